"""How many things happen at once, per event loop and name, and what counts every page (reliability NW16)."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextvars import ContextVar

__all__ = ("Gates", "count_page")

count_page: ContextVar[Callable[[], None]] = ContextVar("stepengine_count_page", default=lambda: None)
"""Is called for every page that a tool has fetched, and raises ``ToolError`` when its run has had its share."""


class Gates:
    """
    Semaphores by name; each event loop has its own, because one cannot be used in two.

    Args:
        size: How many may be inside one gate at once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_loop: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, weakref.WeakValueDictionary[str, asyncio.Semaphore]
        ] = weakref.WeakKeyDictionary()

    def at(self, name: str) -> asyncio.Semaphore:
        """Return the gate of *name*; whoever waits or is inside keeps it alive."""
        gates = self._by_loop.setdefault(asyncio.get_running_loop(), weakref.WeakValueDictionary())
        gate = gates.get(name)
        if gate is None:
            gate = gates[name] = asyncio.Semaphore(self._size)
        return gate
