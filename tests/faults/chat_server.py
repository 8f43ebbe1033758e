"""A server of Chat Completions on this machine, for commands, which have an event loop of their own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.scripts import CHAT
from tests.faults.server import Answer, FaultServer, fault_server, json_answer, sse


class ChatServer:
    """A server of Chat Completions that notes what it is asked for, and with which key."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.live: list[FaultServer] = []
        self.asked: list[tuple[str, str | None]] = []

    def __call__(self, body: bytes) -> Answer:
        lines = self.live[0].requests[-1][0].decode().split("\r\n")
        keys = [line.partition(": ")[2] for line in lines if line.lower().startswith("authorization:")]
        request = json.loads(body)
        self.asked.append((request["model"], keys[0] if keys else None))
        if self.key and keys != [f"Bearer {self.key}"]:
            return json_answer(CHAT.error("invalid_api_key", "Who are you?"), 401)
        if request.get("stream"):
            return sse(*CHAT.stream("It is five.", [], "end_turn"), "fin")
        return json_answer(CHAT.reply("It is five.", [], "end_turn"))


@contextmanager
def serving(server: ChatServer) -> Iterator[str]:
    """Run *server* in a loop of its own, since the command has one too; gives its address."""
    up, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fault_server(server) as live:
            server.live.append(live)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    up.wait()
    try:
        yield f"{server.live[0].url}/v1"
    finally:
        done.set()
        thread.join()
