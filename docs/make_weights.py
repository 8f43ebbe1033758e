# ruff: noqa: INP001
"""Write the size of an installation without extras into ``benchmarks/README.md``: ``python docs/make_weights.py``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "benchmarks" / "README.md"
BEGIN, END = "<!-- weights: made by docs/make_weights.py -->\n", "<!-- end of weights -->\n"
LEAST = 1.0
"""Megabytes from which a part has a row of its own."""


def figures() -> dict[str, float]:
    """Return megabytes by part: those of the table, and what is left, the SDKs apart."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.starts import of_the_sdks, weights

    found = weights()
    theirs = of_the_sdks(found)
    own = {name: megabytes for name, megabytes in found.items() if name not in theirs}
    shown = {name: own[name] for name in sorted(own, key=lambda name: -own[name]) if own[name] >= LEAST}
    return {
        **shown,
        "others": sum(own.values()) - sum(shown.values()),
        "all of these": sum(own.values()),
        "the three SDKs, and what they alone need": sum([found[name] for name in theirs]),
    }


def table() -> str:
    """Return the rows of the page."""
    rows = [f"| {name} | {megabytes:.1f} |\n" for name, megabytes in figures().items()]
    return "| part | MB |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    TARGET.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
