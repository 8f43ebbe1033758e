"""
A server for the conformance suite of MCP: agents with the names and answers that its scenarios ask for.

It prints its URL when it answers, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from stepengine import AgentDefinition, Ask, Engine, ToolCall, tool
from stepengine.adapters.mcp import AgentServer, OfferedAgent
from stepengine.errors import ToolError

ADDRESS = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
PARAMS = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": ADDRESS},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "additionalProperties": False,
}


@tool
def step(number: int) -> str:
    """
    Do a step.
    """
    return str(number)


def say(ctx: Any) -> Any:
    yield from ()
    return "This is a simple text response for testing."


def fail(ctx: Any) -> Any:
    yield from ()
    msg = "This tool intentionally returns an error for testing"
    raise ToolError(msg)


def work(ctx: Any) -> Any:
    for number in range(3):
        yield ToolCall("step", {"number": number})
    return "done"


def ask(ctx: Any) -> Any:
    said = yield from Ask("Who are you?")
    return f"User response: {said}"


AGENTS = (
    AgentDefinition("test-simple-text", handle_steps=say),
    AgentDefinition("test-error-handling", handle_steps=fail),
    AgentDefinition("test-tool-with-progress", tools=[step], handle_steps=work),
    AgentDefinition("test-elicitation", handle_steps=ask),
    AgentDefinition("json-schema-2020-12-tool", input_schema=PARAMS, handle_steps=say),
)


async def main() -> None:
    async with Engine(AGENTS) as engine:
        server = AgentServer([OfferedAgent(engine, agent) for agent in AGENTS])
        serving = asyncio.create_task(server.serve_http(port=0, ready=lambda url: print(url, flush=True)))
        await asyncio.to_thread(os.read, sys.stdin.fileno(), 1)
        serving.cancel()
        await asyncio.wait((serving,))


if __name__ == "__main__":
    asyncio.run(main())
