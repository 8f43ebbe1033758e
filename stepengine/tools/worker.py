"""How a body in a thread reaches the event loop: its context emits and logs there, in order."""

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


class OnLoop:
    """Calls functions on the event loop, in order, until the call ends; calls of an abandoned body are ignored."""

    __slots__ = ("_loop", "_thread", "is_open")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self.is_open = True

    def wrap(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls *fn* on the event loop, from any thread, as long as the call is open."""

        def call_on_loop(*args: object, **kwargs: object) -> None:
            call = functools.partial(self._call_if_open, fn, *args, **kwargs)
            # An async body runs there, and its call may end before the loop runs anything else.
            if threading.get_ident() == self._thread:
                call()
                return
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(call)

        return call_on_loop

    def _call_if_open(self, fn: Callable[..., None], *args: object, **kwargs: object) -> None:
        if self.is_open:
            fn(*args, **kwargs)


def make_thread_context(ctx: ToolContext, loop: OnLoop) -> tuple[ToolContext, CallSignal]:
    """Return a copy of the context for a body in a thread, and the signal that cancels this call."""
    signal = CallSignal(ctx.cancelled)
    logger: Any = SimpleNamespace(
        **{name: loop.wrap(getattr(ctx.logger, name)) for name in ("debug", "info", "warning", "error")}
    )
    return ctx.for_thread(signal, loop.wrap, logger), signal
