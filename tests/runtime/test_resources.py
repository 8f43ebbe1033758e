"""
What runs take of the process they live in.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import tracemalloc
import types
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Limits,
    Parallel,
    Perform,
    RetryPolicy,
    RunStatus,
    StepContext,
    ToolCall,
    tool,
)
from stepengine.errors import ModelError, PerformError
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply, ModelRequest
from stepengine.testing import ScriptedModel, failure, tool_call

CALLS = 40


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:TL07")
async def test_sync_tools_share_32_threads_outside_the_default_executor():
    lock, go, full = threading.Lock(), threading.Event(), threading.Event()
    running = most = 0
    names = set()

    @tool(parallel_safe=True, requires_permission=False)
    def wait() -> str:
        """Wait."""
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            names.add(threading.current_thread().name)
            if running == 32:
                full.set()
        go.wait(50)
        with lock:
            running -= 1
        return "waited"

    def handle_steps(ctx):
        yield from ToolCall("wait", {})

    async with Engine(pricing=None) as engine:
        agent = AgentDefinition("a", tools=[wait], handle_steps=handle_steps)
        runs = [asyncio.create_task(engine.run(agent)) for _ in range(CALLS)]
        try:
            for _ in range(5_000):
                if full.is_set():
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # a thread too many would have begun
            executor = asyncio.get_running_loop()._default_executor
            at_once = await asyncio.wait_for(asyncio.to_thread(lambda: "at once"), 50)
        finally:
            go.set()
        results = await asyncio.gather(*runs)

    assert (32, None, "at once") == (most, executor, at_once)
    assert all(name.startswith("stepengine-tool-") for name in names), names
    assert {RunStatus.COMPLETED} == {result.status for result in results}


# --- what failures hold -----------------------------------------------------------------------------------------------

NO_DATA = (type, types.ModuleType, types.FunctionType, types.CodeType)
"""What leads to all that is loaded."""


def frames_behind(roots: Iterable[Any]) -> list[str]:
    """
    Name the tracebacks and frames that are reachable, each with the classes on the way to it.
    """
    found, seen = [], {}
    ways = [(root, type(root).__name__) for root in roots]
    while ways:
        one, way = ways.pop()
        if id(one) in seen or isinstance(one, NO_DATA):
            continue
        seen[id(one)] = one
        if isinstance(one, types.TracebackType | types.FrameType):
            found.append(way)
            continue
        nexts = gc.get_referents(one)
        if isinstance(one, BaseException):
            nexts += [one.__cause__, one.__context__, one.__traceback__]
        ways += [(each, f"{way} > {type(each).__name__}") for each in nexts]
    return found


@tool(requires_permission=False)
def broken() -> str:
    """Fail."""
    raise ValueError("the tool")


def sync() -> None:
    members = []
    try:
        raise KeyError("first")
    except KeyError as error:
        members.append(error)
    try:
        raise OSError("second")
    except OSError:
        raise ExceptionGroup("the function", members) from None


async def coroutine() -> None:
    await asyncio.sleep(0)
    sync()


def failing(ctx: StepContext) -> Any:
    yield ToolCall("broken", {})
    raise RuntimeError("the child")


@pytest.mark.spec("reliability:RS02")
async def test_failures_given_to_handlers_hold_no_traceback_or_frame():
    kept, caught = [], []

    def lead(ctx: StepContext) -> Any:
        kept.append((yield ToolCall("broken", {})))
        for fn in (sync, coroutine):
            try:
                yield Perform(fn)
            except PerformError as error:
                kept.append(error)
                caught.append("perform")
        kept.append((yield AgentCall("child", "go")))
        kept.append((yield AgentCall("modelled", "go")))
        kept.append((yield Parallel(Perform(sync), AgentCall("child"), AgentCall("modelled", "go"))))
        try:
            yield STEP
        except ModelError as error:
            kept.append(error)
            caught.append("model")
        kept.append(ctx.agent_state)

    members = [
        AgentDefinition("child", tools=[broken], handle_steps=failing),
        AgentDefinition("modelled", model="test/m"),
    ]
    agent = AgentDefinition("a", model="test/m", tools=[broken], handle_steps=lead, spawnable_agents=members)
    journal = MemoryJournal()
    model = ScriptedModel([failure(OSError(f"down {n}")) for n in range(3)])
    async with Engine(models=model, pricing=None, retry=RetryPolicy(attempts=1)) as engine:
        result = await engine.run(agent, "go", journal=journal)
    records = journal.records()

    assert (RunStatus.COMPLETED, ["perform", "perform", "model"]) == (result.status, caught)
    assert [RunStatus.FAILED] * 4 == [child.status for child in result.children]
    assert len(model.calls) == 3
    assert [] == frames_behind([*kept, result, *records])


# --- what runs keep ---------------------------------------------------------------------------------------------------


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


class Forgetful(ScriptedModel):
    """
    Says the same at every step and keeps no request.
    """

    async def complete(self, request: ModelRequest) -> ModelReply:
        return ModelReply("seen")


async def growth(steps: int, kept: list[Any] | None) -> int:
    """
    The bytes that the second half of a run adds, whose handler keeps every state or none.
    """
    sizes = []

    def handle_steps(ctx: StepContext) -> Any:
        for number in range(1, steps + 1):
            state = (yield STEP).agent_state
            if kept is not None:
                kept.append(state)
            if number in {steps // 2, steps}:
                sizes.append(traced())

    agent = AgentDefinition("a", model="test/m", tools=[], handle_steps=handle_steps)
    engine = Engine(models=Forgetful(), pricing=None, limits=Limits(max_steps=steps + 1))
    tracemalloc.start()
    try:
        result = await engine.run(agent, "go")
    finally:
        tracemalloc.stop()

    assert (RunStatus.COMPLETED, 2) == (result.status, len(sizes))
    return sizes[1] - sizes[0]


@pytest.mark.memory
@pytest.mark.spec("reliability:RS03")
async def test_kept_handler_state_costs_less_than_a_kilobyte():
    kept: list[Any] = []
    with_all, with_none = await growth(2_000, kept), await growth(2_000, None)

    assert list(range(2, 2_002)) == [len(state.message_history) for state in kept]
    assert with_all - with_none < 1_000 * 1_000


LONG = 10_000


async def looks(seen: Callable[[], None]) -> None:
    """Run so many steps, and call *seen* in each."""
    steps = 0

    @tool(in_thread=False, requires_permission=False)
    def look() -> str:
        """Look."""
        nonlocal steps
        steps += 1
        seen()
        return "seen"

    model = ScriptedModel([*[tool_call("look", {})] * LONG, "done"])
    async with Engine(models=model, pricing=None, limits=Limits(max_steps=LONG + 1)) as engine:
        result = await engine.run(AgentDefinition("a", model="test/m", tools=[look]), "go")
    assert (RunStatus.COMPLETED, LONG) == (result.status, steps)


@pytest.mark.speed
@pytest.mark.spec("reliability:RS03")
async def test_cost_of_a_step_is_constant_over_ten_thousand_steps():
    calls, marks = 0, []

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        await looks(lambda: marks.append(calls))
    finally:
        sys.setprofile(before)
    per_step = [later - earlier for earlier, later in pairwise(marks)]
    early, late = sorted(per_step[20:120]), sorted(per_step[-100:])

    assert late[50] <= 1.05 * early[50]
    assert late[-1] <= 2 * early[-1]


@pytest.mark.memory
@pytest.mark.spec("reliability:RS03")
async def test_memory_of_ten_thousand_steps_grows_only_by_content():
    sizes: list[int] = []
    steps = itertools.count(1)
    tracemalloc.start()
    try:
        await looks(lambda: sizes.append(traced()) if next(steps) % (LONG // 4) == 0 else None)
    finally:
        tracemalloc.stop()
    second, _, last = [later - earlier for earlier, later in pairwise(sizes)]

    assert last <= 1.2 * second


# --- what many runs take ----------------------------------------------------------------------------------------------

RUNS, STEPS = 1_000, 20


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.memory
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory and descriptors are read from /proc")
@pytest.mark.spec("reliability:RS02")
async def test_a_thousand_concurrent_runs_stay_within_their_memory():
    begun, all_there = 0, asyncio.Event()

    @tool(in_thread=False, requires_permission=False)
    def look() -> str:
        """Look."""
        return "seen"

    class Together(ScriptedModel):
        async def complete(self, request: ModelRequest) -> ModelReply:
            nonlocal begun
            begun += len(request.messages) == 1
            if begun == RUNS:
                all_there.set()
            await all_there.wait()
            await asyncio.sleep(0)
            return await super().complete(request)

    def say(request: Any) -> Any:
        return "done" if len(request.messages) >= 2 * STEPS - 1 else tool_call("look", {})

    async def crowd(runs: int) -> list[Any]:
        async with Engine(models=Together([say] * runs * STEPS), pricing=None) as engine:
            return await asyncio.gather(*[engine.run(agent, "go") for _ in range(runs)])

    agent = AgentDefinition("a", model="test/m", tools=[look])
    all_there.set()
    await crowd(20)
    all_there.clear()
    begun = 0
    tasks, open_files, before = len(asyncio.all_tasks()), descriptors(), resident()
    async with asyncio.timeout(120):
        results = await crowd(RUNS)
    grown = resident() - before

    assert begun == RUNS
    assert {(RunStatus.COMPLETED, 2 * STEPS)} == {(r.status, len(r.state.message_history)) for r in results}
    assert (tasks, open_files) == (len(asyncio.all_tasks()), descriptors())
    # 20 KiB for what is kept of 5 steps.
    assert grown < RUNS * STEPS // 5 * 20 * 1024


TEXTS, CHARS = 1_000, 1_000


@pytest.mark.memory
@pytest.mark.spec("reliability:RS03")
async def test_events_shown_to_an_observer_are_not_kept():
    shown, kept = 0, 0

    def watch(event: Any) -> None:
        nonlocal shown, kept
        shown += 1
        if shown == 900_000:
            tracemalloc.start()
        elif shown == 1_000_000:
            kept = traced()

    def handle_steps(ctx: StepContext) -> Any:
        for _ in range(TEXTS):
            yield STEP

    agent = AgentDefinition("a", model="test/m", tools=[], handle_steps=handle_steps)
    model = ScriptedModel(["x" * CHARS] * TEXTS, chunk=1)
    engine = Engine(models=model, observers=[watch], pricing=None, limits=Limits(max_steps=TEXTS + 1))
    try:
        result = await engine.run(agent, "go")
    finally:
        tracemalloc.stop()

    assert RunStatus.COMPLETED == result.status
    assert shown > TEXTS * CHARS
    # The texts themselves are a byte for each of these events; one that is kept would be fifty and more.
    assert 0 < kept < 8 * 100_000
