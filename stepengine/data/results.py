"""What a tool call gives: ``ToolResult``, and what it may change or has done beside its content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import attrs

from stepengine.data.json import JsonValue, freeze, mended
from stepengine.data.makers import maker_of
from stepengine.data.parts import (
    DocumentPart,
    ImagePart,
    JsonPart,
    ResultPart,
    TextPart,
    joined_text,
    result_parts,
    tuple_of,
)

if TYPE_CHECKING:
    from stepengine.data.hooks import Change

__all__ = ("ResultStatus", "SideEffect", "ToolCallLog", "ToolResult", "quick_log", "quick_result", "result_parts")

ResultStatus: TypeAlias = Literal["ok", "error", "pending", "skipped", "denied", "cancelled"]


class _Text:
    """``result.text`` is the text of a result; ``ToolResult.text("...")`` makes one (requirements B15, design 14)."""

    @overload
    def __get__(self, instance: None, owner: type[ToolResult]) -> Callable[..., ToolResult]: ...
    @overload
    def __get__(self, instance: ToolResult, owner: type[ToolResult]) -> str: ...
    def __get__(self, instance: ToolResult | None, owner: type[ToolResult]) -> Any:
        if instance is not None:
            return joined_text(instance.content)
        return lambda text, **fields: owner(TextPart(text), **fields)


@attrs.frozen
class SideEffect:
    """
    Something a tool did to the world, for the log (requirements E12).

    Attributes:
        kind: A word such as ``"file_written"``.
        target: What was affected, such as a path.
        details: Free JSON.
    """

    kind: str
    target: str = ""
    details: JsonValue = attrs.field(default=None, converter=freeze)


@attrs.frozen(weakref_slot=False)
class ToolResult:
    """
    The result of one tool call (requirements B15, generator-contract G24).

    Make one with ``ToolResult.text("...")``, ``.json(value)``, ``.error("...")`` or ``.parts([...])``.

    Attributes:
        content: The ordered parts.
        status: ``"ok"``, or why there is no ordinary result: ``"error"``, ``"pending"``, ``"skipped"``, ``"denied"``,
            ``"cancelled"``. Everything but ``"ok"`` and ``"pending"`` is an error.
        tool_name: The tool that was called; set by the machine.
        tool_call_id: The call that this answers; set by the machine.
        credits_used: Credits that the tool reports, never money (requirements X20).
        side_effects: What it did to the world.
        change: What the tool wants changed in its run, such as ``Change(context={...})``; made once, when the call has
            run, so that the next call and every hook see it.
    """

    content: tuple[ResultPart, ...] = attrs.field(default=(), converter=result_parts)
    status: ResultStatus = attrs.field(default="ok", kw_only=True)
    tool_name: str = attrs.field(default="", kw_only=True)
    tool_call_id: str = attrs.field(default="", kw_only=True)
    credits_used: float = attrs.field(default=0, kw_only=True)
    side_effects: tuple[SideEffect, ...] = attrs.field(default=(), converter=tuple_of, kw_only=True)
    change: Change | None = attrs.field(default=None, kw_only=True)

    text = _Text()

    @classmethod
    def json(cls, value: JsonValue, **fields: Any) -> ToolResult:
        """Return a result that holds one JSON value."""
        return cls((JsonPart(value),), **fields)

    @classmethod
    def parts(cls, parts: Sequence[ResultPart | str], **fields: Any) -> ToolResult:
        """Return a result that holds *parts* in order."""
        return cls(parts, **fields)

    @classmethod
    def error(cls, message: str, **fields: Any) -> ToolResult:
        """Return an error result with *message* as its text."""
        return cls((TextPart(mended(message)),), **{"status": "error", **fields})

    @classmethod
    def pending(cls, question_id: str, **fields: Any) -> ToolResult:
        """Return the result that stands in for an answer which has not come yet (requirements K6)."""
        text = f"Pending: waiting for the answer to question {question_id}."
        return cls((TextPart(text),), **{"status": "pending", **fields})

    @property
    def is_error(self) -> bool:
        """Whether the call did not do what it was asked for."""
        return self.status not in ("ok", "pending")

    @property
    def data(self) -> JsonValue:
        """The value of the first JSON part, or ``None`` when there is none."""
        for part in self.content:
            if isinstance(part, JsonPart):
                return part.value
        return None

    @property
    def media(self) -> tuple[ImagePart | DocumentPart, ...]:
        """The image and document parts."""
        return tuple([p for p in self.content if isinstance(p, ImagePart | DocumentPart)])


quick_result = maker_of(ToolResult)


@attrs.frozen(weakref_slot=False)
class ToolCallLog:
    """
    One tool call of a run as the result lists it (requirements D10).

    Attributes:
        tool_name: The tool.
        input: Its input as executed, after hooks changed it.
        result: What came back.
        step: The step index in which it ran.
        duration_ms: Milliseconds by the run's clock, 0 for control tools.
        tool_call_id: The call's id, also when it is not in the history.
        source: Who asked for it.
    """

    tool_name: str
    input: JsonValue = attrs.field(converter=freeze)
    result: ToolResult
    step: int
    duration_ms: int
    tool_call_id: str
    source: Literal["model", "handler", "hook"] = "model"

    @property
    def is_error(self) -> bool:
        """Whether the call failed."""
        return self.result.is_error


quick_log = maker_of(ToolCallLog)
