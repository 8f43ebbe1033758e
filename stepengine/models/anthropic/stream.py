"""Assemble the events of a stream of Anthropic's Messages API into the completed reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.json import compact
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.usage import Usage
from stepengine.models._byte_reader import Accumulator
from stepengine.models._call_arguments import ArgumentPieces
from stepengine.models._failures import RequestLabel
from stepengine.models._json import (
    encode_utf8,
    find_unknown_members,
    get_optional_list,
    get_optional_object,
    get_optional_text,
    parse_json,
    require_index,
)
from stepengine.models.anthropic.decode import decode, parse_usage

TERMINAL = (b"event: message_stop\n", b'data: {"type":"message_stop"', b'data: {"type": "message_stop"')
BELONGS = {
    "text_delta": ("text",),
    "citations_delta": ("text",),
    "thinking_delta": ("thinking",),
    "signature_delta": ("thinking",),
}
"""The block types that each type of delta may extend."""

IN_EVENT = frozenset({"type", "index", "delta", "content_block", "message", "usage"})
"""The known members of an event. Unknown ones of ``message_delta`` are stored with the message, others are reported."""
TOLD = frozenset({"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_stop"})
IN_DELTA = {
    "text_delta": frozenset({"type", "text"}),
    "thinking_delta": frozenset({"type", "thinking"}),
    "signature_delta": frozenset({"type", "signature"}),
    "citations_delta": frozenset({"type", "citation"}),
    "input_json_delta": frozenset({"type", "partial_json"}),
}
NOTHING = frozenset({"type"})
"""The known members of a delta of an unknown type; its other members are stored with the block."""

Json = dict[str, Any]


@attrs.define
class _OpenAnthropicBlock:
    """A content block that is still being received."""

    block: Json
    pieces: list[str] = attrs.field(factory=list)
    arguments: ArgumentPieces = attrs.field(factory=ArgumentPieces)
    call: int | None = None
    closed: bool = False


class AnthropicAccumulator(Accumulator):
    """Turns the events of one stream into the completed reply."""

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(data.get("usage")))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._message: Json | None = None
        self._blocks: list[_OpenAnthropicBlock] = []
        self._calls = 0

    @property
    def usage(self) -> Usage | None:
        """The usage reported so far."""
        usage = parse_usage(self._message.get("usage")) if self._message else None
        return usage if usage is None or self.is_done else attrs.evolve(usage, at_least=True)

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one event to the reply, and return its deltas; raise ``ModelError`` for an error event or an impossible order.

        Raises:
            ModelError: for an error event, and for events in an impossible order.
        """
        if name == "ping":
            return []
        event = parse_json(data)
        kind = event.get("type") or name
        if kind in TOLD and not IN_EVENT.issuperset(event):
            self._record_unknown_names(*[f"{kind}.{member}" for member in find_unknown_members(event, IN_EVENT)])
        match kind:
            case "content_block_delta":
                return self._apply_delta(
                    self._get_open_block(require_index(event, "index")), get_optional_object(event, "delta")
                )
            case "content_block_start":
                return self._open_block(require_index(event, "index"), get_optional_object(event, "content_block"))
            case "content_block_stop":
                return self._close_block(self._get_open_block(require_index(event, "index")))
            case "error":
                raise self._make_stream_error(event)
            case _:
                self._add_message_event(kind, event)
                return []

    def _add_message_event(self, kind: str, event: Json) -> None:
        """Apply an event of the message itself, or record the name of an unknown one; raise for an impossible order."""
        if kind == "message_start":
            if self._message is not None:
                self._raise_protocol_error("a second message_start")
            message = get_optional_object(event, "message")
            self._message = {**message, "usage": dict(get_optional_object(message, "usage"))}
        elif kind == "message_delta":
            self._apply_message_delta(event)
        elif kind == "message_stop":
            if not self._is_complete_except_stop():
                self._raise_protocol_error("a message_stop while a block is open or the stop reason is missing")
            self.is_done = True
        elif kind != "ping":
            self._record_unknown_names(kind)

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if its terminal event is missing.

        A body that ends inside the terminal event counts if everything before it arrived (reliability:MP20).

        Raises:
            TruncatedReply: when the terminal marker is missing.
        """
        begun = bool(tail) and any(mark.startswith(tail) or tail.startswith(mark) for mark in TERMINAL)
        message = self._message
        if message is None or not (self.is_done or (begun and self._is_complete_except_stop())):
            self._raise_truncated_error("its message_stop is missing")
        self.is_done = True
        message["content"] = [opened.block for opened in self._blocks]
        return self._decode_message(message)

    def _is_complete_except_stop(self) -> bool:
        """Return whether the stop reason is known and all blocks are closed."""
        return bool(self._message and self._message.get("stop_reason")) and all(o.closed for o in self._blocks)

    def _open_block(self, index: int, block: Mapping[str, object]) -> list[ModelDelta]:
        """Store a new block and return its first deltas; raise for a block out of order."""
        if self._message is None or index != len(self._blocks):
            self._raise_protocol_error(f"content block {index} starts where block {len(self._blocks)} belongs")
        opened = _OpenAnthropicBlock(dict(block))
        self._blocks.append(opened)
        if block["type"] != "tool_use":
            return _make_initial_text_deltas(block)
        opened.call = self._calls
        self._calls += 1
        return [ToolCallStarted(opened.call, get_optional_text(block, "name"))]

    def _get_open_block(self, index: int) -> _OpenAnthropicBlock:
        """Return the open block at *index*; raise for any other index."""
        if not 0 <= index < len(self._blocks) or self._blocks[index].closed:
            self._raise_protocol_error(f"an event for content block {index}, which is not open")
        return self._blocks[index]

    def _apply_delta(self, opened: _OpenAnthropicBlock, delta: Mapping[str, Any]) -> list[ModelDelta]:
        """Merge a delta into its block and return the deltas for subscribers; raise for a delta of the wrong kind."""
        block, kind = opened.block, delta["type"]
        if block["type"] not in BELONGS.get(kind, (block["type"],)):
            self._raise_protocol_error(f"a {kind} in a block of type {block['type']!r}")
        _merge_unknown_members(block, find_unknown_members(delta, IN_DELTA.get(kind, NOTHING)))
        match kind:
            case "text_delta" | "thinking_delta":
                text = get_optional_text(delta, "text" if kind == "text_delta" else "thinking")
                opened.pieces.append(text)
                chunk = TextChunk if kind == "text_delta" else ThinkingChunk
                return [chunk(text)] if text else []
            case "signature_delta":
                block["signature"] = get_optional_text(block, "signature") + get_optional_text(delta, "signature")
            case "citations_delta":
                block["citations"] = [*get_optional_list(block, "citations"), delta["citation"]]
            case "input_json_delta":
                if block["type"] in {"text", "thinking"}:
                    self._raise_protocol_error(f"arguments in a block of type {block['type']!r}")
                given = delta.get("partial_json")
                text = compact(given) if isinstance(given, dict) else get_optional_text(delta, "partial_json")
                new = opened.arguments.append_and_flush_certain(text)
                if opened.call is not None and new:
                    return [ToolCallChunk(opened.call, new)]
            case _:
                pass  # of an unknown kind: its members are in the block already
        return []

    def _close_block(self, opened: _OpenAnthropicBlock) -> list[ModelDelta]:
        """Join the pieces of a block and close it; return the last deltas of a call."""
        opened.closed = True
        block, text = opened.block, "".join(opened.pieces)
        match block["type"]:
            case "text":
                block["text"] = get_optional_text(block, "text") + text
            case "thinking":
                block["thinking"] = get_optional_text(block, "thinking") + text
            case "tool_use":
                return self._close_call(opened)
            case _:
                if given := opened.arguments.text:
                    block["input"] = parse_json(encode_utf8(given))
        return []

    def _close_call(self, opened: _OpenAnthropicBlock) -> list[ModelDelta]:
        """Store the arguments of a call and return its last deltas; raise for ambiguous arguments."""
        block, arguments, number = opened.block, opened.arguments, opened.call or 0
        if arguments.is_undecided:
            name = get_optional_text(block, "name")
            self._raise_protocol_error(
                f"ambiguous arguments of {name!r}: both the joined pieces and the last piece are complete"
            )
        rest = arguments.flush_rest()
        block["input"] = arguments.text or block.get("input")
        return [*([ToolCallChunk(number, rest)] if rest else []), ToolCallEnded(number)]

    def _apply_message_delta(self, event: Json) -> None:
        """Merge stop reason, usage and unknown members of an event into the message."""
        if self._message is None:
            self._raise_protocol_error("a message_delta before message_start")
        usage = get_optional_object(event, "usage")
        self._message["usage"].update({name: value for name, value in usage.items() if value is not None})
        self._message.update(get_optional_object(event, "delta"))
        self._message.update(find_unknown_members(event, IN_EVENT))


def _make_initial_text_deltas(block: Mapping[str, object]) -> list[ModelDelta]:
    """Return the delta for the text that a new block already contains."""
    if block["type"] == "text" and (text := get_optional_text(block, "text")):
        return [TextChunk(text)]
    if block["type"] == "thinking" and (text := get_optional_text(block, "thinking")):
        return [ThinkingChunk(text)]
    return []


def _merge_unknown_members(block: Json, delta: Mapping[str, Any]) -> None:
    """Merge unknown members of a delta into its block: texts and lists grow, other values are replaced."""
    for name, value in delta.items():
        old = block.get(name)
        grows = type(value) is type(old) and isinstance(value, str | list)
        block[name] = old + value if grows else value
