"""
Parents and children through the engine: who may start whom, what comes back, and what stays behind.
"""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    Decision,
    Engine,
    Hooks,
    Limits,
    RunStatus,
    ToolCall,
    tool,
)
from stepengine.data.codec import to_json
from stepengine.engine.handler_sources import SourceWarning
from stepengine.testing import ScriptedModel, text, tool_call
from tests.engine.sums import add


@tool(in_thread=False)
def other() -> str:
    """
    Do something else.
    """
    return "other"


@pytest.mark.spec("reliability:SP04")
async def test_mutual_spawns_are_bounded_by_depth_and_inherit_no_rights():
    said = []

    def call(who):
        def handle(ctx):
            child = yield AgentCall(who)
            said.append((ctx.agent_state.agent_id, len(ctx.agent_state.ancestor_run_ids), str(child.value.error or "")))

        return handle

    ping = AgentDefinition("ping", spawnable_agents=["pong"], handle_steps=call("pong"))
    pong = AgentDefinition("pong", spawnable_agents=["ping"], handle_steps=call("ping"))
    await Engine([ping, pong], models=ScriptedModel([])).run("ping", limits=Limits(max_depth=3))
    depths = [(agent, depth) for agent, depth, _ in said]

    assert [("pong", 3), ("ping", 2), ("pong", 1), ("ping", 0)] == depths
    assert "max_depth is 3" in said[0][2]

    said.clear()
    leaf = AgentDefinition("leaf")
    thief = AgentDefinition("thief", handle_steps=call("leaf"))
    boss = AgentDefinition("boss", spawnable_agents=[thief, leaf], handle_steps=call("thief"))
    with pytest.warns(SourceWarning, match="the agent 'leaf' may not be spawned"):
        await Engine([boss], models=ScriptedModel([])).run("boss")

    assert "agent 'thief' may not spawn 'leaf'; it may spawn: none" in said[0][2]


@pytest.mark.spec("generator-contract:G23")
async def test_state_names_exactly_its_agents_tools_with_their_specifications():
    seen = {}

    def handle(ctx):
        seen[ctx.agent_state.agent_id] = dict(ctx.agent_state.tool_definitions)
        if ctx.agent_state.agent_id == "boss":
            yield AgentCall("child", "go")
        yield STEP

    child = AgentDefinition("child", model="test/m", tools=["other"], handle_steps=handle)
    boss = AgentDefinition("boss", model="test/m", tools=[add], spawnable_agents=[child], handle_steps=handle)
    model = ScriptedModel([text("a"), text("b")])
    await Engine([boss], [other], models=model).run("boss")

    assert {"boss": {"add": add.spec}, "child": {"other": other.spec}} == seen
    assert [["other"], ["add"]] == [[spec.name for spec in request.tools] for request in model.calls]


@pytest.mark.spec("requirements:B17")
async def test_stored_state_names_the_agent_but_no_hooks():
    def secret_hook(ctx):
        return None

    agent = AgentDefinition("a", model="test/m", hooks=Hooks(pre_run=secret_hook))
    result = await Engine(models=ScriptedModel([text("hi")]), hooks=Hooks(pre_step=secret_hook)).run(agent, "go")
    stored = str(to_json(result.state))

    assert "'a'" in stored
    assert "hook" not in stored


@pytest.mark.spec("requirements:X47")
@pytest.mark.parametrize("ending", ["answer", "interrupt"])
async def test_input_during_a_permission_question_waits_and_answers_nothing(ending):
    def ask(ctx, call):
        return Decision.ask("May I?")

    agent = AgentDefinition("a", model="test/m", tools=[add], hooks=Hooks(pre_tool=ask))
    model = ScriptedModel([tool_call("add", {"a": 1, "b": 2}), text("done")])
    handle = Engine(models=model).start(agent, "go")
    async for event in handle.events():
        if event.type == "permission_requested":
            handle.send_input("no")
            await asyncio.sleep(0)

            assert not handle.done
            assert 1 == len(model.calls)

            if ending == "answer":
                handle.answer(event.question.id, True)
            else:
                handle.interrupt()
    result = await handle.result()

    if ending == "answer":
        assert [(3, False)] == [(c.result.data, c.is_error) for c in result.tool_calls]
        assert "no" in [m.text for m in model.calls[1].messages]
    else:
        assert RunStatus.CANCELLED is result.status
        assert all(c.is_error for c in result.tool_calls)
        assert 1 == len(model.calls)


@pytest.mark.spec("reliability:RS02")
async def test_handle_task_generator_and_tree_are_freed_without_the_collector():
    kept = []

    class Local:
        """
        Something that a handler holds.
        """

    def handle(ctx):
        mine = Local()
        kept.append(weakref.ref(mine))
        yield ToolCall(add, {"a": 1, "b": 2})
        yield STEP_ALL

    agent = AgentDefinition("a", model="test/m", tools=[add], handle_steps=handle)
    engine = Engine(models=ScriptedModel([text("hi")] * 2), observers=[lambda event: None])
    await engine.run(agent, "warm up")
    gc.collect()
    gc.disable()
    try:
        handle = engine.start(agent, "go")
        await handle.result()
        kept += [weakref.ref(handle), weakref.ref(handle._tree), weakref.ref(handle._task)]
        del handle
        await asyncio.sleep(0)

        assert [None] * 5 == [ref() for ref in kept]
    finally:
        gc.enable()
