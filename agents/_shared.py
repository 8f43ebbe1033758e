"""What several agents of this folder need. It defines no agent, so the loader leaves it alone: its name begins with ``_``."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from stepengine import AssistantMessage, StepContext, ToolCall, ToolMessage, UserMessage

Messages: TypeAlias = "list[UserMessage | AssistantMessage | ToolMessage]"

THOUGHTS = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>|\A\s*<think(?:ing)?>.*", re.DOTALL)


def spoken(text: str) -> str:
    """Return what a model said without the thoughts that some models write into their text."""
    return THOUGHTS.sub("", text).strip()


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
