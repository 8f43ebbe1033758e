"""
The list of workers in the database, including those without runs.

A worker's lock shows that it is alive, but not its name, and runs name only the workers that have some. So each worker adds itself to
a list when it starts and removes itself when it ends. A dead worker stays on the list; its free lock shows that it is dead.
"""

from __future__ import annotations

import logging
from typing import Any

from stepengine.durable.database import create_missing_tables, fetch_value, get_missing_rights_error
from stepengine.runtime.logs import LOGGER

LOCK = "stepengine-workers"
THERE = "select to_regclass('stepengine.workers') is not null"
TABLES = (
    "create schema if not exists stepengine",
    """
    create table if not exists stepengine.workers (
        app text, executor text, pool text not null, release text not null, primary key (app, executor)
    )
    """,
)
GRANTS = ("grant usage on schema stepengine", "grant select, insert, update, delete on stepengine.workers")
ENLIST = """
insert into stepengine.workers values (%s, %s, %s, %s)
on conflict (app, executor) do update set pool = excluded.pool, release = excluded.release
"""
STRIKE_OFF = "delete from stepengine.workers where app = %s and executor = %s"
WORKERS = "select executor, release from stepengine.workers where app = %s order by executor"


async def has_worker_table(connection: Any) -> bool:
    """Return whether the database has the list; it has none if no role was allowed to create it."""
    return bool(await fetch_value(connection, THERE))


async def create_worker_table(connection: Any, *, role: str | None = None) -> None:
    """
    Create the list of workers if missing, over *connection*, and let *role* use it; safe to call concurrently.

    Without the right to do so, it stays missing, and workers without runs are not shown.
    """
    await create_missing_tables(
        connection,
        "the list of workers",
        lock=LOCK,
        exists_query=THERE,
        tables=TABLES,
        grants=GRANTS,
        role=role,
        level=logging.WARNING,
    )


async def add_worker(connection: Any, app: str, executor: str, pool: str, release: str) -> None:
    """Put a worker on the list. Do nothing if there is no list; log a warning if this role may not."""
    if await has_worker_table(connection):
        try:
            await connection.execute(ENLIST, (app, executor, pool, release))
        except get_missing_rights_error():
            LOGGER.warning("this role may not write to the list of workers: run `stepengine deploy migrate --role`")


async def remove_worker(connection: Any, app: str, executor: str) -> None:
    """Remove a worker from the list. Do nothing if there is no list, or if this role may not."""
    if await has_worker_table(connection):
        try:
            await connection.execute(STRIKE_OFF, (app, executor))
        except get_missing_rights_error():
            LOGGER.debug("this role may not write to the list of workers")


async def list_workers(connection: Any, app: str) -> dict[str, str]:
    """Return the executors on the list, each with its release; nothing if there is no list."""
    if not await has_worker_table(connection):
        return {}
    rows = await (await connection.execute(WORKERS, (app,))).fetchall()
    return dict(rows)
