"""Replies of both wires as bytes, in the form that providers send: streams, whole replies, errors."""

from __future__ import annotations

import json
from typing import Any

import attrs

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models import AnthropicProvider, OpenAIChatProvider, Provider

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = (ToolSpec("add", "Add two numbers.", ADD),)


def event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), json.dumps(data).encode())


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "x", "model": "gpt-4o", "choices": [choice], **more}).encode()


def anthropic_stream(text: str, calls: list[tuple[str, str]], stop: str) -> list[bytes]:
    usage = {"input_tokens": 25, "output_tokens": 1, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}
    message = {
        "id": "msg_1",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": [],
        "stop_reason": None,
        "usage": usage,
    }
    events = [event({"type": "message_start", "message": message}), event({"type": "ping"})]
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if text:
        deltas = [{"type": "text_delta", "text": piece} for piece in (text[:3], text[3:])]
        blocks.append(({"type": "text", "text": ""}, deltas))
    for number, (name, arguments) in enumerate(calls):
        deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in ("", arguments[:4], arguments[4:])]
        blocks.append(({"type": "tool_use", "id": f"toolu_{number}", "name": name, "input": {}}, deltas))
    for index, (block, deltas) in enumerate(blocks):
        events.append(event({"type": "content_block_start", "index": index, "content_block": block}))
        events += [event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas]
        events.append(event({"type": "content_block_stop", "index": index}))
    delta = {
        "type": "message_delta",
        "delta": {"stop_reason": stop, "stop_sequence": None},
        "usage": {"output_tokens": 12},
    }
    return [*events, event(delta), event({"type": "message_stop"})]


def anthropic_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    content += [
        {"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": json.loads(arguments)}
        for n, (name, arguments) in enumerate(calls)
    ]
    usage = {"input_tokens": 25, "output_tokens": 12, "cache_read_input_tokens": 5, "cache_creation_input_tokens": 2}
    message = {"id": "msg_1", "role": "assistant", "model": "claude-sonnet-4-5", "content": content, "usage": usage}
    return json.dumps({**message, "stop_reason": stop, "stop_sequence": None}).encode()


CHAT_USAGE = {"prompt_tokens": 30, "completion_tokens": 12, "prompt_tokens_details": {"cached_tokens": 5}}
CHAT_STOPS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def chat_stream(text: str, calls: list[tuple[str, str]], stop: str) -> list[bytes]:
    events = [chunk({"role": "assistant", "content": ""})]
    if text:
        events += [chunk({"content": piece}) for piece in (text[:3], text[3:])]
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(chunk({"tool_calls": [head]}))
        for piece in (arguments[:4], arguments[4:]):
            events.append(chunk({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}))
    events.append(chunk({}, CHAT_STOPS[stop]))
    usage = {"id": "x", "model": "gpt-4o", "choices": [], "usage": CHAT_USAGE}
    return [*events, b"data: %s\n\n" % json.dumps(usage).encode(), b"data: [DONE]\n\n"]


def chat_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": CHAT_STOPS[stop]}
    return json.dumps({"id": "x", "model": "gpt-4o", "choices": [choice], "usage": CHAT_USAGE}).encode()


@attrs.frozen
class Wire:
    """One adapter with the bytes of its protocol."""

    name: str
    provider: type[Any]
    model: str
    stream: Any
    reply: Any
    error: Any
    stream_error: bytes

    def make(self, url: str | None = None, **options: Any) -> Provider:
        base = url if self.name == "anthropic" or url is None else f"{url}/v1"
        return self.provider(api_key="sk-secret-key-0123456789", base_url=base, **options)

    def request(self, **fields: Any) -> ModelRequest:
        return ModelRequest(self.model, "Be brief.", Transcript([UserMessage("What is 2 + 3?")]), TOOLS, **fields)

    @property
    def marker(self) -> bytes:
        """Where the terminal event of a stream begins; chat: the finish reason's event."""
        return b"event: message_stop" if self.name == "anthropic" else b'"finish_reason": "'


def _anthropic_error(kind: str, message: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_9"}).encode()


def _chat_error(kind: str, message: str) -> bytes:
    return json.dumps({"error": {"type": kind, "code": kind, "message": message, "param": None}}).encode()


ANTHROPIC = Wire(
    "anthropic",
    AnthropicProvider,
    "anthropic/claude-sonnet-4-5",
    anthropic_stream,
    anthropic_reply,
    _anthropic_error,
    event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}),
)
CHAT = Wire(
    "openai_chat",
    OpenAIChatProvider,
    "openai_chat/gpt-4o",
    chat_stream,
    chat_reply,
    _chat_error,
    b'data: {"error": {"code": 502, "message": "Overloaded"}, "choices": [{"delta": {}, "finish_reason": "error"}]}\n\n',
)
WIRES = (ANTHROPIC, CHAT)
