"""
What a journal or a tracer is built into: the private way in which runs are begun.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Change,
    Engine,
    Hooks,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    ToolCall,
    Usage,
)
from stepengine.data.outcomes import Value
from stepengine.engine.run_plans import RunRequest
from stepengine.models import ModelReply
from stepengine.runtime import IO, Item, Performer, Services
from stepengine.testing import ScriptedModel, text, tool_call
from tests.engine.sums import add


class Recording:
    """
    A middleware that writes down what goes by.
    """

    def __init__(self, inner: Performer, log: list[Any]) -> None:
        self._inner = inner
        self._log = log

    async def begin(self, batch: Any) -> None:
        for item in batch:
            self._note("begin", item)
        await self._inner.begin(batch)

    async def perform(self, item: Item, io: IO) -> Any:
        self._note("perform", item)
        outcome = await self._inner.perform(item, io)
        self._note(type(outcome).__name__, item)
        return outcome

    def _note(self, what: str, item: Item) -> None:
        self._log.append((what, f"{item.path}#{item.effect.seq}", type(item.effect).__name__))


def wrapped(**changes: Any) -> Callable[[Services], Services]:
    return lambda services: attrs.evolve(services, **changes)


def family() -> AgentDefinition[Any]:
    def work(ctx: Any) -> Any:
        yield ToolCall(add, {"a": 1, "b": 2})
        yield STEP

    def lead(ctx: Any) -> Any:
        yield from Perform(len, "abc")
        yield Parallel(AgentCall("worker", "one"), AgentCall("worker", "two"))
        yield STEP

    def look(ctx: Any, reply: Any) -> Any:
        yield from Perform(len, "hook")
        return Change()

    worker = AgentDefinition("worker", model="test/m", tools=[add], handle_steps=work)
    hooks = Hooks(post_step=[look])
    return AgentDefinition(
        "lead", model="test/m", tools=[add], spawnable_agents=[worker], handle_steps=lead, hooks=hooks
    )


async def test_middleware_sees_every_effect_of_the_tree_once() -> None:
    log: list[Any] = []
    agent = family()
    replies = {"one": text("1"), "two": text("2")}

    def reply(request: Any) -> Any:
        return replies.get(request.messages[0].text) or (
            tool_call("add", {"a": 3, "b": 4}) if len(request.messages) == 1 else text("done")
        )

    engine = Engine([agent], models=ScriptedModel([reply] * 4))
    request = RunRequest(agent=engine._launcher.catalog.find("lead"), prompt="go")
    result = await engine._launcher.ready(
        request, wrap=wrapped(middlewares=(lambda inner: Recording(inner, log),))
    ).run()
    seen = [(address, kind) for what, address, kind in log if what == "begin"]

    assert RunStatus.COMPLETED is result.status
    assert ["#0", "#1", "#2", "1#0", "1#1", "2#0", "2#1", "#3", "#4", "#5"] == [address for address, _ in seen]
    assert [
        "CallFunction",
        "Spawn",
        "Spawn",
        *2 * ["CallTool", "CallModel"],
        "CallModel",
        "CallTool",
        "CallFunction",
    ] == [kind for _, kind in seen]
    for address, _ in seen:
        assert ["begin", "perform", "Value"] == [what for what, where, _ in log if where == address]


async def test_middleware_may_answer_instead_and_the_meter_counts_its_usage() -> None:
    class Player:
        def __init__(self, inner: Performer) -> None:
            self.begin = inner.begin
            self.inner = inner

        async def perform(self, item: Item, io: IO) -> Any:
            outcome = await self.inner.perform(item, io)
            return Value(ModelReply("recorded", usage=Usage(95))) if type(outcome) is Value else outcome

    def twice(ctx: Any) -> Any:
        yield STEP
        yield STEP

    model = ScriptedModel([text("1"), text("2")])
    agent = AgentDefinition("a", model="test/m", handle_steps=twice, limits=Limits(max_tokens=100))
    engine = Engine([agent], models=model)
    request = RunRequest(agent=engine._launcher.catalog.find("a"), prompt="hi")
    result = await engine._launcher.ready(request, wrap=wrapped(middlewares=(Player,))).run()

    assert "tokens" == result.error.kind  # type: ignore[union-attr]
    assert "recorded" == result.state.message_history[-1].text
    assert 95 == result.usage.total_tokens
