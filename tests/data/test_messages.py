"""
Parts, messages and states: what they take, what they refuse, what they give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict
from stepengine.data.messages import (
    AssistantMessage,
    CitationPart,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    SideEffect,
    TextPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    ToolResult,
    UserMessage,
    join_text_parts,
)
from stepengine.data.state import AgentState
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Usage
from stepengine.errors import DataError, TranscriptError
from tests import strategies

call = ToolCallPart("c1", "add", {"a": 1})
image = ImagePart(data=b"png")
document = DocumentPart(url="https://example.org/a.pdf", name="a.pdf")
CONTENTS: dict[Any, set[type]] = {
    UserMessage: {TextPart, ImagePart, DocumentPart},
    AssistantMessage: {
        TextPart,
        ThinkingPart,
        ToolCallPart,
        RefusalPart,
        ImagePart,
        DocumentPart,
        OpaquePart,
        CitationPart,
    },
    ToolResult: {TextPart, JsonPart, ImagePart, DocumentPart},
}
PARTS = (
    TextPart("t"),
    ThinkingPart("t"),
    RefusalPart("t"),
    call,
    image,
    document,
    JsonPart(1),
    OpaquePart("p", {}),
    CitationPart("u"),
)


# --- parts ----------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:B14", "requirements:B12", "requirements:B13")
@pytest.mark.parametrize("kind", list(CONTENTS), ids=lambda kind: kind.__name__)
def test_message_accepts_strings_and_its_own_parts_only(kind: Any) -> None:
    for part in PARTS:
        if type(part) in CONTENTS[kind]:
            assert (part,) == kind(part).content == kind([part]).content == kind((part,)).content
            assert (TextPart("a"), part) == kind(["a", part]).content
        else:
            for content in (part, [part], ("a", part)):
                with pytest.raises(
                    DataError, match=f"cannot contain a {type(part).__name__}|not a {type(part).__name__}"
                ):
                    kind(content)
    for wrong in (None, 5, {"a": 1}, {"a"}, [5], [None], (p for p in PARTS)):
        with pytest.raises(DataError):
            kind(wrong)
    assert (TextPart("text"),) == kind("text").content


def test_empty_string_is_a_part_of_results_only() -> None:
    assert () == UserMessage("").content == AssistantMessage("").content
    assert (TextPart(""),) == ToolResult("").content == ToolMessage("c1", "t", "").content


@pytest.mark.spec("requirements:B14")
@pytest.mark.parametrize("kind", [ImagePart, DocumentPart])
def test_media_have_one_source(kind: Any) -> None:
    assert kind(url="https://example.org").data is None
    assert kind(data=b"").url is None
    for fields in ({}, {"url": "u", "data": b""}, {"data": "text"}, {"data": bytearray(b"")}, {"url": 5}):
        with pytest.raises(DataError):
            kind(**fields)


@pytest.mark.spec("reliability:JR43", "replay:J7")
def test_unencodable_text_is_rejected_on_construction() -> None:
    makers: list[Callable[[Any], Any]] = [
        TextPart,
        ThinkingPart,
        RefusalPart,
        UserMessage,
        ToolResult.text,
        lambda t: AssistantMessage([t]),
        lambda t: ToolCallPart("c1", t),
        lambda t: ToolCallPart("c1", "t", {"a": t}),
        lambda t: ToolCallPart("c1", "t", raw_input=t),
        lambda t: ToolCallPart("c1", "t", input_error=t),
        lambda t: ImagePart(url=t),
        lambda t: JsonPart([t]),
        lambda t: OpaquePart("p", {t: 1}),
        lambda t: TextPart("a", provider_data={"provider": t}),
        lambda t: ToolResult.json({"a": t}),
    ]
    for make in makers:
        make("\U0001f600 ä")
        for text in ("\ud83d", "a\ude00b"):
            with pytest.raises(DataError, match="lone surrogate"):
                make(text)


def test_objects_inside_parts_are_json_objects() -> None:
    for make in (
        lambda v: ToolCallPart("c1", "t", v),
        lambda v: OpaquePart("p", v),
        lambda v: TextPart("a", provider_data=v),
        lambda v: ToolSpec("t", input_schema=v),
        lambda v: AgentState(context=v),
    ):
        make({"a": 1})
        for wrong in ([1], "a", 5):
            with pytest.raises(DataError, match="expected a JSON object"):
                make(wrong)
    assert JsonDict is type(ToolCallPart("c1", "t").input)
    assert {"type": "object", "properties": {}} == ToolSpec("t").input_schema


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:B16", "requirements:B13")
@pytest.mark.parametrize("given", [0, 1], ids=["defaults", "everything set"])
def test_numbering_a_call_or_result_changes_nothing_else(given: int) -> None:
    part = [
        ToolCallPart("", "look"),
        ToolCallPart("", "look", {"at": 1}, raw_input="{", input_error="cut", provider_data={"id": "x"}),
    ][given]
    everything: dict[str, Any] = {
        "status": "error",
        "credits_used": 2.0,
        "side_effects": [SideEffect("write", "a.txt")],
        "change": Change(context={"a": 1}),
        "structured": [1],
        "usage": Usage(1, 2),
        "cost": Decimal("0.5"),
        "trust": "trusted",
    }
    result = [ToolResult(), ToolResult("gone", **everything)][given]

    numbered = part.with_id("c7")
    named = result.with_call(numbered)

    assert attrs.evolve(part, tool_call_id="c7") == numbered
    assert attrs.evolve(result, tool_name="look", tool_call_id="c7") == named
    assert named is named.with_call(numbered)
    unset = [f.name for f in attrs.fields(ToolResult) if getattr(named, f.name) == f.default]
    assert not given or [] == unset, "fields that this test does not know"


def test_messages_read_by_role() -> None:
    thinking = ThinkingPart("why", provider_data={"provider": "p", "signature": "s"})
    answer = AssistantMessage(
        [thinking, "a", call, ThinkingPart(""), RefusalPart("b"), OpaquePart("p", {})], tags="NOTE"
    )
    result = ToolResult(["a", JsonPart({"b": 1}), image], status="error", tool_name="add", tool_call_id="c1")
    message = ToolMessage.from_result(result)

    assert ("user", "assistant", "tool") == (UserMessage("").role, answer.role, message.role)
    assert ("ab", (call,), ("why",), ("NOTE",)) == (answer.text, answer.tool_calls, answer.thinking, answer.tags)
    assert ('a{"b":1}', True, "add", "c1") == (message.text, message.is_error, message.tool_name, message.tool_call_id)
    assert result == message.result
    assert {"b": 1} == result.data
    assert (image,) == result.media
    assert not ToolMessage("c1", "t", "", "pending").is_error
    assert "a\nb" == UserMessage(["a\n", image, "b"]).text


@given(st.lists(strategies.to_result_parts))
@settings(max_examples=20)
def test_joined_text_is_the_text_of_the_parts_in_order(parts: list[Any]) -> None:
    assert "".join(join_text_parts((part,)) for part in parts) == join_text_parts(tuple(parts))


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.spec("requirements:B1", "generator-contract:G23", "generator-contract:S8")
def test_a_state_is_a_value_with_empty_defaults() -> None:
    state = AgentState()

    assert state == AgentState() == copy.deepcopy(state)
    assert (None, (), (), None, 1) == (
        state.parent_id,
        state.ancestor_run_ids,
        state.child_run_ids,
        state.output,
        state.next_call,
    )
    assert state.view is state.message_history
    with pytest.raises(AttributeError):
        state.output = 1  # type: ignore[misc]
    with pytest.raises(TypeError):
        state.context["a"] = 1
    with pytest.raises(TypeError):
        state.tool_definitions["a"] = ToolSpec("a")  # type: ignore[index]


@pytest.mark.spec("requirements:D18")
def test_state_from_messages_continues_call_numbering() -> None:
    def history(*call_ids: str) -> list[Any]:
        return [m for i in call_ids for m in (AssistantMessage([ToolCallPart(i, "t")]), ToolMessage(i, "t", ""))]

    assert 1 == AgentState.from_messages([]).next_call
    assert 1 == AgentState.from_messages(history("call_9", "c3_7", "x")).next_call
    assert 18 == AgentState.from_messages(history("c17", "c2")).next_call
    assert "r" == AgentState.from_messages(history("c1"), run_id="r").run_id
    with pytest.raises(TranscriptError):
        AgentState.from_messages(history("c1")[:1])


def test_the_estimate_of_a_state_counts_view_prompt_and_tools() -> None:
    state = AgentState(
        view=Transcript([UserMessage("x" * 8)]),
        system_prompt="y" * 8,
        tool_definitions={"t": ToolSpec("t", "d" * 8, {})},
        usage=Usage(5),
    )

    assert (8 + 2) + 2 + (2 + 1) == state.context_tokens


def test_parts_are_hashable_values() -> None:
    for part in PARTS:
        assert copy.copy(part) == copy.deepcopy(part) == part
        assert hash(part) == hash(copy.deepcopy(part))
        with pytest.raises(AttributeError):
            part.surprise = 1  # type: ignore[union-attr]
