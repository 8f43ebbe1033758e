"""
SQL conditions and indexes of the tables of ``dbos``: for turns of sessions and trees of runs.

The package finds runs by their ids, queues and states. A query for a session or a tree has to cost the same however many runs there
are, and a pattern of ids uses no index if the database sorts by a language. The text of an index is the text in the statements that
use it. Without the indexes, which a role without rights cannot create, the same statements are right and slower.
"""

from __future__ import annotations

import logging
from typing import Any

from stepengine.durable.database import WORKFLOW, create_missing_tables

LOCK = "stepengine-indexes"


def turn_condition_sql(table_prefix: str = "") -> str:
    """Return the SQL condition for a turn of a session; *table_prefix* is a table name with its dot, or ``""``."""
    return f"{table_prefix}name = '{WORKFLOW}' and {table_prefix}attributes ? 'session'"


def child_condition_sql(table_prefix: str = "") -> str:
    """Return the SQL condition for a run that another run started."""
    return f"{table_prefix}name = '{WORKFLOW}' and position('/' in {table_prefix}workflow_uuid) > 0"


def root_id_sql(table_prefix: str = "") -> str:
    """Return the SQL expression for the id of a run's root."""
    return f"split_part({table_prefix}workflow_uuid, '/', 1)"


def session_key_sql(session: str) -> str:
    """
    Return an SQL expression for a session's index key: the start of its id and a hash.

    Args:
        session: An SQL expression for the id.
    """
    return f"(left({session}, 300) || hashtextextended({session}, 0)::text)"


def session_turns_sql(app: str, session: str, table_prefix: str = "") -> str:
    """Return the SQL condition for the turns of a session; *app* and *session* are expressions."""
    own = f"({table_prefix}attributes->>'session')"
    return (
        f"{turn_condition_sql(table_prefix)} and {table_prefix}application_name = {app}"
        f" and {session_key_sql(own)} = {session_key_sql(session)}"
        f" and {table_prefix}attributes @> jsonb_build_object('session', {session})"
    )


def turn_kind_sql(table_prefix: str = "") -> str:
    """
    Return the SQL expression for the kind of a turn: ``line``, ``open``, ``done``, ``gone``.

    ``line``: the turn waits for an earlier turn. ``open``: later turns wait for it. ``done``: it has a result. ``gone``: no turn waits
    for it, and it has no result.
    """
    return (
        f"(case when {table_prefix}status = 'SUCCESS' then 'done'"
        f" when {table_prefix}status = 'ENQUEUED' and right({table_prefix}queue_name, 5) = '.line' then 'line'"
        f" when {table_prefix}status = 'CANCELLED' and {table_prefix}attributes->>'held' is distinct from 'true' then 'gone'"
        f" when {table_prefix}status <> 'CANCELLED' and {table_prefix}attributes->>'given_up' = 'true' then 'gone'"
        " else 'open' end)"
    )


def turn_number_sql(table_prefix: str = "") -> str:
    """Return the SQL expression for the number of a turn."""
    return f"(({table_prefix}attributes->>'turn')::int)"


SESSION = "(attributes->>'session')"
INDEXES = {
    "stepengine_turns": (
        f"(application_name, {turn_kind_sql()}, {session_key_sql(SESSION)}, {turn_number_sql()}, workflow_uuid) where {turn_condition_sql()}"
    ),
    "stepengine_trees": f"(({root_id_sql()})) where {child_condition_sql()}",
}
THERE = "select " + " and ".join([f"to_regclass('dbos.{name}') is not null" for name in INDEXES])


async def create_indexes(connection: Any) -> None:
    """
    Create missing indexes over *connection*; safe to call concurrently.

    Without the right to do so, they stay missing, and a warning is logged.
    """
    await create_missing_tables(
        connection, "indexes", lock=LOCK, exists_query=THERE, level=logging.WARNING,
        tables=[f"create index if not exists {name} on dbos.workflow_status {what}" for name, what in INDEXES.items()],
    )  # fmt: skip
