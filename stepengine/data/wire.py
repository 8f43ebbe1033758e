"""
Conversion of histories from and to the common ``{"role", "content"}`` form.

The content is text or blocks of type ``text``, ``tool_use``, ``tool_result``, ``image`` and the like. Three more forms can be read:
calls and results of Chat Completions, as ``tool_calls`` of an assistant message and messages with the role ``tool``; our own stored
form (``{"type": "user_message", ...}``), so that a handler can pass messages on as JSON without a loss; and the AI SDK's form
(``data.ai_sdk``) of codebuff's histories. Unknown members raise an error with their name.

The written form lacks provider data, tags, lifetimes, trust, and arguments that could not be parsed. Of the status of a result it has
only whether it is an error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import attrs

from stepengine.data.ai_sdk import LIFETIMES, convert_to_wire_message
from stepengine.data.alike import list_names
from stepengine.data.faults import fault, format_value, prefix_path
from stepengine.data.json import MAX_ARGUMENTS_CHARS, JsonValue, freeze_object, require_storable_text, thaw
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
    join_text_parts,
)
from stepengine.data.object_codec import FORMAT_VERSION, ObjectCodec
from stepengine.data.stored_values import VALUE_TYPES
from stepengine.errors import DataError

CITED = ("url", "title", "quote", "said", "source")
TAGGING = {"tags", "ttl", "timeToLive"}
ABOUT_A_REPLY = {"id", "type", "object", "created", "model", "stop_reason", "stop_sequence", "finish_reason", "usage"}
"""Members about the reply of a message, which are not part of the conversation."""
EMPTY: tuple[Any, ...] = (None, "", [], (), {})
"""Values of a member that count as a missing member."""
MEMBERS = {
    "user": {"name"},
    "assistant": {"name", "refusal", "tool_calls"},
    "tool": {"name", "tool_call_id"},
    "system": {"name"},
    "developer": {"name"},
}


class ImportedHistory(NamedTuple):
    """An imported history: its system prompt and its messages."""

    system_prompt: str
    messages: tuple[Message, ...]


def read_messages(messages: Iterable[object]) -> tuple[Message, ...]:
    """
    Return the parsed messages; system messages raise (``read_history`` accepts them).

    Raises:
        DataError: for a message or block that cannot be read, naming the place.
    """
    history = read_history(messages)
    if history.system_prompt:
        msg = "a transcript cannot contain a system message; read_history() returns it separately"
        raise DataError(msg)
    return history.messages


def read_history(messages: Iterable[object]) -> ImportedHistory:
    """Return the parsed messages of a history and its system prompt, its system messages joined by blank lines."""
    system: list[str] = []
    found: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        try:
            if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
                plain = convert_to_wire_message(message)
                _refuse_unknown_members(plain, plain["role"])
                system.append(_read_system_text(plain.get("content")))
            else:
                for each in _read_message(message, names):
                    _append_or_merge_message(found, each)
        except DataError as error:
            raise prefix_path(error, f"[{index}]") from None
        if found and isinstance(found[-1], AssistantMessage):
            names.update({c.tool_call_id: c.tool_name for c in found[-1].tool_calls})
    return ImportedHistory("\n\n".join(system), tuple(found))


def _append_or_merge_message(messages: list[Message], message: Message) -> None:
    """
    Append a message, or merge an assistant message into a preceding one with tool calls.

    Codebuff stores each call of a reply as a message, with all results after the last one. Here they are one message, with the tags of
    all. It has the lifetime of the first, which does not matter: a message with calls stays.
    """
    last = messages[-1] if messages else None
    if isinstance(message, AssistantMessage) and isinstance(last, AssistantMessage) and last.tool_calls:
        tags = tuple(dict.fromkeys([*last.tags, *message.tags]))
        messages[-1] = attrs.evolve(last, content=(*last.content, *message.content), tags=tags)
    else:
        messages.append(message)


def _read_message(message: Any, names: Mapping[str, str]) -> list[Message]:
    """Return the messages in *message*, an object or a dict in the ``{"role", "content"}`` or the stored form."""
    if isinstance(message, (UserMessage, AssistantMessage, ToolMessage)):
        return [message]
    role = message.get("role") if isinstance(message, Mapping) else None
    if isinstance(message, Mapping) and role is None and "type" in message:
        return [_read_stored_message(message)]
    if not isinstance(role, str) or role not in MEMBERS:
        msg = f"a message needs role 'user', 'assistant', 'tool', 'system' or 'developer', not {format_value(role)}"
        raise fault(msg)
    return [
        _copy_tags_and_lifetime(each, message)
        for each in _read_normalized_message(convert_to_wire_message(message), role, names)
    ]


def _copy_tags_and_lifetime(message: Message, original: Mapping[str, Any]) -> Message:
    """Return *message* with the tags and the lifetime of the original message; a tool result has neither."""
    tags = _read_tags(original.get("tags"))
    own, ai_sdk = _read_lifetime(original, "ttl", LIFETIMES.values()), _read_lifetime(original, "timeToLive", LIFETIMES)
    ttl: Any = own or LIFETIMES.get(ai_sdk)
    return (
        message if isinstance(message, ToolMessage) or not (tags or ttl) else attrs.evolve(message, tags=tags, ttl=ttl)
    )


def _read_tags(tags: object) -> list[str]:
    if tags in EMPTY:
        return []
    if not isinstance(tags, list | tuple):
        raise prefix_path(fault(f"expected a list of texts, not {format_value(tags)}"), ".tags")
    return [require_storable_text(tag, f"$.tags[{n}]") for n, tag in enumerate(tags)]


def _read_lifetime(message: Mapping[str, Any], member: str, lifetimes: Iterable[str]) -> str:
    """Return the lifetime in a member of a message, one of *lifetimes*; ``""`` without one."""
    value: Any = message.get(member)
    if value in EMPTY:
        return ""
    if not isinstance(value, str) or value not in lifetimes:
        words = " or ".join(map(repr, lifetimes))
        raise prefix_path(fault(f"expected {words}, not {format_value(value)}"), f".{member}")
    return value


def _read_normalized_message(message: Mapping[str, Any], role: str, names: Mapping[str, str]) -> list[Message]:
    _refuse_unknown_members(message, role)
    if role == "assistant":
        return [_read_assistant_message(message)]
    if role == "tool":
        return [_read_tool_role_message(message, names)]
    blocks = _read_blocks(message.get("content"), partial(_read_user_part, names=names))
    results = [b for b in blocks if isinstance(b, ToolMessage)]
    others = [b for b in blocks if not isinstance(b, ToolMessage)]
    return [*results, *([UserMessage(others)] if others or not results else [])]


def _read_stored_message(message: Mapping[str, object]) -> Message:
    loaded: Message = _get_message_codec().from_json({"stepengine": FORMAT_VERSION, **message})
    return loaded


@cache
def _get_message_codec() -> ObjectCodec:
    return ObjectCodec(VALUE_TYPES)


def _refuse_unknown_members(message: Mapping[str, object], role: str) -> None:
    """Raise for unknown members that are not empty."""
    for name in message.keys() - MEMBERS[role] - ABOUT_A_REPLY - TAGGING - {"role", "content"}:
        if message[name] not in EMPTY:
            known = list_names(["content", *sorted(MEMBERS[role])], name)
            msg = f"a message of role {role!r} may have {known}, and not this"
            raise prefix_path(fault(msg), f".{name}")


def _read_assistant_message(message: Mapping[str, Any]) -> AssistantMessage:
    """Return a model's message; one with calls or a refusal may lack content."""
    calls, refusal = message.get("tool_calls") or [], message.get("refusal")
    content = message.get("content")
    parts = _read_blocks("" if content is None and (calls or refusal) else content, _read_assistant_part)
    if refusal:
        parts.append(RefusalPart(require_storable_text(refusal, "$.refusal")))
    return AssistantMessage([*parts, *_read_blocks(calls, _read_tool_call, "tool_calls")])


def _read_tool_call(call: Mapping[str, object]) -> ToolCallPart:
    if call.get("type", "function") != "function":
        msg = f"unknown kind of tool call {format_value(call.get('type'))}"
        raise fault(msg)
    call_id, function = _get_required_text(call, "id"), _get_required_member(call, "function")
    if not isinstance(function, Mapping):
        raise prefix_path(fault(f"expected an object, not {format_value(function)}"), ".function")
    try:
        name, arguments = _get_required_text(function, "name"), function.get("arguments")
        if isinstance(arguments, Mapping):
            return ToolCallPart(call_id, name, freeze_object(arguments, "$.arguments"))
        return _parse_call_arguments(
            call_id, name, "" if arguments is None else require_storable_text(arguments, "$.arguments")
        )
    except DataError as error:
        raise prefix_path(error, ".function") from None


def _parse_call_arguments(call_id: str, name: str, text: str) -> ToolCallPart:
    """Return a call; arguments that are not a JSON object are stored as text, as in a reply."""
    if len(text) > MAX_ARGUMENTS_CHARS:
        msg = f"the arguments are too large: {len(text)} characters, at most {MAX_ARGUMENTS_CHARS} are read"
        raise prefix_path(fault(msg), ".arguments")
    try:
        return ToolCallPart(call_id, name, freeze_object(json.loads(text) if text.strip() else {}))
    except (ValueError, RecursionError, DataError) as error:
        return ToolCallPart(call_id, name, raw_input=text, input_error=f"the arguments are no JSON object: {error}")


def _read_tool_role_message(message: Mapping[str, Any], names: Mapping[str, str]) -> ToolMessage:
    """Return the result in a message with the role ``tool``; *names* maps call ids to tool names."""
    call_id = require_storable_text(_get_required_member(message, "tool_call_id"), "$.tool_call_id")
    name = names.get(call_id) or require_storable_text(message.get("name") or "", "$.name")
    return ToolMessage(call_id, name, _read_blocks(message.get("content"), _read_result_part))


def _read_blocks(content: object, read: Callable[[Mapping[str, Any]], object], member: str = "content") -> list[Any]:
    """Return the results of *read* for all blocks of *content*; text is one block, empty text none."""
    if isinstance(content, str) and member == "content":
        content = [{"type": "text", "text": content}] if content else []
    if not isinstance(content, (list, tuple)):
        raise prefix_path(fault(f"expected text or a list of blocks, not {format_value(content)}"), f".{member}")
    made: list[object] = []
    try:
        for block in content:
            made.append(read(freeze_object(block)))  # noqa: PERF401 - the error below needs the index
    except DataError as error:
        raise prefix_path(error, f".{member}[{len(made)}]") from None
    return made


def _read_system_text(content: object) -> str:
    return join_text_parts(tuple([b for b in _read_blocks(content, _read_user_part) if isinstance(b, TextPart)]))


def _get_required_member(block: Mapping[str, object], name: str) -> Any:
    """Return a member of a block; raise ``DataError`` if it is missing."""
    if name in block:
        return block[name]
    raise prefix_path(fault(f"a block of type {format_value(block.get('type'))} needs this"), f".{name}")


def _get_required_text(block: Mapping[str, object], name: str) -> str:
    return require_storable_text(_get_required_member(block, name), f"$.{name}")


def _read_optional_texts(block: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, str]:
    return {name: require_storable_text(block[name], f"$.{name}") for name in names if name in block}


def _read_assistant_part(block: Mapping[str, object]) -> object:
    match block.get("type"):
        case "text":
            return TextPart(_get_required_text(block, "text"))
        case "thinking":
            return ThinkingPart(_get_required_text(block, "thinking"))
        case "refusal":
            return RefusalPart(_get_required_text(block, "refusal"))
        case "tool_use":
            value = block.get("input") or {}
            return ToolCallPart(
                _get_required_text(block, "id"), _get_required_text(block, "name"), freeze_object(value, "$.input")
            )
        case "opaque":
            data = freeze_object(_get_required_member(block, "data"), "$.data")
            return OpaquePart(
                _get_required_text(block, "provider"), data, **_read_optional_texts(block, ("tool", "text"))
            )
        case "citation":
            return CitationPart(**_read_optional_texts(block, CITED))
        case "image" | "image_url" | "document":
            return _read_user_part(block)
        case other:
            msg = f"unknown assistant block {format_value(other)}"
            raise fault(msg)


def _read_user_part(block: Mapping[str, Any], names: Mapping[str, str] | None = None) -> object:
    match block.get("type"):
        case "text":
            return TextPart(_get_required_text(block, "text"))
        case "image":
            return ImagePart(**_read_media_source(block))
        case "image_url":
            return _read_linked_image(block)
        case "document":
            return DocumentPart(
                **_read_media_source(block), name=require_storable_text(block.get("title") or "", "$.title")
            )
        case "tool_result" if names is not None:
            return _read_tool_result_block(block, names)
        case other:
            msg = f"unknown block {format_value(other)}"
            raise fault(msg)


def _read_linked_image(block: Mapping[str, object]) -> ImagePart:
    """Return an image in the Chat Completions form: an address or a data URL."""
    link = _get_required_member(block, "image_url")
    try:
        url = _get_required_text(link, "url") if isinstance(link, Mapping) else require_storable_text(link)
    except DataError as error:
        raise prefix_path(error, ".image_url") from None
    try:
        return ImagePart(url=url)
    except DataError as error:
        raise prefix_path(fault(error.message), ".image_url.url") from None


def _read_media_source(block: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of an image or document part from the source of a block."""
    source = freeze_object(_get_required_member(block, "source"), "$.source")
    try:
        if source.get("type") == "url" and "media_type" not in source:
            return {"url": _get_required_text(source, "url")}
        kind = _get_required_text(source, "media_type")
        if source.get("type") == "file":
            return {
                "file_id": _get_required_text(source, "file_id"),
                "provider": _get_required_text(source, "provider"),
                "mime_type": kind,
            }
        if source.get("type") == "url":
            return {"url": _get_required_text(source, "url"), "mime_type": kind}
        return {"data": base64.b64decode(_get_required_text(source, "data"), validate=True), "mime_type": kind}
    except DataError as error:
        raise prefix_path(error, ".source") from None
    except ValueError:
        raise prefix_path(fault("expected base64 text"), ".source.data") from None


def _read_tool_result_block(block: Mapping[str, object], names: Mapping[str, str]) -> ToolMessage:
    """Return the result in a ``tool_result`` block; *names* maps call ids to tool names."""
    call_id = _get_required_text(block, "tool_use_id")
    content = block.get("content", "")
    parts = [TextPart(content)] if isinstance(content, str) else _read_blocks(content, _read_result_part)
    return ToolMessage(call_id, names.get(call_id, ""), parts, "error" if block.get("is_error") else "ok")


def _read_result_part(block: Mapping[str, object]) -> Any:
    if block.get("type") == "tool_reference":
        return ToolReferencePart(_get_required_text(block, "tool_name"))
    return JsonPart(block.get("value")) if block.get("type") == "json" else _read_user_part(block)


def to_dicts(transcript: Iterable[Message]) -> list[dict[str, JsonValue]]:
    """
    Return *transcript* in the ``{"role", "content"}`` form, tool results as blocks of user messages; consecutive results share one.

    The form loses what the module docstring lists. For example, a pending result is read back as one without an error.
    """
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


def _write_part(part: Any) -> dict[str, object]:  # noqa: C901 - one case for each kind
    """Return a content part as a block of the ``{"role", "content"}`` form."""
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
        case ToolReferencePart(tool_name=name):
            return {"type": "tool_reference", "tool_name": name}
        case OpaquePart(provider=provider, data=data):
            told = {name: getattr(part, name) for name in ("tool", "text") if getattr(part, name)}
            return {"type": "opaque", "provider": provider, "data": thaw(data), **told}
        case CitationPart():
            return {"type": "citation", **{name: getattr(part, name) for name in CITED if getattr(part, name)}}
        case _:
            kind = "image" if isinstance(part, ImagePart) else "document"
            title = {"title": part.name} if kind == "document" and part.name else {}
            return {"type": kind, "source": _write_media_source(part), **title}


def _write_media_source(part: ImagePart | DocumentPart) -> dict[str, str]:
    """Return the source of an image or document as in a block: an address, a file id or base64."""
    if part.data is None:
        where = {"url": str(part.url)} if part.file_id is None else {"file_id": part.file_id, "provider": part.provider}
        return {"type": "url" if part.file_id is None else "file", **where, "media_type": part.mime_type}
    return {"type": "base64", "media_type": part.mime_type, "data": base64.b64encode(part.data).decode()}
