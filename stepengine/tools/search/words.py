"""The words of names and texts, as descriptions and paths are compared by them (requirements F12)."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ("SHORTEST_STEM", "words_of")

SHORTEST_STEM = 3


@lru_cache(maxsize=50_000)
def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a name or text in lower case: at ``camelCase``, digits and everything that is no letter."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+", text)
    return tuple([_stem(part.lower()) for part in parts])


def _stem(word: str) -> str:
    """Return a word without the ``s`` of a plural."""
    is_plural = len(word) > SHORTEST_STEM and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else word
