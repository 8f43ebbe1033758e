"""
``thinker-selector``: reads several conclusions to one question and names the best. ``thinker-best-of-n`` asks it.

It has no handler: a turn of the model is all there is to it, and the engine insists on an output that fits ``Choice``.

``stepengine run thinker-selector "Is a lock needed?" --params '{"thoughts": [{"id": "A", "content": "..."}]}'``
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition

INSTRUCTIONS = """\
You choose now. Take the conclusion that serves the question above best: right first, complete next, short last. Pay no
attention to how sure it sounds or where it stands in the list. Answer only by calling set_output."""


class Thought(BaseModel):
    """One conclusion."""

    id: str = Field(description="What it is called in the answer.")
    content: str = Field(description="The conclusion and its reasons.")


class Thoughts(BaseModel):
    """What there is to choose from."""

    model_config = ConfigDict(extra="forbid")

    thoughts: list[Thought] = Field(min_length=1, description="The conclusions.")


class Choice(BaseModel):
    """What was chosen."""

    thought_id: str = Field(description="The id of the best conclusion.")


agent = AgentDefinition(
    "thinker-selector",
    description="Names the best of several conclusions.",
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    input_schema=Thoughts,
    output_schema=Choice,
)
