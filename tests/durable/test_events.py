"""
Events of durable runs, seen from any process while they go on, and after they have ended.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, StepContext, ToolCall, call, tool
from stepengine.durable import DurableEngine, records
from stepengine.errors import DatabaseUnavailable, JournalError
from stepengine.events import QuestionAsked, RunFinished, ToolFinished
from stepengine.testing import ScriptedModel, text, tool_call

from .shared import add, worker_of

pytestmark = pytest.mark.deep  # each starts workers on a database of its own


def child_steps(ctx: StepContext):
    return (yield from call(add, 1, 2))


def steps(ctx: StepContext):
    yield from call(add, 40, 2)
    yield from AgentCall("child", "hello")
    yield STEP
    yield STEP
    size = yield from Ask("How large?")
    return size


CHILD = AgentDefinition("child", tools=[add], handle_steps=child_steps)
AGENT = AgentDefinition("parent", model="test/model", tools=[add], spawnable_agents=[CHILD], handle_steps=steps)


def model() -> ScriptedModel:
    return ScriptedModel([tool_call("add", {"a": 1, "b": 2}), text("done")])


def seen(events):
    """What is told, where: no parts of replies and no times."""
    told = [(type(event).__name__, event.path, event.seq) for event in events]
    return [each for each in told if not each[0].endswith("Delta")]


@pytest.mark.spec("durable:U44")
async def test_events_of_a_run_can_be_followed_from_another_process(db: str):
    expected = [
        event async for event in Engine([AGENT], models=model()).stream(AGENT, "go", answers={"How large?": "l"})
    ]
    options = {"db": db, "release": "r1"}
    async with worker_of([AGENT], models=model(), **options) as worker:
        watcher = await DurableEngine([AGENT], models=ScriptedModel([]), works=False, **options).open()
        events, answered = [], False
        async for event in watcher.stream(AGENT, "go"):
            events.append(event)
            if type(event).__name__ == "QuestionAsked" and not answered:
                answered = True
                await worker.answer(await the_only(worker), {event.question.id: "l"})
        later = [event async for event in watcher.events(await the_only(worker))]
        await watcher.aclose()

    assert isinstance(events[-1], RunFinished)
    assert "l" == events[-1].result.output
    assert seen(expected) == seen(events) == seen(later)


async def the_only(worker) -> str:
    return (
        await worker.operator.deployment.fetch_rows(
            "select workflow_uuid from dbos.workflow_status where workflow_uuid not like '%%/%%'"
        )
    )[0][0]


@pytest.mark.spec("durable:U44", "durable:U26")
async def test_closing_a_stream_cancels_its_run(db: str, until):
    async with worker_of([AGENT], db, models=model()) as worker:
        events = worker.stream(AGENT, "go")
        async for event in events:
            if isinstance(event, ToolFinished):
                break
        await events.aclose()
        run = await the_only(worker)

        async def state():
            return (await worker.operator.run(run)).state

        assert "CANCELLED" == await until(state, lambda each: each != "PENDING")
        with pytest.raises(JournalError):
            [event async for event in worker.events("no-such-run")]


@pytest.mark.smoke
@pytest.mark.spec("durable:U44", "durable:U26")
async def test_cancelling_the_reader_of_a_stream_cancels_its_run(db: str, until):
    async with worker_of([AGENT], db, models=model()) as worker:
        asked = asyncio.Event()

        async def read():
            async for event in worker.stream(AGENT, "go"):
                if isinstance(event, QuestionAsked):
                    asked.set()

        reading = asyncio.create_task(read())
        await asyncio.wait_for(asked.wait(), 50)
        # It waits for the event after the question.
        reading.cancel()
        await asyncio.wait((reading,))
        state = (await worker.operator.run(await the_only(worker))).state

    assert reading.cancelled()
    assert "CANCELLED" == state


@pytest.mark.spec("durable:U44")
async def test_record_is_complete_after_a_failed_read_of_its_steps(db: str, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: object) -> None:
        raise DatabaseUnavailable("the database went away")

    async with worker_of([AGENT], db, models=model()) as worker:
        run = (await worker.run(AGENT, "go")).journal
        deployment = worker.operator.deployment
        tree_record = await records.read_tree_record(deployment, run)
        await worker.resume(run, answers={"How large?": "l"})
        with monkeypatch.context() as patch:
            patch.setattr(deployment, "load_steps", fail)
            with pytest.raises(DatabaseUnavailable):
                await tree_record.refresh(deployment)
        await tree_record.refresh(deployment)
        expected = await records.read_tree_record(deployment, run)

    assert expected.entries == tree_record.entries


@pytest.mark.smoke
@pytest.mark.spec("durable:U44")
async def test_one_look_at_the_record_shows_all_that_ended(db: str, monkeypatch: pytest.MonkeyPatch):
    started, gate = asyncio.Semaphore(0), asyncio.Event()
    looks, looking, finished = asyncio.Semaphore(1), asyncio.Semaphore(0), []
    refresh = records.RunTreeRecord.refresh

    @tool(idempotent=True)
    async def hold(name: str) -> str:
        """
        Wait.

        Args:
            name: For what.
        """
        started.release()
        await gate.wait()
        return name

    def holding(ctx: StepContext):
        yield Parallel(*[ToolCall("hold", {"name": name}) for name in "abcdef"])

    async def permitted(self, deployment):
        looking.release()
        await looks.acquire()
        await refresh(self, deployment)

    agent = AgentDefinition("holding", tools=[hold], handle_steps=holding)
    monkeypatch.setattr(records.RunTreeRecord, "refresh", permitted)

    async def read(run: str) -> None:
        async for event in worker.events(run):
            if isinstance(event, ToolFinished):
                finished.append(event)
                if len(finished) == 6:
                    for _ in range(9):
                        looks.release()

    async with worker_of([agent], db) as worker:
        run = await worker.submit(agent)
        for _ in range(6):
            await asyncio.wait_for(started.acquire(), 50)
        reading = asyncio.create_task(read(run))
        for _ in range(2):
            await asyncio.wait_for(looking.acquire(), 50)
        gate.set()
        await worker.result(run)
        looks.release()
        await asyncio.wait_for(reading, 50)

    assert 6 == len(finished)
