"""
Disks that lie: the power goes, a disk is full, a sector cannot be written, at every moment of a run.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepengine import STEP, AgentCall, AgentDefinition, Ask, Engine, Parallel, Perform, RunStatus
from stepengine.errors import JournalWriteFailed
from stepengine.journal import FileJournal, SqliteJournal, check
from stepengine.journal.mailbox import MailboxMessage
from stepengine.journal.sqlite import LockedRun
from tests.journal.test_crash import facts
from tests.power import Power


class Case:
    """
    An agent, what it did to its world, and what its handlers saw of that.
    """

    def __init__(self, world: Any, name: str) -> None:
        self.name, self.done, self.seen = name, world.done, list[str]()
        self.rig = world.rig() if name == "everything" else type(world.rig())(getattr(self, name)(), ["done"] * 9)

    def act(self, name: str) -> str:
        self.done.append(f"fetch {name}")
        return f"did {name}"

    def saw(self, *values: str) -> None:
        self.seen.extend(values)

    def batches(self) -> AgentDefinition[Any]:
        def branch(ctx: Any) -> Any:
            for n in range(2):
                self.saw((yield from Perform(self.act, f"{ctx.prompt}{n}")))

        def handle_steps(ctx: Any) -> Any:
            self.saw((yield from Perform(self.act, "first")))
            self.saw(*(yield from Parallel(*[Perform(self.act, f"p{n}") for n in range(4)])))
            yield from Parallel(*[AgentCall(kid, kid.id) for kid in kids])
            yield STEP
            return self.saw((yield from Perform(self.act, "last"))) or "the end"

        kids = [AgentDefinition(name, handle_steps=branch) for name in ("left", "right")]
        return AgentDefinition("batches", model="t/m", spawnable_agents=kids, handle_steps=handle_steps)

    def asking(self) -> AgentDefinition[Any]:
        def handle_steps(ctx: Any) -> Any:
            self.saw((yield from Perform(self.act, "before")))
            answer = yield from Ask("Go on?")
            self.saw((yield from Perform(self.act, "after")))
            return answer

        return AgentDefinition("asking", handle_steps=handle_steps)

    def record(self, journal: Any) -> Any:
        return self.rig.record(journal, answers={"Go on?": "yes"})

    def resume(self, journal: Any) -> Any:
        result = self.rig.resume(journal)
        return (
            self.rig.resume(journal, {q.id: "yes" for q in result.pending_questions})
            if result.pending_questions
            else result
        )


NAMES = ["asking", pytest.param("batches", marks=pytest.mark.deep), pytest.param("everything", marks=pytest.mark.deep)]
ONCE = ("send", "fetch")
"""How deeds begin that must not happen twice."""


@pytest.fixture
def case(fresh_world: Any) -> Callable[[str], Case]:
    return lambda name: Case(fresh_world(), name)


def goes_on(
    made: Callable[[str], Case], name: str, journal: Any, before: tuple[list[str], list[str]], expected: Any
) -> bool:
    """
    Resume from what a disk kept, and judge it by what had been done and seen before; return whether anything was in doubt.
    """
    done, seen = before
    if not journal.records():
        assert ([], []) == (done, seen), "the whole run is lost"
        return False
    history = journal.history()
    recorded = str([history.outcome(known) for known in history.results.values()])
    assert [] == [value for value in seen if value not in recorded], "what a handler saw is lost"
    sure, doubtful = facts(history)
    again = made(name)
    result = again.resume(journal)
    assert not sure & set(again.done), "what is recorded was done again"
    assert not {d for d in done if d.startswith(ONCE)} & set(again.done), "what was done was done again"
    if not doubtful:
        assert told(expected) == told(result), result.error
    return bool(doubtful)


def told(result: Any) -> Any:
    """Return how a run ended, without the chance that is drawn for each."""
    output = result.output
    return result.status, {**output, "dice": None} if isinstance(output, dict) else output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R1", "reliability:R2", "replay:J32")
@pytest.mark.parametrize("name", NAMES)
def test_run_continues_from_what_survives_a_power_cut(name: str, case: Callable[[str], Case], tmp_path: Path) -> None:
    """
    The journal stands in folders that are made for it.
    """
    recording = case(name)
    (tmp_path / "disk").mkdir()
    with Power(tmp_path / "disk", lambda: (list(recording.done), list(recording.seen))) as power:
        expected = recording.record(FileJournal(tmp_path / "disk" / "of" / "runs" / "one.jsonl"))
    images, in_doubt = 0, 0
    for number, cut in enumerate(power.cuts):
        for image in cut.images():
            images += 1
            folder = image.written_to(tmp_path / f"{number}-{images}")
            journal = FileJournal(folder / "of" / "runs" / "one.jsonl", sync="write")
            in_doubt += goes_on(case, name, journal, cut.noted, expected)

    assert expected.status is RunStatus.COMPLETED
    assert len(power.cuts) > 8
    assert images > 4 * len(power.cuts)
    assert in_doubt > 2


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:JR08")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("call", "number"),
    [("write", errno.EIO), ("write", errno.ENOSPC), ("sync", errno.EIO)],
    ids=["write EIO", "write ENOSPC", "sync EIO"],
)
def test_run_continues_after_any_failed_disk_call(
    name: str, call: str, number: int, case: Callable[[str], Case], tmp_path: Path
) -> None:
    expected = case(name).record(FileJournal(tmp_path / "undisturbed.jsonl"))
    failed = 0
    for at in range(1, 1_000):
        faulty, path = Faulty(call, at, number), tmp_path / f"{at}.jsonl"
        first = case(name)
        result = first.record(faulty.under(FileJournal(path)))
        if faulty.calls < at:
            break
        failed += result.status is RunStatus.FAILED
        if result.status is RunStatus.FAILED:
            assert isinstance(result.error, JournalWriteFailed)
            goes_on(case, name, FileJournal(path, sync="write"), (first.done, first.seen), expected)
        else:  # the room that was kept for it took the record
            assert (number, told(expected)) == (errno.ENOSPC, told(result))
            assert check(path)

    assert faulty.calls < at
    assert failed == (0 if number == errno.ENOSPC else at - 1)


class Faulty:
    """
    A disk that fails one call, the one of that number, and no other.
    """

    def __init__(self, call: str, at: int, number: int) -> None:
        self.call, self.at, self.number, self.calls = call, at, number, 0

    def under(self, journal: FileJournal) -> FileJournal:
        journal._write, journal._to_disk = self.write, self.sync
        return journal

    def write(self, descriptor: int, data: bytes) -> int:
        self.count("write")
        return os.write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        self.count("sync")

    def count(self, call: str) -> None:
        if call == self.call:
            self.calls += 1
            if self.calls == self.at:
                raise OSError(self.number, os.strerror(self.number))


# --- SQLite -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def commits(folder: Path, note: Callable[[], Any]) -> Iterator[list[tuple[Any, dict[str, bytes]]]]:
    """
    Note the files of a database after each commit, and before the first.
    """
    found: list[tuple[Any, dict[str, bytes]]] = []
    append = LockedRun.append

    def noting(self: LockedRun, data: bytes) -> None:
        assert ("wal", 2) == tuple(
            self.database.get_or_open_writer().execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous")
        ), "a commit is not durable"
        found.append((note(), files(folder)))
        append(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LockedRun, "append", noting)
        yield found


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith("runs.db")}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.usefixtures("synced_database")
@pytest.mark.spec("reliability:JR39", "reliability:R1", "reliability:R2")
@pytest.mark.parametrize("name", NAMES)
def test_sqlite_run_continues_from_its_last_commit_after_power_cut(
    name: str, case: Callable[[str], Case], tmp_path: Path
) -> None:
    """
    What was not committed stands in the log behind the commits, and is torn anywhere.
    """
    recording, folder = case(name), tmp_path / "disk"
    folder.mkdir()
    with commits(folder, lambda: (list(recording.done), list(recording.seen))) as found:
        expected = recording.record(SqliteJournal(folder / "runs.db", "one"))
    images = 0
    for (noted, before), (_, after) in itertools.pairwise(found):
        kept, whole = before["runs.db-wal"], after["runs.db-wal"]
        assert whole.startswith(kept)
        sizes = {len(kept), len(whole) - 1, *range(len(kept), len(whole), 1_536)}
        for size in sorted(sizes):
            images += 1
            made = tmp_path / str(images)
            made.mkdir()
            (made / "runs.db").write_bytes(before["runs.db"])
            (made / "runs.db-wal").write_bytes(whole[:size])
            goes_on(case, name, SqliteJournal(made / "runs.db", "one"), noted, expected)

    assert expected.status is RunStatus.COMPLETED
    assert images > 20


@pytest.mark.spec("reliability:JR08", "reliability:JR39")
@pytest.mark.parametrize("name", ["batches", pytest.param("everything", marks=pytest.mark.deep)])
def test_run_continues_after_the_database_is_full_at_any_page(
    name: str, case: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = case(name).record(SqliteJournal(tmp_path / "undisturbed.db", "one"))
    append, failed = LockedRun.append, 0
    for pages in range(2, 1_000):
        monkeypatch.setattr(
            LockedRun,
            "append",
            lambda self, data, most=pages: (
                self.database.get_or_open_writer().execute(f"PRAGMA max_page_count={most}") and append(self, data)
            ),
        )
        journal, first = SqliteJournal(tmp_path / f"{pages}.db", "one"), case(name)
        result = first.record(journal)
        if result.status is RunStatus.COMPLETED:
            break
        failed += 1
        assert isinstance(result.error, JournalWriteFailed)
        assert "full" in str(result.error)
        monkeypatch.setattr(LockedRun, "append", append)
        goes_on(case, name, journal, (first.done, first.seen), expected)

    assert (told(expected), True) == (told(result), failed > 1)


@pytest.mark.spec("waiting:WT2")
def test_posted_messages_survive_a_power_cut(tmp_path: Path) -> None:
    def handle_steps(ctx: Any) -> Any:
        yield from Perform(lambda: 1)

    posted: list[int] = []
    (tmp_path / "disk").mkdir()
    path = tmp_path / "disk" / "one.jsonl"
    with Power(tmp_path / "disk", lambda: list(posted)) as power:
        with Engine([AgentDefinition("plain", handle_steps=handle_steps)]) as engine:
            engine.run_sync("plain", journal=path)
        for n in range(4):
            # No object of a sender before knows what it knew.
            FileJournal(path).mailbox().send(MailboxMessage(kind="message", topic="t", value=n))
            posted.append(n)
    images = 0
    for number, cut in enumerate(power.cuts):
        for image in cut.images():
            images += 1
            journal = FileJournal(image.written_to(tmp_path / f"{number}-{images}") / "one.jsonl")
            if not journal.is_there():
                continue
            found = [letter.value for letter in journal.mailbox().read()[0]]
            assert cut.noted == found[: len(cut.noted)]
            assert len(found) <= len(cut.noted) + 1
            if journal.head() is not None:
                journal.mailbox().send(MailboxMessage(kind="message", topic="t", value="next"))
                assert [*found, "next"] == [letter.value for letter in journal.mailbox().read()[0]]

    assert [0, 1, 2, 3] == power.cuts[-1].noted
    assert images > 2 * len(power.cuts)
