"""
A provider that several engines were given.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine
from stepengine.models import OpenAIChatProvider
from tests.servers import Quiet, served

REPLY = {
    "id": "r1",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "done"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


@pytest.mark.parametrize("is_watched", [False, True])
async def test_closing_one_engine_keeps_another_engines_request_alive(is_watched: bool) -> None:
    asked, answer = list[str](), threading.Event()
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow(Quiet):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(self.path)
            loop.call_soon_threadsafe(arrived.set)
            if len(asked) > 1:
                answer.wait(30)
            chunk = {
                **REPLY,
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "delta": {"content": "done"}, "finish_reason": "stop"}],
            }
            text = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n" if body.get("stream") else json.dumps(REPLY)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if body.get("stream") else "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    agent = AgentDefinition("asker", model="own/m")
    with served(Slow) as address:
        provider = OpenAIChatProvider("own", base_url=f"{address}/v1", api_key="none")
        first = Engine([agent], models={"own": provider})
        events: list[Any] = []
        second = Engine([agent], models={"own": provider}, observers=[events.append] if is_watched else [])
        (await first.run("asker", "Begin.")).unwrap()
        arrived.clear()
        running = asyncio.create_task(second.run("asker", "Go on."))
        await arrived.wait()
        await first.aclose()
        answer.set()
        result = await running
        await second.aclose()

    assert ("done", 2) == (result.unwrap(), len(asked))
