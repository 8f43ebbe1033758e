"""
Evaluation: measures agents and what a change does to recorded runs.

Evaluations run cases several times and report each metric with a confidence interval. ``impact`` replays recorded runs over changed
code and compares them, ``replay_waiting`` replays waiting runs over it, ``blame`` finds the step at which a run went wrong, ``pinned_tests`` turns recorded runs into tests, and
``improvement_search`` searches for a better prompt. Replays perform nothing, and cost nothing.

Not here: printing, which the command line does, and what tests need (``testing``).

Begin with ``case_runs`` or ``impact``.
"""

from stepengine.evaluation.blame import Blame, Blamed, RetriedStep, blame
from stepengine.evaluation.case_runs import Evaluation
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
from stepengine.evaluation.evaluation_report import EvaluationReport, evaluate, evaluate_sync
from stepengine.evaluation.impact import Impact, impact
from stepengine.evaluation.improvement import Improvement, Trials
from stepengine.evaluation.improvement_search import improve, improve_sync
from stepengine.evaluation.pinned_tests import PinnedTest, pin
from stepengine.evaluation.prices import RunPrice, price
from stepengine.evaluation.waiting_runs import WaitingRun, replay_waiting

__all__ = (
    "ANY",
    "Blame",
    "Blamed",
    "Case",
    "Criterion",
    "Evaluation",
    "EvaluationReport",
    "Impact",
    "Improvement",
    "JudgedRun",
    "MadeCall",
    "PinnedTest",
    "RetriedStep",
    "RunPrice",
    "Trials",
    "Verdict",
    "WaitingRun",
    "WorkingFiles",
    "blame",
    "called",
    "command",
    "contains",
    "equals",
    "evaluate",
    "evaluate_sync",
    "fits",
    "impact",
    "improve",
    "improve_sync",
    "judge",
    "matches",
    "max_cost",
    "max_steps",
    "never_called",
    "only_changes",
    "pin",
    "price",
    "replay_waiting",
)
