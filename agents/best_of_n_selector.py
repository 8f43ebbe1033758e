"""
``best-of-n-selector``: compares several implementations of one change and names the best, with what it lacks.

``editor-multi-prompt`` asks it. It has no handler: a turn of the model is all there is to it, and the engine insists on an
output that fits ``Choice``.

``stepengine run best-of-n-selector "Guard against None" --params '{"implementations": [{"id": "A", "content": "..."}]}'``
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from stepengine import AgentDefinition

INSTRUCTIONS = """\
You choose now. Compare the implementations as diffs against the same files. Take the one that does what was asked with the
fewest risks; between equals, the smaller one. Name what the chosen one should still take over from the others or repair, or say that
there is nothing. Answer only by calling set_output."""


class Implementation(BaseModel):
    """One way to make the change."""

    id: str = Field(description="What it is called in the answer.")
    strategy: str = Field(default="", description="What it was asked to do.")
    content: str = Field(description="Its diff, or why there is none.")


class Implementations(BaseModel):
    """What there is to choose from."""

    model_config = ConfigDict(extra="forbid")

    implementations: list[Implementation] = Field(min_length=1, description="The implementations.")


class Choice(BaseModel):
    """What was chosen and why."""

    implementation_id: str = Field(description="The id of the best implementation.")
    reason: str = Field(description="Why, in a sentence or two.")
    suggested_improvements: str = Field(description="What is still to be done to it; empty for nothing.")


agent = AgentDefinition(
    "best-of-n-selector",
    description="Names the best of several implementations of one change.",
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    input_schema=Implementations,
    output_schema=Choice,
)
