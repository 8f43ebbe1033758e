"""
Judging: looking at recorded runs, and measuring what a change does.

A recorded run can be run again at no cost, so what a change does can be asked of all the runs that there are. What lives here stands on
that: the debugger goes to any step of a run, in both directions, by sending a new machine the recorded outcomes; ``impact`` replays
many runs over changed code and sorts them by where they part; evaluations run cases several times and say how sure their difference
is; ``viewing`` makes a page of a run. They read journals, and perform nothing but what they were told to, since a run that is looked
at must not send a mail once more.

Must not be here: printing, which the command line does; what a test needs (``testing``), which stands beside this floor.

What authors of evaluations need is exported here, and what looks at a run and makes a page of it.

Begin with ``debugger`` or ``evaluating``.
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
from stepengine.judging.evaluation_report import EvaluationReport, evaluate, evaluate_sync
from stepengine.judging.improving import Trials
from stepengine.judging.viewing.rendering import render_run

__all__ = (
    "ANY",
    "Case",
    "Criterion",
    "Evaluation",
    "EvaluationReport",
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
    "evaluate",
    "evaluate_sync",
    "fits",
    "judge",
    "matches",
    "max_cost",
    "max_steps",
    "never_called",
    "only_changes",
    "render_run",
)
