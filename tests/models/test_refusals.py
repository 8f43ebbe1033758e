"""
Replies with an error status are read, unpacked and quoted only so far, and nothing in them reaches a terminal.
"""

from __future__ import annotations

import gzip
import json
import resource
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import attrs
import httpx2
import pytest

from stepengine.data.models import ModelRequest
from stepengine.data.transcript import Transcript
from stepengine.errors import ModelError
from stepengine.models._failures import error_from_body
from stepengine.models._transport import MAX_REFUSAL
from tests.faults.scripts import WIRES
from tests.models.wires import made as call_to
from tests.servers import Quiet, served

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024


@contextmanager
def serving(status: int, pieces, **headers: str) -> Iterator[tuple[str, list[int]]]:
    """A server that answers with *pieces*, and what it could send of them."""
    sent: list[int] = []

    class Handler(Quiet):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            for name, value in {"content-type": "application/json", "connection": "close", **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.close_connection = True
            try:
                for piece in pieces():
                    self.wfile.write(piece)
                    sent.append(len(piece))
            except OSError:
                pass

    with served(Handler) as url:
        yield url, sent


async def failure(made, request, *, stream: bool) -> ModelError:
    try:
        with pytest.raises(ModelError) as caught:
            if stream:
                _ = [delta async for delta in made.stream(request)]
            else:
                await made.complete(request)
    finally:
        await made.close()
    return caught.value


@cache
def bomb(mebibytes: int = 150) -> bytes:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    pieces = [packer.compress(b'{"error": {"message": "'), *[packer.compress(b"a" * MIB) for _ in range(mebibytes)]]
    return b"".join([*pieces, packer.flush()])


EACH_REFUSAL = pytest.mark.parametrize(
    ("wire", "status"),
    [pytest.param(wire, status, id=f"{wire}-{status}") for wire in WIRES[:1] for status in (302, 500)],
)


async def refusal(wire, status, *body, **headers):
    with serving(status, lambda: [*body], **headers) as (url, _):
        return await failure(wire.make(url), wire.request(), stream=status == 500)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R23", "reliability:MP27")
@EACH_REFUSAL
async def test_gigabyte_refusal_is_quoted_only_at_its_start(wire, status):
    error = await refusal(wire, status, bomb(), content_encoding="gzip")

    assert status == error.status
    assert len(error.message) < 3_000
    assert "aaaa" in error.message


@pytest.mark.memory
@pytest.mark.spec("reliability:R23", "reliability:MP27")
@EACH_REFUSAL
async def test_a_refusal_that_unpacks_to_gigabytes_takes_no_memory(wire, status):
    packed = bomb()
    await refusal(wire, status, b"{}")  # what the first request imports is not counted
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await refusal(wire, status, packed, content_encoding="gzip")

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


@pytest.mark.spec("reliability:R23")
@pytest.mark.parametrize("wire", WIRES[:1], ids=str)
async def test_a_refusal_without_an_end_is_read_to_its_limit(wire):
    def endless():
        yield b'{"error": {"message": "no'
        while True:
            yield b" more" * 13_000

    with serving(503, endless) as (url, sent):
        error = await failure(wire.make(url), wire.request(), stream=False)

    assert (503, True) == (error.status, error.retryable)
    assert "no more more" in error.message
    assert sum(sent) < MAX_REFUSAL + 32 * MIB  # what waits in the buffers of two sockets


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("reliability:R23", "reliability:MP27")
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "complete"])
@pytest.mark.parametrize(
    ("packing", "packed"),
    [("gzip, gzip", lambda: gzip.compress(bomb())), ("br", lambda: b"\0" * 100), ("gzip", lambda: b"no gzip at all")],
    ids=["twice", "unasked", "broken"],
)
async def test_unrequested_content_encoding_is_a_connection_error(packing, packed, stream):
    wire = WIRES[0]
    with serving(200, lambda: [packed()], content_encoding=packing) as (url, _):
        error = await failure(wire.make(url), wire.request(), stream=stream)

    assert (error.kind, error.retryable) == ("connection", True)


@pytest.mark.spec("reliability:MP27")
@pytest.mark.parametrize("wire", WIRES, ids=str)
async def test_gzip_reply_is_unpacked_and_only_gzip_is_accepted(wire):
    seen = []

    def handler(request):
        seen.append(request.headers["accept-encoding"])
        return httpx2.Response(
            200, content=wire.reply("hi", [], "end_turn"), headers={"content-type": "application/json"}
        )

    with serving(200, lambda: [gzip.compress(wire.reply("hi", [], "end_turn"))], content_encoding="gzip") as (url, _):
        made = wire.make(url)
        assert "hi" == (await made.complete(wire.request())).text
        await made.close()
    made = wire.make(transport=httpx2.MockTransport(handler))
    assert "hi" == (await made.complete(wire.request())).text
    await made.close()
    assert ["gzip"] == seen


@pytest.mark.spec("reliability:R23", "reliability:UI09")
@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("status", [200, 400])
async def test_error_details_are_shortened_and_cleaned(wire, status):
    long, escape = "w" * 20_000, "\x1b[31m\x9b\x07"
    error = {"message": long + escape, "code": f"{escape}{long}", "type": f"{escape}{long}", "status": "9" * 5_000}
    answer = httpx2.Response(status, json={"error": error, "request_id": long}, headers={"x-request-id": long})
    made = wire.make(transport=httpx2.MockTransport(lambda request: answer))
    failed = await failure(made, wire.request(), stream=False)

    assert len(failed.message) < 3_000
    assert failed.message.isprintable()
    assert len(failed.request_id) < 300


@pytest.mark.spec("reliability:MP10")
@pytest.mark.parametrize("wait", ["9" * 400 + "s", "\u0661s", "1.5s", "-1s", "1e5s", "s"])
async def test_retry_delay_in_a_body_is_seconds_or_none(wait):
    wire = next(wire for wire in WIRES if wire.name == "google")
    body = json.dumps({"error": {"message": "slow", "code": 429, "details": [{"retryDelay": wait}]}})
    made = wire.make(transport=httpx2.MockTransport(lambda request: httpx2.Response(429, content=body)))
    failed = await failure(made, wire.request(), stream=False)

    assert {"1.5s": 1.5, "\u0661s": 1.0}.get(wait) == failed.retry_after


@pytest.mark.spec("reliability:MP10")
@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ("Limit 6000, Used 5900. Please try again in 5.289s. Visit the console.", 5.289),
        ("Please try again in 250ms.", 0.25),
        ("Please try again in 7m12.5s.", 432.5),
        ("Please try again in 20 years.", None),
        ("Please try again in 9" + "9" * 400 + "s.", None),
        ("Please try again later.", None),
    ],
)
def test_retry_delay_in_the_message_is_read_without_a_header(words, seconds):
    body = {"error": {"code": "rate_limit_exceeded", "message": words}}
    assert seconds == error_from_body(body, 429, {}, call_to("groq")).retry_after
    assert 2 == error_from_body(body, 429, {"retry-after": "2"}, call_to("groq")).retry_after


@pytest.mark.spec("providers:PV4", "reliability:MP02")
def test_context_limit_message_may_be_cut_anywhere():
    words = "input length and `max_tokens` exceed context limit: 188240 + 21333 > 200000"
    label = attrs.evolve(call_to("anthropic"), request=ModelRequest("anthropic/claude", "", Transcript()))
    first = words.index("188240")
    kinds = [
        error_from_body({"error": {"message": words[:end]}}, 400, {}, label).kind
        for end in range(first, len(words) + 1)
    ]
    assert [*["context_overflow"] * (len(words) - first), "large_limit"] == kinds
