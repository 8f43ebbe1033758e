"""openai-agents with a ``Model`` of its interface; over HTTP its ``OpenAIChatCompletionsModel``. Tracing is off."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from agents.items import ToolCallOutputItem
from openai import AsyncOpenAI
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

# ruff: noqa: TID251 - this is the peer whose import name it is
from agents import Agent, Model, ModelResponse, OpenAIChatCompletionsModel, Runner, Usage, function_tool
from agents import set_tracing_disabled as tracing_disabled
from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "openai-agents"
PROTOCOL = "openai_chat"
tracing_disabled(disabled=True)


@function_tool
async def add(a: int, b: int) -> int:
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
        self.calls = 0
        self.steps = steps

    async def get_response(self, *_: Any, **__: Any) -> ModelResponse:
        """Return the next reply."""
        number, self.calls = self.calls, self.calls + 1
        item: Any = ResponseFunctionToolCall(
            type="function_call", call_id=f"call_{number}", name="add", arguments=json.dumps(arguments(number))
        )
        if number == self.steps:
            text = ResponseOutputText(type="output_text", text="done", annotations=[])
            item = ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[text])
        return ModelResponse(output=[item], usage=Usage(), response_id=None)

    def stream_response(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Refuse: nothing here streams."""
        msg = "nothing here streams"
        raise TypeError(msg)


def results_of(result: Any) -> list[int]:
    """Return what the tool returned."""
    return [int(item.output) for item in result.new_items if isinstance(item, ToolCallOutputItem)]


def agent_for(model: Model) -> Agent[None]:
    """Return an agent with the tool."""
    return Agent(name="adder", model=model, tools=[add])


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    model = Scripted(steps)
    result = await Runner.run(agent_for(model), "add", max_turns=steps + 2)
    return lambda: Work(model.calls, results_of(result), result.final_output)


def http_agent(url: str) -> Agent[None]:
    """Return the agent over HTTP."""
    client = AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=0)
    return agent_for(OpenAIChatCompletionsModel(model="m", openai_client=client))


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    agent = http_agent(url)

    async def http_run(steps: int) -> Told:
        result = await Runner.run(agent, "add", max_turns=steps + 2)
        return lambda: Work(UNCOUNTED, results_of(result), result.final_output)

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    agent = http_agent(url)
    history: list[Any] = [{"role": "user", "content": "add"}]
    for number in range((count - 1) // 2):
        call_id = f"call_{number}"
        call = {"type": "function_call", "call_id": call_id, "name": "add", "arguments": json.dumps(arguments(number))}
        history += [call, {"type": "function_call_output", "call_id": call_id, "output": str(number + 1)}]

    async def ask() -> str:
        result = await Runner.run(agent, [*history, {"role": "user", "content": "go on"}])
        return str(result.final_output)

    return ask
