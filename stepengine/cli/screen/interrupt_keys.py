"""Ctrl-C and termination signals while a run or command works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def call_on_interrupts(stop: Callable[[], object], again: Callable[[], object] | None = None) -> Iterator[list[int]]:
    """
    Call *stop* at the first SIGINT or SIGTERM and *again* at later ones; without *again*, those end the process as usual.

    Yields the list of received signals, which grows.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle_signal(number: int, _: FrameType | None) -> None:
        received.append(number)
        if again is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (stop if again is None or len(received) == 1 else again)()

    for number in before:
        signal.signal(number, handle_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
