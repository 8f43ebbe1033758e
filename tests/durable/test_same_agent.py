"""
The same agent, untouched, on an ``Engine`` and on a ``DurableEngine``.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Engine,
    Limits,
    Parallel,
    Perform,
    StepContext,
    ToolCall,
    call,
    tool,
)
from stepengine.data.state import ChildResult
from stepengine.errors import LimitExceeded
from stepengine.journal import MemoryJournal, diff
from stepengine.journal.fingerprints import Fingerprints
from stepengine.testing import ScriptedModel, text, tool_call

from .shared import add, worker_of


def measured(folder: str) -> int:
    return len(folder)


def child_steps(ctx: StepContext):
    total = yield from call(add, 1, 2)
    return {"total": total, "prompt": ctx.prompt}


def steps(ctx: StepContext):
    total = yield from call(add, 40, 2)
    size = yield from Perform(measured, "src")
    child = yield from AgentCall("child", "hello")
    first, second = yield from Parallel(AgentCall("child", "one"), ToolCall("add", {"a": 5, "b": 6}))
    said = yield STEP
    end = yield STEP
    drawn = ctx.random.random()
    return {
        "total": total, "size": size, "child": child, "first": first.output, "second": second.data,
        "calls": len(said.tool_results), "text": end.text, "is_drawn": 0 <= drawn < 1,
    }  # fmt: skip


CHILD = AgentDefinition("child", tools=[add], handle_steps=child_steps)
AGENT = AgentDefinition("parent", model="test/model", tools=[add], spawnable_agents=[CHILD], handle_steps=steps)


def model() -> ScriptedModel:
    return ScriptedModel([tool_call("add", {"a": 1, "b": 2}), text("done")])


def comparable(result):
    """What two runs of the same thing have in common: no ids, no durations, nothing of their process."""
    return {
        "status": result.status,
        "stop_reason": result.stop_reason,
        "output": result.output,
        "text": result.text,
        "usage": result.usage,
        "cost": result.cost,
        "usage_by_agent": result.usage_by_agent,
        "tool_calls": [attrs.evolve(logged, duration_ms=0) for logged in result.tool_calls],
        "messages": list(result.state.message_history),
        "context": result.state.context,
        "children": [attrs.evolve(child, run_id="") for child in result.children],
        "error": result.error,
    }


def told(journal):
    """What two journals of the same run have in common: addresses, fingerprints and outcomes, but no times and no ids."""
    history = journal.history()
    order = sorted(history.intents, key=lambda address: (address != ("", -1), address))
    return [
        (address, history.intents[address].type, history.intents[address].gather, _fp(history, address), _said(history, address))
        for address in order
    ]  # fmt: skip


def _fp(history, address):
    # The root's own record holds the id of the run.
    return None if address == ("", -1) else history.intents[address].fp


def _said(history, address):
    outcome = history.outcome(history.results[address])
    value = getattr(outcome, "value", outcome)
    return attrs.evolve(value, run_id="") if isinstance(value, ChildResult) else value


@pytest.mark.deep
@pytest.mark.spec("durable:UT1", "durable:U4", "durable:U5", "durable:U12", "durable:U20", "durable:U42")
async def test_durable_journal_equals_the_in_process_journal(db: str, tmp_path: Path):
    embedded = MemoryJournal()
    expected = await Engine([AGENT], models=model()).run(AGENT, "go", journal=embedded)
    for intent in embedded.records():
        if intent.kind == "intent":
            intent.fp = intent.fp or Fingerprints(embedded.redactor).for_effect(intent.effect)

    async with worker_of([AGENT], db, models=model()) as engine:
        result = await engine.run(AGENT, "go")
        exported = await engine.export(result.journal, tmp_path / "run.jsonl")
    again = MemoryJournal(exported.lines())
    # Without network, models or keys, by whoever has the agent and the file.
    replayed = await Engine([AGENT], models=ScriptedModel([])).replay(tmp_path / "run.jsonl")

    assert told(embedded) == told(again)
    assert expected.error is None
    assert comparable(expected) == comparable(result) == comparable(replayed)
    assert not diff(embedded, exported)


def failing_steps(ctx: StepContext):
    yield from Perform(measured, "src")
    raise ValueError("boom")


def careless_steps(ctx: StepContext):
    yield AgentCall("broken")


@tool(uses=["broken"])
def careless(name: str):
    """
    Lose a failure.

    Args:
        name: Its name.
    """
    yield AgentCall("broken")
    return name


@pytest.mark.deep
@pytest.mark.spec("durable:UT1", "generator-contract:L42")
async def test_warnings_of_children_and_tools_reach_the_result(db: str):
    def warning_steps(ctx: StepContext):
        yield from AgentCall("careless")
        yield from call(careless, name="alone")
        yield from Parallel(ToolCall("careless", {"name": "one"}), ToolCall("careless", {"name": "two"}))

    broken = AgentDefinition("broken", handle_steps=failing_steps)
    kid = AgentDefinition("careless", spawnable_agents=[broken], handle_steps=careless_steps)
    boss = AgentDefinition("boss", tools=[careless], spawnable_agents=[kid, broken], handle_steps=warning_steps)
    async with Engine([boss]) as engine:
        expected = await engine.run(boss, "go")

    async with worker_of([boss], db) as worker:
        result = await worker.run(boss, "go")

    assert ["run 0 (careless)", "run 1 (boss)", "run 2 (boss)", "run 3 (boss)"] == sorted(
        [warning.partition(": ")[0] for warning in expected.warnings]
    )
    assert sorted(expected.warnings) == sorted(result.warnings)


def replying_steps(ctx: StepContext):
    reply = yield STEP
    return reply.text


def leading_steps(ctx: StepContext):
    child = yield from AgentCall("under", "Go.")
    reply = yield STEP
    return [child, reply.text]


@pytest.mark.deep
@pytest.mark.spec("durable:UT1")
async def test_agent_models_apply_to_children_and_exported_journals(db: str):
    under = AgentDefinition("under", model="test/own", handle_steps=replying_steps)
    leader = AgentDefinition("leader", model="test/own", spawnable_agents=[under], handle_steps=leading_steps)
    names = ScriptedModel(lambda request: request.model)

    async with worker_of([leader], db, models=names) as engine:
        chosen = await engine.run(leader, agent_models={"leader": "test/l", "under": "test/u"})
        ordinary = await engine.run(leader)
        journal = await engine.export(str(chosen.journal))
    again = await Engine([leader], models=ScriptedModel([])).replay(journal)

    assert chosen.error is None, chosen.error
    assert (["test/u", "test/l"], ["test/own"] * 2) == (chosen.output, ordinary.output)
    assert chosen.output == again.output


@pytest.mark.deep
@pytest.mark.spec("durable:UT1", "requirements:A20")
async def test_durable_run_fills_placeholders_like_in_process(db: str, tmp_path: Path):
    prompts = {"system_prompt": "In {CODEBUFF_PROJECT_ROOT}.", "step_prompt": "{CODEBUFF_REMAINING_STEPS} {CODEBUFF_X}"}
    agent = AgentDefinition("filled", model="test/model", **prompts)
    inside, durable = ScriptedModel(["done"]), ScriptedModel(["done"])
    async with Engine([agent], models=inside, workspace=tmp_path) as engine:
        expected = await engine.run(agent, "go")
    async with worker_of([agent], db, models=durable, workspace=tmp_path) as worker:
        actual = await worker.run(agent, "go")
    (first,), (second,) = inside.calls, durable.calls

    assert first.system_prompt == second.system_prompt == f"In {tmp_path}."
    assert first.tail == second.tail
    assert expected.warnings == actual.warnings
    assert "{CODEBUFF_X}" in "".join(actual.warnings)


@pytest.mark.deep
@pytest.mark.spec("durable:UT1")
async def test_step_limit_of_an_agent_raises_on_both_engines(db: str):
    limits = Limits(max_steps=1, on_max_steps="raise")
    busy = AgentDefinition("busy", model="test/model", tools=[add], limits=limits)
    replies = ScriptedModel(lambda request: tool_call("add", {"a": 1, "b": 2}))

    with pytest.raises(LimitExceeded) as expected:
        await Engine([busy], models=replies).run(busy, "go")
    async with worker_of([busy], db, models=replies) as engine:
        with pytest.raises(LimitExceeded) as raised:
            await engine.run(busy, "go")

    assert expected.value.message == raised.value.message
    assert raised.value.result is not None
    assert comparable(expected.value.result) == comparable(raised.value.result)
