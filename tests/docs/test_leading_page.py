"""
`docs/leading-other-agents.md` is so: its program makes an engine, and its table has the calls that there are.
"""

from __future__ import annotations

import re
from typing import Any

from .pages import blocks_of, execute, page

NAME = "leading-other-agents.md"
(PROGRAM,) = [block for block in blocks_of(page(NAME)) if block.kind == "python"]


def test_the_program_of_the_page_makes_an_engine_whose_calls_and_categories_the_table_has() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    execute(PROGRAM, NAME, names)
    made = {tool.spec.name: tool.spec.category for tool in names["claude"].tools if tool.spec.name != "claude"}
    table = dict(re.findall(r'\| `(claude_\w+)` \| `"(\w*)"` \|', page(NAME)))

    assert ["claude", "gemini"] == list(names["lead"].spawnable_ids)
    assert made == table
