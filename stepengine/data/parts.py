"""
The parts that messages, replies and tool results are made of.

A part is a frozen value. ``provider_data`` holds what only the provider that made a part understands (thinking
signatures, its own call ids); it always names that provider under ``"provider"`` and survives every transformation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from stepengine.data.json import JsonDict, JsonValue, compact, freeze, freeze_object, text_of
from stepengine.data.makers import maker_of
from stepengine.errors import DataError

__all__ = (
    "AssistantPart",
    "DocumentPart",
    "ImagePart",
    "JsonPart",
    "OpaquePart",
    "Part",
    "RefusalPart",
    "ResultPart",
    "TextPart",
    "ThinkingPart",
    "ToolCallPart",
    "UserPart",
    "assistant_parts",
    "joined_text",
    "parts_of",
    "quick_call",
    "quick_json",
    "quick_text",
    "result_parts",
    "strings",
    "tuple_of",
    "user_parts",
)


def _object_or_none(value: Mapping[str, Any] | None) -> JsonDict | None:
    return None if value is None else freeze_object(value)


def _text_or_none(value: str | None) -> str | None:
    return None if value is None else text_of(value)


@attrs.frozen(weakref_slot=False)
class TextPart:
    """Plain text."""

    text: str = attrs.field(converter=text_of)
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)


quick_text = maker_of(TextPart)


@attrs.frozen
class ThinkingPart:
    """What a model thought before it answered. *text* may be empty when the provider hides it (requirements B12)."""

    text: str = attrs.field(converter=text_of)
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)


@attrs.frozen
class RefusalPart:
    """The text with which a model refused."""

    text: str = attrs.field(converter=text_of)
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)


@attrs.frozen(weakref_slot=False)
class ToolCallPart:
    """
    A tool call inside an assistant message (requirements B13).

    Attributes:
        tool_call_id: ``c<n>`` inside a run; empty in a reply that the machine has not numbered yet.
        tool_name: The tool's name as the model wrote it.
        input: The arguments, a JSON object; empty when they could not be read.
        raw_input: The arguments' text as received, kept only when it could not be read or was cut off.
        input_error: Why *raw_input* could not be read; ``None`` when *input* is good.
        provider_data: With ``"id"``, the provider's own id of the call. A part without data of the target provider is
            *foreign* there (design 6).
    """

    tool_call_id: str
    tool_name: str = attrs.field(converter=text_of)
    input: JsonDict = attrs.field(factory=JsonDict, converter=freeze_object)
    raw_input: str | None = attrs.field(default=None, converter=_text_or_none, kw_only=True)
    input_error: str | None = attrs.field(default=None, converter=_text_or_none, kw_only=True)
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)


quick_call = maker_of(ToolCallPart)


def _check_source(part: ImagePart | DocumentPart) -> None:
    if (part.url is None) == (part.data is None):
        msg = f"{type(part).__name__} needs exactly one of url= and data="
        raise DataError(msg)
    if not isinstance(part.data, bytes | None):
        msg = f"the data of {type(part).__name__} is bytes, not a {type(part.data).__name__}"
        raise DataError(msg)


@attrs.frozen
class ImagePart:
    """An image, by *url* or as bytes in *data*; *mime_type* such as ``"image/png"`` (requirements B14)."""

    url: str | None = attrs.field(default=None, converter=_text_or_none)
    data: bytes | None = None
    mime_type: str = "image/png"
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check_source(self)


@attrs.frozen
class DocumentPart:
    """A document, by *url* or as bytes in *data*; *name* is a file name to show (requirements B14)."""

    url: str | None = attrs.field(default=None, converter=_text_or_none)
    data: bytes | None = None
    mime_type: str = "application/pdf"
    name: str = ""
    provider_data: JsonDict | None = attrs.field(default=None, converter=_object_or_none, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check_source(self)


@attrs.frozen(weakref_slot=False)
class JsonPart:
    """A JSON value inside a tool result."""

    value: JsonValue = attrs.field(converter=freeze)


quick_json = maker_of(JsonPart)


@attrs.frozen
class OpaquePart:
    """
    A reply part that only its provider understands, kept as it came and sent back to nobody else.

    Attributes:
        provider: The adapter that made it, such as ``"anthropic"``.
        data: The part as the provider sent it.
    """

    provider: str
    data: JsonDict = attrs.field(converter=freeze_object)


UserPart: TypeAlias = TextPart | ImagePart | DocumentPart
AssistantPart: TypeAlias = TextPart | ThinkingPart | ToolCallPart | RefusalPart | OpaquePart
ResultPart: TypeAlias = TextPart | JsonPart | ImagePart | DocumentPart
Part: TypeAlias = UserPart | AssistantPart | ResultPart


_MEDIA = frozenset((TextPart, ImagePart, DocumentPart))
_USER: frozenset[type] = _MEDIA
_ASSISTANT: frozenset[type] = frozenset((TextPart, ThinkingPart, ToolCallPart, RefusalPart, OpaquePart))
_RESULT: frozenset[type] = _MEDIA | {JsonPart}


def user_parts(content: str | UserPart | Sequence[str | UserPart]) -> tuple[UserPart, ...]:
    """Turn a string, a part or a sequence of both into the parts of a user message."""
    return parts_of(content, _USER, "a user message")


def assistant_parts(content: str | AssistantPart | Sequence[str | AssistantPart]) -> tuple[AssistantPart, ...]:
    """Turn a string, a part or a sequence of both into the parts of an assistant message."""
    return parts_of(content, _ASSISTANT, "an assistant message")


def result_parts(content: str | ResultPart | Sequence[str | ResultPart]) -> tuple[ResultPart, ...]:
    """Turn a string, a part or a sequence of both into the parts of a tool result; a string is one part, also when empty."""
    return (TextPart(content),) if isinstance(content, str) else parts_of(content, _RESULT, "a tool result")


def parts_of(content: Any, allowed: frozenset[type], where: str) -> tuple[Any, ...]:
    """
    Turn *content* into parts of the *allowed* classes.

    Raises:
        DataError: for anything else, naming *where* it was to stand.
    """
    if type(content) is tuple and allowed.issuperset(map(type, content)):
        return content
    if isinstance(content, str):
        return (TextPart(content),) if content else ()
    if type(content) in allowed:
        return (content,)
    if not isinstance(content, (list, tuple)):
        msg = f"{where} holds a string or a sequence of parts, not a {type(content).__name__}"
        raise DataError(msg)
    parts = tuple([TextPart(p) if isinstance(p, str) else p for p in content])
    for part in parts:
        if type(part) not in allowed:
            msg = f"{where} cannot hold a {type(part).__name__}"
            raise DataError(msg)
    return parts


def strings(value: str | Iterable[str]) -> tuple[str, ...]:
    """Turn one string or several into a tuple of them."""
    if type(value) is tuple:
        return value
    return (value,) if isinstance(value, str) else tuple(value)


def tuple_of(value: Iterable[Any]) -> tuple[Any, ...]:
    """Turn several values into a tuple of them."""
    return value if type(value) is tuple else tuple(value)


def joined_text(parts: tuple[Any, ...]) -> str:
    """Return the text and refusal parts of *parts* joined, JSON parts as compact JSON."""
    if len(parts) == 1 and type(parts[0]) is TextPart:
        return parts[0].text
    texts = []
    for part in parts:
        kind = type(part)
        if kind is TextPart or kind is RefusalPart:
            texts.append(part.text)
        elif kind is JsonPart:
            texts.append(compact(part.value))
    return "".join(texts)
