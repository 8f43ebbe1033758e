"""
`docs/models.md` is so: its blocks run, one after the other.
"""

from __future__ import annotations

import pytest

from .pages import blocks_of, execute, page

NAME = "models.md"


@pytest.mark.spec("requirements:A15", "requirements:G12")
def test_every_block_of_the_page_runs_after_those_before_it() -> None:
    names: dict[str, object] = {"__name__": "page"}
    blocks = blocks_of(page(NAME))
    assert len(blocks) == 10
    for block in blocks:
        assert "python" == block.kind
        execute(block, NAME, names)
