"""
Writes the content of a file atomically, and removes the temporary files of interrupted writes.

It needs only the standard library of Python 3.8: its text is sent before ``stepengine.workspace.worker``, to do the same remotely.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time

TEMPORARY = ".stepengine-"
"""The prefix of temporary files."""
NEW_MODE = 0o644
"""The mode of new files in editors: all may read them, within the umask."""
STALE_SECONDS = 60
"""Writing a file is faster, so an older temporary file is abandoned."""
NAME = re.compile(re.escape(TEMPORARY) + r"(\d+)-[0-9a-f]{16}")


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def replace_file_atomically(folder: int, name: str, data: bytes, mode: int | None) -> None:
    """
    Replace the content of a file in an open folder durably and atomically.

    Args:
        folder: The descriptor of the folder.
        name: The file.
        data: The new content.
        mode: Its permission bits; 0644 minus the umask for ``None``.
    """
    # With the process id, so that files of ended processes can be distinguished from those of running ones.
    temporary = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # The umask belongs to the whole process, so only the system can apply it while other threads run.
    fd = os.open(temporary, flags, NEW_MODE if mode is None else 0o600, dir_fd=folder)
    try:
        try:
            write_all(fd, data)
            if mode is not None:
                os.fchmod(fd, mode)
            # Before the rename: some file systems make the new name durable before the content, and a power cut would
            # leave an empty file under the old one's name.
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    # The rename itself is an entry of the folder, and is durable only with it (reliability:R1).
    os.fsync(folder)


def remove_stale_temporaries(folder: int) -> None:
    """Remove temporary files in a folder that are older than a minute and whose process has ended."""
    with os.scandir(folder) as entries:
        names = [e.name for e in entries if e.name.startswith(TEMPORARY)]
    for name in names:
        found = NAME.fullmatch(name)
        if found is None or is_alive(int(found[1])):
            continue
        with contextlib.suppress(OSError):
            info = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if stat.S_ISREG(info.st_mode) and time.time() - info.st_mtime > STALE_SECONDS:
                os.unlink(name, dir_fd=folder)


def is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
