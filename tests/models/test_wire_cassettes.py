"""
Our own recordings of the four wires prove the codecs in every clone: what is sent, what comes back, in one piece and in
streams (``cassettes/record_wires.py`` says what is in them).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cassettes import record_wires as wires
from stepengine.data.messages import ThinkingPart, ToolCallPart
from stepengine.data.models import (
    StopReason,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._byte_reader import ReplyReader
from stepengine.models._failures import RequestLabel
from stepengine.models.base import split_reply_into_deltas
from stepengine.models.keys import Credentials
from stepengine.models.openai_chat.decode import ChatAccumulator
from stepengine.testing import Cassette, ReplayTransport
from tests.models.wires import ACCUMULATORS

FOLDER = Path(__file__).resolve().parents[2] / "cassettes"


WIRES = {wire.name: wire for wire in wires.FOUR}
USED = {"anthropic": (25, 12, 5, 2)}
EXPECTED: dict[str, list[tuple[StopReason, list[Any]]]] = {
    "text": [(StopReason.END_TURN, ["It is five: 2 + 3 = 5. \u2713"])],
    "calls": [
        (StopReason.TOOL_USE, ["I add both.", {"a": 2, "b": 3}, {"a": 4, "b": 5}]),
        (StopReason.END_TURN, ["They are 5 and 9."]),
    ],
    "thinking": [
        (StopReason.TOOL_USE, ["Two and three.\nThat is a sum.", "Let me see.", {"a": 2, "b": 3}]),
        (StopReason.END_TURN, ["It is 5."]),
    ],
    "refusal": [(StopReason.REFUSAL, ["I will not say that."])],
    "cut": [(StopReason.MAX_TOKENS, ["One, two, three"])],
    "media": [(StopReason.END_TURN, ["One pixel, and a page of two words."])],
}
EACH = [(wire, scene, stream) for wire in WIRES for scene, what in wires.SCENES.items() for stream in wires.ways(what)]


@cache
def interactions(wire: str) -> tuple[Any, ...]:
    return Cassette.load(wires.WIRES / f"{wire}.yaml").interactions


def cassette(wire: str) -> Cassette:
    return Cassette(interactions(wire))


def said(reply: Any) -> tuple[StopReason, list[Any]]:
    return reply.stop_reason, [p.input if type(p) is ToolCallPart else p.text for p in reply.content]


async def played(wire: str, scene: str, *, stream: bool) -> tuple[list[Any], Cassette]:
    recorded = cassette(wire)
    provider = WIRES[wire].provider(ReplayTransport(recorded))
    try:
        return await wires.converse(WIRES[wire], provider, wires.SCENES[scene], stream=stream), recorded
    finally:
        await provider.close()


@pytest.mark.spec("ecosystem:EC57", "ecosystem:EC58", "ecosystem:EC83", "ecosystem:EC86", "ecosystem:EC96")
@pytest.mark.spec("requirements:G1", "requirements:G5")
@pytest.mark.parametrize(("wire", "scene", "stream"), EACH)
async def test_recorded_exchange_is_sent_unchanged_and_decodes_as_expected(wire, scene, stream):
    """
    A request that differs in one member of its body is not in the cassette.
    """
    outcomes, _ = await played(wire, scene, stream=stream)

    if scene in ("error", "breaks off"):
        (error,) = outcomes
        kinds = {"error": (ModelError, 429, True), "breaks off": (TruncatedReply, None, True)}
        assert kinds[scene] == (type(error), error.status, error.retryable)
        assert scene != "error" or "You ask too often." in error.message
        return
    silent = wire == "google" and scene == "refusal"  # a candidate that was blocked holds nothing
    assert [(stop, [] if silent else parts) for stop, parts in EXPECTED[scene]] == [said(reply) for reply in outcomes]
    for reply in outcomes:
        usage = reply.usage
        figures = (usage.input_tokens, usage.output_tokens, usage.cache_read_tokens, usage.cache_write_tokens)
        assert figures == USED.get(wire, (25, 12, 5, 0))


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("requirements:G1", "requirements:G5")
@pytest.mark.parametrize(("wire", "scene"), [(wire, scene) for wire in WIRES for scene in EXPECTED])
async def test_a_stream_gives_the_same_reply_as_one_piece(wire, scene):
    plain, _ = await played(wire, scene, stream=False)
    streamed, _ = await played(wire, scene, stream=True)

    assert [(reply.content, reply.usage, reply.stop_reason) for reply in plain] == [
        (reply.content, reply.usage, reply.stop_reason) for reply in streamed
    ]


@pytest.mark.spec("interfaces:IF12", "requirements:G5")
@pytest.mark.spec("ecosystem:EC71", "ecosystem:EC72", "ecosystem:EC73", "ecosystem:EC74", "reliability:MP20")
@pytest.mark.parametrize("wire", WIRES)
def test_stream_is_chunk_independent_and_truncated_before_its_end(wire):
    bodies = [i.response.body for i in interactions(wire)]
    streams = [body for body in bodies if body.lstrip().startswith((b"data:", b"event:"))]
    assert 9 == len(streams)

    for body in streams[:-1]:  # the last one breaks off
        whole = read(wire, [body])
        for size in (1, 7, 4_096):
            assert whole == read(wire, [body[n : n + size] for n in range(0, len(body), size)])
        text = "".join([d.text for d in whole[0] if isinstance(d, TextChunk)])
        thoughts = "".join([d.text for d in whole[0] if isinstance(d, ThinkingChunk)])
        assert text == "".join([p.text for p in whole[1].content if type(p).__name__ in ("TextPart", "RefusalPart")])
        assert thoughts == "".join([p.text for p in whole[1].content if type(p) is ThinkingPart])
        for deltas in (whole[0], [*split_reply_into_deltas(whole[1])]):
            check_calls(deltas, whole[1].tool_calls)
        refused_before_its_end(wire, body)


def check_calls(deltas: list[Any], calls: Any) -> None:
    """Each call has its place in the reply as its number, starts in that order, and gets all of its arguments."""
    started = [(delta.index, delta.tool_name) for delta in deltas if isinstance(delta, ToolCallStarted)]
    assert started == [*enumerate([call.tool_name for call in calls])]
    assert sorted(delta.index for delta in deltas if isinstance(delta, ToolCallEnded)) == [*range(len(calls))]
    for number, call in enumerate(calls):
        text = "".join([d.text for d in deltas if isinstance(d, ToolCallChunk) and d.index == number])
        assert json.loads(text or "{}") == call.input


def reader(wire: str) -> ReplyReader:
    call = RequestLabel(provider=wire, model=WIRES[wire].model, credentials=Credentials(None, "no key"))
    return ReplyReader(ACCUMULATORS.get(wire, ChatAccumulator)(call, "m", None), call)


def read(wire: str, pieces: list[bytes]) -> tuple[list[Any], Any]:
    opened, deltas = reader(wire), []
    for piece in pieces:
        deltas += opened.feed(piece)
    return deltas, opened.finish()


def refused_before_its_end(wire: str, body: bytes) -> None:
    events = body.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
    ends = {"anthropic": 1, "openai": 1, "openai_chat": 3, "google": 1}[wire]
    for kept in range(len(events) - ends + 1):
        with pytest.raises(TruncatedReply):
            read(wire, [event + b"\n\n" for event in events[:kept]])
