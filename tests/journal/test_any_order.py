"""
Journals under writers that append, commit, die in the middle and come back, in any order, against a model of their bytes.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepengine import AgentDefinition, Engine, Perform
from stepengine.errors import JournalCorrupt, JournalLocked
from stepengine.journal import FileJournal, Journal, MemoryJournal, SqliteJournal, check
from stepengine.journal.locked_file import LockedFile
from stepengine.journal.records import Record

EFFECTS = 150


@cache
def recorded(link: bool) -> list[Record]:
    """
    Return the records of a run with as many effects as anybody appends.
    """

    def handle_steps(ctx: Any) -> Any:
        for n in range(EFFECTS):
            yield from Perform.idempotent(str, n)

    journal = MemoryJournal(link=link)
    with Engine([AgentDefinition("a", handle_steps=handle_steps)]) as engine:
        engine.run_sync("a", journal=journal).unwrap()
    return journal.records()


class FileOwners(RuleBasedStateMachine):
    """
    One writer after another of one journal; what was committed stays, byte for byte, and what was not is gone or torn.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "one"
        self.writer: Any = None
        self.kept, self.count, self.waiting, self.torn = b"", 0, 0, 0

    def journal(self) -> Journal:
        return FileJournal(self.path, sync="write", link=self.link)

    def stored(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def drop(self) -> None:
        """The process ends: its descriptors are closed, and nothing else is done."""
        [*LockedFile._all][-1].release()
        if self.writer.store.reserve is not None:
            self.writer.store.reserve.remove_user()

    @initialize(link=st.booleans())
    def begin(self, link: bool) -> None:
        self.link = link

    @precondition(lambda self: self.writer is None)
    @rule()
    def open(self) -> None:
        if self.torn and not self.count:
            # Without its whole first line nothing tells it from a file of another program.
            with pytest.raises(JournalCorrupt, match="is not a journal of stepengine and was left unchanged"):
                self.journal().writer()
            assert self.torn == len(self.path.read_bytes())
            self.path.unlink()
            self.torn = 0
        self.writer = self.journal().writer()
        assert (self.torn, self.count) == (self.writer.repaired, len(self.writer.history.records))
        self.torn = 0
        self.kept = self.stored()

    @precondition(lambda self: self.writer is not None and self.count + self.waiting < 2 * EFFECTS - 9)
    @rule(more=st.integers(1, 7))
    def append(self, more: int) -> None:
        start = self.count + self.waiting
        for record in recorded(self.link)[start : start + more]:
            self.writer.append(record)
        self.waiting += more

    @precondition(lambda self: self.writer is not None)
    @rule(close=st.booleans())
    def commit(self, close: bool) -> None:
        self.writer.close() if close else self.writer.commit()
        added = self.stored().removeprefix(self.kept)
        assert self.waiting == added.count(b"\n")
        self.kept, self.count, self.waiting = self.kept + added, self.count + self.waiting, 0
        self.writer = None if close else self.writer

    @precondition(lambda self: self.writer is not None)
    @rule()
    def die(self) -> None:
        self.drop()
        self.writer, self.waiting = None, 0

    @precondition(lambda self: self.writer is not None and self.waiting)
    @rule(data=st.data())
    def die_in_a_commit(self, data: st.DataObject) -> None:
        """
        A record that came whole but for its newline counts; what is less of one does not.
        """
        self.writer.commit()
        added = self.stored().removeprefix(self.kept)
        size = data.draw(st.integers(0, len(added)))
        self.drop()
        self.path.write_bytes(self.kept + added[:size])
        whole, rest = added[:size].count(b"\n"), added[:size].rpartition(b"\n")[2]
        is_whole = bool(rest) and rest == added.split(b"\n")[whole]
        self.count, self.torn = self.count + whole + is_whole, 0 if is_whole else len(rest)
        self.kept = self.stored()[: len(self.kept) + size - self.torn]
        self.writer, self.waiting = None, 0

    @precondition(lambda self: self.writer is not None)
    @rule()
    def nobody_else_gets_it(self) -> None:
        with pytest.raises(JournalLocked):
            self.journal().writer()

    @precondition(lambda self: self.writer is None and self.count > 3 and not self.torn)
    @rule(data=st.data())
    def one_bit_turns(self, data: st.DataObject) -> None:
        """
        Anywhere but in the last record, which may be a torn one.
        """
        at = data.draw(st.integers(0, self.kept[:-1].rindex(b"\n") - 1))
        bit = 1 << data.draw(st.integers(0, 7))
        self.path.write_bytes(self.kept[:at] + bytes([self.kept[at] ^ bit]) + self.kept[at + 1 :])
        try:
            for use in (lambda: self.journal().records(), lambda: self.journal().writer()):
                # In its first bytes: it is not a journal any more.
                with pytest.raises(JournalCorrupt, match=r"record \d+|is not a journal"):
                    use()
            assert not check(self.journal())
        finally:
            self.path.write_bytes(self.kept)

    @precondition(lambda self: self.count > 2)
    @rule()
    def copy(self) -> None:
        other = FileJournal(self.path.with_name("other"), sync="write")
        self.journal().copy_to(other)
        assert self.count == len(other.records())
        assert check(other)

    @invariant()
    def what_was_committed_is_read_by_everybody(self) -> None:
        if hasattr(self, "link"):
            assert self.count == len(self.journal().records())
            assert self.stored().startswith(self.kept)
            if self.count > 2:
                assert (0, self.torn) == (len(check(self.journal()).problems), check(self.journal()).torn)

    def teardown(self) -> None:
        if self.writer is not None:
            self.drop()
        self.folder.cleanup()


class SqliteOwners(FileOwners):
    """
    The same in a database, where nothing is ever torn.
    """

    def journal(self) -> Journal:
        return SqliteJournal(self.path, "one", link=self.link)

    def stored(self) -> bytes:
        return self.journal().content()

    def drop(self) -> None:
        self.writer.store.database.close()
        [*LockedFile._all][-1].release()
        if self.writer.store.reserve is not None:
            self.writer.store.reserve.remove_user()

    die_in_a_commit = one_bit_turns = None  # type: ignore[assignment]  # those are of files


ROWS = pytest.mark.spec("reliability:JR01", "reliability:JR02", "reliability:JR14")
TestFileOwners = ROWS(FileOwners.TestCase)
TestFileOwners.settings = settings(max_examples=12, stateful_step_count=30)
TestSqliteOwners = pytest.mark.deep(pytest.mark.spec("reliability:JR39")(SqliteOwners.TestCase))
TestSqliteOwners.settings = settings(max_examples=12, stateful_step_count=30)
