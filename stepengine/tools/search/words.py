"""The words of names and texts, as descriptions and paths are compared by them (requirements F12)."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ("SHORTEST_STEM", "words_of")

SHORTEST_STEM = 3
CACHED_CHARS = 100
"""How long the texts are whose words are kept: names come again and again, descriptions and links do not."""


def words_of(text: str) -> tuple[str, ...]:
    """Return the words of a name or text in lower case: at ``camelCase``, digits and everything that is no letter."""
    return _known_words(text) if len(text) <= CACHED_CHARS else _words(text)


def _words(text: str) -> tuple[str, ...]:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+|[^\W\d_A-Za-z]+", text)
    return tuple([_stem(part.lower()) for part in parts])


_known_words = lru_cache(maxsize=50_000)(_words)


def _stem(word: str) -> str:
    """Return a word without the ``s`` of a plural."""
    is_plural = len(word) > SHORTEST_STEM and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if is_plural else word
