"""
What a durable run costs, counted and not timed: rows, statements, connections; and what the benchmark of it prints.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepengine import AgentCall, AgentDefinition, Ask, Limits, Perform, StepContext, tool
from stepengine import call as called
from stepengine.durable import DeploymentMaintenance, DurableEngine, Operator, migrate
from stepengine.durable.step_records import PAGE_STEPS
from stepengine.errors import DatabaseUnavailable, StepEngineError

from .shared import worker_of

pytestmark = pytest.mark.deep  # each starts workers on a database of its own

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40


async def measured(number: int) -> int:
    return number


@tool
async def fire(name: str) -> str:
    """
    Do something that must not be done twice.

    Args:
        name: What.
    """
    return name


def counting(ctx: StepContext):
    for number in range(int(ctx.prompt)):
        yield from Perform.idempotent(measured, number)
    return ctx.prompt


def mixed(ctx: StepContext):
    yield from Perform.idempotent(measured, 1)
    yield from called(fire, "a")
    yield from AgentCall("counting", "2")
    size = yield from Ask("How large?")
    return size


def firing(ctx: StepContext):
    for number in range(int(ctx.prompt)):
        yield from called(fire, str(number))
    return ctx.prompt


def resuming(ctx: StepContext):
    yield from firing(ctx)
    answer = yield from Ask("Go on?")
    return answer


FIRING = AgentDefinition("firing", tools=[fire], handle_steps=firing)
RESUMING = AgentDefinition("resuming", tools=[fire], handle_steps=resuming, limits=Limits(max_actions=10_000))
COUNTING = AgentDefinition("counting", handle_steps=counting)
MIXED = AgentDefinition("mixed", tools=[fire], spawnable_agents=[COUNTING], handle_steps=mixed)


def engine(db: str, **options) -> DurableEngine:
    return worker_of([COUNTING, FIRING, MIXED, RESUMING], db, **options)


@contextmanager
def transactions() -> Iterator[list[str]]:
    """
    Give the transactions about steps that this process makes, as they are made: those of the package by their statements.
    """
    from sqlalchemy import Engine, event

    made: list[str] = []
    under_way: dict[int, str] = {}

    def note(connection, _cursor, statement: str, *_) -> None:
        under_way[id(connection)] = under_way.get(id(connection), "") + statement

    def end(connection) -> None:
        statement = under_way.pop(id(connection), "")
        if "operation_outputs" in statement:
            made.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    event.listen(Engine, "commit", end)
    try:
        yield made
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        event.remove(Engine, "commit", end)


@pytest.mark.speed
@pytest.mark.spec("durable:UT20", "durable:U18")
@pytest.mark.parametrize(
    ("agent", "steps"), [(COUNTING, 1), (FIRING, 2)], ids=["may be repeated", "must not be repeated"]
)
async def test_effect_is_one_dbos_step_or_two_if_not_repeatable(db: str, agent, steps: int):
    from dbos import DBOS

    async with engine(db) as worker:

        async def loop(count: int) -> str:
            for number in range(count):
                await DBOS.run_step_async({"name": f"perform:{number:032x}"}, measured, number)
            return "done"

        bare = DBOS.workflow(name=f"cost.bare.{agent.id}")(loop)
        with transactions() as of_bare:
            await (await DBOS.start_workflow_async(bare, STEPS)).get_result(polling_interval_sec=0.02)
        with transactions() as of_ours:
            await worker.operator.result(await worker.submit(agent, str(STEPS)))
        with transactions() as of_longer:
            await worker.operator.result(await worker.submit(agent, str(4 * STEPS)))

    # A step is two transactions: one looks for a record, one writes the result. A run has one more step for its end, and one
    # query for what is recorded of it.
    assert 2 * STEPS <= len(of_bare)
    assert 2 * steps * STEPS <= len(of_ours) <= 2 * steps * STEPS + 3
    assert 2 * steps * 3 * STEPS == len(of_longer) - len(of_ours)


@pytest.mark.speed
async def test_resume_reads_recorded_steps_in_pages(db: str):
    count = 600
    async with engine(db) as worker:
        waiting = await worker.run(RESUMING, str(count))
        (question,) = waiting.pending_questions
    async with await Operator.connect(db) as operator:
        await operator.answer(waiting.journal, {question.id: "yes"})
        with transactions() as made:
            async with engine(db):
                form = await operator.result(waiting.journal)

    assert "yes" == form["output"]
    # Each tool that must not be repeated has two rows. The question, its answer, and the end are looked for by themselves.
    assert len(made) <= 2 * count / PAGE_STEPS + 8


@pytest.mark.spec("durable:UT20", "durable:U4", "durable:U15", "durable:U18", "durable:U28")
async def test_run_leaves_only_needed_steps_named_by_kind_and_hash(db: str):
    async with engine(db) as worker:
        result = await worker.run(MIXED, "s3cret prompt", answers={"How large?": "large"})
        polling = {thread.name for thread in threading.enumerate() if thread.name.startswith("queue-worker")}
        queues = await DeploymentMaintenance(worker.operator).list_queue_settings()
        own = [step.name for step in await worker.operator.deployment.load_steps(result.journal)]
        below = [step.name for step in await worker.operator.deployment.load_steps(f"{result.journal}/2")]

    assert "large" == result.output
    kinds = Counter(name.partition(":")[0] for name in own if ":" in name)
    assert {"perform": 1, "intent": 1, "tool": 1, "spawn": 1, "child": 1, "ask": 1, "end": 1} == kinds
    assert ["perform", "perform", "end"] == [name.partition(":")[0] for name in below]
    for name in [name for name in own if not name.startswith("DBOS.")]:
        kind, _, print_ = name.partition(":")
        assert kind.isalpha()
        assert 32 == len(print_)
        assert int(print_, 16) >= 0
    # No thread asks a queue that is empty.
    assert polling <= {"queue-worker-_dbos_internal_queue"}
    assert {f"se.default.d{depth}" for depth in range(5)} <= {view.name for view in queues}


@pytest.mark.spec("durable:UK3")
async def test_worker_holds_at_most_the_documented_connections(db: str):
    look = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    async with await Operator.connect(db) as operator:
        ((before,),) = await operator.deployment.fetch_rows(look)
        async with engine(db) as worker:
            runs = [await worker.submit(COUNTING, "5") for _ in range(30)]
            for run in runs:
                await worker.operator.result(run)
            ((after,),) = await operator.deployment.fetch_rows(look)

    page = (ROOT / "docs" / "durable-operations.md").read_text()
    assert "A worker holds 11 connections" in page
    # Eight for steps, and one each to listen, for the lock, and to look.
    assert 3 <= after - before <= 12


@pytest.mark.spec("durable:U45")
async def test_asynchronous_commits_are_rejected_unless_allowed(db: str):
    import psycopg

    with psycopg.connect(db, autocommit=True) as connection:
        connection.execute(f'alter database "{connection.info.dbname}" set synchronous_commit = off')
    with pytest.raises(StepEngineError, match="synchronous_commit=off"):
        await engine(db).open()

    async with engine(db, executor="worker-2", allow_async_commit=True) as worker:
        result = await worker.run(COUNTING, "2")

    assert "2" == result.output


@pytest.mark.spec("durable:UK8")
async def test_migration_sets_fillfactor_and_autovacuum(db: str):
    await migrate(db)

    async with await Operator.connect(db) as operator:
        ((options,),) = await operator.deployment.fetch_rows(
            "select reloptions from pg_class where oid = 'dbos.workflow_status'::regclass"
        )

    assert {"fillfactor=80", "autovacuum_vacuum_scale_factor=0.02"} <= set(options)


@pytest.mark.spec("durable:U38", "durable:UF18")
def test_database_package_logs_one_line_without_traceback():
    from dbos._error import DBOSAwaitedWorkflowCancelledError, DBOSWorkflowCancelledError

    from stepengine.durable.database import import_patched_dbos

    import_patched_dbos()
    logger, heard = logging.getLogger("dbos"), list[logging.LogRecord]()
    handler = logging.Handler()
    handler.emit = heard.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for _ in range(200):
            try:
                raise ConnectionError("gone\nin many words")
            except ConnectionError:
                logger.info("trying again")
                logger.warning("cannot write", exc_info=True)
        logger.warning("another place")
        # Who moved or cancelled a run was told.
        for cancelled in (DBOSAwaitedWorkflowCancelledError("order-3"), DBOSWorkflowCancelledError("order-3")):
            logger.error("a workflow that was cancelled", exc_info=cancelled)
    finally:
        logger.removeHandler(handler)

    assert ["cannot write ConnectionError: gone", "another place"] == [record.getMessage() for record in heard]
    assert [None, None] == [record.exc_info for record in heard]


@pytest.mark.spec("durable:U35")
async def test_process_can_be_one_worker_only(db: str):
    async with engine(db) as worker:
        with pytest.raises(StepEngineError, match="a process can run only one worker"):
            await engine(db, executor="worker-2").open()
        # The first one is none the worse for it.
        result = await worker.run(COUNTING, "2")

    assert "2" == result.output


@pytest.mark.spec("durable:U35")
async def test_only_one_of_two_workers_opened_at_once_starts(db: str):
    first, second = engine(db), engine(db, executor="worker-2")
    opened = await asyncio.gather(first.open(), second.open(), return_exceptions=True)
    try:
        result = await first.run(COUNTING, "2")
    finally:
        await first.aclose(drain=0)
        await second.aclose(drain=0)

    assert "a process can run only one worker" in str(opened[1])
    assert (first, "2") == (opened[0], result.output)


@pytest.mark.spec("durable:U35")
async def test_failed_open_leaves_room_for_another_worker(db: str):
    with pytest.raises(DatabaseUnavailable):
        await engine("postgresql://nobody@127.0.0.1:1/none").open()
    async with engine(db) as worker:
        result = await worker.run(COUNTING, "2")

    assert "2" == result.output
