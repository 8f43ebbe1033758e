"""The flags of ``code_search``: a closed list, read into a value; no text of the model's becomes a flag of a program."""

from __future__ import annotations

import re
import shlex
from typing import Any

import attrs

from stepengine.errors import ToolError

__all__ = ("Flags", "parse_flags")

SWITCHES = {
    "i": ("case", "i"),
    "s": ("case", "s"),
    "S": ("case", "S"),
    "w": ("word", True),
    "F": ("fixed", True),
    "x": ("whole_line", True),
    "U": ("multiline", True),
    "v": ("invert", True),
    "c": ("count", True),
    "l": ("names_only", True),
}
LISTS = {"t": "types", "T": "not_types", "g": "globs"}
NUMBERS = {"A": ("after",), "B": ("before",), "C": ("before", "after"), "m": ("max_count",)}
TYPE = re.compile(r"[A-Za-z0-9_+-]{1,40}")
LIMIT = 1_000
FLAGS_CHARS = 2_000
KNOWN = "-i -s -S -w -F -x -U -v -c -l -t TYPE -T TYPE -g GLOB -A N -B N -C N -m N"


@attrs.frozen(kw_only=True)
class Flags:
    """
    What the flags ask for.

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


def parse_flags(text: str) -> Flags:
    """
    Read flags; switches may be joined (``-iw``), values may follow directly (``-A3``).

    Raises:
        ToolError: for anything that is not in the list, and for more than 2,000 characters.
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
        word = words.pop(0)
        if not re.fullmatch(r"-[A-Za-z].*", word, re.DOTALL):
            _refuse(word)
        rest = word[1:]
        while rest:
            letter, rest = rest[0], rest[1:]
            if letter in SWITCHES:
                name, value = SWITCHES[letter]
                found[name] = value
                continue
            if letter not in LISTS and letter not in NUMBERS:
                _refuse(f"-{letter}" if len(word) == len(f"-{letter}") else word)
            value = rest or (words.pop(0) if words else "")
            _take(found, letter, value)
            break
    return Flags(**found)


def _take(found: dict[str, Any], letter: str, value: str) -> None:
    if letter in NUMBERS:
        if not re.fullmatch(r"\d{1,4}", value) or int(value) > LIMIT or (letter == "m" and value == "0"):
            msg = f"-{letter} needs a number up to {LIMIT}, not {value!r}"
            raise ToolError(msg)
        found.update(dict.fromkeys(NUMBERS[letter], int(value)))
        return
    if not value or "\0" in value or (letter in "tT" and not TYPE.fullmatch(value)):
        msg = f"-{letter} needs a value such as {'*.py' if letter == 'g' else 'py'!r}, not {value!r}"
        raise ToolError(msg)
    name = LISTS[letter]
    found[name] = (*found.get(name, ()), value)


def _refuse(word: str) -> None:
    msg = f"the flag {word!r} is not available; these are: {KNOWN}"
    raise ToolError(msg)
