"""
Small values with arithmetic: usage, spending, limits, settings, hooks, questions.
"""

from __future__ import annotations

from decimal import Decimal
from functools import reduce
from typing import Any

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepengine.data.codec import from_json, to_json
from stepengine.data.hooks import HOOK_POINTS, Change, Hooks
from stepengine.data.json import JsonDict, JsonList
from stepengine.data.limits import DEFAULT_LIMITS, Limits
from stepengine.data.messages import (
    SideEffect,
    TextPart,
    ToolCallLog,
    ToolCallPart,
    ToolResult,
    UserMessage,
)
from stepengine.data.models import ModelReply, ModelSettings, StopReason, Thinking
from stepengine.data.questions import Answer, Question, to_answer
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.errors import DataError, DefinitionError, StepEngineError, TranscriptError
from tests import strategies

BUCKETS = ("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "reasoning_tokens")
usages = strategies.usages
spendings = strategies.spendings


# --- usage and cost -------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC76")
@given(usages)
def test_the_disjoint_buckets_add_up_to_the_total(usage: Usage) -> None:
    assert sum(getattr(usage, bucket) for bucket in BUCKETS) == usage.total_tokens
    assert usage.prompt_tokens + usage.completion_tokens == usage.total_tokens
    assert usage.input_tokens + usage.cache_read_tokens + usage.cache_write_tokens == usage.prompt_tokens


@given(usages, usages, usages)
def test_usages_add_like_numbers(a: Usage, b: Usage, c: Usage) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Usage() == a
    assert (a + b).total_tokens == a.total_tokens + b.total_tokens
    assert (a + b).requests == a.requests + b.requests
    assert (a + b).at_least is (a.at_least or b.at_least)
    for bucket in BUCKETS:
        assert getattr(a + b, bucket) == getattr(a, bucket) + getattr(b, bucket)


@pytest.mark.spec("reliability:I4")
@given(strategies.costs, strategies.costs)
def test_a_cost_that_is_unknown_once_stays_unknown(a: Decimal | None, b: Decimal | None) -> None:
    total = add_cost(a, b)

    assert add_cost(b, a) == total
    assert (total is None) is (a is None or b is None)
    assert total is None or total == sum((c for c in (a, b) if c is not None), Decimal(0))
    assert add_cost(a, Decimal(0)) == a


@pytest.mark.spec("reliability:I4")
@pytest.mark.parametrize("make", [ModelReply, ToolResult])
@pytest.mark.parametrize("cost", [Decimal("NaN"), Decimal("-inf"), Decimal(-1), Decimal("1E+999999999999"), 0.5, "1"])
def test_a_cost_that_cannot_be_counted_is_refused(make: Any, cost: Any) -> None:
    with pytest.raises(DataError, match="a cost is a Decimal from 0 to 1,000,000,000,000 US dollars"):
        make((), cost=cost)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:D15")
@given(spendings, spendings, spendings)
@settings(max_examples=20)
def test_spendings_add_like_numbers(a: Spending, b: Spending, c: Spending) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Spending() == a
    for table in ("by_agent", "by_model"):
        merged = getattr(a + b, table)
        assert set(getattr(a, table)) | set(getattr(b, table)) == set(merged)
        parts = [*getattr(a, table).values(), *getattr(b, table).values()]
        assert reduce(Usage.__add__, parts, Usage()) == reduce(Usage.__add__, merged.values(), Usage())
    for table in ("cost_by_agent", "cost_by_model"):
        mine, others, both = getattr(a, table), getattr(b, table), getattr(a + b, table)
        assert set(mine) | set(others) == set(both)
        assert {name: add_cost(mine.get(name, Decimal(0)), others.get(name, Decimal(0))) for name in both} == both
    with pytest.raises(TypeError):
        (a + b).by_agent["x"] = Usage()  # type: ignore[index]


# --- limits and settings --------------------------------------------------------------------------------------------


@given(strategies.limits, strategies.limits, strategies.limits)
@settings(max_examples=20)
def test_gaps_of_limits_are_filled_from_below(run: Limits, agent: Limits, engine: Limits) -> None:
    effective = run.resolve(agent).resolve(engine)

    assert effective == run.resolve(agent.resolve(engine))
    for name in attrs.asdict(Limits()):
        wanted = [getattr(limits, name) for limits in (run, agent, engine)]
        assert next((value for value in wanted if value is not None), None) == getattr(effective, name)
    assert run.resolve(None) == run.resolve(Limits()) == Limits().resolve(run) == run


@given(strategies.limits, strategies.limits)
def test_cap_lowers_limits_above_it_and_keeps_the_others(own: Limits, most: Limits) -> None:
    names = ("max_tokens", "max_cost_usd", "max_seconds", "max_depth")
    capped = own.cap({name: getattr(most, name) for name in names})

    for name in attrs.asdict(Limits()):
        before, after = getattr(own, name), getattr(capped, name)
        cap = getattr(most, name) if name in names else None
        is_above = cap is not None and (before is None or Decimal(str(before)) > Decimal(str(cap)))
        assert (cap if is_above else before) == after
    assert Limits(max_cost_usd=0.1) == Limits(max_cost_usd=0.1).cap({"max_cost_usd": Decimal("0.1")})


@pytest.mark.spec("generator-contract:G46", "requirements:D7")
def test_the_default_limits_are_the_documented_ones() -> None:
    assert (50, 1000, 5, 100, 16, 8, "final_answer") == (
        DEFAULT_LIMITS.max_steps,
        DEFAULT_LIMITS.max_actions,
        DEFAULT_LIMITS.max_depth,
        DEFAULT_LIMITS.max_total_children,
        DEFAULT_LIMITS.max_children,
        DEFAULT_LIMITS.max_concurrent_children,
        DEFAULT_LIMITS.on_max_steps,
    )
    assert (None, None, None) == (DEFAULT_LIMITS.max_tokens, DEFAULT_LIMITS.max_cost_usd, DEFAULT_LIMITS.max_seconds)


@given(strategies.settings, strategies.settings)
@settings(max_examples=20)
def test_merged_settings_prefer_values_of_the_override(base: ModelSettings, over: ModelSettings) -> None:
    merged = base.merge(over)

    for name in (a.name for a in attrs.fields(ModelSettings)):
        is_set = getattr(over, name) != getattr(ModelSettings(), name)
        assert getattr(over if is_set else base, name) == getattr(merged, name)
    assert base.merge(None) == base.merge(ModelSettings()) == ModelSettings().merge(base) == base
    assert merged.merge(over) == merged


# --- hooks ----------------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_list_order_the_first_operand_first() -> None:
    first, second, third = (lambda ctx, n=n: n for n in range(3))
    engine = Hooks(pre_step=[first, second], post_run=first)
    agent = Hooks(pre_step=third, pre_tool=(second,))
    both = engine + agent

    assert (first, second, third) == both.get_hooks("pre_step") == both.pre_step
    assert (first,) == both.get_hooks("post_run")
    assert (second,) == both.get_hooks("pre_tool")
    assert () == both.on_stop
    assert both + Hooks() == Hooks() + both == both
    assert (engine + agent) + both == engine + (agent + both)


@pytest.mark.spec("requirements:H1")
def test_hooks_are_false_when_there_are_none() -> None:
    assert not Hooks()
    for point in HOOK_POINTS:
        assert Hooks(**{point: print}), point
        assert Hooks(**{point: print}) == Hooks(**{point: [print]})
        assert (print,) == Hooks(**{point: print}).get_hooks(point)
    assert set(HOOK_POINTS) == {a.name for a in attrs.fields(Hooks)}


def test_change_freezes_its_arguments() -> None:
    change = Change(messages=[UserMessage("hi")], view=Transcript(), context={"a": [1]}, tail=[UserMessage("x")])

    assert Transcript([UserMessage("hi")]) == change.messages
    assert Transcript() == change.view
    assert JsonList is type(change.context["a"])  # type: ignore[index]
    assert (UserMessage("x"),) == change.tail
    assert Change() == Change(messages=None, view=None, context=None, input=None)
    with pytest.raises(DataError):
        Change(input=[1])
    with pytest.raises(TranscriptError):
        Change(messages=[5])


# --- questions ------------------------------------------------------------------------------------------------------


@given(strategies.questions, st.booleans() | strategies.text)
def test_callers_answer_becomes_a_choice_or_free_text(question: Question, given_answer: bool | str) -> None:
    answer = to_answer(given_answer, question)
    text = {True: "yes", False: "no"}.get(given_answer) if isinstance(given_answer, bool) else given_answer

    assert text == answer.value
    assert ((text,) if text in question.options else ()) == answer.selected
    assert to_answer(answer, question) is answer
    assert not answer.declined


@pytest.mark.parametrize("text", ["yes", "y", "YES", " Allow ", "true"])
def test_agreeing_words_count_as_approval(text: str) -> None:
    assert Answer(text=text).agrees
    assert Answer(selected=(text,)).agrees
    assert not Answer(text=text, declined=True).agrees


@given(strategies.text)
def test_other_words_do_not_count_as_approval(text: str) -> None:
    assume(text.strip().lower() not in {"yes", "y", "allow", "true"})

    assert not Answer(text=text).agrees


def test_an_answer_is_its_choices_or_its_text() -> None:
    assert "a, b" == Answer(["a", "b"], "ignored").value
    assert "free" == Answer(text="free").value
    assert "" == Answer(declined=True).value
    assert ("yes",) == Answer("yes").selected


@pytest.mark.spec("requirements:K2")
def test_options_are_labels() -> None:
    question = Question("q1", "which?", [{"label": "a", "description": "first"}, "b", 3])

    assert ("a", "b", "3") == question.options
    assert ("only",) == Question("q1", "which?", "only").options


# --- requests, replies, results -------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC97")
def test_stop_reasons_are_closed_and_default_by_content() -> None:
    assert ["end_turn", "tool_use", "max_tokens", "stop_sequence", "refusal", "pause", "error"] == list(StopReason)
    call = ToolCallPart("", "t")
    assert StopReason.TOOL_USE is ModelReply(["text", call]).stop_reason
    assert StopReason.END_TURN is ModelReply("text").stop_reason
    assert StopReason.MAX_TOKENS is ModelReply(call, stop_reason="max_tokens").stop_reason  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="because"):
        ModelReply("text", stop_reason="because")  # type: ignore[arg-type]


@pytest.mark.spec("requirements:B13")
def test_tool_result_text_builds_on_class_and_reads_on_instance() -> None:
    made = ToolResult.text("fine", tool_name="t")

    assert ToolResult((TextPart("fine"),), tool_name="t") == made
    assert "fine" == made.text
    assert "fine" == ToolResult("fine").text
    assert '{"a":[1,"ä"]}' == ToolResult.json({"a": (1, "ä")}).text
    assert 'before{"a":1}after' == ToolResult.parts(["before", ToolResult.json({"a": 1}).content[0], "after"]).text
    with pytest.raises(AttributeError):
        made.text = "other"  # type: ignore[misc]


@pytest.mark.spec("requirements:B13")
def test_results_expose_error_state_and_data() -> None:
    assert ToolResult.error("no").is_error
    assert "denied" == ToolResult.error("no", status="denied").status
    assert not ToolResult.make_pending("q1").is_error
    assert "waiting for the answer to question q1" in ToolResult.make_pending("q1").text
    assert {"a": 1} == ToolResult.json({"a": 1}).data
    assert ToolResult("text").data is None
    assert "x\ufffdy" == ToolResult.error("x\udce9y").text
    log = ToolCallLog("t", {"a": [1]}, ToolResult.error("no"), 0, 0, "c1")
    assert log.is_error
    assert JsonDict is type(log.input)
    assert JsonList is type(SideEffect("k", details=[1]).details)


def test_unwrap_returns_the_output_or_raises() -> None:
    state = AgentState(agent_id="a")
    cause = ValueError("broken")
    waiting = RunResult[str](
        status=RunStatus.SUSPENDED,
        state=state,
        pending_questions=(Question("q1", "sure?"),),
        spending=Spending(Usage(1)),
    )

    assert "out" == RunResult(status=RunStatus.COMPLETED, state=state, output="out").unwrap()
    with pytest.raises(ValueError, match="broken") as caught:
        RunResult[str](status=RunStatus.FAILED, state=state, error=cause).unwrap()
    assert caught.value is cause
    with pytest.raises(StepEngineError, match=r"the run of 'a' ended as suspended; it waits for \['sure\?'\]"):
        waiting.unwrap()
    with pytest.raises(StepEngineError, match=r"ended as max_steps$"):
        RunResult[str](status=RunStatus.MAX_STEPS, state=state).unwrap()
    spent = waiting.spending
    assert (spent.usage, spent.cost, spent.credits_used) == (waiting.usage, waiting.cost, waiting.credits_used)
    assert (spent.by_agent, spent.by_model) == (waiting.usage_by_agent, waiting.usage_by_model)


@pytest.mark.spec("requirements:A16")
def test_thinking_modes_are_spellings_and_stored_forms() -> None:
    modes = {
        "none": {},
        "enabled": {"mode": "enabled"},
        "extended": {"mode": "extended"},
    }
    for mode, members in modes.items():
        spelt = Thinking(mode=mode)
        stored = {"stepengine": 1, "type": "thinking_settings", **members}
        assert stored == to_json(spelt)
        assert from_json(to_json(spelt)) == spelt == Thinking(mode)  # type: ignore[arg-type]
    members = {"mode": "extended", "budget_tokens": 2_000}
    assert {"stepengine": 1, "type": "thinking_settings", **members} == to_json(Thinking(tokens=2_000))
    assert Thinking("extended", 2_000) == Thinking(mode="extended", budget_tokens=2_000) == Thinking(tokens=2_000)
    assert (None, None, True) == (Thinking().effort, Thinking().tokens, Thinking().show)
    assert ("none", None) == (Thinking("none").effort, Thinking("none").tokens)


@pytest.mark.parametrize("given", [{"effort": "none"}, {"mode": "none"}])
def test_thinking_none_with_a_number_is_refused(given: Any) -> None:
    with pytest.raises(
        DefinitionError, match=r"Thinking\('none'\) cannot be combined with a number of tokens \(16000\)"
    ):
        Thinking(tokens=16_000, **given)


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"), [(Limits, "max_step", "max_steps"), (ModelSettings, "temperatur", "temperature")]
)
def test_misspelt_argument_is_answered_with_the_nearest_one(kind: Any, misspelt: str, meant: str) -> None:
    said = f"{kind.__name__} has no argument '{misspelt}'; did you mean '{meant}'\\? Valid arguments: "
    with pytest.raises(DefinitionError, match=said):
        kind(**{misspelt: 1})
