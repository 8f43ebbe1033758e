"""
Count the bytes that enter and leave the sandbox.

These values are in the memory of this process, which the sandbox's own memory limit does not cover.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Any

VALUE_BYTES = 16
"""Estimated bytes of a small number, and of each list, dict and member of one."""
ANSWER_BYTES = 256
"""Bytes that even a short answer needs in this process."""


class TooManyBytes(Exception):
    """More bytes crossed the sandbox boundary than allowed; the message names the limit."""


def approximate_byte_size(value: object) -> int:
    """Return the approximate size of a JSON value in bytes."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="replace"))
    if isinstance(value, int):
        return approximate_number_bytes(value)
    if isinstance(value, Mapping):
        return sum(
            [VALUE_BYTES + approximate_byte_size(key) + approximate_byte_size(inner) for key, inner in value.items()],
            VALUE_BYTES,
        )
    return (
        sum([VALUE_BYTES + approximate_byte_size(inner) for inner in value], VALUE_BYTES)
        if isinstance(value, list | tuple)
        else VALUE_BYTES
    )


def approximate_number_bytes(number: int) -> int:
    """Return the approximate bytes of a whole number, which may have millions of digits in a program."""
    return max(VALUE_BYTES, number.bit_length() // 8)


def min_argument_bytes(value: object) -> int:
    """Return a lower bound of the bytes of all texts and large numbers in the arguments of a program."""
    # Forty lists, each twice in the next one, are few bytes and 2^40 members: a repeated value is counted once.
    # Counted values stay referenced: an object creates its attributes on access, and a freed id could be reused.
    size, left, counted = 0, [value], dict[int, object]()
    while left:
        one = left.pop()
        if id(one) in counted:
            continue
        counted[id(one)] = one
        size += min_shallow_bytes(one)
        inner = inner_values(one)
        if inner is not None:
            size += len(inner)
            left += [*inner, *inner.values()] if isinstance(inner, Mapping) else inner
    return size


def min_shallow_bytes(value: object) -> int:
    """Return a lower bound of the bytes of a value without its members; 0 for a small value."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 8
    return len(str(value)) if isinstance(value, PurePath) else 0


def inner_values(value: object) -> Collection[Any] | None:
    """Return the members of a container, an exception or an object of a program; ``None`` for any other value."""
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        return value
    if isinstance(value, BaseException):
        return value.args
    attributes = getattr(value, "attributes", None)
    return attributes if isinstance(attributes, Mapping) else None


class ByteBudget:
    """
    The bytes that may cross the sandbox boundary for one handler.

    Args:
        turn: The limit of one turn.
        total: The limit of all turns together.
    """

    def __init__(self, turn: int, total: int) -> None:
        self._turn, self._total = turn, total
        self._of_turn = self._of_all = 0

    def reset_turn_count(self) -> None:
        """Reset the count of the turn; the total stays."""
        self._of_turn = 0

    def add(self, value: object) -> None:
        """
        Count a value that crosses the sandbox boundary; raise ``TooManyBytes`` if the turn or the total exceeds its limit.

        Raises:
            TooManyBytes: when the turn or the total exceeds its limit.
        """
        size = ANSWER_BYTES + approximate_byte_size(value)
        self._of_turn += size
        self._of_all += size
        for used, limit, where in ((self._of_turn, self._turn, "in one turn"), (self._of_all, self._total, "in all")):
            if used > limit:
                msg = f"more than {limit:,} bytes went in and out of the sandbox {where}"
                raise TooManyBytes(msg)
