"""
Counts the bytes that cross the wall of the sandbox.

Values that go in and out are held in this process, and the sandbox's own limit of memory does not see them.
"""

from __future__ import annotations

from collections.abc import Mapping

VALUE_BYTES = 16
"""For a number, and for each list, dict and member of one: a guess at what the encoding adds to each value."""
ANSWER_BYTES = 256
"""What an answer takes in this process, however short it is."""


class TooManyBytes(Exception):
    """More bytes crossed the sandbox boundary than allowed; the message names the limit."""


def byte_size(value: object) -> int:
    """Return the approximate size of a JSON value in bytes."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, Mapping):
        return sum([VALUE_BYTES + byte_size(key) + byte_size(inner) for key, inner in value.items()], VALUE_BYTES)
    return (
        sum([VALUE_BYTES + byte_size(inner) for inner in value], VALUE_BYTES)
        if isinstance(value, list | tuple)
        else VALUE_BYTES
    )


def argument_size(value: object) -> int:
    """Return a lower bound of the bytes of all texts in the arguments of a program."""
    # Forty lists, each twice in the next one, are few bytes and 2^40 members: what is there several times is counted once.
    size, left, seen = 0, [value], set[int]()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            size += len(one)
            left += one
    return size


class ByteBudget:
    """
    The number of bytes that may cross the sandbox boundary for one handler.

    Args:
        turn: In one turn.
        total: In all of its turns.
    """

    def __init__(self, turn: int, total: int) -> None:
        self._turn, self._total = turn, total
        self._of_turn = self._of_all = 0

    def start_turn(self) -> None:
        """Start counting a turn."""
        self._of_turn = 0

    def add(self, value: object) -> None:
        """
        Count a value that crosses the sandbox boundary.

        Raises:
            TooManyBytes: when it is more than may be.
        """
        size = ANSWER_BYTES + byte_size(value)
        self._of_turn += size
        self._of_all += size
        for used, limit, where in ((self._of_turn, self._turn, "in one turn"), (self._of_all, self._total, "in all")):
            if used > limit:
                msg = f"more than {limit:,} bytes went in and out of the sandbox {where}"
                raise TooManyBytes(msg)
