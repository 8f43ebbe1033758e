# ruff: noqa: INP001, S603
"""
Write the table of ``docs/record-and-replay.md`` by running each recorder on the same program: ``python docs/make_recorders.py``.

It needs an environment with the extra ``recorders``. A server on loopback plays the provider while a cell is recorded, and is down while it is
replayed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.http_programs.odd_server import odd_server  # noqa: E402

PAGE = Path(__file__).with_name("record-and-replay.md")
KEY = "sk-proj-1234567890abcdefghijklmnop"
PROGRAM = """\
import os, threading
from openai import OpenAI

# Not in a function: a traceback shows the whole function, and what it shows counts as shown by the recorder.
EDIT = "EDIT" in os.environ
CASE = os.environ["CASE"]
PROMPT = "in French" if EDIT and CASE == "prompt" else "in English"
TOOLS = ["look", "search_the_web"] if EDIT and CASE == "tool" else ["look"]
RESULT = "rainy" if EDIT and CASE == "result" else "sunny"

def say_wrong():
    print("wrong" + "-answers")

def text_of(client, prompt, tools=(), more=()):
    asked = [{"role": "user", "content": prompt}, *more]
    options = {"tools": [{"type": "function", "function": {"name": n}} for n in tools]} if tools else {}
    raw = client.chat.completions.with_raw_response.create(model="m", messages=asked, **options)
    return raw.parse().choices[0].message.content, raw.retries_taken

def main():
    client = OpenAI(max_retries=1)
    if CASE == "streams":
        asked = [{"role": "user", "content": "say it"}]
        parts = client.chat.completions.create(model="m", messages=asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "one two three"
    elif CASE == "threads":
        got, start = {}, threading.Barrier(1 if EDIT else 8)
        def ask(n):
            start.wait()
            got[n] = text_of(client, f"say {n}")[0]
        threads = [threading.Thread(target=ask, args=(n,)) for n in (range(7, -1, -1) if EDIT else range(8))]
        for thread in threads:
            thread.start()
            if EDIT:
                thread.join()
        for thread in threads:
            thread.join()
        if any(got[n] != f"reply to say {n}" for n in got):
            say_wrong()
        assert got == {n: f"reply to say {n}" for n in range(8)}
    elif CASE == "429":
        assert text_of(client, "fail once")[1] == 1  # the program saw the 429, and tried again
    else:
        text_of(client, PROMPT, TOOLS)
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        more = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": RESULT}]
        text_of(client, "and now", ["look"], more)

if __name__ == "__main__":
    main()
"""
PROGRAMS = """\
import json, os, sys

sys.path.append(os.environ["ROOT"])
from tests.http_programs.programs import COMMON, SCENES, hide, iter_clients

def main():
    seen = {}
    for client, run in iter_clients():
        for scene in SCENES:
            if scene.name not in COMMON:
                continue
            try:
                told = run(scene, os.environ["SERVER"])
                told.pop("length", None)
                told["headers"] = sorted((name.lower(), value) for name, value in told.get("headers", ()))
                told = hide(told)
            except BaseException as error:
                told = type(error).__name__
            seen[f"{client}, {scene.name}"] = told
    with open("seen.json", "w") as file:
        json.dump(seen, file)

if __name__ == "__main__":
    main()
"""
"""Small programs on each client that is installed; what they see is kept beside the program, without the order and case of headers."""
OURS = "import pytest, program\n@pytest.mark.stepengine(patch=True, record_errors=True)\ndef test_it():\n    program.main()\n"
VCRPY = "import vcr, program\ndef test_it():\n    with vcr.use_cassette('recorded.yaml'{options}):\n        program.main()\n"
RECORDING = "import pytest, program\n@pytest.mark.vcr({options})\ndef test_it():\n    program.main()\n"
BODIES = "match_on=['method', 'scheme', 'host', 'port', 'path', 'query', 'body']"
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
TAPE = [str(Path(sys.executable).with_name("tape"))]
RECORDERS: dict[str, tuple[str, list[str], list[str]]] = {
    "stepengine": (OURS, [*PYTEST, "--stepengine-record=once"], PYTEST),
    "vcrpy": (VCRPY.format(options=""), PYTEST, PYTEST),
    "vcrpy, matching bodies": (VCRPY.format(options=", " + BODIES), PYTEST, PYTEST),
    "pytest-recording": (RECORDING.format(options=""), [*PYTEST, "--record-mode=once"], [*PYTEST, "--block-network"]),
    "reeltime": ("", [*TAPE, "run", "python", "program.py"], [*TAPE, "replay"]),
    "reeltime --strict": ("", [*TAPE, "run", "python", "program.py"], [*TAPE, "replay", "--strict"]),
}
"""The test that surrounds the program, the command that records, the command that replays."""
EDITED = "a prompt, tool or result is edited"
THREADS = "8 threads, in another order"
SAME = "small HTTP programs that saw the same live, recorded and replayed"
SHOWN = {"prompt": ("in English", "in French"), "tool": ("look", "search_the_web"), "result": ("sunny", "rainy")}


class Provider(BaseHTTPRequestHandler):
    """A provider of models that repeats the prompt."""

    failed = False

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Answer a Chat Completions request."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt = asked["messages"][0]["content"]
        head: dict[str, Any] = {"id": "c", "created": 1, "model": "m"}
        if prompt == "fail once" and not Provider.failed:
            Provider.failed = True
            self.answer(429, b'{"error": {"message": "slow down"}}', "application/json", {"retry-after-ms": "1"})
        elif asked.get("stream"):
            deltas = [
                {**head, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": word}}]}
                for word in ("one ", "two ", "three")
            ]
            body = "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas) + "data: [DONE]\n\n"
            self.answer(200, body.encode(), "text/event-stream")
        else:
            message = {"role": "assistant", "content": f"reply to {prompt}"}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            self.answer(200, json.dumps({**head, "object": "chat.completion", "choices": [choice]}).encode())

    def answer(
        self, status: int, body: bytes, kind: str = "application/json", more: dict[str, str] | None = None
    ) -> None:
        """Send a response."""
        self.send_response(status)
        for name, value in {"content-type": kind, "content-length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def write_program(folder: Path, program: str, test: str) -> None:
    """Write a program, and the test that surrounds it if there is one."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    (folder / "conftest.py").write_text("import sys; sys.path.insert(0, '.')\n", encoding="utf-8")
    if test:
        (folder / "test_it.py").write_text(test, encoding="utf-8")


def run_in(folder: Path, command: list[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, with a few variables of this process and *more*."""
    kept = {name: value for name, value in os.environ.items() if name in {"HOME", "LANG"}}
    env = {**kept, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **more}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def count_same(recorder: str, folder: Path) -> str:
    """Return of how many small programs all three runs saw the same: live, recorded, and replayed without the server."""
    test, record, replay = RECORDERS[recorder]
    write_program(folder, PROGRAMS, test)

    def run(command: list[str]) -> dict[str, Any]:
        found = folder / "seen.json"
        found.unlink(missing_ok=True)
        done = run_in(folder, command, {"ROOT": str(ROOT), "SERVER": address, "OPENAI_API_KEY": KEY})
        if not found.exists():
            msg = f"{recorder} ran no programs: {done.stdout}{done.stderr}"
            raise RuntimeError(msg)
        return dict(json.loads(found.read_text(encoding="utf-8")))

    with odd_server() as server:
        address = f"http://127.0.0.1:{server.server_port}"
        live = run([sys.executable, "program.py"])
        server.counts.clear()
        recorded = run(record)
    replayed = run(replay)
    same = [name for name, seen in live.items() if seen == recorded.get(name) == replayed.get(name)]
    return f"{len(same)} of {len(live)}"


class Trial:
    """One recorder in a folder of its own, with one case recorded."""

    def __init__(self, recorder: str, case: str, folder: Path) -> None:
        """Record the case."""
        test, self.record, self.replay = RECORDERS[recorder]
        self.case, self.folder = case, folder
        write_program(folder, PROGRAM, test)
        Provider.failed = False
        server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
        self.url = f"http://127.0.0.1:{server.server_port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.recorded = self.run(self.record)
        server.shutdown()
        server.server_close()

    def run(self, command: list[str], *, key: bool = True, edit: bool = False) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder."""
        more = {"CASE": self.case, "OPENAI_BASE_URL": self.url}
        more |= {"OPENAI_API_KEY": KEY} if key else {}
        more |= {"EDIT": "1"} if edit else {}
        return run_in(self.folder, command, more)

    def holds(self, text: str) -> bool:
        """Return whether a file that was written while recording contains *text*."""
        files = [path for path in self.folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return any(text.encode() in path.read_bytes() for path in files)


def cells(recorder: str) -> dict[str, str]:
    """Return what a recorder did, by row of the table."""
    found: dict[str, str] = {}

    def trial(case: str) -> Trial:
        return Trial(recorder, case, Path(tempfile.mkdtemp(dir=scratch)))

    with tempfile.TemporaryDirectory() as scratch:
        results = set()
        for case, values in SHOWN.items():
            made = trial(case)
            same, edited = made.run(made.replay), made.run(made.replay, edit=True)
            if same.returncode:
                msg = f"{recorder} does not replay {case!r} unchanged: {same.stdout}{same.stderr}"
                raise RuntimeError(msg)
            said = edited.stdout + edited.stderr
            if edited.returncode == 0:
                results.add("passes, and reports it" if "drifted content" in said else "passes")
            else:
                both = all(value in said for value in values)
                results.add("fails, shows the difference" if both else "fails")
        (found[EDITED],) = results  # the page has one row for the three edits
        for case in ("429", "streams", "threads"):
            made = trial(case)
            replayed = made.run(made.replay, edit=case == "threads")
            said = replayed.stdout + replayed.stderr
            wrong = "wrong answers" if "wrong-answers" in said else "fails"
            result = "replayed" if replayed.returncode == made.recorded.returncode == 0 else wrong
            if case == "threads":
                found[THREADS] = result
            elif result != "replayed":
                msg = f"{recorder} does not replay {case!r}, but the page says that it does: {said}"
                raise RuntimeError(msg)
        made = trial("prompt")
        found["the key is in the recording"] = "yes" if made.holds(KEY) else "no"
        found["replays without a key"] = "yes" if made.run(made.replay, key=False).returncode == 0 else "no"
        found[SAME] = count_same(recorder, Path(tempfile.mkdtemp(dir=scratch)))
    return found


def shown(page: str) -> dict[str, dict[str, str]]:
    """Return the cells of the page's table, by recorder and row."""
    table = page.partition("<!-- table -->\n")[2].partition("\n<!-- end -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {name: {row[0]: row[number] for row in rows} for number, name in enumerate(head) if number}


def titled(recorder: str) -> str:
    """Return the heading of a recorder's column, with its version."""
    name = re.split(r"[, ]", recorder)[0]
    return recorder if name == "stepengine" else recorder.replace(name, f"{name} {version(name)}", 1)


def main() -> None:
    """Write the table into the page."""
    columns = {titled(recorder): cells(recorder) for recorder in RECORDERS}
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    rows = list(next(iter(columns.values())))
    lines += ["| " + " | ".join([row, *[column[row] for column in columns.values()]]) + " |" for row in rows]
    before, mark, rest = PAGE.read_text(encoding="utf-8").partition("<!-- table -->\n")
    PAGE.write_text(
        before + mark + "\n".join(lines) + "\n<!-- end -->" + rest.partition("<!-- end -->")[2], encoding="utf-8"
    )


if __name__ == "__main__":
    main()
