"""
Many runs at once: with fewer descriptors than runs, into one database, beside other processes, and through forks and kills.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Perform, RunResult, RunStatus
from stepengine.errors import JournalLocked, JournalWriteFailed
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, check, locked_file
from stepengine.journal.locked_file import LockedFile
from stepengine.journal.records import Record
from stepengine.journal.sqlite import LockedRun
from stepengine.workspace.write_ahead import Database
from tests.journal.forked import FORKS, in_child

EFFECTS = 3
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only there a lock outlives the descriptor of its file")


def at_once(count: int, journal: Callable[[int], Journal]) -> list[RunResult[Any]]:
    """Run an agent so many times; none goes on before all have begun."""

    async def go() -> list[RunResult[Any]]:
        all_have_begun = asyncio.Barrier(count)

        async def later(n: int) -> int:
            if not n:
                await asyncio.wait_for(all_have_begun.wait(), 30)
            return n

        def handle_steps(ctx: Any) -> Any:
            total = 0
            for n in range(EFFECTS):
                total += yield from Perform(later, n)
            return total

        async with Engine([AgentDefinition("adding", handle_steps=handle_steps)]) as engine:
            return list(await asyncio.gather(*[engine.run("adding", journal=journal(n)) for n in range(count)]))

    return asyncio.run(go())


@cache
def records_of_a_run() -> list[Record]:
    return at_once(1, lambda _: MemoryJournal())[0].journal.records()


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Let this process open only so many files more than it has open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = [int(file.name) for file in Path("/proc/self/fd").iterdir()]
    limit = next(n for n in range(more, 10_000) if n - sum(number < n for number in is_open) >= more)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def two_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Two journals may be open at once.
    """
    monkeypatch.setattr(locked_file, "get_open_file_limit", lambda: 2)


# --- descriptors ------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@ON_LINUX
@pytest.mark.spec("reliability:HP5", "reliability:R10")
@pytest.mark.parametrize("store", ["file", "sqlite"])
def test_more_runs_than_descriptors_complete(tmp_path: Path, store: str) -> None:
    places: dict[str, Callable[[int], Journal]] = {
        "file": lambda n: FileJournal(tmp_path / f"{n}.jsonl", sync="write"),
        "sqlite": lambda _: SqliteJournal(tmp_path / "runs.db"),
    }
    with few_descriptors(40):
        results = at_once(45, places[store])

    assert {(RunStatus.COMPLETED, 3)} == {(result.status, result.output) for result in results}
    assert all(check(result.journal) for result in results)
    assert 45 == len({result.journal.name for result in results})
    assert [] == list(tmp_path.glob(".*"))


@pytest.mark.deep
@pytest.mark.smoke
@ON_LINUX
@FORKS
@pytest.mark.usefixtures("two_open")
@pytest.mark.spec("reliability:JR13", "reliability:JR14")
@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_temporarily_closed_file_stays_locked_by_its_process(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    journal = FileJournal(path) if kind == "file" else SqliteJournal(path, "one")
    writer: Any = journal.writer()
    held_file = [*LockedFile._all][-1]
    others = [FileJournal(tmp_path / str(n)).writer() for n in range(3)]
    assert None is held_file.descriptor, "its file is open, so this shows nothing"

    def is_refused() -> None:
        with pytest.raises(JournalLocked) as refused:
            journal.writer()
        assert os.getppid() == refused.value.pid

    try:
        with pytest.raises(JournalLocked, match="another run of this process"):
            journal.writer()
        assert 0 == in_child(is_refused)
        for record in records_of_a_run():
            writer.append(record)
            writer.commit()
            for other in others:
                other.commit()
        assert 0 == in_child(is_refused)
    finally:
        for each in (writer, *others):
            each.close()

    assert 0 == in_child(lambda: journal.writer().close())
    assert check(journal)


@ON_LINUX
@pytest.mark.usefixtures("two_open")
@pytest.mark.spec("reliability:JR15")
@pytest.mark.parametrize("harm", ["delete", "replace"])
def test_file_replaced_while_closed_stops_the_run(tmp_path: Path, harm: str) -> None:
    writer = FileJournal(tmp_path / "run").writer()
    others = [FileJournal(tmp_path / str(n)).writer() for n in range(3)]
    (tmp_path / "run").unlink()
    if harm == "replace":
        (tmp_path / "run").touch()
    writer.append(records_of_a_run()[0])
    with pytest.raises(JournalWriteFailed, match="moved, deleted or replaced"):
        writer.commit()
    for each in (writer, *others):
        each.close()


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_too_many_open_files_error_names_ulimit(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked_file, "_load_libc", lambda: None)
    monkeypatch.setattr(LockedFile, "_keeping", {})
    writers = []
    with few_descriptors(30), pytest.raises(JournalWriteFailed) as refused:
        for n in range(60):
            journal = (
                FileJournal(tmp_path / f"{n}.jsonl") if kind == "file" else SqliteJournal(tmp_path / "runs.db", str(n))
            )
            writers.append(journal.writer())
    for writer in writers:
        writer.append(records_of_a_run()[0])
        writer.close()
    said = str(refused.value)

    assert "too many open files: this process may have" in said
    assert "ulimit -n" in said
    assert said.endswith("nothing was run")
    assert 60 > len(writers) > 10


# --- one connection ---------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R1", "reliability:JR39")
def test_runs_that_are_ready_at_once_share_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, connected = [], Database._connect
    monkeypatch.setattr(Database, "_connect", lambda self: opened.append(self) or connected(self))
    results = at_once(20, lambda _: SqliteJournal(tmp_path / "runs.db"))

    assert {RunStatus.COMPLETED} == {result.status for result in results}
    assert len(opened) <= 2, "one that writes, one that reads"
    assert not Database._known


@pytest.mark.spec("reliability:JR39", "reliability:JR14")
def test_failed_run_does_not_affect_shared_commits(tmp_path: Path) -> None:
    """
    Somebody without a lock wrote rows of its run meanwhile.
    """
    path, records = tmp_path / "runs.db", records_of_a_run()
    writers = {name: SqliteJournal(path, name).writer() for name in ("a", "b", "c")}
    with closing(sqlite3.connect(path)) as other, other:
        other.execute("INSERT INTO lines VALUES ('b', 0, 'foreign')")
    for writer in writers.values():
        writer.append(records[0])
        writer.announce_commit()
    writers["a"].commit()
    with pytest.raises(JournalWriteFailed, match="UNIQUE"):
        writers["b"].commit()
    with pytest.raises(JournalWriteFailed, match="UNIQUE"):
        writers["b"].append(records[1])
    for name in ("a", "c"):
        assert 1 == len(SqliteJournal(path, name).records())
    for writer in writers.values():
        writer.close()


@pytest.mark.spec("reliability:R1")
def test_commit_returns_only_after_its_lines_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    insert, may_go, begun = LockedRun.insert_rows, threading.Event(), threading.Event()
    records, journal = records_of_a_run(), SqliteJournal(tmp_path / "runs.db", "along")
    leader, other = SqliteJournal(tmp_path / "runs.db", "leader").writer(), journal.writer()

    def slow(self: LockedRun, rows: list[Any]) -> None:
        begun.set()
        assert may_go.wait(50)
        insert(self, rows)

    monkeypatch.setattr(LockedRun, "insert_rows", slow)
    for writer in (leader, other):
        writer.append(records[0])
        writer.announce_commit()
    threads = [threading.Thread(target=leader.commit), threading.Thread(target=other.close)]
    threads[0].start()
    assert begun.wait(50)
    threads[1].start()
    threads[1].join(0.05)
    assert threads[1].is_alive(), "it was given back before it was stored"
    may_go.set()
    for thread in threads:
        thread.join()

    assert 1 == len(journal.records())
    leader.close()


# --- forks and kills --------------------------------------------------------------------------------------------------


@FORKS
@pytest.mark.spec("reliability:SS14", "reliability:JR39")
def test_forked_process_opens_its_own_connection(tmp_path: Path) -> None:
    """
    SQLite forbids to carry a connection through a fork, whether it is used there or not.
    """
    path, records = tmp_path / "runs.db", records_of_a_run()
    writer: Any = SqliteJournal(path, "parent").writer()
    writer.append(records[0])
    writer.commit()

    def work() -> None:
        assert writer.store.database._writer is None, "the child has the parent's connection"
        for name in ("child", "second"):
            mine = SqliteJournal(path, name).writer()
            for record in records:
                mine.append(record)
                mine.commit()
            mine.close()
        with pytest.raises(JournalLocked):
            SqliteJournal(path, "parent").writer()

    assert 0 == in_child(work)
    for record in records[1:]:
        writer.append(record)
        writer.commit()
    writer.close()
    with closing(sqlite3.connect(path)) as database:
        assert [("ok",)] == database.execute("PRAGMA integrity_check").fetchall()
    assert {"parent": len(records), "child": len(records), "second": len(records)} == {
        name: len(SqliteJournal(path, name).records()) for name in SqliteJournal(path).runs()
    }


@ON_LINUX
@FORKS
@pytest.mark.spec("reliability:JR13")
@pytest.mark.parametrize("bound", [2, 100])
def test_lock_ends_with_its_process_despite_forked_children(
    tmp_path: Path, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked_file, "get_open_file_limit", lambda: bound)
    writers: list[Any] = []

    def be_killed_after_a_fork() -> None:
        writers.extend(FileJournal(tmp_path / str(n)).writer() for n in range(4))
        writers.extend(SqliteJournal(tmp_path / "runs.db", str(n)).writer() for n in range(4))
        reading, writing = os.pipe()
        orphan = os.fork()
        if not orphan:
            os.write(writing, b"1")  # by now it has given back the locks that it inherited
            time.sleep(60)
            os._exit(0)
        os.read(reading, 1)
        (tmp_path / "orphan").write_text(str(orphan))
        os.kill(os.getpid(), signal.SIGKILL)

    ended = in_child(be_killed_after_a_fork)
    orphan = int((tmp_path / "orphan").read_text())
    try:
        assert -signal.SIGKILL == ended
        for n in range(4):
            FileJournal(tmp_path / str(n)).writer().close()
            SqliteJournal(tmp_path / "runs.db", str(n)).writer().close()
    finally:
        os.kill(orphan, signal.SIGKILL)


BUSY = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
database.execute("CREATE TABLE IF NOT EXISTS other (n)")
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    database.execute("BEGIN IMMEDIATE")
    time.sleep(0.03)
    database.execute("INSERT INTO other VALUES (1)")
    database.execute("COMMIT")
"""


@pytest.mark.deep
@pytest.mark.spec("reliability:JR39")
def test_busy_database_is_awaited_while_others_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Two processes hold the database in turns, nearly all the time: a turn is shorter than `BUSY_SECONDS`, all turns together are longer.
    """
    # Many turns long: on a busy machine one of them may be several times as long as it sleeps.
    monkeypatch.setattr("stepengine.journal.sqlite.BUSY_SECONDS", 1.0)
    path = tmp_path / "runs.db"
    at_once(1, lambda _: SqliteJournal(path))
    command = [sys.executable, "-c", BUSY, str(path), "2.5"]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None
            assert b"ready\n" == other.stdout.readline()
        results = [result for _ in range(3) for result in at_once(5, lambda _: SqliteJournal(path))]
    finally:
        for other in others:
            other.communicate()

    assert {RunStatus.COMPLETED} == {result.status for result in results}, results[0].error
