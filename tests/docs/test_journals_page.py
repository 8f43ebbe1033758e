"""
`docs/journals.md` is so: each of its blocks runs, and its tables have all records and modes.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepengine.journal import modes
from stepengine.journal.records import Blob, Head, Input, Intent, Result

from .pages import follow, page

PAGE = page("journals.md")
FIRST = re.compile(r"^\| `?(\w+)`? \|", re.MULTILINE)


@pytest.mark.spec("replay:J1", "replay:J34", "requirements:P13")
@pytest.mark.deep
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    In one folder and in order, all of Python in one module: each block goes on with the names of those before.
    """
    monkeypatch.chdir(tmp_path)
    follow("journals.md", tmp_path, names={"__name__": "page"})


def test_the_tables_have_every_kind_of_record_and_every_mode() -> None:
    listed = FIRST.findall(PAGE)

    assert {kind.kind for kind in (Head, Intent, Result, Input, Blob)} | {
        kind.name
        for kind in vars(modes).values()
        if isinstance(kind, type) and issubclass(kind, modes.Mode) and kind.name
    } <= set(listed)
