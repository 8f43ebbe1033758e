"""Failures of the connection and of the transport, and what of them is kept."""

from __future__ import annotations

import gc
import ssl
import traceback
import warnings
from contextlib import aclosing

import httpx2
import pytest

from stepengine.errors import ModelError
from tests.faults.scripts import WIRES

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("wire", WIRES, ids=str)]


class Miss(BaseException):
    """What a replay transport raises for a request that it does not have."""


class SoftMiss(Exception):
    """The same from a library that derives it from Exception."""


def failing(error: BaseException) -> httpx2.MockTransport:
    def handler(request: httpx2.Request) -> httpx2.Response:
        raise error

    return httpx2.MockTransport(handler)


def dying(error: Exception, first: bytes = b"") -> httpx2.MockTransport:
    async def body():
        yield first
        raise error

    return httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=body(), headers={"content-type": "text/event-stream"})
    )


async def failure_of(wire, transport, stream):
    provider = wire.make(transport=transport)
    try:
        if stream:
            async for _ in provider.stream(wire.request()):
                pass
        else:
            await provider.complete(wire.request())
    finally:
        await provider.close()


def tls_error() -> httpx2.ConnectError:
    error = httpx2.ConnectError("certificate verify failed")
    error.__cause__ = ssl.SSLCertVerificationError("self-signed certificate")
    return error


@pytest.mark.spec("reliability:MP16", "ecosystem:EC66")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize(
    ("error", "kind", "retryable"),
    [
        (httpx2.ConnectError("refused"), "connection", True),
        (httpx2.RemoteProtocolError("peer closed connection"), "connection", True),
        (httpx2.ReadTimeout("slow"), "timeout", True),
        (httpx2.ConnectTimeout("slow"), "timeout", True),
        (httpx2.PoolTimeout("full"), "pool_timeout", True),
        (httpx2.LocalProtocolError("Illegal header value b'Bearer sk-secret-key-0123456789\\n'"), "request", False),
        (httpx2.UnsupportedProtocol("no scheme"), "request", False),
        (tls_error(), "tls", False),
        (ConnectionResetError("reset"), "connection", True),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_connection_failure_is_classified_by_its_cause(wire, error, kind, retryable, stream):
    with pytest.raises(ModelError) as caught:
        await failure_of(wire, failing(error), stream)
    assert (type(caught.value), caught.value.kind, caught.value.retryable) == (ModelError, kind, retryable)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)
    assert "0123456789" not in caught.value.message


@pytest.mark.spec("reliability:MP16")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
async def test_error_status_raised_by_a_transport_keeps_its_status(wire, stream):
    """
    Hooks of HTTP clients often raise for an error status, before anybody has read the body.
    """

    def handler(request: httpx2.Request) -> httpx2.Response:
        unread = httpx2.Response(429, headers={"retry-after": "7"}, stream=httpx2.ByteStream(b"slow down"))
        raise httpx2.HTTPStatusError("refused by a hook", request=request, response=unread)

    with pytest.raises(ModelError) as caught:
        await failure_of(wire, httpx2.MockTransport(handler), stream)
    assert (caught.value.status, caught.value.retryable, caught.value.retry_after) == (429, True, 7)


ADDRESS = "http://user:sk-hidden@127.0.0.1:9/v7"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx2.ConnectError("refused"), "refused; is a server running there?"),
        (httpx2.ReadTimeout("slow"), "did not answer in time"),
        (tls_error(), "certificate"),
        (httpx2.Response(404, text="no such page"), "answered 404"),
        (httpx2.Response(307, headers={"location": "http://elsewhere"}), "pass the final URL"),
        (
            httpx2.Response(200, text="<html>", headers={"content-type": "text/html"}),
            "answered with text/html, which is not a reply",
        ),
    ],
    ids=["refused", "slow", "tls", "missing", "moved", "a page"],
)
async def test_unreachable_address_is_named_without_its_secrets(wire, answer, words, stream):
    def handler(_: httpx2.Request) -> httpx2.Response:
        if isinstance(answer, Exception):
            raise answer
        return httpx2.Response(answer.status_code, headers=answer.headers, content=answer.content)

    provider = wire.make(ADDRESS, transport=httpx2.MockTransport(handler))
    with pytest.raises(ModelError) as caught:
        async with aclosing(provider.stream(wire.request())) as deltas:
            [delta async for delta in deltas] if stream else await provider.complete(wire.request())
    await provider.close()
    assert "at http://127.0.0.1:9/v7" in caught.value.message
    assert words in caught.value.message
    assert "hidden" not in str(caught.value)


@pytest.mark.spec("reliability:MP16", "reliability:MP19", "reliability:MP27")
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx2.RemoteProtocolError("incomplete chunked read"), "truncated"),
        (httpx2.ReadError("reset"), "truncated"),
        (httpx2.ReadTimeout("slow"), "timeout"),
        (httpx2.DecodingError("bad gzip"), "truncated"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_connection_lost_mid_stream_is_retryable(wire, error, kind):
    with pytest.raises(ModelError) as caught:
        await failure_of(wire, dying(error, wire.stream("hi", [], "end_turn")[0]), stream=True)
    assert (caught.value.kind, caught.value.retryable) == (kind, True)
    assert (caught.value.__cause__, caught.value.__context__) == (None, None)


@pytest.mark.spec("reliability:MP23", "reliability:MP28")
async def test_complete_reply_counts_although_the_connection_stays_open(wire):
    events = [piece for piece in wire.stream("It is five.", [], "end_turn") if b"[DONE]" not in piece]
    provider = wire.make(transport=dying(TimeoutError(), b"".join(events)))
    *_, done = [delta async for delta in provider.stream(wire.request())]
    assert done.reply.text == "It is five."
    with pytest.raises(ModelError) as caught:
        await failure_of(wire, dying(TimeoutError(), events[0]), stream=True)
    assert caught.value.kind == "timeout"


@pytest.mark.spec("ecosystem:EC70")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize("miss", [Miss("not recorded"), SoftMiss("not recorded")], ids=["miss", "soft miss"])
async def test_replay_transport_error_passes_through_unchanged(wire, miss, stream):
    with pytest.raises(type(miss)) as caught:
        await failure_of(wire, failing(miss), stream)
    assert caught.value is miss


@pytest.mark.spec("ecosystem:EC70")
async def test_a_miss_is_found_behind_an_http_error(wire):
    error = httpx2.ConnectError("wrapped")
    error.__cause__ = Miss("not recorded")
    with pytest.raises(Miss):
        await failure_of(wire, failing(error), stream=True)


@pytest.mark.spec("requirements:G23", "reliability:SC05")
async def test_no_traceback_frame_shows_the_key(wire):
    with pytest.raises(ModelError) as caught:
        await failure_of(wire, failing(httpx2.ConnectError("refused")), stream=False)
    shown = "".join(traceback.TracebackException.from_exception(caught.value, capture_locals=True).format())
    assert "_http.py" in shown
    assert "0123456789" not in shown


async def test_a_provider_serves_several_event_loops_one_after_the_other(wire):
    import asyncio

    answer = wire.reply("hi", [], "end_turn")
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=answer, headers={"content-type": "application/json"})
    )
    provider = wire.make(transport=transport)

    async def ask():
        reply = await provider.complete(wire.request())
        await provider.close()
        return reply.text

    assert await ask() == "hi"
    assert await asyncio.to_thread(asyncio.run, ask()) == "hi"
    assert await ask() == "hi"


@pytest.fixture(scope="module")
def only_what_is_new_is_collected():
    """
    A search for garbage goes through what tests of this file made, not through all SDKs, which takes a second each time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.parametrize("closed", [True, False])
async def test_unclosed_provider_warns_once_when_collected(wire, closed, only_what_is_new_is_collected):
    provider = wire.make("http://127.0.0.1:9")
    for _ in range(2):
        with pytest.raises(ModelError):
            await provider.complete(wire.request())
    if closed:
        await provider.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del provider
        gc.collect()

    said = [str(warning.message) for warning in told if "were never closed" in str(warning.message)]
    assert (0 if closed else 1) == len(said), said
