"""
Values as text and as JSON, on their way to a terminal or a pipe (reliability UI01, UI02).

Everything from models, tools and files that would steer the terminal or hide itself is shown as an escape
(``stepengine.data.visible``); only our own colours reach the screen.
"""

from __future__ import annotations

import json
import sys
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.codec import plain
from stepengine.data.state import RunResult
from stepengine.data.usage import Usage
from stepengine.data.visible import visible
from stepengine.errors import ChildError

__all__ = (
    "COLORS",
    "ColorScheme",
    "cut",
    "dumps",
    "error_of",
    "is_terminal",
    "json_of",
    "message_of",
    "money",
    "one_line",
    "output_of",
    "tokens",
    "visible",
)


@attrs.frozen(kw_only=True)
class ColorScheme:
    """
    The style of each kind of line, in the words of rich: ``"bold cyan"``, ``"#ff8800"``, ``"dim"``; ``""`` for none.

    On an output that is no terminal, and where ``NO_COLOR`` is set, there are no colours whatever the scheme says.

    Attributes:
        step: A step of the model.
        tool: A tool call that begins.
        result: A tool call that went well; a todo that is done.
        agent: A child that begins or ends.
        thinking: Thoughts.
        question: What a person is asked.
        warning: What somebody should look at.
        error: What failed.
        note: What is said in passing.
        summary: How a run ended; the names of files in a diff.
        place: A place in a diff.
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


COLORS = ColorScheme()


def cut(text: str, width: int) -> str:
    """Return *text*, cut with an ellipsis to at most *width* characters."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def one_line(text: str, width: int = 100) -> str:
    """Return *text* as one visible line of at most *width* characters."""
    return cut(visible(" ".join(text[: 4 * width].split()), strict=True), width)


def dumps(value: Any) -> str:
    """Return *value* as indented JSON in ASCII, so that no byte of it can steer a terminal."""
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f")


def is_terminal(stream: Any = None) -> bool:
    """Return whether *stream*, by default stderr, is a terminal that can redraw a line."""
    return bool((stream or sys.stderr).isatty())


def json_of(result: RunResult[Any]) -> dict[str, Any]:
    """Return *result* as one JSON object: everything but the final state, of which it keeps ids and counts."""
    state = result.state
    return {
        "agent": state.agent_id,
        "run_id": state.run_id,
        "status": result.status.value,
        "stop_reason": result.stop_reason and result.stop_reason.value,
        "output": output_of(result.output),
        "text": plain(result.text),
        "error": error_of(result.error),
        "usage": {**attrs.asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "cost": None if result.cost is None else str(result.cost),
        "steps": state.step_index,
        "tool_calls": [_call(c) for c in result.tool_calls],
        "pending_questions": [plain(q) for q in result.pending_questions],
        "children": [
            {"agent": c.agent_id, "run_id": c.run_id, "status": c.status.value, "output": output_of(c.output)}
            for c in result.children
        ],
        "session_id": result.session_id,
        "leaked": list(result.leaked),
        "warnings": [plain(w) for w in result.warnings],
    }


def output_of(output: Any) -> Any:
    """Return an output as JSON; a pydantic model by its own JSON form."""
    dump = getattr(output, "model_dump", None)
    return plain(output if dump is None else dump(mode="json"))


def error_of(error: BaseException | None) -> dict[str, Any] | None:
    """Return an error as JSON: its class, its message and its notes."""
    if error is None:
        return None
    return {
        "type": type(error).__name__,
        "message": plain(str(error)),
        "notes": [plain(note) for note in _notes(error)],
    }


def message_of(error: BaseException) -> str:
    """Return what an error says, and on lines below it what is noted with it: where it happened, what else went wrong."""
    return "\n  ".join([str(error), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error, those of a child's own first."""
    cause = _notes(error.__cause__) if isinstance(error, ChildError) and error.__cause__ is not None else []
    return [*cause, *[note for note in getattr(error, "__notes__", ()) if note not in cause]]


def _call(call: Any) -> dict[str, Any]:
    return {
        "tool": call.tool_name,
        "input": plain(call.input),
        "status": call.result.status,
        "source": call.source,
        "step": call.step,
        "duration_ms": call.duration_ms,
    }


def tokens(usage: Usage) -> str:
    """Return the tokens of *usage* in words; ``""`` when there are none."""
    if not usage.total_tokens:
        return ""
    about = "at least " if usage.at_least else ""
    return f"{about}{usage.prompt_tokens:,} tokens in, {usage.completion_tokens:,} out"


def money(cost: Decimal | None) -> str:
    """Return *cost* in US dollars; a cost that is unknown is not zero."""
    if cost is None:
        return "cost unknown"
    return f"${cost:.4f}" if cost < 1 else f"${cost:.2f}"
