"""The files that tools show to a model: a walk that omits entries that ``.gitignore`` files match, and withheld files."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from stepengine.errors import ToolError
from stepengine.workspace import calls
from stepengine.workspace.calls import Fd, FolderEntry
from stepengine.workspace.patterns import IgnorePattern
from stepengine.workspace.text import read_if_small
from stepengine.workspace.walk import WalkBudget, walk

if TYPE_CHECKING:
    from stepengine.workspace.root import OpenedEntry, Root

MAX_LINES = 5_000
"""Files of patterns have some dozen lines; each is compared with every path."""
FILE_BYTES = 1_000_000
"""Far more than a file of patterns has."""
PATTERNS_BETWEEN_CHECKS = 16
"""Looking at the clock costs about as much as comparing some patterns."""
BOM = "\xef\xbb\xbf"
Parts = tuple[str, ...]


class Ignore:
    """
    Tests whether git ignores a path; the ``.gitignore`` files are read when needed and cached.

    Args:
        root: The root of the files.
        budget: The time limit for reading and comparing patterns; after it, every path counts as ignored.
    """

    def __init__(self, root: Root, budget: WalkBudget) -> None:
        self._root = root
        self._budget = budget
        self._patterns: dict[Parts, list[IgnorePattern]] = {}

    def is_ignored(self, parts: Parts, *, is_folder: bool) -> bool:
        """Return True if git ignores an entry whose parent folders are not ignored, or if the time limit is reached."""
        if parts[-1] == ".git":
            return True
        names = tuple(map(_decode_bytewise, parts))
        for depth in range(len(parts) - 1, -1, -1):
            for number, pattern in enumerate(self._get_patterns_of_folder(parts[:depth])):
                if not number % PATTERNS_BETWEEN_CHECKS and not self._budget.has_time_left():
                    return True
                if pattern.match(names[depth:], is_folder=is_folder):
                    return not pattern.is_negated
        return bool(self._budget.cut)

    def is_path_ignored(self, parts: Parts) -> bool:
        """Return True if a file or a folder above it is ignored."""
        above = (parts[:depth] for depth in range(1, len(parts)))
        return any(self.is_ignored(a, is_folder=True) for a in above) or self.is_ignored(parts, is_folder=False)

    def _get_patterns_of_folder(self, folder: Parts) -> list[IgnorePattern]:
        """Return the patterns in the ``.gitignore`` of one folder, the last line first; cached."""
        if folder not in self._patterns:
            self._patterns[folder] = self._read_patterns(folder)
        return self._patterns[folder]

    def _read_patterns(self, folder: Parts) -> list[IgnorePattern]:
        """Read the patterns in the ``.gitignore`` of one folder, the last line first; none if it cannot be read."""
        try:
            opened = self._root.open_file("/".join((*folder, ".gitignore")))
        except (ToolError, UnicodeError):
            return []
        try:
            data = read_if_small(opened.fd, FILE_BYTES)
        finally:
            calls.close(opened.fd)
        made: list[IgnorePattern] = []
        text = (data or b"").decode("latin-1").removeprefix(BOM)
        for number, line in enumerate(text.split("\n")[:MAX_LINES]):
            if not number % PATTERNS_BETWEEN_CHECKS and not self._budget.has_time_left():
                break
            pattern = IgnorePattern.parse(line.removesuffix("\r"))
            if pattern is not None:
                made.append(pattern)
        return made[::-1]


def _decode_bytewise(name: str) -> str:
    """Return a name with one character for each of its bytes. Git compares bytes."""
    return name if name.isascii() else os.fsencode(name).decode("latin-1")


def walk_visible_entries(
    root: Root, opened: OpenedEntry, budget: WalkBudget, is_wanted: Callable[[Parts], bool] | None = None
) -> Generator[tuple[Parts, FolderEntry, bool], None, None]:
    """
    Yield path, entry and is-folder flag of each entry below an open folder, a folder before its content.

    Skips ``.git``, entries that ``.gitignore`` files match, files with secrets, links and special files.

    Args:
        root: The folder that the walk may not leave.
        opened: The folder; it stays open.
        budget: How far to go.
        is_wanted: A predicate on the path of a file; by default all files are accepted.
    """
    ignore = Ignore(root, budget)

    def may_enter_folder(place: Parts, _: Fd) -> bool:
        """Return whether a folder is neither withheld nor ignored."""
        return not root.is_withheld(place) and not ignore.is_ignored(place, is_folder=True)

    with closing(walk(root.may_enter, opened.fd, opened.parts, budget, may_enter_folder)) as entries:
        for place, entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder:
                yield place, entry, True
            elif is_wanted is not None and not is_wanted(place):
                continue
            elif not (root.is_withheld(place) or ignore.is_ignored(place, is_folder=False)):
                yield place, entry, False
