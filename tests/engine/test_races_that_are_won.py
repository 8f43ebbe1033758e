"""
Which member of a race has won, and what becomes of the others; where the rest of the tree waits, nobody is suspended for that.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Decision,
    Engine,
    Hooks,
    Parallel,
    Perform,
    Race,
    Receive,
    RunStatus,
    Sleep,
    Start,
    ToolCall,
    tool,
)
from stepengine.events import WaitStarted
from stepengine.journal import MemoryJournal
from stepengine.testing import Clock, ScriptedModel, text


def mail_steps(ctx: Any) -> Any:
    yield STEP
    yield from Receive("more")


def nap_steps(ctx: Any) -> Any:
    yield from Sleep(4000)


async def soon() -> str:
    return "soon"


mail = AgentDefinition("mail", model="t/m", handle_steps=mail_steps)
nap = AgentDefinition("nap", handle_steps=nap_steps)


@pytest.mark.spec("waiting:WT5", "waiting:WT20")
@pytest.mark.parametrize("loser", [Sleep(4000), Receive("stop"), AgentCall(nap)], ids=["sleep", "receive", "child"])
async def test_child_beside_an_answered_race_is_not_suspended(loser: Any) -> None:
    def handle_steps(ctx: Any) -> Any:
        yield from Start(AgentCall(mail, "go"))
        return (yield from Race(Ask("Go?", options=("yes", "no")), loser))

    lead = AgentDefinition("lead", handle_steps=handle_steps, spawnable_agents=[mail, nap])
    journal = MemoryJournal()
    async with Engine([lead], models=ScriptedModel([text("hello")]), pricing=None, clock=Clock(waits=True)) as engine:
        question = (await engine.run(lead, journal=journal)).pending_questions[0]
        result = await engine.resume(journal, answers={question.id: "yes"})
        replayed = await engine.replay(journal)

    assert (0, "yes") == result.output
    assert ["hello"] == [child.text for child in result.children if child.agent_id == "mail"]
    assert result == replayed


@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize(
    ("race", "expected"),
    [
        (lambda: Race(Sleep(4000), Race(Perform(soon), Sleep(4000))), (1, (0, "soon"))),
        (lambda: Race(Race(Sleep(4000), Sleep(3000)), Race(Sleep(2000), Perform(soon))), (1, (1, "soon"))),
    ],
    ids=["beside a wait", "beside another race"],
)
async def test_nested_race_wins_when_one_of_its_members_is_first(race: Any, expected: Any) -> None:
    def handle_steps(ctx: Any) -> Any:
        return (yield from race())

    journal = MemoryJournal()
    async with Engine([AgentDefinition("lead", handle_steps=handle_steps)], clock=Clock(waits=True)) as engine:
        result = await engine.run("lead", journal=journal)
        replayed = await engine.replay(journal)

    assert expected == result.output
    assert result == replayed


@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize("depth", [1, 2])
async def test_a_call_that_a_hook_denies_ends_its_race(depth: int) -> None:
    @tool
    def look() -> str:
        """Look."""
        return "seen"

    def deny(ctx: Any, call: Any) -> Decision:
        return Decision.deny("not now")

    def handle_steps(ctx: Any) -> Any:
        race: Any = ToolCall("look", {})
        for _ in range(depth):
            race = Race(Sleep(4000), race)
        number, value = yield from race
        return [number, value.status if depth == 1 else [value[0], value[1].status]]

    lead = AgentDefinition("lead", handle_steps=handle_steps, tools=[look], hooks=Hooks(pre_tool=[deny]))
    async with Engine([lead], clock=Clock(waits=True)) as engine:
        result = await engine.run("lead")

    assert ([1, "denied"] if depth == 1 else [1, [1, "denied"]]) == result.output


@pytest.mark.spec("waiting:WT5")
async def test_message_that_loses_a_race_stays_for_the_next_receiver() -> None:
    """It is received once then, also by whoever resumes the run after that."""
    handles: list[Any] = []

    async def work() -> str:
        await asyncio.sleep(0)
        handles[0].send_message("mail", "hello")
        return "worked"

    def handle_steps(ctx: Any) -> Any:
        _, first = yield from Race(Perform(work), Receive("mail"))
        second = yield from Receive("mail", timeout=5)
        yield from Ask("Go?")
        third = yield from Receive("mail", timeout=0)
        return [first, second, third]

    journal = MemoryJournal()
    async with Engine([AgentDefinition("lead", handle_steps=handle_steps)]) as engine:
        handles.append(engine.start("lead", journal=journal))
        question = (await handles[0].result()).pending_questions[0]
        result = await engine.resume(journal, answers={question.id: "yes"})
        replayed = await engine.replay(journal)

    assert ["worked", "hello", None] == result.output
    assert result == replayed


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize("is_sent_before", [True, False])
@given(timeouts=st.lists(st.sampled_from([None, 60, 3600]), min_size=2, max_size=5))
async def test_losing_messages_keep_their_order(is_sent_before: bool, timeouts: list[float | None]) -> None:
    numbers = [*range(len(timeouts) + 1)]

    def handle_steps(ctx: Any) -> Any:
        yield from Receive("start")
        _, first = yield from Race(*[Receive("mail", timeout=timeout) for timeout in timeouts])
        others: list[Any] = []
        for _ in timeouts:
            others += [(yield from Receive("mail"))]
        return [first, others]

    waits, all_wait = list[Any](), asyncio.Event()

    def note(event: Any) -> None:
        if isinstance(event, WaitStarted) and event.topic == "mail":
            waits.append(event)
            if len(waits) == len(timeouts):
                all_wait.set()

    agent = AgentDefinition("lead", handle_steps=handle_steps)
    async with asyncio.timeout(50), Engine([agent], observers=[note]) as engine:
        handle = engine.start("lead")
        if not is_sent_before:
            handle.send_message("start", None)
            await all_wait.wait()
        for number in numbers:
            handle.send_message("mail", number)
        handle.send_message("start", None)
        first, others = (await handle.result()).unwrap()

    assert sorted(others) == others
    assert numbers == sorted([first, *others])


@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_all_members_of_a_race_begin_together_despite_the_window(concurrency: int) -> None:
    """
    The first in order does not keep the others from being faster.
    """

    def handle_steps(ctx: Any) -> Any:
        races = [Race(Sleep(3), Race(Sleep(2), Perform(soon))) for _ in range(3)]
        found = yield from Parallel(*races, concurrency=concurrency)
        return [value for _, value in found]

    journal = MemoryJournal()
    async with Engine([AgentDefinition("lead", handle_steps=handle_steps)], clock=Clock(waits=True)) as engine:
        result = await asyncio.wait_for(engine.run("lead", journal=journal), 50)
        replayed = await engine.replay(journal)

    assert [(1, "soon")] * 3 == result.output
    assert result == replayed


@pytest.mark.spec("waiting:WT5")
async def test_background_child_of_a_losing_tool_is_cancelled() -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    def works(ctx: Any) -> Any:
        yield from Perform.idempotent(slow)

    @tool
    def starts() -> Any:
        """Start a child in the background."""
        yield from Start(AgentCall("works"))
        yield from Perform.idempotent(slow)

    def handle_steps(ctx: Any) -> Any:
        return (yield from Race(ToolCall(starts), Perform(asyncio.sleep, 0.02)))[0]

    agents = [
        AgentDefinition("works", handle_steps=works),
        AgentDefinition("lead", handle_steps=handle_steps, tools=[starts], spawnable_agents=["works"]),
    ]
    journal = MemoryJournal()
    async with Engine(agents, models=ScriptedModel([])) as engine:
        result = await engine.run("lead", journal=journal)
        replayed = await engine.replay(journal)

    assert 1 == result.output
    assert [(RunStatus.CANCELLED, None)] == [(child.status, child.error) for child in result.children]
    assert result == replayed


def asks_steps(ctx: Any) -> Any:
    return (yield from Ask("Go?"))


@tool
def asks_in_a_child() -> Any:
    """Start a child that asks."""
    return (yield from AgentCall("asks")).status.value


@pytest.mark.spec("waiting:WT5")
@pytest.mark.parametrize("loser", [AgentCall("asks"), ToolCall(asks_in_a_child)], ids=["child", "child of a body"])
async def test_member_suspended_before_its_race_is_won_is_cancelled(loser: Any) -> None:
    def handle_steps(ctx: Any) -> Any:
        return (yield from Race(loser, Perform(asyncio.sleep, 0.02)))[0]

    agents = [
        AgentDefinition("asks", handle_steps=asks_steps),
        AgentDefinition("lead", handle_steps=handle_steps, tools=[asks_in_a_child], spawnable_agents=["asks"]),
    ]
    journal = MemoryJournal()
    async with Engine(agents, models=ScriptedModel([])) as engine:
        result = await engine.run("lead", journal=journal)
        replayed = await engine.replay(journal)

    assert (RunStatus.COMPLETED, 1) == (result.status, result.output)
    assert [(RunStatus.CANCELLED, ())] == [(child.status, child.questions) for child in result.children]
    assert () == result.pending_questions
    assert result == replayed
