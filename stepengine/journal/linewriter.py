"""``LineWriter``: what the stores that hold lines have in common: encoding, the lines that wait, giving up for good."""

from __future__ import annotations

import abc
import os
import threading
from collections import deque

from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, JournalError, JournalWriteFailed
from stepengine.journal.encoding import Encoder
from stepengine.journal.history import History
from stepengine.journal.reading import Reading
from stepengine.journal.records import Record
from stepengine.journal.store import Journal, Writer

__all__ = ("LineWriter",)


_this_process = os.getpid()


def _forked() -> None:
    global _this_process  # noqa: PLW0603 - it is a fact of the process
    _this_process = os.getpid()


# Asked of the system at every record, who we are would cost as much as the record's checksum.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class LineWriter(Writer):
    """
    A writer that keeps lines until they are committed.

    Args:
        journal: Whose writer it is.
        reading: What the journal held when it was opened.
    """

    waits = True
    blocks = True

    def __init__(self, journal: Journal, reading: Reading) -> None:
        self._journal = journal
        self.history = History(reading.records, journal.name)
        head = self.history.head
        self._encoder = Encoder(
            journal.redactor,
            link=journal.link if head is None else head.link,
            previous=reading.crc,
            blobs=tuple(self.history.blobs),
            stable=journal.stable,
        )
        self._lines: deque[bytes] = deque()
        # One commit after the other: lines are chained, and a file has one end.
        self._storing = threading.Lock()
        self._broken: JournalError | None = None
        self._is_lost = False
        self._closed = False
        self._pid = _this_process

    def remember(self, path: str, seq: int, transcript: Transcript) -> None:
        """Let later requests be stored as differences to one that is in the journal already."""
        self._encoder.remember(path, seq, transcript)

    def append(self, record: Record) -> None:
        """
        Add a record after those before it; it is durable with the next ``commit``.

        Raises:
            JournalWriteFailed: when it cannot be stored, or an earlier write failed.
            SecretFound: when shapes are looked for and one is left.
        """
        self._check()
        try:
            self._lines.extend(self._encoder.lines(record))
        except (JournalError, DataError) as error:
            # What comes next would be chained to a line that does not exist.
            self._broken = self._failed(str(error))
            raise

    def commit(self) -> None:
        """
        Make everything durable that was appended.

        Raises:
            JournalWriteFailed: when that is impossible; the journal still opens, without what was not committed.
        """
        self._check()  # before the lock: a thread that a fork left behind may hold it for ever
        with self._storing:
            if self._broken is not None:
                raise self._broken
            self._flush()

    def close(self) -> None:
        """Commit, and give the journal back; may be called twice. A forked process has nothing to give back."""
        if self._is_forked():
            return
        with self._storing:
            if self._closed:
                return
            self._closed = True
            try:
                self._flush()
            finally:
                self._release()

    def _flush(self) -> None:
        """Store the lines that wait; those before a record that could not be made are whole, those after a lost one are not."""
        lines: list[bytes] = []
        while self._lines:
            lines.append(self._lines.popleft())
        if not lines or self._is_lost:
            return
        try:
            self._store(lines)
        except JournalError as error:
            self._broken, self._is_lost = error, True
            raise

    def _is_forked(self) -> bool:
        """Tell whether this is a copy in a child process, which shares the open file, and its lock, with the owner."""
        return self._pid != _this_process

    def _check(self) -> None:
        if self._pid != _this_process:
            why = f"the run belongs to process {self._pid}, and this one ({_this_process}) was forked from it"
            raise self._failed(why)
        if self._broken is not None:
            raise self._broken

    def _failed(self, why: str) -> JournalWriteFailed:
        msg = f"{self._journal.name} cannot be written: {why}. What was committed before is whole; resume from it"
        return JournalWriteFailed(msg)

    @abc.abstractmethod
    def _store(self, lines: list[bytes]) -> None:
        """Make *lines* durable, all or none of them; raise ``JournalWriteFailed`` for good otherwise."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Give the journal back."""
