"""Exact replacements in a text, all or nothing, and the diff that shows them (requirements F6, reliability FS17)."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Sequence

import attrs

from stepengine.errors import ToolError

__all__ = ("Replacement", "replace_all", "unified_diff")

CONTEXT = 3
DIFF_CHARS = 20_000
DIFF_LINES = 20_000
SHOWN_LINES = 10


@attrs.frozen
class Replacement:
    """
    One replacement.

    Attributes:
        old: The text to find; not empty.
        new: What stands in its place, taken literally.
        allow_multiple: Whether every occurrence is replaced; else there has to be exactly one.
    """

    old: str
    new: str
    allow_multiple: bool = False


def replace_all(text: str, replacements: Sequence[Replacement], path: str) -> str:
    """
    Return the text after all replacements, each made on the result of the one before.

    A line end in ``old`` also matches CRLF; what stands in its place gets the line ends of the text that it replaces.
    Everything outside of the matches stays as it is.

    Raises:
        ToolError: naming every replacement that failed, with counts and line numbers. Then nothing is to be written.
    """
    problems = []
    for number, replacement in enumerate(replacements, 1):
        try:
            text = _replaced(text, replacement)
        except ToolError as error:
            problems.append(f"replacement {number}: {error.message}" if len(replacements) > 1 else error.message)
    if problems:
        msg = f"{path!r} was not changed: {'; '.join(problems)}"
        raise ToolError(msg)
    return text


def _replaced(text: str, replacement: Replacement) -> str:
    old, new = replacement.old, replacement.new
    if not old:
        msg = "old_string is empty; to make or overwrite a whole file use write_file"
        raise ToolError(msg)
    if old == new:
        msg = "old_string and new_string are the same"
        raise ToolError(msg)
    spans = _spans(text, old) or _spans_of_lines(text, old)
    if not spans:
        msg = "old_string was found 0 times; it has to match exactly, white space included. Read the file again"
        raise ToolError(msg)
    if replacement.allow_multiple:
        spans = _apart(spans)
    elif len(spans) > 1:
        lines = _line_numbers(text, spans)
        msg = (
            f"old_string was found {len(spans)} times (lines {lines}); give more of the text around the one that you mean, "
            "or set allow_multiple"
        )
        raise ToolError(msg)
    pieces, position = [], 0
    for start, end in spans:
        pieces += [text[position:start], _with_ends_of(new, text, start, end)]
        position = end
    return "".join([*pieces, text[position:]])


def _spans(text: str, old: str) -> list[tuple[int, int]]:
    """Return every place of *old*, overlapping ones too."""
    spans, start = [], text.find(old)
    while start >= 0:
        spans.append((start, start + len(old)))
        start = text.find(old, start + 1)
    return spans


def _spans_of_lines(text: str, old: str) -> list[tuple[int, int]]:
    """Return every place of *old* when line ends LF and CRLF count as equal."""
    if "\r\n" not in text or "\n" not in old:
        return []
    ends = [m.start() for m in re.finditer("\r\n", text)]
    shifted = [e - i for i, e in enumerate(ends)]
    found = _spans(text.replace("\r\n", "\n"), old.replace("\r\n", "\n"))
    return [(a + bisect_left(shifted, a), b + bisect_left(shifted, b)) for a, b in found]


def _with_ends_of(new: str, text: str, start: int, end: int) -> str:
    """Return *new* with CRLF line ends when the replaced text, or else the line that it stands in, has them."""
    if "\n" not in new:
        return new
    replaced = text[start:end]
    sample = replaced if "\n" in replaced else text[start : text.find("\n", end) + 1]
    unix = new.replace("\r\n", "\n")
    return unix.replace("\n", "\r\n") if "\r\n" in sample else unix if "\n" in sample else new


def _apart(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the places from left to right that do not overlap."""
    kept: list[tuple[int, int]] = []
    for span in spans:
        if not kept or span[0] >= kept[-1][1]:
            kept.append(span)
    return kept


def _line_numbers(text: str, spans: list[tuple[int, int]]) -> str:
    numbers = [str(text.count("\n", 0, start) + 1) for start, _ in spans[:SHOWN_LINES]]
    return ", ".join(numbers) + (", ..." if len(spans) > SHOWN_LINES else "")


def unified_diff(old: str, new: str, path: str) -> str:
    """Return the unified diff of two texts, at most 20,000 characters of it."""
    before, after = _by_newline(old), _by_newline(new)
    same = 0
    for a, b in zip(before, after, strict=False):
        if a != b:
            break
        same += 1
    tail = 0
    while tail < min(len(before), len(after)) - same and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    first = max(0, same - CONTEXT)
    keep = max(0, tail - CONTEXT)
    old_part, new_part = before[first : len(before) - keep], after[first : len(after) - keep]
    if max(len(old_part), len(new_part)) > DIFF_LINES:
        return f"(the changes span {max(len(old_part), len(new_part)):,} lines, too many for a diff)"
    lines = difflib.unified_diff(old_part, new_part, f"a/{path}", f"b/{path}", n=CONTEXT)
    text = "".join(_shifted(line, first) for line in lines)
    return (
        text
        if len(text) <= DIFF_CHARS
        else f"{text[:DIFF_CHARS]}\n(the diff was cut; it has {len(text):,} characters)\n"
    )


def _by_newline(text: str) -> list[str]:
    pieces = text.split("\n")
    return [*[p + "\n" for p in pieces[:-1]], *([pieces[-1]] if pieces[-1] else [])]


def _shifted(line: str, first: int) -> str:
    """Return a line of a diff with its numbers counted from the beginning of the file."""
    if line.startswith("@@ "):
        return re.sub(r"(?<=[-+])\d+", lambda m: str(int(m[0]) + first), line)
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
