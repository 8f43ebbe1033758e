"""
What runs take of the process they live in.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import types
from collections.abc import Iterable
from typing import Any

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
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
from stepengine.testing import ScriptedModel, failure

CALLS = 40


@pytest.mark.spec("reliability:RS06")
async def test_slow_sync_tools_fill_a_pool_of_32_and_leave_the_default_executor_alone():
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
        go.wait(20)
        with lock:
            running -= 1
        return "waited"

    def handle_steps(ctx):
        yield from ToolCall("wait", {})

    async with Engine(pricing=None) as engine:
        agent = AgentDefinition("a", tools=[wait], handle_steps=handle_steps)
        runs = [asyncio.create_task(engine.run(agent)) for _ in range(CALLS)]
        try:
            for _ in range(1_000):
                if full.is_set():
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)  # a thread too many would have begun
            executor = asyncio.get_running_loop()._default_executor
            at_once = await asyncio.wait_for(asyncio.to_thread(lambda: "at once"), 5)
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


@pytest.mark.spec("reliability:RS07")
async def test_what_a_handler_was_told_of_failures_holds_no_traceback_and_no_frame():
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
    gc.collect()

    assert (RunStatus.COMPLETED, ["perform", "perform", "model"]) == (result.status, caught)
    assert [RunStatus.FAILED] * 4 == [child.status for child in result.children]
    assert len(model.calls) == 3
    assert [] == frames_behind([*kept, result, *records])
