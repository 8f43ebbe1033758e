"""
Files of journals: private to their owner, with one writer each.

This module knows files, folders, locks and permissions, and nothing of records. The lock is the operating system's, on an open
descriptor, and ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from stepengine.data.alike import MAX_SUGGESTIONS, find_nearest
from stepengine.errors import JournalError, JournalLocked, JournalMissing, JournalWriteFailed
from stepengine.workspace.atomic import create_folder_durably
from stepengine.workspace.calls import OTHERS_BITS, OWNER_FILE_MODE, OWNER_FOLDER_MODE
from stepengine.workspace.open_files import describe_os_error

MAX_COMPARED_NAMES = 1_000
"""A folder may hold a hundred thousand journals; an error message must not list and sort them all."""
TO_RECORD = "record one with engine.run(..., journal=...)"
# A pipe without another end must not be waited for, and a terminal must not become the process's own.
CAREFULLY = os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
REOPENED = os.O_RDWR | os.O_APPEND | NO_LINK | CAREFULLY
"""How a journal is opened to go on writing it: it is not made."""


def open_for_reading(path: Path) -> int | None:
    """
    Open the file at *path* for reading and return its descriptor, or ``None`` if the file is missing.

    Raises:
        JournalError: when the file cannot be read, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | CAREFULLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise make_unusable_error(path, error) from error
    return _close_unless_regular(path, descriptor)


def open_for_appending(path: Path) -> int:
    """
    Open the file at *path* for reading and appending; a missing one is created as by ``create_file``.

    Raises:
        JournalError: when the file cannot be written, or is not a regular file.
    """
    while True:
        try:
            return _close_unless_regular(path, os.open(path, REOPENED))
        except FileNotFoundError:
            make_private_folder(path.parent)
        except OSError as error:
            raise make_unusable_error(path, error) from error
        with contextlib.suppress(FileExistsError):
            return create_file(path, REOPENED)


def create_file(path: Path, flags: int = os.O_WRONLY | os.O_CLOEXEC) -> int:
    """
    Create a file and return its descriptor; its name is durable after ``sync_folder``.

    Raises:
        FileExistsError: when a file of this name exists.
        JournalError: when the file cannot be created.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, OWNER_FILE_MODE)
    except FileExistsError:
        raise
    except OSError as error:
        raise make_unusable_error(path, error) from error


def read_file_stamp(path: str) -> tuple[object, object]:
    """Return the device and inode of a file, and its size and time; ``None`` and the error number if it has no status."""
    try:
        status = os.stat(path)  # noqa: PTH116 - a path object takes its time, and whoever waits asks many times a second
    except OSError as error:
        return None, error.errno
    return (status.st_dev, status.st_ino), (status.st_size, status.st_mtime_ns)


def make_private(path: Path, descriptor: int | None = None) -> None:
    """
    Remove the permissions of others than the owner from a file.

    Raises:
        FileNotFoundError: when there is no file at *path*.
        JournalError: when the process may not change the permissions.
    """
    try:
        if descriptor is None:
            if path.stat().st_mode & OTHERS_BITS:
                path.chmod(OWNER_FILE_MODE)
        elif os.fstat(descriptor).st_mode & OTHERS_BITS:
            os.fchmod(descriptor, OWNER_FILE_MODE)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise make_unusable_error(path, error) from error


def require_regular_file(path: Path, status: os.stat_result) -> None:
    """
    Raise unless *status* is that of a regular file.

    Raises:
        JournalError: when it is another kind of file; the error names the kind.
    """
    if stat.S_ISLNK(status.st_mode):
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        raise JournalError(msg)
    if not stat.S_ISREG(status.st_mode):
        msg = f"{path} is not a regular file; a journal must be one"
        raise JournalError(msg)


def make_private_folder(folder: Path) -> None:
    """
    Create a folder and its missing parents for their owner only; existing ones stay unchanged.

    Raises:
        JournalError: when a folder cannot be created.
    """
    try:
        create_folder_durably(folder, OWNER_FOLDER_MODE)
    except OSError as error:
        raise make_unusable_error(folder, error) from error


def path_exists(path: Path) -> bool:
    """
    Return whether there is something at *path*.

    Raises:
        JournalError: when the system cannot tell, as for a folder that this process may not enter, or a name that is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    except OSError as error:
        raise make_unusable_error(path, error) from error
    return True


def make_missing_file_error(path: Path) -> JournalMissing:
    """Return the error for a missing or empty file; it names similar files in the folder."""
    if path_exists(path):
        msg = f"{path} holds no run; {TO_RECORD}"
        return JournalMissing(msg, path=str(path))
    if not path.parent.is_dir():
        msg = f"there is no journal {str(path)!r}: the folder {str(path.parent)!r} does not exist"
        return JournalMissing(msg, path=str(path))
    alike: list[str] = []
    with contextlib.suppress(OSError):
        alike = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    near = suggest_names(path.name, alike)
    beside = (
        f"in the same folder {format_names_with_verb(near, len(alike))}"
        if near
        else f"its folder has no *{path.suffix} file; {TO_RECORD}"
    )
    msg = f"there is no journal {str(path)!r}; {beside}"
    return JournalMissing(msg, path=str(path), beside=near)


def suggest_names(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return up to five of the names, similar ones first."""
    known = sorted(islice(names, MAX_COMPARED_NAMES))
    return tuple(dict.fromkeys([*find_nearest(name, known), *known]))[:MAX_SUGGESTIONS]


def format_names_with_verb(names: Sequence[str], count: int) -> str:
    """Return ``is`` or ``are``, these names, and how many of *count* they leave out, for a message."""
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return f"{'is' if count == 1 else 'are'} {', '.join(map(repr, names))}{more}"


def make_unusable_error(path: Path, error: OSError) -> JournalError:
    """Return the error for an unusable file."""
    if error.errno == errno.ELOOP:
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        return JournalError(msg)
    kind = JournalLocked if error.errno == errno.EAGAIN else JournalWriteFailed
    return kind(f"{path} cannot be used as a journal: {describe_os_error(error)}; nothing was run")


def _close_unless_regular(path: Path, descriptor: int) -> int:
    """Return the descriptor of a regular file; close it and raise for anything else."""
    try:
        require_regular_file(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


LOCKS = Path("/proc/locks")
LOCKS_READS = 5
"""Reads of the kernel's list until the owner is unknown: it can miss a lock while other processes lock and unlock files."""


def lock_file(descriptor: int, path: Path, *, unsafe_no_lock: bool = False) -> None:
    """
    Lock an open file until it is closed; raise ``JournalLocked`` if another process has locked it.

    Args:
        descriptor: The open file.
        path: The path of the file, for messages.
        unsafe_no_lock: Continue without a lock if the file system has none.

    Raises:
        JournalLocked: when another process has locked the file; the error names the process if it is known.
        JournalError: when the file system has no locks.
    """
    try:
        import fcntl
    except ImportError:
        _refuse_unlocked(path, "this system has no flock", unsafe_no_lock=unsafe_no_lock)
        return
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            # No writer has the file if a shared lock is free: only ``is_locked`` looked at it at that moment.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _make_locked_error(path, _find_lock_owner(descriptor)) from error
    except OSError as error:
        _refuse_unlocked(path, error.strerror or str(error), unsafe_no_lock=unsafe_no_lock)


def is_locked(path: Path) -> bool:
    """
    Return whether a process has locked the file; False for a missing file or without lock support.

    Raises:
        JournalError: when the file cannot be opened.
    """
    descriptor = open_for_reading(path)
    if descriptor is None:
        return False
    try:
        import fcntl

        # Shared: of two who ask at the same time neither takes the other one for an owner.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        return False
    finally:
        unlock_and_close(descriptor)
    return False


def unlock_and_close(descriptor: int) -> None:
    """
    Unlock a file that ``lock_file`` locked, and close it.

    The file is unlocked first: a process that another thread is starting has inherited the descriptor, and would keep the lock.
    """
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _refuse_unlocked(path: Path, reason: str, *, unsafe_no_lock: bool) -> None:
    """Raise because a file cannot be locked, unless the caller accepts that."""
    if not unsafe_no_lock:
        msg = (
            f"{path} cannot be locked ({reason}), so two writers could damage it; put it on a local file system, or pass "
            "unsafe_no_lock=True if you are sure that no other process writes it"
        )
        raise JournalError(msg)


def _make_locked_error(path: Path, owner: int | None) -> JournalLocked:
    """Return the error for a file that another writer has locked; it names the process *owner* and its start, if known."""
    if owner == os.getpid():
        who = f"another run of this process ({owner})"
    else:
        who = f"process {owner} on {socket.gethostname()}" if owner else "another process"
    since = f", which started at {started}" if owner and (started := _format_process_start(owner)) else ""
    msg = f"{path} is being written by {who}{since}; only one process can write a journal. For several processes see stepengine.durable"
    return JournalLocked(msg, pid=owner, host=socket.gethostname())


def _find_lock_owner(descriptor: int) -> int | None:
    """Return the id of the process that has locked an open file, on Linux; ``None`` if it is unknown."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for _ in range(LOCKS_READS):
        try:
            text = LOCKS.read_text()
        except OSError:
            return None
        if found := re.search(rf"FLOCK +\S+ +WRITE +(\d+) +{device} ", text):
            return int(found[1]) or None
    return None


def _format_process_start(pid: int) -> str:
    """Return the start time of a process in UTC, or ``""`` if it is unknown."""
    from datetime import UTC, datetime

    try:
        started = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return ""
    return datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
