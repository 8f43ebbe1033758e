"""
``FileJournal``: one run in one file of JSON lines.

The lock is the operating system's, held on the open file, so it dies with its process. A torn tail is cut off before the
first append. Every commit checks that the file is still the one that this writer left, writes whole lines, and syncs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from stepengine.errors import JournalError, JournalMissing, JournalWriteFailed
from stepengine.journal.encoding import MAX_LINE_BYTES
from stepengine.journal.following import LAST_BYTES, BytesBehind, ByteTail, Tail
from stepengine.journal.held import HeldFile, opened_with_room
from stepengine.journal.history import History
from stepengine.journal.mailbox import MAIL, FileMailbox, Mailbox, mailbox_of
from stepengine.journal.places import (
    FULL,
    check_place,
    close_locked,
    is_locked,
    lock_file,
    made_folder,
    make_private,
    missing_file,
    opened,
    opened_new,
    unusable,
)
from stepengine.journal.reading import Reading, first_of, read_file
from stepengine.journal.records import Head, Record
from stepengine.journal.store import Journal, LineWriter, Writer
from stepengine.workspace.atomic import replace_path, sync_folder
from stepengine.workspace.calls import OWNER_FILE_MODE
from stepengine.workspace.open_files import said

__all__ = ("FileJournal", "Sync")

Sync = Literal["disk", "write"]


class FileJournal(Journal):
    """
    A journal in a file, ``.jsonl`` by custom.

    Making one touches nothing; the file is created when a run is recorded into it.

    Args:
        path: The file.
        sync: ``"disk"`` (default) survives a power cut, ``"write"`` survives the end of the process only.
        unsafe_no_lock: Go on where the file system has no locks; then two writers would damage the file.
        options: See ``Journal``.
    """

    def __init__(self, path: str | Path, *, sync: Sync = "disk", unsafe_no_lock: bool = False, **options: Any) -> None:
        super().__init__(**options)
        if "\0" in str(path):
            msg = f"the path of a journal holds a NUL character: {str(path)!r}"
            raise JournalError(msg)
        if sync not in get_args(Sync):
            msg = f"sync is one of {', '.join(get_args(Sync))}, not {sync!r}"
            raise JournalError(msg)
        self.path = Path(path)
        if self.path.name.endswith(MAIL):
            msg = f"{str(path)!r} is the name of a mailbox; its journal is {str(path).removesuffix(MAIL)!r}"
            raise JournalError(msg)
        self.sync: Sync = sync
        self.unsafe_no_lock = unsafe_no_lock

    def __repr__(self) -> str:
        return f"FileJournal({str(self.path)!r})"

    @property
    def name(self) -> str:
        """How the journal is called in messages."""
        return str(self.path)

    def content(self) -> bytes:
        """Return the file's bytes; those of a file that does not exist are none."""
        descriptor = opened(self.path)
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            return file.read()

    def records(self) -> list[Record]:
        """Return all records; a torn tail is left out."""
        descriptor = opened(self.path)
        if descriptor is None:
            return []
        try:
            return read_file(descriptor, self.path, self.name).records
        finally:
            os.close(descriptor)

    def is_there(self) -> bool:
        """Return whether the file exists."""
        return self.path.exists()

    def is_held(self) -> bool:
        """Return whether the file is locked."""
        return is_locked(self.path)

    def missing(self) -> JournalMissing:
        """Return the error for a file that is not there or empty; it names journals beside it."""
        return missing_file(self.path)

    def writer(self) -> Writer:
        """Take the file over for writing; it is created when there is none."""
        return FileWriter(self)

    def head(self) -> Head | None:
        """Return the first record, without reading any other."""
        descriptor = opened(self.path)
        if descriptor is None:
            return None
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            return first_of(file.readline(MAX_LINE_BYTES + 1), self.name)

    def tail(self) -> Tail:
        """Return a place at the start of the file."""
        return FileTail(self)

    def mailbox(self) -> Mailbox:
        """Return the mailbox of this journal, a file beside it: ``run.jsonl.mail``."""
        to_disk = getattr(os, "fdatasync", os.fsync) if self.sync == "disk" else None
        return FileMailbox(self, self.path, sync=to_disk, unsafe_no_lock=self.unsafe_no_lock)

    def discard(self) -> None:
        """Remove the file, and its mailbox."""
        self.path.unlink(missing_ok=True)
        mailbox_of(self.path).unlink(missing_ok=True)

    def set_aside(self) -> Journal:
        """Copy the file to one beside it that is new, such as ``run.before-1.jsonl``."""
        number = 0
        # A new name each time and never an overwritten one: what is put aside is the only copy of what was cut off.
        while True:
            number += 1
            path = self.path.with_name(f"{self.path.stem}.before-{number}{self.path.suffix}")
            with contextlib.suppress(FileExistsError):
                self._copy_to(opened_new(path))
                return FileJournal(path, sync=self.sync, unsafe_no_lock=self.unsafe_no_lock).with_rules_of(self)

    def _copy_to(self, descriptor: int) -> None:
        import shutil

        with open(descriptor, "wb") as made:
            source = opened(self.path)
            if source is None:
                return
            with open(source, "rb") as file:  # noqa: PTH123 - it is open already
                shutil.copyfileobj(file, made)
            made.flush()
            os.fsync(descriptor)
        sync_folder(self.path.parent)

    def replace(self, records: Sequence[Record]) -> None:
        """Replace the file by one with *records*, at once or not at all."""
        History(records, self.name)
        content = b"".join(self.lines_of(records))
        _check_no_link(self.path)
        made_folder(self.path.parent)
        try:
            replace_path(self.path, content, mode=OWNER_FILE_MODE)
        except OSError as error:
            raise unusable(self.path, error) from error


class FileTail(ByteTail):
    """
    A place in a file, by bytes.

    Args:
        journal: The journal.
    """

    def __init__(self, journal: FileJournal) -> None:
        super().__init__(journal.name)
        self._journal = journal
        self._path = str(journal.path)
        self._file: tuple[int, int] | None = None
        self._place = 0
        self._last = b""

    def _stamp(self) -> object:
        # A path object takes its time, and this is done by everybody who waits, many times a second.
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError as error:
            return error.errno
        return status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev

    def _look(self, most: int) -> BytesBehind:
        descriptor = opened(self._journal.path)
        if descriptor is None:
            if self._file is not None:
                raise self._journal.missing()
            return BytesBehind()
        try:
            status = os.fstat(descriptor)
            file = status.st_dev, status.st_ino
            if self._file not in (None, file):
                return BytesBehind(again="replaced")
            self._file = file
            if status.st_size < self._place:
                return BytesBehind(again="cut")
            before = self._place - len(self._last)
            data = os.pread(descriptor, len(self._last) + most, before)
        except OSError as error:
            raise unusable(self._journal.path, error) from error
        finally:
            os.close(descriptor)
        # The last bytes that were read are read once more: a file may have been replaced by one that is longer, under
        # the same name and even with the same inode.
        if not data.startswith(self._last):
            return BytesBehind(again="rewritten")
        return BytesBehind(data[len(self._last) :], before + len(data) >= status.st_size)

    def _take(self, data: bytes) -> None:
        self._place += len(data)
        self._last = (self._last + data[-LAST_BYTES:])[-LAST_BYTES:]

    def _forget(self) -> None:
        self._file, self._place, self._last = None, 0, b""


class FileWriter(LineWriter):
    """
    The writer of a file.

    Args:
        journal: The journal.
        write: Stands in for ``os.write``, for tests of full disks.
        sync: Stands in for ``os.fdatasync``.
    """

    def __init__(
        self,
        journal: FileJournal,
        *,
        write: Callable[[int, bytes], int] = os.write,
        sync: Callable[[int], None] | None = None,
    ) -> None:
        self._path = journal.path
        self._write = write
        to_disk: Any = sync or getattr(os, "fdatasync", os.fsync)
        self.blocks = journal.sync == "disk"
        self._sync: Callable[[int], None] | None = to_disk if self.blocks else None
        self._fd = opened_with_room(journal.path)
        try:
            lock_file(self._fd, journal.path, unsafe_no_lock=journal.unsafe_no_lock)
            make_private(journal.path, self._fd)
            reading = self._repair_tail(journal)
            super().__init__(journal, reading)
            self._keep_room(journal.path)
            status = os.fstat(self._fd)
        except BaseException:
            close_locked(self._fd)
            raise
        self._held = HeldFile(journal.path, self._fd, self._storing)
        # As bytes, which is what the system takes.
        self._file, self._inode, self._device = os.fsencode(journal.path), status.st_ino, status.st_dev
        self._is_new = not self._size
        # Whether a write is not all that there is to do.
        self._settles = self._is_new or self.blocks

    def _repair_tail(self, journal: FileJournal) -> Reading:
        """Return what the file holds, after a torn tail was cut off and a missing newline was added."""
        self._size = os.fstat(self._fd).st_size
        reading = read_file(self._fd, journal.path, journal.name)
        try:
            # Cut off before anything is appended: what came behind half a line would be damage in the middle, which
            # nobody can tell from an attack (reliability:JR01).
            if reading.torn:
                os.ftruncate(self._fd, reading.end)
                os.fsync(self._fd)
                self._size, self.repaired = reading.end, reading.torn
            if reading.open_end:
                self._size += os.write(self._fd, b"\n")
        except OSError as error:
            raise unusable(journal.path, error) from error
        return reading

    def _store(self, lines: list[bytes]) -> None:
        """
        Write lines at once, behind what this writer left, and to the disk where that is asked for.

        Before them the system is asked once whether the file is still that one (reliability:JR15, reliability:JR16). What nearly
        always happens is one function: in five of them a commit took 4 us beside the 9 that the system takes to look and to write.
        """
        try:
            status = os.stat(self._file)  # noqa: PTH116 - a path object takes its time
        except OSError:
            raise self._changed(None) from None
        # By their numbers, as the names of a status are looked up anew each time: inode, device and size.
        if status[1] != self._inode or status[2] != self._device or status[6] != self._size:
            raise self._changed(status)
        data = b"".join(lines)
        length = len(data)
        held = self._held
        if not held.is_last:
            try:
                self._fd = held.take()
            except OSError as error:
                raise self._write_error(said(error)) from error
        write = self._write
        try:
            written = write(self._fd, data)
            if written < length:
                self._write_all(data[written:])
        except OSError as error:
            self._write_into_reserve(data, error)
        self._size += length
        if self._settles:
            self._settle()

    def _settle(self) -> None:
        """Make durable what was written, as far as that is asked for, and the name of a new file."""
        if self._sync is not None:
            self._sync_data(self._sync)
        self._sync_name()
        self._settles = self._sync is not None

    def _changed(self, status: os.stat_result | None) -> JournalWriteFailed:
        """Return the error for a file that is not as this writer left it."""
        if status is None or (status.st_ino, status.st_dev) != (self._inode, self._device):
            why = "the file was moved, deleted or replaced during the run"
        else:
            why = f"somebody else wrote to it: it has {status.st_size} bytes, this run left {self._size}"
        return self._write_error(why)

    def _sync_name(self) -> None:
        """Make the name of a new file durable, once; this happens with its first records, where waiting for the disk is expected."""
        if self._is_new:
            try:
                sync_folder(self._path.parent)
            except OSError as error:
                why = f"its name cannot be made durable ({said(error)})"
                raise self._write_error(why) from error
            self._is_new = False

    def _write_into_reserve(self, data: bytes, error: OSError) -> None:
        """Where the disk is full write once more, into the room that was kept for this (reliability:JR09)."""
        self._back()
        if error.errno not in FULL or self._reserve is None or not self._reserve.spend():
            raise self._write_error(said(error)) from error
        try:
            self._write_all(data)
        except OSError as again:
            self._back()
            raise self._write_error(said(again)) from again
        self._reserve.regain()

    def _sync_data(self, sync: Callable[[int], None]) -> None:
        try:
            sync(self._fd)
        except OSError as error:
            # A page that could not be written may be gone: syncing again would only seem to succeed (reliability:JR10).
            why = f"the disk refused to sync ({said(error)}), so its last records may be lost"
            raise self._write_error(why) from error

    def _write_all(self, data: bytes) -> None:
        while data:
            data = data[self._write(self._fd, data) :]

    def _back(self) -> None:
        """Cut off what was written of a record that did not fit."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)

    def _release(self) -> None:
        try:
            self._sync_name()
        finally:
            if self._reserve is not None:
                self._reserve.close()
            self._held.release()


def _check_no_link(path: Path) -> None:
    """Raise unless it is a regular file: replacing a symbolic link would leave its target as it was."""
    with contextlib.suppress(FileNotFoundError):
        check_place(path, path.lstat())
