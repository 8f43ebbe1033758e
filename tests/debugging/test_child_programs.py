"""
Jobs and desks: programs that a server starts for an author's current code, and talks to in lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

AGENTS = """
from stepengine import STEP, AgentCall, AgentDefinition, Engine
from stepengine.testing import ScriptedModel, text


def child_steps(ctx):
    reply = yield STEP
    return reply.text


def root_steps(ctx):
    yield STEP
    return (yield from AgentCall("kid", "go"))


kid = AgentDefinition("kid", model="t/m", system_prompt="SAYS", handle_steps=child_steps)
boss = AgentDefinition("boss", model="t/m", system_prompt="boss", spawnable_agents=["kid"], handle_steps=root_steps)


def make_engine():
    return Engine([boss, kid], models=ScriptedModel(lambda request: text(f"{request.system_prompt} {request.model}")))
"""
MAKER = {"make": "team:make_engine", "given": {}, "files": []}
RECORD = 'from team import *; make_engine().run_sync("boss", "go", journal="run.jsonl")'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "team.py").write_text(AGENTS)
    subprocess.run([sys.executable, "-c", RECORD], cwd=tmp_path, check=True, env=environment())
    return tmp_path


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}


class Program:
    def __init__(self, process: Any) -> None:
        self._process = process

    def send(self, *messages: dict[str, Any]) -> None:
        """
        Send messages in one piece, so that the program reads them together.
        """
        self._process.stdin.write("".join([f"{json.dumps(message)}\n" for message in messages]))
        self._process.stdin.flush()

    def end_input(self) -> list[dict[str, Any]]:
        """
        Return the rest of the messages.
        """
        return [json.loads(line) for line in self._process.communicate()[0].splitlines()]

    def receive(self, key: str) -> dict[str, Any]:
        """
        Return the next message that has *key*.
        """
        return next(told for line in self._process.stdout if key in (told := json.loads(line)))


@contextmanager
def started(module: str, folder: Path) -> Iterator[Program]:
    words = [sys.executable, "-m", f"stepengine.debugging.{module}"]
    with subprocess.Popen(
        words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        yield Program(process)


@pytest.mark.deep
@pytest.mark.spec("studio:ST7")
def test_next_request_is_answered_by_its_own_new_reply(project: Path) -> None:
    """
    The root has a recorded reply at the number that the first new request has in its child.
    """
    (project / "team.py").write_text(AGENTS.replace("SAYS", "SAYS MORE"))
    with started("jobs", project) as job:
        job.send({"kind": "ask", "maker": MAKER, "files": {"one": "run.jsonl"}, "asked": {}})
        job.receive("price")
        job.send({"budget": None})
        made = job.receive("done")["done"]

    assert made["address"].endswith("#0")
    assert made["address"] != "#0"
    assert "SAYS MORE t/m" == made["text"]


@pytest.mark.deep
@pytest.mark.spec("studio:ST5")
def test_requests_sent_with_the_first_message_are_answered(project: Path) -> None:
    with started("desk", project) as desk:
        desk.send(
            {"maker": MAKER, "file": "run.jsonl", "at": ""}, *[{"id": n, "do": "look", "at": "#0"} for n in range(3)]
        )
        answered = [(told["id"], told["now"]["place"]["address"]) for told in desk.end_input() if "id" in told]

    assert [(n, "#0") for n in range(3)] == answered


RAISED = """
def parse():
    raise ValueError("no number")


try:
    parse()
except ValueError as error:
    raise RuntimeError("bad config") CAUSE
"""
LOADED = "from stepengine import load_agent\nload_agent('agent_file.py')\n"


@pytest.mark.deep
@pytest.mark.spec("studio:ST6")
@pytest.mark.parametrize("cause", ["from None", "from error", ""])
@pytest.mark.parametrize("is_loaded", [False, True], ids=["imported", "loaded"])
def test_error_of_loading_has_the_line_that_raised_it(project: Path, cause: str, is_loaded: bool) -> None:
    raised = project / ("agent_file.py" if is_loaded else "team.py")
    raised.write_text(RAISED.replace("CAUSE", cause))
    if is_loaded:
        (project / "team.py").write_text(LOADED)
    with started("load_check", project) as check:
        check.send({"maker": MAKER})
        told = check.receive("problem")

    assert (str(raised), 9) == (told["file"], told["line"])
    assert f"{raised}:9" in told["problem"]
    assert "RuntimeError: bad config" in told["problem"]
