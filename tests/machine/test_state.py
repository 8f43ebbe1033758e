"""The classes that hold the state of a run."""

from __future__ import annotations

from stepengine.machine.background import Children
from stepengine.machine.budget import Budget
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.history import RunHistory
from stepengine.machine.output import Output
from stepengine.machine.progress import Progress
from stepengine.machine.run_tools import RunTools
from stepengine.machine.spent import UsageTotals
from stepengine.machine.state import BodyProgress, Prompt, RunQuestions, RunState, SharedData, Snapshot

PARTS = (
    BodyProgress,
    Budget,
    Children,
    EffectChannel,
    Output,
    Progress,
    Prompt,
    RunHistory,
    RunQuestions,
    RunTools,
    SharedData,
    Snapshot,
    UsageTotals,
)


def test_run_state_classes_use_slots():
    """A misspelt attribute cannot appear, and thousands of runs stay small."""
    for cls in (RunState, *PARTS):
        assert not hasattr(cls.__new__(cls), "__dict__")
