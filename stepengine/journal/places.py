"""
Where journals stand: files that only their owner can read, in folders of which the same holds (reliability SC08, JR12, JR17).

What lives here knows files, folders and permissions, and nothing of records.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from stepengine.errors import JournalError, JournalLocked, JournalWriteFailed

__all__ = (
    "check_place",
    "made_folder",
    "make_private",
    "opened",
    "opened_for_writing",
    "opened_new",
    "said",
    "sync_folder",
    "unusable",
)

OWNER_ONLY = 0o600
FOLDER = 0o700
OTHERS = 0o077
# A pipe without another end must not be waited for, and a terminal must not become the process's own.
CAREFULLY = os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def opened(path: Path) -> int | None:
    """
    Return a descriptor to read the file at *path*; ``None`` when there is none.

    Raises:
        JournalError: when it cannot be read, or is no regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | CAREFULLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unusable(path, error) from error
    return _regular(path, descriptor)


def opened_for_writing(path: Path) -> int:
    """
    Return a descriptor to read the file at *path* and to append to it; it is made as by ``opened_new`` when there is none.

    Raises:
        JournalError: when it cannot be written, or is a symbolic link or no regular file.
    """
    flags = os.O_RDWR | os.O_APPEND | NO_LINK | CAREFULLY
    while True:
        try:
            return _regular(path, os.open(path, flags))
        except FileNotFoundError:
            made_folder(path.parent)
        except OSError as error:
            raise unusable(path, error) from error
        with contextlib.suppress(FileExistsError):
            return opened_new(path, flags)


def opened_new(path: Path, flags: int = os.O_WRONLY | os.O_CLOEXEC) -> int:
    """
    Return a descriptor of a file that was made now; its name is durable after ``sync_folder``.

    Raises:
        FileExistsError: when there is one of this name.
        JournalError: when it cannot be made.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, OWNER_ONLY)
    except FileExistsError:
        raise
    except OSError as error:
        raise unusable(path, error) from error


def make_private(path: Path, descriptor: int | None = None) -> None:
    """
    Take away what others than the owner may do with the file at *path*, or with the one that is open.

    Raises:
        JournalError: when that is not allowed.
    """
    try:
        if descriptor is None:
            if path.stat().st_mode & OTHERS:
                path.chmod(OWNER_ONLY)
        elif os.fstat(descriptor).st_mode & OTHERS:
            os.fchmod(descriptor, OWNER_ONLY)
    except OSError as error:
        raise unusable(path, error) from error


def check_place(path: Path, status: os.stat_result) -> None:
    """
    Raise for what is no regular file.

    Raises:
        JournalError: it says what was found.
    """
    if stat.S_ISLNK(status.st_mode):
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        raise JournalError(msg)
    if not stat.S_ISREG(status.st_mode):
        msg = f"{path} is no regular file; a journal is one"
        raise JournalError(msg)


def made_folder(folder: Path) -> None:
    """
    Make a folder and those above it that are missing, for their owner only; those that exist stay as they are.

    Raises:
        JournalError: when one cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        for one in reversed(missing):
            one.mkdir(FOLDER, exist_ok=True)
        folder.mkdir(FOLDER, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the content of their files (reliability JR12)."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def said(error: OSError) -> str:
    """Return what the system says of an error."""
    return error.strerror or str(error)


def unusable(path: Path, error: OSError) -> JournalError:
    """Return the error for a file that cannot be used."""
    if error.errno == errno.ELOOP:
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        return JournalError(msg)
    kind = JournalLocked if error.errno == errno.EAGAIN else JournalWriteFailed
    return kind(f"{path} cannot be used as a journal: {said(error)}; nothing was run")


def _regular(path: Path, descriptor: int) -> int:
    try:
        check_place(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
