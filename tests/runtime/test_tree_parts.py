"""The parts of a run tree, each without a tree."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from stepengine.runtime.active_runs import ActiveRuns, TreeLoop
from stepengine.runtime.clock import SystemClock, TreeClock

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class Ticking(SystemClock):
    """A clock that is set by the test."""

    ms = 5_000

    def now_ms(self):
        return self.ms


def test_tree_time_starts_with_it_and_sleeps_survive_process_changes():
    source = Ticking()
    clock = TreeClock(source, CREATED, since=60_000)
    source.ms += 1_500

    assert clock.elapsed() == 1_500
    assert clock.now() == CREATED + timedelta(milliseconds=1_500)
    # Asked for by an earlier process at 10 s: it is 61.5 s now.
    assert clock.seconds_until(70_000, 10_000) == pytest.approx(8.5)
    assert TreeClock(source, CREATED, since=None).seconds_until(70_000, 10_000) == 60


async def test_loop_call_is_immediate_in_its_thread_and_scheduled_elsewhere():
    loop, seen = TreeLoop(), []
    loop.call(seen.append, "nowhere")
    assert (loop.is_open, seen) == (False, [])

    loop.enter()
    loop.call(seen.append, 1)
    assert (loop.is_open, seen) == (True, [1])
    await asyncio.to_thread(loop.call, seen.append, 2)
    await asyncio.sleep(0)
    assert seen == [1, 2]


async def test_run_is_stopped_locally_or_through_its_remote_driver():
    stops = []
    runs = ActiveRuns(SimpleNamespace(path=""), TreeLoop(), [])
    runs.by_path["1"] = SimpleNamespace(stop=lambda stop: stops.append(stop.kind))
    there = runs.elsewhere["2"] = asyncio.get_running_loop().create_future()

    runs.cancel("1", "enough")
    for reason in ("first", "second"):
        runs.cancel("2", reason)

    assert stops == ["cancelled"]
    assert str(there.result().error) == "first"
