"""
Writing to SQLite databases: this process has one connection to each, shared by all its writers, next to other processes.

SQLite lets one connection at a time write. Threads of one process wait for each other at a lock, which is fair and has no
time-out. Only processes wait for SQLite's lock, and they retry often. This module knows files and connections, but no tables.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from stepengine.workspace import after_fork
from stepengine.workspace.after_fork import Lock, call_in_forked_child, hold_references, register_fork_hooks
from stepengine.workspace.file_formats import mark_own_database
from stepengine.workspace.open_files import describe_os_error, make_too_many_files_advice

if TYPE_CHECKING:
    import sqlite3

    from stepengine.workspace.guarded_database import GuardedConnection

PAUSE_SECONDS = 0.005
"""About the time of a commit by another process."""
# A waiting process retries this often. SQLite by itself retries only ten times a second after a while, and rarely finds
# the moment between two commits of a busy process.
TURN_SECONDS = 0.001


LOG_FILES = ("-wal", "-shm")
"""The endings of the files next to a database with a write-ahead log: the log, and its index."""


def is_busy_error(error: BaseException) -> bool:
    """Return whether SQLite reports that another connection has locked the database."""
    import sqlite3

    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def describe_database_error(error: Exception, seconds: float) -> str:
    """
    Return why a database cannot be used, with advice where SQLite's message is too short.

    Args:
        error: The error of SQLite or the system.
        seconds: How long the caller has waited for other processes.
    """
    import sqlite3

    if is_busy_error(error):
        return (
            f"{error}: another program has locked it for {seconds:g} s without a commit; end that program's transaction, "
            "and keep the database on a local disk"
        )
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN and (full := _find_open_file_problem()):
        return f"{error}: {full}"
    return describe_os_error(error) if isinstance(error, OSError) else str(error)


def _find_open_file_problem() -> str:
    """Return advice if too many files are open, which SQLite does not report; else ``""``."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return make_too_many_files_advice(error)
    return ""


def enable_write_ahead(database: sqlite3.Connection, seconds: float) -> None:
    """
    Mark a new database as one of stepengine, and switch it to a write-ahead log; retry for *seconds* while other processes hold it.

    SQLite lets one process do this and rejects the others at once, despite the time-out of the connection. So it is retried.

    Raises:
        sqlite3.Error: when that is impossible, or others held the database for *seconds*.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            mark_own_database(database)
            database.execute("PRAGMA journal_mode=WAL")
        except Exception as error:
            if not is_busy_error(error) or time.monotonic() >= until:
                raise
            time.sleep(PAUSE_SECONDS)
        else:
            return


@contextmanager
def transaction(database: sqlite3.Connection, seconds: float = 0.0) -> Iterator[None]:
    """
    Execute the block in one transaction, which commits all of it or nothing.

    It waits for other writers as long as they commit: *seconds* is the longest wait without a commit.

    Raises:
        sqlite3.Error: when SQLite cannot execute a statement, for example because the disk is full, or others hold the database.
    """
    _begin_transaction(database, seconds)
    try:
        yield
        database.execute("COMMIT")
    finally:
        # After some errors SQLite has rolled back by itself, and would refuse to do it twice.
        if database.in_transaction:
            database.execute("ROLLBACK")


def _begin_transaction(database: sqlite3.Connection, seconds: float) -> None:
    """Start a transaction; retry as long as other connections commit at least once in every *seconds*."""
    until, seen = 0.0, None
    while True:
        try:
            database.execute("BEGIN IMMEDIATE")
        except Exception as error:
            if not is_busy_error(error):
                raise
            now = time.monotonic()
            if now >= until:
                version = _read_data_version_or_busy(database)
                if version == seen or not seconds:
                    raise
                until, seen = now + seconds, version
            time.sleep(TURN_SECONDS)
        else:
            return


def _read_data_version_or_busy(database: sqlite3.Connection) -> object:
    """
    Return a value that changes with each commit of another connection, or ``"busy"``.

    It is busy while another process recovers the log of a killed process, which delays readers, too.
    """
    try:
        return database.execute("PRAGMA data_version").fetchone()[0]
    except Exception as error:
        if not is_busy_error(error):
            raise
        return "busy"


def _read_file_status(path: str) -> os.stat_result:
    """
    Return the status of a file that is part of an open database; raise ``OSError`` if it is missing.

    Raises:
        OSError: when the file does not exist.
    """
    # Checked by name and never opened: closing another descriptor of the file would release SQLite's own locks on it.
    try:
        return os.lstat(path)
    except FileNotFoundError as error:
        raise _make_changed_error(path) from error


def _read_unchanged_status(path: str, known_status: os.stat_result) -> os.stat_result:
    """
    Return the status of a file; raise ``OSError`` if it is not the file with the status *known_status*.

    Raises:
        OSError: when the name belongs to another file, or to none.
    """
    status = _read_file_status(path)
    if os.path.samestat(known_status, status):
        return status
    raise _make_changed_error(path)


def _make_changed_error(path: str) -> OSError:
    """Return the error for a database file or log that is no longer the one that was opened."""
    # The caller adds the name of the database.
    what = "the file" if not path.endswith(LOG_FILES) else f"its log {os.path.basename(path)!r}"  # noqa: PTH119 - no path object
    return OSError(errno.ESTALE, f"{what} was moved, deleted or replaced since it was opened")


class Database:
    """
    The connections of this process to an SQLite file: one for writing, one for reading, and one for slow reads.

    ``open`` creates the object, and the last ``close`` ends it. SQLite forbids the use of a connection after a fork. So all connections
    are closed before a fork, and each process opens new ones when it needs them.

    Args:
        path: The file.
        status: The status of the file, which must not be replaced.
        seconds: How long to wait for other processes.

    Attributes:
        lock: The lock of the connection for writing.
        looking: The lock of the connection for reading.
        scanning: The lock of the connection for slow reads.
        waiting: Data of users for the next transaction of any user.
    """

    _known: ClassVar[dict[tuple[int, int], Database]] = {}
    _counting: ClassVar[Lock] = Lock()

    def __init__(self, path: Path, status: os.stat_result, seconds: float) -> None:
        self.path: Final = path
        self.seconds: Final = seconds
        self.lock = Lock()
        self.waiting: deque[Any] = deque()
        self._status = status
        self._users = 0
        self._writer: GuardedConnection | None = None
        self._has_written = False
        self._readers: dict[bool, GuardedConnection] = {}
        self._files: Sequence[os.stat_result] = ()
        self.looking = Lock()
        self.scanning = Lock()

    @classmethod
    def open(cls, path: Path, status: os.stat_result, *, seconds: float) -> Database:
        """Count a user of an existing file, and return the database that all users of this process share; ``close`` releases it."""
        key = status.st_dev, status.st_ino
        with cls._counting:
            known = cls._known.get(key)
            if known is None:
                known = cls._known[key] = cls(path, status, seconds)
            known._users += 1
            return known

    def share(self) -> Self:
        """Count one more user of this database, and return the database; ``close`` releases it."""
        with self._counting:
            self._users += 1
            return self

    def close(self) -> None:
        """Count one user less; the last one closes the connections."""
        with self._counting:
            self._users -= 1
            if self._users:
                return
            self._known.pop((self._status.st_dev, self._status.st_ino), None)
            # The lock of the count is released only after this: a fork in between would copy connections that no code knows.
            with self.lock, self.looking, self.scanning:
                self.disconnect()

    def get_or_open_writer(self) -> GuardedConnection:
        """
        Return the writing connection, opened if necessary; the caller must hold ``lock``. A commit is durable.

        Raises:
            OSError: when the file was replaced, or the database has no users.
            sqlite3.Error: when the file cannot be opened, or is not a database.
        """
        if self._writer is None:
            database = self._connect()
            try:
                enable_write_ahead(database, self.seconds)
                database.execute("PRAGMA synchronous=FULL")
            except BaseException:
                database.close()
                raise
            self._writer, self._has_written = database, False
        return self._writer

    # SQLite writes to the files that it opened. Linux accepts writes to a deleted or replaced file, so every commit would
    # succeed and be lost. Two checks of three names need microseconds, a commit needs milliseconds. The first check prevents
    # a lost commit, the second one detects a change during it.
    @contextmanager
    def write_transaction(self) -> Iterator[sqlite3.Connection]:
        """
        Execute the block in one transaction and yield its connection; the caller must hold ``lock``.

        Raises:
            OSError: when the database or its log was moved, deleted, replaced or truncated since it was opened. The writes of the block
                are then lost.
            sqlite3.Error: when SQLite cannot execute a statement.
        """
        from stepengine.workspace.guarded_database import raise_interrupt_cause

        database = self.get_or_open_writer()
        if not self._has_written:
            # From now on it is asked more often than SQLite would do it.
            database.execute("PRAGMA busy_timeout=0")
            self._has_written = True
        with raise_interrupt_cause(database), transaction(database, self.seconds):
            self._check_and_store_file_status()
            yield database
        self._check_and_store_file_status()

    @contextmanager
    def read_connection(self, *, is_long: bool = False) -> Iterator[sqlite3.Connection]:
        """
        Yield a connection for reading that waits for no commit; its results must be fetched inside the block.

        Before the first transaction, short reads use the connection for writing.

        Args:
            is_long: Whether the read may take seconds; short reads do not wait for long ones.

        Raises:
            OSError: when the file was moved, deleted or replaced since it was opened.
            sqlite3.Error: when SQLite cannot execute a query.
        """
        from stepengine.workspace.guarded_database import raise_interrupt_cause

        self._check_not_replaced()
        if not is_long and not self._has_written and self.lock.acquire(timeout=0):
            try:
                database = self.get_or_open_writer()
                with raise_interrupt_cause(database):
                    yield database
            finally:
                self.lock.release()
            return
        with self.scanning if is_long else self.looking:
            if is_long not in self._readers:
                self._readers[is_long] = self._connect()
            with raise_interrupt_cause(self._readers[is_long]):
                yield self._readers[is_long]

    def _connect(self) -> GuardedConnection:
        """Open and return a new connection; raise ``OSError`` if no user is left, or the file was replaced."""
        from stepengine.workspace.guarded_database import open_guarded_database

        # The thread of a cancelled caller continues: a connection opened after the last user closed would never be closed.
        if not self._users:
            raise OSError(errno.EBADF, "it was closed")
        self._check_not_replaced()
        database = open_guarded_database(self.path, seconds=self.seconds, any_thread=True)
        try:
            self._check_not_replaced()
        except BaseException:
            database.close()
            raise
        return database

    def _check_not_replaced(self) -> None:
        """Raise ``OSError`` unless the path still names the file that was opened."""
        _read_unchanged_status(str(self.path), self._status)

    def _check_and_store_file_status(self) -> None:
        """Raise ``OSError`` if database, log or index of the log was replaced or truncated; else store their status for the next check."""
        path = str(self.path)
        # Inside of a transaction all three exist. While a connection is open, no user of SQLite removes one.
        known = self._files or (self._status, *[_read_file_status(path + end) for end in LOG_FILES])
        files = [_read_unchanged_status(path + end, one) for end, one in zip(("", *LOG_FILES), known, strict=True)]
        is_cut = any(now.st_size < before.st_size for now, before in zip(files, known, strict=True))
        if is_cut and self._files:
            self._check_intact()
        self._files = files

    def _check_intact(self) -> None:
        """
        Raise ``OSError`` if a database or log that has become shorter lacks a part.

        ``VACUUM`` and checkpoints of other programs shorten files, too, and lose nothing.
        """
        import sqlite3

        try:
            # A new connection, since an open one has pages in memory that the file may lack.
            with closing(self._connect()) as database:
                found = database.execute("PRAGMA quick_check(1)").fetchone()
            problem = "" if found == ("ok",) else str(found)
        except sqlite3.Error as error:
            problem = str(error)
        if problem:
            raise OSError(errno.ESTALE, f"the file or its log was truncated since it was opened ({problem})")

    def connections(self) -> list[sqlite3.Connection]:
        """Return the open connections."""
        return [*self._readers.values(), *([] if self._writer is None else [self._writer])]

    def disconnect(self) -> None:
        """Close the connections; the caller must hold the locks. The next use opens new ones."""
        for database in self.connections():
            database.close()
        self._readers, self._writer = {}, None
        self._has_written, self._files = False, ()

    # --- forks --------------------------------------------------------------------------------------------------------

    _held: ClassVar[list[Lock]] = []

    @classmethod
    def before_fork(cls) -> None:
        """Lock the databases and close their connections; the connections of a database that stays busy are left open."""
        cls._held = [cls._counting] if cls._counting.acquire(after_fork.PATIENCE_SECONDS) else []
        for database in list(cls._known.values()):
            if not database.lock.acquire(after_fork.PATIENCE_SECONDS):
                continue
            cls._held.append(database.lock)
            reads = [
                each for each in (database.looking, database.scanning) if each.acquire(after_fork.PATIENCE_SECONDS)
            ]
            cls._held += reads
            if len(reads) == 2:  # noqa: PLR2004 - both are free
                with suppress(Exception):
                    database.disconnect()

    @classmethod
    def after_fork(cls) -> None:
        """Release the locks in the parent, which opens new connections when it needs them."""
        while cls._held:
            cls._held.pop().release()

    @classmethod
    def reset_after_fork(cls) -> None:
        """Drop all databases in a forked child without closing them, which would affect the parent's."""
        hold_references(*[each for known in cls._known.values() for each in known.connections()])
        cls._known, cls._held = {}, []


register_fork_hooks(Database.before_fork, Database.after_fork)
call_in_forked_child(Database.reset_after_fork)
