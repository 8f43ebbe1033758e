"""One writer a file: the operating system's lock on an open descriptor, which dies with its process (reliability JR13-JR15)."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from stepengine.errors import JournalError, JournalLocked

__all__ = ("lock_file",)

LOCKS = Path("/proc/locks")


def lock_file(descriptor: int, path: Path, *, unsafe_no_lock: bool = False) -> None:
    """
    Lock an open file until it is closed.

    Args:
        descriptor: The open file.
        path: What it is called in messages.
        unsafe_no_lock: Go on where there are no locks.

    Raises:
        JournalLocked: when somebody else has it; it names the process where the system tells.
        JournalError: when there are no locks here.
    """
    try:
        import fcntl
    except ImportError:
        _no_locks(path, "this system has no flock", unsafe_no_lock=unsafe_no_lock)
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _locked(path, _owner(descriptor)) from error
    except OSError as error:
        _no_locks(path, error.strerror or str(error), unsafe_no_lock=unsafe_no_lock)


def _no_locks(path: Path, why: str, *, unsafe_no_lock: bool) -> None:
    if not unsafe_no_lock:
        msg = (
            f"{path} cannot be locked ({why}), so two writers could damage it; put it on a local file system, or pass "
            "unsafe_no_lock=True if you are sure that nobody else writes it"
        )
        raise JournalError(msg)


def _locked(path: Path, owner: int | None) -> JournalLocked:
    if owner == os.getpid():
        who = f"another run of this process ({owner})"
    else:
        who = f"process {owner} on {socket.gethostname()}" if owner else "another process"
    since = f", which started at {started}" if owner and (started := _started(owner)) else ""
    msg = f"{path} is written by {who}{since}; one run has one owner. For several processes see stepengine.durable"
    return JournalLocked(msg, pid=owner, host=socket.gethostname())


def _owner(descriptor: int) -> int | None:
    """Return the process that holds the lock, where the system tells (Linux)."""
    status = os.fstat(descriptor)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    try:
        text = LOCKS.read_text()
    except OSError:
        return None
    found = re.search(rf"FLOCK +\S+ +WRITE +(\d+) +{device} ", text)
    return int(found[1]) if found and int(found[1]) > 0 else None


def _started(pid: int) -> str:
    """Return when a process started, in UTC; ``""`` when nobody knows."""
    from datetime import UTC, datetime

    try:
        started = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return ""
    return datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")
