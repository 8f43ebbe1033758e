"""The registry, and the bundled tools as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepengine import tool
from stepengine.data.definition import AgentDefinition
from stepengine.data.tools import ToolLike
from stepengine.errors import DefinitionError, ToolNotAvailable
from stepengine.tools import ToolRegistry
from stepengine.tools.bundled import (
    SafeFetcher,
    SearchedDocs,
    SearxngSearch,
    ask_user_tool,
    control_tools,
    file_tools,
    followup_tools,
    search_tools,
    shell_tools,
    spawn_tools,
    web_tools,
)


@tool(category="read", in_thread=False)
def double(n: int) -> int:
    """Double."""
    return 2 * n


@tool
def other() -> None:
    """Do nothing."""


@pytest.mark.spec("requirements:E21", "requirements:E25")
def test_registry_returns_exactly_the_registered_tools() -> None:
    registry = ToolRegistry()
    assert ((), {}) == (registry.list(), registry.specs())

    registry.register(double)
    registry.register(other)

    assert (double, None) == (registry.get("double"), registry.get("nothing"))
    assert (True, False) == (registry.has("double"), registry.has("nothing"))
    assert {"double": double.spec} == registry.specs(["double"])
    agent = AgentDefinition("a", tools=["other", double])
    assert (other, double) == registry.for_agent(agent)
    with pytest.raises(ToolNotAvailable, match="'nothing' is not available"):
        registry.for_agent(AgentDefinition("a", tools=["nothing"]))
    assert "read" == registry.category("double")
    with pytest.raises(ToolNotAvailable, match="Available tools: double, other"):
        registry.category("nothing")


@pytest.mark.spec("requirements:E21", "reliability:TL20")
def test_a_second_tool_of_the_same_name_needs_replace() -> None:
    registry = ToolRegistry([double])
    impostor = tool(name="double")(lambda: 1)

    with pytest.raises(DefinitionError, match="two tools are named 'double'"):
        registry.register(impostor)
    with pytest.raises(DefinitionError, match="put @tool above"):
        registry.register(lambda: 1)  # type: ignore[arg-type]
    registry.register(double)
    registry.register(impostor, replace=True)
    assert registry.get("double") is impostor


@pytest.mark.spec("generator-contract:G32", "requirements:M5")
async def test_tools_are_executed_without_an_engine_and_never_raise() -> None:
    registry = ToolRegistry([double, *control_tools()])

    assert 8 == (await registry.execute("double", {"n": "4"})).data
    unknown = await registry.execute("treble", {})
    assert ("error", True) == (
        unknown.status,
        unknown.text.startswith("Tool 'treble' is not available. Available tools: double"),
    )
    assert (await registry.execute("double", {})).text.startswith("Invalid parameters for double: n: is required")
    assert (await registry.execute("double", {"n": object()})).is_error
    assert (
        "runs only as part of an agent run; it cannot be executed on its own"
        in (await registry.execute("end_turn", {})).text
    )


def bundled(root: Path) -> list[ToolLike]:
    return [
        *file_tools(root, write=True, propose=True),
        *search_tools(root),
        *control_tools(),
        ask_user_tool(),
        *spawn_tools(),
    ]


@pytest.mark.spec(
    "requirements:F1",
    "generator-contract:S8",
    "generator-contract:G51",
    "generator-contract:T34",
    "generator-contract:T35",
    "requirements:E25",
)
def test_the_bundled_sets_hold_these_tools(tmp_path: Path) -> None:
    def names(tools: list[Any]) -> list[str]:
        return [t.spec.name for t in tools]

    reads, writes = ["read_files", "list_directory", "read_subtree"], ["write_file", "str_replace"]
    assert reads == names(file_tools(tmp_path))
    assert [*reads, *writes] == names(file_tools(tmp_path, write=True))
    assert [*reads, *[f"propose_{n}" for n in writes]] == names(file_tools(tmp_path, propose=True))
    assert ["glob", "code_search", "find_files"] == names(search_tools(tmp_path))
    assert {"set_output", "end_turn", "task_completed", "write_todos", "think_deeply"} == set(names(control_tools()))
    assert ["ask_user", "spawn_agents"] == names([ask_user_tool(), *spawn_tools()])
    assert ["run_terminal_command", "check_job", "kill_job"] == names(shell_tools(tmp_path))
    assert ["suggest_followups"] == names(followup_tools())
    search, fetcher = SearxngSearch("http://localhost:8080"), SafeFetcher(allow="public")
    web = web_tools(search, SearchedDocs(search, fetcher), fetcher)
    assert {"web_search", "read_docs", "read_url"} == set(names(web))


@pytest.mark.spec("requirements:E25", "generator-contract:T25")
def test_handler_only_tools_are_never_offered() -> None:
    assert not {"set_messages", "add_message"} & {t.spec.name for t in control_tools()}


@pytest.mark.spec("requirements:F21", "requirements:E17")
def test_every_bundled_tool_declares_category_and_annotations(tmp_path: Path) -> None:
    specs = {t.spec.name: t.spec for t in bundled(tmp_path)}
    reads = ("read_files", "list_directory", "read_subtree", "glob", "code_search", "find_files")
    writes, proposals = ("write_file", "str_replace"), ("propose_write_file", "propose_str_replace")

    assert all(specs[n].category == "read" and specs[n].annotations.read_only and specs[n].parallel_safe for n in reads)
    assert all(
        specs[n].category == "write" and specs[n].annotations.destructive and not specs[n].parallel_safe for n in writes
    )
    assert all(
        specs[n].category == "read" and specs[n].annotations.read_only and not specs[n].parallel_safe for n in proposals
    )
    assert all(spec.category for spec in specs.values())


@pytest.mark.spec("requirements:E26")
def test_bundled_tools_are_described_with_examples_and_limits(tmp_path: Path) -> None:
    tools = [*bundled(tmp_path), *shell_tools(tmp_path), *followup_tools()]
    words = ("Usage", "Examples", "When not to use", "Notes")
    parameters = [(t.spec.name, name, one) for t in tools for name, one in t.spec.input_schema["properties"].items()]

    assert [] == [(t.spec.name, word) for t in tools for word in words if f"\n{word}:" not in t.spec.description]
    assert [] == [(tool_name, name) for tool_name, name, one in parameters if not one.get("description")]
