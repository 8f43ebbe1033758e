"""
``base2-plan``: talks a request through and ends with a specification. It changes nothing.

``stepengine run base2-plan "We need discounts for large orders"``
"""

from __future__ import annotations

from .base2 import GATHER, THINK, create_base2
from .thinker import agent as thinker

QUESTIONS = """\
Ask with ask_user what the code cannot tell: first what is wanted and why, then what is to happen in the odd cases. Ask in
rounds of at most four questions, and only what changes the plan."""
NO_CHANGES = "Change no file and keep no todos: somebody else will do the work, from your plan alone."
SPECIFICATION = """\
End with the plan between <plan> and </plan>: the aim in one sentence, what changes in which file, in an order in which
each part can be checked, how to check it, and what was decided against."""

agent = create_base2(
    "base2-plan",
    description="Asks, looks around and ends with a plan that somebody else can carry out. Changes nothing.",
    instructions=[GATHER, QUESTIONS, THINK.format(thinker="thinker"), NO_CHANGES, SPECIFICATION],
    tools=["ask_user"],
    helpers=[thinker],
)
