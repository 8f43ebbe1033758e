"""``StepContext``: what a handler is given (requirements C2, generator-contract G2)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Generic

import attrs
from typing_extensions import TypeVar

from stepengine.data.logger import RunLogger
from stepengine.data.state import AgentState

if TYPE_CHECKING:
    from random import Random

__all__ = ("StepContext",)

Params = TypeVar("Params", default=Any)


@attrs.frozen(kw_only=True)
class StepContext(Generic[Params]):
    """
    What a handler is given; frozen.

    Attributes:
        prompt: The prompt of this run; ``""`` when there is none.
        params: The validated params: the pydantic model when ``input_schema`` is one, else an immutable mapping.
        agent_state: The state before the first yield; newer states arrive with each ``StepResult``.
        model: The model string of the run, or ``None``.
        logger: Log lines that become events; silent while a recorded prefix is replayed.
        random: A random source seeded by the run; equal on every replay.
    """

    prompt: str
    params: Params
    agent_state: AgentState
    model: str | None
    logger: RunLogger
    random: Random
    _created: datetime
    _elapsed: Callable[[], int]
    _notify: Callable[[str, Any], None]

    def now(self) -> datetime:
        """Return the run's recorded time (UTC), as of the last outcome; equal on every replay."""
        return self._created + timedelta(milliseconds=self._elapsed())

    def notify(self, message: str, data: Any = None) -> None:
        """Send *message* and JSON *data* to whoever watches the run, without touching the history (requirements C20)."""
        self._notify(message, data)
