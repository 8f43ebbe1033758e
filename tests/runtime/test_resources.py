"""
What runs take of the process they live in.
"""

from __future__ import annotations

import asyncio
import threading

import pytest

from stepengine import AgentDefinition, Engine, RunStatus, ToolCall, tool

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
