"""Ctrl-C while the modules of the command line are loaded."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ("INTERRUPTED", "loading")

INTERRUPTED = 130
"""As in the table of exit codes, which is not loaded yet when it counts."""


@contextmanager
def loading() -> Iterator[None]:
    """Let Ctrl-C end the process at once, while the modules of the command line are loaded."""
    _at_interrupt(_leave_at_once, signal.default_int_handler)
    try:
        yield
    finally:
        _at_interrupt(signal.default_int_handler, _leave_at_once)


def _at_interrupt(handler: Callable[..., object], instead_of: Callable[..., object]) -> None:
    """Let Ctrl-C do something else than usual; a process that ignores it, or has its own handler, keeps that."""
    if signal.getsignal(signal.SIGINT) is instead_of:
        with suppress(ValueError):  # another thread than the main one is never interrupted
            signal.signal(signal.SIGINT, handler)


def _leave_at_once(*_: object) -> None:
    """Leave while modules are loaded, when nothing has begun: raised there, an exception may be shown, or lost in a callback."""
    os.write(2, b"stepengine: interrupted\n")
    os._exit(INTERRUPTED)
