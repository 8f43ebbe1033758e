"""
bu-agent-sdk: the fastest peer; its own loop over a model object that answers in process.

Its compaction is switched off: it downloads a price table at the first step of every agent.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from typing import Any

from bu_agent_sdk import Agent
from bu_agent_sdk.agent.compaction import CompactionConfig
from bu_agent_sdk.llm.messages import Function, ToolCall
from bu_agent_sdk.llm.views import ChatInvokeCompletion
from bu_agent_sdk.tools import tool

results: ContextVar[list[int]] = ContextVar("results")


@tool("Add two numbers")
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    results.get().append(a + b)
    return str(a + b)


class Scripted:
    """A chat model that asks for *steps* calls and then stops."""

    model = "scripted"
    provider = "scripted"
    name = "scripted"

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.steps = steps

    async def ainvoke(self, *_: Any, **__: Any) -> ChatInvokeCompletion:
        """Return the next reply."""
        if not self.left:
            return ChatInvokeCompletion(content="done")
        self.left -= 1
        number = self.steps - self.left - 1
        call = ToolCall(id=f"call_{number}", function=Function(name="add", arguments=json.dumps({"a": number, "b": 1})))
        return ChatInvokeCompletion(content=None, tool_calls=[call])


async def run(steps: int) -> int:
    """Run the peer's agent; see the package's docstring."""
    mine: list[int] = []
    results.set(mine)
    agent = Agent(
        llm=Scripted(steps), tools=[add], max_iterations=steps + 2, compaction=CompactionConfig(enabled=False)
    )
    await agent.query("add")
    return sum(mine)
