"""
Waiting for what other threads and processes do, by looking where nothing tells of it. No test measures a time with this.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

HANG_SECONDS = 60
"""What has not happened by then hangs; on a busy machine the slowest of these waits takes a tenth of it."""
LOOK_SECONDS = 0.01


def until(holds: Callable[[], T], *, seconds: float = HANG_SECONDS) -> T:
    """
    Return what a function returns as soon as that is true.

    Args:
        holds: The function.
        seconds: After how long it hangs; longer only for a program of others that starts slowly.

    Raises:
        TimeoutError: It hangs.
    """
    end = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > end:
            msg = f"not true within {seconds:g} s"
            raise TimeoutError(msg)
        time.sleep(LOOK_SECONDS)
    return found


async def until_async(holds: Callable[[], T]) -> T:
    """
    Do the same, and let the event loop run meanwhile.

    Raises:
        TimeoutError: It hangs.
    """
    async with asyncio.timeout(HANG_SECONDS):
        while not (found := holds()):  # noqa: ASYNC110 - another process makes it true
            await asyncio.sleep(LOOK_SECONDS)
    return found
