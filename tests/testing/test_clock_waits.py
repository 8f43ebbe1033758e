"""
`Clock(waits=True)`: time passes by `advance` alone, and wakes who sleeps in order of time.
"""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from stepengine import AgentDefinition, Engine, Parallel, Sleep
from stepengine.testing import Clock

HOUR = timedelta(hours=1)


def sleeper(name, *seconds):
    def handle_steps(ctx):
        woke = []
        for one in seconds:
            woke += [(yield from Sleep(one)).isoformat()]
        return woke

    return AgentDefinition(name, handle_steps=handle_steps)


def at(clock, **passed):
    return (Clock().now() + timedelta(**passed)).isoformat()


@pytest.mark.spec("waiting:WT24")
async def test_two_sleeps_of_an_hour_at_once_make_one_hour():
    clock = Clock(waits=True)

    def handle_steps(ctx):
        yield from Parallel(Sleep(3600), Sleep(3600))
        return ctx.now().isoformat()

    async with Engine([AgentDefinition("two", handle_steps=handle_steps)], clock=clock) as engine:
        running = asyncio.create_task(engine.run("two", "go"))
        await clock.wait_for_sleepers(2)
        clock.advance(minutes=59)
        await asyncio.sleep(0.05)
        assert (clock.sleepers, running.done()) == (2, False)
        clock.advance(minutes=1)
        result = await running

    assert (result.output, clock.sleepers) == (at(clock, hours=1), 0)


@pytest.mark.spec("waiting:WT24")
async def test_sleepers_wake_in_order_of_time_and_of_asking():
    clock, woke = Clock(waits=True), []

    async def sleep(name, seconds):
        await clock.sleep(seconds)
        woke.append(name)

    tasks = [asyncio.create_task(sleep(name, s)) for name, s in [("c", 30), ("a", 10), ("d", 30), ("b", 20), ("z", 99)]]
    await clock.wait_for_sleepers(5)
    clock.advance(seconds=30)
    await asyncio.gather(*tasks[:4])

    assert woke == ["a", "b", "c", "d"]
    tasks[4].cancel()
    await asyncio.wait(tasks)
    assert clock.sleepers == 0


@pytest.mark.spec("waiting:WT24")
async def test_another_thread_may_let_time_pass():
    clock = Clock(waits=True)
    async with Engine([sleeper("near", 5, 5)], clock=clock) as engine:
        running = asyncio.create_task(engine.run("near", "go"))
        for _ in range(2):
            await clock.wait_for_sleepers()
            thread = threading.Thread(target=clock.advance, kwargs={"seconds": 5})
            thread.start()
            await asyncio.to_thread(thread.join)
            await asyncio.sleep(0.02)
        result = await running

    assert result.output == [at(clock, seconds=5), at(clock, seconds=10)]


@pytest.mark.spec("waiting:WT24")
async def test_a_clock_without_waiting_advances_in_sleep():
    clock = Clock()
    await clock.sleep(3600)
    assert (clock.now() - Clock().now(), clock.sleepers) == (HOUR, 0)
    with pytest.raises(ValueError, match=r"create it with Clock\(waits=True\)"):
        await clock.wait_for_sleepers()
    with pytest.raises(ValueError, match="a clock cannot go back"):
        Clock(waits=True).advance(seconds=-1)
