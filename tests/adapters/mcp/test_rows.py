"""
The rows of the specification about MCP servers, and the tests that hold them.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.spec_rows import known

ROW = re.compile(r'"reliability:(MC\d\d)"')


def test_every_row_about_mcp_servers_is_held_by_a_test() -> None:
    rows = {row.partition(":")[2] for row in known() if row.startswith("reliability:MC")}
    held: dict[str, int] = {}
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        for row in ROW.findall(file.read_text(encoding="utf-8")):
            held[row] = held.get(row, 0) + 1
    print(f"{len(rows & held.keys())} of {len(rows)} rows MC are held by {sum(held.values())} citations: {held}")

    assert rows == held.keys()


def test_continuous_integration_brings_the_programs_of_others_that_are_named_as_supported() -> None:
    from .peers import NPM

    script = (Path(__file__).resolve().parents[3] / ".ci" / "deep").read_text(encoding="utf-8")

    assert [] == [package for name, version in NPM.items() if f'"{(package := f"{name}@{version}")}"' not in script]
