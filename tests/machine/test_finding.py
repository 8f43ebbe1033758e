"""Tools that a model is not shown: what is offered for them, what a search finds, and what is said of a wrong name."""

from __future__ import annotations

from typing import Any

import pytest

from stepengine import AgentDefinition, Change, Engine, Hooks, Tool, ToolCall
from stepengine.data.messages import ToolReferencePart
from stepengine.data.tools import FIND_TOOLS, ToolSpec
from stepengine.errors import DefinitionError
from stepengine.machine.tool_search import search_hidden_tools
from stepengine.testing import ScriptedModel, tool_call

EMPTY: dict[str, Any] = {"type": "object", "properties": {}}


async def work(input: dict[str, Any]) -> str:
    return "worked"


def made(name: str, about: str = "", **options: Any) -> Tool[..., Any]:
    return Tool(name, about, EMPTY, work, **options)


HAMMER = made("use_hammer", "Drive a nail into wood.", defer_loading=True)
SAW = made("use_saw", "Cut wood.", defer_loading=True)
SHOUT = made("shout", "Say something aloud.")


def specs(*tools: ToolSpec) -> dict[str, ToolSpec]:
    return {tool.name: tool for tool in tools}


def names(*told: tuple[str, str], query: str) -> list[str]:
    """What a search finds among hidden tools, given by name and description."""
    hidden = specs(*[ToolSpec(name, about, defer_loading=True) for name, about in told])
    return [
        part.tool_name for part in search_hidden_tools(hidden, query).content if isinstance(part, ToolReferencePart)
    ]


# --- what is offered -------------------------------------------------------------------------------------------------


async def test_tool_search_is_offered_last_and_lists_hidden_tools() -> None:
    model = ScriptedModel(["ok"])
    async with Engine([AgentDefinition("a", tools=[HAMMER, SHOUT, SAW])], models=model) as engine:
        result = await engine.run("a", "Go.")
    offered = model.calls[0].tools
    assert ["use_hammer", "shout", "use_saw", "find_tools"] == [tool.name for tool in offered]
    assert offered[-1].description.endswith("\nThe tools: use_hammer, use_saw")
    assert FIND_TOOLS in result.state.tool_definitions


async def test_tools_added_by_hooks_are_searched_too() -> None:
    hooks = Hooks(pre_run=[lambda ctx: Change(tools=[SAW])])
    model = ScriptedModel([tool_call("find_tools", {"query": "wood"}), "ok"])
    async with Engine([AgentDefinition("a", tools=[HAMMER], hooks=hooks)], models=model) as engine:
        result = await engine.run("a", "Go.")
    assert ["use_hammer", "use_saw", "find_tools"] == [tool.name for tool in model.calls[0].tools]
    parts = result.tool_calls[0].result.content
    assert ["use_hammer", "use_saw"] == [part.tool_name for part in parts if isinstance(part, ToolReferencePart)]


@pytest.mark.parametrize("where", ["agent", "engine"])
def test_tool_named_find_tools_conflicts_with_hidden_tools(where: str) -> None:
    own = made("find_tools", "Mine.")
    tools = [HAMMER, own] if where == "agent" else [HAMMER]
    with pytest.raises(
        DefinitionError, match=r"'use_hammer' has defer_loading=True .* another tool with that name; rename it"
    ):
        Engine([AgentDefinition("a", tools=tools)], tools=[own] if where == "engine" else (), models=ScriptedModel([]))


async def test_tool_named_find_tools_is_allowed_without_hidden_tools() -> None:
    agent = AgentDefinition("a", tools=[made("find_tools", "Mine."), SHOUT])
    model = ScriptedModel([tool_call("find_tools"), "ok"])
    async with Engine([agent], models=model) as engine:
        result = await engine.run("a", "Go.")
    assert ["worked"] == [call.result.text for call in result.tool_calls]


# --- what a model that errs is told ---------------------------------------------------------------------------------


async def test_unknown_tool_error_lists_shown_tools_and_the_search() -> None:
    model = ScriptedModel([tool_call("use_drill"), "ok"])
    async with Engine([AgentDefinition("a", tools=[HAMMER, SAW, SHOUT])], models=model) as engine:
        result = await engine.run("a", "Go.")
    (call,) = result.tool_calls
    assert call.result.is_error
    assert "Available tools: shout, find_tools. 2 others are found with find_tools." in call.result.text


async def test_handler_searches_and_calls_hidden_tools() -> None:
    def handle(ctx: Any) -> Any:
        search = yield ToolCall("find_tools", {"query": "nail"})
        (part,) = search.tool_result.content
        result = yield from ToolCall(part.tool_name, {})
        return result.text

    agent = AgentDefinition("a", tools=[HAMMER, SAW], handle_steps=handle)
    async with Engine([agent], models=ScriptedModel([])) as engine:
        assert "worked" == (await engine.run("a")).unwrap()


# --- what a search finds ---------------------------------------------------------------------------------------------


def test_rare_words_and_words_of_a_name_count_for_more() -> None:
    rows = [
        ("list_rooms", "Rooms of the hotel."),
        ("book_room", "Book a room of the hotel."),
        ("pay", "Pay the hotel."),
    ]
    assert ["book_room"] == names(*rows, query="book hotel")
    assert ["pay"] == names(*rows, query="how do I pay the bill")


def test_exact_name_finds_only_that_tool() -> None:
    rows = [("get_rate", "The rate."), ("get_rate_history", "The rates of a year.")]
    assert ["get_rate"] == names(*rows, query="Get-Rate") == names(*rows, query="get_rate")


def test_search_returns_at_most_five_tools_deterministically() -> None:
    rows = [(f"tool_{n}", "Does the work.") for n in range(30)]
    assert (
        names(*rows, query="work")
        == names(*rows[::-1], query="work")
        == ["tool_0", "tool_1", "tool_10", "tool_11", "tool_12"]
    )


def test_search_without_match_says_so_and_references_nothing() -> None:
    result = search_hidden_tools(specs(ToolSpec("get_rate", "The rate.", defer_loading=True)), "weather")
    assert not result.is_error
    assert result.text.startswith("No tool has any of these words.")
    assert search_hidden_tools({}, "").text == result.text


def test_tools_that_are_shown_are_not_found() -> None:
    assert "No tool" in search_hidden_tools(specs(ToolSpec("get_rate", "The rate.")), "rate").text
