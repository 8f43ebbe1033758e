"""
Assemble the streamed arguments of one tool call, for all known ways in which servers split them.

| dialect | servers known to send it | rule |
|---|---|---|
| consecutive pieces | OpenAI and most others | pieces are joined |
| all arguments so far in each piece | vLLM's MiniMax parser before 0.10.1, SGLang's for MiniMax-M2 | the last piece counts |
| pieces, then all arguments once more | vLLM's xlam parser, LiteLLM (encoded twice), some gateways | the repetition is dropped |
| an object in place of its text | Ollama's native form behind gateways | its JSON |
| white space after the end | Groq, vLLM | is dropped by the reader |

A piece may be more text, or all text so far. Both readings are followed as long as both can become JSON. Mostly one of them
fails at once, because a second ``{"name":`` after the first is invalid. If both are complete at the end, the arguments are
ambiguous.
"""

from __future__ import annotations

from typing import Any

from stepengine.data.json import MAX_DECODINGS
from stepengine.models._json import encode_utf8, parse_json

ENDS = ("}", "]", '"', "l", "e")
UNREADABLE = object()
"""A marker for arguments that are not JSON, which equals no value."""


def can_start_json(text: str) -> bool:
    """Return whether *text* is a JSON value or can be the start of one."""
    import jiter

    stripped = text.strip()
    if not stripped:
        return True
    try:
        jiter.from_json(encode_utf8(stripped), allow_inf_nan=False)
    except ValueError as error:
        # Only this message of the parser distinguishes a truncated value from an invalid one.
        return str(error).startswith("EOF while parsing")
    return True


def parse_complete_arguments(text: str) -> Any:
    """Return the value of complete arguments, which may be encoded twice; ``UNREADABLE`` for incomplete or invalid ones."""
    if not text.rstrip().endswith(ENDS):
        return UNREADABLE
    value: Any = text
    for _ in range(MAX_DECODINGS):
        if not isinstance(value, str):
            break
        try:
            value = parse_json(encode_utf8(value.strip()))
        except ValueError:
            return UNREADABLE
    return value


class ArgumentPieces:
    """
    Collects the arguments of one call.

    Attributes:
        count: The number of pieces with text.
    """

    __slots__ = ("_first", "_others", "_pieces", "_shown", "count")

    def __init__(self) -> None:
        self.count = 0
        # Texts grow as lists that are joined once: a long text has ten thousand pieces.
        self._pieces: list[str] = []
        # Other possible readings of the pieces; mostly none.
        self._others: list[str] = []
        self._first = ""
        self._shown = 0

    @property
    def text(self) -> str:
        """The arguments so far; with several possible readings, the one that is complete JSON."""
        joined = self._join_pieces()
        whole = [reading for reading in (joined, *self._others) if parse_complete_arguments(reading) is not UNREADABLE]
        return whole[0] if self._others and whole else joined

    @property
    def certain_text(self) -> str:
        """The part of the arguments that was returned so far; later pieces cannot change it."""
        return self._join_pieces()[: self._shown]

    @property
    def is_undecided(self) -> bool:
        """Whether the pieces can be read as complete arguments in more than one way."""
        readings = (self._join_pieces(), *self._others) if self._others else ()
        return sum(parse_complete_arguments(reading) is not UNREADABLE for reading in readings) > 1

    @property
    def is_complete(self) -> bool:
        """Whether the arguments are a complete JSON value."""
        # Evaluated for every piece that may start a call, so the cheap check of the last character goes first.
        last = next((piece.rstrip() for piece in reversed(self._pieces) if not piece.isspace()), "")
        return (bool(self._others) or last.endswith(ENDS)) and parse_complete_arguments(self.text) is not UNREADABLE

    def is_repeated_by(self, text: str) -> bool:
        """Return whether *text* repeats the same complete arguments."""
        return _are_equal_arguments(text, self.text)

    def can_continue_with(self, text: str) -> bool:
        """Return whether the arguments can still become JSON with *text* as their next piece."""
        return any(can_start_json(reading) for reading in self._list_readings_after(text))

    def append_and_flush_certain(self, text: str) -> str:
        """Add a piece, and return the part of the arguments that is new and that later pieces cannot change; it may be empty."""
        self.count += bool(text.strip())
        self._first = self._first or text.strip()[:1]
        if not self._others and not self._may_repeat_arguments(text):
            self._pieces.append(text)
            self._shown += len(text)
            return text
        found = self._list_readings_after(text)
        if len(found) > 1:
            found = [reading for reading in found if can_start_json(reading)] or found[:1]
        self._pieces, self._others = found[:1], found[1:]
        return "" if self._others else self.flush_rest()

    def flush_rest(self) -> str:
        """At the end of the stream, return the rest of the arguments and mark it as returned."""
        text = self.text
        new, self._shown = text[self._shown :], len(text)
        return new

    def _join_pieces(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def _may_repeat_arguments(self, text: str) -> bool:
        """Return whether *text* starts like the arguments, or like their JSON text, and so may repeat them."""
        begin = text.lstrip()[:2]
        return bool(self._pieces and self._first) and (begin[:1] == self._first or begin == '"{')

    def _list_readings_after(self, text: str) -> list[str]:
        """Return the possible arguments after *text*: extended by it, replaced by it, or unchanged."""
        readings = (self._join_pieces(), *self._others)
        found = [reading + text for reading in readings]
        for reading in readings:
            if reading and text.startswith(reading):
                found.append(text)
            elif _are_equal_arguments(text, reading):
                found.append(reading)
        return list(dict.fromkeys(found))


def _are_equal_arguments(first: str, second: str) -> bool:
    """Return whether both texts are complete arguments with equal values."""
    value = parse_complete_arguments(first)
    return value is not UNREADABLE and parse_complete_arguments(second) == value
