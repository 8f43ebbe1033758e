"""Suggestions in messages about unknown names: the nearest first, at most five, with the number of the others."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, ToolCall, tool
from stepengine.data.alike import list_names
from stepengine.engine.handler_sources import SourceWarning
from stepengine.errors import DefinitionError, ToolError
from stepengine.testing import ScriptedModel
from stepengine.workspace.skills import get_skill

NAMES = ["apple", "banana", "cherry", "damson", "elder", "fig", "grape"]


def test_up_to_five_names_are_listed_in_their_order() -> None:
    assert list_names(NAMES[:5], "elder") == "apple, banana, cherry, damson, elder"
    assert list_names(["b", "a"], quoted=True) == "'b', 'a'"
    assert list_names([]) == "none"
    assert list_names([], none="nothing") == "nothing"


@pytest.mark.spec("reliability:GN01")
def test_long_name_lists_start_with_nearest_and_count_the_rest() -> None:
    assert list_names(NAMES, "grap") == "grape, apple, banana, cherry, damson and 2 more"
    assert list_names(NAMES) == "apple, banana, cherry, damson, elder and 2 more"
    assert list_names(NAMES, 7, quoted=True) == "'apple', 'banana', 'cherry', 'damson', 'elder' and 2 more"
    assert list_names([f"n{n}" for n in range(2_000)]).endswith("n4 and 1,995 more")


def _make_tool(name: str) -> Any:
    @tool(name=name)
    def made() -> str:
        """Return a fruit."""
        return name

    return made


@pytest.mark.spec("reliability:GN01")
def test_a_call_of_an_unknown_tool_names_the_nearest_five() -> None:
    def steps(_: Any) -> Generator[Any, Any, None]:
        yield ToolCall("grappe")

    agent = AgentDefinition("a", tools=[_make_tool(name) for name in NAMES], handle_steps=steps, model="test/x")
    with (
        pytest.warns(SourceWarning, match="'grappe' is not available"),
        Engine([agent], models={"test": ScriptedModel([])}) as engine,
    ):
        said = str(engine.run_sync(agent, "go").error)

    assert "Available tools: grape, apple, banana, cherry, damson and 2 more." in said
    assert "Did you mean 'grape'?" in said


@pytest.mark.spec("reliability:GN01")
def test_unknown_tools_and_children_get_the_nearest_five_names() -> None:
    agents = [AgentDefinition(name, model="test/x") for name in NAMES]
    lead = AgentDefinition("lead", model="test/x", tools=["spawn_agents"], spawnable_agents=["grappe"])
    with pytest.raises(DefinitionError, match=r"known agents: .*grape.* and 3 more; did you mean 'grape'"):
        Engine([lead, *agents])
    user = AgentDefinition("user", model="test/x", tools=["grappe"])
    with pytest.raises(DefinitionError, match=r"available: grape, apple, .* and 15 more"):
        Engine([user], tools=[_make_tool(name) for name in NAMES])


@pytest.mark.spec("reliability:GN01")
def test_unknown_skill_error_names_at_most_five(tmp_path: Path) -> None:
    for name in NAMES:
        folder = tmp_path / ".agents" / "skills" / name
        folder.mkdir(parents=True)
        (folder / "SKILL.md").write_text(f"---\nname: {name}\ndescription: About it.\n---\nDo it.\n")

    with pytest.raises(ToolError, match=r"near to it: grape$"):
        get_skill(tmp_path, "grapes", user=False)
    with pytest.raises(ToolError, match="near to it: apple, banana, cherry, damson, elder and 2 more"):
        get_skill(tmp_path, "zzz", user=False)
