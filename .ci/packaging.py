#!/usr/bin/env python3
"""
Holds what the wheel promises to whoever installs it, beside what the tests hold of the checkout.

    .ci/packaging.py WHEEL USER_ENVIRONMENT constraints.txt

USER_ENVIRONMENT holds the wheel and what it requires, nothing else. Every extra is installed beside it in an environment of
its own, with its parts used there; whatever belongs to another extra says which one it needs. Four type checkers, of the
environment that runs this, read programs against the installed wheel. `import stepengine` loads nothing heavy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stepengine.testing.installation_checks import DEVELOPMENT

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
ALWAYS = {"otel"}
"""What the base install holds, too: a client of a provider requires it."""
BRINGS = {"mcp": {"serve"}}
"""What comes with the package of another extra."""
HEAVY = ["anthropic", "openai", "google.genai", "vcr", "typer", "rich", "mcp", "dbos"]
TYPED = ["handler.py", "public_tasks.py"]
WRONG = "wrong_yields.py"
FOLDER = ROOT / "tests" / "typing"
MARK = re.compile(r"  # type: ignor[e]\[[a-z-]+\]")

# Each uses a part whose package is an extra, as far as that goes without a peer, and says what it got.
PROBE = """
import asyncio, json, os, pathlib, sys, tempfile
from stepengine import AgentDefinition, Engine
from stepengine.errors import ModelError
from stepengine.testing import ScriptedModel

agent = AgentDefinition("probe", model="test/model")
folder = pathlib.Path(tempfile.mkdtemp())

async def no_events():
    for event in ():
        yield event

def acp():
    from stepengine.adapters.acp import serve
    taken, given = os.pipe()
    os.dup2(taken, 0)
    os.close(given)
    return asyncio.run(serve(lambda *_: None, "probe", folder, out=open(os.devnull, "wb")))

def ag_ui():
    from stepengine.adapters.ag_ui import ag_ui
    async def collect():
        return [event async for event in ag_ui(no_events(), thread_id="t", run_id="r")]
    return asyncio.run(collect())

def otel():
    from stepengine.adapters.otel import Tracing
    return Tracing()

def mcp():
    from stepengine.adapters.mcp import mcp_tools
    gone = mcp_tools(["this-program-is-not-there"], name="gone", start_timeout=20)
    with Engine([AgentDefinition("probe", model="test/model", tools=[gone])], models=ScriptedModel(["well"])) as engine:
        return engine.run_sync("probe", "Go").unwrap()

def durable():
    from stepengine.durable import DurableEngine
    async def away():
        async with DurableEngine([agent], db="postgresql://nobody@127.0.0.1:9/none", release="1"):
            return "there is a database"
    return asyncio.run(away())

def web():
    from stepengine.tools.bundled.web.fetcher import Fetched
    from stepengine.tools.bundled.web.pages import read_page
    page = Fetched("https://example.com/", 200, "text/html", b"<!doctype html><p>Hello")
    return asyncio.run(read_page(page)).text

def chat():
    import prompt_toolkit
    return prompt_toolkit.__version__

def bedrock():
    import httpx2
    from stepengine.models import BedrockProvider, ModelRequest
    signed = []
    def answer(request):
        signed.append(request.headers["authorization"].partition(" ")[0])
        return httpx2.Response(404, json={})
    keys = {"region": "us-east-1", "access_key": "a", "secret_key": "s"}
    provider = BedrockProvider(**keys, transport=httpx2.MockTransport(answer))
    async def ask():
        try:
            await provider.complete(ModelRequest("bedrock/anthropic.claude-sonnet-5"))
        except ModelError:
            if not signed:
                raise
        finally:
            await provider.close()
    asyncio.run(ask())
    return signed[0]

def azure():
    from stepengine.models import OpenAIProvider
    os.environ["AZURE_TENANT_ID"] = "tenant"
    OpenAIProvider(name="azure_responses", base_url="https://example.com").check("azure_responses/mine")
    from azure.identity import DefaultAzureCredential
    return DefaultAzureCredential.__name__

def programs():
    from stepengine import Engine, tool
    from stepengine.sandbox import code_mode
    from stepengine.testing import text, tool_call
    @tool
    def double(n: int) -> int:
        return 2 * n
    agent = AgentDefinition("probe", model="test/model", tools=[code_mode(double)])
    model = ScriptedModel([tool_call("run_code", {"code": "await double(21)"}), text("end")])
    return Engine([agent], models=model).run_sync(agent, "go").tool_calls[0].result.text

def search():
    from stepengine import ToolCall
    from stepengine.tools.bundled import search_tools
    os.environ["PATH"] = ""
    (folder / "two.txt").write_text("one\\ntwo\\n")
    def handle_steps(ctx):
        yield ToolCall("code_search", {"pattern": "one\\\\ntwo", "flags": "-U"})
    searcher = AgentDefinition("searcher", tools=search_tools(folder), handle_steps=handle_steps)
    call, = Engine([searcher], models=ScriptedModel([])).run_sync(searcher).tool_calls
    if call.result.is_error:
        raise RuntimeError(call.result.text)
    return "Found 1 match" in str(call.result)

def serve():
    from stepengine.server import Guard, Tokens
    guard = Guard(None, tokens=Tokens.open(folder / "tokens.json"))
    import uvicorn
    sent = []
    async def send(message):
        sent.append(message)
    asked = {"type": "http", "method": "GET", "path": "/runs", "headers": [(b"host", b"localhost")]}
    asyncio.run(guard(asked, None, send))
    return sent[0]["status"]

def test():
    import hypothesis, pytest, syrupy, vcr
    import stepengine.pytest_plugin
    from stepengine.testing import snapshots
    return pytest.__version__

said = {}
for name, use in {"acp": acp, "ag-ui": ag_ui, "otel": otel, "mcp": mcp, "durable": durable, "web": web, "chat": chat, "bedrock": bedrock, "azure": azure,
                  "programs": programs, "search": search, "serve": serve,
                  "test": test}.items():
    try:
        said[name] = f"ok {use()!r}"
    except BaseException as error:
        said[name] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
THERE = {
    "acp": r"ok None",
    "ag-ui": r"ok \[",
    "otel": r"ok <",
    "mcp": r"(?s).*this-program-is-not-there",
    "durable": r"DatabaseUnavailable: ",
    "web": r"ok 'Hello'",
    "chat": r"ok ",
    "bedrock": r"ok 'AWS4-HMAC-SHA256'",
    "azure": r"ok ",
    "programs": r"ok '42'",
    "search": r"ok True",
    "serve": r"ok 401",
    "test": r"ok ",
}
"""What a probe says where its extra is installed."""
PLAIN = {
    "chat": r"ModuleNotFoundError: No module named 'prompt_toolkit'",
    "test": r"ModuleNotFoundError: No module named '(?:hypothesis|pytest|syrupy|vcr)'",
}
"""What is imported by its own name, by a program that says itself what to install: `stepengine chat` and pytest."""


def run(command: list[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """
    Run a command in a folder, without what would let it see the checkout.
    """
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(part) for part in command], cwd=folder, env={**kept, **variables}, check=False,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def expect(holds: object, why: str) -> None:
    """
    Leave with the reason when something does not hold.
    """
    if not holds:
        print(why, file=sys.stderr)
        raise SystemExit(1)


def alone(extra: str, wheel: Path, user: Path, constraints: Path, scratch: Path) -> str:
    """
    Install an extra alone beside the base install, use it, and let the others say what they need.
    """
    began = time.monotonic()
    (lent,) = user.glob("lib/python3*/site-packages")
    place = scratch / f"env-{extra}"
    run([user / "bin" / "python", "-m", "venv", "--without-pip", place], scratch)
    (own,) = place.glob("lib/python3*/site-packages")
    (own / "lent.pth").write_text(f"{lent}\n")
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", place / "bin" / "python"]
    done = run([*pip, "install", "-qq", f"stepengine[{extra}] @ {wheel.as_uri()}", "-c", constraints], scratch)
    expect(done.returncode == 0, f"{extra} cannot be installed: {done.stderr}")
    probed(place, extra, scratch)
    return f"{time.monotonic() - began:6.1f} s  {extra} alone: it works, and the others say which extra they need"


def probed(place: Path, extra: str | None, scratch: Path) -> None:
    """
    Use every part in an environment that holds one extra or none.
    """
    done = run([place / "bin" / "python", "probe.py"], scratch)
    expect(done.returncode == 0, f"{extra}: {done.stderr}")
    for name, got in json.loads(done.stdout.splitlines()[-1]).items():
        is_there = name == extra or name in ALWAYS or name in BRINGS.get(extra or "", ())
        pattern = THERE[name] if is_there else PLAIN.get(name, rf"(?s).*stepengine\[{name}\]")
        expect(re.match(pattern, got), f"with the extra {extra}, {name} says {got!r}, which is not {pattern!r}")


def checked(checker: Callable[[Path, Path], set[tuple[str, int]] | None], user: Path, scratch: Path) -> str:
    """
    Let a checker read programs against the installed wheel: what is right has no error, each marked line has one.
    """
    began = time.monotonic()
    found, wrong = checker(user, scratch), marked()
    if found is None:
        return f"          {checker.__name__} does not run here"
    expect(found == wrong, f"{checker.__name__} reports {sorted(found ^ wrong)} other than marked")
    took = f"{time.monotonic() - began:6.1f} s"
    return f"{took}  {checker.__name__}: {len(TYPED)} programs without error, {len(wrong)} wrong lines found"


def marked() -> set[tuple[str, int]]:
    """
    Return the lines of the repository's programs that are wrong on purpose.
    """
    lines = (FOLDER / WRONG).read_text(encoding="utf-8").splitlines()
    return {(WRONG, number) for number, line in enumerate(lines, start=1) if MARK.search(line)}


def mypy(user: Path, scratch: Path) -> set[tuple[str, int]] | None:
    """
    Return files and lines with errors.
    """
    options = ["--strict", "--no-pretty", "--output", "json", "--python-executable", str(user / "bin" / "python")]
    done = run([sys.executable, "-m", "mypy", *options, *TYPED, WRONG], scratch)
    expect(done.returncode in (0, 1), done.stdout + done.stderr)
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(Path(one["file"]).name, one["line"]) for one in reports if one["severity"] == "error"}


def pyright(user: Path, scratch: Path) -> set[tuple[str, int]] | None:
    """
    Return files and lines with errors; nothing where its program cannot be had.
    """
    done = run(
        [sys.executable, "-m", "pyright", "--pythonpath", user / "bin" / "python", "--outputjson", *TYPED, WRONG],
        scratch,
    )
    if done.returncode not in (0, 1):
        print(done.stderr[-500:] or done.stdout[-500:], file=sys.stderr)
        return None
    reports = json.loads(done.stdout)["generalDiagnostics"]
    errors = [one for one in reports if one["severity"] == "error"]
    return {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in errors}


def pyrefly(user: Path, scratch: Path) -> set[tuple[str, int]] | None:
    """
    Return files and lines with errors.
    """
    options = ["--preset", "default", "--python-interpreter-path", user / "bin" / "python", "--output-format", "json"]
    done = run([sys.executable, "-m", "pyrefly", "check", *options, *TYPED, WRONG], scratch)
    expect(done.returncode in (0, 1), done.stdout + done.stderr)
    errors = [one for one in json.loads(done.stdout)["errors"] if one["severity"] == "error"]
    return {(Path(one["path"]).name, one["line"]) for one in errors}


def ty(user: Path, scratch: Path) -> set[tuple[str, int]] | None:
    """
    Return files and lines with errors.
    """
    options = ["--python", user / "bin" / "python", "--output-format", "gitlab"]
    done = run([sys.executable, "-m", "ty", "check", *options, *TYPED, WRONG], scratch)
    expect(done.returncode in (0, 1), done.stdout + done.stderr)
    found = [one["location"] for one in json.loads(done.stdout) if one["severity"] != "minor"]
    return {(Path(at["path"]).name, at["positions"]["begin"]["line"]) for at in found}


def imports(user: Path, scratch: Path) -> None:
    """
    Import the installed wheel with its engine, and hold what that loads.
    """
    code = (
        "import time; began = time.process_time(); import stepengine; stepengine.Engine; took = time.process_time() - began\n"
        f"import json, sys; print(json.dumps([[n for n in {HEAVY!r} if n in sys.modules], took, stepengine.__file__]))"
    )
    run([user / "bin" / "python", "-c", code], scratch)  # byte code is there from now on
    done = run([user / "bin" / "python", "-c", code], scratch)
    expect(done.returncode == 0, done.stderr)
    loaded, took, file = json.loads(done.stdout)
    expect(not loaded, f"import stepengine loads {loaded}")
    expect(str(user.resolve()) in str(Path(file).resolve()), f"what was imported is {file}, not the wheel")
    print(
        f"          import stepengine, with its engine: {took * 1000:.0f} ms of CPU, none of {', '.join(HEAVY)}",
        flush=True,
    )


def main(wheel: str, user: str, constraints: str) -> None:
    """
    Hold all of it.
    """
    began = time.monotonic()
    held = Path(wheel).resolve(), Path(user).absolute(), Path(constraints).resolve()
    with tempfile.TemporaryDirectory(prefix="stepengine-packaging-") as name, ThreadPoolExecutor(2) as pool:
        scratch = Path(name)
        (scratch / "probe.py").write_text(PROBE, encoding="utf-8")
        for program in (*TYPED, WRONG):
            (scratch / program).write_text(
                MARK.sub("", (FOLDER / program).read_text(encoding="utf-8")), encoding="utf-8"
            )
        imports(held[1], scratch)
        probed(held[1], None, scratch)
        jobs = [pool.submit(checked, checker, held[1], scratch) for checker in (mypy, pyrefly, pyright, ty)]
        jobs += [
            pool.submit(alone, extra, *held, scratch) for extra in EXTRAS if extra not in DEVELOPMENT and EXTRAS[extra]
        ]
        for job in jobs:
            print(job.result(), flush=True)
    print(f"the wheel holds what it promises, after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    if len(sys.argv) != 4:  # noqa: PLR2004 - three arguments
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
