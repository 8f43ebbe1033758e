"""
The `Clock` of a test: it says when runs begin and how long they take, and hours between two runs are one line.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stepengine import AgentDefinition, Engine, Hooks, Perform, RateLimit
from stepengine.context import prune_to_summary
from stepengine.sessions import MemorySessions
from stepengine.testing import Clock, ScriptedModel, text

MODEL = "test/model"


def chatty(**policy):
    hooks = Hooks(pre_step=[prune_to_summary(cold_min_tokens=None, **policy)])
    return AgentDefinition("chatty", model=MODEL, system_prompt="You sell.", hooks=hooks)


@pytest.mark.spec("generator-contract:P4", "requirements:P4")
@pytest.mark.parametrize(("minutes", "count"), [(45, 2), (25, 3)])
def test_the_prompt_cache_expires_after_45_minutes_of_the_clock(minutes, count):
    clock = Clock()
    model = ScriptedModel([text("We sell apples. " * 500), text("Yes, bread too.")])
    agent = chatty(cold_after=timedelta(minutes=30), assistant_tool_budget=100)
    with Engine([agent], models=model, clock=clock, sessions=MemorySessions(clock=clock.now)) as engine:
        for number, said in enumerate(["What do you sell?", "And bread?"]):
            engine.run_sync("chatty", said, session_id="shop")
            if not number:
                clock.advance(minutes=minutes)

    first, second = model.calls
    assert 1 == len(first.messages)
    assert count == len(second.messages)
    assert "And bread?" == second.messages[-1].text
    assert "What do you sell?" in second.messages[0].text


def test_start_and_duration_of_a_run_come_from_the_clock():
    clock = Clock(datetime(2030, 5, 6, 7, tzinfo=UTC))

    def dinner():
        clock.advance(hours=2, seconds=0.5)

    def handle_steps(ctx):
        before = ctx.now()
        yield from Perform(dinner)
        return [before.isoformat(), ctx.now().isoformat()]

    with Engine([AgentDefinition("cook", handle_steps=handle_steps)], clock=clock) as engine:
        first = engine.run_sync("cook").output
        clock.advance(days=1)
        second = engine.run_sync("cook").output

    assert ["2030-05-06T07:00:00+00:00", "2030-05-06T09:00:00.500000+00:00"] == [*first]
    assert "2030-05-07T09:00:00.500000+00:00" == second[0]


def test_a_rate_limit_follows_the_clock():
    clock = Clock()
    model = ScriptedModel([text(str(n)) for n in range(4)])
    with Engine(
        [AgentDefinition("a", model=MODEL)], models=model, clock=clock, rate_limits=RateLimit(requests_per_minute=2)
    ) as engine:
        for _ in range(2):
            engine.run_sync("a", "hi")
        waited = clock.now_ms()
        clock.advance(minutes=1)
        begun = clock.now_ms()
        engine.run_sync("a", "hi")
        assert (0, begun) == (waited, clock.now_ms())
