"""
The thin client call that every adapter shares: bytes out through the SDK's own client, bytes back into an accumulator.

One client per event loop, made at the first request and closed by ``close``. The SDK supplies address, authentication,
headers and error classes; it neither retries nor decodes (design 6, ecosystem EC46, EC51, EC66).
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

import attrs

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.models._failures import Call, body_failure, protocol_failure, sdk_failure, transport_failure
from stepengine.models._json import read_json
from stepengine.models._sse import SSEParser
from stepengine.models.base import Provider, deltas_of
from stepengine.models.keys import Credentials, Secret, base_url_for, find_key, redacted

__all__ = ("Accumulator", "Body", "HttpProvider", "ReplyReader")

MAX_REPLY = 64 * 1024 * 1024
DRAIN_SECONDS = 0.25
DRAIN_BYTES = 64 * 1024
NO_KEY = "none"
logger = logging.getLogger("stepengine.models")


@attrs.frozen
class Body:
    """An encoded request: its bytes and the headers it needs beside the client's own."""

    content: bytes
    headers: Mapping[str, str] = attrs.field(factory=dict)


class Accumulator(Protocol):
    """Turns the events of one wire into the completed reply."""

    @property
    def done(self) -> bool:
        """Whether the terminal marker has come."""

    @property
    def usage(self) -> Usage | None:
        """What the reply is known to have used so far."""

    def event(self, name: str, data: bytes) -> list[ModelDelta]:
        """Take one event and return what it adds."""

    def finish(self, tail: bytes, *, clean: bool) -> ModelReply:
        """Return the reply; *tail* is an unfinished event, *clean* whether the body ended as it should."""


class ReplyReader:
    """Feeds the bytes of a streamed reply, in whatever pieces, through the event parser into an accumulator."""

    def __init__(self, accumulator: Accumulator, call: Call) -> None:
        self._accumulator = accumulator
        self._call = call
        self._parser = SSEParser()
        self._size = 0

    @property
    def done(self) -> bool:
        """Whether the terminal marker has come, after which nothing counts."""
        return self._accumulator.done

    @property
    def usage(self) -> Usage | None:
        """What the reply is known to have used so far."""
        return self._accumulator.usage

    def feed(self, chunk: bytes) -> list[ModelDelta]:
        """
        Return what *chunk* adds.

        Raises:
            ModelError: for an error event, a broken protocol, and a reply that does not end.
        """
        self._size += len(chunk)
        if self._size > MAX_REPLY:
            msg = f"the reply of {self._call.model!r} is longer than {MAX_REPLY} bytes and was cut"
            raise ModelError(msg, kind="too_large", usage=self.usage)
        deltas: list[ModelDelta] = []
        for name, data in self._parser.feed(chunk):
            if self._accumulator.done:
                break
            try:
                deltas += self._accumulator.event(name, data)
            except ValueError as error:
                broken = protocol_failure(self._call, f"an event is not JSON: {error}", self.usage)
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                broken = protocol_failure(self._call, f"an event lacks what it must hold: {error!r}", self.usage)
            else:
                continue
            raise broken
        return deltas

    def finish(self, *, clean: bool = True) -> ModelReply:
        """
        Return the completed reply after the last byte.

        Raises:
            TruncatedReply: when the terminal marker is missing.
        """
        try:
            return self._accumulator.finish(self._parser.tail, clean=clean)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            broken = protocol_failure(self._call, f"the reply lacks what it must hold: {error!r}", self.usage)
        raise broken


class HttpProvider(Provider):
    """
    A provider behind an SDK client. Subclasses say how to build the client and how to encode and decode.

    Args:
        name: The provider's name.
        api_key: The key; by default from the environment.
        base_url: Another server; by default from the environment, else the provider's own.
        transport: An ``httpx2.AsyncBaseTransport`` to use in place of the network, for replay and tests.
    """

    path: ClassVar[str]

    def __init__(self, name: str, api_key: str | Secret | None, base_url: str | None, transport: Any) -> None:
        self.name = name
        self._api_key = Secret(api_key.strip()) if isinstance(api_key, str) else api_key
        self._base_url = base_url
        self._transport = transport
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, Credentials]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    @abstractmethod
    def _home(self) -> tuple[str | None, str | None]:
        """The variable that holds the base URL and the default base URL."""

    @property
    @abstractmethod
    def _key_variables(self) -> tuple[str, ...]:
        """The environment variables that may hold the key."""

    @property
    def _key_required(self) -> bool:
        return True

    @abstractmethod
    def _sdk(self) -> Any:
        """Import the SDK, or raise an error that names the extra."""

    @abstractmethod
    def _client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Build the SDK's client."""

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool) -> Body:
        """Encode *request*."""

    @abstractmethod
    def _accumulator(self, request: ModelRequest, call: Call, request_id: str | None) -> Accumulator:
        """Make the accumulator for one streamed reply."""

    @abstractmethod
    def _decode(self, data: Mapping[str, Any], request: ModelRequest, call: Call, request_id: str | None) -> ModelReply:
        """Decode a reply that came in one piece."""

    def check(self, model: str) -> None:
        """
        Look for the key.

        Raises:
            MissingKey: when there is none.
        """
        self._settings()

    def _settings(self) -> tuple[Credentials, str]:
        variable, default = self._home
        url, elsewhere = base_url_for(self._base_url, variable, default)
        required = self._key_required and not elsewhere
        argument = f"{type(self).__name__}(api_key=...)"
        credentials = find_key(self.name, self._api_key, self._key_variables, required=required, argument=argument)
        if url is None:
            msg = f"there is no address for {self.name!r}: pass base_url= or set {variable}"
            raise ModelError(msg, kind="missing_base_url")
        return credentials, url

    def _ready(self) -> tuple[Any, Credentials]:
        loop = asyncio.get_running_loop()
        ready = self._clients.get(loop)
        if ready is None:
            import httpx2

            credentials, base_url = self._settings()
            self._sdk()
            http_client = httpx2.AsyncClient(
                transport=self._transport,
                timeout=httpx2.Timeout(connect=5.0, read=600.0, write=60.0, pool=60.0),
                limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
                follow_redirects=False,
            )
            ready = self._clients[loop] = (self._client(credentials, base_url, http_client), credentials)
        return ready

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*, asked for in one piece.

        Raises:
            ModelError: when there is none.
        """
        exchange = await self._sent(request, stream=False)
        return await self._read(exchange, request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Give the reply in pieces, and last one ``ReplyDone``. Closing the iterator closes the connection (G20).

        Raises:
            ModelError: when there is no reply; ``TruncatedReply`` when it ended early.
        """
        exchange = await self._sent(request, stream=True)
        try:
            if not exchange.is_event_stream:
                reply = await self._read(exchange, request)
                for delta in deltas_of(reply):
                    yield delta
                yield ReplyDone(reply)
                return
            reader = ReplyReader(self._accumulator(request, exchange.call, exchange.request_id), exchange.call)
            async with aclosing(exchange.response.aiter_bytes()) as chunks:
                clean = True
                while not reader.done:
                    chunk, clean = await _next(chunks, exchange.call)
                    if chunk is None:
                        break
                    for delta in reader.feed(chunk):
                        yield delta
                reply = reader.finish(clean=clean)
                await _drain(chunks)
            yield ReplyDone(reply)
        finally:
            await exchange.response.aclose()

    async def close(self) -> None:
        """Close the client of this event loop, and those of loops that still run elsewhere."""
        here = asyncio.get_running_loop()
        for loop, (client, _) in list(self._clients.items()):
            self._clients.pop(loop, None)
            if loop is here:
                await client.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(client.close(), loop))

    async def _sent(self, request: ModelRequest, *, stream: bool) -> _Exchange:
        client, credentials = self._ready()
        body = self._encode(request, stream=stream)
        call = Call(provider=self.name, model=request.model, credentials=credentials, size=len(body.content))
        sdk = self._sdk()
        import httpx2

        failure: BaseException
        try:
            response = await self._post(client, sdk, body, stream=stream)
        except (sdk.APIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError) as error:
            failure = sdk_failure(error, sdk, call)
        else:
            return _Exchange(response, call)
        # Raised here and not in the handler, so that the SDK's error, which holds the key, is nobody's context (SC05).
        raise failure

    async def _post(self, client: Any, sdk: Any, body: Body, *, stream: bool) -> Any:
        options = {"headers": dict(body.headers)} if body.headers else {}
        if stream:
            opened = await client.post(
                self.path,
                content=body.content,
                cast_to=object,
                stream=True,
                stream_cls=sdk.AsyncStream[object],
                options=options,
            )
            return opened.response
        import httpx2

        return await client.post(self.path, content=body.content, cast_to=httpx2.Response, options=options)

    async def _read(self, exchange: _Exchange, request: ModelRequest) -> ModelReply:
        content = await exchange.content()
        if exchange.is_event_stream:
            reader = ReplyReader(self._accumulator(request, exchange.call, exchange.request_id), exchange.call)
            reader.feed(content)
            return reader.finish()
        data = exchange.json(content)
        if data.get("error"):
            raise body_failure(data, None, exchange.response.headers, exchange.call)
        try:
            return self._decode(data, request, exchange.call, exchange.request_id)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            broken = protocol_failure(exchange.call, f"the reply lacks what it must hold: {error!r}")
        raise broken


@attrs.frozen
class _Exchange:
    response: Any
    call: Call

    @property
    def request_id(self) -> str | None:
        headers = self.response.headers
        for name in ("request-id", "x-request-id", "x-generation-id"):
            if headers.get(name):
                return str(headers[name])
        return None

    @property
    def is_event_stream(self) -> bool:
        """By the content type, whatever was asked for (reliability MP26)."""
        return "text/event-stream" in self.response.headers.get("content-type", "").lower()

    async def content(self) -> bytes:
        """Return the whole body."""
        import httpx2

        try:
            content: bytes = await self.response.aread()
        except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
            failure = transport_failure(error, self.call)
        else:
            return content
        raise failure

    def json(self, content: bytes) -> Mapping[str, Any]:
        """
        Return the object in *content*.

        Raises:
            ModelError: for anything else, quoting its beginning (reliability MP15).
        """
        kind = self.response.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            data = read_json(content)
        except ValueError:
            data = None
        if isinstance(data, Mapping):
            return data
        begin = redacted(content[:200].decode("utf-8", "replace"), self.call.credentials.key)
        begin = "".join([c if c.isprintable() else " " for c in begin])
        msg = f"{self.call.provider} answered {kind or 'something'} that is no reply of {self.call.model!r}: {begin!r}"
        raise ModelError(msg, retryable=kind != "text/html", kind="protocol", request_id=self.request_id)


async def _next(chunks: Any, call: Call) -> tuple[bytes | None, bool]:
    """Return the next piece, or ``None`` and whether the body ended as it should."""
    import httpx2

    try:
        return await anext(chunks, None), True
    except httpx2.TimeoutException as error:
        failure = transport_failure(error, call)
    except (httpx2.HTTPError, httpx2.StreamError, OSError) as error:
        failure = transport_failure(error, call)
        if isinstance(failure, ModelError) and failure.kind == "connection":
            logger.debug("the connection to %s broke: %s", call.provider, type(error).__name__)
            return None, False
    raise failure


async def _drain(chunks: Any) -> None:
    """Read what follows the terminal marker, for a moment, so that the connection can be used again (MP29)."""
    import httpx2

    seen = 0
    with suppress(TimeoutError, httpx2.HTTPError, httpx2.StreamError, OSError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for chunk in chunks:
                seen += len(chunk)
                if seen > DRAIN_BYTES:
                    return
