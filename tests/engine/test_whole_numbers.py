"""Whole numbers over 64 bits go wherever JSON goes; the longest that Python converts have 4,300 digits."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, Engine, InputSchema, Perform, StepContext, ToolCall, call, tool
from stepengine.journal import MemoryJournal
from stepengine.testing import ScriptedModel, text, tool_call

NUMBERS = st.integers() | st.integers(2**63, 2**70) | st.sampled_from([-(2**63) - 1, 10**4299, -(10**4299)])
PARAMS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@tool(in_thread=False)
def twice(n: int) -> int:
    """Double a number."""
    return n * 2


@tool(in_thread=False)
def factorial(n: int) -> int:
    """Compute a factorial."""
    return math.factorial(n)


@pytest.mark.spec("replay:J6")
def test_large_integers_are_recorded_and_replayed() -> None:
    number, seen = 10**24 + 1, list[Any]()

    def handle(ctx: StepContext) -> Generator[Any, Any, Any]:
        seen.extend([ctx.params["n"], (yield from call(factorial, 25)), (yield from Perform(lambda: [number]))])
        turn = yield ToolCall("twice", {"n": number})
        return {"n": turn.tool_result.data}

    agent = AgentDefinition(
        "a",
        tools=[factorial, twice],
        handle_steps=handle,
        input_schema=InputSchema(params=PARAMS),
        output_schema=PARAMS,
    )
    journal = MemoryJournal()
    with Engine([agent]) as engine:
        result = engine.run_sync("a", params={"n": -number}, journal=journal)

        assert [-number, math.factorial(25), [number]] == seen
        assert {"n": 2 * number} == result.output
        assert result.output == engine.replay_sync(journal).output


@pytest.mark.spec("reliability:MP44")
@settings(max_examples=20)
@given(NUMBERS)
def test_model_may_pass_any_integer_json_holds(number: int) -> None:
    model = ScriptedModel([tool_call("twice", {"n": number // 2}), text("done")])
    with Engine([AgentDefinition("a", model="test/m", tools=[twice])], models=model) as engine:
        result = engine.run_sync("a", "go")

    assert [number // 2 * 2] == [each.result.data for each in result.tool_calls]
