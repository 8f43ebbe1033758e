"""The tools of the engine itself: tools like any other, whoever carries them out."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, StepContext, Steps, Tool, call
from stepengine.testing import ScriptedModel, text, tool_call
from stepengine.tools.agent_tools import BUILT_IN
from stepengine.tools.bundled import control_tools, task_tool

KID = AgentDefinition("kid", description="Helps.", model="t/m")
TODOS = [{"task": "a", "completed": True}, {"task": "b", "completed": False}]


async def test_a_handler_calls_built_in_tools_like_any_other() -> None:
    todos, task = BUILT_IN["write_todos"], task_tool([KID])

    def handle_steps(ctx: StepContext) -> Steps[list[Any]]:
        done = yield from call(todos, todos=TODOS)
        said = yield from call(task, agent="kid", prompt="hi")
        return [done, said]

    agent = AgentDefinition("caller", handle_steps=handle_steps, tools=[task])
    result = await Engine([agent], models=ScriptedModel([text("hello")])).run(agent)

    assert result.output == ["1 of 2 done.", "hello"]


@pytest.mark.spec("generator-contract:T2")
@pytest.mark.parametrize("tools", [["write_todos"], control_tools()], ids=["by name", "as tools"])
async def test_model_input_is_repaired_for_built_in_tools(
    tools: list[str | Tool[..., object]],
) -> None:
    agent = AgentDefinition("writer", model="t/m", tools=tools)
    replies = [tool_call("write_todos", {"todos": '[{"task": "a", "completed": true}]'}), text("done")]
    result = await Engine([agent], models=ScriptedModel(replies)).run(agent, "go")

    assert [c.result.text for c in result.tool_calls] == ["1 of 1 done."]


@pytest.mark.parametrize("where", ["engine", "agent"])
async def test_a_custom_tool_replaces_the_built_in_of_its_name(where: str) -> None:
    own: Tool[..., Any] = Tool("write_todos", "Mine.", {}, lambda given: "mine")
    tools: list[Any] = [own] if where == "agent" else ["write_todos"]
    agent = AgentDefinition("writer", model="t/m", tools=tools)
    model = ScriptedModel([tool_call("write_todos", {}), text("done")])
    engine = Engine([agent], tools=[own] if where == "engine" else [], models=model)
    result = await engine.run(agent, "go")

    assert [c.result.text for c in result.tool_calls] == ["mine"]
    assert [spec.description for spec in model.calls[0].tools] == ["Mine."]
