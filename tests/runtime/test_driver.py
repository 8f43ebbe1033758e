"""
The driver: outcomes in order, one task per run, every way out.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from stepengine.data.effects import AskPerson, CallFunction, CallModel, CallTool, Gather, Notify, Spawn
from stepengine.data.events import Notification
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Stop
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.yields import Perform as Do
from stepengine.errors import StepEngineError

REQUEST = ModelRequest("test/m")


def do(seq, fn, *args):
    return CallFunction(seq, Do(fn, *args))


async def test_machine_receives_one_outcome_per_effect_and_none_for_notify(world):
    sent = []

    def machine(plan, state):
        sent.append((yield Notify(Notification(message="hello"))))
        sent.append((yield CallModel(0, REQUEST)).value.text)
        sent.append((yield do(1, lambda: 7)).value)
        return world.done(state, "end")

    finished = await world.tree(machine).run()

    assert [None, "ok", 7] == sent
    assert "end" == finished.output


async def test_gather_runs_concurrently_and_returns_request_order(world):
    order = []
    gate = asyncio.Event()

    async def first():
        await gate.wait()
        order.append("first")
        return 1

    async def second():
        order.append("second")
        gate.set()
        return 2

    def machine(plan, state):
        outcome = yield Gather((do(0, first), do(1, second)))
        return world.done(state, [o.value for o in outcome.outcomes])

    finished = await world.tree(machine).run()

    assert ["second", "first"] == order
    assert [1, 2] == finished.output


async def test_gather_respects_its_concurrency(world):
    running = most = 0

    async def work():
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    def machine(plan, state):
        outcome = yield Gather(tuple([do(i, work) for i in range(20)]), concurrency=3)
        return world.done(state, len(outcome.outcomes))

    finished = await world.tree(machine).run()

    assert 3 == most
    assert 20 == finished.output


async def test_scripted_run_yields_to_other_tasks(world):
    turns = []

    async def bystander():
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    def machine(plan, state):
        for seq in range(1000):
            yield CallModel(seq, REQUEST)
        return world.done(state)

    task = asyncio.create_task(bystander())
    await world.tree(machine).run()
    task.cancel()

    assert len(turns) >= 1000 // 64


@pytest.mark.spec("generator-contract:G40")
@pytest.mark.parametrize("way", ["return", "raise", "stop"])
async def test_machine_is_closed_on_every_exit(world, way):
    closed = []

    def machine(plan, state):
        try:
            yield CallModel(0, REQUEST)
            if way == "raise":
                raise RuntimeError("the machine broke")
            if way == "stop":
                tree.root.stop(Stop("cancelled"))
                outcome = yield CallModel(1, REQUEST)
                return world.done(state, status="cancelled" if isinstance(outcome, Stop) else "failed")
            return world.done(state)
        finally:
            closed.append(way)

    tree = world.tree(machine)
    finished = await tree.run()

    assert [way] == closed
    assert {"return": "completed", "raise": "failed", "stop": "cancelled"}[way] == finished.status
    if way == "raise":
        assert "the machine broke" in str(finished.error)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (StepEngineError("the disk is full"), "the disk is full"),
        (ValueError("no"), "performing an effect of the run at '' failed with ValueError: no"),
    ],
    ids=["ours", "foreign"],
)
async def test_raising_performer_ends_the_run_with_its_error(raised, said, world):
    seen = []

    class Broken:
        def __init__(self, inner):
            self.begin = inner.begin

        async def perform(self, item, io):
            raise raised

    def machine(plan, state):
        seen.append((yield CallModel(0, REQUEST)))
        seen.append((yield Gather((CallModel(1, REQUEST), CallModel(2, REQUEST)))))
        return world.done(state, status="failed", error=seen[0].error)

    await world.tree(machine, middlewares=[Broken]).run()

    assert said == seen[0].error.message
    assert raised in (seen[0].error, seen[0].error.__cause__)
    assert {Stop} == {type(o) for o in (seen[0], *seen[1].outcomes)}


# --- cancellation ---------------------------------------------------------------------------------------------------


def hanging(world, seen, started):
    """
    A machine that waits for ever in its first effect and asks for another one afterwards.
    """

    async def hang():
        started.set()
        await asyncio.Event().wait()

    def machine(plan, state):
        seen.append((yield do(0, hang)))
        seen.append((yield CallModel(1, REQUEST)))
        seen.append((yield Notify(Notification(message="the end is still told"))))
        return world.done(state, status="cancelled")

    return machine


@pytest.mark.spec("reliability:I12", "reliability:SS12")
async def test_cancelled_task_ends_the_run_and_keeps_its_cancellation(world):
    seen, started, provider = [], asyncio.Event(), world.Provider()
    tree = world.tree(hanging(world, seen, started), models=provider)
    task = asyncio.create_task(tree.run())
    await started.wait()
    task.cancel()
    finished = await task

    assert ["cancelled", "cancelled"] == [o.kind for o in seen[:2]]
    assert [] == provider.requests
    assert RunStatus.CANCELLED is finished.status
    assert tree.root.cancelled
    assert 1 == task.cancelling()


@pytest.mark.spec("reliability:SS12", "reliability:I12")
async def test_stop_and_cancel_in_one_tick_are_both_kept(world):
    seen, started = [], asyncio.Event()
    tree = world.tree(hanging(world, seen, started))
    task = asyncio.create_task(tree.run())
    await started.wait()
    tree.root.stop(Stop("shutdown"))
    task.cancel()
    await task

    assert "shutdown" == seen[0].kind
    assert tree.root.cancelled
    assert 1 == task.cancelling()


@pytest.mark.spec("reliability:I12")
async def test_cancel_at_the_end_of_an_effect_is_not_lost(world):
    for ticks in range(6):
        gate, started = asyncio.Event(), asyncio.Event()

        async def wait(gate=gate, started=started):
            started.set()
            await gate.wait()

        def machine(plan, state, wait=wait):
            outcome = yield do(0, wait)
            outcome = yield CallModel(1, REQUEST)
            return world.done(state, status="cancelled" if isinstance(outcome, Stop) else "completed")

        tree = world.tree(machine)
        task = asyncio.create_task(tree.run())
        await started.wait()
        gate.set()
        for _ in range(ticks):
            await asyncio.sleep(0)
        cancelled = task.cancel()
        finished = await asyncio.gather(task, return_exceptions=True)

        if not cancelled:
            assert RunStatus.COMPLETED is finished[0].status
        else:
            assert isinstance(finished[0], asyncio.CancelledError) or tree.root.cancelled


async def test_a_swallowed_cancellation_still_ends_the_run(world):
    seen, started = [], asyncio.Event()

    async def stubborn():
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "I go on"

    def machine(plan, state):
        seen.append((yield do(0, stubborn)))
        seen.append((yield CallModel(1, REQUEST)))
        return world.done(state, status="cancelled")

    tree = world.tree(machine)
    task = asyncio.create_task(tree.run())
    await started.wait()
    task.cancel()
    await task

    assert "I go on" == seen[0].value
    assert isinstance(seen[1], Stop)
    assert tree.root.cancelled


@pytest.mark.spec("reliability:I12")
async def test_finished_gather_members_survive_a_stop(world):
    started = asyncio.Event()
    cancelled = []

    async def quick():
        return "kept"

    async def hang():
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(True)

    def machine(plan, state):
        outcome = yield Gather((do(0, quick), do(1, hang), do(2, quick)), concurrency=1)
        return world.done(state, outcome.outcomes, status="cancelled")

    tree = world.tree(machine)
    task = asyncio.create_task(tree.run())
    await started.wait()
    tree.root.stop(Stop("cancelled"))
    kept, stopped, never = (await task).output

    assert "kept" == kept.value
    assert ("cancelled", "cancelled") == (stopped.kind, never.kind)
    assert [True] == cancelled


@pytest.mark.spec("reliability:I12", "reliability:SS12")
async def test_concurrent_stops_from_threads_count_once(world):
    seen, started = [], asyncio.Event()
    tree = world.tree(hanging(world, seen, started))
    task = asyncio.create_task(tree.run())
    await started.wait()
    threads = [
        threading.Thread(target=lambda: [tree.root.stop(Stop("cancelled")) for _ in range(100)]) for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    finished = await task
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert RunStatus.CANCELLED is finished.status
    assert 0 == task.cancelling()


@pytest.mark.spec("requirements:X59")
@pytest.mark.parametrize(("kind", "together"), [(KeyboardInterrupt, False), (SystemExit, True)])
async def test_keyboard_interrupt_in_an_effect_reaches_the_caller(world, kind, together):
    seen = []

    async def interrupt():
        raise kind

    async def hang():
        await asyncio.Event().wait()

    def machine(plan, state):
        if together:
            seen.extend((yield Gather((do(0, interrupt), do(1, hang)))).outcomes)
        else:
            seen.append((yield do(0, interrupt)))
        return world.done(state, status="cancelled")

    tree = world.tree(machine)
    finished = await tree.run()

    assert {"cancelled"} == {o.kind for o in seen}
    assert RunStatus.CANCELLED is finished.status
    assert isinstance(tree.leftovers.reraise, kind)


async def test_outcomes_carry_the_time_since_run_creation(world):
    clock = world.JumpingClock()

    def machine(plan, state):
        first = yield CallModel(0, REQUEST)
        clock.ms += 250
        second = yield CallModel(1, REQUEST)
        return world.done(state, [first.at, second.at])

    finished = await world.tree(machine, clock=clock).run()

    assert [0, 250] == finished.output


async def test_started_and_finished_events_surround_an_effect_in_order(world):
    events = []

    def machine(plan, state):
        yield Notify(Notification(message="one"))
        yield CallModel(0, REQUEST)
        yield do(1, lambda: 1)
        return world.done(state)

    await world.tree(machine, observers=[events.append]).run()

    assert [
        "notification",
        "model_started",
        "text_delta",
        "model_finished",
        "perform_started",
        "perform_finished",
    ] == [e.type for e in events]
    assert list(range(6)) == [e.index for e in events]


async def test_finished_tree_is_freed_without_garbage_collection(world):
    def machine(plan, state):
        if not plan.path:
            yield Gather((CallModel(0, REQUEST), Spawn(1, "kid")))
        yield AskPerson(2, (Question("q", "?"),))
        yield CallTool(3, "no such tool", {})
        return world.done(state)

    def planner(parent, effect, path):
        return world.plan(path=path), AgentState(run_id=path)

    gc.disable()
    try:
        tree = world.tree(machine, planner=planner, observers=[lambda event: None])
        await tree.run()
        freed = weakref.ref(tree.hub), weakref.ref(tree.questions), weakref.ref(tree)
        del tree

        assert [None, None, None] == [ref() for ref in freed]
    finally:
        gc.enable()
