"""
Records the cassette of ``stepengine demo`` again: ``python -m cassettes.record_demo [FILE]``.

A server on this machine speaks the Messages protocol and says what is written below. The demo runs against it through the
real SDK and the real codec, and what goes over the wire becomes the cassette. No key, no provider, no network.
"""

# ruff: noqa: T201 - a script that says what it wrote

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cassettes.local_server import Answer, Redirected, save_cassette, serve, source_of
from stepengine.cli.commands.demo import CASSETTE, run_demo
from stepengine.testing import Cassette, RecordTransport

SOURCE = source_of("record_demo")
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


def answer(_: str, body: bytes) -> Answer:
    """Answer a request with the reply that comes after the assistant messages in it."""
    messages = json.loads(body)["messages"]
    turn = sum(m["role"] == "assistant" for m in messages) - handler_calls(messages)
    size = len(json.dumps(messages))
    stream = "".join([f"event: {e['type']}\ndata: {json.dumps(e)}\n\n" for e in events(REPLIES[turn], turn, size)])
    kind = {"content-type": "text/event-stream; charset=utf-8"}
    return Answer(stream.encode(), stream=True, headers={**kind, "request-id": f"req_demo_{turn}"})


def handler_calls(messages: list[dict[str, Any]]) -> int:
    """Count the assistant messages that the handler made: they hold a call of read_files, which no reply does."""
    blocks = [m["content"] for m in messages if m["role"] == "assistant" and isinstance(m["content"], list)]
    return sum(any(b.get("name") == "read_files" for b in content) for content in blocks)


def record(path: Path) -> Path:
    """Run the demo against the server and write what went over the wire to *path*."""
    cassette = Cassette()
    with serve(answer) as port:
        result = run_demo(RecordTransport(Redirected(port), cassette)).result
    result.unwrap()
    return save_cassette(cassette.interactions, SOURCE, path)


if __name__ == "__main__":
    print(f"recorded {record(Path(sys.argv[1]) if sys.argv[1:] else CASSETTE)}")
