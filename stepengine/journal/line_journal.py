"""
``LineJournal``: the base class of stores, which only read, append and replace bytes and take a lock.

Encoding, redaction, checksums, signatures, torn lines, following and the messages of errors are here, so that no store can get them
wrong. ``append_bytes`` names the offset that it appends at. A store that compares it with its size also notices a second writer whose
lock was lost. ``LineWriter`` is the writer of all of them; it leaves the bytes to a ``LockedStore``.
"""

from __future__ import annotations

import abc
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from stepengine.data.record_sizes import MAX_LINE_BYTES
from stepengine.data.transcript import Transcript
from stepengine.errors import DataError, JournalError, JournalWriteFailed
from stepengine.journal.disk_reserve import FULL, RESERVE_BYTES, DiskReserve
from stepengine.journal.encoding import Encoder
from stepengine.journal.history import History
from stepengine.journal.line_macs import MacChain, load_or_create_mac_key, split_into_lines
from stepengine.journal.line_reader import Reading, parse_head, read_lines
from stepengine.journal.mailbox import Mailbox, StoreMailbox
from stepengine.journal.records import Head, Intent, Record
from stepengine.journal.store import Journal, Writer
from stepengine.workspace.after_fork import register_for_fork_reset
from stepengine.workspace.open_files import describe_os_error

if TYPE_CHECKING:
    from stepengine.journal.signing import SignatureChain

HEAD_BYTES = 16 * 1024
"""The first line of most journals fits."""


class LineJournal(Journal):
    """
    A journal whose lines are bytes of some store. A subclass has ``name``, ``read_bytes``, ``append_bytes``, ``replace_bytes`` and ``lock``.

    Methods raise ``OSError`` when the store cannot be used. They are called in any thread, one at a time for each object.
    A store with faster ways than the defaults also overrides ``read_piece``, ``stamp`` and ``truncate_bytes``.

    Args:
        options: ``redact``, ``secrets``, ``allow_secrets``, ``machine``, ``link``, ``stable``, ``inline`` and ``sign``; see ``Journal``.

    Attributes:
        blocks: Whether ``append_bytes`` may block for a long time, as for a disk.
        folder: A folder on the disk of the journal, on which space for the last results is reserved; ``None`` (default) without a disk.
    """

    blocks = True
    folder: Path | None = None

    @abc.abstractmethod
    def read_bytes(self, start: int) -> bytes:
        """Return the stored bytes from offset *start*; ``b""`` at and behind the end, and if nothing is stored."""

    @abc.abstractmethod
    def append_bytes(self, data: bytes, at: int) -> None:
        """
        Append *data* durably to a store of exactly *at* bytes.

        Raises:
            OSError: when the store has another size or cannot be written.
        """

    @abc.abstractmethod
    def replace_bytes(self, data: bytes) -> None:
        """Replace all stored bytes atomically. ``b""`` may delete the store."""

    @abc.abstractmethod
    def lock(self) -> Callable[[], None]:
        """
        Lock the store for one writer and return the function that unlocks it. The end of the process unlocks it, too.

        Raises:
            JournalLocked: when a writer of this or another process has locked the store.
        """

    def truncate_bytes(self, size: int) -> None:
        """Keep the first *size* bytes only; the caller has the lock."""
        self.replace_bytes(self.read_bytes(0)[:size])

    def get_mailbox_store(self) -> LineJournal | None:
        """Return the store for messages from other processes to the run; ``None`` (default) for no mailbox."""
        return None

    def read_records(self) -> Reading:
        """Return the stored records, with the offset of the end of the last complete one."""
        return read_lines(self.content(), self.name)

    @override
    def records(self) -> list[Record]:
        return self.read_records().records

    @override
    def content(self) -> bytes:
        return _read_bytes(self, 0)

    @override
    def read_piece(self, start: int, most: int) -> bytes:
        return _read_bytes(self, start)

    @override
    def head(self) -> Head | None:
        """Return the first record, from as few bytes as possible; ``None`` while there is none."""
        most = HEAD_BYTES
        while True:
            data = self.read_piece(0, most)
            first, newline, _ = data.partition(b"\n")
            if newline or len(data) < most or most > MAX_LINE_BYTES:
                return parse_head(first + newline, self.name)
            most *= 16  # a head of megabytes is read in a few pieces

    @override
    def is_there(self) -> bool:
        return bool(self.content())

    @override
    def writer(self) -> Writer:
        return LineWriter(LockedStore(self))

    @override
    def mailbox(self) -> Mailbox:
        mailbox_store = self.get_mailbox_store()
        return super().mailbox() if mailbox_store is None else StoreMailbox(self, mailbox_store)

    @override
    def replace(self, records: Sequence[Record]) -> None:
        History(records, self.name)
        data = b"".join(self.encode_lines(records))
        try:
            self.replace_bytes(data)
        except OSError as error:
            msg = f"{self.name} cannot be replaced: {describe_os_error(error)}. Nothing was changed"
            raise JournalWriteFailed(msg) from error

    @override
    def discard(self) -> None:
        self.replace([])
        mailbox_store = self.get_mailbox_store()
        if mailbox_store is not None:
            mailbox_store.replace([])


# A function: a private method here could be overridden by one of the same name in a store of somebody else.
def _read_bytes(journal: LineJournal, start: int) -> bytes:
    """Return the stored bytes from an offset on; raise ``JournalError`` where the store raises ``OSError``."""
    try:
        return journal.read_bytes(start)
    except OSError as error:
        msg = f"{journal.name} cannot be read: {describe_os_error(error)}"
        raise JournalError(msg) from error


class LockedStore:
    """
    The locked bytes of a ``LineJournal``: no other writer appends, and disk space is reserved for the last results.

    Args:
        journal: The journal; its store is locked until ``release``.

    Attributes:
        journal: The journal.
        size: The number of stored bytes.
        repaired: The number of bytes of a torn tail that were cut off.
        reserve: The reserved space on the disk of the journal; ``None`` without a disk.
    """

    def __init__(self, journal: LineJournal) -> None:
        self.journal = journal
        self.size = self.repaired = 0
        self.reserve: DiskReserve | None = None
        self._unlock = self._lock()

    def _lock(self) -> Callable[[], None]:
        """Lock the store and return the function that unlocks it."""
        try:
            return self.journal.lock()
        except OSError as error:
            msg = f"{self.journal.name} cannot be locked: {describe_os_error(error)}. Nothing was run"
            raise JournalError(msg) from error

    def _read_records(self) -> tuple[Reading, int]:
        """Return the stored records, and the number of stored bytes."""
        reading = self.journal.read_records()
        return reading, reading.end + reading.torn

    def repair_and_read_records(self) -> Reading:
        """Cut off a torn tail, add a missing newline, reserve disk space, and return the stored records."""
        journal = self.journal
        reading, self.size = self._read_records()
        try:
            # Cut off before anything is appended: what came behind half a line would be damage in the middle, which
            # nobody can tell from an attack (reliability:JR01).
            if reading.torn:
                journal.truncate_bytes(reading.end)
                self.size, self.repaired = reading.end, reading.torn
            if reading.open_end:
                journal.append_bytes(b"\n", self.size)
                self.size += 1
        except OSError as error:
            msg = f"{journal.name} cannot be repaired: {describe_os_error(error)}; nothing was run"
            raise JournalWriteFailed(msg) from error
        self.reserve = None if journal.folder is None else DiskReserve.acquire_for_disk_of(journal.folder)
        return reading

    def renew_reserve_or_raise(self, reserve: DiskReserve) -> None:
        """Reserve space for an effect's outcome on the disk again; raise if the disk is still full."""
        folder = self.journal.folder
        if folder is not None and not reserve.restore_full_reserve(folder):
            why = f"the disk is full; an effect starts only if {RESERVE_BYTES // 1024} KiB are free for its result"
            # What is under way may still be recorded: the writer is not broken.
            raise self.make_write_error(why)

    def append(self, data: bytes) -> None:
        """
        Append lines durably, all or none of them; use the reserved space if the disk is full.

        Raises:
            JournalWriteFailed: when the lines cannot be stored; later appends fail, too.
        """
        try:
            self.append_bytes(data)
        except OSError as error:
            self._append_into_reserve(data, error)
        self.size += len(data)

    def append_bytes(self, data: bytes) -> None:
        """Append lines to the store, without using the reserved space; raise ``OSError`` if that fails."""
        self.journal.append_bytes(data, self.size)

    def _append_into_reserve(self, data: bytes, error: OSError) -> None:
        """Release the reserved space of a full disk and append once more (reliability:JR08)."""
        if error.errno not in FULL or self.reserve is None or not self.reserve.free_reserved_space():
            raise self.make_write_error(describe_os_error(error), error) from error
        try:
            self.append_bytes(data)
        except OSError as again:
            raise self.make_write_error(describe_os_error(again), again) from again
        self.reserve.reserve_remaining_space()

    def make_write_error(self, reason: str, error: Exception | None = None) -> JournalWriteFailed:
        """Return the error for lines that cannot be stored; its message tells how to continue."""
        if self.size and getattr(error, "errno", 0) == errno.ESTALE:
            then = "The records committed before are in the file that this run wrote to. If you still have that file, resume from it"
        elif self.size:
            then = "The records committed before are intact. Resume from them"
        else:
            then = "Nothing was run or recorded. Start the run again; you can use the same journal"
        msg = f"{self.journal.name} cannot be written: {reason}. {then}"
        return JournalWriteFailed(msg)

    def release(self) -> None:
        """Release the reserved space and the lock; raise ``JournalError`` if unlocking fails."""
        if self.reserve is not None:
            self.reserve.remove_user()
        try:
            self._unlock()
        except OSError as error:
            msg = (
                f"{self.journal.name} cannot be unlocked: {describe_os_error(error)}. The committed records are intact"
            )
            raise JournalError(msg) from error


class LineWriter(Writer):
    """
    The writer of a ``LineJournal``: it encodes records, and holds their lines until they are committed.

    Args:
        store: The locked store; ``close`` releases it.
    """

    waits = True

    def __init__(self, store: LockedStore) -> None:
        self.store = store
        self.blocks = store.journal.blocks
        try:
            self._open(store.journal)
        except BaseException:
            store.release()
            raise

    def _open(self, journal: LineJournal) -> None:
        """Read the stored records, and prepare the encoder and the chain of signatures to continue them."""
        reading = self.store.repair_and_read_records()
        self.repaired = self.store.repaired
        self.history = History(reading.records, journal.name, journal.make_missing_error)
        head = self.history.head
        self._encoder = Encoder(
            journal.redactor,
            link=journal.link if head is None else head.link,
            previous=reading.crc,
            blobs=tuple(self.history.blobs.values),
            stable=journal.stable,
            inline=journal.inline,
        )
        self._lines: list[bytes] = []
        self._chain = _restore_signature_chain(journal, self.history)
        # One commit after the other: lines are chained, and a store has one end.
        self._storing = threading.Lock()
        self._broken: JournalError | None = None
        self._is_lost = False
        self._closed = False
        self._pid, self._is_forked = os.getpid(), False
        register_for_fork_reset(self)

    # Called once in the child, in place of a check at every record and commit.
    def reset_after_fork(self) -> None:
        """Make all later writes raise in a forked child, since the parent owns run, file and lock."""
        self._is_forked, self._storing = True, threading.Lock()
        why = f"the run belongs to process {self._pid}, and this one ({os.getpid()}) was forked from it"
        self._broken = self.store.make_write_error(why)

    def enable_macs(self) -> None:
        """Add a keyed digest to each later line; do nothing without a usable state folder of the user."""
        key = load_or_create_mac_key()
        if key is not None:
            chain = MacChain(key)
            if self.store.size:
                chain.add_and_verify_lines(split_into_lines(self.store.journal.read_piece))
            self._encoder.add_mac = chain.add_line

    def set_request_base(self, path: str, seq: int, transcript: Transcript) -> None:
        """Store later requests as differences to this one, which the journal holds already."""
        self._encoder.set_request_base(path, seq, transcript)

    def append(self, record: Record) -> None:
        """
        Append a record; it is durable with the next ``commit``.

        Raises:
            JournalWriteFailed: when the record cannot be stored, or an earlier write failed.
            SecretFound: when the rules look for secrets by shape, and one remains.
        """
        if self._broken is not None:
            raise self._broken
        # Only a head and an intent can still be refused. A result has happened, and a mebibyte is kept for it on the disk
        # (reliability:JR08).
        reserve = self.store.reserve
        if reserve is not None and reserve.is_short and isinstance(record, Head | Intent):
            self.store.renew_reserve_or_raise(reserve)
        chain = self._chain
        if chain is not None and chain.has_unsigned_records:
            self._append_signature(chain)
        try:
            lines = self._encoder.encode_record_lines(record)
        except (JournalError, DataError) as error:
            # Later lines would be chained to a missing one.
            self._broken = self.store.make_write_error(str(error))
            raise
        self._lines += lines
        if chain is not None:
            chain.add_record(record, lines)
            if chain.is_signature_due:
                self._append_signature(chain)

    def _append_signature(self, chain: SignatureChain, *, closes: bool = False) -> None:
        """Append a signature of everything before it; *closes* marks it as the last one of this writer."""
        line = self._encoder.encode_text_line(chain.make_signature_text(closes=closes))
        chain.add_signature(line)
        self._lines.append(line)

    def _append_last_signature(self) -> None:
        """Sign the remaining records before the journal is closed, unless lines were lost."""
        chain = self._chain
        if chain is not None and chain.is_unclosed and self._broken is None and not self._is_lost:
            self._append_signature(chain, closes=True)

    def commit(self) -> None:
        """
        Make everything appended durable.

        Raises:
            JournalWriteFailed: when that fails; the journal can still be opened, without uncommitted records.
        """
        with self._storing:
            self._require_usable()
            self._store_waiting_lines()

    def close(self) -> None:
        """Commit and release the journal; may be called twice. A forked process releases nothing."""
        if self._is_forked:
            return
        with self._storing:
            if self._closed:
                return
            # Closed before the last lines are stored: a second call does nothing, also where storing them failed.
            self._closed = True
            try:
                self._append_last_signature()
                self._store_waiting_lines()
            finally:
                self.store.release()

    def _store_waiting_lines(self) -> None:
        """Store the waiting lines; if that fails, mark the writer as broken and raise."""
        lines = self.pop_waiting_lines()
        if lines:
            try:
                self.store.append(b"".join(lines))
            except JournalError as error:
                self.mark_broken(error)
                raise

    def pop_waiting_lines(self) -> list[bytes]:
        """
        Remove and return the waiting lines. The caller has to store or ``mark_broken`` them.

        Lines before a record that could not be encoded are complete. After lost lines the list is empty.
        """
        # One takes at a time, and another thread may add behind the end meanwhile.
        lines = self._lines[:]
        del self._lines[: len(lines)]
        return [] if self._is_lost else lines

    def mark_broken(self, error: JournalError) -> None:
        """Mark the writer as broken for good, since lines were lost."""
        self._broken, self._is_lost = error, True

    def _require_usable(self) -> None:
        if self._broken is not None:
            raise self._broken


def _restore_signature_chain(journal: Journal, history: History) -> SignatureChain | None:
    """Return the chain of signatures to continue, verified; ``None`` for a journal without a signing key."""
    if journal.signing is None:
        return None
    from stepengine.journal.alterations import verify_and_restore_chain

    return verify_and_restore_chain(journal.signing, journal.content(), history)
