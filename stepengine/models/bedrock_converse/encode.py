"""
Encode messages for the Converse API. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. Joining adds the parts
that depend on the whole conversation. These are unique names of documents, and a message between results and content that
the model does not accept in the same message.

**Calls as text.** The API rejects calls and results in a request that offers no tools. With a thinking budget, Claude rejects
calls in a last turn without thinking. They are then sent as text of the user.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, assert_never

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
    OFFICE,
    Kind,
    MessageEncoders,
    MessageJoiner,
    choose_wire_ids,
    continues_paused_reply,
    encode_base64,
    encode_comma_separated,
    encode_json,
    encode_turns,
    encode_wire_ids,
    format_call_as_text,
    format_result_text,
    get_arguments_to_send,
    get_media_kind,
    is_from_provider,
    list_generated_media,
    make_result_media_heading,
    make_safe_tool_name,
    make_unsupported_part_error,
)
from stepengine.models._wire import EncodedMessage as BaseTurn
from stepengine.models.bedrock_converse.families import ConverseFamily

Json = dict[str, Any]

IMAGES = {"image/png": "png", "image/jpeg": "jpeg", "image/gif": "gif", "image/webp": "webp"}
TEXTS = {"text/csv": "csv", "text/html": "html", "text/markdown": "md"}
OFFICES = frozenset({"doc", "docx", "xls", "xlsx"})
VIDEOS = {
    "video/mp4": "mp4", "video/quicktime": "mov", "video/webm": "webm", "video/x-matroska": "mkv", "video/x-flv": "flv",
    "video/mpeg": "mpeg", "video/x-ms-wmv": "wmv", "video/3gpp": "three_gp",
}  # fmt: skip
SOUNDS = {
    "audio/mpeg": "mp3", "audio/mp3": "mp3", "audio/wav": "wav", "audio/x-wav": "wav", "audio/wave": "wav",
    "audio/ogg": "ogg", "audio/opus": "opus", "audio/flac": "flac", "audio/x-flac": "flac", "audio/aac": "aac",
    "audio/mp4": "mp4", "audio/m4a": "m4a", "audio/x-m4a": "m4a", "audio/webm": "webm", "audio/x-matroska": "mka",
}  # fmt: skip
FORMS: dict[str, Mapping[str, str]] = {"image": IMAGES, "video": VIDEOS, "audio": SOUNDS}
STORED = "s3://"
"""The prefix of the only URLs that the service reads."""

UNNAMED = "Document"
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9()\[\]-]+")
MAX_NAME_CHARS = 150
"""AWS documents 200 characters for the name of a document; the rest is for a suffix that makes it unique."""
PLACE = b'"name":"\\u0000'
"""The start of a document name that is not unique yet."""
PLACED = re.compile(rb'"name":"\\u0000([A-Za-z0-9()\[\] -]+)"')

NOTHING = "(nothing)"
BETWEEN = "(The results are there; more follows.)"
"""The text of the assistant message between results and content that the model does not accept with them; never recorded."""


@frozen
class ConverseEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        provider: Only ids and opaque parts of this provider are sent back.
        model: Only thinking of this model is sent back (ecosystem:EC99).
        family: The model's family.
        calls: Whether calls can be sent as calls, which requires an offered tool.
        manual: Whether thinking has a budget, so that calls without thinking are sent as text.
    """

    provider: str
    model: str
    family: ConverseFamily
    calls: bool = True
    manual: bool = False


@frozen
class ConverseEncoded(BaseTurn):
    """
    One encoded message.

    Attributes:
        texts: The text in a user message for each call that is not sent as a call.
        as_text: The text in a user message for a result.
        kinds: The kinds of its user content.
        last: The kind of its last user content.
    """

    texts: Mapping[str, bytes] = attrs.field(factory=dict)
    as_text: bytes = b""
    kinds: frozenset[str] = frozenset()
    last: str = ""


# --- joining --------------------------------------------------------------------------------------------------------

NUDGE_BLOCK = encode_json({"text": NUDGE})
BETWEEN_BLOCK = encode_json({"text": BETWEEN})
OPEN = {"user": b'{"role":"user","content":[', "assistant": b'{"role":"assistant","content":['}
TEXT = frozenset({"text"})


def encode_messages(request: ModelRequest, options: ConverseEncodeOptions) -> tuple[bytes, str]:
    """Return (array, kind): the messages with alternating roles, and the kind of the last block, ``""`` if it is the assistant's."""
    joiner = _ConverseJoiner(options.family)
    for turn in encode_turns(request, options, ENCODERS):
        joiner.append_turn(turn)
    return joiner.join(must_end_with_user=not continues_paused_reply(request)), joiner.last


class _ConverseJoiner(MessageJoiner):
    """Joins encoded messages and gives each document a unique name."""

    def __init__(self, family: ConverseFamily) -> None:
        super().__init__(OPEN, NUDGE_BLOCK)
        self._beside = family.beside
        self._ids: Mapping[str, bytes] = {}
        self._texts: Mapping[str, bytes] = {}
        self._names: set[str] = set()
        self._has_results = False
        self._kept: tuple[frozenset[str], str] = (frozenset(), "")
        self.last = ""

    def append_turn(self, turn: ConverseEncoded) -> None:
        """Append an encoded message; content that the model does not accept in it is deferred to the next user message."""
        if turn.role == "tool":
            self._append_result(turn)
            return
        self.append_deferred_content()
        if turn.role == "assistant":
            self._ids, self._texts = turn.ids, turn.texts
            if turn.body:
                self.append_content("assistant", turn.body)
        elif turn.body:
            self._append_user_content(turn.body, turn.kinds, turn.last)
        if turn.after:
            self.defer_to_user_turn(turn.after)
            self._kept = (turn.kinds, turn.last)

    def _append_result(self, turn: ConverseEncoded) -> None:
        """Append a result under the id of its call, or as text if the call was sent as text."""
        wire_id = self._ids.get(turn.call_id)
        if wire_id is None:
            self._append_user_content(self._texts[turn.call_id] + b"," + turn.as_text, turn.kinds | TEXT, turn.last)
            return
        self.append_content("user", b'{"toolResult":{"toolUseId":' + wire_id + turn.body)
        self._has_results, self.last = True, "toolResult"
        if turn.after:
            self.defer_to_user_turn(turn.after)
            self._kept = (self._kept[0] | turn.kinds, turn.last)

    def append_deferred_content(self) -> None:
        """Append the content that was deferred to the user's turn."""
        kept, (kinds, last) = self._after, self._kept
        self._after, self._kept = [], (frozenset(), "")
        for body in kept:
            self._append_user_content(body, kinds, last)

    def _append_user_content(self, body: bytes, kinds: frozenset[str], last: str) -> None:
        """Append user content, after an assistant message if the model does not accept it together with results."""
        if self._has_results and self._beside is not None and not kinds <= self._beside:
            self.append_content("assistant", BETWEEN_BLOCK)
        self.append_content("user", body)
        self.last = last

    def append_content(self, role: Literal["user", "assistant"], body: bytes) -> None:
        """Append encoded content of *role*, with unique names of documents."""
        if role == "assistant":
            self._has_results, self.last = False, ""
        elif PLACE in body:
            body = PLACED.sub(self._make_unique_document_name, body)
        super().append_content(role, body)

    def _make_unique_document_name(self, match: re.Match[bytes]) -> bytes:
        """Return the ``"name"`` member with a name that no earlier document has, ignoring case, and record the name."""
        wanted = name = match[1].decode()
        number = 1
        while name.lower() in self._names:
            number += 1
            name = f"{wanted} ({number})"
        self._names.add(name.lower())
        return b'"name":' + encode_json(name)


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: ConverseEncodeOptions) -> ConverseEncoded:
    """Encode a user message, with a text before documents."""
    blocks = _add_text_before_documents([_encode_content_part(part, options) for part in message.content])
    return ConverseEncoded(
        "user", encode_comma_separated(blocks), kinds=_list_block_kinds(blocks), last=_get_last_block_kind(blocks)
    )


def _add_text_before_documents(blocks: Iterable[Json | None]) -> list[Json]:
    """Return *blocks* without ``None``, with a text first if they have documents and no text; the service rejects documents alone."""
    found = [block for block in blocks if block is not None]
    kinds = _list_block_kinds(found)
    if "document" in kinds and "text" not in kinds:
        found.insert(0, {"text": f"{UNNAMED}s:"})
    return found


def _list_block_kinds(blocks: Iterable[Json]) -> frozenset[str]:
    """Return the kinds of *blocks*, such as ``text`` and ``document``."""
    return frozenset([next(iter(block)) for block in blocks])


def _get_last_block_kind(blocks: list[Json]) -> str:
    return next(iter(blocks[-1])) if blocks else ""


def _encode_assistant(
    message: AssistantMessage,
    options: ConverseEncodeOptions,
    with_provider_ids: bool,  # noqa: FBT001 - private
) -> ConverseEncoded:
    """Encode a reply; calls become text if no tool is offered, or if they lack thinking with a manual budget."""
    calls = message.tool_calls
    ids = choose_wire_ids(calls, options.provider, with_provider_ids=with_provider_ids)
    blocks = [block for part in message.content if (block := _encode_assistant_block(part, options, ids)) is not None]
    # With manual thinking, Claude rejects calls that do not follow a thought, including those of another model's server tools.
    keeps_calls = options.calls and not (options.manual and blocks and "reasoningContent" not in blocks[0])
    if not keeps_calls:
        blocks = [block for block in blocks if not block.keys() & {"toolUse", "toolResult"}]
    made = list_generated_media(message)
    shown = (
        _add_text_before_documents([{"text": MADE}, *[_encode_content_part(part, options) for part in made]])
        if made
        else []
    )
    more: Json = {
        "after": encode_comma_separated(shown),
        "kinds": _list_block_kinds(shown),
        "last": _get_last_block_kind(shown),
    }
    if not calls:
        return ConverseEncoded("assistant", encode_comma_separated(_drop_trailing_thoughts(blocks)), **more)
    if not keeps_calls:
        texts = {call.tool_call_id: encode_json({"text": format_call_as_text(call)}) for call in calls}
        return ConverseEncoded(
            "assistant", encode_comma_separated(_drop_trailing_thoughts(blocks)), texts=texts, **more
        )
    return ConverseEncoded(
        "assistant",
        encode_comma_separated(blocks),
        ids=encode_wire_ids(ids),
        **more,
    )


def _drop_trailing_thoughts(blocks: list[Json]) -> list[Json]:
    """Return *blocks* without thinking at the end, which Claude rejects."""
    while blocks and "reasoningContent" in blocks[-1]:
        blocks = blocks[:-1]
    return blocks


def _encode_assistant_block(part: AssistantPart, options: ConverseEncodeOptions, ids: Mapping[str, str]) -> Json | None:
    """Return the block of a part of a reply; ``None`` for parts that are not sent back, such as thoughts of other models."""
    match part:
        case TextPart():
            data = part.provider_data
            if is_from_provider(data, options.provider, options.model) and "cited" in data:
                return dict(data["cited"])
            return _encode_text(part.text, _unwrap_unknown_members(data, options))
        case RefusalPart():
            return _encode_text(part.text)
        case ThinkingPart():
            return _encode_thinking_if_own(part, options)
        case ToolCallPart():
            return _encode_call(part, options, ids)
        case OpaquePart():
            return dict(part.data) if part.provider == options.provider else None
        case CitationPart() | ImagePart() | DocumentPart():
            return None
        case _ as never:
            assert_never(never)


def _encode_text(text: str, more: Mapping[str, object] | None = None) -> Json | None:
    """Return a text block; ``None`` for blank text, which the service rejects."""
    return {"text": text, **(more or {})} if text.strip() else None


def _unwrap_unknown_members(data: Mapping[str, object] | None, options: ConverseEncodeOptions) -> Json:
    """Return the stored unknown members next to a block, if the same model sent them; else ``{}``."""
    return dict(data.get("more", {})) if is_from_provider(data, options.provider, options.model) else {}


def _encode_thinking_if_own(part: ThinkingPart, options: ConverseEncodeOptions) -> Json | None:
    """Return the block of signed or redacted thinking of the same model; ``None`` for other thoughts, which models do not accept."""
    data = part.provider_data
    if not is_from_provider(data, options.provider, options.model):
        return None
    if data.get("redacted"):
        return {"reasoningContent": {"redactedContent": data["redacted"]}}
    kept = {name: value for name, value in data.items() if name not in {"provider", "model"}}
    return {"reasoningContent": {"reasoningText": {"text": part.text, **kept}}} if data.get("signature") else None


def _encode_call(part: ToolCallPart, options: ConverseEncodeOptions, ids: Mapping[str, str]) -> Json:
    """Return the block of a call, with unknown members of the same model."""
    data = part.provider_data
    newer = data.get("in_call", {}) if is_from_provider(data, options.provider, options.model) else {}
    call = {
        "toolUseId": ids[part.tool_call_id],
        "name": make_safe_tool_name(part.tool_name),
        "input": get_arguments_to_send(part),
    }
    return {"toolUse": {**newer, **call}, **_unwrap_unknown_members(data, options)}


def _encode_result(message: ToolMessage, options: ConverseEncodeOptions) -> ConverseEncoded:
    """Encode a result with the media that the family accepts inside; other media follow it."""
    inside: list[Json] = []
    outside: list[Json | None] = []
    for part in message.content:
        block = _encode_content_part(part, options)
        if block is not None:
            is_medium = isinstance(part, ImagePart | DocumentPart)
            (outside if is_medium and _get_last_block_kind([block]) not in options.family.inside else inside).append(
                block
            )
    is_told = not message.is_error or options.family.status
    if not is_told:
        inside = [{"text": format_result_text(message) or "Error"}, *[block for block in inside if "text" not in block]]
    after = _add_text_before_documents([{"text": make_result_media_heading(message)}, *outside]) if outside else []
    result: Json = {"content": inside or [{"text": NOTHING}]}
    if options.family.status:
        result["status"] = "error" if message.is_error else "success"
    everything = [*result["content"], *after]
    return ConverseEncoded(
        "tool",
        b"," + encode_json(result)[1:] + b"}",
        call_id=message.tool_call_id,
        after=encode_comma_separated(after),
        as_text=encode_comma_separated(everything),
        kinds=_list_block_kinds(after) if options.calls and not options.manual else _list_block_kinds(everything),
        last=_get_last_block_kind(everything),
    )


def _encode_content_part(part: ResultPart, options: ConverseEncodeOptions) -> Json | None:
    """Return the block of a part of a user message or result; ``None`` for blank text."""
    match part:
        case TextPart() | ToolReferencePart():
            return _encode_text(part.text)
        case JsonPart():
            return _encode_text(compact(part.value))
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def _encode_supported_media(part: ImagePart | DocumentPart, options: ConverseEncodeOptions) -> Json:
    """Return the block of an image, document, video or audio; raise ``ModelError`` for an unsupported type."""
    mime = part.mime_type.partition(";")[0].strip().lower()
    kind = get_media_kind(part)
    form = _find_media_format(kind, mime)
    if not form:
        why = "it accepts PNG, JPEG, GIF, WebP, PDF, text, Word, Excel, and common audio and video types"
        raise make_unsupported_part_error(options.provider, part, why)
    source = _encode_media_source(part, options)
    if kind in FORMS:
        return {kind: {"format": form, "source": source}}
    # The null character marks a name that joining makes unique.
    return {
        "document": {"format": form, "name": f"\0{make_document_name(getattr(part, 'name', ''))}", "source": source}
    }


def make_document_name(file_name: str) -> str:
    """Return a document name from a file name: without its extension, and only with characters that the service accepts."""
    return NOT_IN_NAMES.sub(" ", file_name.rpartition(".")[0] or file_name).strip()[:MAX_NAME_CHARS].strip() or UNNAMED


def _find_media_format(kind: Kind, mime: str) -> str:
    """Return the service's name of a media type; ``""`` if the service does not accept the type."""
    if kind in FORMS:
        return FORMS[kind].get(mime, "")
    if kind == "office":
        form = OFFICE.get(mime, "")[1:]
        return form if form in OFFICES else ""
    return {"pdf": "pdf", "text": TEXTS.get(mime, "txt")}.get(kind, "")


def _encode_media_source(part: ImagePart | DocumentPart, options: ConverseEncodeOptions) -> Json:
    """Return the source of a part: its bytes or its URL in S3; raise ``ModelError`` for any other."""
    if part.data is not None:
        return {"bytes": encode_base64(part.data)}
    if part.url is not None and part.url.startswith(STORED):
        return {"s3Location": {"uri": part.url}}
    raise make_unsupported_part_error(
        options.provider, part, "it accepts bytes, and URLs in S3 such as url='s3://bucket/key'"
    )


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
