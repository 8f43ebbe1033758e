"""The table of `benchmarks/README.md`: made from its figures, and those are what a run needs."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks.peers import ENVIRONMENTS
from benchmarks.programs.__main__ import MEASURED, PAGE, PEER, measured, page_with, table
from benchmarks.programs.market import ITEMS, WAYS

FIGURES = json.loads(MEASURED.read_text(encoding="utf-8"))


def test_the_page_shows_the_figures() -> None:
    text = PAGE.read_text(encoding="utf-8")

    assert page_with(text, table(FIGURES)) == text
    assert ["stepengine", "pydantic_ai"] == list(FIGURES)
    assert all(tuple(ways) == WAYS for ways in FIGURES.values())
    assert PEER in ENVIRONMENTS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.deep
def test_a_run_needs_the_published_calls_and_bytes(way: str) -> None:
    if way == "program":
        pytest.importorskip("pydantic_monty", reason="needs the extra programs")
    kept, now = FIGURES["stepengine"][way], measured("stepengine", way, sys.executable, 1)

    assert (kept["model calls"], kept["written"]) == (now["model calls"], now["written"])
    assert now["sent"] == pytest.approx(kept["sent"], rel=0.1)


def test_a_program_needs_fewer_requests_and_tokens() -> None:
    for ways in FIGURES.values():
        assert (len(ITEMS) + 1, 2, 2) == tuple(ways[way]["model calls"] for way in WAYS)
    ours = FIGURES["stepengine"]
    assert ours["program"]["sent"] < 0.7 * ours["in one reply"]["sent"] < 0.1 * ours["one by one"]["sent"]
