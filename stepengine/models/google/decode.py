"""
Replies of the Gemini API in our terms. Pure: no SDK, no clock, no I/O.

A stream is put together into the response object that the API would have sent in one piece, and both go through
``decode``, so that they cannot differ. A part that came with a thought signature stays a part of its
own, since the signature counts only on the part that it came on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.json import compact, freeze
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
    make_given_up_error,
    make_malformed_call_error,
    make_protocol_error,
    make_truncated_error,
    make_unsigned_call_error,
)
from stepengine.models._json import (
    find_newer_members,
    make_call_part,
    object_at,
    objects_at,
    parse_token_count,
    read_json,
    text_at,
    wrap_newer_members,
)
from stepengine.models._reply import (
    MAX_UNREAD_NAMES,
    UNKNOWN,
    find_objects,
    find_text,
    make_media_part,
    make_reply,
    shorten_text,
)
from stepengine.models.google.calls import IN_PIECES, PartialCall, join_arguments
from stepengine.models.google.encode import GOES_ON_WITH
from stepengine.models.keys import printable

CONTINUATION = "CONTINUATION"
"""What is said of a reply that is longer than one request gives (providers:PV114)."""
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
"""What is read of a reply, of its candidate and of that one's content; whatever else they hold is kept as it came."""
TOOLS = {
    "GOOGLE_SEARCH_WEB": "web_search",
    "GOOGLE_SEARCH": "web_search",
    "URL_CONTEXT": "url_context",
    "FILE_SEARCH": "file_search",
    "CODE_EXECUTION": "code_execution",
}
"""The API's words for its tools, and ours."""
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
"""What a part holds that is neither text nor a call."""
MADE = frozenset({"inlineData", "thoughtSignature"})
BLOB = frozenset({"mimeType", "data"})
QUOTED = "citationMetadata"
"""What is quoted; a chunk tells of its own text alone, or of all before it once more."""
LIKELY = ("chosenCandidates", "topCandidates")
"""The lists of probabilities of tokens, which come in pieces."""

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the response object *data*, whose own ``responseId`` stands in for a missing *request_id*.

    Raises:
        ModelError: when there is no candidate although the prompt was not blocked, and for a malformed call (ecosystem:EC97).
    """
    usage = parse_usage(data.get("usageMetadata"))
    feedback, candidates = object_at(data, "promptFeedback"), objects_at(data, "candidates")
    # A blocked prompt has no candidate and a reason: that is a refusal. Neither is a broken reply, which may be asked
    # for again (reliability:MP54).
    if not candidates and not feedback.get("blockReason"):
        raise make_protocol_error(call, "it holds no candidate", usage)
    candidate = candidates[0] if candidates else {}
    raw = text_at(candidate, "finishReason") or text_at(feedback, "blockReason") or None
    if candidates:
        _refuse_unusable(candidate, raw, call, usage)
    mark: Json = {"provider": call.provider, "model": model}
    stop = STOPS.get(raw or "") if candidates else StopReason.REFUSAL
    parts = _join_all_arguments(objects_at(object_at(candidate, "content"), "parts"), stop, call, usage)
    content = tuple([part for part in [_decode_part(part, mark) for part in parts] if part is not None])
    content = (*content, *_decode_citations(candidate))
    if raw == CONTINUATION and (token := text_at(candidate, GOES_ON_WITH)) and not any(map(_is_partial_call, parts)):
        content, stop = (*content, OpaquePart(call.provider, freeze({GOES_ON_WITH: token}))), StopReason.PAUSE
    kept: Json = {"id": data.get("responseId"), "usage": data.get("usageMetadata")}
    kept.update({name: candidate[name] for name in KEPT if candidate.get(name)})
    kept.update({name: data[name] for name in OF_REPLY if data.get(name)})
    kept.update(_collect_newer_members(data, candidate))
    return make_reply(
        content,
        call,
        model,
        stop=stop,
        raw=raw,
        usage=usage,
        answered=text_at(data, "modelVersion"),
        request_id=request_id or printable(text_at(data, "responseId"), MAX_ID_CHARS) or None,
        kept=kept,
    )


def _collect_newer_members(data: Mapping[str, object], candidate: Mapping[str, object]) -> Json:
    """Return what a reply holds that is newer than this package, and by name the candidates that are not taken."""
    found = {
        "more": find_newer_members(data, IN_REPLY),
        "more_of_candidate": find_newer_members(candidate, IN_CANDIDATE),
        "more_of_content": find_newer_members(object_at(candidate, "content"), IN_CONTENT),
        "unread": [f"candidates[{index}]" for index in range(1, len(objects_at(data, "candidates")))][
            :MAX_UNREAD_NAMES
        ],
    }
    return {name: value for name, value in found.items() if value}


def _refuse_unusable(candidate: Mapping[str, object], raw: str | None, call: RequestLabel, usage: Usage | None) -> None:
    """
    Raise for a candidate that ended without a reply that counts (ecosystem:EC97).

    A call of a tool that was not offered is a call all the same, when it came: it gets the result that says so.
    """
    said = text_at(candidate, "finishMessage") or raw or ""
    parts = objects_at(object_at(candidate, "content"), "parts")
    # The API throws away a call that it could not parse and says so in place of a reply. There is nothing to answer,
    # and the same prompt mostly goes well the next time; so it is an error that is asked again.
    if raw in MALFORMED and not (raw == "UNEXPECTED_TOOL_CALL" and any("functionCall" in part for part in parts)):
        raise make_malformed_call_error(call, said, usage)
    if raw == UNSIGNED:
        raise make_unsigned_call_error(call, said, usage)
    if raw in GIVEN_UP:
        raise make_given_up_error(call, said, usage)


def _join_all_arguments(
    parts: list[Mapping[str, Any]], stop: StopReason | None, call: RequestLabel, usage: Usage | None
) -> list[Mapping[str, object]]:
    """
    Return *parts* with each call's arguments joined; drop or raise for calls that are not whole.

    A call that the output limit cut stays, since it is not carried out; of a refusal it is left out.

    Raises:
        TruncatedReply: for another call that is not whole.
    """
    whole = [join_arguments(part) if isinstance(part.get("functionCall"), Mapping) else part for part in parts]
    cut = [part for part in whole if _is_partial_call(part)]
    if cut and stop is StopReason.REFUSAL:
        return [part for part in whole if part not in cut]
    if cut and (stop is not StopReason.MAX_TOKENS or cut != whole[-1:]):
        raise make_truncated_error(call, f"its call of {text_at(cut[0]['functionCall'], 'name')!r} is not whole", usage)
    return whole


def _is_partial_call(part: Mapping[str, object]) -> bool:
    """Return whether *part* is a call of which more is to come."""
    return object_at(part, "functionCall").get("willContinue") is True


def _decode_part(part: Mapping[str, Any], mark: Json) -> AssistantPart | None:
    """Return a part in our terms; ``None`` for one that says nothing at all."""
    signature = text_at(part, "thoughtSignature")
    signed = {"signature": signature} if signature else {}
    call = part.get("functionCall")
    if isinstance(call, Mapping):
        # Often there is none. None is made up: what goes back must be what came, and results are matched by name and
        # order then (ecosystem:EC83).
        given = {"id": call["id"]} if text_at(call, "id") else {}
        newer = {name: value for name, value in call.items() if name not in IN_CALL}
        data = {**mark, **signed, **wrap_newer_members(part, CALL), **given, **({"in_call": newer} if newer else {})}
        return make_call_part(text_at(call, "name"), call.get("args"), data)
    if _is_text_part(part):
        kept = {**signed, **wrap_newer_members(part, TEXT)}
        if part.get("thought"):
            return ThinkingPart(part["text"], provider_data=freeze({**mark, **kept}))
        # Gemini ends many streams with an empty part. One with a signature is kept although it says nothing: the next
        # request is refused without it.
        if not part["text"] and not kept:
            return None
        return TextPart(part["text"], provider_data=freeze({**mark, **kept}) if kept else None)
    blob = part.get("inlineData")
    # Taken as an image only where nothing else stands in the part; with anything more it is kept whole, so that what
    # goes back is what came.
    if isinstance(blob, Mapping) and BLOB.issuperset(blob) and MADE.issuperset(part):
        made = make_media_part(blob.get("data"), find_text(blob, "mimeType") or UNKNOWN, {**mark, **signed})
        if made is not None:
            return made
    tool, text = _describe_server_tool(part)
    return OpaquePart(mark["provider"], freeze(part), tool=tool, text=text)


def _is_text_part(part: Mapping[str, object]) -> bool:
    return isinstance(part.get("text"), str) and OTHERS.isdisjoint(part)


def _describe_server_tool(part: Mapping[str, object]) -> tuple[str, str]:
    """Return the tool of the provider that a part tells of, in our words, and for people what was asked or came of it."""
    # For people alone, who want to see what was searched or run; what goes back is the part itself.
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
    Return the sources of the text: what it rests on piece by piece, else what was found; and the pages that were read.

    Offsets are in bytes of the text, so the words that the API repeats are taken (providers:PV62).
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
    for kind in ("web", "retrievedContext", "maps"):
        told = chunk.get(kind)
        if isinstance(told, Mapping):
            store = find_text(told, "fileSearchStore")
            return CitationPart(
                find_text(told, "uri"), find_text(told, "title"), quote=find_text(told, "text"), source=store
            )
    return CitationPart()


def parse_usage(raw: object) -> Usage | None:
    """Return the API's usage in our buckets; ``None`` when it does not say."""
    if not isinstance(raw, Mapping):
        return None
    names = ("promptTokenCount", "candidatesTokenCount", "cachedContentTokenCount", "toolUsePromptTokenCount")
    figures = [raw.get(name) for name in (*names, "thoughtsTokenCount")]
    if raw.get("totalTokenCount") is None and all(figure is None for figure in figures):
        return None
    prompt, output, cached, for_tools, thoughts = [parse_token_count(figure) or 0 for figure in figures]
    unsure = any(figure is not None and parse_token_count(figure) is None for figure in figures)
    if raw.get("promptTokenCount") is None:
        # What is stated of the whole and of nothing else in it was sent.
        total = parse_token_count(raw.get("totalTokenCount"))
        prompt = max(0, (total or 0) - output - for_tools - thoughts)
        unsure = unsure or total is None
    read, unsure = min(prompt, cached), unsure or cached > prompt
    # Cached tokens are part of the prompt here, and what its tools read is not; the buckets are disjoint
    # (ecosystem:EC76), or the price would be asked for twice.
    return Usage(prompt - read + for_tools, output, read, 0, thoughts, at_least=unsure)


class GoogleAccumulator(Accumulator):
    """
    Turns the chunks of one stream into the completed reply.

    Each chunk is a whole response object, and each part in it is complete, but for calls whose arguments are streamed;
    neighbouring texts are one text, and the last usage counts.
    """

    decoder = staticmethod(decode)

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._data: Json = {}
        self._candidate: Json = {}
        self._content: Json = {}
        self._parts: list[Mapping[str, Any]] = []
        # Beside the parts and not in them: a part is what came, and its text grows by pieces that are joined once, at
        # the end.
        self._texts: list[list[str]] = []
        self._likely: dict[str, list[Any]] = {}
        self._quoted: dict[str, list[Any]] = {}
        self._calls = 0
        self._call_at: int | None = None
        self._newest: PartialCall | None = None

    @property
    def usage(self) -> Usage | None:
        """What the reply is known to have used so far."""
        return parse_usage(self._data.get("usageMetadata"))

    def event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Take one chunk and return what it adds.

        Raises:
            ModelError: for a chunk that holds an error (reliability:MP22).
        """
        try:
            chunk = read_json(data)
        except ValueError:
            if not self.ended:
                raise
            self.done = True  # behind an end, what cannot be read is no piece of the reply
            return []
        if chunk.get("error"):
            raise self._make_stream_error(chunk)
        self._data.update({key: value for key, value in chunk.items() if key != "candidates" and value is not None})
        deltas: list[ModelDelta] = []
        for candidate in objects_at(chunk, "candidates"):
            if index := candidate.get("index"):
                self._record_unread(f"candidates[{index}]")
            else:
                deltas += self._apply_candidate(candidate)
        return deltas

    def _apply_candidate(self, candidate: Mapping[str, object]) -> list[ModelDelta]:
        # The last word of each member counts, but for what comes in pieces: an empty one of a later chunk must not take
        # away what an earlier one said.
        told = {name: value for name, value in candidate.items() if name != "content" and value not in (None, {})}
        self._candidate.update(told)
        for member, sources in object_at(candidate, QUOTED).items():
            if isinstance(sources, list):
                known = self._quoted.setdefault(member, [])
                # Each chunk tells of its own quotations alone, or of all so far once more, so only new ones are added.
                known += [source for source in sources if source not in known]
        self._content.update(find_newer_members(object_at(candidate, "content"), IN_CONTENT))
        for member in LIKELY:
            if tokens := find_objects(candidate, "logprobsResult", member):
                self._likely.setdefault(member, []).extend(tokens)
        return [delta for part in objects_at(object_at(candidate, "content"), "parts") for delta in self._take(part)]

    @property
    def ended(self) -> bool:
        """Whether an end was told of; some models and gateways do so with every chunk, so that the last one counts."""
        blocked = text_at(object_at(self._data, "promptFeedback"), "blockReason")
        return bool(self._candidate.get("finishReason") or (blocked and not self._candidate))

    def _take(self, part: Mapping[str, Any]) -> list[ModelDelta]:
        """Add a part to the reply, and return its deltas."""
        if isinstance(part.get("functionCall"), Mapping):
            return self._apply_call(part)
        is_text = _is_text_part(part)
        text = part["text"] if is_text else ""
        last = self._parts[-1] if self._parts else {}
        # Neighbours are joined only when both are nothing but text: a signature belongs to its very part, and one that
        # is merged into its neighbour is refused when it goes back (ecosystem:EC74).
        plain = PLAIN.issuperset(part) and PLAIN.issuperset(last) and is_text and _is_text_part(last)
        if plain and bool(last.get("thought")) == bool(part.get("thought")):
            self._texts[-1].append(text)
        else:
            self._append_part(part, text)
        if not text:
            return []
        return [ThinkingChunk(text) if part.get("thought") else TextChunk(text)]

    def _append_part(self, part: Mapping[str, object], text: str = "") -> None:
        self._parts.append(part)
        self._texts.append([text])

    def _apply_call(self, part: Mapping[str, Any]) -> list[ModelDelta]:
        call, newest, number = part["functionCall"], self._newest, self._calls
        # Pieces of a call have no number; which call a piece belongs to is known only because one has to end before the
        # next begins. So two that are open at once are an error and no guess.
        if newest is not None:
            if not newest.is_continued_by(call):
                self._refuse_stream(f"a call of {text_at(call, 'name')!r} begins while another one is not whole")
            newest.take(part)
            return [] if newest.is_open else self._close_call()
        if call.get("willContinue") is True:
            self._newest, self._call_at = PartialCall(part), len(self._parts)
            self._append_part(part)
            return [ToolCallStarted(number, text_at(call, "name"))]
        part = join_arguments(part)
        self._append_part(part)
        return [ToolCallStarted(number, text_at(call, "name")), *self._make_argument_deltas(part["functionCall"])]

    def _close_call(self) -> list[ModelDelta]:
        """Put the call that came in pieces in its place, and return what is told of it."""
        assert self._newest is not None  # noqa: S101 - asked for only then
        assert self._call_at is not None  # noqa: S101
        self._parts[self._call_at] = whole = self._newest.whole()
        self._newest = self._call_at = None
        return self._make_argument_deltas(whole["functionCall"])

    def _make_argument_deltas(self, call: Mapping[str, object]) -> list[ModelDelta]:
        number = self._calls
        self._calls += 1
        arguments = compact({} if call.get("args") is None else call["args"])
        return [ToolCallChunk(number, arguments), ToolCallEnded(number)]

    def finish(self, tail: bytes, *, clean: bool = True) -> ModelReply:
        """
        Return the reply.

        Raises:
            TruncatedReply: when neither a finish reason nor the reason of a blocked prompt came.
        """
        if not self.ended:
            self._raise_truncated("its finishReason is missing")
        self.done = True
        # A call whose last piece never came, in a reply that has its end: the limit cut it, or a filter. `decode` sees
        # by its mark that it is open, and by the stop reason what that means.
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
                    data["candidates"][0][member] = {**object_at(self._candidate, member), **lists}
        return self._decode_message(data)
