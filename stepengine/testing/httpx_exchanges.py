"""
Requests, replies and streams of httpx2 and httpx, which use the same names.

Both are modules with the same classes, but an object of one is none of the other. ``HttpxExchanges(module)`` reads and makes objects of
one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

from stepengine.testing.cassette_files import Headers, Interaction, RecordedRequest, RecordedResponse, is_event_stream
from stepengine.testing.exchanges import Exchange, header_pairs_from_bytes
from stepengine.testing.recorded_errors import wait_for_cancellation

__tracebackhide__ = True  # a failed test ends at its author's line

EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n|\r\r|\Z)", re.DOTALL)


class HttpxExchanges:
    """
    Converts requests and responses of one httpx module.

    Args:
        module: ``httpx2`` or ``httpx``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        bases = (module.SyncByteStream, module.AsyncByteStream)
        self._played: Any = type("Played", (PlayedBody, *bases), {})
        self._watched: Any = type("Watched", (WatchedBody, *bases), {})

    def convert_request(self, request: Any) -> RecordedRequest:
        """Return an httpx request, whose body has been read, as a ``RecordedRequest``."""
        return RecordedRequest(
            request.method, str(request.url), header_pairs_from_bytes(request.headers.raw), request.content
        )

    def make_response(
        self, reply: RecordedResponse, request: Any, pieces: list[bytes], error: Exception | None = None
    ) -> Any:
        """Return a response that plays *reply* in *pieces*; *error* is raised after the last."""
        reason = {"reason_phrase": reply.reason.encode("latin-1", errors="replace")} if reply.reason else {}
        return self._module.Response(
            reply.status,
            headers=header_pairs_to_bytes(reply.headers),
            stream=self._played(pieces, error),
            request=request,
            extensions={"http_version": b"HTTP/1.1", **reason},
        )

    def record_while_read(self, response: Any, exchange: Exchange | None) -> Any:
        """Return *response* with a body that records itself while it is read; unchanged if it is not recorded."""
        headers = header_pairs_from_bytes(response.headers.raw)
        if exchange is None or not exchange.start_reply(response.status_code, response.reason_phrase, headers):
            return response
        return self._module.Response(
            response.status_code,
            headers=response.headers,
            stream=self._watched(response.stream, exchange),
            extensions=response.extensions,
        )


def header_pairs_to_bytes(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return header pairs as Latin-1 bytes."""
    return [
        (name.encode("latin-1", errors="replace"), value.encode("latin-1", errors="replace")) for name, value in headers
    ]


def split_body_into_events(reply: RecordedResponse) -> list[bytes]:
    """Return the body of a reply in pieces: one per event of a stream, else one."""
    if is_event_stream(reply):
        return [piece for piece in EVENT.findall(reply.body) if piece]
    return [reply.body] if reply.body else []


def make_cut_reply_error(module: Any, interaction: Interaction) -> Exception | None:
    """Return the error of *module* that ends a reply recorded without its end; None for a complete one."""
    if interaction.is_complete:
        return None
    return module.RemoteProtocolError("the recorded reply ends here, because the program read no further")  # type: ignore[no-any-return]


class PlayedBody:
    """A recorded body, replayed in pieces; *error* is raised after the last."""

    def __init__(self, pieces: list[bytes], error: Exception | None) -> None:
        self._pieces = pieces
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece
        await wait_for_cancellation(self._error)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Do nothing: no connection is open."""

    async def aclose(self) -> None:
        """Do nothing: no connection is open."""


@contextlib.contextmanager
def _finish_exchange_at_end(exchange: Exchange) -> Iterator[None]:
    """Store the end of a body behind the block, or the error that ends it."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        exchange.finish(read_to_end=False, error=error)
        raise
    exchange.finish(read_to_end=True)


class WatchedBody:
    """A live body that is recorded while it is read."""

    def __init__(self, stream: Any, exchange: Exchange) -> None:
        self._stream = stream
        self._exchange = exchange

    def __iter__(self) -> Iterator[bytes]:
        with _finish_exchange_at_end(self._exchange):
            for piece in self._stream:
                self._exchange.add_piece(piece)
                yield piece

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _finish_exchange_at_end(self._exchange):
            async for piece in self._stream:
                self._exchange.add_piece(piece)
                yield piece

    def close(self) -> None:
        """Close the live body."""
        self._exchange.finish(read_to_end=False)
        self._stream.close()

    async def aclose(self) -> None:
        """Close the live body."""
        self._exchange.finish(read_to_end=False)
        await self._stream.aclose()
