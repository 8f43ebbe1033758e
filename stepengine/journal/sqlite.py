"""
``SqliteJournal``: many runs in one file.

The lines are those of a file journal, one row each. WAL and ``synchronous=FULL``: a commit survives a power cut, and no
partial record is ever seen. SQLite lets one writer at a time in, so the runs of a process share one, and a transaction stores
what all of them have ready; each run has one owner, by a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepengine.data.alike import list_names
from stepengine.errors import JournalError, JournalMissing, JournalWriteFailed
from stepengine.journal.follower import JournalPosition, OffsetPosition
from stepengine.journal.journal_files import (
    create_file,
    format_names_with_verb,
    is_locked,
    lock_file,
    make_missing_file_error,
    make_private,
    make_private_folder,
    make_unusable_error,
    path_exists,
    read_file_stamp,
    require_regular_file,
    suggest_names,
)
from stepengine.journal.line_journal import LineJournal, LineWriter, LockedStore
from stepengine.journal.line_reader import Reading, read_lines
from stepengine.journal.locked_file import LockedFile, open_closing_idle_files
from stepengine.journal.mailbox import Mailbox
from stepengine.journal.sqlite_mailbox import SqliteMailbox, delete_mailbox
from stepengine.journal.store import Journal, WakePlace, Writer
from stepengine.workspace.atomic import sync_folder
from stepengine.workspace.file_formats import check_own_database
from stepengine.workspace.paths import to_path
from stepengine.workspace.write_ahead import LOG_FILES, Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

MAX_RUN_ID_CHARS = 64
"""Room for a UUID and a prefix; it is part of the primary key of each line."""
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The number of a line is how many bytes of its run are before it.
SCHEMA = "CREATE TABLE IF NOT EXISTS lines (run TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID"
INSERT = "INSERT INTO lines VALUES (?, ?, ?)"
BUSY_SECONDS = 5.0
"""A commit takes milliseconds, so that many writers get their turn; Python's sqlite3 waits as long by default."""


class SqliteJournal(LineJournal):
    """
    A run in an SQLite file of many runs.

    ``SqliteJournal(path)`` is the store. Each run recorded into it gets a journal of its own, ``result.journal``.
    ``SqliteJournal(path, run=id)`` is the journal of one run.

    Args:
        path: The file.
        run: The id of one run; ``None`` for the store.
        options: See ``Journal``.
    """

    def __init__(self, path: str | Path, run: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._options = options
        self.path = to_path(path, "SqliteJournal(path)")
        self.folder = self.path.parent
        if run is not None and RUN_ID.fullmatch(run) is None:
            msg = f"{run!r} is not a run id; one has 1 to 64 letters, digits, hyphens and underscores"
            raise JournalError(msg)
        self.run = run

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r}, run={self.run!r})"

    @property
    def name(self) -> str:
        """The journal's name for messages."""
        return str(self.path) if self.run is None else f"run {self.run!r} in {self.path}"

    @property
    def address(self) -> str:
        """The file and the run, as ``RUNS.db#RUN``; the file alone before the first run."""
        return str(self.path) if self.run is None else f"{self.path}#{self.run}"

    def wake_place(self) -> WakePlace | None:
        """Return where the wake time of the run is stored: for a store, of the first run in the file; ``None`` without a run."""
        run = self.run or next(iter(self.runs()), None)
        return None if run is None else WakePlace(self.path, run)

    def runs(self, prefix: str = "") -> list[str]:
        """Return the sorted ids of the runs in the database file; only those that start with *prefix*."""
        if not path_exists(self.path):
            return []
        with _open_for_reading(self.path) as database:
            if not _has_lines_table(database):
                return []
            # All characters of an id sort before the tilde.
            # By a range and not by LIKE: the index serves a range, and `%` and `_` in an id are letters.
            found = database.execute(
                "SELECT DISTINCT run FROM lines WHERE run >= ? AND run < ? ORDER BY run", (prefix, f"{prefix}~")
            )
            return [row[0] for row in found]

    def is_there(self) -> bool:
        """Return whether the file exists and holds the run."""
        return path_exists(self.path) and (self.run is None or self.run in self.runs(self.run))

    def is_held(self) -> bool:
        """Return whether the run is locked."""
        try:
            return is_locked(_make_lock_path(self.path, self.path.stat(), self._get_bound_or_only_run()))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise make_unusable_error(self.path, error) from error

    def make_missing_error(self) -> JournalMissing:
        """Return the error for a run that the file lacks; it names the runs in the file, or files in the folder."""
        known = self.runs() if path_exists(self.path) else []
        if not known:
            return make_missing_file_error(self.path)
        near = suggest_names(self.run or "", known)
        msg = f"there is no run {self.run!r} in {self.path}; in that file {format_names_with_verb(near, len(known))}"
        return JournalMissing(msg, path=str(self.path), beside=near)

    def bind_run(self, run: str) -> Journal:
        """Return the journal of one run, or this journal if it is bound to a run."""
        return self if self.run is not None else SqliteJournal(self.path, run, **self._options)

    def read_bytes(self, start: int) -> bytes:
        """Return the stored lines of this run from an offset on."""
        return self.read_piece(start, sys.maxsize)

    def read_piece(self, start: int, most: int) -> bytes:
        """Return at most *most* bytes of this run from offset *start* on."""
        run = self._get_bound_or_only_run()
        if not path_exists(self.path):
            return b""
        with _open_for_reading(self.path) as database:
            return _read_run_bytes(database, run, start, most)

    def stamp(self) -> tuple[object, object]:
        """Return the file's device and inode, and sizes and times of the file and its log."""
        file, log = read_file_stamp(str(self.path)), read_file_stamp(f"{self.path}-wal")
        return file[0], (file, log)

    def append_bytes(self, data: bytes, at: int) -> None:
        """Append lines to this run in a transaction of their own."""
        run = self._get_bound_or_only_run()
        with _open_for_writing(self.path) as database:
            size = _read_run_size(database, run)
            if size != at:
                raise OSError(errno.ESTALE, f"another program wrote to it: it has {size} bytes, and {at} were expected")
            database.executemany(INSERT, _make_rows(run, at, data))

    def replace_bytes(self, data: bytes) -> None:
        """Replace the stored bytes of the run in one transaction."""
        run = self._get_bound_or_only_run()
        with _open_for_writing(self.path) as database:
            database.execute("DELETE FROM lines WHERE run = ?", (run,))
            database.executemany(INSERT, _make_rows(run, 0, data))

    def lock(self) -> Callable[[], None]:
        """Lock the run for writing, and return the function that unlocks it; a missing file is created."""
        return self.lock_run()[2]

    def lock_run(self) -> tuple[str, Database, Callable[[], None]]:
        """Lock the run; return its name, a database connection for this process, and a function that unlocks the run and closes the connection."""
        import sqlite3

        run = self._get_bound_or_only_run()
        try:
            status = ensure_database(self.path)
        except sqlite3.Error as error:
            raise _make_unusable_error(self.path, error) from error
        path = _make_lock_path(self.path, status, run)
        # A lock of the operating system beside the database, one for each run: SQLite locks the whole file, and a lock
        # in a table would outlive its process (replay:J38).
        held = LockedFile(path, _open_and_lock(path, self.path))
        database = Database.open(self.path, status, seconds=BUSY_SECONDS)

        def unlock() -> None:
            database.close()
            # The name goes before the lock does, so whoever gets a lock can tell whether its file is still the one.
            path.unlink(missing_ok=True)
            held.release()

        try:
            with database.read_connection() as connection:
                is_new = not _has_lines_table(connection)
            if is_new:
                with database.lock, database.write_transaction() as connection:
                    connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            unlock()
            raise _make_unusable_error(self.path, error) from error
        except BaseException:
            unlock()
            raise
        return run, database, unlock

    def make_start_position(self) -> JournalPosition:
        """Return a position at the start of this run."""
        return OffsetPosition(self.bind_run(self._get_bound_or_only_run()))

    def mailbox(self) -> Mailbox:
        """Return the mailbox of this run, in the same file."""
        return SqliteMailbox(self, self.path, self._get_bound_or_only_run, seconds=BUSY_SECONDS)

    def discard(self) -> None:
        """Delete the run and its mailbox."""
        run = self._get_bound_or_only_run()
        with _open_for_writing(self.path) as database:
            database.execute("DELETE FROM lines WHERE run = ?", (run,))
            delete_mailbox(database, run)

    def writer(self) -> Writer:
        """Lock the run and return its writer. A missing file is created."""
        return SqliteWriter(LockedRun(self))

    def make_backup(self) -> Journal:
        """Copy the run to a new one in the same file, such as ``RUN-before-1``."""
        run, number = self._get_bound_or_only_run(), 0
        with _open_for_writing(self.path) as database:
            while True:
                number += 1
                end = f"-before-{number}"
                name = f"{run[: MAX_RUN_ID_CHARS - len(end)]}{end}"
                if not _read_run_size(database, name):
                    break
            database.execute("INSERT INTO lines SELECT ?, number, line FROM lines WHERE run = ?", (name, run))
        return SqliteJournal(self.path, name, **self._options).copy_redaction_rules_from(self)

    def _get_bound_or_only_run(self) -> str:
        """Return the run that this journal is bound to, else the only run in the file; raise unless there is one."""
        if self.run is not None:
            return self.run
        known = self.runs()
        if not known:
            raise self.make_missing_error()
        if len(known) != 1:
            listed = list_names(known)
            msg = (
                f"{self.path} is a file of many runs; choose one with SqliteJournal(path, run=...). Its runs: {listed}"
            )
            raise JournalError(msg)
        return known[0]


class LockedRun(LockedStore):
    """
    One locked run of an SQLite file.

    Attributes:
        database: The connections to the file, which all runs of this process share.
    """

    journal: SqliteJournal

    def _lock(self) -> Callable[[], None]:
        """Lock the run, set ``database``, and return the function that unlocks the run."""
        self._run, self.database, unlock = self.journal.lock_run()
        return unlock

    def _read_records(self) -> tuple[Reading, int]:
        """Return the records of the run and the number of its bytes; raise if the database is unusable."""
        import sqlite3

        try:
            # By the connection that all runs share, and not by one for each.
            with self.database.read_connection() as connection:
                data, size = _read_run_bytes(connection, self._run), _read_run_size(connection, self._run)
        except (OSError, sqlite3.Error) as error:
            raise _make_unusable_error(self.journal.path, error) from error
        return read_lines(data, self.journal.name), size

    def append_bytes(self, data: bytes) -> None:
        """Append lines in a separate transaction; raise ``OSError`` if that fails."""
        import sqlite3

        try:
            self.insert_rows(self.make_rows(data))
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            raise OSError(
                errno.ENOSPC if is_full else errno.EIO, describe_database_error(error, self.database.seconds)
            ) from error

    def make_rows(self, data: bytes) -> list[Row]:
        """Return the table rows that append *data*, complete lines, to the run."""
        return _make_rows(self._run, self.size, data)

    def insert_rows(self, rows: Sequence[Row]) -> None:
        """Insert rows, which may be those of several runs, in one transaction."""
        with self.database.write_transaction() as connection:
            connection.executemany(INSERT, rows)


class SqliteWriter(LineWriter):
    """
    The writer of one run. The writer that gets the connection stores the announced lines of all runs, in one transaction.

    Args:
        store: The locked run.
    """

    store: LockedRun

    def __init__(self, store: LockedRun) -> None:
        self._is_announced = self._is_under_way = False
        super().__init__(store)

    def announce_commit(self) -> None:
        """Register the appended lines for the next commit of any writer."""
        if not self._is_announced:
            self._is_announced = True
            self.store.database.waiting.append(self)

    def commit(self) -> None:
        """
        Make everything appended durable.

        Raises:
            JournalWriteFailed: when that fails; the journal can still be opened, without uncommitted records.
        """
        self._require_usable()
        self.announce_commit()
        with self.store.database.lock:
            if self._lines and self._broken is None:
                self._store_announced_lines()
        self._require_usable()

    def _store_waiting_lines(self) -> None:
        """Store the waiting lines with those of all announced writers; raise if lines of this writer are lost."""
        # A loss that a commit has told of already is not told again: whoever closes does so in a `finally`, and the error
        # that ended the run would be covered.
        was_lost = self._is_lost
        # Nobody waits for the commits of others who has nothing in them.
        if self._lines or self._is_under_way:
            with self.store.database.lock:
                self._store_announced_lines()
        if self._is_lost and not was_lost and self._broken is not None:
            raise self._broken

    def _store_announced_lines(self) -> None:
        """Store the waiting lines of this and all announced writers; errors are per writer."""
        database = self.store.database
        writers = {self: None}
        while database.waiting:
            writers[database.waiting.popleft()] = None
        try:
            batches = [(one, b"".join(lines)) for one in writers if (lines := one.pop_lines_to_store())]
            if len(batches) > 1:
                self._store_in_one_transaction(batches)
            else:
                _store_each_separately(batches)
        finally:
            for one in writers:
                one.finish_storing()

    def _store_in_one_transaction(self, batches: Batches) -> None:
        """Store the lines of all writers; mark them as broken on failure, or try each alone if one may be the cause."""
        import sqlite3

        # What fails for all may be the fault of one: then each is tried by itself, so that a run with a record that is
        # too long does not end a hundred others.
        apart = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG)
        try:
            self.store.insert_rows([row for one, data in batches for row in one.store.make_rows(data)])
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in apart:
                _store_each_separately(batches)
                return
            why = describe_database_error(error, self.store.database.seconds)
            for one, _ in batches:
                one.mark_broken(one.store.make_write_error(why, error))
        else:
            for one, data in batches:
                one.store.size += len(data)

    def pop_lines_to_store(self) -> list[bytes]:
        """Remove and return the lines to be stored now; the caller must call ``finish_storing`` afterwards."""
        # First of all: whoever closes this writer sees lines that wait, or that they are under way.
        self._is_under_way = True
        self._is_announced = False
        return self.pop_waiting_lines()

    def finish_storing(self) -> None:
        """Record that no store is running any more."""
        self._is_under_way = False


Batches: TypeAlias = "list[tuple[SqliteWriter, bytes]]"
"""Writers, each with the lines that it has to store."""


def _store_each_separately(batches: Batches) -> None:
    """Store the lines of each writer in a transaction of its own; a failure loses the lines of that writer alone."""
    for one, data in batches:
        try:
            one.store.append(data)
        except JournalError as error:
            one.mark_broken(error)


def _make_lock_path(database: Path, status: os.stat_result, run: str) -> Path:
    """Return the path of a run's lock file, which is next to the database and named after its device and inode."""
    # Named after the file and not after one of its names, so that whoever finds the file finds the lock.
    return database.with_name(f".{status.st_dev:x}-{status.st_ino:x}.{run}.lock")


def _open_and_lock(path: Path, database: Path) -> int:
    """Return the open and locked file at *path*, which is still the one with that name."""
    while True:
        descriptor = open_closing_idle_files(path)
        try:
            lock_file(descriptor, database)
            # The process that had the lock may have deleted the file.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def ensure_database(path: Path) -> os.stat_result:
    """
    Return the file status of the database at *path*, made private to its owner; a missing one is created.

    Raises:
        JournalError: when the path is a symbolic link or not a regular file, or the file cannot be created; when the file has two
            names: SQLite stores its log next to the name, so a process that uses the other name would damage the file.
        sqlite3.DatabaseError: when the file is not a database of stepengine; it is not changed.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        require_regular_file(path, status)
        if status.st_nlink > 1:
            msg = f"{path} has {status.st_nlink} names (hard links), and SQLite allows one; remove the others or copy the file"
            raise JournalError(msg)
        check_own_database(path)
        for one in (path, *[path.with_name(path.name + end) for end in LOG_FILES]):
            with contextlib.suppress(FileNotFoundError):
                require_regular_file(one, one.lstat())
                make_private(one)
        return status
    make_private_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.close(create_file(path))
        try:
            sync_folder(path.parent)
        except OSError as error:
            raise make_unusable_error(path, error) from error
    return ensure_database(path)


def _make_unusable_error(path: Path, error: Exception) -> JournalWriteFailed:
    msg = f"{path} cannot be used as a journal: {describe_database_error(error, BUSY_SECONDS)}; nothing was run"
    return JournalWriteFailed(msg)


@contextlib.contextmanager
def _open_for_reading(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a read-only connection to an existing database; raise ``JournalError`` if it cannot be used."""
    import sqlite3

    from stepengine.workspace.guarded_database import open_guarded_database, raise_interrupt_cause

    try:
        # Looked at by name and never opened: closing another descriptor of the file would give up SQLite's own locks on it.
        status = path.lstat()
        require_regular_file(path, status)
        database = open_guarded_database(path, seconds=BUSY_SECONDS, read_only=True)
    except (OSError, sqlite3.Error) as error:
        raise _make_unusable_error(path, error) from error
    try:
        _check_not_replaced(path, status)
        with raise_interrupt_cause(database):
            yield database
    except sqlite3.Error as error:
        msg = f"{path} cannot be read as a journal: {describe_database_error(error, BUSY_SECONDS)}"
        raise JournalError(msg) from error
    finally:
        database.close()


@contextlib.contextmanager
def _open_for_writing(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield the connection that this process shares, in a write transaction; a missing file or table is created."""
    import sqlite3

    database: Database | None = None
    try:
        database = Database.open(path, ensure_database(path), seconds=BUSY_SECONDS)
        with database.lock, database.write_transaction() as connection:
            connection.execute(SCHEMA)
            yield connection
    except (OSError, sqlite3.Error) as error:
        raise _make_unusable_error(path, error) from error
    finally:
        if database is not None:
            database.close()


def _check_not_replaced(path: Path, status: os.stat_result) -> None:
    """Raise if another file than that of *status* is at the path."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(status, path.lstat()):
            return
    msg = f"{path} was moved, deleted or replaced while it was opened; nothing was run"
    raise JournalError(msg)


def _has_lines_table(database: sqlite3.Connection) -> bool:
    """Return whether the file has its table; its creator may have been killed before."""
    from stepengine.workspace.guarded_database import has_table

    return has_table(database, SCHEMA)


Row: TypeAlias = "tuple[str, int, bytes]"
"""A run, how many bytes of it are before a line, and the line."""


def _make_rows(run: str, at: int, data: bytes) -> list[Row]:
    """Return the rows of lines that begin at an offset."""
    rows = []
    for line in BytesIO(data):
        rows.append((run, at, line))
        at += len(line)
    return rows


def _read_run_size(database: sqlite3.Connection, run: str) -> int:
    """Return the offset behind the last line of a run."""
    found = database.execute(
        "SELECT number + length(line) FROM lines WHERE run = ? ORDER BY number DESC LIMIT 1", (run,)
    ).fetchone()
    return found[0] if found else 0


def _read_run_bytes(database: sqlite3.Connection, run: str, start: int = 0, max_size: int = sys.maxsize) -> bytes:
    """Return at most *max_size* bytes of a run from offset *start* on."""
    if not _has_lines_table(database):
        return b""
    rows = database.execute(
        "SELECT number, line FROM lines WHERE run = :run AND number >= "
        "(SELECT coalesce(max(number), 0) FROM lines WHERE run = :run AND number <= :start) ORDER BY number",
        {"run": run, "start": start},
    )
    lines, before = list[bytes](), 0
    for number, line in _check_row_order(rows):
        if number >= start + max_size:
            break
        before = before if lines else max(0, start - number)
        lines.append(line)
    return b"".join(lines)[before : before + max_size]


def _check_row_order(rows: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, bytes]]:
    """
    Yield the number and line of each row; raise if numbers do not increase; a line that is not bytes becomes an empty one.

    Raises:
        sqlite3.DatabaseError: when a number is not higher than the one before: a damaged file can repeat its rows for ever.
    """
    last: int | None = None
    for number, line in rows:
        if type(number) is not int or (last is not None and number <= last):
            import sqlite3

            msg = f"it is damaged: the row {number!r} of a run is out of order"
            raise sqlite3.DatabaseError(msg)
        last = number
        yield number, line if isinstance(line, bytes) else b"\n"
