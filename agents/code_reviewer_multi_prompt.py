"""
``code-reviewer-multi-prompt``: several reviews of one change at once, each with another question.

``stepengine run code-reviewer-multi-prompt "$(git diff)" --params '{"prompts": ["Is it thread-safe?", "Is it simple?"]}'``
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition, StepContext, Steps, ToolCall, map_agents

from .code_reviewer import agent as code_reviewer


class Questions(BaseModel):
    """What to look at."""

    model_config = ConfigDict(extra="forbid")

    prompts: list[str] = Field(min_length=1, max_length=10, description="One question per review.")


class Reviews(BaseModel):
    """The reviews in the order of the questions; one that failed says why."""

    reviews: list[str]


def handle_steps(ctx: StepContext[Questions]) -> Steps[Reviews]:
    """Ask all reviewers at once, each with its own question and without those of the others."""
    said = [*ctx.inherited_messages, *ctx.prompt_messages]
    yield ToolCall("set_messages", {"messages": said}, include_tool_call=False)
    found = yield from map_agents(code_reviewer, ctx.params.prompts, prompt=str)
    return Reviews(
        reviews=[f"This review failed: {one.error}" if one.is_error else one.output.strip() for one in found]
    )


agent = AgentDefinition(
    "code-reviewer-multi-prompt",
    description="Reviews the change made so far several times at once, with one question each, given as params.",
    spawnable_agents=[code_reviewer],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    input_schema=Questions,
    output_schema=Reviews,
    handle_steps=handle_steps,
)
