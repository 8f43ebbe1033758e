"""
`engine.stepper` and what walks by it, on runs that wait: children in the background, races, messages, times.

What each place has is compared with the record; what the walk comes to, with the run itself.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Cancel,
    Engine,
    Limits,
    Perform,
    Race,
    Receive,
    RunResult,
    RunStatus,
    Send,
    Sleep,
    Start,
    Wait,
)
from stepengine.debugging import debug
from stepengine.journal import Journal, MemoryJournal, diff
from stepengine.journal.records import Result, format_address
from stepengine.testing import ScriptedModel, text


def waiting(ctx: Any) -> Any:
    return (yield from Receive("never"))


def working(ctx: Any) -> Any:
    order = yield from Receive("order")
    kept = yield from Perform(int, order)
    yield from Sleep(0.001)
    return kept * 2


def shouting(ctx: Any) -> Any:
    said = yield from Perform(str, ctx.prompt)
    yield STEP
    return said.upper()


def leading(ctx: Any) -> Any:
    a, b, c = yield from Start(AgentCall("worker", "a"), AgentCall("shouter", "b"), AgentCall("waiter", "c"))
    yield from Send(a, 21, topic="order")
    won = yield from Race(Sleep(5), Perform(str, "won"), AgentCall("waiter", "d"))
    waited = yield from Wait(a, b)
    message = yield from Receive("go", timeout=5)
    gone = yield from Cancel(c, reason="enough")
    yield from Sleep(0.001)
    yield STEP
    return [waited[a].output, waited[b].output, message, gone.status.value, won[1]]


KIDS = [
    AgentDefinition("waiter", handle_steps=waiting),
    AgentDefinition("worker", handle_steps=working),
    AgentDefinition("shouter", model="m/x", handle_steps=shouting),
]
OUTPUT = [42, "B", {"n": 1}, "cancelled", "won"]


def leader(handle: Any = leading) -> AgentDefinition[Any]:
    return AgentDefinition("leader", model="m/x", spawnable_agents=KIDS, handle_steps=handle)


def engine_of(*agents: AgentDefinition[Any]) -> Engine:
    return Engine(agents or [leader()], models=ScriptedModel(lambda _: text("fine", cost="0.01")))


async def recorded(journal: Journal) -> RunResult:
    async with engine_of() as engine, engine.start("leader", "go", journal=journal) as handle:
        handle.send_message("go", {"n": 1})
        return await handle.result()


@pytest.fixture(params=["as it came", "in order of addresses"])
def journal(request: pytest.FixtureRequest) -> MemoryJournal:
    return MemoryJournal(stable=request.param != "as it came")


def ends_of(journal: Journal) -> list[str]:
    """
    The addresses of all results, that of the root run apart, as they stand in the journal.
    """
    results = [r for r in journal.history().records if type(r) is Result]
    return [format_address(r.path, r.seq) for r in results if (r.path, r.seq) != ("", -1)]


# --- the walk -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("evaluation:JG3", "waiting:WT4")
async def test_each_result_is_one_position_up_to_the_recorded_end(
    journal: MemoryJournal,
) -> None:
    result = await recorded(journal)

    with engine_of().stepper(journal) as stepper:
        moments = list(stepper.moments())
        finished = stepper.finished

    assert OUTPUT == result.output
    assert [*ends_of(journal), ""] == [moment.address for moment in moments]
    history = journal.history()
    for moment in moments[:-1]:
        assert moment.effect is not None
        path, _, seq = moment.address.rpartition("#")
        assert history.outcome(history.results[path, int(seq)]) == moment.outcome
    assert finished is not None
    assert (OUTPUT, RunStatus.COMPLETED) == (finished.output, finished.status)
    assert result.spending == finished.spending


@pytest.mark.spec("evaluation:JG3")
async def test_background_child_shows_its_own_variables(journal: MemoryJournal) -> None:
    await recorded(journal)

    with debug(engine_of(), journal) as one:
        inner = one.goto("0#2")
        assert ({"order": 21, "kept": 21}, "worker") == (
            {k: v for k, v in inner.frames[0].locals.items() if k != "ctx"},
            inner.agent_id,
        )
        assert "42" == one.evaluate("kept * 2")
        one.goto("0#-1")
        assert "the end of agent worker in the background" == one.moment().asked
        assert not one.moment().frames
        cancelled = one.goto("2#-1")
        assert "waiting" == cancelled.frames[0].function
        told = one.goto("#7")
        assert ["a", "b", "c", "ctx", "won"] == sorted(k for k in told.frames[0].locals if k != "self")
        one.move_to(one.places.follow_child("0", one.position))
        assert "0#" == one.moment().address[:2]
        one.places.followed_path = None
        assert "#0" == one.goto("#0").address


# --- ends that nobody waited for ------------------------------------------------------------------------------------


def below(ctx: Any) -> Any:
    yield STEP
    yield from Receive("never")


def between(ctx: Any) -> Any:
    yield from Start(AgentCall("below", "b"))
    yield from Perform(str, "m")
    yield from Receive("never")


def races(ctx: Any) -> Any:
    got = yield from Race(AgentCall("between", "m"), Sleep(0.05))
    return got[0]


def cancels(ctx: Any) -> Any:
    ref = yield from Start(AgentCall("between", "m"))
    yield from Sleep(0.05)
    return (yield from Cancel(ref)).status.value


def leaves(ctx: Any) -> Any:
    yield from Start(AgentCall("between", "m"))
    yield from Sleep(0.05)
    return "left"


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG3", "waiting:WT4")
@pytest.mark.parametrize("handle", [races, cancels, leaves])
async def test_work_ended_with_its_parent_has_its_recorded_price(handle: Any, journal: MemoryJournal) -> None:
    middle = AgentDefinition("between", spawnable_agents=["below"], handle_steps=between)
    agents = [
        AgentDefinition("leader", model="m/x", spawnable_agents=["between", "below"], handle_steps=handle),
        middle,
        AgentDefinition("below", model="m/x", handle_steps=below),
    ]
    async with engine_of(*agents) as engine:
        result = await engine.run("leader", "go", journal=journal, limits=Limits(max_steps=3))
        again = await engine.replay(journal)
        with engine.stepper(journal) as stepper:
            moments = list(stepper.moments())
            finished = stepper.finished

    assert len(ends_of(journal)) + 1 == len(moments)
    assert finished is not None
    assert (result.status, result.output, result.spending) == (finished.status, finished.output, finished.spending)
    assert again.status is result.status


async def test_suspended_run_ends_the_walk_at_its_wait() -> None:
    def parent(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("waiter", "w"))
        yield from Wait(ref)

    journal = MemoryJournal()
    async with engine_of(leader(parent)) as engine:
        result = await engine.run("leader", "go", journal=journal)
        with engine.stepper(journal) as stepper:
            moments = list(stepper.moments())

    assert RunStatus.SUSPENDED is result.status
    assert ["#0", "0#0"] == [moment.address for moment in moments]
    assert ("message on never", None) == (moments[-1].asked, moments[-1].outcome)


# --- what walks by it, and what tells the record --------------------------------------------------------------------


@pytest.mark.spec("replay:D13")
async def test_two_recordings_in_address_order_are_equal() -> None:
    first, again = MemoryJournal(stable=True), MemoryJournal(stable=True)
    for one in (first, again):
        await recorded(one)

    for path in ("0", "1", "2"):
        told = [address for address in ends_of(first) if address.startswith(f"{path}#")]
        assert f"{path}#-1" == told[-1]
    assert not [c for c in diff(first, again).changes if c.a not in ("#8", "")]
