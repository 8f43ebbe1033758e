"""Agents of ``stepengine serve``: ``working`` asks its model twice and calls one tool, ``waiting`` has a tool that takes an hour."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

from stepengine import AgentDefinition, tool
from stepengine.data.models import ModelDelta, ModelRequest
from stepengine.testing import ScriptedModel, tool_call

DELAY = float(os.environ["DELAY"])


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
async def wait() -> str:
    """Wait for an hour."""
    await asyncio.sleep(3600)
    return "over"


class Slow(ScriptedModel):
    """A model that takes its time."""

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Give a reply in pieces, after the delay."""
        await asyncio.sleep(DELAY)
        async for delta in super().stream(request):
            yield delta


def reply(request: ModelRequest) -> object:
    """Ask for a call, then end."""
    if any(message.role == "tool" for message in request.messages):
        return "done"
    return tool_call("wait") if request.system_prompt == "wait" else tool_call("add", {"a": 1, "b": 1})


models = Slow(reply)
agents = [
    AgentDefinition("working", model="test/model", system_prompt="work", tools=[add]),
    AgentDefinition("waiting", model="test/model", system_prompt="wait", tools=[wait]),
]
