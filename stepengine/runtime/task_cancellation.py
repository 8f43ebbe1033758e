"""The cancellations of the task that drives a run: the one by the engine and those from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class TaskCancellation:
    """
    Cancels the task that drives a run, and distinguishes this cancellation from those by others.

    The own cancellation is taken back before the task leaves the run. Those by others are never taken back.

    Attributes:
        task: The task; ``None`` while no task drives the run.
    """

    __slots__ = ("_earlier", "_is_requested", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[object] | None = None
        self._earlier = 0
        self._is_requested = False

    def enter(self) -> None:
        """Register the current task as the one that drives the run."""
        task = self.task = asyncio.current_task()
        assert task is not None  # noqa: S101
        # A task may carry cancellations that are none of ours when we enter it: the caller's `asyncio.timeout` around us
        # that has fired and is still unwinding. Only what is counted above them came while the run was driven.
        # Without it such a task would end every run that is started in its cleanup.
        self._earlier = task.cancelling()

    def leave(self) -> None:
        """Release the task without the cancellation of this run."""
        if self._is_requested:
            self.take_back()
        self.task = None

    def schedule(self, cancel: Callable[[], None]) -> bool:
        """Schedule *cancel* in the task's event loop; return False if no task drives the run. May be called from any thread."""
        task = self.task
        if task is None or (loop := task.get_loop()).is_closed():
            return False
        loop.call_soon_threadsafe(cancel)
        return True

    def cancel(self) -> None:
        """Cancel the task once."""
        if self.task is not None and not self._is_requested:
            self._is_requested = True
            self.task.cancel()

    def take_back(self) -> None:
        """Take back the cancellation by ``cancel``, if there was one."""
        # `uncancel` takes back one count of the task, so it may be called exactly as often as we cancelled: once too
        # seldom, and the caller's next `await` behind a finished run sees a cancellation that nobody asked for; once too
        # often, and the caller's own is lost (reliability:SS12).
        if self.task is not None and self._is_requested:
            self._is_requested = False
            self.task.uncancel()

    @property
    def is_from_outside(self) -> bool:
        """Whether anyone else has cancelled the task since it entered the run."""
        assert self.task is not None  # noqa: S101
        return self.task.cancelling() - self._is_requested > self._earlier
