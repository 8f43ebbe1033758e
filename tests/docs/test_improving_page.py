"""
The table of searches in `benchmarks/README.md` has what the searches find.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.improving.measuring import SEEDS, TASKS, cells_of, improved, measured, read_found

from .pages import ROOT


@pytest.mark.deep
@pytest.mark.spec("evaluation:JG147")
@pytest.mark.parametrize("task", TASKS)
def test_improve_finds_a_better_version_as_the_table_shows(task: str, tmp_path: Path) -> None:
    """
    With ten seeds, of which three are searched again; on the task where none exists none is told.
    """
    found = read_found()[task]
    better = sum(one.is_better for one in found)
    text = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{task}` |")]

    assert found[:3] == measured(task, improved, tmp_path, SEEDS[:3])
    assert len(SEEDS) == len(found)
    assert better == 0 if task == TASKS[-1] else better >= 9
    assert [cell.strip() for cell in row.split("|")[3:6]] == cells_of(found)
