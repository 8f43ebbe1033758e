"""
`docs/observability.md` is so: every block of it runs.
"""

from __future__ import annotations

import pytest

from .pages import Block, blocks_of, execute, page

NAME = "observability.md"
BLOCKS = [block for block in blocks_of(page(NAME)) if block.kind != "text"]


@pytest.mark.spec("requirements:D15", "requirements:O1", "requirements:O5", "requirements:O6")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: str(block.line))
def test_every_block_of_the_page_runs(block: Block) -> None:
    assert "python" == block.kind
    execute(block, NAME)
