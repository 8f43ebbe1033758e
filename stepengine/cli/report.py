"""What is left when a run has ended: its exit code, its JSON form, and the sentence about what it spent."""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum
from typing import Any, assert_never

import attrs

from stepengine.data.codec import plain
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import ChildError, LimitExceeded, MissingKey, ReplayDivergence, UnknownModel

__all__ = ("Exit", "exit_code", "json_of", "message_of", "money", "output_of", "tokens")


class Exit(IntEnum):
    """What the command line tells its caller (ecosystem EC141)."""

    COMPLETED = 0
    FAILED = 1
    USAGE = 2
    SUSPENDED = 3
    LIMIT = 4
    DIVERGED = 5
    INTERRUPTED = 130
    TERMINATED = 143


def exit_code(result: RunResult[Any]) -> Exit:
    """Return the exit code of *result*; a run that nobody interrupted and that was cancelled has failed."""
    match result.status:
        case RunStatus.COMPLETED:
            return Exit.COMPLETED
        case RunStatus.SUSPENDED:
            return Exit.SUSPENDED
        case RunStatus.MAX_STEPS | RunStatus.TRUNCATED:
            return Exit.LIMIT
        case RunStatus.FAILED | RunStatus.CANCELLED:
            return _failed(result.error)
        case _ as never:
            assert_never(never)


def _failed(error: BaseException | None) -> Exit:
    match error:
        case LimitExceeded():
            return Exit.LIMIT
        case ReplayDivergence():
            return Exit.DIVERGED
        case MissingKey() | UnknownModel():
            return Exit.USAGE
        case ChildError(__cause__=MissingKey() | UnknownModel() | ChildError() as cause):
            return _failed(cause)
        case _:
            return Exit.FAILED


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
