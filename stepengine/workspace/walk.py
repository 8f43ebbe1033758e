"""Goes through a tree below a root by descriptors, without following links, within a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from stepengine.workspace import calls
from stepengine.workspace.calls import FOLDER, Fd, FolderEntry
from stepengine.workspace.threads import CancelSignal
from stepengine.workspace.whole_files import TEMPORARY

__all__ = ("TEMPORARY", "WalkBudget", "walk")

LIST_ENTRIES = 20_000
"""A repository without its dependencies has fewer; a listing must not hold a run in a home folder."""
LIST_SECONDS = 10.0
"""A slow disk lists all files that a model can read within this time."""

MAX_DEPTH_LEVELS = 100
"""Real trees have about twenty levels; each needs an open folder."""


class WalkBudget:
    """
    The limits of a walk: entries, time and cancellation.

    Attributes:
        cut: Why the walk stopped early, also at its limit of depth; ``""`` if it saw everything.
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

    def count_entry(self) -> bool:
        """Count one entry, and return True if it was within the budget."""
        self._left -= 1
        if self._left < 0:
            self.cut = f"stopped after {self._entries:,} entries"
        elif not self._left % 64 or self._left > self._entries - 2:
            self.has_time_left()
        return not self.cut

    @property
    def is_late(self) -> bool:
        """Whether the time has ended."""
        return time.monotonic() > self._end

    def has_time_left(self) -> bool:
        """Return True if the walk may go further; record in ``cut`` if its time has ended or the call was cancelled."""
        if self.is_late:
            self.cut = f"stopped after {self._seconds:g} s"
        elif self._cancelled is not None and self._cancelled.is_set():
            self.cut = "stopped because the call was cancelled"
        return not self.cut


def walk(
    may_enter: Callable[[Fd], bool],
    fd: Fd,
    parts: tuple[str, ...],
    budget: WalkBudget,
    enter: Callable[[tuple[str, ...], Fd], bool],
) -> Generator[tuple[tuple[str, ...], FolderEntry], None, None]:
    """
    Yield the entries below an open folder, sorted by name, a folder before its content. *enter* selects folders to open.

    Symbolic links, special files, temporary files of atomic writes, and the content of unreadable folders are omitted. An entry's
    ``stat`` works only until the next entry.

    Args:
        may_enter: Returns whether an open folder may be entered; see ``Root.may_enter``.
        fd: The folder; it stays open.
        parts: Its path below the root.
        budget: The limits.
        enter: Receives a folder's path and the descriptor of its parent; returns whether to yield and open the folder.
    """
    if len(parts) > MAX_DEPTH_LEVELS:
        budget.cut = budget.cut or f"stopped below {MAX_DEPTH_LEVELS} folders"
        return
    with calls.scandir(fd) as listing:
        entries = sorted(listing, key=lambda e: e.name)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if not (is_folder or entry.is_file(follow_symlinks=False)) or entry.name.startswith(TEMPORARY):
            continue
        place = (*parts, entry.name)
        if is_folder and not enter(place, fd):
            continue
        if not budget.count_entry():
            return
        yield place, entry
        if is_folder:
            yield from _walk_subfolder(may_enter, (fd, entry.name), place, budget, enter)
        if budget.cut:
            return


def _walk_subfolder(
    may_enter: Callable[[Fd], bool],
    parent_and_name: tuple[Fd, str],
    parts: tuple[str, ...],
    budget: WalkBudget,
    enter: Any,
) -> Generator[Any, None, None]:
    """Yield the entries below a subfolder; nothing if it cannot be opened or may not be entered."""
    try:
        inner = calls.open_at(parent_and_name[1], FOLDER, parent_and_name[0])
    except OSError:  # gone, swapped for a link, or not ours to read
        return
    try:
        if may_enter(inner):
            with closing(walk(may_enter, inner, parts, budget, enter)) as entries:
                yield from entries
    except OSError:
        return
    finally:
        calls.close(inner)
