"""
Where journals stand: files that only their owner can read, one writer each, and room kept for the last record.

What lives here knows files, folders, locks and permissions, and nothing of records. The
lock is the operating system's, on an open descriptor, and dies with its process. The room for the last record is held by an
unnamed temporary file, one for all journals of a disk, so nothing of it is ever seen or left behind.
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
from typing import ClassVar

from stepengine.data.alike import MAX_SUGGESTIONS, find_nearest
from stepengine.errors import JournalError, JournalLocked, JournalMissing, JournalWriteFailed
from stepengine.workspace.after_fork import Lock, renews
from stepengine.workspace.atomic import make_folder
from stepengine.workspace.calls import OTHERS_BITS, OWNER_FILE_MODE, OWNER_FOLDER_MODE
from stepengine.workspace.open_files import said

__all__ = (
    "CAREFULLY",
    "FULL",
    "NO_LINK",
    "REOPENED",
    "RESERVE_BYTES",
    "TO_RECORD",
    "Reserve",
    "check_place",
    "close_locked",
    "is_locked",
    "likely",
    "listed",
    "lock_file",
    "made_folder",
    "make_private",
    "missing_file",
    "opened",
    "opened_for_writing",
    "opened_new",
    "unusable",
)

MAX_COMPARED_NAMES = 1_000
"""A folder may hold a hundred thousand journals; an error message must not list and sort them all."""
TO_RECORD = "record one with engine.run(..., journal=...)"
# A pipe without another end must not be waited for, and a terminal must not become the process's own.
CAREFULLY = os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
REOPENED = os.O_RDWR | os.O_APPEND | NO_LINK | CAREFULLY
"""How a journal is opened to go on writing it: it is not made."""


def opened(path: Path) -> int | None:
    """
    Return a descriptor to read the file at *path*; ``None`` when there is none.

    Raises:
        JournalError: when it cannot be read, or is not a regular file.
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
    while True:
        try:
            return _regular(path, os.open(path, REOPENED))
        except FileNotFoundError:
            made_folder(path.parent)
        except OSError as error:
            raise unusable(path, error) from error
        with contextlib.suppress(FileExistsError):
            return opened_new(path, REOPENED)


def opened_new(path: Path, flags: int = os.O_WRONLY | os.O_CLOEXEC) -> int:
    """
    Return a descriptor of a file that was made now; its name is durable after ``sync_folder``.

    Raises:
        FileExistsError: when there is one of this name.
        JournalError: when it cannot be made.
    """
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, OWNER_FILE_MODE)
    except FileExistsError:
        raise
    except OSError as error:
        raise unusable(path, error) from error


def make_private(path: Path, descriptor: int | None = None) -> None:
    """
    Take away what others than the owner may do with the file at *path*, or with the one that is open.

    Raises:
        FileNotFoundError: when there is no file at *path*, any more.
        JournalError: when that is not allowed.
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
        raise unusable(path, error) from error


def check_place(path: Path, status: os.stat_result) -> None:
    """
    Raise for what is not a regular file.

    Raises:
        JournalError: it says what was found.
    """
    if stat.S_ISLNK(status.st_mode):
        msg = f"{path} is a symbolic link; give the path of the journal itself"
        raise JournalError(msg)
    if not stat.S_ISREG(status.st_mode):
        msg = f"{path} is not a regular file; a journal is one"
        raise JournalError(msg)


def made_folder(folder: Path) -> None:
    """
    Make a folder and those above it that are missing, for their owner only; those that exist stay as they are.

    Raises:
        JournalError: when one cannot be made.
    """
    try:
        make_folder(folder, OWNER_FOLDER_MODE)
    except OSError as error:
        raise unusable(folder, error) from error


def missing_file(path: Path) -> JournalMissing:
    """Return the error for a file that is not there, or holds nothing; it names what lies beside it."""
    if path.exists():
        msg = f"{path} holds no run; {TO_RECORD}"
        return JournalMissing(msg, path=str(path))
    if not path.parent.is_dir():
        msg = f"there is no journal {str(path)!r}: the folder {str(path.parent)!r} does not exist"
        return JournalMissing(msg, path=str(path))
    alike: list[str] = []
    with contextlib.suppress(OSError):
        alike = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    near = likely(path.name, alike)
    beside = f"beside it {listed(near, len(alike))}" if near else f"no file *{path.suffix} is beside it; {TO_RECORD}"
    msg = f"there is no journal {str(path)!r}; {beside}"
    return JournalMissing(msg, path=str(path), beside=near)


def likely(wanted: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return up to five names, those that look like the wanted one first."""
    known = sorted(islice(names, MAX_COMPARED_NAMES))
    return tuple(dict.fromkeys([*find_nearest(wanted, known), *known]))[:MAX_SUGGESTIONS]


def listed(names: Sequence[str], count: int) -> str:
    """Return that there are these names, of so many, as a message says it."""
    more = f" and {count - len(names):,} more" if count > len(names) else ""
    return f"{'is' if count == 1 else 'are'} {', '.join(map(repr, names))}{more}"


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
        raise _locked_error(path, _owner(descriptor)) from error
    except OSError as error:
        _no_locks(path, error.strerror or str(error), unsafe_no_lock=unsafe_no_lock)


def is_locked(path: Path) -> bool:
    """
    Return whether somebody has the file at *path* locked; false where there is none, and where there are no locks.

    Raises:
        JournalError: when it cannot be opened.
    """
    descriptor = opened(path)
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
        close_locked(descriptor)
    return False


def close_locked(descriptor: int) -> None:
    """
    Unlock a file that ``lock_file`` locked, and close it.

    A process that another thread begins at this moment has the open file, too, until its program starts; closing alone would
    leave the lock with it.
    """
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _no_locks(path: Path, why: str, *, unsafe_no_lock: bool) -> None:
    if not unsafe_no_lock:
        msg = (
            f"{path} cannot be locked ({why}), so two writers could damage it; put it on a local file system, or pass "
            "unsafe_no_lock=True if you are sure that nobody else writes it"
        )
        raise JournalError(msg)


def _locked_error(path: Path, owner: int | None) -> JournalLocked:
    if owner == os.getpid():
        who = f"another run of this process ({owner})"
    else:
        who = f"process {owner} on {socket.gethostname()}" if owner else "another process"
    since = f", which started at {started}" if owner and (started := _start_of_process(owner)) else ""
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


def _start_of_process(pid: int) -> str:
    """Return when a process started, in UTC; ``""`` when nobody knows."""
    from datetime import UTC, datetime

    try:
        started = Path(f"/proc/{pid}").stat().st_mtime
    except OSError:
        return ""
    return datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds")


RESERVE_BYTES = 1024 * 1024
"""Room for the results of some dozen effects that are in progress when the disk becomes full, and no loss to any disk."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """
    A mebibyte of one disk, for results that come when it is full; make one with ``Reserve.near(path)``.

    Attributes:
        users: How many journals count on it.
        is_short: Whether less is kept, so that no effect should begin: there may be no room for what comes of it.
    """

    _known: ClassVar[dict[int, Reserve]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, device: int, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self._descriptor: int | None = None
        self.users = 0
        self.is_short = True

    @classmethod
    def near(cls, path: Path) -> Reserve | None:
        """Return the reserve of the disk that *path* is on; ``None`` where there can be none."""
        with cls._lock:
            try:
                device = path.parent.stat().st_dev
                known = cls._known.get(device)
                if known is None:
                    known = cls(device, path.parent)
                    known._take((RESERVE_BYTES,))
                    cls._known[device] = known
            except (OSError, AttributeError):
                return None
            known.users += 1
            return known

    def spend(self) -> bool:
        """Give the room back to the disk; return whether there was any left to give."""
        with self._lock:
            return self._release()

    def renew(self, folder: Path) -> bool:
        """
        Keep all the room again, once there is as much; return whether there is.

        Args:
            folder: One of the disk that is there: the one that the room was first kept in may be gone.
        """
        with self._lock:
            if self.is_short:
                self._release()
                self._folder = folder
                try:
                    self._take((RESERVE_BYTES, *LESS))
                except OSError:  # as in `near`: where no room can be kept, nothing waits for it
                    self.is_short = False
            return not self.is_short

    def regain(self) -> None:
        """Keep what is left of the room that was spent, for results of what is still under way."""
        with self._lock:
            self._release()
            self._take_what_there_is(LESS)

    def close(self) -> None:
        """Count one journal less; the last one gives the room back."""
        with self._lock:
            self.users -= 1
            if self.users <= 0:
                self._release()
                if self._known.get(self._device) is self:
                    del self._known[self._device]

    def _take_what_there_is(self, sizes: tuple[int, ...]) -> None:
        with contextlib.suppress(OSError):
            self._take(sizes)

    def _take(self, sizes: tuple[int, ...]) -> None:
        """Keep the first of these sizes that there is room for; a full disk is not an error."""
        for size in sizes:
            try:
                self._descriptor = _room(self._folder, size)
            except OSError as error:
                if error.errno not in FULL:
                    raise
            else:
                self.is_short = size < RESERVE_BYTES
                return

    def leave(self) -> None:
        """Close what a forked child has of it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _release(self) -> bool:
        descriptor, self._descriptor = self._descriptor, None
        self.is_short = True
        if descriptor is None:
            return False
        os.close(descriptor)
        return True


@renews
def _without_reserves() -> None:
    """Let the room of the parent's reserves go: while a forked child has their files open, the disk does not get it back."""
    for reserve in list(Reserve._known.values()):  # noqa: SLF001 - it is what this module keeps of them
        reserve.leave()
    Reserve._known.clear()  # noqa: SLF001


LESS = tuple([RESERVE_BYTES >> halved for halved in range(1, 5)])
"""What is kept in place of ``RESERVE_BYTES`` for effects that are under way when there is no more."""


def _room(folder: Path, size: int) -> int:
    descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
