"""
Foreign history in and out: the widespread ``{"role", "content"}`` form.

Its content is text or blocks of type ``text``, ``tool_use``, ``tool_result``, ``image`` and the like. Read is also how Chat
Completions writes calls and results, as ``tool_calls`` of an assistant message and messages with the role ``tool``, and
our own stored form (``{"type": "user_message", ...}``), so that nothing is lost when a handler passes messages on as JSON,
and the AI SDK's form (``data.ai_sdk``), in which codebuff's histories are. What a message holds beside that is refused by name. Writing keeps everything that the form can hold; provider data is
left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import attrs

from stepengine.data.ai_sdk import LIFETIMES, plain_message
from stepengine.data.alike import list_names
from stepengine.data.faults import fault, shown, within
from stepengine.data.json import MAX_ARGUMENTS_CHARS, JsonValue, freeze_object, text_of, thaw
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    Message,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
    joined_text,
)
from stepengine.data.object_codec import FORMAT_VERSION, ObjectCodec
from stepengine.data.stored_values import VALUE_TYPES
from stepengine.errors import DataError

__all__ = ("ImportedHistory", "read_history", "read_messages", "to_dicts")


CITED = ("url", "title", "quote", "said", "source")
TAGGING = {"tags", "ttl", "timeToLive"}
ABOUT_A_REPLY = {"id", "type", "object", "created", "model", "stop_reason", "stop_sequence", "finish_reason", "usage"}
"""What a message says about the reply that it was, and no part of the conversation."""
MEMBERS = {
    "user": {"name"},
    "assistant": {"name", "refusal", "tool_calls"},
    "tool": {"name", "tool_call_id"},
    "system": {"name"},
    "developer": {"name"},
}


class ImportedHistory(NamedTuple):
    """An imported history: the system prompt that stood in it, and the messages."""

    system_prompt: str
    messages: tuple[Message, ...]


def read_messages(messages: Iterable[object]) -> tuple[Message, ...]:
    """
    Return the messages that *messages* say; there must be no system message (``read_history`` takes them out).

    Raises:
        DataError: for a message or block that cannot be read, naming the place.
    """
    history = read_history(messages)
    if history.system_prompt:
        msg = "a transcript holds no system message; read_history() returns it apart"
        raise DataError(msg)
    return history.messages


def read_history(messages: Iterable[object]) -> ImportedHistory:
    """Return system prompt and messages of *messages*; several system messages are joined by a blank line."""
    system: list[str] = []
    found: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                plain = plain_message(message)
                _refuse_others(plain, plain["role"])
                system.append(_text(plain.get("content")))
            else:
                found.extend(_read(message, names))
        except DataError as error:
            raise within(error, f"[{index}]") from None
        if found and isinstance(found[-1], AssistantMessage):
            names.update({c.tool_call_id: c.tool_name for c in found[-1].tool_calls})
    return ImportedHistory("\n\n".join(system), tuple(found))


def _read(message: Any, names: Mapping[str, str]) -> list[Message]:
    if isinstance(message, (UserMessage, AssistantMessage, ToolMessage)):
        return [message]
    role = message.get("role") if isinstance(message, Mapping) else None
    if isinstance(message, Mapping) and role is None and "type" in message:
        return [_read_stored(message)]
    if not isinstance(role, str) or role not in MEMBERS:
        msg = f"a message needs role 'user', 'assistant', 'tool', 'system' or 'developer', not {shown(role)}"
        raise fault(msg)
    return [_tag(each, message) for each in _read_parts(plain_message(message), role, names)]


def _tag(made: Message, given: Mapping[str, Any]) -> Message:
    """Return *made* with the tags and the lifetime of the message that it was read from."""
    tags: Any = given.get("tags") or ()
    ttl: Any = given.get("ttl") or LIFETIMES.get(given.get("timeToLive", ""))
    if isinstance(made, ToolMessage) or not (tags or ttl):
        return made
    if not isinstance(tags, list | tuple):
        raise within(fault(f"expected a list of texts, not {shown(tags)}"), ".tags")
    return attrs.evolve(made, tags=tags, ttl=ttl)


def _read_parts(message: Mapping[str, Any], role: str, names: Mapping[str, str]) -> list[Message]:
    _refuse_others(message, role)
    if role == "assistant":
        return [_assistant(message)]
    if role == "tool":
        return [_result(message, names)]
    blocks = _each(message.get("content"), partial(_user_part, names=names))
    results = [b for b in blocks if isinstance(b, ToolMessage)]
    others = [b for b in blocks if not isinstance(b, ToolMessage)]
    return [*results, *([UserMessage(others)] if others or not results else [])]


def _read_stored(message: Mapping[str, object]) -> Message:
    loaded: Message = _message_codec().from_json({"stepengine": FORMAT_VERSION, **message})
    return loaded


@cache
def _message_codec() -> ObjectCodec:
    return ObjectCodec(VALUE_TYPES)


def _refuse_others(message: Mapping[str, object], role: str) -> None:
    """Refuse members that are not read, but for those that hold nothing."""
    for name in message.keys() - MEMBERS[role] - ABOUT_A_REPLY - TAGGING - {"role", "content"}:
        if message[name] not in (None, "", [], (), {}):
            known = list_names(["content", *sorted(MEMBERS[role])], name)
            msg = f"a message of role {role!r} may have {known}, and not this"
            raise within(fault(msg), f".{name}")


def _assistant(message: Mapping[str, Any]) -> AssistantMessage:
    """Return the message of a model; one that holds calls or a refusal may have no content."""
    calls, refusal = message.get("tool_calls") or [], message.get("refusal")
    content = message.get("content")
    parts = _each("" if content is None and (calls or refusal) else content, _assistant_part)
    if refusal:
        parts.append(RefusalPart(text_of(refusal, "$.refusal")))
    return AssistantMessage([*parts, *_each(calls, _call, "tool_calls")])


def _call(call: Mapping[str, object]) -> ToolCallPart:
    if call.get("type", "function") != "function":
        msg = f"unknown kind of tool call {shown(call.get('type'))}"
        raise fault(msg)
    call_id, function = _need_text(call, "id"), _need(call, "function")
    if not isinstance(function, Mapping):
        raise within(fault(f"expected an object, not {shown(function)}"), ".function")
    try:
        name, arguments = _need_text(function, "name"), function.get("arguments")
        if isinstance(arguments, Mapping):
            return ToolCallPart(call_id, name, freeze_object(arguments, "$.arguments"))
        return _make_call(call_id, name, "" if arguments is None else text_of(arguments, "$.arguments"))
    except DataError as error:
        raise within(error, ".function") from None


def _make_call(call_id: str, name: str, text: str) -> ToolCallPart:
    """Return a call; arguments that are no JSON object are kept as they were written, as in a reply."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        msg = f"the arguments are too large: {len(text)} characters, at most {MAX_ARGUMENTS_CHARS} are read"
        raise within(fault(msg), ".arguments")
    try:
        return ToolCallPart(call_id, name, freeze_object(json.loads(text) if text.strip() else {}))
    except (ValueError, RecursionError, DataError) as error:
        return ToolCallPart(call_id, name, raw_input=text, input_error=f"the arguments are no JSON object: {error}")


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> ToolMessage:
    call_id = text_of(_need(message, "tool_call_id"), "$.tool_call_id")
    name = names.get(call_id) or text_of(message.get("name") or "", "$.name")
    return ToolMessage(call_id, name, _each(message.get("content"), _result_part))


def _each(content: object, read: Callable[[Mapping[str, Any]], object], member: str = "content") -> list[Any]:
    """Return what *read* makes of every block of *content*; text is one block, empty text none."""
    if isinstance(content, str) and member == "content":
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, (list, tuple)):
        raise within(fault(f"expected text or a list of blocks, not {shown(content)}"), f".{member}")
    made: list[object] = []
    try:
        for block in content:
            made.append(read(freeze_object(block)))  # noqa: PERF401 - the error below needs to know how far it came
    except DataError as error:
        raise within(error, f".{member}[{len(made)}]") from None
    return made


def _text(content: object) -> str:
    return joined_text(tuple([b for b in _each(content, _user_part) if isinstance(b, TextPart)]))


def _need(block: Mapping[str, object], name: str) -> Any:
    if name in block:
        return block[name]
    raise within(fault(f"a block of type {shown(block.get('type'))} needs this"), f".{name}")


def _need_text(block: Mapping[str, object], name: str) -> str:
    return text_of(_need(block, name), f"$.{name}")


def _texts(block: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    return {name: text_of(block[name], f"$.{name}") for name in names if name in block}


def _assistant_part(block: Mapping[str, object]) -> object:
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
            data = freeze_object(_need(block, "data"), "$.data")
            return OpaquePart(_need_text(block, "provider"), data, **_texts(block, ("tool", "text")))
        case "citation":
            return CitationPart(**_texts(block, CITED))
        case "image" | "image_url" | "document":
            return _user_part(block)
        case other:
            msg = f"unknown assistant block {shown(other)}"
            raise fault(msg)


def _user_part(block: Mapping[str, Any], names: Mapping[str, str] | None = None) -> object:
    match block.get("type"):
        case "text":
            return TextPart(_need_text(block, "text"))
        case "image":
            return ImagePart(**_source(block))
        case "image_url":
            return _linked_image(block)
        case "document":
            return DocumentPart(**_source(block), name=text_of(block.get("title") or "", "$.title"))
        case "tool_result" if names is not None:
            return _tool_message(block, names)
        case other:
            msg = f"unknown block {shown(other)}"
            raise fault(msg)


def _linked_image(block: Mapping[str, object]) -> ImagePart:
    """Return an image as Chat Completions writes it: an address, which may hold the image itself."""
    link = _need(block, "image_url")
    try:
        url = _need_text(link, "url") if isinstance(link, Mapping) else text_of(link)
    except DataError as error:
        raise within(error, ".image_url") from None
    kind, found, data = url.removeprefix("data:").partition(";base64,")
    if not (url.startswith("data:") and found):
        return ImagePart(url=url)
    try:
        return ImagePart(data=base64.b64decode(data, validate=True), mime_type=kind)
    except ValueError:
        raise within(fault("expected base64 text"), ".image_url.url") from None


def _source(block: Mapping[str, object]) -> dict[str, Any]:
    source = freeze_object(_need(block, "source"), "$.source")
    try:
        if source.get("type") == "url" and "media_type" not in source:
            return {"url": _need_text(source, "url")}
        kind = _need_text(source, "media_type")
        if source.get("type") == "file":
            return {
                "file_id": _need_text(source, "file_id"),
                "provider": _need_text(source, "provider"),
                "mime_type": kind,
            }
        if source.get("type") == "url":
            return {"url": _need_text(source, "url"), "mime_type": kind}
        return {"data": base64.b64decode(_need_text(source, "data"), validate=True), "mime_type": kind}
    except DataError as error:
        raise within(error, ".source") from None
    except ValueError:
        raise within(fault("expected base64 text"), ".source.data") from None


def _tool_message(block: Mapping[str, object], names: Mapping[str, str]) -> ToolMessage:
    call_id = _need_text(block, "tool_use_id")
    content = block.get("content", "")
    parts = [TextPart(content)] if isinstance(content, str) else _each(content, _result_part)
    return ToolMessage(call_id, names.get(call_id, ""), parts, "error" if block.get("is_error") else "ok")


def _result_part(block: Mapping[str, object]) -> Any:
    if block.get("type") == "tool_reference":
        return ToolReferencePart(_need_text(block, "tool_name"))
    return JsonPart(block.get("value")) if block.get("type") == "json" else _user_part(block)


def to_dicts(transcript: Iterable[Message]) -> list[dict[str, JsonValue]]:
    """Return *transcript* in the widespread form; results that follow each other share one user message."""
    written: list[dict[str, Any]] = []
    for message in transcript:
        blocks: list[Any] = [_write_part(p) for p in message.content]
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


def _write_part(part: Any) -> dict[str, object]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ThinkingPart(text=text):
            return {"type": "thinking", "thinking": text}
        case RefusalPart(text=text):
            return {"type": "refusal", "refusal": text}
        case ToolCallPart(tool_call_id=call_id, tool_name=name, input=value):
            return {"type": "tool_use", "id": call_id, "name": name, "input": thaw(value)}
        case JsonPart() | ToolReferencePart():
            return _written_result(part)
        case OpaquePart(provider=provider, data=data):
            told = {name: getattr(part, name) for name in ("tool", "text") if getattr(part, name)}
            return {"type": "opaque", "provider": provider, "data": thaw(data), **told}
        case CitationPart():
            return {"type": "citation", **{name: getattr(part, name) for name in CITED if getattr(part, name)}}
        case _:
            kind = "image" if isinstance(part, ImagePart) else "document"
            title = {"title": part.name} if kind == "document" and part.name else {}
            return {"type": kind, "source": _written_source(part), **title}


def _written_result(part: JsonPart | ToolReferencePart) -> dict[str, object]:
    if isinstance(part, JsonPart):
        return {"type": "json", "value": thaw(part.value)}
    return {"type": "tool_reference", "tool_name": part.tool_name}


def _written_source(part: ImagePart | DocumentPart) -> dict[str, str]:
    if part.data is None:
        where = {"url": str(part.url)} if part.file_id is None else {"file_id": part.file_id, "provider": part.provider}
        return {"type": "url" if part.file_id is None else "file", **where, "media_type": part.mime_type}
    return {"type": "base64", "media_type": part.mime_type, "data": base64.b64encode(part.data).decode()}
