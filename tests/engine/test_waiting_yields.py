"""
Sleep, children in the background and races: what a handler gets of them, and what is left of them after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Cancel,
    Engine,
    Perform,
    Race,
    Receive,
    RunStatus,
    Send,
    Sleep,
    Start,
    Wait,
)
from stepengine.errors import AgentError, BadYield
from stepengine.journal import FileJournal, MemoryJournal, SqliteJournal
from stepengine.testing import Clock

HOUR = timedelta(hours=1)


def agent(handle: Any, *children: AgentDefinition[Any], id: str = "lead") -> AgentDefinition[Any]:
    return AgentDefinition(id, handle_steps=handle, spawnable_agents=children)


def listens(ctx: Any) -> Any:
    return (yield from Receive("go"))


def asks(ctx: Any) -> Any:
    return (yield from Ask("Go?", options=("yes", "no")))


def fails(ctx: Any) -> Any:
    yield from Receive("go")
    msg = "no"
    raise ValueError(msg)


def sleeps(ctx: Any) -> Any:
    yield from Sleep(HOUR)


sleeping = agent(sleeps, id="sleeping")
first, second = agent(listens, id="first"), agent(listens, id="second")
failing, asking = agent(fails, id="failing"), agent(asks, id="asking")


# --- Sleep ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT1")
async def test_sleep_keeps_its_date_across_resumes_and_reports_its_delay() -> None:
    def handle(ctx: Any) -> Any:
        yield from Sleep(HOUR)
        return (yield from Sleep(until=ctx.now() - timedelta(minutes=1))).isoformat()

    clock, journal, lead = Clock(waits=True), MemoryJournal(), agent(handle)
    begun = clock.now()
    async with Engine([lead], clock=clock) as engine:
        wakes = [(await engine.run(lead, journal=journal)).wakes_at]
        for _ in range(2):
            clock.advance(minutes=20)
            wakes.append((await engine.resume(journal)).wakes_at)
        clock.advance(minutes=50)
        result = await engine.resume(journal)
        replayed = await engine.replay(journal)

    assert [begun + HOUR] * 3 == wakes
    assert (begun + timedelta(minutes=90)).isoformat() == result.output
    assert result == replayed


@pytest.mark.spec("waiting:WT1")
@pytest.mark.parametrize(
    "given",
    [
        {"seconds": -1},
        {"until": datetime(2026, 3, 2)},  # noqa: DTZ001
        {},
        {"seconds": 1, "until": datetime(2026, 3, 2)},  # noqa: DTZ001
        {"until": datetime.max.replace(tzinfo=UTC)},
        {"until": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
    ],
    ids=["negative", "naive", "neither", "both", "the end of the calendar", "that elsewhere"],
)
async def test_sleep_without_a_valid_time_is_refused_at_the_yield(given: Any) -> None:
    def handle(ctx: Any) -> Any:
        try:
            yield from Sleep(**given)
        except BadYield:
            return "refused"

    lead = agent(handle)
    async with Engine([lead], clock=Clock()) as engine:
        assert "refused" == (await engine.run(lead)).output


# --- children in the background -------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT3", "waiting:WT4")
async def test_children_are_reported_in_order_of_completion_on_replay_too() -> None:
    def handle(ctx: Any) -> Any:
        one, two, three = yield from Start(AgentCall(first), AgentCall(second), AgentCall(failing))
        told = [(yield from Send(two, 2, topic="go"))]
        yield from Wait(two)
        yield from Send(three, 3, topic="go")
        yield from Wait(three)
        told.append((yield from Send(two, 4, topic="go")))
        told.append((yield from Send(one, 1, topic="go")))
        waited = yield from Wait(one, two, three)
        again = yield from Wait(two, one, three)
        assert again == waited
        return [told, [child.agent_id for child in waited.done], [child.status.value for child in waited.done]]

    lead, journal = agent(handle, first, second, failing), MemoryJournal()
    # A clock by which time passes, so that no two of them end at once.
    async with Engine([lead], clock=Ticking()) as engine:
        result = await engine.run(lead, journal=journal)
        replayed = await engine.replay(journal)

    expected = [[True, False, True], ["second", "failing", "first"], ["completed", "failed", "completed"]]
    assert expected == result.output
    assert result == replayed


class Ticking(Clock):
    """A clock by which a millisecond passes whenever it is read."""

    def now_ms(self) -> int:
        self.advance(seconds=0.001)
        return super().now_ms()


@pytest.mark.spec("waiting:WT3")
@pytest.mark.parametrize("how", ["returns", "fails"])
@pytest.mark.parametrize("kind", [MemoryJournal, FileJournal, SqliteJournal])
async def test_children_at_work_end_with_their_parent(how: str, kind: Any, tmp_path: Path) -> None:
    def handle(ctx: Any) -> Any:
        # A journal in a file takes a moment for each of them, in which every other run there is may wait.
        for child in (sleeping, asking, sleeping):
            yield from Start(AgentCall(child))
        yield from Perform(len, "x")
        if how == "fails":
            msg = "no"
            raise ValueError(msg)
        return "done"

    lead, journal = agent(handle, sleeping, asking), kind(*[tmp_path / "run"] * (kind is not MemoryJournal))
    async with Engine([lead]) as engine:
        result = await engine.run(lead, journal=journal)

    assert result.status is (RunStatus.COMPLETED if how == "returns" else RunStatus.FAILED)
    assert [RunStatus.CANCELLED] * 3 == [child.status for child in result.children]
    assert () == result.pending_questions == result.waits_for
    assert {"0", "1", "2"} == {path for path, seq in journal.history().results if seq == -1 and path}


@pytest.mark.spec("waiting:WT3")
async def test_returning_parent_waits_for_children_unless_told_to_cancel() -> None:
    def handle(ctx: Any) -> Any:
        kept = yield from Start(AgentCall(first), on_return="wait")
        other = yield from Start(AgentCall(second))
        ended = yield from Cancel(other, "enough")
        yield from Send(kept, "late", topic="go")
        return [ended.status.value, str(ended.error)]

    lead = agent(handle, first, second)
    async with Engine([lead], clock=Clock(waits=True)) as engine:
        result = await engine.run(lead)

    assert ["cancelled", "enough"] == result.output
    assert {"first": "late", "second": None} == {child.agent_id: child.output for child in result.children}


async def test_only_the_run_that_started_a_child_may_cancel_it() -> None:
    def handle(ctx: Any) -> Any:
        kept = yield from Start(AgentCall(second))
        with pytest.raises(
            AgentError, match=r"was not started in the background by this run.* Started here: 'second' at"
        ):
            yield from Cancel(attrs.evolve(kept, path="7"))
        return (yield from Cancel(kept)).status.value

    async with Engine([agent(handle, second)], clock=Clock(waits=True)) as engine:
        result = await engine.run("lead")

    assert "cancelled" == result.output


@pytest.mark.spec("waiting:WT3")
async def test_replay_counts_no_child_stopped_before_it_began() -> None:
    begun = asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)

    def handle(ctx: Any) -> Any:
        yield from Perform(stubborn)
        yield from AgentCall(first)

    def start(ctx: Any) -> Any:
        yield from Start(AgentCall(kid))
        yield from Perform(begun.wait)

    kid = agent(handle, first, id="kid")
    lead, journal = agent(start, kid), MemoryJournal()
    async with Engine([lead]) as engine:
        result = await engine.run(lead, journal=journal)
        replayed = await engine.replay(journal)

    assert result.spending.by_agent.keys() == {"lead", "kid"} == replayed.spending.by_agent.keys()
    assert result == replayed


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT5")
async def test_race_starts_all_members_before_the_run_counts_as_waiting(
    tmp_path: Path,
) -> None:
    """
    The process died when only the sleeper had begun. The others begin now, and a journal in a file takes a moment for that.
    """

    def rests(ctx: Any) -> Any:
        yield from Perform(len, "")
        yield from Perform(len, "")
        yield from Sleep(HOUR)

    def handle(ctx: Any) -> Any:
        yield from Start(AgentCall(child))  # comes to rest when the others are about to begin
        yield from Perform(asyncio.sleep, 0.1)
        return (yield from Race(Sleep(HOUR), Perform(len, "abc")))[0]

    child = agent(rests, id="child")
    lead, path = agent(handle, child), tmp_path / "run.jsonl"
    async with Engine([lead]) as engine:
        assert 1 == (await engine.run(lead, journal=path)).output
        lines = path.read_bytes().splitlines(keepends=True)
        begun = [n for n, line in enumerate(lines) if b'"wake_time"' in line][1]
        path.write_bytes(b"".join(lines[: begun + 1]))
        result = await engine.resume(path)

    history = FileJournal(path).history()
    assert (RunStatus.COMPLETED, 1) == (result.status, result.output)
    # Who is suspended has no result, also where the run goes on then.
    assert {("0", 2)} == history.intents.keys() - history.results.keys()


@pytest.mark.spec("waiting:WT5")
async def test_loser_of_a_race_is_not_repeated_after_any_crash() -> None:
    """
    The record is cut after each of its lines behind the winner's result, as a crash leaves it.
    """
    begun: list[str] = []

    async def slow(name: str) -> str:
        begun.append(name)
        await asyncio.sleep(60)
        return name

    def handle(ctx: Any) -> Any:
        won = yield from Race(Perform.idempotent(slow, "loser"), AgentCall(second), Perform(len, "four"))
        yield from Perform.idempotent(len, "x")
        return won

    lead, journal = agent(handle, second), MemoryJournal()
    async with Engine([lead]) as engine:
        result = await engine.run(lead, journal=journal)
    won_at = next(n for n, line in enumerate(journal.lines()) if b'"kind":"result"' in line and b'"seq":2' in line)
    for cut in range(won_at + 1, len(journal.lines())):
        begun.clear()
        async with Engine([lead]) as engine:
            again = await engine.resume(MemoryJournal(journal.lines()[:cut]))
        assert (2, 4) == result.output == again.output
        assert [] == begun
        assert [RunStatus.CANCELLED] == [child.status for child in again.children]


@pytest.mark.spec("waiting:WT37")
async def test_receive_without_any_possible_sender_fails_with_the_remedy() -> None:
    result = await Engine([first]).run("first")

    assert (RunStatus.FAILED, ()) == (result.status, tuple(result.waits_for))
    assert "Receive('go') waits for a message that cannot be sent" in str(result.error)
    assert "journal=FileJournal(...)" in str(result.error)
    assert "handle.send_message('go', value)" in str(result.error)


@pytest.mark.spec("waiting:WT37")
async def test_child_without_any_possible_sender_fails_and_informs_its_parent() -> None:
    def starts(ctx: Any) -> Any:
        ref = yield from Start(AgentCall(first))
        waited = yield from Wait(ref)
        return [str(child.error) for child in waited.done]

    result = await Engine([agent(starts, first)]).run("lead")

    assert RunStatus.COMPLETED is result.status
    assert "of the run '0' waits for a message that cannot be sent" in str(result.output)


@pytest.mark.spec("waiting:WT37")
async def test_message_from_a_parent_or_handle_arrives_without_a_journal() -> None:
    def tells(ctx: Any) -> Any:
        ref = yield from Start(AgentCall(first))
        yield from Send(ref, "now", topic="go")
        waited = yield from Wait(ref)
        return [child.output for child in waited.done]

    engine = Engine([agent(tells, first), second])
    told = await engine.run("lead")
    handle = engine.start("second")
    handle.send_message("go", "later")

    assert (["now"], "later") == (told.output, (await handle.result()).output)


@pytest.mark.spec("waiting:WT37")
async def test_receiving_run_that_also_asks_a_question_is_suspended() -> None:
    def starts(ctx: Any) -> Any:
        yield from Start(AgentCall(first))
        return (yield from asks(ctx))

    result = await Engine([agent(starts, first)]).run("lead")

    assert RunStatus.SUSPENDED is result.status
