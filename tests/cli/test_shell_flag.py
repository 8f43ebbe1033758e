"""``stepengine run --shell``: programs are run when that is allowed, and only then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from tests.cli.command import command

AGENT = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    result = yield ToolCall("run_terminal_command", {"command": ["ls"]})
    return result.tool_result.data["stdout"].strip()

agent = AgentDefinition(id="lister", tools=["run_terminal_command", "check_job"], handle_steps=handle_steps)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lister.py").write_text(AGENT)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "seen.txt").touch()
    return tmp_path


@pytest.mark.spec("reliability:SH02", "requirements:F1")
def test_programs_are_run_with_shell_and_in_the_folder() -> None:
    done = command("run", "lister.py", "--shell", "--cwd", "project", "--journal", "run.jsonl")

    assert done.stdout == "seen.txt\n"
    replayed = CliRunner().invoke(app, ["replay", "run.jsonl", "--agent", "lister.py", "--json"])
    assert json.loads(replayed.stdout)["output"] == "seen.txt", replayed.stderr
