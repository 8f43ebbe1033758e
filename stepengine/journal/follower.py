"""
``Follower``: the new records of a journal since the last poll, in a process that does not run it.

A look reads what stands behind the last one, and nothing again. Nothing is locked and nothing written, so that the holder never
notices. A line that is not whole yet is waited for: its holder may be about to end it, and if that was killed, the next one cuts it
off. Where what was given does not stand in the journal any more, the next look says so and begins anew.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

from attrs import frozen

from stepengine.errors import JournalCorrupt, JournalError, JournalMissing, JournalVersion
from stepengine.journal.history import History
from stepengine.journal.line_reader import Reading, read_more_lines
from stepengine.journal.records import Head, Record

PIECE_BYTES = 1024 * 1024
"""Bytes that one look takes in, so that whoever comes late to a long journal does other things meanwhile."""
LAST_BYTES = 64
"""Bytes in front of what is new that must still be there: they hold the checksum of the last record that was given."""
MARK_CHARS = 8
"""A CRC-32 has eight hexadecimal digits."""

Again: TypeAlias = Literal["", "cut", "rewritten", "replaced"]
"""Why a journal is read from its start: it became shorter, it says something else, or it is another one by the same name."""


@frozen
class AddedRecords:
    """
    The records added to a journal since the last poll.

    Attributes:
        records: The records, in order.
        again: The reason why *records* start again with the first record; ``""`` if they follow the records of earlier calls.
        kept: If *again* is set: the number of earlier records that are unchanged and returned again. Later ones of the earlier
            records are no longer valid.
        is_behind: Whether the journal has further records already: one call reads about a megabyte.
        is_complete: Whether the root run has ended, so that no records follow.
    """

    records: Sequence[Record] = ()
    again: Again = ""
    kept: int = 0
    is_behind: bool = False
    is_complete: bool = False


class NewRecords(NamedTuple):
    """
    The records of a store after a position; ``AddedRecords`` explains *again*, *kept* and *is_behind* in full.

    Attributes:
        records: The records, in order.
        again: The reason why they start again with the first record of the store; ``""`` if they follow earlier ones.
        kept: The number of earlier records that are unchanged and returned again.
        is_behind: Whether the store has further records already.
    """

    records: Sequence[Record] = ()
    again: Again = ""
    kept: int = 0
    is_behind: bool = False


class JournalPosition(abc.ABC):
    """A position in a journal, from which new records are read."""

    @property
    @abc.abstractmethod
    def offset(self) -> int:
        """Where the next read starts, in bytes or records from the start of the journal."""

    @abc.abstractmethod
    def may_have_new_records(self) -> bool:
        """Return whether ``read_new_records`` may find something; a cheap check that returns True if it cannot tell."""

    @abc.abstractmethod
    def read_new_records(self) -> NewRecords:
        """
        Return the new records and advance the position behind them.

        Raises:
            JournalCorrupt: when a record other than the last one is damaged.
            JournalMissing: when the journal was removed.
            JournalVersion: when a newer version wrote the journal.
            JournalError: when the journal cannot be read.
        """

    @abc.abstractmethod
    def restart(self) -> None:
        """Reset the position so that the next read returns all records; call it after ``read_new_records`` raised."""


class BytesAfter(NamedTuple):
    """
    Bytes read after a position.

    Attributes:
        data: The bytes.
        is_all: Whether *data* ends at the end of the store.
        again: The reason why the position is no longer valid; ``""`` if it is valid.
    """

    data: bytes = b""
    is_all: bool = True
    again: Again = ""


class FollowableJournal(Protocol):
    """The methods of a journal that are needed to follow it."""

    @property
    def name(self) -> str:
        """The journal's name for errors."""

    def make_start_position(self) -> JournalPosition:
        """Return a position at the start of the journal."""

    def read_piece(self, start: int, most: int) -> bytes:
        """Return about *most* stored bytes from an offset on."""

    def stamp(self) -> tuple[object, object] | None:
        """Return the identity of the store and a value that changes with its bytes; ``None`` if only reading shows changes."""

    def is_there(self) -> bool:
        """Return whether the journal exists."""

    def make_missing_error(self) -> JournalMissing:
        """Return the error for a missing journal."""


class OffsetPosition(JournalPosition):
    """
    A position in stored bytes, which are read from an offset.

    Args:
        store: The journal that has the bytes.
    """

    def __init__(self, store: FollowableJournal) -> None:
        self._store = store
        self._reading = Reading([])
        self._link = False
        # The checksum of each record as it is written: what tells, when all is read again, how much of it is the same.
        self._marks = bytearray()
        self._seen: tuple[object, object] | None = None
        self._is_behind = self._must_restart = False
        self._found: object = None
        self._last = b""

    @property
    def offset(self) -> int:
        """Where the next read starts, in bytes: the length of all returned records."""
        return self._reading.end

    def may_have_new_records(self) -> bool:
        """Return whether there may be new records; True after ``restart``, and if the store cannot tell."""
        seen = self._store.stamp()
        return self._is_behind or self._must_restart or seen is None or seen != self._seen

    def restart(self) -> None:
        """Reset the position so that the next read returns all records."""
        self._must_restart = True

    def read_new_records(self) -> NewRecords:
        """Return the new records and advance behind them."""
        # Asked for before the bytes: what comes between the two is seen at the next look.
        seen = self._store.stamp()
        if not (self._is_behind or self._must_restart or seen is None) and seen == self._seen:
            return NewRecords()
        self._seen = seen
        return self._read_from_start("rewritten") if self._must_restart else self._read_next_piece()

    def _read_next_piece(self) -> NewRecords:
        """Return the records of about the next megabyte, or all records if the bytes before the position have changed."""
        look = self._read_after(PIECE_BYTES)
        if self._reading.open_end and look.data and not look.again:
            # The last line had no end. Whoever goes on writes one first; anything else has taken the line's place.
            if not look.data.startswith(b"\n"):
                return self._read_from_start("rewritten")
            self._remember_last_bytes(b"\n")
            self._reading = self._reading._replace(end=self._reading.end + 1, open_end=False)
            look = look._replace(data=look.data[1:])
        if look.again:
            return self._read_from_start(look.again)
        try:
            return self._parse_records(look)
        except JournalCorrupt:
            # What follows from something else than what was given is damage only if it is so from the start.
            if not self._marks:
                raise
            return self._read_from_start("rewritten")

    def _read_from_start(self, again: Again) -> NewRecords:
        """Return all records of the journal; *again* is why records that were read before are read again."""
        before, self._marks = self._marks, bytearray()
        self._reading, self._link, self._is_behind, self._must_restart = Reading([]), False, False, False
        self._found, self._last = None, b""
        records: list[Record] = []
        try:
            while True:
                more = self._parse_records(self._read_after(PIECE_BYTES))
                records += more.records
                if not more.is_behind:
                    return NewRecords(records, again if before else "", count_common_marks(before, self._marks))
        except JournalError:
            self._marks = before
            raise

    def _parse_records(self, new_bytes: BytesAfter) -> NewRecords:
        """Return the records in the whole lines of *new_bytes*, with more bytes read if a line is longer, and advance behind them."""
        size = PIECE_BYTES
        while True:
            # Of a piece the last line may go on; one that is damaged is known by what stands behind it.
            data = new_bytes.data if new_bytes.is_all else new_bytes.data[: new_bytes.data.rfind(b"\n") + 1]
            reading = read_more_lines(
                data, self._store.name, self._reading, len(self._marks) // MARK_CHARS, link=self._link
            )
            if new_bytes.is_all or (data and not reading.torn):
                break
            size *= 2
            new_bytes = self._read_after(size)
        if not self._marks and reading.records and isinstance(reading.records[0], Head):
            self._link = reading.records[0].link
        taken = data[: reading.end - self._reading.end]
        lines = taken.removesuffix(b"\n").split(b"\n") if taken else ()
        self._marks += b"".join([line[-MARK_CHARS - 2 : -2] for line in lines])
        self._remember_last_bytes(taken)
        self._reading = reading._replace(records=[])
        self._is_behind = not new_bytes.is_all
        return NewRecords(reading.records, is_behind=self._is_behind)

    def _read_after(self, max_size: int) -> BytesAfter:
        """Return about *max_size* bytes after the position, or the reason why the position is no longer valid."""
        found = None if self._seen is None else self._seen[0]
        known, self._found = self._found, found
        if known not in (None, found):
            return self._make_restart_result("replaced")
        # The last bytes that were read are read once more: a store may have been replaced by a longer one, under
        # the same name and even as the same file.
        size = len(self._last) + max_size
        data = self._store.read_piece(self._reading.end - len(self._last), size)
        if not data.startswith(self._last):
            return self._make_restart_result("cut" if len(data) < len(self._last) else "rewritten")
        return BytesAfter(data[len(self._last) :], len(data) != size)

    def _make_restart_result(self, again: Again) -> BytesAfter:
        """Return *again*, the reason why the store must be read from its start; raise if the store is missing."""
        if not self._store.is_there():
            raise self._store.make_missing_error()
        return BytesAfter(again=again)

    def _remember_last_bytes(self, data: bytes) -> None:
        self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]


def count_common_marks(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Return how many marks (the last characters of each line) two journals have in common from their start."""
    low, high = 0, min(len(a), len(b)) // MARK_CHARS
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * MARK_CHARS : middle * MARK_CHARS] == b[low * MARK_CHARS : middle * MARK_CHARS]:
            low = middle
        else:
            high = middle - 1
    return low


class Follower:
    """
    Follows a journal that another process may be writing.

    Args:
        journal: Any journal; it may be empty or missing until a run is recorded.

    Attributes:
        history: The history of the records returned so far.

    Raises:
        JournalError: for a store of many runs without the name of a run.
    """

    def __init__(self, journal: FollowableJournal) -> None:
        self._journal = journal
        self._tail = journal.make_start_position()
        self._given = 0
        self._error: JournalError | None = None
        self.history = History((), journal.name, journal.make_missing_error)

    @property
    def offset(self) -> int:
        """Where the next read starts: bytes from the start of the journal, or records of a journal in memory."""
        return self._tail.offset

    def may_have_new_records(self) -> bool:
        """Return whether ``read_new`` may find records, from the file's size and time alone."""
        return self._tail.may_have_new_records()

    def read_new(self) -> AddedRecords:
        """
        Return the records added since the last call; there may be none.

        An incomplete line at the end is left for a later call.

        Raises:
            JournalCorrupt: when a record is damaged; raised by each call until the journal has changed.
            JournalMissing: when the journal was removed.
            JournalVersion: when a newer version wrote the journal.
            JournalError: when the journal cannot be read.
        """
        if self._error is not None:
            if not self._tail.may_have_new_records():
                raise self._error
            self._error = None
            self._tail.restart()
        try:
            return self._read_into_history()
        except (JournalCorrupt, JournalVersion) as error:
            self._error = error
            raise
        except JournalError:
            # It says nothing of what the journal holds, and may be over by the next look.
            self._tail.restart()
            raise

    def _read_into_history(self) -> AddedRecords:
        """Read the new records and add them to the history; if all records are read again, replace the history."""
        found = self._tail.read_new_records()
        if found.again:
            kept, self._given = min(found.kept, self._given), 0
            self.history = History(found.records, self._journal.name, self._journal.make_missing_error)
        else:
            kept = self._given
            if found.records:
                self.history.grow(found.records)
        self._given += len(found.records)
        return AddedRecords(found.records, found.again, kept, found.is_behind, self.history.is_complete)
