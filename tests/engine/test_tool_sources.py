"""
Sources of tools: what they find when a run begins is recorded, known to that run alone, and judged like any other tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from stepengine import AgentDefinition, Change, Engine, Hooks, Perform, RunStatus, Tool
from stepengine.errors import DefinitionError
from stepengine.journal import MemoryJournal
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, tool_call

EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


class Shelf:
    """
    A source whose tools are the names that it holds at the moment.
    """

    def __init__(self, *names: str) -> None:
        self.names = list(names)
        self.looked = self.closed = 0

    name = "shelf"

    async def look(self) -> list[str]:
        self.looked += 1
        return list(self.names)

    def pre_run(self, ctx: Any) -> Generator[Any, Any, Change]:
        names = yield from Perform.idempotent(self.look)
        return Change(tools=[Tool(name, f"Take {name}.", EMPTY, self.take) for name in names])

    async def take(self, input: dict[str, Any]) -> str:
        return "taken"

    async def aclose(self, blocked: Any = None) -> None:
        self.closed += 1


def worker(*tools: Any, **options: Any) -> AgentDefinition[Any]:
    return AgentDefinition("worker", model="test/model", tools=[*tools], **options)


async def test_run_has_the_tools_its_source_listed_at_start() -> None:
    shelf = Shelf("cup")
    model = ScriptedModel(["ok", "ok"])

    async with Engine([worker(shelf)], models=model) as engine:
        await engine.run("worker", "Go.")
        shelf.names = ["plate"]
        result = await engine.run("worker", "Go.")

    assert [["cup"], ["plate"]] == [[tool.name for tool in request.tools] for request in model.calls]
    assert ["plate"] == list(result.state.tool_definitions)
    assert 1 == shelf.closed


async def test_replay_uses_recorded_tools_without_asking_the_source() -> None:
    shelf, journal = Shelf("cup"), MemoryJournal()
    async with Engine([worker(shelf)], models=ScriptedModel([tool_call("cup", {}), "ok"])) as engine:
        await engine.run("worker", "Go.", journal=journal)
    other = Shelf("plate")

    async with Engine([worker(other)], models=ScriptedModel([])) as engine:
        again = await engine.replay(journal)

    assert (RunStatus.COMPLETED, ["taken"]) == (again.status, [one.result.text for one in again.tool_calls])
    assert 0 == other.looked


async def test_a_child_has_the_tools_of_its_own_sources() -> None:
    shelf = Shelf("cup")
    child = AgentDefinition("child", model="test/model", tools=[shelf])
    parent = AgentDefinition("parent", model="test/model", tools=["spawn_agents"], spawnable_agents=[child])
    spawns = tool_call("spawn_agents", {"agents": [{"agent_type": "child", "prompt": "x"}]})
    model = ScriptedModel([spawns, tool_call("cup", {}), "done", "ok"])

    async with Engine([parent], models=model) as engine:
        result = await engine.run("parent", "Go.")

    assert RunStatus.COMPLETED is result.status
    assert ["cup"] == [tool.name for tool in model.calls[1].tools]
    assert "cup" not in [tool.name for tool in model.calls[0].tools]


async def test_permission_rules_apply_to_tools_listed_at_run_start() -> None:
    model = ScriptedModel([tool_call("cup", {}), tool_call("plate", {}), "ok"])
    policy = Policy([Rule.allow_tool("cup")], mode="dont_ask")

    async with Engine([worker(Shelf("cup", "plate"))], models=model, permissions=policy) as engine:
        result = await engine.run("worker", "Go.")

    assert ["ok", "denied"] == [one.result.status for one in result.tool_calls]


async def test_listed_tool_with_a_taken_name_fails_the_run() -> None:
    async def take(input: dict[str, Any]) -> str:
        return "own"

    own = Tool("cup", "Take the cup.", EMPTY, take)
    async with Engine([worker(own, Shelf("cup"))], models=ScriptedModel([])) as engine:
        result = await engine.run("worker", "Go.")

    assert isinstance(result.error, DefinitionError)
    assert "'shelf' has a tool 'cup', and the agent has another tool with that name" in str(result.error)


async def test_hook_may_add_tools_to_one_run() -> None:
    async def take(input: dict[str, Any]) -> str:
        return "taken"

    def adding(ctx: Any) -> Change | None:
        return Change(tools=[Tool("cup", "Take the cup.", EMPTY, take)]) if ctx.metadata.get("cup") else None

    agent = worker(hooks=Hooks(pre_run=[adding]))
    model = ScriptedModel([tool_call("cup", {}), "ok", "ok"])
    async with Engine([agent], models=model) as engine:
        one = await engine.run(agent, "Go.", metadata={"cup": True})
        await engine.run(agent, "Go.")

    assert ["taken"] == [call.result.text for call in one.tool_calls]
    assert [["cup"], ["cup"], []] == [[tool.name for tool in request.tools] for request in model.calls]


class FailsToClose(Shelf):
    """
    A source whose ``aclose`` raises an exception.
    """

    name = "broken"

    async def aclose(self, blocked: Any = None) -> None:
        await super().aclose(blocked)
        msg = "cannot close"
        raise OSError(msg)


@pytest.mark.spec("reliability:RS11")
@pytest.mark.parametrize("is_async", [True, False])
def test_failed_close_of_a_source_leaves_nothing_else_open(is_async: bool) -> None:
    class ClosedModel(ScriptedModel):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    model, sources = ClosedModel([]), [FailsToClose(), Shelf(), FailsToClose()]
    agents = [AgentDefinition(f"agent{n}", model="test/model", tools=[source]) for n, source in enumerate(sources)]
    engine = Engine(agents, models=model)
    with pytest.raises(OSError, match="cannot close"):
        asyncio.run(engine.aclose()) if is_async else engine.close()

    assert [1, 1, 1, 1] == [model.closed, *[source.closed for source in sources]]
