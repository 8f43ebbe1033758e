"""pydantic-ai with its own ``FunctionModel``."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.usage import UsageLimits


async def run(steps: int) -> int:
    """Run the peer's agent; see the package's docstring."""
    results: list[int] = []
    count = iter(range(steps))

    def reply(*_: Any) -> ModelResponse:
        number = next(count, None)
        if number is None:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart("add", {"a": number, "b": 1})])

    agent = Agent(FunctionModel(reply))

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        results.append(a + b)
        return a + b

    await agent.run("add", usage_limits=UsageLimits(request_limit=None))
    return sum(results)
