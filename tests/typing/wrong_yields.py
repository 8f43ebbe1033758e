"""
What both type checkers must refuse: every marked line is an error, and a mark without an error is one too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    ChildResult,
    Complete,
    GenerateN,
    Parallel,
    Perform,
    StepContext,
    Steps,
    StepText,
    StepWith,
    ToolCall,
    UserMessage,
    call,
    tool,
)
from stepengine.tools.bundled import code_search, read_files


@tool
async def find_todos(folder: str) -> list[str]:
    """List the comments under a folder that ask for work."""
    return [folder]


async def fetch(url: str, *, times: int = 1) -> str:
    return url * times


stylist: AgentDefinition[int] = AgentDefinition("stylist")


def built_wrong(ctx: StepContext) -> Steps:
    yield ToolCall(5)  # type: ignore[arg-type]
    yield ToolCall("t", [1])  # type: ignore[arg-type]
    yield ToolCall("t", {}, "no")  # type: ignore[arg-type]
    yield ToolCall("t", inputs={})  # type: ignore[call-arg]
    yield AgentCall(5)  # type: ignore[arg-type]
    yield AgentCall("a", 5)  # type: ignore[arg-type]
    yield AgentCall("a", params=[1])  # type: ignore[arg-type]
    yield StepWith(tools=5)  # type: ignore[arg-type]
    yield StepWith(temperature=0.5)  # type: ignore[call-arg]
    yield StepText(5)  # type: ignore[arg-type]
    yield GenerateN("3")  # type: ignore[arg-type]
    yield Complete(5)  # type: ignore[arg-type]
    yield Complete([UserMessage(5)])  # type: ignore[arg-type]
    yield Parallel(STEP)  # type: ignore[call-overload]
    yield Parallel(ToolCall("a"), StepText("b"))  # type: ignore[call-overload]
    yield Parallel([Parallel()])  # type: ignore[list-item]
    yield Perform(fetch)  # type: ignore[call-overload]
    yield Perform(fetch, 5)  # type: ignore[call-overload]
    yield Perform(fetch, "u", time=2)  # type: ignore[call-arg]
    yield Perform(fetch("u"))  # type: ignore[call-overload]
    yield Ask(5)  # type: ignore[arg-type]
    yield Ask("?", options=[1, 2])  # type: ignore[list-item]


def yielded_wrong(ctx: StepContext) -> Steps[int]:
    yield "STEP"  # type: ignore[misc]
    yield None  # type: ignore[misc]
    yield fetch("u")  # type: ignore[misc]
    yield call(find_todos, "src")  # type: ignore[misc]
    text: str = yield STEP  # type: ignore[assignment]
    return text  # type: ignore[return-value]


def taken_wrong(ctx: StepContext) -> Steps:
    numbers: list[int] = yield from call(find_todos, "src")  # type: ignore[assignment]
    yield from call(find_todos)  # type: ignore[call-overload]
    yield from call(find_todos, 5)  # type: ignore[call-overload]
    yield from call(find_todos, "src", deep=True)  # type: ignore[call-arg]
    answer: int = yield from Ask("how many?")  # type: ignore[assignment]
    output: str = yield from AgentCall(stylist)  # type: ignore[assignment]
    one, two = yield from Parallel(Ask("?"))  # type: ignore[misc]
    child: ChildResult[str]
    (child,) = yield from Parallel(AgentCall(stylist))  # type: ignore[assignment]
    print(numbers, answer, output, one, two, child)


def bundled_wrong(ctx: StepContext) -> Steps:
    yield from call(read_files)  # type: ignore[call-overload]
    yield from call(read_files, [1])  # type: ignore[call-overload]
    yield from call(read_files, ["a"], deep=True)  # type: ignore[call-arg]
    text: str = yield from call(code_search, "x")  # type: ignore[assignment]
    found = yield from call(code_search, "x")
    print(text, found["hits"])  # type: ignore[misc]


def changed(ctx: StepContext) -> Steps:
    ctx.prompt = "other"  # type: ignore[misc]
    ctx.agent_state.output = 5  # type: ignore[misc]
    ctx.agent_state.message_history[0] = UserMessage("x")  # type: ignore[index]
    yield STEP


async def asynchronous(ctx: StepContext) -> AsyncGenerator[Any, Any]:
    yield STEP


def of_nothing() -> Generator[Any, Any, None]:
    yield STEP


AgentDefinition("a", handle_steps=asynchronous)  # type: ignore[arg-type]
AgentDefinition("a", handle_steps=of_nothing)  # type: ignore[arg-type]
AgentDefinition("a", handle_steps=fetch)  # type: ignore[arg-type]
AgentDefinition("a", tools=[5])  # type: ignore[list-item]
AgentDefinition("a", spawnable_agents=[5])  # type: ignore[list-item]
AgentDefinition("a", tool=["b"])  # type: ignore[arg-type]
AgentDefinition("a", "openai/x")  # type: ignore[call-arg]
wrong: AgentDefinition[str] = AgentDefinition("a", output_schema=int)  # type: ignore[arg-type]
