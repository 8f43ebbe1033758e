"""
The wake index of a folder or database: its sleeping runs and their wake times.

A waker reads it instead of ten thousand journals. The journals decide: an index that is missing, damaged or of another version is rebuilt
from them, and a wrong row only costs one read of its journal.

So that every run wakes: record a run *before* its suspension is durable, and check its mailbox once *after* that. Notify the index of a
mailbox message *after* it was sent, also if it was sent before.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
from attrs import frozen

from stepengine.errors import InputError, JournalError, JournalWriteFailed
from stepengine.journal.mailbox import MailboxMessageKind
from stepengine.journal.records import UNREADABLE
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import BUSY_SECONDS, ensure_database
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.write_ahead import LOG_FILES, Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

logger = logging.getLogger("stepengine.journal")

WAKING = ".stepengine.waking"
"""The name of the index in a folder of journals."""
INDEX_VERSION = 1
"""An index of another version is rebuilt from the journals."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)
PAST_MICROSECONDS = 0
"""A due time that has passed, in microseconds since 1970: the run is resumed at the next look."""
WAITED_FOR: dict[MailboxMessageKind, str] = {"message": "message", "answer": "question"}
"""What a run waits for that a mailbox message of this kind wakes; the other kinds wake every run."""
MAX_NAME_CHARS = 1_000
"""File names have at most 255 bytes and ids of agents are short; a longer name is damage or an attack."""
MAX_KINDS = 20
"""A run waits for fewer kinds of things than this; a longer list is damage."""
DUE_RUNS = 100
"""Runs that one look resumes: those that are due later are found by the next look."""
MAX_ATTEMPTS = 3
"""Another process may remove the index once, and damage is removed once; a third failure means that somebody keeps doing so."""
TABLES = (
    "CREATE TABLE waking (version INTEGER NOT NULL, is_whole INTEGER NOT NULL)",
    "CREATE TABLE sleeping (run TEXT PRIMARY KEY, wakes_at INTEGER, due INTEGER, kinds TEXT NOT NULL, agent TEXT NOT NULL) WITHOUT ROWID",
    # Of runs that wait for no time there is nothing in it, so that a look at it costs what is due.
    "CREATE INDEX sleeping_by_time ON sleeping (due, run) WHERE due IS NOT NULL",
)
ROW = "run, wakes_at, kinds, agent"
DUE = f"SELECT {ROW} FROM sleeping WHERE due <= ? ORDER BY due, run LIMIT ?"  # noqa: S608 - of names of ours
NEXT = "SELECT MIN(due) FROM sleeping WHERE due IS NOT NULL"


def _to_frozenset(words: Iterable[str]) -> frozenset[str]:
    return frozenset(words)


@frozen
class Sleeping:
    """
    A run that waits.

    Attributes:
        run: The name of the journal's file in the folder, or of the run in the database.
        wakes_at: The wake time; ``None`` for a run that waits for no time.
        kinds: The kinds of its waits: ``"question"``, ``"message"``, ``"child"``, ``"time"``. ``"process"`` marks a running run,
            which is resumed from ``wakes_at`` on if its process has ended.
        agent_id: The id of the root's agent.
    """

    run: str
    wakes_at: datetime | None = None
    kinds: frozenset[str] = attrs.field(default=frozenset(), converter=_to_frozenset)
    agent_id: str = ""

    def __attrs_post_init__(self) -> None:
        if not 1 <= len(self.run) <= MAX_NAME_CHARS or len(self.agent_id) > MAX_NAME_CHARS:
            msg = f"the name of a run and the id of its agent may have at most {MAX_NAME_CHARS:,} characters"
            raise InputError(msg)
        if self.wakes_at is not None and self.wakes_at.tzinfo is None:
            msg = f"wakes_at needs a time zone, and {self.wakes_at} has none"
            raise InputError(msg)
        if len(self.kinds) > MAX_KINDS or not all(
            kind.isidentifier() and len(kind) < MAX_NAME_CHARS for kind in self.kinds
        ):
            msg = f"kinds must be at most {MAX_KINDS} words such as question, time, message and child"
            raise InputError(msg)


Made = TypeVar("Made")
Rebuild = Callable[[], Iterable[Sleeping]]
"""Reads the journals, and gives those runs that sleep."""


class WakeIndex:
    """
    The sleeping runs of a folder or a database, usable by several processes and threads at once; made by ``for_store``.

    Every method raises ``JournalWriteFailed`` when the disk or the database cannot be used. Methods block for the disk, so do not
    call them in an event loop. The index is a context manager; ``close`` closes the connection.

    Args:
        path: The SQLite file.
        rebuild: Returns the sleeping runs, to build a missing index.
        is_own: Whether the file contains only the index, so that a damaged file may be removed.
    """

    def __init__(self, path: Path, rebuild: Rebuild, *, is_own: bool) -> None:
        self._path = path
        self._rebuild = rebuild
        self._is_own = is_own
        self._database: Database | None = None
        self._inode = (0, 0)
        self._using = Lock()

    @classmethod
    def for_store(cls, store_path: str | Path, rebuild: Rebuild) -> Self:
        """
        Return the index of a folder or an SQLite file of journals. It is created on first use.

        Args:
            store_path: The folder or the file.
            rebuild: Reads the journals and returns the sleeping runs; called if the index is missing or damaged. It must not use
                the index.

        Raises:
            JournalError: when *store_path* is neither.
        """
        path = Path(store_path)
        if path.is_dir():
            return cls(path / WAKING, rebuild, is_own=True)
        if parse_database_path(str(store_path)) == (str(store_path), ""):
            return cls(path, rebuild, is_own=False)
        msg = f"{str(store_path)!r} is neither a folder nor a database of journals, such as runs.db"
        raise JournalError(msg)

    def __repr__(self) -> str:
        return f"WakeIndex({str(self._path)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; may be called twice. Later calls open another one."""
        with self._using:
            self._close_database()

    def record_sleep(self, run_name: str, wakes_at: datetime | None, kinds: Iterable[str], agent_id: str) -> None:
        """
        Insert or replace the wake time of a run.

        Raises:
            InputError: for a time without its zone, or names that are too long.
        """
        run = Sleeping(run_name, wakes_at, kinds, agent_id)
        self._write_with_retries(lambda database: _insert_runs(database, [run]))

    def remove_run(self, run_name: str) -> None:
        """Remove a run from the index, if it is there."""
        self._write_with_retries(
            lambda database: database.execute("DELETE FROM sleeping WHERE run = ?", (run_name,)).rowcount
        )

    def postpone(self, run_name: str, until: datetime) -> None:
        """Set the time when a run is due next, such as one that could not be woken, so that it does not block others."""
        given = (_to_microseconds(until), run_name)
        self._write_with_retries(
            lambda database: database.execute("UPDATE sleeping SET due = ? WHERE run = ?", given).rowcount
        )

    def wake_for_message(self, run_name: str, kind: MailboxMessageKind) -> bool:
        """
        Make a sleeping run due at once if it waits for a mailbox message of this kind; return whether it does.

        Messages that end or steer a run make any sleeping run due.
        """

        def make_due_if_waiting(database: sqlite3.Connection) -> bool:
            row = database.execute("SELECT kinds FROM sleeping WHERE run = ?", (run_name,)).fetchone()
            wanted = WAITED_FOR.get(kind)
            if row is None or (wanted is not None and wanted not in str(row[0]).split()):
                return False
            database.execute("UPDATE sleeping SET due = ? WHERE run = ?", (PAST_MICROSECONDS, run_name))
            return True

        return self._write_with_retries(make_due_if_waiting)

    def list_due(self, now: datetime, limit: int = DUE_RUNS) -> list[Sleeping]:
        """Return at most *limit* runs whose wake time is *now* or earlier, the earliest first."""
        given = (_to_microseconds(now), limit)
        return self._read_with_retries(
            lambda database: [_sleeping_from_row(row) for row in database.execute(DUE, given)]
        )

    def find_next_wake_time(self) -> datetime | None:
        """Return the earliest wake time, a time long ago for a run that is due at once, or ``None`` if no run waits for a time."""
        return self._read_with_retries(lambda database: _parse_time(database.execute(NEXT).fetchone()[0]))

    def list_all(self) -> list[Sleeping]:
        """Return all sleeping runs, by name."""
        rows = f"SELECT {ROW} FROM sleeping ORDER BY run"  # noqa: S608 - of names of ours
        return self._read_with_retries(lambda database: [_sleeping_from_row(row) for row in database.execute(rows)])

    def rebuild(self) -> None:
        """Rebuild the index from the journals."""
        with self._using:
            self._run_with_retries(lambda database: self._rebuild_index(database, _ANY, "a caller requested it"))

    # --- the file -----------------------------------------------------------------------------------------------------

    def _write_with_retries(self, act: Callable[[sqlite3.Connection], Made]) -> Made:
        """Run *act* in a write transaction on the index, and return its result. A missing or damaged index is rebuilt first."""

        def write(database: Database) -> Made:
            with database.lock, database.write_transaction() as connection:
                return act(connection)

        with self._using:
            return self._run_with_retries(write)

    def _read_with_retries(self, act: Callable[[sqlite3.Connection], Made]) -> Made:
        """Run *act* in a read transaction on the index, and return its result. A missing or damaged index is rebuilt first."""

        def read(database: Database) -> Made:
            with database.read_connection() as connection:
                return act(connection)

        with self._using:
            return self._run_with_retries(read)

    def _run_with_retries(self, act: Callable[[Database], Made]) -> Made:
        """Run *act* on a complete index and return its result; retry at most twice if the index was damaged or its file replaced."""
        import sqlite3

        for _ in range(MAX_ATTEMPTS):
            try:
                database = self._open_database()
                self._ensure_complete(database)
                made = act(database)
                if self._is_same_file():
                    return made
            except (_DamagedRow, sqlite3.Error) as error:
                if not _is_damage(error):
                    raise self._make_unusable_error(error) from error
                self._discard_damaged_index(error)
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise self._make_unusable_error(error) from error
            self._close_database()
        msg = f"the wake index {self._path} was repeatedly removed or damaged during its use"
        raise JournalWriteFailed(msg)

    def _open_database(self) -> Database:
        """Return the open database, opened or created if necessary."""
        if self._database is not None:
            return self._database
        status = ensure_database(self._path)
        self._inode = status.st_dev, status.st_ino
        self._database = Database.open(self._path, status, seconds=BUSY_SECONDS)
        return self._database

    def _is_same_file(self) -> bool:
        """Return whether the path still names the file that was opened."""
        try:
            status = os.lstat(self._path)
        except OSError:
            return False
        return (status.st_dev, status.st_ino) == self._inode

    def _close_database(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _ensure_complete(self, database: Database) -> None:
        """Build the index if it is missing, of another version or incomplete."""
        with database.read_connection() as connection:
            state = _read_index_state(connection)
        if state is None:
            self._rebuild_index(database, None, "it was missing")
        elif state == (INDEX_VERSION, 0):
            self._fill_from_journals(database, "it was incomplete")
        elif state != (INDEX_VERSION, 1):
            self._rebuild_index(database, state, f"it was of version {state[0]}")

    def _rebuild_index(self, database: Database, damaged_state: object, reason: str) -> None:
        """Create the tables again and fill them, unless another process has changed them since."""
        with database.lock, database.write_transaction() as connection:
            # Another process may have made it since: what was noted in that one is not to be lost.
            if damaged_state is _ANY or _read_index_state(connection) == damaged_state:
                _recreate_tables(connection)
        self._fill_from_journals(database, reason)

    def _fill_from_journals(self, database: Database, reason: str) -> None:
        """Add the sleeping runs of all journals, mark the index as complete, and log why; present rows stay."""
        # Nobody waits meanwhile: what others note is newer than what is read here.
        found = list(self._rebuild())
        with database.lock, database.write_transaction() as connection:
            _insert_runs(connection, found, "IGNORE")
            connection.execute("UPDATE waking SET is_whole = 1")
        logger.info("rebuilt the wake index %s with %d sleeping runs: %s", self._path, len(found), reason)

    def _discard_damaged_index(self, error: Exception) -> None:
        """Remove an unusable index; in a file of journals create only its tables again, and raise if that fails."""
        import sqlite3

        # As a text: a handler that keeps the error would keep its query, and so the database open.
        logger.warning("the wake index %s cannot be used, and is rebuilt: %s", self._path, str(error))
        if not self._is_own:
            try:
                database = self._open_database()
                with database.lock, database.write_transaction() as connection:
                    _recreate_tables(connection)
            except (OSError, sqlite3.Error) as again:
                raise self._make_unusable_error(again) from error
        elif self._is_same_file():
            self._close_database()
            for end in ("", *LOG_FILES):
                self._path.with_name(self._path.name + end).unlink(missing_ok=True)

    def _make_unusable_error(self, error: Exception) -> JournalWriteFailed:
        return JournalWriteFailed(
            f"the wake index {self._path} cannot be used: {describe_database_error(error, BUSY_SECONDS)}"
        )


_ANY = object()


class _DamagedRow(Exception):
    """A row of the index is invalid."""


def _is_damage(error: Exception) -> bool:
    """Return whether an error means that the index is damaged, not that the disk failed or is busy."""
    import sqlite3

    faults = (
        sqlite3.SQLITE_ERROR,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_CONSTRAINT,
    )
    return isinstance(error, _DamagedRow) or getattr(error, "sqlite_errorcode", 0) & 0xFF in faults


def _read_index_state(database: sqlite3.Connection) -> tuple[object, object] | None:
    """Return the version of the index and whether it is complete, or ``None`` if there is none."""
    import sqlite3

    try:
        state: tuple[object, object] | None = database.execute("SELECT version, is_whole FROM waking").fetchone()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_ERROR:
            raise
        return None
    return state


def _recreate_tables(database: sqlite3.Connection) -> None:
    """Drop and create the tables of the index, marked as incomplete."""
    for name in ("waking", "sleeping"):
        database.execute(f"DROP TABLE IF EXISTS {name}")
    for table in TABLES:
        database.execute(table)
    database.execute("INSERT INTO waking VALUES (?, 0)", (INDEX_VERSION,))


def _insert_runs(database: sqlite3.Connection, runs: Iterable[Sleeping], on_conflict: str = "REPLACE") -> None:
    """Insert rows for runs; *on_conflict* is the SQL word for rows that are present: ``REPLACE`` or ``IGNORE``."""
    rows = []
    for one in runs:
        wakes_at = None if one.wakes_at is None else _to_microseconds(one.wakes_at)
        rows.append((one.run, wakes_at, wakes_at, " ".join(sorted(one.kinds)), one.agent_id))
    database.executemany(f"INSERT OR {on_conflict} INTO sleeping VALUES (?, ?, ?, ?, ?)", rows)  # noqa: S608 - a word of ours


def _to_microseconds(when: datetime) -> int:
    """Return a time in microseconds since 1970, as the index stores it; raise if it has no time zone."""
    if when.tzinfo is None:
        msg = f"a time needs a time zone, and {when} has none"
        raise InputError(msg)
    return (when - EPOCH) // MICROSECOND


def _parse_time(microseconds: Any) -> datetime | None:
    """Return a stored time; raise ``_DamagedRow`` if it is invalid."""
    try:
        return None if microseconds is None else EPOCH + microseconds * MICROSECOND
    except UNREADABLE as error:
        msg = f"{type(error).__name__}: {error}"
        raise _DamagedRow(msg) from error


def _sleeping_from_row(row: tuple[Any, ...]) -> Sleeping:
    """Return the sleeping run in a row; raise ``_DamagedRow`` if it is invalid."""
    run, wakes_at, kinds, agent = row
    try:
        return Sleeping(run, _parse_time(wakes_at), kinds.split(), agent)
    except (InputError, *UNREADABLE) as error:
        msg = f"{type(error).__name__}: {error}"
        raise _DamagedRow(msg) from error
