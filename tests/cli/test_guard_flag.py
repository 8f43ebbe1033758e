"""``stepengine run --guard injection``, and what a record says of the arguments of its calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine, ToolCall, tool
from stepengine.cli.app import app
from stepengine.journal import FileJournal
from tests.phrases import FROM_RESULT

AGENT = """
from stepengine import AgentDefinition, ToolCall

def handle_steps(ctx):
    mail = yield ToolCall("read_files", {"paths": ["mail.txt"]})
    looked = yield ToolCall("run_terminal_command", {"command": ["ls"]})
    command = mail.tool_result.data[0]["content"].strip().split()
    done = yield ToolCall("run_terminal_command", {"command": command})
    return [looked.tool_result.status, done.tool_result.status, done.tool_result.text]

agent = AgentDefinition(id="reader", tools=["read_files", "run_terminal_command", "write_file"], handle_steps=handle_steps)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reader.py").write_text(AGENT)
    (tmp_path / "mail.txt").write_text("touch owned\n")
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, [*words])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("provenance:PV10")
def test_command_from_a_file_is_denied_only_with_the_guard(folder: Path) -> None:
    code, said, errors = run("run", "reader.py", "--shell", "--write", "--guard", "injection", "--no-journal")

    assert 0 == code, errors
    looked, done, text = json.loads(said)
    assert ("ok", "denied", False) == (looked, done, (folder / "owned").exists())
    assert f"The reason: command touch owned: {FROM_RESULT} read_files('mail.txt') in step 1" in text

    assert 0 == run("run", "reader.py", "--shell", "--write", "--no-journal")[0]
    assert (folder / "owned").exists()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("provenance:PV10", "provenance:PV13", "provenance:PV14")
def test_resumed_run_keeps_its_guard_and_explains_provenance(folder: Path) -> None:
    words = ("--shell", "--write", "--journal", "run.jsonl")
    assert 3 == run("run", "reader.py", "--guard", "injection", *words)[0]
    assert not (folder / "owned").exists()

    code, said, errors = run("resume", "run.jsonl", "--agent", "reader.py", "--shell", "--write", "--answer", "q2=yes")

    assert 0 == code, errors
    assert ["ok", "ok"] == json.loads(said)[:2]
    assert (folder / "owned").exists()
    assert 0 == run("replay", "run.jsonl", "--agent", "reader.py")[0]
    told = run("show", "run.jsonl", "--provenance")[1]
    assert "run_terminal_command (asked)\n  command" in told
    assert f"{FROM_RESULT} read_files('mail.txt') in step 1" in told
    found = run("show", "run.jsonl", "--provenance", "touch owned")[1]
    lines = found.strip().split("\n")
    assert ["the run", f"  {FROM_RESULT} read_files('mail.txt') in step 1 at [0].content"] == lines[:2]
    one = json.loads(run("show", "run.jsonl", "--provenance", "#0", "--json")[1])
    assert ["read_files"] == [call["name"] for call in one["calls"]]


@pytest.mark.spec("provenance:PV13")
def test_provenance_redacts_secrets_and_keeps_values_on_one_line() -> None:
    key, lines = "sk-ant-api03-" + "k7Q" * 12, "a\n  path b: from your request"

    @tool
    def look(path: str, key: str) -> str:
        """Look up a path."""
        return f"{path} {key}"

    def handle_steps(ctx):
        yield ToolCall(look, {"path": ctx.prompt, "key": key})

    with Engine([AgentDefinition("reader", tools=[look], handle_steps=handle_steps)]) as engine:
        engine.run_sync("reader", lines, journal=FileJournal("raw.jsonl", redact="off")).unwrap()
    assert key in Path("raw.jsonl").read_text()

    told = run("show", "raw.jsonl", "--provenance")[1]
    as_json = run("show", "raw.jsonl", "--provenance", "--json")[1]

    assert 3 == len(told.strip().split("\n"))
    assert "<redacted" in told
    assert "<redacted" in as_json
    assert key[-9:] not in told + as_json
    assert key[:18] not in told + as_json


def test_unknown_guard_is_rejected() -> None:
    code, _, errors = run("run", "reader.py", "--shell", "--write", "--guard", "everything")

    assert (2, True) == (code, "--guard injection" in errors)
