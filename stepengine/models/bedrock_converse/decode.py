"""
Decode replies of the Converse API. Pure: no SDK, no clock, no I/O.

``stream`` first assembles the events of a stream into the message of a request without a stream. ``decode`` handles both, so
they cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.json import compact, freeze
from stepengine.data.messages import AssistantPart, CitationPart, OpaquePart, TextPart, ThinkingPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.usage import Usage
from stepengine.errors import ContextOverflow
from stepengine.models._failures import (
    RequestLabel,
    make_aborted_reply_error,
    make_malformed_call_error,
    make_protocol_error,
)
from stepengine.models._json import (
    find_objects,
    find_text,
    find_unknown_members,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_token_counts,
    wrap_unknown_members,
)
from stepengine.models._reply import make_validated_reply, media_part_from_base64, shorten_text

STOPS = {
    "end_turn": StopReason.END_TURN,
    "tool_use": StopReason.TOOL_USE,
    "max_tokens": StopReason.MAX_TOKENS,
    "stop_sequence": StopReason.STOP_SEQUENCE,
    "guardrail_intervened": StopReason.REFUSAL,
    "content_filtered": StopReason.REFUSAL,
}
OVERFLOW = "model_context_window_exceeded"
MALFORMED_CALL, MALFORMED = "malformed_tool_use", "malformed_model_output"
SERVER = "server_tool_use"
"""The type of a call that the service executes itself."""
OWN_TYPE = "tool_use"
TEXT, CALL = frozenset({"text"}), frozenset({"toolUse"})
IN_CALL = frozenset({"toolUseId", "name", "input", "type"})
TOOLS = {"nova_code_interpreter": "code_execution", "nova_grounding": "web_search"}
"""Our names for the service's tools."""
RESULT = "_result"
IMAGES = {"png": "image/png", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp"}
NOT_KEPT = frozenset({"output", "stopReason"})

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the response object *data*; raise ``ContextOverflow`` for a full context, ``ModelError`` for an invalid message.

    Raises:
        ContextOverflow: when the model stopped because its context is full.
        ModelError: when there is no message, and for a malformed message, which may be retried once.
    """
    usage = parse_usage(data.get("usage"))
    raw = get_optional_text(data, "stopReason") or None
    _raise_if_unusable(raw, call, usage, request_id)
    message = get_optional_object(data, "output").get("message")
    if not isinstance(message, Mapping) or message.get("content") is None:
        raise make_protocol_error(call, "it holds no message", usage)
    mark: Json = {"provider": call.provider, "model": model}
    content = [
        part for block in get_optional_objects(message, "content") for part in _decode_block_to_parts(block, mark)
    ]
    return make_validated_reply(
        tuple(content),
        call,
        model,
        stop_reason=STOPS.get(raw or ""),
        raw_stop_reason=raw,
        usage=usage,
        # A prompt router chooses the model, and only its trace names it. The price depends on it.
        answering_model=find_text(data, "trace", "promptRouter", "invokedModelId").rpartition("/")[2],
        request_id=request_id,
        data_to_store={name: value for name, value in data.items() if name not in NOT_KEPT and value is not None},
    )


def _raise_if_unusable(
    stop_reason: str | None, call: RequestLabel, usage: Usage | None, request_id: str | None
) -> None:
    """Raise an error for a *stop_reason* that means a full context, a malformed call or malformed output."""
    if stop_reason == OVERFLOW:
        msg = f"the context of {call.model!r} is full; its reply is discarded"
        raise ContextOverflow(msg, kind="context_overflow", usage=usage, request_id=request_id)
    if stop_reason == MALFORMED_CALL:
        raise make_malformed_call_error(call, stop_reason, usage)
    if stop_reason == MALFORMED:
        raise make_aborted_reply_error(call, stop_reason, usage)


def _decode_block_to_parts(block: Mapping[str, Any], mark: Json) -> list[AssistantPart]:
    """Return the part of a block, followed by the sources if it is a cited text; ``[]`` for an empty text."""
    # Blocks have no type. Their kind is the name of their only member. Unknown blocks are stored whole.
    if isinstance(block.get("text"), str):
        beside = wrap_unknown_members(block, TEXT)
        if not block["text"] and not beside:
            return []
        return [TextPart(block["text"], provider_data=freeze({**mark, **beside}) if beside else None)]
    if isinstance(call := block.get("toolUse"), Mapping) and call.get("type") != SERVER:
        return [_decode_call(call, {**mark, **wrap_unknown_members(block, CALL)})]
    if isinstance(thought := block.get("reasoningContent"), Mapping):
        return [_decode_thought(block, thought, mark)]
    if isinstance(cited := block.get("citationsContent"), Mapping):
        return _decode_cited_text(block, cited, mark)
    if isinstance(image := block.get("image"), Mapping) and image.keys() == {"format", "source"}:
        kind = IMAGES.get(find_text(image, "format"), "")
        made = (
            media_part_from_base64(find_text(image, "source", "bytes"), kind, mark)
            if kind and len(block) == 1
            else None
        )
        if made is not None:
            return [made]
    tool, text = _name_and_describe_server_tool(block)
    return [OpaquePart(mark["provider"], freeze(block), tool=tool, text=text)]


def _decode_call(call: Mapping[str, object], data: Json) -> AssistantPart:
    """Return a call with its id and its unknown members."""
    given = {"id": call["toolUseId"]} if get_optional_text(call, "toolUseId") else {}
    newer = find_unknown_members(call, IN_CALL)
    if call.get("type") not in {None, OWN_TYPE}:
        newer["type"] = call["type"]
    data = {**data, **given, **({"in_call": newer} if newer else {})}
    return make_call_part(get_optional_text(call, "name"), call.get("input"), data)


def _decode_thought(block: Mapping[str, object], thought: Mapping[str, object], mark: Json) -> AssistantPart:
    """Return signed or redacted thinking; a block with unknown members becomes an opaque part."""
    told = thought.get("reasoningText")
    known = {"reasoningText", "redactedContent"}
    # A block with unknown members is stored whole: thoughts are signed, and one with a missing member is rejected.
    if len(block) > 1 or len(thought) != 1 or not known.issuperset(thought):
        return OpaquePart(mark["provider"], freeze(block), text=shorten_text(find_text(told, "text")))
    if not isinstance(told, Mapping):
        return ThinkingPart(
            "", provider_data=freeze({**mark, "redacted": get_optional_text(thought, "redactedContent")})
        )
    kept = {name: value for name, value in told.items() if name != "text" and value is not None}
    return ThinkingPart(get_optional_text(told, "text"), provider_data=freeze({**mark, **kept}))


def _decode_cited_text(block: Mapping[str, object], cited: Mapping[str, object], mark: Json) -> list[AssistantPart]:
    """Return a text with its sources; the whole block goes back in place of the text."""
    said = "".join([find_text(piece, "text") for piece in find_objects(cited, "content")])
    sources = [_decode_citation(citation, said) for citation in find_objects(cited, "citations")]
    return [TextPart(said, provider_data=freeze({**mark, "cited": block})), *sources]


def _decode_citation(citation: Mapping[str, object], reply_text: str) -> CitationPart:
    quote = "".join([find_text(piece, "text") for piece in find_objects(citation, "sourceContent")])
    url = find_text(citation, "location", "web", "url") or find_text(citation, "source")
    return CitationPart(url, find_text(citation, "title"), quote=quote, said=reply_text)


def _name_and_describe_server_tool(block: Mapping[str, object]) -> tuple[str, str]:
    """Return (name, text) for a block of a server tool: our name of the tool, and its input or result; ``("", "")`` for others."""
    asked, found = block.get("toolUse"), block.get("toolResult")
    if isinstance(asked, Mapping):
        name, given = find_text(asked, "name"), asked.get("input")
        said = find_text(given, "snippet") or find_text(given, "query")
        return TOOLS.get(name, name), shorten_text(said or compact(given))
    if isinstance(found, Mapping):
        name = find_text(found, "type").removesuffix(RESULT)
        texts = [
            said.rstrip("\n")
            for piece in find_objects(found, "content")
            for said in (
                find_text(piece, "text"),
                find_text(piece, "json", "stdOut"),
                find_text(piece, "json", "stdErr"),
            )
        ]
        return TOOLS.get(name, name or "server_tool"), shorten_text("\n".join([text for text in texts if text]))
    return "", ""


def parse_usage(raw: object) -> Usage | None:
    """Parse the API's usage, whose input count excludes cached tokens; ``None`` if *raw* has no token counts."""
    if not isinstance(raw, Mapping) or (raw.get("inputTokens") is None and raw.get("outputTokens") is None):
        return None
    totals = ("inputTokens", "outputTokens")
    counts, unsure = parse_token_counts(raw, *totals, "cacheReadInputTokens", "cacheWriteInputTokens")
    fresh, output, read, written = counts
    return Usage(fresh, output, read, written, at_least=unsure or any(raw.get(name) is None for name in totals))
