"""
A stream is complete when the last event of its protocol has arrived, whether or not the connection was read to its end.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx2
import pytest

from stepengine.testing import Cassette, RecordTransport, ReplayTransport
from stepengine.testing.transport import Clients
from tests.model_server import ModelServer, model_server, streams

pytestmark = pytest.mark.spec("replay:C6")
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
URL = "https://api.test/v1/stream"


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server() as running:
        yield running


def openai_text(client: Any) -> str:
    return "".join(c.choices[0].delta.content or "" for c in client.chat.completions.create(**ASKED) if c.choices)


async def anthropic_text_async(client: Any) -> str:
    said = ""
    async for event in await client.messages.create(max_tokens=9, **ASKED):
        if event.type == "content_block_delta":
            said += event.delta.text
        if event.type == "message_stop":
            break
    return said


def test_a_sync_sdk_stream_closed_at_its_end_is_recorded(server, tmp_path):
    def said(transport: Any) -> str:
        return openai_text(Clients(transport).openai.with_options(base_url=f"{server.url}/v1"))

    held = Cassette()
    assert "You said: hi" == said(RecordTransport(httpx2.HTTPTransport(), held))
    again = Cassette.load(held.save(tmp_path / "c.yaml"))
    assert "You said: hi" == said(ReplayTransport(again))
    again.assert_all_used()


async def test_an_async_sdk_stream_closed_at_its_end_is_recorded(server, tmp_path):
    async def said(transport: Any) -> str:
        async with Clients(transport).async_anthropic.with_options(base_url=server.url) as client:
            return await anthropic_text_async(client)

    held = Cassette()
    assert "You said: hi" == await said(RecordTransport(httpx2.AsyncHTTPTransport(), held))
    again = Cassette.load(held.save(tmp_path / "c.yaml"))
    assert "You said: hi" == await said(ReplayTransport(again))
    again.assert_all_used()


def record(body: bytes, *, read: int | None = None, clean: bool = True, packed: bool = False) -> Cassette:
    """
    Record a stream of which the client reads *read* pieces; the connection breaks at the end unless it is *clean*.
    """
    sent = gzip.compress(body) if packed else body

    class Stream(httpx2.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            for start in range(0, len(sent), 16):
                yield sent[start : start + 16]
            if not clean:
                raise httpx2.RemoteProtocolError("peer closed connection")

    headers = {"content-type": "text/event-stream", **({"content-encoding": "gzip"} if packed else {})}
    live = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, stream=Stream()))
    held = Cassette()
    with httpx2.Client(transport=RecordTransport(live, held)) as client, client.stream("POST", URL) as response:
        try:
            for number, _ in enumerate(response.iter_raw(), 1):
                if number == read:
                    break
        except httpx2.RemoteProtocolError:
            assert not clean
    return held


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("wire", ["chat", "responses", "messages", "google"])
def test_no_stream_left_at_a_random_point_is_recorded_whole(wire):
    whole = streams()[wire]
    last = whole.decode().rstrip()
    random = Random(wire)
    for number in range(100):
        size = random.randrange(1, len(last) - (len("[DONE]") if wire == "chat" else 1))
        if wire == "chat" and b'"finish_reason": "stop"' in whole[:size]:
            size //= 4  # with a finish reason, a proper end is enough
        way = number % 3
        if way == 2:
            held = record(whole, read=max(1, size // 16))
            assert held.complete_interactions == ()
        else:
            held = record(whole[:size], clean=way == 0)
            assert held.complete_interactions == (), whole[:size]
        if not held.complete_interactions:
            assert [left.reason in ("cut", "not_read") for left in held.left_out] == [True]


@pytest.mark.parametrize(
    ("wire", "packed"), [("chat", True), ("chat", False), ("responses", False), ("messages", False), ("google", True)]
)
def test_whole_streams_are_recorded_at_any_cut(wire, packed):
    body = streams()[wire]
    pieces = -(-len(gzip.compress(body) if packed else body) // 16)
    for held in (
        record(body, packed=packed),
        record(body, packed=packed, clean=False),
        record(body, packed=packed, read=pieces),
    ):
        stored = [interaction.response.body for interaction in held.complete_interactions]
        assert [body] == [gzip.decompress(one) if packed else one for one in stored]
        assert [] == held.left_out


@pytest.mark.parametrize(
    ("body", "complete"),
    [
        ('data: {"n": 1}\n\n', True),
        ('data: {"n": 1}\n\ndata: {"n":', False),
        (": waiting\n\n", False),
        ("", True),
        ('data: {"id": 1, "object": "chat.completion.chunk", "choices": [{"finish_reason": "stop"}]}\n\n', True),
        ('data: {"object": "chat.completion.chunk", "choices": [{"finish_reason": null}]}\n\n', False),
        ('event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}\n\n', True),
        ('data: {"candidates": [{"index": 0, "finishReason": "STOP"}, {"index": 1}]}\n\n', False),
        ('data: {"promptFeedback": {"blockReason": "SAFETY"}}\n\n', True),
        ("data: [1,\n\n", True),
    ],
)
def test_a_fully_read_body_is_judged_by_its_protocol(body, complete):
    assert [complete] == [interaction.is_complete for interaction in record(body.encode()).interactions]


@pytest.mark.parametrize(
    "answer", ['{"jsonrpc": "2.0", "id": 1, "result": {}}', '{"jsonrpc": "2.0", "id": 1, "error": {}}']
)
def test_an_mcp_answer_is_the_last_event_of_its_stream(answer):
    body = f"event: message\ndata: {answer}\n\n".encode() + b": open\n\n" * 20
    assert 1 == len(record(body, read=8).complete_interactions)


def test_an_error_event_ends_streams_only_where_errors_are_recorded():
    body = b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}\n\n' + b": open\n\n" * 20
    live = httpx2.MockTransport(
        lambda _: httpx2.Response(
            200, headers={"content-type": "text/event-stream"}, content=iter([body, b": open\n\n"])
        )
    )
    kept = []
    for record_errors in (False, True):
        held = Cassette()
        transport = RecordTransport(live, held, record_errors=record_errors)
        with httpx2.Client(transport=transport) as client, client.stream("POST", URL) as response:
            next(response.iter_raw())
        kept.append(len(held.complete_interactions))
    assert [0, 1] == kept
