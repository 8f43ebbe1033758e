"""
The calls on open folders and files that tools make, each carried out where the folder is: here, or at another end of a pipe.

This is the one seam between tools and where they run: above it nothing knows the difference, so confinement, limits and what
tools say are the same everywhere. The names and errors are those of ``os``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

from stepengine.workspace import whole_files
from stepengine.workspace.far import Far

__all__ = (
    "FILE",
    "FOLDER",
    "OTHERS_BITS",
    "OTHERS_WRITE_BITS",
    "OWNER_FILE_MODE",
    "OWNER_FOLDER_MODE",
    "WALK",
    "Fd",
    "FolderEntry",
    "close",
    "fstat",
    "lseek",
    "mkdir",
    "mount_of",
    "open_at",
    "put",
    "read",
    "readlink",
    "rmdir",
    "scandir",
    "stat_at",
    "sweep",
    "unlink",
)  # fmt: skip

WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OWNER_FILE_MODE = 0o600
"""The permissions of files that hold what a run said and read: their owner alone reads and writes them."""
OWNER_FOLDER_MODE = 0o700
"""The permissions of folders for such files: nobody else lists or enters them."""
OTHERS_BITS = 0o077
"""All permissions of the group and of other users; a secret has none of them."""
OTHERS_WRITE_BITS = 0o022
"""What others may write they may have written: its content is not trusted."""
KINDS = {WALK: "walk", FOLDER: "folder", FILE: "file"}

Params = ParamSpec("Params")
T = TypeVar("T")
Fd: TypeAlias = int | Far
"""Something open: a descriptor of this process, or of a program elsewhere."""


class FolderEntry(Protocol):
    """What stands in a folder, as ``os.DirEntry`` tells it."""

    @property
    def name(self) -> str:
        """Its name."""

    def inode(self) -> int:
        """Return its number."""

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a folder; links are not followed elsewhere."""

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether it is a regular file."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return what the system says of it."""


def _asks(call: Callable[Params, T]) -> Callable[Params, T]:
    """Have a name or mode that no system has refused as the system would: Python refuses it before, with errors of its own."""

    @wraps(call)
    def asking(*args: Params.args, **kwargs: Params.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (ValueError, OverflowError):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None

    return asking


@_asks
def open_at(name: str, flags: int, folder: Fd) -> Fd:
    """Open one name in an open folder; *flags* are ``WALK``, ``FOLDER`` or ``FILE``."""
    if isinstance(folder, Far):
        return folder.open(name, KINDS[flags])
    return os.open(name, flags, dir_fd=folder)


def close(fd: Fd) -> None:
    """Close something open."""
    if isinstance(fd, Far):
        fd.close()
    else:
        os.close(fd)


def fstat(fd: Fd) -> os.stat_result:
    """Return what the system says of something open."""
    return fd.fstat() if isinstance(fd, Far) else os.fstat(fd)


def mount_of(fd: Fd) -> str:
    """Return which mount something open was reached through; ``""`` where the system does not tell."""
    if isinstance(fd, Far):
        return fd.mount()
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith("mnt_id:")), "")


def read(fd: Fd, size: int) -> bytes:
    """Read on in a file."""
    return fd.read(size) if isinstance(fd, Far) else os.read(fd, size)


def lseek(fd: Fd, position: int) -> None:
    """Have reading go on at a position from the beginning."""
    if isinstance(fd, Far):
        fd.position = position
    else:
        os.lseek(fd, position, os.SEEK_SET)


def scandir(fd: Fd) -> AbstractContextManager[Iterator[FolderEntry]]:
    """List an open folder."""
    return _list_far(fd) if isinstance(fd, Far) else os.scandir(fd)


@contextmanager
def _list_far(fd: Far) -> Iterator[Iterator[FolderEntry]]:
    yield iter(fd.list())


@_asks
def stat_at(name: str, folder: Fd) -> os.stat_result:
    """Return what the system says of a name, without following it."""
    if isinstance(folder, Far):
        return folder.stat(name)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


@_asks
def readlink(name: str, folder: Fd) -> str:
    """Return where a symbolic link points."""
    return folder.readlink(name) if isinstance(folder, Far) else os.readlink(name, dir_fd=folder)


@_asks
def mkdir(name: str, mode: int, folder: Fd) -> None:
    """Make a folder."""
    if isinstance(folder, Far):
        folder.mkdir(name, mode)
    else:
        os.mkdir(name, mode, dir_fd=folder)


@_asks
def rmdir(name: str, folder: Fd) -> None:
    """Remove a folder that is empty."""
    if isinstance(folder, Far):
        folder.rmdir(name)
    else:
        os.rmdir(name, dir_fd=folder)


@_asks
def unlink(name: str, folder: Fd) -> None:
    """Remove a file, durably."""
    if isinstance(folder, Far):
        folder.unlink(name)
    else:
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)


@_asks
def put(folder: Fd, name: str, data: bytes, mode: int | None) -> None:
    """Make *data* the content of a file, durably, all of it or nothing; with 0644 minus the umask for the mode ``None``."""
    if isinstance(folder, Far):
        folder.put(name, data, mode)
    else:
        whole_files.put(folder, name, data, mode)


def sweep(folder: Fd) -> None:
    """Remove temporary files that a process which no longer exists has left in a folder."""
    if isinstance(folder, Far):
        folder.sweep()
    else:
        whole_files.sweep(folder)
