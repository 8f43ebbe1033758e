"""
Trees that are stopped from outside: a replay ends as the run did, whatever it waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from tests.loop_clock import put_clock_ahead

SOON = 0.06
HOUR = 3600
PATIENCE = 50
WAITS = ("call", "model", "child", "background", "sleep", "body", "group", "race", "failure", "return")
STOPS = ("limit", "interrupt", "grace", "shutdown")
PLACES = ("root", "body", "child", "background", "limited", "race", "ended")


class Silent(ScriptedModel):
    """A model that does not answer."""

    async def complete(self, request: Any) -> Any:
        await asyncio.Event().wait()

    async def stream(self, request: Any) -> Any:
        yield await self.complete(request)


HANGING: list[asyncio.Event] = []
"""What calls of ``hang`` wait for."""


@tool
async def hang() -> str:
    """Wait."""
    HANGING.append(asyncio.Event())
    await HANGING[-1].wait()
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


def agents(seconds: float) -> list[AgentDefinition[Any]]:
    """Return the agents; *seconds* is the time limit of the agent "limited"."""
    common: dict[str, Any] = {
        "tools": [hang, hang_in_body, start_in_body],
        "spawnable_agents": ["plain", "waits", "starts", "limited"],
    }
    limited = Limits(max_seconds=seconds)
    return [
        AgentDefinition("plain", model="test/m"),
        AgentDefinition("waits", handle_steps=wait_as_asked, **common),
        AgentDefinition("starts", handle_steps=start_as_asked, **common),
        AgentDefinition("limited", handle_steps=start_in_its_body, limits=limited, **common),
        AgentDefinition("lead", handle_steps=lead, **common),
    ]


async def run_and_replay(stop: str, **params: str) -> tuple[RunResult, RunResult]:
    """Return the result of a run that is stopped after a moment, wherever it is then, and that of its replay."""
    journal = MemoryJournal()
    limits = Limits(max_seconds=SOON) if stop == "limit" else None
    async with asyncio.timeout(PATIENCE), Engine(agents(SOON), models=Silent()) as engine:
        handle = engine.start("lead", params=params, journal=journal, limits=limits)
        if stop != "limit":
            await asyncio.sleep(SOON)
        if stop == "shutdown":
            await handle.shutdown()
        elif stop != "limit":
            handle.interrupt(grace=SOON / 2 if stop == "grace" else 0)
        result = await handle.result()
        return result, await engine.replay(journal)


@asynccontextmanager
async def hanging_run(place: str, seconds: float, limits: Limits | None = None) -> AsyncIterator[tuple[Engine, Any]]:
    """Yield a run and its engine when two calls of it hang, one of them of a child in the background."""
    HANGING.clear()
    async with Engine(agents(seconds), models=Silent()) as engine:
        params = {"place": place, "waits": "call", "child_waits": "call"}
        handle = engine.start("lead", params=params, journal=MemoryJournal(), limits=limits)
        while len(HANGING) < 2:  # noqa: ASYNC110 - a tool of this module has no event of a test
            await asyncio.sleep(0.001)
        yield engine, handle


@pytest.mark.spec("waiting:WT3", "reliability:R6")
@pytest.mark.parametrize("place", ["root", "body", "child", "background"])
async def test_children_are_cancelled_when_their_run_times_out(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hanging_run(place, 9 * HOUR, Limits(max_seconds=HOUR)) as (engine, handle):
        put_clock_ahead(monkeypatch, 2 * HOUR)
        result = await handle.result()
        replayed = await engine.replay(result.journal)

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
def test_replay_equals_the_result_of_any_stopped_tree(stop: str, place: str, waits: str, child_waits: str) -> None:
    result, replayed = asyncio.run(run_and_replay(stop, place=place, waits=waits, child_waits=child_waits))

    assert result == replayed


@pytest.mark.spec("reliability:R6")
async def test_interrupt_with_grace_ends_despite_a_childs_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hanging_run("limited", HOUR) as (engine, handle):
        handle.interrupt(grace=9 * HOUR)
        await asyncio.sleep(0)  # it is interrupted in the next turn of the loop
        put_clock_ahead(monkeypatch, 2 * HOUR)
        result = await handle.result()
        replayed = await engine.replay(result.journal)

    assert RunStatus.CANCELLED is result.status
    assert result == replayed


@pytest.mark.spec("replay:D1")
async def test_slow_replay_ignores_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    is_slow = False

    def handle(ctx: Any) -> Any:
        for _ in range(3):
            yield from Perform(len, "x")
            if is_slow:
                put_clock_ahead(monkeypatch, 2 * HOUR)
        return "done"

    slow = AgentDefinition("slow", handle_steps=handle, limits=Limits(max_seconds=HOUR))
    journal = MemoryJournal()
    async with Engine([slow]) as engine:
        result = await engine.run("slow", journal=journal)
        is_slow = True
        replayed = await engine.replay(journal)

    assert "done" == result.output
    assert result == replayed


@pytest.mark.spec("waiting:WT3")
async def test_child_finished_at_the_parents_timeout_is_in_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def block(event: Any) -> None:
        # The loop does not turn meanwhile, so that the end of the child and that of the time arrive together.
        if isinstance(event, AgentFinished):
            put_clock_ahead(monkeypatch, 2 * HOUR)

    def cancels(ctx: Any) -> Any:
        ref = yield from Start(AgentCall("waits", params={"kind": "call"}))
        yield from Cancel(ref, "enough")

    journal = MemoryJournal()
    lead = AgentDefinition("cancels", handle_steps=cancels, spawnable_agents=["waits"], limits=Limits(max_seconds=HOUR))
    async with Engine([lead, *agents(SOON)], models=Silent(), observers=[block]) as engine:
        result = await engine.run(lead, journal=journal)
        replayed = await engine.replay(journal)

    assert isinstance(result.error, LimitExceeded)
    assert ["enough"] == [str(child.error) for child in result.children]
    assert result == replayed


@pytest.mark.spec("waiting:WT3", "reliability:R6")
async def test_child_started_after_the_parents_timeout_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def block(event: Any) -> None:
        if isinstance(event, AgentSpawned):
            put_clock_ahead(monkeypatch, 2 * HOUR)

    def starts(ctx: Any) -> Any:
        yield from Start(AgentCall("waits", params={"kind": "call"}))

    journal = MemoryJournal()
    parent = AgentDefinition("parent", handle_steps=starts, spawnable_agents=["waits"], limits=Limits(max_seconds=HOUR))
    async with Engine([parent, *agents(SOON)], models=Silent(), observers=[block]) as engine:
        result = await engine.run(parent, journal=journal)
        replayed = await engine.replay(journal)

    assert isinstance(result.error, LimitExceeded)
    assert () == tuple(result.children)
    assert result == replayed
