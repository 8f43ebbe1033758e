"""
``editor``: makes the edits that a prompt asks for, checks them, and reports what changed.

The model reads and edits; the handler decides. It reads the files named in the params before the first model call, reads
every edited file again afterwards, and sends the model back to work while one of them does not parse. Without a prompt it
continues the conversation that it was given: exactly one model step, whose messages are part of the report.

``stepengine run editor "Rename total to subtotal" --params '{"files": ["shop.py"]}' --write``
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Generator, Mapping
from io import StringIO
from posixpath import normpath
from typing import Any, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from stepengine import (
    STEP,
    STEP_ALL,
    AgentDefinition,
    AgentState,
    Change,
    HookContext,
    Hooks,
    StepContext,
    StepResult,
    Steps,
    ToolCall,
)
from stepengine.tools.bundled import unified_diff

EDITING = ("str_replace", "write_file")
BEFORE = "editor_before"
DIFF_CHARS = 1_000_000
CHECKED_CHARS, CHECKED_DOTS = 200_000, 100

INSTRUCTIONS = """\
Edit the files so that the request is met, and nothing else.
Read a file before you change it. Change it with str_replace; use write_file only for a file that does not exist yet.
When everything is done, say in one or two sentences what you changed."""


class EditorParams(BaseModel):
    """What the editor can be told beside its prompt."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(default=[], description="Files to show to the model before its first step.")
    repairs: int = Field(default=2, ge=0, le=10, description="How often files that do not parse are sent back.")


class EditReport(TypedDict):
    """
    What the editor did.

    Attributes:
        changed_files: Files whose content is another one than before, sorted.
        diff: One unified diff of everything that changed.
        problems: What is still wrong with a changed file.
        summary: The model's last words.
        messages: Without a prompt: the messages of the step, in the widespread form. Else empty.
    """

    changed_files: list[str]
    diff: str
    problems: list[str]
    summary: str
    messages: list[dict[str, Any]]


def handle_steps(ctx: StepContext[EditorParams]) -> Steps[EditReport]:
    """Read the files, let the model edit, send it back while a file does not parse, and return a report of the edits."""
    start = len(ctx.agent_state.message_history)
    if ctx.params.files:
        yield ToolCall("read_files", {"paths": ctx.params.files})  # no model has been called yet
    turn = yield STEP_ALL if ctx.prompt else STEP  # the model takes its steps and calls its tools
    report = yield from report_edits(turn)  # reads every edited file again
    for _ in range(ctx.params.repairs if ctx.prompt else 0):
        if not report["problems"] or not turn.agent_state.steps_remaining:
            break
        note = "These files do not parse any more. Repair them:\n" + "\n".join(report["problems"])
        yield ToolCall("add_message", {"role": "user", "content": note}, include_tool_call=False)
        turn = yield STEP_ALL
        report = yield from report_edits(turn)
    return report if ctx.prompt else {**report, "messages": list_messages_since(turn.agent_state, start)}


def report_edits(turn: StepResult) -> Steps[EditReport]:
    """Read every edited file again and return its changes since the run started, with parse problems."""
    changed: list[str] = []
    diffs: list[str] = []
    problems: list[str] = []
    for path, before in sorted(turn.agent_state.context.get(BEFORE, {}).items()):
        after = yield from read_whole_file(path)
        if after == before:
            continue
        changed.append(path)
        diffs.append(make_diff(path, before, after))
        if problem := after.get("error") or find_parse_problem(path, after["content"]):
            problems.append(f"{path}: {problem}")
    return EditReport(changed_files=changed, diff="".join(diffs), problems=problems, summary=turn.text, messages=[])


def list_messages_since(state: AgentState, start: int) -> list[dict[str, Any]]:
    """Return the messages after the first *start* ones as ``role``/``content`` dicts."""
    return AgentState.from_messages(state.message_history[start:]).message_history.to_dicts()


def read_whole_file(path: str) -> Generator[Any, Any, dict[str, str]]:
    """Return the content and digest of a whole file, or the error; the calls are not in the history."""
    lines: list[str] = []
    while True:
        window = {"path": path, "offset": len(lines) + 1}
        turn = yield ToolCall("read_files", {"paths": [window]}, include_tool_call=False)
        entry = (turn.tool_results[0].data or [{}])[0]
        if "content" not in entry:
            return {"error": entry.get("error") or turn.tool_results[0].text}
        portion = split_lines(entry["content"])
        lines += portion
        if not portion or not entry["has_more"]:
            return {"content": "".join(lines), "hash": entry.get("hash", "")}


def record_content_before_edit(ctx: HookContext, call: Any) -> Generator[Any, Any, Change | None]:
    """Store the content of a file in the context before its first edit."""
    known: Mapping[str, Any] = ctx.state.context.get(BEFORE, {})
    path = normpath(call.input.get("path") or ".")
    if call.tool_name not in EDITING or path in known:
        return None
    before = yield from read_whole_file(path)
    return Change(context={BEFORE: {**known, path: before}})


def clear_recorded_contents(_: HookContext) -> Change:
    """Remove the file contents that an earlier run stored in the context."""
    return Change(context={BEFORE: None})


def make_diff(path: str, before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return a unified diff in git's form; a file that cannot be read is ``/dev/null``."""
    return unified_diff(before.get("content"), after.get("content"), path, max_chars=DIFF_CHARS)


def split_lines(text: str) -> list[str]:
    """Return the lines of *text* with their ends; only a newline ends a line, as in the tools."""
    return list(StringIO(text, newline="\n"))


def find_parse_problem(path: str, text: str) -> str:
    """
    Return why *text* does not parse as the type of *path*; ``""`` if it does or the type is unknown.

    A text of more than 200,000 characters is not looked at, nor TOML with a hundred dots in a line: a key of very many
    parts takes its parser very long.
    """
    if len(text) > CHECKED_CHARS:
        return ""
    try:
        match path.rpartition(".")[2]:
            case "py":
                ast.parse(text, path)
            case "json":
                json.loads(text)
            case "toml" if all(line.count(".") < CHECKED_DOTS for line in text.split("\n")):
                tomllib.loads(text)
            case _:
                pass
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:  # the last one says "too deep" as well
        return f"{type(error).__name__}: {error}"
    return ""


agent = AgentDefinition(
    "editor",
    description="Makes the requested edits to files, checks that they still parse, and returns a diff.",
    tools=["read_files", "code_search", "str_replace", "write_file"],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    input_schema=EditorParams,
    output_mode="structured_output",
    handle_steps=handle_steps,
    hooks=Hooks(pre_run=[clear_recorded_contents], pre_tool=[record_content_before_edit]),
)
