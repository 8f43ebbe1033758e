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


def turn_condition_sql(row: str = "") -> str:
    """Return the SQL condition for a turn of a session; *row* is the table's name with its dot."""
    return f"{row}name = '{WORKFLOW}' and {row}attributes ? 'session'"


def child_condition_sql(row: str = "") -> str:
    """Return the SQL condition for a run that another run started."""
    return f"{row}name = '{WORKFLOW}' and position('/' in {row}workflow_uuid) > 0"


def root_id_sql(row: str = "") -> str:
    """Return the SQL expression for the id of a run's root."""
    return f"split_part({row}workflow_uuid, '/', 1)"


def session_key_sql(session: str) -> str:
    """Return the SQL expression of an indexable key for a session id; *session* is an expression."""
    return f"(left({session}, 300) || hashtextextended({session}, 0)::text)"


def session_turns_sql(app: str, session: str, row: str = "") -> str:
    """Return the SQL condition for the turns of a session; *app* and *session* are expressions."""
    own = f"({row}attributes->>'session')"
    return (
        f"{turn_condition_sql(row)} and {row}application_name = {app} and {session_key_sql(own)} = {session_key_sql(session)}"
        f" and {row}attributes @> jsonb_build_object('session', {session})"
    )


def turn_kind_sql(row: str = "") -> str:
    """
    Return the SQL expression for the kind of a turn: ``line``, ``open``, ``done``, ``gone``.

    As ``TurnView`` has it: it waits for a turn before it; those after it wait for it; it has a result; nobody waits for it.
    """
    return (
        f"(case when {row}status = 'SUCCESS' then 'done'"
        f" when {row}status = 'ENQUEUED' and right({row}queue_name, 5) = '.line' then 'line'"
        f" when {row}status = 'CANCELLED' and {row}attributes->>'held' is distinct from 'true' then 'gone'"
        f" when {row}status <> 'CANCELLED' and {row}attributes->>'given_up' = 'true' then 'gone'"
        " else 'open' end)"
    )


def turn_number_sql(row: str = "") -> str:
    """Return the SQL expression for the number of a turn."""
    return f"(({row}attributes->>'turn')::int)"


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
