"""Ctrl-C and termination signals while a run or command works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def call_on_interrupts(
    on_first: Callable[[], object], on_later: Callable[[], object] | None = None
) -> Iterator[list[int]]:
    """
    Call *on_first* at the first SIGINT or SIGTERM and *on_later* at later ones; without *on_later*, those end the process as usual.

    Yields the list of received signals, which grows.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle_signal(number: int, _: FrameType | None) -> None:
        """Record a signal, and call *on_first* or *on_later*; without *on_later*, restore the usual handlers."""
        received.append(number)
        if on_later is None:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        (on_first if on_later is None or len(received) == 1 else on_later)()

    for number in before:
        signal.signal(number, handle_signal)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
