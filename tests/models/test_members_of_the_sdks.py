"""
Every member that the providers' SDKs know of a reply is read, carried along, or named here with the reason why not.

A reply is made in which each member of each type has a value of its own; what of these is not found again in the decoded reply
is what the list below has to name. A newer SDK that knows more fails here.
"""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import pytest
from pydantic import BaseModel

from stepengine.data.codec import to_json
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.errors import ModelError
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import decode as decode_chat
from tests.models.wires import FOUR, MODEL, made, sent

DEEPEST = 7
ASKED = "told back of what was asked"
REST = "the same for every reply"
NAMED: dict[str, str] = {
    **dict.fromkeys(
        [
            f"Response.{member}"
            for member in (
                *(
                    "access_programs",
                    "background",
                    "image",
                    "instructions",
                    "max_output_tokens",
                    "max_tool_calls",
                    "metadata",
                ),
                *(
                    "parallel_tool_calls",
                    "prompt",
                    "prompt_cache_key",
                    "prompt_cache_options",
                    "prompt_cache_retention",
                ),
                *("reasoning", "safety_identifier", "temperature", "text", "tool_choice", "tools", "top_logprobs"),
                *("top_p", "truncation", "user"),
            )
        ],
        ASKED,
    ),
    "ChatCompletion.metadata": ASKED,
    **dict.fromkeys(
        ("ChatCompletion.object", "Response.object", "BetaMessage.role", "BetaMessage.type", "Content.role"), REST
    ),
    **dict.fromkeys(("ChatCompletionMessage.role", "ResponseOutputMessage.role"), REST),
    **dict.fromkeys(("Choice.index", "Candidate.index"), "one reply is asked for, and the first is taken"),
    **dict.fromkeys(
        (
            "ChatCompletion.created",
            "Response.created_at",
            "Response.completed_at",
            "GenerateContentResponse.createTime",
        ),
        "the journal has its own time, and a reply shall be equal when it is given again",
    ),
    "Response.error": "a response with it is no reply",
    "ResponseFunctionToolCall.async": "a call with it is refused, as it waits for an answer in another way",
    "ChatCompletionMessage.function_call": "older than tool_calls, and repeats them where both are there",
    "FunctionCall.partialArgs": "streamed: tests/models/test_streamed_arguments.py",
    "FunctionCall.willContinue": "streamed: tests/models/test_streamed_arguments.py",
    **dict.fromkeys(
        [
            f"GenerateContentResponse.{name}"
            for name in ("sdkHttpResponse", "parsed", "automaticFunctionCallingHistory")
        ],
        "made by the SDK",
    ),
}
"""What is neither read nor carried along, and why."""
READ: dict[str, str] = {
    "BetaMessage.model": "where another model stood in, that one is told of",
    **dict.fromkeys(
        ("BetaRedactedThinkingBlock.type", "ChatCompletionMessageFunctionToolCall.type", "ResponseOutputText.type"),
        "a part of that kind is made of it",
    ),
    "Part.thought": "a part of that kind is made of it",
}
"""What is read and not found again by its value."""


class Maker:
    """Makes values of types, and remembers which member each leaf is the value of."""

    def __init__(self) -> None:
        self.leaves: list[tuple[str, str, Any]] = []
        self.members: set[str] = set()
        self._numbers = itertools.count(100_001)

    def of(self, kind: Any, owner: str, member: str, above: tuple[Any, ...] = ()) -> Iterator[Any]:
        """Values of *kind*, one for each of its variants."""
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Literal:
            yield self._leaf(owner, member, inner[0])
        elif hasattr(kind, "__metadata__"):
            yield from self.of(inner[0], owner, member, above)
        elif origin in (Union, types.UnionType):
            for variant in inner:
                if variant is not type(None):
                    yield from self.of(variant, owner, member, above)
        elif origin is list:
            yield list(self.of(inner[0], owner, member, above))
        elif inspect.isclass(kind) and issubclass(kind, BaseModel):
            if kind not in above and len(above) < DEEPEST:
                yield from self._objects(kind, (*above, kind))
        else:
            yield self._leaf(owner, member, self._plain(kind, f"{owner}.{member}"))

    def _objects(self, kind: type[BaseModel], above: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
        """One object with the first variant of every member, and one more for every further variant."""
        first: dict[str, Any] = {}
        more: list[tuple[str, Any]] = []
        for name, field in kind.model_fields.items():
            key = field.alias or name
            self.members.add(f"{kind.__name__}.{key}")
            if f"{kind.__name__}.{key}" in NAMED:
                continue
            values = list(self.of(field.annotation, kind.__name__, key, above))
            if values:
                first[key] = values[0]
                more += [(key, value) for value in values[1:]]
        yield first
        for key, value in more:
            yield {**first, key: value}

    def _plain(self, kind: Any, path: str) -> Any:
        number = next(self._numbers)
        if kind is bool:
            return True
        if kind in (int, float):
            return number
        if kind is bytes:
            return base64.b64encode(b"\x89PNG" + str(number).encode()).decode()
        if kind is datetime:
            return "2026-01-01T00:00:00Z"
        if inspect.isclass(kind) and issubclass(kind, Enum):
            return next((one.value for one in kind), "MEMBER_OF_TOMORROW")
        if kind is str and path == "ChatCompletionAudio.data":
            return base64.b64encode(b"ID3" + str(number).encode()).decode()
        if kind is str:
            return f"{path}~{number}"
        return {"inside": f"{path}~{number}"}

    def _leaf(self, owner: str, member: str, value: Any) -> Any:
        self.leaves.append((owner, member, value))
        return value


def leaves_in(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves_in(inner, name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves_in(inner, key)
    else:
        yield key, json.dumps(value)


def alone(value: dict[str, Any], *path: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each item of the list at *path*, and *value* with it alone in that list, and of lists on the way their first."""
    name, *rest = path
    inner = value.get(name)
    if isinstance(inner, list):
        for item in inner:
            if rest:
                yield from ((last, {**value, name: [one]}) for last, one in alone(item, *rest))
            else:
                yield item, {**value, name: [item]}
    elif isinstance(inner, dict):
        yield from ((last, {**value, name: one}) for last, one in alone(inner, *rest))
    else:
        yield {}, value


def lost_by(decode: Callable[..., Any], kind: type[BaseModel], provider: str, *path: str) -> set[str]:
    """The members of *kind* and all below it whose values stand in no reply that is decoded of them."""
    maker, found, text = Maker(), set[tuple[str, str]](), []
    for whole in list(maker.of(kind, "", "")):
        for item, one in alone(whole, *path):
            try:
                reply = to_json(decode(one, made(provider), "m", None))
            except ModelError as error:
                if error.kind != "unanswerable":
                    raise
                found.update(leaves_in(item))
                continue
            found.update(leaves_in(reply))
            text.append(json.dumps(reply))
    everything = "".join(text)
    return {
        f"{owner}.{member}"
        for owner, member, value in maker.leaves
        for key, plain in leaves_in(value, member)
        if f"{owner}.{member}" not in READ
        and (key, plain) not in found
        and (len(plain) <= 5 or plain.strip('"') not in everything)
    }


def types_of() -> dict[str, tuple[Any, ...]]:
    from anthropic.types.beta import BetaMessage
    from google.genai.types import GenerateContentResponse
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    return {
        "anthropic": (decode_anthropic, BetaMessage, "anthropic", "content"),
        "openai": (decode_responses, Response, "openai", "output"),
        "openai_chat": (decode_chat, ChatCompletion, "openai_chat", "choices", "message", "tool_calls"),
        "google": (decode_google, GenerateContentResponse, "google", "candidates", "content", "parts"),
    }


@pytest.mark.spec("reliability:MP59", "requirements:G5")
@pytest.mark.parametrize("name", FOUR)
def test_every_member_that_an_sdk_knows_of_a_reply_is_read_carried_or_named(name) -> None:
    assert set() == lost_by(*types_of()[name])


def test_what_is_named_is_still_there() -> None:
    known = set()
    for _, kind, *_ in types_of().values():
        maker = Maker()
        assert list(maker.of(kind, "", ""))
        known |= maker.members

    assert set() == (NAMED.keys() | READ.keys()) - known


def test_a_member_of_tomorrow_is_noticed() -> None:
    from openai.types.chat import ChatCompletion

    class Tomorrow(ChatCompletion):
        dream: str
        dreams: list[str]

    assert {"Tomorrow.dream", "Tomorrow.dreams"} <= lost_by(
        decode_chat, Tomorrow, "openai_chat", "choices", "message", "tool_calls"
    )


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
def test_what_a_call_holds_beside_its_arguments_goes_back_to_the_model_that_made_it_alone(name, same) -> None:
    model = MODEL[name] if same else "another"
    decode = types_of()[name][0]
    (call,) = decode(REPLIES[name](CALLS[name]), made(name, model), model, None).tool_calls
    history = [
        UserMessage("go"),
        AssistantMessage([attrs.evolve(call, tool_call_id="c1")]),
        ToolMessage("c1", "look", ["x"]),
    ]
    items = json.dumps(sent(name, *history))

    for member in CALLS[name].keys() & {"caller", "toolset_name"}:
        assert same == (json.dumps(CALLS[name][member]) in items)


@pytest.mark.spec("reliability:MP59")
def test_that_a_model_itself_called_is_not_said_again() -> None:
    call = {**CALLS["anthropic"], "caller": {"type": "direct"}}
    (part,) = decode_anthropic(REPLIES["anthropic"](call), made("anthropic"), MODEL["anthropic"], None).tool_calls
    history = [
        UserMessage("go"),
        AssistantMessage([attrs.evolve(part, tool_call_id="c1")]),
        ToolMessage("c1", "look", ["x"]),
    ]

    assert "direct" not in json.dumps(sent("anthropic", *history))
