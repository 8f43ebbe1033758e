"""
Runs keep the release that they began with; what waits in a queue is taken by priority.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import AgentDefinition, Ask, StepContext, Steps, tool
from stepengine.durable import DurableEngine, Operator, migrate
from stepengine.errors import DefinitionError, InputError, StepEngineError

from .shared import worker_of

order: list[str] = []


def old(ctx: StepContext):
    said = yield from Ask("Go on?")
    return f"old {said}"


def new(ctx: StepContext):
    said = yield from Ask("Shall I go on?")
    return f"new {said}"


def noted(ctx: StepContext):
    order.append(ctx.prompt)
    return ctx.prompt
    yield


def engine(db: str, handler, **options) -> DurableEngine:
    agent = AgentDefinition("agent", handle_steps=handler)
    return worker_of([agent], db, **options)


@pytest.mark.deep
@pytest.mark.spec("durable:U36", "durable:U33")
async def test_run_finishes_on_the_release_it_started_with(db: str):
    async with engine(db, old) as worker:
        first = (await worker.run("agent")).journal
        old_release = worker.release
    async with engine(db, new) as worker:
        await worker.answer(first, {(await worker.operator.list_questions(first))[0].questions[0].id: "yes"})
        second = await worker.run("agent", answers={"Shall I go on?": "yes"})
        left_alone = await worker.operator.run(first)
        new_release = worker.release
    async with engine(db, old) as worker:
        result = await worker.result(first, waits=True)

    assert old_release != new_release
    assert "new yes" == second.output
    assert ("PENDING", old_release) == (left_alone.state, left_alone.release)
    assert "old yes" == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U28", "durable:UC2")
async def test_smaller_priorities_are_taken_first(db: str):
    order.clear()
    release = "r1"
    async with engine(db, noted, works=False, release=release) as client:
        runs = [await client.submit("agent", str(priority), priority=priority) for priority in (5, 1, 3)]
    async with engine(db, noted, concurrency=1, release=release) as worker:
        await asyncio.gather(*[worker.result(run) for run in runs])

    assert ["1", "3", "5"] == order


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U28")
@pytest.mark.parametrize("priority", [-1, 2**31])
async def test_priority_that_cannot_be_stored_is_refused(db: str, priority: int):
    async with await Operator.connect(db) as operator:
        with pytest.raises(InputError, match="a priority must be 0 to 2,147,483,647"):
            await operator.submit("agent", priority=priority)


@pytest.mark.spec("durable:U28")
async def test_names_that_cannot_be_listed_are_refused():
    db = "postgresql://host/x"
    for name, value in (("pool", ""), ("pool", "a\nb"), ("executor", "a\tb"), ("release", "r" * 201)):
        with pytest.raises(DefinitionError, match="must have 1 to 200 printable characters"):
            engine(db, noted, **{name: value})
    with pytest.raises(DefinitionError, match="the name of a pool must have 1 to 200 printable characters, not ''"):
        await Operator.connect(db, pool="")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:UC8")
async def test_rights_for_a_missing_role_are_refused(db: str):
    with pytest.raises(StepEngineError, match='role "nobody" does not exist; create it first'):
        await migrate(db, role="nobody")


@pytest.mark.spec("durable:U33")
def test_release_depends_on_the_agent_definition():
    url = "postgresql://host/x"
    same = [engine(url, old).release for _ in range(2)]
    others = {engine(url, new).release, engine(url, noted).release}

    assert same[0] == same[1]
    assert 2 == len(others - {same[0]})


@pytest.mark.spec("durable:U33", "programs:PG7")
async def test_release_depends_on_bodies_of_tools():
    url = "postgresql://nobody@localhost/nowhere"

    def release(body, inner=None) -> str:
        made = tool(name="asks", uses=[tool(name="inner")(inner or before)])(body)
        return worker_of([AgentDefinition("agent", tools=[made])], url).release

    assert release(before) == release(before)
    assert 3 == len({release(before), release(after), release(before, after)})


def before() -> Steps[str]:
    """
    Ask.
    """
    return str((yield from Ask("Go on?")))


def after() -> Steps[str]:
    """
    Ask.
    """
    return str((yield from Ask("Shall I go on?")))
