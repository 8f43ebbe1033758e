"""
``code-searcher``: searches without a model (generator-contract B24).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import Engine, load_agent
from stepengine.testing import ScriptedModel
from stepengine.tools.bundled import search_tools


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("import os\n\n\ndef Handle():\n    return os\n")
    (tmp_path / "b.txt").write_text("handle with care\nhandle again\nhandle once more\n")
    return tmp_path


def search(folder: Path, *queries: dict[str, Any]) -> Any:
    model = ScriptedModel([])
    with Engine([load_agent("code_searcher")], search_tools(folder), model) as engine:
        result = engine.run_sync("code-searcher", params={"search_queries": list(queries)})
    assert [] == model.calls
    return result


@pytest.mark.spec("generator-contract:B24")
def test_every_query_runs_in_turn_without_a_model(project: Path) -> None:
    result = search(
        project,
        {"pattern": "handle", "flags": "-i"},
        {"pattern": "handle", "cwd": "src"},
        {"pattern": "handle", "max_results": 1},
    )
    everywhere, in_src, capped = result.unwrap().results

    assert "a.py" in everywhere["stdout"]
    assert "b.txt" in everywhere["stdout"]
    assert "Line 4: def Handle" in everywhere["stdout"]
    assert "a.py" not in in_src["stdout"]
    assert 1 == capped["stdout"].count("Line ")
    assert ["code_search"] * 3 == [call.tool_name for call in result.tool_calls]
    assert 3 == sum(len(m.tool_calls) for m in result.state.message_history if m.role == "assistant")
    assert 0 == result.usage.requests


def test_a_failed_query_returns_its_error_in_place(project: Path) -> None:
    broken, fine = search(project, {"pattern": "("}, {"pattern": "import"}).unwrap().results

    assert broken["error"]
    assert "a.py" in fine["stdout"]
