"""
Decode replies of the Interactions API. Pure: no SDK, no clock, no I/O.

The events of a stream are assembled into the interaction of a request without a stream. ``decode`` handles both, so they
cannot differ.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
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
from stepengine.models._failures import RequestLabel, error_from_body, make_protocol_error, make_unanswerable_error
from stepengine.models._json import (
    encode_utf8,
    find_objects,
    find_text,
    get_optional_list,
    get_optional_object,
    get_optional_objects,
    get_optional_text,
    make_call_part,
    parse_json,
    parse_token_count,
    parse_token_counts,
    require_index,
)
from stepengine.models._reply import make_validated_reply, media_part_from_base64, shorten_text
from stepengine.models.google.decode import make_disjoint_usage

STOPS = {
    "completed": StopReason.END_TURN,
    "requires_action": StopReason.TOOL_USE,
    **dict.fromkeys(("incomplete", "budget_exceeded", "requires_continuation"), StopReason.MAX_TOKENS),
}
FAILED = frozenset({"failed", "cancelled"})
WAITING = frozenset({"queued", "in_progress"})
ASKED = frozenset({"user_input", "function_result"})
"""Steps that repeat the input."""
IN_CALL = frozenset({"type", "id", "name", "arguments"})
MEDIUM = frozenset({"type", "data", "mime_type"})
NOT_KEPT = frozenset({"steps", "status", "object", "input", "tools", "system_instruction"})
TOOLS = {"google_search": "web_search"}
"""Our names for the API's tools."""
DONE = b"[DONE]"
MAX_SAID = 4_000
"""The most bytes of cited text in a citation."""

Json = dict[str, Any]


def decode(data: Mapping[str, Any], call: RequestLabel, model: str, request_id: str | None) -> ModelReply:
    """
    Return the reply in the interaction *data*; raise ``ModelError`` if it failed, has no steps or continues in the background.

    Raises:
        ModelError: for an interaction that failed, has no steps, or continues in the background.
    """
    usage, status = parse_usage(data.get("usage")), get_optional_text(data, "status") or None
    if status in FAILED:
        errors = get_optional_objects(data, "errors") or [{"message": f"the interaction was {status}"}]
        raise error_from_body({"error": errors[0]}, None, {}, call, usage)
    if status in WAITING:
        raise make_unanswerable_error(call, [f"an interaction that is {status} in the background"], usage)
    if data.get("steps") is None:
        raise make_protocol_error(call, "it holds no steps", usage)
    mark: Json = {"provider": call.provider, "model": model}
    content = [part for step in get_optional_objects(data, "steps") for part in _decode_step(step, mark, call, usage)]
    return make_validated_reply(
        tuple(content),
        call,
        model,
        stop_reason=STOPS.get(status or ""),
        raw_stop_reason=status,
        usage=usage,
        answering_model=get_optional_text(data, "model"),
        request_id=request_id,
        data_to_store={name: value for name, value in data.items() if name not in NOT_KEPT and value is not None},
    )


# A step with an unknown member, or of an unknown type, is stored whole. Decoded into parts, it would go back without the
# unknown members.
def _decode_step(step: Mapping[str, Any], mark: Json, call: RequestLabel, usage: Usage | None) -> list[AssistantPart]:
    """Return the parts of a step, ``[]`` for repeated input, an opaque part for an unknown step; raise for a step with an error."""
    match step.get("type"):
        case "model_output" if step.get("error"):
            raise error_from_body(step, None, {}, call, usage)
        case "model_output" if step.keys() <= {"type", "content", "error"}:
            return [
                part for piece in get_optional_objects(step, "content") for part in _decode_output_piece(piece, mark)
            ]
        case "thought":
            told = "\n".join(
                [find_text(piece, "text") for piece in find_objects(step, "summary") if find_text(piece, "text")]
            )
            return [ThinkingPart(told, provider_data=freeze({**mark, "step": step}))]
        case "function_call":
            given = {"id": step["id"]} if get_optional_text(step, "id") else {}
            newer = {name: value for name, value in step.items() if name not in IN_CALL and value}
            kept = {**mark, **given, **({"in_call": newer} if newer else {})}
            return [make_call_part(get_optional_text(step, "name"), step.get("arguments"), kept)]
        case kind if kind in ASKED:
            return []
        case _:
            tool, text = _name_and_describe_server_tool(step)
            return [OpaquePart(mark["provider"], freeze(step), tool=tool, text=text)]


def _decode_output_piece(piece: Mapping[str, Any], mark: Json) -> list[AssistantPart]:
    """Return the parts of a piece of output: a text and its sources, a medium, or an opaque part for anything else."""
    kind, text = piece.get("type"), piece.get("text")
    if kind == "text" and isinstance(text, str):
        more = {name: value for name, value in piece.items() if name not in {"type", "text"} and value is not None}
        if not text and not more:
            return []
        part = TextPart(text, provider_data=freeze({**mark, "more": more}) if more else None)
        notes = find_objects(piece, "annotations")
        content = encode_utf8(text) if notes else b""
        return [part, *[_decode_citation(one, content) for one in notes]]
    if "data" in piece and MEDIUM.issuperset(piece):
        made = media_part_from_base64(piece.get("data"), find_text(piece, "mime_type") or UNKNOWN, mark)
        if made is not None:
            return [made]
    return [OpaquePart(mark["provider"], freeze({"type": "model_output", "content": [piece]}))]


def _decode_citation(annotation: Mapping[str, object], text: bytes) -> CitationPart:
    """Return the citation of an annotation, whose offsets count bytes of *text*, the encoded text of the piece."""
    # (providers:PV62)
    start, end = parse_token_count(annotation.get("start_index")) or 0, parse_token_count(annotation.get("end_index"))
    said = "" if end is None else text[start : min(end, start + MAX_SAID)].decode("utf-8", "ignore")
    url = find_text(annotation, "url") or find_text(annotation, "source") or find_text(annotation, "document_uri")
    return CitationPart(url, find_text(annotation, "title") or find_text(annotation, "file_name"), said=said)


def _name_and_describe_server_tool(step: Mapping[str, object]) -> tuple[str, str]:
    """Return (name, text) for a step of a server tool: our name of the tool, and its input or result; ``("", "")`` for others."""
    kind = find_text(step, "type")
    name = kind.removesuffix("_call").removesuffix("_result")
    if name == kind:
        return "", ""
    asked, found = step.get("arguments"), step.get("result")
    if isinstance(asked, Mapping):
        queries = asked.get("queries")
        lines = [each for each in queries if isinstance(each, str)] if isinstance(queries, list | tuple) else []
        said = "\n".join(lines) or find_text(asked, "code") or compact(asked)
    else:
        said = found if isinstance(found, str) else ""
    return TOOLS.get(name, name), shorten_text(said)


def parse_usage(raw: object) -> Usage | None:
    """Parse the API's usage; ``None`` if *raw* has no token counts."""
    if not isinstance(raw, Mapping) or (
        raw.get("total_input_tokens") is None and raw.get("total_output_tokens") is None
    ):
        return None
    totals = ("total_input_tokens", "total_output_tokens")
    others = ("total_cached_tokens", "total_tool_use_tokens", "total_thought_tokens")
    counts, unsure = parse_token_counts(raw, *totals, *others)
    return make_disjoint_usage(counts, at_least=unsure or any(raw.get(name) is None for name in totals))


@attrs.define
class _OpenStep:
    """
    A step that is still being received.

    Attributes:
        step: The step so far.
        texts: Each text of it with its deltas, which are joined once at the end.
        arguments: The deltas of the arguments of a call.
        call: The index of the call in the stream's deltas.
        closed: Whether it is complete.
    """

    step: Json
    texts: list[tuple[Json, list[str]]] = attrs.field(factory=list)
    arguments: list[str] = attrs.field(factory=list)
    call: int | None = None
    closed: bool = False


class InteractionsAccumulator(Accumulator):
    """Assembles the events of one stream into the completed reply; the last event has status and usage."""

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(data.get("usage")))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._steps: dict[int, _OpenStep] = {}
        self._calls = 0

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one event to the reply, and return its deltas; raise ``ModelError`` for an error event or an impossible order.

        Raises:
            ModelError: for an error event, and for events in an impossible order.
        """
        if data.strip() == DONE:
            return []
        event = parse_json(data)
        match event.get("event_type") or name:
            case "step.delta":
                return self._apply_delta(require_index(event, "index"), get_optional_object(event, "delta"))
            case "step.start":
                return self._start_step(require_index(event, "index"), get_optional_object(event, "step"))
            case "step.stop":
                opened = self._get_open_step(require_index(event, "index"))
                opened.closed = True
                return [] if opened.call is None else [ToolCallEnded(opened.call)]
            case "error":
                raise self._make_stream_error(event)
            case "interaction.created" | "interaction.completed" as kind:
                self._data.update(get_optional_object(event, "interaction"))
                self.is_done = kind == "interaction.completed"
            case "interaction.status_update":
                kept = ("status", "usage", "continuation_token")
                self._data.update({name: event[name] for name in kept if event.get(name) is not None})
            case _:
                # Unknown events are ignored: an error would lose the whole reply.
                pass
        return []

    def _start_step(self, index: int, step: Mapping[str, Any]) -> list[ModelDelta]:
        """Store the new step at *index*; return a ``ToolCallStarted`` for a call."""
        if index in self._steps:
            self._raise_protocol_error(f"step {index} starts for the second time")
        opened = self._steps[index] = _OpenStep(copy.deepcopy(dict(step)))
        if step.get("type") != "function_call":
            return []
        opened.call = self._calls
        self._calls += 1
        return [ToolCallStarted(opened.call, get_optional_text(step, "name"))]

    def _get_open_step(self, index: int) -> _OpenStep:
        """Return the open step at *index*; raise an error for any other."""
        opened = self._steps.get(index)
        if opened is None or opened.closed:
            self._raise_protocol_error(f"an event for step {index}, which is not open")
        return opened

    def _apply_delta(self, index: int, delta: Mapping[str, Any]) -> list[ModelDelta]:
        """Merge a delta into its step and return the deltas for subscribers; raise for a delta of the wrong kind."""
        opened = self._get_open_step(index)
        kind, belongs = get_optional_text(delta, "type"), opened.step.get("type")
        if BELONGS.get(kind, belongs) != belongs:
            self._raise_protocol_error(f"a delta of {kind!r} in a step of type {belongs!r}")
        match kind:
            case "text":
                text = get_optional_text(delta, "text")
                _append_text(opened, "content", text)
                return [TextChunk(text)] if text else []
            case "thought_summary" if find_text(delta, "content", "type") in {"", "text"}:
                text = get_optional_text(get_optional_object(delta, "content"), "text")
                _append_text(opened, "summary", text)
                return [ThinkingChunk(text)] if text else []
            case "arguments_delta":
                text = get_optional_text(delta, "arguments")
                opened.arguments.append(text)
                return [ToolCallChunk(opened.call or 0, text)] if text else []
            case _:
                _merge_silent_delta(opened, kind, delta)
                return []

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if its end event is missing.

        Raises:
            TruncatedReply: when ``interaction.completed`` is missing.
        """
        if not self.is_done:
            self._raise_truncated_error("its interaction.completed is missing")
        steps = [_build_step(opened) for _, opened in sorted(self._steps.items())]
        return self._decode_message({**self._data, "steps": steps})


BELONGS = {
    **dict.fromkeys(("text", "text_annotation_delta"), "model_output"),
    **dict.fromkeys(("thought_summary", "thought_signature"), "thought"),
    "arguments_delta": "function_call",
}
"""The step type that each type of delta may extend."""


def _append_text(opened: _OpenStep, member: str, text: str) -> None:
    """Append *text* to the last piece of *member*, or start a new piece if the last one is not text."""
    pieces = opened.step.setdefault(member, [])
    last = pieces[-1] if pieces else None
    if last is None or last.get("type") != "text":
        pieces.append({"type": "text", "text": ""})
        opened.texts.append((pieces[-1], []))
    elif not opened.texts or opened.texts[-1][0] is not last:
        opened.texts.append((last, [get_optional_text(last, "text")]))
    opened.texts[-1][1].append(text)


def _merge_silent_delta(opened: _OpenStep, kind: str, delta: Mapping[str, Any]) -> None:
    """Merge a delta that subscribers do not see into the step: signatures, sources, images and unknown kinds."""
    step = opened.step
    if kind == "text_annotation_delta":
        _append_text(opened, "content", "")
        step["content"][-1].setdefault("annotations", []).extend(get_optional_list(delta, "annotations"))
    elif kind == "thought_signature":
        step["signature"] = get_optional_text(step, "signature") + get_optional_text(delta, "signature")
    elif kind == "thought_summary":
        step.setdefault("summary", []).append(delta["content"])
    elif step.get("type") == "model_output":
        step.setdefault("content", []).append(dict(delta))
    else:
        step.update({name: value for name, value in delta.items() if name != "type" and value is not None})


def _build_step(opened: _OpenStep) -> Json:
    """Return a step in the form of a reply without a stream."""
    for piece, texts in opened.texts:
        piece["text"] = "".join(texts)
    return {**opened.step, "arguments": "".join(opened.arguments)} if opened.arguments else opened.step
