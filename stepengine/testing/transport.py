"""
Transports between an SDK's client and the network, which replay or record a cassette.

All are sync and async transports of httpx2 at once, so that one object serves every client of a test. That
of a test that records plays what the cassette knows; the rest goes to the network and is kept.

``Clients`` are ready clients of the SDKs over one of them, for tests of code that uses the SDKs itself.
"""

from __future__ import annotations

from functools import cached_property
from random import Random
from typing import Any, Literal, Self, TypeAlias

import attrs
import httpx2

from stepengine.errors import DataError
from stepengine.testing.cassette import Cassette
from stepengine.testing.cassette_files import Interaction, has_json_content_type
from stepengine.testing.cassette_misses import CassetteMiss
from stepengine.testing.exchanges import Exchange, bypass_patches, make_credential_reply, start_exchange
from stepengine.testing.httpx_exchanges import HttpxExchanges, make_cut_reply_error, split_body_into_events
from stepengine.testing.recorded_errors import wait_for_cancellation
from stepengine.testing.traffic_redaction import is_credential_exchange, is_presigned

__tracebackhide__ = True  # a failed test ends at its author's line

Chunks: TypeAlias = Literal["events", "whole", "recorded", "random"] | int
MAX_RANDOM_CHUNK = 64
OURS = HttpxExchanges(httpx2)


class ReplayTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """
    A transport that replays a cassette without sockets or waiting.

    Args:
        cassette: What it plays.
        chunks: How a stream of events is cut: ``"events"`` one event each, ``"whole"``, ``"recorded"`` as it arrived,
            ``"random"`` by *seed* and also inside characters and line ends, or so many bytes each. Any other body is one
            piece unless it is ``"random"`` or a number.
        cut: End every body cleanly after so many bytes, as a proxy does that gives up.
        reset_after: Break the connection after so many bytes of every body (``httpx2.RemoteProtocolError``).
        seed: Seeds ``"random"``.

    Raises:
        CassetteMiss: from a request that is not in the cassette, through every SDK. A request for credentials, which no cassette
            has, gets a made-up reply.
    """

    def __init__(
        self,
        cassette: Cassette,
        chunks: Chunks = "events",
        *,
        cut: int | None = None,
        reset_after: int | None = None,
        seed: int = 0,
    ) -> None:
        if chunks not in ("events", "whole", "recorded", "random") and not (isinstance(chunks, int) and chunks > 0):
            msg = f"chunks must be 'events', 'whole', 'recorded', 'random' or a number of bytes, not {chunks!r}"
            raise DataError(msg)
        self.cassette = cassette
        self._chunks = chunks
        self._cut = cut
        self._reset_after = reset_after
        self._random = Random(seed)  # noqa: S311

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply to a sync client, or raise the recorded error."""
        request.read()
        return self.play_interaction(self._consume_or_make_interaction(request), request)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply to an async client, or raise the recorded error."""
        await request.aread()
        return await self.play_interaction_async(self._consume_or_make_interaction(request), request)

    def _consume_or_make_interaction(self, request: httpx2.Request) -> Interaction:
        """Return the recorded interaction of a request and mark it as used; make one for an unrecorded request for credentials."""
        asked = OURS.convert_request(request)
        try:
            return self.cassette.consume(asked)
        except CassetteMiss as miss:
            if not is_credential_exchange(asked) or is_presigned(asked):
                raise
            self.cassette.remove_miss(miss)
            return Interaction(asked, make_credential_reply(asked))

    async def play_interaction_async(self, interaction: Interaction, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply, or raise the recorded error. A request that was cancelled waits until it is cancelled again."""
        await wait_for_cancellation(None if interaction.response.status else interaction.error)
        return self.play_interaction(interaction, request)

    def play_interaction(self, interaction: Interaction, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply, which ends as it was recorded, or raise the recorded error."""
        recorded, met = interaction.response, interaction.error
        if met is not None and not recorded.status:
            raise met
        stops = [n for n in (self._cut, self._reset_after) if n is not None]
        body = recorded.body[: min(stops)] if stops else recorded.body
        breaks = self._reset_after is not None and self._reset_after == min(stops)
        error: Exception | None = _make_reset_error(request, len(body)) if breaks else None
        if not stops:
            error = met or make_cut_reply_error(httpx2, interaction)
        played: httpx2.Response = OURS.make_response(
            recorded, request, self._split_body_into_chunks(body, interaction), error
        )
        return played

    def _split_body_into_chunks(self, body: bytes, interaction: Interaction) -> list[bytes]:
        """Return *body* cut as the option ``chunks`` says."""
        if isinstance(self._chunks, int):
            return [body[i : i + self._chunks] for i in range(0, len(body), self._chunks)]
        if self._chunks == "random":
            return _split_randomly(body, self._random)
        if self._chunks == "recorded":
            return _split_by_recorded_sizes(body, interaction)
        if self._chunks == "events":
            return split_body_into_events(attrs.evolve(interaction.response, body=body))
        return [body] if body else []


class RecordTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """
    A transport that forwards requests to a real transport and records the exchanges.

    Each piece of a reply is passed on as it arrives. The stored exchange has placeholders for secrets, also for the values of secret
    headers wherever they occur. Request headers that are neither compared nor secret are left out. ``cassette.save(path)`` writes the file.

    Args:
        inner: The real transport, such as ``httpx2.HTTPTransport()`` or ``httpx2.AsyncHTTPTransport()``.
        cassette: Where it is kept, in the order in which requests start.
        record_errors: Keep replies with status 408, 409, 429 and 5xx too.
        keep_chunks: Keep the sizes of a stream's pieces, for ``chunks="recorded"``.
    """

    def __init__(
        self,
        inner: httpx2.BaseTransport | httpx2.AsyncBaseTransport,
        cassette: Cassette,
        *,
        record_errors: bool = False,
        keep_chunks: bool = False,
    ) -> None:
        self.inner = inner
        self.cassette = cassette
        self._record_errors = record_errors
        self._keep_chunks = keep_chunks

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request of a sync client with the inner transport, and record request and response."""
        if not isinstance(self.inner, httpx2.BaseTransport):
            msg = f"RecordTransport wraps an async {type(self.inner).__name__}; a sync client needs a sync transport"
            raise DataError(msg)
        request.read()
        exchange = self._start_exchange(request)
        with bypass_patches(exchange):
            response = self.inner.handle_request(request)
        watched: httpx2.Response = OURS.record_while_read(response, exchange)
        return watched

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request of an async client with the inner transport, and record request and response."""
        if not isinstance(self.inner, httpx2.AsyncBaseTransport):
            msg = f"RecordTransport wraps a sync {type(self.inner).__name__}; an async client needs an async transport"
            raise DataError(msg)
        await request.aread()
        exchange = self._start_exchange(request)
        with bypass_patches(exchange):
            response = await self.inner.handle_async_request(request)
        watched: httpx2.Response = OURS.record_while_read(response, exchange)
        return watched

    def _start_exchange(self, request: httpx2.Request) -> Exchange | None:
        """Start to record *request*; return ``None`` for one that is never recorded."""
        return start_exchange(
            self.cassette,
            OURS.convert_request(request),
            record_errors=self._record_errors,
            keep_chunks=self._keep_chunks,
        )

    def close(self) -> None:
        """Close the real transport."""
        if isinstance(self.inner, httpx2.BaseTransport):
            self.inner.close()

    async def aclose(self) -> None:
        """Close the real transport."""
        if isinstance(self.inner, httpx2.AsyncBaseTransport):
            await self.inner.aclose()


def _make_reset_error(request: httpx2.Request, sent: int) -> httpx2.RemoteProtocolError:
    """Return the error for a reply that was cut after *sent* bytes."""
    msg = f"peer closed connection without sending complete message body ({sent} bytes, replayed)"
    return httpx2.RemoteProtocolError(msg, request=request)


def _split_randomly(body: bytes, random: Random) -> list[bytes]:
    """Return *body* in pieces of random sizes."""
    pieces, start = [], 0
    while start < len(body):
        size = random.randint(1, MAX_RANDOM_CHUNK)
        pieces.append(body[start : start + size])
        start += size
    return pieces


def _split_by_recorded_sizes(body: bytes, interaction: Interaction) -> list[bytes]:
    """Return *body* in the pieces in which it arrived; raise ``DataError`` for a stream without recorded sizes."""
    sizes = interaction.extras.get("chunks")
    if sizes is None:
        if has_json_content_type(interaction.response) or not body:
            return [body] if body else []
        msg = f"chunks='recorded' needs recorded sizes, and {interaction.request.url} has none; record with keep_chunks=True"
        raise DataError(msg)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(body[start : start + size])
        start += size
    return [piece for piece in (*pieces, body[start:]) if piece]


class MixedTransport(httpx2.BaseTransport, httpx2.AsyncBaseTransport):
    """
    A transport that replays *known*, and records other requests into *fresh*.

    Args:
        known: What is played.
        fresh: What is recorded into.
        inner: What reaches the network; httpx2's own transports by default.
        chunks: How a replayed stream is cut.
        record_errors: As for ``RecordTransport``.
    """

    def __init__(
        self,
        known: Cassette,
        fresh: Cassette,
        inner: Any = None,
        chunks: Chunks = "events",
        *,
        record_errors: bool = False,
    ) -> None:
        self._known = known
        self._replay = ReplayTransport(known, chunks)
        to_network = httpx2.HTTPTransport() if inner is None else inner
        self._sync = RecordTransport(to_network, fresh, record_errors=record_errors)
        to_network = httpx2.AsyncHTTPTransport() if inner is None else inner
        self._async = RecordTransport(to_network, fresh, record_errors=record_errors)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply to a sync client; if there is none, send the request and record the reply."""
        request.read()
        found = self._find_recorded_interaction(request)
        if found is None:
            return self._sync.handle_request(request)
        return self._replay.play_interaction(found, request)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the recorded reply to an async client; if there is none, send the request and record the reply."""
        await request.aread()
        found = self._find_recorded_interaction(request)
        if found is None:
            return await self._async.handle_async_request(request)
        return await self._replay.play_interaction_async(found, request)

    def _find_recorded_interaction(self, request: httpx2.Request) -> Interaction | None:
        """Return the recorded interaction of a request; None, without a miss, if there is none."""
        try:
            return self._known.consume(OURS.convert_request(request))
        except CassetteMiss as miss:
            self._known.remove_miss(miss)
            return None

    def close(self) -> None:
        """Close the real transport."""
        self._sync.close()

    async def aclose(self) -> None:
        """Close the real transport."""
        await self._async.aclose()


# --- clients of the SDKs -----------------------------------------------------------------------------------------------

GOOGLE_VERSION = "v1beta"


class Clients:
    """
    Clients of the three SDKs that use one transport; each is created at its first use.

    Base URLs are the providers' own, whatever the environment says, so that a recording fits everywhere. The SDKs do not
    try again: a replay must not wait.

    Args:
        transport: A sync and async transport of httpx2, such as ``ReplayTransport(cassette)``.
        key: The API key; ``None`` leaves it to the SDKs, which look into the environment.
    """

    def __init__(self, transport: Any, key: str | None = "replay") -> None:
        self._transport = transport
        self._key = key

    @cached_property
    def _shared_http(self) -> Any:
        """The sync HTTP client of all SDK clients, with the transport."""
        return httpx2.Client(transport=self._transport)

    @cached_property
    def _shared_async_http(self) -> Any:
        return httpx2.AsyncClient(transport=self._transport)

    @cached_property
    def anthropic(self) -> Any:
        """An ``anthropic.Anthropic``."""
        return self._make_anthropic("Anthropic", self._shared_http)

    @cached_property
    def async_anthropic(self) -> Any:
        """An ``anthropic.AsyncAnthropic``."""
        return self._make_anthropic("AsyncAnthropic", self._shared_async_http)

    @cached_property
    def openai(self) -> Any:
        """An ``openai.OpenAI``."""
        return self._make_openai("OpenAI", self._shared_http)

    @cached_property
    def async_openai(self) -> Any:
        """An ``openai.AsyncOpenAI``."""
        return self._make_openai("AsyncOpenAI", self._shared_async_http)

    @cached_property
    def google(self) -> Any:
        """A ``google.genai.Client``; its async side is ``google.aio``. Both sides use the transport."""
        from stepengine.models.google import GoogleProvider

        provider = GoogleProvider("replay")
        sdk = provider._load_sdk()  # noqa: SLF001 - it alone may import the SDK
        options = sdk.types.HttpOptions(
            base_url=provider.settings().base_url,
            api_version=GOOGLE_VERSION,
            httpx_client=self._shared_http,
            httpx_async_client=self._shared_async_http,
        )
        return sdk.Client(api_key=self._key, vertexai=False, http_options=options)

    def _make_anthropic(self, name: str, http_client: object) -> Any:
        """Return a client of Anthropic's SDK of the class *name*."""
        from stepengine.models.anthropic import AnthropicProvider

        return self._make_client(AnthropicProvider("replay"), name, http_client)

    def _make_openai(self, name: str, http_client: object) -> object:
        """Return a client of OpenAI's SDK of the class *name*."""
        from stepengine.models.openai import OpenAIProvider

        return self._make_client(OpenAIProvider("replay"), name, http_client)

    def _make_client(self, provider: Any, name: str, http_client: object) -> Any:
        """Return a client of the class *name* of a provider's SDK, without retries."""
        make = getattr(provider._load_sdk(), name)  # noqa: SLF001 - it alone may import the SDK
        url = provider.settings().base_url
        return make(api_key=self._key, base_url=url, max_retries=0, http_client=http_client)

    def close(self) -> None:
        """Close the connections of the sync clients."""
        self._shared_http.close()

    async def aclose(self) -> None:
        """Close the connections of all clients."""
        self.close()
        await self._shared_async_http.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
