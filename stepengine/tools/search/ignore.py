"""What ``.gitignore`` files below a root leave out (ecosystem EC33)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepengine.errors import ToolError
from stepengine.tools.files.text import decode, read_capped

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

    from stepengine.tools.files.root import Root

__all__ = ("Ignore",)

LINES = 5_000
FILE_BYTES = 1_000_000
Parts = tuple[str, ...]


class Ignore:
    """Says which paths are ignored; files that were read are remembered for as long as this object lives."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._specs: dict[Parts, GitIgnoreSpec | None] = {}

    def is_ignored(self, parts: Parts, *, is_folder: bool) -> bool:
        """Return whether one entry is ignored, given that the folders above it are not."""
        if parts[-1] == ".git":
            return True
        for depth in range(len(parts) - 1, -1, -1):
            spec = self._spec(parts[:depth])
            if spec is not None:
                text = "/".join(parts[depth:]) + ("/" if is_folder else "")
                found = spec.check_file(text).include
                if found is not None:
                    return found
        return False

    def hides(self, parts: Parts) -> bool:
        """Return whether a file is ignored, or a folder above it."""
        above = (parts[:depth] for depth in range(1, len(parts)))
        return any(self.is_ignored(a, is_folder=True) for a in above) or self.is_ignored(parts, is_folder=False)

    def _spec(self, folder: Parts) -> GitIgnoreSpec | None:
        if folder not in self._specs:
            self._specs[folder] = self._read(folder)
        return self._specs[folder]

    def _read(self, folder: Parts) -> GitIgnoreSpec | None:
        from pathspec import GitIgnoreSpec

        try:
            opened = self._root.open_file("/".join((*folder, ".gitignore")))
        except (ToolError, UnicodeError):
            return None
        try:
            data = read_capped(opened.fd, FILE_BYTES)
        finally:
            os.close(opened.fd)
        text = decode(data) if data is not None else None
        if text is None:
            return None
        lines = text.text.splitlines()[:LINES]
        try:
            return GitIgnoreSpec.from_lines(lines)
        except ValueError:
            return None
