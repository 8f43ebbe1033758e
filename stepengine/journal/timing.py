"""The time of a recorded run: milliseconds since its root was created, over all processes that worked on it (JR28)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from stepengine.errors import JournalError

__all__ = ("Pace", "Timing")

STABLE_STEP = 1_000
MAX_PAUSE = 10.0


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


class Pace:
    """
    Lets recorded results come as fast as they did, or faster.

    Args:
        speed: How many times as fast.

    Attributes:
        sleep: Waits some seconds.

    Raises:
        JournalError: when *speed* is not above 0.
    """

    def __init__(self, speed: float) -> None:
        if not speed > 0:
            msg = f"speed is {speed!r}; it is a number above 0, such as 1.0 for as fast as recorded"
            raise JournalError(msg)
        self._speed = speed
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._shown = 0

    async def reach(self, at: int) -> None:
        """Wait for the time of a result, from that of the one before; never long, also where a person was waited for."""
        pause = min((at - self._shown) / 1_000 / self._speed, MAX_PAUSE)
        if pause > 0:
            await self.sleep(pause)
        self._shown = max(self._shown, at)
