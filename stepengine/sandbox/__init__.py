"""
Programs that models write, one tool, ``run_code``, in which an agent's other tools are functions; and agent files of strangers.

A program is the body of that tool: every call that it makes is an effect of its own path, which is judged, recorded, suspended for
days, resumed in another process, replayed and stepped through as a handler's. It runs in a sandbox (extra ``programs``), is refused
before anything of it runs where it cannot go well, and holds no worker while it waits for somebody.

``program_checks`` says in the lines of the text what is wrong with it; ``stubs`` and ``prelude`` are what it sees of the tools. A sandbox
works it out in a thread (``Compute``), up to the next call of a tool, which then is an effect. What was worked out in between is
recorded, so that a replay needs no sandbox. Agent files of strangers run in the same sandbox and are never imported; as it has no
generators, ``source_rewriter`` makes what waits of what yields.

Must not be here: an interpreter of ours, what judges calls, and trust in anything that comes out of a sandbox.

Begin with ``program_tool``, then ``sessions``; ``untrusted_handlers`` for agent files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepengine.data.late import make_lazy_exports

if TYPE_CHECKING:
    from stepengine.sandbox.check_workers import StopSignal
    from stepengine.sandbox.program_checks import CheckedProgram, ProgramProblem
    from stepengine.sandbox.program_tool import ProgramLimits, code_mode
    from stepengine.sandbox.sessions import (
        CallAnswer,
        MontySandbox,
        ProgramCall,
        ProgramEnded,
        ProgramRaised,
        ProgramSession,
        ProgramTurn,
        ProgramWaiting,
        Sandbox,
    )
    from stepengine.sandbox.stubs import ProgramFunction, Stubs
    from stepengine.sandbox.untrusted_handlers import load_source

__all__ = (
    "CallAnswer",
    "CheckedProgram",
    "MontySandbox",
    "ProgramCall",
    "ProgramEnded",
    "ProgramFunction",
    "ProgramLimits",
    "ProgramProblem",
    "ProgramRaised",
    "ProgramSession",
    "ProgramTurn",
    "ProgramWaiting",
    "Sandbox",
    "StopSignal",
    "Stubs",
    "code_mode",
    "load_source",
)

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "stepengine.sandbox.check_workers": ("StopSignal",),
        "stepengine.sandbox.program_checks": ("CheckedProgram", "ProgramProblem"),
        "stepengine.sandbox.program_tool": ("ProgramLimits", "code_mode"),
        "stepengine.sandbox.sessions": (
            "CallAnswer",
            "MontySandbox",
            "ProgramCall",
            "ProgramEnded",
            "ProgramRaised",
            "ProgramSession",
            "ProgramTurn",
            "ProgramWaiting",
            "Sandbox",
        ),
        "stepengine.sandbox.stubs": ("ProgramFunction", "Stubs"),
        "stepengine.sandbox.untrusted_handlers": ("load_source",),
    },
)
