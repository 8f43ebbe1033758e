"""
`docs/extending.md` is so: each of its blocks runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import blocks_of, execute, page


@pytest.mark.leaks_allowed("the workers of programs belong to the process, and wait for its next program")
def test_every_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks_of(page("extending.md")):
        execute(block, "extending.md", names)
    assert names
