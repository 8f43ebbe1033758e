"""A server of Chat Completions on this machine, for commands, which have an event loop of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.scripts import CHAT
from tests.faults.server import Answer, FaultServer, json_answer, served, sse


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
    """Run *server* in a loop of its own; gives its address."""
    with served(server) as live:
        server.live.append(live)
        yield f"{live.url}/v1"
