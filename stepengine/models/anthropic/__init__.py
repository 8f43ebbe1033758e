"""The adapter for Anthropic's Messages API and for servers that speak it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, ClassVar, Literal, cast
from urllib.parse import quote

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ModelSettings, ReplyDone
from stepengine.data.server_tools import Programs
from stepengine.data.tools import ToolSpec
from stepengine.errors import ModelError
from stepengine.models._api import NO_KEY, RequestBody, require_batch_id
from stepengine.models._byte_reader import HttpExchange
from stepengine.models._http import HttpProvider
from stepengine.models._json import get_optional_object, parse_token_count
from stepengine.models._programs import merge_programs
from stepengine.models._schemas import count_optional_members
from stepengine.models._sdks import ANTHROPIC
from stepengine.models._settings import warn_once
from stepengine.models._thinking_levels import CANNOT
from stepengine.models._wire import ToolsCache, merge_headers, parse_extra_headers
from stepengine.models.anthropic.families import AnthropicFamily, copy_family_with_capabilities, get_family
from stepengine.models.anthropic.request import (
    BINDING_BETA,
    FALLBACK_BETA,
    FAST_BETA,
    TOOL_SEARCH,
    UNPROMISING,
    AnthropicRequestOptions,
    Site,
    demands_unsupported_call,
    disables_unavoidable_thinking,
    encode,
    encode_provider_settings,
    encode_token_count_request,
    encode_tool,
    limit_strict_tools,
    limit_tools_if_choice_unsupported,
    needs_binding_beta,
    override_cache_lifetime,
    resolve_output_limit,
    uses_fast_mode,
)
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.base import BatchMember, ModelInfo, ProviderSettings, Timeouts
from stepengine.models.keys import Credentials, Secret

__all__ = ("AnthropicProvider",)

logger = logging.getLogger("stepengine.models")

VERSION = "2026-10-21"
"""The API version of the SDK, for clouds that expect it in the body."""
SAMPLING_VERSION = "2023-06-01"
"""The last API version that accepts ``temperature`` and ``top_p``; newer ones answer 400 (ecosystem:EC92)."""

BATCHES = "/v1/messages/batches"
MOST_WAYS = 32
"""The number of cached encodings of tools."""

MAX_UNSTREAMED = 21_333
"""Output tokens above which a reply may exceed the API's limit of ten minutes for requests without a stream."""


class AnthropicProvider(HttpProvider):
    """
    Claude models through Anthropic's Messages API.

    Temperature and top-p are sent only if the request sets them. Such a request names the last API version that accepts
    them, and a model that rejects them answers with an error.

    Args:
        api_key: The key; by default from ``ANTHROPIC_API_KEY`` or ``ANTHROPIC_AUTH_TOKEN``.
        base_url: Another server; by default from ``ANTHROPIC_BASE_URL``. With one, no key is required.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        max_tokens: The output limit of requests that set none. The default is the largest output of the model if it is
            known, else 8,192. The API requires a limit, and thinking counts towards it.
        prompt_cache: Whether the API caches tools, system prompt and messages, and for how long: true is five
            minutes, ``"1h"`` an hour.
        name: The provider name that is stored with ids, signatures and opaque parts.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own.
        ask_models: Whether to query the API, once for each model name that is newer than this package, for its kinds of
            thinking, efforts and largest output. By default such a model counts as one of the newest family.
    """

    model_patterns: tuple[str, ...] = (r"claude-.+",)
    sdk = ANTHROPIC
    accumulator = AnthropicAccumulator
    path = "/v1/messages"
    batches_have_headers = True
    site: ClassVar[Site] = Site()

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: object = None,
        *,
        max_tokens: int | None = None,
        prompt_cache: bool | Literal["5m", "1h"] = True,
        name: str = "anthropic",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        key_env: str | None = None,
        ask_models: bool = False,
    ) -> None:
        super().__init__(name, api_key, base_url, transport, timeouts=timeouts, headers=headers, key_env=key_env)
        cache: Literal["5m", "1h"] | None = "5m" if prompt_cache is True else prompt_cache or None
        self._ways = AnthropicRequestOptions(provider=name, max_tokens=max_tokens, cache=cache, site=self.site)
        self._tools: dict[tuple[str | None, Programs | None], ToolsCache] = {}
        self._strict_tools: tuple[tuple[object, ...], object, tuple[ToolSpec, ...]] = ((), None, ())
        self._asks = ask_models
        self._asked_for: set[str] = set()
        self._described: dict[str, tuple[ModelInfo, AnthropicFamily]] = {}

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's key and base URL."""
        return ProviderSettings(
            key_variables=(self._key_env,) if self._key_env else ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
            base_url_variable="ANTHROPIC_BASE_URL",
            base_url="https://api.anthropic.com",
            given_url=self._base_url,
        )

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create Anthropic's client with the key, or a placeholder without one."""
        key = NO_KEY if credentials.key is None else credentials.key.reveal()
        return self._create_client("AsyncAnthropic", base_url, http_client, api_key=key)

    def _create_client(self, class_name: str, base_url: str, http_client: Any, **access: Any) -> Any:
        """Return a client of the SDK's class *class_name*."""
        return getattr(self._load_sdk(), class_name)(
            **access,
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Upload a file and return its id; without *expires_in* (3,600 to 7,776,000 seconds) it never expires.

        Raises:
            ModelError: when the upload fails.
        """
        until: dict[str, object] = {} if expires_in is None else {"expires_in_seconds": expires_in}
        file = (name or "file", data, mime_type)
        held = await self._run_file_operation(
            lambda to: to.files.upload(file=file, extra_headers=self._headers, **until)
        )
        return str(held.id)

    async def delete_file(self, file_id: str) -> None:
        """
        Delete an uploaded file.

        Raises:
            ModelError: when the API does not delete it, such as for an unknown id.
        """
        await self._run_file_operation(lambda at: at.files.delete(file_id, extra_headers=self._headers))

    def encode_batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Encode *request* for a batch; all requests of a batch have the same headers, which are its group.

        Raises:
            ModelError: when the request cannot be sent.
        """
        body = self._encode_for_batch(request)
        headers = merge_headers(body.headers, parse_extra_headers(request.settings))
        group = " ".join([f"{name}: {value}" for name, value in sorted(headers.items())])
        family = self._get_family(self.strip_prefix(request.model))
        return BatchMember(request, group, (body.content, headers, family))

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        """
        Send requests together and return the id of their batch.

        Raises:
            ModelError: when the API rejects them.
        """
        parts, headers = list[bytes](), dict[str, str]()
        for name, member in members.items():
            model = self.strip_prefix(member.request.model)
            await self._describe_unknown_model_once(model)
            encoded, own_headers, family = member.content
            if family != self._get_family(model):
                encoded, own_headers, _ = self.encode_batch_member(member.request).content
            # A description that arrived meanwhile may have changed the headers of some requests only.
            headers = {**headers, **own_headers}
            parts.append(b'{"custom_id":"%s","params":%s}' % (name.encode(), encoded))
        content = b'{"requests":[%s]}' % b",".join(parts)
        return require_batch_id(self.name, await self._call_api("batches", BATCHES, content, **headers))

    async def fetch_batch_results(self, batch: str) -> Mapping[str, object] | None:
        """
        Return the result of each request of a batch by name; ``None`` while the batch is not done.

        Raises:
            ModelError: when the query fails.
        """
        path = f"{BATCHES}/{quote(batch, safe='')}"
        if (await self._call_api("batches", path)).get("processing_status") != "ended":
            return None
        # Results without a name are dropped: the name "" means a result for all requests.
        lines = await self._fetch_json_lines(f"{path}/results")
        return {str(line["custom_id"]): _parse_batch_result(line) for line in lines if line.get("custom_id")}

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*; a long reply is streamed internally, because an idle connection would be dropped.

        Raises:
            ModelError: when there is no reply.
        """
        model = self.strip_prefix(request.model)
        await self._describe_unknown_model_once(model)
        if resolve_output_limit(request, model, self._get_family(model), self._ways) <= MAX_UNSTREAMED:
            return await super().complete(request)
        async with aclosing(cast("AsyncGenerator[ModelDelta]", self.stream(request))) as deltas:
            replies = [delta.reply async for delta in deltas if isinstance(delta, ReplyDone)]
        return replies[-1]

    async def describe(self, model: str) -> ModelInfo:
        """
        Query the API once for the limits, thinking kinds and efforts of *model*, and use them for later requests to it.

        Until then, requests use the table of model names.

        Raises:
            ModelError: when the query fails, such as for an unknown model.
        """
        model = self.strip_prefix(model)
        if model not in self._described:
            answer = await self._call_api(model, f"/v1/models/{quote(model, safe='')}")
            self._described[model] = self._parse_model_description(answer, model)
        return self._described[model][0]

    def _parse_model_description(self, answer: Mapping[str, object], model: str) -> tuple[ModelInfo, AnthropicFamily]:
        """Return (limits, family) from the API's description of *model*; raise ``ModelError`` if the description is unreadable."""
        try:
            most, capabilities = (
                parse_token_count(answer.get("max_tokens")),
                get_optional_object(answer, "capabilities"),
            )
            family = copy_family_with_capabilities(get_family(model), capabilities, most)
            types = get_optional_object(get_optional_object(capabilities, "thinking"), "types")
            takes = tuple([name for name in types if get_optional_object(types, name).get("supported") is True])
        except (TypeError, ValueError) as error:
            msg = f"{self.name} sent an unreadable description of {model!r}: {error}"
            raise ModelError(msg, kind="protocol") from None
        window = parse_token_count(answer.get("max_input_tokens"))
        return ModelInfo(window, most, thinking=takes, efforts=family.efforts), family

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that is sent with *request*; the API requires a limit."""
        model = self.strip_prefix(request.model)
        return resolve_output_limit(request, model, self._get_family(model), self._ways)

    def _get_family(self, model: str) -> AnthropicFamily:
        """Return the family of *model* by the API's description if that was fetched, else by the table of names."""
        known = self._described.get(model)
        return get_family(model) if known is None else known[1]

    async def _describe_unknown_model_once(self, model: str) -> None:
        """Query the API for a model that the table does not know, at most once and only if enabled; log a failure."""
        if not self._asks or model in self._asked_for or not get_family(model).is_guess:
            return
        self._asked_for.add(model)
        try:
            await self.describe(model)
        except ModelError as error:
            logger.info("the API did not describe %s, so the newest family is assumed: %s", model, error)

    @asynccontextmanager
    async def _send_request(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[HttpExchange]:
        """Query the API for an unknown model if enabled, then send *request* and yield the response."""
        await self._describe_unknown_model_once(self.strip_prefix(request.model))
        async with super()._send_request(request, stream=stream) as exchange:
            yield exchange

    def _encode_tools_cached(
        self, tools: tuple[ToolSpec, ...], settings: ModelSettings, options: AnthropicRequestOptions | None = None
    ) -> bytes:
        """Return the encoded tools, cached for each combination of cache lifetime and programs."""
        mark, programs = None if options is None else options.cache_mark, merge_programs(settings)
        key = (None if options is None else options.cache, programs)
        if key not in self._tools:
            if len(self._tools) >= MOST_WAYS:
                self._tools.clear()
            encode_one = partial(encode_tool, programs=programs)
            self._tools[key] = ToolsCache(encode_one, {"cache_control": mark} if mark else None, TOOL_SEARCH)
        return self._tools[key](tools)

    def _limit_strict_tools(self, request: ModelRequest, previous_failure: str = "") -> tuple[ToolSpec, ...]:
        """Return the tools of *request*, with as many strict tools as the API accepts; equal inputs return the same objects."""
        tools = limit_tools_if_choice_unsupported(request, self._get_family(self.strip_prefix(request.model)))
        if not any(tool.strict for tool in tools):
            return tools
        programs, schema = merge_programs(request.settings), request.settings.response_schema
        key = (previous_failure, programs, id(schema), *map(id, tools))
        if self._strict_tools[0] != key:
            # The cache holds tools and schema, so that no other objects get their ids.
            self._strict_tools = key, (tools, schema), limit_strict_tools(tools, schema, previous_failure, programs)
        return self._strict_tools[2]

    def _supports_tool_search(self, model: str) -> bool:
        """Return whether both the host and *model* support a tool search."""
        return self.site.searches and self._get_family(model).searches

    def _explain_unsupported_schema(self, request: ModelRequest) -> str:
        """Return the reason why model or schema do not allow structured output; ``""`` if they do."""
        schema = request.settings.response_schema
        if UNPROMISING.search(self.strip_prefix(request.model)):
            return "the model is older than structured output"
        if schema is not None and count_optional_members(schema, "anthropic") is None:
            return "the schema has open objects, more than 24 optional members, or no object at its root"
        return ""

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that the model or the host does not support."""
        model = self.strip_prefix(request.model)
        dropped = encode_provider_settings(request, model, self.site).dropped
        shaped = self._select_tools_and_add_answer_tool(request)
        wanted = {tool.name for tool in request.tools if tool.strict}
        if wanted and wanted.intersection([tool.name for tool in self._limit_strict_tools(shaped) if not tool.strict]):
            dropped = (*dropped, "strict")
        if merge_programs(request.settings) is not None and request.settings.parallel_tool_calls is False:
            dropped = (*dropped, "parallel_tool_calls")
        return (*dropped, "tool_choice") if demands_unsupported_call(shaped, self._get_family(model)) else dropped

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request* with the betas and the API version that it needs; warn if thinking cannot be switched off."""
        model = self.strip_prefix(request.model)
        family = self._get_family(model)
        if disables_unavoidable_thinking(request, family):
            warn_once(CANNOT.format(model=model, least="low effort"))
        request, ways = (
            self._select_tools_and_add_answer_tool(request, previous_failure),
            override_cache_lifetime(self._ways, request.settings),
        )
        tools = self._encode_tools_cached(self._limit_strict_tools(request, previous_failure), request.settings, ways)
        headers: dict[str, str] = {}
        if request.settings.temperature is not None or request.settings.top_p is not None:
            headers["anthropic-version"] = SAMPLING_VERSION
        if needs_binding_beta(request, model, family):
            headers["anthropic-beta"] = BINDING_BETA
        if uses_fast_mode(request.settings.service_tier, model, self.site):
            headers = merge_headers(headers, {"anthropic-beta": FAST_BETA})
        if request.settings.fallbacks and self.site.has_fallbacks:
            headers = merge_headers(headers, {"anthropic-beta": FALLBACK_BETA})
        more = self._make_version_members(request, headers)
        content = encode(
            request, model, family, ways, tools, stream=stream, previous_failure=previous_failure, more=more
        )
        return RequestBody(content, headers, self._make_request_path(model, stream=stream))

    def _make_request_path(self, model: str, *, stream: bool) -> str:
        """Return ``""``, because all models have one URL path; a cloud may return a path with the model."""
        return ""

    def _make_version_members(self, request: ModelRequest, headers: Mapping[str, str]) -> dict[str, Any]:
        """Return the body members with API version and betas, for clouds that expect them in the body; else ``{}``."""
        if self.site.model_in_body:
            return {}
        given = merge_headers(self._headers, headers, parse_extra_headers(request.settings))
        betas = given.get("anthropic-beta", "")
        more = {"anthropic_version": given.get("anthropic-version") or VERSION}
        return {**more, "anthropic_beta": betas.split(",")} if betas and self.site.betas_in_body else more

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody:
        model, request = (
            self.strip_prefix(request.model),
            self._select_tools_and_add_answer_tool(request, is_token_count=True),
        )
        tools, family = (
            self._encode_tools_cached(self._limit_strict_tools(request), request.settings),
            self._get_family(model),
        )
        headers = {"anthropic-beta": BINDING_BETA} if needs_binding_beta(request, model, family) else {}
        content = encode_token_count_request(request, model, family, self._ways, tools)
        return RequestBody(content, headers, path=f"{self.path}/count_tokens")


def _parse_batch_result(line: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the result in a line of batch results, in the form for ``decode_batch_reply``; ``{}`` for an unknown form."""
    match line.get("result"):
        case {"type": "succeeded", "message": message}:
            return {"reply": message}
        case {"type": "errored", "error": {"error": error}}:
            return {"error": error}
        case {"type": kind}:
            return {"ended": kind}
        case _:
            return {}
