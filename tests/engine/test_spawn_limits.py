"""
Many children: what is reserved before they start, what they leave behind, and what stops them.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from random import Random
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Limits,
    ModelSettings,
    Parallel,
    Perform,
    RunStatus,
    Start,
    ToolCall,
    Usage,
    Wait,
    tool,
)
from stepengine.data.estimate import estimate_tokens
from stepengine.errors import ChildError, InputError, LimitExceeded
from stepengine.events import AgentFinished, AgentSpawned, RunStarted
from stepengine.journal import MemoryJournal, check
from stepengine.models import ModelReply, Provider
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import agent_tool, spawn_tools, task_tool
from tests.loop_clock import put_clock_ahead


def quick(ctx):
    return ctx.prompt
    yield


QUICK = AgentDefinition("quick", handle_steps=quick)


def entries(count: int, agent: str = "quick") -> dict[str, Any]:
    return {"agents": [{"agent_type": agent, "prompt": str(i)} for i in range(count)]}


@pytest.mark.spec("reliability:SP02", "generator-contract:L3", "reliability:I8")
@pytest.mark.parametrize("way", ["model", "handler"])
async def test_hundred_requested_children_are_cut_to_the_tree_limit(way):
    def handle(ctx):
        yield STEP

    agent = AgentDefinition(
        "boss",
        model="test/m",
        tools=spawn_tools(),
        spawnable_agents=[QUICK],
        handle_steps=None if way == "model" else handle,
    )
    scripted = ScriptedModel([tool_call("spawn_agents", entries(100)), text("end")])
    limits = Limits(max_children=100, max_total_children=37)
    events = [event async for event in Engine([agent], models=scripted).stream("boss", "go", limits=limits)]
    result = events[-1].result
    started = [e.path for e in events if isinstance(e, RunStarted) and e.path]

    assert 37 == len(started) == sum(not c.is_error for c in result.children)
    assert 100 == len(result.children)
    assert ["completed"] * 37 + ["failed"] * 63 == [c.status.value for c in result.children]
    assert all("max_total_children is 37" in c.error.message for c in result.children[37:])
    assert 100 == sum(isinstance(e, AgentSpawned) for e in events) == sum(isinstance(e, AgentFinished) for e in events)
    data = result.tool_calls[0].result.data
    assert [str(i) for i in range(37)] == [e["output"] for e in data[:37]]
    assert all("max_total_children" in e["error"] for e in data[37:])


@pytest.mark.spec("reliability:SP02", "generator-contract:L3")
async def test_a_child_that_never_started_does_not_count_as_one():
    picky = AgentDefinition("picky", input_schema={"type": "object", "required": ["a"]}, handle_steps=quick)

    def handle(ctx):
        bad = yield Parallel([AgentCall("picky", params={}) for _ in range(3)])
        good = yield Parallel([AgentCall("picky", params={"a": i}) for i in range(3)])
        with pytest.raises(LimitExceeded, match="has started 3 children, and max_total_children is 3"):
            yield AgentCall("picky", params={"a": 3})
        return [[c.status.value for c in r.value] for r in (bad, good)]

    agent = AgentDefinition("boss", spawnable_agents=[picky], handle_steps=handle)
    result = await Engine([agent], models=ScriptedModel([])).run("boss", limits=Limits(max_total_children=3))

    assert [["failed"] * 3, ["completed"] * 3] == result.output


@pytest.mark.spec("reliability:SP02", "waiting:WT4")
async def test_background_child_that_never_started_does_not_count():
    picky = AgentDefinition("picky", input_schema={"type": "object", "required": ["a"]}, handle_steps=quick)

    def handle(ctx):
        with pytest.raises(InputError):
            yield from Start(AgentCall("picky", params={}))
        ref = yield from Start(AgentCall("picky", params={"a": 1}))
        yield from Wait(ref)
        with pytest.raises(LimitExceeded, match="has started 1 children, and max_total_children is 1"):
            yield from Start(AgentCall("picky", params={"a": 2}))
        return "done"

    agent = AgentDefinition("boss", spawnable_agents=[picky], handle_steps=handle)
    journal = MemoryJournal()
    engine = Engine([agent])
    result = await engine.run("boss", limits=Limits(max_total_children=1), journal=journal)

    assert "done" == result.unwrap()
    assert result == await engine.replay(journal)


class Honest(Provider):
    """
    A provider that takes its time, in an order of its own, and uses what it was asked for or less.
    """

    name = "honest"

    def __init__(self, random: Random) -> None:
        self.random = random
        self.spent = 0

    async def complete(self, request: Any) -> ModelReply:
        for _ in range(self.random.randrange(6)):
            await asyncio.sleep(0)
        prompt = sum(estimate_tokens(m.text) for m in request.all_messages)
        output = self.random.randint(0, request.settings.max_tokens)
        self.spent += prompt + output
        return ModelReply("x", usage=Usage(input_tokens=prompt, output_tokens=output))


def price(model: str, usage: Usage, at: Any) -> Decimal:
    return Decimal(usage.total_tokens) / 1000


def tree_of(random: Random) -> AgentDefinition[Any]:
    """
    An agent that calls a model, starts children that do the same, and goes on whatever happens.
    """

    def handle(ctx):
        for _ in range(ctx.random.randint(1, 2)):
            yield STEP
            if ctx.agent_state.agent_id != "leaf":
                yield Parallel(
                    [AgentCall("leaf" if ctx.agent_state.parent_id else "middle")] * ctx.random.randint(1, 3)
                )

    settings = ModelSettings(max_tokens=random.choice([5, 40, 90]))
    leaf = AgentDefinition("leaf", handle_steps=handle, settings=settings)
    middle = AgentDefinition("middle", handle_steps=handle, settings=settings, spawnable_agents=[leaf])
    return AgentDefinition("root", model="test/m", handle_steps=handle, settings=settings, spawnable_agents=[middle])


@pytest.mark.deep
@pytest.mark.spec("reliability:R6", "reliability:I8")
async def test_no_schedule_of_a_tree_spends_more_than_its_limits():
    refused = 0
    for seed in range(1000):
        random = Random(seed)
        provider = Honest(random)
        cap = random.randint(20, 300)
        in_tokens = seed % 2 == 0
        limits = Limits(max_tokens=cap) if in_tokens else Limits(max_cost_usd=Decimal(cap) / 1000)
        engine = Engine([tree_of(random)], models=provider, pricing=price)
        result = await engine.run("root", limits=limits)

        assert result.usage.total_tokens == provider.spent <= cap, seed
        assert result.cost is not None
        assert result.cost <= Decimal(cap) / 1000, seed
        refused += result.status is RunStatus.FAILED or any(c.is_error for c in result.children)
    assert 200 < refused


CUT = {
    "steps": ({"limits": Limits(max_steps=2)}, {}, "used all of its 2 steps; raise Limits(max_steps=...)"),
    "tokens": ({"limits": Limits(max_tokens=1_000)}, {"usage": Usage(900, 90)}, "used or reserved 990 of 1000 tokens"),
    "the output": ({}, {"stop_reason": "max_tokens"}, "its last reply was cut off at the output limit"),
}


@tool
def look() -> str:
    """Look."""
    return "nothing yet"


@pytest.mark.spec("requirements:X63")
@pytest.mark.parametrize(("kid", "reply", "why"), CUT.values(), ids=CUT)
async def test_childs_last_text_reaches_its_parent_with_the_spent_limit(kid, reply, why):
    child = AgentDefinition("kid", model="test/m", description="Looks.", tools=[look], **kid)
    calls: dict[str, dict[str, Any]] = {
        "spawn_agents": {"agents": [{"agent_type": "kid", "prompt": "look"}]},
        "task": {"agent": "kid", "prompt": "look"},
        "tool": {"prompt": "look"},
    }
    seen: list[tuple[bool, str]] = []

    def handle(ctx):
        for name, value in calls.items():
            result = (yield ToolCall(name, value)).tool_result
            seen.append((result.is_error, result.text))
        try:
            yield from AgentCall("kid", "look")
        except ChildError as error:
            seen.append((True, f"{error.message} {error.result.text}"))

    boss = AgentDefinition(
        "boss",
        tools=[*spawn_tools(), task_tool([child]), agent_tool(child, name="tool")],
        spawnable_agents=[child],
        handle_steps=handle,
    )

    def replies(request: Any) -> ModelReply:
        is_last = "stop_reason" in reply or not request.tools
        return text("Found half.", **reply) if is_last else tool_call(look, text="Found half.", **reply)

    result = await Engine([boss], models=ScriptedModel([replies] * 20)).run("boss")

    assert RunStatus.COMPLETED is result.status, result.error
    assert 4 == len(seen)
    for is_error, told in seen:
        assert is_error
        assert why in told
        assert "Found half." in told


@pytest.mark.spec("generator-contract:G46")
@pytest.mark.parametrize(
    ("asked", "where"),
    [*[(asked, "root") for asked in ("step", "turn", "perform", "child", "children")], ("turn", "middle")],
)
async def test_time_limit_takes_effect_when_blocking_code_returns(asked, where, monkeypatch):
    after = []

    def blocking(*_: Any) -> str:
        """
        Take longer than the run may, while the loop does not turn, and with it no timer of the run.
        """
        put_clock_ahead(monkeypatch, 6_000)
        return "x"

    async def blocking_later() -> str:
        return blocking()

    def leaf(ctx):
        yield STEP
        after.append("leaf")
        yield STEP

    def handle(ctx):
        try:
            if asked == "step":
                yield STEP
            elif asked == "perform":
                yield Perform(blocking_later)
            else:
                yield Parallel([AgentCall("leaf", "go")] * (1 if asked == "child" else 3))
            yield Perform(after.append, "more")
        finally:
            after.append("closed")

    late = Limits(max_seconds=3_000)
    kid = AgentDefinition("leaf", handle_steps=leaf)
    inner = AgentDefinition(
        "inner",
        handle_steps=None if asked == "turn" else handle,
        spawnable_agents=[] if asked == "turn" else [kid],
        limits=late if where == "middle" else None,
    )

    def outer(ctx):
        child = yield AgentCall("inner", "go")
        return [child.value.status.value, child.value.error.kind]

    root = AgentDefinition("root", model="test/m", handle_steps=outer, spawnable_agents=[inner])
    engine = Engine([root], models=ScriptedModel([blocking] * 10))
    journal = MemoryJournal()
    result = await engine.run("root", journal=journal, limits=late if where == "root" else None)

    assert after == (["closed"] if asked != "turn" else [])
    if where == "middle":
        assert ["failed", "seconds"] == result.unwrap()
    else:
        assert (RunStatus.FAILED, "seconds") == (result.status, result.error.kind)
    assert () == check(journal).problems
    replayed = await Engine([root], models=ScriptedModel([])).replay(journal)
    assert (result.status, result.output, result.error) == (replayed.status, replayed.output, replayed.error)
