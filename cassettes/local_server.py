"""The server on this machine that plays a provider while a cassette is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs
import httpx2

from stepengine.testing import Cassette
from stepengine.testing.cassette_files import Interaction

__all__ = ("Answer", "Redirected", "save_cassette", "serve", "source_of")


@attrs.frozen
class Answer:
    """The response to one request."""

    body: bytes
    status: int = 200
    stream: bool = False
    headers: Mapping[str, str] = attrs.Factory(dict)


@contextmanager
def serve(answer: Callable[[str, bytes], Answer]) -> Iterator[int]:
    """Answer POST requests by their path and body until the block ends, and yield the free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Answer one request."""
            answered = answer(self.path, self.rfile.read(int(self.headers["content-length"])))
            kind = "text/event-stream" if answered.stream else "application/json"
            length = str(len(answered.body))
            self.send_response_only(answered.status)  # neither the time nor this version of Python stands in the files
            for name, value in {"content-type": kind, **answered.headers, "content-length": length}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answered.body)

        def log_message(self, format: str, *args: object) -> None:
            """Write no log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="recording-server")
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Redirected(httpx2.AsyncHTTPTransport):
    """Sends requests for any host to a port of this machine."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._port = port

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send *request* to the port."""
        there = request.url.copy_with(scheme="http", host="127.0.0.1", port=self._port)
        return await super().handle_async_request(
            httpx2.Request(request.method, there, headers=request.headers, content=request.content)
        )


def source_of(script: str) -> str:
    """Return the origin of what *script* records, as its cassettes name it."""
    return f"a server on the recording machine that speaks the protocol (cassettes/{script}.py); no model was asked"


def save_cassette(interactions: Iterable[Interaction], source: str, path: Path) -> Path:
    """Save interactions with their *source* to *path* and return it."""
    return Cassette([attrs.evolve(i, extras={**i.extras, "recorded_from": source}) for i in interactions]).save(path)
