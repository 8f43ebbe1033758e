"""Opening SQLite databases that several processes use, and writing to them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

__all__ = ("transaction", "write_ahead")

PAUSE = 0.005


def write_ahead(database: sqlite3.Connection, seconds: float) -> None:
    """
    Let a database keep a write-ahead log, which every process that opens a new one asks for.

    SQLite lets one of them do it and refuses the others at once, whatever time-out the connection has, so it is asked again.

    Raises:
        sqlite3.Error: when that is impossible, or others held the database for *seconds*.
    """
    import sqlite3

    until = time.monotonic() + seconds
    while True:
        try:
            database.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until:
                raise
            time.sleep(PAUSE)
        else:
            return


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """
    Commit what is written meanwhile, all of it or nothing.

    Raises:
        sqlite3.Error: what SQLite says of a statement that it cannot carry out, such as that the disk is full.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        # After some errors SQLite has rolled back by itself, and would refuse to do it twice.
        if database.in_transaction:
            database.execute("ROLLBACK")
