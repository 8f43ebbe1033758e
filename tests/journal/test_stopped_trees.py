"""
Trees that are stopped from outside: a replay ends as the run did, whatever it waited for.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import (
    AgentCall,
    AgentDefinition,
    Cancel,
    Engine,
    Limits,
    Parallel,
    Perform,
    Race,
    RunResult,
    RunStatus,
    Sleep,
    Start,
    ToolCall,
    Wait,
    tool,
)
from stepengine.errors import LimitExceeded
from stepengine.events import AgentFinished, AgentSpawned
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel

SOON = 0.06
PATIENCE = 50
WAITS = ("call", "model", "child", "background", "sleep", "body", "group", "race", "failure", "return")
STOPS = ("limit", "interrupt", "grace", "shutdown")
PLACES = ("root", "body", "child", "background", "limited", "race", "ended")


class Silent(ScriptedModel):
    """A model that does not answer."""

    async def complete(self, request: Any) -> Any:
        await asyncio.sleep(PATIENCE * 2)

    async def stream(self, request: Any) -> Any:
        yield await self.complete(request)


@tool
async def hang() -> str:
    """Wait."""
    await asyncio.sleep(PATIENCE * 2)
    return ""


@tool
def hang_in_body() -> Any:
    """Wait in a body."""
    yield from ToolCall(hang)
    return ""


@tool
def start_in_body(waits: str, child_waits: str) -> Any:
    """Start a child in the background, and wait."""
    yield from start_and_wait(waits, child_waits)
    return ""


def wait(kind: str) -> Any:
    hanging = AgentCall("waits", params={"kind": "call"})
    match kind:
        case "call":
            yield from ToolCall(hang)
        case "model":
            yield from AgentCall("plain", "go")
        case "child":
            yield from hanging
        case "background":
            yield from Wait((yield from Start(hanging)))
        case "sleep":
            yield from Sleep(3600)
        case "body":
            yield from ToolCall(hang_in_body)
        case "group":
            yield from Parallel(ToolCall(hang), hanging, ToolCall(hang_in_body))
        case "race":
            yield from Race(ToolCall(hang), hanging, ToolCall(hang_in_body))
        case "failure":
            yield from Perform(asyncio.sleep, SOON / 2)
            msg = "the parent failed"
            raise ValueError(msg)
        case "return":
            yield from Perform(asyncio.sleep, SOON / 2)


def start_and_wait(waits: str, child_waits: str) -> Any:
    yield from Start(AgentCall("waits", params={"kind": child_waits}))
    yield from wait(waits)


def lead(ctx: Any) -> Any:
    place, given = ctx.params["place"], {name: ctx.params[name] for name in ("waits", "child_waits")}
    match place:
        case "root":
            yield from start_and_wait(**given)
        case "body":
            yield from ToolCall(start_in_body, given)
        case "race":
            yield from Race(ToolCall(start_in_body, given), Sleep(SOON / 2))
        case "ended":
            ref = yield from Start(AgentCall("starts", params=given))
            yield from Sleep(SOON / 2)
            yield from Cancel(ref, "enough")
        case "background":
            yield from Wait((yield from Start(AgentCall("starts", params=given))))
        case _:
            yield from AgentCall({"child": "starts"}.get(place, place), params=given)


def wait_as_asked(ctx: Any) -> Any:
    yield from wait(ctx.params["kind"])


def start_as_asked(ctx: Any) -> Any:
    yield from start_and_wait(**ctx.params)


def start_in_its_body(ctx: Any) -> Any:
    yield from ToolCall(start_in_body, ctx.params)


def agents(own_seconds: float = SOON) -> list[AgentDefinition[Any]]:
    """Return the agents; *own_seconds* is the time limit of the agent "limited"."""
    common: dict[str, Any] = {
        "tools": [hang, hang_in_body, start_in_body],
        "spawnable_agents": ["plain", "waits", "starts", "limited"],
    }
    limited = Limits(max_seconds=own_seconds)
    return [
        AgentDefinition("plain", model="test/m"),
        AgentDefinition("waits", handle_steps=wait_as_asked, **common),
        AgentDefinition("starts", handle_steps=start_as_asked, **common),
        AgentDefinition("limited", handle_steps=start_in_its_body, limits=limited, **common),
        AgentDefinition("lead", handle_steps=lead, **common),
    ]


async def run_and_replay(stop: str, *, own_seconds: float = SOON, **params: str) -> tuple[RunResult, RunResult]:
    """Return the result of a run that is stopped after a moment, and that of its replay."""
    journal = MemoryJournal()
    limits = Limits(max_seconds=SOON) if stop == "limit" else None
    async with asyncio.timeout(PATIENCE), Engine(agents(own_seconds), models=Silent()) as engine:
        handle = engine.start("lead", params=params, journal=journal, limits=limits)
        if stop != "limit":
            await asyncio.sleep(SOON)
        if stop == "shutdown":
            await handle.shutdown()
        elif stop != "limit":
            handle.interrupt(grace=SOON / 2 if stop == "grace" else 0)
        result = await handle.result()
        return result, await engine.replay(journal)


@pytest.mark.spec("waiting:WT3", "reliability:R6")
@pytest.mark.parametrize("place", ["root", "body", "child", "background"])
async def test_children_of_a_run_that_its_time_limit_stops_are_cancelled_live_and_in_a_replay(place: str) -> None:
    result, replayed = await run_and_replay("limit", place=place, waits="call", child_waits="call")

    assert isinstance(result.error, LimitExceeded)
    assert [(RunStatus.CANCELLED, None)] == [(child.status, child.error) for child in result.children]
    assert result == replayed


@pytest.mark.deep
@pytest.mark.spec("waiting:WT3", "waiting:WT5")
@settings(max_examples=25, deadline=None)
@given(
    stop=st.sampled_from(STOPS),
    place=st.sampled_from(PLACES),
    waits=st.sampled_from(WAITS),
    child_waits=st.sampled_from(WAITS),
)
def test_a_replay_has_the_result_of_a_tree_however_it_was_stopped_and_whatever_it_waited_for(
    stop: str, place: str, waits: str, child_waits: str
) -> None:
    result, replayed = asyncio.run(run_and_replay(stop, place=place, waits=waits, child_waits=child_waits))

    assert result == replayed


@pytest.mark.spec("reliability:R6")
async def test_an_interrupt_with_grace_ends_a_run_whose_child_comes_to_its_time_limit_in_that_time() -> None:
    result, replayed = await run_and_replay(
        "grace", own_seconds=SOON * 1.2, place="limited", waits="call", child_waits="call"
    )

    assert RunStatus.CANCELLED is result.status
    assert result == replayed


@pytest.mark.deep
@pytest.mark.spec("replay:D1")
async def test_a_replay_that_takes_longer_than_the_time_limit_of_the_run_ends_as_recorded() -> None:
    pause = 0.0

    def handle(ctx: Any) -> Any:
        for _ in range(3):
            yield from Perform(len, "x")
            time.sleep(pause)
        return "done"

    slow = AgentDefinition("slow", handle_steps=handle, limits=Limits(max_seconds=1))
    journal = MemoryJournal()
    async with Engine([slow]) as engine:
        result = await engine.run("slow", journal=journal)
        pause = 0.6
        replayed = await engine.replay(journal)

    assert "done" == result.output
    assert result == replayed


@pytest.mark.spec("waiting:WT3")
async def test_a_child_that_ended_when_the_time_of_its_parent_was_over_is_in_the_result() -> None:
    def block(event: Any) -> None:
        # The loop cannot turn meanwhile, so that the end of the child and that of the time arrive together.
        if isinstance(event, AgentFinished):
            time.sleep(SOON * 2)

    def cancels(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("waits", params={"kind": "call"}))
        yield from Cancel(ref, "enough")

    journal = MemoryJournal()
    lead = AgentDefinition("cancels", handle_steps=cancels, spawnable_agents=["waits"], limits=Limits(max_seconds=SOON))
    async with Engine([lead, *agents()], models=Silent(), observers=[block]) as engine:
        result = await engine.run(lead, journal=journal)
        replayed = await engine.replay(journal)

    assert isinstance(result.error, LimitExceeded)
    assert ["enough"] == [str(child.error) for child in result.children]
    assert result == replayed


@pytest.mark.spec("waiting:WT3", "reliability:R6")
async def test_a_child_whose_start_takes_longer_than_the_time_of_its_parent_does_not_start() -> None:
    def block(event: Any) -> None:
        if isinstance(event, AgentSpawned):
            time.sleep(SOON * 2)

    def starts(ctx: Any) -> Any:
        yield from Start(AgentCall("waits", params={"kind": "call"}))

    journal = MemoryJournal()
    parent = AgentDefinition("parent", handle_steps=starts, spawnable_agents=["waits"], limits=Limits(max_seconds=SOON))
    async with Engine([parent, *agents()], models=Silent(), observers=[block]) as engine:
        result = await engine.run(parent, journal=journal)
        replayed = await engine.replay(journal)

    assert isinstance(result.error, LimitExceeded)
    assert () == tuple(result.children)
    assert result == replayed
