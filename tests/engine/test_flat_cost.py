"""
What the plan of an agent costs does not depend on how many children use it.

Calls of Python functions are counted, not time: the count is the same on every machine.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from stepengine import AgentCall, AgentDefinition, Engine, Parallel, RunStatus
from stepengine.testing import ScriptedModel


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
        engine = Engine([agent], models=ScriptedModel(["done"] * 2 * count), pricing=None)
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
