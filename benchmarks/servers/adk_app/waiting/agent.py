"""An agent of ``adk api_server`` whose tool takes an hour."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models import BaseLlm, LlmResponse
from google.genai import types

DELAY = float(os.environ["DELAY"])


async def add(a: int, b: int) -> dict[str, int]:
    """Add two numbers."""
    return {"result": a + b}


async def wait() -> dict[str, str]:
    """Wait for an hour."""
    await asyncio.sleep(3600)
    return {"result": "over"}


class Scripted(BaseLlm):
    """A model that asks for one call, then ends."""

    tool: str
    args: dict[str, Any]

    async def generate_content_async(self, request: Any, *_: Any, **__: Any) -> AsyncGenerator[LlmResponse, None]:
        """Give the next reply, after the delay."""
        await asyncio.sleep(DELAY)
        has_result = any(part.function_response for content in request.contents for part in content.parts)
        call = types.Part.from_function_call(name=self.tool, args=self.args)
        part = types.Part(text="done") if has_result else call
        yield LlmResponse(content=types.Content(role="model", parts=[part]))


def agent(name: str, model: Scripted) -> LlmAgent:
    """Return an agent with both tools."""
    return LlmAgent(name=name, model=model, tools=[add, wait])


root_agent = agent("waiting", Scripted(model="scripted", tool="wait", args={}))
