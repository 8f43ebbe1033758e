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


def play(*acts, end="end"):
    """
    Return a handler that does one thing after the other.
    """

    def steps(ctx: StepContext):
        for act in acts:
            made = act()
            if made is STEP:
                yield made
            else:
                yield from made
        return end

    return steps


def noting(name: str):
    return lambda: call(note, name)


def asking(text: str):
    return lambda: Ask(text)


def child(prompt: str):
    return lambda: AgentCall("child", prompt)


def children(*prompts: str):
    return lambda: Parallel(*[AgentCall("child", prompt) for prompt in prompts])


def step():
    return STEP


FIRST = (noting("one"), lambda: Perform.idempotent(len, "abc"))
original = play(*FIRST, child("a"), children("b", "c"), step, asking("Go on?"), noting("last"))
EDITS = {
    "early return": play(noting("one"), end="early"),
    "other spawn": play(*FIRST, child("z"), noting("after")),
    "swapped members": play(*FIRST, child("a"), children("c", "b"), noting("after")),
    "other question": play(*FIRST, child("a"), children("b", "c"), step, asking("Really?"), noting("after")),
}


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


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.spec("durable:UT9", "durable:U4", "durable:U15", "durable:UC3", "replay:D1")
@pytest.mark.deep
async def test_edited_handler_diverges_and_resumes_with_the_original(db: str, edit: str):
    DONE.clear()
    async with engine(original, db) as worker:
        run = (await worker.run("parent", "")).journal
    before = list(DONE)
    async with engine(EDITS[edit], db) as worker:
        with pytest.raises(ReplayDivergence) as raised:
            await worker.result(run, waits=True)
    performed = DONE[len(before) :]
    async with engine(original, db) as worker:
        await worker.operator.retry(run)
        waiting = await worker.result(run)
        result = await worker.resume(run, answers={waiting.pending_questions[0].id: "yes"})

    assert [] == performed
    assert edit == "early return" or f"{__file__}:" in str(raised.value)
    assert f"run {run!r}" in str(raised.value)
    assert "end" == result.output
    assert [*before, "last"] == DONE


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
        with pytest.raises(ReplayDivergence, match="cannot continue"):
            await worker.result(run, waits=True)
    async with workers("as it was") as worker:
        await worker.operator.retry(run)
        waiting = await worker.result(run)
        result = await worker.resume(run, answers={waiting.pending_questions[0].id: "yes"})

    assert ["as it was"] == DONE
    assert "yes" == result.output


def waits_for_the_child(ctx: StepContext):
    return (yield from AgentCall("child", ""))
