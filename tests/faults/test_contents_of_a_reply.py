"""
What a complete reply may hold that nobody asked for: odd arguments, ids, stop reasons, usage, parts. On every wire, streamed
and in one piece, where the wire can say it at all.
"""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.spec("reliability:MP52")
async def test_an_empty_reply_is_a_reply(wire):
    reply = await both(wire, "", [], "end_turn")
    assert (reply.content, reply.stop_reason) == ((), StopReason.END_TURN)


@pytest.mark.spec("reliability:MP62")
async def test_a_reply_names_another_model_that_answered(wire):
    own = await both(wire, "hello", [], "end_turn")
    assert own.model is None
    name = wire.model.partition("/")[2]
    reply = await both(wire, "hello", [], "end_turn", swap((f'"{name}"', '"routed-elsewhere"')))
    assert reply.model == f"{wire.name}/routed-elsewhere"
