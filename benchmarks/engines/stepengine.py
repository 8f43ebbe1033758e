"""
stepengine: a model that answers in process, a validated tool, immutable state, events; no journal.

Over HTTP each of its own providers.

One engine serves all runs, as it would in an application; definitions and engines hold no run state.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from benchmarks.engines import UNCOUNTED, Run, Told, Work, arguments
from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    AgentState,
    Engine,
    Limits,
    Parallel,
    RunResult,
    StepContext,
    Steps,
    StopReason,
    tool,
)
from stepengine.data.messages import AssistantMessage, Message, TextPart, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.transcript import Transcript
from stepengine.models import ModelReply, ModelRequest, Provider

MOST = 3_000
"""More steps than any run over HTTP has."""


@tool(in_thread=False)
def add(a: int, b: int) -> int:
    """
    Add two numbers.

    Args:
        a: One number.
        b: Another number.
    """
    return a + b


class Counting(Provider):
    """A model that asks for *steps* calls and then stops; what comes next is read from the request."""

    name = "counting"

    def __init__(self, steps: int) -> None:
        self.steps = steps

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the next reply."""
        number = len(request.messages) // 2
        # Built from its parts, as the peers' models build theirs: what the test kit's helpers cost is no cost of a run.
        if number >= self.steps:
            return ModelReply((TextPart("done"),), stop_reason=StopReason.END_TURN)
        return ModelReply((ToolCallPart("", "add", arguments(number)),), stop_reason=StopReason.TOOL_USE)


def until_done(_: StepContext) -> Steps:
    """Run step by step, looking at the state after each one."""
    while True:
        turn = yield STEP
        if turn.steps_complete:
            return


@cache
def engine_for(steps: int) -> Engine:
    """Return the engine for runs of *steps* steps, with an agent without a handler and one with."""
    limits = Limits(max_steps=steps + 1)
    agents = [
        AgentDefinition("adder", model="counting/model", tools=[add], limits=limits),
        AgentDefinition("stepper", model="counting/model", tools=[add], limits=limits, handle_steps=until_done),
    ]
    return Engine(agents=agents, models=Counting(steps), pricing=None)


async def result_of(steps: int, agent: str = "adder") -> RunResult:
    """Return the result of one run."""
    result = await engine_for(steps).run(agent, "add")
    result.unwrap()
    return result


async def children(count: int) -> float:
    """Return the CPU seconds of a parent and its children, which run at once; the best of three."""

    def lead(_: StepContext) -> Steps:
        yield Parallel(*[AgentCall("child", "go")] * count)

    agents = [AgentDefinition("lead", handle_steps=lead, spawnable_agents=["child"])]
    engine = Engine([*agents, AgentDefinition("child", model="counting/model")], models=Counting(0), pricing=None)
    best = float("inf")
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        result = await engine.run("lead")
        best = min(best, time.process_time() - start)
        assert len(result.children) == count
        assert all(child.text == "done" for child in result.children)
    return best


async def alone(count: int) -> float:
    """Return the CPU seconds of runs as those of the children, which run at once and have no parent; the best of three."""
    engine = Engine([AgentDefinition("child", model="counting/model")], models=Counting(0), pricing=None)
    best = float("inf")
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        results = await asyncio.gather(*(engine.run("child", "go") for _ in range(count)))
        best = min(best, time.process_time() - start)
        assert all(result.text == "done" for result in results)
    return best


def work_of(result: RunResult, calls: int) -> Work:
    """Return the work of a run."""
    return Work(calls, [int(call.result.text) for call in result.tool_calls], result.text)


def told(result: RunResult) -> Told:
    """Return what tells the work of a run in process: the model's calls are the messages that it has written."""
    return lambda: work_of(result, sum(m.role == "assistant" for m in result.state.message_history))


async def run(steps: int, agent: str = "adder") -> Told:
    """Run the agent without a handler; see the package's docstring."""
    return told(await result_of(steps, agent))


def provider_of(protocol: str, url: str, key: str = "k") -> Provider:
    """Return our adapter."""
    from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider

    if protocol == "anthropic":
        return AnthropicProvider(key, url)
    if protocol == "google":
        return GoogleProvider(key, url)
    kind = OpenAIProvider if protocol == "openai" else OpenAIChatProvider
    return kind(api_key=key, base_url=f"{url}/v1")


def http_engine(protocol: str, url: str) -> Engine:
    """Return an engine over HTTP with an agent and the tool."""
    agent = AgentDefinition(
        "adder", model=f"{protocol}/m", tools=[add], limits=Limits(max_steps=MOST, max_actions=MOST)
    )
    return Engine(agents=[agent], models={protocol: provider_of(protocol, url)}, pricing=None)


def over_http(url: str, protocol: str) -> Run:
    """Return runs over HTTP; see the package's docstring."""
    engine = http_engine(protocol, url)

    async def http_run(_: int) -> Told:
        result = await engine.run("adder", "add")
        result.unwrap()
        return lambda: work_of(result, UNCOUNTED)

    return http_run


def history_of(count: int) -> Transcript:
    """Return a transcript of *count* messages: a question, then calls and results."""
    messages: list[Message] = [UserMessage("add")]
    for number in range((count - 1) // 2):
        call = ToolCallPart(f"c{number}", "add", arguments(number))
        messages += [AssistantMessage([call]), ToolMessage(call.tool_call_id, "add", str(number + 1))]
    return Transcript(messages)


def behind(url: str, count: int, protocol: str) -> Callable[[], Awaitable[str]]:
    """Return one call of the provider alone; what was said grows by a step each time."""
    provider, grown = provider_of(protocol, url), [history_of(count)]

    async def ask() -> str:
        said: list[Any] = [AssistantMessage("answer"), UserMessage("go on")]
        grown.append(grown[-1].extend(said))
        return (await provider.complete(ModelRequest(f"{protocol}/m", messages=grown[-1]))).text

    return ask


def run_behind(url: str, count: int, protocol: str) -> Callable[[], Awaitable[str]]:
    """Return a whole run that goes on behind a history, as the peers are measured."""
    engine, state = (
        http_engine(protocol, url),
        AgentState(run_id="r", agent_id="adder", message_history=history_of(count)),
    )

    async def ask() -> str:
        return (await engine.run("adder", "go on", previous=state)).text

    return ask
