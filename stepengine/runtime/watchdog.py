"""
Says who blocks the event loop (reliability GN05, TL08).

Nothing in a process can stop a handler that never yields, or synchronous code in an async tool; but it can be named. Once
a run is older than a second, a thread asks its loop four times a second whether it is alive. A loop that does not answer
is warned of in the log at once, and in the run's events when it goes on. There is one such thread per loop, it ends with
the last run, and short runs never start one.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from stepengine.data.events import Warned
from stepengine.data.functions import innermost_own
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.toolcalls import call_tool

if TYPE_CHECKING:
    from stepengine.runtime.tree import Tree

__all__ = ("Watchdog",)

ARM_SECONDS = 1.0
TICK_SECONDS = 0.25
TOOL_SECONDS = 1.0
OTHER_SECONDS = 5.0


class _Culprit(NamedTuple):
    """Who keeps the loop: a tool's name, ``""`` for a handler or hook, and where its code stands."""

    tool: str
    place: str


class Watchdog:
    """Watches one event loop while runs are under way in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._trees: set[Tree] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._over: threading.Event | None = None
        self._asked = 0.0
        self._is_answered = True
        self._reported = ""

    @classmethod
    def of_running_loop(cls) -> Watchdog:
        """Return the watchdog of the running loop."""
        loop = asyncio.get_running_loop()
        known = _watchdogs.get(loop)
        if known is None:
            known = _watchdogs[loop] = cls(loop)
        return known

    def enter(self, tree: Tree) -> None:
        """Watch while *tree* runs."""
        self._trees.add(tree)
        if self._timer is None:
            self._timer = self._loop.call_later(ARM_SECONDS, self._start)

    def leave(self, tree: Tree) -> None:
        """Stop watching for *tree*."""
        self._trees.discard(tree)
        if self._trees:
            return
        _watchdogs.pop(self._loop, None)
        if self._timer is not None:
            self._timer.cancel()
        if self._over is not None:
            self._over.set()

    def _start(self) -> None:
        self._over = threading.Event()
        self._is_answered = True
        arguments = (self._over, threading.get_ident())
        threading.Thread(target=self._watch, args=arguments, name="stepengine-watchdog", daemon=True).start()

    def _watch(self, over: threading.Event, thread: int) -> None:
        while not over.wait(TICK_SECONDS):
            if self._is_answered:
                self._is_answered = False
                self._asked = time.monotonic()
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return
            elif not self._reported:
                self._look(sys._current_frames().get(thread))  # noqa: SLF001  (the documented way to see another thread)

    def _look(self, frame: FrameType | None) -> None:
        blocked = time.monotonic() - self._asked
        culprit = _culprit(frame)
        if blocked < (TOOL_SECONDS if culprit.tool else OTHER_SECONDS):
            return
        who = f"the tool {culprit.tool!r}" if culprit.tool else "code of a handler, hook or observer"
        self._reported = f"the event loop has not moved for {blocked:.1f} s: {who} blocks it at {culprit.place}"
        LOGGER.warning(self._reported)

    def _answer(self) -> None:
        self._is_answered = True
        if self._reported:
            message, self._reported = self._reported, ""
            for tree in list(self._trees):
                tree.emit(Warned(message=message))


_watchdogs: dict[asyncio.AbstractEventLoop, Watchdog] = {}
"""Of the loops in which runs are under way; the last run takes its entry away."""


def _culprit(frame: FrameType | None) -> _Culprit:
    tool, places = "", []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno))
        if frame.f_code is call_tool.__code__:
            tool = frame.f_locals["effect"].tool_name
            break
        frame = frame.f_back
    return _Culprit(tool, innermost_own(reversed(places)) or "an unknown place")
