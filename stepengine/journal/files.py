"""
``FileJournal``: one run in one file of JSON lines.

The lock is the operating system's, held on the open file, so it dies with its process. A torn tail is cut off before the
first append. Every commit checks that the file is still the one that this writer left, writes whole lines, and syncs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from stepengine.errors import JournalCorrupt, JournalError, JournalMissing, JournalWriteFailed
from stepengine.journal.journal_files import (
    create_file,
    is_locked,
    lock_file,
    make_missing_file_error,
    make_private,
    make_private_folder,
    make_unusable_error,
    open_for_reading,
    path_exists,
    read_file_stamp,
    require_regular_file,
    unlock_and_close,
)
from stepengine.journal.line_journal import LineJournal
from stepengine.journal.line_reader import Reading, read_file
from stepengine.journal.locked_file import LockedFile, open_closing_idle_files
from stepengine.journal.mailbox import MAIL, MAILBOX_FILE, FileMailbox, Mailbox, mailbox_path
from stepengine.journal.store import Journal, WakePlace
from stepengine.workspace.atomic import replace_path, sync_folder
from stepengine.workspace.calls import OWNER_FILE_MODE
from stepengine.workspace.file_formats import FileFormat
from stepengine.workspace.open_files import describe_os_error
from stepengine.workspace.paths import to_path

Sync = Literal["disk", "write"]
JOURNAL_FILE = FileFormat(
    "a journal",
    re.compile(rb'\{"kind":"head","format":"stepengine\.journal/'),
    JournalCorrupt,
    # The file of another program may hold one line that looks like the start of a head: it is not written over.
    has_whole_line=True,
)


class FileJournal(LineJournal):
    """
    A journal in a file, ``.jsonl`` by custom.

    Creating the object does not create the file; recording a run does.

    Args:
        path: The file.
        sync: ``"disk"`` (default) survives a power cut, ``"write"`` survives the end of the process only.
        unsafe_no_lock: Continue without a lock if the file system has none; two writers would then damage the file.
        options: See ``Journal``.
    """

    def __init__(self, path: str | Path, *, sync: Sync = "disk", unsafe_no_lock: bool = False, **options: Any) -> None:
        super().__init__(**options)
        if "\0" in str(path):
            msg = f"the path of a journal holds a NUL character: {str(path)!r}"
            raise JournalError(msg)
        if sync not in get_args(Sync):
            msg = f"sync must be one of {', '.join(get_args(Sync))}, not {sync!r}"
            raise JournalError(msg)
        self.path = to_path(path, "FileJournal(path)")
        if self.path.name.endswith(MAIL):
            msg = f"{str(path)!r} is a mailbox; name its journal {str(path).removesuffix(MAIL)!r}"
            raise JournalError(msg)
        self.sync: Sync = sync
        self.unsafe_no_lock = unsafe_no_lock
        self.blocks = sync == "disk"
        self._name, self.folder = str(self.path), self.path.parent
        self._file: JournalFile | None = None
        # Tests replace them by those of failing disks.
        self._write: Callable[[int, bytes], int] = os.write
        self._to_disk: Callable[[int], None] | None = None

    def __repr__(self) -> str:
        return f"FileJournal({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The journal's name for messages."""
        return self._name

    @property
    def file(self) -> Path:
        """The path."""
        return self.path

    def size(self) -> int:
        """Return the size of the file, 0 if it does not exist."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise make_unusable_error(self.path, error) from error

    def wake_place(self) -> WakePlace:
        """Return the folder and the name of the file."""
        return WakePlace(self.path.parent, self.path.name)

    def read_bytes(self, start: int) -> bytes:
        """Return the file's bytes from offset *start* on; ``b""`` if the file does not exist."""
        descriptor = open_for_reading(self.path)
        if descriptor is None:
            return b""
        with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
            file.seek(start)
            return file.read()

    def read_piece(self, start: int, most: int) -> bytes:
        """Return at most *most* bytes from offset *start* on."""
        descriptor = open_for_reading(self.path)
        if descriptor is None:
            return b""
        try:
            return os.pread(descriptor, most, start)
        except OSError as error:
            raise make_unusable_error(self.path, error) from error
        finally:
            os.close(descriptor)

    def read_records(self) -> Reading:
        """Return the stored records and the offset of the end of the last complete one; long texts of a large file are read on demand."""
        descriptor = open_for_reading(self.path)
        if descriptor is None:
            return Reading([])
        try:
            return read_file(descriptor, self.path, self.name)
        finally:
            os.close(descriptor)

    def stamp(self) -> tuple[object, object]:
        """Return the file's device and inode, and its size and time."""
        return read_file_stamp(self._name)

    def lock(self) -> Callable[[], None]:
        """Lock the file for writing, and return the function that unlocks it; a missing one is created."""
        file = self._open_file(locks=True)

        def unlock() -> None:
            self._file = None
            try:
                file.release()
            except OSError as error:
                raise make_unusable_error(self.path, error) from error

        self._file = file
        return unlock

    def append_bytes(self, data: bytes, at: int) -> None:
        """Append *data* to the file immediately, and sync it if the journal's ``sync`` requires it."""
        if self._file is not None:
            self._file.append(data, at)
            return
        file = self._open_file(locks=False)
        try:
            file.append(data, at)
        finally:
            file.release()

    def truncate_bytes(self, size: int) -> None:
        """Cut the file off durably; the caller has the lock."""
        assert self._file is not None  # noqa: S101 - who has the lock has the file
        self._file.truncate(size)

    def replace_bytes(self, data: bytes) -> None:
        """Replace the file by a new one, at once or not at all."""
        with contextlib.suppress(FileNotFoundError):
            # Replacing a symbolic link would leave its target as it was.
            require_regular_file(self.path, self.path.lstat())
            self._require_own_files()
        make_private_folder(self.path.parent)
        try:
            replace_path(self.path, data, mode=OWNER_FILE_MODE)
        except OSError as error:
            raise make_unusable_error(self.path, error) from error

    def is_there(self) -> bool:
        """Return whether the file exists."""
        return path_exists(self.path)

    def is_held(self) -> bool:
        """Return whether the file is locked."""
        return is_locked(self.path)

    def make_missing_error(self) -> JournalMissing:
        """
        Return the error for a missing or empty file; it names other journals in the folder.

        Raises:
            JournalCorrupt: when the file is not a journal.
        """
        self._require_own_files()
        return make_missing_file_error(self.path)

    def mailbox(self) -> Mailbox:
        """Return the mailbox of this journal, a file next to it: ``run.jsonl.mail``."""
        return FileMailbox(self, self.path, sync=self._get_sync_function(), unsafe_no_lock=self.unsafe_no_lock)

    def discard(self) -> None:
        """Remove the file, and its mailbox."""
        self._require_own_files(with_mailbox=True)
        self.path.unlink(missing_ok=True)
        mailbox_path(self.path).unlink(missing_ok=True)

    def make_backup(self) -> Journal:
        """Copy the file to a new one next to it, such as ``run.before-1.jsonl``."""
        number = 0
        # A new name each time and never an overwritten one: what is put aside is the only copy of what was cut off.
        while True:
            number += 1
            path = self.path.with_name(f"{self.path.stem}.before-{number}{self.path.suffix}")
            with contextlib.suppress(FileExistsError):
                made = create_file(path)
                try:
                    self._copy_file_to(made)
                except OSError as error:
                    path.unlink(missing_ok=True)
                    msg = f"{self.path} was left unchanged, because it could not be copied to {path}: {describe_os_error(error)}"
                    raise JournalWriteFailed(msg) from error
                return FileJournal(path, sync=self.sync, unsafe_no_lock=self.unsafe_no_lock).copy_redaction_rules_from(
                    self
                )

    def _copy_file_to(self, descriptor: int) -> None:
        """Copy the journal's file durably into an open file, and close that."""
        import shutil

        with open(descriptor, "wb") as made:
            source = open_for_reading(self.path)
            if source is None:
                return
            with open(source, "rb") as file:  # noqa: PTH123 - it is open already
                shutil.copyfileobj(file, made)
            made.flush()
            os.fsync(descriptor)
        sync_folder(self.path.parent)

    def _require_own_files(self, *, with_mailbox: bool = False) -> None:
        """Raise unless the file, and its mailbox if *with_mailbox*, is missing, empty or in the format of stepengine."""
        try:
            JOURNAL_FILE.check(self.path)
            if with_mailbox:
                MAILBOX_FILE.check(mailbox_path(self.path))
        except OSError as error:
            raise make_unusable_error(self.path, error) from error

    def _get_sync_function(self) -> Callable[[int], None] | None:
        """Return the function that makes an open file durable; ``None`` with ``sync="write"``."""
        return self._to_disk or getattr(os, "fdatasync", os.fsync) if self.blocks else None

    def _open_file(self, *, locks: bool) -> JournalFile:
        """Open the file for appending, and lock it if *locks*; create a missing one, and raise if it is not a journal."""
        descriptor = open_closing_idle_files(self.path)
        try:
            if locks:
                lock_file(descriptor, self.path, unsafe_no_lock=self.unsafe_no_lock)
            JOURNAL_FILE.check(self.path, descriptor)
            make_private(self.path, descriptor)
            return JournalFile(self.path, descriptor, self._write, self._get_sync_function())
        except BaseException:
            unlock_and_close(descriptor)
            raise


class JournalFile:
    """
    The file of a journal, open to append.

    Args:
        path: The path of the file.
        descriptor: The open file, locked or not; this object closes it.
        write: Writes to an open file, as ``os.write``.
        sync: Makes an open file durable; ``None`` if its content only has to survive the end of the process.
    """

    def __init__(
        self,
        path: Path,
        descriptor: int,
        write: Callable[[int, bytes], int],
        sync: Callable[[int], None] | None,
    ) -> None:
        self._folder = path.parent
        self._write, self._sync = write, sync
        status = os.fstat(descriptor)
        # As bytes, which is what the system takes.
        self._name, self._inode, self._device = os.fsencode(path), status.st_ino, status.st_dev
        # The name of a new file is made durable once, with its first records.
        self._is_new = not status.st_size
        self._held = LockedFile(path, descriptor)

    def append(self, data: bytes, at: int) -> None:
        """
        Append *data* to the file, which has *at* bytes, and sync it if the journal asks for it.

        First a system call checks that the path still names this file and that its size is *at* (reliability:JR15).

        Raises:
            OSError: when the check fails or the file cannot be written.
        """
        try:
            status = os.stat(self._name)  # noqa: PTH116 - a path object takes its time
        except OSError:
            raise _make_changed_error(None, at) from None
        # By their numbers, as the names of a status are looked up anew each time: inode, device and size.
        if status[1] != self._inode or status[2] != self._device or status[6] != at:
            is_same = (status[1], status[2]) == (self._inode, self._device)
            raise _make_changed_error(status[6] if is_same else None, at)
        held = self._held
        # `with` takes twice as long, and every step of a run commits twice.
        held.using.acquire()
        try:
            descriptor = (held.is_last and held.descriptor) or held.ensure_open()
            try:
                written = self._write(descriptor, data)
                while written < len(data):
                    written += self._write(descriptor, data[written:])
            except OSError:
                # What is left of it would be half a line.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, at)
                raise
            if self._sync is not None:
                self._sync_data(self._sync, descriptor)
            if self._is_new:
                self._sync_folder_entry()
        finally:
            held.using.release()

    def _sync_data(self, sync: Callable[[int], None], descriptor: int) -> None:
        """Sync the file; raise ``OSError`` that records may be lost if this fails."""
        try:
            sync(descriptor)
        except OSError as error:
            # A page that could not be written may be gone: syncing again would only seem to succeed (reliability:JR08).
            why = f"the disk refused to sync ({describe_os_error(error)}), so its last records may be lost"
            raise OSError(errno.EIO, why) from error

    def _sync_folder_entry(self) -> None:
        """Make the name of a new file durable."""
        try:
            sync_folder(self._folder)
        except OSError as error:
            why = f"its name cannot be made durable ({describe_os_error(error)})"
            raise OSError(errno.EIO, why) from error
        self._is_new = False

    def truncate(self, size: int) -> None:
        """Cut the file to *size* bytes, durably."""
        with self._held.using:
            descriptor = self._held.ensure_open()
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
            self._is_new = not size

    def release(self) -> None:
        """Close and unlock the file; the name of an empty new one is made durable before."""
        try:
            if self._is_new:
                self._sync_folder_entry()
        finally:
            self._held.release()


def _make_changed_error(size: int | None, at: int) -> OSError:
    """Return the error for a file that was changed since this writer's last write."""
    if size is None:
        why = "the file was moved, deleted or replaced during the run"
    else:
        why = f"another program wrote to it: it has {size} bytes, and this run wrote {at}"
    return OSError(errno.ESTALE, why)
