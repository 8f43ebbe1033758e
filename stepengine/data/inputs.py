"""The inputs that can be sent to a running run: a closed union."""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import frozen

from stepengine.data.questions import AnswerLike


@frozen
class UserInput:
    """A text of the user; it becomes a user message before the next model call."""

    text: str


@frozen
class ToolResultInput:
    """
    The result of a deferred tool.

    Attributes:
        tool_call_id: The call's id, as in ``ToolStarted``.
        result: A ``ToolResult``, or any value that a tool may return.
        path: The path of the run that made the call, as in ``ToolStarted``. It is only needed if calls with the same id wait
            in several runs of the tree.
    """

    tool_call_id: str
    result: Any
    path: str | None = None


@frozen
class AnswerInput:
    """The answer to an open question, permission questions included."""

    question_id: str
    answer: AnswerLike


@frozen
class Interrupt:
    """End the turn gracefully; a handle that stays open is idle then."""


@frozen
class Shutdown:
    """End the run and its children, and close its handle."""


RunInput: TypeAlias = UserInput | ToolResultInput | AnswerInput | Interrupt | Shutdown
"""The inputs of ``RunHandle.send`` for a running run."""
