"""langgraph through ``create_agent``, its prebuilt loop, with a chat model of its interface; over HTTP ``ChatOpenAI``."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any

os.environ["LANGSMITH_TRACING"] = "false"

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_openai import ChatOpenAI

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments

PACKAGE = "langgraph"
PROTOCOL = "openai_chat"


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def called(number: int) -> AIMessage:
    """Return a reply that asks for a call."""
    return AIMessage("", tool_calls=[{"name": "add", "args": arguments(number), "id": f"call_{number}"}])


class Scripted(BaseChatModel):
    """A chat model that asks for *steps* calls and then stops."""

    steps: int
    calls: int = 0

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, *_: Any, **__: Any) -> Scripted:  # type: ignore[override]
        """Return the model: it knows the tool."""
        return self

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        number, self.calls = self.calls, self.calls + 1
        message = AIMessage("done") if number == self.steps else called(number)
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _agenerate(self, *_: Any, **__: Any) -> ChatResult:
        return self._generate()


def results_of(state: Any) -> list[int]:
    """Return what the tool returned."""
    return [int(message.content) for message in state["messages"] if isinstance(message, ToolMessage)]


async def invoked(agent: Any, steps: int) -> Any:
    """Return the state that a run ends with."""
    return await agent.ainvoke({"messages": [HumanMessage("add")]}, {"recursion_limit": 4 * steps + 10})


async def run(steps: int) -> Told:
    """Run the peer's agent; see the package's docstring."""
    model = Scripted(steps=steps)
    state = await invoked(create_agent(model, [add]), steps)
    return lambda: Work(model.calls, results_of(state), state["messages"][-1].content)


def http_agent(url: str) -> Any:
    """Return the agent over HTTP."""
    return create_agent(ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="k", max_retries=0), [add])


def over_http(url: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    agent = http_agent(url)

    async def http_run(steps: int) -> Told:
        state = await invoked(agent, steps)
        return lambda: Work(UNCOUNTED, results_of(state), state["messages"][-1].content)

    return http_run


def behind(url: str, count: int) -> Callable[[], Awaitable[str]]:
    """Return one call behind a history; see the package's docstring."""
    agent = http_agent(url)
    history: list[Any] = [HumanMessage("add")]
    for number in range((count - 1) // 2):
        history += [called(number), ToolMessage(str(number + 1), tool_call_id=f"call_{number}", name="add")]

    async def ask() -> str:
        state = await agent.ainvoke({"messages": [*history, HumanMessage("go on")]})
        return str(state["messages"][-1].content)

    return ask
