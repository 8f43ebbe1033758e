"""
``context-pruner``: replaces a long conversation by a short summary of it, without calling a model.

Agents usually prune with the hook of the same rules, ``Hooks(pre_step=[prune_to_summary()])``. This agent is for handlers
that choose the moment themselves; it runs in their conversation and leaves the shorter one in its place:

``yield ToolCall("spawn_agent_inline", {"agent_type": "context-pruner", "params": {"cache_expiry_ms": 300_000}})``

Asked before every step, it knows by itself how long the pause before a request was; also in the next run of the conversation.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, AgentState, Change, HookContext, Hooks, StepContext, Steps, ToolCall
from stepengine.context import ContextLimits, prune_to_summary

ASKED, ASKED_BEFORE = "context_pruner_asked", "context_pruner_asked_before"


class Budgets(BaseModel):
    """How long the conversation may get and what may stay of it, in tokens."""

    # Handlers pass their own params on: {**ctx.params, "cache_expiry_ms": ...}.
    model_config = ConfigDict(extra="ignore")

    max_context_length: int = Field(default=200_000, ge=1, description="Prune when the conversation is longer.")
    assistant_tool_budget: int = Field(default=20_000, ge=0, description="What may stay of replies and tools.")
    user_budget: int = Field(default=50_000, ge=0, description="What may stay of the user's words.")
    forgotten_agents: list[str] = Field(default=[], description="Agents whose outputs are not kept.")
    cache_expiry_ms: int = Field(default=0, ge=0, description="Prune also after so long a pause; 0 for never.")
    idle_ms: int | None = Field(
        default=None, ge=0, description="How long the pause was; by default the time since this agent was asked last."
    )


def handle_steps(ctx: StepContext[Budgets]) -> Steps[bool]:
    """Replace the history by a shorter one if it is due, and return whether it was replaced."""
    given, now = ctx.params, ctx.now()
    if given.idle_ms is None:
        before = ctx.agent_state.context.get(ASKED_BEFORE)
        last_request = None if before is None else datetime.fromisoformat(before)
    else:
        last_request = now - timedelta(milliseconds=given.idle_ms)
    policy = prune_to_summary(
        given.max_context_length,
        user_budget=given.user_budget,
        assistant_tool_budget=given.assistant_tool_budget,
        cold_after=timedelta(milliseconds=given.cache_expiry_ms) if given.cache_expiry_ms else None,
        cold_min_tokens=None,
        forgotten_agents=given.forgotten_agents,
    )
    history = AgentState.from_messages(ctx.inherited_messages).view
    limits = ContextLimits.for_state(ctx.agent_state, given.max_context_length)
    shorter = policy.rewrite(history, limits, now, last_request)
    if shorter is None:
        return False
    yield ToolCall("set_messages", {"messages": shorter}, include_tool_call=False)
    return True


def record_request_time(ctx: HookContext) -> Change:
    """Store the times of this and of the previous request to this agent in the context."""
    return Change(context={ASKED: ctx.now.isoformat(), ASKED_BEFORE: ctx.state.context.get(ASKED)})


agent = AgentDefinition(
    "context-pruner",
    description="Shortens the conversation to a summary of it when it has become long; needs no model.",
    include_message_history=True,
    inherit_parent_system_prompt=True,
    input_schema=Budgets,
    handle_steps=handle_steps,
    hooks=Hooks(pre_run=[record_request_time]),
)
