"""
``check_journal``: our stores keep the promises, and a store that breaks one is told which.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stepengine.errors import JournalLocked
from stepengine.journal import FileJournal, Journal, LineJournal, MemoryJournal, SqliteJournal
from stepengine.testing import check_journal


def in_file(folder: Path, name: str) -> Journal:
    return FileJournal(folder / f"{name}.jsonl", sync="write")


def in_database(folder: Path, name: str) -> Journal:
    return SqliteJournal(folder / "runs.db", name)


def in_named_folder(name: str, *, folder: Path) -> Journal:
    return in_file(folder, name)


class Bytes(LineJournal):
    """
    The smallest store: bytes in a dict.
    """

    stored: dict[str, bytes]
    locks: set[str]

    def __init__(self, stored: dict[str, bytes], locks: set[str], run: str) -> None:
        super().__init__()
        self.stored, self.locks, self.run = stored, locks, run

    @property
    def name(self) -> str:
        return self.run

    def read_bytes(self, start: int) -> bytes:
        return self.stored.get(self.run, b"")[start:]

    def append_bytes(self, data: bytes, at: int) -> None:
        if len(self.stored.get(self.run, b"")) != at:
            raise OSError("the store has another size")
        self.stored[self.run] = self.stored.get(self.run, b"") + data

    def replace_bytes(self, data: bytes) -> None:
        self.stored[self.run] = data

    def lock(self) -> Any:
        if self.run in self.locks:
            raise JournalLocked("it is locked")
        self.locks.add(self.run)
        return partial(self.locks.discard, self.run)

    def get_mailbox_store(self) -> LineJournal | None:
        return type(self)(self.stored, self.locks, f"{self.run}.mail")


def make_of(kind: type[Bytes]) -> Any:
    return partial(kind, {}, set())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J52")
def test_journals_in_memory_keep_the_promises() -> None:
    journals: dict[str, MemoryJournal] = {}
    check_journal(lambda name: journals.setdefault(name, MemoryJournal()), processes=False)


@pytest.mark.deep
@pytest.mark.spec("replay:J52")
@pytest.mark.parametrize("make", [in_file, in_database])
def test_journals_in_files_and_databases_keep_the_promises(make: Any, tmp_path: Path) -> None:
    check_journal(partial(make, tmp_path))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J52")
def test_another_process_makes_the_journal_with_keyword_arguments(tmp_path: Path) -> None:
    check_journal(partial(in_named_folder, folder=tmp_path), only="killed")
    assert (tmp_path / "killed.jsonl").exists()


@pytest.mark.spec("replay:J52")
def test_no_private_method_of_a_store_replaces_an_inherited_one() -> None:
    """Somebody else's store may call its methods what it likes, such as ``_read``."""
    private = [name for name in dir(LineJournal) if name.startswith("_") and not name.startswith(("__", "_abc_"))]

    assert [] == private


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("replay:J52")
def test_the_smallest_store_keeps_the_promises() -> None:
    check_journal(make_of(Bytes), processes=False)


class WithoutLock(Bytes):
    def lock(self) -> Any:
        return lambda: None


class StaysLocked(Bytes):
    def lock(self) -> Any:
        super().lock()
        return lambda: None


class LosesTheLastBytes(Bytes):
    def append_bytes(self, data: bytes, at: int) -> None:
        super().append_bytes(data, at)
        if len(self.stored[self.run]) > 2_000:
            self.stored[self.run] = self.stored[self.run][:2_000].rpartition(b"\n")[0] + b"\n"


class AppendsAnywhere(Bytes):
    def append_bytes(self, data: bytes, at: int) -> None:
        self.stored[self.run] = self.stored.get(self.run, b"") + data


class ReadsFromTheStart(Bytes):
    def read_bytes(self, start: int) -> bytes:
        return self.stored.get(self.run, b"")


class ReplacesByAppending(Bytes):
    def replace_bytes(self, data: bytes) -> None:
        self.stored[self.run] = self.stored.get(self.run, b"") + data


class ReplacesInTwoSteps(Bytes):
    def replace_bytes(self, data: bytes) -> None:
        self.stored[self.run] = b""
        self.append_bytes(data, 0)


class ReadsAllForEachStep(Bytes):
    def append_bytes(self, data: bytes, at: int) -> None:
        before = self.read_bytes(0)
        if len(before) != at:
            raise OSError("the store has another size")
        self.replace_bytes(before + data)


class SharesNames(Bytes):
    def __init__(self, stored: dict[str, bytes], locks: set[str], run: str) -> None:
        super().__init__(stored, locks, "mail" if run.endswith("mail") else "all")


class RemembersLettersTwice(Bytes):
    def get_mailbox_store(self) -> LineJournal | None:
        return ReadsFromTheStart(self.stored, self.locks, f"{self.run}.mail")


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (WithoutLock, "lock"),
        (StaysLocked, "reopen"),
        (LosesTheLastBytes, "append"),
        (AppendsAnywhere, "foreign bytes"),
        (ReadsFromTheStart, "follow"),
        (ReplacesByAppending, "replace"),
        (ReplacesInTwoSteps, "replace"),
        (ReadsAllForEachStep, "growth"),
        (SharesNames, "names"),
        (RemembersLettersTwice, "mailbox"),
    ],
)
def test_a_broken_promise_is_named_and_can_be_checked_alone(kind: type[Bytes], promise: str) -> None:
    with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
        check_journal(make_of(kind), only=promise, processes=False)

    assert f"check_journal(make, only={promise!r})" in str(caught.value)


class LosesUncommitted(FileJournal):
    """
    A store that writes its last records only when it is closed.
    """

    def writer(self) -> Any:
        writer = super().writer()
        commits = iter(range(1_000_000))
        commit = writer.commit
        writer.commit = lambda: commit() if next(commits) < 2 else None
        return writer


def losing(folder: Path, name: str) -> Journal:
    return LosesUncommitted(folder / f"{name}.jsonl")


@pytest.mark.deep
@pytest.mark.smoke
def test_a_store_that_commits_late_fails_the_conformance_kit(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="broken promise 'killed'"):
        check_journal(partial(losing, tmp_path), only="killed")


def test_a_store_that_cannot_be_pickled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="use a function or class of a module"):
        check_journal(lambda name: in_file(tmp_path, name), only="killed")


def test_an_unknown_promise_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown promise 'speed'; valid promises: names, append, "):
        check_journal(make_of(Bytes), only="speed", processes=False)
