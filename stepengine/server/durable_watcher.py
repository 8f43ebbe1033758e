"""``DurableWatcher``: the event streams of runs in a database."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from stepengine.errors import LimitExceeded

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.durable.shared_events import SharedEvents
    from stepengine.server.durable_launcher import DurableLauncher
    from stepengine.server.durable_store import DurableStore
    from stepengine.server.ledger import RunRow

IDLE_SECONDS = 15.0
"""Seconds that the events of a run are still followed after its last client, which may reconnect."""
MAX_READERS = 100
"""The most clients that may watch one run, as for runs on a disk."""


class DurableWatcher:
    """
    The event streams of runs, read once from the database for all clients of a run.

    Args:
        store: The database.
        launcher: Submits a run that a dead server had registered, before it is watched.
        suspended_wait_seconds: Seconds that an event stream stays open while its run is suspended.
    """

    def __init__(self, store: DurableStore, launcher: DurableLauncher, suspended_wait_seconds: float) -> None:
        self._store = store
        self._launcher = launcher
        self._suspended_wait_seconds = suspended_wait_seconds
        self._followed: dict[tuple[str, int], SharedEvents] = {}
        self._readers: Counter[tuple[str, int]] = Counter()
        self._left_at: dict[tuple[str, int], float] = {}

    def _get_or_create_shared_events(self, row: RunRow) -> SharedEvents:
        """Return the event stream that all clients of a run share; create it for the first client."""
        key = row.run, row.tries
        known = self._followed.get(key)
        if known is None:
            known = self._followed[key] = self._store.engine.shared_events(row.run, tries=row.tries)
            self._left_at[key] = time.monotonic()
        return known

    async def may_have_no_more_events(self, row: RunRow, after: str | None) -> bool:
        """
        Return True if a run has ended or is suspended, so that no event may follow *after*; validate *after* and count clients.

        Raises:
            ReplayDivergence: If this server does not have the agents of the run.
            LimitExceeded: If too many clients watch the run.
            StepEngineError: If *after* is not the id of an event of this run.
        """
        await self._launcher.submit_if_unsubmitted(row)
        if self._readers[row.run, row.tries] >= MAX_READERS:
            msg = f"{MAX_READERS} clients already watch this run; try again in a moment"
            raise LimitExceeded(msg, kind="readers", limit=MAX_READERS)
        shared = self._get_or_create_shared_events(row)
        await shared.wait_for_index_after(after)
        if shared.is_suspended:
            # It may have been answered since, and a client that is told that nothing follows does not ask again.
            await shared.refresh()
        return shared.is_over or shared.is_suspended

    def parse_position(self, after: str | None) -> None:
        """Return ``None``: at every server, the id of an event alone is the position of a client."""

    async def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """
        Yield the events of a run from the first one, or after *after*, with the same ids at every server.

        The events come from the record, with whole texts and no pieces. The stream of a suspended run stays open for a while.
        """
        key = row.run, row.tries
        self._readers[key] += 1
        try:
            shared = self._get_or_create_shared_events(row)
            async with contextlib.aclosing(
                shared.read(await shared.wait_for_index_after(after), patience=self._suspended_wait_seconds)
            ) as events:
                async for event in events:
                    yield event
        finally:
            self._readers[key] -= 1
            self._left_at[key] = time.monotonic()

    async def stop_following_idle_runs(self) -> None:
        """Stop following the runs that no client has watched for a while."""
        for key in list(self._followed):
            if self._readers[key] <= 0 and time.monotonic() - self._left_at[key] > IDLE_SECONDS:
                del self._readers[key], self._left_at[key]
                await self._followed.pop(key).close()

    async def close(self) -> None:
        """End all streams."""
        for key in list(self._followed):
            await self._followed.pop(key).close()
