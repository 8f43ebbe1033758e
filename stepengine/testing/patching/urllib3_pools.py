"""Send the requests of urllib3 by ``Exchanges``: boto3, requests and google-auth send by its connection pools."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

from stepengine.testing.cassette_files import RecordedRequest, RecordedResponse
from stepengine.testing.exchanges import FRAMING, PASSING, Exchange, Exchanges, bypass_patches

__tracebackhide__ = True  # a failed test ends at its author's line

DEFAULT_PORTS = {"http": 80, "https": 443}
PIECE = 65_536


def install(module: Any, exchanges: Exchanges) -> Callable[[], None]:
    """Replace the request method of urllib3's connection pools, and return a function that restores it."""
    pool_class = module.HTTPConnectionPool
    send = pool_class.urlopen
    signature = inspect.signature(send)
    watched = _make_watched_class(module)

    def urlopen(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A retry or redirect of urllib3's own calls this method again; the request is recorded once, with its last reply.
        if PASSING.get():
            return send(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given["body"] = _read_body(given["body"])
        request = _read_request(self, given)
        reply = exchanges.find_reply(request)
        if reply is not None:
            return _make_response(module, reply, request, given)
        exchange = exchanges.start(request)
        wanted = given["preload_content"]
        given["preload_content"] = False
        with bypass_patches(exchange):
            response = send(*bound.args, **bound.kwargs)
        return watched.wrap_response(response, exchange, request, preload=wanted, decode=given["decode_content"])

    pool_class.urlopen = urlopen

    def restore() -> None:
        pool_class.urlopen = send

    return restore


def _read_body(body: Any) -> Any:
    """Return a body of any kind as bytes: a file or an iterator can be read once only."""
    if body is None or isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    pieces = [body.read()] if hasattr(body, "read") else list(body)
    return b"".join([piece.encode() if isinstance(piece, str) else piece for piece in pieces])


def _read_request(pool: Any, given: dict[str, Any]) -> RecordedRequest:
    headers = pool.headers if given["headers"] is None else given["headers"]
    return RecordedRequest(given["method"], _make_url(pool, given["url"]), _header_texts(headers), given["body"] or b"")


def _make_url(pool: Any, target: str) -> str:
    if not target.startswith("/"):  # through a proxy
        return target
    host = f"[{pool.host}]" if ":" in pool.host.strip("[]") and not pool.host.startswith("[") else pool.host
    port = "" if pool.port in (None, DEFAULT_PORTS.get(pool.scheme)) else f":{pool.port}"
    return f"{pool.scheme}://{host}{port}{target}"


def _header_texts(headers: Any) -> list[tuple[str, str]]:
    pairs = headers.items() if hasattr(headers, "items") else headers or ()
    return [(_decode_text(name), _decode_text(value)) for name, value in pairs]


def _decode_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _make_response(module: Any, reply: RecordedResponse, request: RecordedRequest, given: dict[str, Any]) -> Any:
    headers = module.HTTPHeaderDict()
    for name, value in reply.headers:
        if name not in FRAMING:
            headers.add(name, value)
    return module.HTTPResponse(
        body=io.BytesIO(reply.body),
        headers=headers,
        status=reply.status,
        reason=reply.reason or None,
        version=11,
        preload_content=given["preload_content"],
        decode_content=given["decode_content"],
        request_method=request.method,
        request_url=request.url,
    )


class _RecordedBody:
    """The body of a live response as a file object that records the bytes that are read."""

    def __init__(self, response: Any, exchange: Exchange) -> None:
        self._response = response
        self._exchange = exchange
        self.closed = False

    def read(self, amount: int | None = None) -> bytes:
        data: bytes = self._response.read(amount, decode_content=False)
        self._exchange.add(data)
        if amount is None or amount < 0 or (not data and amount):
            self._end(read_to_end=True)
        return data

    def pieces(self, amount: int) -> Iterator[bytes]:
        """Yield the pieces as they arrive; ``read`` waits for a full piece."""
        for piece in self._response.stream(amount, decode_content=False):
            self._exchange.add(piece)
            yield piece
        self._end(read_to_end=True)

    def close(self) -> None:
        self._end(read_to_end=False)
        self._response.close()

    def flush(self) -> None:
        """Do nothing: files have this."""

    def _end(self, *, read_to_end: bool) -> None:
        self.closed = True
        self._exchange.end(read_to_end=read_to_end)


def _make_watched_class(module: Any) -> Any:
    class Watched(module.HTTPResponse):  # type: ignore[misc]
        """A live response that is recorded while it is read."""

        recorded: _RecordedBody

        @classmethod
        def wrap_response(
            cls, live: Any, exchange: Exchange | None, request: RecordedRequest, *, preload: bool, decode: bool
        ) -> Any:
            """Return the response *live* in the form of its caller, recorded by *exchange*."""
            kept = exchange is not None and exchange.start_reply(
                live.status, live.reason or "", _header_texts(live.headers)
            )
            if exchange is None or not kept:
                if preload:
                    _ = live.data
                return live
            body = _RecordedBody(live, exchange)
            response = cls(
                body=body,
                headers=live.headers,
                status=live.status,
                version=live.version,
                reason=live.reason,
                preload_content=preload,
                decode_content=decode,
                retries=live.retries,
                enforce_content_length=False,
                request_method=request.method,
                request_url=request.url,
            )
            response.recorded = body
            return response

        def stream(self, amt: int | None = PIECE, decode_content: bool | None = None) -> Iterator[bytes]:  # noqa: FBT001
            """Give the body in pieces, those of a stream as they arrive."""
            if self.headers.get("content-encoding") and decode_content is not False:
                yield from super().stream(amt, decode_content)
                return
            yield from self.recorded.pieces(amt or PIECE)

        def release_conn(self) -> None:
            """Give the connection back to its pool."""
            if hasattr(self, "recorded") and not self.recorded.closed:
                self.recorded.close()

    return Watched
