"""
A handler that was edited while its runs are under way is a reported divergence, and never a silent wrong result.
"""

from __future__ import annotations

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Parallel, Perform, StepContext, call
from stepengine.durable import DurableEngine
from stepengine.errors import ReplayDivergence
from stepengine.testing import ScriptedModel, text

from .shared import DONE, note, worker_of


def asks(ctx: StepContext):
    return (yield from Ask("Go on?"))


def answers_at_once(ctx: StepContext):
    yield from call(note, f"child {ctx.prompt}")
    return ctx.prompt


def waits_for_child(ctx: StepContext):
    return (yield from AgentCall("asks", "a"))


def waits_for_another_child(ctx: StepContext):
    return (yield from AgentCall("asks", "b"))


def original(ctx: StepContext):
    yield from call(note, "one")
    yield from Perform.idempotent(len, "abc")
    yield from AgentCall("child", "a")
    yield from Parallel(AgentCall("child", "b"), AgentCall("child", "c"))
    yield STEP
    yield from Ask("Go on?")
    yield from call(note, "last")
    return "end"


def other_input(ctx: StepContext):
    yield from call(note, "two")
    yield from call(note, "after")


def other_spawn(ctx: StepContext):
    yield from call(note, "one")
    yield from Perform.idempotent(len, "abc")
    yield from AgentCall("child", "z")
    yield from call(note, "after")


def swapped_members(ctx: StepContext):
    yield from call(note, "one")
    yield from Perform.idempotent(len, "abc")
    yield from AgentCall("child", "a")
    yield from Parallel(AgentCall("child", "c"), AgentCall("child", "b"))
    yield from call(note, "after")


def other_prompt(ctx: StepContext):
    yield from call(note, "one")
    yield from Perform.idempotent(len, "abc")
    yield from AgentCall("child", "a")
    yield from Parallel(AgentCall("child", "b"), AgentCall("child", "c"))
    yield from call(note, "inserted")
    yield STEP
    yield from call(note, "after")


def other_question(ctx: StepContext):
    yield from call(note, "one")
    yield from Perform.idempotent(len, "abc")
    yield from AgentCall("child", "a")
    yield from Parallel(AgentCall("child", "b"), AgentCall("child", "c"))
    yield STEP
    yield from Ask("Really?")
    yield from call(note, "after")


def early_return(ctx: StepContext):
    yield from call(note, "one")
    return "early"


EDITS = [
    early_return,
    *[
        pytest.param(edit, marks=pytest.mark.deep)
        for edit in (other_spawn, other_input, swapped_members, other_prompt, other_question)
    ],
]


def engine(handler, db: str) -> DurableEngine:
    child = AgentDefinition("child", tools=[note], handle_steps=answers_at_once)
    agent = AgentDefinition(
        "parent",
        model="test/model",
        tools=[note],
        spawnable_agents=[child, AgentDefinition("asks", handle_steps=asks)],
        handle_steps=handler,
    )
    # The same release on purpose: somebody forgot that an edit makes a new one.
    return worker_of([agent], db, models=ScriptedModel([text("said")] * 9), release="r1")


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: getattr(edit, "__name__", None))
@pytest.mark.spec("durable:UT9", "durable:U4", "durable:U15", "durable:UC3", "replay:D1")
@pytest.mark.deep
async def test_edited_handler_diverges_and_resumes_with_the_original(db: str, edit):
    DONE.clear()
    async with engine(original, db) as worker:
        run = (await worker.run("parent", "")).journal
    before = list(DONE)
    async with engine(edit, db) as worker:
        with pytest.raises(ReplayDivergence) as raised:
            await worker.result(run, waits=True)
    performed = DONE[len(before) :]
    async with engine(original, db) as worker:
        await worker.operator.retry(run)
        waiting = await worker.result(run)
        result = await worker.resume(run, answers={waiting.pending_questions[0].id: "yes"})

    assert [] == performed
    assert edit is early_return or f"{__file__}:" in str(raised.value)
    assert f"run {run!r}" in str(raised.value)
    assert "end" == result.output
    assert [*before, "last"] == DONE


@pytest.mark.deep
@pytest.mark.spec("durable:U15", "durable:UT9")
async def test_different_child_does_not_get_another_childs_result(db: str):
    async with engine(waits_for_child, db) as worker:
        waiting = await worker.run("parent", "")
    async with engine(waits_for_another_child, db) as worker:
        with pytest.raises(ReplayDivergence, match="#0"):
            await worker.result(waiting.journal, waits=True)
    async with engine(waits_for_child, db) as worker:
        await worker.operator.retry(waiting.journal)
        result = await worker.resume(waiting.journal, answers={waiting.pending_questions[0].id: "yes"})

    assert "yes" == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U15", "durable:UT9")
async def test_run_with_a_diverged_child_can_be_retried(db: str):
    """
    The child is the one that was edited; its parent waits for a result that nobody can give now.
    """
    DONE.clear()

    def edited_child(name):
        def steps(ctx: StepContext):
            yield from call(note, name)
            return (yield from Ask("Go on?"))

        return steps

    def workers(name):
        child = AgentDefinition("child", tools=[note], handle_steps=edited_child(name))
        parent = AgentDefinition("parent", spawnable_agents=[child], handle_steps=waits_for_the_child)
        return worker_of([parent], db, release="r1")

    async with workers("as it was") as worker:
        run = (await worker.run("parent", "")).journal
    async with workers("edited") as worker:
        with pytest.raises(ReplayDivergence, match="cannot go on"):
            await worker.result(run, waits=True)
    async with workers("as it was") as worker:
        await worker.operator.retry(run)
        waiting = await worker.result(run)
        result = await worker.resume(run, answers={waiting.pending_questions[0].id: "yes"})

    assert ["as it was"] == DONE
    assert "yes" == result.output


def waits_for_the_child(ctx: StepContext):
    return (yield from AgentCall("child", ""))
