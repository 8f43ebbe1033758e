"""
``Follower``: what is new in a journal since the last look, for whoever does not hold its run.

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
from stepengine.journal.reading import Reading, read_later
from stepengine.journal.records import Head, Record

__all__ = (
    "LAST_BYTES",
    "Again",
    "ByteTail",
    "BytesBehind",
    "ContentTail",
    "Follower",
    "NewRecords",
    "News",
    "Tail",
    "same_before",
)

PIECE_BYTES = 1024 * 1024
"""Bytes that one look takes in, so that whoever comes late to a long journal does other things meanwhile."""
LAST_BYTES = 64
"""Bytes in front of what is new that must still be there: they hold the checksum of the last record that was given."""
MARK_CHARS = 8
"""A CRC-32 has eight hexadecimal digits."""

Again: TypeAlias = Literal["", "cut", "rewritten", "replaced"]
"""Why a journal is read from its start: it became shorter, it says something else, or it is another one by the same name."""


@frozen
class News:
    """
    What a journal has that it had not at the last look.

    Attributes:
        records: The records, in order.
        again: Why *records* begin with the first of the journal; ``""`` where they follow from those that were given before.
        kept: Where they do not, how many of those that were given before stand there unchanged, and are given again; what was
            given behind them does not hold any more.
        is_behind: Whether more is there already: a look takes in about a megabyte.
        is_complete: Whether the root run has ended, so that nothing comes any more.
    """

    records: Sequence[Record] = ()
    again: Again = ""
    kept: int = 0
    is_behind: bool = False
    is_complete: bool = False


class NewRecords(NamedTuple):
    """What a store has behind a place; see ``News``."""

    records: Sequence[Record] = ()
    again: Again = ""
    kept: int = 0
    is_behind: bool = False


class Tail(abc.ABC):
    """A place in a journal, and what its store has behind it."""

    @property
    @abc.abstractmethod
    def end(self) -> int:
        """How far it is from the start: bytes, or records of what has none."""

    @abc.abstractmethod
    def has_changed(self) -> bool:
        """Return whether ``found`` may find something; cheap, and true where that cannot be told."""

    @abc.abstractmethod
    def found(self) -> NewRecords:
        """
        Return what is new, and stand behind it.

        Raises:
            JournalCorrupt: when a record is damaged that is not the last one.
            JournalMissing: when the journal was there, and is not any more.
            JournalVersion: when a newer version wrote it.
            JournalError: when it cannot be read.
        """

    @abc.abstractmethod
    def restart(self) -> None:
        """Find everything again next time; to be called where ``found`` raised."""


class BytesBehind(NamedTuple):
    """
    Bytes behind a place.

    Attributes:
        data: The bytes.
        is_all: Whether there are no others behind them.
        again: Why the place is none any more.
    """

    data: bytes = b""
    is_all: bool = True
    again: Again = ""


class ByteTail(Tail):
    """
    A place in lines of bytes.

    Args:
        name: The journal's name, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reading = Reading([])
        self._link = False
        # The checksum of each record as it is written: what tells, when all is read again, how much of it is the same.
        self._marks = bytearray()
        self._seen: object = None
        self._is_behind = self._must_restart = False

    @property
    def end(self) -> int:
        """How many bytes what was found has."""
        return self._reading.end

    def has_changed(self) -> bool:
        """Return whether there may be more."""
        seen = self._stamp()
        return self._is_behind or self._must_restart or seen is None or seen != self._seen

    def restart(self) -> None:
        """Read everything again."""
        self._must_restart = True

    def found(self) -> NewRecords:
        """Read what is new."""
        # Asked for before the bytes: what comes between the two is seen at the next look.
        seen = self._stamp()
        if not (self._is_behind or self._must_restart or seen is None) and seen == self._seen:
            return NewRecords()
        self._seen = seen
        return self._anew("rewritten") if self._must_restart else self._find()

    def _find(self) -> NewRecords:
        look = self._look(PIECE_BYTES)
        if self._reading.open_end and look.data and not look.again:
            # The last line had no end. Whoever goes on writes one first; anything else has taken the line's place.
            if not look.data.startswith(b"\n"):
                return self._anew("rewritten")
            self._take(b"\n")
            self._reading = self._reading._replace(end=self._reading.end + 1, open_end=False)
            look = look._replace(data=look.data[1:])
        if look.again:
            return self._anew(look.again)
        try:
            return self._take_records(look)
        except JournalCorrupt:
            # What follows from something else than what was given is damage only if it is so from the start.
            if not self._marks:
                raise
            return self._anew("rewritten")

    def _anew(self, again: Again) -> NewRecords:
        before, self._marks = self._marks, bytearray()
        self._reading, self._link, self._is_behind, self._must_restart = Reading([]), False, False, False
        self._forget()
        records: list[Record] = []
        try:
            while True:
                more = self._take_records(self._look(PIECE_BYTES))
                records += more.records
                if not more.is_behind:
                    return NewRecords(records, again if before else "", same_before(before, self._marks))
        except JournalError:
            self._marks = before
            raise

    def _take_records(self, look: BytesBehind) -> NewRecords:
        size = PIECE_BYTES
        while True:
            # Of a piece the last line may go on; one that is damaged is known by what stands behind it.
            data = look.data if look.is_all else look.data[: look.data.rfind(b"\n") + 1]
            reading = read_later(data, self._name, self._reading, len(self._marks) // MARK_CHARS, link=self._link)
            if look.is_all or (data and not reading.torn):
                break
            size *= 2
            look = self._look(size)
        if not self._marks and reading.records and isinstance(reading.records[0], Head):
            self._link = reading.records[0].link
        taken = data[: reading.end - self._reading.end]
        lines = taken.removesuffix(b"\n").split(b"\n") if taken else ()
        self._marks += b"".join([line[-MARK_CHARS - 2 : -2] for line in lines])
        self._take(taken)
        self._reading = reading._replace(records=[])
        self._is_behind = not look.is_all
        return NewRecords(reading.records, is_behind=self._is_behind)

    @abc.abstractmethod
    def _stamp(self) -> object:
        """Return what changes when the journal does; ``None`` where that cannot be told without reading it."""

    @abc.abstractmethod
    def _look(self, most: int) -> BytesBehind:
        """Return about *most* bytes behind the place."""

    @abc.abstractmethod
    def _take(self, data: bytes) -> None:
        """Stand behind these bytes, the first of those that ``_look`` gave last."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Stand at the start."""


def same_before(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Return how many marks two journals have in common from their start on."""
    low, high = 0, min(len(a), len(b)) // MARK_CHARS
    while low < high:
        middle = (low + high + 1) // 2
        if a[low * MARK_CHARS : middle * MARK_CHARS] == b[low * MARK_CHARS : middle * MARK_CHARS]:
            low = middle
        else:
            high = middle - 1
    return low


class Contents(Protocol):
    """Follows a journal that does not say where it stores what."""

    @property
    def name(self) -> str:
        """How it is called in messages."""

    def content(self) -> bytes:
        """Return all its bytes."""


class ContentTail(ByteTail):
    """
    A place in a journal that can only be read as a whole, at each look.

    Args:
        journal: The journal.
    """

    def __init__(self, journal: Contents) -> None:
        super().__init__(journal.name)
        self._journal = journal
        self._place = 0
        self._last = b""

    def _stamp(self) -> object:
        return None

    def _look(self, most: int) -> BytesBehind:
        content = self._journal.content()
        if len(content) < self._place:
            return BytesBehind(again="cut")
        if not content.startswith(self._last, self._place - len(self._last)):
            return BytesBehind(again="rewritten")
        return BytesBehind(content[self._place :])

    def _take(self, data: bytes) -> None:
        self._place += len(data)
        self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]

    def _forget(self) -> None:
        self._place, self._last = 0, b""


class Followed(Protocol):
    """A journal, as far as it is followed."""

    @property
    def name(self) -> str:
        """How it is called in messages."""

    def tail(self) -> Tail:
        """Return a place at its start."""

    def missing(self) -> JournalMissing:
        """Return the error for one without a run."""


class Follower:
    """
    Follows a journal that another process may be writing.

    Args:
        journal: Any journal; it may be empty or not there yet, and is waited for then.

    Attributes:
        history: What the records say that were given so far.

    Raises:
        JournalError: for a store of many runs that does not say which.
    """

    def __init__(self, journal: Followed) -> None:
        self._journal = journal
        self._tail = journal.tail()
        self._given = 0
        self._error: JournalError | None = None
        self.history = History((), journal.name, journal.missing)

    @property
    def end(self) -> int:
        """Where the last record that was given ends: bytes from the start; of a journal in memory, records."""
        return self._tail.end

    def has_changed(self) -> bool:
        """Return whether there may be news: one look at the file's size and time, and none at what it holds."""
        return self._tail.has_changed()

    def news(self) -> News:
        """
        Return what is new since the last look; it may be nothing.

        A line that is not whole is waited for.

        Raises:
            JournalCorrupt: when a record is damaged; again at each look until the journal has changed.
            JournalMissing: when the journal was there and is not any more.
            JournalVersion: when a newer version wrote it.
            JournalError: when it cannot be read.
        """
        if self._error is not None:
            if not self._tail.has_changed():
                raise self._error
            self._error = None
            self._tail.restart()
        try:
            return self._news()
        except (JournalCorrupt, JournalVersion) as error:
            self._error = error
            raise
        except JournalError:
            # It says nothing of what the journal holds, and may be over by the next look.
            self._tail.restart()
            raise

    def _news(self) -> News:
        found = self._tail.found()
        if found.again:
            kept, self._given = min(found.kept, self._given), 0
            self.history = History(found.records, self._journal.name, self._journal.missing)
        else:
            kept = self._given
            if found.records:
                self.history.grow(found.records)
        self._given += len(found.records)
        return News(found.records, found.again, kept, found.is_behind, self.history.is_complete)
