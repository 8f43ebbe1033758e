"""
`docs/permissions.md` is so: its Python runs, its commands show what it shows, its tables name what is there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stepengine.permissions.policy import MODES

from .pages import Project, assert_shown, blocks_of, execute, page

PAGE = page("permissions.md")
BLOCKS = blocks_of(PAGE)


@pytest.mark.deep
@pytest.mark.spec("requirements:M11", "requirements:M16", "requirements:M17", "requirements:M18")
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    In one folder and in order, since commands look at what Python recorded; each block of Python has names of its own.
    """
    monkeypatch.chdir(tmp_path)
    project, said = Project(tmp_path), ""
    for block in BLOCKS:
        match block.kind:
            case "python":
                execute(block, "permissions.md")
            case "json":
                assert block.path is not None
                project.paste(block.path, block.text)
            case "sh":
                said = "".join([project.run(line) for line in block.text.splitlines()])
            case "text":
                assert_shown(block.text, said)
            case other:
                pytest.fail(f"nobody runs a block of {other}")


def test_the_modes_are_all_there() -> None:
    rows = PAGE.partition("| mode |")[2].partition("\n\n")[0]

    assert list(MODES) == re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)
