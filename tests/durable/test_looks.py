"""
What a look finds and costs: as many rows of a long session as of a short one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg
import pytest

from stepengine.data.state import RunInfo
from stepengine.durable import Operator, migrate
from stepengine.durable.database import open_connection, quote_name
from stepengine.durable.indexes import create_indexes
from stepengine.durable.upkeep import FINISHED_ROOTS
from tests.cases import case

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


def known_to_the_planner(db: str) -> None:
    with psycopg.connect(db, autocommit=True) as own:
        own.execute("analyze")


def rows_of(node: dict[str, Any]) -> int:
    """
    Return how many rows of tables a plan read or compared, and how many entries of indexes it gathered.
    """
    names = {"Rows Removed by Join Filter"}
    if "Relation Name" in node or "Index Name" in node:
        names |= {"Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck"}
    read = round(sum(node.get(name, 0) for name in names) * node["Actual Loops"])
    return read + sum(map(rows_of, node.get("Plans", ())))


async def read_by(operator: Operator, look: Callable[[], Awaitable[Any]]) -> int:
    """
    Return how many rows the statements of an operator read.
    """
    asked, read = operator.rows, 0

    async def rows(statement: str, *values: Any) -> list[tuple[Any, ...]]:
        nonlocal read
        ((plan,),) = await asked(f"explain (analyze, format json) {statement}", *values)
        read += rows_of(plan[0]["Plan"])
        return await asked(statement, *values)

    operator.rows = rows
    try:
        await look()
    finally:
        del operator.rows
    return read


@pytest.mark.speed
@pytest.mark.parametrize(("state", "before", "behind"), [("CANCELLED", 1000, 1), ("SUCCESS", 1, 1000)])
async def test_session_lookup_cost_is_independent_of_its_length(db: str, state, before, behind):
    await migrate(db)
    for name, most in (("short", 10), ("long", 1000)):
        ended, waiting = min(before, most), min(behind, most)
        runs(db, f"{name}-ended-", ended, state=state, session=name)
        # One that stopped keeps all after it waiting.
        runs(db, f"{name}-stopped-", 1, state="ERROR", session=name, first=ended + 1)
        runs(db, f"{name}-waiting-", waiting, state="ENQUEUED", queue=LINE, session=name, first=ended + 2)
    known_to_the_planner(db)
    async with await Operator.connect(db) as operator:
        sessions = operator.sessions

        async def look(name: str) -> None:
            assert not await sessions.advance(name)
            await sessions.last(name)
            await sessions.load(name)

        short, long = [await read_by(operator, lambda name=name: look(name)) for name in ("short", "long")]
        lines = await read_by(operator, sessions.in_line)
        found = await sessions.in_line()

    assert {"short", "long"} == set(found)
    assert short == long < 50
    assert lines < 10


async def test_turn_gets_the_next_number_in_any_state(db: str):
    async with await Operator.connect(db) as operator:
        for state, queue in (("SUCCESS", None), ("CANCELLED", None), ("ERROR", None), ("ENQUEUED", LINE)):
            with case(state):
                runs(db, f"first-{state}", 2, session=state)
                runs(db, f"then-{state}", 3, state=state, queue=queue, session=state, first=3)
                await operator.submit("chat", "a", id=f"next-{state}", info=RunInfo(state))
                turns = await operator.sessions.turns(state)

                assert (f"next-{state}", 6) == (turns[-1].run, turns[-1].number)


FINISHED = ("stepengine.run", "stepengine", "", ["SUCCESS"], 10**6, ["SUCCESS"], ["SUCCESS"], 10**6, 10**9)
"""What is asked for when what has ended is cleaned up."""


async def test_cleanup_finds_finished_trees(db: str):
    count = 100
    await migrate(db)
    for kind, state in (("ended", "SUCCESS"), ("going", "PENDING")):
        runs(db, f"{kind}-", count)
        runs(db, f"{kind}-", count, below="/1", state=state)
    runs(db, "turn-", count, session="s")
    async with await Operator.connect(db) as operator:
        found = {run for (run,) in await operator.rows(FINISHED_ROOTS, *FINISHED)}

    assert {f"ended-{n}" for n in range(1, count + 1)} < found
    # What is not over keeps its tree; the last of a session goes when nothing has happened since.
    assert not any(run.startswith("going") for run in found)
    assert {"turn-1", f"turn-{count}"} < found


async def test_role_without_index_rights_works_and_is_warned(db: str, caplog):
    name = quote_name(f"limited-{db.rpartition('/')[2][:20]}")
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
            assert ["s"] == await operator.sessions.in_line()
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
