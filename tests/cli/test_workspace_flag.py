"""``--workspace``: where the tools of a run work, when that is not this machine."""

from __future__ import annotations

import gc
import json
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from tests.cli.command import command

AGENT = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    yield ToolCall("write_file", {"path": "new.txt", "content": "n"})
    result = yield ToolCall("run_terminal_command", {"command": ["ls"]})
    return result.tool_result.data["stdout"]

agent = AgentDefinition(id="lister", tools=["run_terminal_command", "write_file"], handle_steps=handle_steps)
"""
PROGRAM = f'shift; exec {shlex.quote(sys.executable)} "$@"'
PYTHON = f"over:sh -c {shlex.quote(PROGRAM)} sh"
"""A command that puts this Python in the place of the one that follows."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lister.py").write_text(AGENT)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "seen.txt").touch()
    return tmp_path


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS1")
def test_tools_replay_and_undo_use_the_workspace(folder: Path) -> None:
    words = [
        "run",
        "lister.py",
        "--shell",
        "--write",
        "--cwd",
        "project",
        "--journal",
        "run.jsonl",
        "--workspace",
        PYTHON,
    ]
    done = CliRunner().invoke(app, words)
    gc.collect()

    assert done.exit_code == 0, done.stderr
    listed = "new.txt\nseen.txt\n"
    assert listed + "\n" == done.stdout
    replayed = CliRunner().invoke(app, ["replay", "run.jsonl", "--agent", "lister.py", "--json"])
    assert listed == json.loads(replayed.stdout)["output"], replayed.stderr
    elsewhere = command("undo", "run.jsonl", "--cwd", "project", code=1)

    assert "written outside of the given folders" in elsewhere.stderr + elsewhere.stdout
    assert (folder / "project" / "new.txt").exists()
    unnamed = CliRunner().invoke(app, ["undo", "run.jsonl", "--workspace", "somewhere"])
    assert (1, True) == (unnamed.exit_code, "'somewhere' is not a workspace" in unnamed.stderr)
    undone = CliRunner().invoke(app, ["undo", "run.jsonl", "--cwd", "project", "--workspace", PYTHON])
    gc.collect()
    assert (0, False) == (undone.exit_code, (folder / "project" / "new.txt").exists()), undone.stderr


ASKER = """
from stepengine import AgentDefinition, Ask, ToolCall

def handle_steps(ctx):
    yield from Ask("May it go on?")
    yield ToolCall("write_file", {"path": "new.txt", "content": "n"})

agent = AgentDefinition(id="asker", tools=["write_file"], handle_steps=handle_steps)
"""


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("remote:WS11", "replay:J11")
def test_run_of_another_workspace_does_not_resume_here(folder: Path) -> None:
    (folder / "asker.py").write_text(ASKER)
    more = ["--write", "--cwd", "project"]
    CliRunner().invoke(app, ["run", "asker.py", *more, "--journal", "run.jsonl", "--workspace", PYTHON])
    before = (folder / "run.jsonl").read_bytes()
    resume = ["resume", "run.jsonl", "--agent", "asker.py", *more, "--answer", "q0=yes"]
    for other in ([], ["--workspace", "over:env"]):
        refused = CliRunner().invoke(app, [*resume, *other])
        assert refused.exit_code != 0
        assert "has a run that works in 'over:sh -c" in refused.stderr
        assert (before, False) == ((folder / "run.jsonl").read_bytes(), (folder / "project" / "new.txt").exists())

    done = CliRunner().invoke(app, [*resume, "--workspace", PYTHON])
    gc.collect()
    assert (0, True) == (done.exit_code, (folder / "project" / "new.txt").exists()), done.stderr
    assert PYTHON == json.loads(before.splitlines()[0])["workspace"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("moon:base", "is not a workspace"),
        ("ssh:-oProxyCommand=x:/y", "cannot be passed to ssh"),
        ("over:no-such-program", "cannot be executed"),
        ("over:false", "cannot be reached"),
    ],
)
def test_invalid_workspace_is_a_usage_error(given: str, said: str) -> None:
    assert (
        said
        in command("run", "lister.py", "--shell", "--write", "--cwd", "project", "--workspace", given, code=2).stderr
    )
