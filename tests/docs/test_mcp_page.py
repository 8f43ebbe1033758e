"""
`docs/mcp.md` is so: its Python runs, and what it says of options is what `mcp_tools` takes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from stepengine.adapters.mcp import mcp_tools

from .pages import follow, page

PAGE = page("mcp.md")


@pytest.mark.deep
@pytest.mark.spec("requirements:P13")
def test_every_block_of_the_page_runs_with_its_shown_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))

    follow("mcp.md", tmp_path)


def test_exactly_the_options_of_mcp_tools_are_documented() -> None:
    known = set(inspect.signature(mcp_tools).parameters) - {"server", "name"}
    told = set(re.findall(r"`(?:mcp_tools\(\.\.\., )?(\w+)=", PAGE)) | set(re.findall(r"`(timeout)`", PAGE))

    assert told <= known | {"defer_loading", "tools"}
    assert known - told <= {"start_timeout", "protocol"}
