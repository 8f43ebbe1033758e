"""How the machine leaves its own frames; none of these is ever seen by author code."""

from __future__ import annotations

from stepengine.data.outcomes import Stop
from stepengine.errors import StepEngineError

__all__ = ("Abort", "EndRun", "Stopped")


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
