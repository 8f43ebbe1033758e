"""An SQLite file that is deleted, replaced or cut off while it is used: whoever writes next is told, and nothing is lost silently."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stepengine import AgentDefinition, Engine, Perform, RunStatus
from stepengine.engine.schedule_book import ScheduleBook
from stepengine.errors import JournalError, JournalWriteFailed, SessionError
from stepengine.journal import SqliteJournal
from stepengine.journal.mailbox import MailboxMessage
from stepengine.server.ledger import Ledger
from stepengine.sessions import SqliteSessions
from stepengine.testing import ScriptedModel

CHANGED = "moved, deleted or replaced"


def delete(path: Path) -> None:
    path.unlink()


def delete_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def delete_index_of_log(path: Path) -> None:
    path.with_name(f"{path.name}-shm").unlink()


def delete_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def replace(path: Path) -> None:
    other = path.with_name("other.db")
    shutil.copyfile(path, other)
    other.rename(path)


def replace_log(path: Path) -> None:
    replace(path.with_name(f"{path.name}-wal"))


def cut_off_log(path: Path) -> None:
    with path.with_name(f"{path.name}-wal").open("r+b") as file:
        file.truncate(0)


HARMS = [delete, delete_log, delete_index_of_log, delete_folder, replace, replace_log]


def run_that_performs(act: object, journal: SqliteJournal) -> tuple[object, list[str]]:
    done: list[str] = []

    def handle_steps(ctx: object) -> object:
        yield from Perform(act)
        yield from Perform(done.append, "after")
        return "end"

    with Engine([AgentDefinition("a", handle_steps=handle_steps)], models=ScriptedModel([]), pricing=None) as engine:
        return engine.run_sync("a", journal=journal), done


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs" / "runs.db"


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.spec("reliability:JR15")
def test_run_ends_when_its_database_is_lost(path: Path, harm) -> None:
    result, done = run_that_performs(lambda: harm(path), SqliteJournal(path, run="r"))

    assert (RunStatus.FAILED, JournalWriteFailed) == (result.status, type(result.error))
    assert CHANGED in str(result.error)
    assert "perform #0 happened, but its result is not in the journal" in result.error.__notes__[0]
    assert done == []


@pytest.mark.spec("reliability:JR15")
def test_run_ends_when_its_write_ahead_log_is_truncated(path: Path) -> None:
    result, done = run_that_performs(lambda: cut_off_log(path), SqliteJournal(path, run="r"))

    assert (RunStatus.FAILED, JournalWriteFailed) == (result.status, type(result.error))
    assert "was truncated" in str(result.error)
    assert done == []


@pytest.mark.spec("reliability:JR15")
def test_run_ends_when_its_database_is_cut_off(path: Path) -> None:
    def harm() -> None:
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        with path.open("r+b") as file:
            file.truncate(512)

    run_that_performs(int, SqliteJournal(path, run="earlier"))
    result, done = run_that_performs(harm, SqliteJournal(path, run="r"))

    assert (RunStatus.FAILED, JournalWriteFailed) == (result.status, type(result.error))
    assert done == []


@pytest.mark.spec("reliability:JR15")
def test_run_continues_when_another_program_shortens_files_without_loss(path: Path) -> None:
    def shorten() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute("DELETE FROM lines WHERE run = 'earlier'")
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    run_that_performs(lambda: "x" * 30_000, SqliteJournal(path, run="earlier"))
    before = path.stat().st_size
    result, done = run_that_performs(shorten, SqliteJournal(path, run="r"))

    assert path.stat().st_size < before
    assert (RunStatus.COMPLETED, ["after"]) == (result.status, done)


def test_ledger_of_a_server_reports_the_loss_of_its_database(path: Path) -> None:
    ledger = Ledger(path)
    try:
        ledger.write([])
        delete(path)
        with pytest.raises(JournalError, match=CHANGED):
            ledger.write([])
    finally:
        ledger.close()


@pytest.mark.spec("reliability:JR15")
@pytest.mark.parametrize("harm", [delete, replace_log])
def test_message_is_rejected_when_the_database_is_lost(path: Path, harm) -> None:
    """The sender uses the connection of the run, which is in the same process."""
    journal = SqliteJournal(path, run="r")
    run_that_performs(int, journal)
    writer = journal.writer()
    try:
        journal.mailbox().send(MailboxMessage(kind="message", topic="t", id="1"))
        harm(path)
        with pytest.raises(JournalError):
            journal.mailbox().send(MailboxMessage(kind="message", topic="t", id="2"))
    finally:
        writer.close()


def test_lost_sessions_are_not_replaced_by_an_empty_store(path: Path) -> None:
    store = SqliteSessions(path)
    session = store.save(store.load("a"))
    delete_folder(path)

    with pytest.raises(SessionError, match=CHANGED):
        store.load("a")
    with pytest.raises(SessionError, match=CHANGED):
        store.save(session)
    assert not path.exists()


def test_lost_schedules_are_not_replaced_by_an_empty_store(path: Path) -> None:
    book, now = ScheduleBook(path), datetime(2026, 1, 1, tzinfo=UTC)
    book.register_and_get_decided_times({"daily": "0 0 * * *"}, now)
    delete(path)

    with pytest.raises(JournalError, match=CHANGED):
        book.claim_time("daily", now, run="r")
    assert not path.exists()


def delete_at_look(monkeypatch: pytest.MonkeyPatch, method: str, end: str, number: int) -> None:
    """Delete a file with this end of its name right before the *number*-th look at it."""
    looks: list[Path] = []
    look = getattr(Path, method)

    def delete_and_look(self: Path, **options: bool) -> object:
        if self.name.endswith(end):
            looks.append(self)
            if len(looks) == number:
                self.unlink()
        return look(self, **options)

    monkeypatch.setattr(Path, method, delete_and_look)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.spec("reliability:JR15")
def test_run_is_locked_although_its_lock_file_is_deleted_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    delete_at_look(monkeypatch, "stat", ".r.lock", number)
    result, done = run_that_performs(int, SqliteJournal(path, run="r"))

    assert (RunStatus.COMPLETED, ["after"]) == (result.status, done)


@pytest.mark.spec("reliability:JR15")
def test_reading_a_database_that_is_deleted_meanwhile_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_that_performs(int, SqliteJournal(path, run="r"))
    delete_at_look(monkeypatch, "lstat", path.name, 2)

    with pytest.raises(JournalError, match=CHANGED):
        SqliteJournal(path, run="r").records()
