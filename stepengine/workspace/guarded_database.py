"""
Connections to SQLite databases from untrusted sources.

An SQLite file can act like a program: a view or trigger runs queries of its author, and a damaged tree of pages can make a query
endless. So a connection is returned only after a check of the schema: tables and indexes, nothing that runs. Each query has a limit
in proportion to the size of the file, and Ctrl-C ends it.

``sqlite3`` is loaded with this module, so it must be imported inside functions.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from stepengine.workspace.file_formats import check_own_database
from stepengine.workspace.open_files import open_databases

OPERATIONS_PER_CALL = 100_000
"""The limit is checked after so many operations of SQLite's machine, about 5 ms."""
BASE_OPERATIONS = 20_000_000
"""Far more than a query on a small database needs; about a second."""
OPERATIONS_PER_BYTE = 2
"""Reading a row needs about 15 operations, and our rows have at least 20 bytes."""
LOG_SUFFIX = "-wal"
PLAIN_SCHEMA = re.compile(r"CREATE (?:TABLE|INDEX|UNIQUE INDEX) ")
FIRST_WORDS_CHARS = 40
"""Enough to see the kind of statement and its table."""


class GuardedConnection(sqlite3.Connection):
    """
    A connection whose queries are limited in time and size.

    Attributes:
        is_over: Whether the last query needed more operations than the size of the file explains.
    """

    def __init__(self, database: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(database, *args, **kwargs)
        open_databases[id(self)] = database
        self.is_over = False
        self._path = database
        self._operations = 0
        self.set_progress_handler(self._count_and_report_excess, OPERATIONS_PER_CALL)

    @override
    def close(self) -> None:
        """Close the connection; from then on other code may open the file."""
        super().close()
        open_databases.pop(id(self), None)

    @override
    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Execute a statement, with its operations counted from zero; raise an error for a damaged file."""
        self._operations, self.is_over = 0, False
        try:
            return super().execute(sql, parameters)
        except UnicodeDecodeError as error:  # SQLite quotes a damaged schema in its error
            msg = "it is damaged: its schema is not text"
            raise _make_damage_error(msg) from error

    def _count_and_report_excess(self) -> bool:
        """Count more operations of a query, and return True, which interrupts the query, if they exceed the limit."""
        # This call is also where Python handles Ctrl-C, which it cannot do inside of SQLite.
        self._operations += OPERATIONS_PER_CALL
        self.is_over = self._operations > BASE_OPERATIONS + OPERATIONS_PER_BYTE * self._get_file_size()
        return self.is_over

    def _get_file_size(self) -> int:
        size = 0
        for path in (self._path, self._path + LOG_SUFFIX):
            with suppress(OSError):
                size += os.stat(path).st_size  # noqa: PTH116
        return size


def open_guarded_database(
    path: Path, *, seconds: float, read_only: bool = False, any_thread: bool = False
) -> GuardedConnection:
    """
    Open the database at *path*, check its schema, and return a connection in autocommit mode.

    Args:
        path: The file.
        seconds: How long to wait for other processes.
        read_only: Refuse statements that write.
        any_thread: Allow other threads than this one to use the connection.

    Raises:
        sqlite3.Error: when it cannot be opened, is not a database of stepengine, or contains more than tables and indexes.
    """
    check_own_database(path)
    connection = sqlite3.connect(
        str(path), timeout=seconds, isolation_level=None, check_same_thread=not any_thread, factory=GuardedConnection
    )
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        if read_only:
            # Not `mode=ro`: the last reader of such a connection does not remove the log files.
            connection.execute("PRAGMA query_only=ON")
        with raise_interrupt_cause(connection):
            _check_schema(connection)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def raise_interrupt_cause(connection: GuardedConnection) -> Iterator[None]:
    """
    Raise the cause of an interrupted query in the block: its limit, or Ctrl-C.

    Raises:
        sqlite3.DatabaseError: when a query needed more operations than the size of the file explains, and for a text that is not UTF-8.
        KeyboardInterrupt: when Ctrl-C was pressed during a query.
    """
    try:
        yield
    except sqlite3.OperationalError as error:
        # Python raises this error without a code: SQLite has read the text, and Python cannot decode it.
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            msg = "it is damaged: it contains text that is not UTF-8"
            raise _make_damage_error(msg) from error
        if code != sqlite3.SQLITE_INTERRUPT:
            raise
        if connection.is_over:
            msg = "the database is damaged or was not made by stepengine: a query takes too long for its size"
            raise sqlite3.DatabaseError(msg) from error
        # SQLite discards the exception of the Python handler, and only reports an interruption.
        raise KeyboardInterrupt from error


def _make_damage_error(message: str) -> sqlite3.DatabaseError:
    """Return an error with the code of SQLite for a damaged file."""
    error = sqlite3.DatabaseError(message)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def has_table(connection: sqlite3.Connection, statement: str) -> bool:
    """
    Return whether the table that *statement* creates exists; raise ``sqlite3.DatabaseError`` if it has another schema.

    Raises:
        sqlite3.DatabaseError: when it exists with another schema.
    """
    plain = statement.replace("IF NOT EXISTS ", "")
    name = plain.split()[2]
    row = connection.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,)).fetchone()
    if row is None:
        return False
    if row[0] != plain:
        msg = f"it is not a database of stepengine: its table {name!r} has a different schema"
        raise sqlite3.DatabaseError(msg)
    return True


def _check_schema(connection: sqlite3.Connection) -> None:
    """Raise ``sqlite3.DatabaseError`` if the database has anything but tables and indexes, such as views and triggers."""
    # By the text and not by the column `type`: SQLite executes the text, with any type in the row.
    for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if not isinstance(sql, str) or PLAIN_SCHEMA.match(sql) is None:
            msg = (
                "it is not a database of stepengine: it contains more than tables and indexes, "
                f"such as {str(sql)[:FIRST_WORDS_CHARS]!r}"
            )
            raise sqlite3.DatabaseError(msg)
