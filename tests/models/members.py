"""What the providers' SDKs know of replies, made into bodies in which every member has a value of its own."""

from __future__ import annotations

import base64
import inspect
import itertools
import json
import types
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from stepengine.data.models import ModelReply
from stepengine.errors import ModelError
from stepengine.models.anthropic.decode import decode as decode_anthropic
from stepengine.models.google.decode import decode as decode_google
from stepengine.models.openai.decode import decode as decode_responses
from stepengine.models.openai_chat.decode import decode as decode_chat
from tests.faults.scripts import event, unnamed
from tests.models.wires import made, reader

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
    "Response.error": "a response with it is not a reply",
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
        if kind is str and path in {"ChatCompletionAudio.data", "ChoiceDeltaAudio.data"}:
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
    if not path:
        yield {}, value
        return
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


def lost_by(read: Callable[[dict[str, Any]], Any], kind: Any, *path: str) -> set[str]:
    """The members of *kind* and all below it whose values stand in nothing that *read* makes of them."""
    maker, found, text = Maker(), set[tuple[str, str]](), []
    for whole in list(maker.of(kind, "", "")):
        for item, one in alone(whole, *path):
            try:
                reply = read(one)
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


DECODE = {
    "anthropic": decode_anthropic,
    "openai": decode_responses,
    "openai_chat": decode_chat,
    "google": decode_google,
}


def types_of() -> dict[str, tuple[Any, ...]]:
    """The type of a reply on every wire, and the way to what it is a list of."""
    from anthropic.types.beta import BetaMessage
    from google.genai.types import GenerateContentResponse
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    return {
        "anthropic": (BetaMessage, "content"),
        "openai": (Response, "output"),
        "openai_chat": (ChatCompletion, "choices", "message", "tool_calls"),
        "google": (GenerateContentResponse, "candidates", "content", "parts"),
    }


def at_once(wire: str, body: dict[str, Any]) -> ModelReply:
    """The reply that comes as *body* in one piece."""
    return DECODE[wire](body, made(wire), "m", None)


@cache
def bodies_of(wire: str) -> tuple[dict[str, Any], ...]:
    """A body with every member of every type, one item in each; of Gemini also each kind of part by itself."""
    kind, *path = types_of()[wire]
    found = list[dict[str, Any]]()
    for whole in list(Maker().of(kind, "", "")):
        for item, one in alone(whole, *path):
            found.append(one)
            if wire == "google":
                for part in ({"text": "x"}, {"text": "x", "thought": True}, *[{name: item[name]} for name in item]):
                    candidate = {**one["candidates"][0], "content": {"role": "model", "parts": [part]}}
                    found.append({**one, "candidates": [candidate]})
    return tuple(found)


# --- in pieces --------------------------------------------------------------------------------------------------------


def stream_of(wire: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream that brings *body*, each item of it at once."""
    if wire == "google":
        return [body]
    if wire == "openai_chat":
        choices = [{**choice, "delta": choice["message"]} for choice in body["choices"]]
        return [{**body, "choices": [{k: v for k, v in choice.items() if k != "message"} for choice in choices]}]
    if wire == "openai":
        items = [
            {"type": f"response.output_item.{stage}", "output_index": index, "item": item}
            for index, item in enumerate(body["output"])
            for stage in ("added", "done")
        ]
        begin = {"type": "response.created", "response": {**body, "output": []}}
        return [begin, *items, {"type": "response.completed", "response": body}]
    blocks: list[dict[str, Any]] = []
    for index, block in enumerate(body["content"]):
        blocks += [
            {"type": "content_block_start", "index": index, "content_block": block},
            {"type": "content_block_stop", "index": index},
        ]
    begin = {"type": "message_start", "message": {**body, "content": []}}
    return [begin, *blocks, {"type": "message_delta", "delta": {}, "usage": {}}, {"type": "message_stop"}]


def written(wire: str, events: list[dict[str, Any]]) -> list[bytes]:
    return [event(data) if wire in {"anthropic", "openai"} else unnamed(data) for data in events]


def in_pieces(wire: str, events: list[dict[str, Any]]) -> ModelReply:
    """The reply that comes as *events*."""
    it = reader(wire)
    for data in written(wire, events):
        it.feed(data)
    return it.finish()


def objects_in(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The way to every object in *value*."""
    if isinstance(value, dict):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects_in(inner, (*path, key))


TOMORROW = {"tomorrow": "a member of tomorrow"}


def with_more(value: Any, path: tuple[str | int, ...]) -> Any:
    """*value* with a member that nobody knows in the object at *path*."""
    if not path:
        return {**value, **TOMORROW}
    step, *rest = path
    inner = with_more(value[step], tuple(rest))
    return {**value, step: inner} if isinstance(value, dict) else [*value[:step], inner, *value[step + 1 :]]
