"""
`stepengine send` and `cancel` reach a run of a journal that another process has in hands.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentDefinition, Ask, Engine, Receive
from stepengine.cli.exits import Exit
from stepengine.testing import ScriptedModel, text
from tests.cli.command import command


def asking(ctx):
    day = yield from Ask("On which day?")
    return f"{ctx.prompt} on {day}"


def waiting(ctx):
    yield Receive("go")
    yield STEP
    return "went"


AGENTS = [
    AgentDefinition("asking", handle_steps=asking),
    AgentDefinition("waiting", model="anthropic/claude-sonnet-4-5", handle_steps=waiting),
]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STEPENGINE_DB", raising=False)


@pytest.mark.spec("studio:SV3", "waiting:WT2")
@pytest.mark.parametrize("name", ["run.jsonl", "runs.db#one"])
def test_running_run_takes_an_answer_from_the_command_line(name: str) -> None:
    """
    Answers to what is not open are refused, and so is what comes too late.
    """

    async def answered() -> object:
        engine = Engine(AGENTS, models=ScriptedModel(["Well."]))
        async with engine, engine.start("asking", "Rome", journal=name, wait_for_answers=30) as handle:
            async for event in handle.events():
                if event.type == "question_asked":
                    break
            odd = await asyncio.to_thread(command, "send", name, "--answer", "q99=x", code=Exit.FAILED)
            await asyncio.to_thread(command, "send", name, "--answer", "q0=Friday")
            await handle.fetch_mail()
            assert "'q0'" in odd.stderr
            return (await handle.result()).output

    assert "Rome on Friday" == asyncio.run(answered())
    assert "has ended" in command("send", name, "--answer", "q0=Sunday", code=Exit.FAILED).stderr


@pytest.mark.spec("waiting:WT2")
def test_suspended_runs_receive_messages_and_cancellation() -> None:
    with Engine(AGENTS, models=ScriptedModel(["Well."] * 3)) as engine:
        rested = [engine.run_sync("waiting", journal=f"{name}.jsonl").status for name in ("first", "second")]
        command("send", "first.jsonl", "Be short.")
        command("send", "first.jsonl", "--topic", "go")
        command("cancel", "second.jsonl")
        gone_on, ended = engine.resume_sync("first.jsonl"), engine.resume_sync("second.jsonl")

    said = [part.text for m in gone_on.state.message_history if m.role == "user" for part in m.content]
    assert ["suspended", "suspended"] == rested
    assert ("went", True) == (gone_on.output, "Be short." in said)
    assert "cancelled" == ended.status


@pytest.mark.spec("waiting:WT2")
def test_send_prints_the_id_and_whether_it_is_new() -> None:
    with Engine(AGENTS, models=ScriptedModel([])) as engine:
        engine.run_sync("asking", "Rome", journal="asks.jsonl")
    text = command("send", "asks.jsonl", "-", "--id", "m1", input="Be short.")
    again = command("send", "asks.jsonl", "Be short.", "--id", "m1")
    shown = json.loads(command("send", "asks.jsonl", "Be short.", "--id", "m1", "--json").stdout)
    answered = json.loads(command("send", "asks.jsonl", "--answer", "q0=Friday", "--json").stdout)

    assert ("m1\n", "m1 (already sent)\n") == (text.stdout, again.stdout)
    assert {"id": "m1", "topic": "", "path": "", "new": False} == shown
    assert {"answered": ["q0"]} == answered


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "nothing to send; pass TEXT, --answer ID=TEXT, or --topic"),
        (["Be short.", "--answer", "q0=Friday"], "--answer and --always cannot be combined with a message"),
        (["--topic", "go", "--always", "q0"], "--answer and --always cannot be combined with a message"),
        (["--answer", "q0=no", "--always", "q0"], "--answer and --always both answer 'q0'"),
        (["--answer", "q0"], "is not ID=TEXT"),
        (["Be short.", "--path", "1"], "--path names the child that receives on a topic"),
        (["--topic", "go", "{"], "the message is not JSON"),
    ],
)
def test_invalid_send_is_rejected_before_looking_for_the_run(words: list[str], part: str) -> None:
    assert part in command("send", "nowhere.jsonl", *words, code=Exit.USAGE).stderr


def test_name_of_neither_journal_nor_database_is_rejected() -> None:
    assert "there is no journal 'nowhere.jsonl'" in command("cancel", "nowhere.jsonl", code=Exit.USAGE).stderr


@pytest.mark.parametrize(
    "words",
    [
        ("send", "nowhere.jsonl", "-"),
        ("send", "nowhere.jsonl", "--topic", "go", "-"),
        ("ask", "test/m", "-"),
        ("run", "code_searcher", "-"),
    ],
)
def test_stdin_that_is_no_text_is_rejected(words: tuple[str, ...], scripted: Any) -> None:
    scripted(text("ok"))

    assert "stdin is not text in the encoding utf-8" in command(*words, input=b"\xff", code=Exit.USAGE).stderr
