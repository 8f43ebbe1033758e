"""
``stepengine serve``: what it refuses in words, and how it begins and ends; its process connects to nothing.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from stepengine.server import Tokens
from stepengine.server.ledger import Ledger, RunRow, make_register_run_act
from tests import forked_processes
from tests.cli.command import command, typed
from tests.cli.in_process_server import run_until_settled, serve_in_process
from tests.offline import NO_NETWORK, ROOT

SECONDS = 30
SHOP = """
from stepengine import AgentDefinition, Ask, Engine

def asks(ctx):
    day = yield from Ask("On which day?")
    return f"{ctx.prompt}: {day}"

agent = AgentDefinition("asker", handle_steps=asks)
def make_engine(): return Engine([agent])
def makes_none(): return 3
def makes_empty(): return Engine([])
def fails(): raise RuntimeError("the shop is closed")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    tmp_path.chmod(0o700)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "PYTHONUNBUFFERED": "1"}


@contextmanager
def server_process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    # As the command that pip makes: its own folder stands on the way of imports, and not the user's.
    script = "import sys; del sys.path[0]; from stepengine.cli import main; sys.exit(main())"
    process = forked_processes.Process(
        [sys.executable, "-c", script, "serve", *arguments],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(folder),
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told(process: subprocess.Popen[str]) -> tuple[str, str]:
    """
    Return the address and the token that a server says at its start.
    """
    assert process.stderr is not None
    said = ""
    while "curl" not in said:
        line = process.stderr.readline()
        assert line, said
        said += line
    found = re.search(r"(http://127\.0\.0\.1:\d+) serves asker\n.*: (sk-stepengine-\S+)\n", said, re.DOTALL)
    assert found is not None, said
    return found[1], found[2]


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, str]:
    """
    Return how a server leaves, and what it says, when it is told to stop.
    """
    process.send_signal(number)
    out, said = process.communicate(timeout=SECONDS)
    return process.returncode, out + said


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("studio:SV11", "interfaces:IF111")
def test_page_may_set_only_shared_state_and_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    def asked(client: TestClient, thread: str, **more: Any) -> tuple[int, str]:
        said = [{"id": "m", "role": "user", "content": "Rome"}]
        answer = client.post("/ag-ui/asker", json={"threadId": thread, "runId": "r", "messages": said, **more})
        return answer.status_code, answer.text

    context = [{"description": "the open file", "value": "a.txt"}]
    with serve_in_process("serve", "shop.py", "--share", "colours", "--share", "sizes") as (client, _):
        shared = asked(client, "one", state={"colours": ["red"]}, context=context)
        other = asked(client, "two", state={"secret": 1})
    (journal,) = (folder / "runs").glob("*.jsonl")
    replayed = typed("replay", journal, "--agent", "shop.py")

    assert (200, 422) == (shared[0], other[0])
    assert '"snapshot":{"colours":["red"]}' in shared[1]
    assert "On which day?" in shared[1]
    assert "a.txt" in journal.read_text()
    assert "recorded with other hooks" not in replayed.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no nowhere; pass a Python file, a folder of agent files, or an importable module"),
        (["nowhere:make_engine"], "nowhere:make_engine could not make an engine: ModuleNotFoundError"),
        (["shop:nothing"], "shop:nothing could not make an engine: AttributeError"),
        (["shop:makes_none"], "shop:makes_none returned a int; name a function without arguments that returns an Engine"),
        (["shop:makes_empty"], "shop:makes_empty returned an engine without agents, so it can start no run; make it with agents"),
        (["shop:makes_empty", "--tokens", "tokens.json"], "shop:makes_empty returned an engine without agents"),
        (["shop:fails"], "shop:fails could not make an engine: RuntimeError: the shop is closed"),
        (["shop.py", "--host", "0.0.0.0"], "--host 0.0.0.0 makes the server reachable from other machines"),
        (["shop.py", "--host", "0.0.0.0", "--tokens", "tokens.json"], "--allow-host NAME"),
        (["shop.py", "--host", "0.0.0.0", "--allow-host", "shop.example.com"], "--tokens FILE"),
        (["shop.py", "--host", "999.1.1.1"], "--host 999.1.1.1 cannot be used: it is neither an IP address nor a host name; pass an address"),
        (["shop.py", "--host", "a..b"], "--host a..b cannot be used: it is neither an IP address nor a host name"),
        (["shop.py", "--host", "192.0.2.1"], "pass an address of this machine, such as 127.0.0.1"),
        (["shop.py", "--tokens", "nothing.json"], "there is no nothing.json; `stepengine tokens add NAME --file nothing.json` creates it"),
        (["shop.py", "--tokens", "shop.py"], "may be read or written by others (mode 0644)"),
        (["shop.py", "--runs", "everybodys"], "others may write to"),
        (["shop.py", "--runs", "shop.py"], "'shop.py' is a file; runs are stored in a folder or in a database such as 'runs.db'"),
        (["shop.py", "--reports", "shop.py"], "reports='shop.py' is not a folder"),
        (["shop.py", "--reports", "everybodys"], "others may write to"),
        (["shop.py", "--allow-host", "a/b"], "hosts= has the invalid name 'a/b'"),
        (["shop.py", "--cors", "*"], "cors= has the invalid origin '*'"),
    ],
)  # fmt: skip
def test_invalid_serve_arguments_exit_with_2(
    folder: Path, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "everybodys").mkdir()
    (folder / "everybodys").chmod(0o777)
    Tokens.open("tokens.json").add("web", ["read"])
    try:
        result = typed("serve", *arguments, env={"COLUMNS": "200", "NO_COLOR": "1"})
    finally:
        sys.modules.pop("shop", None)

    assert 2 == result.exit_code, result.output
    assert said in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_loopback_server_answers_to_its_address_and_names(
    folder: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    own = f"[{host}]" if ":" in host else host
    told = {}
    with serve_in_process("serve", "shop.py", "--host", host, "--allow-host", "shop.example.com") as (client, _):
        for name in (f"{own}:8000", "localhost:8000", "shop.example.com", "example.com"):
            told[name] = client.get("/agents", headers={"host": name}).status_code

    assert {f"{own}:8000": 200, "localhost:8000": 200, "shop.example.com": 200, "example.com": 421} == told


def test_other_loopback_address_needs_no_host_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with serve_in_process("serve", "shop.py", "--host", "127.0.0.2") as (client, _):
        assert 200 == client.get("/agents", headers={"host": "127.0.0.2:8000"}).status_code


@pytest.mark.deep
@pytest.mark.smoke
def test_prompt_may_have_an_image_of_8_mib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    image = {"data": b64encode(b"\x89PNG\r\n\x1a\n".ljust(6 * 1024 * 1024)).decode()}
    with serve_in_process("serve", "shop.py") as (client, _):
        answer = client.post("/runs", json={"agent": "asker", "prompt": "hi", "images": [image]})

    assert 202 == answer.status_code, answer.text


def test_link_has_a_host_name_that_the_server_accepts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    told = {}
    for name in ("localhost", "shop.example.com:8443"):
        words = ("--ui", "--host", "0.0.0.0", "--port", "8001", "--allow-host", name)
        with serve_in_process("serve", "shop.py", *words) as (_, said):
            told[name] = re.findall(r"http://([^/\s]+)", said)

    assert {"localhost": ["localhost:8001"] * 2, "shop.example.com:8443": ["shop.example.com:8443"] * 2} == told


def test_occupied_port_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = command("serve", "shop.py", "--port", port, code=2)

    assert f"the server cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "sk-stepengine-" not in result.output


def test_server_with_an_occupied_port_resumes_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "runs").mkdir(mode=0o700)
    ledger, request = Ledger(folder / "runs"), {"prompt": "", "params": None, "metadata": None}
    ledger.write([make_register_run_act(RunRow("1" * 32, "", "asker", "started", 1.0, 1.0, request), None)])
    ledger.close()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = command("serve", "shop.py", "--port", taken.getsockname()[1], "--drain", "0", code=2)

    assert "Address already in use" in result.stderr
    assert [] == list((folder / "runs").glob("*.jsonl"))


@pytest.mark.usefixtures("forks")
@pytest.mark.spec("studio:SV1")
@pytest.mark.parametrize(
    ("module", "number"),
    [("shop.py", signal.SIGTERM), pytest.param("shop:make_engine", signal.SIGINT, marks=pytest.mark.deep)],
)
def test_server_accepts_its_token_and_exits_with_0_on_signal(folder: Path, module: str, number: int) -> None:
    with server_process(folder, module, "--port", "0", "--drain", "0.1") as process:
        url, token = told(process)
        with httpx2.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=SECONDS) as client:
            run = client.post("/runs", json={"agent": "asker", "prompt": "Rome"}).json()["run_id"]
            wrong = client.get("/runs", headers={"authorization": f"Bearer {token[:-1]}"})
            stranger = client.get("/runs", headers={"host": "shop.example.com"})
            with client.stream("GET", f"/runs/{run}/events"):
                code, said = ended(process, number)

    assert (401, 421) == (wrong.status_code, stranger.status_code)
    assert 0 == code, said
    assert "Traceback" not in said
    assert (folder / "runs" / f"{run}.jsonl").exists()


WRITER = """
from stepengine import AgentDefinition, ToolCall

def writes(ctx):
    result = yield from ToolCall("write_file", {"path": "plan.txt", "content": ctx.prompt})
    return result.text

agent = AgentDefinition("asker", tools=["write_file"], handle_steps=writes)
"""


@pytest.mark.spec("studio:SV2")
def test_server_undoes_written_files_and_lists_reports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "writer.py").write_text(WRITER)
    (folder / "work").mkdir()
    report = folder / "evals" / "nightly"
    report.mkdir(parents=True)
    (report / "results.json").write_text('{"format": "stepengine.eval/1", "name": "nightly"}')
    with serve_in_process("serve", "writer.py", "--write", "--cwd", "work", "--reports", "evals") as (client, _):
        ended = run_until_settled(client, "asker", "Rome")
        wrote = (folder / "work" / "plan.txt").read_text()
        undone = client.post(f"/runs/{ended['run_id']}/undo")
        reports = client.get("/reports").json()["reports"]

    assert ("completed", "Rome") == (ended["status"], wrote), ended
    assert ["plan.txt"] == undone.json()["removed"], undone.text
    assert not (folder / "work" / "plan.txt").exists()
    assert ["nightly"] == [one["id"] for one in reports]
