"""
Exit codes, the JSON form of a result, and the words for what a run spent.
"""

from __future__ import annotations

import json
from decimal import Decimal

import pytest
from pydantic import BaseModel

from stepengine.cli.exits import choose_exit_code
from stepengine.cli.screen.render import format_cost, format_tokens, result_to_json, to_ascii_json
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunResult, RunStatus
from stepengine.data.usage import Spending, Usage
from stepengine.errors import HandlerError, LimitExceeded, MissingKey, ModelError, ReplayDivergence, UnknownModel

ENDINGS = [
    ("completed", None, 0),
    ("failed", HandlerError("x"), 1),
    ("failed", ModelError("x"), 1),
    ("failed", None, 1),
    ("failed", MissingKey("x"), 2),
    ("failed", UnknownModel("x"), 2),
    ("suspended", None, 3),
    ("max_steps", None, 4),
    ("truncated", None, 4),
    ("failed", LimitExceeded("x"), 4),
    ("cancelled", LimitExceeded("x"), 4),
    ("failed", ReplayDivergence("x"), 5),
    ("cancelled", None, 1),
]


@pytest.mark.spec("ecosystem:EC141")
@pytest.mark.parametrize(("status", "error", "expected"), ENDINGS)
def test_every_ending_has_its_exit_code(status: str, error: BaseException | None, expected: int) -> None:
    result = RunResult(status=RunStatus(status), state=AgentState(), error=error)

    assert expected == choose_exit_code(result)
    assert {each.value for each in RunStatus} == {each for each, *_ in ENDINGS}


class Report(BaseModel):
    count: int
    tags: set[str] = set()


def test_the_json_form_holds_everything_but_the_state() -> None:
    usage = Usage(input_tokens=3, output_tokens=4, requests=1)
    result = RunResult(
        status=RunStatus.FAILED,
        state=AgentState(run_id="r1", agent_id="a"),
        output=Report(count=1, tags={"x"}),
        spending=Spending(usage=usage, cost=Decimal("0.25")),
        pending_questions=[Question("q1", "Sure?", ["yes", "no"])],
        children=(ChildResult(agent_id="b", output={"n": 1}),),
        error=HandlerError("it broke \ud800\x1b"),
        warnings=("w",),
    )

    found = json.loads(to_ascii_json(result_to_json(result)))

    assert {"count": 1, "tags": ["x"]} == found["output"]
    assert ("failed", "0.25", 7) == (found["status"], found["cost"], found["usage"]["total_tokens"])
    assert "HandlerError" == found["error"]["type"]
    assert "q1" == found["pending_questions"][0]["id"]
    assert {"n": 1} == found["children"][0]["output"]


def test_an_unknown_cost_is_not_zero() -> None:
    assert "cost unknown" == format_cost(None)
    assert "$0.0123" == format_cost(Decimal("0.01234"))
    assert "$12.50" == format_cost(Decimal("12.5"))
    assert "" == format_tokens(Usage())
    bound = Usage(input_tokens=1200, output_tokens=3, at_least=True)
    assert "at least 1,200 tokens in, 3 out" == format_tokens(bound)
    assert ["at least $0.0123", "at least $12.50"] == [
        format_cost(Decimal(cost), usage=bound) for cost in ("0.0123", "12.5")
    ]
    assert ("cost unknown", "$0.0123") == (
        format_cost(None, usage=bound),
        format_cost(Decimal("0.0123"), usage=Usage()),
    )
