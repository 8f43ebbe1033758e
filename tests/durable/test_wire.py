"""
What stands in the database, without one: everything comes back as it was, and what is another version's is refused.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.codec import decode_stored
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, freeze
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.outcomes import Failure, SetOutput, Stop, Value
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, ChildResult, RunInfo, RunResult, RunStatus
from stepengine.data.usage import Spending, Usage
from stepengine.durable.wire import (
    Ancestor,
    StartOutcomes,
    SubmittedRun,
    encode_answers,
    encode_body_end,
    encode_error,
    encode_outcome,
    encode_result,
    mark_usage_uncertain,
    parse_answers,
    parse_body_end,
    parse_error,
    parse_outcome,
    parse_result,
)
from stepengine.errors import DataError, StepEngineError, ToolError
from stepengine.machine.plan import Finished
from stepengine.redaction import Redactor

REDACTOR = Redactor({}, shapes=True)
STATE = AgentState(run_id="r", agent_id="a", step_index=3)
OPTIONAL: dict[str, Any] = {
    "prompt": "go", "params": freeze({"n": [1, None]}), "info": RunInfo("s", "u", freeze({"k": "v"})), "limits": Limits(max_steps=3),
    "previous": STATE, "answers": {"Q?": "yes", "R?": True, "S?": Answer("no", by="ann")}, "priority": 2, "pool": "large",
    "spawns": (
        Ancestor(seq=4, agent_id="a", tool_name="t", input={"n": 1}, source="handler", at=5, values={"k": [1]}),
        Ancestor(seq=2, agent_id="c", prompt="p", tool_call_id="c1", is_inline=True, at=7, of=2),
    ), "parent": STATE,
    "slice": Limits(max_tokens=9), "turn": 4, "rules": (freeze({"tool": "x"}),),
}  # fmt: skip


@pytest.mark.deep
@pytest.mark.smoke
@given(st.sets(st.sampled_from(sorted(OPTIONAL))))
def test_run_request_round_trips(names: set[str]) -> None:
    order = SubmittedRun(
        root="r", agent_id="a", created="2026-01-01T00:00:00Z", seed="s", **{n: OPTIONAL[n] for n in names}
    )
    stored = json.loads(json.dumps(order.to_json()))

    assert order == SubmittedRun.from_json(stored)
    assert order.id == ("r/4.2" if "spawns" in names else "r")
    for broken in ({**stored, "schema": 2}, {k: v for k, v in stored.items() if k != "seed"}, {**stored, "spawns": 5}):
        with pytest.raises(DataError, match=r"schema 2|stored request of a run is invalid"):
            SubmittedRun.from_json(broken)


CHANGES = (
    Change(context=JsonDict({"a": [1, None]}), values={"last": "x", "many": [1.5, {"b": True}]}),
    Change(system_prompt="Now."),
    Change(values={"own": object()}),
    SetOutput(freeze({"n": 1})),
    SetOutput(None),
    UserMessage("meanwhile"),
)


@pytest.mark.spec("programs:PG7", "programs:PG5")
@given(
    st.lists(st.sampled_from(CHANGES)), st.integers(0, 3), st.sampled_from([RunStatus.COMPLETED, RunStatus.CANCELLED])
)
def test_body_result_round_trips_without_process_values(changes: list[Any], children: int, status: RunStatus) -> None:
    spending = Spending(usage=Usage(input_tokens=3, requests=1), cost=Decimal("0.25"), credits_used=2)
    ended = Finished(
        status=status,
        state=STATE,
        spending=spending,
        children=tuple([ChildResult(agent_id="c", run_id=f"r-{n}", output=freeze([n])) for n in range(children)]),
        changes=tuple(changes),
    )
    result = ToolResult.text("done")
    form = json.loads(
        json.dumps(encode_body_end(ended, result, descendant_count=children, approval_rules=OPTIONAL["rules"]))
    )
    left = parse_body_end(form["body"])

    own = [attrs.evolve(each, values={}) if each is CHANGES[2] else each for each in changes]
    assert own == list(left.changes)
    assert (spending, ended.children) == (left.spending, left.children)
    assert (status.value, children, result) == (form["status"], form["started"], decode_stored(form["result"]))


OUTCOMES = {
    ("", 1): ("tool", "f", {"v": 1}),
    ("1", 2): ("step", "g", None),
    ("12", 1): ("x", "h", {}),
    ("1.3", 1): ("y", "i", {}),
}


def test_seed_round_trips_and_selects_subtrees() -> None:
    seed = StartOutcomes(OUTCOMES, {"": {"a": 1}, "1": {"b": 2}, "12": {}, "1.3": {"c": 3}})

    assert seed == StartOutcomes.from_json(json.loads(json.dumps(seed.to_json())))
    assert ({("1", 2), ("1.3", 1)}, {"1", "1.3"}) == tuple(
        map(set, (seed.select_subtree("1").outcomes, seed.select_subtree("1").lookups))
    )


@pytest.mark.parametrize(
    "outcome", [Value("x", 5), Failure(ToolError("bad"), 6), Stop("cancelled", 7), Stop("limit", 8, StepEngineError("full"))]
)  # fmt: skip
def test_outcome_round_trips(outcome: Any) -> None:
    again = parse_outcome(json.loads(json.dumps(encode_outcome(3, outcome, REDACTOR))))

    assert (type(outcome), outcome.at) == (type(again), again.at)
    assert str(getattr(outcome, "error", None)) == str(getattr(again, "error", None))
    assert getattr(outcome, "value", None) == getattr(again, "value", None)
    assert getattr(outcome, "kind", None) == getattr(again, "kind", None)


def test_unstorable_outcome_is_a_failure_that_says_it_happened() -> None:
    again = parse_outcome(encode_outcome(1, Value(object()), REDACTOR))

    assert isinstance(again, Failure)
    assert str(again.error).startswith("the effect happened, but its outcome cannot be stored")


def test_attempts_are_stored_only_if_present() -> None:
    plain = encode_outcome(1, Value("x"), REDACTOR)
    full = encode_outcome(1, Value("x"), REDACTOR, attempts=[{"n": 1}])

    assert plain == {k: v for k, v in full.items() if k != "attempts"}
    assert [{"n": 1}] == full["attempts"]


def test_uncertain_model_usage_is_a_lower_bound() -> None:
    reply = Value(ModelReply((), model="m", usage=Usage(input_tokens=3)), 4)

    assert (True, 3) == ((usage := mark_usage_uncertain(reply).value.usage).at_least, usage.input_tokens)
    assert mark_usage_uncertain(Value(ModelReply((), model="m"))).value.usage.at_least
    assert Value("x") == mark_usage_uncertain(Value("x"))


def test_errors_round_trip_by_class_or_by_name() -> None:
    ours, other = parse_error(encode_error(ToolError("bad"))), parse_error(encode_error(KeyError("k")))

    assert (ToolError, "bad") == (type(ours), str(ours))
    assert (StepEngineError, "KeyError: 'k'") == (type(other), str(other))
    assert parse_error(None) is None


def test_answers_keep_question_order_and_missing_one_is_named() -> None:
    questions = [Question(id="q1", text="A?"), Question(id="q2", text="B?")]
    form = encode_answers(questions, {"q2": "two", "q1": "one"})

    assert ["one", "two"] == [answer.text for answer in parse_answers(form, questions)]
    with pytest.raises(DataError, match="no answer to 'q1'"):
        parse_answers({"q2": form["q2"]}, questions)


@pytest.mark.parametrize(("error", "reason"), [(None, None), (ToolError("bad"), StopReason.END_TURN)])
def test_result_round_trips(error: Any, reason: Any) -> None:
    result = RunResult(
        status=RunStatus.FAILED, stop_reason=reason, state=STATE, output=freeze({"a": 1}), text="t", thinking=("h",),
        children=(ChildResult(agent_id="c", output="o"),), session_id="s", error=error, warnings=("w",), leaked=("l",),
    )  # fmt: skip
    form = json.loads(json.dumps(encode_result(result)))
    again = parse_result(form)

    for name in (
        "status",
        "stop_reason",
        "state",
        "output",
        "text",
        "spending",
        "tool_calls",
        "thinking",
        "children",
        "session_id",
        "warnings",
        "leaked",
    ):
        assert getattr(result, name) == getattr(again, name), name
    assert (type(error), str(error)) == (type(again.error), str(again.error))
    assert "own" == parse_result(form, "own").output
    assert [None, True, False] == [
        parse_result({**form, **more}).session_saved
        for more in ({}, {"session": {"is_saved": True}}, {"session": {"is_saved": False}})
    ]
