"""``OwnerShares``: slots that owners share, so that no owner uses all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class OwnerShares:
    """
    Slots that owners share: the more of them are free, the more an owner may use.

    A single owner leaves the part *reserve* free. A second owner leaves the same part of the rest free, and so on, so that an owner
    without slots gets one until all are used.

    Args:
        slots: The number of slots.
        reserve: The part of the slots that an owner leaves free for others, from 0 up to 1.
    """

    def __init__(self, slots: int, reserve: float) -> None:
        self._slots, self._reserve = slots, reserve
        self._used = Counter[str]()

    def count_used_slots(self, owner: str) -> int:
        """Return how many slots an owner uses."""
        return self._used[owner]

    def has_room(self, owner: str) -> bool:
        """Return whether an owner may use one more slot."""
        # Of its own and the free ones, an owner may use the part that is not reserved.
        free = self._slots - self._used.total()
        return free > 0 and self._used[owner] < (1 - self._reserve) * (self._used[owner] + free)

    @contextmanager
    def use_slot(self, owner: str) -> Iterator[None]:
        """Count a slot as used by *owner* within the block, without a check that one is free."""
        self._used[owner] += 1
        try:
            yield
        finally:
            self._used[owner] -= 1
            if not self._used[owner]:
                del self._used[owner]
