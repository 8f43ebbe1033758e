"""
``thinker-best-of-n``: has the same question thought through several times and returns the best conclusion.

The candidates are replies to the very same conversation, so they share its prompt cache and leave no trace in it.

``stepengine run thinker-best-of-n "Where should the retries live?" --params '{"n": 3}'``
"""

from __future__ import annotations

from string import ascii_uppercase

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentCall, AgentDefinition, GenerateN, StepContext, Steps, StepText
from stepengine.errors import ChildError

from .thinker import INSTRUCTIONS, NOTHING
from .thinker_selector import agent as selector


class Candidates(BaseModel):
    """How much to spend."""

    model_config = ConfigDict(extra="forbid")

    n: int = Field(default=3, ge=1, le=10, description="How many conclusions compete.")


def handle_steps(ctx: StepContext[Candidates]) -> Steps:
    """Generate several thoughts, and answer with the one that the selector chooses."""
    found = yield from GenerateN(ctx.params.n)
    thoughts = dict(zip(ascii_uppercase, filter(None, map(str.strip, found)), strict=False))
    best, *others = thoughts.values() or [NOTHING]
    yield StepText((yield from select_thought(thoughts)) if others else best)


def select_thought(thoughts: dict[str, str]) -> Steps[str]:
    """Return the thought that the selector chooses; without a valid choice, the first one with a note."""
    listed = [{"id": name, "content": text} for name, text in thoughts.items()]
    try:
        choice = yield from AgentCall(selector, params={"thoughts": listed})
    except ChildError as error:
        return f"None could be selected: {error}\nThis is the first of {len(thoughts)}:\n\n{thoughts['A']}"
    chosen = choice.thought_id.strip().upper()
    if chosen in thoughts:
        return thoughts[chosen]
    return f"{chosen!r} was selected, which is none. This is the first of {len(thoughts)}:\n\n{thoughts['A']}"


agent = AgentDefinition(
    "thinker-best-of-n",
    description="Thinks a hard question through several times and returns the best conclusion.",
    spawnable_agents=[selector],
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    input_schema=Candidates,
    handle_steps=handle_steps,
)
