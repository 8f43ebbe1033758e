"""
Runs that have ended leave nothing in memory.
"""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import weakref

import pytest

from stepengine import STEP_ALL, AgentDefinition, Engine, ToolCall
from stepengine.testing import ScriptedModel, text
from tests.engine.sums import add

TEN_THOUSAND = """
import asyncio, gc, json
from pathlib import Path

from stepengine import STEP_ALL, AgentCall, AgentDefinition, Engine, ToolCall, tool
from stepengine.testing import ScriptedModel, text


class Forever(ScriptedModel):  # says the same for ever and remembers nothing
    async def complete(self, request):
        return text("hi")


@tool
def add(a: int, b: int) -> int:
    return a + b


def lead(ctx):
    yield AgentCall("child", "go")
    yield ToolCall(add, {"a": 1, "b": 2})
    yield STEP_ALL


def held():
    gc.collect()
    return len(gc.get_objects()), int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def main():
    child = AgentDefinition("child", model="test/m")
    engine = Engine(
        [AgentDefinition("a", model="test/m", tools=[add], spawnable_agents=[child], handle_steps=lead)], models=Forever([])
    )
    seen = {}
    for number in range(10_000):
        await engine.run("a", "go")
        if number in (1_000, 9_999):
            seen[number] = held()
    print(json.dumps([after - before for before, after in zip(seen[1_000], seen[9_999])]))


asyncio.run(main())
"""


@pytest.mark.memory
@pytest.mark.spec("reliability:RS02")
def test_ten_thousand_runs_one_after_another_leave_nothing_behind():
    done = subprocess.run([sys.executable, "-c", TEN_THOUSAND], capture_output=True, text=True, check=True)
    objects, memory = json.loads(done.stdout)

    assert objects < 100
    assert memory < 5 * 1024 * 1024


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:RS02")
async def test_handle_task_generator_and_tree_are_freed_without_the_collector():
    kept = []

    class Local:
        """
        Something that a handler holds.
        """

    def handle(ctx):
        mine = Local()
        kept.append(weakref.ref(mine))
        yield ToolCall(add, {"a": 1, "b": 2})
        yield STEP_ALL

    agent = AgentDefinition("a", model="test/m", tools=[add], handle_steps=handle)
    engine = Engine(models=ScriptedModel([text("hi")] * 2), observers=[lambda event: None])
    await engine.run(agent, "warm up")
    gc.collect()
    gc.disable()
    try:
        handle = engine.start(agent, "go")
        await handle.result()
        kept += [weakref.ref(handle), weakref.ref(handle._tree), weakref.ref(handle._turns.task)]
        del handle
        await asyncio.sleep(0)

        assert [None] * 5 == [ref() for ref in kept]
    finally:
        gc.enable()
