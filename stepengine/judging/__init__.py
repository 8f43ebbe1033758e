"""
Judging: looking at recorded runs, and measuring what a change does.

Lives here: what stands on recorded runs and serves whoever wrote the agent: the debugger, and beside it what shows, runs
again and counts. It reads journals, and performs nothing but what it was told to. Must not be here: printing, which the
command line does; what a test needs (``testing``), which stands beside this floor.

What authors of evaluations need is exported here, and what looks at a run and makes a page of it.
"""

from stepengine.judging.criteria import (
    ANY,
    Case,
    Criterion,
    JudgedRun,
    MadeCall,
    Verdict,
    WorkingFiles,
    called,
    command,
    contains,
    equals,
    fits,
    judge,
    matches,
    max_cost,
    max_steps,
    never_called,
    only_changes,
)
from stepengine.judging.debugger import debug
from stepengine.judging.evaluating import Evaluation
from stepengine.judging.improving import Trials
from stepengine.judging.viewing.rendering import render_run

__all__ = (
    "ANY",
    "Case",
    "Criterion",
    "Evaluation",
    "JudgedRun",
    "MadeCall",
    "Trials",
    "Verdict",
    "WorkingFiles",
    "called",
    "command",
    "contains",
    "debug",
    "equals",
    "fits",
    "judge",
    "matches",
    "max_cost",
    "max_steps",
    "never_called",
    "only_changes",
    "render_run",
)
