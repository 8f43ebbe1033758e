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

        Events of a run of this process come from its handle. Events from before this process resumed the run, and those of other runs,
        come from the journal, with whole texts and no pieces.

        Args:
            row: The run.
            after: The id of the last event that the client received, from any server.

        Raises:
            LimitExceeded: If the run already has 100 readers.
            StepEngineError: If *after* is not the id of an event.
        """
        position, handle = ReaderPosition.parse(after), self._live.find_newest_handle(row)
        if handle is None:
            return self._shared.get_or_create_followed_events(row.run).events(
                position, wait_for_new=row.status in RUNNING
            )
        is_of_handle = position.place is not None and position.place.epoch == handle.epoch
        after = position.last_event_id if is_of_handle else None
        if (is_of_handle and not (position.is_mixed and position.marks)) or (
            position.place is None and not self._live.was_resumed_here(row.run)
        ):
            return handle.events(after=after)
        following = self._shared.get_or_create_followed_events(row.run)
        if row.run in self._live:
            return stream_recorded_then_live_events(handle.events(after=after), following, position)
        return following.events(position, wait_for_new=False)

    async def may_have_no_more_events(self, row: RunRow, after: str | None) -> bool:
        """Return True if no process executes the run, so that no event may follow; *after* is not used."""
        return row.run not in self._live and (
            row.status not in RUNNING or self._live.find_newest_handle(row) is not None
        )

    def parse_position(self, after: str | None) -> ReaderPosition:
        """
        Return the position of a client that reconnects with the id *after*.

        Raises:
            StepEngineError: If *after* is not the id of an event.
        """
        return ReaderPosition.parse(after)

    def stop_following_idle_runs(self) -> None:
        """Stop following the journals that no client has read for a while."""
        self._shared.stop_following_idle_runs()

    def close(self) -> None:
        """Stop reading all journals. This does not end streams: they end when ``ServiceState.stopping`` is set."""
        self._shared.close()
