"""Replies that take too long, are too long, or lie about their length: over a real loopback server, on every wire."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket

import pytest

from stepengine.data.messages import AssistantMessage, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import ContextOverflow, ModelError, TruncatedReply
from stepengine.models import Timeouts, _byte_reader
from tests.faults.scripts import WIRES
from tests.faults.server import Answer, fault_server, json_answer, sse
from tests.faults.test_adapters import BOTH, TEXT, asked, before_the_end, streamed

# Every test waits for time-outs: two wires in the fast suite, all in the deep one.
FAST = ("anthropic", "openai_chat")
EACH = [pytest.param(wire, id=str(wire), marks=() if str(wire) in FAST else pytest.mark.deep) for wire in WIRES]
pytestmark = pytest.mark.parametrize("wire", EACH)

SHORT = 0.05
LONG = 30.0


async def failed(wire, answer, *, stream=True, **limits):
    """The error of a call under these limits, all others being long."""
    timeouts = Timeouts(**{"first_byte": LONG, "idle": LONG, "silence": LONG, "total": LONG, **limits})
    async with fault_server(answer) as server:
        provider = wire.make(server.url, timeouts=timeouts)
        with pytest.raises(ModelError) as caught:
            await (streamed(provider, wire.request()) if stream else provider.complete(wire.request()))
        await provider.close()
    assert caught.value.__context__ is None
    return caught.value


@pytest.mark.spec("reliability:MP23")
async def test_a_silent_server_is_abandoned_after_the_first_byte_timeout(wire):
    error = await failed(wire, sse("hang"), first_byte=SHORT)
    assert (type(error), error.kind, error.retryable) == (ModelError, "timeout", True)
    assert "Timeouts.first_byte" in error.message
    assert "sent nothing for 0.05 s" in error.message


@pytest.mark.spec("reliability:MP23")
async def test_a_server_without_headers_is_abandoned_too(wire):
    async def silent(reader, writer):
        try:
            await reader.read(100_000)
            await asyncio.sleep(LONG)
        finally:
            writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    provider = wire.make(f"http://127.0.0.1:{port}", timeouts=Timeouts(first_byte=SHORT, total=2 * SHORT))
    for ask in (lambda: streamed(provider, wire.request()), lambda: provider.complete(wire.request())):
        with pytest.raises(ModelError) as caught:
            await ask()
        assert (caught.value.kind, caught.value.retryable) == ("timeout", True)
    await provider.close()
    server.close()


@pytest.mark.spec("reliability:MP23")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_accepts_no_connection_is_a_retryable_timeout(wire, stream):
    """
    The HTTP library ends its attempt by cancelling it; that is a time limit, and no cancellation of the run.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):  # until its queue is full
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        provider = wire.make(f"http://127.0.0.1:{server.getsockname()[1]}", timeouts=Timeouts(connect=SHORT))
        with pytest.raises(ModelError) as caught:
            await (streamed(provider, wire.request()) if stream else provider.complete(wire.request()))
        await provider.close()

    assert (caught.value.kind, caught.value.retryable) == ("timeout", True)


@pytest.mark.spec("reliability:MP23", "reliability:MP19")
async def test_a_stalled_stream_is_abandoned_after_the_idle_timeout(wire):
    events = wire.stream(*BOTH)
    error = await failed(wire, sse(*before_the_end(wire, events), "hang"), idle=SHORT)
    assert (error.kind, error.retryable) == ("timeout", True)
    assert "Timeouts.idle" in error.message


@pytest.mark.spec("reliability:MP23")
async def test_keep_alives_and_single_bytes_do_not_count_as_progress(wire):
    async def ended(keep_alive):
        drip = [item for _ in range(200) for item in (keep_alive, SHORT / 10)]
        error = await failed(wire, sse(wire.stream(*TEXT)[0], *drip, "hang"), silence=2 * SHORT)
        return keep_alive, (error.kind, error.retryable, "Timeouts.silence" in error.message)

    kept_alive = [b": OPENROUTER PROCESSING\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', b"e"]
    endings = await asyncio.gather(*[ended(one) for one in kept_alive])  # they mostly wait
    assert endings == [(one, ("timeout", True, True)) for one in kept_alive]


@pytest.mark.spec("reliability:MP23")
async def test_the_total_timeout_bounds_every_call(wire):
    drip = [item for _ in range(200) for item in (b" ", SHORT / 10)]
    answers = {"stream": sse(*drip, "hang"), "complete": Answer((*drip, "hang"), content_type="application/json")}

    async def ended(how):
        error = await failed(wire, answers[how], stream=how == "stream", total=2 * SHORT)
        return how, (error.kind, error.retryable, "Timeouts.total" in error.message)

    endings = await asyncio.gather(*[ended(how) for how in answers])
    assert endings == [(how, ("timeout", True, True)) for how in answers]


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:MP23")
async def test_a_slow_stream_that_progresses_is_a_reply(wire):
    events = wire.stream(*BOTH)
    limit = 0.3  # longer than a pause of a busy machine
    slowly = [item for event in events for item in (event, 1.5 * limit / len(events))]
    timeouts = Timeouts(first_byte=LONG, idle=LONG, silence=LONG, total=limit)
    async with fault_server(sse(*slowly, "fin")) as server:
        provider = wire.make(server.url, timeouts=timeouts)
        _, reply = await streamed(provider, wire.request())
        await provider.close()
    assert reply.tool_calls


# --- too long -------------------------------------------------------------------------------------------------------


@pytest.mark.deep
@pytest.mark.spec("reliability:MP23")
async def test_a_limit_ends_only_its_own_wait_across_tasks(wire):
    """
    A timer that was set for one wait is there for those after it.
    """
    pieces = [(part, SHORT / 2) for part in before_the_end(wire, wire.stream(*BOTH))]
    async with fault_server(sse(*[step for piece in pieces for step in piece], "hang")) as server:
        provider = wire.make(server.url, timeouts=Timeouts(first_byte=LONG, idle=3 * SHORT, silence=LONG, total=LONG))
        stream = provider.stream(wire.request())

        async def first():
            return await anext(stream)

        with pytest.raises(ModelError, match=r"Timeouts\.idle"):
            while True:
                await asyncio.create_task(first())
        await stream.aclose()
        await provider.close()
    assert asyncio.current_task().cancelling() == 0


@pytest.mark.spec("reliability:MP24")
async def test_an_endless_stream_is_cut_by_bytes_and_text(wire, monkeypatch):
    monkeypatch.setattr(_byte_reader, "MAX_REPLY_BYTES", 4_000)
    error, _ = await asked(wire, sse(wire.stream(*TEXT)[0], *[b": " + b"x" * 100 + b"\n"] * 100, "fin"))
    assert (type(error), error.kind, error.retryable) == (ModelError, "too_large", False)
    monkeypatch.undo()
    monkeypatch.setattr(_byte_reader, "MAX_TEXT_CHARS", 1_000)
    error, _ = await asked(wire, sse(*wire.stream("x" * 1_001, [], "end_turn"), "fin"))
    assert (error.kind, error.retryable) == ("too_large", False)
    reply, _ = await asked(wire, sse(*wire.stream("x" * 1_000, [], "end_turn"), "fin"))
    assert len(reply.text) == 1_000


@pytest.mark.spec("reliability:MP27")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
async def test_the_unpacked_size_of_a_compressed_body_is_limited(wire, stream, monkeypatch):
    monkeypatch.setattr(_byte_reader, "MAX_REPLY_BYTES", 100_000)
    bomb = gzip.compress(b" " * 10_000_000)
    assert len(bomb) < 20_000
    kind = "text/event-stream" if stream else "application/json"
    answer = Answer((bomb, "fin"), 200, {"content-encoding": "gzip"}, kind)
    error, _ = await asked(wire, answer, stream=stream)
    assert (type(error), error.kind, error.retryable) == (ModelError, "too_large", False)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
async def test_a_body_shorter_than_its_content_length_is_retryable(wire, stream):
    events = wire.stream(*TEXT)
    body = b"".join(before_the_end(wire, events)) if stream else wire.reply(*TEXT)[:-5]

    async def lying(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
        await reader.readexactly(length)
        kind = b"text/event-stream" if stream else b"application/json"
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ncontent-length: 100000\r\n\r\n" + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(lying, "127.0.0.1", 0)
    provider = wire.make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(ModelError) as caught:
        await (streamed(provider, wire.request()) if stream else provider.complete(wire.request()))
    await provider.close()
    server.close()
    assert caught.value.retryable
    assert isinstance(caught.value, TruncatedReply) == stream


@pytest.mark.spec("reliability:MP02")
async def test_a_too_large_request_names_its_size_and_largest_messages(wire):
    history = [UserMessage("small"), UserMessage("y" * 5_000), AssistantMessage([ToolCallPart("c1", "read_file")])]
    history += [ToolMessage("c1", "read_file", "z" * 9_000), UserMessage("x" * 200)]
    async with fault_server(json_answer(wire.error("request_too_large", "Too large."), 413)) as server:
        provider = wire.make(server.url)
        with pytest.raises(ContextOverflow) as caught:
            await provider.complete(ModelRequest(wire.model, messages=Transcript(history)))
        await provider.close()
    message = caught.value.message
    assert not caught.value.retryable
    assert f"The request had {len(server.requests[0][1])} bytes" in message
    named = [message.index(words) for words in ("number 3 (tool, read_file, ", "number 1 (user, ", "number 4 (user, ")]
    assert named == sorted(named)
    assert "number 0" not in message


@pytest.mark.spec("reliability:MP33")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
async def test_a_call_cancelled_before_its_headers_releases_the_connection(wire, stream):
    gone, asked_for = asyncio.Event(), asyncio.Event()

    async def silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked_for.set()
        while await reader.read(100_000):
            pass
        gone.set()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    provider = wire.make(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    task = asyncio.create_task(streamed(provider, wire.request()) if stream else provider.complete(wire.request()))
    await asyncio.wait_for(asked_for.wait(), 50)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(gone.wait(), 50)
    await provider.close()
    server.close()
