"""The budget of a run: its steps, its actions, its denials, and the first of them that was spent."""

from __future__ import annotations

from typing import TypeGuard

from stepengine.data.limits import Limits
from stepengine.errors import LimitExceeded, LimitReached, StepEngineError
from stepengine.machine.protocol import REFUSALS


def is_spent_budget_error(error: BaseException) -> TypeGuard[LimitExceeded]:
    """Return whether *error* means that a budget of the run is spent, rather than one effect refused."""
    return isinstance(error, LimitExceeded) and error.kind not in REFUSALS


def to_raisable_error(error: StepEngineError) -> StepEngineError | LimitReached:
    """Return the exception to raise for a failed effect: a ``LimitReached`` for a spent budget."""
    return LimitReached(error) if is_spent_budget_error(error) else error


class Budget:
    """
    The remaining budget of one run; limits of whole trees are enforced outside of the machine.

    Attributes:
        limits: The limits in force.
        reached: The first budget that was spent, of the run or of its tree; ``None`` while none is.
        steps_left: The number of steps that are left.
        most_steps: The total number of steps, including those that people allowed in addition to the limits.
        denied: The number of denied calls in a row by tool name; a call that is not denied removes its tool.
    """

    __slots__ = ("_actions", "_agent_id", "_denials", "denied", "limits", "most_steps", "reached", "steps_left")

    def __init__(self, limits: Limits, agent_id: str) -> None:
        """Start with all that *limits* allow; messages name the agent *agent_id*."""
        self.limits = limits
        self.reached: LimitExceeded | None = None
        self.steps_left = self.most_steps = limits.max_steps or 0
        self._agent_id = agent_id
        self._actions = self._denials = 0
        self.denied: dict[str, int] = {}

    def record_spent_budget(self, error: LimitExceeded) -> LimitExceeded:
        """Record that a budget is spent; return the error of the first spent budget."""
        if self.reached is None:
            self.reached = error
        return self.reached

    def raise_if_spent(self, before: LimitExceeded | None = None) -> None:
        """
        Raise if a budget was reached since *before*, the value of ``reached`` at an earlier time.

        Raises:
            LimitReached: when something was.
        """
        if self.reached is not None and self.reached is not before:
            raise LimitReached(self.reached)

    def deduct_step(self) -> None:
        """Deduct a step from the steps left. Nothing is raised here: ``Progress.request_step`` checks the rest."""
        self.steps_left -= 1

    def increase_step_limit(self, max_steps: int) -> None:
        """Raise the run's total number of steps to *max_steps*."""
        self.steps_left += max_steps - self.most_steps
        self.most_steps = max_steps

    def count_actions_or_raise(self, count: int) -> None:
        """
        Count actions of the handler other than steps; raise ``LimitReached`` for too many.

        Raises:
            LimitReached: when that is more than the run may do.
        """
        self._actions += count
        limit = self.limits.max_actions
        if limit is not None and self._actions > limit:
            msg = (
                f"agent {self._agent_id!r} requested more than {limit} actions; "
                "raise Limits(max_actions=...) or end the run earlier"
            )
            raise LimitReached(self.record_spent_budget(LimitExceeded(msg, kind="actions", limit=limit)))

    def count_denial(self, tool_name: str) -> int:
        """Count a denied call; return the number of denials of its tool in a row. Too many of all tools end the run."""
        self._denials += 1
        in_a_row = self.denied[tool_name] = self.denied.get(tool_name, 0) + 1
        most = self.limits.max_denials
        if most is not None and self._denials >= most:
            msg = (
                f"{self._denials} tool calls of agent {self._agent_id!r} were denied, the last one of {tool_name!r}, and "
                f"max_denials is {most}; allow the calls it needs, name the forbidden calls in its prompt, or raise "
                "Limits(max_denials=...)"
            )
            self.record_spent_budget(LimitExceeded(msg, kind="denials", limit=most))
        return in_a_row
