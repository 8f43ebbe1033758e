"""
What a stream had used when it was stopped, on its way to whoever asked for it: nothing but the stop itself gets there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stepengine.data.usage import Usage

__all__ = ("note_usage", "telling_use", "usage_when_stopped")

NAME = "stepengine_usage"


def note_usage(stopped: BaseException, usage: Usage | None) -> None:
    """Let *stopped*, which ends a stream, say what that had used."""
    if usage is not None:
        vars(stopped)[NAME] = usage


def usage_when_stopped(stopped: BaseException) -> Usage | None:
    """Return what a stream had used that *stopped* ended; ``None`` when nothing is known of that."""
    usage = vars(stopped).get(NAME)
    return usage if isinstance(usage, Usage) else None


@contextmanager
def telling_use(used: Callable[[], Usage | None]) -> Iterator[None]:
    """Let a cancellation inside say what a provider had told of the usage until then."""
    try:
        yield
    except asyncio.CancelledError as stopped:
        note_usage(stopped, used())
        raise
