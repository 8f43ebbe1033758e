"""
Parents and children through the engine: who may start whom, what comes back, and what stays behind.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Decision,
    Engine,
    Hooks,
    RunStatus,
    tool,
)
from stepengine.data.codec import to_json
from stepengine.testing import ScriptedModel, text, tool_call
from tests.engine.sums import add


@tool(in_thread=False)
def other() -> str:
    """
    Do something else.
    """
    return "other"


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
