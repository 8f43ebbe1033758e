"""
Questions of durable runs: they wait in the database, and are answered from any process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
import tracemalloc

import pytest

from stepengine import AgentDefinition, Ask, Parallel, StepContext, ToolCall
from stepengine.durable import Operator
from stepengine.durable.process import MAX_EXECUTOR_THREADS
from stepengine.errors import AnswerRejected, JournalError

from .shared import wipe, worker_of


def asks(ctx: StepContext):
    size = yield from Ask("How large?", options=("small", "large"))
    return {"size": size}


def asks_twice(ctx: StepContext):
    first, second, done = yield from Parallel(Ask("First?"), Ask("Second?"), ToolCall("wipe", {"disk": "a"}))
    return [first, second, done.text]


ASKS = AgentDefinition("asks", handle_steps=asks)
TWICE = AgentDefinition("twice", tools=[wipe], handle_steps=asks_twice)


@pytest.mark.deep
@pytest.mark.spec("durable:U37")
async def test_first_of_concurrent_answers_wins(db: str):
    """
    They ask again and again from the run's first moment on, also while it is being put away for want of an answer.
    """

    async def answering(operator: Operator, run: str, said: str) -> str | None:
        while not await operator.list_questions(run):
            if (await operator.run(run)).is_over:
                return None  # the others were so fast that this one never saw the question
            await asyncio.sleep(0.001)
        try:
            await operator.answer_first(run, {"How large?": said})
        except AnswerRejected:
            return None
        return said

    async with worker_of([ASKS], db) as worker, contextlib.AsyncExitStack() as opened:
        operators = [await opened.enter_async_context(await Operator.connect(db)) for _ in range(6)]
        for number in range(6):
            run = await worker.submit(ASKS, str(number))
            told = await asyncio.gather(
                *[answering(one, run, ("small", "large")[n % 2]) for n, one in enumerate(operators)]
            )
            result = await worker.result(run, waits=True)
            assert [result.output["size"]] == [said for said in told if said is not None]


@pytest.mark.deep
@pytest.mark.spec("durable:U37")
async def test_invalid_answer_is_rejected_and_not_sent(db: str):
    async with worker_of([ASKS], db) as worker:
        waiting = await worker.run(ASKS, "")
        key = waiting.pending_questions[0].id
        for wrong in ({"nothing": "large"}, {key: "enormous"}):
            with pytest.raises(AnswerRejected):
                await worker.answer(waiting.journal, wrong)
        with pytest.raises(JournalError):
            await worker.answer("no-such-run", {key: "large"})
        await worker.answer(waiting.journal, {key: "small"})
        # The same again is dropped: it has the same key.
        result = await worker.result(waiting.journal, waits=True)
        with pytest.raises(AnswerRejected):
            await worker.answer(waiting.journal, {key: "large"})

    assert {"size": "small"} == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U20", "durable:U37")
async def test_parallel_questions_can_be_answered_in_any_order(db: str, until):
    async with worker_of([TWICE], db) as worker:
        handle = worker.start(TWICE, "")
        run = await handle.id()
        waiting = await until(handle.questions, lambda asked: len(asked) == 2)
        second, first = waiting[1].questions[0], waiting[0].questions[0]
        await handle.answer(second.id, "two")
        await until(handle.questions, lambda asked: len(asked) == 1)
        await worker.answer(run, {first.id: "one"})
        result = await handle.result()

    assert ["one", "two", "wiped a"] == result.output


@pytest.mark.deep
@pytest.mark.spec("durable:U37")
async def test_answer_sent_without_workers_is_received_by_the_next(db: str):
    async with worker_of([ASKS], db) as worker:
        run = (await worker.run(ASKS, "")).journal
    async with await Operator.connect(db) as operator:
        await operator.answer(run, {"How large?": "large"})
        (reply,) = await sent(operator, run)
        # Sent again under the same key, another one is dropped.
        other = {
            **reply,
            "answers": {key: {**answer, "selected": ["small"]} for key, answer in reply["answers"].items()},
        }
        await operator.client.send_async(run, other, "ask::0", idempotency_key=f"{run}:0")
        assert [reply] == await sent(operator, run)
        async with worker_of([ASKS], db) as worker:
            result = await worker.result(run, waits=True)

    assert {"size": "large"} == result.output


async def sent(operator: Operator, run: str) -> list[dict]:
    """
    What waits in the database for a run.
    """
    rows = await operator.deployment.fetch_rows(
        "select message from dbos.notifications where destination_uuid = %s", run
    )
    return [json.loads(message) for (message,) in rows]


@pytest.mark.deep
@pytest.mark.spec("durable:UF11")
async def test_secrets_known_at_start_are_redacted_from_questions(db: str, monkeypatch):
    def asks_for(ctx: StepContext):
        return (yield from Ask(f"May I use {SECRET}?"))

    agent = AgentDefinition("asks-for", handle_steps=asks_for)
    asked = []
    async with worker_of([agent], db) as worker:
        for begin in (lambda: None, lambda: monkeypatch.setenv("SHOP_API_KEY", SECRET)):
            begin()
            asked += [question.text for question in (await worker.run(agent, "")).pending_questions]

    assert [f"May I use {SECRET}?", "May I use <redacted:SHOP_API_KEY>?"] == asked


SECRET = "open-sesame-4711"


async def five_hundred(db: str, until) -> float:
    """Let so many runs wait, answer all of them, and return how many bytes each one has allocated."""
    async with worker_of([ASKS], db) as worker:
        await worker.run(ASKS, "", answers={"How large?": "small"})
        # The worker's threads, which are made as they are needed and are nobody's, are all there before anything is measured.
        await asyncio.gather(*[asyncio.to_thread(time.sleep, 0.2) for _ in range(MAX_EXECUTOR_THREADS)])

        async def waiting():
            return len(
                await worker.operator.deployment.fetch_rows(
                    "select 1 from dbos.operation_outputs where function_name like 'ask:%%'"
                )
            )

        async def add_waiting_runs() -> None:
            runs.extend([await worker.submit(ASKS, "") for _ in range(250)])
            # And the one that was answered up front.
            await until(waiting, lambda count: count == len(runs) + 1, seconds=120)
            gc.collect()

        runs: list[str] = []
        await add_waiting_runs()
        # The pools that the first ones filled are not counted. Allocations are, and not the memory of the process: that grew by
        # 51 to 70 KB for each of the same runs, by how many arenas the C library keeps for the threads of a worker.
        tracemalloc.start()
        await add_waiting_runs()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for run in runs:
            await worker.answer(run, {"How large?": "small"})
        results = await asyncio.gather(*[worker.result(run, waits=True) for run in runs])

    assert [{"size": "small"}] * 500 == [result.output for result in results]
    return size / 250


@pytest.mark.memory
@pytest.mark.spec("durable:UF11", "durable:U21", "durable:U37")
async def test_hundreds_of_waiting_runs_cost_little_and_are_answered(db: str, until):
    assert await five_hundred(db, until) < 50_000
