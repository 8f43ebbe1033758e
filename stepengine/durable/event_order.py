"""
``EventOrder``: the order of a durable run's records, on which all processes agree.

Each process finds the ends of effects that ran at once in an order of its own. So the first process that sees a record stores its
position in the database, and all others show the record there.
"""

from __future__ import annotations

from collections import deque

from stepengine.durable.deployment import Deployment
from stepengine.journal.records import Input, Intent, Record, Result

BATCH_KEYS = 1_000
"""More events than a run makes between two looks; a run that is read late is placed in several statements of limited size."""
STUCK_LOOKS = 20
"""After so many looks a record that another process placed, and that does not arrive here, is skipped: the run was moved to other code."""
PLACED = "select keys from stepengine.served_events where run = %s and first >= %s order by first"
PLACE = "insert into stepengine.served_events (run, first, keys) values (%s, %s, %s) on conflict do nothing returning 1"


class EventOrder:
    """
    The records of one run that are not shown yet, and their positions.

    Args:
        deployment: The database with the positions.
        run: The id of the root run.
    """

    def __init__(self, deployment: Deployment, run: str) -> None:
        self._deployment = deployment
        self._run = run
        self._arrived: dict[str, Record] = {}
        self._unplaced: list[str] = []
        self._ordered: deque[str] = deque()
        self._placed = 0
        self._stuck_looks = 0
        self._stops: list[Record] = []

    @property
    def is_empty(self) -> bool:
        """Whether no record waits for its position or its turn; stop records are not part of the order."""
        return not self._unplaced and not self._ordered

    def add_record(self, record: Record) -> bool:
        """
        Add a record that arrived; return whether it needs a position.

        How a run without a result ended is not part of the order, and is shown behind it: the run may be resumed.
        """
        if isinstance(record, Input) and record.input.get("type") == "stop":
            self._stops.append(record)
            return False
        key = _find_order_key(record)
        if key is None:
            return False
        self._arrived[key] = record
        self._unplaced.append(key)
        return True

    async def has_unread_positions(self) -> bool:
        """Return whether another process has stored positions that this one has not read."""
        return bool(await self._deployment.fetch_rows(PLACED, self._run, self._placed))

    async def read_and_append_positions(self) -> None:
        """Read new positions from the database, and append the keys of records that have no position there."""
        while self._unplaced:
            for (keys,) in await self._deployment.fetch_rows(PLACED, self._run, self._placed):
                self._placed += len(keys)
                self._ordered.extend(keys)
                known = set(keys)
                self._unplaced = [key for key in self._unplaced if key not in known]
            if any(key not in self._arrived for key in self._ordered):
                # Another process is further than this one, and has records that belong in front of those that are new here.
                return
            some = self._unplaced[:BATCH_KEYS]
            if some and await self._deployment.fetch_rows(PLACE, self._run, self._placed, some):
                self._placed += len(some)
                self._ordered.extend(some)
                del self._unplaced[: len(some)]

    def pop_ready_records(self, *, is_last: bool) -> list[Record]:
        """
        Remove and return the next records in the agreed order, up to the first one that has not arrived here.

        With *is_last*, or after several calls that found the same record missing, missing records are skipped.
        """
        ready: list[Record] = []
        while self._ordered:
            if self._ordered[0] in self._arrived:
                ready.append(self._arrived.pop(self._ordered.popleft()))
                self._stuck_looks = 0
                continue
            self._stuck_looks += 1
            if not is_last and self._stuck_looks < STUCK_LOOKS:
                break
            self._ordered.popleft()
        if is_last and self.is_empty:
            ready += self._stops
        return ready


def _find_order_key(record: Record) -> str | None:
    """Return the key of a record in the order; ``None`` for a record without events."""
    if isinstance(record, Intent):
        return f"i{record.path}#{record.seq}"
    if isinstance(record, Result):
        return f"r{record.path}#{record.seq}"
    if isinstance(record, Input) and record.input.get("type") == "wake_time":
        return f"w{record.path}#{record.seq}"
    return None
