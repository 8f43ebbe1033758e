"""
The helper generators, stepped by hand: what they yield, and what they make of the answers.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from stepengine.data.json import JsonDict, freeze
from stepengine.data.messages import ToolResult
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import ToolBinding, ToolSpec, Validated
from stepengine.data.yields import AgentCall, Parallel, StepResult, ToolCall
from stepengine.errors import BadYield, ChildError, ModelError, ToolError
from stepengine.helpers import best_of, call, map_agents, retry


class Doubler:
    """
    A typed tool as the decorator makes one.
    """

    spec = ToolSpec("double")

    def binding(self) -> ToolBinding:
        return ToolBinding(self.spec, lambda value: Validated(value, value))

    def arguments(self, number: int) -> JsonDict:
        return freeze({"number": number})

    def decode(self, result: ToolResult, /) -> int:
        return int(result.text)


def sent(*results: ToolResult, value: Any = None) -> StepResult:
    return StepResult(AgentState(), results, value=value)


def finish(steps: Generator[Any, Any, Any], answers: list[Any]) -> tuple[list[Any], Any]:
    """
    Return what a generator yielded and returned when it is given these answers; an exception is thrown.
    """
    yielded = [next(steps)]
    for answer in answers:
        try:
            yielded.append(steps.throw(answer) if isinstance(answer, BaseException) else steps.send(answer))
        except StopIteration as stop:
            return yielded, stop.value
    raise AssertionError(yielded)


def child(output: Any, status: RunStatus = RunStatus.COMPLETED) -> ChildResult[Any]:
    return ChildResult(agent_id="a", output=output, status=status)


@pytest.mark.spec("generator-contract:G8")
def test_calling_a_decorated_tool_returns_the_decoded_result() -> None:
    yielded, returned = finish(call(Doubler(), 21), [sent(ToolResult.text("42"))])

    assert yielded == [ToolCall("double", {"number": 21})]
    assert returned == 42


@pytest.mark.parametrize(
    ("as_", "result", "expected"),
    [
        (dict, ToolResult.json({"a": 1}), {"a": 1}),
        (str, ToolResult.text("plain"), "plain"),
        (object, ToolResult.text("text when there is no JSON"), "text when there is no JSON"),
    ],
)
def test_call_by_name_returns_the_json_value_or_text(as_: type[Any], result: ToolResult, expected: Any) -> None:
    yielded, returned = finish(call("look", as_, path="x"), [sent(result)])

    assert yielded == [ToolCall("look", {"path": "x"})]
    assert returned == expected


def test_call_by_name_refuses_another_type_and_names_both() -> None:
    with pytest.raises(ToolError, match="'look' gave a JsonList, not a dict"):
        finish(call("look", dict), [sent(ToolResult.json([1]))])


@pytest.mark.spec("generator-contract:G33")
def test_a_failing_tool_raises_at_the_call() -> None:
    with pytest.raises(ToolError, match="no such file") as caught:
        finish(call(Doubler(), 1), [sent(ToolResult.error("no such file"))])

    assert caught.value.result == ToolResult.error("no such file")


@pytest.mark.spec("generator-contract:G8")
def test_retry_repeats_until_it_succeeds() -> None:
    failing, working = sent(ToolResult.error("busy")), sent(ToolResult.text("4"))

    yielded, returned = finish(retry(lambda: call(Doubler(), 2), times=3), [failing, failing, working])

    assert yielded == [ToolCall("double", {"number": 2})] * 3
    assert returned == 4


def test_retry_raises_the_last_error() -> None:
    with pytest.raises(ToolError, match="second"):
        finish(
            retry(lambda: call(Doubler(), 2), times=2),
            [sent(ToolResult.error("first")), sent(ToolResult.error("second"))],
        )


def test_retry_reraises_other_errors_at_once() -> None:
    with pytest.raises(ModelError, match="down"):
        finish(retry(lambda: call(Doubler(), 2), times=5, on=(ToolError,)), [ModelError("down")])


@pytest.mark.spec("requirements:J13", "requirements:X50")
def test_map_agents_makes_one_windowed_parallel_in_item_order() -> None:
    children = (child("a"), child("b"), child("c", RunStatus.FAILED))

    yielded, returned = finish(
        map_agents("finder", ["x", "y", "z"], prompt=lambda i: f"find {i}", params=lambda i: {"q": i}, concurrency=2),
        [sent(value=children)],
    )

    assert yielded == [Parallel([AgentCall("finder", f"find {i}", {"q": i}) for i in "xyz"], concurrency=2)]
    assert [r.output for r in returned] == ["a", "b", "c"]
    assert returned[2].is_error


def test_map_agents_over_no_items_yields_nothing() -> None:
    with pytest.raises(StopIteration) as stop:
        next(map_agents("finder", [], prompt="look"))

    assert stop.value.value == ()


@pytest.mark.spec("requirements:J13")
def test_map_agents_uses_strings_as_prompts_and_mappings_as_params() -> None:
    yielded, _ = finish(map_agents("kid", ["pears", {"q": "plums"}]), [sent(value=(child("a"), child("b")))])

    assert yielded == [Parallel([AgentCall("kid", "pears"), AgentCall("kid", "", {"q": "plums"})], concurrency=8)]


@pytest.mark.spec("requirements:J13")
@pytest.mark.parametrize("item", [1, ["pears"], AgentState()])
def test_map_agents_without_prompt_and_params_refuses_other_items(item: object) -> None:
    with pytest.raises(BadYield, match=r"item 1 of map_agents is .*; pass prompt= or params="):
        map_agents("kid", ["pears", item])


def test_best_of_gives_the_judge_only_completed_outputs() -> None:
    children = (child("bad", RunStatus.FAILED), child("short"), child("the longest"))

    yielded, returned = finish(
        best_of("writer", "write", n=3, judge=lambda outputs: outputs.index(max(outputs, key=len))),
        [sent(value=children)],
    )

    assert yielded == [Parallel([AgentCall("writer", "write")] * 3, concurrency=8)]
    assert returned == "the longest"


def test_the_judge_of_best_of_may_call_an_agent() -> None:
    def judge(_: Any) -> Any:
        return (yield from AgentCall("selector"))

    yielded, returned = finish(
        best_of("writer", n=2, judge=judge), [sent(value=(child("a"), child("b"))), sent(value=child(1))]
    )

    assert yielded[1] == AgentCall("selector")
    assert returned == "b"


@pytest.mark.parametrize("choice", [2, -1, "0"])
def test_best_of_refuses_an_invalid_choice(choice: Any) -> None:
    with pytest.raises(BadYield, match=f"chose {choice!r}; there are 2 outputs"):
        finish(best_of("writer", n=2, judge=lambda _: choice), [sent(value=(child("a"), child("b")))])


def test_best_of_raises_when_no_child_completed() -> None:
    with pytest.raises(ChildError, match="ended as failed"):
        finish(best_of("writer", n=1, judge=lambda _: 0), [sent(value=(child(None, RunStatus.FAILED),))])
