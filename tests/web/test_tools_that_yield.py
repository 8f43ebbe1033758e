"""What a tool that yields asks for, on the pages of others: below its call, as what a child does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from stepengine import AgentDefinition, Ask, Engine, Steps, ToolCall, tool
from stepengine.adapters.ag_ui import ag_ui
from stepengine.adapters.vercel import vercel
from stepengine.testing import ScriptedModel, text, tool_call

pytestmark = [pytest.mark.anyio, pytest.mark.spec("programs:PG3")]


@tool
def add(a: int) -> int:
    """Add one."""
    return a + 1


@tool(uses=[add])
def twice(a: int) -> Steps[Any]:
    """Add two."""
    first = yield ToolCall("add", {"a": a})
    second = yield ToolCall("add", {"a": first.tool_result.data})
    return second.tool_result.data


@pytest.fixture
async def events() -> AsyncIterator[Any]:
    agent = AgentDefinition("counter", model="test/m", tools=[twice])
    async with Engine([agent], models=ScriptedModel([tool_call(twice, {"a": 1}), text("3")])) as engine:
        yield engine.stream(agent, "go")


@pytest.mark.deep
async def test_ag_ui_shows_calls_of_a_yielding_tool_as_subagent(events: Any) -> None:
    seen = [event.model_dump(exclude_none=True) async for event in ag_ui(events, thread_id="t", run_id="r")]
    (lane,) = [e for e in seen if e["type"] == "SUBAGENT_STARTED"]
    assert (lane["name"], lane["parent_tool_call_id"]) == ("twice", "c1")
    calls = [e for e in seen if e["type"] == "TOOL_CALL_START" and e["tool_call_name"] == "add"]
    assert [e["subagent_run_id"] for e in calls] == [lane["subagent_run_id"]] * 2
    types = [e["type"] for e in seen]
    assert types.count("SUBAGENT_STARTED") == types.count("SUBAGENT_FINISHED") == 1


@pytest.mark.deep
async def test_vercel_shows_calls_of_a_yielding_tool_as_data_agent(events: Any) -> None:
    parts = [chunk["data"] async for chunk in vercel(events, message_id="m") if chunk["type"] == "data-agent"]
    assert {part["path"] for part in parts} == {"1"}
    assert [(part["name"], part["status"], part["tool"]) for part in parts] == [
        ("twice", "running", ""),
        *[("twice", "running", name) for name in ("add", "", "add", "")],
        ("twice", "completed", ""),
    ]


@tool
def asking() -> Steps[str]:
    """Ask somebody."""
    return (yield from Ask("Sure?"))


async def test_waiting_tool_call_has_no_ag_ui_result() -> None:
    agent = AgentDefinition("asker", model="test/m", tools=[asking])
    waiting = Engine([agent], models=ScriptedModel([tool_call(asking)])).stream(agent, "go")
    types = [event.type.value async for event in ag_ui(waiting, thread_id="t", run_id="r")]
    assert "TOOL_CALL_END" in types
    assert "TOOL_CALL_RESULT" not in types
