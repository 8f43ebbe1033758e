"""
smolagents' ``ToolCallingAgent`` with a ``Model`` of its interface; over HTTP its ``OpenAIModel``. It says nothing meanwhile.

The engine is synchronous; its documentation runs it in a thread beside an event loop. A run ends with a call of its tool
``final_answer``, so that is what the last reply asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from smolagents import ActionStep, LogLevel, Model, OpenAIModel, TaskStep, ToolCall, ToolCallingAgent, tool
from smolagents.models import ChatMessage, ChatMessageToolCall, ChatMessageToolCallFunction, MessageRole
from smolagents.monitoring import Timing

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "smolagents"
PROTOCOL = "openai_chat"
FINAL = "final_answer"
"""The tool that the server's last reply must ask for."""


@tool
def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


class Scripted(Model):
    """A model that asks for *steps* calls and then stops."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.calls = 0
        self.steps = steps

    def generate(self, *_: Any, **__: Any) -> ChatMessage:
        """Return the next reply."""
        number, self.calls = self.calls, self.calls + 1
        done = number == self.steps
        function = ChatMessageToolCallFunction(
            name=FINAL if done else "add", arguments={"answer": "done"} if done else arguments(number)
        )
        call = ChatMessageToolCall(function=function, id=f"call_{number}", type="function")
        return ChatMessage(role=MessageRole.ASSISTANT, content=None, tool_calls=[call])


def agent_for(model: Model, steps: int) -> ToolCallingAgent:
    """Return an agent; one has one memory."""
    return ToolCallingAgent(tools=[add], model=model, max_steps=steps + 2, verbosity_level=LogLevel.OFF)


def results_of(agent: ToolCallingAgent) -> list[int]:
    """Return what the tool returned."""
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep) and not step.is_final_answer]
    return [int(json.loads(step.observations or "")) for step in steps]


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    model = Scripted(steps)
    agent = agent_for(model, steps)
    text = await asyncio.to_thread(agent.run, "add")
    return lambda: Work(model.calls, results_of(agent), str(text))


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    model = OpenAIModel("m", api_base=f"{url}/v1", api_key="k", client_kwargs={"max_retries": 0})

    async def http_run(steps: int) -> Told:
        agent = agent_for(model, steps)
        text = await asyncio.to_thread(agent.run, "add")
        return lambda: Work(UNCOUNTED, results_of(agent), str(text))

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    agent = agent_for(OpenAIModel("m", api_base=f"{url}/v1", api_key="k", client_kwargs={"max_retries": 0}), 1)
    history: list[Any] = [TaskStep(task="add")]
    for number in range((count - 1) // 2):
        call = ToolCall(name="add", arguments=arguments(number), id=f"call_{number}")
        history.append(ActionStep(number, Timing(0.0), tool_calls=[call], observations=str(number + 1)))

    async def ask() -> str:
        agent.memory.steps = list(history)
        return str(await asyncio.to_thread(agent.run, "go on", reset=False))

    return ask
