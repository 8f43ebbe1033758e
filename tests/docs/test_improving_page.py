"""
`docs/improving.md` is so: its searches run, and find what it shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.improving.measuring import page_with, table

from .pages import follow, page


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG140", "evaluation:JG144", "evaluation:JG146")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    follow("improving.md", tmp_path)

    assert (tmp_path / "better" / "report.html").is_file()
    assert not (tmp_path / "same" / "improvement.diff").exists()


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG147")
def test_the_table_holds_what_the_searches_find(tmp_path: Path) -> None:
    text = page("improving.md")

    assert page_with(text, table(tmp_path)) == text
