"""
Encode messages as steps of the Interactions API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. A reply becomes several
steps in order: thoughts, output, calls, and calls and results of the provider's own tools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, assert_never

from attrs import frozen

from stepengine.data.json import compact
from stepengine.data.messages import (
    AssistantMessage,
    AssistantPart,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    ResultPart,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolReferencePart,
    UserMessage,
)
from stepengine.data.models import ModelRequest
from stepengine.models._wire import (
    MADE,
    NUDGE,
    EncodedMessage,
    MessageEncoders,
    choose_wire_ids,
    continues_paused_reply,
    encode_comma_separated,
    encode_json,
    encode_turns,
    encode_wire_ids,
    get_arguments_to_send,
    get_media_kind,
    is_from_provider,
    list_generated_media,
    make_result_media_heading,
    make_safe_tool_name,
    make_unsupported_part_error,
    remove_blank_texts,
    require_file_of_provider,
)
from stepengine.models.google.encode import encode_inline_data

Json = dict[str, Any]

KINDS = {"image": "image", "audio": "audio", "video": "video", "pdf": "document", "text": "document"}


@frozen
class InteractionsEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        provider: Only ids and opaque parts of this provider are sent back.
        model: Only thoughts and signatures of this model are sent back (ecosystem:EC99).
    """

    provider: str
    model: str


NUDGE_STEP = encode_json({"type": "user_input", "content": [{"type": "text", "text": NUDGE}]})
RESULT = b'{"type":"function_result","call_id":'


def encode_messages(request: ModelRequest, options: InteractionsEncodeOptions) -> bytes:
    """Return the array of the steps of history and tail; the first and the last step are the user's."""
    out: list[bytes] = []
    after: list[bytes] = []
    ids: Mapping[str, bytes] = {}
    role = ""
    for turn in encode_turns(request, options, ENCODERS):
        if turn.role == "tool":
            out.append(RESULT + ids[turn.call_id] + turn.body)
            after += [turn.after] if turn.after else []
            role = "user"
            continue
        if after:
            out += after
            after, role = [], "user"
        if turn.role == "assistant":
            ids = turn.ids
            if turn.body and not role:
                out.append(NUDGE_STEP)
        if turn.body:
            out.append(turn.body)
            role = turn.role
        after += [turn.after] if turn.after else []
    out += after
    if not out or (role == "assistant" and not after and not continues_paused_reply(request)):
        out.append(NUDGE_STEP)
    return b"[" + b",".join(out) + b"]"


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: InteractionsEncodeOptions) -> EncodedMessage:
    """Encode a user message without blank texts as a step."""
    return EncodedMessage(
        "user",
        _encode_user_step([_encode_content_part(part, options) for part in remove_blank_texts(message.content)]),
    )


def _encode_user_step(content: Iterable[Json | None]) -> bytes:
    """Return the encoded step of user content; empty bytes if there is none."""
    found = [piece for piece in content if piece is not None]
    return encode_json({"type": "user_input", "content": found}) if found else b""


def _encode_assistant(
    message: AssistantMessage,
    options: InteractionsEncodeOptions,
    with_provider_ids: bool,  # noqa: FBT001 - private
) -> EncodedMessage:
    """Encode a reply as steps; media that this model did not make follow in a step of the user."""
    ids = choose_wire_ids(message.tool_calls, options.provider, with_provider_ids=with_provider_ids)
    steps: list[Json] = []
    said: list[Json] | None = None
    for part in message.content:
        output = _encode_output_piece(part, options)
        if output is not None:
            if said is None:
                said = []
                steps.append({"type": "model_output", "content": said})
            said.append(output)
        elif (step := _encode_step(part, options, ids)) is not None:
            steps.append(step)
            said = None
    made = [
        part
        for part in list_generated_media(message)
        if not is_from_provider(part.provider_data, options.provider, options.model)
    ]
    after = (
        _encode_user_step([_encode_text(MADE), *[_encode_content_part(part, options) for part in made]])
        if made
        else b""
    )
    return EncodedMessage(
        "assistant",
        encode_comma_separated(steps),
        ids=encode_wire_ids(ids),
        after=after,
    )


def _encode_output_piece(part: AssistantPart, options: InteractionsEncodeOptions) -> Json | None:
    """Return a text or medium of the model as a piece of output; ``None`` for parts that are steps or are not sent."""
    match part:
        case TextPart() | RefusalPart():
            data = part.provider_data
            more = data.get("more", {}) if is_from_provider(data, options.provider, options.model) else {}
            return {"type": "text", "text": part.text, **more} if part.text or more else None
        case ImagePart() | DocumentPart() if is_from_provider(part.provider_data, options.provider, options.model):
            return _encode_supported_media(part, options)
        case _:
            return None


def _encode_step(part: AssistantPart, options: InteractionsEncodeOptions, ids: Mapping[str, str]) -> Json | None:
    """Return the step of thinking, a call or an opaque part; ``None`` for parts that are not steps or are not sent back."""
    match part:
        case ThinkingPart():
            data = part.provider_data
            return (
                dict(data["step"])
                if is_from_provider(data, options.provider, options.model) and "step" in data
                else None
            )
        case ToolCallPart():
            data = part.provider_data
            newer = data.get("in_call", {}) if is_from_provider(data, options.provider, options.model) else {}
            call = {
                "id": ids[part.tool_call_id],
                "name": make_safe_tool_name(part.tool_name),
                "arguments": get_arguments_to_send(part),
            }
            return {**newer, "type": "function_call", **call}
        case OpaquePart():
            return dict(part.data) if part.provider == options.provider else None
        case TextPart() | RefusalPart() | CitationPart() | ImagePart() | DocumentPart():
            return None
        case _ as never:
            assert_never(never)


def _encode_result(message: ToolMessage, options: InteractionsEncodeOptions) -> EncodedMessage:
    """Encode a result with its texts and images; documents, audio and video follow the result as user content."""
    inside: list[Json | None] = []
    outside: list[Json | None] = []
    for part in message.content:
        is_medium = isinstance(part, DocumentPart)
        (outside if is_medium else inside).append(_encode_content_part(part, options))
    found = [piece for piece in inside if piece is not None]
    is_text = all(piece["type"] == "text" for piece in found)
    told = "\n".join([piece["text"] for piece in found]) if is_text else found
    rest: Json = {"name": make_safe_tool_name(message.tool_name), "result": told}
    if message.is_error:
        rest["is_error"] = True
    after = _encode_user_step([_encode_text(make_result_media_heading(message)), *outside]) if outside else b""
    return EncodedMessage("tool", b"," + encode_json(rest)[1:], call_id=message.tool_call_id, after=after)


def _encode_text(text: str) -> Json:
    """Return a text as a content part."""
    return {"type": "text", "text": text}


def _encode_content_part(part: ResultPart, options: InteractionsEncodeOptions) -> Json | None:
    """Return the encoded part of a user message or result; ``None`` for empty text."""
    match part:
        case TextPart() | ToolReferencePart():
            return _encode_text(part.text) if part.text else None
        case JsonPart():
            return _encode_text(compact(part.value))
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def _encode_supported_media(part: ImagePart | DocumentPart, options: InteractionsEncodeOptions) -> Json:
    """Return the encoded image, audio, video or document; raise ``ModelError`` for unsupported or too large media."""
    require_file_of_provider(options.provider, part)
    kind = KINDS.get(get_media_kind(part))
    if kind is None:
        raise make_unsupported_part_error(options.provider, part, "it accepts images, audio, video, text and PDF")
    block: Json = {"type": kind, "mime_type": part.mime_type}
    if part.data is None:
        return {**block, "uri": part.url if part.file_id is None else part.file_id}
    return {**block, "data": encode_inline_data(part, part.data, options.provider)}


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
