"""The clock of a run: the date, monotonic milliseconds, and sleep. Tests bring their own."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol

__all__ = ("Clock", "SystemClock")


class Clock(Protocol):
    """Where a run gets its time from."""

    def now(self) -> datetime:
        """Return the date and time in UTC; a run that begins is created then. It may be set back."""

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
