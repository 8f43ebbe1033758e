"""``PendingStarts``: registered starts of this process that have neither succeeded nor failed yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class PendingStarts:
    """
    Registered starts that are not finished.

    A start that fails removes its run again. A client that repeats the request meanwhile must not get the id of that run.
    """

    def __init__(self) -> None:
        self._ends: dict[str, asyncio.Event] = {}

    @contextmanager
    def track_start(self, run: str) -> Iterator[None]:
        """Mark the start of a run as pending within the block, and release the waiters at its end."""
        self._ends[run] = end = asyncio.Event()
        try:
            yield
        finally:
            del self._ends[run]
            end.set()

    async def wait_if_pending(self, run: str) -> bool:
        """Wait for the end of a run's pending start, and return True; return False at once without a pending start."""
        end = self._ends.get(run)
        if end is not None:
            await end.wait()
        return end is not None
