"""The book of schedules in the database: which times were started, in tables next to the list of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from stepengine.durable.database import create_missing_tables, open_transaction
from stepengine.engine.schedule_book import (
    KEPT_TIMES,
    ClaimedTime,
    KnownSchedule,
    claimed_time_from_row,
    seconds_from_time,
    time_from_seconds,
)
from stepengine.errors import DatabaseUnavailable, JournalError

THERE = "select to_regclass('stepengine.schedule_times') is not null"
TABLES = (
    "create schema if not exists stepengine",
    """
    create table if not exists stepengine.schedules (
        app text, id text, line text not null, passed bigint not null, missed bigint not null default 0, newest_missed bigint,
        primary key (app, id)
    )
    """,
    """
    create table if not exists stepengine.schedule_times (
        app text, schedule text, at bigint, run text not null, missed bigint not null, status text not null,
        error text not null default '', primary key (app, schedule, at)
    )
    """,
)
GRANTS = (
    "grant usage on schema stepengine",
    "grant select, insert, update, delete on stepengine.schedules, stepengine.schedule_times",
)
PASSED = """
    insert into stepengine.schedules as known (app, id, line, passed) values (%(app)s, %(id)s, %(line)s, %(now)s)
    on conflict (app, id) do update set line = excluded.line,
        passed = case when known.line = excluded.line and known.passed <= excluded.passed then known.passed else excluded.passed end
    returning passed
"""
CLAIM = """
    insert into stepengine.schedule_times (app, schedule, at, run, missed, status)
    select %(app)s, %(id)s, %(at)s, %(run)s, %(missed)s, 'claimed'
    where not exists (select from stepengine.schedules where app = %(app)s and id = %(id)s and passed >= %(at)s)
    on conflict do nothing
"""
FORGET = """
    delete from stepengine.schedule_times where app = %(app)s and schedule = %(id)s and status <> 'claimed' and at < (
        select at from stepengine.schedule_times where app = %(app)s and schedule = %(id)s order by at desc limit 1 offset %(kept)s
    )
"""
MOVE = """
    update stepengine.schedules
    set passed = %(until)s, missed = missed + %(missed)s, newest_missed = coalesce(%(newest)s, newest_missed)
    where app = %(app)s and id = %(id)s and passed < %(until)s
"""
HELD = "select from stepengine.schedules where app = %s and id = %s for update"
ROW = "schedule, at, run, missed, status, error"
CLAIMED = f"select {ROW} from stepengine.schedule_times where app = %s and status = 'claimed' order by at"  # noqa: S608
MARK = "update stepengine.schedule_times set status = %s, error = %s where app = %s and schedule = %s and at = %s"
LAST = f"select distinct on (schedule) {ROW} from stepengine.schedule_times where app = %s order by schedule, at desc"  # noqa: S608
KNOWN = "select id, passed, missed, newest_missed from stepengine.schedules where app = %s"


async def create_schedule_tables(connection: Any, *, role: str | None = None) -> None:
    """Create the missing tables of schedules, and let *role* use them; without the right to do so, log it and return."""
    await create_missing_tables(
        connection,
        "the tables of schedules",
        lock="stepengine-schedules",
        exists_query=THERE,
        tables=TABLES,
        grants=GRANTS,
        role=role,
    )


class DatabaseBook:
    """
    The started times of a deployment's schedules: a ``ScheduleBook`` in its database. Its methods block.

    Args:
        url: The database.
        app: The deployment's name.

    Raises:
        JournalError: by each call, when the database or its tables cannot be used.
    """

    def __init__(self, url: str, *, app: str) -> None:
        self._url = url
        self._app = app

    def register_and_get_decided_times(self, lines: Mapping[str, str], now: datetime) -> dict[str, datetime]:
        """Register schedules and return until when each was decided; see ``ScheduleBook.register_and_get_decided_times``."""
        with self._connect() as own:
            known = {
                id_: own.execute(
                    PASSED, {"app": self._app, "id": id_, "line": line, "now": seconds_from_time(now)}
                ).fetchone()
                for id_, line in sorted(lines.items())
            }
        return {id_: time_from_seconds(row[0]) for id_, row in known.items()}

    def claim_time(self, schedule: str, at: datetime, *, run: str, missed: tuple[datetime, ...] = ()) -> bool:
        """Claim a time; return whether it was unclaimed. Earlier times are decided with it, and the oldest recorded ones deleted."""
        given = {"app": self._app, "id": schedule}
        with self._connect() as own:
            own.execute(HELD, (self._app, schedule))
            claimed = own.execute(
                CLAIM, {**given, "at": seconds_from_time(at), "run": run, "missed": len(missed)}
            ).rowcount
            _advance_decided_time(own, given, at, missed if claimed else ())
            own.execute(FORGET, {**given, "kept": KEPT_TIMES})
        return bool(claimed)

    def skip_times_until(self, schedule: str, until: datetime, *, missed: tuple[datetime, ...] = ()) -> bool:
        """Skip all times up to *until*; return whether this had not been decided before."""
        with self._connect() as own:
            return _advance_decided_time(own, {"app": self._app, "id": schedule}, until, missed)

    def load_unstarted_claims(self) -> tuple[ClaimedTime, ...]:
        """Return the times that were claimed but not reported as submitted."""
        with self._connect() as own:
            return tuple([claimed_time_from_row(row) for row in own.execute(CLAIMED, (self._app,)).fetchall()])

    def set_run_status(self, schedule: str, at: datetime, status: str, error: str = "") -> None:
        """Record the status and the error of the run of a claimed time."""
        with self._connect() as own:
            own.execute(MARK, (status, error.replace("\0", ""), self._app, schedule, seconds_from_time(at)))

    def load_known_schedules(self) -> dict[str, KnownSchedule]:
        """Return the recorded state of each schedule by id, deleted ones included."""
        with self._connect() as own:
            lasts = {row[0]: claimed_time_from_row(row) for row in own.execute(LAST, (self._app,)).fetchall()}
            known = own.execute(KNOWN, (self._app,)).fetchall()
        return {
            id_: KnownSchedule(
                time_from_seconds(passed), missed, None if newest is None else time_from_seconds(newest), lasts.get(id_)
            )
            for id_, passed, missed, newest in known
        }

    @contextmanager
    def _connect(self) -> Iterator[Any]:
        """Yield a connection, and commit its changes after the block; raise ``JournalError`` if the database is unreachable."""
        try:
            with open_transaction(self._url) as own:
                yield own
        except DatabaseUnavailable as error:
            msg = f"the schedules of {self._app!r} cannot be read or written: {error}"
            raise JournalError(msg) from error


def _advance_decided_time(
    connection: Any, schedule_key: Mapping[str, str], until: datetime, missed: tuple[datetime, ...]
) -> bool:
    """
    Advance the time until which a schedule is decided and count its *missed* times; return False, without a change, if it is as late.

    Args:
        connection: A connection in a transaction.
        schedule_key: The deployment and the schedule, as ``app`` and ``id``.
        until: The new time.
        missed: The times that were not started.

    Returns:
        ``False``, with nothing changed, if the schedule was decided until then or longer.
    """
    newest = seconds_from_time(missed[-1]) if missed else None
    moved = connection.execute(
        MOVE, {**schedule_key, "until": seconds_from_time(until), "missed": len(missed), "newest": newest}
    )
    return bool(moved.rowcount)
