"""
``RecordedTree``: the runs of a record, which contain each other: where each starts and ends, and whether in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepengine.data.outcomes import Failure, Value
from stepengine.data.waits import Awaited
from stepengine.journal.records import Address, Intent, Result, get_starter_address


class RecordedTree:
    """
    The runs of one record.

    Args:
        intents: The intents by address, in order.
        results: The results by address.
        decode: Returns the outcome in a result.
    """

    def __init__(
        self,
        intents: Mapping[Address, Intent],
        results: Mapping[Address, Result],
        decode: Callable[[Result], Value | Failure],
    ) -> None:
        self._intents = intents
        self._results = results
        self._decode = decode
        # Built on first use: few readers need it, and it takes a walk over all records.
        self._reports: dict[str, Address] | None = None

    def has_run(self, path: str) -> bool:
        """Return whether the effect that starts the run at *path* is recorded."""
        return get_starter_address(path) in self._intents

    def is_background(self, path: str) -> bool:
        """Return whether the run at *path* was started in the background."""
        started = self._intents.get(get_starter_address(path)) if path else None
        return started is not None and started.is_background

    def find_end(self, path: str) -> Result | None:
        """Return the record of a run's end, at its start effect or, for a background run, at its own path."""
        return self._results.get((path, -1) if self.is_background(path) else get_starter_address(path))

    def has_ended(self, path: str) -> bool:
        """Return whether the child at *path*, or one around it, has a recorded end; False for the root."""
        while path:
            if self.find_end(path) is not None:
                return True
            path = get_starter_address(path)[0]
        return False

    def list_effects(self, path: str) -> list[Intent]:
        """Return the recorded effects of the run at *path*, in order."""
        found: list[Intent] = []
        while (intent := self._intents.get((path, len(found)))) is not None:
            found.append(intent)
        return found

    def find_group_end(self, address: Address) -> int:
        """Return the number of the last effect in the same gather group, or the effect's own if it was alone."""
        path, seq = address
        known = self._intents.get(address)
        while known is not None and known.gather is not None:
            after = self._intents.get((path, seq + 1))
            if after is None or after.gather != known.gather:
                break
            seq += 1
        return seq

    def find_first_report_address(self, path: str) -> Address | None:
        """Return the address where a run first received the end of its background child at *path*."""
        if self._reports is None:
            self._reports = {}
            for address, intent in self._intents.items():
                result = self._results.get(address) if intent.type in ("wait", "cancel") else None
                awaited = None if result is None else getattr(self._decode(result), "value", None)
                for child in awaited.done if isinstance(awaited, Awaited) else ():
                    self._reports.setdefault(child, address)
        return self._reports.get(path)
