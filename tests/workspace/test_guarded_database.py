"""Connections to databases that somebody else may have made: what they refuse, and that every query ends."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepengine.workspace import guarded_database
from stepengine.workspace.file_formats import mark_own_database
from stepengine.workspace.guarded_database import (
    GuardedConnection,
    has_table,
    open_guarded_database,
    raise_interrupt_cause,
)

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n"
TABLE = "CREATE TABLE IF NOT EXISTS words (word TEXT PRIMARY KEY)"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with contextlib.closing(sqlite3.connect(tmp_path / "words.db")) as database:
        mark_own_database(database)
        database.execute(TABLE)
    return tmp_path / "words.db"


@pytest.fixture
def connection(path: Path) -> Iterator[GuardedConnection]:
    with contextlib.closing(open_guarded_database(path, seconds=1)) as made:
        yield made


def test_an_endless_query_is_ended(connection: GuardedConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_database, "BASE_OPERATIONS", 1_000_000)

    with (
        pytest.raises(sqlite3.Error, match="takes too long for its size"),
        raise_interrupt_cause(connection),
    ):
        connection.execute(ENDLESS).fetchall()


def test_the_work_limit_applies_to_each_query(connection: GuardedConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_database, "BASE_OPERATIONS", 1_000_000)
    limited = ENDLESS.replace("FROM n)", "FROM n WHERE x < 30000)")

    for _ in range(10):
        with raise_interrupt_cause(connection):
            assert (30_000,) == connection.execute(limited).fetchone()


def test_ctrl_c_ends_a_query(connection: GuardedConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_database, "BASE_OPERATIONS", 10**15)
    timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])

    with pytest.raises(KeyboardInterrupt), raise_interrupt_cause(connection):
        timer.start()
        connection.execute(ENDLESS).fetchall()
    timer.join()


def test_a_table_with_another_schema_is_refused(connection: GuardedConnection) -> None:
    assert has_table(connection, TABLE)
    assert not has_table(connection, TABLE.replace("words", "letters"))
    with pytest.raises(sqlite3.DatabaseError, match="its table 'words' has a different schema"):
        has_table(connection, TABLE.replace("TEXT", "BLOB"))


def test_a_connection_that_only_reads_writes_nothing(path: Path) -> None:
    with contextlib.closing(open_guarded_database(path, seconds=1, read_only=True)) as made:
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            made.execute("INSERT INTO words VALUES ('a')")
        assert [] == made.execute("SELECT * FROM words").fetchall()
