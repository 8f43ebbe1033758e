"""
The thin client call that every adapter shares: bytes out through the SDK's own client, bytes back into an accumulator.

One client per event loop, made at the first request and closed by ``close``. The SDK supplies address, authentication,
headers and error classes; it neither retries nor decodes (design 6, ecosystem EC46, EC51, EC66).
"""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import attrs

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.errors import ModelError
from stepengine.models._discretion import discreet
from stepengine.models._failures import ONCE, Call, body_failure, sdk_failure
from stepengine.models._json import count_of
from stepengine.models._reading import (
    Accumulator,
    Exchange,
    ReplyReader,
    Timeouts,
    held,
    late,
    pieces_of,
    understood,
)
from stepengine.models._wire import all_headers, extra_headers
from stepengine.models.base import Provider, deltas_of
from stepengine.models.keys import (
    Credentials,
    Secret,
    base_url_for,
    find_key,
    given_to,
    headers_given_to,
    password_given_to,
    usable_variables,
)
from stepengine.redaction import GIVEN

__all__ = ("NO_KEY", "Body", "HttpProvider")

NO_KEY = "none"
REMEMBERED = 32


@attrs.frozen
class Body:
    """
    An encoded request.

    Attributes:
        content: Its bytes.
        headers: What it needs beside the client's own headers.
        path: Where it goes, when that is not the provider's ``path``.
    """

    content: bytes
    headers: Mapping[str, str] = attrs.field(factory=dict)
    path: str = ""


class SecondTries:
    """
    Which requests had a failure that is worth exactly one more try, so that the second one is final.

    The provider does not try again itself: it says once that the same request may succeed, and whoever coordinates
    retries asks again (reliability R21, MP60).
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[Any, ...], tuple[ModelRequest, str]] = OrderedDict()

    def kind_of(self, request: ModelRequest) -> str:
        """Return how *request* failed before; ``""`` when it did not."""
        _, kind = self._failed.get(_identity(request), (None, ""))
        return kind

    def judge(self, error: ModelError, request: ModelRequest) -> None:
        """Set whether *error* may be tried again, when it is of a kind that may be tried again once."""
        if error.kind in ONCE:
            key = _identity(request)
            error.retryable = key not in self._failed
            self._failed[key] = (request, error.kind)
            while len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)


def _identity(request: ModelRequest) -> tuple[Any, ...]:
    """Return what the attempts of one call share, also when a wrapper gives each a copy with another model."""
    return id(request.messages), id(request.tail), request.model, len(request.messages)


class HttpProvider(Provider):
    """
    A provider behind an SDK client. Subclasses say how to build the client and how to encode and decode.

    Args:
        name: The provider's name.
        api_key: The key; by default from the environment.
        base_url: Another server; by default from the environment, else the provider's own.
        transport: An ``httpx2.AsyncBaseTransport`` to use in place of the network, for replay and tests.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own. Where *base_url* is given
            too, whoever gave both has chosen the host that the key goes to.
    """

    accumulator: ClassVar[type[Accumulator]]
    path: ClassVar[str]
    count_member: ClassVar[str] = "input_tokens"

    def __init__(
        self,
        name: str,
        api_key: str | Secret | None,
        base_url: str | None,
        transport: Any,
        *,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        key_env: str | None = None,
    ) -> None:
        self.name = name
        self._key_env = key_env
        self._api_key = Secret(api_key.strip()) if isinstance(api_key, str) else api_key
        self._base_url = base_url
        self._transport = transport
        self._timeouts = timeouts or Timeouts()
        self._headers = dict(headers or {})
        given_to(name, self._api_key)
        headers_given_to(name, self._headers)
        self._second_tries = SecondTries()
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Ready] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

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
    def _encode(self, request: ModelRequest, *, stream: bool, after: str = "") -> Body:
        """Encode *request*; *after* is how it failed before, so that the second try leaves out what was refused."""

    def _encode_count(self, request: ModelRequest) -> Body | None:
        """Encode the question how many tokens *request* has; ``None`` when the provider cannot be asked."""
        return None

    def check(self, model: str) -> None:
        """
        Look for the key.

        Raises:
            MissingKey: when there is none.
        """
        self._access()

    def _access(self) -> tuple[Credentials, str]:
        """Return the key to use and the address to go to."""
        settings = self.settings()
        default = settings.base_url
        url, elsewhere = base_url_for(self._base_url, settings.base_url_variable, default)
        required = self._key_env is not None or (self._key_required and not (elsewhere and default is not None))
        argument = f"{type(self).__name__}(api_key=...)"
        variables = settings.key_variables if self._api_key is None else ()
        is_chosen = self._key_env is not None and self._base_url is not None
        usable = variables if is_chosen else usable_variables(self.name, variables, url, default)
        credentials = find_key(self.name, self._api_key, usable, required=required, argument=argument)
        if url is None:
            msg = f"there is no address for {self.name!r}: pass base_url= or set {settings.base_url_variable}"
            raise ModelError(msg, kind="missing_base_url")
        password_given_to(self.name, url)
        return credentials, url

    def _ready(self) -> _Ready:
        loop = asyncio.get_running_loop()
        ready = self._clients.get(loop)
        if ready is None:
            import httpx2

            from stepengine.models._transport import hold, trusted

            credentials, base_url = self._access()
            self._sdk()
            timeouts = self._timeouts
            http_client = httpx2.AsyncClient(
                headers={"accept-encoding": "gzip"},
                event_hooks={"response": [hold]},
                transport=self._transport,
                verify=trusted(),
                timeout=httpx2.Timeout(connect=timeouts.connect, read=timeouts.total, write=60.0, pool=60.0),
                limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
                follow_redirects=False,
            )
            GIVEN.learn(os.environ)
            client = self._client(credentials, base_url, http_client)
            ready = self._clients[loop] = _Ready(client, credentials, http_client)
        discreet()
        return ready

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*, asked for in one piece.

        Raises:
            ModelError: when there is none.
        """
        try:
            exchange = await self._sent(request, stream=False)
            try:
                return await self._read(exchange, request)
            finally:
                await exchange.response.aclose()
        except ModelError as error:
            self._second_tries.judge(error, request)
            raise

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Give the reply in pieces, and last one ``ReplyDone``. Closing the iterator closes the connection (G20).

        Raises:
            ModelError: when there is no reply; ``TruncatedReply`` when it ended early.
        """
        try:
            exchange = await self._sent(request, stream=True)
            try:
                async with aclosing(self._deltas(exchange, request)) as deltas:
                    async for delta in deltas:
                        yield delta
            finally:
                await exchange.response.aclose()
        except ModelError as error:
            self._second_tries.judge(error, request)
            raise

    async def _deltas(self, exchange: Exchange, request: ModelRequest) -> AsyncGenerator[ModelDelta]:
        if not exchange.is_event_stream:
            reply = await self._read(exchange, request)
            for delta in deltas_of(reply):
                yield delta
            yield ReplyDone(reply)
            return
        reader = self._reader(exchange, request)
        done: ModelReply | None = None
        async with aclosing(pieces_of(exchange, reader)) as pieces:
            async for piece, clean in pieces:
                for delta in reader.feed(piece) if piece is not None else ():
                    yield delta
                if piece is None or reader.done:
                    done = reader.finish(clean=clean)
        if done is not None:
            yield ReplyDone(self._finished(done, request))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Return how many tokens the provider counts in *request*; ``None`` when it cannot be asked (ecosystem EC75).

        Raises:
            ModelError: when the question fails.
        """
        body = self._encode_count(request)
        if body is None:
            return None
        exchange = await self._asked(body, request, stream=False)
        try:
            data = exchange.json(await exchange.content())
        finally:
            await exchange.response.aclose()
        return count_of(data.get(self.count_member))

    async def close(self) -> None:
        """Close the client of this event loop, and those of loops that still run elsewhere."""
        here = asyncio.get_running_loop()
        for loop, ready in list(self._clients.items()):
            self._clients.pop(loop, None)
            if loop is here:
                await ready.http_client.aclose()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ready.http_client.aclose(), loop))

    async def _sent(self, request: ModelRequest, *, stream: bool) -> Exchange:
        after = self._second_tries.kind_of(request)
        return await self._asked(self._encode(request, stream=stream, after=after), request, stream=stream)

    async def _asked(self, body: Body, request: ModelRequest, *, stream: bool) -> Exchange:
        ready = self._ready()
        call = Call(
            provider=self.name,
            model=request.model,
            credentials=ready.credentials,
            size=len(body.content),
            request=request,
        )
        body = attrs.evolve(body, headers=all_headers(self._headers, body.headers, extra_headers(request.settings)))
        timeouts, started = self._timeouts, asyncio.get_running_loop().time()
        limit = "first_byte" if stream else "total"
        failure: BaseException
        try:
            async with asyncio.timeout_at(started + getattr(timeouts, limit)):
                response = await self._post(ready.client, body, stream=stream)
        except TimeoutError:
            failure = late(call, limit, timeouts)
        except self._errors() as error:
            failure = self._failure(error, call)
        else:
            return Exchange(response, call, timeouts, started)
        # Raised here and not in the handler, so that the SDK's error, which holds the key, is nobody's context (SC05).
        raise failure

    def _errors(self) -> tuple[type[Exception], ...]:
        """Return what the SDK and the HTTP library raise when a request fails."""
        import httpx2

        return self._sdk().APIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError

    def _failure(self, error: Exception, call: Call) -> BaseException:
        """Return what to raise for *error*."""
        return sdk_failure(error, self._sdk(), call)

    async def _post(self, client: Any, body: Body, *, stream: bool) -> Any:
        """
        Send *body* and return the HTTP library's response with its body still to come.

        The body of a reply in one piece is read here too and not by the SDK, so that its size has a limit (MP27).
        """
        opened = await client.post(
            body.path or self.path,
            content=body.content,
            cast_to=object,
            stream=True,
            stream_cls=self._sdk().AsyncStream[object],
            options={"headers": dict(body.headers)} if body.headers else {},
        )
        return opened.response

    async def _read(self, exchange: Exchange, request: ModelRequest) -> ModelReply:
        content = await exchange.content()
        if exchange.is_event_stream:
            reader = self._reader(exchange, request)
            reader.feed(content)
            return self._finished(reader.finish(), request)
        data = exchange.json(content)
        if data.get("error"):
            raise body_failure(data, None, exchange.response.headers, exchange.call)
        model = self.bare(request.model)
        reply = understood(
            exchange.call,
            lambda: held(self.accumulator.decoder(data, exchange.call, model, exchange.request_id), exchange.call),
        )
        return self._finished(reply, request)

    def _reader(self, exchange: Exchange, request: ModelRequest) -> ReplyReader:
        accumulator = self.accumulator(exchange.call, self.bare(request.model), exchange.request_id)
        return ReplyReader(accumulator, exchange.call)

    def _finished(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* with what the wire could not do itself."""
        return reply


@attrs.frozen
class _Ready:
    """The clients of one event loop."""

    client: Any
    credentials: Credentials
    http_client: Any
