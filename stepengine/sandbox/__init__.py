"""
Programs that models write, one tool, ``run_code``, in which an agent's other tools are functions; and agent files of strangers.

A program is the body of that tool: every call that it makes is an effect of its own path, which is judged, recorded, suspended for
days, resumed in another process, replayed and stepped through as a handler's. It runs in a sandbox (extra ``programs``), is refused
before anything of it runs where it cannot go well, and holds no worker while it waits for somebody.

``checking`` says in the lines of the text what is wrong with it; ``stubs`` and ``prelude`` are what it sees of the tools. A sandbox
works it out in a thread (``Compute``), up to the next call of a tool, which then is an effect. What was worked out in between is
recorded, so that a replay needs no sandbox. Agent files of strangers run in the same sandbox and are never imported; as it has no
generators, ``rewriting`` makes what waits of what yields.

Must not be here: an interpreter of ours, what judges calls, and trust in anything that comes out of a sandbox.

Begin with ``running``, then ``sessions``; ``strangers`` for agent files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import late

if TYPE_CHECKING:
    from stepengine.sandbox.running import ProgramLimits, code_mode
    from stepengine.sandbox.sessions import MontySandbox, Sandbox
    from stepengine.sandbox.strangers import agents_of_source

__all__ = (
    "MontySandbox",
    "ProgramLimits",
    "Sandbox",
    "agents_of_source",
    "code_mode",
)

__getattr__, __dir__ = late(
    __name__,
    {
        "stepengine.sandbox.running": ("ProgramLimits", "code_mode"),
        "stepengine.sandbox.sessions": ("MontySandbox", "Sandbox"),
        "stepengine.sandbox.strangers": ("agents_of_source",),
    },
)
