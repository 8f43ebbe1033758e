"""A loopback web server that answers with scripted bytes, and notes what it was asked."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

Script = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes | str = b"", kind: str = "text/plain", status: str = "200 OK", **headers: str) -> bytes:
    """Return a whole HTTP answer; ``content_encoding="gzip"`` sets a header, it does not compress."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(data)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def redirect(location: str, status: str = "302 Found", **headers: str) -> bytes:
    return answer(status=status, location=location, **headers)


def zipped(body: bytes, **headers: str) -> bytes:
    return answer(gzip.compress(body), content_encoding="gzip", **headers)


class Site:
    """
    What a server was asked and what it answers: path to bytes, or to a script that writes.
    """

    def __init__(self) -> None:
        self.port = 0
        self.heads: list[str] = []
        self.connections = 0
        self.answers: dict[str, bytes | Script] = {}
        self.asked = asyncio.Event()
        self.open = 0
        self.most_open = 0
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def paths(self) -> list[str]:
        return [head.split(" ")[1] for head in self.heads]

    def url(self, path: str = "/", host: str = "site.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.heads.append(head)
            self.asked.set()
            path = head.split(" ")[1]
            made = self.answers.get(path.partition("?")[0], answer("nothing here", status="404 Not Found"))
            if isinstance(made, bytes):
                writer.write(made)
            else:
                await made(path, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None) -> AsyncIterator[Site]:
    """Serve until the block ends; no connection outlives it."""
    made = Site()
    tasks: set[asyncio.Task[Any]] = set()

    def start(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(start, "127.0.0.1", 0, ssl=tls, limit=2**22)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # What nobody read is not sent any more: a connection that still had something to send would outlive the loop.
        for writer in made.writers:
            writer.transport.abort()
        await asyncio.gather(*[writer.wait_closed() for writer in made.writers], return_exceptions=True)
        await server.wait_closed()


class Names:
    """A resolver of its own: name to addresses, or to one list per question."""

    def __init__(self, *answers: Sequence[str], **fixed: Sequence[str]) -> None:
        self._answers = list(answers)
        self._fixed = {name.replace("_", "."): found for name, found in fixed.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        if self._answers:
            return self._answers.pop(0)
        return self._fixed.get(host, ("127.0.0.1",))
