"""
Every bundled agent in worlds where things go wrong: nothing that must hold for a run is broken, and no handler stumbles.
"""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from stepengine import load_agents
from stepengine.data.state import RunStatus
from stepengine.testing import simulate, text, tool_call, tool_calls
from stepengine.testing.world import draw_model_reply
from stepengine.tools.bundled import file_tools, followup_tools, search_tools, shell_tools


def brief(request, random):
    """
    Return a short reply, so that an orchestrator and all its children come to an end soon.
    """
    reply = draw_model_reply(request, random)
    return attrs.evolve(reply, content=reply.content[:1]) if random.random() < 0.6 else "fine"


CONTENT = [{"path": "a.py", "content": "x = 1\n", "has_more": False, "hash": "h"}]
CHANGED = {"path": "a.py", "message": "ok", "unified_diff": "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"}
RESULTS = {
    "read_files": CONTENT,
    "read_subtree": "a.py\nb.py",
    "list_directory": {"files": ["a.py"], "directories": []},
    "glob": {"files": ["a.py"], "count": 1},
    "code_search": {"files": []},
    "str_replace": CHANGED,
    "write_file": CHANGED,
    "propose_str_replace": CHANGED,
    "propose_write_file": CHANGED,
    "stepengine.workspace.repository.read_project": {
        **{key: [] for key in ("instructions", "deeper", "skills", "warnings")},
        "facts": {"platform": "linux"},
    },
    "stepengine.adapters.mcp.source.McpTools.listing": {"tools": [], "prompts": [], "left_out": []},
    "run_terminal_command": {"command": "ls", "exit_code": 0, "stdout": "a.py\n" * 2_000},
}
CASE = {"spent": "0.01", "stopped": "", "cost": "0.01", "journal": "a.jsonl", "served": 0}
RESULTS |= {
    "run_case": {**CASE, "score": 0.5, "problem": "", "said": ["wrong"], "did": "It said x.", "steps": 2},
    "blame_case": {**CASE, "step": 1, "why": "it guessed"},
}
RESULTS |= {
    "read_rules": "An agent file defines an agent.",
    "check_draft": {"problem": "", "id": "greeter", "permissions": []},
    "try_draft": {"problem": "", "output": "hello", "calls": []},
    "walk_draft": {"problem": "", "worlds": 100},
}
DRAFT = {"source": "agent = 1", "why": "x", "example_prompt": "hi", "example_replies": [], "example_results": {}}
EDIT = {"path": "a.py", "replacements": [{"old_string": "1", "new_string": "2"}]}
SETTINGS = {
    **{f"base2{variant}": {"replies": brief} for variant in ("", "-fast", "-lite", "-max", "-plan")},
    "agent-builder": {"replies": [tool_call("draft_agent", DRAFT)] * 20},
    "basher": {"params": {"command": "ls", "what_to_summarize": "the files"}},
    "best-of-n-selector": {"params": {"implementations": [{"id": "A", "content": "x"}]}},
    "improver": {
        "params": {"parts": {"system_prompt": "Help."}, "search": ["a", "b"], "held_out": ["c"], "budget": "1"},
        "replies": [tool_call("change", {"part": "system_prompt", "value": "Help well.", "why": "x"})] * 200,
    },
    "librarian": {
        "params": {"repo_url": "https://git.example/shop.git"},
        "replies": [
            tool_call("list_directory", {"path": "."}),
            tool_call("set_output", {"answer": "x", "relevant_files": [], "clone_dir": "."}),
            text("ok"),
        ],
    },
    "code-reviewer-multi-prompt": {"params": {"prompts": ["Is it right?", "Is it simple?"]}},
    "code-searcher": {"params": {"search_queries": [{"pattern": "x"}, {"pattern": "y"}]}},
    "directory-lister": {"params": {"directories": [{"path": "."}, {"path": "src"}]}},
    "editor": {
        "params": {"files": ["a.py"]},
        "replies": [
            tool_calls(tool_call("str_replace", EDIT), tool_call("read_files", {"paths": ["a.py"]})),
            text("ok"),
        ],
    },
    "editor-multi-prompt": {"params": {"prompts": ["raise", "count"]}, "replies": brief},
    "glob-matcher": {"params": {"patterns": [{"pattern": "*.py"}, {"pattern": "*.md", "cwd": "docs"}]}},
    "thinker-selector": {"params": {"thoughts": [{"id": "A", "content": "x"}]}},
}
"""
What an agent needs beside a prompt.
"""

AGENTS = {agent.id: agent for agent in load_agents(Path(__file__).resolve().parents[2] / "agents")}


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    return [
        *file_tools(folder, write=True, propose=True),
        *search_tools(folder),
        *shell_tools(folder),
        *followup_tools(),
    ]


@pytest.mark.deep
@pytest.mark.spec("requirements:Q10")
@pytest.mark.parametrize("name", AGENTS)
def test_a_bundled_agent_holds_in_500_worlds(name, tools):
    seen = simulate(AGENTS[name], range(500), tools=tools, results=RESULTS, **SETTINGS.get(name, {}))

    assert 500 == seen.runs
    assert seen.statuses[RunStatus.COMPLETED] > 250
