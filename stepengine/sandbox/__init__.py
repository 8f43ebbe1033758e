"""
Run untrusted code in a sandbox: programs of models, with the tool ``run_code``, and agent files of third parties.

A program is the body of a ``run_code`` call. Each of its calls is an effect with its own address, so the engine checks, records,
suspends, resumes and replays it like a call of a handler. Programs with certain problems are refused before they run. A waiting
program gives up its worker when another session needs one.

``program_checks`` finds the problems of a program. ``stubs`` describes tools and agents as functions, and ``prelude`` holds the classes
that a sandboxed handler sees. A ``Compute`` effect runs a program in a thread, up to its next calls, and records the result. A replay of
programs therefore needs no sandbox. Agent files run in the same sandbox and are never imported. The sandbox has no generators, so
``source_rewriter`` replaces each ``yield`` by an ``await``. A replay runs a handler again, and needs the sandbox.

Not in this package: an interpreter, the approval of calls, and trust in values that leave a sandbox.

Start with ``program_tool`` and ``sessions``; for agent files, with ``untrusted_handlers``.
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
