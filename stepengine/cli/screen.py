"""
Text from models, tools and files on its way to a terminal (reliability UI01, UI02).

Everything that would steer the terminal or hide itself is shown as an escape; only our own colours reach the screen.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from typing import Any

__all__ = ("cut", "dumps", "one_line", "visible")

HIDDEN = frozenset({"Cc", "Cf", "Co", "Cs", "Zl", "Zp"})
"""Unicode categories of what has no picture of its own: controls, formats, private use, surrogates, separators."""
JOINERS = frozenset("\u200d\ufe0e\ufe0f")
"""They shape emoji and stay in running text; names and paths show them."""
MAX_COMBINING = 8
SELECTORS = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")


def visible(text: str, *, strict: bool = False) -> str:
    r"""
    Return *text* with everything that has no picture as an escape such as ``\x1b`` or ``\u202e``.

    Line ends and tabs stay. Runs of combining marks are cut after 8.

    Args:
        text: Any text.
        strict: Show line ends, tabs, joiners and variation selectors too: for names, paths and arguments.
    """
    if text.isascii() and text.isprintable():
        return text
    shown: list[str] = []
    marks = 0
    for character in text.replace("\r\n", "\n"):
        marks = marks + 1 if unicodedata.category(character) in ("Mn", "Me") else 0
        if marks <= MAX_COMBINING:
            shown.append(_shown(character, strict=strict))
    return "".join(shown)


def _shown(character: str, *, strict: bool) -> str:
    if not strict and (character in "\n\t" or character in JOINERS):
        return character
    if unicodedata.category(character) not in HIDDEN and not SELECTORS.match(character):
        return character
    return json.dumps(character)[1:-1] if character in "\n\t\r" else _escape(ord(character))


def _escape(code: int) -> str:
    if code <= 0xFF:  # noqa: PLR2004
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"  # noqa: PLR2004


def cut(text: str, width: int) -> str:
    """Return *text*, cut with an ellipsis to at most *width* characters."""
    return text if len(text) <= width else f"{text[: max(0, width - 3)]}..."


def one_line(text: str, width: int = 100) -> str:
    """Return *text* as one visible line of at most *width* characters."""
    return cut(visible(" ".join(text[: 4 * width].split()), strict=True), width)


def dumps(value: Any) -> str:
    """Return *value* as indented JSON in ASCII, so that no byte of it can steer a terminal."""
    return json.dumps(value, indent=2).replace("\x7f", "\\u007f")


def is_terminal(stream: Any = None) -> bool:
    """Return whether *stream*, by default stderr, is a terminal that can redraw a line."""
    return bool((stream or sys.stderr).isatty())
