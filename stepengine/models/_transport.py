"""
What a server sends, unpacked and held to sizes before anybody reads it, whatever the status.

The HTTP library unpacks each piece of a body whole, several times over when the server says so, and the SDKs read the
whole body of a refusal. Here only one packing is known, the one that is asked for, and it is undone a little at a time.
Import this at the first request: it loads the HTTP library.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import zlib
from collections.abc import AsyncIterator
from functools import cache

import httpx2

from stepengine.models._failures import HTTP_REDIRECT

MAX_REFUSAL = 256 * 1024
"""Bytes, unpacked, that are read of a reply with an error status; its beginning says what is wrong."""

# How much is unpacked at a time. A packed kilobyte may hold a megabyte, so a bound on what comes in is none on what it
# becomes.
PIECE = 256 * 1024


def get_ssl_context() -> ssl.SSLContext:
    """Return how certificates are checked: as the HTTP library does it by itself, but for all clients of the process once."""
    return _create_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _create_ssl_context(_file: str | None, _folder: str | None) -> ssl.SSLContext:
    """Read the certificates, 20 ms, anew only where the variables that the library looks at have changed."""
    return httpx2.create_ssl_context()


async def unpack_response(response: httpx2.Response) -> None:
    """Let *response* give its body unpacked and in pieces, as a hook of the client before anything is read."""
    # The header is taken away and the body unpacked here, though the HTTP library could: an SDK reads the body of an
    # error by itself, to its end, and what it reads must have a limit (reliability:MP27). That limit is one of unpacked
    # bytes, so it has to stand above the unpacking and below the SDK, and between the library's own unpacking and the
    # SDK there is no place.
    packing = response.headers.pop("content-encoding", "identity").strip().lower()
    # Of a refusal only its words are wanted, and these stand at the beginning.
    limit = MAX_REFUSAL if response.status_code >= HTTP_REDIRECT else None
    if packing != "identity":
        response.headers.pop("content-length", None)
    response.stream = _UnpackedBody(response.stream, packing, limit)


class _UnpackedBody(httpx2.AsyncByteStream):
    """The body *stream*, unpacked; at most *limit* bytes of it, then it ends."""

    def __init__(self, stream: httpx2.SyncByteStream | httpx2.AsyncByteStream, packing: str, limit: int | None) -> None:
        self._stream = stream
        self._packing = packing
        self._left = limit

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packing == "identity" and self._left is None and isinstance(self._stream, httpx2.AsyncByteStream):
            return aiter(self._stream)  # as it is: a generator around it would cost every token of a stream
        return self._unpack() if self._left is None else self._cut(self._left)

    async def _cut(self, left: int) -> AsyncIterator[bytes]:
        async for piece in self._unpack():
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return

    async def aclose(self) -> None:
        if isinstance(self._stream, httpx2.AsyncByteStream):
            await self._stream.aclose()

    async def _unpack(self) -> AsyncIterator[bytes]:
        if not isinstance(self._stream, httpx2.AsyncByteStream):
            msg = "a body for asynchronous clients was expected"
            raise httpx2.StreamError(msg)
        if self._packing == "identity":
            async for piece in self._stream:
                yield piece
            return
        if self._packing not in ("gzip", "x-gzip"):
            msg = "the body is packed in a way that was not asked for; 'gzip' or nothing was"
            raise httpx2.DecodingError(msg)
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        async for packed in self._stream:
            rest = packed
            while rest and not unpacker.eof:
                try:
                    # Bounded pieces, and each is handed on before the next is made: whoever reads counts bytes and
                    # stops at its cap. The rest stays packed in `unconsumed_tail`.
                    piece = unpacker.decompress(rest, PIECE)
                except zlib.error as error:
                    msg = f"the body is not gzip: {error}"
                    raise httpx2.DecodingError(msg) from error
                rest = unpacker.unconsumed_tail
                yield piece
                # A bomb that is cut at its cap has still unpacked many megabytes; other runs get their turn in between,
                # and so does whoever cancels.
                await asyncio.sleep(0)
