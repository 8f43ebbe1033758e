"""
``base2-max``: ``base2`` that spends more to get it right. Several thoughts, several edits and several reviews compete.

``stepengine run base2-max "Make the parser accept comments" --write --shell``
"""

from __future__ import annotations

from .base2 import ASK, DELEGATE, END, FOLLOW_UP, GATHER, REPAIR, THINK, TODOS, VALIDATE, create_base2
from .basher import agent as basher
from .code_reviewer_multi_prompt import agent as code_reviewer_multi_prompt
from .editor_multi_prompt import agent as editor_multi_prompt
from .thinker_best_of_n import agent as thinker_best_of_n

# Helpers that inherit the tools that are shown can only call what is among them; this agent is not told to use these.
SHOWN = ("propose_str_replace", "propose_write_file", "set_output")
STRATEGIES = "Give it one prompt per strategy that could work, at least two."

agent = create_base2(
    "base2-max",
    description="Gets a hard coding request done: best of several thoughts, edits and reviews. Costs several times base2.",
    instructions=[
        GATHER,
        ASK,
        TODOS,
        THINK.format(thinker="thinker-best-of-n"),
        f"{DELEGATE.format(editor='editor-multi-prompt')} {STRATEGIES}",
        VALIDATE.format(reviewer="code-reviewer-multi-prompt"),
        REPAIR,
        END,
        FOLLOW_UP,
    ],
    tools=["ask_user", "write_todos", "suggest_followups", *SHOWN],
    helpers=[thinker_best_of_n, editor_multi_prompt, code_reviewer_multi_prompt, basher],
)
