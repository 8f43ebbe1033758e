"""
The watchdog: whoever blocks the loop is named, and nothing is left of it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import pytest

from stepengine.data.effects import CallTool, Perform
from stepengine.data.yields import Perform as Do
from stepengine.runtime import watchdog
from stepengine.runtime.toolcalls import BoundTool
from stepengine.tools import tool


@pytest.fixture
def quick(monkeypatch):
    """
    A watchdog that looks every few milliseconds, and is not so impatient that a busy machine makes it speak.
    """
    for name in ("ARM_SECONDS", "TICK_SECONDS"):
        monkeypatch.setattr(watchdog, name, 0.005)
    for name in ("TOOL_SECONDS", "OTHER_SECONDS"):
        monkeypatch.setattr(watchdog, name, 0.4)


def watchdogs():
    return [t for t in threading.enumerate() if t.name == "stepengine-watchdog"]


async def until_watched():
    async with asyncio.timeout(20):
        while not watchdogs():  # noqa: ASYNC110  (nobody is told when a thread starts)
            await asyncio.sleep(0.001)


def block(caplog):
    deadline = time.monotonic() + 20
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.spec("reliability:TL08")
async def test_synchronous_code_in_an_async_tool_is_reported_with_the_name_of_the_tool(world, quick, caplog):
    @tool
    async def blocking() -> str:
        """Block the loop."""
        await until_watched()
        block(caplog)
        await asyncio.sleep(0.05)
        return "done"

    def machine(plan, state):
        outcome = yield CallTool(0, "blocking", {}, arguments={})
        return world.done(state, outcome.value.text)

    events = []
    binding = blocking.binding()
    plan = world.plan(tools={"blocking": BoundTool(binding.spec, binding.validate, tool=blocking)})
    with caplog.at_level(logging.WARNING, "stepengine"):
        finished = await world.tree(machine, plan=plan, observers=[events.append]).run()
    warned = [e.message for e in events if e.type == "warned"]

    assert "done" == finished.output
    assert "the tool 'blocking' blocks it at" in warned[0]
    assert "test_watchdog.py:" in warned[0]


@pytest.mark.spec("reliability:GN05")
async def test_a_handler_that_does_not_yield_is_reported_with_its_line(world, quick, caplog):
    def machine(plan, state):
        yield Perform(0, Do(until_watched))
        block(caplog)
        yield Perform(1, Do(asyncio.sleep, 0.05))
        return world.done(state)

    events = []
    with caplog.at_level(logging.WARNING, "stepengine"):
        await world.tree(machine, observers=[events.append]).run()
    warned = [e.message for e in events if e.type == "warned"]

    assert 1 == len(caplog.records)
    assert "test_watchdog.py:" in warned[0]


async def test_short_runs_start_no_thread_and_long_ones_leave_none(world, monkeypatch):
    def running(work):
        def machine(plan, state):
            yield Perform(0, Do(work))
            return world.done(state)

        return machine

    await world.tree(running(lambda: None)).run()
    assert [] == watchdogs()

    monkeypatch.setattr(watchdog, "ARM_SECONDS", 0)
    await world.tree(running(until_watched)).run()
    async with asyncio.timeout(20):
        while watchdogs():  # noqa: ASYNC110  (nobody is told when a thread ends)
            await asyncio.sleep(0.001)
    assert {} == watchdog._watchdogs
