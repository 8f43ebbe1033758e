"""
What looks at runs find, and who may make their indexes.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import psycopg
import pytest

from stepengine import AgentDefinition, Ask, StepContext, call, tool
from stepengine.data.state import RunInfo
from stepengine.durable import Operator, migrate
from stepengine.durable.database import open_connection, quote_sql_name
from stepengine.durable.executions import WorkflowSteps
from stepengine.durable.indexes import create_indexes
from stepengine.errors import StepEngineError
from tests.cases import case

from .shared import worker_of

RUNS = """
insert into dbos.workflow_status
    (workflow_uuid, status, name, application_name, queue_name, executor_id, attributes, created_at, updated_at)
select %(ids)s || n || %(below)s, %(state)s, 'stepengine.run', 'stepengine', %(queue)s, 'worker-1',
    case when %(session)s::text is null then '{}' else jsonb_build_object('session', %(session)s::text, 'turn', n) end, n, n
from generate_series(%(first)s::int, %(last)s::int) n
"""
LINE = "se.default.line"


def runs(db: str, ids: str, count: int, **more: Any) -> None:
    """
    Make runs with the numbers from *first* on; with *session* its turns.
    """
    first = more.get("first", 1)
    values = {
        "below": "",
        "state": "SUCCESS",
        "queue": None,
        "session": None,
        "first": first,
        "last": first + count - 1,
    }
    with psycopg.connect(db, autocommit=True) as own:
        own.execute(RUNS, {"ids": ids, **values, **more})


@pytest.mark.deep
@pytest.mark.smoke
async def test_turn_gets_the_next_number_in_any_state(db: str):
    async with await Operator.connect(db) as operator:
        for state, queue in (("SUCCESS", None), ("CANCELLED", None), ("ERROR", None), ("ENQUEUED", LINE)):
            with case(state):
                runs(db, f"first-{state}", 2, session=state)
                runs(db, f"then-{state}", 3, state=state, queue=queue, session=state, first=3)
                await operator.submit("chat", "a", id=f"next-{state}", info=RunInfo(state))
                turns = await operator.sessions.list_turns(state)

                assert (f"next-{state}", 6) == (turns[-1].run, turns[-1].number)


@pytest.mark.deep
@pytest.mark.smoke
async def test_role_without_index_rights_works_and_is_warned(db: str, caplog):
    name = quote_sql_name(f"limited-{db.rpartition('/')[2][:20]}")
    async with await Operator.connect(db) as operator:
        own = await open_connection(operator.url)
        try:
            await own.execute(f"create role {name}")
            await own.execute(f"grant usage on schema dbos to {name}")
            await own.execute(f"set role {name}")
            with caplog.at_level(logging.WARNING, logger="stepengine"):
                await create_indexes(own)
            await own.execute("reset role")
            assert ["run `stepengine deploy migrate`" in record.getMessage() for record in caplog.records] == [True]
            await operator.submit("chat", "a", info=RunInfo("s"))
            await operator.submit("chat", "b", info=RunInfo("s"))
            assert ["s"] == await operator.sessions.list_waiting_sessions()
            caplog.clear()
            # Several may make them at once, and a second time there is nothing to do.
            await asyncio.gather(migrate(db), migrate(db))
            await create_indexes(own)
            found = await (
                await own.execute("select indexname from pg_indexes where indexname like 'stepengine%'")
            ).fetchall()
            assert {"stepengine_turns", "stepengine_trees"} == {index for (index,) in found}
            await own.execute(f"drop owned by {name}")
            await own.execute(f"drop role {name}")
        finally:
            await own.close()


@pytest.mark.deep
@pytest.mark.spec("durable:UC8")
async def test_wait_without_select_rights_fails_with_a_remedy(db: str):
    name = f"blind_{db.rpartition('/')[2].partition('?')[0][:20]}"
    async with await Operator.connect(db) as operator:
        own = await open_connection(operator.url)
        try:
            await own.execute(f"create role {name}")
            await own.execute(f"grant usage on schema dbos to {name}")
            await own.execute(f"alter database {own.info.dbname} set role {name}")
            async with await Operator.connect(db) as blind:
                with pytest.raises(StepEngineError, match=r"denies this role a right.*`stepengine deploy migrate"):
                    await asyncio.wait_for(blind.result("chat-1"), 50)
            await own.execute(f"alter database {own.info.dbname} reset role")
            await own.execute(f"drop owned by {name}")
            await own.execute(f"drop role {name}")
        finally:
            await own.close()


@tool(idempotent=True)
async def slow(name: str) -> str:
    """
    Take longer than a look at the record does.

    Args:
        name: What.
    """
    await asyncio.sleep(0.3)
    return name


def many(ctx: StepContext):
    for n in range(8):
        yield from call(slow, str(n))
    size = yield from Ask("Which?")
    yield from call(slow, "last")
    return size


MANY = AgentDefinition("many", tools=[slow], handle_steps=many)


@pytest.mark.deep
@pytest.mark.spec("durable:U13")
async def test_shown_question_can_be_answered_at_once(db: str, monkeypatch: pytest.MonkeyPatch):
    """
    Whoever follows goes through the same code as the worker, and is there first where that is slow to write down what it asks.
    """
    step = WorkflowSteps.reserve_and_load_or_perform_step

    async def slowly(self: Any, name: str, *given: Any) -> Any:
        await asyncio.sleep(1.5 if name.startswith("ask:") else 0)
        return await step(self, name, *given)

    monkeypatch.setattr(WorkflowSteps, "reserve_and_load_or_perform_step", slowly)
    async with worker_of([MANY], db) as worker:
        run = await worker.submit(MANY, "go")
        async for event in worker.events(run):
            if type(event).__name__ == "QuestionAsked":
                await worker.answer(run, {"Which?": "this"})
        result = await worker.result(run)

    assert "this" == result.output
