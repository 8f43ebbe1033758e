"""
`docs/observability.md` is so: every block of it runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from .pages import Block, blocks_of, execute, page

NAME = "observability.md"
BLOCKS = [block for block in blocks_of(page(NAME)) if block.kind != "text"]


@pytest.mark.spec("requirements:O1", "reliability:GN34", "requirements:O6")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(block.line))
def test_every_block_of_the_page_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "python" == block.kind
    execute(block, NAME)
