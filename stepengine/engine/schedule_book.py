"""
``ScheduleBook``: which times of which schedules were started, beside the runs.

For a folder of journals it is a hidden SQLite file in it, for an SQLite file of runs two tables in that file. A time is claimed in one
transaction, so that of any number of processes one starts it. Known here are ids and moments; what a schedule is stands in
``schedules``, who starts runs in ``scheduler``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stepengine.errors import JournalError
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import BUSY_SECONDS, ensure_database
from stepengine.workspace.write_ahead import Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

FILE = ".schedules.db"
KEPT_TIMES = 1_000
"""Three years of a daily schedule, and half a day of one that starts each minute; older times are never started again."""
CLAIMED, STARTED = "claimed", "started"
"""The states of a time before its run has ended: whether there is a journal is not known, or is."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS schedules (
    id TEXT PRIMARY KEY, line TEXT NOT NULL, passed INTEGER NOT NULL, missed INTEGER NOT NULL DEFAULT 0, newest_missed INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS schedule_times (
    schedule TEXT NOT NULL, at INTEGER NOT NULL, run TEXT NOT NULL, missed INTEGER NOT NULL, status TEXT NOT NULL,
    error TEXT NOT NULL DEFAULT '', PRIMARY KEY (schedule, at)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS schedule_times_open ON schedule_times (schedule, at) WHERE status = 'claimed'
"""


@frozen
class ClaimedTime:
    """
    A time of a schedule that a process claimed.

    Attributes:
        schedule: The schedule's id.
        at: The time, in UTC.
        run: The name of the run's journal: the file without its ending, or the run in the SQLite file.
        missed: How many times before it were told as missed with it.
        status: How the run ended, such as ``completed``; ``failed`` also when it could not begin. Before that ``claimed``, or
            ``started`` once it is known that there is a journal.
        error: Why it failed.
    """

    schedule: str
    at: datetime
    run: str
    missed: int
    status: str
    error: str = ""


@frozen
class KnownSchedule:
    """
    The recorded state of a schedule: until when it is decided, its missed times, and the last claimed one.

    Attributes:
        passed: Until when its times were decided about.
        missed: How many times were ever missed.
        newest_missed: The newest of them.
        last: The newest time that was claimed.
    """

    passed: datetime
    missed: int = 0
    newest_missed: datetime | None = None
    last: ClaimedTime | None = None


class ScheduleBook:
    """
    The database of started schedule times, for runs that are recorded into one folder or one SQLite file.

    Every call may wait for other processes, at most five seconds for one that does nothing.

    Args:
        runs: A folder of journals, or an SQLite file of runs, such as ``RUNS.db``. It is made when there is none.

    Raises:
        JournalError: by each call, when the file cannot be used.
    """

    def __init__(self, runs: str | Path) -> None:
        self.path = Path(runs) if parse_database_path(str(runs)) is not None else Path(runs) / FILE
        self._status: os.stat_result | None = None

    def register_and_get_decided_times(self, lines: Mapping[str, str], now: datetime) -> dict[str, datetime]:
        """
        Return up to when each schedule's times are decided; for a new or changed schedule, store and return *now*.

        If the clock was set back, the times of a schedule count from *now* again. Times that were started before are claimed and are
        not started twice.

        Args:
            lines: The line and time zone of each schedule, by id.
            now: The current time.
        """
        if not lines:
            return {}
        moment, found = seconds_from_time(now), dict[str, int]()
        with self._write_transaction() as database:
            for id_, line in lines.items():
                row = database.execute("SELECT line, passed FROM schedules WHERE id = ?", (id_,)).fetchone()
                if row is not None and row[0] == line and row[1] <= moment:
                    found[id_] = row[1]
                    continue
                found[id_] = moment
                database.execute(
                    "INSERT INTO schedules (id, line, passed) VALUES (?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET line = excluded.line, passed = excluded.passed",
                    (id_, line, moment),
                )
        return {id_: time_from_seconds(number) for id_, number in found.items()}

    def claim_time(self, schedule: str, at: datetime, *, run: str, missed: tuple[datetime, ...] = ()) -> bool:
        """Claim a time; return whether it was unclaimed. Earlier times are decided with it, and the oldest recorded ones deleted."""
        with self._write_transaction() as database:
            begun = database.execute(
                # Whoever is slow comes with a time that another has reported as missed meanwhile.
                "INSERT INTO schedule_times (schedule, at, run, missed, status) SELECT ?, ?, ?, ?, ? "
                "WHERE NOT EXISTS (SELECT 1 FROM schedules WHERE id = ? AND passed >= ?) ON CONFLICT DO NOTHING",
                (schedule, seconds_from_time(at), run, len(missed), CLAIMED, schedule, seconds_from_time(at)),
            )
            _advance_decided_time(database, schedule, at, missed if begun.rowcount else ())
            database.execute(
                "DELETE FROM schedule_times WHERE schedule = ? AND status <> ? AND at < "
                "(SELECT at FROM schedule_times WHERE schedule = ? ORDER BY at DESC LIMIT 1 OFFSET ?)",
                (schedule, CLAIMED, schedule, KEPT_TIMES),
            )
            return bool(begun.rowcount)

    def skip_times_until(self, schedule: str, until: datetime, *, missed: tuple[datetime, ...] = ()) -> bool:
        """Skip all times up to *until*; return whether this had not been decided before."""
        with self._write_transaction() as database:
            return _advance_decided_time(database, schedule, until, missed)

    def load_unstarted_claims(self) -> tuple[ClaimedTime, ...]:
        """Return the times that were claimed but have no reported journal."""
        with self._read_transaction() as database:
            rows = database.execute(f"SELECT {ROW} FROM schedule_times WHERE status = 'claimed' ORDER BY at")  # noqa: S608 - constants
            return tuple([claimed_time_from_row(row) for row in rows])

    def set_run_status(self, schedule: str, at: datetime, status: str, error: str = "") -> None:
        """Record the status and the error of the run of a claimed time."""
        with self._write_transaction() as database:
            database.execute(
                "UPDATE schedule_times SET status = ?, error = ? WHERE schedule = ? AND at = ?",
                (status, error, schedule, seconds_from_time(at)),
            )

    def load_known_schedules(self) -> dict[str, KnownSchedule]:
        """Return the recorded state of each schedule by id, deleted ones included. No file is created."""
        if not self.path.exists():
            return {}
        with self._read_transaction() as database:
            known = database.execute("SELECT id, passed, missed, newest_missed FROM schedules").fetchall()
            newest = f"SELECT {ROW} FROM schedule_times WHERE schedule = ? ORDER BY at DESC LIMIT 1"  # noqa: S608 - constants
            lasts = {row[0]: database.execute(newest, (row[0],)).fetchone() for row in known}
        return {
            id_: KnownSchedule(
                time_from_seconds(passed),
                missed,
                None if latest is None else time_from_seconds(latest),
                None if lasts[id_] is None else claimed_time_from_row(lasts[id_]),
            )
            for id_, passed, missed, latest in known
        }

    @contextmanager
    def _write_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a writing transaction, with the tables created."""
        with self._open_database() as known, known.lock, known.write_transaction() as database:
            _create_tables(database)
            yield database

    @contextmanager
    def _read_transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a reading transaction; missing tables are created before."""
        with self._open_database() as known:
            with known.read_connection() as database:
                found = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'schedule_times_open'").fetchone()
            if found is None:
                with known.lock, known.write_transaction() as database:
                    _create_tables(database)
            with known.read_connection() as database:
                yield database

    @contextmanager
    def _open_database(self) -> Iterator[Database]:
        """Open the database for the block; create its file once, and raise its errors as ``JournalError``."""
        import sqlite3

        known: Database | None = None
        try:
            # Created once: after the file was deleted, an empty one in its place would start times again that were started.
            if self._status is None:
                self._status = ensure_database(self.path)
            known = Database.open(self.path, self._status, seconds=BUSY_SECONDS)
            yield known
        except (OSError, sqlite3.Error) as error:
            msg = f"{self.path} cannot store schedules: {describe_database_error(error, BUSY_SECONDS)}; nothing was started"
            raise JournalError(msg) from error
        finally:
            if known is not None:
                known.close()


ROW = "schedule, at, run, missed, status, error"


def _create_tables(database: sqlite3.Connection) -> None:
    for statement in SCHEMA.split(";"):
        database.execute(statement)


def _advance_decided_time(
    database: sqlite3.Connection, schedule: str, until: datetime, missed: tuple[datetime, ...]
) -> bool:
    """Set the time until which a schedule is decided, and count *missed*; return ``False`` if it was decided until then."""
    newest = seconds_from_time(missed[-1]) if missed else None
    moved = database.execute(
        "UPDATE schedules SET passed = ?, missed = missed + ?, newest_missed = coalesce(?, newest_missed) WHERE id = ? AND passed < ?",
        (seconds_from_time(until), len(missed), newest, schedule, seconds_from_time(until)),
    )
    return bool(moved.rowcount)


def claimed_time_from_row(row: tuple[str, int, str, int, str, str]) -> ClaimedTime:
    """Return the claimed time that a row of the table stores."""
    schedule, at, run, missed, status, error = row
    return ClaimedTime(schedule, time_from_seconds(at), run, missed, status, error)


def seconds_from_time(moment: datetime) -> int:
    """Return a time as it is stored: whole seconds since 1970, because schedules have no fractions of a second."""
    return int(moment.timestamp())


def time_from_seconds(number: int) -> datetime:
    """Return the time in UTC that was stored as *number*, in seconds since 1970."""
    return datetime.fromtimestamp(number, UTC)
