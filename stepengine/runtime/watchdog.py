"""
Report the code that blocks the event loop.

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
from stepengine.data.functions import PACKAGE, find_author_line, is_installed_file
from stepengine.runtime.core_performer import CorePerformer
from stepengine.runtime.logs import LOGGER
from stepengine.workspace.after_fork import Lock, call_in_forked_child

if TYPE_CHECKING:
    from stepengine.runtime.tree_protocols import Tree

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
"""The frames below these started the loop and wait for its end; they do not block it."""


MODELS = f"{PACKAGE}models/"


class _BlockingCode(NamedTuple):
    """
    The code that blocks the loop: a tool's name, ``""`` for a handler or hook, and its location.

    Both are ``""`` when nobody's code is under way: the engine imports an SDK, or the machine is busy.
    """

    tool: str
    place: str


NOBODY = _BlockingCode("", "")


class Watchdog:
    """Watches one event loop while runs are active in it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._trees: set[Tree] = set()
        self._reported = ""
        # The first question is asked here, so that nothing is missed that the first run does at once.
        self._asked = time.monotonic()
        self._is_answered = False
        loop.call_soon(self._record_pong)

    @classmethod
    def for_running_loop(cls) -> Watchdog:
        """Return the watchdog of the running loop; to be called in it."""
        loop = asyncio.get_running_loop()
        known = _watchdogs.get(loop)
        return cls(loop) if known is None else known

    def watch_tree(self, tree: Tree) -> None:
        """Watch the loop while *tree* runs; start the watching thread if necessary."""
        with _lock:  # the thread forgets a watchdog that watches nothing
            self._trees.add(tree)
            if _watchdogs.get(self._loop) is not self:
                _watchdogs[self._loop] = self
                _ensure_thread()

    def unwatch_tree(self, tree: Tree) -> None:
        """Stop watching for *tree*; a block during its last act is still reported."""
        self._trees.discard(tree)
        if self._reported:
            tree.emit(Warned(message=self._reported))

    @property
    def is_needed(self) -> bool:
        """Whether a run is active in its loop."""
        return bool(self._trees)

    def ping_or_report(self) -> None:
        """Ping the loop, or report how long it has not answered; called in the watching thread."""
        if self._is_answered:
            self._is_answered = False
            self._asked = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._record_pong)
        elif not self._reported:
            self._report_block(sys._current_frames().get(self._thread))  # noqa: SLF001  (the documented way to see another thread)

    def _report_block(self, frame: FrameType | None) -> None:
        """Log the tool or author code that blocks the loop, after too long; without such code there is no report."""
        blocked = time.monotonic() - self._asked
        culprit = _find_blocking_code(frame)
        if culprit == NOBODY or blocked < (BLOCKING_TOOL_SECONDS if culprit.tool else BLOCKING_SECONDS):
            return
        who = f"the tool {culprit.tool!r}" if culprit.tool else "code of a handler, hook or observer"
        message = f"the event loop has been blocked for {blocked:.1f} s: {who} blocks it at {culprit.place or 'an unknown place'}"
        self._reported = message  # which the loop takes away as soon as it moves
        LOGGER.warning(message)

    def _record_pong(self) -> None:
        """Record that the loop answers, and report a block that was logged in the events of its runs."""
        self._is_answered = True
        if self._reported:
            message, self._reported = self._reported, ""
            for tree in list(self._trees):
                tree.emit(Warned(message=message))


_watchdogs: dict[asyncio.AbstractEventLoop, Watchdog] = {}
"""Of the loops in which runs are under way; an entry stays a moment longer, for runs one after another."""
_lock = Lock()
_threads: list[threading.Thread] = []
"""The thread that watches, while there is one."""


def _ensure_thread() -> None:
    """Start the watching thread if it is not running; called with the lock held."""
    if not (_threads and _threads[0].is_alive()):
        _threads[:] = [threading.Thread(target=_run_watch_loop, name="stepengine-watchdog", daemon=True)]
        _threads[0].start()


@call_in_forked_child
def _reset_after_fork() -> None:
    """Drop the parent's watchdogs in a forked child."""
    _watchdogs.clear()
    _threads.clear()


def _run_watch_loop() -> None:
    """Check all watched loops periodically until none is left."""
    while True:
        time.sleep(TICK_SECONDS)
        with _lock:
            for loop in [loop for loop, watchdog in _watchdogs.items() if not watchdog.is_needed]:
                del _watchdogs[loop]
            watchdogs = list(_watchdogs.values())
            if not watchdogs:
                _threads.clear()
                return
        for watchdog in watchdogs:
            watchdog.ping_or_report()


def _find_blocking_code(frame: FrameType | None) -> _BlockingCode:
    """Return the tool or author code that a stack frame is in."""
    tool = ""
    places: list[tuple[str, int]] = []
    # The thread goes on while it is looked at: CPython 3.11 was seen to give another object where the frame behind one was gone.
    while isinstance(frame, FrameType) and frame.f_code not in RUNS_A_LOOP:
        file = frame.f_code.co_filename
        if file.startswith(MODELS):
            # An SDK, which is loaded when it is first needed and makes its client then; what the author gave it counts.
            places = [place for place in places if not is_installed_file(place[0])]
        # Generated code, such as the constructor of a named tuple, is nobody's; what is typed in a shell is in `__main__`.
        if not file.startswith("<") or frame.f_globals.get("__name__") == "__main__":
            places.append((file, frame.f_lineno))
        if frame.f_code is CorePerformer._call_tool.__code__:  # noqa: SLF001
            # The loop goes on meanwhile: at first there are only arguments, and a call that is over has lost them too.
            item = frame.f_locals.get("item")
            tool = "" if item is None else item.effect.tool_name
            break
        frame = frame.f_back
    return _BlockingCode(tool, find_author_line(reversed(places)))
