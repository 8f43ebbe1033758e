"""
``SqliteJournal``: many runs in one file (replay J1, reliability JR39).

The lines are those of a file journal, one row each. WAL and ``synchronous=FULL``: a commit survives a power cut, and no
partial record is ever seen. SQLite lets one writer at a time in; each run has one owner, by a lock that dies with its
process.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.errors import JournalError, JournalWriteFailed
from stepengine.journal.history import History
from stepengine.journal.places import (
    Reserve,
    check_place,
    close_locked,
    lock_file,
    made_folder,
    make_private,
    opened_for_writing,
    opened_new,
)
from stepengine.journal.reading import read_lines
from stepengine.journal.records import Record
from stepengine.journal.store import Journal, LineWriter, Writer
from stepengine.runtime.write_ahead import transaction, write_ahead
from stepengine.tools.files.atomic import sync_folder

if TYPE_CHECKING:
    import sqlite3

__all__ = ("SqliteJournal",)

MAX_RUN_ID = 64
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
SCHEMA = "CREATE TABLE IF NOT EXISTS lines (run TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID"
BUSY_SECONDS = 5.0
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
            msg = f"{run!r} is no run id; one has 1 to 64 letters, digits, hyphens and underscores"
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
        with _connection(self.path) as database:
            if not _has_table(database):
                return []
            # No letter of an id comes after the tilde.
            found = database.execute(
                "SELECT DISTINCT run FROM lines WHERE run >= ? AND run < ? ORDER BY run", (prefix, f"{prefix}~")
            )
            return [row[0] for row in found]

    def bound(self, run: str) -> Journal:
        """Return the journal of one run; the store's own journal when it is one already."""
        return self if self.run is not None else SqliteJournal(self.path, run, **self._options)

    def content(self) -> bytes:
        """Return the lines of this run as they are stored."""
        run = self._bound_run()
        if not self.path.exists():
            return b""
        with _connection(self.path) as database:
            return _content(database, run)

    def records(self) -> list[Record]:
        """Return all records of this run."""
        return read_lines(self.content(), self.name).records

    def writer(self) -> Writer:
        """Take the run over for writing; the file is created when there is none."""
        return SqliteWriter(self, self._bound_run())

    def set_aside(self) -> Journal:
        """Copy the run to one in the same file that is new, such as ``RUN-before-1``."""
        run, number = self._bound_run(), 0
        with _connection(self.path, create=True) as database, transaction(database):
            while True:
                number += 1
                end = f"-before-{number}"
                name = f"{run[: MAX_RUN_ID - len(end)]}{end}"
                if not _content(database, name):
                    break
            database.execute("INSERT INTO lines SELECT ?, number, line FROM lines WHERE run = ?", (name, run))
        return SqliteJournal(self.path, name, **self._options).with_rules_of(self)

    def replace(self, records: Sequence[Record]) -> None:
        """Replace the run by *records* in one transaction."""
        History(records, self.name)
        run, lines = self._bound_run(), self.lines_of(records)
        with _connection(self.path, create=True) as database, transaction(database):
            database.execute("DELETE FROM lines WHERE run = ?", (run,))
            database.executemany("INSERT INTO lines VALUES (?, ?, ?)", [(run, n, x) for n, x in enumerate(lines)])

    def _bound_run(self) -> str:
        if self.run is not None:
            return self.run
        known = self.runs()
        if len(known) != 1:
            listed = ", ".join(known[:10]) or "none"
            msg = (
                f"{self.path} is a file of many runs; say which with SqliteJournal(path, run=...). There are: {listed}"
            )
            raise JournalError(msg)
        return known[0]


class SqliteWriter(LineWriter):
    """The writer of one run; it has the run's lock and a connection of its own."""

    def __init__(self, journal: SqliteJournal, run: str) -> None:
        self._run = run
        status = _made(journal.path)
        # Named after the file and not after one of its names, so that whoever finds the file finds the lock.
        self._lock_path = journal.path.with_name(f".{status.st_dev:x}-{status.st_ino:x}.{run}.lock")
        self._lock = _locked(self._lock_path, journal.path)
        try:
            self._database = _connect(journal.path, create=True)
            try:
                reading = read_lines(_content(self._database, run), journal.name)
                super().__init__(journal, reading)
                last = self._database.execute("SELECT MAX(number) FROM lines WHERE run = ?", (run,)).fetchone()[0]
                self._count = 0 if last is None else last + 1
                self._reserve = Reserve.near(journal.path)
            except BaseException:
                self._database.close()
                raise
        except BaseException:
            self._unlock()
            raise

    def _store(self, lines: list[bytes]) -> None:
        import sqlite3

        rows = [(self._run, number, line) for number, line in enumerate(lines, self._count)]
        try:
            try:
                self._insert(rows)
            except sqlite3.Error as error:
                reserve = self._reserve
                is_full = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL
                if not is_full or reserve is None or not reserve.spend():
                    raise
                self._insert(rows)
                reserve.regain()
        except sqlite3.Error as error:
            raise self._failed(str(error)) from error
        self._count += len(rows)

    def _insert(self, rows: Sequence[tuple[str, int, bytes]]) -> None:
        with transaction(self._database):
            self._database.executemany("INSERT INTO lines VALUES (?, ?, ?)", rows)

    def _release(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
        self._database.close()
        self._unlock()

    def _unlock(self) -> None:
        # The name goes before the lock does, so whoever gets a lock can tell whether its file is still the one.
        self._lock_path.unlink(missing_ok=True)
        close_locked(self._lock)


def _locked(path: Path, database: Path) -> int:
    """Return the open and locked file at *path*; a lock that its owner has just given up is not taken for ours."""
    while True:
        descriptor = opened_for_writing(path)
        try:
            lock_file(descriptor, database)
            if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _made(path: Path) -> os.stat_result:
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
        sync_folder(path.parent)
    return _made(path)


def _connect(path: Path, *, create: bool = False) -> sqlite3.Connection:
    import sqlite3

    try:
        # Looked at by name and never opened: closing another descriptor of the file would give up SQLite's own locks on it.
        status = _made(path) if create else path.lstat()
        check_place(path, status)
        database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        msg = f"{path} cannot be used as a journal: {error}; nothing was run"
        raise JournalWriteFailed(msg) from error
    try:
        if create:
            write_ahead(database, BUSY_SECONDS)
            database.execute("PRAGMA synchronous=FULL")
            database.execute(SCHEMA)
        _check_same(path, status)
    except (OSError, sqlite3.Error) as error:
        database.close()
        msg = f"{path} cannot be used as a journal: {error}; nothing was run"
        raise JournalWriteFailed(msg) from error
    except BaseException:
        database.close()
        raise
    return database


def _check_same(path: Path, status: os.stat_result) -> None:
    if not os.path.samestat(status, path.lstat()):
        msg = f"{path} was moved, deleted or replaced while it was opened; nothing was run"
        raise JournalError(msg)


@contextlib.contextmanager
def _connection(path: Path, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    import sqlite3

    database = _connect(path, create=create)
    try:
        yield database
    except sqlite3.Error as error:
        msg = f"{path} cannot be read as a journal: {error}"
        raise JournalError(msg) from error
    finally:
        database.close()


def _has_table(database: sqlite3.Connection) -> bool:
    """Return whether the file got its table: whoever made it may have been killed before."""
    return database.execute("SELECT 1 FROM sqlite_master WHERE name = 'lines'").fetchone() is not None


def _content(database: sqlite3.Connection, run: str) -> bytes:
    if not _has_table(database):
        return b""
    rows = database.execute("SELECT line FROM lines WHERE run = ? ORDER BY number", (run,))
    return b"".join([row[0] for row in rows])
