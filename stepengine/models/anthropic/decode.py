"""
Decode replies of Anthropic's Messages API. Pure: no SDK, no clock, no I/O.

``stream`` first assembles the events of a stream into the message of a request without a stream. ``decode`` handles both,
so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import AssistantPart, CitationPart, OpaquePart, TextPart, ThinkingPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow
from stepengine.models._failures import RequestLabel, make_protocol_error
from stepengine.models._hidden_tools import SEARCH, find_loaded_tool_names
from stepengine.models._iterations import STOOD_IN, has_malformed_iterations, list_iterations, list_uncounted_iterations
from stepengine.models._json import (
    find_objects,
    find_text,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_token_count,
    parse_token_counts,
    wrap_unknown_members,
)
from stepengine.models._reply import format_sources, make_validated_reply, select_members, shorten_text

STOPS = {
    "end_turn": StopReason.END_TURN,
    "tool_use": StopReason.TOOL_USE,
    "max_tokens": StopReason.MAX_TOKENS,
    "stop_sequence": StopReason.STOP_SEQUENCE,
    "refusal": StopReason.REFUSAL,
    "pause_turn": StopReason.PAUSE,
    "compaction": StopReason.PAUSE,
}
OVERFLOW = "model_context_window_exceeded"
KEPT = ("stop_sequence", "stop_details", "container", "context_management", "input_transformations", "diagnostics")
IN_MESSAGE = frozenset({"id", "type", "role", "model", "content", "stop_reason", "usage", *KEPT})
IN_CALL = frozenset({"type", "id", "name", "input"})
IN_TEXT = frozenset({"type", "text", "citations"})
IN_THINKING = frozenset({"type", "thinking", "signature"})
IN_REDACTED = frozenset({"type", "data"})
"""The known members of a message and of its blocks; unknown members are stored unchanged."""

TOOLS = {
    "web_fetch": "url_context",
    "bash_code_execution": "code_execution",
    "text_editor_code_execution": "code_execution",
    "tool_search_tool": SEARCH,
    "tool_search_tool_bm25": SEARCH,
    "tool_search_tool_regex": SEARCH,
}
"""Our names for tools of the provider, where they differ."""
RESULT = "_tool_result"
FALLBACK = "fallback"
"""The type of the block between the output of a model and that of its replacement."""
WITHDRAWN = frozenset({"thinking", "redacted_thinking", "connector_text", "tool_use"})
"""Blocks of a replaced model that are neither executed nor sent back."""

Json = dict[str, Any]


def decode(message: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in *message*; raise ``ContextOverflow`` if the context was full, ``ModelError`` for an invalid message.

    Raises:
        ContextOverflow: when the model stopped because its context is full.
        ModelError: when there is no content, and for invalid calls.
    """
    usage = parse_usage(message.get("usage"))
    if usage is not None:
        get_optional_objects(message["usage"], "iterations")  # raises for anything but a list of objects
    raw = get_optional_text(message, "stop_reason") or None
    # The text before a full context is cut anywhere, so it is no reply. With this error pruning hooks shorten the
    # context and the step is retried (reliability:MP02).
    if raw == OVERFLOW:
        msg = f"the context of {call.model!r} is full; its reply is discarded"
        raise ContextOverflow(msg, kind="context_overflow", usage=usage, request_id=request_id)
    if message.get("content") is None:
        raise make_protocol_error(call, "it holds no content", usage)
    blocks = _drop_calls_and_thoughts_of_replaced_model(get_optional_objects(message, "content"))
    container = find_text(message, "container", "id")
    content = tuple(
        [part for block in blocks for part in _decode_block_with_citations(block, call.provider, model, container)]
    )
    return make_validated_reply(
        content,
        call,
        model,
        stop_reason=STOPS.get(raw or ""),
        raw_stop_reason=raw,
        usage=usage,
        answering_model=_find_answering_model(message, blocks),
        request_id=request_id,
        data_to_store={
            "id": message.get("id"),
            "usage": message.get("usage"),
            **select_members(message, *KEPT),
            **wrap_unknown_members(message, IN_MESSAGE),
        },
    )


def _drop_calls_and_thoughts_of_replaced_model(blocks: list[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return *blocks* without the calls and thoughts of a model that was replaced in the middle of the reply."""
    # Executed, such calls would happen in addition to those of the second model. Sent back, the signatures of such
    # thoughts do not match the model that answered.
    last = max([index for index, block in enumerate(blocks) if block.get("type") == FALLBACK], default=0)
    answered = {block.get("tool_use_id") for block in blocks[:last]}
    return [
        block
        for index, block in enumerate(blocks)
        if index >= last
        or not (block["type"] in WITHDRAWN or (block["type"] == "server_tool_use" and block.get("id") not in answered))
    ]


def _find_answering_model(message: Mapping[str, object], blocks: list[Mapping[str, object]]) -> str:
    """Return the name of the model that answered: the last replacement, else the model of the message."""
    # The price depends on it (reliability:MP62). Fallback blocks are the best source, then the usage of whole replies.
    # The start of a stream names only the requested model.
    named = [find_text(block, "to", "model") for block in blocks if block["type"] == FALLBACK]
    served = [
        find_text(entry, "model") for entry in list_iterations(message.get("usage")) if entry.get("type") == STOOD_IN
    ]
    return next((name for name in [*reversed(named), *reversed(served)] if name), get_optional_text(message, "model"))


def _decode_block_with_citations(
    block: Mapping[str, object], provider: str, model: str, container: str
) -> list[AssistantPart]:
    """Return the part of a content block, followed by the sources if it is a cited text."""
    part = _decode_block(block, provider, model, container)
    cited = find_objects(block, "citations") if block["type"] == "text" else []
    return [part, *[_decode_citation(citation, find_text(block, "text")) for citation in cited]]


def _decode_citation(citation: Mapping[str, object], reply_text: str) -> CitationPart:
    title = find_text(citation, "title") or find_text(citation, "document_title")
    url = find_text(citation, "url") or find_text(citation, "source")
    return CitationPart(
        url, title, quote=find_text(citation, "cited_text"), said=reply_text, source=find_text(citation, "file_id")
    )


def _decode_block(block: Mapping[str, Any], provider: str, model: str, container: str) -> AssistantPart:
    """Return the part of a content block; blocks of other kinds, such as those of server tools, become opaque parts."""
    kind = block["type"]
    mark: Json = {"provider": provider}
    # Plain text has no provider data, so equal texts of different providers are equal values and may go to any provider.
    if kind == "text":
        newer = wrap_unknown_members(block, IN_TEXT)
        kept = {**select_members(block, "citations"), **({"model": model, **newer} if newer else {})}
        return TextPart(
            block["text"], provider_data=freeze({**mark, **kept}) if kept.get("citations") or newer else None
        )
    mark["model"] = model
    if kind == "thinking":
        signed = {"signature": get_optional_text(block, "signature")}
        return ThinkingPart(
            block["thinking"], provider_data=freeze({**mark, **signed, **wrap_unknown_members(block, IN_THINKING)})
        )
    # It must go back unchanged and in its place, or the API rejects the turn.
    if kind == "redacted_thinking":
        kept = {"redacted": block["data"], **wrap_unknown_members(block, IN_REDACTED)}
        return ThinkingPart("", provider_data=freeze({**mark, **kept}))
    if kind == "tool_use":
        # The result of a call by a program must name the program's container, which only the message knows.
        where = container if find_calling_program_id(block) else ""
        given = {name: value for name, value in (("id", block.get("id")), ("container", where)) if value}
        return make_call_part(
            block["name"], block.get("input"), {**mark, **given, **wrap_unknown_members(block, IN_CALL)}
        )
    tool = _find_server_tool_name(block, kind)
    return OpaquePart(provider, freeze(block), tool=tool, text=_describe_server_tool(block) if tool else "")


def find_calling_program_id(block: Mapping[str, object]) -> str:
    """Return the id of the program that made a call; ``""`` for a call of the model itself."""
    return find_text(block, "caller", "tool_id")


def _find_server_tool_name(block: Mapping[str, object], kind: str) -> str:
    """Return our name of the provider's tool in a call or result block; ``""`` for other blocks."""
    if kind == "server_tool_use":
        name = find_text(block, "name")
        return TOOLS.get(name, name)
    name = kind.removesuffix(RESULT)
    return "" if name == kind else TOOLS.get(name, name)


def _describe_server_tool(block: Mapping[str, object]) -> str:
    """Return a readable text of the input or the result of a tool of the provider."""
    asked = block.get("input")
    if isinstance(asked, Mapping):
        words = [find_text(asked, name) for name in ("query", "pattern", "url", "code", "command")]
        return shorten_text(next((word for word in words if word), compact(asked)))
    found = block.get("content")
    if isinstance(found, Mapping):
        outputs = [
            find_text(found, name) for name in ("stdout", "stderr", "url", "error_code", "text")
        ] + find_loaded_tool_names(block)
        return shorten_text("\n".join([output.rstrip("\n") for output in outputs if output]))
    return format_sources(
        [(find_text(entry, "title"), find_text(entry, "url")) for entry in find_objects(block, "content")]
    )


def parse_usage(raw: object) -> Usage | None:
    """
    Parse the API's usage; ``None`` if *raw* has no token counts. Never raise.

    Compactions, advisors and replaced models appear only in ``iterations``. They are counted, too.
    """
    # Unknown is not zero (reliability:MP61): a sum with an unknown part is marked as a lower bound.
    if not isinstance(raw, Mapping) or (raw.get("input_tokens") is None and raw.get("output_tokens") is None):
        return None
    totals = ("input_tokens", "output_tokens")
    counts, unsure = parse_token_counts(raw, *totals, "cache_read_input_tokens", "cache_creation_input_tokens")
    fresh, output, read, written = counts
    details = raw.get("output_tokens_details")
    thought = parse_token_count(details.get("thinking_tokens")) if isinstance(details, Mapping) else None
    # Buckets are disjoint (ecosystem:EC76): the API's output includes thoughts. `min`, since a service that reports
    # more thoughts than output must not make the rest negative.
    reasoning = min(output, thought or 0)
    unsure = unsure or any(raw.get(name) is None for name in totals)
    usage = Usage(fresh, output - reasoning, read, written, reasoning, at_least=unsure)
    # It never raises, because a stopped or broken stream also reports its usage. `decode` rejects malformed iterations.
    if has_malformed_iterations(raw):
        usage += Usage(at_least=True)
    # Billed, and in none of the totals above. An entry without counts makes the sum a lower bound.
    for entry in list_uncounted_iterations(raw):
        usage += parse_usage(entry) or Usage(at_least=True)
    return usage
