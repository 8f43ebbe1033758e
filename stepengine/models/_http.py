"""
The base class of all adapters: send encoded requests through the SDK's client, and read replies into an accumulator.

There is one client per event loop, created at the first request and closed by ``close``. The SDK provides the URL, the
authentication, headers and error classes. It neither retries nor decodes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import cache, partial
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, finalize

import attrs
from attrs import frozen

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._answers import (
    ANSWER,
    AnswerChunks,
    add_answer_tool,
    convert_answer_call,
    is_answered_by_tool,
    make_answer_tool,
)
from stepengine.models._byte_reader import (
    Accumulator,
    HttpExchange,
    ReplyReader,
    check_reply_size,
    make_timeout_error,
    open_reply_body,
    parse_json_lines,
    run_decoder,
)
from stepengine.models._failures import (
    GRAMMAR,
    NO_SEARCH,
    ONCE,
    RequestLabel,
    error_from_body,
    error_from_sdk,
    format_address,
)
from stepengine.models._hidden_tools import arrange_hidden_tools
from stepengine.models._json import parse_token_count
from stepengine.models._log_redaction import install_secret_filter
from stepengine.models._reply import parse_dollar_text
from stepengine.models._sdks import Sdk
from stepengine.models._settings import add_dropped, find_foreign_options, remove_options, warn_of_dropped
from stepengine.models._stopped_usage import attach_usage_on_cancel
from stepengine.models._wire import merge_headers, parse_extra_headers
from stepengine.models.base import Provider, Timeouts, split_reply_into_deltas
from stepengine.models.keys import (
    WITHHELD,
    Credentials,
    Secret,
    find_key,
    find_set_variable,
    hash_account,
    register_secret,
    register_secret_headers,
    register_url_password,
    resolve_base_url,
    select_usable_variables,
)
from stepengine.redaction import GIVEN
from stepengine.workspace.after_fork import keep_referenced, register_renewable

logger = logging.getLogger("stepengine.models")

NO_KEY = "none"
MAX_RESULTS = 256 * 1024 * 1024
"""The most bytes of the results of a batch."""
MAX_BATCH_ID_CHARS = 200
"""Enough for ids of batches, which have some dozen characters and become part of a URL and a database key."""
LITELLM_COST = "x-litellm-response-cost"
"""LiteLLM's header with the cost of a reply; it is also 0 for models without a known price."""
# The number of remembered failures. The end of a call is not reported, so the oldest ones are dropped.
REMEMBERED = 32


@cache
def warn_once(note: str) -> None:
    """Log the warning *note* once per process; ``""`` logs nothing."""
    if note:
        logger.warning("%s", note)


@frozen
class RequestBody:
    """
    An encoded request.

    Attributes:
        content: Its bytes.
        headers: Additional headers.
        path: The URL path, if it differs from the provider's ``path``.
        is_question: Whether it is a GET request without a body.
    """

    content: bytes
    headers: Mapping[str, str] = attrs.field(factory=dict)
    path: str = ""
    is_question: bool = False


class ThoughtFilter(Protocol):
    """Separates thoughts from the answer in the text of a stream."""

    def convert_delta(self, delta: ModelDelta) -> Iterable[ModelDelta]:
        """Return the deltas that subscribers receive for *delta*."""

    def end(self) -> Iterable[ModelDelta]:
        """Return the deltas that were held back."""


@frozen
class _DeltaFilters:
    """Converts the deltas of a stream to those that subscribers receive."""

    answers: AnswerChunks | None
    thoughts: ThoughtFilter | None

    def convert_deltas(self, deltas: Iterable[ModelDelta]) -> Iterable[ModelDelta]:
        """Return the deltas that subscribers receive for *deltas*."""
        if self.answers is not None:
            told = map(self.answers.convert_delta, deltas)
            deltas = [delta for delta in told if delta is not None]
        if self.thoughts is not None:
            deltas = [told for delta in deltas for told in self.thoughts.convert_delta(delta)]
        return deltas

    def end(self) -> Iterable[ModelDelta]:
        """Return the deltas that were held back."""
        return () if self.thoughts is None else self.thoughts.end()


class FailedRequests:
    """
    The requests with a failure that may be retried exactly once.

    The provider never retries by itself. It marks the first failure as retryable and the second as final, and the retry
    policy acts on that (reliability:MP60).
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[Any, ...], tuple[ModelRequest, str]] = OrderedDict()

    def find_kind(self, request: ModelRequest) -> str:
        """Return the failure kind of the previous attempt of *request*; ``""`` if there is none."""
        _, kind = self._failed.get(_request_key(request), (None, ""))
        return kind

    def check_retry(self, error: ModelError, request: ModelRequest) -> None:
        """Set ``error.retryable`` if *error* is of a kind that may be retried once."""
        # Such as a rejected signature or a malformed call: if the changed request fails too, more attempts are useless.
        if error.kind in ONCE:
            key = _request_key(request)
            error.retryable = key not in self._failed
            self._failed[key] = (request, error.kind)
            while len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)


def _request_key(request: ModelRequest) -> tuple[object, ...]:
    """Return a key that is equal for all attempts of one call, and for copies of its request."""
    # By identity, because the attempts of one call have the same message objects, and comparing long conversations is
    # slow.
    return id(request.messages), id(request.tail), request.model, len(request.messages)


class HttpProvider(Provider):
    """
    A provider with an HTTP client, mostly that of an SDK. Subclasses create the client, encode and decode.

    Args:
        name: The provider's name.
        api_key: The key; by default from the environment.
        base_url: Another server; by default from the environment, else the provider's own.
        transport: An ``httpx2.AsyncBaseTransport`` to use in place of the network, for replay and tests.
        timeouts: Time limits of calls.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own. Together with *base_url* it
            also permits sending the key to that host.
    """

    accumulator: ClassVar[type[Accumulator]]
    path: ClassVar[str]
    count_member: ClassVar[str] = "input_tokens"
    sdk: ClassVar[Sdk | None] = None
    """The SDK that sends requests; ``None`` without one."""

    batches_have_headers: ClassVar[bool] = False
    """Whether the headers of a batch apply to its requests."""

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
        register_secret(name, self._api_key)
        register_secret_headers(name, self._headers)
        self._failed_requests = FailedRequests()
        self._by_tool: tuple[Mapping[str, Any], ToolSpec] | None = None
        self._unsearching: set[str] = set()
        self._has_sdk = False
        self._unhidden: tuple[ToolSpec, ...] = ()
        # One client per event loop, because connections belong to the loop that opened them. Weak, so that connections
        # do not outlive their loop.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClients] = WeakKeyDictionary()
        self._unclosed: set[str] = set()
        register_renewable(self)
        finalize(self, _warn_of_unclosed, self._unclosed)

    def renew(self) -> None:
        """Drop the parent's connections in a forked child process, which opens its own."""
        keep_referenced(self._clients)
        self._clients = WeakKeyDictionary()
        self._unclosed.clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def _key_required(self) -> bool:
        return True

    def _load_sdk(self) -> Any:
        """Import the SDK and return its module; raise ``ModelError`` if it is missing."""
        return None if self.sdk is None else self.sdk.load()

    @abstractmethod
    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create the SDK's client."""

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool, after: str = "") -> RequestBody:
        """Encode *request*; after the failure kind *after* the rejected part is left out."""

    def _supports_tool_search(self, model: str) -> bool:
        """Return whether the provider has its own tool search for *model*, so that hidden tools can be sent."""
        return False

    def _make_thought_filter(self) -> ThoughtFilter | None:
        """Return the filter that separates thoughts from text in a stream; ``None`` if none is needed."""
        return None

    def _explain_no_schema(self, request: ModelRequest) -> str:
        """Return the reason why the provider does not support the response schema of *request*; ``""`` if it does."""
        return ""

    def _list_dropped_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of settings of *request* that the wire does not support."""
        return ()

    def _find_foreign_options(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the members of ``extra`` that only another provider knows; ``()`` for a server at another URL."""
        if not request.settings.extra:
            return ()
        settings = self.settings()
        _, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        return () if elsewhere else find_foreign_options(request.settings, self.name)

    def _list_left_out(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings and ``extra`` members that *request* is sent without."""
        return (
            *self._list_dropped_settings(request),
            *[f"extra[{name!r}]" for name in self._find_foreign_options(request)],
        )

    def _prepare_request(self, request: ModelRequest, after: str = "", *, is_count: bool = False) -> ModelRequest:
        """
        Return *request* with its hidden tools arranged, and an answer tool where a schema needs one.

        The answer tool is added if the provider does not support the schema. *is_count* is for counting tokens, which does
        not support a tool search.

        Raises:
            ModelError: when the settings require native support of the schema, or an agent's tool has the same name.
        """
        request = self._prepare_hidden_tools(request, after, is_count=is_count)
        schema, how = request.settings.response_schema, request.settings.output
        if schema is None:
            return request
        why = self._explain_no_schema(request) if how != "tool" else ""
        if not is_answered_by_tool(request):
            if why or how == "tool":
                msg = f"the answer of {request.model!r} needs a tool named {ANSWER!r}, but the agent has one of that name; rename it"
                raise ModelError(msg, kind="settings")
            return request
        if why and how == "native":
            msg = f"{self.name} does not support this response_schema for {request.model!r}: {why}; remove output='native'"
            raise ModelError(msg, kind="settings")
        if how != "tool" and not why and (how == "native" or after != GRAMMAR):
            return request
        if self._by_tool is None or self._by_tool[0] is not schema:
            self._by_tool = (schema, make_answer_tool(schema))
        return add_answer_tool(request, self._by_tool[1])

    def _prepare_hidden_tools(self, request: ModelRequest, after: str, *, is_count: bool) -> ModelRequest:
        """Return *request* with its hidden tools arranged for the provider; after a rejected tool search none are hidden."""
        # The tools of a run are the same tuple at every step, so this is fast for nearly every request.
        if request.tools is self._unhidden:
            return request
        if True not in [tool.defer_loading for tool in request.tools]:
            self._unhidden = request.tools
            return request
        model = self.strip_prefix(request.model)
        if after == NO_SEARCH:
            self._unsearching.add(model)
            warn_once(f"{self.name} rejected its own tool search for {model}; find_tools is offered in its place")
        searches = not is_count and self._supports_tool_search(model) and model not in self._unsearching
        return arrange_hidden_tools(request, self.name, searches=searches)

    def _encode_count(self, request: ModelRequest) -> RequestBody | None:
        """Encode a request that counts the tokens of *request*; ``None`` if the provider does not count tokens."""
        return None

    def check(self, model: str) -> None:
        """
        Check that there is a key and that the SDK is installed, without loading it.

        Raises:
            MissingKey: when there is no key.
            ModelError: when the SDK is not installed.
        """
        self._resolve_access()
        if self.sdk is not None and not self._has_sdk:  # cached, because the search for the package is slow
            self.sdk.check()
            self._has_sdk = True

    def get_account(self) -> str:
        """Return a hash of its key, or of its URL without a key."""
        credentials, url = self._resolve_access()
        return hash_account(credentials.key, url)

    def _resolve_access(self) -> tuple[Credentials, str]:
        """Return the key and the base URL for requests."""
        settings = self.settings()
        default = settings.base_url
        url, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, default)
        required = self._key_env is not None or (self._key_required and not (elsewhere and default is not None))
        argument = f"{type(self).__name__}(api_key=...)"
        variables = settings.key_variables if self._api_key is None else ()
        # A key is only sent to its own host, because a URL in the environment may point anywhere. If code passes both
        # key_env and base_url, that is an explicit choice.
        is_chosen = self._key_env is not None and self._base_url is not None
        usable = variables if is_chosen else select_usable_variables(self.name, variables, url, default)
        credentials = find_key(self.name, self._api_key, usable, required=required, argument=argument)
        if credentials.key is None and not usable and find_set_variable(variables) is not None:
            credentials = Credentials(None, WITHHELD)
        if url is None:
            variable = f" or set {settings.base_url_variable}" if settings.base_url_variable else ""
            msg = f"there is no base URL for {self.name!r}: pass base_url={variable}"
            raise ModelError(msg, kind="missing_base_url")
        register_url_password(self.name, url)
        return credentials, url

    def _get_clients(self) -> _LoopClients:
        """Return the clients of this event loop, created at the first call."""
        loop = asyncio.get_running_loop()
        ready = self._clients.get(loop)
        if ready is None:
            import httpx2

            from stepengine.models._transport import get_ssl_context, unpack_response

            credentials, base_url = self._resolve_access()
            self._load_sdk()
            timeouts = self._timeouts
            # Our own client for the SDK. It accepts only gzip, which can be decompressed in bounded pieces. It follows no
            # redirects, which would send the key to another host (reliability:MP14). Its time limits are above ours,
            # which ignore keep-alives.
            http_client = httpx2.AsyncClient(
                headers={"accept-encoding": "gzip"},
                event_hooks={"response": [unpack_response]},
                transport=self._transport,
                verify=get_ssl_context(),
                timeout=httpx2.Timeout(connect=timeouts.connect, read=timeouts.total, write=60.0, pool=60.0),
                limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
                follow_redirects=False,
            )
            # Keys may have been set since the process started; they are registered for redaction (reliability:R11).
            GIVEN.add_from_environment(os.environ)
            client = self._make_client(credentials, base_url, http_client)
            ready = self._clients[loop] = _LoopClients(client, credentials, http_client, format_address(base_url))
            if self._transport is None:
                self._unclosed.add(repr(self))
        install_secret_filter()
        return ready

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*, requested without a stream.

        Raises:
            ModelError: when there is none.
        """
        with self._mark_retryable(request):
            async with self._send_request(request, stream=False) as exchange:
                return await self._read(exchange, request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Yield the reply in pieces, and last one ``ReplyDone``. Closing the iterator closes the connection.

        Raises:
            ModelError: when there is no reply; ``TruncatedReply`` when it ended early.
        """
        # Only one generator, because each further one would slow every token.
        with self._mark_retryable(request):
            async with self._send_request(request, stream=True) as exchange:
                # The response decides, not the request: gateways answer a stream request with one object, and vice versa
                # (reliability:MP26).
                if not exchange.is_event_stream:
                    reply = await self._read(exchange, request)
                    for delta in (*split_reply_into_deltas(reply), ReplyDone(reply)):
                        yield delta
                    return
                reader = self._make_reader(exchange, request)
                done: ModelReply | None = None
                shown = self._make_delta_filters(request)
                with attach_usage_on_cancel(lambda: reader.usage):
                    async with open_reply_body(exchange, reader) as body:
                        while done is None:
                            piece = body.read_available()
                            if piece is None:
                                piece = await body.wait_for_piece()
                            deltas = () if piece is None else reader.feed(piece)
                            for delta in deltas if shown is None else shown.convert_deltas(deltas):
                                yield delta
                            if piece is None or reader.done:
                                done = reader.finish(clean=body.clean)
                for delta in () if shown is None else shown.end():
                    yield delta
                yield ReplyDone(self._complete_reply(done, request))

    def _make_delta_filters(self, request: ModelRequest) -> _DeltaFilters | None:
        """Return the filters for the deltas of a stream; ``None`` if subscribers receive all deltas unchanged."""
        answers, thoughts = AnswerChunks() if is_answered_by_tool(request) else None, self._make_thought_filter()
        return None if answers is None and thoughts is None else _DeltaFilters(answers, thoughts)

    @contextmanager
    def _mark_retryable(self, request: ModelRequest) -> Iterator[None]:
        """Set ``retryable`` of a ``ModelError`` in the block if *request* may be retried once."""
        try:
            yield
        except ModelError as error:
            self._failed_requests.check_retry(error, request)
            raise

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Query the provider for the number of tokens in *request*; ``None`` if it does not count them.

        Raises:
            ModelError: when the query fails.
        """
        body = self._encode_count(remove_options(request, self._find_foreign_options(request)))
        if body is None:
            return None
        return parse_token_count((await self._answer(body, request)).get(self.count_member))

    async def _answer(self, body: RequestBody, request: ModelRequest) -> Mapping[str, Any]:
        """Send *body* and return the response object, for requests other than model calls."""
        async with self._send_body(body, request, stream=False) as exchange:
            return exchange.parse_json(await exchange.read_content())

    async def _fetch_batch_lines(self, path: str) -> list[Mapping[str, object]]:
        """Return the objects of a file with batch results."""
        body = RequestBody(b"", path=path, is_question=True)
        async with self._send_body(body, self._make_batch_pseudo_request(), stream=False) as exchange:
            return parse_json_lines(await exchange.read_content(MAX_RESULTS), exchange.call)

    async def _call_batch_api(self, path: str, content: bytes | None = None, **headers: str) -> Mapping[str, Any]:
        """Send a GET, or a POST of *content*, to the batch API at *path* and return the response object."""
        body = RequestBody(content or b"", headers, path=path, is_question=content is None)
        return await self._answer(body, self._make_batch_pseudo_request())

    def _make_batch_pseudo_request(self) -> ModelRequest:
        """Return an empty request that names the batch API in errors."""
        return ModelRequest(f"{self.name}/batches")

    def _encode_for_batch(self, request: ModelRequest) -> RequestBody:
        """Encode *request* for a batch."""
        dropped = self._list_left_out(request)
        if not self.batches_have_headers and parse_extra_headers(request.settings):
            dropped = (*dropped, "extra['headers']")
        warn_of_dropped(request, self.name, dropped)
        request = remove_options(request, self._find_foreign_options(request))
        return self._encode(request, stream=False, after=self._failed_requests.find_kind(request))

    def _read_batch_id(self, answer: Mapping[str, object], member: str = "id") -> str:
        """Return the id of an accepted batch; without one the error is final, because a retry might be billed twice."""
        name = answer.get(member)
        if isinstance(name, str) and 0 < len(name) <= MAX_BATCH_ID_CHARS:
            return name
        msg = f"{self.name} accepted a batch, but returned no {member!r} of 1 to {MAX_BATCH_ID_CHARS} characters for it"
        raise ModelError(msg, kind="protocol")

    def batch_reply(self, result: object, request: ModelRequest) -> ModelReply:
        """
        Return the reply in *result*, a value of ``batch_results``.

        Raises:
            ModelError: when the request failed, or the batch expired or was cancelled before it.
        """
        with self._mark_retryable(request):
            return self._decode_batch_result(result, request)

    def _decode_batch_result(self, result: Any, request: ModelRequest) -> ModelReply:
        call = RequestLabel(
            provider=self.name, model=request.model, credentials=self._get_clients().credentials, request=request
        )
        match result:
            case {"reply": Mapping() as data}:
                reply = self._decode_reply(data, call, request, result.get("request_id"))
                return attrs.evolve(reply, provider_data={**reply.provider_data, "processing": "batch"})
            case {"error": error}:
                raise error_from_body({"error": error}, result.get("status"), {}, call)
            case {"ended": "canceled"}:
                msg = f"the batch with this request of {request.model!r} was cancelled at {self.name}"
                raise ModelError(msg, kind="batch")
            case {"ended": _}:
                msg = f"the batch with this request of {request.model!r} expired at {self.name} before it was processed"
                raise ModelError(msg, kind="batch", retryable=True)
            case _:
                return super().batch_reply(None, request)

    async def _call_file_api(self, ask: Callable[[Any], Awaitable[object]]) -> Any:
        """Return the result of *ask*, called with the SDK's client for a file operation, with its failures as ``ModelError``."""
        ready = self._get_clients()
        call = RequestLabel(
            provider=self.name, model=f"{self.name}/files", credentials=ready.credentials, address=ready.address
        )
        failure: BaseException
        try:
            async with ready.lease_connections(), asyncio.timeout(self._timeouts.total):
                return await ask(ready.client)
        except TimeoutError:
            failure = make_timeout_error(call, "total", self._timeouts)
        except self._list_errors() as error:
            failure = self._convert_error(error, call)
        raise failure

    async def close(self) -> None:
        """
        Close the client of this event loop, and those of other running loops.

        Running requests, such as those of another engine, end first.
        """
        here = asyncio.get_running_loop()
        self._unclosed.clear()
        for loop, ready in list(self._clients.items()):
            self._clients.pop(loop, None)
            if loop is here:
                await ready.release()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(ready.release(), loop))

    @asynccontextmanager
    async def _send_request(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[HttpExchange]:
        after = self._failed_requests.find_kind(request)
        warn_of_dropped(request, self.name, self._list_left_out(request))
        body = self._encode(remove_options(request, self._find_foreign_options(request)), stream=stream, after=after)
        async with self._send_body(body, request, stream=stream) as exchange:
            yield exchange

    @asynccontextmanager
    async def _send_body(
        self, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[HttpExchange]:
        """Send *body* and yield the response; the connections stay open meanwhile, even if the provider is closed."""
        ready = self._get_clients()
        async with ready.lease_connections():
            exchange = await self._open_exchange(ready, body, request, stream=stream)
            try:
                yield exchange
            finally:
                await exchange.response.aclose()

    async def _open_exchange(
        self, ready: _LoopClients, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> HttpExchange:
        call = RequestLabel(
            provider=self.name,
            model=request.model,
            credentials=ready.credentials,
            size=len(body.content),
            request=request,
            address=ready.address,
        )
        body = attrs.evolve(
            body, headers=merge_headers(self._headers, body.headers, parse_extra_headers(request.settings))
        )
        timeouts, started = self._timeouts, asyncio.get_running_loop().time()
        limit = "first_byte" if stream else "total"
        failure: BaseException
        try:
            async with asyncio.timeout_at(started + getattr(timeouts, limit)):
                response = await self._post(ready.client, body, stream=stream)
        except TimeoutError:
            failure = make_timeout_error(call, limit, timeouts)
        except self._list_errors() as error:
            failure = self._convert_error(error, call)
        else:
            return HttpExchange(response, call, timeouts, started)
        # Raised outside the handler, so that the SDK's error, which holds the key, is not its context (reliability:SC05).
        raise failure

    def _list_errors(self) -> tuple[type[Exception], ...]:
        """Return the exception classes of the SDK and the HTTP library for failed requests."""
        import httpx2

        return self._load_sdk().APIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the error to raise for *error*."""
        return error_from_sdk(error, self._load_sdk(), call)

    async def _post(self, client: Any, body: RequestBody, *, stream: bool) -> object:
        """
        Send *body* and return the HTTP library's response before its body is read.

        The SDK never reads the body, not even of a reply without a stream, so that its size is limited.
        """
        send = client.get if body.is_question else partial(client.post, content=body.content)
        # The SDK's public way to send encoded bytes. Its other methods transform the whole body on each call, which is
        # slow. The SDK still adds authentication and default headers, and classifies errors.
        opened = await send(
            body.path or self.path,
            cast_to=object,
            stream=True,
            stream_cls=self._load_sdk().AsyncStream[object],
            options={"headers": dict(body.headers)} if body.headers else {},
        )
        return opened.response

    async def _read(self, exchange: HttpExchange, request: ModelRequest) -> ModelReply:
        content = await exchange.read_content()
        if exchange.is_event_stream:
            reader = self._make_reader(exchange, request)
            reader.feed(content)
            return self._complete_reply(reader.finish(), request)
        data = exchange.parse_json(content)
        if data.get("error"):
            raise error_from_body(data, None, exchange.response.headers, exchange.call)
        reply = self._decode_reply(data, exchange.call, request, exchange.request_id)
        stated = parse_dollar_text(exchange.response.headers.get(LITELLM_COST)) if reply.cost is None else None
        return attrs.evolve(reply, cost=stated) if stated else reply

    def _decode_reply(
        self, data: Mapping[str, object], call: RequestLabel, request: ModelRequest, request_id: str | None
    ) -> ModelReply:
        model = self.strip_prefix(request.model)
        reply = run_decoder(
            call, lambda: check_reply_size(self.accumulator.decoder(data, call, model, request_id), call)
        )
        return self._complete_reply(reply, request)

    def _complete_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* with its answer call as text, and with the names of the settings that were left out."""
        if is_answered_by_tool(request) and request.settings.response_schema is not None:
            reply = convert_answer_call(reply, request.settings.response_schema)
        return add_dropped(self._finish_reply(reply, request), self._list_left_out(request))

    def _make_reader(self, exchange: HttpExchange, request: ModelRequest) -> ReplyReader:
        accumulator = self.accumulator(exchange.call, self.strip_prefix(request.model), exchange.request_id)
        return ReplyReader(accumulator, exchange.call, exchange.parser)

    def _finish_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* after processing that the service does not do itself; by default unchanged."""
        return reply


def _warn_of_unclosed(unclosed: set[str]) -> None:
    """Warn of providers that were garbage-collected without being closed, because Python's own warning names only sockets."""
    for name in unclosed:
        msg = f"the connections of {name} were never closed; use `async with Engine(...)`, or its aclose() or close()"
        warnings.warn(msg, ResourceWarning, stacklevel=2)


@attrs.define(eq=False)
class _LoopClients:
    """
    The clients of one event loop.

    Attributes:
        client: The SDK's client.
        credentials: Its key and the source of the key.
        http_client: The HTTP client with the connections.
        address: The base URL, for messages.
        users: The number of running requests.
        is_released: Whether to close it after the last of them.
    """

    client: Any
    credentials: Credentials
    http_client: Any
    address: str
    users: int = 0
    is_released: bool = False

    @asynccontextmanager
    async def lease_connections(self) -> AsyncIterator[None]:
        """Prevent the connections from being closed during the block."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if self.is_released:
                await self.release()

    async def release(self) -> None:
        """Close the connections now, or after the last running request, since engines may share a provider."""
        self.is_released = True
        if not self.users:
            await self.http_client.aclose()
