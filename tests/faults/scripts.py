"""Replies of the wires as bytes, in the form that providers send: streams, whole replies, errors."""

from __future__ import annotations

import json
from typing import Any

import attrs

from stepengine.data.messages import UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.models import AnthropicProvider, GoogleProvider, OpenAIChatProvider, OpenAIProvider, Provider

ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOLS = (ToolSpec("add", "Add two numbers.", ADD),)


def given(arguments: str) -> Any:
    """Arguments as a server with an object in that place would hold them."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def event(data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), json.dumps(data).encode())


def unnamed(data: dict[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(data).encode()


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return unnamed({"id": "x", "model": "gpt-4o", "choices": [choice], **more})


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
        {"type": "tool_use", "id": f"toolu_{n}", "name": name, "input": given(arguments)}
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


RESPONSES_USAGE = {
    "input_tokens": 30,
    "output_tokens": 12,
    "input_tokens_details": {"cached_tokens": 5},
    "output_tokens_details": {"reasoning_tokens": 0},
}
RESPONSES_STOPS = {"end_turn": "completed", "tool_use": "completed", "max_tokens": "incomplete"}


def responses_items(text: str, calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    items: list[dict[str, Any]] = []
    if text:
        items.append({"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": content})
    for number, (name, arguments) in enumerate(calls):
        ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
        items.append({"type": "function_call", **ids, "name": name, "arguments": arguments, "status": "completed"})
    return items


def response_object(text: str, calls: list[tuple[str, str]], stop: str) -> dict[str, Any]:
    status = RESPONSES_STOPS[stop]
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    head = {"id": "resp_1", "object": "response", "model": "gpt-5", "status": status, "error": None}
    return {**head, "incomplete_details": details, "output": responses_items(text, calls), "usage": RESPONSES_USAGE}


def responses_stream(text: str, calls: list[tuple[str, str]], stop: str) -> list[bytes]:
    whole = response_object(text, calls, stop)
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(whole["output"]):
        empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
        added = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        said = text if item["type"] == "message" else item["arguments"]
        kind = "response.output_text.delta" if item["type"] == "message" else "response.function_call_arguments.delta"
        at = {"output_index": index, "item_id": item["id"]}
        events += [{"type": kind, **at, "delta": piece} for piece in (said[:3], said[3:])]
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{whole['status']}", "response": whole})
    return [event({**data, "sequence_number": number}) for number, data in enumerate(events)]


def responses_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    return json.dumps(response_object(text, calls, stop)).encode()


GOOGLE_USAGE = {"promptTokenCount": 30, "candidatesTokenCount": 12, "totalTokenCount": 42, "cachedContentTokenCount": 5}
GOOGLE_STOPS = {"end_turn": "STOP", "tool_use": "STOP", "max_tokens": "MAX_TOKENS"}


def google_chunk(parts: list[dict[str, Any]], finish: str | None = None, **more: Any) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    if finish:
        candidate["finishReason"] = finish
    head = {"modelVersion": "gemini-3-pro", "responseId": "r_1"}
    return {"candidates": [candidate], "usageMetadata": GOOGLE_USAGE, **head, **more}


def google_calls(calls: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"functionCall": {"name": name, "args": given(arguments), "id": f"g_{n}"}, "thoughtSignature": "c2ln+/8="}
        for n, (name, arguments) in enumerate(calls)
    ]


def google_stream(text: str, calls: list[tuple[str, str]], stop: str) -> list[bytes]:
    chunks = [google_chunk([{"text": piece}]) for piece in (text[:3], text[3:]) if piece]
    chunks += [google_chunk([part]) for part in google_calls(calls)]
    chunks.append(google_chunk([{"text": ""}], GOOGLE_STOPS[stop]))
    return [b"data: %s\r\n\r\n" % json.dumps(chunk).encode() for chunk in chunks]


def google_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    parts = ([{"text": text}] if text else []) + google_calls(calls)
    return json.dumps(google_chunk(parts, GOOGLE_STOPS[stop])).encode()


CONVERSE_USAGE = {
    "inputTokens": 25,
    "outputTokens": 12,
    "totalTokens": 44,
    "cacheReadInputTokens": 5,
    "cacheWriteInputTokens": 2,
    "serverToolUsage": {},
}


def converse_events(text: str, calls: list[tuple[str, str]], stop: str) -> list[tuple[str, dict[str, Any]]]:
    """A stream of Bedrock's Converse: the types of its events, and what they hold."""
    blocks: list[tuple[dict[str, Any] | None, list[dict[str, Any]]]] = []
    if text:
        blocks.append((None, [{"text": piece} for piece in (text[:3], text[3:])]))
    for number, (name, arguments) in enumerate(calls):
        deltas = [{"toolUse": {"input": piece}} for piece in ("", arguments[:4], arguments[4:])]
        blocks.append(({"toolUse": {"toolUseId": f"tooluse_{number}", "name": name}}, deltas))
    events: list[tuple[str, dict[str, Any]]] = [("messageStart", {"role": "assistant", "p": "abcd"})]
    for index, (start, pieces) in enumerate(blocks):
        at = {"contentBlockIndex": index, "p": "abcdefgh"}
        events += [("contentBlockStart", {"start": start, **at})] if start else []
        events += [("contentBlockDelta", {"delta": delta, **at}) for delta in pieces]
        events.append(("contentBlockStop", at))
    told = {"usage": CONVERSE_USAGE, "metrics": {"latencyMs": 431}, "p": "abc"}
    return [*events, ("messageStop", {"stopReason": stop, "p": "ab"}), ("metadata", told)]


def converse_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    content: list[dict[str, Any]] = [{"text": text}] if text else []
    content += [
        {"toolUse": {"toolUseId": f"tooluse_{n}", "name": name, "input": given(arguments)}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content}
    told = {"usage": CONVERSE_USAGE, "metrics": {"latencyMs": 431}}
    return json.dumps({"output": {"message": message}, "stopReason": stop, **told}).encode()


INTERACTION_USAGE = {
    "total_tokens": 109,
    "total_input_tokens": 53,
    "total_output_tokens": 15,
    "total_cached_tokens": 3,
    "total_tool_use_tokens": 0,
    "total_thought_tokens": 41,
}
INTERACTION_STOPS = {"end_turn": "completed", "tool_use": "requires_action", "max_tokens": "incomplete"}


def interaction(stop: str, **more: Any) -> dict[str, Any]:
    told = {"status": INTERACTION_STOPS[stop], "usage": INTERACTION_USAGE, "object": "interaction"}
    return {"id": "v1_abc", "model": "gemini-3-pro", **told, **more}


def interactions_reply(text: str, calls: list[tuple[str, str]], stop: str) -> bytes:
    said = {"type": "model_output", "content": [{"type": "text", "text": text}]}
    steps: list[dict[str, Any]] = [said] if text else []
    steps += [
        {"type": "function_call", "id": f"call_{n}", "name": name, "arguments": given(arguments)}
        for n, (name, arguments) in enumerate(calls)
    ]
    return json.dumps(interaction(stop, steps=steps)).encode()


def interactions_stream(text: str, calls: list[tuple[str, str]], stop: str) -> list[bytes]:
    def told(kind: str, **more: Any) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps({"event_type": kind, **more}).encode())

    steps: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if text:
        pieces = [{"type": "text", "text": piece} for piece in (text[:3], text[3:])]
        steps.append(({"type": "model_output"}, pieces))
    for number, (name, arguments) in enumerate(calls):
        start = {"type": "function_call", "id": f"call_{number}", "name": name, "arguments": {}}
        steps.append((start, [{"type": "arguments_delta", "arguments": p} for p in (arguments[:4], arguments[4:])]))
    events = [
        told("interaction.created", interaction={"id": "v1_abc", "status": "in_progress", "model": "gemini-3-pro"})
    ]
    for index, (step, deltas) in enumerate(steps):
        events.append(told("step.start", index=index, step=step))
        events += [told("step.delta", index=index, delta=delta) for delta in deltas]
        events.append(told("step.stop", index=index))
    return [*events, told("interaction.completed", interaction=interaction(stop)), b"event: done\ndata: [DONE]\n\n"]


@attrs.frozen
class Wire:
    """
    One adapter with the bytes of its protocol.

    Attributes:
        name: The adapter.
        provider: Its class.
        model: What it is asked for.
        base: What of its address follows the server's.
        key_variable: Where its key comes from.
        stream: The events of a reply, from text, calls and stop reason.
        reply: The same in one piece.
        error: The body of an error, from its type and its message.
        stream_error: An error inside a stream that began well, and the status that it stands for.
        marker: Where the terminal event of a stream begins; chat: the finish reason's event.
    """

    name: str
    provider: type[Any]
    model: str
    base: str
    key_variable: str
    stream: Any
    reply: Any
    error: Any
    stream_error: tuple[bytes, int]
    marker: bytes

    def __str__(self) -> str:
        return self.name

    def make(self, url: str | None = None, **options: Any) -> Provider:
        base = None if url is None else f"{url}{self.base}"
        return self.provider(api_key="sk-secret-key-0123456789", base_url=base, **options)

    def request(self, **fields: Any) -> ModelRequest:
        return ModelRequest(self.model, "Be brief.", Transcript([UserMessage("What is 2 + 3?")]), TOOLS, **fields)


def _anthropic_error(kind: str, message: str) -> bytes:
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_9"}).encode()


def _openai_error(kind: str, message: str) -> bytes:
    return json.dumps({"error": {"type": kind, "code": kind, "message": message, "param": None}}).encode()


def _google_error(kind: str, message: str) -> bytes:
    return json.dumps({"error": {"code": 400, "status": kind, "message": message, "details": []}}).encode()


ANTHROPIC = Wire(
    "anthropic",
    AnthropicProvider,
    "anthropic/claude-sonnet-4-5",
    "",
    "ANTHROPIC_API_KEY",
    anthropic_stream,
    anthropic_reply,
    _anthropic_error,
    (event({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}), 529),
    b"event: message_stop",
)
RESPONSES = Wire(
    "openai",
    OpenAIProvider,
    "openai/gpt-5",
    "/v1",
    "OPENAI_API_KEY",
    responses_stream,
    responses_reply,
    _openai_error,
    (event({"type": "error", "code": "server_error", "message": "Overloaded", "param": None}), 500),
    b"event: response.completed",
)
CHAT = Wire(
    "openai_chat",
    OpenAIChatProvider,
    "openai_chat/gpt-4o",
    "/v1",
    "STEPENGINE_OPENAI_CHAT_API_KEY",
    chat_stream,
    chat_reply,
    _openai_error,
    (
        b'data: {"error": {"code": 502, "message": "Overloaded"}, "choices": [{"delta": {}, "finish_reason": "error"}]}\n\n',
        502,
    ),
    b'"finish_reason": "',
)
GOOGLE = Wire(
    "google",
    GoogleProvider,
    "google/gemini-3-pro",
    "",
    "GOOGLE_API_KEY",
    google_stream,
    google_reply,
    _google_error,
    (b'data: {"error": {"code": 503, "status": "UNAVAILABLE", "message": "Overloaded"}}\r\n\r\n', 503),
    b'"finishReason"',
)
WIRES = (ANTHROPIC, RESPONSES, CHAT, GOOGLE)
