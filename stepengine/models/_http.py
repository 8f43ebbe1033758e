"""
The thin client call that every adapter shares: bytes out through the SDK's own client, bytes back into an accumulator.

One client per event loop, made at the first request and closed by ``close``. The SDK supplies address, authentication,
headers and error classes; it neither retries nor decodes.
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
from stepengine.models._settings import add_dropped, find_foreign_options, warn_of_dropped, without_options
from stepengine.models._stopped_usage import attach_usage_on_cancel
from stepengine.models._wire import extra_headers, merge_headers
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
    usable_variables,
)
from stepengine.redaction import GIVEN
from stepengine.workspace.after_fork import keep_referenced, register_renewable

logger = logging.getLogger("stepengine.models")

NO_KEY = "none"
MAX_RESULTS = 256 * 1024 * 1024
"""Bytes of the results of a batch."""
MAX_BATCH_ID_CHARS = 200
"""Providers' ids have some dozen characters; it becomes part of an address and a key of a database."""
LITELLM_COST = "x-litellm-response-cost"
"""Where that gateway states what a reply cost; 0 stands there, too, for models whose price it does not know."""
# Failures of calls under way, of which few are so at once; nobody says when a call has ended, so the oldest are
# forgotten.
REMEMBERED = 32


@cache
def warn_once(note: str) -> None:
    """Log the warning *note* once in a process; ``""`` logs nothing."""
    if note:
        logger.warning("%s", note)


@frozen
class RequestBody:
    """
    An encoded request.

    Attributes:
        content: Its bytes.
        headers: What it needs beside the client's own headers.
        path: Where it goes, when that is not the provider's ``path``.
        is_question: Whether it only looks something up, without a body.
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
        """Return what was held back."""


@frozen
class _DeltaFilters:
    """Turns the deltas of a stream into those that subscribers receive."""

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
        """Return what was held back."""
        return () if self.thoughts is None else self.thoughts.end()


class FailedRequests:
    """
    Which requests had a failure that is worth exactly one more try, so that the second one is final.

    The provider does not try again itself: it says once that the same request may succeed, and whoever coordinates
    retries asks again (reliability:MP60).
    """

    def __init__(self) -> None:
        self._failed: OrderedDict[tuple[Any, ...], tuple[ModelRequest, str]] = OrderedDict()

    def find_kind(self, request: ModelRequest) -> str:
        """Return how *request* failed before; ``""`` when it did not."""
        _, kind = self._failed.get(_request_key(request), (None, ""))
        return kind

    def check_retry(self, error: ModelError, request: ModelRequest) -> None:
        """Set whether *error* may be tried again, when it is of a kind that may be tried again once."""
        # A refused signature, a malformed call: worth one more try and not four, since the same goes wrong again if
        # leaving something out did not help.
        if error.kind in ONCE:
            key = _request_key(request)
            error.retryable = key not in self._failed
            self._failed[key] = (request, error.kind)
            while len(self._failed) > REMEMBERED:
                self._failed.popitem(last=False)


def _request_key(request: ModelRequest) -> tuple[object, ...]:
    """Return what the attempts of one call share, also when a wrapper gives each a copy with another model."""
    # By identity, as the attempts of one call carry the very same objects: to compare conversations of 10,000 messages
    # for this would cost more than to send one.
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
    sdk: ClassVar[Sdk | None] = None
    """What requests are sent through; ``None`` where that is not an SDK."""

    batches_have_headers: ClassVar[bool] = False
    """Whether headers of a batch hold for its requests."""

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
        # One client for each event loop: connections belong to the loop in which they were opened, and `run_sync` in
        # several threads means several loops. Weak, so that a loop that is gone takes its connections along.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClients] = WeakKeyDictionary()
        self._unclosed: set[str] = set()
        register_renewable(self)
        finalize(self, _warn_of_unclosed, self._unclosed)

    def renew(self) -> None:
        """Drop the parent's connections in a forked child, which opens its own."""
        keep_referenced(self._clients)
        self._clients = WeakKeyDictionary()
        self._unclosed.clear()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def _key_required(self) -> bool:
        return True

    def _load_sdk(self) -> Any:
        """Import the SDK, or raise an error that names it."""
        return None if self.sdk is None else self.sdk.load()

    @abstractmethod
    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Build the SDK's client."""

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool, after: str = "") -> RequestBody:
        """Encode *request*; *after* is how it failed before, so that the second try leaves out what was refused."""

    def _supports_tool_search(self, model: str) -> bool:
        """Return whether the provider itself searches tools for *model*, so that hidden ones can be sent to it."""
        return False

    def _make_thought_filter(self) -> ThoughtFilter | None:
        """Return the filter that separates thoughts from text in a stream; ``None`` where none is needed."""
        return None

    def _explain_no_schema(self, request: ModelRequest) -> str:
        """Return why the provider cannot promise an answer by the schema of *request*; ``""`` when it can."""
        return ""

    def _list_dropped_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the settings of *request* that the wire has no word for."""
        return ()

    def _find_foreign_options(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the members of ``extra`` that another provider owns; a server at another address may know any of them."""
        if not request.settings.extra:
            return ()
        settings = self.settings()
        _, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        return () if elsewhere else find_foreign_options(request.settings, self.name)

    def _list_left_out(self, request: ModelRequest) -> tuple[str, ...]:
        """Return what *request* is sent without, by the names of its settings."""
        return (
            *self._list_dropped_settings(request),
            *[f"extra[{name!r}]" for name in self._find_foreign_options(request)],
        )

    def _prepare_request(self, request: ModelRequest, after: str = "", *, is_count: bool = False) -> ModelRequest:
        """
        Return *request* with its hidden tools arranged, and an answer tool where a schema needs one.

        Its tools are those that are sent, and where a schema is not promised, one more takes the answer. *is_count* is for
        the question how many tokens it has, which knows no search of tools.

        Raises:
            ModelError: when the promise was demanded and cannot be given.
        """
        request = self._prepare_hidden_tools(request, after, is_count=is_count)
        schema, how = request.settings.response_schema, request.settings.output
        if schema is None:
            return request
        why = self._explain_no_schema(request) if how != "tool" else ""
        if not is_answered_by_tool(request):
            if why or how == "tool":
                msg = f"a tool named {ANSWER!r} is to take the answer of {request.model!r}, but the agent has one of that name"
                raise ModelError(msg, kind="settings")
            return request
        if why and how == "native":
            msg = f"{request.model!r} cannot be held to the response_schema by {self.name} itself: {why}; leave output= out"
            raise ModelError(msg, kind="settings")
        if how != "tool" and not why and (how == "native" or after != GRAMMAR):
            return request
        if self._by_tool is None or self._by_tool[0] is not schema:
            self._by_tool = (schema, make_answer_tool(schema))
        return add_answer_tool(request, self._by_tool[1])

    def _prepare_hidden_tools(self, request: ModelRequest, after: str, *, is_count: bool) -> ModelRequest:
        """Return *request* with hidden tools as the provider takes them; one that refused its search is sent none again."""
        # The tools of a run are one tuple at every step, so this answers for nearly every request at once.
        if request.tools is self._unhidden:
            return request
        if True not in [tool.defer_loading for tool in request.tools]:
            self._unhidden = request.tools
            return request
        model = self.strip_prefix(request.model)
        if after == NO_SEARCH:
            self._unsearching.add(model)
            warn_once(f"{self.name} refused to search tools itself for {model}; find_tools is offered in its place")
        searches = not is_count and self._supports_tool_search(model) and model not in self._unsearching
        return arrange_hidden_tools(request, self.name, searches=searches)

    def _encode_count(self, request: ModelRequest) -> RequestBody | None:
        """Encode the question how many tokens *request* has; ``None`` when the provider cannot be asked."""
        return None

    def check(self, model: str) -> None:
        """
        Look for the key and the SDK; the SDK is not loaded.

        Raises:
            MissingKey: when there is no key.
            ModelError: when the SDK is not installed.
        """
        self._resolve_access()
        if self.sdk is not None and not self._has_sdk:  # every run asks, and the finder goes through the whole path
            self.sdk.check()
            self._has_sdk = True

    def get_account(self) -> str:
        """Return what tells its key, or without one its address, from others."""
        credentials, url = self._resolve_access()
        return hash_account(credentials.key, url)

    def _resolve_access(self) -> tuple[Credentials, str]:
        """Return the key to use and the address to go to."""
        settings = self.settings()
        default = settings.base_url
        url, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, default)
        required = self._key_env is not None or (self._key_required and not (elsewhere and default is not None))
        argument = f"{type(self).__name__}(api_key=...)"
        variables = settings.key_variables if self._api_key is None else ()
        # A key goes only to the host that it belongs to. An address from the environment may lead anywhere, and would
        # be sent the key of the real service; unless somebody gave both in code, who then has said which key goes
        # where.
        is_chosen = self._key_env is not None and self._base_url is not None
        usable = variables if is_chosen else usable_variables(self.name, variables, url, default)
        credentials = find_key(self.name, self._api_key, usable, required=required, argument=argument)
        if credentials.key is None and not usable and find_set_variable(variables) is not None:
            credentials = Credentials(None, WITHHELD)
        if url is None:
            variable = f" or set {settings.base_url_variable}" if settings.base_url_variable else ""
            msg = f"there is no address for {self.name!r}: pass base_url={variable}"
            raise ModelError(msg, kind="missing_base_url")
        register_url_password(self.name, url)
        return credentials, url

    def _get_clients(self) -> _LoopClients:
        """Return the clients of this event loop; create them at the first call."""
        loop = asyncio.get_running_loop()
        ready = self._clients.get(loop)
        if ready is None:
            import httpx2

            from stepengine.models._transport import get_ssl_context, unpack_response

            credentials, base_url = self._resolve_access()
            self._load_sdk()
            timeouts = self._timeouts
            # Our own client, handed to the SDK: it takes only gzip, which can be unpacked in bounded pieces; it follows
            # no redirect, which would carry the key to another host (reliability:MP14); and its own time limits stand
            # behind ours, which know bytes from keep-alives.
            http_client = httpx2.AsyncClient(
                headers={"accept-encoding": "gzip"},
                event_hooks={"response": [unpack_response]},
                transport=self._transport,
                verify=get_ssl_context(),
                timeout=httpx2.Timeout(connect=timeouts.connect, read=timeouts.total, write=60.0, pool=60.0),
                limits=httpx2.Limits(max_connections=1000, max_keepalive_connections=100),
                follow_redirects=False,
            )
            # Keys may have been set since the process started; from here on none of them is written by anything of ours
            # (reliability:R11).
            GIVEN.add_from_environment(os.environ)
            client = self._make_client(credentials, base_url, http_client)
            ready = self._clients[loop] = _LoopClients(client, credentials, http_client, format_address(base_url))
            if self._transport is None:
                self._unclosed.add(repr(self))
        install_secret_filter()
        return ready

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*, asked for in one piece.

        Raises:
            ModelError: when there is none.
        """
        with self._mark_retryable(request):
            async with self._send_request(request, stream=False) as exchange:
                return await self._read(exchange, request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Give the reply in pieces, and last one ``ReplyDone``. Closing the iterator closes the connection.

        Raises:
            ModelError: when there is no reply; ``TruncatedReply`` when it ended early.
        """
        # One generator and no further one inside: each would cost every token.
        with self._mark_retryable(request):
            async with self._send_request(request, stream=True) as exchange:
                # By what came and not by what was asked for: gateways answer a stream with one object, and the other way
                # round (reliability:MP26).
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
        """Return the filters for the deltas of a stream; ``None`` if subscribers receive them unchanged."""
        answers, thoughts = AnswerChunks() if is_answered_by_tool(request) else None, self._make_thought_filter()
        return None if answers is None and thoughts is None else _DeltaFilters(answers, thoughts)

    @contextmanager
    def _mark_retryable(self, request: ModelRequest) -> Iterator[None]:
        """Set on a ``ModelError`` of the block whether *request* may be tried again."""
        try:
            yield
        except ModelError as error:
            self._failed_requests.check_retry(error, request)
            raise

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Return how many tokens the provider counts in *request*; ``None`` when it cannot be asked.

        Raises:
            ModelError: when the question fails.
        """
        body = self._encode_count(without_options(request, self._find_foreign_options(request)))
        if body is None:
            return None
        return parse_token_count((await self._answer(body, request)).get(self.count_member))

    async def _answer(self, body: RequestBody, request: ModelRequest) -> Mapping[str, Any]:
        """Return the object that *body* is answered with, when that is not a reply of a model."""
        async with self._send_body(body, request, stream=False) as exchange:
            return exchange.parse_json(await exchange.read_content())

    async def _fetch_batch_lines(self, path: str) -> list[Mapping[str, object]]:
        """Return the objects of a file with the results of a batch."""
        body = RequestBody(b"", path=path, is_question=True)
        async with self._send_body(body, self._make_batch_pseudo_request(), stream=False) as exchange:
            return parse_json_lines(await exchange.read_content(MAX_RESULTS), exchange.call)

    async def _call_batch_api(self, path: str, content: bytes | None = None, **headers: str) -> Mapping[str, Any]:
        """Return the answer of the batch API at *path*: to a GET, or to a POST of *content*."""
        body = RequestBody(content or b"", headers, path=path, is_question=content is None)
        return await self._answer(body, self._make_batch_pseudo_request())

    def _make_batch_pseudo_request(self) -> ModelRequest:
        """Return a request without messages that stands for the batch API in errors."""
        return ModelRequest(f"{self.name}/batches")

    def _encode_for_batch(self, request: ModelRequest) -> RequestBody:
        """Encode *request* for a batch."""
        dropped = self._list_left_out(request)
        if not self.batches_have_headers and extra_headers(request.settings):
            dropped = (*dropped, "extra['headers']")
        warn_of_dropped(request, self.name, dropped)
        request = without_options(request, self._find_foreign_options(request))
        return self._encode(request, stream=False, after=self._failed_requests.find_kind(request))

    def _read_batch_id(self, answer: Mapping[str, object], member: str = "id") -> str:
        """Return the id of an accepted batch; its lack is final, as a second submission might be paid twice."""
        name = answer.get(member)
        if isinstance(name, str) and 0 < len(name) <= MAX_BATCH_ID_CHARS:
            return name
        msg = f"{self.name} took a batch, but gave it no {member} of 1 to {MAX_BATCH_ID_CHARS} characters to ask for it by"
        raise ModelError(msg, kind="protocol")

    def batch_reply(self, result: object, request: ModelRequest) -> ModelReply:
        """
        Return the reply that *result* holds, which ``batch_results`` gave.

        Raises:
            ModelError: when it holds none: the request failed, or the batch expired or was cancelled before its turn.
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
                msg = f"{self.name} did not come to this request of {request.model!r} before its batch expired"
                raise ModelError(msg, kind="batch", retryable=True)
            case _:
                return super().batch_reply(None, request)

    async def _call_file_api(self, ask: Callable[[Any], Awaitable[object]]) -> Any:
        """Return what *ask* gets from the file client of the SDK's client, its failures as those of a model call."""
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
        Close the client of this event loop, and those of loops that still run elsewhere.

        Requests that are under way, such as those of another engine, come to their end first.
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
        body = self._encode(without_options(request, self._find_foreign_options(request)), stream=stream, after=after)
        async with self._send_body(body, request, stream=stream) as exchange:
            yield exchange

    @asynccontextmanager
    async def _send_body(
        self, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[HttpExchange]:
        """Send *body*, and give the answer while it is read; the connections stay open meanwhile, whoever closes the provider."""
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
        body = attrs.evolve(body, headers=merge_headers(self._headers, body.headers, extra_headers(request.settings)))
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
        # Raised here and not in the handler, so that the SDK's error, which holds the key, is nobody's context (reliability:SC05).
        raise failure

    def _list_errors(self) -> tuple[type[Exception], ...]:
        """Return what the SDK and the HTTP library raise when a request fails."""
        import httpx2

        return self._load_sdk().APIError, httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return what to raise for *error*."""
        return error_from_sdk(error, self._load_sdk(), call)

    async def _post(self, client: Any, body: RequestBody, *, stream: bool) -> object:
        """
        Send *body* and return the HTTP library's response with its body still to come.

        The body of a reply in one piece is read here too and not by the SDK, so that its size has a limit.
        """
        send = client.get if body.is_question else partial(client.post, content=body.content)
        # The SDK's public way to send bytes that are encoded already. Its own methods walk and transform the whole body
        # on each call: at 400 messages 0.6 to 188 ms, where joined bytes take 0.3. What it still does is authentication,
        # default headers and sorting of errors.
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
        """Return *reply* with an answer call as text, and with the names of what the request left out."""
        if is_answered_by_tool(request) and request.settings.response_schema is not None:
            reply = convert_answer_call(reply, request.settings.response_schema)
        return add_dropped(self._finish_reply(reply, request), self._list_left_out(request))

    def _make_reader(self, exchange: HttpExchange, request: ModelRequest) -> ReplyReader:
        accumulator = self.accumulator(exchange.call, self.strip_prefix(request.model), exchange.request_id)
        return ReplyReader(accumulator, exchange.call, exchange.parser)

    def _finish_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* with what the wire could not do itself."""
        return reply


def _warn_of_unclosed(unclosed: set[str]) -> None:
    """Warn of a provider that nobody uses any more and nobody closed: Python closes its sockets, and names only them."""
    for name in unclosed:
        msg = f"the connections of {name} were never closed; use `async with Engine(...)`, or its aclose() or close()"
        warnings.warn(msg, ResourceWarning, stacklevel=2)


@attrs.define(eq=False)
class _LoopClients:
    """
    The clients of one event loop.

    Attributes:
        client: The SDK's client.
        credentials: What it shows who asks.
        http_client: What holds the connections.
        address: Where they lead.
        users: How many requests are under way.
        is_released: Whether it is closed when the last of them has ended.
    """

    client: Any
    credentials: Credentials
    http_client: Any
    address: str
    users: int = 0
    is_released: bool = False

    @asynccontextmanager
    async def lease_connections(self) -> AsyncIterator[None]:
        """Keep the connections open meanwhile."""
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            if self.is_released:
                await self.release()

    async def release(self) -> None:
        """Close the connections, once nobody uses them: engines may share a provider, and one of them ends first."""
        self.is_released = True
        if not self.users:
            await self.http_client.aclose()
