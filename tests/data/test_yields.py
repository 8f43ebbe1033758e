"""
Yieldables: built wrong they fail where they are built; iterated they yield themselves once and unpack the answer.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from pydantic import BaseModel

from stepengine import Tool
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import JsonDict
from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, ToolResult, UserMessage
from stepengine.data.models import ModelReply, ModelSettings
from stepengine.data.questions import Answer, Question
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.yields import (
    STEP,
    STEP_ALL,
    AgentCall,
    Ask,
    Complete,
    GenerateN,
    Parallel,
    Perform,
    Receive,
    Sentinel,
    StepResult,
    StepText,
    StepWith,
    ToolCall,
)
from stepengine.errors import (
    BadYield,
    ChildError,
    DataError,
    ModelError,
    PerformError,
    ToolError,
    TranscriptError,
)

state = AgentState()
ok = ToolResult("fine")
failed = ToolResult.error("boom")
reply = ModelReply("hi")
child = ChildResult[str](agent_id="kid", output="out")


def fetch(url: str, *, times: int = 1) -> str:
    return url * times


def sent(yieldable: Any, **answer: Any) -> Any:
    """
    Return what `yield from yieldable` gives when the machine answers with a StepResult of `answer`.
    """

    def handler() -> Any:
        return (yield from yieldable)

    running = handler()
    assert running.send(None) is yieldable
    try:
        running.send(StepResult(state, **answer))
    except StopIteration as done:
        return done.value
    raise AssertionError("it yielded twice")


# --- unpacking ------------------------------------------------------------------------------------------------------

STEP_ANSWER = {"steps_complete": True}
UNPACKED: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "STEP": (STEP, STEP_ANSWER, StepResult(state, steps_complete=True)),
    "STEP_ALL": (STEP_ALL, STEP_ANSWER, StepResult(state, steps_complete=True)),
    "StepWith": (StepWith(model="m/x"), STEP_ANSWER, StepResult(state, steps_complete=True)),
    "StepText": (StepText("hi"), {"tool_results": (ok, failed)}, (ok, failed)),
    "GenerateN": (GenerateN(2), {"n_responses": ("a", "b")}, ("a", "b")),
    "Complete": (Complete("hi"), {"value": reply}, reply),
    "ToolCall": (ToolCall("t"), {"tool_results": (ok,)}, ok),
    "ToolCall pending": (
        ToolCall("t"),
        {"tool_results": (ToolResult.make_pending("q1"),)},
        ToolResult.make_pending("q1"),
    ),
    "AgentCall": (AgentCall("kid"), {"value": child}, "out"),
    "Perform": (Perform(fetch, "u"), {"value": [1]}, [1]),
    "Ask": (Ask("sure?"), {"value": "yes"}, "yes"),
    "Parallel": (Parallel(ToolCall("t"), Ask("sure?")), {"value": (ok, "no")}, (ok, "no")),
}


@pytest.mark.parametrize("name", sorted(UNPACKED))
def test_yieldable_yields_itself_once_and_unpacks_its_value(name: str) -> None:
    yieldable, answer, expected = UNPACKED[name]

    assert expected == sent(yieldable, **answer)
    assert [yieldable] == [next(iter(yieldable))]


@pytest.mark.spec("generator-contract:G22", "generator-contract:G24")
def test_a_step_result_names_its_last_tool_result() -> None:
    assert StepResult(state).tool_result is None
    assert failed == StepResult(state, (ok, failed)).tool_result
    assert StepResult(state) == StepResult(
        agent_state=state, tool_results=(), steps_complete=False, n_responses=(), value=None
    )


@pytest.mark.spec("generator-contract:G33")
@pytest.mark.parametrize("status", ["error", "denied"])
def test_a_failed_tool_call_raises_with_its_result(status: Any) -> None:
    result = ToolResult("boom", status=status)

    with pytest.raises(ToolError, match="tool 'add' failed: boom") as caught:
        sent(ToolCall("add"), tool_results=(ok, result))

    assert caught.value.result is result
    assert "add" == caught.value.tool_name


def test_a_tool_call_without_any_result_raises() -> None:
    with pytest.raises(ToolError, match="no result") as caught:
        sent(ToolCall("add"))

    assert caught.value.result is None


@pytest.mark.parametrize("status", [RunStatus.FAILED, RunStatus.SUSPENDED])
def test_incomplete_child_raises_with_its_error_as_cause(status: RunStatus) -> None:
    cause = ModelError("no credit")
    result: ChildResult[Any] = ChildResult(agent_id="kid", status=status, error=cause)

    with pytest.raises(ChildError, match=f"agent 'kid' ended as {status.value}: no credit") as caught:
        sent(AgentCall("kid"), value=result)

    assert caught.value.__cause__ is cause
    assert (result, "kid", status.value) == (caught.value.result, caught.value.agent_id, caught.value.status)
    assert result.is_error


def test_a_child_may_end_without_an_error_to_show() -> None:
    with pytest.raises(ChildError, match=r"agent .kid. ended as cancelled$"):
        ChildResult(agent_id="kid", status="cancelled").unwrap()


def test_a_failed_perform_raises_its_error() -> None:
    error = PerformError("fetch failed", kind="OSError")

    with pytest.raises(PerformError) as caught:
        sent(Perform(fetch, "u"), value=error)

    assert caught.value is error


# --- building -------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no tool name": (lambda: ToolCall(""), "a tool must be a Tool or the name of a tool, not ''"),
    "no tool": (lambda: ToolCall(fetch), "a tool must be a Tool or the name of a tool"),  # type: ignore[arg-type]
    "input no object": (lambda: ToolCall("t", [1]), "the input of a ToolCall must be an object"),  # type: ignore[arg-type]
    "flag": (lambda: ToolCall("t", {}, 1), "include_tool_call must be True or False, not 1"),  # type: ignore[arg-type]
    "no agent": (lambda: AgentCall(5), "an AgentCall needs an AgentDefinition or the id"),  # type: ignore[arg-type]
    "prompt": (lambda: AgentCall("a", 5), "a prompt or question must be text, not 5"),  # type: ignore[arg-type]
    "params": (lambda: AgentCall("a", "", [1]), "params must be a JSON object or a pydantic model"),  # type: ignore[arg-type]
    "params a class": (lambda: AgentCall("a", "", Model), "params must be a JSON object or a pydantic model"),  # type: ignore[arg-type]
    "tools one string": (lambda: StepWith(tools="add"), "the tools of a StepWith must be a list"),
    "tools a number": (lambda: StepWith(tools=5), "the tools of a StepWith must be a list"),  # type: ignore[arg-type]
    "text": (lambda: StepText(None), "the text of a StepText must be text, not None"),  # type: ignore[arg-type]
    "GenerateN(0)": (lambda: GenerateN(0), "GenerateN needs an integer from 1 to 64, not 0"),
    "GenerateN(True)": (lambda: GenerateN(True), "GenerateN needs an integer"),
    "messages": (lambda: Complete(5), "Complete needs a string or a sequence of messages"),  # type: ignore[arg-type]
    "messages a yieldable": (lambda: Complete(Ask("?")), "Complete needs a string or a sequence of messages"),
    "no function": (lambda: Perform(fetch("u")), "Perform needs a function and its arguments, not 'u'"),  # type: ignore[call-overload]
    "no idempotent function": (lambda: Perform.idempotent(5), "Perform needs a function"),  # type: ignore[call-overload]
    "question": (lambda: Ask(5), "a prompt or question must be text, not 5"),  # type: ignore[arg-type]
    "one option": (lambda: Ask("?", ["yes"]), "Ask needs no options or at least two, not only 'yes'"),
    "options one string": (lambda: Ask("?", "yes"), "the options of an Ask must be a list of strings, not 'yes'"),
    "options a number": (lambda: Ask("?", 5), "the options of an Ask must be a list of strings, not 5"),  # type: ignore[arg-type]
    "options a yieldable": (lambda: Ask("?", Ask("?")), "the options of an Ask must be a list of strings, not Ask("),
    "STEP in parallel": (
        lambda: Parallel(STEP),
        "Parallel can contain ToolCall, AgentCall, Perform, Ask, Sleep, Receive, Wait and Race, not STEP",
    ),  # type: ignore[call-overload]
    "parallel in parallel": (lambda: Parallel([Parallel()]), "Parallel can contain"),  # type: ignore[list-item]
}


@pytest.mark.spec("reliability:GN01")
@pytest.mark.parametrize("case", sorted(BAD))
def test_a_wrong_field_fails_where_the_author_builds_the_object(case: str) -> None:
    make, reason = BAD[case]

    with pytest.raises(BadYield) as caught:
        make()

    assert reason in caught.value.message


@pytest.mark.spec("reliability:JR43")
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: ToolCall("t", {"a": [object()]}), "$.a[0]"),
        (lambda: AgentCall("a", "", {"a": float("nan")}), "$.a"),
        (lambda: Ask("?", details={"a": {1}}), "$.a"),
        (lambda: StepText("\ud800"), "$"),
        (lambda: AgentCall("a", "\ud800"), "$"),
        (lambda: Ask("?", ["a", "\ud800"]), "$"),
    ],
    ids=["ToolCall", "AgentCall", "Ask", "StepText", "prompt", "option"],
)
def test_non_json_value_in_a_yieldable_is_rejected_on_construction(make: Callable[[], Any], path: str) -> None:
    with pytest.raises(DataError) as caught:
        make()

    assert path == caught.value.path


@pytest.mark.spec("reliability:GN01")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Answer(5), "expected a list, not 5"),
        (lambda: Answer(StepText("a")), "write `yield from` before it"),
        (lambda: Answer(text=5), "Answer(text=...) must be text, not 5"),
        (lambda: UserMessage("a", tags=5), "expected a list, not 5"),
        (lambda: Question("q0", "?", wider=5), "expected a list, not 5"),
        (lambda: Receive("go", schema={1: 2}), "JSON keys are strings"),
    ],
    ids=["selected", "selected a yieldable", "text", "tags", "rules", "schema"],
)
def test_wrong_type_raises_a_data_error_on_construction(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(DataError) as caught:
        make()

    assert reason in caught.value.message


def test_messages_of_a_completion_pair() -> None:
    with pytest.raises(TranscriptError):
        Complete([AssistantMessage([ToolCallPart("c1", "t")])])
    with pytest.raises(TranscriptError, match="not a dict"):
        Complete([{"role": "user"}])  # type: ignore[list-item]


class Model(BaseModel):
    mode: str = "json"
    items: tuple[int, ...] = (1, 2)


def test_fields_are_normalised_when_an_object_is_built() -> None:
    tool = Tool("add", "", {}, lambda given: given)
    agent: AgentDefinition[Any] = AgentDefinition("kid")

    assert ToolCall("add", {"a": (1,)}) == ToolCall(tool, {"a": [1]}, include_tool_call=True)
    assert type(ToolCall("add").input) is JsonDict
    assert {"mode": "json", "items": [1, 2]} == AgentCall(agent, params=Model()).params
    assert ("kid", "kid") == (AgentCall(agent).agent_id, AgentCall("kid").agent_id)
    assert AgentCall("kid").params is None
    assert ("add", "sub") == StepWith(tools=[tool, "sub"]).tools
    assert () == StepWith(tools=[]).tools
    assert StepWith().tools is None
    assert (UserMessage("hi"),) == Complete("hi").messages == Complete([UserMessage("hi")]).messages
    assert Complete("hi", model="m/x", settings=ModelSettings(temperature=1)).model == "m/x"
    assert ("a", "b") == Ask("?", ["a", "b"]).options
    assert () == Ask("?").options
    assert Parallel([ToolCall("a"), Ask("?")]) == Parallel(ToolCall("a"), Ask("?"))
    assert () == Parallel().calls == Parallel([]).calls


def test_perform_keeps_function_and_arguments() -> None:
    perform = Perform(fetch, "u", times=2)

    assert (fetch, ("u",), {"times": 2}, False) == (perform.fn, perform.args, perform.kwargs, perform.is_idempotent)
    assert Perform.idempotent(fetch, "u", times=2).is_idempotent
    assert perform == Perform(fetch, "u", times=2) != Perform.idempotent(fetch, "u", times=2)
    assert f"{__name__}.fetch" == perform.name == Perform(functools.partial(fetch, "u")).name
    assert Perform(Callable1()).name.endswith("Callable1")
    assert {"fn": 1, "self": 2} == Perform(dict, fn=1, self=2).kwargs
    with pytest.raises(TypeError):
        perform.kwargs["times"] = 3  # type: ignore[index]


class Callable1:
    def __call__(self) -> int:
        return 1


@pytest.mark.spec("reliability:GN01")
def test_sentinels_are_two_and_read_as_they_are_written() -> None:
    assert (STEP, STEP_ALL) == tuple(Sentinel)
    assert ("STEP", "STEP_ALL") == (repr(STEP), str(STEP_ALL))
    assert copy.deepcopy(STEP) is STEP
    assert STEP != "STEP"


def test_step_text_is_the_newest_reply_without_thoughts() -> None:
    call = ToolCallPart("c1", "look")
    history = [UserMessage("q"), AssistantMessage(" <think>hm</think> said \n")]
    called = [*history, AssistantMessage([call]), ToolMessage("c1", "look", "result")]

    assert "said" == StepResult(AgentState.from_messages(history)).text
    assert "said" == StepResult(AgentState.from_messages([*history, UserMessage("later")])).text
    assert ("", "") == (StepResult(AgentState.from_messages(called)).text, StepResult(AgentState()).text)


@pytest.mark.spec("requirements:X69")
@pytest.mark.parametrize("other", ["yes", 0, {"a": 1}, (1,)], ids=repr)
def test_comparing_a_step_result_with_a_value_raises(other: Any) -> None:
    for compare in (lambda a, b: a == b, lambda a, b: a != b, lambda a, b: b == a, lambda a, b: a in [b, b]):
        with pytest.raises(TypeError, match="yield from"):
            compare(StepResult(state), other)


@pytest.mark.spec("requirements:X69")
def test_a_step_result_is_neither_true_nor_false() -> None:
    for use in (bool, lambda r: not r, lambda r: r and 1):
        with pytest.raises(TypeError, match="yield from"):
            use(StepResult(state, value="yes"))


@pytest.mark.spec("requirements:X69")
def test_step_result_attribute_error_hints_at_yield_from() -> None:
    result = StepResult(state, (ok,), value="yes")

    with pytest.raises(AttributeError, match=r"'lower'; .*yield from") as caught:
        result.lower()  # type: ignore[attr-defined]

    assert (caught.value.name, caught.value.obj) == ("lower", result)
    assert not hasattr(result, "lower")
    assert getattr(result, "lower", 7) == 7
    for again in (copy.copy(result), copy.deepcopy(result), pickle.loads(pickle.dumps(result)), attrs.evolve(result)):
        assert again == result
        assert hash(again) == hash(result)
    other = StepResult(state, value="no")
    assert other != result
    assert result in [other, result]
    assert other not in [result, result]
    assert result.__eq__(None) is NotImplemented
    assert result != None  # noqa: E711 - how `None` compares is what is asked
    assert result is not None


def test_yieldables_are_values() -> None:
    for name, (yieldable, _, _) in UNPACKED.items():
        fields = [a.name for a in attrs.fields(type(yieldable))] if attrs.has(type(yieldable)) else ["value"]
        for field in fields:
            with pytest.raises(AttributeError):
                setattr(yieldable, field, None)
        assert copy.copy(yieldable) == yieldable, name
        assert hash(yieldable) == hash(copy.copy(yieldable)), name
