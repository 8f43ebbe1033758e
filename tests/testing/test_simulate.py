"""
`simulate` runs the whole machine where things go wrong, holds it to the invariants, and shrinks what breaks one.
"""

from __future__ import annotations

import pytest

from stepengine import Tool
from stepengine.data.definition import AgentDefinition
from stepengine.data.limits import Limits
from stepengine.data.state import RunStatus
from stepengine.data.tools import ToolAnnotations
from stepengine.data.yields import (
    STEP,
    STEP_ALL,
    AgentCall,
    Ask,
    Complete,
    GenerateN,
    Parallel,
    Perform,
    ToolCall,
)
from stepengine.engine.handler_sources import SourceWarning
from stepengine.errors import DataError, StepEngineError
from stepengine.testing import Fault, SimulationFailed, simulate, text
from stepengine.testing.faults import FAULTS


def everything(ctx):
    yield ToolCall("read", {"path": "a"})
    yield STEP_ALL
    yield Parallel([ToolCall("read"), ToolCall("check"), AgentCall("kid"), Ask("Which?", ["a", "b"])])
    yield GenerateN(3)
    yield Perform(int)
    yield Complete("x")
    try:
        yield from AgentCall("kid", "task")
    except StepEngineError:
        yield STEP
    return "done"


KID = AgentDefinition("kid", tools=["look"])
BOSS = AgentDefinition(
    "boss",
    tools=["read", "check", "spawn_agents", "ask_user", "write_todos", "end_turn"],
    spawnable_agents=[KID],
    handle_steps=everything,
    limits=Limits(max_steps=6),
)


@pytest.mark.deep
@pytest.mark.spec(
    "reliability:I1",
    "reliability:I2",
    "reliability:I3",
    "reliability:I4",
    "reliability:I5",
    "reliability:I6",
    "reliability:I7",
    "reliability:I8",
    "reliability:I9",
)
def test_a_tree_of_runs_survives_every_kind_of_fault():
    seen = simulate(BOSS, range(300))

    assert 300 == seen.runs
    assert {*FAULTS} - {"late", "never", "lost_wake"} == {*seen.faults}  # of what waits, see test_simulate_waiting
    assert {RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED, RunStatus.SUSPENDED} <= {*seen.statuses}
    assert simulate(BOSS, range(30)) == simulate(BOSS, range(30))


# --- what is told ---------------------------------------------------------------------------------------------------


def careless(ctx):
    yield STEP
    found = yield ToolCall("search", {"q": "x"})
    yield STEP
    return found.tool_results[0].data["hits"]


CARELESS = AgentDefinition("careless", tools=["search"], handle_steps=careless)
HITS = {"results": {"search": {"hits": []}}, "replies": [text("a"), text("b")]}


@pytest.mark.deep
def test_a_failing_seed_is_shrunk_and_printed_with_its_command():
    """
    The handler expects data and a failed search gives a text; slow effects and duplicates around it are left out.
    """
    with pytest.raises(SimulationFailed) as failed:
        simulate(CARELESS, range(200), **HITS)
    told = str(failed.value)
    (fault,) = failed.value.faults

    assert "handler" == failed.value.row
    assert (1, True) == (fault.seq, fault.kind in ("failure", "timeout"))
    assert "agent 'careless' breaks handler" in told
    assert "test_simulate.py" in told
    assert "handler requires: a handler raises no error of its own" in told
    assert f"{fault!r}: the effect " in told
    assert "hint:" not in told
    assert "1  tool search {'q': 'x'} (handler)   !! " in told
    line = told.splitlines()[-1].partition("unchanged: ")[2]
    assert f"simulate(agent, seeds=[{failed.value.seed}], faults=[{fault!r}])" == line
    with pytest.raises(SimulationFailed) as again:
        eval(line.replace("])", "], **HITS)"), {"simulate": simulate, "agent": CARELESS, "HITS": HITS, "Fault": Fault})
    assert (failed.value.seed, (fault,), told) == (again.value.seed, again.value.faults, str(again.value))


def test_the_fewest_faults_are_found_among_those_that_are_given():
    faults = [Fault(0, "slow"), Fault(1, "timeout"), Fault(2, "duplicate")]
    with pytest.raises(SimulationFailed) as failed:
        simulate(CARELESS, [0], faults=faults, **HITS)
    assert (Fault(1, "timeout"),) == failed.value.faults
    assert 1 == simulate(CARELESS, [0], faults=faults, may_raise=(TypeError, KeyError, AttributeError), **HITS).runs


@pytest.mark.spec("reliability:I12")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("cancel", RunStatus.CANCELLED),
        ("shutdown", RunStatus.CANCELLED),
        ("slow", RunStatus.COMPLETED),
        ("duplicate", RunStatus.COMPLETED),
        ("crash", RunStatus.COMPLETED),
    ],
)
def test_a_fault_at_every_effect_ends_a_run_correctly(kind, status):
    safe = Tool(
        "search", "Search.", {}, lambda given: given, annotations=ToolAnnotations(read_only=True)
    )  # may run again
    hits = {**HITS, "tools": [safe]}
    for seq in range(3):
        assert {status: 1} == simulate(CARELESS, [0], faults=[Fault(seq, kind)], **hits).statuses


def test_a_crash_reveals_a_handler_with_hidden_inputs():
    runs = []

    def forgetful(ctx):
        runs.append(1)
        yield ToolCall("read", {"run": len(runs)})
        yield STEP

    agent = AgentDefinition("forgetful", tools=["read"], handle_steps=forgetful)
    with pytest.raises(SimulationFailed, match=r"I3: after a crash the run diverged .*effect #0 of forgetful"):
        simulate(agent, [1], faults=[Fault(1, "crash")])
    with pytest.raises(SimulationFailed, match=r"I3: in a replay of its records, the run diverged .*effect #0"):
        simulate(agent, [0], faults=())


def test_a_non_repeatable_effect_is_unknown_after_a_crash():
    seen = []

    def handler(ctx):
        try:
            yield from Perform(print, "once")
        except StepEngineError as error:
            seen.append(type(error).__name__)
        yield from Perform.idempotent(print, "again")

    agent = AgentDefinition("printing", handle_steps=handler)
    assert 1 == simulate(agent, [0], faults=[Fault(0, "crash"), Fault(1, "crash")]).runs
    assert {"UnknownOutcome"} == {*seen}


def test_an_exception_in_a_test_function_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError):
        simulate(CARELESS, range(50), results={"search": lambda given: 1 // 0})


def test_a_run_that_never_gets_anywhere_does_not_pass():
    def handler(ctx):
        found = yield ToolCall("search", {"q": "x"}, include_tool_call=False)
        return found.tool_result.text

    agent = AgentDefinition("seeker", handle_steps=handler)
    with (
        pytest.raises(SimulationFailed, match="search"),
        pytest.warns(SourceWarning, match="'search' is not available"),
    ):
        simulate(agent, [0])
    assert 20 == simulate(agent, range(20), results={"search": "found"}, faults=()).effects
    with pytest.raises(DataError, match="no seeds"), pytest.warns(SourceWarning, match="'search' is not available"):
        simulate(agent, [])
    with pytest.raises(DataError, match="not 'seeker'"):
        simulate("seeker")


def test_an_invalid_fault_is_refused():
    with pytest.raises(DataError, match="'boom' is not a kind of fault; valid kinds: failure, timeout"):
        simulate(KID, faults=["boom"])
    with pytest.raises(DataError, match="not a kind of fault"):
        Fault(1, "boom")


made = iter(range(1_000))


def counting(ctx):
    yield ToolCall("search", {"at": next(made)})


@pytest.mark.parametrize(
    ("handler", "hint"),
    [
        (careless, "hint: no results were given for 'search', so they are made up; pass results={'search': ...}"),
        (counting, "hint: a handler may depend only on its context"),
    ],
)
def test_a_failure_explains_the_next_steps(handler, hint):
    agent = AgentDefinition("new", tools=["search"], handle_steps=handler)
    with pytest.raises(SimulationFailed) as failed:
        simulate(agent, [0], faults=())
    assert hint in str(failed.value)
    assert "faults (the fewest that cause it): none, it fails without faults" in str(failed.value)
