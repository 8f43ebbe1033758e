"""
The replay transport hands back what a cassette holds, in pieces, cut or broken as a test asks.
"""

from __future__ import annotations

import asyncio
import gzip

import httpx2
import pytest

from stepengine.errors import DataError
from stepengine.testing import Cassette, CassetteMiss, ReplayTransport
from stepengine.testing.cassette_files import Interaction, RecordedRequest, RecordedResponse
from stepengine.testing.transport import MixedTransport

URL = "http://api.example.com/v1/messages"
EVENTS = ['event: a\r\ndata: {"n": "ä"}\r\n\r\n', "data: 2\n\n", ": ping\n\n", "data: [DONE]"]
STREAM = "".join(EVENTS).encode()
SSE = {"content-type": "text/event-stream; charset=utf-8"}


def cassette_of(response: RecordedResponse, times: int = 1, **extras: object) -> Cassette:
    return Cassette([Interaction(RecordedRequest("GET", URL), response, extras)] * times)


def pieces_of(cassette: Cassette, *args: object, **options: object) -> list[bytes]:
    client = httpx2.Client(transport=ReplayTransport(cassette, *args, **options))
    with client.stream("GET", URL) as response:
        return list(response.iter_raw())


@pytest.mark.spec("replay:C4")
async def test_a_response_comes_back_as_it_was_recorded():
    headers = [("Content-Length", "10"), ("X-A", "1"), ("Connection", "close"), ("x-a", "2")]
    recorded = RecordedResponse(418, "Short and stout", headers, b"0123456789")
    transport = ReplayTransport(cassette_of(recorded, times=2))

    one = httpx2.Client(transport=transport).get(URL)
    async with httpx2.AsyncClient(transport=transport) as client:
        two = await client.get(URL)

    for response in (one, two):
        assert (418, "Short and stout", b"0123456789") == (
            response.status_code,
            response.reason_phrase,
            response.content,
        )
        assert headers == [(name.decode(), value.decode()) for name, value in response.headers.raw]


@pytest.mark.spec("replay:C4", "replay:C1")
def test_compressed_replies_of_foreign_files_are_decoded_by_the_client():
    recorded = RecordedResponse(200, "OK", {"content-encoding": "gzip"}, gzip.compress(b"hello"))

    assert b"hello" == httpx2.Client(transport=ReplayTransport(cassette_of(recorded))).get(URL).content


@pytest.mark.spec("replay:C13")
def test_a_stream_is_cut_into_events_or_as_configured():
    held = cassette_of(RecordedResponse(200, "OK", SSE, STREAM), times=300, chunks=[5, 7])
    split = STREAM.index("ä".encode()) + 1

    assert [e.encode() for e in EVENTS] == pieces_of(held)
    assert [STREAM] == pieces_of(held, "whole")
    assert [STREAM[i : i + 7] for i in range(0, len(STREAM), 7)] == pieces_of(held, 7)
    assert [STREAM[:5], STREAM[5:12], STREAM[12:]] == pieces_of(held, "recorded")
    shuffled = [pieces_of(held, "random", seed=n) for n in range(100)]
    assert {STREAM} == {b"".join(pieces) for pieces in shuffled}
    assert shuffled[3] == pieces_of(held, "random", seed=3)
    assert 50 < len({tuple(pieces) for pieces in shuffled})
    ends = [{len(b"".join(pieces[:n])) for n in range(len(pieces))} for pieces in shuffled]
    assert any(split in places for places in ends)
    with pytest.raises(DataError, match="chunks must be"):
        ReplayTransport(held, "slow")
    with pytest.raises(DataError, match="record with keep_chunks=True"):
        pieces_of(cassette_of(RecordedResponse(200, "OK", SSE, STREAM)), "recorded")


@pytest.mark.spec("replay:C13")
def test_a_body_that_is_no_stream_is_one_piece():
    recorded = RecordedResponse(200, "OK", {"content-type": "application/json"}, b'{\n\n"a": 1}')

    assert [b'{\n\n"a": 1}'] == pieces_of(cassette_of(recorded))


@pytest.mark.spec("replay:C16")
@pytest.mark.parametrize("chunks", ["events", "whole", 3, "random"])
def test_a_stream_can_end_early_or_break_at_any_byte(chunks):
    held = cassette_of(RecordedResponse(200, "OK", SSE, STREAM), times=2 * len(STREAM) + 2)

    for n in range(len(STREAM) + 1):
        assert STREAM[:n] == b"".join(pieces_of(held, chunks, cut=n))
        seen = []
        client = httpx2.Client(transport=ReplayTransport(held, chunks, reset_after=n))
        with client.stream("GET", URL) as response, pytest.raises(httpx2.RemoteProtocolError):
            for piece in response.iter_raw():
                seen.append(piece)  # noqa: PERF402
        assert STREAM[:n] == b"".join(seen)


async def test_a_miss_passes_a_gathering_caller_and_is_still_known():
    held = Cassette()
    async with httpx2.AsyncClient(transport=ReplayTransport(held)) as client:
        (result,) = await asyncio.gather(client.get(URL), return_exceptions=True)

    assert isinstance(result, CassetteMiss)
    assert [result] == held.misses


@pytest.mark.spec("replay:C7", "replay:C4")
@pytest.mark.parametrize("mixed", [False, True])
async def test_recorded_errors_and_cut_replies_are_raised_again(mixed):
    def make_transport(response, **extras):
        held = cassette_of(response, times=2, **extras)
        return MixedTransport(held, Cassette()) if mixed else ReplayTransport(held)

    refused = {"type": "httpx2.ConnectError", "arguments": ["nobody there"]}
    json_head = {"content-type": "application/json"}
    for transport, error in [
        (make_transport(RecordedResponse(0), error=refused), httpx2.ConnectError),
        (make_transport(RecordedResponse(200, "OK", json_head, b'{"a": '), complete=False), httpx2.RemoteProtocolError),
        (
            make_transport(RecordedResponse(200, "OK", SSE, STREAM[:9]), complete=False, error=refused),
            httpx2.ConnectError,
        ),
    ]:
        with pytest.raises(error):
            httpx2.Client(transport=transport).get(URL)
        async with httpx2.AsyncClient(transport=transport) as client:
            with pytest.raises(error):
                await client.get(URL)


@pytest.mark.spec("replay:C7")
async def test_a_cancelled_request_waits_for_its_cancellation_in_a_replay():
    held = cassette_of(RecordedResponse(0), error={"type": "asyncio.exceptions.CancelledError", "arguments": []})

    async with httpx2.AsyncClient(transport=ReplayTransport(held)) as client:
        task = asyncio.ensure_future(client.get(URL))
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.spec("replay:K15")
async def test_a_replayed_token_request_gets_a_made_up_token():
    form = {"grant_type": "client_credentials", "client_secret": "s3cret-0123456789"}
    transport = ReplayTransport(Cassette())

    one = httpx2.Client(transport=transport).post("https://login.test/oauth/token", data=form)
    async with httpx2.AsyncClient(transport=transport) as client:
        two = await client.post("https://login.test/oauth/token", data=form)

    assert ["replay", "replay"] == [reply.json()["access_token"] for reply in (one, two)]
    assert [] == transport.cassette.misses
