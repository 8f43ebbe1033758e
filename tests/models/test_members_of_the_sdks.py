"""
Every member that the providers' SDKs know of a reply is read, carried along, or named in ``members`` with the reason why not.

A reply is made in which each member of each type has a value of its own; what of these is not found again in the decoded reply
is what the lists there have to name. A newer SDK that knows more fails here. What no SDK knows yet is carried as well, wherever
it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import attrs
import pytest

from stepengine.data.codec import to_json
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.models import ModelReply
from stepengine.errors import ModelError
from stepengine.models.anthropic import decode as anthropic
from stepengine.models.google import decode as google
from stepengine.models.openai import decode as openai
from stepengine.models.openai_chat import decode as openai_chat
from tests.models.members import (
    DECODE,
    TOMORROW,
    at_once,
    bodies_of,
    in_pieces,
    lost_by,
    objects_in,
    stream_of,
    types_of,
    with_more,
)
from tests.models.wires import FOUR, MODEL, made, sent

WAYS: dict[str, Callable[[str, dict[str, Any]], ModelReply]] = {
    "at once": at_once,
    "in pieces": lambda wire, body: in_pieces(wire, stream_of(wire, body)),
}


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP59", "requirements:G5")
@pytest.mark.parametrize("name", FOUR)
def test_every_known_reply_member_is_read_kept_or_listed(name) -> None:
    """Streams are held by the equality below, over the same bodies."""
    kind, *path = types_of()[name]

    assert set() == lost_by(lambda body: to_json(at_once(name, body)), kind, *path)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP58", "reliability:MP59")
@pytest.mark.parametrize("name", FOUR)
def test_any_reply_decodes_the_same_streamed_and_whole(name) -> None:
    def read(came: str, body: dict[str, Any]) -> object:
        try:
            return WAYS[came](name, body)
        except ModelError as error:
            return error.kind, str(error)

    for body in bodies_of(name):
        assert read("at once", body) == read("in pieces", body)


@pytest.mark.spec("ecosystem:EC97")
def test_every_known_stop_reason_is_mapped() -> None:
    from anthropic.types.beta import BetaStopReason
    from google.genai.types import FinishReason
    from openai.types.chat.chat_completion import Choice
    from openai.types.responses import ResponseStatus
    from openai.types.responses.response import IncompleteDetails

    gemini = {word.value for word in FinishReason} - {"FINISH_REASON_UNSPECIFIED"}
    (why,) = [kind for kind in get_args(IncompleteDetails.model_fields["reason"].annotation) if kind is not type(None)]

    assert set() == set(get_args(BetaStopReason)) - {*anthropic.STOPS, anthropic.OVERFLOW}
    assert set() == gemini - {*google.STOPS, *google.MALFORMED, *google.GIVEN_UP, google.UNSIGNED}
    assert set() == set(get_args(Choice.model_fields["finish_reason"].annotation)) - openai_chat.STOPS.keys()
    assert set() == set(get_args(ResponseStatus)) - {*openai.STOPS, "incomplete"}
    assert set() == set(get_args(why)) - openai.INCOMPLETE.keys()


# --- what no SDK knows yet --------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("came", WAYS)
@pytest.mark.parametrize("name", FOUR)
def test_unknown_reply_member_is_kept_anywhere(name, came) -> None:
    tried = set()
    for body in bodies_of(name):
        with suppress(ModelError):
            at_once(name, body)
            for path in objects_in(body):
                place = (*[step for step in path if isinstance(step, str)], str(held_at(body, path).get("type")))
                if place not in tried:
                    tried.add(place)
                    assert TOMORROW["tomorrow"] in json.dumps(to_json(WAYS[came](name, with_more(body, path)))), place

    assert len(tried) > 20


def held_at(value: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


CALLS = {
    "anthropic": {
        "type": "tool_use", "id": "t", "name": "look", "input": {"at": "1"},
        "caller": {"type": "code_execution_20260120", "tool_id": "s"}, "toolset_name": "eyes",
    },
    "openai": {
        "type": "function_call", "call_id": "t", "name": "look", "arguments": '{"at":"1"}',
        "caller": {"type": "program", "caller_id": "p"},
    },
}  # fmt: skip
REPLIES = {
    "anthropic": lambda call: {"model": "m", "content": [call], "stop_reason": "tool_use"},
    "openai": lambda call: {"model": "m", "output": [call], "status": "completed"},
}


@pytest.mark.spec("reliability:MP59", "ecosystem:EC91")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another one"])
def test_extra_call_members_return_only_to_the_same_model(name, same) -> None:
    model = MODEL[name] if same else "another"
    (call,) = DECODE[name](REPLIES[name](CALLS[name]), made(name, model), model, None).tool_calls
    history = [
        UserMessage("go"),
        AssistantMessage([attrs.evolve(call, tool_call_id="c1")]),
        ToolMessage("c1", "look", ["x"]),
    ]
    asked = json.dumps(sent(name, *history)[1])  # a result of a call names its caller, too

    for member in CALLS[name].keys() & {"caller", "toolset_name"}:
        assert same == (json.dumps(CALLS[name][member]) in asked)


@pytest.mark.spec("reliability:MP59")
def test_direct_caller_of_a_call_is_not_sent_back() -> None:
    call = {**CALLS["anthropic"], "caller": {"type": "direct"}}
    (part,) = anthropic.decode(REPLIES["anthropic"](call), made("anthropic"), MODEL["anthropic"], None).tool_calls
    history = [
        UserMessage("go"),
        AssistantMessage([attrs.evolve(part, tool_call_id="c1")]),
        ToolMessage("c1", "look", ["x"]),
    ]

    assert "direct" not in json.dumps(sent("anthropic", *history))


SAID = {
    "anthropic": {
        "model": "m",
        "stop_reason": "end_turn",
        "content": [
            {"type": "thinking", "thinking": "Hm", "signature": "c2ln", "in_thinking": 1},
            {"type": "redacted_thinking", "data": "eA==", "in_redacted": 2},
            {"type": "text", "text": "Yes", "citations": None, "in_text": {"x": [3]}},
        ],
    },
    "openai": {
        "model": "m",
        "status": "completed",
        "output": [
            {
                "type": "message",
                "id": "i",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Yes", "annotations": [], "in_text": {"x": [3]}}],
                "in_item": 4,
            },
        ],
    },
    "google": {
        "candidates": [
            {
                "finishReason": "STOP",
                "content": {"parts": [{"text": "Hm", "thought": True, "in_thinking": 1}, {"text": "Yes", "in_text": [3]}]},
            }
        ],
    },
}  # fmt: skip


@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("name", SAID)
@pytest.mark.parametrize("came", WAYS)
@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another one"])
def test_unknown_text_and_thought_members_return_only_to_their_model(name, came, same) -> None:
    reply = WAYS[came](name, SAID[name])
    model = MODEL[name] if same else "another"
    content = [
        attrs.evolve(part, provider_data={**part.provider_data, "model": model}) if part.provider_data else part
        for part in reply.content
    ]
    items = sent(name, UserMessage("go"), AssistantMessage(content), UserMessage("on"))
    words = {
        member for path in objects_in(SAID[name]) for member in held_at(SAID[name], path) if member.startswith("in_")
    }

    assert words
    assert (words if same else set()) == {word for word in words if f'"{word}"' in json.dumps(items)}
    if same and name != "google":
        (written,) = [item for item in items if item.get("role") == "assistant"]
        blocks = SAID[name]["content"] if name == "anthropic" else SAID[name]["output"][0]["content"]
        assert [{k: v for k, v in block.items() if v is not None} for block in blocks] == written["content"]
