"""
The rows of the specification about MCP servers, and the tests that hold them.
"""

from __future__ import annotations

from pathlib import Path

from tests.spec_rows import holders, known


def test_every_row_about_mcp_servers_is_held_by_a_test() -> None:
    rows = {row for row in known() if row.startswith("reliability:MC")}

    assert rows <= holders("tests/adapters/mcp").keys()


def test_ci_installs_the_supported_npm_packages() -> None:
    from .peers import NPM

    script = (Path(__file__).resolve().parents[3] / ".ci" / "deep").read_text(encoding="utf-8")

    assert [] == [package for name, version in NPM.items() if f'"{(package := f"{name}@{version}")}"' not in script]
