"""Runs that ended and whose handles are still in memory, so that their events are shown with all pieces of texts."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepengine.runtime.handle import RunHandle

KEPT = 100
KEPT_BYTES = 64 * 1024 * 1024
"""Of journals: a run takes about as much memory as its journal has bytes, or a few times that."""


class EndedRuns:
    """The handles of the runs that ended last, bounded in number and in the bytes of their journals."""

    def __init__(self) -> None:
        self._handles: OrderedDict[str, tuple[RunHandle, int]] = OrderedDict()
        self._bytes = 0

    def get(self, run: str) -> RunHandle | None:
        """Return the handle of a run; ``None`` if the handle is not stored or was removed."""
        known = self._handles.get(run)
        return None if known is None else known[0]

    def put(self, run: str, handle: RunHandle, journal_bytes: int = 0) -> None:
        """Store the handle of a run as the newest; *journal_bytes* is 0 if the journal is not yet measured."""
        self.remove(run)
        self._handles[run] = (handle, journal_bytes)
        self._bytes += journal_bytes

    def remove(self, run: str) -> None:
        """Remove the handle of a run, if there is one."""
        self._bytes -= self._handles.pop(run, (None, 0))[1]

    def list_excess_runs(self) -> list[str]:
        """Return the ids of the oldest runs that exceed the limits of number and size; nothing is removed."""
        count, size, found = len(self._handles), self._bytes, list[str]()
        for run, (_, own) in self._handles.items():
            if count <= KEPT and size <= KEPT_BYTES:
                break
            count, size = count - 1, size - own
            found.append(run)
        return found
