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


def test_the_time_of_a_tree_starts_with_it_and_sleeps_end_as_if_no_process_had_changed():
    source = Ticking()
    clock = TreeClock(source, CREATED, since=60_000)
    source.ms += 1_500

    assert clock.elapsed() == 1_500
    assert clock.now() == CREATED + timedelta(milliseconds=1_500)
    # Asked for by an earlier process at 10 s: it is 61.5 s now.
    assert clock.seconds_until(70_000, 10_000) == pytest.approx(8.5)
    assert TreeClock(source, CREATED, since=None).seconds_until(70_000, 10_000) == 60


async def test_a_call_in_the_loops_own_thread_happens_at_once_and_one_from_elsewhere_in_the_loop():
    loop, seen = TreeLoop(), []
    loop.call(seen.append, "nowhere")
    assert (loop.is_open, seen) == (False, [])

    loop.enter()
    loop.call(seen.append, 1)
    assert (loop.is_open, seen) == (True, [1])
    await asyncio.to_thread(loop.call, seen.append, 2)
    await asyncio.sleep(0)
    assert seen == [1, 2]


async def test_a_run_is_stopped_here_or_where_another_process_drives_it():
    stops = []
    runs = ActiveRuns(SimpleNamespace(path=""), TreeLoop(), [])
    runs.by_path["1"] = SimpleNamespace(stop=lambda stop: stops.append(stop.kind))
    there = runs.elsewhere["2"] = asyncio.get_running_loop().create_future()

    runs.cancel("1", "enough")
    for reason in ("first", "second"):
        runs.cancel("2", reason)

    assert stops == ["cancelled"]
    assert str(there.result().error) == "first"
