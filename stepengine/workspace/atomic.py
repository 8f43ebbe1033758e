"""
Writes a whole file so that there is always the old content or the new one, never half.

The new content goes to a temporary file in the same folder, which then takes the name. An existing file is never opened
for writing, so a hard link to it keeps the old content.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepengine.errors import ToolError
from stepengine.workspace import calls
from stepengine.workspace.after_fork import Lock
from stepengine.workspace.calls import Fd
from stepengine.workspace.open_files import make_too_many_files_advice
from stepengine.workspace.remote_files import RemoteFile

_locks: weakref.WeakValueDictionary[tuple[object, int, int, str], Lock] = weakref.WeakValueDictionary()
_guard = Lock()


@contextmanager
def hold_file_lock(folder: Fd, name: str) -> Iterator[None]:
    """Hold the lock of one file in this process, so that only one caller at a time reads and writes it."""
    info = calls.fstat(folder)
    with _guard:
        where = folder.system if isinstance(folder, RemoteFile) else None
        found = _locks.setdefault((where, info.st_dev, info.st_ino, name), Lock())
    with found:
        yield


def stat_regular_file(folder: Fd, name: str, path: str) -> os.stat_result | None:
    """
    Return the status of the file under a name, ``None`` if it is missing; raise ``ToolError`` for a link, folder or special file.

    Raises:
        ToolError: when it is a folder, a symbolic link or a special file, which are never replaced.
    """
    try:
        info = calls.stat_at(name, folder)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(info.st_mode):
        return info
    if stat.S_ISLNK(info.st_mode):
        msg = f"{path!r} is a symbolic link; files are not written through links"
    elif stat.S_ISDIR(info.st_mode):
        msg = f"{path!r} is a folder"
    else:
        msg = f"{path!r} is not a regular file"
    raise ToolError(msg)


def replace_file(folder: Fd, name: str, data: bytes, old: os.stat_result | None, *, mode: int | None = None) -> None:
    """
    Replace the content of a file with *data*, durably.

    Without *mode*, the file gets the permission bits of *old*, without set-uid and set-gid; without *old*, 0644 minus the umask.
    Nothing else of *old* is used: the caller checks whether the file has changed since.
    """
    if mode is None and old is not None:
        mode = stat.S_IMODE(old.st_mode) & 0o777
    calls.put_file(folder, name, data, mode)


def replace_path(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace the content of the file at a trusted path, as ``replace_file`` does; a link there is replaced."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        old = None
        with contextlib.suppress(FileNotFoundError):
            old = path.stat()
        replace_file(folder, path.name, data, old, mode=mode)
    finally:
        os.close(folder)


def create_folder_durably(folder: Path, mode: int) -> None:
    """
    Create a folder and its missing parents, and sync each new name to the disk.

    Raises:
        OSError: when one cannot be made.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode, exist_ok=True)
        sync_folder(one.parent)
    folder.mkdir(mode, exist_ok=True)


def sync_folder(folder: Path) -> None:
    """
    Sync the names in a folder to the disk, if its file system supports it.

    Raises:
        OSError: when too many files are open. Other errors are ignored.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if make_too_many_files_advice(error):
            raise
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
