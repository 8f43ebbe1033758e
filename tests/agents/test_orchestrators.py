"""
The ``base2`` family, ``coder`` and ``planner`` (generator-contract B1 to B6, B9; requirements Q8).
"""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import pytest

from stepengine import (
    AgentState,
    AssistantMessage,
    UserMessage,
    load_agent,
    load_agents,
)
from stepengine.testing import tool_call, tool_calls

from .common import called, replace, run

ROOT = Path(__file__).resolve().parents[2]
BUNDLED = {agent.id: agent for agent in load_agents(ROOT / "agents")}
LOOKING = ("file-picker", "code-searcher", "directory-lister", "glob-matcher")
EDITS = {"str_replace", "write_file"}
FAMILY: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "base2": (
        ("thinker", "editor", "code-reviewer", "basher"),
        {*EDITS, "write_todos", "ask_user", "suggest_followups"},
    ),
    "base2-lite": (("thinker", "code-reviewer", "basher"), {*EDITS, "write_todos", "ask_user"}),
    "base2-fast": (("basher",), EDITS),
    "base2-max": (
        ("thinker-best-of-n", "editor-multi-prompt", "code-reviewer-multi-prompt", "basher"),
        {"write_todos", "ask_user", "suggest_followups", "propose_str_replace", "propose_write_file", "set_output"},
    ),
    "base2-plan": (("thinker",), {"ask_user"}),
}


def checked(*command: str) -> Any:
    """
    Return a reply that runs a command with ``basher``.
    """
    return tool_call("spawn_agents", {"agents": [{"agent_type": "basher", "params": {"command": list(command)}}]})


LISTING = checked("ls")
FREE = replace("str_replace", "shop.py", "sum(order)", "0")
DIFFERENT = ("editor", "thinker", "basher", "code-reviewer")


@pytest.mark.spec("generator-contract:B2", "generator-contract:B6")
@pytest.mark.parametrize("agent_id", FAMILY)
def test_the_base2_family_differs_only_in_helpers_and_tools(agent_id: str) -> None:
    helpers, tools = FAMILY[agent_id]
    agent = BUNDLED[agent_id]

    assert (*LOOKING, *helpers) == agent.spawnable_ids
    core = {"spawn_agents", "read_files", "read_subtree", "list_directory", "glob", "skill"}
    assert core | tools == set(agent.tool_names)
    assert agent.include_message_history
    assert agent.handle_steps is BUNDLED["base2"].handle_steps
    assert "" == agent.step_prompt
    for helper in DIFFERENT:
        if helper not in helpers:
            assert f" {helper} " not in agent.instructions_prompt, helper


@pytest.mark.spec("requirements:Q10")
def test_every_required_agent_exists_and_matches_its_file_name() -> None:
    asked = """
        base2 base2-lite base2-max base2-fast base2-plan editor editor-multi-prompt editor-implementor best-of-n-selector
        thinker thinker-best-of-n thinker-selector file-picker file-lister code-searcher directory-lister glob-matcher
        researcher-web researcher-docs basher code-reviewer code-reviewer-multi-prompt planner coder context-pruner
        librarian browser-use improver agent-builder
    """
    files = {file.stem.replace("_", "-") for file in (ROOT / "agents").glob("[!_]*.py")}

    assert set(asked.split()) == set(BUNDLED) == files
    assert all(load_agent(agent_id) is agent for agent_id, agent in BUNDLED.items())
    assert all(agent.description and agent.model is None for agent in BUNDLED.values())


@pytest.mark.spec("requirements:Q10")
@pytest.mark.parametrize("file", sorted((ROOT / "agents").glob("*.py")), ids=lambda f: f.stem)
def test_agent_files_use_public_names_only(file: Path) -> None:
    """
    They import the front door, its public submodules, pydantic, the standard library, and each other.
    """
    modules = (
        "adapters.mcp",
        "context",
        "drafts",
        "errors",
        "evaluation",
        "permissions",
        "sandbox",
        "testing",
        "tools",
        "tools.bundled",
    )
    public = {"stepengine", *(f"stepengine.{module}" for module in modules)}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            root = str(node.module).partition(".")[0]
            assert node.module in public or root == "pydantic" or root in sys.stdlib_module_names, node.module
            if node.module in public:
                assert {alias.name for alias in node.names} <= set(import_module(node.module).__all__)


@pytest.mark.spec("generator-contract:B1", "requirements:F20")
def test_base2_reminds_its_model_of_open_todos_once(project: Path) -> None:
    todos = [{"task": "Write it", "completed": False}]
    replies = [tool_call("write_todos", {"todos": todos}), "I am done.", "It stays open: nobody knows how."]
    result, model = run("base2", project, replies, "Write it.")

    assert "It stays open: nobody knows how.\n\nStill open: Write it" == result.output
    assert "- Write it" in model.calls[2].messages[-1].text


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B1")
def test_an_unchecked_edit_is_sent_back_once_by_the_handler(project: Path) -> None:
    """
    The model forgets; taken away, nobody notices.
    """
    result, model = run("base2-fast", project, [FREE, "Done.", LISTING, "Done, and checked."], "Make it free.")
    (project / "shop.py").write_text("def total(order):\n    return sum(order)\n")
    without = attrs.evolve(BUNDLED["base2-fast"], handle_steps=None)
    careless, _ = run(without, project, [FREE, "Done."], "Make it free.")

    assert "nothing was checked since" in model.calls[2].messages[-1].text
    assert "Done, and checked." == result.output
    assert "Done." == careless.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B1")
def test_the_summary_names_failed_and_missing_checks(project: Path) -> None:
    """
    A check that failed, one that ran before the last edit or beside it, and a check that passed later.
    """
    (failing, passing) = checked("ls", "nowhere"), checked("ls", "docs")
    again = replace("str_replace", "shop.py", "return 0", "return 1")
    failed, _ = run("base2-fast", project, [FREE, failing, "All is well."], "Make it free.")
    stale, _ = run("base2-fast", project, [passing, again, "All is well.", "It is."], "Make it dear.")
    write = tool_call("write_file", {"path": "nowhere", "content": "x"})
    repaired, _ = run("base2-fast", project, [again, failing, write, failing, "All is well."], "Repair it.")
    later = [again, checked("ls", "made"), checked("mkdir", "made"), checked("ls", "made"), "All is well."]
    passed, _ = run(
        "base2-fast", project, [replace("str_replace", "shop.py", "return 1", "return 0"), *later], "Repair it."
    )
    looked, _ = run("base2-fast", project, ["It costs one."], "What does it cost?", previous=stale.state)

    assert "All is well.\n\nFailed: ls nowhere (exit code 2)" == failed.output
    assert "It is.\n\nNot checked: files were edited after the last check." == stale.output
    assert "All is well." == repaired.output
    assert "All is well." == passed.output
    assert "It costs one." == looked.output


@pytest.mark.spec("generator-contract:B1")
def test_a_check_with_a_summarized_output_counts(project: Path) -> None:
    params = {"command": ["seq", "2000"], "what_to_summarize": "the last number"}
    summed = tool_call("spawn_agents", {"agents": [{"agent_type": "basher", "params": params}]})
    result, _ = run("base2-fast", project, [FREE, summed, "It is 2000.", "All is well."], "Make it free.")

    assert "All is well." == result.output


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("generator-contract:B1")
def test_an_edit_by_a_helper_needs_a_later_check(project: Path) -> None:
    both = [{"agent_type": "editor", "prompt": "Free!"}, {"agent_type": "basher", "params": {"command": ["ls"]}}]
    replies = [tool_call("spawn_agents", {"agents": both}), FREE, "Edited.", "Done.", LISTING, "Done, and checked."]
    result, model = run("base2", project, replies, "Make it free.")

    assert "Done, and checked." == result.output
    assert "nothing was checked since" in model.calls[4].messages[-1].text


@pytest.mark.spec("requirements:X60")
def test_base2_sees_project_instructions_and_skills(project: Path) -> None:
    (project / "AGENTS.md").write_text("Use tabs.")
    (project / ".agents" / "skills" / "notes").mkdir(parents=True)
    (project / ".agents" / "skills" / "notes" / "SKILL.md").write_text(
        "---\nname: notes\ndescription: For notes.\n---\n"
    )
    _, model = run("base2", project, ["Done."], "Go on.")

    assert "Use tabs." in model.calls[0].system_prompt
    assert "- notes: For notes." in model.calls[0].system_prompt


@pytest.mark.spec("generator-contract:B1", "generator-contract:P32")
def test_base2_prunes_the_view_and_keeps_the_record(project: Path) -> None:
    words = "apples and bread " * 5_000
    history = [m for n in range(5) for m in (UserMessage(f"Question {n}?"), AssistantMessage(words))]
    result, model = run("base2", project, ["Done."], "Go on.", previous=AgentState.from_messages(history))
    shown = model.calls[0].messages

    assert "Go on." in [m.text for m in shown]
    assert 12 == len(result.state.message_history) - 1
    assert len(shown) < 5
    assert "Question 4?" in shown[0].text


@pytest.mark.spec("generator-contract:B9")
def test_the_coder_works_alone_with_every_kind_of_tool(project: Path) -> None:
    todos = [{"task": "Make it free", "completed": True}]
    replies = [
        tool_calls(
            tool_call("find_files", {"prompt": "total of an order"}), tool_call("read_files", {"paths": ["shop.py"]})
        ),
        replace("str_replace", "shop.py", "sum(order)", "0"),
        tool_calls(
            tool_call("run_terminal_command", {"command": ["cat", "shop.py"]}),
            tool_call("write_todos", {"todos": todos}),
        ),
        "It costs nothing now.",
    ]
    result, model = run("coder", project, replies, "Make it free.")

    assert "It costs nothing now." == result.output
    assert ["find_files", "read_files", "str_replace", "run_terminal_command", "write_todos"] == called(result)
    assert "return 0" in [m for m in model.calls[3].messages if m.role == "tool"][-2].text
    assert () == BUNDLED["coder"].spawnable_ids
    assert BUNDLED["coder"].handle_steps is None
    assert "# Constraints" in model.calls[0].system_prompt
