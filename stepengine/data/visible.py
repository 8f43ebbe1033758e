"""
Text from models, tools and files on its way to a screen or into a file that people read.

Everything that would steer a terminal or hide itself is shown as an escape.
"""

from __future__ import annotations

import json
import re
import unicodedata

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of characters without a visible form: controls, formats, private use, surrogates, separators."""
JOINERS = frozenset("\u200d\ufe0e\ufe0f")
"""They shape emoji and stay in running text; names and paths show them."""
LINE_CHARS = 100
"""Such a text and the other columns of a list fit into a terminal of usual width."""
MAX_COMBINING_MARKS = 8
"""More than any language puts on one letter; longer stacks cover the lines above and below."""
SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
NOT_PLAIN = re.compile(r"[^\n\t -~]+")
NOT_PLAIN_STRICT = re.compile(r"[^ -~]+")
"""Only these characters are looked at one by one: most of a long text is ASCII."""


def visible(text: str, *, strict: bool = False) -> str:
    r"""
    Return *text* with invisible characters as escapes such as ``\x1b`` or ``\u202e``.

    Line ends and tabs stay. Runs of combining marks are cut after 8.

    Args:
        text: Any text.
        strict: Show line ends, tabs, joiners and variation selectors too: for names, paths and arguments.
    """
    pattern = NOT_PLAIN_STRICT if strict else NOT_PLAIN
    return pattern.sub(lambda found: _escape_run(found[0], strict=strict), text.replace("\r\n", "\n"))


def _escape_run(text: str, *, strict: bool) -> str:
    """Return a part of a text with invisible characters as escapes, and without combining marks after the eighth in a row."""
    shown: list[str] = []
    marks = 0
    for character in text:
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks <= MAX_COMBINING_MARKS:
            shown.append(_escape_character(character, strict=strict))
    return "".join(shown)


def _escape_character(character: str, *, strict: bool) -> str:
    if not strict and (character in "\n\t" or character in JOINERS):
        return character
    if unicodedata.category(character) not in HIDDEN and not SELECTORS.match(character):
        return character
    return character.encode("unicode_escape").decode()


def cut_end(text: str, limit: int, total: int = 0) -> str:
    """
    Return *text*, or if it is longer than *limit*, its beginning and the number of missing characters, *limit* in all.

    Args:
        text: The text, or a beginning of it.
        limit: How many characters are returned at most, the note included.
        total: How long the whole text is; by default as long as *text*.
    """
    length = max(len(text), total)
    if length <= limit:
        return text
    note = ""
    for _ in range(3):  # the number may have one more digit where the note itself makes it larger
        note = f" [{length - limit + len(note):,} more characters]…"
    return text[: max(0, limit - len(note))] + note[:limit]


def cut_after(text: str, limit: int, note: str = "...") -> str:
    """Return *text*, or the first *limit* characters of a longer one with *note* behind them."""
    return text if len(text) <= limit else f"{text[:limit]}{note}"


def cut_middle(text: str, limit: int, note: str = "", *, head: int | None = None) -> str:
    """
    Return *text*; if it is longer than *limit*, a note on a line of its own replaces its middle.

    Args:
        text: The text.
        limit: The number of characters that stay.
        note: The note; by default it gives the number of missing characters.
        head: How many of the characters that stay are before the note; half of them by default.
    """
    if len(text) <= limit:
        return text
    start = (limit + 1) // 2 if head is None else head
    note = note or f"[... {len(text) - limit:,} characters were left out here ...]"
    return f"{text[:start]}\n{note}\n{text[len(text) - (limit - start) :]}"


def truncate_text(text: str, width: int) -> str:
    """Return *text*, cut with an ellipsis to at most *width* characters."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 step``, ``1,200 steps``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def one_line(text: str, width: int = LINE_CHARS) -> str:
    """Return *text* as one visible line of at most *width* characters."""
    return truncate_text(visible(" ".join(text[: 4 * width].split()), strict=True), width)


def to_ascii_json(value: object) -> str:
    """Return *value* as indented JSON in ASCII, so that no byte of it can steer a terminal."""
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f")
