"""
``LockedFile``: a locked file of a journal that is closed while unused and stays locked.

A process may have so many files open, and may have more runs than that at once: of the files of all journals a part is open,
those used last. The lock of a file lasts as long as anything refers to what was opened, and a mapping of it into memory does:
so a mapped file can be closed, and opened again to write, and no other process gets the lock meanwhile. That is how Linux
does it; it is tried on each disk before anything counts on it, and where it is not so files stay open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from stepengine.errors import JournalWriteFailed
from stepengine.journal.journal_files import REOPENED, open_for_appending, unlock_and_close
from stepengine.workspace import after_fork
from stepengine.workspace.after_fork import Lock, call_in_forked_child, register_fork_hooks
from stepengine.workspace.open_files import get_max_open_files, make_too_many_files_advice

MIN_HELD_FILES = 8
"""So many journals of one process stay open where hardly any file may be: each effect of theirs opens one otherwise."""
MAX_HELD_FILES = 512
"""More runs than one process carries out at once; a journal that is opened again for each record costs little beside a model call."""
OPEN_FILES_DIVISOR = 4
"""Of the files that a process may have open, one in so many may be a journal's: runs need sockets and pipes, too."""


def get_open_file_limit() -> int:
    """Return the number of journal files that this process may keep open."""
    most = get_max_open_files()
    return MAX_HELD_FILES if most is None else max(MIN_HELD_FILES, min(MAX_HELD_FILES, most // OPEN_FILES_DIVISOR))


class LockedFile:
    """
    A locked file, open or not.

    Args:
        path: The path of the file.
        descriptor: The open and locked file; this object owns it from now on.

    Attributes:
        descriptor: The open file; ``None`` while it is closed.
        using: A lock; while it is held, the file stays open. A plain ``threading.Lock``, as a child never uses its parent's files.
        is_last: Whether the file is open and the most recently used one. A holder of ``using`` need not call ``ensure_open`` then:
            the order of use is unchanged, and a file in use is never closed. This avoids the shared lock in each commit.
    """

    # Those that are open and may be closed, the least recently used first.
    _open: ClassVar[OrderedDict[LockedFile, None]] = OrderedDict()
    _all: ClassVar[dict[LockedFile, None]] = {}
    _last: ClassVar[LockedFile | None] = None
    _lock: ClassVar[Lock] = Lock()
    _keeping: ClassVar[dict[int, bool]] = {}

    def __init__(self, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self._path = path
        self._device, self._inode = status.st_dev, status.st_ino
        self._mapping: int | None = None
        self.using = threading.Lock()
        self.descriptor: int | None = descriptor
        self.is_last = False
        with self._lock:
            self._all[self] = self._open[self] = None
            if len(self._open) > 1:
                # Tried while there are descriptors to try it with, and not when the first file has to be closed for lack of one.
                self._locks_outlive_close()
            self._close_idle_files(get_open_file_limit())

    def ensure_open(self) -> int:
        """
        Return the open file, opened again if it was closed; the caller holds ``using`` while it uses it.

        Raises:
            OSError: when the file cannot be opened again.
        """
        with self._lock:
            if self.descriptor is None:
                self.descriptor = self._reopen()
                self._open[self] = None
                self._close_idle_files(get_open_file_limit())
            elif self in self._open:
                self._open.move_to_end(self)
            if LockedFile._last is not None:
                LockedFile._last.is_last = False
            LockedFile._last, self.is_last = self, True
            return self.descriptor

    def release(self) -> None:
        """Release the lock and close the file."""
        with self._lock:
            self._open.pop(self, None)
            self._all.pop(self, None)
            self._forget_last_used()
            descriptor, self.descriptor = self.descriptor, None
            mapping, self._mapping = self._mapping, None
            if descriptor is not None:
                unlock_and_close(descriptor)
            if mapping is not None:
                _unmap_page(mapping)

    @classmethod
    def close_least_recently_used_file(cls) -> bool:
        """Close the least recently used idle file, keeping its lock; return False if none can be closed."""
        with cls._lock:
            return cls._close_idle_files(len(cls._open) - 1)

    @classmethod
    def _close_idle_files(cls, max_open_count: int) -> bool:
        """Close the least recently used idle files until at most *max_open_count* are open; return whether any was closed."""
        begun = len(cls._open)
        for one in list(cls._open):
            if len(cls._open) <= max_open_count:
                break
            if one.using.acquire(timeout=0):
                try:
                    one.close_keeping_lock()
                finally:
                    one.using.release()
        return len(cls._open) < begun

    def close_keeping_lock(self) -> None:
        """Close the file and keep the lock; if the lock would be lost, leave the file open permanently."""
        descriptor = self.descriptor
        if descriptor is not None and self._mapping is None:
            keeps = self._locks_outlive_close()
            if keeps is None:
                return
            self._mapping = _map_page(descriptor) if keeps else None
        del self._open[self]
        if descriptor is not None and self._mapping is not None:
            self._forget_last_used()
            self.descriptor = None
            os.close(descriptor)

    def _forget_last_used(self) -> None:
        if self.is_last:
            LockedFile._last, self.is_last = None, False

    def _locks_outlive_close(self) -> bool | None:
        """Return whether locks survive closing a file on this disk, or ``None`` if descriptors ran out in the test."""
        keeps = self._keeping.get(self._device)
        if keeps is None:
            try:
                keeps = self._keeping[self._device] = _test_lock_outlives_close(self._path.parent)
            except OSError as error:
                return None if make_too_many_files_advice(error) else False
        return keeps

    def _reopen(self) -> int:
        """Open the file again; raise if another file has its name now."""
        try:
            descriptor = os.open(self._path, REOPENED)
        except OSError as error:
            if error.errno != errno.EMFILE or not self._close_idle_files(len(self._open) - 1):
                raise
            descriptor = os.open(self._path, REOPENED)
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (self._device, self._inode):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the file was moved, deleted or replaced during the run")
        return descriptor

    # --- forks --------------------------------------------------------------------------------------------------------

    _is_held: ClassVar[bool] = False

    @classmethod
    def lock_before_fork(cls) -> None:
        """Lock opening and closing of files while the process is forked."""
        cls._is_held = cls._lock.acquire(after_fork.PATIENCE_SECONDS)

    @classmethod
    def unlock_after_fork(cls) -> None:
        """Allow opening and closing again in the parent process."""
        if cls._is_held:
            cls._is_held = False
            cls._lock.release()

    @classmethod
    def close_in_forked_child(cls) -> None:
        """Close the parent's files in a forked child without unlocking them."""
        for one in cls._all:
            if one.descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(one.descriptor)
                one.descriptor = None
            one.is_last = False
        cls._open, cls._all, cls._last, cls._is_held = OrderedDict(), {}, None, False


register_fork_hooks(LockedFile.lock_before_fork, LockedFile.unlock_after_fork)
call_in_forked_child(LockedFile.close_in_forked_child)


def open_closing_idle_files(path: Path) -> int:
    """
    Return a descriptor as ``open_for_appending`` does; idle journals are closed if too many files are open.

    Raises:
        JournalError: as ``open_for_appending``.
    """
    while True:
        try:
            return open_for_appending(path)
        except JournalWriteFailed as error:
            cause = error.__cause__
            if (
                not isinstance(cause, OSError)
                or cause.errno != errno.EMFILE
                or not LockedFile.close_least_recently_used_file()
            ):
                raise


# --- locks without descriptors ----------------------------------------------------------------------------------------


@cache
def _load_libc() -> Any:
    """Return libc with typed ``mmap``, ``munmap`` and ``madvise``; ``None`` except on Linux, where a mapping preserves a file's lock."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        size, number, place = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        libc.mmap.restype, libc.mmap.argtypes = place, (place, size, number, number, number, ctypes.c_long)
        libc.munmap.argtypes, libc.madvise.argtypes = (place, size), (place, size, number)
    except (ImportError, OSError, AttributeError):
        return None
    return libc


def _map_page(descriptor: int) -> int | None:
    """Map a page of a file that forks do not inherit; return its address, or ``None`` on failure."""
    import ctypes
    import mmap

    libc = _load_libc()
    if libc is None:
        return None
    none, failed = 0, ctypes.c_void_p(-1).value
    address: int | None = libc.mmap(None, mmap.PAGESIZE, none, mmap.MAP_SHARED, descriptor, 0)
    if address in (None, failed):
        return None
    if libc.madvise(address, mmap.PAGESIZE, mmap.MADV_DONTFORK):
        _unmap_page(address)
        return None
    return address


def _unmap_page(address: int | None) -> None:
    import mmap

    _load_libc().munmap(address, mmap.PAGESIZE)


def _test_lock_outlives_close(folder: Path) -> bool:
    """Test whether the lock of a closed file lasts exactly as long as its mapping."""
    import fcntl
    import tempfile

    if _load_libc() is None:
        return False
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file, contextlib.ExitStack() as stack:
        fcntl.flock(file, exclusive)
        other = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, other)
        address = _map_page(file.fileno())
        if address is None:
            return False
        file.close()
        try:
            fcntl.flock(other, exclusive)
        except BlockingIOError:
            is_kept = True
        else:
            is_kept = False
        finally:
            _unmap_page(address)
        if is_kept:
            fcntl.flock(other, exclusive)
        return is_kept
