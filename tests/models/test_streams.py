"""Streams: tool calls in pieces, reasoning, events in an impossible order, and server-sent events however they are cut."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.data.json import thaw
from stepengine.data.messages import TextPart, ThinkingPart, UserMessage
from stepengine.data.models import ModelRequest, ModelSettings, TextChunk, ThinkingChunk
from stepengine.data.usage import Usage
from stepengine.errors import ModelError, TruncatedReply
from stepengine.models._sse import SSEParser
from tests.faults.scripts import chunk, event
from tests.models.wires import provider_of, reader
from tests.strategies import json_values

# --- tool calls in pieces -------------------------------------------------------------------------------------------


def pieces(*deltas: list[dict[str, Any]]) -> list[tuple[str, Any, Any]]:
    it = reader("vllm")
    for delta in deltas:
        it.feed(chunk({"tool_calls": delta}))
    it.feed(chunk({}, "tool_calls"))
    return [(c.tool_name, dict(c.input), c.provider_data.get("id")) for c in it.finish().tool_calls]


def piece(name: str | None = None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}, **more}


A, B = '{"n":1}', '{"n":2}'
TWO = [("f", {"n": 1}), ("f", {"n": 2})]


@pytest.mark.spec("ecosystem:EC116", "ecosystem:EC105", "ecosystem:EC106", "reliability:MP49")
@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        pytest.param([[piece("f", A, index=0, id="x")], [piece("f", B, index=1, id="y")]], [*TWO, "x", "y"], id="plain"),
        pytest.param([[piece("f", ""), piece("f", None)]], [("f", {}), ("f", {})], id="both in one chunk, no arguments"),
        pytest.param([[piece("get_", None, index=0)], [piece("it", None, index=0)], [piece(None, A, index=0)]], [("get_it", {"n": 1})], id="name in pieces"),
        pytest.param([[piece("f", None, index=0)]], [("f", {})], id="no arguments"),
        pytest.param([[piece("f", "", index=0)], [{"index": 0, "function": None}]], [("f", {})], id="empty arguments"),
        pytest.param([[piece("f", A, index=0, id="x"), piece("f", B, index=1, id="x")]], [*TWO, "x", "x"], id="one id twice"),
    ],
)  # fmt: skip
def test_chat_calls_are_assembled_from_all_known_piece_forms(deltas, calls):
    got = pieces(*deltas)
    assert [(name, value) for name, value, _ in got] == [c for c in calls if isinstance(c, tuple)]
    ids = [c for c in calls if isinstance(c, str)]
    assert [call_id for *_, call_id in got] == (ids or [None] * len(got))


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.spec("ecosystem:EC90", "ecosystem:EC91")
def test_streamed_reasoning_is_joined_and_kept_with_details():
    it = reader("openrouter")
    for text in ("Hm", "m."):
        detail = {"type": "reasoning.text", "text": text, "index": 0}
        it.feed(chunk({"reasoning": text, "reasoning_details": [detail], "content": ""}))
    it.feed(chunk({"reasoning_details": [{"type": "reasoning.text", "signature": "s", "text": "", "index": 0}]}))
    it.feed(
        chunk({"reasoning_details": [{"type": "reasoning.encrypted", "data": "d", "index": 1}], "content": "Five."})
    )
    it.feed(chunk({}, "stop", usage={"prompt_tokens": 3, "completion_tokens": 2, "cost": 0.25}))
    reply = it.finish()
    thinking, text = reply.content
    assert (type(thinking), thinking.text, text) == (ThinkingPart, "Hmm.", TextPart("Five."))
    assert thinking.provider_data["reasoning_details"] == [
        {"type": "reasoning.text", "text": "Hmm.", "index": 0, "signature": "s"},
        {"type": "reasoning.encrypted", "data": "d", "index": 1},
    ]
    assert float(reply.cost) == 0.25


@pytest.mark.spec("ecosystem:EC91", "ecosystem:EC111")
@pytest.mark.parametrize("index", [{"index": 0}, {}], ids=["with its number", "without a number"])
@pytest.mark.parametrize("text", [{}, {"text": None}, {"text": ""}], ids=["no text", "null", "empty"])
def test_signature_alone_ends_the_preceding_reasoning_piece(text, index):
    """Claude behind OpenRouter: torn from its text, the signature was refused with the next request."""
    kind = {"type": "reasoning.text", "format": "anthropic-claude-v1"}
    it = reader("openrouter")
    for number, said in ((0, "Hm"), (0, "m."), (0, ""), (1, "So.")):
        signed = {} if said else {"signature": f"s{number}", **text}
        place = index if signed else {"index": number}
        it.feed(chunk({"reasoning_details": [{**kind, **({"text": said} if said else {}), **signed, **place}]}))
    it.feed(chunk({"reasoning_details": [{**kind, "signature": "s1", **text, **({"index": 1} if index else {})}]}))
    it.feed(chunk({"content": "Five."}, "stop"))
    details = it.finish().content[0].provider_data["reasoning_details"]

    assert [("Hmm.", "s0", 0), ("So.", "s1", 1)] == [(d["text"], d["signature"], d["index"]) for d in details]


@pytest.mark.spec("ecosystem:EC91")
def test_a_signature_of_something_else_stays_for_itself():
    it = reader("openrouter")
    pieces = [
        {"type": "reasoning.text", "text": "Hm.", "signature": "s0", "index": 0},
        {"type": "reasoning.text", "signature": "s1", "index": 0},
        {"type": "reasoning.encrypted", "data": "d", "index": 0},
        {"type": "reasoning.encrypted", "data": "e", "signature": "s2", "index": 0},
    ]
    for piece in pieces:
        it.feed(chunk({"reasoning_details": [piece]}))
    it.feed(chunk({"content": "Five."}, "stop"))

    assert pieces == thaw(it.finish().content[0].provider_data["reasoning_details"])


@pytest.mark.spec("ecosystem:EC90", "requirements:G5")
def test_thought_under_two_names_is_shown_once_before_text():
    it = reader("vllm")
    shown = it.feed(chunk({"reasoning": "Hm", "reasoning_content": "Hm"}))
    shown += it.feed(chunk({"content": "Five.", "reasoning": "m.", "reasoning_content": "m."}))
    it.feed(chunk({}, "stop"))

    assert [ThinkingChunk("Hm"), ThinkingChunk("m."), TextChunk("Five.")] == shown
    thinking, text = it.finish().content
    assert ("Hmm.", "reasoning_content", TextPart("Five.")) == (thinking.text, thinking.provider_data["member"], text)


START = event(
    {"type": "message_start", "message": {"id": "m", "content": [], "usage": {"input_tokens": 7, "output_tokens": 1}}}
)
BLOCK = event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
DELTA = event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "x"}})


@pytest.mark.spec("reliability:MP19", "reliability:MP59", "ecosystem:EC71")
def test_lost_stream_reports_the_usage_so_far():
    it = reader("anthropic")
    it.feed(START + b"event: from_the_future\ndata: {}\n\n" + BLOCK + DELTA)
    with pytest.raises(TruncatedReply) as caught:
        it.finish()
    assert caught.value.usage == Usage(7, 1, at_least=True)


@pytest.mark.spec("reliability:MP25")
@given(
    st.lists(st.tuples(st.sampled_from(["", "a", "message"]), st.lists(st.sampled_from(["x", "é", "", ": y"]), min_size=1, max_size=3)), max_size=4),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 80), max_size=6),
)  # fmt: skip
def test_sse_events_are_independent_of_line_ends_and_chunks(events, ending, cuts):
    lines: list[bytes] = [b": comment"]
    for name, data in events:
        lines += [b"event:" + name.encode()] if name else []
        lines += [b"id: 7", *[b"data: " + value.encode() for value in data], b""]
    body = ending.join([*lines, b""])
    some = sorted({0, len(body), *[cut for cut in cuts if cut < len(body)]})
    for edges in (some, range(len(body) + 1)):
        parser, got = SSEParser(), []
        for start, end in pairwise(edges):
            got += parser.feed(body[start:end])
        assert got == [(name, "\n".join(data).encode()) for name, data in events]
        assert parser.tail == b""


@pytest.mark.spec("providers:PV112")
def test_item_numbers_may_have_gaps_but_not_repeat() -> None:
    def item(number: int, kind: str, text: str) -> bytes:
        said = {"type": "message", "id": f"m{number}", "content": [{"type": "output_text", "text": text}]}
        return event({"type": f"response.output_item.{kind}", "output_index": number, "item": said})

    it = reader("openai")
    it.feed(event({"type": "response.created", "response": {"status": "in_progress"}}))
    for number, text in ((1, "a"), (4, "b"), (5, "c")):
        it.feed(item(number, "added", text))
        it.feed(item(number, "done", text))
    again = reader("openai")
    again.feed(item(4, "added", "b"))
    for number in (4, 3):
        with pytest.raises(ModelError, match="starts after item 4"):
            again.feed(item(number, "added", "b"))
    done = {"status": "completed", "output": [], "usage": {"input_tokens": 1, "output_tokens": 1}}
    it.feed(event({"type": "response.completed", "response": done}))

    assert it.finish().text == "abc"


@pytest.mark.anyio
@pytest.mark.spec("providers:PV112")
async def test_object_content_becomes_json_only_with_a_schema() -> None:
    """Cloudflare answers so in its JSON mode; it was a reply that broke its protocol."""
    told = {"choices": [{"message": {"content": {"name": "Ada"}}, "finish_reason": "stop"}]}
    provider = provider_of("openai_chat", transport=httpx2.MockTransport(lambda _: httpx2.Response(200, json=told)))
    for how in ({"response_schema": {"type": "object"}}, {"extra": {"response_format": {"type": "json_object"}}}):
        reply = await provider.complete(ModelRequest("openai_chat/m", settings=ModelSettings(**how)))

        assert reply.text == '{"name":"Ada"}'
    with pytest.raises(ModelError, match="violated its protocol"):
        await provider.complete(ModelRequest("openai_chat/m"))
    await provider.close()


def test_reply_keeps_the_id_of_its_first_chunk() -> None:
    it = reader("openai_chat")
    for named, delta, finish in (("", {}, None), ("chatcmpl-1", {"content": "Hi."}, None), ("stub", {}, "stop")):
        chunk = {"id": named, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
        it.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    it.feed(b"data: [DONE]\n\n")

    assert "chatcmpl-1" == it.finish().provider_data["id"]


# --- text that nothing else comes with ------------------------------------------------------------------------------

BARE = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
CHOICE = {"index": 0, "finish_reason": None}
CHUNKS = [
    *[{**BARE, "choices": [{**CHOICE, "delta": delta}]} for delta in (
        {"content": "a"}, {"content": "b"}, {"content": ""}, {"role": "assistant", "content": "c"}, {"refusal": "no"}, {"content": None},
        {"reasoning_content": "hm"}, {"content": [{"type": "text", "text": "d"}]}, {"content": "e", "newer": "x"}, {"content": 1},
    )],
    {**BARE, "obfuscation": "xyz", "choices": [{**CHOICE, "delta": {"content": "f"}}]},
    {**BARE, "id": "stub", "choices": [{**CHOICE, "delta": {"content": "g"}}]},
    {**BARE, "service_tier": "flex", "choices": [{**CHOICE, "delta": {"content": "h"}}]},
    {**BARE, "choices": [{**CHOICE, "delta": {"content": "i"}, "logprobs": {"content": [{"token": "i", "logprob": -1}]}}]},
    {**BARE, "choices": [{**CHOICE, "index": 1, "delta": {"content": "j"}}]},
    {**BARE, "choices": [{**CHOICE, "delta": {"content": "k"}}, {**CHOICE, "delta": {"content": "l"}}]},
    {**BARE, "choices": [{**CHOICE, "delta": {"content": "m"}, "finish_reason": "stop"}]},
    {**BARE, "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}},
    {**BARE, "error": {"message": "broken"}, "choices": [{**CHOICE, "delta": {"content": "n"}}]},
]  # fmt: skip
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
TEXT_BLOCK = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
MESSAGE = {"type": "message", "id": "m", "model": "m", "role": "assistant", "content": [], "usage": {"input_tokens": 1}}
EVENTS = [
    *[TEXT, TEXT, TEXT, TEXT_BLOCK, {**TEXT_BLOCK, "index": 1}, {**TEXT, "index": 1}, {**TEXT, "index": True}, {**TEXT, "index": 7}],
    *[{**TEXT, "newer": 1}, {**TEXT, "delta": {**TEXT["delta"], "newer": 1}}, {**TEXT, "delta": {**TEXT["delta"], "text": ""}}],
    *[{**TEXT, "delta": {**TEXT["delta"], "text": 1}}, {"type": "content_block_stop", "index": 0}],
    {**TEXT_BLOCK, "index": 1, "content_block": {"type": "thinking", "thinking": ""}},
]  # fmt: skip


def read(wire: str, events: list[Any], *, at_length: bool) -> Any:
    """Return the pieces and the reply, or the error; *at_length*, nothing is taken for text that nothing else comes with."""
    it = reader(wire)
    if at_length:
        shortcut = "_append_if_only_text_differs" if wire == "openai_chat" else "_append_plain_text"
        setattr(it._accumulator, shortcut, lambda _: None if wire == "openai_chat" else "")
    shown = []
    try:
        for each in events:
            shown += it.feed(f"data: {json.dumps(each)}\n\n".encode())
        return shown, it.finish()
    except ModelError as error:
        return shown, error.kind, error.message, error.usage


@given(st.lists(st.one_of(st.sampled_from(CHUNKS[:2]), st.sampled_from(CHUNKS)), max_size=12))
def test_chat_text_fast_path_equals_the_full_path(chunks: list[Any]) -> None:
    chunks = [CHUNKS[3], *chunks, CHUNKS[-3]]

    assert read("openai_chat", chunks, at_length=True) == read("openai_chat", chunks, at_length=False)


@given(st.lists(st.one_of(st.just(TEXT), st.sampled_from(EVENTS[8:11]), st.sampled_from(EVENTS)), max_size=8))
def test_anthropic_text_fast_path_equals_the_full_path(events: list[Any]) -> None:
    ended = [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ]
    events = [{"type": "message_start", "message": MESSAGE}, TEXT_BLOCK, *events, *ended, {"type": "message_stop"}]

    assert read("anthropic", events, at_length=True) == read("anthropic", events, at_length=False)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.anyio
@pytest.mark.spec("reliability:MP59")
@pytest.mark.parametrize("is_cancelled", [True, False])
@given(json_values())
async def test_any_reported_iterations_leave_the_end_of_a_stream_unchanged(is_cancelled, iterations):
    usage = {"input_tokens": 7, "output_tokens": 1, "iterations": iterations}
    start = event({"type": "message_start", "message": {"id": "m", "role": "assistant", "content": [], "usage": usage}})

    async def body():
        yield start + BLOCK + DELTA
        if is_cancelled:
            await asyncio.Event().wait()
        yield start

    async def read():
        async for _ in provider.stream(ModelRequest("anthropic/claude-opus-5", tail=(UserMessage("hi"),))):
            shown.set()

    shown, answer = asyncio.Event(), httpx2.Response(200, content=body(), headers={"content-type": "text/event-stream"})
    provider = provider_of("anthropic", transport=httpx2.MockTransport(lambda _: answer))
    reading = asyncio.ensure_future(read())
    await asyncio.wait([reading, asyncio.ensure_future(shown.wait())], return_when=asyncio.FIRST_COMPLETED)
    if is_cancelled:
        reading.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else ModelError) as caught:
        await reading
    await provider.close()
    assert is_cancelled or (7, True) == (caught.value.usage.input_tokens, caught.value.usage.at_least)
