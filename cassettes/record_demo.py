"""
Records the cassette of ``stepengine demo`` again: ``python cassettes/record_demo.py [FILE]``.

A server on this machine speaks the Messages protocol and says what is written below. The demo runs against it through the
real SDK and the real codec, and what goes over the wire becomes the cassette. No key, no provider, no network.
"""

# ruff: noqa: INP001, T201 - a script that says what it wrote

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import httpx2

from stepengine.cli.commands.demo import CASSETTE, run_demo
from stepengine.testing import Cassette, RecordTransport

SOURCE = "a server on the recording machine that speaks the protocol (cassettes/record_demo.py); no model was asked"
SUM = "sum(PRICES[article] * count for article, count in order.items())"


def text(said: str) -> dict[str, Any]:
    """Return a text block."""
    return {"type": "text", "text": said}


def edit(number: int, path: str, old: str, new: str) -> dict[str, Any]:
    """Return a block that calls str_replace."""
    replacements = [{"old_string": old, "new_string": new}]
    arguments = {"path": path, "replacements": replacements}
    return {"type": "tool_use", "id": f"toolu_demo_{number}", "name": "str_replace", "input": arguments}


# The first edit has a parenthesis too many, so that there is something for the handler to find.
REPLIES: list[list[dict[str, Any]]] = [
    [
        text("I will apply the discount in total() and mention it in the README."),
        edit(
            1,
            "shop.py",
            f"    return {SUM}\n",
            f"    price = {SUM}\n    return price * 0.9 if price >= 100 else price)\n",
        ),
        edit(
            2,
            "README.md",
            "`total(order)` returns what an order costs.\n",
            "`total(order)` returns what an order costs. Orders of 100 or more are 10 % cheaper.\n",
        ),
    ],
    [text("Orders of 100 or more now get 10 % off, and the README says so.")],
    [
        text("There is a parenthesis too many."),
        edit(3, "shop.py", "if price >= 100 else price)\n", "if price >= 100 else price\n"),
    ],
    [text("total() gives 10 % off from 100 on, the README says so, and shop.py parses again.")],
]


def events(reply: list[dict[str, Any]], turn: int, size: int) -> Iterator[dict[str, Any]]:
    """Give the events of one streamed reply of the Messages protocol; a token counts as four characters."""
    usage = {"input_tokens": size // 4, "output_tokens": 1}
    message = {"id": f"msg_demo_{turn}", "type": "message", "role": "assistant", "model": "demo", "content": []}
    yield {"type": "message_start", "message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    for index, block in enumerate(reply):
        if block["type"] == "text":
            empty, key, whole, kind = {**block, "text": ""}, "text", block["text"], "text_delta"
        else:
            empty, key, kind = {**block, "input": {}}, "partial_json", "input_json_delta"
            whole = json.dumps(block["input"])
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for start in range(0, len(whole), 24):
            delta = {"type": kind, key: whole[start : start + 24]}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    stop = "tool_use" if reply[-1]["type"] == "tool_use" else "end_turn"
    delta = {"stop_reason": stop, "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": len(json.dumps(reply)) // 4}}
    yield {"type": "message_stop"}


class Answers(BaseHTTPRequestHandler):
    """Answers each request with the reply that comes after the assistant messages in it."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer one request of the Messages protocol."""
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turn = sum(m["role"] == "assistant" for m in request["messages"]) - handler_calls(request["messages"])
        size = len(json.dumps(request["messages"]))
        stream = "".join([f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events(REPLIES[turn], turn, size)])
        body = stream.encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("request-id", f"req_demo_{turn}")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def handler_calls(messages: list[dict[str, Any]]) -> int:
    """Count the assistant messages that the handler made: they hold a call of read_files, which no reply does."""
    blocks = [m["content"] for m in messages if m["role"] == "assistant" and isinstance(m["content"], list)]
    return sum(any(b.get("name") == "read_files" for b in content) for content in blocks)


class Redirected(httpx2.AsyncHTTPTransport):
    """Takes the cassette's host to the port on which the server of this run listens."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send *request* to the server of this run."""
        there = request.url.copy_with(host="127.0.0.1", port=self._port)
        moved = httpx2.Request(request.method, there, headers=request.headers, content=request.content)
        return await super().handle_async_request(moved)


@contextmanager
def serving() -> Iterator[int]:
    """Serve the replies on a free port of this machine for as long as the block lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="demo-server")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def record(path: Path) -> Path:
    """Run the demo against the server and write what went over the wire to *path*."""
    cassette = Cassette()
    with serving() as port:
        result = run_demo(RecordTransport(Redirected(port), cassette)).result
    result.unwrap()
    labelled = [attrs.evolve(i, extras={**i.extras, "recorded_from": SOURCE}) for i in cassette.interactions]
    return Cassette(labelled).save(path)


if __name__ == "__main__":
    print(f"recorded {record(Path(sys.argv[1]) if sys.argv[1:] else CASSETTE)}")
