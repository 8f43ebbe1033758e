"""
Memory that ended runs have freed, returned to the system.

glibc keeps freed memory in a pool for each thread that allocated it. A server has many threads, so after runs with large texts most of its
memory is free and still its own. ``malloc_trim`` returns it. Other C libraries have no such function and no such pools.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from stepengine.data.events import RunFinished

if TYPE_CHECKING:
    from stepengine.data.events import Event

PAUSE_SECONDS = 10.0
"""Seconds between two returns of memory: each takes milliseconds, and the next run has to allocate again."""


class FreedMemory:
    """Returns the memory of ended runs to the system. It is an observer of an engine."""

    def __init__(self) -> None:
        self._has_ended_run = False

    def on_event(self, event: Event) -> None:
        """Record that a run has ended."""
        if isinstance(event, RunFinished) and not event.path:
            self._has_ended_run = True

    @asynccontextmanager
    async def trim_periodically(self) -> AsyncIterator[None]:
        """Within the block, return freed memory to the system every few seconds if a run has ended."""
        task = asyncio.create_task(self._trim_memory_forever())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _trim_memory_forever(self) -> None:
        """Every few seconds, return freed memory to the system if a run has ended."""
        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            if self._has_ended_run:
                self._has_ended_run = False
                # In a thread, where the call holds up no run: ctypes releases the interpreter meanwhile.
                await asyncio.to_thread(trim_memory)


def trim_memory() -> None:
    """Return the freed memory of this process to the system, if its C library can."""
    trim = _find_malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _find_malloc_trim() -> Any:
    """Return ``malloc_trim`` of glibc; ``None`` for another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
