"""Reads the body of an answer within caps: decoded bytes, ratio of compression, size of the headers (reliability NW10, WP4)."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import attrs

from stepengine.errors import ToolError

if TYPE_CHECKING:
    import httpx2

__all__ = ("Body", "check_headers", "read_body")

MIB = 1024 * 1024
WEB_BYTES = 2_000_000
WEB_HEADER_BYTES = 64 * 1024
WEB_RATIO = 100

GZIP_OR_ZLIB = 47
PIECE = 4_096
CODINGS = frozenset({"gzip", "x-gzip", "deflate"})


@attrs.frozen
class Body:
    """
    What an answer holds.

    Attributes:
        data: The decoded bytes.
        truncated: Whether there was more.
    """

    data: bytes
    truncated: bool = False


def check_headers(response: httpx2.Response, where: str) -> None:
    """
    Refuse an answer whose headers are larger than 64 KiB.

    Raises:
        ToolError: with their size.
    """
    size = sum(len(name) + len(value) + 4 for name, value in response.headers.raw)
    if size > WEB_HEADER_BYTES:
        msg = f"{where} answered with {size:,} bytes of headers; at most {WEB_HEADER_BYTES:,} are read"
        raise ToolError(msg)


async def read_body(response: httpx2.Response, where: str, limit: int = WEB_BYTES) -> Body:
    """
    Return the decoded body, at most *limit* bytes of it, from as many bytes that were sent; the rest is never read.

    Raises:
        ToolError: for a coding that was not asked for, several codings, broken data, and data that grows more than a
            hundredfold.
    """
    codings = [c.strip().lower() for c in response.headers.get("content-encoding", "").split(",") if c.strip()]
    codings = [c for c in codings if c != "identity"]
    if len(codings) > 1 or not CODINGS.issuperset(codings):
        msg = f"{where} answered in the content encoding {', '.join(codings)!r}; only one layer of gzip is read"
        raise ToolError(msg)
    inflate = _Inflate(where, limit) if codings else None
    made, came = bytearray(), 0
    async for chunk in response.aiter_raw():
        made += chunk if inflate is None else inflate.feed(chunk)
        came += len(chunk)
        if max(len(made), came) > limit:  # what follows the end of compressed data makes nothing, but does not end
            return Body(bytes(made[:limit]), truncated=True)
    return Body(bytes(made))


class _Inflate:
    """One layer of decompression, never more at a time than what may still be kept."""

    def __init__(self, where: str, limit: int) -> None:
        self._where = where
        self._limit = limit
        self._inflater = zlib.decompressobj(GZIP_OR_ZLIB)
        self._read = 0
        self._made = 0

    def feed(self, chunk: bytes) -> bytes:
        """Return what a chunk unpacks to; in small pieces, so that what grows is seen while it grows."""
        pieces = (chunk[start : start + PIECE] for start in range(0, len(chunk), PIECE))
        return b"".join([self._unpacked(piece) for piece in pieces])

    def _unpacked(self, chunk: bytes) -> bytes:
        if self._inflater.eof or self._made > self._limit:
            return b""
        self._read += len(chunk)
        try:
            data = self._inflater.decompress(chunk, max(1, self._limit + 1 - self._made))
        except zlib.error as error:
            msg = f"{self._where} answered with broken compressed data: {error}"
            raise ToolError(msg) from None
        self._made += len(data)
        if self._made > MIB and self._made > WEB_RATIO * self._read:
            msg = f"{self._where} answered with {self._read:,} bytes that unpack to more than {self._made:,}; that is refused"
            raise ToolError(msg)
        return data
