"""
Handlers, hooks and tools in real runs: what they log, how they end, how they fail alone.
"""

from __future__ import annotations

import asyncio
import logging

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Parallel,
    Perform,
    ToolCall,
    ToolContext,
    tool,
)
from stepengine.events import ToolLog, ToolProgress
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, tool_call


def agent(handler=None, agent_id="worker", **fields):
    return AgentDefinition(agent_id, **{"model": "test/m", "handle_steps": handler, **fields})


@pytest.mark.spec("requirements:O4", "generator-contract:G4", "requirements:O1")
async def test_handler_logs_and_notices_reach_logger_and_stream_only(caplog):
    def handle(ctx):
        yield STEP
        ctx.logger.warning("careful", n=1)
        ctx.notify("half way", {"percent": 50})
        yield ToolCall("add_message", {"role": "user", "content": "go on"})

    events = []
    engine = Engine(models=ScriptedModel(["hi"]), observers=[events.append])
    with caplog.at_level(logging.DEBUG, "stepengine"):
        result = await engine.run(agent(handle), "go")
    record = next(r for r in caplog.records if r.getMessage() == "careful")
    note = next(e for e in events if e.type == "notification")

    assert (result.state.run_id, "worker", "", {"n": 1}) == (record.run_id, record.agent_id, record.path, record.data)
    assert 1 == record.step  # the step that comes next, as hooks see it
    assert ("half way", {"percent": 50}) == (note.message, note.data)
    assert all("careful" not in m.text and "half way" not in m.text for m in result.state.message_history)


async def test_each_run_has_its_own_seed_kept_on_replay():
    """
    No two runs draw alike, recorded or not, and neither do a parent and its children.
    """

    def draw(ctx):
        drawn = [ctx.random.random()]
        drawn += [kid.output for kid in (yield from Parallel(AgentCall("kid"), AgentCall("kid")))]
        return drawn

    def kid_steps(ctx):
        yield ToolCall("think_deeply", {"thought": "hm"})
        return ctx.random.random()

    boss = agent(draw, "boss", spawnable_agents=[agent(kid_steps, "kid")])
    engine = Engine(models=ScriptedModel([]))
    journal = MemoryJournal()
    runs = [(await engine.run(boss, "go", journal=kept)).output for kept in (journal, None, None)]

    assert 9 == len({number for drawn in runs for number in drawn})
    assert runs[0] == (await engine.replay(journal, agent=boss)).output


@pytest.mark.spec("requirements:O4")
@pytest.mark.parametrize("in_thread", [False, True])
async def test_tool_logs_and_notices_carry_their_run_and_call(caplog, in_thread):
    def body(ctx: ToolContext) -> str:
        """Work."""
        ctx.logger.info("working", x=2)
        ctx.emit(ToolProgress(message="half", percent=50))
        ctx.emit(ToolLog(message="by hand"))
        return "done"

    work = tool(in_thread=in_thread)(body)
    events = []
    async with Engine(models=ScriptedModel([tool_call("body"), "ok"]), observers=[events.append]) as engine:
        with caplog.at_level(logging.DEBUG, "stepengine"):
            result = await engine.run(agent(tools=[work]), "go")
    record = next(r for r in caplog.records if r.getMessage() == "working")
    shown = [e for e in events if e.type.startswith("tool_")]

    assert (result.state.run_id, {"x": 2}) == (record.run_id, record.data)
    assert any(r.getMessage() == "by hand" for r in caplog.records)
    assert ["tool_started", "tool_log", "tool_progress", "tool_log", "tool_finished"] == [
        e.type for e in shown if e.type != "tool_input_delta"
    ]
    assert {("body", "c1")} == {(e.tool_name, e.tool_call_id) for e in shown if e.type != "tool_input_delta"}
    assert 1 == len({e.seq for e in shown if e.type in ("tool_log", "tool_progress", "tool_finished")})


@pytest.mark.spec("reliability:I12", "reliability:R10")
async def test_cancelling_a_run_ends_a_three_level_tree_leaves_first():
    order, hanging = [], asyncio.Event()
    counter = []

    async def hang():
        counter.append(1)
        if len(counter) == 8:
            hanging.set()
        await asyncio.Event().wait()

    def level(n, below=None):
        def handle(ctx):
            try:
                if below is None:
                    yield Perform(hang)
                else:
                    yield Parallel(AgentCall(below), AgentCall(below))
            finally:
                order.append(n)

        return agent(handle, f"level-{n}", model=None, spawnable_agents=[below] if below else [])

    top = level(0, level(1, level(2, level(3))))
    before = asyncio.all_tasks()
    task = asyncio.create_task(Engine().run(top))
    await hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert [3] * 8 == order[:8]
    assert 0 == order[-1]
    assert 15 == len(order)
    assert before == asyncio.all_tasks()
