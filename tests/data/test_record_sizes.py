"""
What is too long for a record is refused or cut where it enters a run.
"""

from __future__ import annotations

import json

import attrs

from stepengine.data.record_sizes import MAX_INLINE_CHARS, MAX_VALUE_BYTES, find_length_problem, fit_child_result
from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import HandlerError

PIECE = "x" * (MAX_INLINE_CHARS - 1)
MANY = {str(number): [PIECE] for number in range(MAX_VALUE_BYTES // MAX_INLINE_CHARS + 1)}


def test_members_that_are_too_long_together_are_counted_in_bytes() -> None:
    problem = find_length_problem(MANY)

    length = len(json.dumps(MANY, separators=(",", ":")))
    assert f"its record would have {length:,} bytes, and one has at most {MAX_VALUE_BYTES:,}" == problem
    assert "" == find_length_problem({"alone": PIECE * 500}), "a long text has a record of its own"


def test_child_result_that_is_too_long_becomes_a_failure() -> None:
    short = ChildResult(agent_id="poet", run_id="r-0", status=RunStatus.COMPLETED, output="fine", text="fine")
    failed = fit_child_result(attrs.evolve(short, output=MANY))

    assert short is fit_child_result(short)
    assert (RunStatus.FAILED, None, "") == (failed.status, failed.output, failed.text)
    assert isinstance(failed.error, HandlerError)
    assert "the result of agent 'poet' is too long: its record would have" in str(failed.error)
