"""Histories in codebuff's shape, which is the AI SDK's: read by ``AgentState.from_dicts`` and by ``set_messages``."""

from __future__ import annotations

import base64
import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepengine import AgentDefinition, AgentState, Engine, ToolCall
from stepengine.data.ai_sdk import LIFETIMES
from stepengine.errors import DataError, TranscriptError
from tests import strategies

PNG = base64.b64encode(b"\x89PNG").decode()
HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be brief."}], "sentAt": 1},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Read a.", "providerOptions": {"x": 1}}, {"type": "image", "image": PNG}],
        "tags": ["USER_PROMPT"],
        "sentAt": 1_700_000_000_000,
        "keepDuringTruncation": True,
    },
    {
        "role": "assistant",
        "content": [
            {"type": "reasoning", "text": "Hm."},
            {"type": "text", "text": "I read it."},
            {"type": "tool-call", "toolCallId": "call_7", "toolName": "read_files", "input": {"paths": ["a"]}},
        ],
        "sentAt": 2,
        "providerOptions": {},
    },
    {
        "role": "tool",
        "toolCallId": "call_7",
        "toolName": "read_files",
        "content": [
            {"type": "json", "value": [{"path": "a", "content": "x"}]},
            {"type": "media", "data": PNG, "mediaType": "image/png"},
        ],
        "sentAt": 3,
    },
    {"role": "user", "content": "And now?", "timeToLive": "agentStep", "keepLastTags": ["A"]},
]


def shown(state: AgentState) -> list[Any]:
    return [
        [
            message.role,
            [type(part).__name__ for part in message.content],
            list(getattr(message, "tags", ())),
            message.ttl,
        ]
        for message in state.message_history
    ]


EXPECTED = [
    ["user", ["TextPart", "ImagePart"], ["USER_PROMPT"], None],
    ["assistant", ["ThinkingPart", "TextPart", "ToolCallPart"], [], None],
    ["tool", ["JsonPart", "ImagePart"], [], None],
    ["user", ["TextPart"], [], "agent_step"],
]


@pytest.mark.spec("generator-contract:T26")
def test_codebuff_history_is_read_with_calls_tags_and_images() -> None:
    state = AgentState.from_dicts(HISTORY)
    user, reply, result, _ = state.message_history

    assert EXPECTED == shown(state)
    assert "Be brief." == state.system_prompt
    assert ("read_files", "call_7", {"paths": ["a"]}) == (
        reply.tool_calls[0].tool_name,
        reply.tool_calls[0].tool_call_id,
        reply.tool_calls[0].input,
    )
    assert [{"path": "a", "content": "x"}] == [dict(e) for e in result.content[0].value]
    assert b"\x89PNG" == user.content[1].data


@pytest.mark.spec("generator-contract:T26")
def test_calls_in_messages_of_their_own_become_one_message() -> None:
    calls = [{"type": "tool-call", "toolCallId": key, "toolName": "read_files", "input": {}} for key in ("a", "b")]
    results = [{"role": "tool", "toolCallId": key, "content": [{"type": "json", "value": key}]} for key in ("a", "b")]
    history = [
        {"role": "user", "content": "Read both."},
        {"role": "assistant", "content": [{"type": "text", "text": "I read."}]},
        *[{"role": "assistant", "content": [call]} for call in calls],
        *results,
        {"role": "assistant", "content": "Done."},
    ]
    found = AgentState.from_dicts(history).message_history

    assert ["user", "assistant", "assistant", "tool", "tool", "assistant"] == [message.role for message in found]
    with pytest.raises(TranscriptError, match="have no result"):
        AgentState.from_dicts(history[:4])


@pytest.mark.spec("generator-contract:T26")
@given(st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=1, max_size=4))
def test_merged_message_has_the_tags_of_all(tags: list[list[str]]) -> None:
    calls = [{"type": "tool-call", "toolCallId": f"t{n}", "toolName": "x", "input": {}} for n in range(len(tags))]
    history = [
        {"role": "user", "content": "go"},
        *[{"role": "assistant", "content": [call], "tags": own} for call, own in zip(calls, tags, strict=True)],
        *[{"role": "tool", "toolCallId": call["toolCallId"], "content": []} for call in calls],
    ]
    merged = AgentState.from_dicts(history).message_history[1]

    assert list(dict.fromkeys([tag for own in tags for tag in own])) == list(merged.tags)


@pytest.mark.spec("generator-contract:T26")
def test_set_messages_accepts_the_ai_sdk_shape() -> None:
    def handle_steps(_: Any) -> Any:
        yield from ToolCall("set_messages", {"messages": HISTORY[1:]}, include_tool_call=False)

    with Engine([AgentDefinition("a", handle_steps=handle_steps)]) as engine:
        result = engine.run_sync("a", "go")

    assert None is result.error
    assert EXPECTED[:3] == shown(result.state)  # what is there for one step is over


def test_from_messages_rejects_dicts_and_names_from_dicts() -> None:
    with pytest.raises(TranscriptError, match=r"AgentState\.from_dicts"):
        AgentState.from_messages([{"role": "user", "content": "x", "sentAt": 1}])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "x", "sendAt": 1},
        {"role": "assistant", "content": [{"type": "tool-call", "toolName": "x", "input": {}}]},
        {"role": "assistant", "content": [{"type": "tool-result"}]},
        {"role": "user", "content": [{"type": "image", "image": "no base64!", "mediaType": "image/png"}]},
        {"role": "user", "content": "x", "tags": 5},
    ],
    ids=["a slip", "no id", "unknown", "no image", "tags"],
)
def test_unreadable_message_is_rejected_with_its_path(message: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"\$\[0\]"):
        AgentState.from_dicts([message])


EMPTY: tuple[Any, ...] = (None, "", [], {})


@pytest.mark.spec("generator-contract:T26")
@given(
    member=st.sampled_from(["tags", "ttl", "timeToLive"]),
    value=strategies.json_values()
    | st.lists(st.text() | st.integers())
    | st.sampled_from([*LIFETIMES, *LIFETIMES.values()]),
)
def test_tags_and_lifetime_are_read_or_rejected_with_their_path(member: str, value: Any) -> None:
    try:
        (message,) = AgentState.from_dicts([{"role": "user", "content": "x", member: value}]).message_history
    except DataError as error:
        assert error.path.startswith(f"$[0].{member}")  # noqa: PT017
        assert f"at {error.path}" in error.message  # noqa: PT017
        assert value not in EMPTY
    else:
        assert tuple(value or ()) == message.tags if member == "tags" else () == message.tags
        assert (LIFETIMES.get(value, value) if member != "tags" and value not in EMPTY else None) == message.ttl
        assert all(isinstance(tag, str) for tag in message.tags)
        assert message.ttl in (None, *LIFETIMES.values())


@pytest.mark.deep
@pytest.mark.smoke
@settings(max_examples=200)
@given(st.data())
def test_mutated_ai_sdk_history_loads_or_raises_our_errors(data: st.DataObject) -> None:
    history = copy.deepcopy(HISTORY)
    node: Any = history
    while isinstance(node, dict | list) and node:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(strategies.json_values())
            break
        node = node[key]

    try:
        AgentState.from_dicts(history)
    except (DataError, TranscriptError) as error:
        assert error.message  # noqa: PT017


def test_file_part_is_read_as_a_document() -> None:
    part = {"type": "file", "data": PNG, "mediaType": "application/pdf", "filename": "a.pdf"}
    (message,) = AgentState.from_dicts([{"role": "user", "content": [part]}]).message_history

    assert ("application/pdf", "a.pdf", b"\x89PNG") == (
        message.content[0].mime_type,
        message.content[0].name,
        message.content[0].data,
    )


@pytest.mark.parametrize(
    ("image", "kind"),
    [
        ("https://a.example/x.png", ("image/jpeg", "https://a.example/x.png")),
        (PNG, ("image/jpeg", "")),
    ],
    ids=["address", "base64"],
)
def test_image_is_read_from_a_url_or_base64(image: str, kind: tuple[str, str]) -> None:
    part = {"type": "image", "image": image, "mediaType": "image/jpeg"}
    (message,) = AgentState.from_dicts([{"role": "user", "content": [part]}]).message_history

    assert kind == (message.content[0].mime_type, message.content[0].url or "")
