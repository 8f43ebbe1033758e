"""
Decode replies of the Gemini API. Pure: no SDK, no clock, no I/O.

The chunks of a stream are assembled into the response object of a request without a stream. ``decode`` handles both, so they
cannot differ. A part with a thought signature is never merged, because the signature is valid only for its own part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from stepengine.data.json import compact, freeze
from stepengine.data.media_types import UNKNOWN
from stepengine.data.messages import AssistantPart, CitationPart, OpaquePart, TextPart, ThinkingPart
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    StopReason,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.usage import Usage
from stepengine.models._byte_reader import Accumulator
from stepengine.models._failures import (
    MAX_ID_CHARS,
    RequestLabel,
    make_aborted_reply_error,
    make_malformed_call_error,
    make_protocol_error,
    make_truncated_error,
    make_unsigned_call_error,
)
from stepengine.models._json import (
    find_objects,
    find_text,
    find_unknown_members,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_json,
    parse_token_count,
    parse_token_counts,
    wrap_unknown_members,
)
from stepengine.models._reply import MAX_UNREAD_NAMES, make_validated_reply, media_part_from_base64, shorten_text
from stepengine.models.google.calls import IN_PIECES, PartialCall, join_streamed_arguments
from stepengine.models.google.encode import GOES_ON_WITH
from stepengine.models.keys import make_safe_excerpt

CONTINUATION = "CONTINUATION"
"""The finish reason of a reply that continues with another request (providers:PV114)."""
STOPS = {
    "STOP": StopReason.END_TURN,
    "MAX_TOKENS": StopReason.MAX_TOKENS,
    CONTINUATION: StopReason.MAX_TOKENS,
    **dict.fromkeys(
        (
            "SAFETY",
            "RECITATION",
            "BLOCKLIST",
            "PROHIBITED_CONTENT",
            "SPII",
            "LANGUAGE",
            "IMAGE_SAFETY",
            "IMAGE_PROHIBITED_CONTENT",
            "IMAGE_RECITATION",
            "MODEL_ARMOR",
            "ESCALATION",
        ),
        StopReason.REFUSAL,
    ),
    "TOO_MANY_TOOL_CALLS": StopReason.MAX_TOKENS,
    "UNEXPECTED_TOOL_CALL": StopReason.TOOL_USE,
    "PUP_LIMITED_DISABLED": StopReason.ERROR,
}
MALFORMED = frozenset({"MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL"})
UNSIGNED = "MISSING_THOUGHT_SIGNATURE"
GIVEN_UP = frozenset({"MALFORMED_RESPONSE", "OTHER", "IMAGE_OTHER", "NO_IMAGE"})
KEPT = (
    "finishMessage",
    "safetyRatings",
    "logprobsResult",
    "groundingMetadata",
    "citationMetadata",
    "urlContextMetadata",
    *("avgLogprobs", GOES_ON_WITH, "tokenCount"),
)
OF_REPLY = ("promptFeedback", "modelStatus")
IN_REPLY = frozenset(
    {"candidates", "usageMetadata", "modelVersion", "responseId", "createTime", "sdkHttpResponse", "error", *OF_REPLY}
)
IN_CANDIDATE = frozenset({"content", "finishReason", "index", *KEPT})
IN_CONTENT = frozenset({"parts", "role"})
"""The known members of a reply, of its candidate and of the candidate's content; unknown ones are stored unchanged."""
TOOLS = {
    "GOOGLE_SEARCH_WEB": "web_search",
    "GOOGLE_SEARCH": "web_search",
    "URL_CONTEXT": "url_context",
    "FILE_SEARCH": "file_search",
    "CODE_EXECUTION": "code_execution",
}
"""Our names for the API's tools."""
PLAIN = frozenset({"text", "thought"})
TEXT = frozenset({"text", "thought", "thoughtSignature"})
CALL = frozenset({"functionCall", "thought", "thoughtSignature"})
IN_CALL = frozenset({"id", "name", "args"}) | IN_PIECES
OTHERS = frozenset(
    {
        *("executableCode", "codeExecutionResult", "fileData", "functionResponse", "inlineData"),
        *("toolCall", "toolResponse"),
    }
)
"""The members of parts that are neither text nor calls."""
MADE = frozenset({"inlineData", "thoughtSignature"})
BLOB = frozenset({"mimeType", "data"})
QUOTED = "citationMetadata"
"""The quotations in the text; a chunk has only its own ones, or repeats all before it."""
LIKELY = ("chosenCandidates", "topCandidates")
"""The lists of token probabilities, which a stream sends in pieces."""

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the response object *data*; raise ``ModelError`` without a candidate or a block, and for a malformed call.

    Raises:
        ModelError: when there is no candidate although the prompt was not blocked, and for a malformed call.
    """
    usage = parse_usage(data.get("usageMetadata"))
    feedback, candidates = get_optional_object(data, "promptFeedback"), get_optional_objects(data, "candidates")
    # A blocked prompt has no candidate, but a reason: that is a refusal. A reply with neither is broken and may be
    # retried (reliability:MP54).
    if not candidates and not feedback.get("blockReason"):
        raise make_protocol_error(call, "it holds no candidate", usage)
    candidate = candidates[0] if candidates else {}
    raw = get_optional_text(candidate, "finishReason") or get_optional_text(feedback, "blockReason") or None
    if candidates:
        _raise_if_unusable(candidate, raw, call, usage)
    mark: Json = {"provider": call.provider, "model": model}
    stop = STOPS.get(raw or "") if candidates else StopReason.REFUSAL
    parts = _join_streamed_calls(
        get_optional_objects(get_optional_object(candidate, "content"), "parts"), stop, call, usage
    )
    content = tuple([made for part in parts if (made := _decode_part(part, mark)) is not None])
    content = (*content, *_decode_citations(candidate))
    if (
        raw == CONTINUATION
        and (token := get_optional_text(candidate, GOES_ON_WITH))
        and not any(map(_is_partial_call, parts))
    ):
        content, stop = (*content, OpaquePart(call.provider, freeze({GOES_ON_WITH: token}))), StopReason.PAUSE
    kept: Json = {"id": data.get("responseId"), "usage": data.get("usageMetadata")}
    kept.update({name: candidate[name] for name in KEPT if candidate.get(name)})
    kept.update({name: data[name] for name in OF_REPLY if data.get(name)})
    kept.update(_collect_unknown_members(data, candidate))
    return make_validated_reply(
        content,
        call,
        model,
        stop_reason=stop,
        raw_stop_reason=raw,
        usage=usage,
        answering_model=get_optional_text(data, "modelVersion"),
        request_id=request_id or make_safe_excerpt(get_optional_text(data, "responseId"), MAX_ID_CHARS) or None,
        data_to_store=kept,
    )


def _collect_unknown_members(data: Mapping[str, object], candidate: Mapping[str, object]) -> Json:
    """Return the unknown members of a reply, and the names of the ignored candidates."""
    found = {
        "more": find_unknown_members(data, IN_REPLY),
        "more_of_candidate": find_unknown_members(candidate, IN_CANDIDATE),
        "more_of_content": find_unknown_members(get_optional_object(candidate, "content"), IN_CONTENT),
        "unread": [f"candidates[{index}]" for index in range(1, len(get_optional_objects(data, "candidates")))][
            :MAX_UNREAD_NAMES
        ],
    }
    return {name: value for name, value in found.items() if value}


def _raise_if_unusable(
    candidate: Mapping[str, object], finish_reason: str | None, call: RequestLabel, usage: Usage | None
) -> None:
    """
    Raise an error for a *finish_reason* that means a malformed call, a missing signature or an aborted reply.

    These errors are retryable (ecosystem:EC97). A call of a tool that was not offered is usable if the call arrived: its result reports the error.
    """
    said = get_optional_text(candidate, "finishMessage") or finish_reason or ""
    parts = get_optional_objects(get_optional_object(candidate, "content"), "parts")
    # The API discards a call that it could not parse and reports that in place of a reply. The same prompt mostly
    # succeeds the next time, so the error is retryable.
    if finish_reason in MALFORMED and not (
        finish_reason == "UNEXPECTED_TOOL_CALL" and any("functionCall" in part for part in parts)
    ):
        raise make_malformed_call_error(call, said, usage)
    if finish_reason == UNSIGNED:
        raise make_unsigned_call_error(call, said, usage)
    if finish_reason in GIVEN_UP:
        raise make_aborted_reply_error(call, said, usage)


def _join_streamed_calls(
    parts: list[Mapping[str, Any]], stop: StopReason | None, call: RequestLabel, usage: Usage | None
) -> list[Mapping[str, object]]:
    """
    Return *parts* with the arguments of each call joined; raise ``TruncatedReply`` for an incomplete call that no limit explains.

    A call that was cut by the output limit stays, because it is never executed. In a refusal it is left out.

    Raises:
        TruncatedReply: for any other incomplete call.
    """
    whole = [join_streamed_arguments(part) if isinstance(part.get("functionCall"), Mapping) else part for part in parts]
    cut = [part for part in whole if _is_partial_call(part)]
    if cut and stop is StopReason.REFUSAL:
        return [part for part in whole if part not in cut]
    if cut and (stop is not StopReason.MAX_TOKENS or cut != whole[-1:]):
        raise make_truncated_error(
            call, f"its call of {get_optional_text(cut[0]['functionCall'], 'name')!r} is incomplete", usage
        )
    return whole


def _is_partial_call(part: Mapping[str, object]) -> bool:
    return get_optional_object(part, "functionCall").get("willContinue") is True


def _decode_part(part: Mapping[str, Any], mark: Json) -> AssistantPart | None:
    """Return the decoded part; ``None`` for an empty text without a signature."""
    signature = get_optional_text(part, "thoughtSignature")
    signed = {"signature": signature} if signature else {}
    call = part.get("functionCall")
    if isinstance(call, Mapping):
        # Often there is no id, and none is generated: the call must go back unchanged. Results then match by name and
        # order (ecosystem:EC83).
        given = {"id": call["id"]} if get_optional_text(call, "id") else {}
        newer = {name: value for name, value in call.items() if name not in IN_CALL}
        data = {**mark, **signed, **wrap_unknown_members(part, CALL), **given, **({"in_call": newer} if newer else {})}
        return make_call_part(get_optional_text(call, "name"), call.get("args"), data)
    if _is_text_part(part):
        kept = {**signed, **wrap_unknown_members(part, TEXT)}
        if part.get("thought"):
            return ThinkingPart(part["text"], provider_data=freeze({**mark, **kept}))
        # Gemini ends many streams with an empty part. One with a signature must be sent back, or the next request is
        # rejected.
        if not part["text"] and not kept:
            return None
        return TextPart(part["text"], provider_data=freeze({**mark, **kept}) if kept else None)
    blob = part.get("inlineData")
    # An image only if the part has no other members. Else the whole part is stored, so that it goes back unchanged.
    if isinstance(blob, Mapping) and BLOB.issuperset(blob) and MADE.issuperset(part):
        made = media_part_from_base64(blob.get("data"), find_text(blob, "mimeType") or UNKNOWN, {**mark, **signed})
        if made is not None:
            return made
    tool, text = _name_and_describe_server_tool(part)
    return OpaquePart(mark["provider"], freeze(part), tool=tool, text=text)


def _is_text_part(part: Mapping[str, object]) -> bool:
    """Return whether *part* has a text and no member of another kind."""
    return isinstance(part.get("text"), str) and OTHERS.isdisjoint(part)


def _name_and_describe_server_tool(part: Mapping[str, object]) -> tuple[str, str]:
    """Return (name, text) for a part of a server tool: our name of the tool, and its input or result; ``("", "")`` for others."""
    # The text is only shown to users. The part itself goes back.
    if "executableCode" in part:
        return "code_execution", shorten_text(find_text(part, "executableCode", "code"))
    if "codeExecutionResult" in part:
        return "code_execution", shorten_text(find_text(part, "codeExecutionResult", "output"))
    for word in ("toolCall", "toolResponse"):
        told = part.get(word)
        if isinstance(told, Mapping):
            kind = find_text(told, "toolType")
            said = told.get("args") if word == "toolCall" else told.get("response")
            queries = said.get("queries") if isinstance(said, Mapping) else None
            lines = [query for query in queries if isinstance(query, str)] if isinstance(queries, list | tuple) else []
            return TOOLS.get(kind, kind.lower() or "server_tool"), shorten_text("\n".join(lines))
    return "", ""


def _decode_citations(candidate: Mapping[str, object]) -> list[CitationPart]:
    """
    Return the sources of the text, the opened pages and the quotations.

    The sources are those of each segment, else all search results. The cited text is taken from the API's own copy, because
    its offsets count bytes (providers:PV62).
    """
    chunks = [_decode_citation(chunk) for chunk in find_objects(candidate, "groundingMetadata", "groundingChunks")]
    found: list[CitationPart] = []
    for support in find_objects(candidate, "groundingMetadata", "groundingSupports"):
        indices = support.get("groundingChunkIndices")
        for index in indices if isinstance(indices, list | tuple) else ():
            if type(index) is int and 0 <= index < len(chunks):
                found.append(attrs.evolve(chunks[index], said=find_text(support, "segment", "text")))  # noqa: PERF401
    read = [
        CitationPart(find_text(page, "retrievedUrl"))
        for page in find_objects(candidate, "urlContextMetadata", "urlMetadata")
    ]
    quoted = [
        CitationPart(find_text(source, "uri"), find_text(source, "title"))
        for word in ("citationSources", "citations")
        for source in find_objects(candidate, "citationMetadata", word)
    ]
    return [*(found or chunks), *read, *quoted]


def _decode_citation(chunk: Mapping[str, object]) -> CitationPart:
    """Return the citation of a grounding chunk; an empty ``CitationPart`` for a chunk of an unknown kind."""
    for kind in ("web", "retrievedContext", "maps"):
        told = chunk.get(kind)
        if isinstance(told, Mapping):
            store = find_text(told, "fileSearchStore")
            return CitationPart(
                find_text(told, "uri"), find_text(told, "title"), quote=find_text(told, "text"), source=store
            )
    return CitationPart()


def parse_usage(raw: object) -> Usage | None:
    """Parse the API's usage; ``None`` if *raw* has no token counts."""
    if not isinstance(raw, Mapping):
        return None
    names = (
        *("promptTokenCount", "candidatesTokenCount", "cachedContentTokenCount"),
        *("toolUsePromptTokenCount", "thoughtsTokenCount"),
    )
    if all(raw.get(name) is None for name in ("totalTokenCount", *names)):
        return None
    (prompt, output, cached, for_tools, thoughts), unsure = parse_token_counts(raw, *names)
    if raw.get("promptTokenCount") is None:
        # The rest of the total is the prompt.
        total = parse_token_count(raw.get("totalTokenCount"))
        prompt = max(0, (total or 0) - output - for_tools - thoughts)
        unsure = unsure or total is None
    return make_disjoint_usage((prompt, output, cached, for_tools, thoughts), at_least=unsure)


def make_disjoint_usage(counts: Sequence[int], *, at_least: bool) -> Usage:
    """
    Return the usage for the counts of prompt, output, cached tokens, tool input and thoughts.

    The prompt count includes cached tokens, and excludes the input from the API's tools, which is billed like it. Our buckets are
    disjoint (ecosystem:EC76), or tokens would be billed twice.
    """
    prompt, output, cached, for_tools, thoughts = counts
    read = min(prompt, cached)  # more cached tokens than prompt tokens would make the rest negative
    return Usage(prompt - read + for_tools, output, read, 0, thoughts, at_least=at_least or cached > prompt)


class GoogleAccumulator(Accumulator):
    """
    Assembles the chunks of one stream into the completed reply.

    Each chunk is a whole response object. Its parts are complete, except calls with streamed arguments. Adjacent texts are
    joined, and the last usage counts.
    """

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(data.get("usageMetadata")))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._candidate: Json = {}
        self._content: Json = {}
        self._parts: list[Mapping[str, Any]] = []
        # The pieces of each part's text, joined once at the end. The parts themselves stay unchanged.
        self._texts: list[list[str]] = []
        self._likely: dict[str, list[Any]] = {}
        self._quoted: dict[str, list[Any]] = {}
        self._calls = 0
        self._call_at: int | None = None
        self._newest: PartialCall | None = None

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one chunk to the reply, and return its deltas; raise ``ModelError`` for a chunk with an error.

        Raises:
            ModelError: for a chunk with an error (reliability:MP22).
        """
        try:
            chunk = parse_json(data)
        except ValueError:
            if not self.has_reported_end:
                raise
            self.is_done = True  # unreadable data after the end is not part of the reply
            return []
        if chunk.get("error"):
            raise self._make_stream_error(chunk)
        self._data.update({key: value for key, value in chunk.items() if key != "candidates" and value is not None})
        deltas: list[ModelDelta] = []
        for candidate in get_optional_objects(chunk, "candidates"):
            if index := candidate.get("index"):
                self._record_unknown_names(f"candidates[{index}]")
            else:
                deltas += self._apply_candidate(candidate)
        return deltas

    def _apply_candidate(self, candidate: Mapping[str, object]) -> list[ModelDelta]:
        """Merge the candidate of a chunk into the reply and return the deltas of its parts."""
        # The last value of each member counts. Empty values of later chunks are ignored, and lists that arrive in pieces
        # are collected below.
        told = {name: value for name, value in candidate.items() if name != "content" and value not in (None, {})}
        self._candidate.update(told)
        for member, sources in get_optional_object(candidate, QUOTED).items():
            if isinstance(sources, list):
                known = self._quoted.setdefault(member, [])
                # A chunk has only its own quotations, or repeats all before it, so only new ones are added.
                known += [source for source in sources if source not in known]
        self._content.update(find_unknown_members(get_optional_object(candidate, "content"), IN_CONTENT))
        for member in LIKELY:
            if tokens := find_objects(candidate, "logprobsResult", member):
                self._likely.setdefault(member, []).extend(tokens)
        return [
            delta
            for part in get_optional_objects(get_optional_object(candidate, "content"), "parts")
            for delta in self._add_part(part)
        ]

    @property
    def has_reported_end(self) -> bool:
        """Whether an end was reported. Some models and gateways report it in every chunk, so more may follow."""
        blocked = get_optional_text(get_optional_object(self._data, "promptFeedback"), "blockReason")
        return bool(self._candidate.get("finishReason") or (blocked and not self._candidate))

    def _add_part(self, part: Mapping[str, Any]) -> list[ModelDelta]:
        if isinstance(part.get("functionCall"), Mapping):
            return self._add_call_part(part)
        is_text = _is_text_part(part)
        text = part["text"] if is_text else ""
        last = self._parts[-1] if self._parts else {}
        # Adjacent parts are joined only if both are plain text. A signature on a merged part is rejected when it goes
        # back (ecosystem:EC74).
        plain = PLAIN.issuperset(part) and PLAIN.issuperset(last) and is_text and _is_text_part(last)
        if plain and bool(last.get("thought")) == bool(part.get("thought")):
            self._texts[-1].append(text)
        else:
            self._store_part(part, text)
        if not text:
            return []
        return [ThinkingChunk(text) if part.get("thought") else TextChunk(text)]

    def _store_part(self, part: Mapping[str, object], text: str = "") -> None:
        """Store a new part, and separately its text, which may grow."""
        self._parts.append(part)
        self._texts.append([text])

    def _add_call_part(self, part: Mapping[str, Any]) -> list[ModelDelta]:
        """Add a call, or a piece of a call, and return the deltas; raise if two calls are open."""
        call, newest, number = part["functionCall"], self._newest, self._calls
        # Pieces of a call have no index, so a call must end before the next one starts. Two open calls are an error.
        if newest is not None:
            if not newest.is_continued_by(call):
                self._raise_protocol_error(
                    f"a call of {get_optional_text(call, 'name')!r} starts while another one is incomplete"
                )
            newest.add_part(part)
            return [] if newest.is_open else self._close_call()
        if call.get("willContinue") is True:
            self._newest, self._call_at = PartialCall(part), len(self._parts)
            self._store_part(part)
            return [ToolCallStarted(number, get_optional_text(call, "name"))]
        part = join_streamed_arguments(part)
        self._store_part(part)
        return [
            ToolCallStarted(number, get_optional_text(call, "name")),
            *self._count_call_and_make_end_deltas(part["functionCall"]),
        ]

    def _close_call(self) -> list[ModelDelta]:
        """Replace the placeholder part by the assembled call, and return the last deltas of the call."""
        assert self._newest is not None  # noqa: S101 - the caller checked it
        assert self._call_at is not None  # noqa: S101
        self._parts[self._call_at] = whole = self._newest.to_part()
        self._newest = self._call_at = None
        return self._count_call_and_make_end_deltas(whole["functionCall"])

    def _count_call_and_make_end_deltas(self, call: Mapping[str, object]) -> list[ModelDelta]:
        """Count the current call, and return the deltas with its whole arguments and its end."""
        number = self._calls
        self._calls += 1
        arguments = compact({} if call.get("args") is None else call["args"])
        return [ToolCallChunk(number, arguments), ToolCallEnded(number)]

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if neither a finish reason nor a block was received.

        Raises:
            TruncatedReply: without a finish reason or the reason of a blocked prompt.
        """
        if not self.has_reported_end:
            self._raise_truncated_error("its finishReason is missing")
        self.is_done = True
        # The last piece of a call is missing although the reply has ended: the limit or a filter cut it. `decode`
        # handles the open call by the stop reason.
        if self._newest is not None:
            self._close_call()
        data = dict(self._data)
        if self._candidate:
            parts = [
                {**part, "text": "".join(texts)} if len(texts) > 1 else part
                for part, texts in zip(self._parts, self._texts, strict=True)
            ]
            data["candidates"] = [{**self._candidate, "content": {**self._content, "parts": parts}}]
            for member, lists in (("logprobsResult", self._likely), (QUOTED, self._quoted)):
                if lists:
                    data["candidates"][0][member] = {**get_optional_object(self._candidate, member), **lists}
        return self._decode_message(data)
