"""The running runs of one tree: their drivers, their interruption, and the objects that tools keep for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from stepengine.data.outcomes import Stop
from stepengine.data.state import label_warning
from stepengine.errors import AgentError
from stepengine.machine.signals import belongs_to_caller
from stepengine.runtime.performer import Item
from stepengine.runtime.run_protocol import Run
from stepengine.tools.context import RunResources


class TreeLoop:
    """The event loop in which a tree runs, for callers in any thread."""

    __slots__ = ("_loop", "_thread")

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0

    def set_running_loop(self) -> None:
        """Register the running loop as the loop of the tree."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    @property
    def is_open(self) -> bool:
        """Whether the tree has a loop that accepts calls."""
        return self._loop is not None and not self._loop.is_closed()

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Schedule *function* in the loop if that is open; may be called from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def call_or_schedule(self, function: Callable[..., object], *args: Any) -> None:
        """Call *function* directly in the loop's thread, else schedule it there; one caller's calls stay in order."""
        # At once where that is possible: sent by way of the loop, an event of a tool would come behind the end of its
        # own call. A tool in a thread may outlive its run by a moment; what it says then is for nobody.
        if threading.get_ident() == self._thread:
            function(*args)
        else:
            self.call_soon(function, *args)


class ActiveRuns:
    """
    The runs of one tree that are running.

    Attributes:
        by_path: Those that this process drives.
        elsewhere: The futures that stop the children which other processes drive, by path.
        spawned_by: The tool call that spawned the child at a path; ``""`` for a handler's.
        belongings: What tools keep for each run.
        signal: ``is_set()`` says whether the tree is being stopped.
    """

    __slots__ = ("_loop", "_patience", "_root", "belongings", "by_path", "elsewhere", "signal", "spawned_by")

    def __init__(self, root: Run, loop: TreeLoop, warnings: list[str]) -> None:
        """Start without runs; errors in ending their belongings are added to *warnings*."""
        self._root = root
        self._loop = loop
        self._patience: asyncio.TimerHandle | None = None
        self.by_path: dict[str, Run] = {}
        self.elsewhere: dict[str, asyncio.Future[Stop]] = {}
        self.spawned_by: dict[str, str] = {}
        self.belongings = RunToolObjects(warnings)
        self.signal = _StopSignal(root)

    def stop(self, path: str, stop: Stop) -> None:
        """Stop the run at *path* and all runs below it."""
        # A child is driven here, or by another worker: who ends it need not know which. A future that is done already
        # has said why.
        run, ending = self.by_path.get(path), self.elsewhere.get(path)
        if run is not None:
            run.stop(stop)
        if ending is not None and not ending.done():
            ending.set_result(stop)

    def cancel(self, path: str, reason: str) -> None:
        """Cancel the run at *path* and all runs below it."""
        self.stop(path, Stop("cancelled", error=AgentError(reason)))

    def interrupt(self, grace: float) -> None:
        """
        Stop all runs; effects that cannot be repeated get *grace* seconds to finish. May be called from any thread.

        Nothing else begins, and what may simply happen again is cut at once. Called again, or with any other reason to
        stop, everything is.
        """
        root = self._root
        # A second call is somebody who has lost patience. The first one set `stopping` already.
        if grace <= 0 or root.stopping is not None or not self._loop.is_open:
            root.stop(Stop("cancelled"))
            return
        root.is_in_grace = True
        root.stopping = Stop("cancelled")
        self._loop.call_soon(self._stop_with_grace, root.stopping, grace)

    def _stop_with_grace(self, stop: Stop, grace: float) -> None:
        """Stop the root after *grace* seconds, or at once if no effect would be in doubt."""
        if not self._root.is_in_grace:
            return
        # Nothing under way would be in doubt, so there is nothing to be patient for.
        if not self.list_unrepeatable_effects():
            self._root.stop(stop)
            return
        self._patience = asyncio.get_running_loop().call_later(grace, self._root.stop, stop)
        for run in list(self.by_path.values()):
            run.stop_gracefully(stop)

    def list_unrepeatable_effects(self) -> list[Item]:
        """Return the running effects that would be in doubt if they were cancelled."""
        return [item for run in list(self.by_path.values()) for item in run.list_unrepeatable_effects()]

    def close(self) -> None:
        """Forget all runs and cancel the timer, since the tree has ended."""
        # The timer would hold the whole tree for the seconds that it has left.
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        # Each run refers to its tree and the tree to its runs. Left alone, thousands of finished trees wait for the
        # collector of cycles, which then stops the process for as long as all of them take.
        self.by_path.clear()


class RunToolObjects:
    """
    The objects that tools keep for the runs of one tree until these end.

    Attributes:
        by_path: What they keep, by the path of the run.
    """

    __slots__ = ("_warnings", "by_path")

    def __init__(self, warnings: list[str]) -> None:
        self.by_path: dict[str, RunResources] = {}
        self._warnings = warnings

    def get_or_create(self, path: str) -> RunResources:
        """Return the objects that tools store for the run at *path*; an empty collection at the first access."""
        return self.by_path.setdefault(path, RunResources())

    async def close_run_objects(self, run: Run) -> None:
        """Close the objects that tools keep for a run, even if this task is cancelled; failures become warnings."""
        kept = self.by_path.pop(run.path)
        # A task of its own, waited for to its end: what is closed are processes and temporary folders, which a
        # cancellation in the middle would leave behind (reliability:R10).
        work = asyncio.create_task(kept.aclose())
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.record_outside_cancel()
        try:
            self._warnings += [label_warning(text, run.path, run.plan.agent.definition.id) for text in work.result()]
        except BaseException as error:
            if not belongs_to_caller(error):
                raise
            run.crash_tree(error)


class _StopSignal:
    """The state of ``ToolContext.cancelled``: whether a run is being stopped."""

    __slots__ = ("_root",)

    def __init__(self, root: Run) -> None:
        self._root = root

    def is_set(self) -> bool:
        """Return whether the run is being stopped and running effects have to end: ``False`` during their grace."""
        # Not while it is spared: a tool that looks at this ends by itself, and what it does is to be finished.
        return self._root.stopping is not None and not self._root.is_in_grace
