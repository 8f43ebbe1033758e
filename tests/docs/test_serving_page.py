"""
`docs/serving.md` is so: its application serves runs over HTTP, over cut connections and a kill, and loses no event.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stepengine.server import Tokens

from .pages import ROOT, blocks_of, execute, page

COUNTERPARTS = (
    ("pypi:fastapi", "0.165.0", "works", "an application with mounted runs"),
    ("pypi:uvicorn", "0.54.0", "works", "serves the FastAPI application"),
)

BLOCKS = [block for block in blocks_of(page("serving.md")) if block.kind == "python"]
SECONDS = 30
BELOW = "/agents"


class Server:
    """
    The application of the page in a process of its own.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "app.py").write_text(BLOCKS[0].text, encoding="utf-8")
        self.token = Tokens.open(folder / "tokens.json").add("web", ["read", "run", "answer"])

    @contextmanager
    def running(self, *, end: int = signal.SIGTERM) -> Iterator[None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(self.port), "--log-level", "warning"]
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        process = subprocess.Popen(command, cwd=self.folder, env={**kept, "PYTHONPATH": str(ROOT)})
        try:
            self._wait_for(process)
            yield
        finally:
            process.send_signal(end)
            process.wait(SECONDS)

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(SECONDS * 50):
            assert process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        try:
            told = None if body is None else json.dumps(body)
            headers = {"content-type": "application/json", "authorization": f"Bearer {self.token}"}
            connection.request(method, BELOW + path, told, headers)
            response = connection.getresponse()
            said = response.read()
            return response.status, json.loads(said) if said else None
        finally:
            connection.close()

    def start(self, city: str) -> str:
        """
        Start a run, and return its path.
        """
        status, made = self.ask("POST", "/runs", {"agent": "concierge", "prompt": city})
        assert 202 == status, made
        return f"/runs/{made['run_id']}"

    def answer(self, path: str, answers: dict[str, Any]) -> int:
        return self.ask("POST", f"{path}/answers", {"answers": answers})[0]

    def look(self, path: str, *, until: str) -> dict[str, Any]:
        """
        Ask until the run is at it: a status or a phase.
        """
        for _ in range(SECONDS * 50):
            seen = self.ask("GET", path)[1]
            if until in (seen["status"], seen["phase"]):
                return seen
            time.sleep(0.02)
        raise AssertionError(seen)

    def events(
        self, path: str, after: str | None = None, *, most: int = 10_000, until: str = ""
    ) -> list[dict[str, Any]] | None:
        """
        Read events as a browser does, so many or until one of a kind before the connection is cut; `None` when told to stop.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        found: list[dict[str, Any]] = []
        try:
            headers = {"authorization": f"Bearer {self.token}"} | ({} if after is None else {"last-event-id": after})
            connection.request("GET", f"{BELOW}{path}/events", headers=headers)
            response = connection.getresponse()
            assert response.status in (200, 204), response.read()
            if response.status == 204:
                return None
            fields: dict[str, str] = {}
            while len(found) < most and (line := response.readline().decode()):
                name, _, value = line.rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "data" in fields:
                    found.append({"id": fields.get("id"), **json.loads(fields["data"])})
                    if fields["event"] == until:
                        break
                    fields = {}
        finally:
            connection.close()
        return found


def last_id(events: list[dict[str, Any]]) -> str:
    return [event["id"] for event in events if event["id"]][-1]


def read_on(server: Server, path: str, got: list[dict[str, Any]], kind: str, *, most: int) -> dict[str, Any]:
    """
    Read so many events, lose the connection and come back, until there is an event of a kind.
    """
    for _ in range(100):
        found = [event for event in got if event["type"] == kind]
        if found:
            return found[0]
        got += server.events(path, last_id(got) if got else None, most=most, until=kind) or []
    raise AssertionError(got)


@pytest.mark.deep
@pytest.mark.spec(
    "interfaces:IF6",
    "reliability:R2",
    "interfaces:IF13",
    "interfaces:IF15",
    "studio:SV3",
    "interfaces:IF18",
)
def test_a_killed_application_resumes_waiting_runs_and_cancelled_ones_stay(tmp_path: Path) -> None:
    server, before = Server(tmp_path), list[dict[str, Any]]()
    with server.running(end=signal.SIGKILL):
        waiting, cancelled = server.start("Oslo"), server.start("Bonn")
        read_on(server, waiting, before, "question_asked", most=2)
        assert 202 == server.ask("POST", f"{cancelled}/cancel", {"reason": "closed"})[0]
        server.look(cancelled, until="cancelled")

    (tmp_path / "runs" / "damaged.jsonl").write_text("no journal\n")
    with server.running():
        questions = server.look(waiting, until="awaiting_answer")["questions"]
        again = server.events(waiting, last_id(before), until="run_started")
        assert 202 == server.answer(waiting, {question["id"]: "Monday" for question in questions})
        after = list[dict[str, Any]]()
        after += server.events(waiting, last_id(before), most=2) or []
        call_id = read_on(server, waiting, after, "tool_started", most=1)["tool_call_id"]
        assert 202 == server.ask("POST", f"{waiting}/tool-results/{call_id}", {"result": "at nine"})[0]
        seen = server.look(waiting, until="completed")

    assert "Oslo, Monday: at nine" == seen["output"]
    assert again is not None
    assert ["run_started"] == [event["type"] for event in again if event.get("resumed")]
    # Which of them come from the journal, and which from the run that goes on, is a matter of moments.
    assert ["answer_received", "tool_started"] == [
        event["type"] for event in after if event["type"] in ("answer_received", "tool_started")
    ]
    for events in (again, after):
        assert "events_dropped" not in [event["type"] for event in events]
        assert not {event["id"] for event in before}.intersection(event["id"] for event in events)
        assert not [event for event in events if event["type"] == "model_started"]


@pytest.mark.spec("requirements:N4")
def test_the_block_about_handles_and_events_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    others = [block for block in blocks_of(page("handles-and-events.md")) if block.kind == "python"]

    assert (1, 1) == (len(BLOCKS), len(others))
    execute(others[0], "handles-and-events.md")
