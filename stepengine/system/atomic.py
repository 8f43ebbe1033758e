"""
Writes a whole file so that there is always the old content or the new one, never half.

The new content goes to a temporary file in the same folder, which then takes the name. An existing file is never opened
for writing, so a hard link to it keeps the old content.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepengine.errors import ToolError
from stepengine.system.after_fork import Lock, renews
from stepengine.system.open_files import too_many_files
from stepengine.system.walk import TEMPORARY

__all__ = ("lock_for", "make_folder", "replace_file", "replace_path", "sweep", "sync_folder", "target_info")

NEW_MODE = 0o644
STALE_SECONDS = 60
NAME = re.compile(re.escape(TEMPORARY) + r"(\d+)-[0-9a-f]{16}")

_locks: weakref.WeakValueDictionary[tuple[int, int, str], _Lock] = weakref.WeakValueDictionary()
_guard = Lock()


class _Lock:
    """A lock that can be referred to weakly."""

    __slots__ = ("__weakref__", "lock")

    def __init__(self) -> None:
        self.lock = threading.Lock()


@renews
def _none_held() -> None:
    _locks.clear()


@contextmanager
def lock_for(folder: int, name: str) -> Iterator[None]:
    """Hold the lock of one file within this process, so that read-change-write is done by one at a time."""
    info = os.fstat(folder)
    with _guard:
        found = _locks.setdefault((info.st_dev, info.st_ino, name), _Lock())
    with found.lock:
        yield


def target_info(folder: int, name: str, path: str) -> os.stat_result | None:
    """
    Return what stands under a name, or ``None`` when it is free.

    Raises:
        ToolError: when it is a folder, a symbolic link or a special file, which are never replaced.
    """
    try:
        info = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(info.st_mode):
        return info
    if stat.S_ISLNK(info.st_mode):
        msg = f"{path!r} is a symbolic link; files are not written through links"
    elif stat.S_ISDIR(info.st_mode):
        msg = f"{path!r} is a folder"
    else:
        msg = f"{path!r} is no regular file"
    raise ToolError(msg)


def replace_file(folder: int, name: str, data: bytes, old: os.stat_result | None, *, mode: int | None = None) -> None:
    """
    Make *data* the content of a file, durably.

    The mode of an old file is kept without set-uid and set-gid, unless *mode* gives another; a new file gets 0644 minus
    the umask.
    """
    if mode is None:
        mode = NEW_MODE & ~_umask() if old is None else stat.S_IMODE(old.st_mode) & 0o777
    temporary = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        try:
            _write_all(fd, data)
            os.fchmod(fd, mode)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    os.fsync(folder)


def replace_path(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Make *data* the content of the file at a path that is trusted, as ``replace_file`` does; a link there is replaced."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        old = None
        with contextlib.suppress(FileNotFoundError):
            old = path.stat()
        replace_file(folder, path.name, data, old, mode=mode)
    finally:
        os.close(folder)


def make_folder(folder: Path, mode: int) -> None:
    """
    Make a folder and those above it that are missing, durably: a file is lost with the name of a folder that it is in.

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
    Make the names in a folder as durable as the content of their files, where its file system can.

    Raises:
        OSError: when too many files are open to do it, which says nothing of the file system.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if too_many_files(error):
            raise
        return
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _umask() -> int:
    """Return the umask, without the moment of a wrong one that setting it would take, where that is possible."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Umask:\s*([0-7]+)$", Path("/proc/self/status").read_text("ascii", "replace"), re.MULTILINE)
        if found:
            return int(found[1], 8)
    current = os.umask(0o077)
    os.umask(current)
    return current


def sweep(folder: int) -> None:
    """Remove temporary files that a process which no longer exists has left in a folder."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.startswith(TEMPORARY)]
    for name in names:
        found = NAME.fullmatch(name)
        if found is None or _is_alive(int(found[1])):
            continue
        with contextlib.suppress(OSError):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and time.time() - info.st_mtime > STALE_SECONDS:
                os.unlink(name, dir_fd=folder)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
