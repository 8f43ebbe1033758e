"""Suggestions for unknown names in error messages: the nearest known names, and at most five of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SIMILAR_RATIO: Final = 0.6
"""difflib's own default: a letter or two of a short word may be wrong."""
MAX_SUGGESTIONS: Final = 5
"""Names in one message: a longer list hides the one that the reader needs."""
NEAR_RATIO: Final = 0.75
"""For guesses among many names: at ``SIMILAR_RATIO``, short names with another meaning are near, too."""
MAX_COMPARED_CHARS: Final = 100
"""The compared characters of a word: the time of the comparison grows with their square."""
MAX_COMPARED_NAMES: Final = 1_000
"""Limits the time of an error message, even if ten thousand tools have the wrong prefix."""


def find_nearest(
    word: str, known: Iterable[str], *, min_similarity: float = SIMILAR_RATIO, max_count: int = MAX_SUGGESTIONS
) -> tuple[str, ...]:
    """
    Return up to *max_count* known names that are at least *min_similarity* similar to *word* (0 to 1), the most similar first.

    Args:
        word: The unknown name.
        known: The known names.
        min_similarity: The lowest similarity of a returned name, from 0 to 1.
        max_count: The largest number of names.
    """
    from difflib import get_close_matches  # noqa: PLC0415 - only a message about a mistake needs it

    return tuple(
        get_close_matches(
            word[:MAX_COMPARED_CHARS],
            list(dict.fromkeys(known))[:MAX_COMPARED_NAMES],
            n=max_count,
            cutoff=min_similarity,
        )
    )


def did_you_mean(word: str, known: Iterable[str], *, min_similarity: float = SIMILAR_RATIO, otherwise: str = "") -> str:
    """
    Return ``"; did you mean 'x'?"`` with the known name that is most like *word*; *otherwise* if none is similar.

    Args:
        word: The unknown name.
        known: The known names.
        min_similarity: The lowest similarity of a suggested name, from 0 to 1.
        otherwise: The text that is returned if no name is that similar.
    """
    near = find_nearest(word, known, min_similarity=min_similarity, max_count=1)
    return f"; did you mean {near[0]!r}?" if near else otherwise


def list_names(known: Iterable[str], near: object = "", *, quoted: bool = False, none: str = "none") -> str:
    """
    Return known names for an error message, at most five, those like *near* first: ``"a, b, c, d, e and 27 more"``.

    Up to five names keep their order. Of more names the ones that are similar to *near* come first.

    Args:
        known: The known names.
        near: The unknown name that the message reports; ignored if it is not a text.
        quoted: Whether each name is shown in quotes.
        none: The text for no names at all.
    """
    names = list(dict.fromkeys(known))
    if len(names) > MAX_SUGGESTIONS and isinstance(near, str):
        names = list(dict.fromkeys([*find_nearest(near, names), *names]))
    shown = ", ".join([repr(name) if quoted else name for name in names[:MAX_SUGGESTIONS]])
    more = len(names) - MAX_SUGGESTIONS
    return f"{shown} and {more:,} more" if more > 0 else shown or none
