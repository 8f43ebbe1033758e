"""One single step from a given state (requirements D8)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs

from stepengine.data.hooks import Hooks
from stepengine.data.limits import Limits
from stepengine.data.run import RunResult
from stepengine.data.state import AgentState
from stepengine.data.usage import add_cost
from stepengine.data.yields import STEP, StepResult
from stepengine.engine.catalog import Agent
from stepengine.errors import StepEngineError
from stepengine.machine.plan import RunPlan

__all__ = ("StepRun",)

ONE_STEP = Limits(max_steps=1, on_max_steps="stop")


class StepRun:
    """
    A run of one step: the agent without its handler, its opening prompts and the hooks around a run.

    Args:
        agent: The agent.
        state: The state to go on from.
    """

    def __init__(self, agent: Agent, state: AgentState) -> None:
        self._before = state
        self._step: StepResult | None = None
        definition = attrs.evolve(agent.definition, handle_steps=None, instructions_prompt="")
        object.__setattr__(definition, "handle_steps", self._handler)
        hooks = attrs.evolve(agent.hooks, pre_run=(), post_run=()) if agent.hooks else Hooks()
        self.agent = attrs.evolve(agent, definition=definition, hooks=hooks)

    def start(self, plan: RunPlan, fresh: AgentState) -> tuple[RunPlan, AgentState]:
        """Return what the step is started with: the given state under its own id, where it has one."""
        before = self._before
        run_id = before.run_id or fresh.run_id
        state = attrs.evolve(
            before,
            run_id=run_id,
            agent_id=self.agent.definition.id,
            system_prompt=before.system_prompt or fresh.system_prompt,
            tool_definitions=fresh.tool_definitions,
            pending=(),
        )
        return attrs.evolve(plan, run_id=run_id), state

    def result(self, ended: RunResult[Any]) -> StepResult:
        """
        Return the state after the step and whether the turn ended.

        Raises:
            StepEngineError: the error that kept the step from ending.
        """
        step, before = self._step, self._before
        if step is None:
            if ended.error is not None:
                raise ended.error
            msg = f"the step of agent {self.agent.definition.id!r} ended as {ended.status.value} before it gave a state"
            raise StepEngineError(msg)
        after = step.agent_state
        budget = before.steps_remaining
        state = attrs.evolve(
            after,
            steps_remaining=max(0, budget - 1),
            usage=before.usage + after.usage,
            cost=add_cost(before.cost, after.cost),
            credits_used=before.credits_used + after.credits_used,
            child_run_ids=(*before.child_run_ids, *after.child_run_ids),
        )
        return attrs.evolve(step, agent_state=state)

    def _handler(self, _: Any) -> Generator[Any, StepResult, None]:
        self._step = yield STEP
