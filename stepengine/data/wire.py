"""
Foreign history in and out: the widespread ``{"role", "content"}`` form with ``text``, ``tool_use`` and ``tool_result``
blocks (requirements B18).

Reading also takes messages in our own stored form (``{"type": "UserMessage", ...}``), so that nothing is lost when a
handler passes messages on as JSON. Writing keeps everything that the form can hold; provider data is left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stepengine.data.json import JsonValue, freeze, thaw
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
        path = f"$[{index}]"
        if isinstance(message, UserMessage | AssistantMessage | ToolMessage):
            found.append(message)
        elif isinstance(message, Mapping) and "type" in message and "role" not in message:
            found.append(_stored(message))
        elif isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
            system.append(_text(message.get("content"), path))
        else:
            found.extend(_read(message, path, names))
        for call in getattr(found[-1], "tool_calls", ()) if found else ():
            names[call.tool_call_id] = call.tool_name
    return History("\n\n".join(system), Transcript(found))


def _stored(message: Mapping[str, Any]) -> Message:
    from stepengine.data.codec import FORMAT, from_json  # noqa: PLC0415

    loaded: Message = from_json({"stepengine": FORMAT, **message})
    return loaded


def _text(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join([b["text"] for b in _blocks(content, path) if b.get("type") == "text"])


def _blocks(content: Any, path: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if isinstance(content, list | tuple) and all(isinstance(b, Mapping) for b in content):
        return list(content)
    raise DataError(f"content at {path} is text or a list of blocks, not {type(content).__name__}", path=path)


def _read(message: Any, path: str, names: Mapping[str, str]) -> list[Message]:
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise DataError(f"a message at {path} needs role 'user' or 'assistant', not {role!r}", path=path)
    blocks = _blocks(message.get("content"), path)
    if role == "assistant":
        return [AssistantMessage([_assistant_part(b, f"{path}.content[{i}]") for i, b in enumerate(blocks)])]
    results = [b for b in blocks if b.get("type") == "tool_result"]
    others = [(i, b) for i, b in enumerate(blocks) if b.get("type") != "tool_result"]
    read: list[Message] = [_tool_message(b, path, names) for b in results]
    if others or not results:
        read.append(UserMessage([_user_part(b, f"{path}.content[{i}]") for i, b in others]))
    return read


def _need(block: Mapping[str, Any], name: str, path: str) -> Any:
    if name in block:
        return block[name]
    raise DataError(f"a {block.get('type')!r} block at {path} needs {name!r}", path=path)


def _assistant_part(block: Mapping[str, Any], path: str) -> Any:
    match block.get("type"):
        case "text":
            return TextPart(_need(block, "text", path))
        case "thinking":
            return ThinkingPart(_need(block, "thinking", path))
        case "refusal":
            return RefusalPart(_need(block, "refusal", path))
        case "tool_use":
            return ToolCallPart(_need(block, "id", path), _need(block, "name", path), block.get("input") or {})
        case "opaque":
            return OpaquePart(_need(block, "provider", path), _need(block, "data", path))
        case other:
            raise DataError(f"unknown assistant block {other!r} at {path}", path=path)


def _user_part(block: Mapping[str, Any], path: str) -> Any:
    match block.get("type"):
        case "text":
            return TextPart(_need(block, "text", path))
        case "image":
            return ImagePart(**_source(block, path))
        case "document":
            return DocumentPart(**_source(block, path), name=block.get("title") or "")
        case other:
            raise DataError(f"unknown user block {other!r} at {path}", path=path)


def _source(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    source = _need(block, "source", path)
    if source.get("type") == "url":
        return {
            "url": _need(source, "url", path),
            **({"mime_type": source["media_type"]} if "media_type" in source else {}),
        }
    try:
        data = base64.b64decode(_need(source, "data", path), validate=True)
    except binascii.Error:
        raise DataError(f"the source at {path} is not base64", path=path) from None
    return {"data": data, "mime_type": _need(source, "media_type", path)}


def _tool_message(block: Mapping[str, Any], path: str, names: Mapping[str, str]) -> ToolMessage:
    call_id = _need(block, "tool_use_id", path)
    content = block.get("content", "")
    parts = [TextPart(content)] if isinstance(content, str) else [_result_part(b, path) for b in _blocks(content, path)]
    return ToolMessage(call_id, names.get(call_id, ""), parts, "error" if block.get("is_error") else "ok")


def _result_part(block: Mapping[str, Any], path: str) -> Any:
    return JsonPart(freeze(block.get("value"))) if block.get("type") == "json" else _user_part(block, path)


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
