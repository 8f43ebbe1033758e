"""Searches a tree for files that are withheld from tools, also under other names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import closing

from stepengine.errors import ToolError
from stepengine.workspace.calls import Fd
from stepengine.workspace.root import SECRET_SCAN_ENTRIES, OpenedEntry, Root
from stepengine.workspace.walk import WalkBudget, walk


def find_linked_secrets(root: Root) -> list[tuple[str, ...]]:
    """
    Return the paths of files that are not withheld, but have a hard link with a withheld name.

    Almost no tree has such files, so the second search, which needs the status of all other files, is rare.

    Raises:
        ToolError: when the tree is too large to be searched in full: over 200,000 entries, 10 seconds or 100 levels.
    """
    withheld = _list_files_or_raise(root, root.is_withheld)
    linked = {(info.st_dev, info.st_ino) for _, info in withheld if info.st_nlink > 1}
    if not linked:
        return []
    others = _list_files_or_raise(root, lambda place: not root.is_withheld(place))
    return [place for place, info in others if (info.st_dev, info.st_ino) in linked]


def _list_files_or_raise(
    root: Root, is_wanted: Callable[[Sequence[str]], bool]
) -> list[tuple[tuple[str, ...], os.stat_result]]:
    """Return all files that *is_wanted* selects; raise ``ToolError`` if the tree is too large to be searched in full."""
    budget = WalkBudget(SECRET_SCAN_ENTRIES)
    found = list(root.iterate_files(is_wanted, budget))
    if budget.cut:
        msg = (
            f"the command was not executed: the search for other names of withheld files in the root {budget.cut}. "
            "Use the tools that read and search files: they check each file"
        )
        raise ToolError(msg)
    return found


def list_withheld_paths(root: Root, folder: OpenedEntry, *, deep: bool) -> list[tuple[str, ...]]:
    """
    Return the withheld paths below an open folder, without the content of withheld folders; raise ``ToolError`` for a too large tree.

    Args:
        root: The root.
        folder: The folder; it stays open.
        deep: Whether the content of its folders is searched, too.

    Raises:
        ToolError: when the tree is too large to be searched in full.
    """
    found: list[tuple[str, ...]] = []
    start = len(folder.parts)

    def enter(place: tuple[str, ...], _: Fd) -> bool:
        """Return whether a folder is searched; a withheld one is added to the result instead."""
        if not root.is_withheld(place):
            return True
        found.append(place[start:])
        return False

    budget = WalkBudget(SECRET_SCAN_ENTRIES)
    with closing(walk(root.may_enter if deep else lambda _: False, folder.fd, folder.parts, budget, enter)) as entries:
        found += [place[start:] for place, entry in entries if not entry.is_dir() and root.is_withheld(place)]
    if budget.cut:
        msg = f"what may be listed of it could not be told: {budget.cut}; name a smaller folder"
        raise ToolError(msg)
    return found


def has_visible_entry(root: Root, folder: OpenedEntry, names: Collection[str], *, deep: bool) -> bool:
    """
    Return whether an open folder has a file or folder with one of these names that is not withheld.

    The search ends after 200,000 entries, 10 seconds or 100 levels; an entry that it did not reach counts as visible.

    Args:
        root: The root.
        folder: The folder; it stays open.
        names: Single names.
        deep: Whether the content of its folders is searched, too.
    """
    may_enter = root.may_enter if deep else lambda _: False
    budget = WalkBudget(SECRET_SCAN_ENTRIES)
    with closing(
        walk(may_enter, folder.fd, folder.parts, budget, lambda place, _: not root.is_withheld(place))
    ) as entries:
        return any(entry.name in names and not root.is_withheld(place) for place, entry in entries) or bool(budget.cut)
