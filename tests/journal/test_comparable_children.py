"""What of a child's result a replay compares: that it failed and of what kind, never the words."""

from __future__ import annotations

import itertools

import attrs
import pytest

from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import LimitExceeded, ModelError, StepEngineError, ToolError
from stepengine.journal.encoding import to_comparable_form

FAILED = ChildResult(agent_id="scout", run_id="r1", status=RunStatus.FAILED)
ENDS = [
    None,
    ToolError("/home/ann/tools.py, line 3"),
    StepEngineError("no"),
    ModelError("no"),
]


@pytest.mark.parametrize(("first", "second"), [*itertools.product(ENDS, ENDS)])
def test_children_that_failed_are_alike_when_their_errors_are_of_one_kind(first, second) -> None:
    one, other = (to_comparable_form(attrs.evolve(FAILED, error=error)) for error in (first, second))

    assert (type(first) is type(second)) == (one == other)


def test_the_words_of_an_error_and_the_limit_that_ended_a_child_are_not_compared() -> None:
    spent = attrs.evolve(FAILED, status=RunStatus.MAX_STEPS)

    assert to_comparable_form(attrs.evolve(FAILED, error=ToolError("a"))) == to_comparable_form(
        attrs.evolve(FAILED, error=ToolError("b"))
    )
    assert to_comparable_form(spent) == to_comparable_form(
        attrs.evolve(spent, error=LimitExceeded("no more", kind="steps", limit=3))
    )
