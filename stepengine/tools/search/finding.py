"""
``find_files``: the files that a description probably means, by words in paths and names (requirements F12).

Needs no model and no index. The words of the description are looked for in the names of files, folders and top-level
definitions; a word that fits few files counts more than one that fits many. A word that fits nowhere is taken for a
misspelling of the nearest one that does.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from difflib import get_close_matches
from itertools import takewhile
from typing import Annotated, Any

import attrs
from pydantic import Field

from stepengine.data.tools import ToolAnnotations
from stepengine.tools.context import ToolContext
from stepengine.tools.decorator import tool
from stepengine.tools.definition import Tool
from stepengine.tools.files.paths import display
from stepengine.tools.files.root import Root
from stepengine.tools.files.walk import Budget
from stepengine.tools.search.ignore import visible
from stepengine.tools.search.symbols import symbols_of
from stepengine.tools.search.words import SHORTEST_STEM, words_of

__all__ = ("finding_tool", "ranked")

FIND_RESULTS = 12
FIND_RESULTS_MAX = 30
FIND_PROMPT_CHARS = 2_000
FIND_SOURCES = 3_000

Parts = tuple[str, ...]
PROMPT_WORDS = 40
SHOWN_SYMBOLS = 8
NEARNESS = 0.78
SPELLED_CHARS, NEAR = 40, 1_000
"""How long a word may be that is taken for a misspelling, and of how many it may be one: comparing takes long."""
IN_NAME, IN_FOLDER, IN_SYMBOL, WHOLE_SYMBOL, NAMED = 10.0, 4.0, 6.0, 14.0, 60.0
BEGINNING = 0.6
"""What a word counts that only begins like one of the description, or the other way round."""
TESTS = frozenset({"test", "tests", "spec", "specs"})
# fmt: off
COMMON = frozenset((
    "a", "about", "all", "an", "and", "any", "are", "as", "at", "be", "by", "can", "code", "do", "does", "file",
    "files", "find", "for", "from", "get", "handle", "handles", "has", "have", "how", "i", "in", "is", "it", "its",
    "like", "me", "need", "of", "on", "or", "please", "project", "related", "relevant", "show", "source", "that",
    "the", "their", "them", "these", "this", "to", "use", "used", "uses", "want", "what", "where", "which", "who",
    "with", "you",
))
"""Words that say nothing about which file is meant."""
# fmt: on


def finding_tool(root: Root) -> Tool[..., Any]:
    """Return the tool that finds files below *root* by a description."""

    @tool(category="read", annotations=ToolAnnotations(read_only=True, idempotent=True), parallel_safe=True)
    def find_files(  # noqa: D417  (the context is no parameter of the tool)
        ctx: ToolContext,
        prompt: Annotated[str, Field(min_length=1, max_length=FIND_PROMPT_CHARS)],
        max_results: Annotated[int, Field(ge=1, le=FIND_RESULTS_MAX)] = FIND_RESULTS,
    ) -> dict[str, Any]:
        """
        Find the files that fit a description, best match first.

        Usage:
            - Describe what you look for with the words that probably stand in file names, folders, classes and functions.
            - Read the first results with `read_files` to see whether they are the right ones.

        Examples:
            {"prompt": "session store for sqlite"}
            {"prompt": "class RetryPolicy, back-off of HTTP requests", "max_results": 5}

        When not to use:
            - To find files by a pattern for their path, use `glob`.
            - To find text inside of files, use `code_search`.

        Notes:
            - `symbols` shows which top-level names of a file fitted. Spelling mistakes are forgiven.
            - What `.gitignore` files leave out, `.git`, files with secrets and symbolic links are not found.
            - At most 20,000 entries are looked at, for 10 seconds; `message` says when that was not enough.

        Args:
            prompt: What to look for.
            max_results: How many files to return at most.
        """
        budget = Budget(cancelled=ctx.cancelled)
        files = _candidates(root, budget)
        best = ranked(prompt, files, budget.check_time)[:max_results]
        notes = [f"{len(best)} of {len(files):,} files fit best" if best else "no file fits the description"]
        if budget.cut:
            notes.append(f"incomplete: {budget.cut}")
        symbols = {display(hit.place): list(hit.symbols) for hit in best if hit.symbols}
        return {"files": [display(hit.place) for hit in best], "symbols": symbols, "message": "; ".join(notes)}

    return find_files


def _candidates(root: Root, budget: Budget) -> dict[Parts, list[str]]:
    """Return the files below the root with their top-level names, for as many of them as there is time to look into."""
    opened = root.open_folder(".")
    try:
        with closing(visible(root, opened, budget)) as entries:
            places = [place for place, _, is_folder in entries if not is_folder]
    finally:
        os.close(opened.fd)
    files: dict[Parts, list[str]] = {place: [] for place in places}
    for place in sorted(places, key=lambda p: (len(p), p))[:FIND_SOURCES]:
        if not budget.check_time():
            break
        files[place] = symbols_of(root, place)
    return files


@attrs.frozen
class Hit:
    """A file that fits: its place, its score, and the names in it that fitted."""

    place: Parts
    score: float
    symbols: tuple[str, ...]


def ranked(prompt: str, files: Mapping[Parts, list[str]], goes_on: Callable[[], bool] = lambda: True) -> list[Hit]:
    """
    Return the files that fit *prompt* at all, best first; equal ones by depth and name.

    Args:
        prompt: What is looked for.
        files: The places of files, with the top-level names in them.
        goes_on: Asked again and again; when it says no, what was found so far is ranked.
    """
    index = _Index(files, goes_on)
    wanted = list(dict.fromkeys(w for w in words_of(prompt) if w not in COMMON))[:PROMPT_WORDS]
    scores: defaultdict[Parts, float] = defaultdict(float)
    for word in takewhile(lambda _: goes_on(), wanted):
        fitting = index.fitting(word)
        weight = math.log(1 + len(files) / (1 + len(fitting)))
        for place, score in fitting.items():
            scores[place] += score * weight
    named = set(re.findall(r"[\w$./-]+", prompt))
    about_tests = bool(TESTS.intersection(wanted))
    hits = [
        Hit(
            place,
            index.adjusted(place, scores[place], named, about_tests=about_tests),
            index.shown(place, wanted, named),
        )
        for place in takewhile(lambda _: goes_on(), files)
        if scores[place] or index.is_named(place, named)
    ]
    return sorted(hits, key=lambda h: (-h.score, len(h.place), h.place))


class _Index:
    """Which words stand where."""

    def __init__(self, files: Mapping[Parts, list[str]], goes_on: Callable[[], bool]) -> None:
        self._files = files
        self._by_word: defaultdict[str, dict[Parts, float]] = defaultdict(dict)
        for place, symbols in takewhile(lambda _: goes_on(), files.items()):
            self._add(words_of(place[-1]), place, IN_NAME)
            self._add((w for folder in place[:-1] for w in words_of(folder)), place, IN_FOLDER)
            self._add((w for symbol in symbols for w in words_of(symbol)), place, IN_SYMBOL)

    def _add(self, words: Iterable[str], place: Parts, score: float) -> None:
        for word in words:
            known = self._by_word[word]
            known[place] = max(known.get(place, 0.0), score)

    def fitting(self, word: str) -> dict[Parts, float]:
        """Return the files that a word fits and how well; the nearest spelling when there are none."""
        found = dict(self._by_word.get(word, {}))
        if len(word) >= SHORTEST_STEM:
            for known, places in self._by_word.items():
                if known != word and len(known) >= SHORTEST_STEM and (known.startswith(word) or word.startswith(known)):
                    for place, score in places.items():
                        found[place] = max(found.get(place, 0.0), score * BEGINNING)
        if not found and SHORTEST_STEM < len(word) <= SPELLED_CHARS:
            near = [known for known in self._by_word if known[:1] == word[:1] and abs(len(known) - len(word)) <= 2]  # noqa: PLR2004
            for known in get_close_matches(word, near[:NEAR], n=1, cutoff=NEARNESS):
                found = {place: score * BEGINNING for place, score in self._by_word[known].items()}
        return found

    def is_named(self, place: Parts, named: set[str]) -> bool:
        """Return whether the description spells out a file, its path, or a name that it defines."""
        return not named.isdisjoint([place[-1], "/".join(place), *self._files[place]])

    def adjusted(self, place: Parts, score: float, named: set[str], *, about_tests: bool) -> float:
        """Return the score of a file after what holds for it as a whole."""
        if not named.isdisjoint([place[-1], "/".join(place)]):
            score += NAMED
        elif not named.isdisjoint([s for s in self._files[place] if len(s) > SHORTEST_STEM and s not in COMMON]):
            score += WHOLE_SYMBOL
        is_test = any(TESTS & set(re.split(r"[._-]", part.lower())) for part in place)
        return score / 2 if is_test and not about_tests else score

    def shown(self, place: Parts, wanted: list[str], named: set[str]) -> tuple[str, ...]:
        """Return the names in a file that fit."""
        fitting = [s for s in self._files[place] if s in named or not set(wanted).isdisjoint(words_of(s))]
        return tuple(fitting[:SHOWN_SYMBOLS])
