"""``RunWatcher``: the event streams of the runs of a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from stepengine.server.live_runs import RUNNING
from stepengine.server.watchers import ReaderPosition, SharedJournals, stream_recorded_then_live_events

if TYPE_CHECKING:
    from stepengine.data.events import Event
    from stepengine.server.ledger import RunRow
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_store import RunStore


class RunWatcher:
    """
    Streams the events of runs to clients.

    Args:
        store: The journals.
        live: The runs of this process.
    """

    def __init__(self, store: RunStore, live: LiveRuns) -> None:
        self._live = live
        self._shared = SharedJournals(store.journal)

    def events(self, row: RunRow, after: str | None) -> AsyncGenerator[Event, None]:
        """
        Return the events of a run from the first one, or after the event *after*.

        Events of a run of this process come from its handle. What it did before this process resumed it, and runs of other
        processes and those that ended long ago, come from the journal: whole texts, no pieces of them.

        Args:
            row: The run.
            after: The id of the last event that the client has, as ``sse`` gave it, from any stream and server.

        Raises:
            LimitExceeded: when the run has 100 readers already.
            StepEngineError: when *after* is not an id of an event.
        """
        had, handle = ReaderPosition.parse(after), self._live.find_newest_handle(row)
        if handle is None:
            return self._shared.get_or_create_followed_events(row.run).events(had, stay=row.status in RUNNING)
        is_its = had.place is not None and had.place.epoch == handle.epoch
        after = had.last_event_id if is_its else None
        if (is_its and not (had.is_mixed and had.marks)) or (
            had.place is None and not self._live.was_resumed_here(row.run)
        ):
            return handle.events(after=after)
        following = self._shared.get_or_create_followed_events(row.run)
        if row.run in self._live:
            return stream_recorded_then_live_events(handle.events(after=after), following, had)
        return following.events(had, stay=False)

    async def may_have_no_more_events(self, row: RunRow, after: str | None) -> bool:
        """Return whether a run may have no events after the event *after*, because no process executes it."""
        return row.run not in self._live and (
            row.status not in RUNNING or self._live.find_newest_handle(row) is not None
        )

    def parse_position(self, after: str | None) -> ReaderPosition:
        """
        Return the position of a client that reconnects with the id *after*.

        Raises:
            StepEngineError: when it is not an id of an event.
        """
        return ReaderPosition.parse(after)

    def stop_following_idle_runs(self) -> None:
        """Stop following the journals that no client has read for a while."""
        self._shared.stop_following_idle_runs()

    def close(self) -> None:
        """Stop following all journals. Streams end when ``ServiceState.stopping`` is set, not by this."""
        self._shared.close()
