"""
Encode messages for Chat Completions. Pure: no SDK, no clock, no I/O.

Every message is encoded once and its bytes are cached (``Transcript.memo``); a request joins them. A tool message holds
only text. Images and documents of results therefore move to a user message after the last result of their batch, merged with
the user messages that follow. Calls need no signatures, so calls of other providers are sent with generated ids.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
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
from stepengine.models._json import encode_utf8
from stepengine.models._wire import (
    MADE,
    NUDGE,
    MessageEncoders,
    choose_wire_ids,
    continues_paused_reply,
    continues_text,
    encode_base64,
    encode_comma_separated,
    encode_json,
    encode_turns,
    encode_wire_ids,
    format_document_text,
    format_result_text,
    get_arguments_to_send,
    get_file_name_or_default,
    get_media_kind,
    get_url_or_data_url,
    is_from_provider,
    list_generated_media,
    list_media,
    make_result_media_heading,
    make_safe_tool_name,
    make_unsupported_part_error,
    remove_blank_texts,
    require_accepted_image_type,
    require_file_of_provider,
)
from stepengine.models._wire import EncodedMessage as BaseTurn
from stepengine.models.presets import Preset

ID_CHARS = 9
"""Mistral requires ids of nine letters and digits (ecosystem:EC83)."""
SOUNDS = {"audio/wav": "wav", "audio/mpeg": "mp3"}

Json = dict[str, Any]


@frozen
class ChatEncodeOptions:
    """
    The options that the encoded form of a message depends on.

    Attributes:
        preset: The preset of the server; only ids and parts of the provider with its name are sent back.
        model: Only thinking of this model is sent back (ecosystem:EC99).
    """

    preset: Preset
    model: str


@frozen
class ChatEncoded(BaseTurn):
    """
    One encoded message.

    Attributes:
        plain: Whether the body of a user message is one text, not a list of parts.
        legacy: The encoded name of the call that goes back as a ``function_call``, if it arrived as one.
    """

    plain: bool = True
    legacy: bytes = b""


# --- joining --------------------------------------------------------------------------------------------------------


def encode_messages(
    request: ModelRequest, options: ChatEncodeOptions, *, is_bridged: bool = False, cache_mark: bytes | None = None
) -> bytes:
    """
    Return the ``messages`` array of system prompt, history and tail.

    *is_bridged* inserts a short assistant message between a tool result and a user message. *cache_mark* is added to the system
    prompt and the last message, as the ends of cached prefixes (providers:PV66).
    """
    joiner = _ChatJoiner(request.system_prompt, is_bridged=is_bridged, cache_mark=cache_mark)
    for turn in encode_turns(request, options, ENCODERS):
        joiner.append_turn(turn)
    return joiner.join(must_end_with_user=not continues_paused_reply(request))


class _ChatJoiner:
    """Joins encoded messages, merges user messages, and moves media after the results of a batch."""

    def __init__(self, system_prompt: str, *, is_bridged: bool, cache_mark: bytes | None) -> None:
        self._bridged = is_bridged
        self._mark = b"" if cache_mark is None else b',"cache_control":' + cache_mark
        self._out = [self._encode_system_prompt(system_prompt)] if system_prompt else []
        self._user: list[ChatEncoded] = []
        self._ids: Mapping[str, bytes] = {}
        self._legacy = b""
        self._role = ""

    def append_turn(self, turn: ChatEncoded) -> None:
        """Append an encoded message; user messages and media of results are stored until the next reply or the end."""
        if turn.role == "user":
            if turn.body:
                self._user.append(turn)
            return
        if turn.role == "tool":
            self._out.append(self._encode_result_start(turn.call_id) + turn.body)
            self._role = "tool"
            if turn.after:
                self._user.append(ChatEncoded("user", turn.after, plain=False))
            return
        self._ids, self._legacy = turn.ids, turn.legacy
        if turn.body:
            self._flush_user_messages()
            # Several servers reject two assistant messages in a row, and merging them would change the history.
            if self._role == "assistant":
                self._user.append(NUDGE_TURN)
                self._flush_user_messages()
            self._out.append(turn.body)
            self._role = "assistant"
        if turn.after:
            self._user.append(ChatEncoded("user", turn.after, plain=False))

    def _encode_result_start(self, call_id: str) -> bytes:
        if self._legacy:
            return b'{"role":"function","name":' + self._legacy
        return b'{"role":"tool","tool_call_id":' + self._ids[call_id]

    def _encode_system_prompt(self, text: str) -> bytes:
        """Return the encoded system message, with a cache mark if there is one."""
        if not self._mark:
            return encode_json({"role": "system", "content": text})
        return b'{"role":"system","content":[{"type":"text","text":' + encode_json(text) + self._mark + b"}]}"

    def _flush_user_messages(self, cache_mark: bytes = b"") -> None:
        """Append the stored user messages as one message; *cache_mark* is added to its last part."""
        turns = self._user
        if not turns:
            return
        if self._bridged and self._role == "tool":
            self._out.append(BRIDGE)
        if len(turns) == 1 and turns[0].plain and not cache_mark:
            content = turns[0].body
        else:
            parts = b",".join([TEXT + t.body + b"}" if t.plain else t.body for t in turns])
            content = b"[" + parts[:-1] + cache_mark + b"}]"
        self._out.append(b'{"role":"user","content":' + content + b"}")
        self._user = []
        self._role = "user"

    def join(self, *, must_end_with_user: bool) -> bytes:
        """Return the array with the stored user messages; *must_end_with_user* adds ``NUDGE`` if the last message is not the user's."""
        if self._mark and self._role == "tool" and not self._user:
            self._add_cache_mark_to_result()
        self._flush_user_messages(self._mark)
        if not self._role or (must_end_with_user and self._role == "assistant"):
            self._user.append(NUDGE_TURN)
            self._flush_user_messages(self._mark)
        return b"[" + b",".join(self._out) + b"]"

    def _add_cache_mark_to_result(self) -> None:
        """Add the cache mark to the last message, a result, by turning its text into a list of one part."""
        head, content, text = self._out[-1].partition(b',"content":"')
        if content and text != b'"}':
            self._out[-1] = head + b',"content":[' + TEXT + b'"' + text[:-1] + self._mark + b"}]}"


TEXT = b'{"type":"text","text":'
# Mistral answers 400, code 3230, "Unexpected role 'user' after role 'tool'".
BRIDGE = encode_json({"role": "assistant", "content": "OK"})
NUDGE_TURN = ChatEncoded("user", encode_json(NUDGE))


# --- one message ----------------------------------------------------------------------------------------------------


def _encode_user(message: UserMessage, options: ChatEncodeOptions) -> ChatEncoded:
    """Encode a user message without blank texts, a single text as a string."""
    parts = remove_blank_texts(message.content)
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        return ChatEncoded("user", encode_json(parts[0].text))
    return ChatEncoded(
        "user", encode_comma_separated([_encode_content_part(part, options) for part in parts]), plain=False
    )


def _encode_assistant(message: AssistantMessage, options: ChatEncodeOptions, with_provider_ids: bool) -> ChatEncoded:  # noqa: FBT001 - private
    """Encode a reply, with the members that the service requires; empty bytes if there is nothing to send."""
    provider = options.preset.name
    ids = choose_wire_ids(
        message.tool_calls,
        provider,
        with_provider_ids=with_provider_ids,
        make_id=_make_nine_char_id if options.preset.nine_letter_ids else None,
    )
    body: Json = {"role": "assistant", "content": _encode_assistant_content(message.content, options)}
    refusal = "".join([part.text for part in message.content if isinstance(part, RefusalPart)])
    if refusal and options.preset.refusals:
        body["refusal"] = refusal
    for part in message.content:
        body.update(_encode_thinking_members_if_own(part, options))
    calls = [_encode_call(part, ids, options) for part in message.tool_calls]
    legacy = len(calls) == 1 and _is_legacy_function_call(message.tool_calls[0], options)
    if calls:
        body.update({"function_call": calls[0]["function"]} if legacy else {"tool_calls": calls})
        if options.preset.text_with_calls and body["content"] is None:
            body["content"] = ""
    elif body["content"] is None and len(body) > 2 and "refusal" not in body:  # noqa: PLR2004 - role and content
        # A reply of thoughts only: without calls the API requires a text.
        body["content"] = ""
    member = options.preset.reasoning_with_calls
    if member and (calls or (options.preset.reasoning_with_text and body["content"] is not None)):
        body.setdefault(member, "")
    made = list_generated_media(message)
    after = (
        encode_comma_separated(
            [{"type": "text", "text": MADE}, *[_encode_supported_media(part, options) for part in made]]
        )
        if made
        else b""
    )
    if body["content"] is None and len(body) == 2:  # noqa: PLR2004 - role and content: there is nothing to send
        return ChatEncoded("assistant", b"", after=after)
    return ChatEncoded(
        "assistant",
        encode_json(body),
        ids=encode_wire_ids(ids),
        after=after,
        legacy=encode_json(calls[0]["function"]["name"]) if legacy else b"",
    )


def _make_nine_char_id(call_id: str) -> str:
    """Return an id of nine letters and digits, which Mistral requires, from our *call_id*."""
    # (ecosystem:EC83)
    return hashlib.sha256(encode_utf8(call_id)).hexdigest()[:ID_CHARS]


def _encode_assistant_content(parts: Sequence[AssistantPart], options: ChatEncodeOptions) -> object:
    """Return the content as one string, as a list if it has parts of this provider's own kinds, or ``None``."""
    pieces: list[str | Json] = []
    before: AssistantPart | None = None
    thought = False
    for part in parts:
        if isinstance(part, CitationPart):
            continue
        text = _find_text_to_send(part, options)
        own = _encode_provider_piece(part, options)
        if own is not None:
            pieces.append(own)
        elif text and pieces and isinstance(pieces[-1], str):
            pieces[-1] += text if continues_text(before, part) or thought else f"\n\n{text}"
        elif text:
            pieces.append(text)
        # Thoughts that the model wrote into its text include the blanks after them.
        before, thought = part, isinstance(part, ThinkingPart) and bool(text)
    if all(isinstance(piece, str) for piece in pieces):
        return pieces[0] if pieces else None
    return [{"type": "text", "text": piece} if isinstance(piece, str) else piece for piece in pieces]


def _encode_provider_piece(part: AssistantPart, options: ChatEncodeOptions) -> Json | None:
    """Return the content piece of an opaque part or thought of this provider, which only it understands; ``None`` for other parts."""
    if isinstance(part, OpaquePart):
        return dict(part.data) if part.provider == options.preset.name else None
    data = part.provider_data if isinstance(part, ThinkingPart) else None
    if not is_from_provider(data, options.preset.name, options.model):
        return None
    return dict(data["piece"]) if data.get("piece") else None


def _find_text_to_send(part: AssistantPart, options: ChatEncodeOptions) -> str:
    """Return the text of a part for the content, with the tags around thoughts that the model wrote; ``""`` for other parts."""
    match part:
        case TextPart():
            return part.text
        case RefusalPart():
            return "" if options.preset.refusals else part.text
        case ThinkingPart():
            data = part.provider_data
            if not is_from_provider(data, options.preset.name, options.model):
                return ""
            tagged = f"<think>{part.text}</think>" if part.text and _sends_tagged_thoughts(options) else ""
            return str(data.get("written", tagged))
        case OpaquePart() | ToolCallPart() | CitationPart() | ImagePart() | DocumentPart():
            return ""
        case _ as never:
            assert_never(never)


def _sends_tagged_thoughts(options: ChatEncodeOptions) -> bool:
    """Return whether the model expects its thoughts between tags in the text."""
    tagged = options.preset.tagged_thoughts
    return bool(tagged and re.fullmatch(tagged, options.model))


def _encode_thinking_members_if_own(part: AssistantPart, options: ChatEncodeOptions) -> Json:
    """Return the members that send thinking back to the same provider and model; ``{}`` for other parts."""
    # (ecosystem:EC91, ecosystem:EC99)
    if not isinstance(part, ThinkingPart) or not is_from_provider(
        data := part.provider_data, options.preset.name, options.model
    ):
        return {}
    if _sends_tagged_thoughts(options):
        return {}
    members: Json = {str(data["member"]): part.text} if data.get("member") else {}
    if data.get("reasoning_details"):
        members["reasoning_details"] = data["reasoning_details"]
    return members


def _encode_call(part: ToolCallPart, ids: Mapping[str, str], options: ChatEncodeOptions) -> Json:
    """Return the entry of a call, with unknown members of the same model."""
    data = part.provider_data
    own = data if is_from_provider(data, options.preset.name, options.model) else {}
    name, arguments = make_safe_tool_name(part.tool_name), encode_utf8(compact(get_arguments_to_send(part))).decode()
    function = {**own.get("more_of_function", {}), "name": name, "arguments": arguments}
    return {**own.get("more", {}), "id": ids[part.tool_call_id], "type": "function", "function": function}


def _is_legacy_function_call(part: ToolCallPart, options: ChatEncodeOptions) -> bool:
    """Return whether a call arrived from this provider as a ``function_call``."""
    data = part.provider_data
    return is_from_provider(data, options.preset.name) and data.get("legacy") is True


def _encode_result(message: ToolMessage, options: ChatEncodeOptions) -> ChatEncoded:
    """Encode a result as text; its images and documents follow in a user message."""
    media = list_media(message)
    text = format_result_text(message)
    moved: list[Json] = []
    # Results hold only text, so images follow in a user message after all results of the batch: nothing may separate
    # results.
    if media:
        text = f"{text}\n(Images and documents follow in the next message.)".strip()
        moved = [
            {"type": "text", "text": make_result_media_heading(message)},
            *[_encode_content_part(part, options) for part in media],
        ]
    body = b',"content":' + encode_json(text) + b"}"
    return ChatEncoded("tool", body, call_id=message.tool_call_id, after=encode_comma_separated(moved))


def _encode_content_part(part: ResultPart, options: ChatEncodeOptions) -> Json:
    """Return the piece of a part of a user message or result."""
    match part:
        case TextPart() | ToolReferencePart():
            return {"type": "text", "text": part.text}
        case JsonPart():
            return {"type": "text", "text": compact(part.value)}
        case ImagePart() | DocumentPart():
            return _encode_supported_media(part, options)
        case _ as never:
            assert_never(never)


def _encode_supported_media(part: ImagePart | DocumentPart, options: ChatEncodeOptions) -> Json:
    """Return the piece of a text, image, video, audio or PDF; raise ``ModelError`` for media that the service does not accept."""
    preset, kind = options.preset, get_media_kind(part)
    require_file_of_provider(preset.name, part)
    if kind == "text" and part.data is not None:
        return {"type": "text", "text": format_document_text(getattr(part, "name", ""), part.data)}
    if kind == "image" and part.file_id is None:
        if preset.stores_files:  # OpenAI itself; other servers check it themselves
            require_accepted_image_type(preset.name, part)
        return {"type": "image_url", "image_url": {"url": get_url_or_data_url(part)}}
    if kind == "video" and preset.supports_video and part.file_id is None:
        return {"type": "video_url", "video_url": {"url": get_url_or_data_url(part)}}
    sound = SOUNDS.get(part.mime_type)
    if sound and preset.audio_format and part.data is not None:
        data = encode_base64(part.data) if preset.audio_format == "bytes" else get_url_or_data_url(part)
        return {"type": "input_audio", "input_audio": {"data": data, "format": sound}}
    pdf = _encode_pdf(part, preset) if kind == "pdf" else None
    if pdf is None:
        raise make_unsupported_part_error(preset.name, part, f"it accepts {_describe_accepted_media(preset)}")
    return pdf


def _encode_pdf(part: ImagePart | DocumentPart, preset: Preset) -> Json | None:
    """Return the piece of a PDF in the format of the service; ``None`` if the service does not accept the PDF."""
    if part.file_id is not None:
        return {"type": "file", "file": {"file_id": part.file_id}} if preset.stores_files else None
    if preset.file_format == "link":
        return {"type": "document_url", "document_url": get_url_or_data_url(part)}
    if preset.file_format == "no" or (preset.file_format == "bytes" and part.data is None):
        return None
    return {
        "type": "file",
        "file": {"filename": get_file_name_or_default(part), "file_data": get_url_or_data_url(part)},
    }


def _describe_accepted_media(preset: Preset) -> str:
    """Return a readable list of the media that a service accepts."""
    files = {
        "no": "",
        "bytes": "PDF as bytes",
        "all": "PDF as bytes or by URL",
        "link": "PDF as bytes or by URL",
    }
    kinds = [
        "text as bytes",
        "images as bytes or by URL",
        files[preset.file_format] + (" or uploaded" if preset.stores_files else ""),
        "WAV and MP3 as bytes" if preset.audio_format else "",
        "video as bytes or by URL" if preset.supports_video else "",
    ]
    return ", ".join([kind for kind in kinds if kind])


ENCODERS = MessageEncoders(_encode_user, _encode_assistant, _encode_result)
