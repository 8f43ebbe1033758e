"""
``check_provider``: bundled providers keep the promises against a scripted server, and a provider that breaks one is told which.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from stepengine.errors import ModelError
from stepengine.models import (
    AnthropicProvider,
    BedrockProvider,
    GoogleInteractionsProvider,
    GoogleProvider,
    ModelReply,
    OpenAIChatProvider,
    OpenAIProvider,
    Provider,
    ReplyDone,
)
from stepengine.testing import check_provider, text, tool_call
from tests.faults.scripts import converse_events, converse_reply, interactions_reply, interactions_stream
from tests.model_server import ANSWERS, ModelServer, model_server

NOBODY = "http://127.0.0.1:9"
BUNDLED: dict[str, tuple[Callable[[str], Provider], str]] = {
    "anthropic": (lambda url: AnthropicProvider("key", url), "claude-sonnet-5"),
    "openai": (lambda url: OpenAIProvider("key", f"{url}/v1"), "gpt-5"),
    "openai-chat": (lambda url: OpenAIChatProvider("gateway", "key", f"{url}/v1"), "gpt-5"),
    "google": (lambda url: GoogleProvider("key", url), "gemini-2.5-flash"),
    "google-interactions": (lambda url: GoogleInteractionsProvider("key", url), "gemini-3-pro"),
    "bedrock-converse": (
        lambda url: BedrockProvider("key", url, region="us-east-1", endpoint="converse"),
        "amazon.nova-pro-v1:0",
    ),
}


def in_pieces(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """
    Answer as OpenAI's Responses do, with the deltas that the shorter answer of the model server leaves out.
    """
    whole, events = ANSWERS["/responses"](body)
    (item,) = whole["output"]
    if item["type"] == "message":
        word, place, whole_text = "output_text", {"content_index": 0}, item["content"][0]["text"]
    else:
        word, place, whole_text = "function_call_arguments", {}, item["arguments"]
    kind = f"response.{word}.delta"
    event = {"type": kind, "item_id": item["id"], "output_index": 0, "sequence_number": 2, "delta": whole_text, **place}
    return whole, [*events[:2], f"event: {kind}\ndata: {json.dumps(event)}\n\n", *events[2:]]


def last_text(value: Any) -> str:
    """
    Return the last text of messages that hold it as `text` or, for a result of a tool, as `result`.
    """
    found = re.findall(r'"(?:text|result)": "([^"]*)"', json.dumps(value))
    return found[-1]


def say_or_call(messages: Any, tools: list[str], has_result: bool) -> tuple[str, list[tuple[str, str]], str]:
    """
    Return text, calls and stop reason of a reply: a call of the first tool, or the last text.
    """
    if tools and not has_result:
        return "", [(tools[0], '{"city": "Oslo"}')], "tool_use"
    return last_text(messages), [], "end_turn"


def by_interactions(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    has_result = any(step["type"] == "function_result" for step in body["input"])
    said = say_or_call(body["input"], [tool["name"] for tool in body.get("tools", [])], has_result)
    return json.loads(interactions_reply(*said)), [event.decode() for event in interactions_stream(*said)]


def by_converse(body: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    tools = [tool["toolSpec"]["name"] for tool in body.get("toolConfig", {}).get("tools", [])]
    said = say_or_call(body["messages"], tools, "toolResult" in json.dumps(body["messages"]))
    return json.loads(converse_reply(*said)), [json.dumps(event) for event in converse_events(*said)]


MORE_ANSWERS = {"/responses": in_pieces, "/interactions": by_interactions, "/converse": by_converse}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    monkeypatch.setattr("tests.model_server.ANSWERS", {**ANSWERS, **MORE_ANSWERS})
    with model_server() as running:
        yield running


@pytest.mark.deep
@pytest.mark.spec("providers:PV139")
@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_providers_keep_the_promises(name: str, server: ModelServer) -> None:
    construct, model = BUNDLED[name]

    def make(situation: str) -> Provider:
        server.failures = [429] if situation == "refused" else []
        server.cut = 20 if situation == "cut" else None
        urls = {"unreachable": NOBODY, "silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        return construct(urls.get(situation, server.url))

    with socket.create_server(("127.0.0.1", 0)) as silent:
        check_provider(make, model)


class Parrot(Provider):
    """
    The smallest provider: its server is the situation.
    """

    name = "parrot"

    def __init__(self, situation: str) -> None:
        self.situation = situation
        self.is_closed = False

    async def complete(self, request: Any) -> ModelReply:
        if self.situation == "silent":
            await asyncio.sleep(3_600)
        if self.situation != "normal":
            raise ModelError("not now", retryable=True)
        last = request.all_messages[-1]
        if request.tools and last.role != "tool":
            return tool_call("weather", {"city": "Oslo"})
        return text(last.text)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("providers:PV139")
def test_the_smallest_provider_keeps_the_promises() -> None:
    check_provider(Parrot, "small")


class WithASlash(Parrot):
    name = "a/parrot"


class SendsNothing(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        await super().complete(request)
        return text("hello")


class EndsTwice(Parrot):
    async def stream(self, request: Any) -> Any:
        async for delta in super().stream(request):
            yield delta
            if isinstance(delta, ReplyDone):
                yield delta


class StreamsLess(Parrot):
    async def stream(self, request: Any) -> Any:
        yield ReplyDone(await self.complete(request))


class CallsAnotherTool(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        reply = await super().complete(request)
        return tool_call("wether", {"city": "Oslo"}) if reply.tool_calls else reply


class StopsForNoReason(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        reply = await super().complete(request)
        return attrs.evolve(reply, stop_reason="end_turn") if reply.tool_calls else reply


class MixesRequests(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        self.request = request
        await asyncio.sleep(0)
        return await super().complete(self.request)


class ClosesForGood(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        if self.is_closed:
            raise ModelError("it is closed")
        return await super().complete(request)

    async def close(self) -> None:
        self.is_closed = True


class GivesUp(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        try:
            return await super().complete(request)
        except ModelError:
            raise ModelError("never") from None


class RaisesItsOwn(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        if self.situation == "unreachable":
            raise ConnectionRefusedError("nobody listens")
        return await super().complete(request)


class TriesAgain(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        self.situation = "normal" if self.situation == "refused" else self.situation
        return await super().complete(request)


class EndsCutStreams(Parrot):
    async def stream(self, request: Any) -> Any:
        if self.situation == "cut":
            yield ReplyDone(text("a her"))
            return
        async for delta in super().stream(request):
            yield delta


class IgnoresTheCancel(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        try:
            return await super().complete(request)
        except asyncio.CancelledError:
            return text("too late")


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (WithASlash, "name"),
        (SendsNothing, "complete"),
        (EndsTwice, "stream"),
        (StreamsLess, "stream"),
        (CallsAnotherTool, "tools"),
        (StopsForNoReason, "tools"),
        (MixesRequests, "concurrency"),
        (ClosesForGood, "reuse"),
        (GivesUp, "refused"),
        (TriesAgain, "refused"),
        (RaisesItsOwn, "unreachable"),
        (EndsCutStreams, "cut"),
        (IgnoresTheCancel, "cancel"),
    ],
)
def test_a_broken_promise_is_named_and_can_be_checked_alone(kind: type[Parrot], promise: str) -> None:
    for only in (promise, ""):
        with pytest.raises(AssertionError, match=f"broken promise '{promise}'") as caught:
            check_provider(kind, "small", only=only)

        assert f"check_provider(make, model, only={promise!r})" in str(caught.value)


def only_normal(situation: str) -> Provider | None:
    return Parrot(situation) if situation == "normal" else None


@pytest.mark.spec("providers:PV139")
def test_unplayable_situations_are_skipped_only_on_purpose() -> None:
    with pytest.raises(AssertionError, match="unchecked promises:") as caught:
        check_provider(only_normal, "small", skip=["cut"])

    assert "'cancel': make('silent') returned None" in str(caught.value)
    assert "check_provider(make, model, skip=['refused', 'cut', 'unreachable', 'cancel'])" in str(caught.value)
    check_provider(only_normal, "small", skip=["refused", "cut", "unreachable", "cancel"])
    check_provider(only_normal, "small", only="stream")
    with pytest.raises(AssertionError, match="unchecked promises:"):
        check_provider(only_normal, "small", only="cut")


def test_an_unknown_promise_to_skip_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown promise 'silent'; valid promises: name, complete, "):
        check_provider(Parrot, "small", skip=["silent"])


class Blocks(Parrot):
    seconds = 2.5

    async def complete(self, request: Any) -> ModelReply:
        if self.situation == "silent":
            time.sleep(self.seconds)  # noqa: ASYNC251 - the mistake that the test finds
            raise ModelError("the server did not answer", retryable=True)
        return await super().complete(request)


@pytest.mark.deep
@pytest.mark.parametrize("cancel_seconds", [10.0, 0.5], ids=["the request times out", "the request never ends"])
def test_a_blocked_event_loop_is_named(
    cancel_seconds: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepengine.testing.conformance.providers.CANCEL_SECONDS", cancel_seconds)
    with pytest.raises(AssertionError, match=r"broken promise 'cancel'.*\n.*blocks the event loop"):
        check_provider(Blocks, "small", only="cancel")
    assert "never retrieved" not in caplog.text


class FailsAtOnce(Parrot):
    async def complete(self, request: Any) -> ModelReply:
        if self.situation == "silent":
            raise ModelError("the server is gone", retryable=True)
        return await super().complete(request)


def test_error_of_a_request_that_does_not_wait_is_shown() -> None:
    with pytest.raises(
        AssertionError, match=r"broken promise 'cancel'.*\n.*the request ended with .*the server is gone"
    ):
        check_provider(FailsAtOnce, "small", only="cancel")
