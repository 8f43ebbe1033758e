"""
``FileJournal``: one run in one file of JSON lines (replay J1, J2, J30, J32, J38; reliability JR01-JR17, JR41).

The lock is the operating system's, held on the open file, so it dies with its process. A torn tail is cut off before the
first append. Every commit checks that the file is still the one that this writer left, writes whole lines, and syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from stepengine.errors import JournalError, JournalLocked, JournalWriteFailed
from stepengine.journal.encoding import Encoder
from stepengine.journal.history import History
from stepengine.journal.linewriter import LineWriter
from stepengine.journal.locking import lock_file
from stepengine.journal.reading import Reading, read_file
from stepengine.journal.records import Record
from stepengine.journal.reserve import Reserve
from stepengine.journal.store import Journal, Writer

__all__ = ("FileJournal", "Sync")

Sync = Literal["disk", "write"]
OWNER_ONLY = 0o600
FOLDER = 0o700


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
        descriptor = self._descriptor()
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            _check_regular(self.path, descriptor)
            return file.read()

    def _descriptor(self) -> int | None:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unusable(self.path, error) from error

    def records(self) -> list[Record]:
        """Return all records; a torn tail is left out."""
        descriptor = self._descriptor()
        if descriptor is None:
            return []
        try:
            _check_regular(self.path, descriptor)
            return read_file(descriptor, self.path, self.name).records
        finally:
            os.close(descriptor)

    def writer(self) -> Writer:
        """Take the file over for writing; it is created when there is none."""
        return FileWriter(self)

    def discard(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def replace(self, records: Sequence[Record]) -> None:
        """Replace the file by one with *records*, at once or not at all."""
        import tempfile

        history = History(records, self.name)
        link = self.link if history.head is None else history.head.link
        encoder = Encoder(self.redactor, link=link, stable=self.stable)
        content = b"".join([line for record in records for line in encoder.lines(record)])
        _make_folder(self.path.parent)
        descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=self.path.parent)
        try:
            with open(descriptor, "wb") as file:  # noqa: PTH123 - it is open already
                file.write(content)
                file.flush()
                os.fsync(descriptor)
            Path(temporary).replace(self.path)
            _sync_folder(self.path.parent)
        except OSError as error:
            raise _unusable(self.path, error) from error
        finally:
            Path(temporary).unlink(missing_ok=True)


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
        self._sync: Callable[[int], None] = to_disk if journal.sync == "disk" else _no_sync
        self._fd = _opened(journal.path)
        self._reserve: Reserve | None = None
        try:
            _check_regular(journal.path, self._fd)
            lock_file(self._fd, journal.path, unsafe_no_lock=journal.unsafe_no_lock)
            reading = self._repaired(journal)
            super().__init__(journal, reading)
            self._reserve = Reserve.near(journal.path)
        except BaseException:
            os.close(self._fd)
            raise
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)

    def _repaired(self, journal: FileJournal) -> Reading:
        """Return what the file holds, after a torn tail was cut off and a missing newline was added."""
        self._size = os.fstat(self._fd).st_size
        reading = read_file(self._fd, journal.path, journal.name)
        try:
            if reading.torn:
                os.ftruncate(self._fd, reading.end)
                os.fsync(self._fd)
                self._size, self.repaired = reading.end, reading.torn
            if reading.open_end:
                self._size += os.write(self._fd, b"\n")
        except OSError as error:
            raise _unusable(journal.path, error) from error
        return reading

    def _store(self, lines: list[bytes]) -> None:
        self._check_file()
        data = b"".join(lines)
        try:
            self._write_all(data)
        except OSError as error:
            self._back()
            if error.errno != errno.ENOSPC or self._reserve is None or not self._reserve.spend():
                raise self._failed(_said(error)) from error
            self._write_again(data)
        try:
            self._sync(self._fd)
        except OSError as error:
            # A page that could not be written may be gone: syncing again would only seem to succeed (reliability JR10).
            why = f"the disk refused to sync ({_said(error)}), so its last records may be lost"
            raise self._failed(why) from error
        self._size += len(data)

    def _write_again(self, data: bytes) -> None:
        """Write once more, into the room that was kept for this (reliability JR09)."""
        try:
            self._write_all(data)
        except OSError as error:
            self._back()
            raise self._failed(_said(error)) from error

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = self._write(self._fd, view)  # type: ignore[arg-type]
            view = view[written:]

    def _back(self) -> None:
        """Cut off what was written of a record that did not fit (reliability JR11)."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)

    def _check_file(self) -> None:
        status = os.fstat(self._fd)
        try:
            there = self._path.stat()
            same = (there.st_dev, there.st_ino) == self._identity
        except OSError:
            same = False
        if not same:
            why = "the file was moved, deleted or replaced during the run"
            raise self._failed(why)
        if status.st_size != self._size:
            why = f"somebody else wrote to it: it has {status.st_size} bytes, this run left {self._size}"
            raise self._failed(why)

    def _release(self) -> None:
        if self._reserve is not None:
            self._reserve.close()
        os.close(self._fd)


def _no_sync(_: int) -> None:
    """Leave it to the operating system when the data reach the disk."""


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unusable(path, error) from error
    _make_folder(path.parent)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except FileExistsError:
        return _opened(path)
    except OSError as error:
        raise _unusable(path, error) from error
    _sync_folder(path.parent)
    return descriptor


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(FOLDER, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def _sync_folder(folder: Path) -> None:
    """Make the file's name as durable as its content (reliability JR12)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_regular(path: Path, descriptor: int) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        msg = f"{path} is no regular file; a journal is one"
        raise JournalError(msg)


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _unusable(path: Path, error: OSError) -> JournalError:
    if error.errno == errno.ELOOP:
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        return JournalError(msg)
    kind = JournalLocked if error.errno == errno.EAGAIN else JournalWriteFailed
    return kind(f"{path} cannot be used as a journal: {_said(error)}; nothing was run")
