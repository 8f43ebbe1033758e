"""The base class of the adapters: encode requests, send them, and read replies into an accumulator."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, Protocol

import attrs

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.errors import ModelError
from stepengine.models._answers import (
    AnswerChunks,
    add_answer_tool_if_needed,
    can_use_answer_tool,
    convert_answer_call_to_text,
)
from stepengine.models._api import ApiProvider, RequestBody
from stepengine.models._byte_reader import (
    Accumulator,
    HttpExchange,
    ReplyReader,
    decode_or_raise_protocol_error,
    open_reply_body,
    require_reply_text_size,
)
from stepengine.models._failures import NO_SEARCH, ONCE, RequestLabel, error_from_body
from stepengine.models._hidden_tools import select_tools_to_send
from stepengine.models._json import parse_token_count
from stepengine.models._reply import parse_dollar_text
from stepengine.models._settings import (
    add_dropped_setting_names,
    find_options_of_other_providers,
    remove_extra_options,
    warn_once,
    warn_or_raise_for_dropped,
)
from stepengine.models._stopped_usage import attach_usage_on_cancel
from stepengine.models._wire import parse_extra_headers
from stepengine.models.base import split_reply_into_deltas
from stepengine.models.keys import resolve_base_url

LITELLM_COST = "x-litellm-response-cost"
"""LiteLLM's header with the cost of a reply; it is also 0 for models without a known price."""
# The number of remembered failures. The end of a call is not reported, so the oldest ones are dropped.
REMEMBERED = 32


class DeltaFilter(Protocol):
    """Converts the deltas of a stream to those that subscribers receive."""

    def convert_delta(self, delta: ModelDelta) -> Iterable[ModelDelta]:
        """Return the deltas that subscribers receive for *delta*, which may be held back, split or converted."""

    def flush(self) -> Iterable[ModelDelta]:
        """Return the deltas that were held back."""


def _apply_delta_filters(deltas: Iterable[ModelDelta], filters: Iterable[DeltaFilter]) -> Iterable[ModelDelta]:
    """Return *deltas* as converted by all *filters* in turn."""
    for each in filters:
        deltas = [shown for delta in deltas for shown in each.convert_delta(delta)]
    return deltas


def _make_retry_key(request: ModelRequest) -> tuple[object, ...]:
    """Return a key that is equal for all requests to one model with the same message objects, such as the attempts of one call."""
    # By identity, because comparing long conversations is slow.
    return id(request.messages), id(request.tail), request.model, len(request.messages)


class HttpProvider(ApiProvider):
    """
    A provider of model replies over HTTP. Subclasses encode requests, and name the accumulator that decodes replies.

    The arguments are those of ``ApiProvider``.
    """

    accumulator: ClassVar[type[Accumulator]]
    count_member: ClassVar[str] = "input_tokens"
    batches_have_headers: ClassVar[bool] = False
    """Whether the headers of a batch apply to its requests."""

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__(name, *args, **options)
        # The requests with a failure that may be retried exactly once, and the kind of that failure.
        self._failed: OrderedDict[tuple[object, ...], tuple[ModelRequest, str]] = OrderedDict()
        self._without_search: set[str] = set()

    @contextmanager
    def _mark_only_first_failure_retryable(self, request: ModelRequest) -> Iterator[None]:
        """
        For failures that may be retried once, set ``retryable`` of the ``ModelError``: true for the first one, then false.

        The failure is remembered, because the next attempt sends a changed request. The provider itself never retries; the retry
        policy does (reliability:MP60).
        """
        key = _make_retry_key(request)
        # Looked up before the attempt, because an equal request may fail meanwhile, which was not sent changed either.
        is_changed = key in self._failed
        try:
            yield
        except ModelError as error:
            # Such as a rejected signature or a malformed call: if the changed request fails too, more attempts are useless.
            if error.kind in ONCE:
                error.retryable = not is_changed
                self._failed[key] = (request, error.kind)
                while len(self._failed) > REMEMBERED:
                    self._failed.popitem(last=False)
            raise
        if is_changed:
            self._failed.pop(key, None)

    @abstractmethod
    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request*; after the failure kind *previous_failure*, leave out or change the part that was rejected."""

    def _supports_tool_search(self, model: str) -> bool:
        """Return whether the provider has its own tool search for *model*, so that hidden tools can be sent; by default false."""
        return False

    def _make_delta_filters(self) -> Sequence[DeltaFilter]:
        """Return no filters for the deltas of a stream; a subclass may return one that separates thoughts from text."""
        return ()

    def _explain_unsupported_schema(self, request: ModelRequest) -> str:
        """Return why the provider does not support the response schema of *request*; ``""``, the default, if it does."""
        return ""

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that are not sent, because the provider does not support them; by default none."""
        return ()

    def _find_options_of_other_providers(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the members of ``extra`` that only another provider knows; ``()`` for a server at another URL."""
        if not request.settings.extra:
            return ()
        settings = self.settings()
        _, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        return () if elsewhere else find_options_of_other_providers(request.settings, self.name)

    def _list_dropped_settings_and_options(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings and ``extra`` members that *request* is sent without."""
        return (
            *self._list_unsupported_settings(request),
            *[f"extra[{name!r}]" for name in self._find_options_of_other_providers(request)],
        )

    def _select_tools_and_add_answer_tool(
        self, request: ModelRequest, previous_failure: str = "", *, is_token_count: bool = False
    ) -> ModelRequest:
        """
        Return *request* with the tools to send, and with an answer tool if the provider does not support its schema.

        After a rejected tool search (*previous_failure*), the model is recorded as one without tool search, with a warning.
        *is_token_count* is for counting tokens, which does not support a tool search.

        Raises:
            ModelError: when the settings require native support of the schema, or an agent's tool has the same name.
        """
        model = self.strip_prefix(request.model)
        if previous_failure == NO_SEARCH:
            self._without_search.add(model)
            warn_once(f"{self.name} rejected its own tool search for {model}; find_tools is offered in its place")
        has_tool_search = not is_token_count and model not in self._without_search and self._supports_tool_search(model)
        request = select_tools_to_send(request, self.name, has_tool_search=has_tool_search)
        return add_answer_tool_if_needed(request, self.name, self._explain_unsupported_schema, previous_failure)

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody | None:
        """Encode a request that counts the tokens of *request*; ``None``, the default, if the provider does not count tokens."""
        return None

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*, requested without a stream.

        Raises:
            ModelError: when there is no reply.
        """
        with self._mark_only_first_failure_retryable(request):
            async with self._send_request(request, stream=False) as exchange:
                return await self._read_reply(exchange, request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Yield the reply in pieces, and last one ``ReplyDone``. Closing the iterator closes the connection.

        Raises:
            ModelError: when there is no reply; ``TruncatedReply`` when it ended early.
        """
        # Only one generator, because each further one would slow every token.
        with self._mark_only_first_failure_retryable(request):
            async with self._send_request(request, stream=True) as exchange:
                # The response decides, not the request: gateways answer a stream request with one object, and vice versa
                # (reliability:MP26).
                if not exchange.is_event_stream:
                    reply = await self._read_reply(exchange, request)
                    for delta in (*split_reply_into_deltas(reply), ReplyDone(reply)):
                        yield delta
                    return
                reader = self._make_reply_reader(exchange, request)
                done: ModelReply | None = None
                filters: list[DeltaFilter] = [AnswerChunks()] if can_use_answer_tool(request) else []
                filters += self._make_delta_filters()
                with attach_usage_on_cancel(lambda: reader.usage):
                    async with open_reply_body(exchange, reader) as body:
                        while done is None:
                            piece = body.read_or_start_wait()
                            if piece is None:
                                piece = await body.wait_for_piece()
                            for delta in () if piece is None else _apply_delta_filters(reader.feed(piece), filters):
                                yield delta
                            if piece is None or reader.is_done:
                                done = reader.finish(is_clean=body.is_clean)
                for delta in [held for each in filters for held in each.flush()]:
                    yield delta
                yield ReplyDone(self._convert_answer_and_add_dropped(done, request))

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Query the provider for the number of tokens in *request*; ``None`` if the provider does not count tokens.

        Raises:
            ModelError: when the query fails.
        """
        body = self._encode_token_count_request(
            remove_extra_options(request, self._find_options_of_other_providers(request))
        )
        if body is None:
            return None
        return parse_token_count((await self._request_json(body, request)).get(self.count_member))

    def _encode_and_warn_of_dropped(
        self, request: ModelRequest, *, stream: bool, dropped: tuple[str, ...] = ()
    ) -> RequestBody:
        """Encode *request* without unsupported settings; warn of these and of *dropped*, or raise if ``unsupported="error"``."""
        warn_or_raise_for_dropped(request, self.name, (*self._list_dropped_settings_and_options(request), *dropped))
        request = remove_extra_options(request, self._find_options_of_other_providers(request))
        _, kind = self._failed.get(_make_retry_key(request), (None, ""))
        return self._encode(request, stream=stream, previous_failure=kind)

    def _encode_for_batch(self, request: ModelRequest) -> RequestBody:
        """Encode *request* for a batch, and warn of dropped settings, which may include ``extra["headers"]``."""
        has_lost_headers = not self.batches_have_headers and parse_extra_headers(request.settings)
        return self._encode_and_warn_of_dropped(
            request, stream=False, dropped=("extra['headers']",) if has_lost_headers else ()
        )

    def decode_batch_reply(self, result: Any, request: ModelRequest) -> ModelReply:
        """
        Return the reply in *result*, a value of ``fetch_batch_results``; raise ``ModelError`` for a failed, expired or cancelled request.

        Raises:
            ModelError: when the request failed, or the batch expired or was cancelled before it.
        """
        call = RequestLabel(
            provider=self.name,
            model=request.model,
            credentials=self._get_or_create_clients().credentials,
            request=request,
        )
        with self._mark_only_first_failure_retryable(request):
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
                    return super().decode_batch_reply(None, request)

    @asynccontextmanager
    async def _send_request(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[HttpExchange]:
        """Encode and send *request*, and yield the response before its body is read."""
        async with self._send_body(
            self._encode_and_warn_of_dropped(request, stream=stream), request, stream=stream
        ) as exchange:
            yield exchange

    async def _read_reply(self, exchange: HttpExchange, request: ModelRequest) -> ModelReply:
        """Read the whole body and return the reply, with the cost of a LiteLLM header; raise ``ModelError`` for an error in the body."""
        content = await exchange.read_content()
        if exchange.is_event_stream:
            reader = self._make_reply_reader(exchange, request)
            reader.feed(content)
            return self._convert_answer_and_add_dropped(reader.finish(), request)
        data = exchange.parse_json_object(content)
        if data.get("error"):
            usage = self.accumulator.usage_parser(data)
            raise error_from_body(data, None, exchange.response.headers, exchange.call, usage)
        reply = self._decode_reply(data, exchange.call, request, exchange.request_id)
        stated = parse_dollar_text(exchange.response.headers.get(LITELLM_COST)) if reply.cost is None else None
        return attrs.evolve(reply, cost=stated) if stated else reply

    def _decode_reply(
        self, data: Mapping[str, object], call: RequestLabel, request: ModelRequest, request_id: str | None
    ) -> ModelReply:
        """Return the decoded reply in *data*, with its answer call as text and the names of dropped settings."""
        model = self.strip_prefix(request.model)
        reply = decode_or_raise_protocol_error(
            call, lambda: require_reply_text_size(self.accumulator.decoder(data, call, model, request_id), call)
        )
        return self._convert_answer_and_add_dropped(reply, request)

    def _convert_answer_and_add_dropped(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* with its answer call as text, postprocessed by the adapter, and with the names of dropped settings."""
        if can_use_answer_tool(request) and request.settings.response_schema is not None:
            reply = convert_answer_call_to_text(reply, request.settings.response_schema)
        return add_dropped_setting_names(
            self._postprocess_reply(reply, request), self._list_dropped_settings_and_options(request)
        )

    def _make_reply_reader(self, exchange: HttpExchange, request: ModelRequest) -> ReplyReader:
        """Return a reader for the events of a streamed reply."""
        accumulator = self.accumulator(exchange.call, self.strip_prefix(request.model), exchange.request_id)
        return ReplyReader(accumulator, exchange.call, exchange.new_parser)

    def _postprocess_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* unchanged; a subclass does here what its service does not do, such as a cut at stop sequences."""
        return reply
