"""
One run while it is driven: how it is told to end, and what became of the cancellations that reached it.

A run ends early because somebody stops it (``stop``) or because its task is cancelled from outside. Inside, ``stop``
cancels the task too, to leave the effect under way; that cancellation is taken back (``uncancel``), the one from outside
never is: it is passed on when the run has finished (reliability SS12, SS13, prototype N7).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from stepengine.data.effects import Effect, Gather
from stepengine.data.outcomes import Gathered, Outcome, Stop
from stepengine.errors import StepEngineError

if TYPE_CHECKING:
    from stepengine.data.state import AgentState
    from stepengine.machine.plan import RunPlan
    from stepengine.runtime.tree import Tree

__all__ = ("Scope",)


class Scope:
    """
    One run of a tree; it may be told to ``stop`` also before and after it is driven.

    Attributes:
        tree: What all runs of the tree share.
        plan: What the run was started with.
        state: The state it was started with.
        path: Its path.
        stopping: Why the run must end, once somebody said so.
        busy: Whether an effect is under way, so that there is something to cancel.
        cancelled: Whether the run's task was cancelled from outside.
    """

    __slots__ = (
        "_base",
        "_kicked",
        "_loop",
        "_told",
        "busy",
        "cancelled",
        "path",
        "plan",
        "state",
        "stopping",
        "task",
        "tree",
    )

    def __init__(self, tree: Tree, plan: RunPlan, state: AgentState, path: str) -> None:
        self.tree = tree
        self.plan = plan
        self.state = state
        self.path = path
        self.task: asyncio.Task[object] | None = None
        self.stopping: Stop | None = None
        self.busy = False
        self.cancelled = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._base = 0
        self._kicked = False
        self._told = False

    def enter(self) -> None:
        """Take the current task as the one that drives this run."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101
        self.task = task
        self._base = task.cancelling()
        self._loop = task.get_loop()

    def leave(self) -> None:
        """Give the task back: no cancellation of ours stays behind on it."""
        if self._kicked and self.task is not None:
            self._kicked = False
            self.task.uncancel()
        self._loop = None

    def release(self) -> None:
        """Forget the tree; nothing more will be performed."""
        del self.tree
        self.task = None

    def stop(self, stop: Stop) -> None:
        """End the run with the first reason that is given; from any thread, any number of times."""
        self.stopping = self.stopping or stop
        if self._told or self._loop is None or self._loop.is_closed():
            return
        self._told = True
        self._loop.call_soon_threadsafe(self._kick)

    def must_stop(self) -> bool:
        """Return whether nothing more may be performed."""
        if self.stopping is None:
            self.stopping = self.tree.too_late(self.path)
        return self.stopping is not None

    def interrupted(self) -> Stop:
        """Account for a ``CancelledError`` that reached the run's own task; return the outcome in its place."""
        task = self.task
        assert task is not None  # noqa: S101
        if self._kicked:
            self._kicked = False
            task.uncancel()
        self.notice_cancel(certain=self.stopping is None)
        return self.halt()

    def notice_cancel(self, *, certain: bool = False) -> None:
        """Take note of a cancellation from outside."""
        assert self.task is not None  # noqa: S101
        if certain or self.task.cancelling() - self._kicked > self._base:
            self.cancelled = True
            self.stopping = self.stopping or Stop("cancelled")

    def crashed(self, error: BaseException) -> Stop:
        """Account for an exception that is the caller's: the tree ends, then it is raised there."""
        self.tree.reraise = self.tree.reraise or error
        is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit)
        stop = Stop("cancelled") if is_interrupt else Stop("crashed", error=error)
        self.tree.root.stop(stop)
        self.stop(stop)
        return self.halt()

    def broken(self, error: BaseException) -> Stop:
        """Account for an exception that a performer let out: the run cannot go on."""
        if not isinstance(error, StepEngineError):
            cause = error
            msg = f"performing an effect of the run at {self.path!r} failed with {type(error).__name__}: {error}"
            error = StepEngineError(msg)
            error.__cause__ = cause
        self.stop(Stop("diverged", error=error))
        return self.halt()

    def halt(self, path: str | None = None) -> Stop:
        """Return the outcome of an effect that is not, or not to its end, performed; *path* is that of its child."""
        stop = self.stopping or Stop("cancelled")
        child = self.tree.orphans.pop(path, None) if path is not None else None
        return Stop(stop.kind, self.tree.elapsed(), stop.error, stop.questions, child)

    def refuse(self, effect: Effect) -> Outcome:
        """Return the outcome of an effect that comes after the run was stopped."""
        return Gathered(tuple([self.halt() for _ in effect.effects])) if type(effect) is Gather else self.halt()

    def _kick(self) -> None:
        if self.busy and not self._kicked and self.task is not None:
            self._kicked = True
            self.task.cancel()
