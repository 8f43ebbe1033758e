"""
`simulate(agent, seeds=None)` goes through everything that can go wrong once; a run repeated over its records is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunStatus
from stepengine.data.yields import STEP, AgentCall, Ask, Parallel, Perform, ToolCall
from stepengine.errors import DataError, PerformError
from stepengine.testing import Fault, SimulationFailed, simulate, text
from stepengine.testing.faults import CRASHES, FAULTS

ROOT = Path(__file__).resolve().parents[2]
KID = AgentDefinition("kid", tools=["look"])


def short(ctx):
    yield STEP
    yield Parallel([ToolCall("read"), AgentCall("kid", "look"), Perform.idempotent(int)])
    try:
        yield from Perform(str)
    except PerformError:
        yield ToolCall("read")
    return (yield from Ask("Which?", ["a", "b"]))


SHORT = AgentDefinition("short", tools=["read"], spawnable_agents=[KID], handle_steps=short)
REPLIES = [text("first"), text("of the child")]


@pytest.mark.spec("reliability:I11", "reliability:I12")
@pytest.mark.deep
def test_every_fault_at_every_effect_and_crash_pair_runs_once():
    seen = simulate(SHORT, None, replies=REPLIES)

    effects = 7
    # It waits for no message and no time.
    assert {kind: seen.faults[kind] for kind in FAULTS if kind in seen.faults and kind not in CRASHES} == {
        "failure": 6,
        "timeout": 5,
        "limit": 4,
        "unknown": 3,
        "cancel": effects,
        "shutdown": effects,
        "suspend": 1,
        "slow": 6,
        "duplicate": 6,
    }
    single = sum(count for kind, count in seen.faults.items() if kind not in CRASHES) + 3 * effects
    assert 1 + single + 3 * effects * (3 * effects - 1) // 2 == seen.runs
    assert {RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.SUSPENDED} == {*seen.statuses}
    assert simulate(SHORT, None, replies=REPLIES) == seen


def test_fault_kinds_can_be_excluded_and_explicit_faults_always_happen():
    assert {"cancel": 7} == simulate(SHORT, None, replies=REPLIES, faults=["cancel"]).faults
    assert 1 == simulate(SHORT, None, replies=REPLIES, faults=[]).runs
    seen = simulate(SHORT, None, replies=REPLIES, faults=[Fault(0, "slow"), "suspend"])
    assert ({"slow": 2, "suspend": 1}, 2) == (seen.faults, seen.runs)


def test_a_run_too_long_for_exhaustion_is_refused():
    def long(ctx):
        for n in range(13):
            yield ToolCall("read", {"n": n})

    agent = AgentDefinition("long", tools=["read"], handle_steps=long)
    with pytest.raises(DataError, match=r"agent 'long' has 13 effects without faults, but seeds=None .* at most 12"):
        simulate(agent, None)


@pytest.mark.spec("reliability:I11")
@pytest.mark.parametrize(("first", "second"), [*zip(CRASHES, (*CRASHES[1:], CRASHES[0]), strict=True)])
def test_crashes_around_and_inside_a_child_are_simulated(first, second):
    faults = [Fault(0, first, "2"), Fault(2, second), Fault(3, first)]
    seen = simulate(SHORT, [0, 1, 2], replies=REPLIES, faults=faults)
    assert 9 == sum(seen.faults.values())
    assert {RunStatus.COMPLETED: 3} == seen.statuses


def test_a_handler_with_hidden_inputs_is_found_without_a_crash():
    made = iter(range(1_000))

    def counting(ctx):
        yield STEP
        return next(made)

    agent = AgentDefinition("counting", handle_steps=counting)
    with pytest.raises(
        SimulationFailed, match=r"I3: in a replay of its records, .* at its end(?s:.*)/output +recorded 0 +now 1"
    ):
        simulate(agent, None)


WORLDS = """
    from stepengine.data.wire import to_dicts
    from stepengine.testing.faults import FAULTS
    from stepengine.testing import simulation
    from tests.testing.test_simulate import BOSS

    kept = []
    checked = simulation._run_and_check_world

    def keeping(setting, world):
        finished = checked(setting, world)
        kept.append((world.lines, finished.status, to_dicts(finished.state.message_history), finished.spending))
        return finished

    simulation._run_and_check_world = keeping
    print(simulation.simulate(BOSS, range(60)), kept)
"""


@pytest.mark.deep
@pytest.mark.spec("reliability:I3")
def test_worlds_are_byte_equal_under_every_hash_seed():
    said = set()
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        code = "\n".join(line[4:] for line in WORLDS.splitlines())
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
        said.add(done.stdout)
    assert 1 == len(said)
    assert len(said.pop()) > 100_000
