"""
`docs/permissions.md` is so: its Python runs, its commands show what it shows, its tables name what is there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepengine.permissions.policy import MODES

from .pages import follow, page

PAGE = page("permissions.md")


@pytest.mark.deep
@pytest.mark.spec("requirements:M11", "requirements:M15", "requirements:M18")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    follow("permissions.md", tmp_path, names={"__name__": "page"})


def test_the_modes_are_all_there() -> None:
    rows = PAGE.partition("| mode |")[2].partition("\n\n")[0]

    assert list(MODES) == re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)
