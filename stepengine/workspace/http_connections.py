"""
Limits of connections, before any request is processed.

uvicorn has no time limit for headers and bodies, and accepts connections until no files are left. Its option ``http=`` accepts a class of
protocols: ``make_limited_protocol`` returns a subclass that creates a ``ConnectionWatch`` for each connection. The watch starts a timer, and
wraps the application of the connection to observe the start of a request, the end of its body, and its end. A connection without a
complete request *waits*, or is *idle* if a token of an earlier request on it was verified. If there are too many, the one that has
waited longest is closed; if none waits, the one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, TypeAlias

from attrs import frozen

from stepengine.workspace.open_files import get_max_open_files

Scope: TypeAlias = Mapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

RESERVED_FILES = 256
"""Files that are reserved for runs: journals, databases, pipes of programs, connections to providers."""
UNKNOWN_FILES = 4_096
"""The limit if the system has none, or it is unknown."""
MAX_HEADERS_BYTES = 64 * 1024
"""Browsers and proxies send some kilobytes; other servers allow from 8 to 64 KiB."""
LOGS = ("asyncio", "uvicorn.error")
"""The loggers of connection errors."""
LENGTHS = frozenset([b"content-length", b"transfer-encoding"])
VERIFIED = "stepengine.verified"
"""The key in the scope of a request whose value is called without arguments when its token was verified."""


@frozen(kw_only=True)
class ConnectionLimits:
    """
    The limits of a server's connections.

    Attributes:
        connections: The maximum number of connections.
        per_address: The maximum number of waiting connections from one address without a request with a verified token. Addresses of
            this machine, such as that of a proxy, have no such limit.
        header_seconds: The time limit for the headers of a request, from the connection or the end of the previous request on.
        body_seconds: The time limit for the body of a request.
        backlog: The number of connections that are accepted at once, before any of them is counted.
        read_seconds: The time limit for a client that reads nothing while data wait to be sent to it.
    """

    connections: int
    per_address: int = 64
    header_seconds: float = 10.0
    body_seconds: float = 60.0
    backlog: int = 64
    read_seconds: float = 60.0


def compute_connection_limits() -> ConnectionLimits:
    """Return the connection limits for the number of files that this process may open; a part of it is left for runs."""
    files = get_max_open_files() or UNKNOWN_FILES
    reserved = max(min(RESERVED_FILES, files // 2), files // 4)
    # The system's own queue limits simultaneous connections, and a rejected client retries a second later. So the queue is as long
    # as the reserve allows.
    return ConnectionLimits(connections=max(16, files - reserved), backlog=min(1_024, max(16, reserved // 4)))


class ConnectionTable:
    """The connections of a server, and which of them wait for a request."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: dict[object, tuple[str, Callable[[], None]]] = {}
        self._waiting: dict[object, None] = {}  # the one that waits for longest first
        self._idle: dict[object, None] = {}  # likewise
        self._per_address = Counter[str]()

    def add(self, key: object, address: str, close: Callable[[], None]) -> None:
        """Add a waiting connection; *close* closes it. Above a limit, the one that waits or idles longest is closed."""
        self._open[key] = (address, close)
        self.mark_waiting(key)
        if self._per_address[address] > self.limits.per_address and not _is_local_address(address):
            self._close_connection(next(one for one in self._waiting if self._open[one][0] == address))
        if len(self._open) > self.limits.connections:
            oldest = next(iter(self._waiting))
            # If no others wait, an idle one is closed: its client may send requests often to block others.
            self._close_connection(next(iter(self._idle), key) if oldest is key else oldest)

    def mark_waiting(self, key: object) -> None:
        """Record that a connection has no complete request."""
        if key in self._open and key not in self._waiting:
            self._waiting[key] = None
            self._per_address[self._open[key][0]] += 1

    def mark_idle(self, key: object) -> None:
        """Record that a connection is idle after a request with a verified token."""
        if key in self._open:
            self._idle[key] = None

    def mark_serving(self, key: object) -> None:
        """Record that a connection has a complete request."""
        self._idle.pop(key, None)
        if key in self._waiting:
            del self._waiting[key]
            address = self._open[key][0]
            self._per_address[address] -= 1
            if not self._per_address[address]:
                del self._per_address[address]

    def remove(self, key: object) -> None:
        """Remove a connection that is closed."""
        self.mark_serving(key)
        self._open.pop(key, None)

    def _close_connection(self, key: object) -> None:
        close = self._open[key][1]
        self.remove(key)
        close()

    def __len__(self) -> int:
        return len(self._open)


def _is_local_address(address: str) -> bool:
    """Return True for an address of this machine, and for a socket of the file system."""
    try:
        return ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a socket of the file system
        return True


class ConnectionWatch:
    """Watches one connection with a timer, and records whether it waits."""

    def __init__(self, table: ConnectionTable, transport: asyncio.Transport) -> None:
        self._table, self._transport = table, transport
        self._timer: asyncio.TimerHandle | None = None
        self._is_known = False
        peer = transport.get_extra_info("peername")
        self._start_abort_timer(table.limits.header_seconds)
        table.add(self, str(peer[0]) if peer else "", transport.abort)

    def _start_abort_timer(self, seconds: float) -> None:
        """Abort the connection after *seconds*, unless the timer is stopped; an earlier timer is replaced."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def _stop_timer(self) -> None:
        """Cancel the timer, if there is one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        """Stop the timer, and remove the connection from the table."""
        self._stop_timer()
        self._table.remove(self)

    def _mark_request_complete(self) -> None:
        """Stop the timer, and record that the connection has a complete request."""
        self._stop_timer()
        self._table.mark_serving(self)

    async def run_app(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for a request, with time limits for its body and for reads; reject a request with two body lengths."""
        names = {name for name, _ in scope["headers"]}
        if names >= LENGTHS:
            await _reject_request(send)
            self._start_abort_timer(self._table.limits.header_seconds)
            return
        if names & LENGTHS:
            self._start_abort_timer(self._table.limits.body_seconds)
        else:
            self._mark_request_complete()
        try:
            await app(
                {**scope, VERIFIED: self._record_verified_token},
                self._wrap_receive(receive),
                self._wrap_send_with_timeout(send),
            )
        finally:
            if not self._transport.is_closing():
                self._start_abort_timer(self._table.limits.header_seconds)
                (self._table.mark_idle if self._is_known else self._table.mark_waiting)(self)

    def _wrap_receive(self, receive: Receive) -> Receive:
        """Return *receive* that also records when the body is complete."""

        async def receive_and_watch() -> Message:
            """Return the next message of the request, and record the end of its body."""
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):
                self._mark_request_complete()
            return message

        return receive_and_watch

    def _record_verified_token(self) -> None:
        """Record that a request of the connection had a verified token, so that it is idle afterwards."""
        self._is_known = True

    def _wrap_send_with_timeout(self, send: Send) -> Send:
        """Return *send* with a time limit, which closes the connection of a client that does not read."""

        async def send_timed(message: Message) -> None:
            """Send a message; abort the connection if the client does not read it in time."""
            # Data for a client that does not read keeps its run in memory.
            timer = asyncio.get_running_loop().call_later(self._table.limits.read_seconds, self._transport.abort)
            try:
                await send(message)
            finally:
                timer.cancel()
            if self._transport.is_closing():
                # Sending to a closed connection does not wait: an application that only sends would block all others.
                await asyncio.sleep(0)

        return send_timed


def report_verified_token(scope: Scope) -> None:
    """Report that the token of a request was verified, to the watch of its connection if there is one."""
    # Not by the status of the answer: a request can be answered before its token is checked.
    note = scope.get(VERIFIED)
    if note is not None:
        note()


async def _reject_request(send: Send) -> None:
    """Send an error for a request with two lengths, which a proxy could read as two requests."""
    body = b"a request has Content-Length or Transfer-Encoding, not both\n"
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def make_limited_protocol(table: ConnectionTable, base: Any) -> type[asyncio.Protocol]:
    """Return a subclass of uvicorn's ``H11Protocol`` *base* with the limits of *table*, for ``uvicorn.Config(http=...)``."""

    class LimitedProtocol(base):  # type: ignore[misc]  # this layer does not import uvicorn
        app: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._watch: ConnectionWatch | None = None
            inner = self.app

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                assert self._watch is not None  # noqa: S101 - no request without a connection
                await self._watch.run_app(inner, scope, receive, send)

            self.app = app

        def connection_made(self, transport: asyncio.Transport) -> None:
            """Start to watch the connection."""
            super().connection_made(transport)
            self._watch = ConnectionWatch(table, transport)

        def connection_lost(self, exc: Exception | None) -> None:
            """Stop to watch the connection."""
            if self._watch is not None:
                self._watch.stop()
            super().connection_lost(exc)

    return LimitedProtocol


def uvicorn_connection_options(base: Any) -> dict[str, Any]:
    """Return options of ``uvicorn.Config`` that limit connections to the capacity of this process; *base* is ``H11Protocol``."""
    limits = compute_connection_limits()
    return {
        "http": make_limited_protocol(ConnectionTable(limits), base),
        "ws": "none",
        "backlog": limits.backlog,
        "h11_max_incomplete_event_size": MAX_HEADERS_BYTES,
    }


class OncePerSecond(logging.Filter):
    """A log filter that passes each message at most once a second, so that connection attempts cannot fill a disk."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[object, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        now, key = time.monotonic(), (record.name, str(record.msg)[:100])
        if now < self._next.get(key, 0.0):
            return False
        if len(self._next) > 100:  # noqa: PLR2004 - the most kinds of messages that are distinguished
            self._next.clear()
        self._next[key] = now + 1.0
        return True


@contextmanager
def limit_connection_logs() -> Iterator[None]:
    """Within the block, log each message about connections at most once a second."""
    only_once = OncePerSecond()
    for name in LOGS:
        logging.getLogger(name).addFilter(only_once)
    try:
        yield
    finally:
        for name in LOGS:
            logging.getLogger(name).removeFilter(only_once)
