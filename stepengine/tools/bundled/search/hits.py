"""
The flags and the results of ``code_search``, the same for ripgrep and for Python.

Flags are a closed list and are parsed into a value; no text of the model becomes a flag of a program.
"""

from __future__ import annotations

import re
import shlex
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.errors import ToolError
from stepengine.tools.bundled.search.ignore import Ignore
from stepengine.tools.bundled.search.symbols import read_text_file
from stepengine.workspace.guard import make_withheld_notes
from stepengine.workspace.paths import format_display_path
from stepengine.workspace.patterns import SEARCH_COLUMNS

if TYPE_CHECKING:
    from stepengine.workspace.root import Root

SWITCHES: dict[str, dict[str, object]] = {
    "i": {"case": "i"},
    "s": {"case": "s"},
    "S": {"case": "S"},
    "w": {"word": True},
    "F": {"fixed": True},
    "x": {"whole_line": True},
    "U": {"multiline": True},
    "v": {"invert": True},
    "c": {"count": True},
    "l": {"names_only": True},
    "n": {},  # line numbers are always shown
}
LISTS = {"t": "types", "T": "not_types", "g": "globs"}
NUMBERS = {"A": ("after",), "B": ("before",), "C": ("before", "after"), "m": ("max_count",)}
TYPE = re.compile(r"[A-Za-z0-9_+-]{1,40}")
LONG = {
    "ignore-case": "i", "case-sensitive": "s", "smart-case": "S", "word-regexp": "w", "fixed-strings": "F",
    "line-regexp": "x", "multiline": "U", "invert-match": "v", "count": "c", "files-with-matches": "l", "line-number": "n",
    "type": "t", "type-not": "T", "glob": "g", "after-context": "A", "before-context": "B", "context": "C", "max-count": "m",
}  # fmt: skip
"""The letters of ripgrep's long flags."""
MAX_FLAG_NUMBER = 1_000
"""More lines around a hit, or hits in a file, than are shown in all."""
FLAGS_CHARS = 2_000
"""Some hundred flags: more than any search has."""
KNOWN = "-i -s -S -w -F -x -U -v -c -l -n -t TYPE -T TYPE -g GLOB -A N -B N -C N -m N"


@frozen(kw_only=True)
class SearchFlags:
    """
    The parsed flags of a search.

    Attributes:
        case: ``"i"`` ignore case, ``"s"`` respect it, ``"S"`` respect it when the pattern has an upper-case letter.
        word: The match is a whole word.
        fixed: The pattern is plain text.
        whole_line: The match is a whole line.
        multiline: A match may span lines.
        invert: Lines that do not match.
        count: Only how many lines match, per file.
        names_only: Only the names of files that match.
        types: File types to search, such as ``"py"``.
        not_types: File types to leave out.
        globs: Patterns of files to search; with ``!`` in front, to leave out.
        before: Lines to show before a match.
        after: Lines to show after a match.
        max_count: Matches per file.
    """

    case: str = ""
    word: bool = False
    fixed: bool = False
    whole_line: bool = False
    multiline: bool = False
    invert: bool = False
    count: bool = False
    names_only: bool = False
    types: tuple[str, ...] = ()
    not_types: tuple[str, ...] = ()
    globs: tuple[str, ...] = ()
    before: int = 0
    after: int = 0
    max_count: int | None = None


def parse_flags(text: str) -> SearchFlags:
    """
    Return the parsed flags of a search, with joined switches and ``--name=value``; raise ``ToolError`` for invalid ones.

    Raises:
        ToolError: For an unknown flag, an invalid value, and for more than 2,000 characters.
    """
    if len(text) > FLAGS_CHARS:
        msg = f"the flags have {len(text):,} characters; at most {FLAGS_CHARS:,} are read"
        raise ToolError(msg)
    try:
        words = shlex.split(text)
    except ValueError as error:
        msg = f"the flags {text!r} cannot be read: {error}"
        raise ToolError(msg) from None
    found: dict[str, Any] = {}
    while words:
        word = _pop_flag(words)
        if not re.fullmatch(r"-[A-Za-z].*", word, re.DOTALL):
            _raise_unknown_flag(word)
        rest = word[1:]
        while rest:
            letter, rest = rest[0], rest[1:]
            if letter in SWITCHES:
                found.update(SWITCHES[letter])
                continue
            if letter not in LISTS and letter not in NUMBERS:
                _raise_unknown_flag(f"-{letter}" if len(word) == len(f"-{letter}") else word)
            value = rest or (words.pop(0) if words else "")
            _add_flag_value(found, letter, value)
            break
    return SearchFlags(**found)


def _pop_flag(words: list[str]) -> str:
    """Remove and return the first word, a long flag as its letter; a value after ``=`` becomes the new first word."""
    word = words.pop(0)
    name, equals, value = word[2:].partition("=")
    letter = LONG.get(name, "") if word.startswith("--") else ""
    if not letter or (equals and letter in SWITCHES):
        return word
    words[:0] = [value] if equals else []
    return f"-{letter}"


def _add_flag_value(flag_values: dict[str, Any], letter: str, value: str) -> None:
    """Add the value of the flag *letter* to *flag_values*; raise ``ToolError`` if the flag does not accept it."""
    if letter in NUMBERS:
        if not re.fullmatch(r"\d{1,4}", value) or int(value) > MAX_FLAG_NUMBER or (letter == "m" and value == "0"):
            msg = f"-{letter} needs a number up to {MAX_FLAG_NUMBER}, not {value!r}"
            raise ToolError(msg)
        flag_values.update(dict.fromkeys(NUMBERS[letter], int(value)))
        return
    if not value or "\0" in value or (letter in "tT" and not TYPE.fullmatch(value)):
        msg = f"-{letter} needs a value such as {'*.py' if letter == 'g' else 'py'!r}, not {value!r}"
        raise ToolError(msg)
    name = LISTS[letter]
    flag_values[name] = (*flag_values.get(name, ()), value)


def _raise_unknown_flag(word: str) -> None:
    """Raise ``ToolError`` for an unknown flag, with the known ones."""
    msg = f"the flag {word!r} is not available; these are: {KNOWN}"
    raise ToolError(msg)


SEARCH_MATCHES = 250
"""More than a model looks at; a better pattern finds fewer."""
SEARCH_CHARS = 20_000
"""About 5,000 tokens."""
SEARCH_FILE_BYTES = 4 * 1024 * 1024
"""Source files are far smaller; larger files are data or generated."""


@frozen
class FileHits:
    """
    The matches in one file.

    Attributes:
        parts: The file.
        lines: All its lines, without their ends.
        spans: First line and number of lines of each match, lines counting from 0, in order.
        total: The number of matching lines, if all were counted; else the number of found ones.
    """

    parts: tuple[str, ...]
    lines: list[str]
    spans: list[tuple[int, int]]
    total: int


def read_searchable_lines(root: Root, ignore: Ignore, parts: tuple[str, ...]) -> list[str] | None:
    """Return the lines of a text file; ``None`` for a file that searches omit: withheld, ignored, binary or over 4 MiB."""
    if root.is_withheld(parts) or ignore.is_path_ignored(parts):
        return None
    text = read_text_file(root, parts, SEARCH_FILE_BYTES)
    if text is None:
        return None
    lines = text.text.removesuffix("\n").split("\n")
    return [line.removesuffix("\r") for line in lines]


class MatchReport:
    """
    Collects matches up to the limits and formats the result.

    Args:
        flags: The flags of the search.
        max_results: The most matches to show of a file.
        notes: Further notes for the message.
    """

    def __init__(self, flags: SearchFlags, max_results: int, notes: Sequence[str]) -> None:
        self._flags = flags
        self._notes = notes
        self._per_file = min(max_results, flags.max_count or max_results)
        self._out: list[str] = []
        self._found: list[dict[str, Any]] = []
        self._chars = 0
        self._files = self._cut_files = 0
        self._skipped_lines, self._columns = 0, 0
        self.stopped = ""

    def count_skipped_line(self, searched_columns: int) -> None:
        """Count a line that was skipped, because only its first *searched_columns* characters could be searched."""
        self._skipped_lines += 1
        self._columns = searched_columns

    def add_file(self, hits: FileHits) -> bool:
        """Add the matches of one file, as many as fit; return False if a limit is reached, so that the search can stop."""
        flags = self._flags
        if not hits.spans:
            return True
        path, shown = format_display_path(hits.parts), hits.spans[: self._per_file]
        data: list[dict[str, object]] = [{"path": path}]
        is_cut = False
        if flags.count:
            lines, data = [f"{path}: {hits.total}"], [{"path": path, "count": hits.total}]
        elif flags.names_only:
            lines = [path]
        else:
            shown = shown[: SEARCH_MATCHES - len(self._found)]
            lines = [f"{path}:", *self._format_lines(hits.lines, shown)]
            data = [{"path": path, "line": n + 1} for n, _ in shown]
            is_cut = len(hits.spans) > self._per_file and flags.max_count != self._per_file
        if _count_line_chars(lines) > SEARCH_CHARS - self._chars:
            self.stopped = self.stopped or f"stopped at {SEARCH_CHARS:,} characters"
            if flags.count or flags.names_only:
                return False
            lines, number = self._format_fitting_matches(path, hits.lines, shown)
            data = data[:number]
            if not number:
                return False
        self._out += lines
        self._chars += _count_line_chars(lines)
        self._files += 1
        self._cut_files += is_cut
        self._found += data
        if len(self._found) >= SEARCH_MATCHES:
            self.stopped = self.stopped or f"stopped at {SEARCH_MATCHES} matches"
        return not self.stopped

    def _format_fitting_matches(
        self, path: str, lines: list[str], spans: list[tuple[int, int]]
    ) -> tuple[list[str], int]:
        """
        Return (lines to show of a file, number of matches in them), for as many matches as fit.

        If no match fits into an empty report, the first one is shown without context, as far as it fits.
        """
        room, head = SEARCH_CHARS - self._chars, f"{path}:"

        def format_first(number: int) -> list[str]:
            return [head, *self._format_lines(lines, spans[:number])]

        number = bisect_right(
            range(1, len(spans) + 1), room, key=lambda number: _count_line_chars(format_first(number))
        )
        if number or self._out:
            return format_first(number), number
        first, count = spans[0]
        shown = [head, *self._format_lines(lines, [(first, count)], context=False)]
        while _count_line_chars(shown) > room:
            shown.pop()
        return shown, 1

    def _format_lines(self, lines: list[str], spans: Iterable[tuple[int, int]], *, context: bool = True) -> list[str]:
        """Return the numbered lines of some matches, with the context lines that the flags request."""
        matched, around = set[int](), set[int]()
        before, after = (self._flags.before, self._flags.after) if context else (0, 0)
        for first, count in spans:
            matched.update(range(first, first + count))
            around.update(range(max(0, first - before), min(len(lines), first + count + after)))
        return [
            f"  Line {n + 1}{':' if n in matched else '-'} {_clean_and_cut_line(lines[n])}"
            for n in sorted(matched | around)
            if n < len(lines)
        ]

    def make_result(self, problems: str) -> dict[str, Any]:
        """
        Return the tool's result: ``stdout`` and ``message`` for the model, ``count`` and ``matches`` for code, *problems* as ``stderr``.

        A match has the ``path`` of its file and its ``line``, counting from 1; a file that is only counted has ``path`` and
        ``count``, one that is only named ``path``. ``count`` is their number.
        """
        what = "files" if self._flags.count or self._flags.names_only else "matches"
        number = len(self._found)
        head = f"Found {number} {what[: -1 if what == 'files' else -2] if number == 1 else what}"
        notes = [f"{head} in {self._files} files" if what == "matches" and self._files != 1 else head, *self._notes]
        if self._cut_files:
            notes.append(f"only the first {self._per_file} matches are shown in {self._cut_files} of the files")
        if self.stopped:
            notes.append(f"{self.stopped}; there may be more")
        if self._skipped_lines:
            notes.append(
                f"{self._skipped_lines:,} longer lines were left out: without ripgrep, for such a pattern only the first "
                f"{self._columns:,} characters of a line are searched"
            )
        notes += make_withheld_notes()
        text = "\n".join([head, *self._out])
        made = {"stdout": text, "message": "; ".join(notes), "count": number, "matches": self._found}
        return {**made, "stderr": problems} if problems else made


def _count_line_chars(lines: Sequence[str]) -> int:
    """Return the number of characters of all lines with their line ends."""
    return sum(map(len, lines)) + len(lines)


def _clean_and_cut_line(line: str) -> str:
    """Return a line with invalid bytes replaced, cut with a note on the number of omitted characters."""
    text = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return (
        text
        if len(text) <= SEARCH_COLUMNS
        else f"{text[:SEARCH_COLUMNS]} [... {len(text) - SEARCH_COLUMNS:,} more characters]"
    )
