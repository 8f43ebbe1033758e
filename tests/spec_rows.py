"""
The rows of the specification that tests may cite.

The specification is not part of a clone, so ``spec_rows.txt`` lists the ids of its rows, one page a line, neighbours as
ranges. ``python -m tests.spec_rows [FOLDER]`` writes it anew from the pages in ``../shared/spec``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path

LIST = Path(__file__).with_name("spec_rows.txt")
SPEC = Path(__file__).resolve().parents[2] / "shared" / "spec"
PAGES = (
    "durable",
    "ecosystem",
    "generator-contract",
    "interfaces",
    "judging",
    "performance",
    "prototype",
    "providers",
    "reliability",
    "replay",
    "requirements",
)
ROW = re.compile(r"(?:\| *|[-*] +)?[*`]{0,3}([A-Z]{1,3}-?[0-9]+[a-z]?)[*`]{0,3}(?: *!)? *(?:[|:.)]|(?<=[0-9] ))")
ID = re.compile(r"([A-Z]{1,3}-?)([0-9]+)([a-z]?)")
RANGE = re.compile(r"([A-Z]{1,3}-?)([0-9]+)-([0-9]+)")


def rows_of(page: str) -> tuple[str, ...]:
    """Return the ids that begin a line of the text of a page, in its order."""
    found = [match[1] for line in page.splitlines() if not line.startswith("#") and (match := ROW.match(line))]
    return tuple(dict.fromkeys(found))


def compact(rows: Sequence[str]) -> str:
    """Return ids with their neighbours as ranges: ``A1-3 A5 A5b FS01-27``."""
    parts = sorted([ID.findall(row)[0] for row in rows], key=lambda part: (part[0], int(part[1]), part[2]))
    counter = count()
    words = []
    for (letters, suffix, _), members in groupby(
        parts, key=lambda part: (part[0], part[2], int(part[1]) - next(counter))
    ):
        numbers = [number for _, number, _ in members]
        if suffix or len(numbers) == 1:
            words += [f"{letters}{number}{suffix}" for number in numbers]
        else:
            words.append(f"{letters}{numbers[0]}-{numbers[-1]}")
    return " ".join(words)


def expanded(words: str) -> Iterator[str]:
    """Give the ids that ``compact`` made a line of."""
    for word in words.split():
        match = RANGE.fullmatch(word)
        if match is None:
            yield word
        else:
            letters, first, last = match.groups()
            yield from (f"{letters}{str(number).zfill(len(first))}" for number in range(int(first), int(last) + 1))


def listed(pages: Mapping[str, str]) -> str:
    """Return the text of ``spec_rows.txt`` for the texts of pages."""
    return "".join(f"{name}: {compact(rows_of(pages[name]))}\n" for name in PAGES)


def known() -> frozenset[str]:
    """Return every row as ``page:ID``."""
    lines = [line.partition(": ") for line in LIST.read_text(encoding="ascii").splitlines()]
    return frozenset(f"{page}:{row}" for page, _, words in lines for row in expanded(words))


def read(folder: Path = SPEC) -> dict[str, str]:
    """Return the texts of the pages in *folder*."""
    return {name: (folder / f"{name}.md").read_text(encoding="utf-8") for name in PAGES}


if __name__ == "__main__":
    LIST.write_text(listed(read(*map(Path, sys.argv[1:2]))), encoding="ascii")
