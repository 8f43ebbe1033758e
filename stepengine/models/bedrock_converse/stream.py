"""Assemble the events of a stream of the Converse API into the completed reply."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.models._byte_reader import Accumulator
from stepengine.models._failures import RequestLabel
from stepengine.models._json import (
    encode_utf8,
    get_optional_list,
    get_optional_object,
    get_optional_text,
    parse_json,
    require_index,
)
from stepengine.models.bedrock_converse.decode import SERVER, decode, parse_usage

PADDING = "p"
"""The member with random letters that hide the lengths of events."""

BELONGS = {"citation": "citationsContent"}
"""The kind of block for a delta, where their names differ."""

Json = dict[str, Any]


@attrs.define
class _OpenConverseBlock:
    """
    A content block that is still being received.

    Attributes:
        kind: The name of its member, such as ``"text"`` or ``"toolUse"``; ``""`` before the first delta.
        block: The value of that member so far.
        pieces: The pieces of its text or its arguments.
        blobs: The pieces of its bytes, as base64.
        call: The index of the call in the stream's deltas.
        closed: Whether it is complete.
    """

    kind: str = ""
    block: Json = attrs.field(factory=dict)
    pieces: list[str] = attrs.field(factory=list)
    blobs: list[str] = attrs.field(factory=list)
    call: int | None = None
    closed: bool = False


class ConverseAccumulator(Accumulator):
    """Assembles the events of one stream into the completed reply; the usage follows its end."""

    decoder = staticmethod(decode)
    usage_parser = staticmethod(lambda data: parse_usage(data.get("usage")))

    def __init__(self, call: RequestLabel, model: str, request_id: str | None) -> None:
        super().__init__(call, model, request_id)
        self._message: Json | None = None
        self._blocks: dict[int, _OpenConverseBlock] = {}
        self._stopped: Json = {}
        self._calls = 0

    @property
    def has_reported_end(self) -> bool:
        """Whether the message has stopped. Only its usage follows."""
        return bool(self._stopped)

    def add_event(self, name: str, data: bytes) -> list[ModelDelta]:
        """
        Add one event to the reply, and return its deltas; raise ``ModelError`` for an exception or an impossible order.

        Raises:
            ModelError: for an exception, and for events in an impossible order.
        """
        event = parse_json(data)
        if not isinstance(event, Mapping):
            self._raise_protocol_error(f"an event of the type {name!r} that is not an object")
        match name:
            case "contentBlockDelta":
                return self._apply_delta(
                    self._get_or_open_block(require_index(event, "contentBlockIndex")),
                    get_optional_object(event, "delta"),
                )
            case "contentBlockStart":
                return self._open_block(require_index(event, "contentBlockIndex"), get_optional_object(event, "start"))
            case "contentBlockStop":
                opened = self._get_or_open_block(require_index(event, "contentBlockIndex"))
                opened.closed = True
                return [] if opened.call is None else [ToolCallEnded(opened.call)]
            case "error":
                raise self._make_stream_error(event)
            case _:
                self._add_message_event(name, event)
                return []

    def _add_message_event(self, name: str, event: Mapping[str, object]) -> None:
        """Apply the start, stop or metadata of the message; raise for an impossible order. Other events are ignored."""
        told = {member: value for member, value in event.items() if member != PADDING}
        if name == "messageStart":
            if self._message is not None:
                self._raise_protocol_error("a second messageStart")
            self._message = told
        elif name == "messageStop":
            if self._message is None or self.has_reported_end or not get_optional_text(event, "stopReason"):
                self._raise_protocol_error("a messageStop without a message, without a reason, or for the second time")
            if any(not opened.closed for opened in self._blocks.values()):
                self._raise_protocol_error("a messageStop while a block is open")
            self._stopped = told
        elif name == "metadata":
            self._data = told
            self.is_done = self.has_reported_end

    def finish(self, tail: bytes, *, is_clean: bool = True) -> ModelReply:
        """
        Return the assembled reply; raise ``TruncatedReply`` if the message has not stopped; its usage may be missing.

        Raises:
            TruncatedReply: when the message has not stopped.
        """
        if not self.has_reported_end:
            self._raise_truncated_error("its messageStop is missing")
        self.is_done = True
        content = [self._build_block(opened) for _, opened in sorted(self._blocks.items())]
        message = {**(self._message or {}), "content": [block for block in content if block]}
        return self._decode_message({"output": {"message": message}, **self._stopped, **self._data})

    def _get_or_open_block(self, index: int) -> _OpenConverseBlock:
        """Return the open block of an event; create a missing one, because texts have no start event."""
        if self._message is None or self.has_reported_end:
            self._raise_protocol_error(f"an event for content block {index} outside a message")
        opened = self._blocks.setdefault(index, _OpenConverseBlock())
        if opened.closed:
            self._raise_protocol_error(f"an event for content block {index}, which is not open")
        return opened

    def _open_block(self, index: int, start: Mapping[str, Any]) -> list[ModelDelta]:
        """Open the content block at *index*; return a ``ToolCallStarted`` for a call."""
        if index in self._blocks:
            self._raise_protocol_error(f"content block {index} starts for the second time")
        opened = self._get_or_open_block(index)
        opened.kind = next((name for name, value in start.items() if isinstance(value, Mapping)), "")
        opened.block = dict(start[opened.kind]) if opened.kind else {}
        if opened.kind != "toolUse" or opened.block.get("type") == SERVER:
            return []
        opened.call = self._calls
        self._calls += 1
        return [ToolCallStarted(opened.call, get_optional_text(opened.block, "name"))]

    def _apply_delta(self, opened: _OpenConverseBlock, delta: Mapping[str, Any]) -> list[ModelDelta]:
        """Merge a delta into its block and return the deltas for subscribers; raise for a delta of the wrong kind."""
        kind = next(iter(delta), "")
        belongs = BELONGS.get(kind, kind)
        if kind == "citation" and opened.kind == "text":
            opened.kind = belongs
        elif kind == "text" and opened.kind == "citationsContent":
            belongs = opened.kind
        opened.kind = opened.kind or belongs
        if opened.kind != belongs:
            self._raise_protocol_error(f"a delta of {kind!r} in a block of {opened.kind!r}")
        match kind:
            case "text":
                text = get_optional_text(delta, kind)
                opened.pieces.append(text)
                return [TextChunk(text)] if text else []
            case "reasoningContent":
                return _append_thought(opened, get_optional_object(delta, kind))
            case "toolUse":
                text = get_optional_text(get_optional_object(delta, kind), "input")
                opened.pieces.append(text)
                return [ToolCallChunk(opened.call, text)] if opened.call is not None and text else []
            case _:
                _merge_silent_delta(opened, kind, delta)
                return []

    def _build_block(self, opened: _OpenConverseBlock) -> Json:
        """Return a block in the form of a reply without a stream; ``{}`` for an empty block."""
        text = "".join(opened.pieces)
        match opened.kind:
            case "":
                return {}
            case "text":
                return {"text": text} if text else {}
            case "citationsContent":
                said = {"content": [{"text": text}]} if text else {}
                return {opened.kind: {**said, **opened.block}}
            case "reasoningContent":
                if opened.blobs:
                    return {opened.kind: {"redactedContent": _join_base64(opened.blobs), **opened.block}}
                return {opened.kind: {"reasoningText": {"text": text, **opened.block}}}
            case "toolUse":
                given = parse_json(encode_utf8(text)) if text and opened.call is None else text
                return {opened.kind: {**opened.block, "input": given}}
            case "image" if opened.blobs:
                return {opened.kind: {**opened.block, "source": {"bytes": _join_base64(opened.blobs)}}}
            case _:
                return {opened.kind: opened.block}


def _append_thought(opened: _OpenConverseBlock, thought: Mapping[str, Any]) -> list[ModelDelta]:
    """Append a piece of thinking to its block: text, signature or redacted content; return the delta of a text."""
    for name, value in thought.items():
        if name == "redactedContent":
            opened.blobs.append(get_optional_text(thought, name))
        elif name != "text":
            _merge_member(opened.block, name, value)
    text = get_optional_text(thought, "text")
    opened.pieces.append(text)
    return [ThinkingChunk(text)] if text else []


def _merge_silent_delta(opened: _OpenConverseBlock, kind: str, delta: Mapping[str, Any]) -> None:
    """Merge a delta that subscribers do not receive into its block."""
    block = opened.block
    if kind == "citation":
        block.setdefault("citations", []).append(delta[kind])
    elif kind == "toolResult":
        block.setdefault("content", []).extend(get_optional_list(delta, kind))
    elif kind == "image" and "bytes" in get_optional_object(get_optional_object(delta, kind), "source"):
        opened.blobs.append(get_optional_text(delta[kind]["source"], "bytes"))
    elif kind:
        for name, value in get_optional_object(delta, kind).items():
            _merge_member(block, name, value)


def _merge_member(block: Json, name: str, value: Any) -> None:
    """Merge a value into a member of any kind: texts and lists grow, other values are replaced."""
    old: Any = block.get(name)
    grows = isinstance(value, str | list) and type(value) is type(old)
    if value is not None:
        block[name] = old + value if grows else value


def _join_base64(blobs: list[str]) -> str:
    """Return one base64 text for the joined bytes of several base64 texts."""
    if len(blobs) == 1:
        return blobs[0]
    return base64.b64encode(b"".join([base64.b64decode(blob) for blob in blobs])).decode("ascii")
