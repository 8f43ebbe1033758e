"""
Our messages as input items of the Responses API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and keeps its bytes (``Transcript.memo``); a request joins them. Nothing is stored at the
provider, so reasoning goes back with its encrypted content, and whole, directly before what followed it (EC91). Texts and
calls that this provider and model made go back under their own item ids; all others as plain messages and calls under
made ids, which the API takes from anybody: foreign calls need no further rule here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, assert_never

import attrs

from stepengine.data.json import compact
from stepengine.data.messages import AssistantMessage, Message, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.parts import (
    AssistantPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    ResultPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
)
from stepengine.models._json import utf8
from stepengine.models._wire import (
    NUDGE,
    arguments_of,
    cannot_take,
    data_url,
    encoded,
    is_own,
    is_paused,
    message_at,
    safe_name,
    wire_ids,
)

__all__ = ("Flags", "encode_message", "encode_messages")

IMAGES = frozenset({"image/jpeg", "image/png", "image/gif", "image/webp"})

Json = dict[str, Any]


@attrs.frozen
class Flags:
    """
    What the encoded form of a message depends on beside the message.

    Attributes:
        provider: Whose call ids and opaque items are sent back.
        model: Whose reasoning and item ids are sent back (EC99).
    """

    provider: str
    model: str


@attrs.frozen
class Turn:
    """
    One encoded message.

    Attributes:
        role: Whose it is.
        items: The items joined by commas; of a result what follows its call id.
        ids: The wire id of each call.
        call_id: The call that a result answers.
    """

    role: Literal["user", "assistant", "tool"]
    items: bytes
    ids: Mapping[str, bytes] = attrs.field(factory=dict)
    call_id: str = ""


NUDGE_ITEM = encoded({"role": "user", "content": NUDGE})
OUTPUT = b'{"type":"function_call_output","call_id":'


def encode_messages(request: ModelRequest, flags: Flags) -> bytes:
    """Return the ``input`` array: history and tail, with a word of the user where the model would follow itself."""
    turns = request.messages.memo(("openai", flags), lambda message: encode_message(message, flags))
    tail = [encode_message(message, flags) for message in request.tail]
    out: list[bytes] = []
    ids: Mapping[str, bytes] = {}
    role = ""
    seen: set[bytes] = set()
    for index, turn in enumerate([*turns, *tail]):
        if turn.role == "tool":
            out.append(OUTPUT + ids[turn.call_id] + turn.items)
            role = "tool"
            continue
        if turn.ids:
            if not seen.isdisjoint(turn.ids.values()):
                turn = encode_message(message_at(request, index), flags, own_ids=False)  # noqa: PLW2901 - the id is taken
            seen.update(turn.ids.values())
        if not turn.items:
            continue
        if turn.role == role == "assistant":
            out.append(NUDGE_ITEM)
        out.append(turn.items)
        role, ids = turn.role, turn.ids
    if not role or (role == "assistant" and not is_paused(request)):
        out.append(NUDGE_ITEM)
    return b"[" + b",".join(out) + b"]"


# --- one message ----------------------------------------------------------------------------------------------------


def encode_message(message: Message, flags: Flags, *, own_ids: bool = True) -> Turn:
    """Encode one message; *own_ids* false sends made ids in place of the provider's."""
    match message:
        case UserMessage():
            return Turn("user", _user(message, flags))
        case AssistantMessage():
            return _assistant(message, flags, own_ids)
        case ToolMessage():
            return _result(message, flags)
        case _ as never:
            assert_never(never)


def _user(message: UserMessage, flags: Flags) -> bytes:
    parts = [part for part in message.content if not (isinstance(part, TextPart) and not part.text)]
    if not parts:
        return b""
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return encoded({"role": "user", "content": parts[0].text})
    return encoded({"role": "user", "content": [_content(part, flags) for part in parts]})


def _assistant(message: AssistantMessage, flags: Flags, own_ids: bool) -> Turn:  # noqa: FBT001 - private
    ids = wire_ids(message.tool_calls, flags.provider, own=own_ids)
    items: list[Json] = []
    for part in message.content:
        _add(items, part, flags, ids)
    joined = b",".join([encoded(item) for item in items])
    return Turn("assistant", joined, ids={ours: encoded(theirs) for ours, theirs in ids.items()})


def _add(items: list[Json], part: AssistantPart, flags: Flags, ids: Mapping[str, str]) -> None:
    match part:
        case TextPart():
            _say(items, part, {"type": "output_text", "text": part.text}, flags)
        case RefusalPart():
            _say(items, part, {"type": "refusal", "refusal": part.text}, flags)
        case ThinkingPart():
            items += _reasoning(part, flags)
        case ToolCallPart():
            items.append(_call(part, flags, ids))
        case OpaquePart():
            if part.provider == flags.provider:
                items.append(dict(part.data))
        case _ as never:
            assert_never(never)


def _reasoning(part: ThinkingPart, flags: Flags) -> list[Json]:
    """Return the reasoning item, which without its encrypted content would mean one that nobody has stored."""
    data = part.provider_data
    item = data.get("item") if data is not None and _is_ours(data, flags) else None
    sendable = isinstance(item, Mapping) and (item.get("encrypted_content") or item.get("content"))
    return [dict(item)] if sendable and isinstance(item, Mapping) else []


def _is_ours(data: Mapping[str, Any] | None, flags: Flags) -> bool:
    return data is not None and is_own(data, flags.provider) and data.get("model") == flags.model


def _say(items: list[Json], part: TextPart | RefusalPart, content: Json, flags: Flags) -> None:
    """Add a text to the message item that it came in, or to a plain message."""
    data = part.provider_data
    last = items[-1] if items else {}
    if data is None or not data.get("id") or not _is_ours(data, flags):
        if not part.text:
            return
        if last.get("role") == "assistant" and "id" not in last:
            last["content"] += f"\n\n{part.text}"
        else:
            items.append({"role": "assistant", "content": part.text})
        return
    if content["type"] == "output_text":
        content["annotations"] = data.get("annotations") or []
    if last.get("type") == "message" and last.get("id") == data["id"]:
        last["content"].append(content)
        return
    phase = {"phase": data["phase"]} if data.get("phase") else {}
    items.append(
        {"type": "message", "id": data["id"], "role": "assistant", "status": "completed", "content": [content], **phase}
    )


def _call(part: ToolCallPart, flags: Flags, ids: Mapping[str, str]) -> Json:
    item: Json = {
        "type": "function_call",
        "call_id": ids[part.tool_call_id],
        "name": safe_name(part.tool_name),
        "arguments": utf8(compact(arguments_of(part))).decode(),
    }
    data = part.provider_data
    if data is not None and _is_ours(data, flags):
        if data.get("item_id"):
            item["id"] = data["item_id"]
        if data.get("namespace"):
            item["namespace"] = data["namespace"]
    return item


def _result(message: ToolMessage, flags: Flags) -> Turn:
    parts = [part for part in message.content if not (isinstance(part, TextPart) and not part.text)]
    output: str | list[Json]
    if any(isinstance(part, ImagePart | DocumentPart) for part in parts):
        output = [_content(part, flags) for part in parts]
        if message.is_error:
            output.insert(0, {"type": "input_text", "text": "Error:"})
    else:
        output = "\n".join([part.text if isinstance(part, TextPart) else compact(_value(part)) for part in parts])
        if message.is_error and not output.lower().startswith("error"):
            output = f"Error: {output}"
    return Turn("tool", b',"output":' + encoded(output) + b"}", call_id=message.tool_call_id)


def _value(part: ResultPart) -> Any:
    return part.value if isinstance(part, JsonPart) else None


def _content(part: ResultPart, flags: Flags) -> Json:
    match part:
        case TextPart():
            return {"type": "input_text", "text": part.text}
        case JsonPart():
            return {"type": "input_text", "text": compact(part.value)}
        case ImagePart():
            if part.data is not None and part.mime_type not in IMAGES:
                raise cannot_take(flags.provider, part, "it takes JPEG, PNG, GIF and WebP")
            return {"type": "input_image", "detail": "auto", "image_url": data_url(part)}
        case DocumentPart():
            return _document(part)
        case _ as never:
            assert_never(never)


def _document(part: DocumentPart) -> Json:
    if part.data is None:
        return {"type": "input_file", "file_url": part.url}
    if part.mime_type.startswith("text/"):
        text = part.data.decode("utf-8", "replace")
        return {"type": "input_text", "text": f"{part.name}:\n{text}" if part.name else text}
    return {"type": "input_file", "filename": part.name or "document.pdf", "file_data": data_url(part)}
