"""
The calls of tools on open folders and files, performed on this machine or at the other end of a pipe.

This is the only layer that knows where tools run, so confinement, limits and the messages of tools are the same everywhere. The names
and errors are those of ``os``.
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
from stepengine.workspace.open_files import DATABASE_IN_USE, is_open_database
from stepengine.workspace.remote_files import RemoteFile

WALK = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
OWNER_FILE_MODE = 0o600
"""The permissions of files with data of a run: only their owner reads and writes them."""
OWNER_FOLDER_MODE = 0o700
"""The permissions of folders for such files: no one else lists or enters them."""
OTHERS_BITS = 0o077
"""All permissions of the group and of other users; a secret has none of them."""
OTHERS_WRITE_BITS = 0o022
"""A file that others may write is not trusted."""
KINDS = {WALK: "walk", FOLDER: "folder", FILE: "file"}

Params = ParamSpec("Params")
T = TypeVar("T")
Fd: TypeAlias = int | RemoteFile
"""Something open: a descriptor of this process, or of a program elsewhere."""


class FolderEntry(Protocol):
    """An entry of a folder, with the methods of ``os.DirEntry``."""

    @property
    def name(self) -> str:
        """The name of the entry."""

    def inode(self) -> int:
        """Return the inode number."""

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a folder; on remote systems links are not followed."""

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """Return whether the entry is a regular file; on remote systems links are not followed."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the status of the entry."""


def _convert_to_os_error(call: Callable[Params, T]) -> Callable[Params, T]:
    """A decorator: raise ``OSError`` for names and modes that Python itself rejects with other errors."""

    @wraps(call)
    def call_with_os_errors(*args: Params.args, **kwargs: Params.kwargs) -> T:
        """Call the function; ``ValueError`` and ``OverflowError`` become ``OSError``."""
        try:
            return call(*args, **kwargs)
        except (ValueError, OverflowError):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None

    return call_with_os_errors


@_convert_to_os_error
def open_at(name: str, flags: int, folder: Fd) -> Fd:
    """Open one name in an open folder; *flags* are ``WALK``, ``FOLDER`` or ``FILE``."""
    if isinstance(folder, RemoteFile):
        return folder.open(name, KINDS[flags])
    if flags == FILE and is_open_database(stat_at(name, folder)):
        raise OSError(errno.EBUSY, DATABASE_IN_USE)
    return os.open(name, flags, dir_fd=folder)


def close(fd: Fd) -> None:
    """Close an open file or folder."""
    if isinstance(fd, RemoteFile):
        fd.close()
    else:
        os.close(fd)


def fstat(fd: Fd) -> os.stat_result:
    """Return the status of an open file or folder."""
    return fd.fstat() if isinstance(fd, RemoteFile) else os.fstat(fd)


def get_mount_id(fd: Fd) -> str:
    """Return the id of the mount of an open file or folder; ``""`` if the system does not report it."""
    if isinstance(fd, RemoteFile):
        return fd.mount_id
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    except OSError:
        return ""
    return next((line for line in text.splitlines() if line.startswith("mnt_id:")), "")


def read(fd: Fd, size: int) -> bytes:
    """Read the next bytes of a file."""
    return fd.read(size) if isinstance(fd, RemoteFile) else os.read(fd, size)


def lseek(fd: Fd, position: int) -> None:
    """Set the read position, counted from the start of the file."""
    if isinstance(fd, RemoteFile):
        fd.position = position
    else:
        os.lseek(fd, position, os.SEEK_SET)


def scandir(fd: Fd) -> AbstractContextManager[Iterator[FolderEntry]]:
    """Return a context manager of an iterator over the entries of an open folder."""
    return _list_remote(fd) if isinstance(fd, RemoteFile) else os.scandir(fd)


@contextmanager
def _list_remote(fd: RemoteFile) -> Iterator[Iterator[FolderEntry]]:
    yield iter(fd.list())


@_convert_to_os_error
def stat_at(name: str, folder: Fd) -> os.stat_result:
    """Return the status of a name, without following links."""
    if isinstance(folder, RemoteFile):
        return folder.stat(name)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


@_convert_to_os_error
def readlink(name: str, folder: Fd) -> str:
    """Return the target of a symbolic link."""
    return folder.readlink(name) if isinstance(folder, RemoteFile) else os.readlink(name, dir_fd=folder)


@_convert_to_os_error
def mkdir(name: str, mode: int, folder: Fd) -> None:
    """Create a folder."""
    if isinstance(folder, RemoteFile):
        folder.mkdir(name, mode)
    else:
        os.mkdir(name, mode, dir_fd=folder)


@_convert_to_os_error
def rmdir(name: str, folder: Fd) -> None:
    """Remove a folder that is empty."""
    if isinstance(folder, RemoteFile):
        folder.rmdir(name)
    else:
        os.rmdir(name, dir_fd=folder)


@_convert_to_os_error
def unlink(name: str, folder: Fd) -> None:
    """Remove a file, durably."""
    if isinstance(folder, RemoteFile):
        folder.unlink(name)
    else:
        os.unlink(name, dir_fd=folder)
        os.fsync(folder)


@_convert_to_os_error
def put_file(folder: Fd, name: str, data: bytes, mode: int | None) -> None:
    """Replace the content of a file durably and atomically; the mode ``None`` means 0644 minus the umask."""
    if isinstance(folder, RemoteFile):
        folder.replace_file(name, data, mode)
    else:
        whole_files.replace_file_atomically(folder, name, data, mode)


def remove_stale_temporary_files(folder: Fd) -> None:
    """Remove temporary files in a folder that are older than a minute and whose process has ended."""
    if isinstance(folder, RemoteFile):
        folder.remove_stale_temporary_files()
    else:
        whole_files.remove_stale_temporaries(folder)
