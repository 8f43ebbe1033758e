"""
`--script`: replies of a file in place of a model, for a single run, its continuation and a conversation.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import typed
from tests.phrases import NO_KEY

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


@pytest.mark.spec("studio:ST12")
def test_script_serves_a_run_and_its_resume_without_a_key() -> None:
    begun = typed("run", "./asker.py", "go", "--script", "replies.json", "--journal", "run.jsonl")
    assert "question q1 waits for an answer: Release it? (yes, no)" in begun.stderr
    hint = "stepengine resume run.jsonl --agent ./asker.py --script replies.json --answer q1=TEXT"
    assert hint in begun.stderr

    done = typed(*hint.replace("TEXT", "yes").split()[1:], "--json")

    told = json.loads(done.stdout)
    assert ("completed", "one yes two", "0") == (told["status"], told["output"], told["cost"])


@pytest.mark.spec("studio:ST12")
def test_listed_run_resumes_with_its_script_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed("run", "./asker.py", "go", "--script", "replies.json")
    (name,) = [row["stem"] for row in json.loads(typed("runs", "--json").stdout)]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    asked = typed("resume", name, "--answer", "q1=no", "--model", "anthropic/claude-haiku-4-5")
    assert f"there is {NO_KEY} 'anthropic'" in asked.stderr

    assert "one no two\n" == typed("resume", name, "--answer", "q1=no", "--quiet").stdout


@pytest.mark.spec("studio:ST12")
def test_forked_run_uses_the_script_after_kept_replies() -> None:
    typed("run", "./talker.py", "go", "--script", "replies.json", "--journal", "run.jsonl")
    Path("others.json").write_text(json.dumps(["three", "four"]))

    def forked(*place: str) -> str:
        line = ["fork", "run.jsonl", "--agent", "./talker.py", "--script", "others.json", *place]
        return str(typed(*line).stdout)

    assert ["three\n", "one\n"] == [forked("--at", "-1"), forked("--at", "0")], "at 0 it keeps the reply of the record"
    refused = typed("fork", "x", "--at", "0", "--db", "@url", "--script", "others.json")
    assert (2, True) == (refused.exit_code, "--script cannot be combined with --db" in refused.stderr)


@pytest.mark.spec("requirements:A17")
def test_max_cost_bounds_a_run_and_scripted_replies_are_free() -> None:
    free = typed("run", "./talker.py", "go", "--script", "replies.json", "--max-cost", "0.5", "--no-journal")
    Path("priced.py").write_text(
        "from decimal import Decimal\nfrom stepengine.models import ModelReply\n"
        "from stepengine.testing import tool_call\nimport attrs\n"
        "replies = [attrs.evolve(tool_call('end_turn', {}), cost=Decimal(1)), 'more']\n"
    )
    Path("twice.py").write_text(
        "from stepengine import STEP, AgentDefinition\n\n\ndef handle_steps(ctx):\n    yield STEP\n    yield STEP\n\n\n"
        'agent = AgentDefinition("twice", model="a/b", tools=["end_turn"], handle_steps=handle_steps)\n'
    )
    spent = typed("run", "./twice.py", "go", "--script", "priced.py", "--max-cost", "0.5", "--no-journal")

    assert (0, "one\n") == (free.exit_code, free.stdout), free.stderr
    assert 4 == spent.exit_code
    assert "0.5 US dollars" in spent.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run ./talkr.py go", "there is no agent file 'talkr.py'; did you mean 'talker.py'?"),
        ("chat ./talkr.py", "there is no agent file 'talkr.py'; did you mean 'talker.py'?"),
        ("run sandboxed:./talkr.py go", "there is no agent file 'talkr.py'; did you mean 'talker.py'?"),
        ("eval talkr.py", "there is no evaluation file 'talkr.py'; did you mean 'talker.py'?"),
        ("eval talker.py", "talker.py does not define 'evaluation'; for example:"),
        ("run ./talker.py go --script reply.json", "No such file or directory; did you mean 'replies.json'?"),
        ("run ./talker.py go --script askr.py", "there is no file 'askr.py'; did you mean 'asker.py'?"),
        ("serve empty", "the folder empty holds no agent files; `stepengine init` creates a project with one"),
        ("runs", "no run is recorded in this folder; `stepengine run AGENT` records one"),
        ("runs --waiting", "no run that waits is recorded in this folder"),
    ],
)
def test_a_misspelt_file_is_answered_with_the_nearest_one(line: str, said: str) -> None:
    Path("empty").mkdir()

    assert said in typed(*line.split()).stderr


@pytest.mark.spec("studio:ST12")
def test_script_starts_again_at_each_chat_turn() -> None:
    done = typed("chat", "./talker.py", "--script", "replies.json", "--plain", input="hello\nonce more\n")

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


@pytest.mark.spec("ecosystem:EC140")
def test_a_model_that_cannot_be_recorded_is_refused() -> None:
    refused = typed("run", "./asker.py", "go", "--script", "replies.json", "--model", "\udcff")

    assert 2 == refused.exit_code
    assert "the text at $.model holds a lone surrogate" in refused.stderr


@pytest.mark.spec("studio:ST12")
def test_a_script_and_a_key_exclude_each_other() -> None:
    refused = typed("run", "./asker.py", "go", "--script", "replies.json", "--api-key-env", "KEY")

    assert 2 == refused.exit_code
    assert "--script and --api-key-env exclude each other; pass one of them" in refused.stderr


@pytest.mark.spec("interfaces:IF96")
@pytest.mark.parametrize("answers", [[], ["--answer", "q1=yes"]], ids=["open", "answered"])
def test_open_question_is_shown_before_the_missing_key(answers: list[str]) -> None:
    typed("run", "./asker.py", "go", "--script", "replies.json", "--journal", "run.jsonl")

    refused = typed("resume", "run.jsonl", "--agent", "./asker.py", *answers)

    question, key = "question q1 waits for an answer: Release it? (yes, no)", f"there is {NO_KEY} 'anthropic'"
    assert 2 == refused.exit_code
    assert key in refused.stderr
    assert (not answers) == (question in refused.stderr)
    assert refused.stderr.find(question) < refused.stderr.index(key)
