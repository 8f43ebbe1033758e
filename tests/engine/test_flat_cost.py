"""
What a step costs does not depend on what came before it, and many runs share one process.

Calls of Python functions are counted, not time: the count is the same on every machine.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import pairwise
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Limits, Parallel, RunStatus, Usage, tool
from stepengine.journal import MemoryJournal
from stepengine.models import ModelReply
from stepengine.testing import ScriptedModel, tool_call

STEPS = 600
LIMITS = Limits(max_steps=STEPS + 1)


def counted(tool_name: str, steps: int) -> ScriptedModel:
    replies = [ModelReply(tool_call(tool_name, {}).content, usage=Usage(10, 1))] * steps
    return ScriptedModel([*replies, "done"])


@pytest.mark.speed
@pytest.mark.spec("reliability:RS03")
async def test_late_step_makes_no_more_calls_than_an_early_one() -> None:
    calls, marks = 0, []

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event == "call"

    @tool(in_thread=False)
    def look() -> str:
        """Look."""
        marks.append(calls)
        return "seen"

    agent = AgentDefinition("a", model="test/m", tools=[look])
    engine = Engine(models=counted("look", STEPS), limits=LIMITS)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = await engine.run(agent, "go", journal=MemoryJournal())
    finally:
        sys.setprofile(before)
    per_step = [later - earlier for earlier, later in pairwise(marks)]
    early, late = sorted(per_step[20:60]), sorted(per_step[-40:])

    assert (RunStatus.COMPLETED, STEPS) == (result.status, len(marks))
    assert late[20] <= 1.05 * early[20]
    assert late[-1] <= 2 * early[-1]


@pytest.mark.spec("reliability:RS02")
async def test_three_hundred_runs_share_one_process() -> None:
    running, most, everybody = 0, 0, asyncio.Event()

    @tool
    async def wait() -> str:
        """Wait."""
        nonlocal running, most
        running += 1
        most = max(most, running)
        if most == 300:
            everybody.set()
        await everybody.wait()
        running -= 1
        return "waited"

    agent = AgentDefinition("a", model="test/m", tools=[wait])
    model = ScriptedModel([lambda request: "done" if len(request.messages) > 2 else tool_call("wait")] * 600)
    engine = Engine(models=model)
    results = await asyncio.gather(*[engine.run(agent, "go") for _ in range(300)])

    assert ({RunStatus.COMPLETED}, 300) == ({result.status for result in results}, most)


@pytest.mark.speed
@pytest.mark.parametrize("inherits", [False, True])
async def test_agent_plan_is_computed_once_for_all_children(inherits: bool) -> None:
    async def calls_of(count: int, family: int) -> int:
        others = [AgentDefinition(f"other-{n}", model="test/m", description="Helps.") for n in range(family)]
        child = AgentDefinition(
            "child",
            model="test/m",
            tools=["spawn_agents"],
            spawnable_agents=others,
            inherit_parent_system_prompt=inherits,
        )

        def lead(ctx: Any) -> Any:
            yield Parallel(*[AgentCall("child", "go")] * count)

        agent = AgentDefinition("lead", model="test/m", handle_steps=lead, spawnable_agents=[child])
        engine = Engine([agent], models=ScriptedModel(["done"] * 2 * count), limits=LIMITS, pricing=None)
        calls = 0

        def number(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        await engine.run("lead")
        before = sys.getprofile()
        sys.setprofile(number)
        try:
            result = await engine.run("lead")
        finally:
            sys.setprofile(before)
        assert [RunStatus.COMPLETED] * count == [c.status for c in result.children]
        return calls

    few = await calls_of(60, 2) - await calls_of(20, 2)
    many = await calls_of(60, 12) - await calls_of(20, 12)

    assert many - few <= 40 * 3
