"""
What a user has: a project of their own, our wheel, an agent, a test with the `journal` fixture, and no network.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

AGENT = """
from stepengine import STEP, AgentDefinition, ToolCall, tool


@tool
def read_notes(day: str) -> str:
    '''Read the notes of a day.'''
    (Path(__file__).parent / "read.txt").open("a").write("read\\n")
    return f"notes of {day}"


def handle_steps(ctx):
    yield ToolCall("read_notes", {"day": "monday"})
    yield STEP
    return "summed up"


agent = AgentDefinition(
    "summer", model="test/model", tools=[read_notes], system_prompt="Sum up in one line.", handle_steps=handle_steps
)
"""
TEST = """
import socket

import pytest
from agent import agent

from stepengine import Engine
from stepengine.testing import ScriptedModel, assert_prefix_stable, text

REPLIES = {"recording": [text("A quiet day.")], "replaying": []}


def test_the_day_is_summed_up(journal):
    replies = REPLIES["replaying" if journal.replaying else "recording"]
    with Engine([agent], models={"test": ScriptedModel(replies)}) as engine:
        result = engine.run_sync("summer", "What happened?", journal=journal)
    assert (result.thinking, result.text, result.output) == ((), "summed up", "summed up")
    assert_prefix_stable(result)


def test_nothing_else_is_reachable(journal):
    with pytest.raises(BaseException, match="must not use the network"):
        socket.create_connection(("192.0.2.1", 9))
"""
JOURNAL = Path("journals/test_agent/test_the_day_is_summed_up.jsonl")


@pytest.mark.spec("replay:Y3", "replay:Y10", "replay:D7", "replay:M2", "replay:D1", "ecosystem:EC122")
def test_an_installed_project_records_once_and_reports_a_changed_prompt(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(f"from pathlib import Path\n{AGENT}")
    (tmp_path / "test_agent.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}

    def run(*args: str, chosen: str = "") -> tuple[int, str]:
        command = [installed / "bin" / "python", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *args]
        done = subprocess.run(
            [*command, *filter(None, [chosen])],
            check=False, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    one = "test_agent.py::test_the_day_is_summed_up"
    code, said = run(chosen=one)
    assert (code, True) == (1, f"there is no journal {JOURNAL}" in said), said
    assert f"pytest {one} --stepengine-record=once" in said
    code, said = run("--stepengine-record=once", chosen=one)
    assert (code, True) == (0, f"recorded {JOURNAL}: 2 effects" in said), said
    assert "read\n" == (tmp_path / "read.txt").read_text()
    recorded = (tmp_path / JOURNAL).read_bytes()
    assert str(tmp_path).encode() not in recorded

    code, said = run("-v")
    assert (1, 1, 1) == (code, said.count("PASSED"), said.count("FAILED test_agent")), said
    assert "NetworkBlocked: socket.getaddrinfo to '192.0.2.1'" in said
    assert f"{JOURNAL}  mode none: 2 replayed, 0 recorded, 0 unused" in said

    file = tmp_path / "agent.py"
    file.write_text(file.read_text().replace("in one line", "in two lines"))
    code, said = run(chosen=one)
    assert 1 == code
    lines = [line.removeprefix("E").strip() for line in said.splitlines()]
    assert f"the run diverged from {JOURNAL} at step 1, effect #1 of summer: model_call changed" in said
    (site_line,) = [line for line in lines if line.endswith("agent.py:15")]
    assert site_line
    (field,) = [line.split() for line in lines if line.startswith("/system_prompt")]
    shown = " ".join(field)
    assert '/system_prompt recorded "Sum up in one line." now "Sum up in two lines."' == shown
    assert f"all of it: pytest {one} --stepengine-record=rewrite" in lines
    assert recorded == (tmp_path / JOURNAL).read_bytes()
    assert "read\n" == (tmp_path / "read.txt").read_text()
    (tmp_path / JOURNAL).unlink()
