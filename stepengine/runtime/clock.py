"""The clock of a run (date, monotonic milliseconds, sleep; tests bring their own), and the time of a run tree with its limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from stepengine.data.outcomes import Stop
from stepengine.errors import LimitExceeded


class TimeSource(Protocol):
    """The source of time for a run."""

    def now(self) -> datetime:
        """Return the date and time in UTC, the creation time of a run that starts. It may go backwards."""

    def now_ms(self) -> int:
        """Return milliseconds that never go back; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Wait; cancelling the task ends the wait."""


class SystemClock:
    """The machine's clocks; within a process only the monotonic one counts, so that a date that jumps changes nothing (reliability:MP32)."""

    def now(self) -> datetime:
        """Return the date and time in UTC."""
        return datetime.now(UTC)

    def now_ms(self) -> int:
        """Return the monotonic time in milliseconds."""
        return time.monotonic_ns() // 1_000_000

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)


class TreeClock:
    """
    The time of one run tree, and the time limits of its runs.

    Attributes:
        now_ms: Returns milliseconds that never go back.
        deadlines: When the time of a run is over, on the clock of the event loop, and how many seconds it had, by path.
    """

    __slots__ = ("_created", "_loop", "_since", "_start", "deadlines", "now_ms")

    def __init__(self, clock: TimeSource, created: datetime, since: int | None) -> None:
        """Start the clock of a root run that was *created* then; *since* is as in ``TimeSetting.since``."""
        self.now_ms = clock.now_ms
        self._created = created
        self._since = since
        self._start = self.now_ms()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.deadlines: dict[str, tuple[float, float]] = {}

    def elapsed_ms(self) -> int:
        """Return milliseconds since the root run was created."""
        return self.now_ms() - self._start

    def now(self) -> datetime:
        """Return the run's time (UTC)."""
        return self._created + timedelta(milliseconds=self.elapsed_ms())

    def compute_seconds_left(self, wake_ms: int, start_ms: int) -> float:
        """Return the seconds left until *wake_ms*, for a wait that started at *start_ms*, both on the run's clock."""
        # Over all processes that worked on the run, its clock goes on with the time of day: a sleep that began before a
        # crash ends when it would have ended.
        since = self._since
        return (wake_ms - (start_ms if since is None else since + self.elapsed_ms())) / 1_000

    def start_time_limit_timer(self, path: str, seconds: float, stop: Callable[[Stop], None]) -> asyncio.TimerHandle:
        """Store the deadline of the run at *path*, and start a timer that calls *stop* then."""
        # On the loop's clock, which goes on evenly: a wall clock that is set back would give a run more time than it
        # has (reliability:MP32).
        loop = self._loop = asyncio.get_running_loop()
        self.deadlines[path] = (loop.time() + seconds, seconds)
        return loop.call_later(seconds, stop, make_time_limit_stop(seconds))

    def find_time_limit_stop(self, path: str) -> Stop | None:
        """
        Return the stop for a time limit that the run at *path*, or one around it, has exceeded, or ``None``.

        Timers say so, too, but not while synchronous code keeps the loop from turning, such as a scripted model's.
        """
        # The limit that is passed names the run that it was set for; those below it are cut with it, and their stop
        # says only that.
        own = True
        while self.deadlines and self._loop is not None:
            deadline = self.deadlines.get(path)
            if deadline is not None and self._loop.time() >= deadline[0]:
                return (
                    make_time_limit_stop(deadline[1], self.elapsed_ms())
                    if own
                    else Stop("cancelled", self.elapsed_ms())
                )
            if not path:
                break
            path, own = path.rpartition(".")[0], False
        return None


def make_time_limit_stop(seconds: float, at: int = 0) -> Stop:
    """Return the stop of a run that exceeded its time limit of *seconds*."""
    msg = f"the run took longer than max_seconds={seconds:g}"
    return Stop("limit", at, LimitExceeded(msg, kind="seconds", limit=seconds))
