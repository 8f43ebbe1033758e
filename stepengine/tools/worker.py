"""Calls from a tool body in a thread to the event loop, where its events and log lines are emitted in order."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from stepengine.tools.context import CallSignal, ToolContext

if TYPE_CHECKING:
    import asyncio


class LoopCaller:
    """Calls functions on the event loop from a body in a thread, in order; after the end of its call they are ignored."""

    __slots__ = ("_loop", "_thread", "is_open")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self.is_open = True

    def wrap(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls *fn* on the event loop from any thread, and does nothing after the end of the tool call."""

        def call_on_loop(*args: object, **kwargs: object) -> None:
            """Call *fn* now in the thread of the event loop, else schedule the call there."""
            call = functools.partial(self._call_if_open, fn, *args, **kwargs)
            # An async body runs on the event loop, and its call may end before the loop runs another callback.
            if threading.get_ident() == self._thread:
                call()
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

        return call_on_loop

    def _call_if_open(self, fn: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Call *fn* on the event loop, unless the tool call has ended."""
        if self.is_open:
            fn(*args, **kwargs)


def make_thread_context(ctx: ToolContext, loop: LoopCaller) -> tuple[ToolContext, CallSignal]:
    """Return (context, signal) for a body in a thread: a copy of the context, and the signal that cancels this call."""
    signal = CallSignal(ctx.cancelled)
    logger: Any = SimpleNamespace(
        **{name: loop.wrap(getattr(ctx.logger, name)) for name in ("debug", "info", "warning", "error")}
    )
    return ctx.for_thread(signal, loop.wrap, logger), signal
