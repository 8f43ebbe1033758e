"""
``base2-fast``: ``base2`` without todos, thinker, editor and reviewer. It edits files itself.

Its instructions ask for one check at the end; nothing else holds it to that.

``stepengine run base2-fast "Fix the typo in the README" --write --shell``
"""

from __future__ import annotations

from .base2 import CHECK, EDIT, EDITING_TOOLS, END, GATHER, create_base2
from .basher import agent as basher

agent = create_base2(
    "base2-fast",
    description="Gets a simple coding request done in few steps: looks around, edits, runs one check.",
    instructions=[GATHER, EDIT, CHECK, END],
    tools=EDITING_TOOLS,
    helpers=[basher],
)
