"""What is wrong with a simulated run, and the checks that need nothing but what they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import attrs

from stepengine.data.messages import AssistantMessage, Message, ToolMessage
from stepengine.machine.plan import Finished

__all__ = ("Violation", "expect_same_end", "refuse", "unpaired")

WIDTH = 300


class Violation(Exception):
    """
    Something that must hold does not.

    Attributes:
        row: Which row: ``"I1"`` ... of the invariants, ``"I3"`` for a run that goes on otherwise after a crash, ``"R1"``
            for a run that does not end well, ``"handler"`` for a handler that let out an error of its own.
    """

    def __init__(self, row: str, message: str) -> None:
        super().__init__(f"{row}: {message}")
        self.row = row


def refuse(row: str, message: str) -> NoReturn:
    """
    Tell that something does not hold.

    Raises:
        Violation: always.
    """
    raise Violation(row, message)


def unpaired(messages: Sequence[Message]) -> str | None:
    """Return what is wrong with the pairing of calls and results in *messages*; ``None`` when nothing is (I1)."""
    seen: set[str] = set()
    waiting: list[str] = []
    for message in messages:
        if isinstance(message, ToolMessage):
            if not waiting or waiting[0] != message.tool_call_id:
                return f"a result for {message.tool_call_id!r} stands where {waiting[:1] or 'none'} is due"
            waiting.pop(0)
            continue
        if waiting:
            return f"calls {waiting} have no result"
        if isinstance(message, AssistantMessage):
            waiting = [call.tool_call_id for call in message.tool_calls]
            if len({*waiting}) < len(waiting) or seen & {*waiting}:
                return f"call ids {waiting} are used twice"
            seen.update(waiting)
    return f"calls {waiting} have no result" if waiting else None


def expect_same_end(row: str, when: str, finished: Finished, due: Finished) -> None:
    """
    Compare two ends of what must be the same run.

    Raises:
        Violation: naming the field that differs.
    """
    problem = _difference("", finished, due, "state") or _difference("state's ", finished.state, due.state)
    if problem:
        refuse(row, f"{when}, {problem}")


def _difference(whose: str, one: Any, other: Any, *but: str) -> str:
    for field in attrs.fields(type(one)):
        name = field.name
        ours, theirs = getattr(one, name), getattr(other, name)
        if name not in but and ours != theirs and (name != "error" or repr(ours) != repr(theirs)):
            return f"the {whose}{name} of the run is {_short(ours)}, and was {_short(theirs)}"
    return ""


def _short(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= WIDTH else f"{said[:WIDTH]}... ({len(said)} characters)"
