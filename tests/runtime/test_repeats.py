"""
A model that makes the same call again and again.
"""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from stepengine import AgentDefinition, Engine, Limits, RunStatus, tool
from stepengine.data.effects import CallTool, Gather, Spawn
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Value
from stepengine.data.state import AgentState
from stepengine.data.tools import Ordinary, ToolBinding, ToolSpec
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls


def call(seq, number=1, **fields):
    return CallTool(seq, fields.pop("tool_name", "poll"), {"n": number}, f"c{seq}", arguments={}, **fields)


async def run(world, machine, *, limits=None, results=None, watched=True):
    said = iter(results) if results is not None else iter(lambda: "same", None)
    calls, events = [], []

    class Poll:
        async def execute(self, arguments, ctx, *, overrides, seconds):
            calls.append(arguments)
            return ToolResult.text(next(said), tool_call_id=f"c{len(calls)}")

        def trust(self, given):
            return "untrusted"

    bound = ToolBinding(ToolSpec("poll"), lambda given: None, runs=Ordinary(Poll()))
    tools = {"poll": bound, "a": bound, "b": bound}

    def child(parent, effect, path):
        return world.plan(path=path, limits=parent.limits, tools=tools), AgentState(run_id=path, agent_id="worker")

    tree = world.tree(
        machine,
        plan=world.plan(limits=Limits(**(limits or {})), tools=tools),
        observers=[events.append] if watched else [],
        planner=child,
    )
    finished = await tree.run()
    return finished.output, [(e.seq, e.tool_name, e.count) for e in events if e.type == "repeat"]


def each(world, effects):
    def machine(plan, state):
        outcomes = []
        for effect in effects:
            outcomes += [(yield effect)]
        return world.done(state, outcomes)

    return machine


@pytest.mark.spec("reliability:MP65")
async def test_third_identical_call_emits_one_repeat_event(world):
    outcomes, repeats = await run(world, each(world, [call(seq) for seq in range(10)]))

    assert [(2, "poll", 3)] == repeats
    assert all(type(outcome) is Value for outcome in outcomes)


@pytest.mark.spec("reliability:MP65")
@pytest.mark.parametrize("watched", [True, False])
async def test_max_identical_calls_refuses_the_call_beyond_it(world, watched):
    effects = [call(seq) for seq in range(6)] + [call(6, 2), call(7)]
    outcomes, _ = await run(world, each(world, effects), limits={"max_identical_calls": 4}, watched=watched)

    assert [Value] * 4 + [Failure] * 2 + [Value] * 2 == [type(outcome) for outcome in outcomes]
    assert ("repetition", 4) == (outcomes[4].error.kind, outcomes[4].error.limit)


@pytest.mark.spec("reliability:MP65")
@pytest.mark.parametrize(
    ("effects", "results"),
    [
        ([call(0), call(1, 2), call(2), call(3, 2), call(4), call(5, 2)], None),
        ([call(seq) for seq in range(6)], ["1 %", "1 %", "2 %", "2 %", "3 %", "3 %"]),
        ([call(seq, source="handler") for seq in range(6)], None),
    ],
    ids=["another input between", "another result", "a handler that polls"],
)
async def test_changing_or_handler_calls_are_no_repetition(world, effects, results):
    outcomes, repeats = await run(world, each(world, effects), limits={"max_identical_calls": 3}, results=results)

    assert [Value] * 6 == [type(outcome) for outcome in outcomes]
    assert [] == repeats


async def test_repetitions_are_counted_per_tool_and_per_run(world):
    def machine(plan, state):
        if not plan.path:
            yield Gather((Spawn(0, "worker"), Spawn(1, "worker")))
        for seq in range(2, 8):
            yield call(seq, tool_name="ab"[seq % 2])
        return world.done(state)

    _, repeats = await run(world, machine)

    assert sorted(3 * [(6, "a", 3), (7, "b", 3)]) == sorted(repeats)


@pytest.mark.spec("reliability:MP65")
async def test_looping_model_ends_the_run_at_max_identical_calls():
    @tool(in_thread=False)
    def poll(job: str) -> str:
        """
        Look at a job.

        Args:
            job: Its name.
        """
        return "running"

    agent = AgentDefinition("poller", model="test/m", tools=[poll], limits=Limits(max_identical_calls=5))
    model = ScriptedModel([tool_call("poll", {"job": "a"}) for _ in range(20)] + [text("never")])
    result = await Engine(models=model).run(agent, "wait for it")

    assert RunStatus.FAILED is result.status
    assert "repetition" == result.error.kind
    assert 6 == len(model.calls)
    assert 5 == sum(not c.result.is_error for c in result.tool_calls)


def together(number, inputs):
    return tool_calls(*[tool_call("poll", {"job": job}) for job in inputs], text=f"Reply {number}.")


@pytest.mark.spec("reliability:MP65")
@pytest.mark.parametrize("concurrent", [None, 2, 1])
async def test_max_identical_calls_refuses_parallel_calls_in_their_order(concurrent):
    @tool(in_thread=False, parallel_safe=True)
    def poll(job: str) -> str:
        """Look at *job*."""
        return "running"

    limits = Limits(max_identical_calls=2, max_concurrent_tools=concurrent)
    agent = AgentDefinition("poller", model="test/m", tools=[poll], limits=limits)
    journal = MemoryJournal()
    engine = Engine([agent], models=ScriptedModel([together(1, "a"), together(2, "aaabbba"), text("never")]))
    result = await engine.run(agent, "wait for it", journal=journal)

    assert "repetition" == result.error.kind
    refused = [call.result.is_error for call in result.tool_calls]
    assert [False, False, True, True, False, False, True, False] == refused
    assert result == await engine.replay(journal)


@pytest.mark.spec("reliability:MP65")
async def test_parallel_calls_are_compared_in_order_not_by_speed():
    ended, started = [asyncio.Event() for _ in range(4)], count()
    ended[3].set()

    @tool(in_thread=False, parallel_safe=True)
    async def poll(job: str) -> str:
        """Look at *job*."""
        number = next(started)
        if number < 3:  # the last one ends first
            await ended[number + 1].wait()
            ended[number].set()
        return "queued" if number == 0 else "running"

    events = []
    agent = AgentDefinition("poller", model="test/m", tools=[poll])
    model = ScriptedModel([together(1, "aaa"), together(2, "a"), text("end")])
    result = await Engine([agent], models=model, observers=[events.append]).run(agent, "wait for it")

    assert [(result.tool_calls[3].tool_call_id, 3)] == [(e.tool_call_id, e.count) for e in events if e.type == "repeat"]
