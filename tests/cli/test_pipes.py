"""Options that name a file read regular files: a pipe or device is refused, and not waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app
from stepengine.errors import DefinitionError
from stepengine.journal import FileJournal
from stepengine.permissions import Policy
from tests.journal.test_reading_limit import requests, user

AGENT = """
from stepengine import AgentDefinition


def handle_steps(ctx):
    return "done"
    yield


agent = AgentDefinition("desk", handle_steps=handle_steps)
"""


@pytest.mark.spec("reliability:JR17")
@pytest.mark.parametrize(
    "command",
    [
        "run ./desk.py Hi --script pipe", "run ./desk.py Hi --script /dev/zero", "run ./desk.py Hi --config pipe", "run ./desk.py Hi --params @pipe",
        "config show --config pipe", "fork run.jsonl --at #0 --edit @pipe", "runs --schedules --config pipe",
        "runs --schedules --db @pipe", "serve ./desk.py --runs @pipe", "serve ./desk.py --tokens pipe",
        "serve ./desk.py --webhooks pipe",
    ],
)  # fmt: skip
def test_options_refuse_a_pipe_or_device_and_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("desk.py").write_text(AGENT)
    requests(Path("run.jsonl"), [[user("hello")]])
    assert FileJournal("run.jsonl").history().records

    ended = CliRunner().invoke(app, command.split())

    assert 2 == ended.exit_code, ended.output
    assert "not a regular file" in " ".join(ended.output.split()), ended.output


@pytest.mark.spec("reliability:JR17")
def test_a_policy_is_read_from_no_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(DefinitionError, match="not a regular file"):
        Policy.load(tmp_path / "pipe")
