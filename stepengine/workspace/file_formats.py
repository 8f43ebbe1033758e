"""
Recognizes the files of stores by their first bytes.

A store may create a file, or write to one of its own format. Any other file belongs to another program. The check precedes locks,
changes of the mode, logs of SQLite and truncation, so such a file stays unchanged and gets no additional files next to it. An empty
file is accepted, as its content cannot be lost. ``read_regular_file`` reads a file from a user, and does not wait for a pipe.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from stepengine.errors import StepEngineError
from stepengine.workspace.open_files import DATABASE_IN_USE, is_open_database

if TYPE_CHECKING:
    import sqlite3

APPLICATION_ID = 0x53746570
"""``Step``: the number in the header of an SQLite database by which ``file`` and other programs recognize whose it is."""
READ_ID = "PRAGMA application_id"
START_BYTES = 64 * 1024
"""A longer first line is read in full only if it starts like one of the format."""
NOT_REGULAR = "it is not a regular file"
CAREFULLY = os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


@frozen
class FileFormat:
    """
    How all files of a store start.

    Attributes:
        name: The kind of file with its article, for error messages.
        start: A pattern of the first bytes.
        error: The error class for other files.
        has_whole_line: Whether the first line must be complete: with its newline, or with the checksum at the end of each line.
    """

    name: str
    start: re.Pattern[bytes]
    error: type[StepEngineError]
    has_whole_line: bool = False

    def check(self, path: str | os.PathLike[str], descriptor: int | None = None) -> None:
        """
        Raise unless the file at *path* is missing, empty or of this format; nothing is changed.

        Args:
            path: The file.
            descriptor: The file, if it is open already.
        """
        if descriptor is None:
            # By its size first: pipes and terminals have none, and are not opened to look into them.
            try:
                status = os.stat(path)  # noqa: PTH116
            except FileNotFoundError:
                return
            if stat.S_ISDIR(status.st_mode):
                msg = f"{os.fspath(path)} is a folder, not {self.name}. Name a file"
                raise self.error(msg)
            if not status.st_size:
                return
            if is_open_database(status):
                raise self._make_error(path)
            opened = os.open(path, CAREFULLY)
            try:
                self.check(path, opened)
            finally:
                os.close(opened)
        elif os.fstat(descriptor).st_size and not self._has_expected_start(descriptor):
            raise self._make_error(path)

    def _make_error(self, path: str | os.PathLike[str]) -> StepEngineError:
        """Return the error for a file of another format, which was left unchanged."""
        return self.error(
            f"{os.fspath(path)} is not {self.name} of stepengine and was left unchanged. Use another path"
        )

    def matches(self, path: str | os.PathLike[str]) -> bool:
        """Return whether the file at *path* is missing, empty or of this format."""
        try:
            self.check(path)
        except self.error:
            return False
        return True

    def _has_expected_start(self, descriptor: int) -> bool:
        """Return True if an open file starts as the format requires."""
        data = os.pread(descriptor, START_BYTES, 0)
        if self.start.match(data) is None:
            return False
        while self.has_whole_line and b"\n" not in data:
            more = os.pread(descriptor, START_BYTES, len(data))
            if not more:
                return LINE_END.search(data) is not None
            data += more
        return True


NOT_OURS = "it is not a database of stepengine and was left unchanged. Use another path"
LINE_END = re.compile(rb',"crc":"[0-9a-f]{8}"\}\Z')


def check_own_database(path: Path) -> None:
    """
    Raise unless the file at *path* is missing, empty or an SQLite database of stepengine; nothing is changed.

    Raises:
        sqlite3.DatabaseError: for any other file.
    """
    import sqlite3

    # Looked at first: a process that creates the database at this moment writes its first page at once.
    if path.exists() and path.stat().st_size and _read_application_id(path) != APPLICATION_ID:
        raise sqlite3.DatabaseError(NOT_OURS)


def mark_own_database(connection: sqlite3.Connection) -> None:
    """
    Write the application id into a new database; raise ``sqlite3.DatabaseError`` if another program has filled it.

    Raises:
        sqlite3.DatabaseError: when another program has filled it meanwhile.
    """
    import sqlite3

    if _select_number(connection, READ_ID) == APPLICATION_ID:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        if _select_number(connection, READ_ID) != APPLICATION_ID:
            if _select_number(connection, "SELECT count(*) FROM sqlite_master"):
                raise sqlite3.DatabaseError(NOT_OURS)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _read_application_id(path: Path) -> int | None:
    """Return the application id of the database at *path*; ``None`` if it is no database, or not a regular file."""
    import sqlite3

    # By SQLite: closing another descriptor of the file would release the locks of SQLite in this process. As an immutable file: a
    # connection with locks creates log files next to a database with a log.
    try:
        address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True, check_same_thread=False)) as database:
            # A checkpoint of another connection may have written the header of a file that still has to grow.
            database.execute("PRAGMA writable_schema = ON")
            return _select_number(database, READ_ID)
    except sqlite3.Error:
        return None


def _select_number(connection: sqlite3.Connection, query: str) -> int:
    found: int = connection.execute(query).fetchone()[0]
    return found


def read_regular_file(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """
    Return the content of a file; of a longer one the first *max_bytes* + 1 bytes, so that the caller can refuse it.

    Raises:
        OSError: when it cannot be read, is a pipe, a device or a folder, or this process uses it as a database. It never waits for
            a pipe.
    """
    try:
        if is_open_database(os.stat(path)):  # noqa: PTH116
            raise OSError(errno.EBUSY, DATABASE_IN_USE)
        descriptor = os.open(path, CAREFULLY)
    except ValueError as error:  # no file has this name: a NUL or a lone surrogate is in it
        raise OSError(errno.EINVAL, str(error)) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, NOT_REGULAR)
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    finally:
        os.close(descriptor)
