"""What several agents of this folder need. It defines no agent, so the loader leaves it alone: its name begins with ``_``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from stepengine import AssistantMessage, StepContext, ToolCall, ToolMessage, UserMessage

Messages: TypeAlias = "list[UserMessage | AssistantMessage | ToolMessage]"


def spoken(messages: Iterable[Any]) -> str:
    """Return what the model said last in *messages*; ``""`` for nothing."""
    return next((m.said.strip() for m in reversed(list(messages)) if isinstance(m, AssistantMessage)), "")


def inherited(ctx: StepContext[Any], *, params: bool) -> Messages:
    """
    Return the conversation that an agent was given, without what was added for itself: instructions, prompt and params.

    Args:
        ctx: The context of its handler.
        params: Whether it was given params.
    """
    messages = list(ctx.agent_state.view)
    for tag in ("INSTRUCTIONS_PROMPT", *(["USER_PROMPT"] if ctx.prompt or params else [])):
        if messages and isinstance(messages[-1], UserMessage) and tag in messages[-1].tags:
            messages.pop()
    return messages


def without_params(ctx: StepContext[Any]) -> ToolCall:
    """
    Return the call that leaves only the prompt of what was added for an agent.

    Children that take over the conversation then see what is asked for, and neither params nor instructions that are not
    theirs.
    """
    asked = [UserMessage(ctx.prompt, ("USER_PROMPT",))] if ctx.prompt else []
    messages = [*inherited(ctx, params=True), *asked]
    return ToolCall("set_messages", {"messages": messages}, include_tool_call=False)
