"""
Evaluation: measures agents and what a change does to recorded runs.

``evaluate`` runs cases several times and reports each metric with a confidence interval. Five functions work on recorded runs:

- ``impact`` replays them with changed code, calls models from the first difference on, and compares.
- ``replay_waiting`` reports which waiting runs the current code can resume.
- ``blame`` finds the step at which a run lost its chance to pass.
- ``pin`` turns a failed run into a test.
- ``price`` computes the cost with another model.

``improve`` searches for better prompts, tool descriptions, settings and defaults. A replay performs nothing and costs nothing.

Printing is in ``cli``, and the test kit in ``testing``.

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
