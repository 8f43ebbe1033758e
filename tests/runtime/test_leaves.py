"""
Author I/O, questions, children: the innermost performers.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from functools import partial

import attrs
import pytest

from stepengine.data.effects import AskPerson, CallFunction, CallModel, Spawn
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, RunStatus
from stepengine.data.usage import Spending, Usage
from stepengine.data.yields import Perform as Do
from stepengine.errors import AgentError, PerformError
from stepengine.runtime import RunHandle

REQUEST = ModelRequest("test/m")


async def outcome_of(world, effect, **options):
    seen = []

    def machine(plan, state):
        seen.append((yield effect))
        return world.done(state)

    await world.tree(machine, **options).run()
    return seen[0]


# --- perform --------------------------------------------------------------------------------------------------------


async def asynchronous(value):
    return value


@pytest.mark.spec("reliability:GN17")
@pytest.mark.parametrize("fn", [lambda v: v, asynchronous, partial(asynchronous)])
async def test_perform_returns_the_json_of_the_function_result(world, fn):
    outcome = await outcome_of(world, CallFunction(0, Do(fn, {"a": (1, 2)})))

    assert {"a": [1, 2]} == outcome.value
    with pytest.raises(TypeError, match="cannot be changed"):
        outcome.value["a"].append(3)


@pytest.mark.spec("reliability:GN17")
@pytest.mark.parametrize("value", [{1: "a"}, float("nan")])
async def test_non_json_result_fails_at_the_yield(world, value):
    outcome = await outcome_of(world, CallFunction(0, Do(asynchronous, value)))

    assert isinstance(outcome, Failure)
    assert isinstance(outcome.error, PerformError)
    assert "not JSON" in outcome.error.message


@pytest.mark.parametrize(
    ("error", "is_async"),
    [
        (ValueError("bad"), False),
        (StopIteration(3), False),
        (StopIteration(3), True),
        (asyncio.CancelledError(), True),
    ],
)
async def test_function_exception_is_the_cause_of_perform_error(world, error, is_async):
    def sync():
        raise error

    async def asynchronously():
        raise error

    outcome = await outcome_of(world, CallFunction(0, Do(asynchronously if is_async else sync)))

    assert isinstance(outcome.error, PerformError)
    if not isinstance(error, StopIteration):
        assert outcome.error.__cause__ is error
        assert type(error).__name__ == outcome.error.kind


async def test_sync_functions_run_in_a_thread_with_the_callers_context(world):
    name = ContextVar("name")
    name.set("ada")
    here = threading.get_ident()

    def look():
        return [name.get(), threading.get_ident() != here]

    assert ["ada", True] == (await outcome_of(world, CallFunction(0, Do(look)))).value


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R10")
async def test_unstoppable_sync_function_is_abandoned_and_reported(world):
    gate, started = threading.Event(), threading.Event()

    def hang():
        started.set()
        gate.wait()

    def machine(plan, state):
        yield CallFunction(0, Do(hang))
        return world.done(state, status="cancelled")

    tree = world.tree(machine)
    task = asyncio.create_task(tree.run())
    await asyncio.to_thread(started.wait)
    task.cancel()
    await task
    gate.set()

    assert 1 == len(tree.leftovers.leaked)


# --- ask ------------------------------------------------------------------------------------------------------------

QUESTION = Question("q0", "Which one?", ("red", "blue"))


@pytest.mark.parametrize(
    ("key", "given", "expected"),
    [
        ("q0", "red", Answer(("red",))),
        ("Which one?", "green", Answer(text="green")),
        ("q0", True, Answer(text="yes")),
        ("Which one?", Answer(declined=True), Answer(declined=True)),
    ],
)
async def test_answers_given_in_advance_match_by_id_or_text(world, key, given, expected):
    question = attrs.evolve(QUESTION, allow_text=True)

    outcome = await outcome_of(world, AskPerson(0, (question,)), answers={key: given})

    assert (expected,) == outcome.value


@pytest.mark.parametrize("behaviour", ["raises", "has nothing to say"])
async def test_interactor_without_answer_leaves_the_question_open(world, behaviour):
    class Interactor:
        async def ask(self, question):
            if behaviour == "raises":
                raise OSError("no terminal")

    outcome = await outcome_of(world, AskPerson(0, (QUESTION,)), interactor=Interactor())

    assert "suspended" == outcome.kind


async def test_all_questions_of_one_ask_are_open_together(world):
    first, second = QUESTION, Question("q1", "How many?")

    def machine(plan, state):
        outcome = yield AskPerson(0, (first, second))
        return world.done(state, [a.value for a in outcome.value])

    tree = world.tree(machine)
    handle = RunHandle(tree, tree.run)
    async for event in handle.events(answers=True):
        if event.type == "question_asked" and event.question is second:
            handle.answer("q1", "two")
            handle.answer("q0", "red")
            break
    finished = await handle.result()

    assert ["red", "two"] == finished.output


# --- spawn ----------------------------------------------------------------------------------------------------------


def nursery(world, child, parent, **options):
    """
    A tree whose children run *child* and whose root runs *parent*.
    """

    def machine(plan, state):
        return (child if plan.path else parent)(plan, state)

    def plan_child(parent_plan, effect, path):
        if effect.agent_id == "nobody":
            raise AgentError("there is no agent 'nobody'")
        return world.plan(path=path), AgentState(run_id=f"r1-{path}", agent_id=effect.agent_id)

    return world.tree(machine, planner=plan_child, **options)


@pytest.mark.spec("generator-contract:L8", "requirements:J12")
async def test_child_uses_the_same_performers_and_emits_its_path(world):
    events, items = [], []

    class Spy:
        def __init__(self, inner):
            self.inner, self.begin = inner, inner.begin

        def perform(self, item, io):
            items.append((item.path, type(item.effect).__name__))
            return self.inner.perform(item, io)

    def child(plan, state):
        reply = yield CallModel(0, REQUEST)
        return world.done(state, reply.value.text, spending=Spending(Usage(output_tokens=3)))

    def parent(plan, state):
        outcome = yield Spawn(4, "kid", "go")
        return world.done(state, outcome.value)

    tree = nursery(world, child, parent, middlewares=[Spy], observers=[events.append])
    result = (await tree.run()).output

    assert [("", "Spawn"), ("4", "CallModel")] == items
    assert ("kid", "r1-4", RunStatus.COMPLETED, "ok") == (result.agent_id, result.run_id, result.status, result.output)
    assert [
        ("agent_spawned", ""),
        ("model_started", "4"),
        ("text_delta", "4"),
        ("model_finished", "4"),
        ("agent_finished", ""),
    ] == [(e.type, e.path) for e in events]
    assert 3 == events[-1].usage.output_tokens


async def test_children_nest_300_levels_deep(world):
    from stepengine.data.limits import Limits

    def machine(plan, state):
        if plan.path.count(".") < 299:
            yield Spawn(0, "kid")
        return world.done(state)
        yield

    def plan_child(parent, effect, path):
        return world.plan(path=path, limits=parent.limits), AgentState(run_id="r", agent_id="kid")

    plan = world.plan(limits=Limits(max_depth=1000, max_total_children=1000))
    finished = await world.tree(machine, plan=plan, planner=plan_child).run()

    assert RunStatus.COMPLETED is finished.status
