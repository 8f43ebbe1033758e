"""
Runs that move: from a journal into the database, and from the database into a journal.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, RunStatus, StepContext, call
from stepengine.durable import DurableEngine
from stepengine.errors import JournalError, ReplayDivergence
from stepengine.journal import FileJournal, Journal, MemoryJournal
from stepengine.journal.mailbox import Mailbox
from stepengine.testing import ScriptedModel, text

from .shared import DONE, note, worker_of


class Today:
    """A system prompt that is another one whenever it is asked."""

    asked = 0

    def render(self, ctx) -> str:
        type(self).asked += 1
        return f"prompt {self.asked}"


def child_steps(ctx: StepContext):
    yield from call(note, f"{ctx.prompt} before")
    size = yield from Ask(f"How large is {ctx.prompt}?")
    yield from call(note, f"{ctx.prompt} after")
    return [ctx.prompt, size]


def quick_steps(ctx: StepContext):
    return (yield from call(note, f"quick {ctx.prompt}"))


def steps(ctx: StepContext):
    yield from call(note, "first")
    quick = yield from AgentCall("quick", "child")
    said = yield STEP
    both = yield from Parallel(AgentCall("child", "a"), AgentCall("child", "b"))
    end = yield STEP
    yield from call(note, "last")
    return [quick, said.text, [each.output for each in both], end.text, round(ctx.random.random(), 6)]


def edited(ctx: StepContext):
    yield from call(note, "another first")


CHILD = AgentDefinition("child", tools=[note], handle_steps=child_steps)
QUICK = AgentDefinition("quick", tools=[note], handle_steps=quick_steps)


def agent(handler=steps) -> AgentDefinition:
    return AgentDefinition(
        "parent",
        model="test/model",
        tools=[note],
        spawnable_agents=[CHILD, QUICK],
        handle_steps=handler,
        system_prompt=Today(),
    )


def durable(db: str, *replies: str, handler=steps) -> DurableEngine:
    script = ScriptedModel([text(reply) for reply in replies])
    return worker_of([agent(handler)], db, models=script)


def in_process(*replies: str) -> Engine:
    return Engine([agent()], models=ScriptedModel([text(reply) for reply in replies]))


@pytest.mark.deep
@pytest.mark.spec("durable:U42")
async def test_run_continues_in_the_database_from_its_journal(db: str, tmp_path: Path):
    DONE.clear()
    file = tmp_path / "run.jsonl"
    waiting = await in_process("one").run("parent", "", journal=file)
    answers = {question.id: question.text[-2] for question in waiting.pending_questions}
    before = list(DONE)
    async with durable(db, "two") as worker:
        run = await worker.submit_journal(file)
        asked = await worker.result(run)
        result = await worker.resume(run, answers=answers)
        exported = await worker.export(run)
    expected = await in_process("two").resume(MemoryJournal(file.read_bytes()), answers=answers)
    replayed = await in_process().replay(exported)

    assert waiting.pending_questions == asked.pending_questions
    assert RunStatus.COMPLETED is result.status
    assert expected.output == result.output == replayed.output
    assert expected.usage == result.usage
    # The two children go on in any order; nothing that was recorded is done again.
    assert sorted([*before, "a after", "b after", "last"]) == sorted(DONE[: len(before) + 3])


@pytest.mark.deep
@pytest.mark.spec("durable:U42")
async def test_run_continues_in_process_from_the_database(db: str, tmp_path: Path):
    DONE.clear()
    async with durable(db, "one") as worker:
        waiting = await worker.run("parent", "")
        await worker.export(waiting.journal, tmp_path / "run.jsonl")
    before = list(DONE)
    answers = {question.id: "x" for question in waiting.pending_questions}
    result = await in_process("two").resume(tmp_path / "run.jsonl", answers=answers)

    assert ["quick child", "one", [["a", "x"], ["b", "x"]], "two"] == result.output[:4]
    assert sorted([*before, "a after", "b after", "last"]) == sorted(DONE)


class StoreWithoutMailbox(FileJournal):
    def mailbox(self) -> Mailbox:
        return Journal.mailbox(self)


@pytest.mark.deep
@pytest.mark.spec("durable:U42")
async def test_journal_without_mailbox_is_moved(db: str, tmp_path: Path):
    await in_process("one").run("parent", "", journal=tmp_path / "run.jsonl")
    async with durable(db, "two") as worker:
        run = await worker.submit_journal(StoreWithoutMailbox(tmp_path / "run.jsonl"))
        assert RunStatus.SUSPENDED is (await worker.result(run)).status


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U42")
async def test_finished_run_cannot_be_moved(db: str):
    journal = MemoryJournal()
    await Engine([QUICK], models=ScriptedModel([])).run("quick", "x", journal=journal)
    async with durable(db) as worker:
        with pytest.raises(JournalError, match="has ended"):
            await worker.submit_journal(journal)


@pytest.mark.deep
@pytest.mark.spec("durable:U42", "durable:U36", "durable:UT9")
async def test_export_with_edited_agents_raises_divergence(db: str, tmp_path: Path):
    async with durable(db, "one") as worker:
        run = (await worker.run("parent", "")).journal
    async with durable(db, "one", handler=edited) as worker:
        with pytest.raises(ReplayDivergence, match="#0"):
            await worker.export(run)
    other = tmp_path / "run.jsonl"
    await in_process("one").run("parent", "", journal=other)
    async with durable(db, handler=edited) as worker:
        imported = await worker.submit_journal(other)
        with pytest.raises(ReplayDivergence, match="#0"):
            await worker.result(imported)


@pytest.mark.deep
@pytest.mark.spec("durable:U11", "replay:D1")
async def test_start_lookups_happen_once(db: str):
    Today.asked = 0
    async with durable(db, "one") as worker:
        waiting = await worker.run("parent", "")
    async with durable(db, "two") as worker:
        answers = {question.id: "x" for question in waiting.pending_questions}
        result = await worker.resume(waiting.journal, answers=answers)

    assert 1 == Today.asked
    assert "prompt 1" == result.state.system_prompt
