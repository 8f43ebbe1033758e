"""pydantic-ai with its own ``FunctionModel``; over HTTP its ``OpenAIChatModel``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "pydantic-ai-slim"
PROTOCOL = "openai_chat"
UNLIMITED = UsageLimits(request_limit=None)


def agent_for(model: Any) -> Agent[None, str]:
    """Return an agent with the tool."""
    agent = Agent(model)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return agent


def results_of(result: Any) -> list[int]:
    """Return what the tool returned."""
    parts = [part for message in result.all_messages() for part in message.parts]
    return [part.content for part in parts if isinstance(part, ToolReturnPart)]


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    calls = 0

    def reply(*_: Any) -> ModelResponse:
        nonlocal calls
        number, calls = calls, calls + 1
        if number == steps:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("add", arguments(number))])

    result = await agent_for(FunctionModel(reply)).run("add", usage_limits=UNLIMITED)
    return lambda: Work(calls, results_of(result), result.output)


def http_model(url: str) -> OpenAIChatModel:
    """Return the model over HTTP."""
    return OpenAIChatModel("m", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"))


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    agent = agent_for(http_model(url))

    async def http_run(_: int) -> Told:
        result = await agent.run("add", usage_limits=UNLIMITED)
        return lambda: Work(UNCOUNTED, results_of(result), result.output)

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    agent = agent_for(http_model(url))
    history: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("add")])]
    for number in range((count - 1) // 2):
        call_id = f"call_{number}"
        history.append(ModelResponse(parts=[ToolCallPart("add", arguments(number), call_id)]))
        history.append(ModelRequest(parts=[ToolReturnPart("add", number + 1, call_id)]))

    async def ask() -> str:
        return (await agent.run("go on", message_history=history)).output

    return ask
