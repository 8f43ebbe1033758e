"""
The index of waking: which runs sleep and when they wake, for one look-up, and made anew from the journals whenever it is in doubt.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stepengine.errors import InputError, JournalError, JournalWriteFailed
from stepengine.journal import FileJournal, SqliteJournal, wake_index
from stepengine.journal.mailbox import MailboxMessageKind
from stepengine.journal.wake_index import WAKING, Sleeping, WakeIndex
from tests.journal.forked import FORKS, in_child
from tests.phrases import NOT_A_DATABASE

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


class Bench:
    """
    A place of journals, what a reading of them would find, and how often they were read.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.sleeping: list[Sleeping] = []
        self.readings = 0

    @property
    def file(self) -> Path:
        return self.place / WAKING if self.place.is_dir() else self.place

    def read(self) -> list[Sleeping]:
        self.readings += 1
        return list(self.sleeping)

    def index(self) -> WakeIndex:
        return WakeIndex.for_store(self.place, self.read)


@pytest.fixture(params=["folder", "database"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path if request.param == "folder" else tmp_path / "runs.db")


@pytest.fixture
def index(bench: Bench) -> Iterator[WakeIndex]:
    with bench.index() as made:
        yield made


def names(found: list[Sleeping]) -> list[str]:
    return [one.run for one in found]


@pytest.mark.spec("waiting:WT21")
def test_due_runs_are_ordered_by_wake_time(index: WakeIndex) -> None:
    index.record_sleep("late", NOW + HOUR, {"time"}, "nightly")
    index.record_sleep("second", NOW, {"time"}, "nightly")
    index.record_sleep("first", NOW - HOUR, {"time", "message"}, "nightly")
    index.record_sleep("person", None, {"question"}, "asker")

    assert ["first", "second"] == names(index.list_due(NOW))
    assert ["first"] == names(index.list_due(NOW, 1))
    assert [] == index.list_due(NOW - 2 * HOUR)
    assert NOW - HOUR == index.find_next_wake_time()
    assert Sleeping("first", NOW - HOUR, {"time", "message"}, "nightly") == index.list_due(NOW)[0]
    assert ["first", "late", "person", "second"] == names(index.list_all())


def test_last_note_of_a_run_holds(index: WakeIndex) -> None:
    index.record_sleep("one", NOW, {"time"}, "a")
    index.record_sleep("one", NOW + HOUR, {"time"}, "b")

    assert [] == index.list_due(NOW)
    assert [Sleeping("one", NOW + HOUR, {"time"}, "b")] == index.list_all()

    index.remove_run("one")
    index.remove_run("one")

    assert [] == index.list_all()
    assert index.find_next_wake_time() is None


@pytest.mark.parametrize(
    ("waits_for", "kind", "wakes"),
    [
        ({"message"}, "message", True),
        ({"question"}, "message", False),
        ({"question"}, "answer", True),
        ({"time"}, "cancel", True),
        ({"question"}, "input", True),
    ],
)
def test_matching_message_makes_a_waiting_run_due(
    index: WakeIndex, waits_for: set[str], kind: MailboxMessageKind, wakes: bool
) -> None:
    index.record_sleep("one", None, waits_for, "a")

    assert wakes == index.wake_for_message("one", kind)
    assert not index.wake_for_message("other", kind)
    assert (["one"] if wakes else []) == names(index.list_due(NOW))
    assert wakes == (index.find_next_wake_time() is not None)

    index.record_sleep("one", NOW + HOUR, waits_for, "a")

    assert [] == index.list_due(NOW), "what was said last holds"


def test_run_that_cannot_wake_does_not_block_others(index: WakeIndex) -> None:
    index.record_sleep("broken", NOW, {"time"}, "a")
    index.record_sleep("fine", NOW, {"time"}, "a")

    index.postpone("broken", NOW + HOUR)

    assert ["fine"] == names(index.list_due(NOW, 1))
    assert [Sleeping("broken", NOW, {"time"}, "a")] == [one for one in index.list_all() if one.run == "broken"]
    assert ["fine", "broken"] == names(index.list_due(NOW + HOUR))


@pytest.mark.parametrize(
    "bad", [{"wakes_at": NOW.replace(tzinfo=None)}, {"run": ""}, {"run": "x" * 2_000}, {"kinds": {"a b"}}]
)
def test_invalid_sleep_entry_is_rejected(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Sleeping(**{"run": "one", **bad})


def test_a_time_without_its_zone_is_refused(index: WakeIndex) -> None:
    with pytest.raises(InputError):
        index.list_due(datetime(2026, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("place", ["nowhere", "run.jsonl", "runs.db#one"])
def test_invalid_store_location_is_rejected(tmp_path: Path, place: str) -> None:
    with pytest.raises(JournalError, match="is neither a folder nor a database"):
        WakeIndex.for_store(tmp_path / place, list)


# --- made anew --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("waiting:WT21")
def test_missing_index_is_rebuilt_once_from_the_journals(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.sleeping = [Sleeping("one", NOW, {"time"}, "a"), Sleeping("two", None, {"question"}, "b")]
    with caplog.at_level(logging.INFO, "stepengine.journal"), bench.index() as index, bench.index() as other:
        assert bench.sleeping == index.list_all()
        assert bench.sleeping == other.list_all()
        index.remove_run("one")
        assert ["two"] == names(other.list_all())

    assert 1 == bench.readings
    assert "with 2 sleeping runs: it was missing" in caplog.text
    assert 0o600 == stat.S_IMODE(bench.file.stat().st_mode)


def spoil(sql: str) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as database:
            database.executescript(sql)

    return act


DAMAGE = {
    "another version": spoil("UPDATE waking SET version = 99"),
    "not filled to its end": spoil("UPDATE waking SET is_whole = 0"),
    "a state of text": spoil("UPDATE waking SET version = 'x'"),
    "a state that is not UTF-8": spoil("UPDATE waking SET version = CAST(x'ff' AS TEXT)"),
    "a name that is not UTF-8": spoil("UPDATE sleeping SET run = CAST(x'ff' AS TEXT)"),
    "no state": spoil("DELETE FROM waking"),
    "no rows": spoil("DROP TABLE sleeping"),
    "other columns": spoil("DROP TABLE sleeping; CREATE TABLE sleeping (run TEXT)"),
    "a row that is none": spoil("UPDATE sleeping SET wakes_at = 'soon'"),
    "a time that no calendar has": spoil("UPDATE sleeping SET wakes_at = 9000000000000000000"),
    "a name of bytes": spoil("UPDATE sleeping SET run = x'00', kinds = 7"),
}


@pytest.mark.spec("waiting:WT21")
@pytest.mark.parametrize(("damage", "is_open"), [*[(each, True) for each in DAMAGE], ("no rows", False)])
def test_unusable_index_is_rebuilt(bench: Bench, damage: str, is_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    bench.sleeping = [Sleeping("one", NOW, {"time"}, "a")]
    with bench.index() as index:
        index.list_all()
        if not is_open:
            index.close()
        DAMAGE[damage](bench.file)
        with caplog.at_level(logging.INFO, "stepengine.journal"):
            assert bench.sleeping == index.list_due(NOW)
            assert bench.sleeping == index.list_all()

    assert 2 == bench.readings
    assert "rebuilt the wake index" in caplog.text


@pytest.mark.spec("waiting:WT21")
@pytest.mark.parametrize("due", ["'soon'", "9000000000000000000"])
def test_index_with_an_unreadable_due_time_is_rebuilt(bench: Bench, due: str) -> None:
    bench.sleeping = [Sleeping("one", NOW, {"time"}, "a")]
    with bench.index() as index:
        index.list_all()
        spoil(f"UPDATE sleeping SET due = {due}")(bench.file)

        assert NOW == index.find_next_wake_time()
    assert 2 == bench.readings


@pytest.mark.spec("reliability:JR49")
@pytest.mark.parametrize("content", [b"garbage" * 999, b"SQLite format 3\0" + b"\xff" * 5_000])
def test_file_of_another_program_is_not_replaced_by_the_index(tmp_path: Path, content: bytes) -> None:
    bench = Bench(tmp_path)
    bench.file.write_bytes(content)

    with bench.index() as index, pytest.raises(JournalWriteFailed, match=f"is {NOT_A_DATABASE}"):
        index.list_all()
    assert (content, [bench.file]) == (bench.file.read_bytes(), [*tmp_path.iterdir()])


@pytest.mark.spec("waiting:WT21")
def test_damaged_database_of_the_index_is_rebuilt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.sleeping = [Sleeping("one", NOW, {"time"}, "a")]
    with bench.index() as index:
        index.list_all()
    data = bench.file.read_bytes()
    bench.file.write_bytes(data[:100] + b"\xff" * (len(data) - 100))

    with bench.index() as index:
        assert bench.sleeping == index.list_all()


@pytest.mark.spec("waiting:WT21")
def test_index_removed_in_use_is_rebuilt_by_the_next_user(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    with bench.index() as index, bench.index() as other:
        index.record_sleep("one", NOW, {"time"}, "a")
        other.list_all()
        for path in tmp_path.glob(f"{WAKING}*"):
            path.unlink()
        bench.sleeping = [Sleeping("one", NOW, {"time"}, "a")]

        assert ["one"] == names(other.list_due(NOW))
        index.record_sleep("two", NOW, {"time"}, "a")
        assert ["one", "two"] == names(other.list_due(NOW))
    with bench.index() as later:
        assert ["one", "two"] == names(later.list_all())
    assert 2 == bench.readings


def test_rebuild_error_is_raised_and_retried(bench: Bench) -> None:
    def read() -> list[Sleeping]:
        bench.readings += 1
        if bench.readings == 1:
            msg = "cannot be read"
            raise JournalError(msg)
        return [Sleeping("one", NOW, {"time"}, "a")]

    with WakeIndex.for_store(bench.place, read) as index:
        with pytest.raises(JournalError, match="cannot be read"):
            index.list_due(NOW)
        assert ["one"] == names(index.list_due(NOW))


# --- beside journals --------------------------------------------------------------------------------------------------


def test_index_is_neither_a_journal_nor_a_run(tmp_path: Path) -> None:
    with WakeIndex.for_store(tmp_path, list) as index:
        index.record_sleep("run.jsonl", NOW, {"time"}, "a")
        beside = str(FileJournal(tmp_path / "run").make_missing_error())
    with WakeIndex.for_store(tmp_path / "runs.db", list) as index:
        index.record_sleep("one", NOW, {"time"}, "a")

        assert [] == SqliteJournal(tmp_path / "runs.db").runs()
    assert WAKING not in beside
    assert not list(tmp_path.glob("*.json*"))


def test_link_in_place_of_the_index_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"")
    (tmp_path / WAKING).symlink_to(tmp_path / "other")

    with WakeIndex.for_store(tmp_path, list) as index, pytest.raises(JournalError, match="is a symbolic link"):
        index.record_sleep("one", NOW, {"time"}, "a")
    assert b"" == (tmp_path / "other").read_bytes()


# --- many at once -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@FORKS
def test_a_forked_child_uses_the_index_of_its_parent(index: WakeIndex) -> None:
    index.record_sleep("parent", NOW, {"time"}, "a")

    assert 0 == in_child(lambda: index.record_sleep("child", NOW, {"time"}, "a"))
    assert ["child", "parent"] == names(index.list_due(NOW))


# --- what a look costs ------------------------------------------------------------------------------------------------


@pytest.mark.speed
@pytest.mark.spec("waiting:WT21")
def test_lookup_of_due_runs_uses_the_index(bench: Bench, index: WakeIndex) -> None:
    index.record_sleep("due", NOW, {"time"}, "a")
    with closing(sqlite3.connect(bench.file)) as database:
        plan = [row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {wake_index.DUE}", (0, 1))]

    assert ["SEARCH sleeping USING INDEX sleeping_by_time (due<?)"] == plan
