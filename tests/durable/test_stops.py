"""
Durable runs that are cancelled, in every place where a run can be, and those whose worker leaves them.
"""

from __future__ import annotations

import asyncio

import pytest
from typer.testing import CliRunner

from stepengine import (
    AgentCall,
    AgentDefinition,
    Ask,
    Cancel,
    Engine,
    Limits,
    Parallel,
    Race,
    Receive,
    RunStatus,
    Start,
    StepContext,
    ToolAnnotations,
    call,
    tool,
)
from stepengine.cli.app import app
from stepengine.durable import DurableEngine, Operator
from stepengine.errors import JournalError
from stepengine.testing import ScriptedModel

from .shared import worker_of

told: list[str] = []


@tool(annotations=ToolAnnotations(idempotent=True))
async def work(seconds: float, name: str = "work") -> str:
    """
    Work for a while.

    Args:
        seconds: How long.
        name: What to tell.
    """
    told.append(f"{name} began")
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        told.append(f"{name} cut off")
        raise
    told.append(f"{name} ended")
    return name


def handler(act):
    def steps(ctx: StepContext):
        try:
            return (yield from act(ctx))
        finally:
            told.append(f"{ctx.agent_state.agent_id} closed")

    return steps


def works(ctx):
    yield from call(work, 0.01, "first")
    return (yield from call(work, 60.0, "second"))


def quick(ctx):
    yield from call(work, 0.01, "first")
    return (yield from Ask("Go on?"))


CHILD = AgentDefinition("child", tools=[work], handle_steps=handler(works))
WORKS = AgentDefinition("works", tools=[work], handle_steps=handler(works))
ASKS = AgentDefinition("asks", tools=[work], handle_steps=handler(quick))
SPAWNS = AgentDefinition(
    "spawns", spawnable_agents=[CHILD], handle_steps=handler(lambda ctx: AgentCall("child", "").__iter__())
)
AGENTS = [WORKS, ASKS, SPAWNS]


def engine(db: str) -> DurableEngine:
    told.clear()
    return worker_of(AGENTS, db)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("agent", "place", "closed"),
    [
        pytest.param("works", "second began", ["works closed"], marks=pytest.mark.deep),
        ("asks", "first ended", ["asks closed"]),
        ("spawns", "second began", ["child closed", "spawns closed"]),
    ],
    ids=["in a tool", "in a question", "in a child"],
)
@pytest.mark.spec("durable:U26", "reliability:I6")
async def test_cancelled_run_closes_its_handlers_and_can_be_retried(db: str, until, agent, place, closed):
    async with engine(db) as worker:
        run = await worker.submit(agent)
        await until(_has_told(place))
        if agent == "asks":
            await worker.result(run)
        await worker.cancel(run)
        result = await worker.result(run)
        await until(_has_told(*closed))
        tree = await worker.operator.tree(run)
        began = told.count("first began")
        await worker.operator.retry(run)
        await until(_is_under_way(worker, run))
        await worker.cancel(run)

    assert RunStatus.CANCELLED is result.status
    assert {"CANCELLED"} == {each.state for each in tree}
    assert began == told.count("first began")


def _has_told(*lines):
    async def ask():
        return all(line in told for line in lines)

    return ask


def _is_under_way(worker, run):
    async def ask():
        return (await worker.operator.run(run)).state == "PENDING"

    return ask


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U26")
async def test_finished_run_can_be_neither_cancelled_nor_retried(db: str):
    async with engine(db) as worker:
        result = await worker.run("asks", answers={"Go on?": "yes"})
        with pytest.raises(JournalError):
            await worker.operator.retry(result.journal)
        cancelled = await worker.operator.cancel(result.journal)

    assert [] == cancelled
    assert "yes" == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U40", "reliability:R1")
async def test_closing_worker_records_running_effects_for_the_next(db: str, until):
    slow = AgentDefinition("slow", tools=[work], handle_steps=_three_times)
    options = {"models": ScriptedModel([]), "db": db, "executor": "worker-1", "polling": 0.05}
    told.clear()
    worker = await DurableEngine([slow], **options).open()
    run = await worker.submit("slow")
    await until(_has_told("a began"))
    await worker.aclose(drain=10)
    left = list(told)
    async with DurableEngine([slow], **options) as next_one:
        result = await next_one.result(run)

    assert ["a began", "a ended"] == left
    assert ["a began", "a ended", "b began", "b ended"] == told
    assert ["a", "b"] == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U40")
async def test_closing_worker_takes_no_new_runs(db: str, until):
    slow = AgentDefinition("slow", tools=[work], handle_steps=_three_times)
    told.clear()
    worker = await DurableEngine([slow], models=ScriptedModel([]), db=db, executor="worker-1", polling=0.05).open()
    async with await Operator.connect(db) as operator:
        await worker.submit("slow")
        await until(_has_told("a began"))
        closing = asyncio.create_task(worker.aclose(drain=10))
        await asyncio.sleep(0.05)
        later = await operator.submit("slow", release=worker.release)
        assert not closing.done()
        await closing
        view = await operator.run(later)

    assert "ENQUEUED" == view.state


def _three_times(ctx):
    return [(yield from call(work, 0.4, "a")), (yield from call(work, 0.01, "b"))]


def fails(ctx: StepContext):
    yield from call(work, 0.2, "failing")
    raise ValueError("no")


def gathers(ctx: StepContext):
    return [
        each.status.value
        for each in (yield from Parallel(AgentCall("child", ""), AgentCall("fails", ""), fail_fast=True))
    ]


FAILS = AgentDefinition("fails", tools=[work], handle_steps=fails)
GATHERS = AgentDefinition("gathers", spawnable_agents=[CHILD, FAILS], handle_steps=gathers)


@pytest.mark.deep
@pytest.mark.spec("durable:U26", "reliability:SP05")
async def test_siblings_of_a_failed_child_are_cancelled(db: str, until):
    told.clear()
    expected = await Engine([GATHERS], models=ScriptedModel([])).run("gathers")
    told.clear()
    async with worker_of([GATHERS], db) as worker:
        result = await worker.run("gathers")
        await until(_has_told("child closed"))
        states = [each.state for each in await worker.operator.tree(result.journal)]

    assert expected.output == result.output
    assert str(expected.error) == str(result.error)
    assert ["CANCELLED", "SUCCESS", "SUCCESS"] == sorted(states)


@pytest.mark.deep
@pytest.mark.spec("durable:U26", "durable:U47")
async def test_children_of_a_timed_out_run_are_cancelled(db: str, until):
    async with engine(db) as worker:
        result = await worker.run("spawns", limits=Limits(max_seconds=1.5))
        await until(_has_told("child closed"))

    assert RunStatus.FAILED is result.status
    assert "seconds" == result.error.kind


@pytest.mark.deep
@pytest.mark.spec("durable:U26")
async def test_retry_command_resumes_a_cancelled_run(db: str):
    async with engine(db) as worker:
        waiting = await worker.run("asks")
        await worker.cancel(waiting.journal)
        before = await worker.result(waiting.journal)
        typed = ["deploy", "retry", waiting.journal, "--db", db]
        shown = await asyncio.to_thread(CliRunner().invoke, app, typed)
        result = await worker.resume(waiting.journal, answers={"Go on?": "yes"})

    assert (0, "") == (shown.exit_code, shown.output)
    assert (RunStatus.CANCELLED, "yes") == (before.status, result.output)


def settles(ctx: StepContext):
    yield from Race(Receive("won"), AgentCall("child", ""))
    child = yield from Start(AgentCall("child", ""))
    yield from Receive("enough")
    yield from Cancel(child)
    alone = yield from Parallel(AgentCall("child", ""))
    gathered = yield from gathers(ctx)
    return [alone[0].status.value, *gathered, (yield from Ask("Go on?"))]


SETTLES = AgentDefinition("settles", spawnable_agents=[CHILD, FAILS], handle_steps=settles)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("durable:U26", "durable:UC3", "durable:U36")
async def test_children_ended_by_their_parent_are_never_resumed(db: str, until):
    told.clear()
    async with worker_of([SETTLES], db, release="1") as worker:
        run = await worker.submit("settles")
        await until(_has_begun(1))
        await worker.send_message(run, "won", None)
        await until(_has_begun(2))
        await worker.send_message(run, "enough", None)
        await until(_has_begun(3))
        (alone,) = [view.id for view in (await worker.operator.tree(run))[1:] if not view.is_over]
        await worker.cancel(alone)
        waiting = await worker.result(run)
        with pytest.raises(JournalError, match="nothing to retry"):
            await worker.operator.retry(run)
        await worker.cancel(run)
        retried = await worker.operator.retry(run)
    async with worker_of([SETTLES], db, release="2") as worker:
        moved = await worker.move(run)
        result = await worker.resume(run, answers={"Go on?": "yes"})
        children = (await worker.operator.tree(run))[1:]

    assert RunStatus.SUSPENDED is waiting.status
    assert [run] == retried == moved
    assert ["cancelled", "cancelled", "failed", "yes"] == result.output
    assert ["CANCELLED"] * 4 + ["SUCCESS"] == sorted(child.state for child in children)


def _has_begun(count):
    async def ask():
        return told.count("second began") == count

    return ask


async def test_tree_of_a_child_holds_what_is_below_it(db: str):
    copied = """
        insert into dbos.workflow_status (workflow_uuid, status, name, created_at, updated_at, application_name)
        values (%s, 'PENDING', 'stepengine.run', 1, 1, 'stepengine') returning 1
    """
    ids = ["a", "a/0", "a/0.1", "a/0.1.2", "a/0.10", "a/00", "a/1", "ab", "ab/0", "a.0/0"]
    async with await Operator.connect(db) as operator:
        for run in ids:
            await operator.deployment.fetch_rows(copied, run)
        trees = {run: {view.id for view in await operator.tree(run)} for run in ids}
        cancelled = await operator.cancel("a/0")
        left = {view.id for view in await operator.deployment.find_runs(ids) if not view.is_over}

    for run in ids:
        below = run + ("." if "/" in run else "/")
        assert {run, *(each for each in ids if each.startswith(below))} == trees[run]
    assert trees["a/0"] == {*cancelled} == {*ids} - left
