"""
A handler as authors write it, with the type of everything that it gets; both type checkers must infer all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, assert_type

import attrs
from pydantic import BaseModel

from stepengine import (
    STEP,
    STEP_ALL,
    AgentCall,
    AgentDefinition,
    AgentState,
    Ask,
    ChildResult,
    Complete,
    Engine,
    GenerateN,
    Hooks,
    Limits,
    ModelSettings,
    Parallel,
    Perform,
    Receive,
    RunResult,
    StepContext,
    StepResult,
    Steps,
    StepText,
    StepWith,
    ToolCall,
    ToolContext,
    ToolResult,
    Usage,
    best_of,
    call,
    map_agents,
    retry,
    tool,
)
from stepengine.adapters.mcp import mcp_tools
from stepengine.errors import PerformError
from stepengine.models import ModelReply
from stepengine.tools.bundled import ask_user, code_search, read_files, recall, run_terminal_command, str_replace
from stepengine.tools.bundled.shapes import Answers, CommandResult, EditedFile, FileEntry, SearchResult


class Bugs(BaseModel):
    found: list[str]


class Style(BaseModel):
    score: int


class Params(BaseModel):
    folder: str = "src"


@tool
async def find_todos(folder: str) -> list[str]:
    """List the comments under a folder that ask for work."""
    return [folder]


@tool
def count_lines(path: str, *, blank: bool = False) -> int:
    """Count the lines of a file."""
    return len(path)


@tool(category="read", parallel_safe=True)
def where_am_i(ctx: ToolContext, hint: str = "") -> dict[str, str]:
    """Say where the tool runs."""
    return {"run": ctx.run_id}


bug_hunter = AgentDefinition(id="bug-hunter", output_schema=Bugs)
stylist = AgentDefinition(id="stylist", output_schema=Style)
assert_type(bug_hunter, AgentDefinition[Bugs])
assert_type(stylist, AgentDefinition[Style])
assert_type(attrs.evolve(stylist, model="openai/x"), AgentDefinition[Style])


async def fetch(url: str, *, times: int = 1) -> bytes:
    await asyncio.sleep(0)
    return url.encode() * times


def measure(path: str) -> float:
    return float(len(path))


def handle_steps(ctx: StepContext) -> Steps[dict[str, int]]:
    """
    The handler of the introduction.
    """
    todos = yield from call(find_todos, "src")
    assert_type(todos, list[str])
    while True:
        turn = yield STEP
        assert_type(turn, StepResult)
        if turn.steps_complete or turn.agent_state.usage.total_tokens > 50_000:
            break
    bugs, style = yield from Parallel(AgentCall(bug_hunter, "src"), AgentCall(stylist, "src"))
    assert_type(bugs, ChildResult[Bugs])
    assert_type(style, ChildResult[Style])
    assert_type(bugs.output.found, list[str])
    answer = yield from Ask("Open a ticket?", options=["yes", "no"])
    assert_type(answer, str)
    return {"todos": len(todos), "style": style.unwrap().score}


reviewer = AgentDefinition(
    id="reviewer",
    model="anthropic/claude-sonnet-4-5",
    tools=[find_todos, "read_files"],
    spawnable_agents=[bug_hunter, stylist],
    hooks=Hooks(pre_step=[print]),
    limits=Limits(max_steps=5),
    settings=ModelSettings(temperature=0.5),
    handle_steps=handle_steps,
)
assert_type(reviewer, AgentDefinition[dict[str, int]])


def every_yieldable(ctx: StepContext[Params]) -> Steps[str]:
    """
    `yield x` is sent a StepResult; `yield from x` gives x's own value.
    """
    assert_type(ctx.params.folder, str)
    assert_type(ctx.agent_state, AgentState)

    assert_type((yield ToolCall("read_files", {"paths": ["a.py"]})), StepResult)
    assert_type((yield AgentCall(stylist)), StepResult)
    assert_type((yield Perform(measure, "a")), StepResult)
    assert_type((yield Ask("sure?")), StepResult)
    assert_type((yield STEP_ALL), StepResult)

    assert_type((yield from ToolCall(find_todos, {"folder": "src"}, include_tool_call=False)), ToolResult)
    assert_type((yield from AgentCall(stylist, "src", {"strict": True})), Style)
    assert_type((yield from AgentCall("stylist")), Any)
    assert_type((yield from AgentCall(reviewer, params=Params())), dict[str, int])
    assert_type((yield from STEP), StepResult)
    assert_type((yield from STEP_ALL), StepResult)
    assert_type((yield from StepWith(model="openai/x", tools=[find_todos, "read_files"])), StepResult)
    assert_type((yield from StepText("hello")), tuple[ToolResult, ...])
    assert_type((yield from GenerateN(3)), tuple[str, ...])
    assert_type((yield from Complete("summarise", settings=ModelSettings(max_tokens=50))), ModelReply)
    assert_type((yield from Complete("summarise", schema=Style)), Style)
    assert_type((yield from Perform(fetch, "https://example.org", times=2)), bytes)
    assert_type((yield from Perform(measure, "a")), float)
    assert_type((yield from Perform.idempotent(fetch, "https://example.org")), bytes)
    assert_type((yield from Ask("what now?")), str)
    assert_type((yield from Receive("news", timeout=60)), Any | None)
    assert_type((yield from Receive("news", schema={"type": "object"})), Any | None)
    assert_type((yield from Receive("news", schema=Style)), Style | None)
    return "done"


def several_at_once(ctx: StepContext) -> Steps:
    """
    A Parallel gives a tuple with one entry per call, in order.
    """
    assert_type((yield from Parallel()), tuple[()])
    assert_type((yield from Parallel(ToolCall("a"))), tuple[ToolResult])
    result, size, name = yield from Parallel(ToolCall("a"), Perform(measure, "a"), Ask("who?"))
    assert_type(result, ToolResult)
    assert_type(size, float | PerformError)
    assert_type(name, str)
    slowly = yield from Parallel(ToolCall("a"), Perform(measure, "a"), Ask("who?"), concurrency=2)
    assert_type(slowly, tuple[ToolResult, float | PerformError, str])
    four = yield from Parallel(Ask("1"), Ask("2"), AgentCall(stylist), Ask("4"))
    assert_type(four, tuple[str, str, ChildResult[Style], str])
    five = yield from Parallel(Ask("1"), Ask("2"), AgentCall(stylist), ToolCall("4"), AgentCall(bug_hunter))
    assert_type(five, tuple[str, str, ChildResult[Style], ToolResult, ChildResult[Bugs]])
    many = yield from Parallel([AgentCall(stylist, f"file {n}") for n in range(10)])
    assert_type(many, tuple[ChildResult[Style], ...])
    starred = yield from Parallel(*[ToolCall("a") for _ in range(10)])
    assert_type(starred, tuple[ToolResult, ...])


def helpers(ctx: StepContext[Mapping[str, Any]]) -> Steps[Usage]:
    """
    Helpers are generators; they keep the types of what they are given.
    """
    assert_type((yield from call(count_lines, "a.py", blank=True)), int)
    assert_type((yield from call(where_am_i, hint="x")), dict[str, str])
    assert_type((yield from call("count_lines", int, path="a.py")), int)
    assert_type((yield from retry(lambda: ToolCall("a"), times=2)), ToolResult)
    assert_type((yield from retry(lambda: AgentCall(stylist), times=2)), Style)
    assert_type((yield from retry(lambda: call(count_lines, "a.py"), times=2)), int)
    reviews = yield from map_agents(stylist, ["a.py", "b.py"], prompt=lambda path: f"look at {path}")
    assert_type(reviews, tuple[ChildResult[Style], ...])
    assert_type((yield from best_of(stylist, "src", n=3, judge=lambda outputs: len(outputs) - 1)), Style)
    inner = yield from inner_steps(5)
    assert_type(inner, int)
    return Usage()


def bundled_tools(ctx: StepContext) -> Steps[int]:
    """
    Names of bundled tools know what the tools take and give; elsewhere they are names.
    """
    entries = yield from call(read_files, ["a.py", {"path": "b.py", "offset": 10}], line_numbers=True)
    assert_type(entries, list[FileEntry])
    for entry in entries:
        assert_type(entry["path"], str)
        assert_type(entry.get("content", ""), str)
    found = yield from call(code_search, "TODO", flags="-g *.py", max_results=5)
    assert_type(found, SearchResult)
    assert_type(found["matches"][0]["path"], str)
    ran = yield from call(run_terminal_command, ["pytest", "-q"], timeout_seconds=60)
    assert_type(ran, CommandResult)
    assert_type(ran["exit_code"], int | None)
    edit = yield from call(str_replace, "a.py", [{"old_string": "a", "new_string": "b"}])
    assert_type(edit, EditedFile)
    assert_type((yield from call(ask_user, [{"question": "Which?", "options": ["a", "b"]}])), Answers)
    assert_type((yield from call(recall)), str)
    assert_type((yield from ToolCall(read_files, {"paths": ["a.py"]})), ToolResult)
    assert_type((yield from retry(lambda: call(code_search, "x"))), SearchResult)
    return found["count"]


def inner_steps(turns: int) -> Steps[int]:
    for _ in range(turns):
        yield STEP
    return turns


def results(run: RunResult[Style], child: ChildResult[Bugs], untyped: RunResult) -> None:
    assert_type(run.output, Style)
    assert_type(run.unwrap(), Style)
    assert_type(child.unwrap(), Bugs)
    assert_type(untyped.unwrap(), Any)
    assert_type(ToolResult.text("hi"), ToolResult)
    assert_type(ToolResult.text("hi").text, str)


served = mcp_tools(["server"], name="server")
buyer = AgentDefinition("buyer", tools=[served, count_lines, ask_user])
engine = Engine([buyer], tools=[served])
silent = AgentDefinition("silent", handle_steps=several_at_once)
assert_type(silent, AgentDefinition[None])
