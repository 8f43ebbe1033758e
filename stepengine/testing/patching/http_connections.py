"""
Send the requests of ``http.client`` by ``Exchanges``: ``urllib.request``, urllib3, requests, boto3 and google-auth send by it.

A request is collected from the bytes that the client writes. A recorded reply comes from a socket that plays it, so that the client reads
it with its own code, as it would live.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import ssl
from collections.abc import Callable, Iterable, Iterator
from http import client
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from stepengine.testing.cassette_files import Interaction, RecordedRequest
from stepengine.testing.exchanges import PASSING, Exchange, Exchanges, bypass_patches
from stepengine.testing.patching.wire import (
    PlayedSocket,
    decode_chunks,
    is_chunked,
    is_complete_request,
    make_reply_pieces,
    parse_request_bytes,
)

__tracebackhide__ = True  # a failed test ends at its author's line

HTTPS_PORT = 443


def patch_library(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """Replace the methods of connections of *module* and of those based on them, and return a function that restores them."""
    with contextlib.ExitStack() as undo:
        for kind in _iterate_subclasses(client.HTTPConnection):
            connect = kind.__dict__.get("connect")
            if connect is not None and not hasattr(connect, "__wrapped__"):
                _replace_method(undo, kind, "connect", functools.partial(_connect_unless_postponed, connect))
        if module is client:
            ours = _Connections(exchanges)
            _replace_method(undo, client.HTTPConnection, "send", ours.send)
            _replace_method(undo, client.HTTPConnection, "getresponse", ours.getresponse)
            _replace_method(undo, client.HTTPConnection, "set_tunnel", ours.set_tunnel)
        return undo.pop_all().close


def _replace_method(undo: contextlib.ExitStack, kind: Any, name: str, replacement: Callable[..., Any]) -> None:
    before = kind.__dict__[name]

    @functools.wraps(before)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(self, *args, **kwargs)

    undo.callback(setattr, kind, name, before)
    setattr(kind, name, method)


@attrs.define
class _OutgoingRequest:
    """
    A request that a connection sends.

    Attributes:
        sent: Its bytes.
        error: What its live connection met.
        found: Its recorded reply.
        looked_up: Whether that was looked for.
    """

    sent: bytearray = attrs.field(factory=bytearray)
    error: Exception | None = None
    found: Interaction | None = None
    looked_up: bool = False


class _Connections:
    """
    What connections do instead of their own methods.

    Args:
        exchanges: What plays and records.
    """

    def __init__(self, exchanges: Exchanges) -> None:
        self._exchanges = exchanges
        base = client.HTTPConnection
        self._send, self._getresponse, self._set_tunnel = base.send, base.getresponse, base.set_tunnel
        self._outgoing: WeakKeyDictionary[Any, _OutgoingRequest] = WeakKeyDictionary()
        self._tunnels: WeakKeyDictionary[Any, tuple[str, int | None]] = WeakKeyDictionary()

    def set_tunnel(self, connection: Any, host: str, port: int | None = None, *args: Any, **kwargs: Any) -> None:
        """Store the host behind a proxy, and call the original method."""
        self._tunnels[connection] = (host, port)
        self._set_tunnel(connection, host, port, *args, **kwargs)

    def send(self, connection: Any, data: Any) -> None:
        """Collect bytes of a request, send them unless its reply may be known, and raise an error when all are there."""
        if PASSING.get():
            self._send(connection, data)
            return
        request = self._outgoing.setdefault(connection, _OutgoingRequest())
        for piece in _iterate_body_pieces(connection, data):
            request.sent += piece
            if not self._exchanges.has_known_replies:
                self._send_live_or_store_error(connection, request, piece)
        if self._exchanges.has_known_replies and connection.sock is None:
            connection.sock = PlayedSocket()
        if not is_complete_request(request.sent):
            return
        if self._exchanges.has_known_replies:
            self._find_reply_or_send(connection, request)
        if request.error is not None:
            self._record_and_raise_error(connection, request, request.error)

    def _send_live_or_store_error(self, connection: Any, request: _OutgoingRequest, piece: bytes) -> None:
        """Send *piece* over the live connection; the first error is stored in *request*, and nothing is sent behind it."""
        # An error is raised when the request is known as a whole. A server that does not read it all may reply nevertheless.
        if request.error is None:
            try:
                with bypass_patches(None):
                    self._send(connection, piece)
            except Exception as error:  # noqa: BLE001 - it is raised later
                request.error = error

    def _find_reply_or_send(self, connection: Any, request: _OutgoingRequest) -> None:
        """Set the recorded reply or error of *request*, or send the request if none is recorded."""
        request.looked_up = True
        asked = self._parse_sent_request(connection, request)
        try:
            request.found = self._exchanges.find_interaction(asked)
        except BaseException:
            self._outgoing.pop(connection, None)
            connection.close()
            raise
        if request.found is None:
            if isinstance(connection.sock, PlayedSocket):
                connection.sock = None
            self._send_live_or_store_error(connection, request, bytes(request.sent))
        elif request.found.has_failed_while_sending:
            request.error = request.found.error

    def _record_and_raise_error(self, connection: Any, request: _OutgoingRequest, error: Exception) -> None:
        """Raise *error* of a live or recorded connection; record a live one, unless urllib3 may still read a reply."""
        if request.found is not None or connection.sock is None or not hasattr(connection, "is_verified"):
            del self._outgoing[connection]
            if request.found is None and (
                exchange := self._exchanges.start_recording(self._parse_sent_request(connection, request))
            ):
                exchange.finish_with_error(error, while_sending=True)
        raise error

    def getresponse(self, connection: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the recorded reply to the request that was sent, or the live one, which is recorded."""
        request = None if PASSING.get() else self._outgoing.get(connection)
        if request is None:
            return self._getresponse(connection, *args, **kwargs)
        if self._exchanges.has_known_replies and not request.looked_up:
            self._find_reply_or_send(connection, request)
        del self._outgoing[connection]
        asked, found = self._parse_sent_request(connection, request), request.found
        if found is not None:
            live = None if isinstance(connection.sock, PlayedSocket) else connection.sock
            connection.sock = PlayedSocket(make_reply_pieces(found, asked.method), found.error)
            try:
                return self._getresponse(connection, *args, **kwargs)
            finally:
                connection.sock = live
        exchange = self._exchanges.start_recording(asked)
        with bypass_patches(exchange):
            response = self._getresponse(connection, *args, **kwargs)
        _record_response(response, exchange)
        return response

    def _parse_sent_request(self, connection: Any, request: _OutgoingRequest) -> RecordedRequest:
        """Return the bytes that a connection has sent as a request with its whole URL."""
        method, target, headers, body = parse_request_bytes(bytes(request.sent))
        return RecordedRequest(method, _make_url(connection, target, self._tunnels.get(connection)), headers, body)


def _connect_unless_postponed(live: Callable[[Any], None], connection: Any) -> None:
    """Connect inside ``bypass_patches``; otherwise only set ``is_verified``, because sending connects later."""
    if PASSING.get():
        live(connection)
    elif hasattr(connection, "is_verified"):
        connection.is_verified = getattr(connection, "cert_reqs", None) not in (ssl.CERT_NONE, "CERT_NONE")


def _iterate_subclasses(base: Any) -> Iterator[Any]:
    """Yield *base* and all its direct and indirect subclasses."""
    yield base
    for kind in base.__subclasses__():
        yield from _iterate_subclasses(kind)


def _iterate_body_pieces(connection: Any, data: Any) -> Iterable[bytes]:
    """Return the bytes that ``send`` would write for bytes, a file, or an iterable of bytes."""
    if not hasattr(data, "read"):
        try:
            return [bytes(memoryview(data))]
        except TypeError:
            return (bytes(memoryview(piece)) for piece in data)
    blocks = iter(lambda: data.read(connection.blocksize), None)
    return (
        block.encode("iso-8859-1") if isinstance(block, str) else block for block in itertools.takewhile(bool, blocks)
    )


def _make_url(connection: Any, target: str, tunnel: tuple[str, int | None] | None) -> str:
    """Return the URL of a request *target*: absolute through a proxy, else with the host of the tunnel or the connection."""
    if not target.startswith("/"):  # through a proxy
        return target
    host, port = tunnel or (connection.host, connection.port)
    scheme = "https" if connection.default_port == HTTPS_PORT else "http"
    host = f"[{host}]" if ":" in host.strip("[]") and not host.startswith("[") else host
    return f"{scheme}://{host}{'' if port in (None, connection.default_port) else f':{port}'}{target}"


def _record_response(response: Any, exchange: Exchange | None) -> None:
    """Record the body of a live response while it is read."""
    headers = response.getheaders()
    if exchange is None or not exchange.start_reply(response.status, response.reason, headers):
        return
    if response.fp is None or response.length == 0:
        exchange.finish(read_to_end=True)
        return
    if is_chunked(headers):
        exchange.unframe = decode_chunks
    response.fp = io.BufferedReader(_Watched(response.fp, exchange))


class _Watched(io.RawIOBase):
    """The file of a live response, which records the bytes that are read from it."""

    def __init__(self, live: Any, exchange: Exchange) -> None:
        self._live = live
        self._exchange = exchange

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read bytes of the live reply into *buffer* and record them, or the error; return their number."""
        try:
            piece = self._live.read1(len(buffer))
        except Exception as error:
            self._exchange.finish(read_to_end=False, error=error)
            raise
        self._exchange.add_piece(piece)
        if not piece:
            self._exchange.finish(read_to_end=True)
        buffer[: len(piece)] = piece
        return len(piece)

    def fileno(self) -> int:
        """Return the file descriptor of the live connection."""
        return int(self._live.fileno())

    def close(self) -> None:
        """Finish the recording, and close the live reply."""
        if not self.closed:
            self._exchange.finish(read_to_end=False)
            self._live.close()
        super().close()
