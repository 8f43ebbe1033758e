"""
Tools that yield in durable runs: a body alone is part of its caller's run, several at once are runs of their own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Limits,
    Parallel,
    Perform,
    RunStatus,
    StepContext,
    Steps,
    ToolCall,
    call,
    tool,
)
from stepengine.durable import DurableEngine
from stepengine.errors import ReplayDivergence, ToolError
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call, tool_calls

from .shared import DONE, note, worker_of

WRITER = AgentDefinition("writer", model="test/model", system_prompt="You write notes.")


@tool(uses=[note])
def noted_twice(ctx: StepContext, name: str) -> Steps[str]:
    """
    Note something twice.

    Args:
        name: What.
    """
    first = yield from call(note, name=f"{name} 1")
    chance = round(ctx.random.random(), 6)
    second = yield from call(note, name=f"{name} 2")
    return f"{first}, {second}, {chance}"


@tool(uses=[note, noted_twice, WRITER])
def release(version: str, asks: bool = True) -> Steps[str]:
    """
    Release a version.

    Args:
        version: Which.
        asks: Whether somebody is asked.
    """
    tested = yield from call(noted_twice, name=f"test {version}")
    if asks:
        sure = yield from Ask(f"Release {version}?", key="sure", options=("yes", "no"))
    else:
        sure = "unasked"
    notes = yield from AgentCall("writer", f"Notes for {version}")
    many = yield from Parallel(ToolCall("note", {"name": f"{version} a"}), ToolCall("note", {"name": f"{version} b"}))
    yield from call(note, name=f"published {version}")
    return f"{version} {sure}: {notes}; {[each.text for each in many]}; {tested}"


def calls_one(ctx: StepContext) -> Steps[Any]:
    told = yield from call(release, version="1.0")
    yield from call(note, name="after")
    return [told, round(ctx.random.random(), 6)]


def calls_three(ctx: StepContext) -> Steps[Any]:
    told = yield from Parallel(
        ToolCall("release", {"version": "1", "asks": False}),
        ToolCall("release", {"version": "2"}),
        ToolCall("noted_twice", {"name": "3"}),
    )
    yield from call(note, name="after")
    return [each.text for each in told]


ONE = AgentDefinition("one", tools=[release, note], handle_steps=calls_one)
THREE = AgentDefinition("three", tools=[release, noted_twice, note], handle_steps=calls_three)
BOSS = AgentDefinition("boss", model="test/model", tools=[release])


def notes(count: int) -> ScriptedModel:
    return ScriptedModel([text("notes")] * count)


def in_process(agent: AgentDefinition, count: int = 9) -> Engine:
    return Engine([agent], models=notes(count))


async def plain(agent: AgentDefinition, answers: dict[str, str], journal: Any = None) -> Any:
    DONE.clear()
    result = await in_process(agent).run(agent, "", answers=answers, journal=journal)
    done = list(DONE)
    DONE.clear()
    return result, done


def seed_of(journal: MemoryJournal) -> str:
    """What the randomness of a recorded run depends on."""
    head = journal.history().head
    assert head is not None
    return head.seed


def effects(journal: Any) -> dict[Any, Any]:
    """What a journal holds of every effect, without times and what follows from the run's id."""
    history = journal.history()
    found = {}
    for address, intent in history.intents.items():
        if address == ("", -1):
            continue
        form = {} if intent.type == "CallModel" else dict(intent.effect)
        result = history.results.get(address)
        value = None if result is None else getattr(history.outcome(result), "value", None)
        found[address] = (intent.type, form, getattr(value, "text", value))
    return found


@pytest.mark.spec("programs:PG7")
async def test_a_body_alone_is_part_of_its_callers_run_and_goes_on_where_it_was(db: str):
    answers = {"Release 1.0?": "yes"}
    journal = MemoryJournal()
    expected, done = await plain(ONE, answers, journal)
    async with worker_of([ONE], db, models=notes(9)) as worker:
        run = await worker.submit(ONE, "", seed=seed_of(journal))
        waiting = await worker.result(run)
        before = list(DONE)
        runs = [view.id for view in await worker.operator.tree(run)]
    async with worker_of([ONE], db, models=notes(9)) as worker:
        result = await worker.resume(run, answers=answers)
        after = [view.id for view in await worker.operator.tree(run)]
        exported = await worker.export(run)
    replayed = await in_process(ONE, 0).replay(exported)

    assert ["test 1.0 1", "test 1.0 2"] == before
    assert sorted(done) == sorted(DONE)
    assert RunStatus.COMPLETED is result.status
    assert expected.output == result.output == replayed.output
    assert expected.text == result.text
    assert [run] == runs
    # The writer stands below the body, which is none of the runs.
    assert [run, f"{run}/0.2"] == sorted(after)
    assert expected.pending_questions == result.pending_questions
    assert [question.text for question in waiting.pending_questions] == ["Release 1.0?"]
    assert effects(journal) == effects(exported)
    assert expected.usage == result.usage == replayed.usage
    assert 1 == len(result.children) == len(replayed.children)


@pytest.mark.spec("programs:PG7")
async def test_bodies_at_once_are_runs_of_their_own_of_which_one_asks_while_the_others_end(db: str, until):
    answers = {"Release 2?": "no"}
    journal = MemoryJournal()
    expected, done = await plain(THREE, answers, journal)
    async with worker_of([THREE], db, models=notes(9)) as worker:
        run = await worker.submit(THREE, "", seed=seed_of(journal))
        waiting = await worker.result(run)
        before = list(DONE)
        states = {view.id: view.state for view in await worker.operator.tree(run)}
    async with worker_of([THREE], db, models=notes(9)) as worker:
        result = await worker.resume(run, answers=answers)
        exported = await worker.export(run)
    replayed = await in_process(THREE, 0).replay(exported)

    assert ["Release 2?"] == [question.text for question in waiting.pending_questions]
    assert {"published 1", "3 2"} <= set(before)
    assert {"published 2", "after"}.isdisjoint(before)
    assert {run, f"{run}/0", f"{run}/0.1", f"{run}/1", f"{run}/2"} == set(states)
    assert ("SUCCESS", "PENDING", "SUCCESS") == tuple(states[f"{run}/{n}"] for n in range(3))
    assert sorted(done) == sorted(DONE)
    assert expected.output == result.output == replayed.output
    assert effects(journal) == effects(exported)
    assert expected.usage == result.usage == replayed.usage
    assert 2 == len(result.children) == len(replayed.children)
