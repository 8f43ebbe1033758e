"""
The usage of a stopped stream, passed to its caller along with the stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepengine.data.usage import Usage

NAME = "stepengine_usage"


def attach_usage(stopped: BaseException, usage: Usage | None) -> None:
    """Store the usage of a stream on *stopped*, the exception that ends it."""
    if usage is not None:
        vars(stopped)[NAME] = usage


def usage_when_stopped(stopped: BaseException) -> Usage | None:
    """Return the usage of the stream that *stopped* ended; ``None`` if it is unknown."""
    usage = vars(stopped).get(NAME)
    return usage if isinstance(usage, Usage) else None


@contextmanager
def attach_usage_on_cancel(used: Callable[[], Usage | None]) -> Iterator[None]:
    """Attach the usage reported so far to a cancellation of the block."""
    try:
        yield
    except asyncio.CancelledError as stopped:
        attach_usage(stopped, used())
        raise
