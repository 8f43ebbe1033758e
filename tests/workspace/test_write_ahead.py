"""Databases with a write-ahead log: why one cannot be used is said so that somebody can do something about it."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import subprocess
import sys

import pytest

from stepengine.workspace.write_ahead import Database, describe_database_error


def error_of(path):
    with pytest.raises(sqlite3.Error) as caught, contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("SELECT 1 FROM missing")
    return caught.value


def test_an_unopenable_database_reports_exhausted_descriptors(tmp_path, monkeypatch):
    refused = error_of(tmp_path / "missing" / "runs.db")
    alone = describe_database_error(refused, 5)

    def full(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", full)
    among = describe_database_error(refused, 5)
    monkeypatch.undo()

    assert "unable to open database file" == alone
    assert among.startswith("unable to open database file: too many open files: this process may have ")


def test_a_locked_database_reports_the_wait_time(tmp_path):
    holder = sqlite3.connect(tmp_path / "runs.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    other = sqlite3.connect(tmp_path / "runs.db", timeout=0)
    with pytest.raises(sqlite3.OperationalError) as caught:
        other.execute("CREATE TABLE t (x)")
    other.close()
    holder.close()

    assert "another program has locked it for 5 s" in describe_database_error(caught.value, 5)


def test_a_closed_database_opens_no_connection(tmp_path):
    path = tmp_path / "runs.db"
    path.touch()
    one = Database.open(path, path.lstat(), seconds=1.0)
    other = one.share()
    other.close()
    with one.read_connection() as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)

    one.close()

    for late in (one.read_connection, one.write_transaction):
        with pytest.raises(OSError, match="it was closed"), late():
            pass
    assert not one.connections()


RECOVERS = """
import fcntl, sys, time
with open(sys.argv[1], "r+b") as index:
    fcntl.lockf(index, fcntl.LOCK_EX, 3, 120)
    index.write(bytes(96))
    index.flush()
    print("holds", flush=True)
    time.sleep(0.1)
"""
"""What a process does that recovers the log after a kill: the index is void, and the locks to write, checkpoint and recover are held."""


@pytest.mark.skipif(sys.platform != "linux", reason="locks bytes of the index as SQLite does it on Linux")
def test_a_process_that_recovers_the_log_is_waited_for(tmp_path):
    path = tmp_path / "runs.db"
    path.touch()
    database = Database.open(path, path.lstat(), seconds=30.0)
    try:
        with database.lock, database.write_transaction() as connection:
            connection.execute("CREATE TABLE t (x)")
        command = [sys.executable, "-I", "-S", "-c", RECOVERS, f"{path}-shm"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert b"holds\n" == other.stdout.readline()
            with database.lock, database.write_transaction() as connection:
                connection.execute("INSERT INTO t VALUES (1)")
        with database.read_connection() as connection:
            assert [(1,)] == connection.execute("SELECT x FROM t").fetchall()
    finally:
        database.close()
