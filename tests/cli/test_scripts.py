"""
`--script`: replies of a file in place of a model, for a single run, its continuation and a conversation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepengine.cli.app import app

AGENT = """
from stepengine import STEP_ALL, AgentDefinition, Ask, StepContext, Steps


def handle_steps(ctx: StepContext) -> Steps[str]:
    first = (yield STEP_ALL).text
    answer = yield from Ask("Release it?", options=["yes", "no"])
    return f"{first} {answer} {(yield STEP_ALL).text}"


agent = AgentDefinition("asker", model="anthropic/claude-sonnet-4-5", handle_steps=handle_steps)
"""
TALKER = (
    'from stepengine import AgentDefinition\n\nagent = AgentDefinition("talker", model="anthropic/claude-sonnet-4-5")\n'
)


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEPENGINE_STATE_DIR", str(tmp_path / "state"))
    Path("asker.py").write_text(AGENT)
    Path("talker.py").write_text(TALKER)
    Path("replies.json").write_text(json.dumps(["one", "two"]))


def typed(*arguments: str, stdin: str = "") -> Any:
    return CliRunner().invoke(app, [*arguments], input=stdin)


@pytest.mark.spec("studio:ST12")
def test_a_run_and_its_continuation_get_the_replies_of_a_file_and_need_no_key() -> None:
    begun = typed("run", "./asker.py", "go", "--script", "replies.json", "--journal", "run.jsonl")
    assert "question q1 waits for an answer: Release it? (yes, no)" in begun.stderr
    hint = "stepengine resume run.jsonl --agent ./asker.py --script replies.json --answer q1=TEXT"
    assert hint in begun.stderr

    done = typed(*hint.replace("TEXT", "yes").split()[1:], "--json")

    told = json.loads(done.stdout)
    assert ("completed", "one yes two", "0") == (told["status"], told["output"], told["cost"])


@pytest.mark.spec("studio:ST12")
def test_a_run_that_is_listed_is_resumed_with_its_script_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed("run", "./asker.py", "go", "--script", "replies.json")
    (name,) = [row["stem"] for row in json.loads(typed("runs", "--json").stdout)]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    asked = typed("resume", name, "--answer", "q1=no", "--model", "anthropic/claude-haiku-4-5")
    assert "there is no API key for 'anthropic'" in asked.stderr

    assert "one no two\n" == typed("resume", name, "--answer", "q1=no", "--quiet").stdout


@pytest.mark.spec("studio:ST12")
def test_each_turn_of_a_chat_gets_the_replies_from_the_first_on() -> None:
    done = typed("chat", "./talker.py", "--script", "replies.json", "--plain", stdin="hello\nonce more\n")

    assert 0 == done.exit_code
    assert ["one", "one"] == [line for line in done.stdout.splitlines() if line in ("one", "two")]
    assert "No model is set yet" not in done.stdout


@pytest.mark.spec("studio:ST12")
@pytest.mark.parametrize("command", [["run", "./asker.py", "go"], ["chat", "./asker.py"]], ids=["run", "chat"])
def test_a_script_and_a_server_exclude_each_other(command: list[str]) -> None:
    line = [*command, "--script", "replies.json", "--model", "m", "--base-url", "http://localhost:1/v1"]

    refused = typed(*line)

    assert 2 == refused.exit_code
    assert "--script and --base-url exclude each other; pass one of them" in refused.stderr


@pytest.mark.spec("interfaces:IF165")
@pytest.mark.parametrize("answers", [[], ["--answer", "q1=yes"]], ids=["open", "answered"])
def test_an_open_question_is_shown_before_the_key_that_is_missing(answers: list[str]) -> None:
    typed("run", "./asker.py", "go", "--script", "replies.json", "--journal", "run.jsonl")

    refused = typed("resume", "run.jsonl", "--agent", "./asker.py", *answers)

    question, key = "question q1 waits for an answer: Release it? (yes, no)", "there is no API key for 'anthropic'"
    assert 2 == refused.exit_code
    assert key in refused.stderr
    assert (not answers) == (question in refused.stderr)
    assert refused.stderr.find(question) < refused.stderr.index(key)
