"""Clocks for runs that wait longer than a test."""

from __future__ import annotations

from datetime import datetime, timedelta

from stepengine.runtime.clock import SystemClock
from stepengine.testing import Clock


class ShiftedClock(SystemClock):
    """
    The machine's clock, put ahead by what was slept between two processes.
    """

    def __init__(self, ahead: timedelta = timedelta()) -> None:
        self.ahead = ahead

    def now(self) -> datetime:
        return super().now() + self.ahead


class NotingClock(Clock):
    """
    A clock of the test kit that notes how long was slept.
    """

    def __init__(self, *start: datetime, waits: bool = False) -> None:
        super().__init__(*start, waits=waits)
        self.sleeps: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        await super().sleep(seconds)
