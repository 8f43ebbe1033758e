"""What a walk shows to a model: regular files and folders that are neither secret nor ignored."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import closing
from typing import TYPE_CHECKING

from stepengine.tools.files.walk import Budget, walk
from stepengine.tools.search.ignore import Ignore

if TYPE_CHECKING:
    from stepengine.tools.files.root import Opened, Root

__all__ = ("visible",)

Parts = tuple[str, ...]


def visible(
    root: Root, opened: Opened, budget: Budget, wanted: Callable[[Parts], bool] | None = None
) -> Generator[tuple[Parts, os.DirEntry[str], bool], None, None]:
    """
    Yield place, entry and whether it is a folder, for what is below an open folder; folders before what they hold.

    Left out are ``.git``, what ``.gitignore`` files name, files with secrets, links and special files.

    Args:
        root: What it is confined to.
        opened: The folder; it stays open.
        budget: How far to go.
        wanted: Takes a file's place and says whether it is of interest; every file by default.
    """
    ignore = Ignore(root, budget)

    def enter(place: Parts, _: int) -> bool:
        return not root.secrets.match(place) and not ignore.is_ignored(place, is_folder=True)

    with closing(walk(root, opened.fd, opened.parts, budget, enter)) as entries:
        for place, entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder:
                yield place, entry, True
            elif wanted is not None and not wanted(place):
                continue
            elif not (root.secrets.match(place) or ignore.is_ignored(place, is_folder=False)):
                yield place, entry, False
