"""
A journal store over HTTP: runs are recorded on a server, and any machine that reaches it resumes them.

`HttpJournal` has the five methods that `LineJournal` needs. A lock is a request that the server does not finish: when its process ends,
the connection ends and the journal is free.

``python examples/extending/journal_store.py`` needs no key and no network: the server below runs on this machine. Your own server
stores bytes in files or objects and keeps the same five requests.
"""

import http.client
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote, urlsplit

from stepengine import AgentDefinition, Ask, Engine, Perform, StepContext, Steps
from stepengine.errors import JournalLocked
from stepengine.journal import LineJournal


class HttpJournal(LineJournal):
    """The journal of one run on a server."""

    def __init__(self, server: str, run: str, **options: Any) -> None:
        super().__init__(**options)
        self._server = server
        self._run = run

    @property
    def name(self) -> str:
        """The address of the journal."""
        return f"{self._server}/{self._run}"

    def read_bytes(self, start: int) -> bytes:
        """Get the bytes from an offset on."""
        return self._request("GET", start)

    def append_bytes(self, data: bytes, at: int) -> None:
        """Append bytes if the server has stored exactly *at* bytes."""
        self._request("PATCH", at, data)

    def replace_bytes(self, data: bytes) -> None:
        """Replace all bytes."""
        self._request("PUT", 0, data)

    def lock(self) -> Callable[[], None]:
        """Hold a request open; a byte, or the end of the connection, unlocks the journal."""
        connection = self._connect()
        connection.request("LOCK", self._path(0))
        response = connection.getresponse()
        if response.status == http.HTTPStatus.LOCKED:
            connection.close()
            msg = f"{self.name} is written by another process"
            raise JournalLocked(msg)
        if response.status != http.HTTPStatus.OK:
            connection.close()
            raise refusal(response)

        def unlock() -> None:
            connection.sock.sendall(b".")
            response.read()
            connection.close()

        return unlock

    def letters(self) -> LineJournal | None:
        """Store messages of other processes under a name of their own."""
        return HttpJournal(self._server, f"{self._run}.mail")

    def _request(self, method: str, offset: int, data: bytes = b"") -> bytes:
        with closing(self._connect()) as connection:
            connection.request(method, self._path(offset), data)
            response = connection.getresponse()
            body = response.read()
        if response.status != http.HTTPStatus.OK:
            raise refusal(response)
        return body

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self._server).netloc, timeout=10)

    def _path(self, offset: int) -> str:
        return f"/{quote(self._run, safe='')}?{offset}"


def refusal(response: http.client.HTTPResponse) -> OSError:
    return OSError(f"the server answers {response.status} {response.reason}")


class JournalServer(ThreadingHTTPServer):
    """Stores bytes by name, in memory. Use it in a ``with`` block."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.stored: dict[str, bytearray] = defaultdict(bytearray)
        self.locks: set[str] = set()
        self.changing = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    def server_close(self) -> None:
        """Stop the server."""
        self.shutdown()
        self._thread.join()
        super().server_close()


class Handler(BaseHTTPRequestHandler):
    """The five requests."""

    server: JournalServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Send the bytes from an offset on."""
        run, offset = self._address()
        with self.server.changing:
            found = bytes(memoryview(self.server.stored[run])[offset:])
        self._reply(200, found)

    def do_PATCH(self) -> None:
        """Append, or refuse if the size differs."""
        run, offset = self._address()
        data = self._body()
        with self.server.changing:
            stored = self.server.stored[run]
            is_next = len(stored) == offset
            if is_next:
                stored += data
        self._reply(200 if is_next else 409)

    def do_PUT(self) -> None:
        """Replace all bytes."""
        run, _ = self._address()
        data = self._body()
        with self.server.changing:
            self.server.stored[run] = bytearray(data)
        self._reply(200)

    def do_LOCK(self) -> None:
        """Lock until the client closes the connection."""
        run, _ = self._address()
        with self.server.changing:
            is_free = run not in self.server.locks
            self.server.locks.add(run)
        if not is_free:
            self._reply(423)
            return
        try:
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.connection.settimeout(None)
            self.rfile.read(1)
        finally:
            with self.server.changing:
                self.server.locks.discard(run)
        self.wfile.write(b".")

    def _address(self) -> tuple[str, int]:
        run, _, offset = self.path.partition("?")
        return run, int(offset)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _reply(self, status: int, data: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def order(ctx: StepContext) -> Steps[str]:
    price = yield from Perform.idempotent(len, ctx.prompt)
    answer = yield from Ask(f"Buy it for {price} euros?", options=["yes", "no"])
    return "bought" if answer == "yes" else "left"


def main() -> None:
    with JournalServer() as server:
        buyer = AgentDefinition("buyer", handle_steps=order)
        with Engine([buyer]) as engine:
            waiting = engine.run_sync(buyer, "a green bicycle", journal=HttpJournal(server.url, "order-7"))
        question = waiting.pending_questions[0]
        print(question.text, f"({len(server.stored['/order-7']):,} bytes are on the server)")
        with Engine([buyer]) as other:
            result = other.resume_sync(HttpJournal(server.url, "order-7"), answers={question.id: "yes"})
        print(result.output)
        assert result.output == "bought"


if __name__ == "__main__":
    main()
