"""What a search found, and the text that shows it; the same for ripgrep and for Python (requirements F11)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from stepengine.errors import ToolError
from stepengine.tools.files.paths import display
from stepengine.tools.files.text import decode, read_capped
from stepengine.tools.search.flags import Flags
from stepengine.tools.search.ignore import Ignore
from stepengine.tools.search.regex import SEARCH_COLUMNS

if TYPE_CHECKING:
    from stepengine.tools.files.root import Root

__all__ = ("FileHits", "Report", "Sources")

SEARCH_MATCHES = 250
SEARCH_CHARS = 20_000
SEARCH_FILE_BYTES = 4 * 1024 * 1024


@attrs.frozen
class FileHits:
    """
    The matches in one file.

    Attributes:
        parts: The file.
        lines: All its lines, without their ends.
        spans: First line and number of lines of each match, lines counting from 0, in order.
        total: How many lines match in all, when that was counted; else how many were found.
    """

    parts: tuple[str, ...]
    lines: list[str]
    spans: list[tuple[int, int]]
    total: int


class Sources:
    """Opens files for a search: by the walk, only text, nothing secret and nothing ignored."""

    def __init__(self, root: Root, ignore: Ignore) -> None:
        self._root = root
        self._ignore = ignore

    def lines(self, parts: tuple[str, ...]) -> list[str] | None:
        """Return the lines of a file, or ``None`` when it is not to be searched."""
        if self._root.secrets.match(parts) or self._ignore.hides(parts):
            return None
        try:
            opened = self._root.open_file("/".join(parts))
        except (ToolError, UnicodeError):
            return None
        try:
            data = read_capped(opened.fd, SEARCH_FILE_BYTES) if opened.parts == parts else None
        except OSError:
            return None
        finally:
            os.close(opened.fd)
        text = None if data is None else decode(data)
        if text is None:
            return None
        lines = text.text.removesuffix("\n").split("\n")
        return [line.removesuffix("\r") for line in lines]


class Report:
    """
    Collects matches within the caps and writes the result.

    Args:
        flags: What to show.
        max_results: Matches to show per file.
    """

    def __init__(self, flags: Flags, max_results: int) -> None:
        self._flags = flags
        self._per_file = min(max_results, flags.max_count or max_results)
        self._out: list[str] = []
        self._found: list[dict[str, Any]] = []
        self._chars = 0
        self._files = self._cut_files = 0
        self.stopped = ""

    def add(self, found: FileHits) -> bool:
        """Add the matches of one file; return whether more are wanted."""
        flags = self._flags
        if not found.spans:
            return True
        path, shown = display(found.parts), found.spans[: self._per_file]
        data: list[dict[str, Any]] = [{"path": path}]
        if flags.count:
            lines, data = [f"{path}: {found.total}"], [{"path": path, "count": found.total}]
        elif flags.names_only:
            lines = [path]
        else:
            shown = shown[: SEARCH_MATCHES - len(self._found)]
            lines, data = (
                [f"{path}:", *self._text(found.lines, shown)],
                [{"path": path, "line": n + 1} for n, _ in shown],
            )
            self._cut_files += len(found.spans) > self._per_file and flags.max_count != self._per_file
        size = sum(map(len, lines)) + len(lines)
        if self._chars + size > SEARCH_CHARS:
            self.stopped = self.stopped or f"stopped at {SEARCH_CHARS:,} characters"
            return False
        self._out += lines
        self._chars += size
        self._files += 1
        self._found += data
        if len(self._found) >= SEARCH_MATCHES:
            self.stopped = self.stopped or f"stopped at {SEARCH_MATCHES} matches"
        return not self.stopped

    def _text(self, lines: list[str], spans: Iterable[tuple[int, int]]) -> list[str]:
        matched, context = set[int](), set[int]()
        for first, count in spans:
            matched.update(range(first, first + count))
            context.update(
                range(max(0, first - self._flags.before), min(len(lines), first + count + self._flags.after))
            )
        return [
            f"  Line {n + 1}{':' if n in matched else '-'} {_shown(lines[n])}"
            for n in sorted(matched | context)
            if n < len(lines)
        ]

    def result(self, problems: str = "") -> dict[str, Any]:
        """
        Return what the tool gives: ``stdout`` and ``message`` to be read, ``count`` and ``matches`` to decide by.

        A match has the ``path`` of its file and its ``line``, counting from 1; a file that is only counted has ``path`` and
        ``count``, one that is only named ``path``. ``count`` is how many of them are there. ``stderr`` stands for problems.
        """
        what = "files" if self._flags.count or self._flags.names_only else "matches"
        number = len(self._found)
        head = f"Found {number} {what[: -1 if what == 'files' else -2] if number == 1 else what}"
        notes = [f"{head} in {self._files} files" if what == "matches" and self._files != 1 else head]
        if self._cut_files:
            notes.append(f"only the first {self._per_file} matches are shown in {self._cut_files} of the files")
        if self.stopped:
            notes.append(f"{self.stopped}; there may be more")
        text = "\n".join([head, *self._out])
        made = {"stdout": text, "message": "; ".join(notes), "count": number, "matches": self._found}
        return {**made, "stderr": problems} if problems else made


def _shown(line: str) -> str:
    text = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return (
        text
        if len(text) <= SEARCH_COLUMNS
        else f"{text[:SEARCH_COLUMNS]} [... {len(text) - SEARCH_COLUMNS:,} more characters]"
    )
