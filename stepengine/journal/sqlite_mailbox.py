"""
The mailbox of a run in an SQLite file: a table for all runs of the file.

Senders commit as the runs do, so a mailbox message survives what a record survives. Numbers follow the order of the commits and are never
reused, so a reader at a number has missed no earlier message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.data.json import MAX_INT
from stepengine.errors import JournalCorrupt, JournalWriteFailed
from stepengine.journal.journal_files import require_regular_file
from stepengine.journal.mailbox import (
    MAX_LETTER_BYTES,
    MAX_LETTERS,
    MAX_MAILBOX_BYTES,
    Mailbox,
    MailboxMessage,
    MailboxOwner,
    StoredMessage,
)
from stepengine.workspace.write_ahead import Database, describe_database_error

if TYPE_CHECKING:
    import sqlite3

# `nth` and `bytes` count the run's mailbox messages up to this one, so that nobody has to count them to know whether there is room.
TABLE = (
    "CREATE TABLE IF NOT EXISTS letters (number INTEGER PRIMARY KEY AUTOINCREMENT, run TEXT NOT NULL, id TEXT NOT NULL, "
    "nth INTEGER NOT NULL, bytes INTEGER NOT NULL, line BLOB NOT NULL)"
)
INDEX = "CREATE INDEX IF NOT EXISTS letters_of_runs ON letters (run, number)"
IDS = "CREATE INDEX IF NOT EXISTS ids_of_letters ON letters (run, id)"


class SqliteMailbox(Mailbox):
    """
    A mailbox in an SQLite file. A position is the number of a message.

    Args:
        journal: The journal of the run.
        path: The file.
        run: Returns the run's name in the file.
        seconds: The number of seconds to wait for a process that has locked the file and commits nothing.
    """

    def __init__(self, journal: MailboxOwner, path: Path, run: Callable[[], str], *, seconds: float) -> None:
        super().__init__(journal)
        self._path = path
        self._name = run
        self._seconds = seconds

    def read(self, after: int = 0) -> tuple[list[MailboxMessage], int]:
        """Return the messages after a position, and the new position."""
        name = self._name()
        with self._open_for_reading() as database:
            found = list(self._read_lines(database, name, after)) if _has_mailbox_table(database) else []
        if not found:
            return [], after
        run, mailbox_messages = self._read_run_id(), []
        for number, line in found:
            stored = StoredMessage.parse(line.removesuffix(b"\n"), f"mailbox message {number} of {self._path}")
            if stored is not None and stored.run == run:
                mailbox_messages.append(stored.message)
        return mailbox_messages, found[-1][0]

    def may_have_messages(self, after: int) -> bool:
        """Return whether there is a mailbox message after a position."""
        name = self._name()
        with self._open_for_reading() as database:
            return _has_mailbox_table(database) and _has_message_after(database, name, after)

    def _read_lines(self, database: sqlite3.Connection, name: str, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and line of each message after a number; raise for damage or more than a mailbox may hold."""
        size = 0
        wanted = "SELECT number, substr(line, 1, ?) FROM letters WHERE run = ? AND number > ? ORDER BY number LIMIT ?"
        given = (MAX_LETTER_BYTES + 1, name, min(after, MAX_INT), MAX_LETTERS + 1)
        for count, (number, line) in enumerate(database.execute(wanted, given), 1):
            if not isinstance(line, bytes):
                msg = f"mailbox message {number} of {self._path} is damaged: it is not bytes"
                raise JournalCorrupt(msg)
            size += len(line)
            if count > MAX_LETTERS or size > MAX_MAILBOX_BYTES:
                msg = f"mailbox message {number} of {self._path} is over the limit of a mailbox"
                raise JournalCorrupt(msg)
            yield number, line

    def _add_messages(self, messages: Sequence[StoredMessage]) -> bool:
        name = self._name()
        with self._open_for_writing() as database:
            if not _has_mailbox_table(database):
                for statement in (TABLE, INDEX, IDS):
                    database.execute(statement)
            if database.execute("SELECT 1 FROM lines WHERE run = ? LIMIT 1", (name,)).fetchone() is None:
                raise self._journal.make_missing_error()
            # An error undoes the transaction, and so the messages before the refused one.
            are_new = [self._add_message(database, name, stored) for stored in messages]
        return any(are_new)

    def _add_message(self, database: sqlite3.Connection, name: str, stored: StoredMessage) -> bool:
        """Insert a message; return False if it is stored already. Raise if another one has its id or the mailbox is full."""
        same = database.execute(
            "SELECT number, substr(line, 1, ?) FROM letters WHERE run = ? AND id = ?",
            (MAX_LETTER_BYTES + 1, name, stored.message.id),
        )
        for number, known in same:
            if isinstance(known, bytes) and known.startswith(stored.line_prefix):
                where = f"mailbox message {number} of {self._path}"
                self._refuse_changed_duplicate(stored, StoredMessage.parse(known.removesuffix(b"\n"), where))
                return False
        last = database.execute(
            "SELECT nth, bytes FROM letters WHERE run = ? ORDER BY number DESC LIMIT 1", (name,)
        ).fetchone() or (0, 0)
        if not all(type(count) is int for count in last):
            msg = f"the last mailbox message to the run {name!r} in {self._path} is damaged"
            raise JournalCorrupt(msg)
        count, size = last[0] + 1, last[1] + len(stored.line)
        self._require_within_limits(count, size)
        database.execute(
            "INSERT INTO letters (run, id, nth, bytes, line) VALUES (?, ?, ?, ?, ?)",
            (name, stored.message.id, count, size, stored.line),
        )
        return True

    @contextmanager
    def _open_for_reading(self) -> Iterator[sqlite3.Connection]:
        with self._open_database() as database, database.read_connection() as connection:
            yield connection

    @contextmanager
    def _open_for_writing(self) -> Iterator[sqlite3.Connection]:
        with self._open_database() as database, database.lock, database.write_transaction() as connection:
            yield connection

    @contextmanager
    def _open_database(self) -> Iterator[Database]:
        """Yield a connection to the existing database for the block; raise if it is unusable."""
        import sqlite3

        try:
            status = self._stat_regular_file()
            database = Database.open(self._path, status, seconds=self._seconds)
            try:
                yield database
            finally:
                database.close()
        except (OSError, sqlite3.Error) as error:
            msg = f"{self._path} cannot be used as a mailbox: {describe_database_error(error, self._seconds)}"
            raise JournalWriteFailed(msg) from error

    def _stat_regular_file(self) -> os.stat_result:
        """Return the status of the file; raise if it is missing or not a regular file."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            raise self._journal.make_missing_error() from None
        require_regular_file(self._path, status)
        return status


def delete_mailbox(database: sqlite3.Connection, run: str) -> None:
    """Delete all messages in a run's mailbox; call it in a transaction."""
    if _has_mailbox_table(database):
        database.execute("DELETE FROM letters WHERE run = ?", (run,))


def _has_mailbox_table(database: sqlite3.Connection) -> bool:
    """Return whether the file has the table of mailbox messages."""
    from stepengine.workspace.guarded_database import has_table

    return has_table(database, TABLE)


def _has_message_after(database: sqlite3.Connection, name: str, after: int) -> bool:
    given = (name, min(after, MAX_INT))
    return database.execute("SELECT 1 FROM letters WHERE run = ? AND number > ? LIMIT 1", given).fetchone() is not None
