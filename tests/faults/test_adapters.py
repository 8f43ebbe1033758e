"""The adapters against a real loopback server: what arrives whole, what breaks, and what an error says."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from stepengine.data.models import ModelReply, ReplyDone, StopReason, TextChunk
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from tests.faults.scripts import WIRES, Wire
from tests.faults.server import fault_server, json_answer, sse

pytestmark = pytest.mark.parametrize("wire", WIRES, ids=str)

TEXT = ("It is five.", [], "end_turn")
BOTH = ("Let me add.", [("add", '{"a": 2, "b": 3}')], "tool_use")


def before_the_end(wire: Wire, events: list[bytes]) -> list[bytes]:
    """The events of a stream before the one that ends it."""
    return events[: next(index for index, event in enumerate(events) if wire.marker in event)]


async def streamed(provider: Any, request: Any) -> tuple[list[Any], ModelReply]:
    async with aclosing(provider.stream(request)) as deltas:
        *items, done = [delta async for delta in deltas]
    assert type(done) is ReplyDone
    assert not any(type(item) is ReplyDone for item in items)
    return items, done.reply


async def asked(wire: Wire, *answers: Any, stream: bool = True) -> tuple[Any, list[tuple[bytes, bytes]]]:
    """Ask once and return the reply or the error, and the requests that the server saw."""
    async with fault_server(*answers) as server:
        provider = wire.make(server.url)
        try:
            reply = (await streamed(provider, wire.request()))[1] if stream else await provider.complete(wire.request())
        except ModelError as error:
            reply = error
        await provider.close()
    return reply, server.requests


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP25")
async def test_a_stream_may_arrive_bytewise_with_any_line_ends(wire):
    body = b": keep-alive\n\n" + b"".join(wire.stream(*BOTH)).replace(b"\r\n", b"\n")
    expected, _ = await asked(wire, sse(body, "fin"))
    for mangled in (
        body.replace(b"\n", b"\r\n"),
        body.replace(b"\n", b"\r"),
        b"\xef\xbb\xbf" + body,
        body.replace(b": {", b":{"),
    ):
        pieces = [mangled[i : i + 1] for i in range(len(mangled))]
        assert (await asked(wire, sse(*pieces, "fin")))[0] == expected


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP26")
async def test_a_reply_is_read_by_its_content_type(wire):
    expected, _ = await asked(wire, json_answer(wire.reply(*BOTH)), stream=False)
    assert (await asked(wire, json_answer(wire.reply(*BOTH)), stream=True))[0].content == expected.content
    assert (await asked(wire, sse(*wire.stream(*BOTH), "fin"), stream=False))[0].content == expected.content


@pytest.mark.spec("reliability:MP28")
async def test_events_after_the_terminal_marker_are_ignored_and_connections_reused(wire):
    events = wire.stream(*TEXT)
    async with fault_server(sse(*events, events[-1], b"event: x\ndata: nonsense\n\n", "fin")) as server:
        provider = wire.make(server.url)
        replies = [(await streamed(provider, wire.request()))[1] for _ in range(3)]
        await provider.close()
    assert replies == [replies[0]] * 3
    assert server.connections == 1


# --- broken replies -------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:MP19", "reliability:MP16", "reliability:R21")
async def test_a_connection_that_breaks_mid_stream_is_a_truncated_reply(wire):
    events = wire.stream(*BOTH)
    for count in range(len(before_the_end(wire, events))):
        error, requests = await asked(wire, sse(*events[:count], "rst"))
        assert isinstance(error, TruncatedReply), count
        assert error.retryable
        assert len(requests) == 1


@pytest.mark.spec("reliability:MP20")
async def test_a_cut_inside_the_terminal_event_may_still_count(wire):
    events = wire.stream(*BOTH)
    whole, _ = await asked(wire, sse(*events, "fin"))
    # Responses and Gemini say the stop reason in the terminal event itself, so there half of it is not enough.
    enough = wire.name in ("anthropic", "openai_chat")
    last = len(events[-1]) - 3
    cuts = [*range(1, last, max(1, last // 4)), last]
    async with fault_server(*[sse(*events[:-1], events[-1][:cut], "fin") for cut in cuts]) as server:
        provider = wire.make(server.url)
        for cut in cuts:
            if enough:
                assert (await streamed(provider, wire.request()))[1] == whole, cut
            else:
                with pytest.raises(TruncatedReply):
                    await streamed(provider, wire.request())
        await provider.close()
    assert len(server.requests) == len(cuts)
    # An open block or a missing stop reason: the same cut is a truncated reply.
    without_stop = [e for e in events[:-1] if b"message_delta" not in e and wire.marker not in e]
    error, _ = await asked(wire, sse(*without_stop, events[-1][:10], "fin"))
    assert isinstance(error, TruncatedReply)


@pytest.mark.spec("reliability:MP22")
async def test_an_error_inside_a_stream_is_the_matching_status(wire):
    events = wire.stream(*BOTH)
    data, status = wire.stream_error
    error, _ = await asked(wire, sse(*before_the_end(wire, events), data, "fin"))
    assert type(error) is ModelError
    assert error.retryable
    assert error.status == status
    assert "Overloaded" in error.message


@pytest.mark.spec("reliability:MP25")
async def test_a_data_line_without_json_is_a_protocol_error(wire):
    error, _ = await asked(wire, sse(wire.stream(*TEXT)[0], b"event: content_block_delta\ndata: {nonsense\n\n", "fin"))
    assert (type(error), error.kind, error.retryable) == (ModelError, "protocol", True)


@pytest.mark.spec("reliability:MP15")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_web_page_is_quoted_and_not_retried(wire, stream):
    page = json_answer(b"<html>\x07Please log in</html>")
    page = type(page)(page.items, 200, {}, "text/html")
    error, _ = await asked(wire, page, stream=stream)
    assert type(error) is ModelError
    assert not error.retryable
    assert "Please log in" in error.message
    assert "\x07" not in error.message


# --- statuses -------------------------------------------------------------------------------------------------------

STATUSES = [
    (400, "invalid_request_error", False, "reliability:MP01"),
    (401, "authentication_error", False, "reliability:MP03"),
    (403, "permission_error", False, "reliability:MP06"),
    (404, "not_found_error", False, "reliability:MP05"),
    (408, "timeout_error", True, "reliability:MP06"),
    (409, "conflict", True, "reliability:MP06"),
    (422, "invalid_request_error", False, "reliability:MP06"),
    (429, "rate_limit_error", True, "reliability:MP10"),
    (429, "insufficient_quota", False, "reliability:MP06"),
    (500, "api_error", True, "reliability:MP06"),
    (504, "timeout_error", True, "reliability:MP06"),
    (529, "overloaded_error", True, "reliability:MP06"),
]


@pytest.mark.spec("reliability:R21", "ecosystem:EC59", "reliability:MP06")
@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}", marks=pytest.mark.spec(held)) for *row, held in STATUSES],
)
async def test_a_status_is_requested_once_and_is_retryable_or_not(wire, status, kind, retryable):
    error, requests = await asked(wire, json_answer(wire.error(kind, "No such luck."), status, x_request_id="r7"))
    assert isinstance(error, ModelError)
    assert (error.status, error.retryable, len(requests)) == (status, retryable, 1)
    assert "No such luck." in error.message
    assert error.request_id is not None
    assert "sk-secret" not in f"{error!r}{error.message}{error.__context__!r}"
    assert error.__cause__ is None
    assert error.__context__ is None


@pytest.mark.spec("reliability:MP03", "reliability:SC05", "requirements:G23")
async def test_a_refused_key_is_named_by_variable_and_never_shown(wire, monkeypatch):
    variable = wire.key_variable
    monkeypatch.setenv(variable, "a plain 0123456789")
    monkeypatch.setenv("STEPENGINE_KEY_HOSTS", "127.0.0.1")
    answer = json_answer(
        wire.error("authentication_error", "bad key 'a plain 0123456789', not sk-other-0123456789"), 401
    )
    async with fault_server(answer) as server:
        provider = wire.provider(base_url=server.url)
        with pytest.raises(ModelError) as caught:
            await provider.complete(wire.request())
        await provider.close()
    assert variable in caught.value.message
    assert "0123456789" not in caught.value.message
    assert b"a plain 0123456789" in server.requests[0][0]


@pytest.mark.spec("reliability:MP10")
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ({"retry_after": "2"}, 2.0),
        ({"retry_after": "1.5"}, 1.5),
        ({"retry_after": "3600"}, 3600.0),
        ({"retry_after_ms": "250", "retry_after": "9"}, 0.25),
        ({"retry_after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.0),
        ({"retry_after": "soon"}, None),
        ({"retry_after": "-3"}, None),
        ({}, None),
    ],
)
async def test_the_wait_that_a_provider_asks_for_is_read(wire, header, seconds):
    error, _ = await asked(wire, json_answer(wire.error("rate_limit_error", "Slow down."), 429, **header))
    assert error.retry_after == seconds


@pytest.mark.spec("reliability:MP06")
@pytest.mark.parametrize(("status", "word"), [(500, "false"), (400, "true")])
async def test_the_provider_s_own_word_on_retrying_wins(wire, status, word):
    error, _ = await asked(wire, json_answer(wire.error("api_error", "Hm."), status, x_should_retry=word))
    assert error.retryable == (word == "true")


@pytest.mark.spec("reliability:MP02")
@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, "invalid_request_error", "prompt is too long: 208310 tokens > 200000 maximum"),
        (413, "request_too_large", "Request exceeds the maximum size"),
    ],
)
async def test_a_request_that_is_too_long_is_a_context_overflow(wire, status, kind, message):
    error, _ = await asked(wire, json_answer(wire.error(kind, message), status))
    assert type(error) is ContextOverflow
    assert not error.retryable


@pytest.mark.spec("reliability:MP06")
async def test_a_redirect_is_not_followed(wire):
    error, requests = await asked(wire, json_answer(b"{}", 307, location="http://127.0.0.1:9/elsewhere"))
    assert (error.status, error.retryable, len(requests)) == (307, False, 1)


# --- cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.spec("reliability:I12", "reliability:MP33")
@pytest.mark.parametrize("how", ["cancel the task", "close the stream"])
async def test_leaving_a_stream_closes_the_connection(wire, how):
    events = wire.stream(*TEXT)
    async with fault_server(sse(*before_the_end(wire, events), "hang")) as server:
        provider = wire.make(server.url)
        begun = asyncio.Event()
        stream = provider.stream(wire.request())

        async def read():
            async for delta in stream:
                if type(delta) is TextChunk:
                    begun.set()
                    if how == "close the stream":
                        break
            await stream.aclose()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 50)
        if how == "cancel the task":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        await asyncio.wait_for(server.closed.wait(), 50)
        await provider.close()


@pytest.mark.spec("reliability:MP55", "generator-contract:L37")
async def test_a_reply_cut_by_the_output_limit_keeps_raw_arguments(wire):
    said = ("", [("add", '{"a": 2, "b": 3}'), ("add", '{"a": 4}')], "max_tokens")
    streaming, _ = await asked(wire, sse(*wire.stream(*said), "fin"))
    whole, _ = await asked(wire, json_answer(wire.reply(*said)), stream=False)
    assert streaming.content == whole.content
    first, last = streaming.tool_calls
    assert streaming.stop_reason is StopReason.MAX_TOKENS
    assert (first.raw_input, last.raw_input) == (None, '{"a":4}')
    cut = ("", [("add", '{"a": 2, "b": 3}'), ("add", '{"a": 4, "b')], "max_tokens")
    reply, _ = await asked(wire, sse(*wire.stream(*cut), "fin"))
    assert reply.tool_calls[1].raw_input == '{"a": 4, "b'
    assert reply.tool_calls[1].input_error is not None
