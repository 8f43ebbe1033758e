"""
What a journal or a tracer is built into: the private way in which runs are begun.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
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
from stepengine.data.effects import CallModel
from stepengine.data.outcomes import Failure, Value
from stepengine.engine.run_plans import RunRequest, pop_run_info
from stepengine.models import ModelReply
from stepengine.runtime import IO, Item, Performer, Services
from stepengine.testing import Clock, ScriptedModel, text, tool_call
from tests.engine.sums import add


class Recorder:
    """
    A middleware that writes down what goes by.
    """

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.log = log

    def __call__(self, inner: Performer) -> Recording:
        return Recording(inner, self)


class Recording:
    def __init__(self, inner: Performer, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

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
        kind = type(item.effect).__name__
        self._recorder.log.append((self._recorder.name, what, f"{item.path}#{item.effect.seq}", kind))


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


async def test_a_middleware_sees_every_effect_of_the_tree_begun_before_it_is_performed_exactly_once() -> None:
    log: list[Any] = []
    agent = family()
    replies = {"one": text("1"), "two": text("2")}

    def reply(request: Any) -> Any:
        return replies.get(request.messages[0].text) or (
            tool_call("add", {"a": 3, "b": 4}) if len(request.messages) == 1 else text("done")
        )

    engine = Engine([agent], models=ScriptedModel([reply] * 4))
    request = RunRequest(agent=engine._launcher.catalog.find("lead"), prompt="go")
    result = await engine._launcher.ready(request, wrap=wrapped(middlewares=(Recorder("r", log),))).run()
    seen = [(address, kind) for _, what, address, kind in log if what == "begin"]

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
        assert ["begin", "perform", "Value"] == [what for _, what, where, _ in log if where == address]


async def test_recorders_stand_inside_the_meter_and_outside_the_gate_and_outermost_outside_of_all() -> None:
    log: list[Any] = []
    agent = AgentDefinition("a", model="test/m", limits=Limits(max_tokens=1))
    engine = Engine([agent], models=ScriptedModel([text("never")]))
    wrap = wrapped(middlewares=(Recorder("inner", log), Recorder("middle", log)), outermost=(Recorder("outer", log),))
    result = await engine._launcher.ready(
        RunRequest(agent=engine._launcher.catalog.find("a"), prompt="x" * 100), wrap=wrap
    ).run()

    assert "tokens" == result.error.kind  # type: ignore[union-attr]
    assert [
        (name, what, "#0", CallModel.__name__) for what in ("begin", "perform") for name in ("outer", "middle", "inner")
    ] == log[:6]
    assert [("inner", Failure.__name__), ("middle", Failure.__name__), ("outer", Failure.__name__)] == [
        entry[:2] for entry in log[6:9]
    ]


async def test_a_middleware_may_answer_instead_and_the_meter_counts_what_it_says() -> None:
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


async def test_the_seed_can_be_given_and_the_date_is_that_of_the_clock_also_for_children() -> None:
    created = datetime(2020, 2, 3, tzinfo=UTC)

    def handle(ctx: Any) -> Any:
        said = [ctx.random.random(), str(ctx.now().date())]
        if ctx.agent_state.parent_id is None:
            said += yield from AgentCall("child")
        return said

    child = AgentDefinition("child", handle_steps=handle)
    agent = AgentDefinition("a", spawnable_agents=[child], handle_steps=handle)
    engine = Engine([agent], models=ScriptedModel([]), clock=Clock(created))

    async def run(seed: str | None = None) -> Any:
        services: list[Services] = []

        def wrap(given: Services) -> Services:
            services.append(given)
            return given

        launcher = engine._launcher
        launcher.seed = seed
        result = await launcher.ready(RunRequest(agent=launcher.catalog.find("a")), wrap=wrap).run()
        return result.output, services[0].seed

    first, seed = await run("s")
    again, _ = await run("s")
    other, drawn = await run()

    assert "s" == seed
    assert first == again
    assert ["2020-02-03"] * 2 == [first[1], first[3]]
    assert first[0] != first[2]
    assert first[0] != other[0]
    assert drawn not in ("", "s")


async def test_plan_and_state_can_be_exchanged_before_the_run_starts() -> None:
    engine = Engine([AgentDefinition("a", model="test/m")], models=ScriptedModel([text("hi")]))

    def prepare(plan: Any, state: Any) -> Any:
        return attrs.evolve(plan, run_id="known"), attrs.evolve(state, run_id="known")

    result = await engine._launcher.ready(
        RunRequest(agent=engine._launcher.catalog.find("a"), prompt="hi"), prepare=prepare
    ).run()

    assert "known" == result.state.run_id


async def test_what_runs_are_started_with_is_what_the_constructors_would_make_of_it() -> None:
    planned: list[Any] = []

    def wrap(services: Services) -> Services:
        def planner(*asked: Any) -> Any:
            planned.append(services.planner(*asked))
            return planned[-1]

        return attrs.evolve(services, planner=planner)

    def prepare(plan: Any, state: Any) -> Any:
        planned.append((plan, state))
        return plan, state

    def lead(ctx: Any) -> Any:
        yield Parallel(AgentCall("plain", "p", {"k": [1]}), AgentCall("heir"))

    agents = [
        AgentDefinition("lead", model="test/m", spawnable_agents=["plain", "heir"], handle_steps=lead),
        AgentDefinition("plain", system_prompt="You are plain.", limits=Limits(max_steps=3)),
        AgentDefinition("heir", inherit_parent_system_prompt=True),
    ]
    engine = Engine(agents, models=ScriptedModel([text("1"), text("2")]), limits=Limits(max_seconds=60))
    info = pop_run_info({"session_id": "s", "user_id": "u", "metadata": {"k": [1]}})
    request = RunRequest(agent=engine._launcher.catalog.find("lead"), prompt="go", info=info)
    result = await engine._launcher.ready(request, prepare=prepare, wrap=wrap).run()

    assert RunStatus.COMPLETED is result.status
    assert ["", "0", "1"] == [plan.path for plan, _ in planned]
    for plan, state in planned:
        assert (plan, state) == (attrs.evolve(plan), attrs.evolve(state))
        assert plan.limits == attrs.evolve(plan).limits
        assert info is plan.info
    assert ["", "You are plain.", ""] == [state.system_prompt for _, state in planned]
    assert [60, 60, 60] == [plan.limits.max_seconds for plan, _ in planned]
