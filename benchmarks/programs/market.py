"""
The task, and the model that does it in three ways: a server on loopback that speaks Chat Completions.

The way is the first part of the path. What it says is made of what it was sent, so that a sum is right only when every result came.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

ITEMS = [f"{kind}-{size}" for kind in ("tea", "coffee", "milk", "bread", "butter") for size in ("s", "m", "l", "xl")]
QUESTION = f"What do these cost together, one of each? {', '.join(ITEMS)}"
PROGRAM = f"""\
import asyncio

items = {json.dumps(ITEMS)}
found = await asyncio.gather(*[look_up(item=item) for item in items])
sum(each["price"] for each in found)
"""
WAYS = ("one by one", "in one reply", "program")
CHARACTERS = 4
"""As many are counted as one token."""
PRICE, NUMBER = re.compile(r'"price": ?(\d+)'), re.compile(r"\d+")


def entry(item: str) -> dict[str, Any]:
    """Return what a lookup gives."""
    number = ITEMS.index(item)
    return {
        "item": item,
        "price": 100 + 7 * number,
        "currency": "EUR",
        "stock": 12 + number,
        "shelf": f"aisle {number % 6}, shelf {number % 4}",
        "supplier": {"name": f"Supplier {number % 3} Ltd.", "days": 2 + number % 5},
    }


TOTAL = sum(entry(item)["price"] for item in ITEMS)


class Asked(NamedTuple):
    """
    What one request was.

    Attributes:
        sent: The tokens that the model reads.
        repeated: How many of these it was sent before, at the same place.
        written: The tokens that it writes.
    """

    sent: int
    repeated: int
    written: int


class Shop:
    """
    What the model was asked since it was told the way.

    Attributes:
        asked: Each request.
    """

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._before = ""

    def reply(self, way: str, body: dict[str, Any]) -> dict[str, Any]:
        """Answer one request in a way."""
        read = json.dumps([body.get("tools"), body["messages"]], ensure_ascii=False)
        message = said(way, body["messages"])
        shared = next(
            (n for n, (a, b) in enumerate(zip(read, self._before, strict=False)) if a != b), len(self._before)
        )
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = (message["content"] or "") + "".join([call["name"] + call["arguments"] for call in calls])
        self.asked.append(Asked(len(read) // CHARACTERS, shared // CHARACTERS, len(written) // CHARACTERS))
        self._before = read
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop", "logprobs": None}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        return {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def said(way: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next message of the model."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    match way:
        case "program":
            calls = [] if results else [("run_code", {"code": PROGRAM})]
        case "one by one":
            calls = [("look_up", {"item": item}) for item in ITEMS[len(results) :][:1]]
        case _:
            calls = [] if results else [("look_up", {"item": item}) for item in ITEMS]
    if not calls:
        prices = [int(number) for text in results for number in PRICE.findall(text) or NUMBER.findall(text)]
        return {"role": "assistant", "content": f"They cost {sum(prices)} euros."}
    made = [
        {
            "id": f"call_{len(results) + n}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


@contextmanager
def opened() -> Iterator[tuple[str, Shop]]:
    """Serve the model; gives its address, to which a way is added, and what it was asked."""
    shop = Shop()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            way = self.path.split("/")[1].replace("-", " ")
            sent = json.dumps(shop.reply(way, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", shop
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
