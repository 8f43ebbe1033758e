"""
Runs that another process, or another execution in the same one, goes on with.
"""

from __future__ import annotations

import asyncio

import pytest

from stepengine import (
    STEP,
    AgentCall,
    AgentDefinition,
    Ask,
    Engine,
    Parallel,
    Perform,
    StepContext,
    ToolCall,
    Usage,
    call,
    tool,
)
from stepengine.durable import DeploymentMaintenance, DurableEngine, Operator
from stepengine.errors import AnswerRejected, DefinitionError, JournalError, ToolError
from stepengine.events import Warned
from stepengine.models import ModelReply, Provider

from .shared import worker_of

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
    return worker_of(agents, db, **{"models": models or Slow(), "pricing": None, "release": "1", **options})


@pytest.mark.deep
@pytest.mark.spec("reliability:R3", "reliability:I4")
@pytest.mark.parametrize("prompt", ["later", "at once"])
async def test_usage_of_an_interrupted_call_is_a_lower_bound(db: str, prompt: str):
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
        said.append([type(error).__name__, str(error)])
    answer = yield from Ask("Go on?", key="go")
    yield from Perform.idempotent(measured)
    return [*said, answer]


FAILS = AgentDefinition("fails", tools=[breaks], handle_steps=fails_and_asks)


@pytest.mark.deep
@pytest.mark.spec("durable:U37", "durable:U13")
async def test_offline_answer_is_received_after_replaying_recorded_errors(db: str):
    async with engine([FAILS], db) as worker:
        expected = await worker.result(await worker.submit(FAILS, "", answers={"go": "yes"}))
        run = (await worker.run(FAILS, "")).journal
    async with await Operator.connect(db) as operator:
        with pytest.raises(JournalError, match="no run 'nobody'"):
            await operator.answer("nobody", {"go": "yes"})
        await operator.answer(run, {"go": "yes"})
        ((sent,),) = await operator.deployment.fetch_rows(
            "select count(*) from dbos.notifications where destination_uuid = %s", run
        )
    async with engine([FAILS], db) as worker:
        result = await worker.result(run, waits=True)
        with pytest.raises(AnswerRejected):
            await worker.answer(run, {"go": "no"})
        journal = await worker.export(run)
        steps = await worker.operator.deployment.fetch_rows(
            "select error from dbos.operation_outputs where workflow_uuid = %s", run
        )
    repeated = await Engine([FAILS]).replay(journal)

    assert 1 == sent
    # No step of the database ended with an exception.
    assert {(None,)} == set(steps)
    assert expected.output == result.output
    assert "ToolError" == result.output[0][0]
    # A question has three numbers in the database and one in the journal: what comes after it is found by its name.
    assert result.output == repeated.output


@pytest.mark.deep
@pytest.mark.spec("durable:U34")
async def test_waiting_run_is_never_marked_as_poison(db: str):
    async with engine([FAILS], db) as worker:
        run = (await worker.run(FAILS, "")).journal
    async with await Operator.connect(db) as operator:
        times = []
        for number in range(8):
            # As if a worker had taken it, and died.
            await operator.deployment.fetch_rows(
                "update dbos.workflow_status set status = 'PENDING', executor_id = %s, recovery_attempts = 200 where workflow_uuid = %s returning 1",
                f"dead-{number}", run,
            )  # fmt: skip
            times += [
                (each.outcome, each.times) for each in await DeploymentMaintenance(operator).takeover(f"dead-{number}")
            ]
        view = await operator.run(run)
    async with engine([FAILS], db) as worker:
        result = await worker.resume(run, answers={"go": "yes"})

    assert [("resumed", 1)] * 8 == times
    assert 1 == view.attributes["takeover"]["times"]
    # The database package counts, too, and would give the run up; being taken over begins its count anew.
    assert 0 == view.attempts
    assert "yes" == result.output[-1]


@pytest.mark.deep
@pytest.mark.spec("durable:UK9")
async def test_warning_about_a_long_run_appears_once(db: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("stepengine.durable.steps.LONG_RUN_EFFECTS", 5)
    told: list[str] = []
    seen = {"observers": [lambda event: told.append(event.message) if isinstance(event, Warned) else None]}
    async with engine([LONG], db, **seen) as worker:
        short = await worker.run(LONG, "4", answers={"go": "yes"})
        assert [] == told
        run = (await worker.run(LONG, "9")).journal
    async with engine([LONG], db, **seen) as worker:
        result = await worker.resume(run, answers={"go": "yes"})

    assert (4, 9) == (short.output, result.output)
    assert 1 == len(told)
    assert run in told[0]
    assert "children" in told[0]


def goes_on(ctx: StepContext):
    for _ in range(int(ctx.prompt) - 1):
        yield from Perform.idempotent(measured)
    yield from Ask("Go on?", key="go")
    return int(ctx.prompt)


LONG = AgentDefinition("long", handle_steps=goes_on)


ORDER: list[str] = []
LAST: list[asyncio.Event] = []


async def takes(name: str) -> str:
    # Whoever comes first ends last.
    if name == "first":
        await LAST[0].wait()
    ORDER.append(name)
    if name == "last":
        LAST[0].set()
    return name


@tool
async def fires(name: str) -> str:
    """
    Do something that must not be done twice.

    Args:
        name: What.
    """
    return await takes(name)


def gathers(ctx: StepContext):
    ORDER.clear()
    LAST[:] = [asyncio.Event()]
    both = yield from Parallel(
        Perform.idempotent(takes, "first"), ToolCall("fires", {"name": "tool"}), AgentCall("leaf", ""),
        Perform.idempotent(takes, "last"),
    )  # fmt: skip
    yield from Perform.idempotent(measured)
    return len(both)


def leaf(ctx: StepContext):
    return "leaf"
    yield


LEAF = AgentDefinition("leaf", handle_steps=leaf)
GATHERS = AgentDefinition("gathers", tools=[fires], spawnable_agents=[LEAF], handle_steps=gathers)


@pytest.mark.deep
@pytest.mark.spec("durable:U5", "durable:U21", "durable:U20")
async def test_effect_numbers_follow_handler_order_and_polling_is_bounded(db: str, monkeypatch):
    from dbos import _core

    waits = []
    get_result = _core.WorkflowHandleAsyncPolling.get_result

    async def noted(self, *, polling_interval_sec=1.0, **more):
        waits.append(polling_interval_sec)
        return await get_result(self, polling_interval_sec=polling_interval_sec, **more)

    monkeypatch.setattr(_core.WorkflowHandleAsyncPolling, "get_result", noted)
    async with engine([GATHERS], db) as worker:
        result = await worker.run(GATHERS, "")
        steps = await worker.operator.deployment.load_steps(result.journal)
        threads = asyncio.get_running_loop()._default_executor.executor

    kinds = [step.name.partition(":")[0] for step in steps]
    assert ["perform", "intent", "tool", "spawn", "child", "perform", "perform", "end"] == kinds
    assert [0, 1, 2, 3, 4] == [step.form["seq"] for step in steps if step.form and {"seq", "at"} <= step.form.keys()]
    assert ["last", "first"] == [name for name in ORDER if name in ("first", "last")]
    assert waits
    assert max(waits) <= 0.2
    assert 64 == threads._max_workers


@pytest.mark.spec("durable:U2")
@pytest.mark.parametrize("url", ["sqlite:///runs.db", "runs.db"])
def test_only_postgresql_urls_are_accepted(url: str):
    with pytest.raises(DefinitionError, match="must start with postgresql://"):
        engine([LEAF], url)


@pytest.mark.deep
@pytest.mark.spec("reliability:R3", "reliability:I4")
@pytest.mark.parametrize("way", ["takeover", "retry"])
async def test_usage_stays_a_lower_bound_after_takeover_and_retry(db: str, way: str):
    provider = Slow()
    async with engine([SAYS], db, provider) as worker:
        run = await worker.submit(SAYS, "at once")
        await asyncio.wait_for(provider.first.wait(), 30)
    async with await Operator.connect(db) as operator:
        if way == "retry":
            await operator.cancel(run)
            await operator.retry(run)
        else:
            await DeploymentMaintenance(operator).takeover("worker-1")
    async with engine([SAYS], db, provider, executor="worker-2") as worker:
        after = await worker.result(run)

    assert (20, True) == (after.usage.total_tokens, after.usage.at_least)
