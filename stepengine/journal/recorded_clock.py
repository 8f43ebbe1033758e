"""The clock of a recorded run over all processes that worked on it, and the pace of a replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from stepengine.errors import JournalError

STABLE_STEP_MS = 1_000
"""A second for each effect: such times are readable, and far enough apart that none is rounded to another."""
# A person once took two days to answer; nobody watches a replay for that long.
MAX_PAUSE_SECONDS = 10.0


# Three clocks meet here: the one of this process, that of the processes before it, and the made-up one of recordings
# for git, in which times follow from addresses, so that the same run gives the same bytes (replay:J23). The machine
# sees one time that only goes on.
class RunClock:
    """
    The run's own clock, which gives each outcome a time.

    Args:
        stable: Whether times depend only on addresses, so that two recordings are equal.

    Attributes:
        last: The latest time so far.
        pace: The speed at which recorded results are returned; ``None`` for at once.
    """

    @property
    def takeover_ms(self) -> int | None:
        """The run's time in milliseconds when this process resumed it; ``None`` for made-up times."""
        return None if self._stable else self._offset

    def __init__(self, *, stable: bool) -> None:
        self._stable = stable
        self._offset = 0
        self.last = 0
        self.pace: ReplayPace | None = None

    def continue_from(self, end_ms: int, created: datetime, now: datetime) -> None:
        """Continue the time of a record that ends at *end_ms*; it never runs backwards."""
        self.last = end_ms
        self._offset = max(end_ms, (now - created) // timedelta(milliseconds=1))

    def record_time(self, path: str, seq: int, at: int) -> int:
        """Record and return the run's time of an outcome, *at* milliseconds after this process resumed it."""
        if self._stable:
            numbers = [*map(int, path.split("."))] if path else []
            time = STABLE_STEP_MS * sum([n + 1 for n in (*numbers, seq)])
        else:
            time = self._offset + at
        self.last = max(self.last, time)
        return time

    def advance_to(self, at: int) -> None:
        """Advance the run's time to at least *at*."""
        self.last = max(self.last, at)


class ReplayPace:
    """
    Delays recorded results as in the recorded run, scaled by a speed.

    Args:
        speed: The factor by which results are faster than recorded.

    Attributes:
        sleep: Waits some seconds.

    Raises:
        JournalError: when *speed* is not above 0.
    """

    def __init__(self, speed: float) -> None:
        if not speed > 0:
            msg = f"speed must be a number above 0, such as 1.0 for as fast as recorded, not {speed!r}"
            raise JournalError(msg)
        self._speed = speed
        self.sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
        self._shown = 0

    async def sleep_until(self, at: int) -> None:
        """Sleep until the time of a result, scaled and bounded, counted from the result before."""
        pause = min((at - self._shown) / 1_000 / self._speed, MAX_PAUSE_SECONDS)
        if pause > 0:
            await self.sleep(pause)
        self._shown = max(self._shown, at)
