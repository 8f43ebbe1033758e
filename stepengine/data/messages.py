"""
Messages: a closed union by role (requirements B10).

There is no system message: the system prompt lives in the state. Every message has a private slot for derived values
that ``Transcript.memo`` fills, so that encoded blocks travel with the message that they belong to.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeAlias

import attrs

from stepengine.data.makers import maker_of
from stepengine.data.parts import (
    AssistantPart,
    ResultPart,
    ThinkingPart,
    ToolCallPart,
    UserPart,
    assistant_parts,
    joined_text,
    result_parts,
    strings,
    user_parts,
)
from stepengine.data.results import ResultStatus, ToolResult
from stepengine.data.thoughts import parted
from stepengine.errors import DataError

__all__ = (
    "AssistantMessage",
    "Message",
    "TimeToLive",
    "ToolMessage",
    "UserMessage",
    "quick_assistant",
    "quick_tool",
    "system_reminder",
)

TimeToLive: TypeAlias = Literal["agent_step", "user_prompt"]
"""When a message leaves the history: at the end of the step that it is there for, or of the run (generator-contract L34)."""


def _ttl(value: TimeToLive | None) -> TimeToLive | None:
    if value is None or value in ("agent_step", "user_prompt"):
        return value
    msg = f"the time-to-live of a message is 'agent_step', 'user_prompt' or None, not {value!r}"
    raise DataError(msg)


def _memo_slot() -> Any:
    return attrs.field(init=False, default=None, eq=False, repr=False)


@attrs.frozen
class UserMessage:
    """
    What a person, or the engine on a person's behalf, says to the model (requirements B11).

    Attributes:
        content: The parts; a string is one text part.
        tags: What the message is, for hooks and pruning: ``USER_PROMPT``, ``INSTRUCTIONS_PROMPT``, ``STEP_PROMPT`` ...
        ttl: When it leaves the history; ``None`` keeps it.
    """

    role: ClassVar[Literal["user"]] = "user"
    content: tuple[UserPart, ...] = attrs.field(converter=user_parts)
    tags: tuple[str, ...] = attrs.field(default=(), converter=strings)
    ttl: TimeToLive | None = attrs.field(default=None, converter=_ttl, kw_only=True)
    _memo: dict[Any, Any] | None = _memo_slot()

    @property
    def text(self) -> str:
        """The text parts joined."""
        return joined_text(self.content)


@attrs.frozen(weakref_slot=False)
class AssistantMessage:
    """
    One reply of a model, its parts in the order received (requirements B12).

    Attributes:
        content: The parts; a string is one text part.
        tags: What the message is, for hooks and pruning.
        ttl: When it leaves the history; ``None`` keeps it, and so do tool calls in it.
    """

    role: ClassVar[Literal["assistant"]] = "assistant"
    content: tuple[AssistantPart, ...] = attrs.field(converter=assistant_parts)
    tags: tuple[str, ...] = attrs.field(default=(), converter=strings)
    ttl: TimeToLive | None = attrs.field(default=None, converter=_ttl, kw_only=True)
    _memo: dict[Any, Any] | None = _memo_slot()

    @property
    def text(self) -> str:
        """The text and refusal parts joined."""
        return joined_text(self.content)

    @property
    def said(self) -> str:
        """The text without the thoughts that some models write into it."""
        return parted(self.text).said

    @property
    def tool_calls(self) -> tuple[ToolCallPart, ...]:
        """The tool call parts in order."""
        return tuple([p for p in self.content if type(p) is ToolCallPart])

    @property
    def thinking(self) -> tuple[str, ...]:
        """The non-empty thinking texts in order."""
        return tuple([p.text for p in self.content if type(p) is ThinkingPart and p.text])


quick_assistant = maker_of(AssistantMessage)


@attrs.frozen(weakref_slot=False)
class ToolMessage:
    """
    The result of one tool call, as the history holds it (requirements B13).

    Attributes:
        tool_call_id: The call that this answers.
        tool_name: The tool that was called.
        content: The ordered parts of the result.
        status: As in ``ToolResult``.
    """

    role: ClassVar[Literal["tool"]] = "tool"
    ttl: ClassVar[None] = None
    tool_call_id: str
    tool_name: str
    content: tuple[ResultPart, ...] = attrs.field(converter=result_parts)
    status: ResultStatus = "ok"
    _memo: dict[Any, Any] | None = _memo_slot()

    @classmethod
    def of(cls, result: ToolResult) -> ToolMessage:
        """Return the message that stores *result*."""
        return cls(result.tool_call_id, result.tool_name, result.content, result.status)

    @property
    def is_error(self) -> bool:
        """Whether the call did not do what it was asked for."""
        return self.status not in ("ok", "pending")

    @property
    def text(self) -> str:
        """The text parts joined, JSON parts as compact JSON."""
        return joined_text(self.content)

    @property
    def result(self) -> ToolResult:
        """The stored result."""
        return ToolResult(self.content, status=self.status, tool_name=self.tool_name, tool_call_id=self.tool_call_id)


quick_tool = maker_of(ToolMessage)


Message: TypeAlias = UserMessage | AssistantMessage | ToolMessage


def system_reminder(text: str) -> str:
    """Return *text* as a model is told of it beside what people say (requirements I20, generator-contract L32)."""
    return f"<system-reminder>\n{text}\n</system-reminder>"
