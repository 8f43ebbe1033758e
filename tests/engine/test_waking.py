"""
Runs that sleep: what reaches them from whoever does not hold them, who wakes them, and what is noted so that nobody is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Perform,
    Receive,
    RunResult,
    RunStatus,
    Sleep,
    ToolCall,
    tool,
)
from stepengine.data.yields import Ask, Parallel, Send, Start, Wait
from stepengine.engine.waker import Waker, WakeResult
from stepengine.errors import (
    BadYield,
    DefinitionError,
    InputError,
    JournalLocked,
    JournalMissing,
    StepEngineError,
)
from stepengine.journal import (
    FileJournal,
    Journal,
    LineJournal,
    MemoryJournal,
    SqliteJournal,
    WakePlace,
    run_end,
    send_message,
)
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.mailbox import FileMailbox, MailboxMessage
from stepengine.journal.pending_items import find_open_questions, find_waits
from stepengine.journal.sleepers import find_sleeping_runs, open_wake_index
from stepengine.journal.wake_index import WAKING
from stepengine.runtime.messages import Message
from stepengine.testing import ScriptedModel, text
from tests.engine.clocks import ShiftedClock
from tests.waits import until_async as until

HOUR = 3600.0


def agent(handle: Callable[[Any], Any], id: str = "napper") -> AgentDefinition:
    return AgentDefinition(id, handle_steps=handle)


def receives(ctx: Any) -> Any:
    got = yield from Receive("go", timeout=HOUR)
    return got


def sleeps(ctx: Any) -> Any:
    yield from Sleep(seconds=float(ctx.prompt or HOUR))
    return "woke"


def asks(ctx: Any) -> Any:
    answer = yield from Ask("Ship it?", options=["yes", "no"])
    return answer


def indexed(place: Path) -> list[Any]:
    """Return the suspended runs in the index of a store, which is made if there is none."""
    with open_wake_index(place) as index:
        return index.list_all()


class StandingClock(ShiftedClock):
    """
    A date that is set, and stands still until it is set again.
    """

    def __init__(self, ahead: timedelta = timedelta()) -> None:
        super().__init__(ahead)
        self.begun = datetime.now(UTC).replace(microsecond=0)

    def now(self) -> datetime:
        return self.begun + self.ahead


@pytest.fixture(autouse=True)
def quick_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A run that waits looks for its messages soon.
    """
    monkeypatch.setattr("stepengine.runtime.messages.FIRST_POLL_SECONDS", 0.02)


@pytest.fixture
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Journal:
    kind = getattr(request, "param", "file")
    if kind == "memory":
        return MemoryJournal()
    return FileJournal(tmp_path / "a.jsonl") if kind == "file" else SqliteJournal(tmp_path / "runs.db", "a")


# --- letters --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize("journal", ["file", "database", "memory"], indirect=True)
async def test_message_to_a_suspended_run_is_delivered_on_resume(journal: Journal) -> None:
    """
    It is taken in by the next process, once, and the replay of the whole is equal.
    """
    async with Engine([agent(receives)]) as engine:
        first = await engine.run("napper", journal=journal)
        new = [await engine.send_message(journal, "go", {"n": 1}, id="one") for _ in range(2)]
        second = await engine.resume(journal)
        again = await engine.replay(journal)

    assert [True, False] == new
    assert (RunStatus.SUSPENDED, "message", "go") == (first.status, first.waits_for[0].kind, first.waits_for[0].topic)
    assert {"n": 1} == second.output == again.output
    assert 1 == sum(i.input.get("type") == "message" for i in journal.history().inputs)
    assert again.journal is not None
    assert journal.content() == again.journal.content()


@pytest.mark.spec("waiting:WT2")
async def test_messages_come_in_order_and_one_for_another_topic_waits(journal: Journal) -> None:
    def three(ctx: Any) -> Any:
        first = yield from Receive("b")
        second = yield from Receive("a")
        third = yield from Receive("a")
        return [first, second, third]

    async with Engine([agent(three)]) as engine:
        await engine.run("napper", journal=journal)
        for n in range(3):
            await engine.send_message(journal, "a", n)
        waits = await engine.resume(journal)
        await engine.send_message(journal, "b", "now")
        result = await engine.resume(journal)

    assert ("b",) == tuple(one.topic for one in waits.waits_for)
    assert ["now", 0, 1] == result.output
    assert 4 == sum(i.input.get("type") == "message" for i in journal.history().inputs)


@pytest.mark.spec("waiting:WT2")
async def test_message_from_another_sender_reaches_a_run_waiting_here(tmp_path: Path) -> None:
    """
    The sender knows only the journal: the run looks into its mailbox while it waits.
    """
    journal = FileJournal(tmp_path / "a.jsonl")
    async with (
        Engine([agent(receives)], sleep_in_process=math.inf) as engine,
        engine.start("napper", journal=journal, wait_for_answers=None) as handle,
    ):
        await until(lambda: journal.is_there() and journal.history().intents.get(("", 0)))
        await asyncio.to_thread(journal.mailbox().send, MailboxMessage(kind="message", topic="go", value=3))
        result = await asyncio.wait_for(handle.result(), 50)

    assert 3 == result.output


class Verdict(BaseException):
    """The error of a test framework that fails a test."""


@pytest.mark.spec("waiting:WT2")
async def test_base_exception_while_polling_ends_the_waiting_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, looks = FileJournal(tmp_path / "a.jsonl"), list[int]()

    def fail_while_polling(_: FileMailbox, after: int) -> bool:
        looks.append(after)
        if len(looks) > 1:  # the first look is before the wait
            raise Verdict("no")
        return False

    monkeypatch.setattr(FileMailbox, "may_have_messages", fail_while_polling)
    async with Engine([agent(receives)], sleep_in_process=math.inf) as engine:
        handle = engine.start("napper", journal=journal, wait_for_answers=None)
        with pytest.raises(Verdict, match="no"):
            await asyncio.wait_for(handle.result(), 50)


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize("how", ["handle", "id", "engine"])
async def test_posted_message_is_on_disk_and_delivered_at_once(tmp_path: Path, how: str) -> None:
    journal = FileJournal(tmp_path / "a.jsonl")
    async with (
        Engine([agent(receives)]) as engine,
        engine.start("napper", journal=journal, wait_for_answers=None) as handle,
    ):
        await asyncio.sleep(0)
        # The run ends with what it receives on "go": until then it may be found by its id.
        if how == "handle":
            new = [
                handle.send_message("else", 2, id="x"),
                handle.send_message("else", 2, id="x"),
                handle.send_message("go", 3),
            ]
        else:
            run: Any = handle if how == "engine" else handle.run_id
            twice = [
                await engine.send_message(run, "else", 2, id="x"),
                await engine.send_message(run, "else", 2, id="x"),
            ]
            new = [*twice, await engine.send_message(run, "go", 3)]
        letter, _ = journal.mailbox().read()[0]
        result = await handle.result()

    assert [True, False, True] == new
    assert ("x", 2) == (letter.id, letter.value)
    assert 3 == result.output
    assert 2 == sum(i.input.get("type") == "message" for i in journal.history().inputs)


@pytest.mark.spec("waiting:WT2")
def test_synchronous_code_posts_too(tmp_path: Path) -> None:
    with Engine([agent(receives)]) as engine:
        engine.run_sync("napper", journal=tmp_path / "a.jsonl")

        assert engine.send_message_sync(tmp_path / "a.jsonl", "go", 1)
        assert 1 == engine.resume_sync(tmp_path / "a.jsonl").output


@pytest.mark.spec("waiting:WT2")
async def test_posting_to_an_invalid_or_missing_run_is_refused(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine:
        await engine.run("napper", journal=journal)
        for topic in ("", "two words", "x" * 201, "é"):
            with pytest.raises(BadYield):
                await engine.send_message(journal, topic, 1)
        with pytest.raises(InputError):
            await engine.send_message(journal, "go", "x" * 1_048_577)
        with pytest.raises(InputError):
            await engine.send_message(journal, "go", 1, path="../x")
        await engine.send_message(journal, "go", 1, id="one")
        with pytest.raises(InputError, match="another mailbox message with the id"):
            await engine.send_message(journal, "go", 2, id="one")
        await engine.resume(journal)
        with pytest.raises(StepEngineError, match="has ended"):
            await engine.send_message(journal, "go", 1)
        with pytest.raises(JournalMissing, match="neither a run in this engine nor a journal"):
            await engine.send_message("no-such-run.jsonl", "go", 1)


@pytest.mark.spec("waiting:WT2")
async def test_posting_to_a_missing_child_is_refused(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine:
        await engine.run("napper", journal=journal)
        for path in ("9", "9.9", "0.3"):
            with pytest.raises(StepEngineError, match="there is no run at the path"):
                await engine.send_message(journal, "go", 1, path=path)

        assert [] == journal.mailbox().read()[0]
        assert await engine.send_message(journal, "go", 1)
        assert 1 == (await engine.resume(journal)).output


@pytest.mark.spec("waiting:WT2")
async def test_program_without_an_engine_posts_to_a_journaled_run(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine:
        await engine.run("napper", journal=journal)
        assert [True, False] == [send_message(journal, "go", {"n": [7]}, id="one") for _ in range(2)]
        assert {"n": [7]} == (await engine.resume(journal)).output
    with pytest.raises(BadYield):
        send_message(journal, "two words", 1)
    with pytest.raises(InputError, match="JSON"):
        send_message(journal, "go", object())
    with pytest.raises(StepEngineError, match="has ended"):
        send_message(journal, "go", 1)


def starts_late(ctx: Any) -> Any:
    yield from Receive("begin")
    child = yield from Start(AgentCall("napper"))
    waited = yield from Wait(child)
    return waited[child].output


@pytest.mark.spec("waiting:WT2")
async def test_message_to_an_unstarted_run_keeps_its_journal_valid(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine:
        await engine.run("napper", journal=journal)
        for kind, topic in (("message", "go"), ("input", ""), ("cancel", "")):
            journal.mailbox().send(MailboxMessage(kind=kind, value="stray", path="9.9", topic=topic))
        await engine.resume(journal)
        await engine.send_message(journal, "go", 2)
        result = await engine.resume(journal)

    assert 2 == result.output
    assert result == await Engine([agent(receives)]).replay(journal)


@pytest.mark.spec("waiting:WT2")
async def test_message_sent_before_its_child_begins_is_delivered(journal: Journal) -> None:
    lead = AgentDefinition("lead", handle_steps=starts_late, spawnable_agents=["napper"])
    async with Engine([lead, agent(receives)]) as engine:
        await engine.run("lead", journal=journal)
        journal.mailbox().send(MailboxMessage(kind="message", value="early", path="1", topic="go", id="early"))
        await engine.send_message(journal, "begin", None)
        suspended = await engine.resume(journal)
        result = await engine.resume(journal) if suspended.status is RunStatus.SUSPENDED else suspended
        replayed = await engine.replay(journal)

    assert "early" == result.output == replayed.output
    assert 1 == sum(i.input.get("id") == "early" for i in journal.history().inputs)


@pytest.mark.spec("waiting:WT2")
async def test_message_to_a_missing_run_keeps_the_active_journal_valid(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "a.jsonl")
    async with (
        Engine([agent(receives)]) as engine,
        engine.start("napper", journal=journal, wait_for_answers=None) as handle,
    ):
        await asyncio.sleep(0)
        handle.send_message("go", 1, path="9.9")
        handle.send_message("go", 2)
        result = await handle.result()
        replayed = await engine.replay(journal)

    assert 2 == result.output == replayed.output


@pytest.mark.spec("waiting:WT2")
async def test_message_against_the_schema_is_skipped_with_a_warning(
    journal: Journal,
) -> None:
    def strict(ctx: Any) -> Any:
        return (yield from Receive("go", schema={"type": "object", "required": ["n"]}))

    async with Engine([agent(strict)]) as engine:
        await engine.run("napper", journal=journal)
        await engine.send_message(journal, "go", [1], id="bad")
        still = await engine.resume(journal)
        await engine.send_message(journal, "go", {"n": 1})
        result = await engine.resume(journal)

    assert RunStatus.SUSPENDED is still.status
    assert any("'bad'" in warning and "does not fit" in warning for warning in still.warnings)
    assert {"n": 1} == result.output
    assert not any("does not fit" in warning for warning in result.warnings)


@pytest.mark.spec("waiting:WT2")
async def test_posted_answer_answers_the_open_question(journal: Journal) -> None:
    async with Engine([agent(asks)]) as engine:
        first = await engine.run("napper", journal=journal)
        (question,) = first.pending_questions
        box = journal.mailbox()
        box.send(MailboxMessage(kind="answer", topic=question.id, value="perhaps"))
        box.send(MailboxMessage(kind="answer", topic="q99", value="yes"))
        left_out = await engine.resume(journal)
        again = await engine.resume(journal)
        box.send(MailboxMessage(kind="answer", topic=question.id, value="yes"))
        result = await engine.resume(journal)

    assert RunStatus.SUSPENDED is left_out.status
    assert 2 == sum("was ignored" in warning for warning in left_out.warnings)
    assert not again.warnings
    assert (RunStatus.COMPLETED, "yes") == (result.status, str(result.output))


@pytest.mark.spec("waiting:WT2")
async def test_answer_of_the_caller_precedes_a_posted_one(journal: Journal) -> None:
    async with Engine([agent(asks)]) as engine:
        first = await engine.run("napper", journal=journal)
        journal.mailbox().send(MailboxMessage(kind="answer", topic=first.pending_questions[0].id, value="yes"))
        result = await engine.resume(journal, answers={"Ship it?": "no"})

    assert "no" == str(result.output)


@pytest.mark.spec("waiting:WT2")
async def test_posted_cancel_ends_the_run_once_and_it_can_resume(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine:
        await engine.run("napper", journal=journal)
        journal.mailbox().send(MailboxMessage(kind="cancel", value="not needed"))
        cancelled = await engine.resume(journal)
        await engine.send_message(journal, "go", 1)
        result = await engine.resume(journal)

    assert RunStatus.CANCELLED is cancelled.status
    assert any("not needed" in warning for warning in cancelled.warnings)
    assert 1 == result.output


@pytest.mark.spec("waiting:WT2")
async def test_posted_cancel_ends_a_run_that_waits_in_this_process(tmp_path: Path) -> None:
    journal = FileJournal(tmp_path / "a.jsonl")
    async with Engine([agent(sleeps)]) as engine, engine.start("napper", "50", journal=journal) as handle:
        await until(lambda: journal.is_there() and journal.history().intents.get(("", 0)))
        await asyncio.to_thread(journal.mailbox().send, MailboxMessage(kind="cancel", value=""))
        result = await asyncio.wait_for(handle.result(), 50)

    assert RunStatus.CANCELLED is result.status


@pytest.mark.spec("waiting:WT2")
async def test_one_letter_cancels_once_however_many_wait_for_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    A second order would cut the call that has its time to come to its end.
    """
    monkeypatch.setattr("stepengine.runtime.outside_messages.GRACE_SECONDS", 3_000.0)
    journal, ends = FileJournal(tmp_path / "a.jsonl"), list[str]()

    @tool(category="write")
    async def pay() -> str:
        """Pay."""
        await asyncio.sleep(0.15)
        ends.append("paid")
        return "paid"

    def cancel() -> None:
        journal.mailbox().send(MailboxMessage(kind="cancel", value="stop"))

    def handle(ctx: Any) -> Any:
        yield Perform(cancel)
        yield Parallel(ToolCall("pay", {}), Receive("a"), Receive("b"))

    async with Engine([AgentDefinition("lead", handle_steps=handle, tools=[pay])]) as engine:
        result = await engine.run("lead", journal=journal)

    assert RunStatus.CANCELLED is result.status
    assert ["paid"] == ends
    assert 1 == len(result.warnings), result.warnings


@pytest.mark.spec("waiting:WT2")
async def test_posted_answer_counts_once_with_many_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, is_sent, looks = FileJournal(tmp_path / "a.jsonl"), asyncio.Event(), itertools.count()
    read = FileMailbox.read

    def slow(box: FileMailbox, after: int = 0) -> Any:
        found = read(box, after)
        time.sleep(0.05 * next(looks))
        return found

    async def send() -> None:
        await until(lambda: handle.questions)
        letter = MailboxMessage(kind="answer", topic=handle.questions[0].id, value="yes")
        await asyncio.to_thread(journal.mailbox().send, letter)
        is_sent.set()

    def looks_too(ctx: Any) -> Any:
        yield Perform(is_sent.wait)
        yield from Receive("nothing", timeout=0.1)

    def lead(ctx: Any) -> Any:
        answer, *_ = yield from Parallel(Ask("Ship it?"), Perform(send), *[AgentCall("looker") for _ in range(3)])
        return str(answer)

    monkeypatch.setattr(FileMailbox, "read", slow)
    lead_agent = AgentDefinition("lead", handle_steps=lead, spawnable_agents=["looker"])
    async with (
        Engine([lead_agent, agent(looks_too, "looker")]) as engine,
        engine.start("lead", journal=journal, wait_for_answers=None) as handle,
    ):
        result = await asyncio.wait_for(handle.result(), 50)

    assert "yes" == result.output
    assert not result.warnings


@pytest.mark.spec("waiting:WT2")
async def test_a_text_by_letter_is_said_to_the_run(journal: Journal) -> None:
    def heard(ctx: Any) -> Any:
        yield from Receive("go")
        yield Perform(lambda: 1)

    async with Engine([agent(heard)]) as engine:
        await engine.run("napper", journal=journal)
        journal.mailbox().send(MailboxMessage(kind="input", value="be quick"))
        await engine.resume(journal)
        await engine.send_message(journal, "go", 1)
        result = await engine.resume(journal)
        again = await engine.replay(journal)

    assert ["be quick"] == [m.text for m in result.state.message_history]
    assert result.state.message_history == again.state.message_history


@pytest.mark.spec("waiting:WT20")
async def test_undelivered_message_of_a_parent_survives_a_crash(tmp_path: Path) -> None:
    """
    The child waits for a message, the parent tells it something; both are suspended and go on in another process.
    """

    def child(ctx: Any) -> Any:
        yield from Receive("later")
        step = yield STEP
        return [m.text for m in step.agent_state.message_history if m.role == "user"]

    def parent(ctx: Any) -> Any:
        from stepengine import AgentCall

        ref = yield from Start(AgentCall("child", "hello"))
        yield from Send(ref, "mind the gap")
        done = yield from Wait(ref)
        return done.done[0].output

    journal = FileJournal(tmp_path / "a.jsonl")
    whole = AgentDefinition("napper", spawnable_agents=["child"], handle_steps=parent)
    async with Engine([whole, agent(child, "child")], models=ScriptedModel([text("ok")])) as engine:
        first = await engine.run("napper", journal=journal)
        where = next(one.path for one in first.waits_for if one.kind == "message")
        await engine.send_message(journal, "later", None, path=where)
        result = await engine.resume(journal)
        again = await engine.replay(journal)

    assert RunStatus.COMPLETED is result.status
    assert 1 == result.output.count("mind the gap")
    assert result.output == again.output


# --- sleeping -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT20")
async def test_short_sleep_waits_in_process_and_long_one_suspends(journal: Journal) -> None:
    async with Engine([agent(sleeps)], sleep_in_process=0.5) as engine:
        short = await engine.run("napper", "0.05", journal=MemoryJournal())
    clock = StandingClock()
    async with Engine([agent(sleeps)], sleep_in_process=0.5, clock=clock) as engine:
        long = await engine.run("napper", "100", journal=journal)

    assert (RunStatus.COMPLETED, "woke") == (short.status, short.output)
    assert RunStatus.SUSPENDED is long.status
    assert clock.begun + timedelta(seconds=100) == long.wakes_at
    assert [("time", long.wakes_at)] == [(one.kind, one.wakes_at) for one in find_waits(journal.history())]


@pytest.mark.spec("waiting:WT20")
@pytest.mark.parametrize("seconds", [-1, True, "60", None, math.nan])
def test_an_engine_sleeps_for_a_number_of_seconds(seconds: Any) -> None:
    with pytest.raises(DefinitionError, match="sleep_in_process"):
        Engine([], sleep_in_process=seconds)


@pytest.mark.spec("waiting:WT20")
async def test_now_ends_recorded_sleeps_and_waits_but_no_later_ones(journal: Journal) -> None:
    def twice(ctx: Any) -> Any:
        yield from Sleep(seconds=HOUR)
        got = yield from Receive("go", timeout=HOUR)
        return got

    async with Engine([agent(twice)]) as engine:
        first = await engine.run("napper", journal=journal)
        early = await engine.resume(journal)
        second = await engine.resume(journal, now=True)
        third = await engine.resume(journal, now=True)

    assert first.wakes_at == early.wakes_at
    assert ("message",) == tuple(one.kind for one in second.waits_for)
    assert (RunStatus.COMPLETED, "") == (third.status, third.output)


@pytest.mark.spec("waiting:WT20")
async def test_attended_run_waits_in_process_and_is_suspended_when_left(journal: Journal) -> None:
    async with Engine([agent(receives)]) as engine, engine.start("napper", journal=journal) as handle:
        events = handle.events(answers=True)
        await anext(events)
        await asyncio.sleep(0.05)
        waits = not handle.done
        await events.aclose()
        result = await asyncio.wait_for(handle.result(), 50)

    assert waits
    assert RunStatus.SUSPENDED is result.status


@pytest.mark.spec("waiting:WT20")
async def test_now_is_true_or_false() -> None:
    async with Engine([agent(sleeps)]) as engine:
        with pytest.raises(InputError):
            await engine.resume(MemoryJournal(), now="yes")  # type: ignore[arg-type]


@pytest.mark.spec("waiting:WT21")
def test_run_that_never_waits_touches_only_its_journal(tmp_path: Path) -> None:
    def handle(ctx: Any) -> Any:
        step = yield Perform(lambda: 1)
        return step.value

    (tmp_path / "other.jsonl").write_text("")
    with Engine([agent(handle)]) as engine:
        engine.run_sync("napper", journal=tmp_path / "a.jsonl")
        engine.run_sync("napper", journal=SqliteJournal(tmp_path / "runs.db"))

    assert {"a.jsonl", "other.jsonl", "runs.db"} == {
        p.name for p in tmp_path.iterdir() if p.suffix in (".jsonl", ".db")
    }
    assert not (tmp_path / WAKING).exists()
    assert not list(tmp_path.glob("*.mail"))
    with contextlib.closing(__import__("sqlite3").connect(tmp_path / "runs.db")) as database:
        assert {"lines"} == {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
async def test_suspended_run_is_indexed_only_in_a_folder_of_runs(tmp_path: Path) -> None:
    alone, folder, database = tmp_path / "alone", tmp_path / "folder", tmp_path / "runs.db"
    folder.mkdir()
    (folder / "other.jsonl").write_text("")
    for place in (folder, database):
        assert [] == indexed(place)  # from now on only what is noted is in it
    async with Engine([agent(sleeps), agent(asks, "asks")]) as engine:
        await engine.run("napper", journal=alone / "a.jsonl")
        one = await engine.run("napper", journal=folder / "a.jsonl")
        two = await engine.run("napper", journal=SqliteJournal(database, "a"))
        await engine.run("asks", journal=SqliteJournal(database, "b"))

        assert ["a.jsonl"] == [p.name for p in alone.iterdir()]
        assert [("a.jsonl", one.wakes_at, {"time"})] == [(s.run, s.wakes_at, s.kinds) for s in indexed(folder)]
        with open_wake_index(database) as index:
            found = [(s.run, s.wakes_at, s.kinds) for s in index.list_all()]
            assert [("a", two.wakes_at, {"time"}), ("b", None, {"question"})] == found
            assert [] == index.list_due(datetime.now(UTC))
        await engine.resume(folder / "a.jsonl", now=True)
        await engine.resume(SqliteJournal(database, "a"), now=True)
        await engine.resume(SqliteJournal(database, "b"), answers={"q0": "yes"})
    for place in (folder, database):
        assert [] == indexed(place)


@pytest.mark.spec("waiting:WT21", "replay:D10")
@pytest.mark.parametrize("journal", ["file", "database"], indirect=True)
async def test_extended_sleeping_run_is_indexed_with_its_new_time(journal: Journal, tmp_path: Path) -> None:
    def sleeps_longer(ctx: Any) -> Any:
        yield from Sleep(seconds=2 * HOUR)

    place = tmp_path / "runs.db" if isinstance(journal, SqliteJournal) else tmp_path
    (tmp_path / "other.jsonl").write_text("")
    assert [] == indexed(place)
    async with Engine([agent(sleeps)]) as engine:
        first = await engine.run("napper", journal=journal)
    async with Engine([agent(sleeps_longer)]) as engine:
        later = await engine.resume(journal, on_divergence="extend")

        assert (RunStatus.SUSPENDED, True) == (later.status, later.wakes_at > first.wakes_at)
        assert [later.wakes_at] == [one.wakes_at for one in indexed(place)]
        await engine.resume(journal, on_divergence="extend", now=True)
    assert [] == indexed(place)


# --- waking ---------------------------------------------------------------------------------------------------------


def waker(place: Path, engine: Engine, told: list[WakeResult], ahead: timedelta = timedelta(), **options: Any) -> Waker:
    async def resume(journal: Journal, _: object) -> RunResult:
        return await engine.resume(journal, in_doubt="ask")

    return Waker(place, resume, tell=told.append, **{"clock": ShiftedClock(ahead), **options})


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
async def test_waker_resumes_due_runs_but_none_waiting_for_a_person(tmp_path: Path) -> None:
    """
    The machine was off for a week: what slept is woken late, each once; a question wakes nobody before it has an answer.
    """
    place, told, week = tmp_path / "runs.db", list[WakeResult](), timedelta(days=7)
    async with Engine([agent(sleeps), agent(asks, "asks")]) as engine:
        for n in range(3):
            await engine.run("napper", str(100 + n), journal=SqliteJournal(place, f"s{n}"))
        await engine.run("asks", journal=SqliteJournal(place, "q"))
        await waker(place, engine, told).once()
        early = len(told)
    async with Engine([agent(sleeps), agent(asks, "asks")], clock=ShiftedClock(week)) as engine:
        await waker(place, engine, told, week).once()
        woken = {one.run: one.result and one.result.output for one in told}
        told.clear()
        SqliteJournal(place, "q").mailbox().send(MailboxMessage(kind="answer", topic="q0", value="yes"))
        with open_wake_index(place) as index:
            assert index.wake_for_message("q", "answer")
        await waker(place, engine, told, week).once()

    assert 0 == early
    assert {f"s{n}": "woke" for n in range(3)} == woken
    assert [("q", "woken", RunStatus.COMPLETED)] == [(o.run, o.state, o.result and o.result.status) for o in told]
    assert [] == indexed(place)


class StoredElsewhere(LineJournal):
    """
    A journal in a store of another project, which has a folder for its wake times.
    """

    def __init__(self, store: dict[str, bytes], run: str, folder: Path) -> None:
        super().__init__()
        self.store, self.run, self.place = store, run, folder

    @property
    def name(self) -> str:
        return f"elsewhere/{self.run}"

    def read_bytes(self, start: int) -> bytes:
        return self.store.get(self.run, b"")[start:]

    def append_bytes(self, data: bytes, at: int) -> None:
        assert at == len(self.read_bytes(0))
        self.store[self.run] = self.read_bytes(0) + data

    def replace_bytes(self, data: bytes) -> None:
        self.store[self.run] = data

    def lock(self) -> Callable[[], None]:
        return lambda: None

    def get_mailbox_store(self) -> LineJournal:
        return StoredElsewhere(self.store, f"{self.run}/mail", self.place)

    def wake_place(self) -> WakePlace:
        return WakePlace(self.place, self.run, JournalsElsewhere(self.store, self.place))


class JournalsElsewhere(Mapping[str, Journal]):
    def __init__(self, store: dict[str, bytes], folder: Path) -> None:
        self.store, self.folder = store, folder

    def __getitem__(self, run: str) -> Journal:
        if run not in self.store:
            raise KeyError(run)
        return StoredElsewhere(self.store, run, self.folder)

    def __iter__(self) -> Iterator[str]:
        return iter([run for run in self.store if not run.endswith("/mail")])

    def __len__(self) -> int:
        return len(list(iter(self)))


@pytest.mark.spec("waiting:WT21")
async def test_waker_resumes_runs_of_a_store_of_another_project(tmp_path: Path) -> None:
    store, told, day = dict[str, bytes](), list[WakeResult](), timedelta(days=1)
    journals = JournalsElsewhere(store, tmp_path)
    async with Engine([agent(sleeps), agent(receives, "receiver")]) as engine:
        for run, handler in [("one", "napper"), ("two", "receiver"), ("three", "napper")]:
            journal = StoredElsewhere(store, run, tmp_path)
            await engine.run(handler, "7200" if handler == "napper" else "", journal=journal)
        assert ["one", "three", "two"] == [one.run for one in indexed(tmp_path)]
        (tmp_path / WAKING).unlink()  # it is rebuilt from the store
        send_message(journals["two"], "go", 7)
        await waker(tmp_path, engine, told, journals=journals).once()
        early = [(one.run, one.state, one.result and one.result.output) for one in told]
    del store["three"]
    told.clear()
    async with Engine([agent(sleeps)], clock=ShiftedClock(day)) as engine:
        await waker(tmp_path, engine, told, day, journals=journals).once()
    late = sorted([(one.run, one.state, one.result and one.result.output) for one in told], key=str)

    assert [("two", "woken", 7)] == early
    assert [("one", "woken", "woke"), ("three", "gone", None)] == late
    assert [] == indexed(tmp_path)


@pytest.mark.spec("waiting:WT21")
async def test_rebuilt_index_has_journals_of_any_file_name(tmp_path: Path) -> None:
    async with Engine([agent(sleeps)]) as engine:
        for name in ("one.jsonl", "two.journal", "three"):
            await engine.run("napper", "7200", journal=tmp_path / name)
        (tmp_path / "two.before-1.journal").write_bytes((tmp_path / "two.journal").read_bytes())
        (tmp_path / "notes.txt").write_text("not a journal")
        (tmp_path / "empty").touch()
        before = indexed(tmp_path)
        (tmp_path / WAKING).unlink()

    assert ["one.jsonl", "three", "two.journal"] == [one.run for one in before]
    assert before == indexed(tmp_path)


@pytest.mark.spec("waiting:WT21")
async def test_failing_run_is_retried_with_backoff_and_blocks_no_other(tmp_path: Path) -> None:
    place, told = tmp_path / "runs.db", list[WakeResult]()
    async with Engine([agent(sleeps), agent(sleeps, "lost")]) as engine:
        await engine.run("lost", "61", journal=SqliteJournal(place, "a"))
        await engine.run("napper", "62", journal=SqliteJournal(place, "b"))
    clock = StandingClock(timedelta(hours=1))
    async with Engine([agent(sleeps)], clock=clock) as engine:

        async def resume(journal: Journal, _: object) -> RunResult:
            return await engine.resume(journal)

        one = Waker(place, resume, tell=told.append, clock=clock)
        for _ in range(3):
            await one.once()
            clock.ahead += timedelta(hours=2)
    failed = [woken for woken in told if woken.state == "failed"]
    starts = [clock.begun + timedelta(hours=1 + 2 * n) for n in range(3)]
    pauses = [(w.again_at - s).total_seconds() for w, s in zip(failed, starts, strict=True) if w.again_at]

    assert ["b"] == [woken.run for woken in told if woken.state == "woken"]
    assert ["a"] * 3 == [woken.run for woken in failed]
    assert all("lost" in str(woken.error) for woken in failed)
    assert [5, 10, 20] == pauses


@pytest.mark.spec("waiting:WT21")
def test_journal_name_that_is_not_utf8_hinders_no_waking(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    odd = FileJournal(tmp_path / os.fsdecode(b"caf\xe9.jsonl"))
    with Engine([agent(asks)]) as engine:
        for journal in (FileJournal(tmp_path / "plain.jsonl"), odd):
            assert "suspended" == engine.run_sync("napper", journal=journal).status

        assert ["plain.jsonl"] == [one.run for one in indexed(tmp_path)]
        assert "is never woken: its file name is not UTF-8" in caplog.text
        assert "yes" == engine.resume_sync(odd, answers={"q0": "yes"}).output


@pytest.mark.spec("waiting:WT21")
async def test_wake_time_of_a_resumed_run_holds_though_tell_raises(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def naps(ctx: Any) -> Any:
        yield from Sleep(seconds=100)
        yield from Sleep(seconds=1_000)

    def tell(woken: WakeResult) -> None:
        raise OSError("no room for that line")

    place, clock = tmp_path / "runs.db", StandingClock(timedelta())
    async with Engine([agent(naps)], clock=clock) as engine:

        async def resume(journal: Journal, _: object) -> RunResult:
            return await engine.resume(journal)

        await engine.run("napper", journal=SqliteJournal(place, "a"))
        clock.ahead += timedelta(seconds=200)
        await Waker(place, resume, tell=tell, clock=clock).once()
    (slept,) = indexed(place)

    assert 1_000 == round((slept.wakes_at - clock.now()).total_seconds())
    assert ["run a: `tell` of the Waker raised OSError: no room for that line"] == [
        r.getMessage() for r in caplog.records
    ]


@pytest.mark.spec("waiting:WT21")
async def test_run_held_elsewhere_is_checked_again_within_a_minute(tmp_path: Path) -> None:
    """
    Whoever has it may be killed at any time.
    """
    told, clock = list[WakeResult](), ShiftedClock()

    async def resume(journal: Journal, _: object) -> RunResult:
        raise JournalLocked("somebody has it")

    with open_wake_index(tmp_path) as index:
        index.record_sleep("a.jsonl", clock.now(), ("time",), "napper")
    one = Waker(tmp_path, resume, tell=told.append, clock=clock)
    for _ in range(12):
        await one.once()
        clock.ahead += timedelta(minutes=1)

    assert ["held"] * 12 == [woken.state for woken in told]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
async def test_two_wakers_of_one_place_wake_each_run_once(tmp_path: Path) -> None:
    place, told, done = tmp_path / "runs.db", list[WakeResult](), list[str]()

    def handle(ctx: Any) -> Any:
        yield from Sleep(seconds=100)
        yield Perform(done.append, ctx.prompt)
        yield from Sleep(seconds=0.05)

    later = timedelta(hours=1)
    async with Engine([agent(handle)]) as engine:
        for n in range(4):
            await engine.run("napper", str(n), journal=SqliteJournal(place, f"r{n}"))
    async with Engine([agent(handle)], clock=ShiftedClock(later)) as engine:
        await asyncio.gather(*[waker(place, engine, told, later).once() for _ in range(2)])

    assert sorted(done) == [str(n) for n in range(4)]
    assert not [one for one in told if one.state == "failed"]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT21")
async def test_watching_waker_resumes_new_runs_and_ends_when_cancelled(tmp_path: Path) -> None:
    place, told = tmp_path / "runs.db", list[WakeResult]()
    clock = StandingClock()
    async with Engine([agent(receives), agent(sleeps, "sleeps")], clock=clock) as engine:
        await engine.run("napper", journal=SqliteJournal(place, "r"))
        task = asyncio.create_task(waker(place, engine, told, clock=clock).watch(0.02))
        await asyncio.sleep(0.08)
        assert [] == told
        await engine.send_message(SqliteJournal(place, "r"), "go", 1)
        await until(lambda: told)
        await engine.run("sleeps", "600", journal=SqliteJournal(place, "s"))
        await asyncio.sleep(0.08)
        assert 1 == len(told)
        clock.ahead = timedelta(seconds=600)
        await until(lambda: len(told) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert {("r", 1), ("s", "woke")} == {(one.run, one.result and one.result.output) for one in told}


@pytest.mark.spec("waiting:WT21")
async def test_run_of_a_stopped_waker_is_due_for_the_next(tmp_path: Path) -> None:
    place, told, begun = tmp_path / "runs.db", list[WakeResult](), threading.Event()

    async def slow() -> int:
        begun.set()
        await asyncio.sleep(30)
        return 1

    def handle(ctx: Any) -> Any:
        yield from Sleep(seconds=100)
        yield Perform.idempotent(slow)

    later = timedelta(hours=1)
    async with Engine([agent(handle)]) as engine:
        await engine.run("napper", journal=SqliteJournal(place, "r"))
    async with Engine([agent(handle)], clock=ShiftedClock(later)) as engine:
        task = asyncio.create_task(waker(place, engine, told, later).watch(0.1))
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    with open_wake_index(place) as index:
        assert ["r"] == [one.run for one in index.list_due(datetime.now(UTC) + later)]


@pytest.mark.spec("waiting:WT21")
async def test_clock_set_back_lets_a_run_sleep_again_without_looping(tmp_path: Path) -> None:
    """
    The waker's clock says that it is time; the engine's was set back. The run sleeps on, and is not resumed over and over.
    """
    place, told = tmp_path / "runs.db", list[WakeResult]()
    async with Engine([agent(sleeps)]) as engine:
        await engine.run("napper", "1000", journal=SqliteJournal(place, "r"))
    async with Engine([agent(sleeps)], clock=ShiftedClock(timedelta(hours=-5))) as engine:
        one = waker(place, engine, told, timedelta(hours=1))
        await one.once()
        await one.once()
    states = [(woken.state, woken.result and woken.result.status) for woken in told]

    assert [("woken", RunStatus.SUSPENDED)] == states
    assert told[0].again_at is not None


@pytest.mark.spec("waiting:WT21")
async def test_a_run_that_was_removed_is_forgotten(tmp_path: Path) -> None:
    place, told, later = tmp_path / "runs.db", list[WakeResult](), timedelta(hours=1)
    async with Engine([agent(sleeps)], clock=ShiftedClock()) as engine:
        await engine.run("napper", "100", journal=SqliteJournal(place, "r"))
        SqliteJournal(place, "r").discard()
        one = waker(place, engine, told, later)
        await one.once()

    assert ["gone"] == [woken.state for woken in told]
    assert [] == indexed(place)


KILLED = """
import asyncio, os, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from stepengine import *
from stepengine.engine.waker import Waker
from stepengine.journal import wake_index

place, log, point = sys.argv[1], sys.argv[2], sys.argv[3]

def effect(n):
    with open(log, "a") as file:
        file.write(f"{n}\\n")
    if point == "effect" and n == "1":
        os.kill(os.getpid(), 9)

def handle(ctx):
    yield from Sleep(seconds=70)
    yield Perform(effect, ctx.prompt)
    yield from Sleep(seconds=70)
    yield Perform(effect, ctx.prompt + "again")

class Clock:
    def now(self): return datetime.now(UTC) + timedelta(hours=float(sys.argv[4]))
    def now_ms(self): return int(asyncio.get_event_loop().time() * 1000)
    async def sleep(self, seconds): await asyncio.sleep(seconds)

agent = AgentDefinition("napper", handle_steps=handle)

async def main():
    async with Engine([agent], clock=Clock()) as engine:
        if point == "begin":
            for n in range(4):
                await engine.run("napper", str(n), journal=f"{place}#r{n}")
            return
        if point == "note":
            noted = wake_index.WakeIndex.record_sleep
            def note(self, *given):
                noted(self, *given)
                os.kill(os.getpid(), 9)
            wake_index.WakeIndex.record_sleep = note
        if point == "resume":
            postpone = wake_index.WakeIndex.postpone
            def killed(self, *given):
                postpone(self, *given)
                os.kill(os.getpid(), 9)
            wake_index.WakeIndex.postpone = killed
        async def resume(journal, one):
            return await engine.resume(journal, in_doubt="retry")
        await Waker(place, resume, clock=Clock(), at_once=1).once()

asyncio.run(main())
"""


@pytest.mark.deep
@pytest.mark.spec("waiting:WT21")
@pytest.mark.parametrize("point", ["note", "resume", "effect"])
def test_each_effect_happens_once_whenever_a_waker_is_killed(tmp_path: Path, point: str) -> None:
    """
    The waker is killed when it has put a run off, when a run is noted again before its suspension is durable, or in an effect.
    """
    place, log, script = tmp_path / "runs.db", tmp_path / "log", tmp_path / "waker.py"
    script.write_text(KILLED)

    def process(point: str, hours: float) -> int:
        done = subprocess.run(
            [sys.executable, str(script), str(place), str(log), point, str(hours)],
            check=False,
            timeout=120,
            env=os.environ | {"PYTHONWARNINGS": "ignore"},
        )
        return done.returncode

    assert 0 == process("begin", 0)
    codes = [process(point, hours) for hours in (1, 2)]
    assert -signal.SIGKILL in codes
    for hours in (3, 4, 5, 6, 7):
        assert 0 == process("work", hours)
    lines = log.read_text().split()
    once = 1 + (point == "effect" and codes.count(-signal.SIGKILL))

    assert {f"{n}{w}" for n in range(4) for w in ("", "again")} == set(lines)
    assert [] == [line for line in set(lines) if lines.count(line) != (once if line == "1" else 1)]
    assert [] == indexed(place)


@pytest.mark.spec("waiting:WT2")
async def test_message_written_during_suspension_makes_the_run_due(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_entry = run_end.find_wake_entry

    def waits(ctx: Any) -> Any:
        return (yield from Receive("go"))

    def disturbed(run: JournaledRun, *given: Any) -> Any:
        journal.mailbox().send(MailboxMessage(kind="message", topic="go", value=1, id="late"))
        run.mail.store_message(Message("late", "", "go", 1))
        return find_entry(run, *given)

    place = journal.path.parent if isinstance(journal, FileJournal) else journal.path
    indexed(place)
    monkeypatch.setattr(run_end, "find_wake_entry", disturbed)
    async with Engine([agent(waits)]) as engine:
        await engine.run("napper", journal=journal)
        monkeypatch.undo()
        with open_wake_index(place) as index:
            due = [one.run for one in index.list_due(datetime.now(UTC))]
        found = [one.wakes_at is not None for one in find_sleeping_runs(place)]
        result = await engine.resume(journal)

    assert 1 == len(due)
    assert [True] == found, "an index that is made anew knows it too"
    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("waiting:WT2")
async def test_message_to_an_unstarted_run_causes_no_repeated_wakeups(journal: Journal) -> None:
    def waits(ctx: Any) -> Any:
        return (yield from Receive("go"))

    place = journal.path.parent if isinstance(journal, FileJournal) else journal.path
    indexed(place)
    async with Engine([agent(waits)]) as engine:
        await engine.run("napper", journal=journal)
        journal.mailbox().send(MailboxMessage(kind="message", topic="go", value=1, path="7"))
        await engine.resume(journal)
        with open_wake_index(place) as index:
            assert [] == index.list_due(datetime.now(UTC))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT2", "waiting:WT21")
@pytest.mark.parametrize("journal", ["file", "database"], indirect=True)
async def test_received_message_neither_ends_the_next_wait_nor_wakes_again(journal: Journal) -> None:
    def receives_two(ctx: Any) -> Any:
        first = yield from Receive("go")
        second = yield from Receive("go")
        return [first, second]

    place = journal.path.parent if isinstance(journal, FileJournal) else journal.path
    indexed(place)
    async with Engine([agent(receives_two)]) as engine:
        await engine.run("napper", journal=journal)
        await engine.send_message(journal, "go", 1)
        for _ in range(2):
            waiting = await engine.resume(journal)
            assert RunStatus.SUSPENDED is waiting.status
            with open_wake_index(place) as index:
                assert [] == index.list_due(datetime.now(UTC))
                index.rebuild()
                assert [] == index.list_due(datetime.now(UTC))
        await engine.send_message(journal, "go", 2)
        result = await engine.resume(journal)

    assert [1, 2] == result.output


@pytest.mark.spec("waiting:WT21")
async def test_archived_and_damaged_runs_are_left_out_of_the_index(tmp_path: Path) -> None:
    async with Engine([agent(sleeps)]) as engine:
        await engine.run("napper", journal=tmp_path / "a.jsonl")
    content = (tmp_path / "a.jsonl").read_bytes()
    (tmp_path / "a.before-1.jsonl").write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(content[:100] + b"x" + content[100:])
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").mkdir()

    assert ["a.jsonl"] == [one.run for one in find_sleeping_runs(tmp_path)]


@pytest.mark.spec("waiting:WT2")
@pytest.mark.deep
async def test_posted_answer_reaches_waiting_and_suspended_questions_in_process(
    tmp_path: Path,
) -> None:
    """
    The first run keeps its question open in its process; the second suspends it while a sleep beside it continues.
    """

    def both(ctx: Any) -> Any:
        answer, _ = yield from Parallel(Ask("Ship it?", options=["yes", "no"]), Sleep(seconds=2))
        return str(answer)

    one, two = FileJournal(tmp_path / "1.jsonl"), FileJournal(tmp_path / "2.jsonl")
    async with Engine([agent(asks), agent(both, "both")]) as engine:
        async with engine.start("napper", journal=one, wait_for_answers=None) as handle:
            await until(lambda: handle.questions)
            await asyncio.to_thread(
                one.mailbox().send, MailboxMessage(kind="answer", topic=handle.questions[0].id, value="perhaps")
            )
            with pytest.raises(TimeoutError):  # that is not an option
                await asyncio.wait_for(handle.wait(), 1.5)
            letter = MailboxMessage(kind="answer", topic=handle.questions[0].id, value="yes")
            await asyncio.to_thread(one.mailbox().send, letter)
            result = await asyncio.wait_for(handle.result(), 50)
        async with engine.start("both", journal=two) as handle:
            await until(lambda: two.is_there() and find_open_questions(two.history()))
            await asyncio.to_thread(two.mailbox().send, MailboxMessage(kind="answer", topic="q0", value="no"))
            suspended = await handle.result()
        gone_on = await engine.resume(two)

    assert "yes" == str(result.output)
    assert any("was ignored" in warning for warning in result.warnings)
    assert RunStatus.SUSPENDED is suspended.status
    assert any("answer" == i.input.get("type") for i in two.history().inputs)
    assert RunStatus.COMPLETED is gone_on.status
    assert "no" in str(gone_on.output)


@pytest.mark.spec("waiting:WT2")
@pytest.mark.parametrize("journal", ["file", "database"], indirect=True)
async def test_answer_read_during_suspension_makes_the_run_due(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_entry, box = run_end.find_wake_entry, journal.mailbox()

    def disturbed(run: JournaledRun, *given: Any) -> Any:
        (question,) = find_open_questions(journal.history())
        box.send(MailboxMessage(kind="answer", topic=question, value="yes"))
        box.send(MailboxMessage(kind="message", topic="go", value=1, path="7"))
        run._early, run._place = [one for one in box.read()[0] if one.path], box.read()[1]
        return find_entry(run, *given)

    place = journal.path.parent if isinstance(journal, FileJournal) else journal.path
    indexed(place)
    monkeypatch.setattr(run_end, "find_wake_entry", disturbed)
    async with Engine([agent(asks)]) as engine:
        await engine.run("napper", journal=journal)
        monkeypatch.undo()
        with open_wake_index(place) as index:
            due = [one.run for one in index.list_due(datetime.now(UTC))]
        result = await engine.resume(journal)

    assert 1 == len(due)
    assert RunStatus.COMPLETED is result.status
