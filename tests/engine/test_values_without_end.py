"""A value of a tool that is nested too deep, or contains itself, is an error in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepengine import AgentDefinition, Engine, ToolCall, tool
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel

HELD: list[Any] = []
"""Python frees a deep list with as many calls as it has levels, so tests keep theirs."""


def cyclic_list() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep_list() -> Any:
    value: Any = 1
    for _ in range(20_000):
        value = [value]
    HELD.append(value)
    return value


ENDLESS = [cyclic_list, deep_list]


def annotated(make: Callable[[], Any]) -> Any:
    def give() -> dict[str, Any]:
        """Give a value."""
        return make()  # type: ignore[no-any-return]

    return give


def typed(make: Callable[[], Any]) -> Any:
    def give() -> tuple[Any, ...]:
        """Give a value."""
        return (make(),)

    return give


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("make", ENDLESS)
@pytest.mark.parametrize("body", [annotated, typed])
async def test_endlessly_nested_tool_value_gives_an_error_result(
    body: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    def handle_steps(ctx: Any) -> Any:
        given = yield ToolCall("give", {})
        return [given.tool_result.status, given.tool_result.text]

    agent = AgentDefinition("desk", tools=[tool(body(make))], handle_steps=handle_steps)
    async with Engine([agent], models=ScriptedModel([])) as engine:
        result = await engine.run("desk", journal=MemoryJournal())

    assert "error" == result.output[0]
    assert any(why in result.output[1] for why in ("contains itself", "nested deeper than 200 levels"))
