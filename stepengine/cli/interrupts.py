"""Ctrl-C while the modules of the command line are loaded."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERRUPTED = 130
"""As in the table of exit codes, which is not loaded yet when it counts."""


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C exit the process at once while the block imports modules."""
    _replace_interrupt_handler(_exit_at_once, signal.default_int_handler)
    try:
        yield
    finally:
        _replace_interrupt_handler(signal.default_int_handler, _exit_at_once)


def _replace_interrupt_handler(handler: Callable[..., object], instead_of: Callable[..., object]) -> None:
    """Replace the SIGINT handler *instead_of*; any other handler stays."""
    if signal.getsignal(signal.SIGINT) is instead_of:
        with suppress(ValueError):  # another thread than the main one is never interrupted
            signal.signal(signal.SIGINT, handler)


def _exit_at_once(*_: object) -> None:
    """End the process without an exception, which could be printed or lost in a callback during imports."""
    os.write(2, b"stepengine: interrupted\n")
    os._exit(INTERRUPTED)
