"""
A run's database in a folder whose files are read: opening it other than by SQLite would release this process's locks on it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stepengine import AgentDefinition, Engine, StepContext, Steps, ToolCall, Workspace
from stepengine.errors import DataError
from stepengine.journal import SqliteJournal
from stepengine.journal.secret_scan import scan
from stepengine.journal.sleepers import find_sleeping_runs

OTHER_PROGRAM = """
import sqlite3, sys
from contextlib import closing
with closing(sqlite3.connect(sys.argv[1])) as database:
    database.execute("SELECT count(*) FROM lines").fetchone()
"""
"""The last connection to close deletes the log of a database; while a run holds its locks, this is not the last one."""


def take_snapshot(folder: Path) -> None:
    Workspace(folder).snapshot(folder.with_name("copy"))
    assert ["notes.txt"] == [one.name for one in folder.with_name("copy").glob("[nr]*")]


def scan_for_secrets(folder: Path) -> None:
    with suppress(DataError):
        list(scan([folder]))


def find_sleeping(folder: Path) -> None:
    assert not list(find_sleeping_runs(folder))


def do_nothing(_: Path) -> None:
    pass


@pytest.mark.spec("reliability:JR39")
@pytest.mark.parametrize("act", [do_nothing, take_snapshot, scan_for_secrets, find_sleeping])
def test_run_keeps_locks_on_its_database(tmp_path: Path, act: Callable[[Path], None]) -> None:
    folder, told = tmp_path / "project", list[str]()
    folder.mkdir()
    (folder / "notes.txt").write_text("hello")
    database = folder / "runs.db"

    def handle_steps(_: StepContext) -> Steps:
        read = yield ToolCall("read_files", {"paths": ["runs.db", "runs.db-shm"]})
        told.extend(one["error"] for one in read.tool_result.content[0].value)
        act(folder)
        subprocess.run([sys.executable, "-c", OTHER_PROGRAM, str(database)], check=True)
        return "done"

    agent = AgentDefinition("reader", handle_steps=handle_steps, tools=["read_files"])
    with Engine([agent], workspace=Workspace(folder)) as engine:
        result = engine.run_sync("reader", "Read", journal=SqliteJournal(database, "run"))

    assert (None, "done") == (result.error, result.output)
    assert [
        f"{name!r} cannot be used: this process has it open as an SQLite database"
        for name in ("runs.db", "runs.db-shm")
    ] == told
