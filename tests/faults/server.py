"""
A loopback provider that plays scripts of bytes and breaks them.

Each request takes the next script. A script is an ``Answer``: a status, headers, and items of the body: bytes to send, a
float to wait, ``"rst"`` to reset the connection, ``"fin"`` to end the chunked body, ``"hang"`` to send nothing more. In
place of a script there may be a function of the request's body that gives one.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, TypeVar

import attrs

__all__ = ("Answer", "FaultServer", "fault_server", "json_answer", "listening", "served", "sse")

S = TypeVar("S", bound="FaultServer")


@attrs.frozen
class Answer:
    """What one request gets."""

    items: Sequence[Any] = ()
    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    content_type: str = "text/event-stream"
    close: bool = False


def sse(*items: Any, **fields: Any) -> Answer:
    """A stream of events."""
    return Answer(items, **fields)


def json_answer(body: bytes, status: int = 200, **headers: str) -> Answer:
    """A body in one piece; underscores in header names are dashes."""
    return Answer((body, "fin"), status, {k.replace("_", "-"): v for k, v in headers.items()}, "application/json")


@attrs.define
class FaultServer:
    """
    The server while it runs.

    Attributes:
        url: Its address.
        requests: Head and body of every request, in order.
        asked: Set when a request has come.
        closed: Set when a client closed a connection on which something was still to come.
    """

    url: str
    answers: list[Answer | Callable[[bytes], Answer]]
    requests: list[tuple[bytes, bytes]] = attrs.field(factory=list)
    asked: asyncio.Event = attrs.field(factory=asyncio.Event)
    closed: asyncio.Event = attrs.field(factory=asyncio.Event)
    connections: int = 0
    tasks: set[asyncio.Task[None]] = attrs.field(factory=set)
    writers: list[asyncio.StreamWriter] = attrs.field(factory=list)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.tasks.add(asyncio.current_task())
        self.writers.append(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    def answer(self, head: bytes, body: bytes) -> Answer:
        """What a request gets: the next script, the last one for ever."""
        self.requests.append((head, body))
        self.asked.set()
        script = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return script(body) if callable(script) else script

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(
            int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        )
        answer = self.answer(head, await reader.readexactly(length))
        headers = {"content-type": answer.content_type, "transfer-encoding": "chunked", **answer.headers}
        lines = [f"HTTP/1.1 {answer.status} Scripted", *[f"{k}: {v}" for k, v in headers.items()], "", ""]
        writer.write("\r\n".join(lines).encode())
        for item in answer.items:
            if isinstance(item, float):
                await asyncio.sleep(item)
            elif item == "rst":
                await writer.drain()
                writer.transport.abort()
                return False
            elif item == "fin":
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return not answer.close
            elif item == "hang":
                await writer.drain()
                await reader.read()  # until the client hangs up
                self.closed.set()
                return False
            elif item:
                writer.write(b"%x\r\n%s\r\n" % (len(item), item))
                await writer.drain()
        return False


@asynccontextmanager
async def listening(state: S) -> AsyncIterator[S]:
    """Run a server that *state* handles the connections of, and tell that where it is."""
    server = await asyncio.start_server(state.handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    state.url = f"http://{host}:{port}"
    try:
        yield state
    finally:
        server.close()
        for task in state.tasks:
            task.cancel()
        await asyncio.gather(*state.tasks)
        # What nobody read is not sent any more: a connection that still had something to send would outlive the loop.
        for writer in state.writers:
            writer.transport.abort()
        await asyncio.gather(*[writer.wait_closed() for writer in state.writers], return_exceptions=True)
        await server.wait_closed()


def fault_server(*answers: Answer | Callable[[bytes], Answer]) -> AbstractAsyncContextManager[FaultServer]:
    """Run a server that gives *answers* in order, the last one for ever."""
    return listening(FaultServer("", list(answers)))


@contextmanager
def served(*answers: Answer | Callable[[bytes], Answer]) -> Iterator[FaultServer]:
    """Run such a server in a loop of its own, since commands have one too."""
    ready: list[FaultServer] = []
    up, done = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fault_server(*answers) as server:
            ready.append(server)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    up.wait()
    try:
        yield ready[0]
    finally:
        done.set()
        thread.join()


class Rule:
    """
    A server with rules: each body is kept, and refused with the words of the first rule that it breaks.

    Args:
        replies: What it answers to bodies that keep the rules, the last one for ever; bytes, or the events of a stream.
        rules: Give the words of a refusal, or nothing.
    """

    def __init__(self, *replies: Any, rules: tuple[Callable[[dict[str, Any]], str | None], ...] = ()) -> None:
        self.replies = list(replies)
        self.rules = rules
        self.bodies: list[dict[str, Any]] = []
        self.refused: list[str] = []

    def __call__(self, body: bytes) -> Answer:
        data = json.loads(body)
        self.bodies.append(data)
        for rule in self.rules:
            if words := rule(data):
                self.refused.append(words)
                problem = {"type": "invalid_request_error", "code": None, "message": words}
                return json_answer(json.dumps({"type": "error", "error": problem}).encode(), 400)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return json_answer(reply) if isinstance(reply, bytes) else sse(*reply, "fin")
