"""The clock of a run: monotonic milliseconds and sleep. Tests and simulators bring their own."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ("Clock", "SystemClock")


class Clock(Protocol):
    """Where a run gets its time from."""

    def now_ms(self) -> int:
        """Return milliseconds that never go back; only differences mean anything."""

    async def sleep(self, seconds: float) -> None:
        """Wait; cancelling the task ends the wait."""


class SystemClock:
    """The machine's monotonic clock, so that a wall clock that jumps changes nothing (reliability MP32)."""

    def now_ms(self) -> int:
        """Return the monotonic time in milliseconds."""
        return int(time.monotonic() * 1000)

    async def sleep(self, seconds: float) -> None:
        """Wait on the event loop."""
        await asyncio.sleep(seconds)
