"""
A planted error in the recorder or the replayer that ship is found by `simulate`: its runs are recorded, resumed and repeated by them.
"""

from __future__ import annotations

import attrs
import pytest

from stepengine import Tool
from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Value
from stepengine.data.tools import ToolAnnotations
from stepengine.data.yields import STEP, AgentCall, Ask, Parallel, Perform, ToolCall
from stepengine.errors import StepEngineError
from stepengine.journal import history, record_player
from stepengine.journal.recorder import Recorder
from stepengine.journal.records import Result
from stepengine.journal.replayer import Replayer
from stepengine.journal.run_writer import RunWriter
from stepengine.testing import Fault, SimulationFailed, simulate, text

SAFE = Tool("look", "Look.", {}, lambda given: given, annotations=ToolAnnotations(read_only=True))
KID = AgentDefinition("kid")


def everyday(ctx):
    yield ToolCall("look", {"n": 1})
    yield STEP
    yield Parallel(ToolCall("look", {"n": 2}), AgentCall("kid"))
    try:
        yield from Perform(print, "once")
    except StepEngineError as error:
        return str(error)
    return "done"


AGENT = AgentDefinition("everyday", tools=["look"], spawnable_agents=[KID], handle_steps=everyday)


def simulated(*faults):
    return simulate(AGENT, [1], tools=[SAFE], replies=[text("a"), text("b")], faults=faults)


@pytest.mark.deep
def test_the_recorder_and_the_replayer_that_ship_are_fine():
    assert 1 == simulated(Fault(1, "crash"), Fault(4, "crash_inside")).runs
    assert 200 == simulate(AGENT, range(200), tools=[SAFE]).runs


def test_effects_stopped_before_a_crash_are_in_doubt_after_it():
    """
    The run of a child is cancelled while it does something that must not happen twice, and then the process dies.
    """

    def once(ctx):
        yield from Perform(print, "once")

    kid = AgentDefinition("kid", handle_steps=once)

    def handler(ctx):
        child = (yield AgentCall("kid")).value
        return type(child.error).__name__

    agent = AgentDefinition("boss", spawnable_agents=[kid], handle_steps=handler)
    faults = [Fault(0, "cancel", "0"), Fault(0, "crash_after")]
    assert {"completed": 1} == {s.value: n for s, n in simulate(agent, [1], faults=faults).statuses.items()}
    assert {"cancelled": 1} == {s.value: n for s, n in simulate(agent, [1], faults=faults[:1]).statuses.items()}


# --- wrong instead of raising -------------------------------------------------------------------------------------------


def another_outcome(monkeypatch):
    """
    The replayer answers a tool call with another result than is recorded.
    """
    answer = Replayer.answer_from_record

    def mutant(replayer, known, item):
        outcome = answer(replayer, known, item)
        is_result = isinstance(getattr(outcome, "value", None), ToolResult)
        return attrs.evolve(outcome, value=ToolResult.text("another")) if is_result else outcome

    monkeypatch.setattr(Replayer, "answer_from_record", mutant)


def wrong_result_sent(monkeypatch):
    """
    The run is sent another result than what it did gave.
    """
    live = Recorder.perform_live

    async def mutant(recorder, *args, **options):
        outcome = await live(recorder, *args, **options)
        is_result = isinstance(getattr(outcome, "value", None), ToolResult)
        return Value(ToolResult.text("another"), outcome.at) if is_result else outcome

    monkeypatch.setattr(Recorder, "perform_live", mutant)


def nothing_recorded(monkeypatch):
    """
    Results are not written.
    """
    append = RunWriter.append

    def mutant(run, record):
        if not isinstance(record, Result):
            append(run, record)

    monkeypatch.setattr(RunWriter, "append", mutant)


def done_twice(monkeypatch):
    """
    What may have happened before a crash is done again, whatever it is.
    """
    monkeypatch.setattr(record_player, "is_repeatable", lambda item: True)


def all_unknown(monkeypatch):
    """
    What can be done again is called unknown.
    """
    monkeypatch.setattr(record_player, "is_repeatable", lambda item: False)


def forgotten_input(monkeypatch):
    """
    Reading a journal loses messages that were sent to the run.
    """
    decode_outcome = history.decode_outcome
    monkeypatch.setattr(history, "decode_outcome", lambda form: attrs.evolve(decode_outcome(form), inputs=()))


CRASH = Fault(4, "crash")
WRONG = {
    another_outcome: ("I3", [CRASH]),
    wrong_result_sent: ("R1", []),
    nothing_recorded: ("I11", [CRASH]),
    done_twice: ("R3", [CRASH]),
    all_unknown: ("R1", [Fault(1, "crash")]),
    forgotten_input: ("I3", [Fault(0, "duplicate"), CRASH]),
}


@pytest.mark.spec("reliability:I3", "reliability:I11", "reliability:R3")
@pytest.mark.parametrize("plant", WRONG, ids=lambda plant: plant.__name__)
def test_a_wrong_recorder_or_replayer_is_reported_under_its_row(plant, monkeypatch):
    plant(monkeypatch)
    row, faults = WRONG[plant]
    with pytest.raises(SimulationFailed) as failed:
        simulated(*faults)
    assert row == failed.value.row


@pytest.mark.spec("reliability:I3", "reliability:I12")
@pytest.mark.parametrize("kind", ["cancel", "shutdown"])
def test_a_replayer_that_confuses_stopped_with_waiting_runs_is_found(kind, monkeypatch):
    def asking(ctx):
        return (yield from Ask("Really?"))

    agent = AgentDefinition("asking", handle_steps=asking)
    assert 2 == simulate(agent, None, faults=[kind]).runs
    monkeypatch.setattr(history.History, "stop", None)
    with pytest.raises(SimulationFailed, match=r"status of the run is .*SUSPENDED.*, but was .*CANCELLED") as failed:
        simulate(agent, None, faults=[kind])
    assert "I3" == failed.value.row


def test_a_replayer_that_takes_any_effect_as_recorded_is_found(monkeypatch):
    """
    A handler that depends on more than its answers is not excused by it.
    """
    runs = []

    def forgetful(ctx):
        runs.append(1)
        yield ToolCall("look", {"run": len(runs)})
        yield STEP

    monkeypatch.setattr("stepengine.journal.recorded_part.RecordedPart.is_same_effect", lambda past, known, asked: True)
    agent = AgentDefinition("forgetful", tools=["look"], handle_steps=forgetful)
    with pytest.raises(SimulationFailed, match="I3: after a crash 0 is tool look"):
        simulate(agent, [1], faults=[Fault(1, "crash")])
