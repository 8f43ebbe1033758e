"""
Encode messages as contents of the Gemini API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. Results match their
calls by name and order. Ids are sent only if the provider itself assigned them.

**Calls without signatures.** Gemini 3 and later reject a call of the current turn without a thought signature. Calls of a
handler, of another provider or of an older model have none. The first such call of a message then has the signature that the
API documents for this case, ``skip_thought_signature_validator``. Sending calls as text instead would teach the model to
write calls as text. The rule looks at one message at a time. A message is therefore sent in the same form in every later
request, and the prompt cache holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, assert_never

import attrs
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
    MessageEncoders,
    MessageJoiner,
    continues_paused_reply,
    encode_base64,
    encode_comma_separated,
    encode_json,
    encode_turns,
    get_arguments_to_send,
    get_media_kind,
    is_from_provider,
    join_non_media_text,
    list_generated_media,
    list_media,
    make_result_media_heading,
    make_safe_tool_name,
    make_unsupported_part_error,
    remove_blank_texts,
    require_file_of_provider,
)
from stepengine.models._wire import EncodedMessage as BaseTurn

DUMMY_SIGNATURE = encode_base64(b"skip_thought_signature_validator")
GENERATION = re.compile(r"(?:models/)?gemini-(\d+)")
LATEST = re.compile(r"(?:models/)?gemini-[a-z-]+-latest$")
SIGNED_SINCE = 3
"""The first generation of Gemini that rejects calls without a thought signature."""
FILES = "https://generativelanguage.googleapis.com/v1beta/files/"
MAX_INLINE = 15_000_000
"""The most bytes of a part; as base64 they fill the 20 MB of a request (providers:PV51)."""
IN_RESULTS = frozenset({"image/png", "image/jpeg", "image/webp", "application/pdf", "text/plain"})

Json = dict[str, Any]


@frozen
class GoogleEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        provider: Only ids and opaque parts of this provider are sent back.
        model: Only signatures and thoughts of this model are sent back (ecosystem:EC99).
        signed: Whether the model rejects calls without a signature and accepts media inside results (Gemini 3).
    """

    provider: str
    model: str
    signed: bool = False


def parse_generation(model: str) -> int:
    """Return the generation in a Gemini model's name, such as 2 for ``gemini-2.5-pro``; 3 for a ``-latest`` alias, else 0."""
    found = GENERATION.match(model)
    if found is not None:
        return int(found.group(1))
    return SIGNED_SINCE if LATEST.match(model) else 0


@frozen
class GoogleEncoded(BaseTurn):
    """
    One encoded message. Its ``ids`` are encoded as ``"id"`` members, for the calls that have one.

    Attributes:
        names: The name of each call, encoded as a ``"name"`` member.
    """

    names: Mapping[str, bytes] = attrs.field(factory=dict)


GOES_ON_WITH = "continuationToken"
"""The member that continues a paused reply, sent in place of the received part of it (providers:PV114)."""


def find_continuation_token(request: ModelRequest, provider: str) -> str:
    """Return the continuation token of the paused reply at the end of *request*; ``""`` if there is none."""
    begun = request.tail[-1].content if continues_paused_reply(request) else ()
    tokens = [
        part.data.get(GOES_ON_WITH) for part in begun if isinstance(part, OpaquePart) and part.provider == provider
    ]
    return next((token for token in reversed(tokens) if isinstance(token, str)), "")


NUDGE_PART = encode_json({"text": NUDGE})
OPEN = {"user": b'{"role":"user","parts":[', "assistant": b'{"role":"model","parts":['}
ANSWER = b'{"functionResponse":{'


def encode_messages(request: ModelRequest, options: GoogleEncodeOptions) -> bytes:
    """Return the ``contents`` array of history and tail, with alternating roles."""
    joiner = _GoogleJoiner()
    for turn in encode_turns(request, options, ENCODERS):
        joiner.append_turn(turn)
    return joiner.join(must_end_with_user=not continues_paused_reply(request))


class _GoogleJoiner(MessageJoiner):
    def __init__(self) -> None:
        super().__init__(OPEN, NUDGE_PART)
        self._ids: Mapping[str, bytes] = {}
        self._names: Mapping[str, bytes] = {}

    def append_turn(self, turn: GoogleEncoded) -> None:
        """Append an encoded message; a result gets the name and id of its call."""
        if turn.role == "tool":
            self.append_content(
                "user", ANSWER + self._names[turn.call_id] + self._ids.get(turn.call_id, b"") + turn.body
            )
            self.defer_to_user_turn(turn.after)
            return
        self.append_deferred_content()
        if turn.role == "assistant":
            self._ids, self._names = turn.ids, turn.names
        if turn.body:
            self.append_content(turn.role, turn.body)
        self.defer_to_user_turn(turn.after)


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: GoogleEncodeOptions) -> GoogleEncoded:
    """Encode a user message without blank texts."""
    return GoogleEncoded(
        "user",
        encode_comma_separated([_encode_content_part(part, options) for part in remove_blank_texts(message.content)]),
    )


def _encode_assistant(
    message: AssistantMessage,
    options: GoogleEncodeOptions,
    with_provider_ids: bool,  # noqa: FBT001 - private
) -> GoogleEncoded:
    """Encode a reply; for a model that requires signatures, add a placeholder to the first call if it has no signature."""
    ids = _find_provider_ids(message.tool_calls, options) if with_provider_ids else {}
    parts = [_encode_assistant_part(part, options, ids) for part in message.content]
    calls = [part for part in parts if part is not None and "functionCall" in part]
    if options.signed and calls and "thoughtSignature" not in calls[0]:
        calls[0]["thoughtSignature"] = DUMMY_SIGNATURE
    made = [
        part
        for part in list_generated_media(message)
        if not is_from_provider(part.provider_data, options.provider, options.model)
    ]
    return GoogleEncoded(
        "assistant",
        encode_comma_separated(parts),
        after=encode_comma_separated([{"text": MADE}, *[_encode_content_part(part, options) for part in made]])
        if made
        else b"",
        ids={ours: b',"id":' + encode_json(theirs) for ours, theirs in ids.items()},
        names={
            call.tool_call_id: b'"name":' + encode_json(_make_safe_function_name(call.tool_name))
            for call in message.tool_calls
        },
    )


def _find_provider_ids(calls: tuple[ToolCallPart, ...], options: GoogleEncodeOptions) -> dict[str, str]:
    """Return the ids that the provider assigned, by our ids of the calls; ``{}`` if two are equal, so that order decides."""
    # (reliability:MP49)
    own = {
        call.tool_call_id: call.provider_data
        for call in calls
        if is_from_provider(call.provider_data, options.provider)
    }
    ids = {ours: str(data["id"]) for ours, data in own.items() if data and data.get("id")}
    return ids if len(set(ids.values())) == len(ids) else {}


def _make_safe_function_name(name: str) -> str:
    """Return *name* with safe characters only, and with ``_`` before a first character that is not a letter."""
    safe = make_safe_tool_name(name)
    return safe if safe[0].isalpha() or safe[0] == "_" else f"_{safe}"


def _encode_assistant_part(part: AssistantPart, options: GoogleEncodeOptions, ids: Mapping[str, str]) -> Json | None:
    """Return the encoded part of a reply; ``None`` for parts that are not sent back, such as thoughts of other models."""
    match part:
        case TextPart() | RefusalPart():
            signed = _get_signature_and_unknown_members(part.provider_data, options)
            return {"text": part.text, **signed} if part.text or signed else None
        case ThinkingPart():
            data = part.provider_data
            own = is_from_provider(data, options.provider, options.model)
            return (
                {"text": part.text, "thought": True, **_get_signature_and_unknown_members(data, options)}
                if own
                else None
            )
        case ToolCallPart():
            own = is_from_provider(part.provider_data, options.provider, options.model)
            newer = part.provider_data.get("in_call", {}) if own and part.provider_data else {}
            call: Json = {
                **newer,
                "name": _make_safe_function_name(part.tool_name),
                "args": get_arguments_to_send(part),
            }
            if part.tool_call_id in ids:
                call["id"] = ids[part.tool_call_id]
            return {"functionCall": call, **_get_signature_and_unknown_members(part.provider_data, options)}
        case OpaquePart():
            return _encode_opaque_if_own(part, options)
        case ImagePart() | DocumentPart():
            own = is_from_provider(part.provider_data, options.provider, options.model)
            return (
                {
                    **_encode_supported_media(part, options),
                    **_get_signature_and_unknown_members(part.provider_data, options),
                }
                if own
                else None
            )
        case CitationPart():
            return None
        case _ as never:
            assert_never(never)


def _encode_opaque_if_own(part: OpaquePart, options: GoogleEncodeOptions) -> Json | None:
    """Return the data of an opaque part of the same provider; ``None`` for other parts, and for a continuation token."""
    if part.provider != options.provider or GOES_ON_WITH in part.data:
        return None
    # The model is "" after a rejected signature: then no signature is sent.
    return {name: value for name, value in part.data.items() if options.model or name != "thoughtSignature"}


def _get_signature_and_unknown_members(data: Mapping[str, object] | None, options: GoogleEncodeOptions) -> Json:
    """Return the signature and the unknown members of a part, if the same model produced it; else ``{}``."""
    if not is_from_provider(data, options.provider, options.model):
        return {}
    signature = {"thoughtSignature": data["signature"]} if data.get("signature") else {}
    return {**data.get("more", {}), **signature}


def _encode_result(message: ToolMessage, options: GoogleEncodeOptions) -> GoogleEncoded:
    """Encode a result; media that the model does not accept inside it follow in the next user message."""
    said = [part for part in message.content if isinstance(part, TextPart | JsonPart | ToolReferencePart)]
    media = list_media(message)
    value = said[0].value if len(said) == 1 and isinstance(said[0], JsonPart) else join_non_media_text(said)
    inside = [part for part in media if options.signed and part.mime_type in IN_RESULTS]
    outside = [part for part in media if part not in inside]
    after: list[Json | None] = []
    if outside:
        after = [
            {"text": make_result_media_heading(message)},
            *[_encode_content_part(part, options) for part in outside],
        ]
        if not value:
            value = "(Images and documents follow.)"
    answer: Json = {"response": {"error" if message.is_error else "output": value}}
    if inside:
        answer["parts"] = [_encode_content_part(part, options) for part in inside]
    return GoogleEncoded(
        "tool", b"," + encode_json(answer)[1:] + b"}", call_id=message.tool_call_id, after=encode_comma_separated(after)
    )


def _encode_content_part(part: ResultPart, options: GoogleEncodeOptions) -> Json | None:
    """Return the encoded part of a user message or result; ``None`` for empty text."""
    match part:
        case TextPart() | ToolReferencePart():
            return {"text": part.text} if part.text else None
        case JsonPart():
            return {"text": compact(part.value)}
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def encode_inline_data(part: ImagePart | DocumentPart, data: bytes, provider: str) -> str:
    """Return the base64 text of a part's bytes; raise ``ModelError`` if they exceed the limit of a request."""
    if len(data) > MAX_INLINE:
        why = f"it has {len(data):,} bytes, and a request holds {MAX_INLINE:,}; upload it, or pass its URL"
        raise make_unsupported_part_error(provider, part, why)
    return encode_base64(data)


def _encode_supported_media(part: ImagePart | DocumentPart, options: GoogleEncodeOptions) -> Json:
    """Return the encoded medium, as inline data or a file reference; raise ``ModelError`` for unsupported or too large media."""
    require_file_of_provider(options.provider, part)
    kind = get_media_kind(part)
    if kind in {"office", "other"}:
        raise make_unsupported_part_error(options.provider, part, "it accepts images, audio, video, text and PDF")
    if part.file_id is not None:
        uri = part.file_id if "://" in part.file_id else f"{FILES}{part.file_id.removeprefix('files/')}"
        return {"fileData": {"mimeType": part.mime_type, "fileUri": uri}}
    if part.data is None:
        return {"fileData": {"mimeType": part.mime_type, "fileUri": part.url}}
    data = encode_inline_data(part, part.data, options.provider)
    mime = "text/plain" if kind == "text" and not part.mime_type.startswith("text/") else part.mime_type
    return {"inlineData": {"mimeType": mime, "data": data}}


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
