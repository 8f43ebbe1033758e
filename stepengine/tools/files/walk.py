"""Goes through a tree below a root by descriptors, without following links, within a budget (reliability FP5, FS23)."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from stepengine.tools.context import CancelSignal

if TYPE_CHECKING:
    from stepengine.tools.files.root import Root

__all__ = ("TEMPORARY", "Budget", "names_a_secret", "walk")

LIST_ENTRIES = 20_000
LIST_SECONDS = 10.0

TEMPORARY = ".stepengine-"
"""How the names of files begin that are being written."""

SECRET_SCAN_ENTRIES = 200_000
DEPTH = 100
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Budget:
    """
    How far a walk may go.

    Attributes:
        cut: Why it went no further; empty when it saw everything.
    """

    def __init__(
        self, entries: int = LIST_ENTRIES, seconds: float = LIST_SECONDS, cancelled: CancelSignal | None = None
    ) -> None:
        self._entries = entries
        self._seconds = seconds
        self._left = entries
        self._end = time.monotonic() + seconds
        self._cancelled = cancelled
        self.cut = ""

    def take(self) -> bool:
        """Count one entry; return whether there was budget for it."""
        self._left -= 1
        if self._left < 0:
            self.cut = f"stopped after {self._entries:,} entries"
        elif not self._left % 64 or self._left > self._entries - 2:
            self.check_time()
        return not self.cut

    def check_time(self) -> bool:
        """Return whether there is time left."""
        if time.monotonic() > self._end:
            self.cut = f"stopped after {self._seconds:g} s"
        elif self._cancelled is not None and self._cancelled.is_set():
            self.cut = "stopped because the call was cancelled"
        return not self.cut


def walk(
    root: Root, fd: int, parts: tuple[str, ...], budget: Budget, enter: Callable[[tuple[str, ...], int], bool]
) -> Generator[tuple[tuple[str, ...], os.DirEntry[str]], None, None]:
    """
    Yield the entries below an open folder, folders before what they hold, names in order.

    Symbolic links and special files are left out. An entry's ``stat`` works only until the next one is asked for.

    Args:
        root: Whose file system it has to be, unless it crosses mounts.
        fd: The folder; it stays open.
        parts: Its place below the root.
        budget: How far to go.
        enter: Takes a folder's place and the descriptor of the folder that holds it; says whether to go into it.
    """
    if len(parts) > DEPTH:
        budget.cut = budget.cut or f"stopped below {DEPTH} folders"
        return
    with os.scandir(fd) as listing:
        entries = sorted(listing, key=lambda e: e.name)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if not (is_folder or entry.is_file(follow_symlinks=False)) or entry.name.startswith(TEMPORARY):
            continue
        place = (*parts, entry.name)
        if is_folder and not enter(place, fd):
            continue
        if not budget.take():
            return
        yield place, entry
        if is_folder:
            yield from _below(root, (fd, entry.name), place, budget, enter)
        if budget.cut:
            return


def _below(
    root: Root, at: tuple[int, str], place: tuple[str, ...], budget: Budget, enter: Any
) -> Generator[Any, None, None]:
    try:
        inner = os.open(at[1], FOLDER, dir_fd=at[0])
    except OSError:  # gone, swapped for a link, or not ours to read
        return
    try:
        if os.fstat(inner).st_dev == root.info.st_dev or root.policy.cross_mounts:
            with closing(walk(root, inner, place, budget, enter)) as entries:
                yield from entries
    except OSError:
        return
    finally:
        os.close(inner)


def names_a_secret(root: Root, info: os.stat_result) -> bool:
    """Return whether a file is also known by a secret name; true as well when the tree is too large to tell."""
    budget = Budget(SECRET_SCAN_ENTRIES)
    fd = os.open(".", FOLDER, dir_fd=root.fd)
    try:
        with closing(walk(root, fd, (), budget, lambda _, __: True)) as entries:
            for place, entry in entries:
                if entry.inode() == info.st_ino and root.secrets.match(place):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode) and os.path.samestat(found, info):
                        return True
    finally:
        os.close(fd)
    return bool(budget.cut)
