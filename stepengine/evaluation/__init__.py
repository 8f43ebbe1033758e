"""
Evaluation: measures agents and what a change does to recorded runs.

Evaluations run cases several times and report each metric with a confidence interval. ``impact`` replays recorded runs over changed
code and compares them, ``blame`` finds the step at which a run went wrong, ``pinning`` turns recorded runs into tests, and
``improving`` searches for a better prompt. Replays perform nothing, and cost nothing.

Not here: printing, which the command line does, and what tests need (``testing``).

Begin with ``evaluating`` or ``impact``.
"""

from stepengine.evaluation.criteria import (
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
from stepengine.evaluation.evaluating import Evaluation
from stepengine.evaluation.evaluation_report import EvaluationReport, evaluate, evaluate_sync
from stepengine.evaluation.improving import Trials

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
)
