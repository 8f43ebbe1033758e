"""
A loopback server that speaks the four protocols: ``python -m benchmarks.loopback`` prints its port and serves until stdin ends.

``GET /reset/N/`` makes the next N replies tool calls ``add(a=i, b=1)`` and what comes after them the text ``done``; with
``/reset/N/TOOL`` it is a call of that tool with ``answer="done"``, in Chat Completions. ``GET /speak/N`` makes all of them streams of N tokens,
each in a piece of its own. ``GET /count`` says how many replies there were since. Requests are not looked at, so that the server costs next to nothing beside the client that is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any


def anthropic(number: int, *, done: bool) -> dict[str, Any]:
    """Return a reply of Anthropic's Messages API."""
    call = {"type": "tool_use", "id": f"toolu_{number}", "name": "add", "input": {"a": number, "b": 1}}
    usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "done"} if done else call],
        "stop_reason": "end_turn" if done else "tool_use",
        "stop_sequence": None,
        "usage": usage,
    }


def chat(number: int, *, done: bool, final: str = "") -> dict[str, Any]:
    """Return a reply of Chat Completions."""
    arguments = json.dumps({"answer": "done"} if done else {"a": number, "b": 1})
    function = {"name": final if done else "add", "arguments": arguments}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    said = done and not final
    message: dict[str, Any] = {"role": "assistant", "content": "done" if said else None}
    message |= {} if said else {"tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "stop" if said else "tool_calls", "logprobs": None}
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def responses(number: int, *, done: bool) -> dict[str, Any]:
    """Return a reply of the Responses API."""
    text = {"type": "output_text", "text": "done", "annotations": []}
    message = {"type": "message", "id": f"m_{number}", "role": "assistant", "status": "completed", "content": [text]}
    arguments = json.dumps({"a": number, "b": 1})
    ids = {"id": f"fc_{number}", "call_id": f"call_{number}"}
    call = {"type": "function_call", **ids, "name": "add", "arguments": arguments, "status": "completed"}
    usage = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}  # type: ignore[dict-item]
    head = {"id": "r", "object": "response", "created_at": 1, "model": "m", "status": "completed", "error": None}
    settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    return {**head, **settings, "output": [message if done else call], "usage": usage}


def google(number: int, *, done: bool) -> dict[str, Any]:
    """Return a reply of the Gemini API."""
    call = {"functionCall": {"name": "add", "args": {"a": number, "b": 1}, "id": f"g_{number}"}}
    content = {"role": "model", "parts": [{"text": "done"} if done else call]}
    usage = {"promptTokenCount": 10, "candidatesTokenCount": 5, "totalTokenCount": 15}
    return {
        "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
        "usageMetadata": usage,
        "modelVersion": "m",
    }


def spoken(path: str, count: int) -> list[bytes]:
    """Return the events of a streamed text of *count* tokens, in Chat Completions or Anthropic's Messages API."""
    return _spoken_messages(count) if path.endswith("/messages") else _spoken_chat(count)


def _spoken_chat(count: int) -> list[bytes]:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "fp"}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        *[{"content": WORD} for _ in range(count)],
        {},
    ]
    chunks = [
        {
            **head,
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None if delta else "stop"}],
        }
        for delta in deltas
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": count, "total_tokens": 10 + count}
    lines = [json.dumps(chunk) for chunk in (*chunks, {**head, "choices": [], "usage": usage})]
    return [f"data: {line}\n\n".encode() for line in (*lines, "[DONE]")]


def _spoken_messages(count: int) -> list[bytes]:
    message = {**anthropic(0, done=True), "content": [], "stop_reason": None}
    delta = {"index": 0, "delta": {"type": "text_delta", "text": WORD}}
    ended = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": {"output_tokens": count}}
    events = [
        ("message_start", {"message": message}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *[("content_block_delta", delta) for _ in range(count)],
        ("content_block_stop", {"index": 0}),
        ("message_delta", ended),
        ("message_stop", {}),
    ]
    return [f"event: {name}\ndata: {json.dumps({'type': name, **data})}\n\n".encode() for name, data in events]


WORD = " word"
PROTOCOLS: dict[str, Any] = {
    "/messages": anthropic,
    "/chat/completions": chat,
    "/responses": responses,
    ":generateContent": google,
}


class Server:
    """Counts replies."""

    def __init__(self) -> None:
        self.number = 0
        self.calls = 0
        self.final = ""
        self.tokens = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                path = head.split(" ", 2)[1].partition("?")[0]
                low = head.lower()
                at = low.find("content-length:")
                if at >= 0:
                    await reader.readexactly(int(low[at + 15 : low.index("\r\n", at)]))
                if self.tokens and not path.startswith(("/reset/", "/speak/", "/count")):
                    self.number += 1
                    writer.writelines(self.streamed(path))
                    await writer.drain()
                    continue
                body = self.answer(path)
                lines = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                writer.write(lines.encode() + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def streamed(self, path: str) -> list[bytes]:
        """Return a streamed reply in pieces, each of which a client reads by itself."""
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return [head, *[b"%x\r\n%b\r\n" % (len(event), event) for event in spoken(path, self.tokens)], b"0\r\n\r\n"]

    def answer(self, path: str) -> bytes:
        """Return the body for one request."""
        if path.startswith("/reset/"):
            count, _, self.final = path.removeprefix("/reset/").partition("/")
            self.number, self.calls, self.tokens = 0, int(count), 0
            return b"0"
        if path.startswith("/speak/"):
            self.number, self.tokens = 0, int(path.removeprefix("/speak/"))
            return b"0"
        if path == "/count":
            return str(self.number).encode()
        protocol = next(make for ending, make in PROTOCOLS.items() if path.endswith(ending))
        number, self.number = self.number, self.number + 1
        final = {"final": self.final} if self.final else {}
        return json.dumps(protocol(number, done=number >= self.calls, **final)).encode()


async def serve() -> None:
    """Serve until stdin ends."""
    server = await asyncio.start_server(Server().handle, "127.0.0.1", 0, limit=2**26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve())
