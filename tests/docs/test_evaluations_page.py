"""
`docs/evaluations.md` is so: its evaluations run, and say what it shows.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.evaluation import criteria

from .pages import follow, page


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG60", "evaluation:JG67")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path) -> None:
    follow("evaluations.md", tmp_path)

    assert (tmp_path / "first" / "report.html").is_file()
    assert (tmp_path / "first" / "cases" / "ann" / "new" / "1.jsonl").is_file()


@pytest.mark.deep
def test_who_comes_from_inspect_sees_what_the_page_shows(tmp_path: Path) -> None:
    follow("coming-from/inspect.md", tmp_path)


@pytest.mark.spec("evaluation:JG61")
def test_the_table_has_every_check() -> None:
    from stepengine.evaluation.evaluation_files import MAKERS

    assert [] == [name for name in MAKERS if f"`{name}(" not in page("evaluations.md")]
    assert {*MAKERS} <= {*criteria.__all__}
