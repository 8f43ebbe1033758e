"""
Children that fail, hang, crash, are cancelled, or want more than they may have.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from typing import Any

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Decision,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    best_of,
    map_agents,
    tool,
)
from stepengine.data.messages import JsonPart
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.bundled import spawn_tools


def empty() -> ScriptedModel:
    return ScriptedModel([])


def quick(ctx):
    return ctx.prompt
    yield


QUICK = AgentDefinition("quick", handle_steps=quick)

# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:SP12", "generator-contract:S12", "generator-contract:L3")
async def test_invalid_or_long_child_outputs_are_marked_in_the_result():
    def huge(ctx):
        return "a" * 1_000_000
        yield

    def listy(ctx):
        return [{"x": "b" * 300_000}]
        yield

    def strange(ctx):
        return {"fine": 1, "deep": [{"bad": object()}]}
        yield

    def wrong(ctx):
        return {"n": "many"}
        yield

    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    kids = [
        AgentDefinition("huge", handle_steps=huge),
        AgentDefinition("listy", handle_steps=listy),
        AgentDefinition("strange", handle_steps=strange),
        AgentDefinition("wrong", model="test/m", handle_steps=wrong, output_schema=schema),
        QUICK,
    ]
    agents = [{"agent_type": k.id, "prompt": "p"} for k in kids]
    boss = AgentDefinition("boss", model="test/m", tools=spawn_tools(), spawnable_agents=kids)
    scripted = ScriptedModel([tool_call("spawn_agents", {"agents": agents}), text("no"), text("end")])
    result = await Engine([boss], models=scripted).run("boss", "go")
    whole, _, odd, against, fine = result.tool_calls[0].result.data
    long, listed, *_ = next(
        part.value for message in scripted.calls[-1].messages for part in message.content if isinstance(part, JsonPart)
    )

    assert "a" * 1_000_000 == whole["output"]
    assert 100_000 < len(long["output"]) < 101_000
    assert "900000 characters of this output are not shown" in long["output"]
    assert listed["output"].startswith('[{"x":"bbb')
    assert "not shown" in listed["output"]
    assert "output.deep[0].bad" in odd["error"]
    assert "n" in against["error"]
    assert "integer" in against["error"]
    assert "p" == fine["output"]
    assert "a" * 1_000_000 == result.children[0].output


# --- what a child cannot gain -----------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:PM39", "requirements:J8", "requirements:H1", "reliability:R7")
async def test_child_cannot_lift_a_denial_of_the_tree():
    asked: list[tuple[str, str]] = []
    ran: list[str] = []

    @tool(in_thread=False)
    def wipe() -> str:
        """Wipe."""
        ran.append("wipe")
        return "wiped"

    def deny(ctx, call):
        asked.append((ctx.agent.id, ctx.path))
        return Decision.deny("not here") if call.tool_name == "wipe" else None

    def allow(ctx, call):
        return Decision.allow()

    kid = AgentDefinition(
        "kid",
        model="test/m",
        tools=[wipe],
        hooks=Hooks(pre_tool=[allow]),
        limits=Limits(max_depth=50, max_total_children=1000, max_tokens=10**9),
    )
    seen: dict[str, Any] = {}

    def greedy(ctx):
        denied = yield ToolCall("wipe", {})
        seen["denied"] = denied.tool_result.text
        deeper = (yield AgentCall("greedy")).value.error
        seen.setdefault("deep", deeper)

    own = AgentDefinition(
        "greedy",
        tools=[wipe],
        spawnable_agents=["greedy"],
        handle_steps=greedy,
        hooks=Hooks(pre_tool=[allow]),
        limits=Limits(max_depth=50),
    )

    def handle(ctx):
        yield AgentCall("kid", "go")
        yield AgentCall("greedy", "go")

    boss = AgentDefinition("boss", model="test/m", spawnable_agents=[kid, own], handle_steps=handle)
    scripted = ScriptedModel([tool_call("wipe", {}), text("gave up")])
    engine = Engine([boss], models=scripted, hooks=Hooks(pre_tool=[deny]))
    result = await engine.run("boss", limits=Limits(max_depth=2))

    assert [] == ran
    assert "not here" in scripted.calls[1].messages[-1].text
    assert "not here" in seen["denied"]
    assert "max_depth is 2" in str(seen["deep"])
    assert ("kid", "0") in asked
    assert ("greedy", "1") in asked
    assert RunStatus.COMPLETED is result.status


@pytest.mark.spec("reliability:R8")
async def test_approval_for_one_child_does_not_cover_its_siblings():
    ran: list[str] = []

    @tool(in_thread=False)
    def wipe(who: str) -> str:
        """
        Wipe.

        Args:
            who: Who.
        """
        ran.append(who)
        return "wiped"

    def ask(ctx, call):
        return Decision.ask("May it?")

    def kid(ctx):
        done = yield ToolCall("wipe", {"who": ctx.path if hasattr(ctx, "path") else ctx.agent_state.run_id[-1]})
        return done.tool_result.status

    def handle(ctx):
        done = yield Parallel(AgentCall("kid"), AgentCall("kid"))
        return [c.output for c in done.value]

    kids = AgentDefinition("kid", tools=[wipe], handle_steps=kid)
    boss = AgentDefinition("boss", spawnable_agents=[kids], handle_steps=handle)
    engine, journal = Engine([boss], models=empty(), hooks=Hooks(pre_tool=[ask])), MemoryJournal()
    open_ = await engine.run("boss", journal=journal)
    first, second = open_.pending_questions

    assert ["0", "1"] == [first.path, second.path]
    once = await engine.resume(journal, answers={first.id: True})
    assert (RunStatus.SUSPENDED, [second.id], 1) == (once.status, [q.id for q in once.pending_questions], len(ran))
    done = await engine.resume(journal, answers={second.id: False})
    assert (["ok", "denied"], ["0"]) == (done.output, ran)


# --- ten thousand -----------------------------------------------------------------------------------------------------


@pytest.mark.memory
@pytest.mark.spec("reliability:SP17", "requirements:J13", "generator-contract:L6", "requirements:X50")
async def test_children_that_ended_leave_nothing_behind():
    begun, most = 0, 0
    alive: list[int] = []
    ended: list[weakref.ref[Any]] = []

    def kid(ctx):
        nonlocal begun, most
        begun += 1
        most = max(most, begun - len(ended))
        yield Perform(asyncio.sleep, 0)
        ended.append(weakref.ref(ctx.random))
        if len(ended) % 3_000 == 0:
            gc.collect()
            alive.append(sum(ref() is not None for ref in ended))
        return int(ctx.prompt)

    def boss(ctx):
        children = yield from map_agents("kid", range(10_000), prompt=str, concurrency=8)
        return sum(c.output for c in children)

    kids = AgentDefinition("kid", handle_steps=kid)
    made = AgentDefinition("boss", spawnable_agents=[kids], handle_steps=boss)
    result = await Engine([made], models=empty()).run("boss")

    assert sum(range(10_000)) == result.output
    assert 10_000 == len(result.children)
    assert 8 == most
    assert 3 == len(alive)
    assert max(alive) <= 8, "plans, states and handlers of children that have ended are still there"


class Many:
    """
    Ten thousand children, of which each waits for a child that hangs; `full` when four do.
    """

    def __init__(self, helper: str) -> None:
        self.helper = helper
        self.begun: list[str] = []
        self.closed: list[str] = []
        self.full = asyncio.Event()

    async def hang(self, name: str) -> None:
        self.begun.append(name)
        if len(self.begun) == 4:
            self.full.set()
        await asyncio.sleep(30)

    def leaf(self, ctx):
        try:
            yield from Perform(self.hang, ctx.prompt)
        finally:
            self.closed.append("leaf")

    def kid(self, ctx):
        try:
            yield AgentCall("leaf", ctx.prompt)
        finally:
            self.closed.append("kid")

    def boss(self, ctx):
        try:
            if self.helper == "map_agents":
                yield from map_agents("kid", range(10_000), prompt=str, concurrency=4)
            else:
                yield from best_of("kid", "x", n=10_000, concurrency=4, judge=lambda _: 0)
        finally:
            self.closed.append("boss")

    def engine(self) -> Engine:
        leaf = AgentDefinition("leaf", handle_steps=self.leaf)
        kid = AgentDefinition("kid", handle_steps=self.kid, spawnable_agents=[leaf])
        return Engine([AgentDefinition("boss", spawnable_agents=[kid], handle_steps=self.boss)], models=empty())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:SP17", "generator-contract:L6")
@pytest.mark.parametrize("helper", ["map_agents", "best_of"])
async def test_stopped_run_starts_no_more_children_and_closes_all(helper):
    many, before = Many(helper), asyncio.all_tasks()
    async with many.engine().start("boss") as handle:
        await asyncio.wait_for(many.full.wait(), 50)
        handle.interrupt()
        result = await asyncio.wait_for(handle.result(), 50)

    assert RunStatus.CANCELLED is result.status
    assert 4 == len(many.begun)
    assert Counter({"leaf": 4, "kid": 4, "boss": 1}) == Counter(many.closed)
    assert "boss" == many.closed[-1]
    assert ["cancelled"] * 4 == [c.status.value for c in result.children]
    assert asyncio.all_tasks() <= before
