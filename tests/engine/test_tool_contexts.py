"""
What a tool's body is told by a real run: who it is, where it stands, and what comes of what it reports.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from decimal import Decimal

import pytest

from stepengine import AgentDefinition, Engine, RunStatus, ToolContext, ToolResult, tool
from stepengine.data.messages import SideEffect
from stepengine.testing import ScriptedModel, text, tool_call

LINEAGE = (
    "tool_name", "session_id", "parent_session_id", "run_id", "agent_name", "agent_description", "tool_call_id",
    "parent_tool_call_id", "ancestor_run_ids",
)  # fmt: skip


def family(*tools):
    """
    An agent and the child that it may spawn, both with *tools*.
    """
    kid = AgentDefinition(
        "kid", model="t/m", description="Looks.", display_name="The Kid", step_prompt="Go on.", tools=tools
    )
    fields = {"description": "Leads.", "tools": [*tools, "spawn_agents"], "spawnable_agents": [kid]}
    return AgentDefinition("boss", model="t/m", **fields)


def with_child(name):
    """
    Replies in which the parent calls the tool, then its child does so twice.
    """
    spawn = tool_call("spawn_agents", {"agents": [{"agent_type": "kid"}]})
    return ScriptedModel([tool_call(name), spawn, tool_call(name), tool_call(name), text("kid"), text("boss")])


@pytest.mark.spec("requirements:E6")
@pytest.mark.parametrize("session", [None, "s1"])
async def test_tool_context_names_run_step_and_parents(session):
    seen, lengths = {}, {}

    @tool(in_thread=False)
    def look(ctx: ToolContext) -> str:
        """Look."""
        where = ctx.agent_id, ctx.step_index
        seen[where] = tuple([getattr(ctx, name) for name in LINEAGE])
        lengths[where] = len(ctx.agent_state.message_history)
        return "seen"

    result = await Engine(models=with_child("look")).run(family(look), "go", session_id=session)
    root = result.state.run_id
    kid = ("look", session, session, f"{root}-3", "The Kid", "Looks.")

    assert RunStatus.COMPLETED is result.status
    assert ("look", session, None, root, "boss", "Leads.", "c1", None, ()) == seen.pop(("boss", 0))
    assert {("kid", 0): (*kid, "c1", "c2", (root,)), ("kid", 1): (*kid, "c2", "c2", (root,))} == seen
    assert {("boss", 0): 2, ("kid", 0): 0, ("kid", 1): 2} == lengths


@pytest.mark.spec("requirements:E6")
@pytest.mark.parametrize("in_thread", [False, True])
async def test_cancelled_run_sets_the_signal_before_interrupting_the_tool(in_thread):
    started, release = asyncio.Event(), threading.Event()
    loop, seen = asyncio.get_running_loop(), []

    @tool
    async def waits(ctx: ToolContext) -> None:
        """Wait."""
        seen.append(ctx.cancelled.is_set())
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            seen.append(ctx.cancelled.is_set())

    @tool
    def polls(ctx: ToolContext) -> None:
        """Poll."""
        seen.append(ctx.cancelled.is_set())
        loop.call_soon_threadsafe(started.set)
        while not ctx.cancelled.is_set() and not release.wait(0.001):
            pass
        seen.append(ctx.cancelled.is_set())

    wanted = polls if in_thread else waits
    model = ScriptedModel([tool_call(wanted.name), text("never")])
    async with Engine(models=model) as engine, engine.start(AgentDefinition("a", model="t/m", tools=[wanted])) as run:
        await started.wait()
        run.interrupt()
        result = await run.result()
    release.set()

    assert (RunStatus.CANCELLED, [False, True]) == (result.status, seen)


@pytest.mark.spec("requirements:E6", "requirements:O1")
async def test_tool_logs_and_errors_reach_the_engine_log_with_place(caplog):
    @tool(in_thread=False)
    def fails(ctx: ToolContext) -> None:
        """Fail."""
        ctx.logger.info("about to fail", n=1)
        raise KeyError("gone")

    with caplog.at_level(logging.DEBUG, "stepengine"):
        result = await Engine(models=with_child("fails")).run(family(fails), "go")
    root = result.state.run_id
    lines = [(r.levelname, r.getMessage(), r.run_id, r.agent_id, r.step) for r in caplog.records]
    raised = "tool 'fails' raised KeyError"

    assert [
        line
        for place in ((root, "boss", 0), (f"{root}-3", "kid", 0), (f"{root}-3", "kid", 1))
        for line in (("INFO", "about to fail", *place), ("ERROR", raised, *place))
    ] == lines
    assert {"n": 1} == caplog.records[0].data
    assert 'raise KeyError("gone")' in caplog.records[1].data["traceback"]


@pytest.mark.spec("requirements:D15")
async def test_cost_reported_by_a_tool_counts_for_the_run():
    @tool(in_thread=False)
    def ask_elsewhere() -> ToolResult:
        """Ask a paid service."""
        return ToolResult.text("done", cost=Decimal("0.25"))

    model = ScriptedModel([tool_call("ask_elsewhere", cost="0.50"), text("ok", cost="0.50")])
    result = await Engine(models=model).run(AgentDefinition("a", model="t/m", tools=[ask_elsewhere]), "go")

    assert Decimal("1.25") == result.cost
    assert Decimal("0.25") == result.cost_by_model["ask_elsewhere"]
    assert result.usage.at_least


@pytest.mark.spec("requirements:E12", "requirements:G17")
async def test_credits_and_side_effects_reach_log_and_totals():
    @tool(in_thread=False)
    def writes() -> ToolResult:
        """Write."""
        return ToolResult.json({"ok": 1}, credits_used=2.5, side_effects=(SideEffect("file_written", "a.py"),))

    result = await Engine(models=with_child("writes")).run(family(writes), "go")
    (own,) = [log.result for log in result.tool_calls if log.tool_name == "writes"]

    assert ((SideEffect("file_written", "a.py"),), 2.5) == (own.side_effects, own.credits_used)
    assert (7.5, 7.5, 5.0) == (result.credits_used, result.state.credits_used, result.children[0].spending.credits_used)
