"""Bundled tools that are made when they are first used."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, Hooks, ToolCall
from stepengine.data.tools import LateBindings, ToolLike, made_bindings
from stepengine.errors import DefinitionError
from stepengine.permissions import Policy, Rule
from stepengine.testing import ScriptedModel, tool_call
from stepengine.tooling.definition import LateTool, Tool, bindings_of, late_tools, name_of
from stepengine.tools import file_tools, followup_tools, recall_history_tool, search_tools, tool

SETS: dict[str, Callable[[Path], list[Tool]]] = {
    "files": lambda root: file_tools(root, write=True, delete=True, propose=True),
    "files that are read": file_tools,
    "searches": search_tools,
    "followups": lambda root: followup_tools(),
    "history": lambda root: [recall_history_tool()],
}


@pytest.mark.parametrize("which", SETS)
def test_each_tool_is_called_what_it_was_said_to_be(which: str, tmp_path: Path) -> None:
    tools = SETS[which](tmp_path)
    names = [name_of(one) for one in tools]
    assert all(type(one) is LateTool for one in tools)

    assert names == [one.spec.name for one in tools]
    assert all(type(one) is Tool for one in tools)


USES: dict[str, Callable[[Tool], object]] = {
    "spec": lambda one: one.spec.name,
    "binding": lambda one: one.binding().spec.name,
    "function": lambda one: one.fn.__name__,
    "arguments": lambda one: one.arguments(["a.txt"]) and "read_files",
    "protocol": lambda one: isinstance(one, ToolLike) and "read_files",
    "attribute": lambda one: one.runs_inline or "read_files",
    "copy": lambda one: copy(one).spec.name,
    "deep copy": lambda one: deepcopy(one.spec).name,
}


@pytest.mark.parametrize("use", USES)
def test_whatever_is_asked_for_makes_it_and_it_stays_the_same_tool(use: str, tmp_path: Path) -> None:
    late, *_ = file_tools(tmp_path)
    folder = late.folder

    assert "read_files" == USES[use](late)
    assert late.folder == folder
    assert "Tool('read_files')" == repr(late)
    assert late.binding() is late.binding()


def test_what_no_tool_has_makes_none(tmp_path: Path) -> None:
    late, *_ = file_tools(tmp_path)

    assert not hasattr(late, "open")
    with pytest.raises(AttributeError, match="has no attribute 'opne'"):
        _ = late.opne  # type: ignore[attr-defined]
    assert type(late) is LateTool


def test_what_makes_a_tool_may_give_one_that_is_late_itself() -> None:
    (late,) = late_tools(["suggest_followups"], followup_tools)

    assert "suggest_followups" == late.spec.name
    assert type(late) is Tool
    assert "control" == late.binding().spec.category


def test_threads_may_need_a_tool_first_at_the_same_time() -> None:
    def make() -> list[Tool]:
        @tool
        def early(word: str) -> str:
            """Say it."""
            return word

        return [early]

    for _ in range(20):
        (late,) = late_tools(["early"], make)
        with ThreadPoolExecutor(8) as pool:
            bindings = list(pool.map(lambda one: one.binding(), [late] * 8))
        assert {"early"} == {each.spec.name for each in bindings}


def test_bindings_stand_in_the_order_of_their_tools_whichever_is_made_first(tmp_path: Path) -> None:
    @tool
    def own(word: str) -> str:
        """Say it."""
        return word

    first, second, *_ = file_tools(tmp_path)
    found = bindings_of({"read_files": first, "own": own, "list_directory": second})

    assert isinstance(found, LateBindings)
    assert ["own"] == [name for name, _ in made_bindings(found)]
    assert "list_directory" in found
    assert "list_directory" == found["list_directory"].spec.name
    assert ["read_files", "own", "list_directory"] == [*found] == list(found.keys())
    assert {"own", "list_directory"} == {name for name, _ in made_bindings(found)}
    assert found.get("absent") is None
    with pytest.raises(KeyError, match="absent"):
        found["absent"]
    copied = found.copy()
    copied["more"] = own.binding()
    assert 3 == len(found)
    assert ["read_files", "own", "list_directory", "more"] == [name for name, _ in copied.items()]
    assert 4 == len({**copied}) == len(list(copied.values()))


@pytest.mark.spec("performance:Q13")
def test_an_engine_makes_the_tools_that_its_agents_offer_and_a_handler_may_call_any(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello.")
    tools = [*file_tools(tmp_path), *search_tools(tmp_path)]
    by_name = {name_of(one): one for one in tools}

    def handle_steps(ctx: Any) -> Any:
        found = yield ToolCall("glob", {"pattern": "*.txt"}, include_tool_call=False)
        return str(found.tool_results)

    agent = AgentDefinition("calling", handle_steps=handle_steps, tools=["read_subtree"])
    with Engine([agent], tools, hooks=Hooks(pre_run=lambda ctx: None)) as engine:
        assert {"read_subtree"} == {name for name, one in by_name.items() if type(one) is Tool}

        result = engine.run_sync(agent)
        assert "a.txt" in result.output
        assert type(by_name["read_files"]) is LateTool


def test_a_policy_knows_what_a_late_tool_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello.")
    agent = AgentDefinition("reading", model="test/m", tools=["read_files", "write_file"])
    model = ScriptedModel(
        [
            tool_call("read_files", {"paths": ["a.txt"]}),
            tool_call("write_file", {"path": "a.txt", "content": "Bye."}),
            "Done.",
        ]
    )
    policy = Policy([Rule.allow_category("read"), Rule.deny_category("write")])
    with Engine([agent], file_tools(tmp_path, write=True), model, permissions=policy) as engine:
        result = engine.run_sync(agent, "Go.")

    read, wrote = [message for message in result.state.message_history if message.role == "tool"]
    assert ("ok", "denied") == (read.status, wrote.status)
    assert "Hello." == (tmp_path / "a.txt").read_text()


def test_a_root_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    for made in (file_tools, search_tools):
        with pytest.raises(DefinitionError, match="cannot be opened as a folder"):
            made(tmp_path / "absent")
