"""
`docs/repositories.md` is so: its Python runs, and its numbers are those of the code.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from stepengine.tools.bundled import memory
from stepengine.workspace import repository, skills

from .pages import follow, page

PAGE = " ".join(page("repositories.md").split())


@pytest.mark.spec("requirements:X60", "interfaces:IF88")
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    follow("repositories.md", tmp_path)


def test_the_numbers_are_those_of_the_code() -> None:
    kib = 1024
    said = {
        f"Each file is cut at {repository.FILE_BYTES // kib} KiB and all files together at {repository.ALL_BYTES // kib} KiB",
        f"at most {repository.DEEPER_FILES} paths",
        f"at most {repository.CHANGED_FILES} changed files",
        f"Front matter over {skills.HEAD_BYTES // kib} KiB",
        f"{memory.NOTE_CHARS:,} characters a note, {memory.MAX_NOTES} notes and {memory.FILE_BYTES // kib} KiB a file",
        ", ".join([f"`{place}`" for place in skills.PLACES]),
        f"a whole word or tag scores {memory.WHOLE_WEIGHT}, a prefix {memory.PREFIX}",
    }

    assert set() == {words for words in said if words not in PAGE}
