"""Which known word was probably meant by one that nobody knows. Pure."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ("did_you_mean",)

LONGEST = 100
"""Characters of a word that are compared: how long that takes grows with their square."""


def did_you_mean(word: str, known: Iterable[str], *, alike: float = 0.6, otherwise: str = "") -> str:
    """
    Return the end of a message about an unknown word: ``"; did you mean 'x'?"``.

    Args:
        word: What was written.
        known: What would have been fine.
        alike: How near a known word has to be, from 0 to 1, to be named.
        otherwise: What is returned where none is that near.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only a message about a mistake needs it

    near = get_close_matches(word[:LONGEST], list(known), n=1, cutoff=alike)
    return f"; did you mean {near[0]!r}?" if near else otherwise
