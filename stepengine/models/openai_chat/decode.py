"""
Decode replies of Chat Completions. Pure: no SDK, no clock, no I/O.

The chunks of a stream are assembled into the completion of a request without a stream. ``decode`` handles both, so they
cannot differ.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn

import attrs
from attrs import frozen

from stepengine.data.json import compact, freeze
from stepengine.data.media_types import UNKNOWN
from stepengine.data.messages import (
    AssistantPart,
    CitationPart,
    ImagePart,
    OpaquePart,
    RefusalPart,
    TextPart,
    ThinkingPart,
)
from stepengine.data.models import ModelDelta, ModelReply, StopReason, TextChunk, ThinkingChunk
from stepengine.data.usage import Usage
from stepengine.models._byte_reader import Accumulator
from stepengine.models._failures import (
    RequestLabel,
    error_from_body,
    make_aborted_reply_error,
    make_protocol_error,
    make_unanswerable_error,
)
from stepengine.models._json import (
    find_object,
    find_objects,
    find_text,
    find_unknown_members,
    get_optional_list,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_json,
    usage_from_totals,
)
from stepengine.models._reply import (
    MAX_UNREAD_NAMES,
    find_stated_cost,
    get_cited_text,
    make_validated_reply,
    media_part_from_base64,
    parse_dollar_text,
    select_members,
)
from stepengine.models._wire import encode_base64, make_safe_tool_name
from stepengine.models.openai_chat.calls import FUNCTION_MEMBERS, MEMBERS, CallPieces, find_legacy_call

STOPS = {
    "stop": StopReason.END_TURN,
    "eos": StopReason.END_TURN,
    "tool_calls": StopReason.TOOL_USE,
    "function_call": StopReason.TOOL_USE,
    "length": StopReason.MAX_TOKENS,
    "model_length": StopReason.MAX_TOKENS,
    "content_filter": StopReason.REFUSAL,
    "error": StopReason.ERROR,
}
GAVE_UP = frozenset({"aborted", "insufficient_system_resource"})
"""DeepSeek's finish reasons of replies that it aborted."""
CACHED = ("prompt_cache_hit_tokens", "num_cached_tokens", "cached_tokens")
"""The members in which DeepSeek, Mistral and Hugging Face report cached tokens."""
PCM = "audio/pcm"
"""The type of audio without a recognizable header: streams send bare samples."""
REASONING = ("reasoning_content", "reasoning")
# Stored in `provider_data` under the server's own names, for callers. The lists are closed, so that a member in none of
# them is recognized as new, stored and reported (reliability:MP59).
KEPT = (
    *("service_tier", "system_fingerprint", "prompt_filter_results", "moderation"),
    *("citations", "search_results", "related_questions", "videos"),
)
IN_REPLY = frozenset(
    {
        *("id", "object", "created", "model", "choices", "usage", "provider", "x_groq", "error", "metadata"),
        *("obfuscation", *KEPT),
    }
)
IN_CHOICE = frozenset(
    {
        *("index", "delta", "message", "finish_reason", "logprobs", "error"),
        *("native_finish_reason", "content_filter_results"),
    }
)
NOT_IN_PIECES = ("provider_metadata", *REASONING)
LISTS = ("reasoning_details", "annotations", "images")
IN_MESSAGE = frozenset(
    {"role", "content", "refusal", "tool_calls", "function_call", "audio", "provider_metadata", *LISTS, *REASONING}
)
IN_AUDIO = frozenset({"data", "transcript"})
IN_TEXT = frozenset({"type", "text"})
"""The known members of a reply, its choice, its message and its content; unknown ones are stored unchanged."""
TEXTS = ("text", "summary")
IN_CALL = MEMBERS | {"custom"}

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the completion object *data*; raise ``ModelError`` for an error, an aborted reply or a custom tool's call.

    Raises:
        ModelError: when there is no choice, when the choice holds an error, when the server aborted the reply, and for a call
            of a custom tool.
    """
    choices = get_optional_objects(data, "choices")
    if not choices:
        raise make_protocol_error(call, "it holds no choice", parse_usage(_find_raw_usage(data)))
    choice = choices[0]
    # OpenRouter and others answer with status 200 and put the error of the actual service into the choice.
    usage = _find_raw_usage(data)
    if choice.get("error"):
        raise error_from_body({"error": choice["error"]}, None, {}, call, parse_usage(usage))
    message = get_optional_object(choice, "message")
    # Only `extra` settings can offer such a tool, and the engine cannot execute it. As an ordinary call it would get an
    # error result, and the model would try again. Snowflake adds an empty `custom` member to function calls.
    entries = get_optional_objects(message, "tool_calls")
    if any(entry.get("type") == "custom" or any(find_object(entry, "custom").values()) for entry in entries):
        raise make_unanswerable_error(call, ["custom"], parse_usage(usage))
    # An answer by a schema is text everywhere else. Without a schema such content is an error of the server.
    if isinstance(message.get("content"), Mapping) and _requests_json(call):
        message = {**message, "content": compact(message["content"])}
    content = (*_decode_message_parts(message, call.provider, model), *_decode_sources(data, message))
    raw = get_optional_text(choice, "finish_reason") or None
    if raw in GAVE_UP:
        raise make_aborted_reply_error(call, f"it ended with {raw!r}", parse_usage(usage))
    return make_validated_reply(
        content,
        call,
        model,
        stop_reason=STOPS.get(raw or ""),
        raw_stop_reason=raw,
        usage=parse_usage(usage),
        answering_model=get_optional_text(data, "model"),
        request_id=request_id,
        data_to_store=_collect_members_to_store(data, choice, message),
        cost=_find_reply_cost(usage, message),
    )


def _requests_json(call: RequestLabel) -> bool:
    """Return whether the request asks for an answer in JSON, which Cloudflare sends as an object in place of a text."""
    settings = None if call.request is None else call.request.settings
    if settings is None:
        return False
    body = find_object(settings.extra, "body")
    return settings.response_schema is not None or "response_format" in settings.extra or "response_format" in body


def _find_reply_cost(usage: object, message: Mapping[str, object]) -> Decimal | None:
    """Return the cost of a reply in US dollars as the service or its gateway states it; ``None`` if it is unknown."""
    # A stated cost is better than any price table: the service knows discounts, caches and the actual provider. With
    # `is_byok` (the user's own key at OpenRouter) it states only its fee, and the tokens are billed elsewhere. Then the
    # cost is unknown: `None`, not 0. Always `Decimal`, because sums of floats drift.
    stated = find_stated_cost(usage)
    if stated is not None or (isinstance(usage, Mapping) and usage.get("is_byok") is True):
        return stated
    beside = find_object(message, "provider_metadata", "gateway")
    return parse_dollar_text(beside.get("cost"))


def _find_raw_usage(data: Mapping[str, object]) -> object:
    """Return the usage member of a reply, else ``x_groq.usage``, which Groq used to send in streams; ``None`` without both."""
    # (ecosystem:EC109)
    elsewhere = data.get("x_groq")
    return data.get("usage") or (elsewhere.get("usage") if isinstance(elsewhere, Mapping) else None)


def _collect_members_to_store(
    data: Mapping[str, object], choice: Mapping[str, object], message: Mapping[str, object]
) -> Json:
    """Return the members of a reply to store in ``provider_data``, under our names where servers differ."""
    # Members that only some servers send, under our names where servers differ. Empty ones are left out.
    more = {
        "served_by": data.get("provider"),
        "native_finish_reason": choice.get("native_finish_reason"),
        "content_filter_results": choice.get("content_filter_results"),
        "annotations": message.get("annotations"),
        "images": [image for image in find_objects(message, "images") if _decode_image(image, {}) is None],
        "logprobs": choice.get("logprobs"),
        "audio": _find_unreadable_audio(message.get("audio")),
    }
    kept: Json = {"id": data.get("id"), "usage": _find_raw_usage(data), **select_members(data, *KEPT)}
    kept.update({name: value for name, value in more.items() if value})
    return {**kept, **_collect_unknown_members(data, choice, message)}


def _collect_unknown_members(
    data: Mapping[str, object], choice: Mapping[str, object], message: Mapping[str, object]
) -> Json:
    """Return the unknown members of a reply, and the names of the ignored choices."""
    of_message = find_unknown_members(message, IN_MESSAGE)
    of_message.update({name: message[name] for name in REASONING if isinstance(message.get(name), dict | list)})
    found = {
        "more": find_unknown_members(data, IN_REPLY),
        "more_of_choice": find_unknown_members(choice, IN_CHOICE),
        "more_of_message": of_message,
        "unread": [f"choices[{index}]" for index in range(1, len(get_optional_objects(data, "choices")))][
            :MAX_UNREAD_NAMES
        ],
    }
    return {name: value for name, value in found.items() if value}


def _decode_message_parts(message: Mapping[str, Any], provider: str, model: str) -> list[AssistantPart]:
    """Return the parts of a message: thoughts, text with its sources, media, the refusal, and the calls last."""
    parts: list[AssistantPart] = []
    mark: Json = {"provider": provider, "model": model}
    # The member of a thought is stored, because the thought must go back in the same one: DeepSeek rejects a history
    # without `reasoning_content`, others do not know it.
    member = next((name for name in REASONING if isinstance(message.get(name), str) and message[name]), None)
    details = get_optional_list(message, "reasoning_details")
    if member or details:
        data = {**mark, **({"member": member} if member else {}), **({"reasoning_details": details} if details else {})}
        parts.append(ThinkingPart(message[member] if member else "", provider_data=freeze(data)))
    # The order in which parts are shown and sent back: thoughts, text with its sources, media, and the calls last,
    # because only results may follow them.
    content = _decode_content(message, mark)
    said = "".join([part.text for part in content if isinstance(part, TextPart)])
    parts += [
        *content,
        *[_decode_citation(note, said) for note in find_objects(message, "annotations") if "url_citation" in note],
    ]
    parts += _decode_media(message, mark)
    if refusal := get_optional_text(message, "refusal"):
        parts.append(RefusalPart(refusal))
    calls = get_optional_objects(message, "tool_calls")
    parts += [_decode_call(call, get_optional_object(call, "function"), mark) for call in calls]
    # Some servers send a call in both forms; then the older one is ignored.
    legacy = None if calls else find_legacy_call(message)
    return parts if legacy is None else [*parts, _decode_call({}, legacy, {**mark, "legacy": True})]


def _decode_call(entry: Mapping[str, object], function: Mapping[str, object], mark: Json) -> AssistantPart:
    """Return a call with its id and unknown members, such as the thought signature of Gemini's OpenAI endpoint."""
    found = {
        "id": get_optional_text(entry, "id"),
        "more": find_unknown_members(entry, IN_CALL),
        "more_of_function": find_unknown_members(function, FUNCTION_MEMBERS),
    }
    data = {**mark, **{name: value for name, value in found.items() if value}}
    return make_call_part(get_optional_text(function, "name"), function.get("arguments"), data)


def _decode_media(message: Mapping[str, object], mark: Json) -> list[AssistantPart]:
    """Return the images of OpenRouter, and the audio of OpenAI with its transcript as text."""
    # (providers:PV52)
    parts: list[AssistantPart] = [
        part for image in find_objects(message, "images") if (part := _decode_image(image, mark)) is not None
    ]
    audio = message.get("audio")
    if not isinstance(audio, Mapping):
        return parts
    said = find_text(audio, "transcript")
    kept = find_unknown_members(audio, IN_AUDIO)
    sound = media_part_from_base64(audio.get("data"), "", {**mark, **kept, **({"transcript": True} if said else {})})
    # Streams send bare samples without a header; other audio is recognized by its first bytes.
    if sound is not None:
        parts.append(attrs.evolve(sound, mime_type=PCM) if sound.mime_type == UNKNOWN else sound)
    return [*parts, *([TextPart(said)] if said else [])]


def _find_unreadable_audio(audio: object) -> Json:
    """Return the members of audio that is missing or unreadable, without its transcript; ``{}`` for readable audio."""
    if not isinstance(audio, Mapping) or media_part_from_base64(audio.get("data"), "", {}) is not None:
        return {}
    return {name: value for name, value in audio.items() if name != "transcript" and value}


def _decode_image(image: Mapping[str, object], mark: Json) -> AssistantPart | None:
    """Return an image from a data URL, or with its URL; ``None`` for unreadable data."""
    # Only data URLs are decoded. Other URLs stay URLs, because a reply must not make this process fetch anything.
    url = find_text(image, "image_url", "url")
    head, found, data = url.removeprefix("data:").partition(";base64,")
    if url.startswith("data:"):
        return media_part_from_base64(data, head, mark) if found and head.startswith("image/") else None
    return ImagePart(url, provider_data=freeze(mark)) if url else None


def _decode_sources(data: Mapping[str, Any], message: Mapping[str, Any]) -> list[CitationPart]:
    """Return the sources that Perplexity and xAI list next to the choices, without those that the message cites."""
    # A citation in the message also has its position in the text, so it replaces the same page in the list.
    cited = {find_text(note, "url_citation", "url") for note in find_objects(message, "annotations")}
    told = data.get("citations")
    addresses = [url for url in told if isinstance(url, str)] if isinstance(told, list | tuple) else []
    found = {find_text(result, "url"): result for result in find_objects(data, "search_results")}
    return [
        CitationPart(url, find_text(found.get(url), "title"), quote=find_text(found.get(url), "snippet"))
        for url in dict.fromkeys([*addresses, *found])
        if url and url not in cited
    ]


def _decode_citation(annotation: Mapping[str, object], text: str) -> CitationPart:
    """Return the citation of an annotation, with the part of *text* between its offsets."""
    # Members of any type are possible. A wrong type counts as empty, because a citation is no reason to reject the reply.
    cited = find_object(annotation, "url_citation")
    return CitationPart(
        find_text(cited, "url"),
        find_text(cited, "title"),
        quote=find_text(cited, "content"),
        said=get_cited_text(cited, text),
    )


def _decode_content(message: Mapping[str, object], mark: Json) -> list[AssistantPart]:
    content = message.get("content")
    # Three forms are in use: a text, a list of parts, and a list of texts. Parts of unknown kinds are stored whole and go
    # back only to the same provider.
    if isinstance(content, str):
        return [TextPart(content)] if content else []
    parts: list[AssistantPart] = []
    for piece in get_optional_list(message, "content"):
        if isinstance(piece, str):
            parts.append(TextPart(piece))
        elif piece.get("type") == "text":
            newer = find_unknown_members(piece, IN_TEXT)
            parts.append(TextPart(piece["text"], provider_data=freeze({**mark, "more": newer}) if newer else None))
        elif piece.get("type") == "thinking":
            parts.append(ThinkingPart(_extract_thought_text(piece), provider_data=freeze({**mark, "piece": piece})))
        else:
            parts.append(OpaquePart(mark["provider"], piece))
    return parts


def _extract_thought_text(piece: Mapping[str, object]) -> str:
    """Return the text of a ``thinking`` piece, which contains a text, or as at Mistral a list of texts."""
    # (ecosystem:EC111)
    inner = piece.get("thinking")
    if isinstance(inner, str):
        return inner
    return "".join([get_optional_text(part, "text") for part in get_optional_objects(piece, "thinking")])


def parse_usage(raw: object) -> Usage | None:
    """Parse the server's usage; ``None`` if *raw* has no token counts."""
    return usage_from_totals(raw, "prompt_tokens", "completion_tokens", cached_members=CACHED)


class ChatAccumulator(Accumulator):
    """Assembles the chunks of one stream into the completed reply."""

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(_find_raw_usage(data)))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._choice: Json = {}
        # Texts are lists that are joined once at the end: a long reply has ten thousand pieces.
        self._texts: dict[str, list[str]] = {}
        self._contents: dict[str, list[_ContentPiece]] = {}
        self._lists: dict[str, list[Any]] = {}
        self._more: Json = {}
        self._more_texts: dict[str, list[str]] = {}
        self._likely: dict[str, list[Any]] = {}
        tools = () if call.request is None else call.request.tools
        self._calls = CallPieces(self._raise_ambiguous_calls, {make_safe_tool_name(tool.name) for tool in tools})
        self._audio: Json = {}
        self._sound: list[str] = []
        self._legacy = False
        self._finished = False
        self._chosen = False
        self._around: Json | None = None
        self._beside: Json | None = None

    @property
    def has_reported_end(self) -> bool:
        """Whether a finish reason was received."""
        return self._finished

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one chunk to the reply, and return its deltas; raise ``ModelError`` for a chunk with an error.

        Raises:
            ModelError: for a chunk with an error.
        """
        if data.lstrip().startswith(b"[DONE]"):
            # Some servers (Snowflake) never send a finish reason; then this marker after complete calls is enough.
            self.is_done = self._finished or (self._chosen and self._calls.has_complete_arguments)
            return self._calls.end_calls() if self.is_done else []
        chunk = parse_json(data)
        text = self._append_if_only_text_differs(chunk) if self._around is not None and name != "error" else None
        if text is not None:
            return [TextChunk(text)]
        self._around = None
        if chunk.get("error") or name == "error":
            raise self._make_stream_error(chunk)
        named = self._data.get("id")
        # The last value of each member counts: usage is cumulative, or only in the last chunk.
        self._data.update({key: value for key, value in chunk.items() if key != "choices" and value is not None})
        if named:
            self._data["id"] = named  # the last chunk of Groq's own tools has the id 'stub'
        deltas: list[ModelDelta] = []
        for choice in get_optional_objects(chunk, "choices"):
            # Only `extra` settings can request several choices. All but the first are reported as ignored.
            if index := choice.get("index"):
                self._record_unknown_names(f"choices[{index}]")
                continue
            self._chosen = True
            deltas += self._apply_choice(choice)
        self._store_chunk_frame(chunk)
        return deltas

    def _store_chunk_frame(self, chunk: Json) -> None:
        """Store the members around a plain text delta, which ``_append_if_only_text_differs`` expects in the next chunk."""
        choices = chunk.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or self._finished or "content" in self._contents:
            return
        choice, others = choices[0], ("index", "logprobs", "error", "finish_reason")
        if isinstance(choice.get("delta"), dict) and not any(map(choice.get, others)):
            self._around = {**chunk, "choices": None, "obfuscation": None}
            self._beside = {**choice, "delta": None}

    def _append_if_only_text_differs(self, chunk: Json) -> str | None:
        """
        Append the text of *chunk* and return it, if the rest equals the previous chunk; else return ``None``.

        Most chunks are of this kind, and a comparison is faster than parsing all members.
        """
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict):
            return None
        delta = choice.get("delta")
        text = delta.get("content") if isinstance(delta, dict) and len(delta) == 1 else None
        if not isinstance(text, str) or not text:
            return None
        chunk["choices"] = choice["delta"] = chunk["obfuscation"] = None  # in place, because copies are slow
        is_known = chunk == self._around and choice == self._beside
        chunk["choices"], choice["delta"] = choices, delta
        if not is_known:
            return None
        self._texts.setdefault("content", []).append(text)
        return text

    def _apply_choice(self, choice: Mapping[str, object]) -> list[ModelDelta]:
        """Add the first choice of a chunk to the reply, and return its deltas; raise ``ModelError`` for a choice with an error."""
        if choice.get("error"):
            raise error_from_body({"error": choice["error"]}, None, {}, self._call, self.usage)
        deltas = self._apply_delta(get_optional_object(choice, "delta"))
        self._choice.update({key: value for key, value in choice.items() if key != "delta" and value is not None})
        for name in ("content", "refusal"):
            if tokens := find_objects(choice, "logprobs", name):
                self._likely.setdefault(name, []).extend(tokens)
        # Only the first one counts: gateways repeat it, and the calls must end once.
        if choice.get("finish_reason") and not self._finished:
            self._finished = True
            deltas += self._calls.end_calls()
        return deltas

    def _apply_delta(self, delta: Mapping[str, Any]) -> list[ModelDelta]:
        """Merge the delta of a chunk into the reply and return the deltas for subscribers."""
        deltas: list[ModelDelta] = []
        # vLLM sends each thought under both names.
        member = next((name for name in REASONING if delta.get(name) and isinstance(delta[name], str)), "")
        if member:
            known = next((name for name in REASONING if name in self._texts), member)
            self._texts.setdefault(known, []).append(delta[member])
            deltas.append(ThinkingChunk(delta[member]))
        for name in ("content", "refusal"):
            value = delta.get(name)
            if isinstance(value, list):
                deltas += self._append_content_pieces(name, value)
            # After a list a text is one more piece of it, so that the order is preserved.
            elif value and name in self._contents:
                deltas += self._append_content_pieces(name, [{"type": "text", "text": get_optional_text(delta, name)}])
            elif text := get_optional_text(delta, name):
                self._texts.setdefault(name, []).append(text)
                deltas.append(TextChunk(text))
        for name in LISTS:
            if pieces := get_optional_list(delta, name):
                self._lists.setdefault(name, []).extend(pieces)
        deltas += self._append_audio(get_optional_object(delta, "audio"))
        self._merge_unknown_members(delta)
        return deltas + self._calls.add_chunk_entries(self._get_call_entries(delta))

    def _raise_ambiguous_calls(self, reason: str) -> NoReturn:
        """Raise the retryable error for pieces of calls that can be read in several ways."""
        self._raise_protocol_error(f"it sent {reason}, so its tool calls are ambiguous")

    def _merge_unknown_members(self, delta: Mapping[str, Any]) -> None:
        """Merge the unknown members of a delta, and known ones of unusual types: texts and lists grow, others are replaced."""
        for name, value in delta.items():
            if name in IN_MESSAGE and not (name in NOT_IN_PIECES and isinstance(value, dict | list)):
                continue
            # The meaning of an unknown member is guessed from its type: pieces of texts and lists are joined, of other
            # values the last one counts.
            if isinstance(value, str):
                self._more_texts.setdefault(name, []).append(value)
            elif isinstance(value, list):
                self._lists.setdefault(name, []).extend(value)
            elif value is not None:
                self._more[name] = value

    def _get_call_entries(self, delta: Mapping[str, object]) -> list[Mapping[str, Any]]:
        """Return the ``tool_calls`` of *delta*, else its ``function_call`` as an entry, and record that form; raise if both forms arrive."""
        calls, legacy = get_optional_objects(delta, "tool_calls"), find_legacy_call(delta)
        # Ambiguous, and a wrong call would be worse than a retry.
        if calls and self._legacy:
            self._raise_protocol_error("tool_calls after a function_call")
        if legacy is None or calls or (not self._legacy and self._calls.resolve_and_join_calls()):
            return calls
        self._legacy = True
        return [{"index": 0, "function": legacy}]

    def _append_audio(self, audio: Mapping[str, object]) -> list[ModelDelta]:
        """Append a chunk of audio in base64 and a chunk of its transcript; return the transcript as a text delta."""
        said, data = find_text(audio, "transcript"), find_text(audio, "data")
        self._audio.update(find_unknown_members(audio, IN_AUDIO))
        if said:
            self._texts.setdefault("transcript", []).append(said)
        if data:
            self._sound.append(data)
        return [TextChunk(said)] if said else []

    def _append_content_pieces(self, name: str, pieces: list[Any]) -> list[ModelDelta]:
        """Append a list of content pieces, after earlier text as the first piece, and return their deltas."""
        before = "".join(self._texts.pop(name, []))
        kept = self._contents.setdefault(name, [_ContentPiece({"type": "text"}, [before])] if before else [])
        deltas: list[ModelDelta] = []
        for given in pieces:
            piece = {"type": "text", "text": given} if isinstance(given, str) else given
            kind = piece.get("type")
            thinks = kind == "thinking"
            text = _extract_thought_text(piece) if thinks else get_optional_text(piece, "text")
            # Adjacent pieces of one kind are joined. A piece of another kind separates them, which preserves the order.
            last = kept[-1] if kept else None
            if last is not None and last.data.get("type") == kind and (thinks or (text and kind == "text")):
                last.texts.append(text)
                last.data.update(piece)
            else:
                kept.append(_ContentPiece(dict(piece), [text]))
            if text:
                deltas.append(ThinkingChunk(text) if thinks else TextChunk(text))
        return deltas

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if both a finish reason and ``[DONE]`` after complete calls are missing.

        Raises:
            TruncatedReply: without either, or when the connection broke while a call was incomplete (reliability:MP20).
        """
        # A body that merely ends is no complete reply (reliability:MP20). A finish reason completes it, even without
        # `[DONE]`, which several servers never send. If the connection broke after it, the calls must also be complete.
        if not (self.is_done or (self._finished and (is_clean or self._calls.has_complete_or_empty_arguments))):
            self._raise_truncated_error("its finish reason is missing")
        self.is_done = True
        message: Json = {**self._more, **_join_texts(self._more_texts), **_join_texts(self._texts)}
        message.update(self._lists)
        message.update({name: [piece.to_dict() for piece in pieces] for name, pieces in self._contents.items()})
        if self._audio or self._sound or "transcript" in message:
            message["audio"] = {
                **self._audio,
                "data": _join_base64(self._sound),
                "transcript": message.pop("transcript", ""),
            }
        if "reasoning_details" in message:
            message["reasoning_details"] = _merge_reasoning_details(message["reasoning_details"])
        # From here on the same decoder handles streams and whole replies, so they cannot differ.
        calls = self._calls.resolve_and_join_calls()
        message.update({"function_call": calls[0]["function"]} if self._legacy else {"tool_calls": calls})
        choice = {**self._choice, "message": message}
        if self._likely:
            choice["logprobs"] = {**get_optional_object(choice, "logprobs"), **self._likely}
        return self._decode_message({**self._data, "choices": [choice]})


def _join_texts(pieces: Mapping[str, list[str]]) -> Json:
    return {name: "".join(texts) for name, texts in pieces.items()}


@frozen
class _ContentPiece:
    """
    A piece of a content list.

    Attributes:
        data: The last values of its members; grows during the stream.
        texts: The pieces of its text, joined at the end.
    """

    data: Json
    texts: list[str]

    def to_dict(self) -> Json:
        """Return the piece in the form of a reply without a stream."""
        if self.data.get("type") == "text":
            return {**self.data, "text": "".join(self.texts)}
        if len(self.texts) > 1:
            return {**self.data, "thinking": [{"type": "text", "text": "".join(self.texts)}]}
        return self.data


def _join_base64(pieces: list[str]) -> str:
    """Return one base64 text for several; ``""`` if one of them is not base64."""
    try:
        return encode_base64(b"".join([base64.b64decode(piece, validate=True) for piece in pieces]))
    except ValueError:
        return ""


def _merge_reasoning_details(details: list[Json]) -> list[Json]:
    """Return the reasoning items of a stream, with adjacent pieces of one type and index joined."""
    items: list[Json] = []
    grown: list[dict[str, list[str]]] = []
    for detail in details:
        last = items[-1] if items else {}
        # Texts are joined; of other members (index, type, id) the last value counts. The items must go back exactly as in
        # a reply without a stream: a provider rejects a signature if its text differs (ecosystem:EC91).
        texts = {name: detail[name] for name in TEXTS if isinstance(detail.get(name), str)}
        # A signature ends an item; several may have one index, and the last piece may be a signature alone.
        is_end = bool(detail.get("signature")) and not any(map(detail.get, (*TEXTS, "data")))
        goes_on = bool(items) and _continues_reasoning_item(last, detail, is_end=is_end) and (bool(texts) or is_end)
        if not goes_on or (last.get("signature") and (is_end or any(texts.values()))):
            items.append(dict(detail))
            grown.append({name: [text] for name, text in texts.items()})
            continue
        for name, value in detail.items():
            if name in texts:
                grown[-1].setdefault(name, []).append(value)
            else:
                last[name] = last.get(name) if value is None else value
    return [
        {**item, **{name: "".join(texts) for name, texts in pieces.items()}}
        for item, pieces in zip(items, grown, strict=True)
    ]


def _continues_reasoning_item(item: Json, piece: Json, *, is_end: bool) -> bool:
    """Return whether *piece* continues the *item* before it; the piece that ends it may have no index."""
    if item.get("type") != piece.get("type"):
        return False
    return item.get("index") == piece.get("index") or (is_end and piece.get("index") is None)
