"""
Foreign history in and out: the widespread ``{"role", "content"}`` form (requirements B18).

Its content is text or blocks of type ``text``, ``tool_use``, ``tool_result``, ``image`` and the like.
Reading also takes messages in our own stored form (``{"type": "UserMessage", ...}``), so that nothing is lost when a
handler passes messages on as JSON. Writing keeps everything that the form can hold; provider data is left out.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from stepengine.data.json import JsonValue, freeze_object, text_of, thaw
from stepengine.data.leaves import fault, shown, within
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage
from stepengine.data.parts import (
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    joined_text,
)
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError

__all__ = ("History", "from_dicts", "read_history", "to_dicts")


class History(NamedTuple):
    """An imported history: the system prompt that stood in it, and the messages."""

    system_prompt: str
    transcript: Transcript


def from_dicts(messages: Iterable[Any]) -> Transcript:
    """
    Return the transcript of *messages*; there must be no system message (``read_history`` takes them out).

    Raises:
        DataError: for a message or block that cannot be read, naming the place.
        TranscriptError: when calls and results do not pair.
    """
    history = read_history(messages)
    if history.system_prompt:
        msg = "a transcript holds no system message; read_history() returns it apart"
        raise DataError(msg)
    return history.transcript


def read_history(messages: Iterable[Any]) -> History:
    """Return system prompt and transcript of *messages*; several system messages are joined by a blank line."""
    system: list[str] = []
    found: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                system.append(_text(message.get("content")))
            else:
                found.extend(_read(message, names))
        except DataError as error:
            raise within(error, f"[{index}]") from None
        if found and type(found[-1]) is AssistantMessage:
            names.update({c.tool_call_id: c.tool_name for c in found[-1].tool_calls})
    return History("\n\n".join(system), Transcript(found))


def _read(message: Any, names: Mapping[str, str]) -> list[Message]:
    if isinstance(message, (UserMessage, AssistantMessage, ToolMessage)):
        return [message]
    role = message.get("role") if isinstance(message, Mapping) else None
    if isinstance(message, Mapping) and role is None and "type" in message:
        return [_stored(message)]
    if role == "assistant":
        return [AssistantMessage(_each(message.get("content"), _assistant_part))]
    if role != "user":
        msg = f"a message needs role 'user' or 'assistant', not {shown(role)}"
        raise fault(msg)
    blocks = _each(message.get("content"), partial(_user_part, names=names))
    results = [b for b in blocks if isinstance(b, ToolMessage)]
    others = [b for b in blocks if not isinstance(b, ToolMessage)]
    return [*results, *([UserMessage(others)] if others or not results else [])]


def _stored(message: Mapping[str, Any]) -> Message:
    from stepengine.data.codec import FORMAT, from_json  # noqa: PLC0415

    loaded: Message = from_json({"stepengine": FORMAT, **message})
    return loaded


def _each(content: Any, read: Callable[[Mapping[str, Any]], Any]) -> list[Any]:
    """Return what *read* makes of every block of *content*; text is one block, empty text none."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, (list, tuple)):
        raise within(fault(f"expected text or a list of blocks, not {shown(content)}"), ".content")
    made: list[Any] = []
    try:
        for block in content:
            made.append(read(freeze_object(block)))  # noqa: PERF401 - the error below needs to know how far it came
    except DataError as error:
        raise within(error, f".content[{len(made)}]") from None
    return made


def _text(content: Any) -> str:
    return joined_text(tuple([b for b in _each(content, _user_part) if isinstance(b, TextPart)]))


def _need(block: Mapping[str, Any], name: str) -> Any:
    if name in block:
        return block[name]
    raise within(fault(f"a block of type {shown(block.get('type'))} needs this"), f".{name}")


def _need_text(block: Mapping[str, Any], name: str) -> str:
    return text_of(_need(block, name), f"$.{name}")


def _assistant_part(block: Mapping[str, Any]) -> Any:
    match block.get("type"):
        case "text":
            return TextPart(_need_text(block, "text"))
        case "thinking":
            return ThinkingPart(_need_text(block, "thinking"))
        case "refusal":
            return RefusalPart(_need_text(block, "refusal"))
        case "tool_use":
            value = block.get("input") or {}
            return ToolCallPart(_need_text(block, "id"), _need_text(block, "name"), freeze_object(value, "$.input"))
        case "opaque":
            return OpaquePart(_need_text(block, "provider"), freeze_object(_need(block, "data"), "$.data"))
        case other:
            msg = f"unknown assistant block {shown(other)}"
            raise fault(msg)


def _user_part(block: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Any:
    match block.get("type"):
        case "text":
            return TextPart(_need_text(block, "text"))
        case "image":
            return ImagePart(**_source(block))
        case "document":
            return DocumentPart(**_source(block), name=text_of(block.get("title") or "", "$.title"))
        case "tool_result" if names is not None:
            return _tool_message(block, names)
        case other:
            msg = f"unknown block {shown(other)}"
            raise fault(msg)


def _source(block: Mapping[str, Any]) -> dict[str, Any]:
    source = freeze_object(_need(block, "source"), "$.source")
    try:
        if source.get("type") == "url" and "media_type" not in source:
            return {"url": _need_text(source, "url")}
        kind = _need_text(source, "media_type")
        if source.get("type") == "url":
            return {"url": _need_text(source, "url"), "mime_type": kind}
        return {"data": base64.b64decode(_need_text(source, "data"), validate=True), "mime_type": kind}
    except DataError as error:
        raise within(error, ".source") from None
    except ValueError:
        raise within(fault("expected base64 text"), ".source.data") from None


def _tool_message(block: Mapping[str, Any], names: Mapping[str, str]) -> ToolMessage:
    call_id = _need_text(block, "tool_use_id")
    content = block.get("content", "")
    parts = [TextPart(content)] if isinstance(content, str) else _each(content, _result_part)
    return ToolMessage(call_id, names.get(call_id, ""), parts, "error" if block.get("is_error") else "ok")


def _result_part(block: Mapping[str, Any]) -> Any:
    return JsonPart(block.get("value")) if block.get("type") == "json" else _user_part(block)


def to_dicts(transcript: Iterable[Message]) -> list[dict[str, JsonValue]]:
    """Return *transcript* in the widespread form; results that follow each other share one user message."""
    written: list[dict[str, Any]] = []
    for message in transcript:
        blocks: list[Any] = [_written(p) for p in message.content]
        if isinstance(message, ToolMessage):
            error = {"is_error": True} if message.is_error else {}
            block = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": blocks, **error}
            last = written[-1] if written else {}
            if last.get("role") == "user" and last["content"][-1:] and last["content"][-1]["type"] == "tool_result":
                last["content"].append(block)
            else:
                written.append({"role": "user", "content": [block]})
        else:
            written.append({"role": message.role, "content": blocks})
    return written


def _written(part: Any) -> dict[str, Any]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ThinkingPart(text=text):
            return {"type": "thinking", "thinking": text}
        case RefusalPart(text=text):
            return {"type": "refusal", "refusal": text}
        case ToolCallPart(tool_call_id=call_id, tool_name=name, input=value):
            return {"type": "tool_use", "id": call_id, "name": name, "input": thaw(value)}
        case JsonPart(value=value):
            return {"type": "json", "value": thaw(value)}
        case OpaquePart(provider=provider, data=data):
            return {"type": "opaque", "provider": provider, "data": thaw(data)}
        case _:
            kind = "image" if isinstance(part, ImagePart) else "document"
            title = {"title": part.name} if kind == "document" and part.name else {}
            return {"type": kind, "source": _written_source(part), **title}


def _written_source(part: ImagePart | DocumentPart) -> dict[str, str]:
    if part.data is None:
        return {"type": "url", "url": str(part.url), "media_type": part.mime_type}
    return {"type": "base64", "media_type": part.mime_type, "data": base64.b64encode(part.data).decode()}
