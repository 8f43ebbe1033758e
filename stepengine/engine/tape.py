"""
``Tape``: a journal that is read once, and the positions in it.

A *position* is the number of results that were applied so far, in the order of the journal, for the root and
its children together.
"""

from __future__ import annotations

from bisect import bisect_right

from stepengine.journal.pending_items import find_open_questions
from stepengine.journal.records import ROOT, Address, Result
from stepengine.journal.store import Journal


class Tape:
    """
    The record that all steppers of one journal share, parsed once, with the order of its results.

    Args:
        journal: The journal; it is read once, and only read.

    Attributes:
        journal: The journal.
        history: Its records.
        order: The addresses of all results but that of the root run, in the order in which they were recorded.
        positions: The position before each of these results, by its address.
        verified: Up to which position the effects were compared with the record.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.history = journal.history()
        # The order of results is that in which they really came, so siblings that ran at once are stepped through as it
        # happened.
        self.order: list[Address] = [
            (record.path, record.seq)
            for record in self.history.records
            if isinstance(record, Result) and (record.path, record.seq) != ROOT
        ]
        self.positions = {address: position for position, address in enumerate(self.order)}
        self._model_calls: dict[str, list[int]] = {}
        for (path, seq), intent in self.history.intents.items():
            if intent.type == "model_call":
                self._model_calls.setdefault(path, []).append(seq)
        self.verified = 0

    @property
    def last_position(self) -> int:
        """The last position: the number of results in the journal, that of the root run apart."""
        return len(self.order)

    @property
    def is_in_address_order(self) -> bool:
        """Whether the results are stored by address, as in the journal of a test, so that siblings follow one another."""
        return self.journal.stable and any(path for path, _ in self.order)

    def find_waiting_effect(self) -> Address | None:
        """Return the first effect that waits where the record ends: an open question before all others; ``None`` without any."""
        history = self.history
        if history.is_complete:
            return None
        asked = [address for address, _ in find_open_questions(history).values()]
        left = [
            a
            for a, i in history.intents.items()
            if a not in history.results and a != ROOT and not i.starts_child_or_body
        ]
        # What was cancelled with a run that has ended never finishes.
        return next((a for a in [*asked, *left] if not history.tree.has_ended(a[0])), None)

    def find_address_at(self, position: int) -> Address | None:
        """Return the address of the next outcome at a position; at the last one that of the waiting effect, if there is one."""
        return self.order[position] if position < self.last_position else self.find_waiting_effect()

    def find_position(self, path: str, seq: int) -> int | None:
        """
        Return the position before the outcome of an effect is sent; ``None`` if the record has no such position.

        For the effect that waits where the record ends, it is the last position.
        """
        known = self.positions.get((path, seq))
        return self.last_position if known is None and self.find_waiting_effect() == (path, seq) else known

    def count_steps(self, path: str = "") -> int:
        """Return the number of model calls of a run."""
        return len(self._model_calls.get(path, ()))

    def get_step_number(self, address: Address) -> int:
        """Return the step of an effect, as ``stepengine show`` numbers them; the end of a child belongs to its last step."""
        path, seq = address
        return self.count_steps(path) if seq == -1 else bisect_right(self._model_calls.get(path, ()), seq)

    def get_step_at(self, position: int) -> int:
        """Return the step of the run that waits at a position; 0 before its first."""
        address = self.find_address_at(position)
        return self.count_steps() if address is None else self.get_step_number(address)

    def find_step_position(self, step: int, path: str = "") -> int | None:
        """Return the position before the reply of a step of a run, from 1; ``None`` when it has no such step."""
        is_known = 0 < step <= self.count_steps(path)
        return self.find_position(path, self._model_calls[path][step - 1]) if is_known else None
