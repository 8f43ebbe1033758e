"""
A server of this machine that speaks the wires of the model providers, for programs that make their own clients.

It calls the first tool of a request once, and answers with a text when the result is there. Without tools it repeats the last text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.servers import Quiet, served

__all__ = ("ModelServer", "model_server", "streams")

JsonObject = dict[str, Any]


class ModelServer:
    """
    What a running server has seen, and how it fails.

    Attributes:
        url: Its address.
        requests: Path and body of each request, in order of arrival.
        failures: Status codes of the next replies, before it answers again.
        cut: Close the connection after so many bytes of each body.
    """

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, JsonObject]] = []
        self.failures: list[int] = []
        self.cut: int | None = None

    def environment(self) -> dict[str, str]:
        """
        Return the variables with which the SDKs find it.
        """
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": "sk-live-0123456789-abcdefghijklmnop",
            "ANTHROPIC_BASE_URL": self.url, "ANTHROPIC_API_KEY": "sk-ant-live-0123456789-abcdefghijklmnop",
            "GOOGLE_GEMINI_BASE_URL": self.url, "GEMINI_API_KEY": "gemini-live-0123456789",
            "AWS_ENDPOINT_URL_BEDROCK_RUNTIME": self.url, "AWS_ACCESS_KEY_ID": "AKIALIVE0123456789AB",
            "AWS_SECRET_ACCESS_KEY": "live-secret-0123456789", "AWS_SESSION_TOKEN": "live-session-0123456789",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip


@contextmanager
def model_server() -> Iterator[ModelServer]:
    server = ModelServer()
    with served(type("Handler", (_Handler,), {"server_state": server})) as url:
        server.url = url
        yield server


class _Handler(Quiet):
    protocol_version = "HTTP/1.1"
    server_state: ModelServer

    def do_GET(self) -> None:
        self._send(200, "application/json", json.dumps({"path": self.path}).encode())

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(data) if data[:1] == b"{" else {"raw": data.decode(errors="replace")}
        path = self.path.partition("?")[0]
        self.server_state.requests.append((path, body))
        if self.server_state.failures:
            status = self.server_state.failures.pop(0)
            error = {"type": "error", "error": {"type": "rate_limit_error", "message": "later", "code": status}}
            self._send(status, "application/json", json.dumps(error).encode(), {"retry-after": "0.01"})
            return
        for end, answer in ANSWERS.items():
            if path.endswith(end) or end in path:
                reply, events = answer(body)
                break
        else:
            reply, events = {"echo": body}, []
        streamed = bool(body.get("stream")) or "stream" in path.lower()
        if streamed and path.endswith("converse-stream"):
            self._send(200, "application/vnd.amazon.eventstream", b"".join(map(_frame, events)))
        elif streamed:
            self._send(200, "text/event-stream", b"".join(event.encode() for event in events))
        else:
            self._send(200, "application/json", json.dumps(reply).encode())

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if kind == "application/json":
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        cut = self.server_state.cut
        for start in range(0, len(body), 64):
            piece = body[start : start + 64] if cut is None else body[start : min(start + 64, cut)]
            if piece:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
        if cut is not None and cut < len(body):
            self.close_connection = True
            return
        self.wfile.write(b"0\r\n\r\n")


def _data(*trees: JsonObject, named: bool = False) -> list[str]:
    return [f"{'event: ' + t['type'] + chr(10) if named else ''}data: {json.dumps(t)}\n\n" for t in trees]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, dict):
        for name in (
            "text",
            "content",
            "output",
            "parts",
            "response",
            "result",
            "toolResult",
            "functionResponse",
            "json",
        ):
            yield from _texts(value.get(name))


def _said(messages: Any) -> str:
    return next(reversed(list(_texts(messages))), "")


def _arguments(schema: JsonObject) -> JsonObject:
    return dict.fromkeys(schema.get("properties", {}), "Oslo")


# --- OpenAI ---------------------------------------------------------------------------------------------------------------


def _chat(body: JsonObject) -> tuple[JsonObject, list[str]]:
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
    tools = body.get("tools")
    if tools and not any(m["role"] == "tool" for m in body["messages"]):
        function = tools[0]["function"]
        call = {
            "id": "call_1", "type": "function",
            "function": {"name": function["name"], "arguments": json.dumps(_arguments(function["parameters"]))},
        }  # fmt: skip
        message: JsonObject = {"role": "assistant", "content": None, "tool_calls": [call]}
        deltas: list[JsonObject] = [{"role": "assistant", "tool_calls": [{"index": 0, **call}]}]
        reason = "tool_calls"
    else:
        text = f"You said: {_said(body['messages'])}"
        message = {"role": "assistant", "content": text}
        deltas = [{"role": "assistant", "content": text[:6]}, {"content": text[6:]}]
        reason = "stop"
    whole = {**head, "object": "chat.completion", "usage": usage}
    whole["choices"] = [{"index": 0, "finish_reason": reason, "message": message}]
    chunk = {**head, "object": "chat.completion.chunk"}
    chunks = [{**chunk, "choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas]
    chunks.append({**chunk, "choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
    chunks.append({**chunk, "choices": [], "usage": usage})
    return whole, [*_data(*chunks), "data: [DONE]\n\n"]


def _responses(body: JsonObject) -> tuple[JsonObject, list[str]]:
    items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
    tools = body.get("tools")
    if tools and not any(item.get("type") == "function_call_output" for item in items):
        arguments = json.dumps(_arguments(tools[0]["parameters"]))
        item: JsonObject = {
            "type": "function_call", "id": "fc_1", "call_id": "call_1", "name": tools[0]["name"], "arguments": arguments,
            "status": "completed",
        }  # fmt: skip
    else:
        part = {"type": "output_text", "text": f"You said: {_said(items)}", "annotations": []}
        item = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}
    whole = {
        "id": "resp_1", "object": "response", "created_at": 1, "status": "completed", "model": body["model"],
        "output": [item], "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None,
        "incomplete_details": None, "instructions": None, "metadata": {}, "temperature": 1.0, "top_p": 1.0,
        "usage": {
            "input_tokens": 20, "output_tokens": 5, "total_tokens": 25, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }  # fmt: skip
    started = {**whole, "status": "in_progress", "output": [], "usage": None}
    events: list[JsonObject] = [
        {"type": "response.created", "response": started, "sequence_number": 0},
        {"type": "response.output_item.added", "output_index": 0, "item": item, "sequence_number": 1},
        {"type": "response.output_item.done", "output_index": 0, "item": item, "sequence_number": 2},
        {"type": "response.completed", "response": whole, "sequence_number": 3},
    ]
    return whole, _data(*events, named=True)


# --- Anthropic ------------------------------------------------------------------------------------------------------------


def _messages(body: JsonObject) -> tuple[JsonObject, list[str]]:
    answered = any('"tool_result"' in json.dumps(m) for m in body["messages"])
    usage = {"input_tokens": 20, "output_tokens": 5}
    tools = body.get("tools")
    if tools and not answered:
        block: JsonObject = {
            "type": "tool_use", "id": "toolu_1", "name": tools[0]["name"], "input": _arguments(tools[0]["input_schema"]),
        }  # fmt: skip
        opened: JsonObject = {**block, "input": {}}
        delta: JsonObject = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        reason = "tool_use"
    else:
        block = {"type": "text", "text": f"You said: {_said(body['messages'])}"}
        opened = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
        reason = "end_turn"
    whole = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": [block],
        "stop_reason": reason, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    started = {**whole, "content": [], "stop_reason": None}
    events: list[JsonObject] = [
        {"type": "message_start", "message": started},
        {"type": "content_block_start", "index": 0, "content_block": opened},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]
    return whole, _data(*events, named=True)


# --- Google ---------------------------------------------------------------------------------------------------------------


def _google(body: JsonObject) -> tuple[JsonObject, list[str]]:
    answered = any("functionResponse" in json.dumps(c) for c in body["contents"])
    usage = {"promptTokenCount": 20, "candidatesTokenCount": 5, "totalTokenCount": 25}
    declared = [f for tool in body.get("tools", []) for f in tool.get("functionDeclarations", [])]
    if declared and not answered:
        schema = declared[0].get("parameters") or declared[0].get("parametersJsonSchema") or {}
        parts: list[JsonObject] = [{"functionCall": {"name": declared[0]["name"], "args": _arguments(schema)}}]
    else:
        parts = [{"text": "You said: "}, {"text": _said(body["contents"])}]
    events: list[JsonObject] = [
        {"candidates": [{"index": 0, "content": {"role": "model", "parts": [part]}}], "modelVersion": "m"}
        for part in parts
    ]
    events[-1]["candidates"][0]["finishReason"] = "STOP"
    events[-1]["usageMetadata"] = usage
    candidate = {"index": 0, "content": {"role": "model", "parts": parts}, "finishReason": "STOP"}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "m"}, _data(*events)


# --- Bedrock --------------------------------------------------------------------------------------------------------------


def _converse(body: JsonObject) -> tuple[JsonObject, list[str]]:
    text = f"You said: {_said(body['messages'])}"
    usage = {"inputTokens": 20, "outputTokens": 5, "totalTokens": 25}
    whole = {
        "output": {"message": {"role": "assistant", "content": [{"text": text}]}}, "stopReason": "end_turn",
        "usage": usage, "metrics": {"latencyMs": 1},
    }  # fmt: skip
    events = [
        ("messageStart", {"role": "assistant"}), ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": text}}),
        ("contentBlockStop", {"contentBlockIndex": 0}), ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}),
    ]  # fmt: skip
    return whole, [json.dumps([kind, tree]) for kind, tree in events]


def _frame(event: str) -> bytes:
    """
    Return an event of AWS's binary framing.
    """
    import binascii
    import struct

    kind, tree = json.loads(event)
    pairs = ((":event-type", kind), (":content-type", "application/json"), (":message-type", "event"))
    headers = b"".join(
        bytes([len(n)]) + n.encode() + b"\x07" + struct.pack(">H", len(v)) + v.encode() for n, v in pairs
    )
    payload = json.dumps(tree).encode()
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    start = prelude + struct.pack(">I", binascii.crc32(prelude)) + headers + payload
    return start + struct.pack(">I", binascii.crc32(start))


ANSWERS = {
    "/chat/completions": _chat, "/responses": _responses, "/messages": _messages, "GenerateContent": _google,
    "generateContent": _google, "/converse": _converse,
}  # fmt: skip


def streams() -> dict[str, bytes]:
    """
    Return a whole stream of each wire of server-sent events.
    """
    asked = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "input": "hello there"}
    google = {"contents": [{"parts": [{"text": "hello there"}]}]}
    made = {
        "chat": _chat(asked),
        "responses": _responses(asked),
        "messages": _messages(asked),
        "google": _google(google),
    }
    return {name: "".join(events).encode() for name, (_, events) in made.items()}
