"""A tool that yields, behind an agent that somebody else's client calls."""

from __future__ import annotations

import mcp_types as types
import pytest
from mcp import Client

from stepengine import AgentDefinition, Ask, Engine, Steps, ToolCall, tool
from stepengine.adapters.mcp.agent_server import AgentServer, OfferedAgent
from stepengine.testing import ScriptedModel, text, tool_call


@tool
def stock(what: str) -> int:
    """Count what is there."""
    return 3


@tool(uses=[stock])
def buy(what: str) -> Steps[str]:
    """Buy something."""
    there = yield ToolCall("stock", {"what": what})
    count = yield from Ask(f"How many of {there.tool_result.data} {what}s?")
    return f"{count} {what}s"


@pytest.mark.anyio
@pytest.mark.spec("programs:PG5")
@pytest.mark.parametrize("by_model", [True, False])
async def test_tool_body_question_reaches_the_client_as_a_form(by_model: bool) -> None:
    def handle_steps(ctx):
        return (yield from ToolCall("buy", {"what": "pear"})).text

    fields = {} if by_model else {"handle_steps": handle_steps}
    shop = AgentDefinition("shop", model="test/m", tools=[buy], **fields)
    engine = Engine([shop], models=ScriptedModel([tool_call(buy, {"what": "pear"}), text("2 pears")]))
    asked = []

    async def person(ctx, params):
        asked.append(params.message)
        return types.ElicitResult(action="accept", content={"answer": "2"})

    server = AgentServer([OfferedAgent(engine, shop)]).server
    async with engine, Client(server, elicitation_callback=person) as client:
        result = await client.call_tool("shop", {})

    assert asked == ["How many of 3 pears?"]
    assert result.content[0].text == "2 pears"
