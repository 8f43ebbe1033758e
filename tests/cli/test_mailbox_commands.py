"""
`stepengine answer`, `say` and `cancel` reach a run of a journal that another process has in hands.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from stepengine import STEP, AgentDefinition, Ask, Engine, Receive
from stepengine.cli.app import app
from stepengine.cli.exits import Exit
from stepengine.testing import ScriptedModel


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


def command(*arguments: str, code: Exit = Exit.COMPLETED) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert code == result.exit_code, (result.stdout, result.stderr, result.exception)
    return result


@pytest.mark.spec("studio:SV3", "waiting:WT2")
@pytest.mark.parametrize("name", ["run.jsonl", "runs.db#one"])
def test_a_run_that_is_under_way_takes_an_answer_from_the_command_line(name: str) -> None:
    """
    Answers to what is not open are refused, and so is what comes too late.
    """

    async def answered() -> object:
        engine = Engine(AGENTS, models=ScriptedModel(["Well."]))
        async with engine, engine.start("asking", "Rome", journal=name, wait_for_answers=30) as handle:
            async for event in handle.events():
                if event.type == "question_asked":
                    break
            odd = await asyncio.to_thread(command, "answer", name, "q99", "x", code=Exit.FAILED)
            await asyncio.to_thread(command, "answer", name, "q0", "Friday")
            await handle.fetch_mail()
            assert "'q0'" in odd.stderr
            return (await handle.result()).output

    assert "Rome on Friday" == asyncio.run(answered())
    assert "has ended" in command("answer", name, "q0", "Sunday", code=Exit.FAILED).stderr


@pytest.mark.spec("waiting:WT2")
def test_a_run_that_rests_is_told_something_and_another_cancelled_from_the_command_line() -> None:
    with Engine(AGENTS, models=ScriptedModel(["Well."] * 3)) as engine:
        rested = [engine.run_sync("waiting", journal=f"{name}.jsonl").status for name in ("first", "second")]
        command("say", "first.jsonl", "Be short.")
        command("post", "first.jsonl", "go")
        command("cancel", "second.jsonl")
        gone_on, ended = engine.resume_sync("first.jsonl"), engine.resume_sync("second.jsonl")

    said = [part.text for m in gone_on.state.message_history if m.role == "user" for part in m.content]
    assert ["suspended", "suspended"] == rested
    assert ("went", True) == (gone_on.output, "Be short." in said)
    assert "cancelled" == ended.status


def test_what_names_neither_a_journal_nor_a_database_is_refused() -> None:
    assert "there is no journal 'nowhere.jsonl'" in command("cancel", "nowhere.jsonl", code=Exit.USAGE).stderr
