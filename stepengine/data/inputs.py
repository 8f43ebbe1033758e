"""The inputs that can be sent to a running run: a closed union."""

from __future__ import annotations

from typing import Any, TypeAlias

from attrs import frozen

from stepengine.data.questions import AnswerLike


@frozen
class UserInput:
    """Something that the user says; it becomes a user message before the next model call."""

    text: str


@frozen
class ToolResultInput:
    """
    The result of a deferred tool.

    Attributes:
        tool_call_id: The call's id, as ``ToolStarted`` has it.
        result: A ``ToolResult``, or whatever a tool may return.
        path: The path of the run that made the call, as ``ToolStarted`` has it; needed only where calls of several runs of the
            tree that have the same id wait.
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
    """End the turn gracefully; a kept-open handle is idle then."""


@frozen
class Shutdown:
    """End the run and its children, and a kept-open handle with it."""


RunInput: TypeAlias = UserInput | ToolResultInput | AnswerInput | Interrupt | Shutdown
"""What ``RunHandle.send`` takes while a run goes on."""
