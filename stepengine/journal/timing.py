"""The time of a recorded run: milliseconds since its root was created, over all processes that worked on it (JR28)."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ("Timing",)

STABLE_STEP = 1_000


class Timing:
    """
    Puts outcomes on the run's own clock.

    Args:
        stable: Whether times depend on addresses alone, so that two recordings agree (replay J23).

    Attributes:
        last: The latest time so far.
    """

    def __init__(self, *, stable: bool) -> None:
        self._stable = stable
        self._offset = 0
        self.last = 0

    def go_on(self, last: int, created: datetime, now: datetime) -> None:
        """Go on from a record that reaches to *last*; a wall clock that was set back does not turn time back."""
        self.last = last
        self._offset = max(last, (now - created) // timedelta(milliseconds=1))

    def of(self, path: str, seq: int, at: int) -> int:
        """Return the run's time for an outcome that came *at* milliseconds after this process took over."""
        if self._stable:
            numbers = [*map(int, path.split("."))] if path else []
            return STABLE_STEP * sum([n + 1 for n in (*numbers, seq)])
        return self._offset + at

    def came_by(self, at: int) -> None:
        """Note that the run's time has reached *at*."""
        self.last = max(self.last, at)
