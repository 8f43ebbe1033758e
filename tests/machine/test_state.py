"""Whose the state of a run is: it changes by its own methods, and nobody sets attributes of it from outside."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stepengine.machine
from stepengine.machine.background import Children
from stepengine.machine.budget import Budget
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.history import RunHistory
from stepengine.machine.output import Output
from stepengine.machine.progress import Progress
from stepengine.machine.run_tools import RunTools
from stepengine.machine.side_events import SideEvents
from stepengine.machine.spent import UsageTotals
from stepengine.machine.state import BodyProgress, Prompt, RunQuestions, RunState, SharedData, Snapshot

MACHINE = Path(stepengine.machine.__file__).parent
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
STATEFUL = (RunState, SideEvents, *PARTS)


def targets_of(node: ast.AST) -> list[ast.expr]:
    """Return what a node binds, deletes or sets, tuples taken apart."""
    match node:
        case ast.Assign() | ast.Delete():
            found = [*node.targets]
        case ast.AugAssign() | ast.AnnAssign() | ast.For() | ast.NamedExpr() | ast.comprehension():
            found = [node.target]
        case ast.With():
            found = [item.optional_vars for item in node.items if item.optional_vars is not None]
        case _:
            found = []
    return [inner for target in found for inner in ast.walk(target) if isinstance(inner, ast.expr)]


def names_of_state() -> set[str]:
    """Return the names of all attributes that the stateful classes have."""
    made = {name for cls in STATEFUL for name in getattr(cls, "__slots__", ())}
    return made | {"waiting", "_run", "warnings", "problems"}


def set_from_outside(source: str) -> list[str]:
    """Return the places where an attribute of the run's state is set through anything but ``self``."""
    known, found = names_of_state(), []
    for node in ast.walk(ast.parse(source)):
        for target in targets_of(node):
            if not isinstance(target, ast.Attribute) or not isinstance(target.ctx, ast.Store | ast.Del):
                continue
            owner = target.value
            if not (isinstance(owner, ast.Name) and owner.id == "self") and target.attr in known:
                found.append(f"line {target.lineno}: {ast.unparse(target)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("file", sorted(MACHINE.glob("*.py")), ids=lambda file: file.stem)
def test_nobody_sets_attributes_of_a_runs_state_from_outside(file):
    assert set_from_outside(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "planted",
    [
        "run.budget.reached = None",
        "run.output.value = 5",
        "call.run.side_events.warnings = []",
        "run.history.record = run.history.view = longer",
        "call.run.progress.step, other = 1, 2",
        "run.budget.steps_left -= 1",
        "run.progress.has_asked: bool = True",
        "del run.effects.stop",
        "self.run.spent.children = []",
        "for run.progress.step in range(3): pass",
        "with held() as run.effects.stop: pass",
        "setattr(run, name, 1)",
    ],
)
def test_one_that_does_is_found(planted):
    source = (MACHINE / "step.py").read_text(encoding="utf-8")
    assert len(set_from_outside(f"{source}\n{planted}\n")) >= 1


def test_the_state_has_slots_only():
    """A misspelt attribute cannot appear, and thousands of runs stay small."""
    for cls in (RunState, *PARTS):
        assert not hasattr(cls.__new__(cls), "__dict__")
