"""``BoundedMatcher``: the common blocks of two sequences, in bounded time."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

T = TypeVar("T")
COMPARISONS_PER_ITEM = 20
"""A guess: a higher number finds longer blocks in texts with many equal lines, and needs proportionally more time."""
MIN_COMPARISONS = 20_000
"""For the smallest texts: a hundred items that are all equal are compared to the end, within milliseconds."""


class BoundedMatcher(difflib.SequenceMatcher[T]):
    """
    A ``SequenceMatcher`` that looks for the longest blocks only for a number of comparisons: 20 for each item.

    Sequences can be made that need any number of them: repeated items take cubic time. After that only what is equal at
    the beginning and the end of a stretch is found; the rest of it counts as replaced.

    Args:
        a: One sequence.
        b: The other one.
        autojunk: Whether items that make up more than 1 % of a long *b* are left out of the search.
    """

    def __init__(self, a: Sequence[T], b: Sequence[T], *, autojunk: bool = True) -> None:
        super().__init__(None, a, b, autojunk)
        self._ours, self._theirs = a, b
        self._left = COMPARISONS_PER_ITEM * (len(a) + len(b)) + MIN_COMPARISONS
        places: dict[T, list[int]] = self.b2j  # type: ignore[attr-defined]  # documented, and not in the stubs
        self._needed = [0, *accumulate([len(places.get(item, ())) + 1 for item in a])]

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Any:
        """Return the longest common block in a range, or one at its start or end if the search would be too slow."""
        ahi = len(self._ours) if ahi is None else ahi
        bhi = len(self._theirs) if bhi is None else bhi
        self._left -= self._needed[ahi] - self._needed[alo]
        if self._left >= 0:
            return super().find_longest_match(alo, ahi, blo, bhi)
        longest = min(ahi - alo, bhi - blo)
        size = next((n for n in range(longest) if self._ours[alo + n] != self._theirs[blo + n]), longest)
        if size:
            return difflib.Match(alo, blo, size)
        size = next((n for n in range(longest) if self._ours[ahi - 1 - n] != self._theirs[bhi - 1 - n]), longest)
        return difflib.Match(ahi - size, bhi - size, size)
