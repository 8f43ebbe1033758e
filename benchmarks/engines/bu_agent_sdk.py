"""
bu-agent-sdk: the fastest peer; its own loop over a model object that answers in process.

Its compaction is switched off: it downloads a price table at the first step of every agent.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from bu_agent_sdk import Agent
from bu_agent_sdk.agent.compaction import CompactionConfig
from bu_agent_sdk.llm import ChatOpenAI
from bu_agent_sdk.llm.messages import AssistantMessage, Function, ToolCall, ToolMessage, UserMessage
from bu_agent_sdk.llm.views import ChatInvokeCompletion
from bu_agent_sdk.tools import tool

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "bu-agent-sdk"
PROTOCOL = "openai_chat"


@tool("Add two numbers")
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def called(number: int) -> ToolCall:
    """Return a call."""
    return ToolCall(id=f"call_{number}", function=Function(name="add", arguments=json.dumps(arguments(number))))


class Scripted:
    """A chat model that asks for *steps* calls and then stops."""

    model = "scripted"
    provider = "scripted"
    name = "scripted"

    def __init__(self, steps: int) -> None:
        self.calls = 0
        self.steps = steps

    async def ainvoke(self, *_: Any, **__: Any) -> ChatInvokeCompletion:
        """Return the next reply."""
        number, self.calls = self.calls, self.calls + 1
        if number == self.steps:
            return ChatInvokeCompletion(content="done")
        return ChatInvokeCompletion(content=None, tool_calls=[called(number)])


def agent_for(llm: Any, steps: int) -> Agent:
    """Return an agent; one has one conversation."""
    return Agent(llm=llm, tools=[add], max_iterations=steps + 2, compaction=CompactionConfig(enabled=False))


def results_of(agent: Agent) -> list[int]:
    """Return what the tool returned."""
    return [int(message.text) for message in agent.messages if isinstance(message, ToolMessage)]


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    model = Scripted(steps)
    agent = agent_for(model, steps)
    text = await agent.query("add")
    return lambda: Work(model.calls, results_of(agent), text)


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    llm = ChatOpenAI(model="m", api_key="k", base_url=f"{url}/v1", max_retries=0)

    async def http_run(steps: int) -> Told:
        agent = agent_for(llm, steps)
        text = await agent.query("add")
        return lambda: Work(UNCOUNTED, results_of(agent), text)

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    llm = ChatOpenAI(model="m", api_key="k", base_url=f"{url}/v1", max_retries=0)
    history: list[Any] = [UserMessage(content="add")]
    for number in range((count - 1) // 2):
        history.append(AssistantMessage(content=None, tool_calls=[called(number)]))
        history.append(ToolMessage(tool_call_id=f"call_{number}", tool_name="add", content=str(number + 1)))

    async def ask() -> str:
        agent = agent_for(llm, 1)
        agent.load_history(history)
        return await agent.query("go on")

    return ask
