"""The parts of a run's state, each without a run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stepengine.data.effects import CallFunction, Gather
from stepengine.data.limits import Limits
from stepengine.data.messages import UserMessage
from stepengine.data.models import StopReason
from stepengine.data.outcomes import Failure, Gathered, Stop, Value
from stepengine.data.state import AgentState
from stepengine.errors import BadYield, LimitExceeded
from stepengine.machine.background import NO_CHILDREN, Children
from stepengine.machine.budget import Budget
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.history import RunHistory
from stepengine.machine.progress import Progress
from stepengine.machine.signals import Stopped
from stepengine.machine.spent import UsageTotals
from stepengine.machine.state import RunQuestions, SharedData

CREATED = datetime(2026, 1, 1, tzinfo=UTC)
EMPTY = AgentState().message_history


class Parts:
    """The effects of a run, and what they change."""

    def __init__(self):
        self.history = RunHistory(EMPTY, EMPTY, {})
        self.budget = Budget(Limits(max_steps=3), "a")
        self.spent = UsageTotals()
        self.effects = EffectChannel(CREATED, 100, self.history, self.budget, self.spent)


def effect_of(parts):
    return CallFunction(parts.effects.number(), None)


def test_effects_are_numbered_and_time_is_that_of_the_latest_outcome():
    parts = Parts()
    first, second = effect_of(parts), effect_of(parts)
    assert (first.seq, second.seq, parts.effects.now) == (0, 1, 100)

    parts.effects.receive(Gathered((Value(1, 300), Value(2, 200))), Gather((first, second)))

    assert parts.effects.now == 300
    assert parts.effects.time == CREATED + timedelta(milliseconds=300)


def test_messages_in_an_outcome_wait_in_the_history():
    parts = Parts()
    parts.effects.receive(Value(1, 200, inputs=(UserMessage("hello"),)), effect_of(parts))

    assert [m.text for m in parts.history.inbox] == ["hello"]
    assert parts.history.append_inbox()
    assert [m.text for m in parts.history.record] == ["hello"]
    assert not parts.history.append_inbox()


def test_the_first_stop_counts_and_a_spent_limit_is_recorded():
    parts = Parts()
    limit = LimitExceeded("spent", kind="tokens", limit=1)
    parts.effects.receive(Failure(limit, 150), effect_of(parts))
    for kind in ("cancelled", "shutdown"):
        parts.effects.receive(Stop(kind, 200), effect_of(parts))

    assert parts.budget.reached is limit
    assert parts.effects.stop is not None
    assert parts.effects.stop.kind == "cancelled"
    with pytest.raises(Stopped):
        parts.effects.unwrap(parts.effects.stop)


def test_each_step_is_deducted_and_thoughts_in_a_row_are_counted():
    budget = Budget(Limits(max_steps=2), "a")
    progress = Progress(5, budget)
    assert progress.request_step()
    assert [progress.count_step(StopReason.END_TURN, only_thoughts=said) for said in (True, False)] == [1, 0]
    progress.end_step()

    assert (progress.step, progress.step_index, budget.steps_left, progress.truncated) == (7, 7, 0, False)
    assert not progress.request_step()


def test_hooks_refuse_the_end_of_a_turn_only_so_often():
    progress = Progress(0, Budget(Limits(max_steps=2), "a"))
    assert [progress.refuse_stop(2) for _ in range(3)] == [True, True, False]
    progress.reset_refused_stops()
    assert progress.refuse_stop(2)


def test_a_question_has_its_name_alone():
    questions = RunQuestions(())
    assert [questions.register_key(key) for key in (None, "a", None, "b")] == ["", "a", "", "b"]
    with pytest.raises(BadYield, match="'a' names a question"):
        questions.register_key("a")


def test_none_deletes_a_member_of_the_context():
    shared = SharedData(AgentState(context={"a": 1, "b": 2}).context, {})
    shared.merge({"a": None, "c": [3]})
    assert shared.context == {"b": 2, "c": [3]}


def test_a_run_has_a_registry_of_children_once_it_may_start_some():
    children = Children("writer")
    assert children.background is NO_CHILDREN
    assert children.ensure_background() is children.ensure_background() is not NO_CHILDREN

    assert (children.successor, children.handed_to) == (None, "writer")
    children.hand_over("editor")
    assert (children.successor, children.handed_to) == ("editor", "editor")
