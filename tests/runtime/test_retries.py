"""
The retry coordinator: when there is another attempt, how long it is waited for, and what a run has of them.
"""

from __future__ import annotations

import time
from decimal import Decimal
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.effects import CallModel, Gather, Spawn
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Value
from stepengine.data.state import AgentState
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError, ModelError
from stepengine.runtime import RetryPolicy, SystemClock
from stepengine.runtime.retry import Retries

REQUEST = ModelRequest("test/m")
HERE = ("", 3)


def busy(**fields):
    return ModelError("overloaded", **{"retryable": True, "status": 529, **fields})


def calls(world, count, *, together=False):
    def machine(plan, state):
        effects = [CallModel(seq, REQUEST) for seq in range(count)]
        if together:
            outcomes = (yield Gather(tuple(effects))).outcomes
        else:
            outcomes = []
            for effect in effects:
                outcomes += [(yield effect)]
        return world.done(state, outcomes)

    return machine


@pytest.mark.spec("reliability:MP32", "reliability:MP10", "reliability:MP06")
@given(
    asked=st.none() | st.floats(),
    attempt=st.integers(1, 40),
    policy=st.builds(
        RetryPolicy,
        attempts=st.integers(1, 50),
        base_seconds=st.floats(0, 1e6),
        cap_seconds=st.floats(0, 100),
        max_retry_after_seconds=st.floats(0, 100),
        extra_attempts=st.integers(0, 3),
    ),
)
def test_retry_wait_is_between_retry_after_and_its_cap(asked, attempt, policy):
    wait = Retries(policy, "seed").count_retry_and_find_delay(busy(retry_after=asked), attempt, HERE)
    meant = asked if asked is not None and asked >= 0 else 0

    if attempt >= policy.attempts or policy.extra_attempts == 0 or meant > policy.max_retry_after_seconds:
        assert wait is None
    else:
        assert 0 <= meant <= wait <= max(policy.max_retry_after_seconds, policy.cap_seconds)


def test_retry_after_waits_are_spread():
    waits = [Retries(RetryPolicy(), str(n)).count_retry_and_find_delay(busy(retry_after=2), 1, HERE) for n in range(20)]

    assert all(2 <= wait <= 2.5 for wait in waits)
    assert len(set(waits)) == 20


@pytest.mark.spec("reliability:R21")
def test_retry_wait_depends_only_on_seed_address_and_attempt():
    def waits(seed, address):
        retries = Retries(RetryPolicy(attempts=9, extra_attempts=9), seed)
        return [retries.count_retry_and_find_delay(busy(), attempt, address) for attempt in range(1, 9)]

    known = waits("a", HERE)

    assert known == waits("a", HERE)
    for other in (waits("b", HERE), waits("a", ("3", 3)), waits("a", ("", 4))):
        assert not set(known) & set(other)


@pytest.mark.parametrize(
    "wrong",
    [
        {"attempts": 0},
        {"base_seconds": -1},
        {"cap_seconds": float("nan")},
        {"max_retry_after_seconds": -1},
        {"extra_attempts": -1},
    ],
)
def test_invalid_retry_policy_raises(wrong):
    with pytest.raises(
        DefinitionError, match="is not valid: attempts must be at least 1, and the other numbers at least 0"
    ):
        RetryPolicy(**wrong)


@pytest.mark.spec("reliability:R21")
@pytest.mark.parametrize(
    ("status", "kind", "retryable"), [(400, "http", False), (429, "no_credit", False), (529, "http", True)]
)
async def test_only_errors_marked_retryable_are_retried(world, status, kind, retryable):
    provider = world.Provider([busy(status=status, kind=kind, retryable=retryable)])
    finished = await world.tree(calls(world, 1), models=provider, clock=world.JumpingClock()).run()

    assert (2 if retryable else 1) == len(provider.requests)
    assert (Value if retryable else Failure) is type(finished.output[0])


@pytest.mark.spec("reliability:R21", "reliability:MP06")
async def test_each_call_has_four_requests_and_the_tree_twenty_retries(world):
    def machine(plan, state):
        if not plan.path:
            yield Gather(tuple([Spawn(seq, "worker") for seq in range(4)]))
        else:
            yield from calls(world, 3)(plan, state)
        return world.done(state)

    def child(parent, effect, path):
        return world.plan(path=path), AgentState(run_id=path, agent_id="worker")

    provider = world.Provider(default=busy())
    await world.tree(machine, models=provider, planner=child, clock=world.JumpingClock()).run()

    assert 4 * 3 + 20 == len(provider.requests)

    provider = world.Provider(default=busy())
    await world.tree(calls(world, 2), models=provider, clock=world.JumpingClock()).run()

    assert 2 * 4 == len(provider.requests)


@pytest.mark.spec("reliability:R21", "requirements:D15")
@pytest.mark.parametrize(
    ("own", "price", "cost"), [(None, Decimal(1), 27), (Decimal(100), Decimal(1), 107), (Decimal(100), None, None)]
)
async def test_cost_of_failed_attempts_is_added_or_unknown_without_price(world, own, price, cost):
    def pricing(model, usage, at):
        return None if price is None else price * usage.total_tokens

    reply = ModelReply("done", usage=Usage(input_tokens=20), cost=own)
    provider = world.Provider([busy(usage=Usage(input_tokens=7)), reply])
    tree = world.tree(calls(world, 1), models=provider, clock=world.JumpingClock(), pricing=pricing)
    outcome = (await tree.run()).output[0]

    assert Usage(input_tokens=27, requests=2) == outcome.value.usage
    assert cost == outcome.value.cost


async def test_services_seed_alone_decides_the_retry_waits(world):
    async def waits(seed, run_id):
        clock, plan = world.JumpingClock(), world.plan(run_id=run_id)
        before = plan.random().getstate()
        provider = world.Provider(default=busy())
        await world.tree(calls(world, 1), models=provider, clock=clock, plan=plan, seed=seed).run()

        assert before == plan.random().getstate()
        assert Random(1).getstate() == before
        return clock.sleeps

    assert await waits("s", "r1") == await waits("s", "r2")
    assert await waits("s", "r1") != await waits("t", "r1")
    assert await waits("", "r1") != await waits("", "r2")


@pytest.mark.spec("reliability:MP32")
async def test_wall_clock_jump_changes_neither_wait_nor_run_time(world, monkeypatch):
    slept = []

    class Clock(SystemClock):
        async def sleep(self, seconds):
            slept.append(seconds)
            monkeypatch.setattr(time, "time", lambda: 0.0)

    provider = world.Provider([busy(retry_after=2), "done"])
    finished = await world.tree(calls(world, 1), models=provider, clock=Clock()).run()

    assert 2 <= slept[0] <= 60
    assert 0 <= finished.output[0].at < 60_000
