"""
``thinker``: thinks about what the conversation before it is about, without any tool, and returns its conclusion.

It is spawned by an agent whose conversation it takes over, so a short prompt is enough.

``stepengine run thinker "Is a lock needed when two threads append to one list?"``
"""

from __future__ import annotations

from typing import TypedDict

from stepengine import STEP_ALL, AgentDefinition, StepContext, Steps

INSTRUCTIONS = """\
You are the thinker now. Think about the question. You have no tools: work with what stands above. Weigh what speaks for and
against, look for what everybody overlooks, and come to a conclusion. Answer with the conclusion and the two or three reasons
that carry it."""
NOTHING = "No conclusion was reached."


class Thought(TypedDict):
    """What came out: the conclusion and its reasons."""

    message: str


def handle_steps(_: StepContext) -> Steps[Thought]:
    """
    Let the model answer, and return its text without its thoughts.

    That takes one step. It shows the tools of whoever spawned the thinker; a model that calls one is told that it may not,
    and goes on.
    """
    turn = yield STEP_ALL
    return Thought(message=turn.text or NOTHING)


agent = AgentDefinition(
    "thinker",
    description="Thinks a hard question through, on the conversation so far, and returns a conclusion with reasons.",
    include_message_history=True,
    inherit_parent_system_prompt=True,
    instructions_prompt=INSTRUCTIONS,
    output_mode="structured_output",
    handle_steps=handle_steps,
)
