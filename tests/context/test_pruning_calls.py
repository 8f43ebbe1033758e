"""What a pruned history keeps of tool calls and their results."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine.context.pruning import describe_call, format_remembered_result
from stepengine.data.messages import JsonPart, ToolCallPart, ToolMessage

LINES: list[tuple[str, dict[str, Any], str]] = [
    ("read_files", {"paths": ["a.py", {"path": "b.py", "offset": 3}]}, "Read a.py, b.py"),
    ("write_file", {"path": "a.py", "content": "x"}, "Wrote a.py"),
    ("str_replace", {"path": "a.py", "replacements": []}, "Edited a.py"),
    ("apply_patch", {"operation": {"type": "update_file", "path": "a.py"}}, "Edited a.py"),
    ("propose_write_file", {"path": "a.py"}, "Proposed to write a.py"),
    ("propose_str_replace", {"path": "a.py"}, "Proposed to edit a.py"),
    ("read_subtree", {"paths": ["src"]}, "Read the tree of src"),
    ("read_subtree", {}, "Read the tree of ."),
    ("code_search", {"pattern": "def f", "flags": "-g *.py"}, "Searched code for def f (-g *.py)"),
    ("code_search", {"pattern": "def f"}, "Searched code for def f"),
    ("glob", {"pattern": "**/*.md"}, "Listed files like **/*.md"),
    ("list_directory", {"path": "src"}, "Listed the directory src"),
    ("find_files", {"prompt": "the tests"}, "Looked for files: the tests"),
    ("run_terminal_command", {"command": "make " + "x" * 60}, "Ran make " + "x" * 44 + "…"),
    ("run_terminal_command", {"command": ["git", "status"]}, "Ran git status"),
    ("read_url", {"url": "https://example.org"}, "Read https://example.org"),
    ("web_search", {"query": "bananas"}, "Searched the web for bananas"),
    ("read_docs", {"library_title": "attrs", "topic": "slots"}, "Read docs: attrs - slots"),
    (
        "write_todos",
        {"todos": [{"task": "a", "completed": True}, {"task": "b", "completed": False}, {"task": "c"}]},
        "Todos: 1 of 3 done; left: b; c",
    ),
    ("ask_user", {"questions": [{"question": "Which?" + "?" * 300}]}, "Asked the user: Which?" + "?" * 193 + "…"),
    (
        "spawn_agents",
        {"agents": [{"agent_type": "a", "prompt": "p" * 2_000, "params": {"n": 1}}, {"agent_type": "b"}]},
        "Delegated to a (" + "p" * 999 + '…; {"n":1}), b',
    ),
    ("spawn_agent_inline", {"agent_type": "a", "prompt": "go"}, "Delegated to a (go)"),
    ("task", {"agent": "a", "prompt": "go"}, "Delegated to a (go)"),
    ("file_picker", {"prompt": "go", "params": {"n": 1}}, 'Delegated to file-picker (go; {"n":1})'),
    ("set_output", {"data": 1}, "Set the output"),
    ("set_messages", {"messages": []}, "Changed the messages"),
    ("my_tool", {"any": "thing"}, "my_tool"),
]


@pytest.mark.spec("generator-contract:P15")
@pytest.mark.parametrize(("name", "given", "line"), LINES, ids=[f"{name} {n}" for n, (name, _, _) in enumerate(LINES)])
def test_call_is_described_in_one_line(name: str, given: dict[str, Any], line: str) -> None:
    assert f"- {line}" == describe_call(ToolCallPart("c1", name, given))
    odd: dict[str, Any] = dict.fromkeys(given, 7)
    for inputs in ({}, odd, dict.fromkeys(given), {key: [7, "a\nb", None] for key in given}):
        assert "\n" not in describe_call(ToolCallPart("c1", name, inputs))


CHILDREN = [
    {"agent_type": "helper", "status": "completed", "output": "<think>hush</think>found " + "x" * 9_000},
    {"agent_type": "basher", "status": "completed", "output": "tests pass"},
    {"agent_type": "thinker", "error": "fell over " * 50},
]
RESULTS: list[tuple[str, Any, str, str]] = [
    ("look", "a lot of text", "ok", ""),
    ("look", "e" * 200, "error", "Error: " + "e" * 99 + "…"),
    ("look", {"error_message": "gone"}, "ok", "Error: gone"),
    ("run_terminal_command", {"stdout": "long", "exit_code": 0}, "ok", ""),
    ("run_terminal_command", {"stdout": "long", "exit_code": 2}, "ok", "Exit code 2"),
    ("ask_user", {"answers": [{"selected": ["a", "b"]}, {"text": "c"}]}, "ok", "The user answered: a, b; c"),
    ("ask_user", {"skipped": True}, "ok", "The user skipped the question."),
    ("str_replace", {"file": "a.py", "diff": "d" * 3_000}, "ok", '{"diff":"' + "d" * 1_990 + "…"),
    ("spawn_agents", CHILDREN, "ok", "helper: found"),
    ("spawn_agents", "no such agent", "error", "Error: no such agent"),
    ("run_terminal_command", {"command": "make", "stdout": "long", "exit_code": 2}, "error", "Exit code 2"),
    ("thinker", CHILDREN[1:], "ok", "thinker failed: " + ("fell over " * 50)[:99] + "…"),
    ("thinker_deep", "<think>hm</think>forty-two", "ok", "thinker-deep: forty-two"),
    ("thinker_deep", "no", "error", "Error: no"),
    ("code_reviewer", "looks good", "ok", ""),
    ("task", "forty-two", "ok", "helper: forty-two"),
]
GIVEN: dict[str, dict[str, Any]] = {
    "thinker_deep": {"prompt": "Think."},
    "code_reviewer": {"prompt": "Review.", "params": {"deep": True}},
    "task": {"agent": "helper", "prompt": "Think."},
}


@pytest.mark.spec("generator-contract:P18")
@pytest.mark.parametrize(
    ("name", "value", "status", "kept"), RESULTS, ids=[f"{r[0]} {n}" for n, r in enumerate(RESULTS)]
)
def test_only_relevant_parts_of_results_are_kept(name: str, value: Any, status: Any, kept: str) -> None:
    content = value if isinstance(value, str) else (JsonPart(value),)
    call = ToolCallPart("c1", name, GIVEN.get(name, {}))
    said = format_remembered_result(
        ToolMessage("c1", name, content, status),
        call,
        frozenset({"basher", "file-picker", "code-reviewer", "librarian"}),
    )

    if value is CHILDREN:
        assert said.startswith("[spawn_agents result]\nhelper: found xxx")
        assert len(said) < 1_300 * 3 + 200
        assert "thinker failed: fell over" in said
        assert "basher" not in said
        assert "hush" not in said
    elif name == "str_replace":
        assert said.endswith("…")
        assert 2_000 == len(said.removeprefix("[str_replace result]\n"))
    else:
        assert said == (f"[{name} result]\n{kept}" if kept else "")
    assert len(said) <= 5_000 * 3 + 100
