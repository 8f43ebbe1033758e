"""
Every bundled agent in a world where things go wrong: the invariants of runs hold, and no handler lets out an error of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import load_agents
from stepengine.testing import simulate

from .common import tools_of

BUNDLED = {agent.id: agent for agent in load_agents(Path(__file__).resolve().parents[2] / "agents")}
DIFF = "--- a/a.py\n+++ b/a.py\n"
RESULTS: dict[str, Any] = {
    "read_files": [{"path": "a.py", "content": "x = 1\n", "has_more": False, "hash": "1"}],
    "code_search": {"stdout": "Found 0 matches", "message": "Found 0 matches"},
    "list_directory": {"path": ".", "files": [], "directories": []},
    "glob": {"files": [], "count": 0, "message": "Found 0 files"},
    "run_terminal_command": {"command": "x", "exit_code": 0, "stdout": "y" * 3_000, "truncated": False},
    "str_replace": {"file": "a.py", "message": "Changed a.py.", "unified_diff": DIFF},
    "write_file": {"file": "a.py", "message": "Created a.py."},
    "propose_str_replace": {"file": "a.py", "message": "Proposed.", "unified_diff": DIFF},
    "propose_write_file": {"file": "a.py", "message": "Proposed.", "unified_diff": DIFF},
}
PARAMS: dict[str, Any] = {
    "basher": {"command": "x", "what_to_summarize": "y"},
    "best-of-n-selector": {"implementations": [{"id": "A", "content": DIFF}]},
    "code-reviewer-multi-prompt": {"prompts": ["a", "b"]},
    "code-searcher": {"search_queries": [{"pattern": "a"}, {"pattern": "b"}]},
    "directory-lister": {"directories": [{"path": "."}, {"path": "a"}]},
    "editor": {"files": ["a.py"]},
    "editor-multi-prompt": {"prompts": ["a", "b"]},
    "glob-matcher": {"patterns": [{"pattern": "a"}, {"pattern": "b"}]},
    "thinker-selector": {"thoughts": [{"id": "A", "content": "a"}]},
}


@pytest.mark.spec("generator-contract:B34")
@pytest.mark.parametrize("agent_id", BUNDLED)
def test_nothing_that_goes_wrong_around_an_agent_breaks_it(agent_id: str, tmp_path: Path) -> None:
    simulate(BUNDLED[agent_id], range(20), params=PARAMS.get(agent_id), tools=tools_of(tmp_path), results=RESULTS)
