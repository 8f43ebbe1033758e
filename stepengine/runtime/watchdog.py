"""
Says who blocks the event loop.

Nothing in a process can stop a handler that never yields, or synchronous code in an async tool; but it can be named. From
the first moment of a run on, a thread asks its loop four times a second whether it is alive. A loop that does not answer
is warned of in the log at once, and in the run's events when it goes on, if only to end. There is one such thread in a
process; it ends by itself a moment after the last run, so that runs one after another share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

from stepengine.data.events import Warned
from stepengine.data.functions import PACKAGE, innermost_own
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.performing import Innermost
from stepengine.workspace.after_fork import Lock, renews

if TYPE_CHECKING:
    from stepengine.runtime.tree_protocols import Tree

__all__ = ("Watchdog",)

TICK_SECONDS = 0.25
"""A fraction of the shortest delay that is reported; four wake-ups in a second do not show in the CPU time."""
BLOCKING_TOOL_SECONDS = 1.0
"""Text streams stop visibly after a second. A tool that blocks as long should be a plain function, which runs in a thread."""
BLOCKING_SECONDS = 5.0
"""Handlers and hooks may compute for a while, and a busy machine delays a loop for seconds; more is a blocking call."""
RUNS_A_LOOP = frozenset(
    fn.__code__
    for fn in (asyncio.Runner.run, asyncio.BaseEventLoop.run_forever, asyncio.BaseEventLoop.run_until_complete)
)
"""Below these stands whoever started the loop and waits for its end; that is nobody who blocks it."""


MODELS = f"{PACKAGE}models/"
IMPORTING = "<frozen importlib"


class _Culprit(NamedTuple):
    """
    Who keeps the loop: a tool's name, ``""`` for a handler or hook, and where its code stands.

    Both are ``""`` when nobody's code is under way: the engine imports an SDK, or the machine is busy.
    """

    tool: str
    place: str


NOBODY = _Culprit("", "")


class Watchdog:
    """Watches one event loop while runs are under way in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._trees: set[Tree] = set()
        self._reported = ""
        # The first question is asked here, so that nothing is missed that the first run does at once.
        self._asked = time.monotonic()
        self._is_answered = False
        loop.call_soon(self._answered_by_loop)

    @classmethod
    def of_running_loop(cls) -> Watchdog:
        """Return the watchdog of the running loop; to be called in it."""
        loop = asyncio.get_running_loop()
        known = _watchdogs.get(loop)
        return cls(loop) if known is None else known

    def enter(self, tree: Tree) -> None:
        """Watch while *tree* runs."""
        self._trees.add(tree)
        _keep(self._loop, self)

    def leave(self, tree: Tree) -> None:
        """Stop watching for *tree*; it is still told of a block that was its last act."""
        self._trees.discard(tree)
        if self._reported:
            tree.emit(Warned(message=self._reported))
        if not self._trees:
            _watchdogs.pop(self._loop, None)

    def look(self) -> None:
        """Ask the loop whether it is alive, or see how long it has not answered; called in the thread that watches."""
        if self._is_answered:
            self._is_answered = False
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._answered_by_loop)
        elif not self._reported:
            self._look(sys._current_frames().get(self._thread))  # noqa: SLF001  (the documented way to see another thread)

    def _look(self, frame: FrameType | None) -> None:
        blocked = time.monotonic() - self._asked
        culprit = _culprit(frame)
        if culprit == NOBODY or blocked < (BLOCKING_TOOL_SECONDS if culprit.tool else BLOCKING_SECONDS):
            return
        who = f"the tool {culprit.tool!r}" if culprit.tool else "code of a handler, hook or observer"
        message = f"the event loop has not moved for {blocked:.1f} s: {who} blocks it at {culprit.place or 'an unknown place'}"
        self._reported = message  # which the loop takes away as soon as it moves
        LOGGER.warning(message)

    def _answered_by_loop(self) -> None:
        self._is_answered = True
        if self._reported:
            message, self._reported = self._reported, ""
            for tree in list(self._trees):
                tree.emit(Warned(message=message))


_watchdogs: dict[asyncio.AbstractEventLoop, Watchdog] = {}
"""Of the loops in which runs are under way; the last run takes its entry away."""
_lock = Lock()
_threads: list[threading.Thread] = []
"""The thread that watches, while there is one."""


def _keep(loop: asyncio.AbstractEventLoop, watchdog: Watchdog) -> None:
    """Let the thread look at *watchdog*."""
    if _watchdogs.get(loop) is watchdog:
        return
    with _lock:
        _watchdogs[loop] = watchdog
        if not (_threads and _threads[0].is_alive()):
            _threads[:] = [threading.Thread(target=_watch, name="stepengine-watchdog", daemon=True)]
            _threads[0].start()


@renews
def _forget() -> None:
    """Watch nothing of the parent's: its loops never answer in a forked child, which has no thread to ask them, either."""
    _watchdogs.clear()
    _threads.clear()


def _watch() -> None:
    while True:
        time.sleep(TICK_SECONDS)
        with _lock:
            watchdogs = list(_watchdogs.values())
            if not watchdogs:
                _threads.clear()
                return
        for watchdog in watchdogs:
            watchdog.look()


def _culprit(frame: FrameType | None) -> _Culprit:
    tool, imports = "", False
    places: list[tuple[str, int]] = []
    # The thread goes on while it is looked at: CPython 3.11 was seen to give another object where the frame behind one was gone.
    while isinstance(frame, FrameType) and frame.f_code not in RUNS_A_LOOP:
        file = frame.f_code.co_filename
        imports = imports or file.startswith(IMPORTING)
        if imports and file.startswith(MODELS):
            places.clear()  # an SDK, which is loaded when it is first needed
        places.append((file, frame.f_lineno))
        if frame.f_code is Innermost._call_tool.__code__:  # noqa: SLF001
            # The loop goes on meanwhile: at first there are only arguments, and a call that is over has lost them too.
            item = frame.f_locals.get("item")
            tool = "" if item is None else item.effect.tool_name
            break
        frame = frame.f_back
    return _Culprit(tool, innermost_own(reversed(places)))
