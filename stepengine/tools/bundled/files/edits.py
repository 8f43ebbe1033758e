"""Exact replacements in a text, all or none of them, and unified diffs."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from attrs import frozen

from stepengine.data.matching import BoundedMatcher
from stepengine.errors import ToolError
from stepengine.workspace.line_ends import apply_old_line_ends, to_lf

CONTEXT_LINES = 3
"""As many as in every unified diff."""
DIFF_CHARS = 20_000
"""About 5,000 tokens and some screens: a person still reads through it."""
DIFF_LINES = 20_000
"""Comparing takes time that may grow with the square; this many lines take about a second."""
SHOWN_LINES = 10
"""Enough line numbers to see where the text is; further ones say nothing new."""
COUNTED_PLACES = 100
"""A text that is found this often is too short to mean one place; counting on would only take time."""


@frozen
class TextReplacement:
    """
    One replacement.

    Attributes:
        old: The text to find; not empty.
        new: The text in its place, taken literally.
        allow_multiple: Whether every occurrence is replaced; else there must be exactly one.
    """

    old: str
    new: str
    allow_multiple: bool = False


def apply_replacements(text: str, replacements: Sequence[TextReplacement], path: str) -> str:
    """
    Return the text after all replacements in order; raise ``ToolError`` with all problems if one of them fails.

    LF and CRLF match each other. A new text gets the line ends of the replaced text, line by line. Text outside of the matches is
    unchanged.

    Raises:
        ToolError: With every failed replacement, its count and line numbers.
    """
    problems = []
    for number, replacement in enumerate(replacements, 1):
        try:
            text = _apply_replacement(text, replacement)
        except ToolError as error:
            problems.append(f"replacement {number}: {error.message}" if len(replacements) > 1 else error.message)
    if problems:
        msg = f"{path!r} was not changed: {'; '.join(problems)}"
        raise ToolError(msg)
    return text


def _apply_replacement(text: str, replacement: TextReplacement) -> str:
    """Return the text after one replacement; raise ``ToolError`` if its old text is missing or ambiguous."""
    old, new = replacement.old, replacement.new
    if not old:
        msg = "old_string is empty; to make or overwrite a whole file use write_file"
        raise ToolError(msg)
    if old == new:
        msg = "old_string and new_string are the same"
        raise ToolError(msg)
    spans = _find_spans_any_line_end(text, old, replacement) or _find_spans(text, old, replacement)
    if not spans:
        msg = "old_string was found 0 times; it has to match exactly, white space included. Read the file again"
        raise ToolError(msg)
    if len(spans) > 1 and not replacement.allow_multiple:
        lines = _format_line_numbers(text, spans)
        times = f"{len(spans)} times" if len(spans) < COUNTED_PLACES else f"at least {COUNTED_PLACES} times"
        msg = (
            f"old_string was found {times} (lines {lines}); give more of the text around the one that you mean, "
            "or set allow_multiple"
        )
        raise ToolError(msg)
    pieces, position = [], 0
    for start, end in spans:
        pieces += [text[position:start], _adapt_line_ends(new, text, start, end)]
        position = end
    return "".join([*pieces, text[position:]])


def _find_spans(text: str, old: str, replacement: TextReplacement) -> list[tuple[int, int]]:
    """Return the spans of *old* in the text: all with ``allow_multiple``, else at most 100, which may overlap."""
    step = len(old) if replacement.allow_multiple else 1
    spans, start = list[tuple[int, int]](), text.find(old)
    while start >= 0 and (replacement.allow_multiple or len(spans) < COUNTED_PLACES):
        spans.append((start, start + len(old)))
        start = text.find(old, start + step)
    return spans


def _find_spans_any_line_end(text: str, old: str, replacement: TextReplacement) -> list[tuple[int, int]]:
    """Return the spans of *old* in the text, with LF and CRLF equal; no span starts or ends within a CRLF."""
    ends = [m.start() for m in re.finditer("\r\n", text)]
    shifted = [e - i for i, e in enumerate(ends)]
    found = _find_spans(to_lf(text), to_lf(old), replacement)
    return [(a + bisect_left(shifted, a), b + bisect_left(shifted, b)) for a, b in found]


def _adapt_line_ends(new: str, text: str, start: int, end: int) -> str:
    """Return *new* with the line ends of the text that it replaces, else of a neighbouring line."""
    at = text.find("\n", end)
    at = text.rfind("\n", 0, start) if at < 0 else at
    default = "" if at < 0 else "\r\n" if text[at - 1 : at] == "\r" else "\n"
    return apply_old_line_ends(text[start:end], new, default)


def _format_line_numbers(text: str, spans: list[tuple[int, int]]) -> str:
    """Return the numbers of the lines at which *spans* start, the first ones only if there are many."""
    numbers = [str(text.count("\n", 0, start) + 1) for start, _ in spans[:SHOWN_LINES]]
    return ", ".join(numbers) + (", ..." if len(spans) > SHOWN_LINES else "")


def unified_diff(old: str | None, new: str | None, path: str, *, max_chars: int = DIFF_CHARS) -> str:
    """
    Return the unified diff of two texts in git's format, cut to *max_chars* characters; a sentence if it would be too long.

    Args:
        old: The text before; ``None`` for a new file.
        new: The text after; ``None`` for a deleted file.
        path: The path of the file.
        max_chars: The most characters of the diff.
    """
    before, after = _split_keeping_line_ends(old or ""), _split_keeping_line_ends(new or "")
    same = 0
    for a, b in zip(before, after, strict=False):
        if a != b:
            break
        same += 1
    tail = 0
    while tail < min(len(before), len(after)) - same and before[-1 - tail] == after[-1 - tail]:
        tail += 1
    first = max(0, same - CONTEXT_LINES)
    keep = max(0, tail - CONTEXT_LINES)
    old_part, new_part = before[first : len(before) - keep], after[first : len(after) - keep]
    if max(len(old_part), len(new_part)) > DIFF_LINES:
        return f"(the changes span {max(len(old_part), len(new_part)):,} lines, too many for a diff)"
    groups = BoundedMatcher(old_part, new_part).get_grouped_opcodes(CONTEXT_LINES)
    hunks = "".join([line for group in groups for line in _format_hunk(group, old_part, new_part, first)])
    was, now = "/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}"
    text = f"--- {was}\n+++ {now}\n{hunks}" if hunks else ""
    return (
        text if len(text) <= max_chars else f"{text[:max_chars]}\n(the diff was cut; it has {len(text):,} characters)\n"
    )


def _split_keeping_line_ends(text: str) -> list[str]:
    """Return the lines of *text* with their LF; only a LF ends a line."""
    pieces = text.split("\n")
    return [*[p + "\n" for p in pieces[:-1]], *([pieces[-1]] if pieces[-1] else [])]


def _format_hunk(
    group: Sequence[tuple[str, int, int, int, int]], old: list[str], new: list[str], first: int
) -> Iterator[str]:
    """Yield the lines of one hunk, numbered from the beginning of the file."""
    (_, a, _, c, _), (_, _, b, _, d) = group[0], group[-1]
    yield f"@@ -{_format_hunk_range(first + a, b - a)} +{_format_hunk_range(first + c, d - c)} @@\n"
    for tag, a, b, c, d in group:
        if tag == "equal":
            yield from [_format_diff_line(" ", line) for line in old[a:b]]
        else:
            yield from [_format_diff_line("-", line) for line in old[a:b]]
            yield from [_format_diff_line("+", line) for line in new[c:d]]


def _format_hunk_range(start: int, length: int) -> str:
    return str(start + 1) if length == 1 else f"{start + 1 if length else start},{length}"


def _format_diff_line(mark: str, line: str) -> str:
    """Return a diff line with its *mark*; a line without LF gets git's note about the missing newline."""
    return f"{mark}{line}" if line.endswith("\n") else f"{mark}{line}\n\\ No newline at end of file\n"
