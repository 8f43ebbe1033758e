"""
Send the requests of aiohttp by ``Exchanges``: google-genai's async client uses aiohttp where it is installed.

A client middleware sees each request as it is sent, redirects included. Sessions are given theirs when they are made, so the methods of
``ClientSession`` are replaced by ones that add it to a request. A recorded reply comes over a connection that plays it, so that aiohttp
reads it with its own code; of a live one, the bytes are recorded as they arrive.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from stepengine.errors import DataError
from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.exchanges import PASSING, Exchange, Exchanges, bypass_patches, header_pairs_from_bytes
from stepengine.testing.patching.wire import decode_chunks, has_body, is_chunked, make_reply_pieces
from stepengine.testing.recorded_errors import wait_for_cancellation

__tracebackhide__ = True  # a failed test ends at its author's line

METHODS = ("request", "get", "options", "head", "post", "put", "patch", "delete")
UPGRADED = 101
INFORMATIONAL = range(100, 200)
DROPPED = "Connection closed"
"""The text of the error that aiohttp sets on a reply when the program drops it: the program met no error."""


@attrs.define(eq=False)
class _Traffic:
    """
    What passes over the connection of one request.

    Attributes:
        played: The interaction that is played; None for a live request.
        arrived: The bytes of the live reply.
        ended: Whether the connection was given back or closed.
        at_end: Called then.
    """

    played: Interaction | None = None
    arrived: list[bytes] = attrs.field(factory=list)
    ended: bool = False
    at_end: Callable[[], object] = lambda: None

    def end(self) -> None:
        """Store that nothing more arrives, and call ``at_end``."""
        self.ended = True
        self.at_end()


TRAFFIC: ContextVar[_Traffic | None] = ContextVar("TRAFFIC", default=None)


def patch_library(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """
    Replace the request methods of aiohttp sessions, and return a function that restores them.

    Raises:
        DataError: if this aiohttp has no client middlewares.
    """
    if not hasattr(module, "ClientMiddlewareType"):
        msg = f"aiohttp {module.__version__} cannot be recorded or replayed; run: pip install 'aiohttp>=3.12'"
        raise DataError(msg)
    middleware = _make_middleware(exchanges)
    originals = {name: getattr(module.ClientSession, name) for name in METHODS}
    request = module.request
    restore_connections = _patch_connections(module)

    def add_middleware(send: Any) -> Any:
        """Return a request method that adds the middleware to each request."""

        @wraps(send)
        def send_recorded(session: Any, *args: Any, **kwargs: Any) -> Any:
            given = kwargs.pop("middlewares", None)
            # There is no public way to those of a session, and a request's own replace them.
            before = getattr(session, "_middlewares", ()) if given is None else given
            return send(session, *args, middlewares=(*before, middleware), **kwargs)

        return send_recorded

    @wraps(request)
    def request_with_middleware(*args: Any, **kwargs: Any) -> Any:
        return request(*args, middlewares=(*kwargs.pop("middlewares", ()), middleware), **kwargs)

    for name, send in originals.items():
        setattr(module.ClientSession, name, add_middleware(send))
    module.request = request_with_middleware

    def restore() -> None:
        """Restore the replaced functions."""
        for name, send in originals.items():
            setattr(module.ClientSession, name, send)
        module.request = request
        restore_connections()

    return restore


def _make_middleware(exchanges: Exchanges) -> Any:
    """Return a client middleware that answers a request from a recording, or sends and records it."""

    async def replay_or_record(request: Any, send: Any) -> Any:
        """Return the recorded reply; without one, send the request and record the reply or the error."""
        if PASSING.get():
            return await send(request)
        recorded = await _read_request(request)
        found = exchanges.find_interaction(recorded)
        if found is not None and not found.response.status:
            await wait_for_cancellation(found.error)
            raise _make_recorded_error(found, request)
        exchange = exchanges.start_recording(recorded) if found is None else None
        traffic = _Traffic(found)
        token = TRAFFIC.set(traffic)
        try:
            with bypass_patches(exchange):
                response = await send(request)
        finally:
            TRAFFIC.reset(token)
        if exchange is not None:
            _record_response(response, exchange, traffic)
        if found is not None and (error := found.error) is not None:
            traffic.at_end = lambda: response.content.set_exception(error)
            if traffic.ended:
                traffic.at_end()
        return response

    return replay_or_record


def _make_recorded_error(interaction: Interaction, request: Any) -> Exception:
    """Return the error recorded in place of a reply; a connector error gets the connection key of *request*."""
    error = interaction.error or ConnectionError("the request got no reply")
    if not hasattr(error, "os_error"):
        return error
    return type(error)(request.connection_key, error.os_error)


async def _read_request(request: Any) -> RecordedRequest:
    """Return *request* of aiohttp with its whole body."""
    body = request.body
    data = await body.as_bytes() if hasattr(body, "as_bytes") else bytes(body or b"")
    return RecordedRequest(request.method, str(request.url), [*request.headers.items()], data)


def _record_response(response: Any, exchange: Exchange, traffic: _Traffic) -> None:
    """Record a live reply while it is read, including bytes that have arrived before."""
    headers = header_pairs_from_bytes(response.raw_headers)
    if response.status == UPGRADED:
        exchange.finish_with_error(ConnectionError("the connection was upgraded to a websocket"))
        return
    reason = (response.reason or "").encode(errors="surrogateescape").decode("latin-1")
    if not exchange.start_reply(response.status, reason, headers):
        return
    exchange.pieces = traffic.arrived

    def decode_arrived_body(arrived: bytes) -> tuple[bytes, bool]:
        """Return the body in the bytes that have arrived, and whether it is complete."""
        body = _strip_reply_heads(arrived)
        return decode_chunks(body) if is_chunked(headers) else (body, response.content.is_eof())

    exchange.unframe = decode_arrived_body

    def finish_exchange() -> None:
        """Store the exchange with the end of the reply or its error."""
        # What a time limit raises is not the stream's, and passes by where the response is closed.
        met = sys.exc_info()[1]
        error = met if isinstance(met, TimeoutError) else response.content.exception()
        if str(error) == DROPPED:
            error = None
        exchange.finish(read_to_end=response.content.is_eof(), error=error)

    traffic.at_end = finish_exchange
    if traffic.ended:
        traffic.at_end()


def _strip_reply_heads(arrived: bytes) -> bytes:
    """Return the body of a reply, without its head and the heads of informational replies."""
    at = 0
    while True:
        end = arrived.find(b"\r\n\r\n", at)
        if end < 0:
            return b""
        status = arrived[at:end].split(b" ", 2)[1:2]
        at = end + 4
        if not status or int(status[0]) not in INFORMATIONAL:
            return arrived[at:]


def _patch_connections(module: Any) -> Callable[[], None]:
    """Replace how connectors connect and how connections receive bytes, and return a function that restores both."""
    handler = import_module("aiohttp.client_proto").ResponseHandler
    connection_class = import_module("aiohttp.connector").Connection
    connect, data_received = module.BaseConnector.connect, handler.data_received
    watched: WeakKeyDictionary[Any, _Traffic] = WeakKeyDictionary()

    async def connect_live_or_played(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a connection that plays the recorded reply, else a live one."""
        traffic = TRAFFIC.get()
        if traffic is not None and traffic.played is not None:
            loop = asyncio.get_running_loop()
            protocol = handler(loop)
            _PlayedTransport(protocol, traffic.played, traffic)
            return connection_class(self, request.connection_key, protocol, loop)
        connection = await connect(self, request, *args, **kwargs)
        if traffic is not None:
            watched[connection.protocol] = traffic
            connection.add_callback(traffic.end)
        return connection

    def record_and_receive(self: Any, data: bytes) -> None:
        """Record received bytes of a watched connection, and pass them on."""
        if (traffic := watched.get(self)) is not None and not traffic.ended:
            traffic.arrived.append(data)
        data_received(self, data)

    module.BaseConnector.connect, handler.data_received = connect_live_or_played, record_and_receive

    def restore() -> None:
        """Restore the replaced methods."""
        module.BaseConnector.connect, handler.data_received = connect, data_received

    return restore


class _PlayedTransport(asyncio.Transport):
    """A transport that sends nothing and passes the bytes of a recorded reply to *protocol* until it pauses reading."""

    def __init__(self, protocol: Any, found: Interaction, traffic: _Traffic) -> None:
        super().__init__()
        method, reply, whole = found.request.method, found.response, found.is_complete and found.error is None
        self._protocol = protocol
        self._traffic = traffic
        self._pieces = deque(make_reply_pieces(found, method))
        self._closes = not whole or not (
            is_chunked(reply.headers) or reply.get_header("content-length") or not has_body(reply, method)
        )
        self._paused = False
        self._loop = asyncio.get_running_loop()
        protocol.connection_made(self)
        protocol.force_close()  # or a live request would be sent over it
        self._loop.call_soon(self._deliver_pieces)

    def _deliver_pieces(self) -> None:
        """Pass the remaining pieces to the protocol unless it has paused; close the connection behind the last if it was closed."""
        while self._pieces and not self._paused:
            self._protocol.data_received(self._pieces.popleft())
        if self._closes and not self._pieces and not self._paused:
            self._closes = False
            self._traffic.end()
            self._protocol.connection_lost(None)

    def pause_reading(self) -> None:
        """Pass no bytes to the protocol until ``resume_reading``."""
        self._paused = True

    def resume_reading(self) -> None:
        """Pass the remaining bytes to the protocol."""
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._deliver_pieces)

    def write(self, data: object) -> None:
        """Do nothing: the request is known."""

    def writelines(self, list_of_data: object) -> None:
        """Do nothing: the request is known."""

    def is_closing(self) -> bool:
        """Return False: there is nothing to close."""
        return False

    def close(self) -> None:
        """Pass no more bytes to the protocol."""
        self._pieces.clear()
        self._closes = False

    def abort(self) -> None:
        """Pass no more bytes to the protocol."""
        self.close()
