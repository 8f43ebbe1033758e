"""
Decompress response bodies in bounded pieces, and limit the size of error bodies.

The HTTP library decompresses each piece of a body at once, also with several encodings, and the SDKs read the whole body of
an error. Here only the requested encoding, gzip, is supported, and it is decompressed in small pieces. Import this module at
the first request, because it loads the HTTP library.
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
"""The most decompressed bytes of a reply with an error status; the start of it has the message."""

# The size of decompressed pieces. A compressed kilobyte may hold a megabyte, so the input size is no limit.
PIECE = 256 * 1024


def get_ssl_context() -> ssl.SSLContext:
    """Return the HTTP library's default SSL context, shared by all clients of the process."""
    return _create_ssl_context(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _create_ssl_context(_cert_file: str | None, _cert_folder: str | None) -> ssl.SSLContext:
    """Load the certificates into a new SSL context, which takes 20 ms; cached by the arguments, which are read from the environment."""
    return httpx2.create_ssl_context()


async def decompress_and_limit_response(response: httpx2.Response) -> None:
    """Replace the stream of *response* by its decompressed body, limited to 256 KiB for an error status; a response hook."""
    # The SDKs read the body of an error to its end, so it needs a limit of decompressed bytes (reliability:MP27). The
    # HTTP library has no place for it, so the header is removed and the body is decompressed here.
    packing = response.headers.pop("content-encoding", "identity").strip().lower()
    # Of an error only the message at its start is needed.
    limit = MAX_REFUSAL if response.status_code >= HTTP_REDIRECT else None
    if packing != "identity":
        response.headers.pop("content-length", None)
    response.stream = _UnpackedBody(response.stream, packing, limit)


class _UnpackedBody(httpx2.AsyncByteStream):
    """The decompressed body of *stream*, which ends after *limit* bytes if that is set."""

    def __init__(self, stream: httpx2.SyncByteStream | httpx2.AsyncByteStream, packing: str, limit: int | None) -> None:
        self._stream = stream
        self._packing = packing
        self._left = limit

    def __aiter__(self) -> AsyncIterator[bytes]:
        if self._packing == "identity" and self._left is None and isinstance(self._stream, httpx2.AsyncByteStream):
            return aiter(self._stream)  # directly, because a generator around it would slow every token
        return self._iterate_decompressed() if self._left is None else self._iterate_limited(self._left)

    async def _iterate_limited(self, left: int) -> AsyncIterator[bytes]:
        """Yield decompressed pieces of at most *left* bytes in all."""
        async for piece in self._iterate_decompressed():
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return

    async def aclose(self) -> None:
        """Close the stream of the compressed body."""
        if isinstance(self._stream, httpx2.AsyncByteStream):
            await self._stream.aclose()

    async def _iterate_decompressed(self) -> AsyncIterator[bytes]:
        """Yield the body in decompressed pieces of bounded size; raise ``DecodingError`` for an encoding other than gzip."""
        if not isinstance(self._stream, httpx2.AsyncByteStream):
            msg = "a body for asynchronous clients was expected"
            raise httpx2.StreamError(msg)
        if self._packing == "identity":
            async for piece in self._stream:
                yield piece
            return
        if self._packing not in ("gzip", "x-gzip"):
            msg = f"the body has the unsupported encoding {self._packing!r}; only 'gzip' was requested"
            raise httpx2.DecodingError(msg)
        unpacker = zlib.decompressobj(16 + zlib.MAX_WBITS)
        async for packed in self._stream:
            rest = packed
            while rest and not unpacker.eof:
                try:
                    # Bounded pieces, each yielded before the next, so that the reader can stop at its limit. The rest
                    # stays compressed in `unconsumed_tail`.
                    piece = unpacker.decompress(rest, PIECE)
                except zlib.error as error:
                    msg = f"the body is not gzip: {error}"
                    raise httpx2.DecodingError(msg) from error
                rest = unpacker.unconsumed_tail
                yield piece
                # Up to its limit a compression bomb has many megabytes. Other tasks and cancellations get their turn.
                await asyncio.sleep(0)
