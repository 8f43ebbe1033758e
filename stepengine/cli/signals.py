"""Ctrl-C and SIGTERM while a run is under way: the first one asks it to end, the second one has its usual effect."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ("interruptible",)


@contextmanager
def interruptible(stop: Callable[[], object]) -> Iterator[list[int]]:
    """Call *stop* at the first SIGINT or SIGTERM; the second one has its usual effect. Gives the signals received."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def arrived(number: int, _: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        stop()

    for number in before:
        signal.signal(number, arrived)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
