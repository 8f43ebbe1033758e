"""The parts of a run tree, each without a tree."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from stepengine.data.messages import UserMessage
from stepengine.runtime.active_runs import ActiveRuns, RunBelongings, TreeLoop
from stepengine.runtime.clock import SystemClock, TreeClock
from stepengine.runtime.mail import Inboxes
from stepengine.runtime.tree import Leftovers

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class Ticking(SystemClock):
    """A clock that is set by the test."""

    ms = 5_000

    def now_ms(self):
        return self.ms


class Run:
    """A run that notes how it was ended."""

    def __init__(self, path, *lasting):
        self.path = path
        self.plan = SimpleNamespace(definition=SimpleNamespace(id="kid"))
        self.stopping = None
        self.spares = False
        self.stops = []
        self.items = list(lasting)

    def stop(self, stop):
        self.spares = False
        self.stops.append(stop.kind)

    def spare(self, stop):
        self.stops.append(f"spared {stop.kind}")

    def lasting(self):
        return self.items

    def notice_cancel(self):
        self.stops.append("noticed")

    def crashed(self, error):
        self.stops.append(type(error).__name__)


def test_the_time_of_a_tree_starts_with_it_and_sleeps_end_as_if_no_process_had_changed():
    source = Ticking()
    clock = TreeClock(source, CREATED, since=60_000)
    source.ms += 1_500

    assert clock.elapsed() == 1_500
    assert clock.now() == CREATED + timedelta(milliseconds=1_500)
    # Asked for by an earlier process at 10 s: it is 61.5 s now.
    assert clock.seconds_until(70_000, 10_000) == pytest.approx(8.5)
    assert TreeClock(source, CREATED, since=None).seconds_until(70_000, 10_000) == 60


async def test_a_time_limit_ends_its_run_and_those_below_it():
    clock, stopped = TreeClock(Ticking(), CREATED, 0), []
    timer = clock.start_timer("1", 0.0, stopped.append)
    await asyncio.sleep(0.01)
    timer.cancel()

    assert [(stop.kind, stop.error.kind) for stop in stopped] == [("limit", "seconds")]
    assert (clock.time_limit_stop("1").kind, clock.time_limit_stop("1.2").kind, clock.time_limit_stop("2")) == (
        "limit",
        "cancelled",
        None,
    )
    del clock.deadlines["1"]
    assert clock.time_limit_stop("1") is None


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


def test_messages_wait_for_the_run_that_they_are_for():
    inboxes = Inboxes()
    inboxes.add("", UserMessage("a"))
    inboxes.add("1", UserMessage("b"), UserMessage("c"))
    inboxes.add("2")

    assert [m.text for m in inboxes.root] == ["a"]
    assert {path: [m.text for m in messages] for path, messages in inboxes.by_path.items()} == {"1": ["b", "c"]}


async def test_a_run_is_stopped_here_or_where_another_process_drives_it():
    runs = ActiveRuns(Run(""), TreeLoop(), [])
    here = runs.by_path["1"] = Run("1")
    there = runs.elsewhere["2"] = asyncio.get_running_loop().create_future()

    runs.cancel("1", "enough")
    for reason in ("first", "second"):
        runs.cancel("2", reason)

    assert here.stops == ["cancelled"]
    assert str(there.result().error) == "first"


@pytest.mark.parametrize("lasting", [False, True])
async def test_an_interrupt_waits_only_for_what_would_be_in_doubt(lasting):
    loop, root = TreeLoop(), Run("", *(["a write"] if lasting else []))
    runs = ActiveRuns(root, loop, [])
    runs.by_path[""] = root
    loop.enter()

    assert not runs.signal.is_set()
    runs.interrupt(30)
    assert not runs.signal.is_set()
    await asyncio.sleep(0)
    assert root.stops == (["spared cancelled"] if lasting else ["cancelled"])

    runs.interrupt(30)
    assert root.stops[-1] == "cancelled"
    assert runs.signal.is_set()
    runs.close()
    assert runs.by_path == {}


async def test_a_second_interrupt_before_the_first_took_effect_stops_at_once_and_spares_nothing():
    loop, root = TreeLoop(), Run("", "a write")
    runs = ActiveRuns(root, loop, [])
    runs.by_path[""] = root
    loop.enter()

    runs.interrupt(30)
    runs.interrupt(30)
    await asyncio.sleep(0)
    runs.close()

    assert root.stops == ["cancelled"]


async def test_belongings_end_with_their_run_and_warnings_are_kept():
    warnings = ["old"]
    belongings, run = RunBelongings(warnings), Run("1")
    assert belongings.get("1") is belongings.get("1")

    closed = SimpleNamespace(aclose=lambda: asyncio.sleep(0, ["a process was left"]))
    belongings.by_path["1"] = closed
    await belongings.end(run)

    assert belongings.by_path == {}
    assert warnings == ["old", "run 1 (kid): a process was left"]
    assert run.stops == []


def test_stopped_calls_are_forgotten_with_their_run():
    leftovers = Leftovers()
    leftovers.stopped_calls = {("1", 0): "a", ("1", 1): "b", ("2", 0): "c"}
    leftovers.forget("1")
    assert leftovers.stopped_calls == {("2", 0): "c"}
