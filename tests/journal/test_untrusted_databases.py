"""A database that somebody else made: its schema is checked before anything is read, and every query has a bound."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepengine import AgentDefinition, Engine
from stepengine.cli.app import app
from stepengine.errors import JournalError
from stepengine.journal import SqliteJournal
from stepengine.testing import ScriptedModel, text
from stepengine.workspace.file_formats import mark_own_database
from tests.phrases import NOT_A_DATABASE

ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
LINES = "(run TEXT NOT NULL, number INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (run, number)) WITHOUT ROWID"
SCHEMAS = {
    "an endless view": f"CREATE VIEW lines AS {ENDLESS} 'r' AS run, x AS number, x'7b7d0a' AS line FROM n",
    "a view next to the table": f"CREATE TABLE lines {LINES}; CREATE VIEW letters AS {ENDLESS} x AS number, 'r' AS run FROM n",
    "a trigger": f"CREATE TABLE lines {LINES}; CREATE TRIGGER t AFTER INSERT ON lines BEGIN DELETE FROM lines; END",
    "a virtual table": "CREATE VIRTUAL TABLE lines USING fts5(run, number, line)",
    "a generated column": "CREATE TABLE lines (run TEXT, number INTEGER, line BLOB AS (zeroblob(1000000)) VIRTUAL)",
}
USES: dict[str, Callable[[SqliteJournal], object]] = {
    "runs": lambda journal: journal.runs(),
    "head": lambda journal: journal.head(),
    "records": lambda journal: journal.records(),
    "mailbox": lambda journal: journal.mailbox().read(),
    "writer": lambda journal: journal.writer(),
    "tail": lambda journal: journal.make_start_position().read_new_records(),
}


def made(path: Path, schema: str) -> Path:
    """Make a database that says in its header that stepengine made it, as anybody can."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        mark_own_database(database)
        database.execute("PRAGMA journal_mode=WAL")
        database.executescript(schema)
    return path


@pytest.mark.spec("replay:J50")
@pytest.mark.parametrize(
    ("command", "schema"),
    [
        *[("show", schema) for schema in SCHEMAS],
        ("journal check", "an endless view"),
    ],
)
def test_foreign_schema_is_rejected_by_every_command(tmp_path: Path, command: str, schema: str) -> None:
    path = made(tmp_path / "runs.db", SCHEMAS[schema])

    result = CliRunner().invoke(app, [*command.split(), f"{path}#r"])

    assert result.exit_code in (1, 2)
    assert f"is {NOT_A_DATABASE}" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.spec("replay:J50")
@pytest.mark.parametrize("use", USES)
def test_foreign_schema_is_rejected_by_every_method(tmp_path: Path, use: str) -> None:
    path = made(tmp_path / "runs.db", SCHEMAS["an endless view"])

    with pytest.raises(JournalError, match=f"is {NOT_A_DATABASE}"):
        USES[use](SqliteJournal(path, "r"))


@pytest.mark.spec("replay:J50")
@pytest.mark.parametrize("use", USES)
def test_schema_that_is_not_utf_8_is_damage(tmp_path: Path, use: str) -> None:
    path = made(tmp_path / "runs.db", f"CREATE TABLE lines {LINES}")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA writable_schema=ON")
        database.execute("UPDATE sqlite_master SET sql = CAST(CAST(sql AS BLOB) || x'202d2d20ff' AS TEXT)")

    with pytest.raises(JournalError, match="it is damaged: it contains text that is not UTF-8"):
        USES[use](SqliteJournal(path, "r"))


@pytest.mark.spec("replay:J50")
@pytest.mark.parametrize("use", ["head", "records", "writer", "tail"])
def test_line_that_is_not_utf_8_is_damage(tmp_path: Path, use: str) -> None:
    path = made(
        tmp_path / "runs.db", f"CREATE TABLE lines {LINES}; INSERT INTO lines VALUES ('r', 0, CAST(x'ff' AS TEXT))"
    )

    with pytest.raises(JournalError, match="it is damaged: it contains text that is not UTF-8"):
        USES[use](SqliteJournal(path, "r"))


def circular(path: Path) -> Path:
    """Make a database of which every inner node points at one leaf, so that a walk through it never ends."""
    made(path, f"CREATE TABLE lines {LINES}")
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute("PRAGMA journal_mode=DELETE")
        rows = [("r", number, b"{}" + b" " * 900 + b"\n") for number in range(2_000)]
        database.executemany("INSERT INTO lines VALUES (?, ?, ?)", rows)
        size = database.execute("PRAGMA page_size").fetchone()[0]
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // size):
        at = page * size
        if data[at] != 2:  # an inner page of an index
            continue
        cells = int.from_bytes(data[at + 3 : at + 5])
        first = at + int.from_bytes(data[at + 12 : at + 14])
        child = data[first : first + 4]
        for cell in range(cells):
            place = at + int.from_bytes(data[at + 12 + 2 * cell : at + 14 + 2 * cell])
            data[place : place + 4] = child
        data[at + 8 : at + 12] = child
    path.write_bytes(data)
    return path


@pytest.mark.spec("replay:J50")
def test_circular_rows_are_damage(tmp_path: Path) -> None:
    path = circular(tmp_path / "runs.db")

    with pytest.raises(JournalError, match=r"row \d+ .* out of order"):
        SqliteJournal(path, "r").records()
    with pytest.raises(JournalError, match=r"row \d+ .* out of order"):
        SqliteJournal(path, "r").make_start_position().read_new_records()


@pytest.mark.spec("replay:J50")
async def test_non_bytes_line_is_damage_of_its_record(tmp_path: Path) -> None:
    agent = AgentDefinition("a", system_prompt="You help.")
    async with Engine([agent], models=ScriptedModel([text("hello")])) as engine:
        await engine.run("a", "Hello", journal=SqliteJournal(tmp_path / "runs.db", "r"))
    with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as database, database:
        database.execute("UPDATE lines SET line = 7 WHERE number = (SELECT min(number) FROM lines WHERE number > 0)")

    result = CliRunner().invoke(app, ["show", f"{tmp_path}/runs.db#r"])

    assert 1 == result.exit_code
    assert "record 2" in result.stderr


@pytest.mark.spec("replay:J50")
def test_unreadable_schema_is_damage(tmp_path: Path) -> None:
    path = made(tmp_path / "runs.db", f"CREATE TABLE lines {LINES}")
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damaged = path.read_bytes().replace(b"lineslines", b"l\xb3nesl\xb3nes").replace(b"run TEXT", b"run ((((")
    path.write_bytes(damaged)

    result = CliRunner().invoke(app, ["show", f"{path}#r"])

    assert result.exit_code in (1, 2)
    assert isinstance(result.exception, SystemExit)
    assert "cannot be used as a journal: it is damaged" in " ".join(result.stderr.split())
