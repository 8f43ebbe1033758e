"""
Values as text and as JSON, for a terminal or a pipe.

Characters from models, tools and files that would control or hide text on the terminal are shown as escapes
(``stepengine.data.visible``). Only the colours of this package reach the screen.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.state import RunResult
from stepengine.data.usage import Usage
from stepengine.data.visible import format_count, one_line, to_ascii_json, truncate_text, visible
from stepengine.data.waits import wait_to_json
from stepengine.errors import ChildError

__all__ = (
    "ColorScheme",
    "can_draw_lines",
    "error_to_json",
    "format_cost",
    "format_count",
    "format_error",
    "format_tokens",
    "format_value",
    "is_terminal",
    "one_line",
    "print_output",
    "print_visible",
    "result_to_json",
    "to_ascii_json",
    "truncate_text",
    "visible",
    "wrap_lines",
)


@frozen(kw_only=True)
class ColorScheme:
    """
    The style of each kind of line, in the words of rich: ``"bold cyan"``, ``"#ff8800"``, ``"dim"``; ``""`` for none.

    If the output is not a terminal, or ``NO_COLOR`` is set, no colours are used.

    Attributes:
        step: The start of a model step.
        tool: The start of a tool call.
        result: A successful tool call; a completed todo.
        agent: The start or end of a child.
        thinking: Thoughts.
        question: A question to a person.
        warning: A warning.
        error: A failure.
        note: A note of less importance.
        summary: The end of a run; the names of files in a diff.
        place: The line numbers in a diff.
        added: A line that a diff adds.
        removed: A line that a diff removes.
    """

    step: str = "bold cyan"
    tool: str = "blue"
    result: str = "dim"
    agent: str = "magenta"
    thinking: str = "dim"
    question: str = "bold yellow"
    warning: str = "yellow"
    error: str = "red"
    note: str = "dim"
    summary: str = "bold"
    place: str = "cyan"
    added: str = "green"
    removed: str = "red"


def is_terminal(stream: Any) -> bool:
    """Return whether *stream* is a terminal."""
    return bool(stream.isatty())


def print_visible(text: str, hanging_indent: int | Callable[[str], int] = 0) -> None:
    """
    Print lines on stdout with control characters made visible; on a terminal, they wrap at words.

    Args:
        text: The lines.
        hanging_indent: The additional indentation of continuation lines, or a function that returns it for a line.
    """
    shown = visible(text)
    print(
        wrap_lines(shown, shutil.get_terminal_size().columns, hanging_indent) if is_terminal(sys.stdout) else shown,
        flush=True,
    )


def wrap_lines(text: str, width: int, hanging_indent: int | Callable[[str], int] = 0) -> str:
    """Wrap the lines of *text* at spaces to at most *width* cells; continuation lines have the same indentation plus *hanging_indent*."""
    more = hanging_indent if callable(hanging_indent) else lambda _: hanging_indent
    return "\n".join([part for line in text.split("\n") for part in _wrap_line(line, width, more(line))])


def _wrap_line(line: str, width: int, hanging_indent: int) -> Iterator[str]:
    """Yield the parts of a line that fit into *width* cells; later parts are indented."""
    from rich.cells import cell_len, chop_cells

    if cell_len(line) > width:
        line = line.rstrip(" ")
    if cell_len(line) <= width:
        yield line
        return
    bare = line.lstrip(" ")
    now = line[: len(line) - len(bare)]
    margin = " " * min(len(now) + hanging_indent, width // 2)
    used, is_empty = len(now), True
    for word in bare.split(" "):
        parts = [word]
        if not is_empty and used + 1 + cell_len(word) > width:
            yield now.rstrip(" ")
            now, used, is_empty = margin, len(margin), True
        if is_empty and used + cell_len(word) > width:  # longer than a line
            # A character may be two cells wide.
            first = chop_cells(word, width - used)[:1] if used + 1 < width else [""]
            parts = [*first, *chop_cells(word[len(first[0]) :], width - len(margin))]
        for part in parts[:-1]:
            yield (now + part).rstrip(" ")
            now, used = margin, len(margin)
        if word or not is_empty:  # spaces where a line was broken are gone
            gap = "" if is_empty else " "
            now, used, is_empty = now + gap + parts[-1], used + len(gap) + cell_len(parts[-1]), False
    yield now.rstrip(" ")


def can_draw_lines() -> bool:
    """Return whether the encoding of stdout is a UTF, so that box-drawing characters can be printed."""
    return "utf" in str(getattr(sys.stdout, "encoding", None) or "").lower()


def format_value(value: object) -> str:
    """Format a JSON value for a person: one member per line, lists with dashes, texts as they are."""
    return "\n".join(_format_value_lines(value, ""))


def _format_value_lines(value: object, indent: str) -> Iterator[str]:
    """Yield the lines of a JSON value: a member or an item per line, nested ones indented."""
    if isinstance(value, dict) and value:
        for name, member in value.items():
            yield from _format_member_lines(f"{indent}{visible(str(name), strict=True)}:", member, f"{indent}  ")
    elif isinstance(value, list) and value:
        for member in value:
            if isinstance(member, dict) and member:
                first, *rest = _format_value_lines(member, f"{indent}  ")
                yield from [f"{indent}- {first.lstrip(' ')}", *rest]
            else:
                yield from _format_member_lines(f"{indent}-", member, f"{indent}  ")
    elif isinstance(value, str):
        yield from [f"{indent}{line}".rstrip() for line in visible(value).split("\n")]
    else:
        yield f"{indent}{json.dumps(value)}"


def _format_member_lines(head: str, value: object, indent: str) -> Iterator[str]:
    """Yield *head* with a short value on the same line, or with the lines of a long one below."""
    lines = list(_format_value_lines(value, indent))
    is_short = not (isinstance(value, dict | list) and value) and len(lines) == 1
    yield from [f"{head} {lines[0].lstrip(' ')}".rstrip()] if is_short else [head, *lines]


def result_to_json(result: RunResult) -> dict[str, Any]:
    """Return *result* as one JSON object, with only ids and counts of the final state."""
    state = result.state
    return {
        "agent": state.agent_id,
        "run_id": state.run_id,
        "status": result.status.value,
        "stop_reason": result.stop_reason and result.stop_reason.value,
        "output": plain(result.output),
        "text": plain(result.text),
        "error": error_to_json(result.error),
        "usage": {**attrs.asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "cost": None if result.cost is None else str(result.cost),
        "steps": state.step_index,
        "tool_calls": [_call_to_json(c) for c in result.tool_calls],
        "pending_questions": [plain(q) for q in result.pending_questions],
        "waits_for": [wait_to_json(one) for one in result.waits_for],
        "wakes_at": result.wakes_at and result.wakes_at.isoformat(),
        "children": [
            {"agent": c.agent_id, "run_id": c.run_id, "status": c.status.value, "output": plain(c.output)}
            for c in result.children
        ],
        "session_id": result.session_id,
        "leaked": list(result.leaked),
        "warnings": [plain(w) for w in result.warnings],
    }


def print_output(output: object) -> None:
    """Print an output unless it is empty: as text for a person, as JSON for a pipe; a string is printed as it is."""
    told = plain(output)
    if told in (None, ""):
        return
    if isinstance(told, str):
        print_visible(told)
    elif is_terminal(sys.stdout):
        print_visible(format_value(told), hanging_indent=2)
    else:
        print(to_ascii_json(told))


def error_to_json(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error as JSON: its class, its message and its notes."""
    if error is None:
        return None
    return {
        "type": type(error).__name__,
        "message": plain(str(error)),
        "notes": [plain(note) for note in _collect_notes(error)],
    }


def format_error(error: BaseException) -> str:
    """Return the message of an error, with its notes on the lines below."""
    return "\n  ".join([str(error), *_collect_notes(error)])


def _collect_notes(error: BaseException) -> list[str]:
    """Return the notes of an error; for a ``ChildError``, those of its cause first. Other causes are not followed."""
    cause = _collect_notes(error.__cause__) if isinstance(error, ChildError) and error.__cause__ is not None else []
    return [*cause, *[note for note in getattr(error, "__notes__", ()) if note not in cause]]


def _call_to_json(call: Any) -> dict[str, Any]:
    """Return a tool call as JSON values, without the text of its result."""
    return {
        "tool": call.tool_name,
        "input": plain(call.input),
        "status": call.result.status,
        "source": call.source,
        "path": call.path,
        "step": call.step,
        "duration_ms": call.duration_ms,
    }


def format_tokens(usage: Usage) -> str:
    """Format the token counts of *usage*; ``""`` for none."""
    if not usage.total_tokens:
        return ""
    about = "at least " if usage.at_least else ""
    return f"{about}{usage.prompt_tokens:,} tokens in, {usage.completion_tokens:,} out"


def format_cost(cost: Decimal | None, *, usage: Usage | None = None) -> str:
    """Format *cost* in US dollars; ``"cost unknown"`` for ``None``. If *usage* is a lower bound, the text starts with "at least"."""
    if cost is None:
        return "cost unknown"
    about = "at least " if usage is not None and usage.at_least else ""
    return f"{about}${cost:.4f}" if cost < 1 else f"{about}${cost:.2f}"
