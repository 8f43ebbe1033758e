"""
Foreign history: read from and written to the widespread `{"role", "content"}` form.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine.data.codec import to_json
from stepengine.data.messages import (
    AssistantMessage,
    DocumentPart,
    ImagePart,
    JsonPart,
    OpaquePart,
    RefusalPart,
    ThinkingPart,
    ToolCallPart,
    ToolMessage,
    UserMessage,
)
from stepengine.data.state import AgentState
from stepengine.data.transcript import Transcript
from stepengine.data.wire import ABOUT_A_REPLY, MEMBERS, read_history
from stepengine.errors import DataError, TranscriptError
from tests import strategies

DICTS: list[dict[str, Any]] = [
    {"role": "user", "content": "add them"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "text", "text": "I will."},
            {"type": "refusal", "refusal": "not that"},
            {"type": "opaque", "provider": "p", "data": {"x": 1}},
            {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "t2", "name": "show", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
            {
                "type": "tool_result",
                "tool_use_id": "t2",
                "is_error": True,
                "content": [
                    {"type": "text", "text": "no"},
                    {"type": "json", "value": {"a": [1]}},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/jpeg", "data": "AAE="}},
                ],
            },
            {"type": "text", "text": "and this"},
            {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
            {
                "type": "document",
                "title": "a.txt",
                "source": {"type": "url", "media_type": "text/plain", "url": "https://example.org/a.txt"},
            },
        ],
    },
    {"role": "assistant", "content": "done"},
]
MESSAGES = [
    UserMessage("add them"),
    AssistantMessage(
        [
            ThinkingPart("hm"),
            "I will.",
            RefusalPart("not that"),
            OpaquePart("p", {"x": 1}),
            ToolCallPart("t1", "add", {"a": 1}),
            ToolCallPart("t2", "show"),
        ]
    ),
    ToolMessage("t1", "add", "3"),
    ToolMessage("t2", "show", ["no", JsonPart({"a": [1]}), ImagePart(data=b"\0\1", mime_type="image/jpeg")], "error"),
    UserMessage(
        [
            "and this",
            ImagePart(url="https://example.org/a.png"),
            DocumentPart(url="https://example.org/a.txt", mime_type="text/plain", name="a.txt"),
        ]
    ),
    AssistantMessage("done"),
]


@pytest.mark.spec("requirements:B18")
def test_foreign_history_is_read() -> None:
    assert Transcript(MESSAGES) == Transcript.from_dicts(DICTS)
    assert Transcript(MESSAGES) == Transcript.from_dicts([*MESSAGES[:1], DICTS[1], *MESSAGES[2:]])


@pytest.mark.spec("requirements:B18", "requirements:B16")
def test_system_messages_move_to_the_system_prompt() -> None:
    dicts = [
        {"role": "system", "content": "You add."},
        *DICTS,
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
    ]
    state = AgentState.from_dicts(dicts, run_id="r")

    assert "You add.\n\nBe brief." == state.system_prompt == read_history(dicts).system_prompt
    assert (Transcript(MESSAGES), "r") == (state.message_history, state.run_id)
    with pytest.raises(DataError, match="a transcript cannot contain a system message"):
        Transcript.from_dicts(dicts)


def without_provider_data(message: Any) -> Any:
    """
    Return *message* with what the foreign form can hold.
    """
    parts = [attrs.evolve(p, provider_data=None) if hasattr(p, "provider_data") else p for p in message.content]
    parts = [attrs.evolve(p, raw_input=None, input_error=None) if isinstance(p, ToolCallPart) else p for p in parts]
    if isinstance(message, ToolMessage):
        return attrs.evolve(message, content=tuple(parts), status="error" if message.is_error else "ok")
    return attrs.evolve(message, content=tuple(parts), tags=())


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:B18")
@settings(max_examples=15)
@given(strategies.transcripts)
def test_foreign_form_round_trips_except_provider_data(transcript: Transcript) -> None:
    dicts = json.loads(json.dumps(transcript.to_dicts()))

    assert [without_provider_data(m) for m in transcript] == list(Transcript.from_dicts(dicts))


def test_results_that_follow_each_other_share_one_user_message() -> None:
    written = Transcript(MESSAGES).to_dicts()

    assert ["user", "assistant", "user", "user", "assistant"] == [message["role"] for message in written]
    assert ["t1", "t2"] == [block["tool_use_id"] for block in written[2]["content"]]
    assert [{"type": "text", "text": "add them"}] == written[0]["content"]


@pytest.mark.deep
@pytest.mark.smoke
@settings(max_examples=15)
@given(strategies.transcripts)
def test_our_stored_form_round_trips_through_from_dicts(transcript: Transcript) -> None:
    stored = [to_json(m) for m in transcript]
    for message in stored:
        del message["stepengine"]

    assert transcript == Transcript.from_dicts(json.loads(json.dumps(stored)))


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def image(**source: Any) -> list[Any]:
    return user({"type": "image", "source": source})


def assistant(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "content": list(blocks)}]


BROKEN: list[tuple[Any, str]] = [
    ([5], "$[0]"),
    ([{"role": "robot", "content": "x"}], "$[0]"),
    ([{"role": "user"}], "$[0].content"),
    ([{"role": "user", "content": {"type": "text"}}], "$[0].content"),
    ([{"role": "system", "content": [{"type": "text"}]}], "$[0].content[0].text"),
    (user(5), "$[0].content[0]"),
    (user({"type": "text", "text": "a"}, {"type": "text", "text": 5}), "$[0].content[1].text"),
    (user({"type": "text", "text": "\ud800"}), "$[0].content[0].text"),
    (user({"type": "tool_use", "id": "c1", "name": "t"}), "$[0].content[0]"),
    (user({"type": "tool_result"}), "$[0].content[0].tool_use_id"),
    (user({"type": "tool_result", "tool_use_id": "c1", "content": 5}), "$[0].content[0].content"),
    (user({"type": "image"}), "$[0].content[0].source"),
    (image(type="url"), "$[0].content[0].source.url"),
    (image(type="base64", data="AA=="), "$[0].content[0].source.media_type"),
    (image(type="base64", media_type="image/png"), "$[0].content[0].source.data"),
    (image(type="base64", media_type="image/png", data="é"), "$[0].content[0].source.data"),
    (assistant({"type": "sound"}), "$[1].content[0]"),
    (assistant({"type": "tool_use", "name": "t"}), "$[1].content[0].id"),
    (assistant({"type": "tool_use", "id": "c1", "name": 5}), "$[1].content[0].name"),
    (assistant({"type": "tool_use", "id": "c1", "name": "t", "input": [1]}), "$[1].content[0].input"),
    (assistant({"type": "opaque", "provider": "p", "data": 5}), "$[1].content[0].data"),
    (assistant({"type": "text", "text": object()}), "$[1].content[0].text"),
    ([{"type": "user_message", "content": [{"type": "text", "text": 5}]}], "$[0].content[0].text"),
]


@pytest.mark.parametrize(("messages", "path"), BROKEN, ids=[f"{n}-{path}" for n, (_, path) in enumerate(BROKEN)])
def test_unreadable_history_is_rejected_with_its_path(messages: list[Any], path: str) -> None:
    with pytest.raises(DataError) as caught:
        read_history(messages)

    assert path == caught.value.path
    assert f"at {path}" in caught.value.message


@pytest.mark.deep
@pytest.mark.smoke
@given(st.data())
@settings(max_examples=25)
def test_mutated_foreign_history_loads_or_raises_our_errors(data: st.DataObject) -> None:
    dicts = copy.deepcopy(DICTS)
    node: Any = dicts
    while isinstance(node, (dict, list)) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], (dict, list)) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(strategies.json_values())
            break
        node = node[key]

    try:
        history = AgentState.from_dicts(dicts).message_history
    except (DataError, TranscriptError) as error:
        assert error.message  # noqa: PT017
    else:
        assert history == Transcript(list(history))


CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "You add."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "add them"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
            {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AAE="}},
        ],
    },
    {
        "role": "assistant",
        "content": None,
        "audio": None,
        "annotations": [],
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "t2", "type": "function", "function": {"name": "show", "arguments": ""}},
            {"id": "t3", "function": {"name": "show", "arguments": {"what": "all"}}},
            {"id": "t4", "type": "function", "function": {"name": "add", "arguments": '{"a": '}},
            {"id": "t5", "type": "function", "function": {"name": "add", "arguments": "[1]"}},
        ],
    },
    *[{"role": "tool", "tool_call_id": f"t{n}", "content": f"result {n}"} for n in range(1, 5)],
    {"role": "tool", "tool_call_id": "t5", "content": [{"type": "text", "text": "result 5"}]},
    {"role": "assistant", "content": None, "refusal": "not that"},
]


@pytest.mark.spec("requirements:B18")
def test_chat_completions_calls_and_results_are_read() -> None:
    state = AgentState.from_dicts(CALLS)
    user_message, assistant_message, *results, refused = state.message_history
    first, second, third, cut, listed = assistant_message.tool_calls

    assert ("You add.", "add them") == (state.system_prompt, user_message.text)
    images = [ImagePart(url="https://example.org/a.png"), ImagePart(data=b"\0\1", mime_type="image/jpeg")]
    assert images == list(user_message.content[1:])
    assert [("add", {"a": 1}), ("show", {}), ("show", {"what": "all"})] == [
        (call.tool_name, call.input) for call in (first, second, third)
    ]
    assert [('{"a": ', {}), ("[1]", {})] == [(call.raw_input, call.input) for call in (cut, listed)]
    assert all("no JSON object" in call.input_error for call in (cut, listed))
    assert [(f"t{n}", name, f"result {n}") for n, name in enumerate(["add", "show", "show", "add", "add"], 1)] == [
        (result.tool_call_id, result.tool_name, result.text) for result in results
    ]
    assert (RefusalPart("not that"),) == refused.content


def called(**call: Any) -> list[Any]:
    return [*user({"type": "text", "text": "hi"}), {"role": "assistant", "content": "", "tool_calls": [call]}]


def spoken(role: str, **members: Any) -> list[Any]:
    return [{"role": role, "content": "x", **members}]


REFUSED: list[tuple[Any, str]] = [
    (spoken("assistant", function_call={"name": "add", "arguments": "{}"}), "$[0].function_call"),
    (spoken("assistant", audio={"id": "a"}), "$[0].audio"),
    (spoken("assistant", tool_calls="add"), "$[0].tool_calls"),
    (spoken("assistant", refusal=5), "$[0].refusal"),
    (spoken("user", tool_calls=[{"id": "t1"}]), "$[0].tool_calls"),
    (spoken("tool"), "$[0].tool_call_id"),
    (spoken("model", parts=[]), "$[0]"),
    ([{"type": "function_call", "call_id": "t1", "name": "add", "arguments": "{}"}], "$[0]"),
    (called(id="t1", type="custom", custom={"name": "add"}), "$[1].tool_calls[0]"),
    (called(id="t1", type="function"), "$[1].tool_calls[0].function"),
    (called(id="t1", function={"arguments": "{}"}), "$[1].tool_calls[0].function.name"),
    (called(id="t1", function={"name": "add", "arguments": 5}), "$[1].tool_calls[0].function.arguments"),
    (
        called(id="t1", function={"name": "add", "arguments": " " * (4 * 2**20 + 1)}),
        "$[1].tool_calls[0].function.arguments",
    ),
    (called(function={"name": "add"}), "$[1].tool_calls[0].id"),
    (user({"type": "image_url", "image_url": {"url": "data:image/png;base64,é"}}), "$[0].content[0].image_url.url"),
    (user({"type": "input_audio", "input_audio": {}}), "$[0].content[0]"),
]


@pytest.mark.spec("requirements:B18")
@pytest.mark.parametrize(("messages", "path"), REFUSED, ids=[f"{n}-{path}" for n, (_, path) in enumerate(REFUSED)])
def test_content_of_neither_form_is_rejected_not_dropped(messages: list[Any], path: str) -> None:
    with pytest.raises(DataError) as caught:
        read_history(messages)

    assert path == caught.value.path


def test_too_deeply_nested_arguments_are_kept_as_text() -> None:
    history = called(id="t1", function={"name": "add", "arguments": '{"a":' * 100_000})
    history.append({"role": "tool", "tool_call_id": "t1", "content": ""})
    (call,) = read_history(history).messages[1].tool_calls

    assert (100_000 * 5, {}) == (len(call.raw_input), call.input)


@pytest.mark.spec("requirements:B18")
@settings(max_examples=40)
@given(st.data())
def test_unknown_non_empty_member_is_rejected_with_its_path(data: st.DataObject) -> None:
    role = data.draw(st.sampled_from(["user", "assistant", "system"]))
    name = data.draw(st.text(min_size=1).filter(lambda n: n not in {*MEMBERS[role], *ABOUT_A_REPLY, "role", "content"}))

    with pytest.raises(DataError) as caught:
        read_history(spoken(role, **{name: ["something"]}))

    assert f"$[0].{name}" == caught.value.path
