"""What is looked up when a run starts and may come out differently next time: computed prompts, context lengths (replay J11)."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from stepengine.data.state import AgentState
from stepengine.journal.history import History
from stepengine.journal.records import Input
from stepengine.machine.plan import RunPlan

__all__ = ("lookups", "recalled")


def recalled(history: History, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
    """Return *plan* and *state* of a run with what was looked up for it when it was recorded, as far as it was."""
    prompt = history.prompts.get(plan.path)
    if prompt is not None and not isinstance(plan.definition.system_prompt, str):
        state = attrs.evolve(state, system_prompt=prompt)
    if plan.path in history.windows or (plan.path, 0) in history.intents:
        plan = attrs.evolve(plan, context_window=history.windows.get(plan.path))
    return plan, state


def lookups(plan: RunPlan, state: AgentState) -> Iterator[Input]:
    """Give the records of what was looked up for a run."""
    if not isinstance(plan.definition.system_prompt, str):
        yield Input(plan.path, -1, 0, {"type": "SystemPrompt", "text": state.system_prompt})
    if plan.context_window is not None:
        yield Input(plan.path, -1, 0, {"type": "ContextWindow", "tokens": plan.context_window})
