"""What a run may do: its steps, its actions, the denials that it may get; and which of them was used up first."""

from __future__ import annotations

from typing import TypeGuard

from stepengine.data.limits import Limits
from stepengine.errors import LimitExceeded, LimitReached, StepEngineError
from stepengine.machine.protocol import REFUSALS

__all__ = ("Budget", "is_spent", "raisable_error")


def is_spent(error: BaseException) -> TypeGuard[LimitExceeded]:
    """Return whether *error* says that a budget of the run is spent, not only that one effect was refused."""
    return isinstance(error, LimitExceeded) and error.kind not in REFUSALS


def raisable_error(error: StepEngineError) -> StepEngineError | LimitReached:
    """Return what to raise for the error of a failed effect: a spent budget arrives as a signal."""
    return LimitReached(error) if is_spent(error) else error


class Budget:
    """
    What is left to one run of its limits; those of whole trees are kept outside of the machine.

    Attributes:
        limits: The limits in force.
        reached: The first budget that was spent, of the run or of its tree; ``None`` while none is.
        steps_left: How many steps are left.
        most_steps: How many it may take in all: as its limits say, and what people allowed beyond that.
        denied: How often calls were denied in a row, by the name of the tool; without those of which one was not, since.
    """

    __slots__ = ("_actions", "_agent_id", "_denials", "denied", "limits", "most_steps", "reached", "steps_left")

    def __init__(self, limits: Limits, agent_id: str) -> None:
        """Begin with everything that *limits* allow; messages name the agent *agent_id*."""
        self.limits = limits
        self.reached: LimitExceeded | None = None
        self.steps_left = self.most_steps = limits.max_steps or 0
        self._agent_id = agent_id
        self._actions = self._denials = 0
        self.denied: dict[str, int] = {}

    def reach(self, error: LimitExceeded) -> LimitExceeded:
        """Note that a budget is spent; return the first one that was."""
        if self.reached is None:
            self.reached = error
        return self.reached

    def check(self, before: LimitExceeded | None = None) -> None:
        """
        Raise if a budget was reached since *before*, which is what had been reached then.

        Raises:
            LimitReached: when something was.
        """
        if self.reached is not None and self.reached is not before:
            raise LimitReached(self.reached)

    def take_step(self) -> None:
        """Take a step."""
        self.steps_left -= 1

    def allow_steps(self, most: int) -> None:
        """Let the run take *most* steps in all."""
        self.steps_left += most - self.most_steps
        self.most_steps = most

    def take_actions(self, count: int) -> None:
        """
        Take what the handler asked for beside steps.

        Raises:
            LimitReached: when that is more than the run may do.
        """
        self._actions += count
        limit = self.limits.max_actions
        if limit is not None and self._actions > limit:
            msg = (
                f"agent {self._agent_id!r} asked for more than {limit} actions; "
                "raise Limits(max_actions=...) or end the run earlier"
            )
            raise LimitReached(self.reach(LimitExceeded(msg, kind="actions", limit=limit)))

    def deny(self, tool_name: str) -> int:
        """Count a denied call; return how many calls of its tool in a row that makes. Too many of all end the run."""
        self._denials += 1
        in_a_row = self.denied[tool_name] = self.denied.get(tool_name, 0) + 1
        most = self.limits.max_denials
        if most is not None and self._denials >= most:
            msg = (
                f"{self._denials} tool calls of agent {self._agent_id!r} were denied, the last one of {tool_name!r}, and "
                f"max_denials is {most}; allow what it needs, tell it in its prompt what it may not do, or raise "
                "Limits(max_denials=...)"
            )
            self.reach(LimitExceeded(msg, kind="denials", limit=most))
        return in_a_row

    def allow(self, tool_name: str) -> None:
        """Take note that a call of a tool was not denied."""
        self.denied.pop(tool_name, None)
