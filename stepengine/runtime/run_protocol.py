"""The protocol of a run: the members that the parts of its tree use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from stepengine.data.outcomes import Stop
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import Item


class Members(Protocol):
    """The effects that a run performs together."""

    def are_all_waiting(self, is_waiting: Callable[[Item], bool]) -> bool:
        """Return whether each of them waits."""


class Run(Protocol):
    """One run of a tree; ``RunTask`` is the implementation."""

    plan: RunPlan
    path: str
    stopping: Stop | None
    is_in_grace: bool
    is_ending: bool
    is_cut: bool

    @property
    def busy(self) -> Item | Members | Literal[True] | None:
        """The effects in progress; ``True`` during another wait, ``None`` if the run awaits nothing that a stop could cancel."""

    def stop_with_error(self, error: BaseException) -> Stop:
        """Stop the run because a performer raised an exception."""

    def crash_tree(self, error: BaseException) -> Stop:
        """Stop the whole tree for an exception that belongs to the caller, where it is raised afterwards."""

    def make_stop(self) -> Stop:
        """Return the outcome of an effect that was not performed, since the run was stopped."""

    def stop(self, stop: Stop) -> None:
        """End the run at once."""

    def stop_gracefully(self, stop: Stop) -> None:
        """Start nothing more, and cancel the effects that can be repeated."""

    def list_unrepeatable_effects(self) -> list[Item]:
        """Return the running effects that would be in doubt if they were cancelled."""

    def is_task_cancelled(self) -> bool:
        """Return whether the current task, its own or one that it started, was cancelled since it entered the run."""

    def absorb_cancellation(self) -> Stop:
        """Account for a cancellation of its task, and return the outcome in its place."""

    def record_outside_cancel(self) -> None:
        """Record a cancellation from outside, if there was one."""

    def start_waiting_for_children(self) -> None:
        """Record that the run has reached its end and waits for its children."""

    def end_waiting_for_children(self) -> None:
        """Record that its children have ended."""
