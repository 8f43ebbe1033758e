"""The clock of a recorded run over all processes that worked on it, and the pace of a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from stepengine.errors import JournalError

__all__ = ("Pace", "Timing")

STABLE_STEP_MS = 1_000
"""A second for each effect: such times are readable, and far enough apart that none is rounded to another."""
# A person once took two days to answer; nobody watches a replay for that long.
MAX_PAUSE_SECONDS = 10.0


# Three clocks meet here: the one of this process, that of the processes before it, and the made-up one of recordings
# for git, in which times follow from addresses, so that the same run gives the same bytes (replay:J23). The machine
# sees one time that only goes on.
class Timing:
    """
    Puts outcomes on the run's own clock.

    Args:
        stable: Whether times depend on addresses alone, so that two recordings agree.

    Attributes:
        last: The latest time so far.
    """

    @property
    def since(self) -> int | None:
        """What time it was when this process took over; ``None`` where times are made up."""
        return None if self._stable else self._offset

    def __init__(self, *, stable: bool) -> None:
        self._stable = stable
        self._offset = 0
        self.last = 0

    def go_on(self, last: int, created: datetime, now: datetime) -> None:
        """Continue a record that reaches to *last*; a wall clock that was set back does not turn time back."""
        self.last = last
        self._offset = max(last, (now - created) // timedelta(milliseconds=1))

    def of(self, path: str, seq: int, at: int) -> int:
        """Return the run's time for an outcome that came *at* milliseconds after this process took over, and note it."""
        if self._stable:
            numbers = [*map(int, path.split("."))] if path else []
            time = STABLE_STEP_MS * sum([n + 1 for n in (*numbers, seq)])
        else:
            time = self._offset + at
        if time > self.last:  # noqa: PLR1730 - a call less, for every outcome
            self.last = time
        return time

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
        pause = min((at - self._shown) / 1_000 / self._speed, MAX_PAUSE_SECONDS)
        if pause > 0:
            await self.sleep(pause)
        self._shown = max(self._shown, at)
