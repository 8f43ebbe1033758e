"""
`docs/files-and-undo.md` is so: its Python runs, its command shows what it shows, its options are there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepengine.cli.commands.undo import undo

from .pages import follow, page

PAGE = page("files-and-undo.md")


@pytest.mark.deep
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    In one folder and in order: each block goes on with the files of the one before.
    """
    monkeypatch.chdir(tmp_path)
    follow("files-and-undo.md", tmp_path)


def test_the_options_of_the_table_are_those_of_the_commands() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE)

    assert ["--dry-run", "--partial", "--trust-journal", "--at", "--moved"] == rows
    assert "--dry-run" in (undo.__doc__ or "")
