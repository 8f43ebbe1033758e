"""
What a complete reply may hold that nobody asked for: odd arguments, ids, stop reasons, usage, parts. On every wire, streamed
and in one piece, where the wire can say it at all.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepengine.data.messages import RefusalPart
from stepengine.data.models import ModelReply, StopReason
from tests.faults.scripts import WIRES, Wire
from tests.faults.server import json_answer, sse
from tests.faults.test_adapters import asked

pytestmark = pytest.mark.parametrize("wire", WIRES, ids=str)

HOLDS_TEXT = ("openai", "openai_chat", "anthropic")
"""The wires on which arguments are a text and can be anything; Gemini's are a part of the JSON body."""


async def both(wire: Wire, text: str, calls: list[tuple[str, str]], stop: str, change: Any = None) -> ModelReply:
    """The reply of a stream, checked to be that of the body in one piece too."""
    change = change or (lambda data: data)
    streaming, _ = await asked(wire, sse(*[change(event) for event in wire.stream(text, calls, stop)], "fin"))
    assert isinstance(streaming, ModelReply), streaming
    whole, _ = await asked(wire, json_answer(change(wire.reply(text, calls, stop))), stream=False)
    assert isinstance(whole, ModelReply), whole
    assert (streaming.content, streaming.stop_reason, streaming.usage) == (
        whole.content,
        whole.stop_reason,
        whole.usage,
    )
    return streaming


def swap(*pairs: tuple[str, str]) -> Any:
    """A change of the bytes: of each pair the second for the first."""

    def change(data: bytes) -> bytes:
        for old, new in pairs:
            data = data.replace(old.encode(), new.encode())
        return data

    return change


@pytest.mark.spec("replay:J7")
async def test_lone_surrogates_become_replacement_characters(wire):
    change = swap(("SURROGATE", "x\\ud83dy"), ("INSIDE", "x\\\\ud83dy" if wire.name in HOLDS_TEXT else "x\\ud83dy"))
    events = [change(e) for e in wire.stream("abcSURROGATE", [("add", '{"abc": "INSIDE"}')], "tool_use")]
    reply, _ = await asked(wire, sse(*events, "fin"))
    assert reply.text == "abcx\ufffdy"
    assert reply.tool_calls[0].input == {"abc": "x\ufffdy"}


def stopping(wire: Wire, word: str) -> Any:
    """A change that puts another word in the place of the stop reason."""
    member = {"anthropic": "stop_reason", "openai": "status", "openai_chat": "finish_reason", "google": "finishReason"}
    name = member[wire.name]
    stops = ("end_turn", "stop", "completed", "STOP")
    return swap(*[(f'"{name}": "{stop}"', f'"{name}": "{word}"') for stop in stops])


@pytest.mark.spec("reliability:MP52")
async def test_an_empty_reply_is_a_reply(wire):
    reply = await both(wire, "", [], "end_turn")
    assert (reply.content, reply.stop_reason) == ((), StopReason.END_TURN)


REFUSED = {"anthropic": "refusal", "openai_chat": "content_filter", "google": "SAFETY"}


@pytest.mark.spec("reliability:MP54")
async def test_a_refusal_is_a_reply_that_says_so(wire):
    if wire.name == "openai":
        filtered = swap(
            ('"status": "completed", "error"', '"status": "incomplete", "error"'),
            ('"incomplete_details": null', '"incomplete_details": {"reason": "content_filter"}'),
            ("response.completed", "response.incomplete"),
        )
        reply = await both(wire, "", [], "end_turn", filtered)
        assert reply.raw_stop_reason == "content_filter"
        spoken = await both(wire, "No.", [], "end_turn", swap(('"output_text", "text"', '"refusal", "refusal"')))
        assert (spoken.stop_reason, [type(part) for part in spoken.content]) == (StopReason.REFUSAL, [RefusalPart])
    else:
        reply = await both(wire, "", [], "end_turn", stopping(wire, REFUSED[wire.name]))
        assert reply.raw_stop_reason == REFUSED[wire.name]
    assert (reply.content, reply.stop_reason) == ((), StopReason.REFUSAL)


@pytest.mark.spec("reliability:MP54", "ecosystem:EC74")
async def test_a_blocked_prompt_without_any_candidate_is_a_refusal(wire):
    if wire.name != "google":
        pytest.skip("only Gemini answers a blocked prompt without a candidate")
    body = json.dumps(
        {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, "usageMetadata": {"promptTokenCount": 3}}
    )
    for answer, stream in (
        (json_answer(body.encode()), False),
        (sse(b"data: " + body.encode() + b"\r\n\r\n", "fin"), True),
    ):
        reply, _ = await asked(wire, answer, stream=stream)
        assert (reply.content, reply.stop_reason, reply.raw_stop_reason) == (
            (),
            StopReason.REFUSAL,
            "PROHIBITED_CONTENT",
        )
        assert reply.usage.input_tokens == 3


@pytest.mark.spec("reliability:MP62")
async def test_a_reply_names_another_model_that_answered(wire):
    own = await both(wire, "hello", [], "end_turn")
    assert own.model is None
    name = wire.model.partition("/")[2]
    reply = await both(wire, "hello", [], "end_turn", swap((f'"{name}"', '"routed-elsewhere"')))
    assert reply.model == f"{wire.name}/routed-elsewhere"
