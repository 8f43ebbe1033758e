"""
`docs/leading-other-agents.md` is so: its program makes an engine, and its table has the calls that there are.
"""

from __future__ import annotations

import re
from typing import Any

from .pages import blocks_of, execute, page

NAME = "leading-other-agents.md"
PROGRAM, BOXED, REMOTE = [block for block in blocks_of(page(NAME)) if block.kind == "python"]


def test_tools_and_categories_of_the_engine_match_the_table() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    execute(PROGRAM, NAME, names)
    made = {tool.spec.name: tool.spec.category for tool in names["claude"].tools if tool.spec.name != "claude"}
    table = dict(re.findall(r'\| `(claude_\w+)` \| `"(\w*)"` \|', page(NAME)))

    assert ["claude", "gemini"] == list(names["lead"].spawnable_ids)
    assert made == table


def test_the_second_program_leads_an_agent_of_another_server() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in (PROGRAM, REMOTE):
        execute(block, NAME, names)
    kinds = {tool.spec.name for tool in names["reviewer"].tools}

    assert ["claude", "reviewer"] == list(names["lead"].spawnable_ids)
    assert {"reviewer", "reviewer_edit", "reviewer_execute"} <= kinds


def test_the_container_example_makes_an_agent() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in (PROGRAM, BOXED):
        execute(block, NAME, names)

    assert "boxed" == names["boxed"].id
