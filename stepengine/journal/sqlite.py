"""
``SqliteJournal``: many runs in one file.

The lines are those of a file journal, one row each. WAL and ``synchronous=FULL``: a commit survives a power cut, and no
partial record is ever seen. SQLite lets one writer at a time in, so the runs of a process share one, and a transaction stores
what all of them have ready; each run has one owner, by a lock that dies with its process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stepengine.data.alike import list_names
from stepengine.errors import JournalError, JournalMissing, JournalWriteFailed
from stepengine.journal.following import BytesBehind, ByteTail, Tail
from stepengine.journal.held import HeldFile, opened_with_room
from stepengine.journal.history import History
from stepengine.journal.mailbox import Mailbox
from stepengine.journal.places import (
    Reserve,
    check_place,
    is_locked,
    likely,
    listed,
    lock_file,
    made_folder,
    make_private,
    missing_file,
    opened_new,
    unusable,
)
from stepengine.journal.reading import first_of, read_lines
from stepengine.journal.records import Head, Record
from stepengine.journal.sqlite_mailbox import SqliteMailbox, forget_letters
from stepengine.journal.store import Journal, LineWriter, Writer
from stepengine.workspace.atomic import sync_folder
from stepengine.workspace.write_ahead import Database, reason

if TYPE_CHECKING:
    import sqlite3

__all__ = ("BESIDE", "BUSY_SECONDS", "SqliteJournal", "made_database")

MAX_RUN_ID_CHARS = 64
"""Room for a UUID and a prefix; it is part of the primary key of each line."""
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
SCHEMA = "CREATE TABLE IF NOT EXISTS lines (run TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID"
BUSY_SECONDS = 5.0
"""A commit takes milliseconds, so that many writers get their turn; Python's sqlite3 waits as long by default."""
BESIDE = ("-wal", "-shm")


class SqliteJournal(Journal):
    """
    A run in an SQLite file that holds many.

    ``SqliteJournal(path)`` is the store: record any number of runs into it, each becomes a journal of its own, which
    ``result.journal`` is. ``SqliteJournal(path, run=id)`` is one of them.

    Args:
        path: The file.
        run: The id of one run; ``None`` for the store.
        options: See ``Journal``.
    """

    def __init__(self, path: str | Path, run: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._options = options
        self.path = Path(path)
        if run is not None and RUN_ID.fullmatch(run) is None:
            msg = f"{run!r} is not a run id; one has 1 to 64 letters, digits, hyphens and underscores"
            raise JournalError(msg)
        self.run = run

    def __repr__(self) -> str:
        return f"SqliteJournal({str(self.path)!r}, run={self.run!r})"

    @property
    def name(self) -> str:
        """How the journal is called in messages."""
        return str(self.path) if self.run is None else f"run {self.run!r} in {self.path}"

    def runs(self, prefix: str = "") -> list[str]:
        """Return the ids of all runs in the file that start with *prefix*, sorted."""
        if not self.path.exists():
            return []
        with _to_read(self.path) as database:
            if not _has_table(database):
                return []
            # No letter of an id comes after the tilde.
            # By a range and not by LIKE: the index serves a range, and `%` and `_` in an id are letters.
            found = database.execute(
                "SELECT DISTINCT run FROM lines WHERE run >= ? AND run < ? ORDER BY run", (prefix, f"{prefix}~")
            )
            return [row[0] for row in found]

    def is_there(self) -> bool:
        """Return whether the file exists and holds the run."""
        return self.path.exists() and (self.run is None or self.run in self.runs(self.run))

    def is_held(self) -> bool:
        """Return whether the run is locked."""
        try:
            return is_locked(_lock_path(self.path, self.path.stat(), self._bound_run()))
        except FileNotFoundError:
            return False

    def missing(self) -> JournalMissing:
        """Return the error for a run that the file does not hold; it names those that it holds, or files beside it."""
        known = self.runs() if self.path.exists() else []
        if not known:
            return missing_file(self.path)
        near = likely(self.run or "", known)
        msg = f"there is no run {self.run!r} in {self.path}; in it {listed(near, len(known))}"
        return JournalMissing(msg, path=str(self.path), beside=near)

    def bound(self, run: str) -> Journal:
        """Return the journal of one run; the store's own journal when it is one already."""
        return self if self.run is not None else SqliteJournal(self.path, run, **self._options)

    def content(self) -> bytes:
        """Return the lines of this run as they are stored."""
        run = self._bound_run()
        if not self.path.exists():
            return b""
        with _to_read(self.path) as database:
            return _content(database, run)

    def head(self) -> Head | None:
        """Return the first record of this run, without reading any other."""
        run = self._bound_run()
        if not self.path.exists():
            return None
        with _to_read(self.path) as database:
            if not _has_table(database):
                return None
            row = database.execute("SELECT line FROM lines WHERE run = ? ORDER BY number LIMIT 1", (run,)).fetchone()
        return None if row is None else first_of(row[0] if isinstance(row[0], bytes) else b"\n", self.name)

    def tail(self) -> Tail:
        """Return a place at the start of this run."""
        return RowTail(self, self._bound_run())

    def mailbox(self) -> Mailbox:
        """Return the mailbox of this run, in the same file."""
        return SqliteMailbox(self, self.path, self._bound_run, seconds=BUSY_SECONDS)

    def discard(self) -> None:
        """Remove the run, and the letters to it."""
        run = self._bound_run()
        with _to_write(self.path) as database:
            database.execute("DELETE FROM lines WHERE run = ?", (run,))
            forget_letters(database, run)

    def records(self) -> list[Record]:
        """Return all records of this run."""
        return read_lines(self.content(), self.name).records

    def writer(self) -> Writer:
        """Take the run over for writing; the file is created when there is none."""
        return SqliteWriter(self, self._bound_run())

    def set_aside(self) -> Journal:
        """Copy the run to one in the same file that is new, such as ``RUN-before-1``."""
        run, number = self._bound_run(), 0
        with _to_write(self.path) as database:
            while True:
                number += 1
                end = f"-before-{number}"
                name = f"{run[: MAX_RUN_ID_CHARS - len(end)]}{end}"
                if not _content(database, name):
                    break
            database.execute("INSERT INTO lines SELECT ?, number, line FROM lines WHERE run = ?", (name, run))
        return SqliteJournal(self.path, name, **self._options).with_rules_of(self)

    def replace(self, records: Sequence[Record]) -> None:
        """Replace the run by *records* in one transaction."""
        History(records, self.name)
        run, lines = self._bound_run(), self.lines_of(records)
        with _to_write(self.path) as database:
            database.execute("DELETE FROM lines WHERE run = ?", (run,))
            database.executemany("INSERT INTO lines VALUES (?, ?, ?)", [(run, n, x) for n, x in enumerate(lines)])

    def _bound_run(self) -> str:
        if self.run is not None:
            return self.run
        known = self.runs()
        if not known:
            raise self.missing()
        if len(known) != 1:
            listed = list_names(known)
            msg = (
                f"{self.path} is a file of many runs; say which with SqliteJournal(path, run=...). There are: {listed}"
            )
            raise JournalError(msg)
        return known[0]


class RowTail(ByteTail):
    """
    A place in the rows of a run, by their numbers.

    Args:
        journal: The journal.
        run: The run.
    """

    def __init__(self, journal: SqliteJournal, run: str) -> None:
        super().__init__(journal.name)
        self._journal = journal
        self._run = run
        self._file: tuple[int, int] | None = None
        # The last row that was taken; of one whose line is not whole, how much of it was.
        self._number, self._row, self._within = -1, b"", 0
        self._looked: deque[tuple[int, bytes]] = deque()

    def _stamp(self) -> object:
        stamps: list[object] = []
        for end in ("", BESIDE[0]):
            try:
                status = os.stat(f"{self._journal.path}{end}")  # noqa: PTH116
                stamps += [status.st_size, status.st_mtime_ns, status.st_ino]
            except OSError as error:
                stamps.append(error.errno)
        return tuple(stamps)

    def _look(self, most: int) -> BytesBehind:
        path = self._journal.path
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            if self._file is not None:
                raise self._journal.missing() from None
            return BytesBehind()
        except OSError as error:
            raise unusable(path, error) from error
        if self._file not in (None, (status.st_dev, status.st_ino)):
            return BytesBehind(again="replaced")
        self._file = status.st_dev, status.st_ino
        with _to_read(path) as database:
            return self._read(database, most) if _has_table(database) else BytesBehind()

    def _read(self, database: sqlite3.Connection, most: int) -> BytesBehind:
        rows = _in_order(
            database.execute(
                "SELECT number, line FROM lines WHERE run = ? AND number >= ? ORDER BY number",
                (self._run, self._number),
            )
        )
        if self._number >= 0:
            found = next(rows, None)
            if found is None or found[0] != self._number:
                return BytesBehind(again="cut" if found is None else "rewritten")
            if found[1] != self._row:
                return BytesBehind(again="rewritten")
        self._looked, size = deque(), 0
        if self._within:
            self._looked.append((self._number, self._row))
            size -= self._within
        is_all = True
        for number, line in rows:
            if size >= most:
                is_all = False
                break
            self._looked.append((number, line))
            size += len(self._looked[-1][1])
        return BytesBehind(b"".join([line for _, line in self._looked])[self._within :], is_all)

    def _take(self, data: bytes) -> None:
        left = len(data)
        while left:
            self._number, self._row = self._looked[0]
            rest = len(self._row) - self._within
            self._within = self._within + left if left < rest else 0
            left = max(0, left - rest)
            if not self._within:
                self._looked.popleft()

    def _forget(self) -> None:
        self._file, self._number, self._row, self._within, self._looked = None, -1, b"", 0, deque()


class SqliteWriter(LineWriter):
    """
    The writer of one run. It has the run's lock, and shares the connection of this process with the other runs.

    Whoever gets the connection stores what all of them have announced, in one transaction.
    """

    def __init__(self, journal: SqliteJournal, run: str) -> None:
        import sqlite3

        self._run = run
        self._is_announced = self._is_under_way = False
        self._reserve: Reserve | None = None
        status = made_database(journal.path)
        self._lock_path = _lock_path(journal.path, status, run)
        # A lock of the operating system beside the database, one for each run: SQLite locks the whole file, and a lock
        # in a table would outlive its process (replay:J2).
        self._lock = HeldFile(self._lock_path, _open_locked(self._lock_path, journal.path))
        self._database = Database.at(journal.path, status, seconds=BUSY_SECONDS)
        try:
            content, self._count = _read_stored(self._database, run)
            super().__init__(journal, read_lines(content, journal.name))
            self._keep_room(journal.path)
        except (OSError, sqlite3.Error) as error:
            self._release()
            raise _unusable(journal.path, error) from error
        except BaseException:
            self._release()
            raise

    def announce(self) -> None:
        """Let whoever commits next take along what was appended."""
        if not self._is_announced:
            self._is_announced = True
            self._database.waiting.append(self)

    def commit(self) -> None:
        """
        Make everything durable that was appended.

        Raises:
            JournalWriteFailed: when that is impossible; the journal still opens, without what was not committed.
        """
        self._check()
        self.announce()
        with self._database.lock:
            if self._lines and self._broken is None:
                self._store_waiting()
        self._check()

    def close(self) -> None:
        """Commit, and give the journal back; may be called twice. A forked process has nothing to give back."""
        if self._is_forked:
            return
        with self._storing:
            if self._closed:
                return
            # Closed before the last lines are stored: a second call does nothing, also where storing them failed. A loss
            # that a commit has told of already is not told again: whoever closes does so in a `finally`, and the error
            # that ended the run would be covered.
            self._closed, was_lost = True, self._is_lost
            try:
                self._sign_last()
                # Nobody waits for the commits of others who has nothing in them.
                if self._lines or self._is_under_way:
                    with self._database.lock:
                        self._store_waiting()
                if self._is_lost and not was_lost and self._broken is not None:
                    raise self._broken
            finally:
                self._release()

    def _store_waiting(self) -> None:
        """Store what this writer and those that announced a commit have ready; each learns what became of its own records."""
        writers = {self: None}
        while self._database.waiting:
            writers[self._database.waiting.popleft()] = None
        try:
            batches = [(one, lines) for one in writers if (lines := one.begin())]
            if len(batches) > 1:
                self._store_together(batches)
            else:
                _store_apart(batches)
        finally:
            for one in writers:
                one.end()

    def _store_together(self, batches: Batches) -> None:
        import sqlite3

        # One of them may be to blame, or less of it may fit.
        # What fails for all may be the fault of one: then each is tried by itself, so that a run with a record that is
        # too long does not end a hundred others.
        apart = (sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_FULL, sqlite3.SQLITE_TOOBIG)
        try:
            self._insert([row for one, lines in batches for row in one.rows(lines)])
        except (OSError, sqlite3.Error) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in apart:
                _store_apart(batches)
                return
            for one, _ in batches:
                one.lose(one.failure(error))
        else:
            for one, lines in batches:
                one.count(lines)

    def begin(self) -> list[bytes]:
        """Return the lines that are to be stored now; ``end`` follows, whether or not they were stored."""
        # First of all: whoever closes this writer sees lines that wait, or that they are under way.
        self._is_under_way = True
        self._is_announced = False
        return self.taken()

    def end(self) -> None:
        """Note that nothing is under way any more."""
        self._is_under_way = False

    def rows(self, lines: list[bytes]) -> list[tuple[str, int, bytes]]:
        """Return the rows of lines that come next."""
        return [(self._run, number, line) for number, line in enumerate(lines, self._count)]

    def count(self, lines: list[bytes]) -> None:
        """Note that these lines are stored."""
        self._count += len(lines)
        self._is_stored = True

    def failure(self, error: Exception) -> JournalWriteFailed:
        """Return the error of this run for what the database said."""
        return self._write_error(reason(error, self._database.seconds))

    def store_apart(self, lines: list[bytes]) -> None:
        """Store lines by a transaction of their own, or lose them."""
        try:
            self._store(lines)
        except JournalError as error:
            self.lose(error)

    def _store(self, lines: list[bytes]) -> None:
        import sqlite3

        try:
            try:
                self._insert(self.rows(lines))
            except sqlite3.Error as error:
                reserve = self._reserve
                is_full = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
                if not is_full or reserve is None or not reserve.spend():
                    raise
                self._insert(self.rows(lines))
                reserve.regain()
        except (OSError, sqlite3.Error) as error:
            raise self.failure(error) from error
        self.count(lines)

    def _insert(self, rows: Sequence[tuple[str, int, bytes]]) -> None:
        with self._database.writing() as connection:
            connection.executemany("INSERT INTO lines VALUES (?, ?, ?)", rows)

    def _release(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
        self._database.close()
        # The name goes before the lock does, so whoever gets a lock can tell whether its file is still the one.
        self._lock_path.unlink(missing_ok=True)
        self._lock.release()


Batches: TypeAlias = "list[tuple[SqliteWriter, list[bytes]]]"
"""Writers, each with the lines that it has to store."""


def _store_apart(batches: Batches) -> None:
    """Store what each writer has by a transaction of its own."""
    for one, lines in batches:
        one.store_apart(lines)


def _read_stored(database: Database, run: str) -> tuple[bytes, int]:
    """Return what is stored of a run, and the number of its next line; the table is made when there is none."""
    with database.reading() as connection:
        if _has_table(connection):
            last = connection.execute("SELECT MAX(number) FROM lines WHERE run = ?", (run,)).fetchone()[0]
            return (b"", 0) if last is None else (_content(connection, run), last + 1)
    with database.lock, database.writing() as connection:
        connection.execute(SCHEMA)
    return b"", 0


def _lock_path(database: Path, status: os.stat_result, run: str) -> Path:
    # Named after the file and not after one of its names, so that whoever finds the file finds the lock.
    return database.with_name(f".{status.st_dev:x}-{status.st_ino:x}.{run}.lock")


def _open_locked(path: Path, database: Path) -> int:
    """Return the open and locked file at *path*; a lock that its owner has just given up is not taken for ours."""
    while True:
        descriptor = opened_with_room(path)
        try:
            lock_file(descriptor, database)
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def made_database(path: Path) -> os.stat_result:
    """
    Return what the system knows of the database at *path*, which is made when there is none, for its owner only.

    Raises:
        JournalError: when it is a symbolic link, no regular file, or cannot be made; when it has two names: SQLite keeps what
            is not in the file yet beside the name, so whoever comes by the other name would damage it.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.lstat()
        check_place(path, status)
        if status.st_nlink > 1:
            msg = f"{path} has {status.st_nlink} names (hard links), and SQLite allows one; remove the others or copy the file"
            raise JournalError(msg)
        for one in (path, *[path.with_name(path.name + end) for end in BESIDE]):
            with contextlib.suppress(FileNotFoundError):
                check_place(one, one.lstat())
                make_private(one)
        return status
    made_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.close(opened_new(path))
        try:
            sync_folder(path.parent)
        except OSError as error:
            raise unusable(path, error) from error
    return made_database(path)


def _unusable(path: Path, error: Exception) -> JournalWriteFailed:
    msg = f"{path} cannot be used as a journal: {reason(error, BUSY_SECONDS)}; nothing was run"
    return JournalWriteFailed(msg)


@contextlib.contextmanager
def _to_read(path: Path) -> Iterator[sqlite3.Connection]:
    """Give a connection to a database that exists; nothing is changed by opening it."""
    import sqlite3

    from stepengine.workspace.guarded_database import bounded, open_guarded

    try:
        # Looked at by name and never opened: closing another descriptor of the file would give up SQLite's own locks on it.
        status = path.lstat()
        check_place(path, status)
        database = open_guarded(path, seconds=BUSY_SECONDS, read_only=True)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error
    try:
        _check_same(path, status)
        with bounded(database):
            yield database
    except sqlite3.Error as error:
        msg = f"{path} cannot be read as a journal: {reason(error, BUSY_SECONDS)}"
        raise JournalError(msg) from error
    finally:
        database.close()


@contextlib.contextmanager
def _to_write(path: Path) -> Iterator[sqlite3.Connection]:
    """Give the connection of this process, in a transaction; the file is made when there is none."""
    import sqlite3

    database = Database.at(path, made_database(path), seconds=BUSY_SECONDS)
    try:
        with database.lock, database.writing() as connection:
            connection.execute(SCHEMA)
            yield connection
    except (OSError, sqlite3.Error) as error:
        raise _unusable(path, error) from error
    finally:
        database.close()


def _check_same(path: Path, status: os.stat_result) -> None:
    if not os.path.samestat(status, path.lstat()):
        msg = f"{path} was moved, deleted or replaced while it was opened; nothing was run"
        raise JournalError(msg)


def _has_table(database: sqlite3.Connection) -> bool:
    """Return whether the file got its table: whoever made it may have been killed before."""
    from stepengine.workspace.guarded_database import has_table

    return has_table(database, SCHEMA)


def _content(database: sqlite3.Connection, run: str) -> bytes:
    if not _has_table(database):
        return b""
    rows = database.execute("SELECT number, line FROM lines WHERE run = ? ORDER BY number", (run,))
    return b"".join([line for _, line in _in_order(rows)])


def _in_order(rows: Iterable[tuple[Any, Any]]) -> Iterator[tuple[int, bytes]]:
    """
    Give the number and line of each row; a line that is no bytes is an empty one, which no record is.

    Raises:
        sqlite3.DatabaseError: when a number is not higher than the one before: a damaged file can repeat its rows for ever.
    """
    last: int | None = None
    for number, line in rows:
        if type(number) is not int or (last is not None and number <= last):
            import sqlite3

            msg = f"it is damaged: the row {number!r} of a run is not in order"
            raise sqlite3.DatabaseError(msg)
        last = number
        yield number, line if isinstance(line, bytes) else b"\n"
