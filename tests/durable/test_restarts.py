"""
Runs that another process, or another execution in the same one, goes on with.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import STEP, AgentDefinition, Ask, Parallel, Perform, StepContext, ToolCall, Usage, call, tool
from stepengine.durable import DurableEngine, Operator, Upkeep
from stepengine.errors import AnswerRejected, JournalError, ToolError
from stepengine.models import ModelReply, Provider

psycopg = pytest.importorskip("psycopg", reason="needs the extra 'durable'")


class Slow(Provider):
    """
    A provider whose first call never ends.
    """

    name = "test"

    def __init__(self) -> None:
        self.asked = 0
        self.first = asyncio.Event()

    async def complete(self, request):
        self.asked += 1
        if self.asked == 1:
            self.first.set()
            await asyncio.sleep(3600)
        return ModelReply("said", usage=Usage(input_tokens=4, output_tokens=6, requests=1))


def measured() -> int:
    return 1


def says(ctx: StepContext):
    if ctx.prompt == "later":
        yield from Perform.idempotent(measured)
    first = yield STEP
    second = yield STEP
    return [first.text, second.text]


SAYS = AgentDefinition("says", model="test/m", handle_steps=says)


def engine(agents, db: str, models=None, **options) -> DurableEngine:
    given = {"executor": "worker-1", "polling": 0.05, "pricing": None, "release": "1", **options}
    return DurableEngine(agents, models=models or Slow(), db=db, **given)


@pytest.mark.spec("durable:U43", "reliability:I4")
@pytest.mark.parametrize("prompt", ["later", "at once"])
async def test_what_a_call_used_that_a_crash_cut_off_is_unknown_and_not_zero(db: str, prompt: str):
    provider = Slow()
    async with engine([SAYS], db, provider) as worker:
        run = await worker.submit(SAYS, prompt)
        await asyncio.wait_for(provider.first.wait(), 30)
    async with engine([SAYS], db, provider) as worker:
        after = await worker.result(run)
        before = await worker.run(SAYS, prompt)

    assert ["said", "said"] == after.output == before.output
    assert (20, True) == (after.usage.total_tokens, after.usage.at_least)
    assert (20, False) == (before.usage.total_tokens, before.usage.at_least)


@pytest.mark.deep
@pytest.mark.spec("durable:U43", "reliability:I4")
@pytest.mark.parametrize("way", ["takeover", "retry"])
async def test_nor_is_it_where_an_operator_gave_the_run_to_another_worker(db: str, way: str, until):
    provider = Slow()
    async with engine([SAYS], db, provider) as worker:
        run = await worker.submit(SAYS, "at once")
        await asyncio.wait_for(provider.first.wait(), 30)
    async with await Operator.connect(db) as operator:
        if way == "retry":
            await operator.cancel(run)
            await operator.retry(run)
        else:
            await Upkeep(operator).takeover("worker-1")
    async with engine([SAYS], db, provider, executor="worker-2") as worker:
        after = await worker.result(run)

    assert (20, True) == (after.usage.total_tokens, after.usage.at_least)


@tool
async def breaks(how: str) -> str:
    """
    Fail.

    Args:
        how: With what.
    """
    raise ValueError(how)


def fails_and_asks(ctx: StepContext):
    said = []
    try:
        yield from call(breaks, "badly")
    except ToolError as error:
        said.append((type(error).__name__, str(error)))
    answer = yield from Ask("Go on?", key="go")
    yield from Perform.idempotent(measured)
    return [*said, answer]


FAILS = AgentDefinition("fails", tools=[breaks], handle_steps=fails_and_asks)


@pytest.mark.spec("durable:UF10", "durable:UF15", "durable:UF35", "durable:U13")
async def test_an_answer_that_is_sent_while_nobody_works_is_taken_by_the_next_who_meets_the_same_errors(db: str):
    async with engine([FAILS], db) as worker:
        expected = await worker.result(await worker.submit(FAILS, "", answers={"go": "yes"}))
        run = (await worker.run(FAILS, "")).journal
    async with await Operator.connect(db) as operator:
        with pytest.raises(JournalError, match="no run 'nobody'"):
            await operator.answer("nobody", {"go": "yes"})
        await operator.answer(run, {"go": "yes"})
        ((sent,),) = await operator.rows("select count(*) from dbos.notifications where destination_uuid = %s", run)
    async with engine([FAILS], db) as worker:
        result = await worker.result(run, waits=True)
        with pytest.raises(AnswerRejected):
            await worker.answer(run, {"go": "no"})
        journal = await worker.export(run)
        shown = [(record.seq, record.kind) for record in journal.records() if record.kind == "result"]

    assert 1 == sent
    assert expected.output == result.output
    assert "ToolError" == result.output[0][0]
    assert shown


@pytest.mark.spec("durable:UF42", "durable:UF23")
async def test_a_run_that_only_waits_is_no_poison_however_often_its_workers_die(db: str):
    async with engine([FAILS], db) as worker:
        run = (await worker.run(FAILS, "")).journal
    async with await Operator.connect(db) as operator:
        times = []
        for number in range(8):
            # As if a worker had taken it, and died.
            await operator.rows(
                "update dbos.workflow_status set status = 'PENDING', executor_id = %s where workflow_uuid = %s returning 1",
                f"dead-{number}", run,
            )  # fmt: skip
            times += [(each.outcome, each.times) for each in await Upkeep(operator).takeover(f"dead-{number}")]
        view = await operator.run(run)
    async with engine([FAILS], db) as worker:
        result = await worker.resume(run, answers={"go": "yes"})

    assert [("resumed", 1)] * 8 == times
    assert {"times": 1} == {name: view.attributes["takeover"][name] for name in ("times",)}
    assert "yes" == result.output[-1]
