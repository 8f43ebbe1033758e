"""
Machines with a planted error: `simulate` catches each of them, under the row that it breaks.
"""

from __future__ import annotations

import contextlib

import attrs
import pytest

from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import Notify
from stepengine.data.events import TextCompleted
from stepengine.data.limits import Limits
from stepengine.data.yields import STEP, AgentCall, GenerateN, Parallel, ToolCall
from stepengine.errors import LimitExceeded
from stepengine.machine import batch, handler, run, step
from stepengine.machine.author import Author
from stepengine.machine.effect_channel import EffectChannel
from stepengine.machine.history import RunHistory
from stepengine.machine.signals import Stopped
from stepengine.machine.usage_totals import UsageTotals
from stepengine.runtime.limits import SpendingLedger
from stepengine.testing import SimulationFailed, simulate, text, tool_call, tool_calls

KID = AgentDefinition("kid", tools=["look"])


def lost(monkeypatch):
    commit = step._commit_reply
    monkeypatch.setattr(step, "_commit_reply", lambda state, message, calls: commit(state, message, calls[:1]))


def swapped(monkeypatch):
    distributed = batch._apply_outcomes_and_list_stops

    def mutant(members, outcomes):
        return distributed(members, [*reversed(outcomes)])

    monkeypatch.setattr(batch, "_apply_outcomes_and_list_stops", mutant)


def unpairing(monkeypatch):
    finished = run._make_finished

    def mutant(state, ending):
        done = finished(state, ending)
        history = [*done.state.message_history]
        broken = Unchecked([m for m in history if m.role != "tool"])
        return attrs.evolve(done, state=evolved(done.state, broken))

    monkeypatch.setattr(run, "_make_finished", mutant)


class Unchecked(tuple):
    """
    A transcript that nobody has checked.
    """

    __slots__ = ()

    def extend(self, added):
        return Unchecked([*self, *added])


def evolved(state, history):
    broken = attrs.evolve(state)
    object.__setattr__(broken, "message_history", history)
    return broken


def miscounted(monkeypatch):
    monkeypatch.setattr(UsageTotals, "count_child", lambda spent, child: spent.children.append(child))


def left_open(monkeypatch):
    kept = []
    monkeypatch.setattr(Author, "close", lambda author: kept.append(author) or ())


def beyond(monkeypatch):
    budgeted = step.run_step_within_budget

    def mutant(state, over):
        state.budget.steps_left = max(1, state.budget.steps_left)
        return budgeted(state, over)

    monkeypatch.setattr(handler, "run_step_within_budget", mutant)


def renumbered(monkeypatch):
    allocate = EffectChannel.allocate_number
    monkeypatch.setattr(EffectChannel, "allocate_number", lambda effects: min(allocate(effects), 2))


def talkative(monkeypatch):
    tell = run._emit_end_or_suspend

    def mutant(state, ending):
        yield from tell(state, ending)
        yield Notify(TextCompleted(path=state.plan.path, seq=state.effects.seq, text="one more thing"))

    monkeypatch.setattr(run, "_emit_end_or_suspend", mutant)


def leaking(monkeypatch):
    answer = handler._perform_yield

    def mutant(state, author, asked):
        try:
            return (yield from answer(state, author, asked))
        except Stopped as stopped:
            author.throw(stopped)

    monkeypatch.setattr(handler, "_perform_yield", mutant)


def deaf(monkeypatch):
    monkeypatch.setattr(RunHistory, "append_inbox", lambda history: history.inbox.clear())


def unstoppable(monkeypatch):
    record = EffectChannel.record_outcome

    def mutant(effects, outcome, effect):
        try:
            return record(effects, outcome, effect)
        finally:
            effects.stop = None

    monkeypatch.setattr(EffectChannel, "record_outcome", mutant)
    monkeypatch.setattr(run, "_ending_from_stop", lambda stop: run._Ending(run.RunStatus.COMPLETED, stop=stop))


def forgetful(monkeypatch):
    count = UsageTotals.count_reply

    def mutant(spent, effect, reply):
        if effect.purpose == "step":
            count(spent, effect, reply)

    monkeypatch.setattr(UsageTotals, "count_reply", mutant)


def generous(monkeypatch):
    monkeypatch.setattr(SpendingLedger, "find_own_limit_error", lambda ledger, tokens, cost, model: None)


def fertile(monkeypatch):
    def mutant(ledger, count, *, by_model):
        ledger.count_children(count, by_model=by_model)

    monkeypatch.setattr(SpendingLedger, "admit_children", mutant)


def flighty(monkeypatch):
    made = iter(range(1_000_000))
    monkeypatch.setattr(run, "_format_params", lambda plan: str(next(made)))


MUTANTS = {
    lost: "I1",
    swapped: "I1",
    unpairing: "I1",
    miscounted: "I10",
    forgetful: "I10",
    left_open: "I6",
    beyond: "I8",
    generous: "I8",
    fertile: "I8",
    renumbered: "I2",
    talkative: "I7",
    leaking: "I12",
    unstoppable: "I12",
    deaf: "R1",
    flighty: "I3",
}


def busy(ctx):
    yield STEP
    yield GenerateN(2)
    yield Parallel([ToolCall("read", {"n": 1}), ToolCall("read", {"n": 2})])
    yield AgentCall("kid", "look")
    with contextlib.suppress(LimitExceeded):
        yield Parallel([AgentCall("kid", "look"), AgentCall("kid", "look")])
    for _ in range(4):
        yield STEP


LIMITS = Limits(max_steps=3, max_tokens=200, max_total_children=1, on_max_steps="stop")
BUSY = AgentDefinition("busy", tools=["read"], spawnable_agents=[KID], handle_steps=busy, limits=LIMITS)
REPLIES = [tool_calls(tool_call("read"), tool_call("read")), text("fine")]


@pytest.mark.deep
def test_the_machine_itself_is_fine():
    assert 200 == simulate(BUSY, range(200), replies=REPLIES).runs


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec(
    "reliability:I1",
    "reliability:I2",
    "reliability:I3",
    "reliability:I6",
    "reliability:I7",
    "reliability:I8",
    "reliability:I4",
    "reliability:I12",
)
@pytest.mark.parametrize("plant", MUTANTS, ids=lambda plant: plant.__name__)
def test_a_mutant_of_the_machine_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(SimulationFailed) as failed:
        simulate(BUSY, range(200), replies=REPLIES)
    assert MUTANTS[plant] == failed.value.row
