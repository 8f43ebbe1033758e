"""The transport of a test that records: what the cassette knows is played, the rest goes to the network and is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx2

from stepengine.testing.cassette import Cassette, CassetteMiss
from stepengine.testing.transport import Chunks, RecordTransport, ReplayTransport

if TYPE_CHECKING:
    from stepengine.testing.recordings import TestCassette

__all__ = ("MixedTransport",)


class MixedTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """
    Plays *known*, and records into *fresh* what is not in it.

    Args:
        known: What is played.
        fresh: What is recorded into.
        inner: What reaches the network; httpx2's own transports by default.
        chunks: How a replayed stream is cut.
    """

    def __init__(self, known: TestCassette, fresh: Cassette, inner: Any = None, chunks: Chunks = "events") -> None:
        self._known = known
        self._replay = ReplayTransport(known, chunks)
        self._sync = RecordTransport(httpx2.HTTPTransport() if inner is None else inner, fresh)
        self._async = RecordTransport(httpx2.AsyncHTTPTransport() if inner is None else inner, fresh)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer a sync client."""
        try:
            return self._replay.handle_request(request)
        except CassetteMiss as miss:
            self._known.forget(miss)
        return self._sync.handle_request(request)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer an async client."""
        try:
            return await self._replay.handle_async_request(request)
        except CassetteMiss as miss:
            self._known.forget(miss)
        return await self._async.handle_async_request(request)

    def close(self) -> None:
        """Close the real transport."""
        self._sync.close()

    async def aclose(self) -> None:
        """Close the real transport."""
        await self._async.aclose()
