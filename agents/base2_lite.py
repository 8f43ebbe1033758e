"""
``base2-lite``: ``base2`` for small requests and cheap models. It edits files itself; others only look, think and judge.

``stepengine run base2-lite "Rename total to subtotal" --write --shell``
"""

from __future__ import annotations

from .base2 import ASK, EDIT, EDITING_TOOLS, END, GATHER, REPAIR, THINK, TODOS, VALIDATE, create_base2
from .basher import agent as basher
from .code_reviewer import agent as code_reviewer
from .thinker import agent as thinker

agent = create_base2(
    "base2-lite",
    description="Gets a small coding request done: looks around, edits the files itself, has the change reviewed.",
    instructions=[
        GATHER,
        ASK,
        TODOS,
        THINK.format(thinker="thinker"),
        EDIT,
        VALIDATE.format(reviewer="code-reviewer"),
        REPAIR,
        END,
    ],
    tools=["ask_user", "write_todos", *EDITING_TOOLS],
    helpers=[thinker, code_reviewer, basher],
)
