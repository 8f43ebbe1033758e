"""Exceptions that end the machine's own frames, which author code never sees, and the caller's, which pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from stepengine.data.outcomes import Stop
from stepengine.data.state import RunStatus
from stepengine.errors import LimitReached, StepEngineError


class Stopped(BaseException):
    """The world ended the run: suspended, cancelled, shut down, out of time, diverged."""

    def __init__(self, stop: Stop) -> None:
        super().__init__(stop.kind)
        self.stop = stop


class Abort(BaseException):
    """The run fails because of *error*, and the handler cannot do anything about it."""

    def __init__(self, error: StepEngineError) -> None:
        super().__init__(error.message)
        self.error = error


class EndRun(BaseException):
    """The handler yielded ``end_turn``: the run ends here, the handler is closed at that yield."""


def belongs_to_caller(error: BaseException) -> bool:
    """
    Return whether *error* belongs to the caller: it ends the run and is raised there unchanged.

    Those are ``KeyboardInterrupt``, ``SystemExit`` and what test frameworks raise: no ``Exception``, no end of a generator,
    no cancellation, no signal of ours.
    """
    if isinstance(error, Exception | GeneratorExit | LimitReached | Stopped | Abort | EndRun):
        return False
    # By name, since this package knows no event loop.
    return all(kind.__name__ != "CancelledError" for kind in type(error).__mro__)


def status_from_stop(stop: Stop) -> RunStatus:
    """Return the final status of a run with this stop."""
    match stop.kind:
        case "suspended":
            return RunStatus.SUSPENDED
        case "cancelled" | "shutdown":
            return RunStatus.CANCELLED
        case "limit" | "diverged" | "crashed":
            return RunStatus.FAILED
        case _:
            assert_never(stop.kind)


def status_from_error(error: BaseException) -> RunStatus:
    """Return the final status of a step that *error* ended."""
    if isinstance(error, Stopped):
        return status_from_stop(error.stop)
    return RunStatus.CANCELLED if isinstance(error, KeyboardInterrupt | SystemExit) else RunStatus.FAILED


def merge_stops(stops: Sequence[Stop]) -> Stop:
    """Return one stop for several: anything harder than a suspension wins, questions are collected."""
    if len(stops) == 1:
        return stops[0]
    first = next((s for s in stops if s.kind != "suspended"), stops[0])
    # Of a limit that asks, each run that has reached it tells the same question.
    questions = {q.id: q for s in reversed(stops) for q in reversed(s.questions)}
    return Stop(first.kind, max([s.at for s in stops]), first.error, tuple(reversed(questions.values())))
