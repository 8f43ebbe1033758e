"""
Providers of clouds: Bedrock, Vertex AI, Foundry, and Anthropic's own platform on AWS and Google Cloud.

They use the wire formats of the models' makers. The SDKs' own clients provide URLs and authentication. This module adds the
differences of each cloud in path and body; the encoded conversation is the same.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Literal
from urllib.parse import quote

import attrs

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest
from stepengine.errors import ModelError
from stepengine.models._api import NO_KEY, ApiProvider, RequestBody
from stepengine.models._byte_reader import HttpExchange
from stepengine.models._cloud_auth import (
    AZURE_TOKEN,
    ENTRA_SCOPE,
    ENTRA_SIGNS,
    ENTRA_TOLD,
    AwsAuth,
    AwsPlatformAuth,
    CloudAuth,
    GoogleAuth,
    GooglePlatformAuth,
    TokenSource,
    make_credentials_error,
    make_entra_token_source,
    require_at_most_one_argument,
    require_trusted_host,
)
from stepengine.models._failures import FORCED_THINKING, GRAMMAR, RequestLabel, error_from_transport
from stepengine.models._http import HttpProvider
from stepengine.models._schemas import count_optional_members
from stepengine.models._settings import warn_once
from stepengine.models._thinking_levels import CANNOT, ThinkingRequest, effort_from_thinking
from stepengine.models._wire import ToolsCache
from stepengine.models.anthropic import VERSION, AnthropicProvider
from stepengine.models.anthropic.families import get_family
from stepengine.models.anthropic.request import (
    BINDING_BETA,
    MIN_BUDGET_TOKENS,
    Site,
    disables_unavoidable_thinking,
    encode_thinking,
    limit_strict_tools,
)
from stepengine.models.base import Provider, ProviderSettings, Timeouts
from stepengine.models.bedrock_converse import request as converse
from stepengine.models.bedrock_converse.families import get_family as get_converse_family
from stepengine.models.bedrock_converse.families import parse_maker
from stepengine.models.bedrock_converse.stream import ConverseAccumulator
from stepengine.models.bedrock_converse.transport import AuthenticatedClient
from stepengine.models.google import GoogleProvider, transport
from stepengine.models.keys import (
    Credentials,
    Secret,
    hash_account,
    register_secret,
    require_host_label,
    resolve_base_url,
    select_key_variables_for_url,
)
from stepengine.models.openai import OpenAIProvider
from stepengine.models.presets import OPENAI

RUNTIME = Site(
    name="Amazon Bedrock",
    model_in_body=False,
    stream_in_body=False,
    betas_in_body=True,
    marks_whole=False,
    is_fast=False,
    has_tiers=False,
    opens_pages=False,
    searches=False,
    has_fallbacks=False,
    runs_programs=False,
)
MANTLE = Site(name="Amazon Bedrock", is_fast=False, has_fallbacks=False, runs_programs=False)
VERTEX = Site(
    name="Vertex AI",
    model_in_body=False,
    marks_whole=False,
    is_fast=False,
    has_tiers=False,
    has_fallbacks=False,
    runs_programs=False,
)
FOUNDRY = Site(name="Foundry", is_fast=False, has_fallbacks=False)
MULTI_REGIONS = frozenset({"us", "eu"})


class _NoFilesProvider(Provider):
    """A provider without files and batches, although its wire supports them elsewhere: these methods raise an error."""

    encode_batch_member = Provider.encode_batch_member
    upload = Provider.upload
    delete_file = Provider.delete_file


class _CloudProvider(ApiProvider):
    """A provider with the authentication of a cloud and a base URL that depends on a region."""

    base_url_variable: str

    @property
    @abstractmethod
    def _cloud_auth(self) -> CloudAuth:
        """The authentication of the cloud."""

    @abstractmethod
    def _find_default_base_url(self) -> str | None:
        """Return the cloud's own base URL; ``None`` if the region is unknown."""

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's credentials and base URL."""
        return ProviderSettings(
            key_variables=tuple(self._cloud_auth.variables),
            base_url_variable=self.base_url_variable,
            base_url=self._find_default_base_url(),
            given_url=self._base_url,
        )

    def _resolve_credentials_and_url(self) -> tuple[Credentials, str]:
        """Return the source of the credentials and the base URL; raise for a missing URL and for an untrusted host."""
        credentials, home = self._cloud_auth.resolve_credentials(self.name), self._find_default_base_url()
        url, _ = resolve_base_url(self._base_url, self.base_url_variable, home)
        if url is None:
            msg = f"there is no base URL for {self.name!r}: pass base_url= or set {self.base_url_variable}"
            raise ModelError(msg, kind="missing_base_url")
        require_trusted_host(self.name, self._cloud_auth, url, home)
        return credentials, url

    def get_account(self) -> str:
        """Return a hash of the provider's account in the cloud, or of the base URL if the account is unknown."""
        return hash_account(self._cloud_auth.find_account_id(), self._resolve_credentials_and_url()[1])

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the error to raise for *error*; an error about missing cloud credentials becomes a ``MissingKey``."""
        if isinstance(error, self._cloud_auth.list_credential_error_types()):
            # The SDK raises a plain RuntimeError for missing credentials; any other one has another cause.
            if type(error) is RuntimeError and "credentials" not in str(error):
                return error
            return make_credentials_error(self.name, call.model, error, call.credentials.source_sentence)
        return super()._convert_error(error, call)


class _AwsProvider(_CloudProvider):
    """The base class of providers with AWS's signatures; ``regional`` is their base URL with a placeholder for the region."""

    regional: str
    _aws: AwsAuth

    @property
    def _cloud_auth(self) -> CloudAuth:
        return self._aws

    def _find_default_base_url(self) -> str | None:
        """Return the service's URL for the region; ``None`` if the region is unknown."""
        region = self._aws.find_region()
        return None if region is None else self.regional.format(region)

    def _make_auth_options(self) -> dict[str, Any]:
        """Return the arguments of Anthropic's clients for AWS: the region, and an API key, else AWS credentials."""
        region, bearer = self._aws.find_region(), self._aws.find_api_key()
        if bearer is not None:
            return {"aws_region": region, "api_key": bearer.reveal()}
        return {
            "aws_region": region,
            **{f"aws_{name}": value for name, value in self._aws.get_signing_keys_or_profile().items()},
        }


class _GoogleCloudProvider(_CloudProvider):
    """The base class of providers with Google's credentials; renewed tokens are registered for redaction."""

    _google: GoogleAuth

    @property
    def _cloud_auth(self) -> CloudAuth:
        return self._google

    async def _send_and_open_response(self, client: object, body: RequestBody, *, stream: bool) -> object:
        """Send *body* and return the response before its body is read; register the current token for redaction."""
        try:
            return await super()._send_and_open_response(client, body, stream=stream)
        finally:
            token = getattr(self._google.credentials, "token", None)
            register_secret(self.name, Secret(token) if isinstance(token, str) else None, "access_token")


class _CloudClaudeProvider(_NoFilesProvider, _CloudProvider, AnthropicProvider):
    """Claude in a cloud, which has no API for the limits and options of models."""

    describe = Provider.describe  # type: ignore[assignment]


class _MultiProvider(Provider):
    """A provider that selects one of several wires by the name of the model."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._wires: dict[str, HttpProvider] = {}

    @abstractmethod
    def _select_wire_provider(self, model: str) -> HttpProvider:
        """Return the provider of the wire for *model*, a name without prefix."""

    def _get_prefixed_provider(self, model: str) -> HttpProvider:
        """Return the provider of the wire for *model*, after adding all prefixes of this provider to it."""
        wire = self._select_wire_provider(self.strip_prefix(model))
        for prefix in (self.name, *self._prefixes):
            wire.add_prefix(prefix)
        return wire

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's credentials and base URL."""
        return self._get_prefixed_provider("").settings()

    def get_account(self) -> str:
        """Return a hash of the provider's account in the cloud, or of the base URL if the account is unknown."""
        return self._get_prefixed_provider("").get_account()

    def check(self, model: str) -> None:
        """
        Raise an error if credentials, region or packages for *model* are missing; no request is sent.

        Raises:
            MissingKey: if no argument, variable or file names credentials.
            ModelError: when a package or a setting is missing.
        """
        self._get_prefixed_provider(model).check(model)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*.

        Raises:
            ModelError: when there is no reply.
        """
        return await self._get_prefixed_provider(request.model).complete(request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Yield the reply in pieces, and last one ``ReplyDone``.

        Raises:
            ModelError: when there is no reply.
        """
        inner: Any = self._get_prefixed_provider(request.model).stream(request)
        async with aclosing(inner) as deltas:
            async for delta in deltas:
                yield delta

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Query the cloud for the number of tokens in *request*; ``None`` if the API for the model does not count tokens.

        Raises:
            ModelError: when the query fails.
        """
        return await self._get_prefixed_provider(request.model).count_tokens(request)

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that is sent with a *request* that sets none; ``None`` if none is sent."""
        return self._get_prefixed_provider(request.model).output_limit(request)

    async def close(self) -> None:
        """Close the connections of all wires, even if closing some of them fails."""
        async with AsyncExitStack() as stack:
            for wire in self._wires.values():
                stack.push_async_callback(wire.close)


# --- Amazon Bedrock ---------------------------------------------------------------------------------------------------


class BedrockProvider(_MultiProvider):
    """
    Models on Amazon Bedrock: ``bedrock/us.anthropic.claude-...``, ``bedrock/openai.gpt-...``, ``bedrock/amazon.nova-...``.

    Claude uses its own wire, OpenAI's models use Responses, and all others use Bedrock's own API, Converse. The maker in the
    model's name decides. A name without a maker, such as an application's inference profile, counts as Claude, unless
    *endpoint* is ``"converse"``.

    Requests are signed with AWS credentials (Signature Version 4), which AWS's own packages find, or have a Bedrock API key.
    Signatures need the extra ``bedrock``.

    Args:
        api_key: A Bedrock API key; by default from ``AWS_BEARER_TOKEN_BEDROCK``.
        base_url: Another server, without the path of a wire.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        region: Such as ``"us-east-1"``; by default from ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the profile.
        profile: A profile of AWS's configuration files; by default from ``AWS_PROFILE``.
        access_key: The id of an access key, together with *secret_key*; by default AWS's packages look for one.
        secret_key: The access key itself.
        session_token: The token of a temporary access key.
        endpoint: The API for Claude: ``"runtime"`` supports inference profiles and AWS's own model names, ``"mantle"`` is
            Anthropic's unchanged API. OpenAI's models always use the second. With ``"converse"`` all models use Converse,
            which supports guardrails, and trained and imported models.
        max_tokens: The output limit of requests to Claude that set none; the largest output of the model by default.
        prompt_cache: Whether prompts of Claude and Nova are cached, and for how long: true is five minutes, ``"1h"`` an hour
            if the model supports that.
        name: The provider name that is stored with ids, signatures and opaque parts.
        timeouts: Time limits of calls.
        headers: HTTP headers to send with every request.

    Raises:
        ModelError: for an incomplete access key, one together with a Bedrock API key, or an unknown endpoint.
    """

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: object = None,
        *,
        region: str | None = None,
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | Secret | None = None,
        session_token: str | Secret | None = None,
        endpoint: Literal["runtime", "mantle", "converse"] = "runtime",
        max_tokens: int | None = None,
        prompt_cache: bool | Literal["5m", "1h"] = True,
        name: str = "bedrock",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name)
        if endpoint not in {"runtime", "mantle", "converse"}:
            msg = f"unknown endpoint={endpoint!r} of Amazon Bedrock; use 'runtime', 'mantle' or 'converse'"
            raise ModelError(msg, kind="settings")
        self._aws = AwsAuth(
            name,
            region=region,
            profile=profile,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            api_key=api_key,
        )
        shared: dict[str, Any] = {"transport": transport, "timeouts": timeouts, "headers": headers}
        own: dict[str, object] = {"max_tokens": max_tokens, "prompt_cache": prompt_cache}
        self._is_converse = endpoint == "converse"
        if endpoint == "mantle":
            self._wires["claude"] = _MantleClaude(
                self._aws, _append_path_to_url(base_url, "/anthropic"), name=name, **own, **shared
            )
        elif endpoint == "runtime":
            self._wires["claude"] = _RuntimeClaude(self._aws, base_url, name=name, **own, **shared)
        openai = _BedrockOpenAI(self._aws, _append_path_to_url(base_url, "/openai/v1"), name=f"{name}_openai", **shared)
        self._wires["openai"] = openai
        called = name if self._is_converse else f"{name}_converse"
        self._wires["converse"] = _Converse(self._aws, base_url, name=called, prompt_cache=prompt_cache, **shared)

    def _select_wire_provider(self, model: str) -> HttpProvider:
        """Return the provider for Claude, OpenAI or Converse by the maker in the name; without a maker, for Claude."""
        maker = "" if self._is_converse else parse_maker(model)
        if self._is_converse or maker not in {"", "anthropic", "openai"}:
            return self._wires["converse"]
        return self._wires["openai" if maker == "openai" else "claude"]


def _append_path_to_url(url: str | None, path: str) -> str | None:
    return None if url is None else url.rstrip("/") + path


class _AwsClaude(_AwsProvider, _CloudClaudeProvider):
    client_name: str

    def __init__(self, aws: AwsAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._aws = aws

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create Anthropic's client for AWS with the region and credentials."""
        access = self._make_auth_options()
        return self._create_client(self.client_name, base_url, http_client, **access)


class _RuntimeClaude(_AwsClaude):
    """Claude through InvokeModel, with the model in the path and streams in AWS's own format."""

    site = RUNTIME
    client_name = "AsyncAnthropicBedrock"
    base_url_variable = "ANTHROPIC_BEDROCK_BASE_URL"
    regional = "https://bedrock-runtime.{}.amazonaws.com"

    def _make_request_path(self, model: str, *, stream: bool) -> str:
        """Return the URL path of InvokeModel for the model."""
        return f"/model/{quote(model, safe=':;')}/invoke{'-with-response-stream' if stream else ''}"

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody | None:  # type: ignore[override]
        """Return ``None``, because InvokeModel does not count tokens."""
        return None


class _MantleClaude(_AwsClaude):
    """Claude through Anthropic's unchanged API, with AWS's authentication."""

    site = MANTLE
    client_name = "AsyncAnthropicBedrockMantle"
    base_url_variable = "ANTHROPIC_BEDROCK_MANTLE_BASE_URL"
    regional = "https://bedrock-mantle.{}.api.aws/anthropic"


class _BedrockOpenAI(_NoFilesProvider, _AwsProvider, OpenAIProvider):
    """OpenAI's models through Responses, with AWS's authentication."""

    base_url_variable = "AWS_BEDROCK_BASE_URL"
    regional = "https://bedrock-mantle.{}.api.aws/openai/v1"

    def __init__(self, aws: AwsAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._aws = aws
        self._preset = attrs.evolve(OPENAI, name=self.name, stores_files=False, supports_batches=False)

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create the SDK's client with a Bedrock API key or AWS credentials; raise ``ModelError`` for an invalid region."""
        from openai.providers import bedrock

        bearer = self._aws.find_api_key()
        access: dict[str, Any]
        if bearer is not None:
            access = {"api_key": bearer.reveal()}
        else:
            keys = self._aws.get_signing_keys_or_profile()
            words = {"access_key": "access_key_id", "secret_key": "secret_access_key"}
            access = {"api_key": None, **{words.get(name, name): value for name, value in keys.items()}}
        sdk, region = self._load_sdk(), self._aws.find_region()
        try:
            provider = bedrock(region=region, base_url=base_url, endpoint="mantle", **access)
        except sdk.OpenAIError as error:
            msg = f"{self.name!r} cannot use the region {region!r}: {error}"
            failure = ModelError(msg, kind="settings")
        else:
            return sdk.AsyncOpenAI(
                provider=provider, max_retries=0, timeout=http_client.timeout, http_client=http_client
            )
        # Raised outside the handler, so that the SDK's error, which may hold the key, is not its context (reliability:SC05).
        raise failure

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the error to raise for *error*; an error about missing credentials becomes a ``MissingKey``."""
        sdk = self._load_sdk()
        if isinstance(error, sdk.OpenAIError) and not isinstance(error, sdk.APIError):
            return make_credentials_error(
                self.name, call.model, error.__cause__ or error, call.credentials.source_sentence
            )
        return super()._convert_error(error, call)


class _Converse(_NoFilesProvider, _AwsProvider, HttpProvider):
    """Models of any maker through Bedrock's own API, without an SDK, because AWS has no asynchronous one."""

    accumulator = ConverseAccumulator
    path = ""
    count_member = "inputTokens"
    base_url_variable = "AWS_ENDPOINT_URL_BEDROCK_RUNTIME"
    regional = "https://bedrock-runtime.{}.amazonaws.com"

    def __init__(
        self,
        aws: AwsAuth,
        base_url: str | None,
        *,
        name: str,
        transport: object,
        timeouts: Timeouts | None,
        headers: Mapping[str, str] | None,
        prompt_cache: bool | Literal["5m", "1h"],
    ) -> None:
        super().__init__(name, None, base_url, transport, timeouts=timeouts, headers=headers)
        self._aws = aws
        self._cache: Literal["5m", "1h"] | None = "5m" if prompt_cache is True else prompt_cache or None
        self._tools = ToolsCache(converse.encode_tool)
        self._loose = ToolsCache(lambda spec: converse.encode_tool(attrs.evolve(spec, strict=False)))

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> AuthenticatedClient:
        """Create the client that adds AWS credentials to requests."""
        return AuthenticatedClient(self._aws, self.name, base_url, http_client)

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the error to raise for *error*; missing credentials become a ``MissingKey``."""
        if isinstance(error, self._cloud_auth.list_credential_error_types()):
            return super()._convert_error(error, call)
        return error_from_transport(error, call)

    async def _send_and_open_response(self, client: AuthenticatedClient, body: RequestBody, *, stream: bool) -> object:
        """Send *body* with AWS credentials, and return the response before its body is read."""
        return await client.post_streaming(body.path, body.content, body.headers)

    def _explain_unsupported_schema(self, request: ModelRequest) -> str:
        """Return the reason why model or schema do not allow structured output; ``""`` if they do."""
        schema = request.settings.response_schema
        if not get_converse_family(self.strip_prefix(request.model)).promises:
            return "Bedrock does not support schemas for this model"
        if schema is not None and count_optional_members(schema, "anthropic") is None:
            return "the schema has open objects, more than 24 optional members, or no object at its root"
        return ""

    def _can_send_strict_tools(self, request: ModelRequest, previous_failure: str = "") -> bool:
        """Return whether *request* has strict tools, and the model supports all of them as strict together."""
        strict = [tool for tool in request.tools if tool.strict]
        if (
            not strict
            or previous_failure == GRAMMAR
            or not get_converse_family(self.strip_prefix(request.model)).promises
        ):
            return False
        return limit_strict_tools(request.tools, request.settings.response_schema) == request.tools

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that Converse does not support for the model."""
        model = self.strip_prefix(request.model)
        family, settings = get_converse_family(model), request.settings
        dropped = [*converse.encode_provider_settings(request, model, family, self.name).dropped]
        if any(tool.strict for tool in request.tools) and not self._can_send_strict_tools(request):
            dropped.append("strict")
        if request.tools and settings.parallel_tool_calls is False:
            dropped.append("parallel_tool_calls")
        if converse.demands_unsupported_call(self._select_tools_and_add_answer_tool(request), family):
            dropped.append("tool_choice")
        return (*dropped, *converse.find_unsupported_limits(self._make_request_options_and_warn(request), settings))

    def _make_request_options_and_warn(
        self, request: ModelRequest, previous_failure: str = ""
    ) -> converse.ConverseRequestOptions:
        """Return the options of *request*; log a note on unsupported thinking once per process."""
        model, cache = self.strip_prefix(request.model), request.settings.cache
        family = get_converse_family(model)
        asked = self._encode_claude_thinking(request, model, previous_failure) if family.thinking == "claude" else None
        asked = converse.encode_non_claude_thinking(request.settings, model, family) if asked is None else asked
        warn_once(asked.note)
        return converse.ConverseRequestOptions(
            provider=self.name,
            model=model,
            family=family,
            cache=self._cache if cache is None else None if cache == "off" else cache,
            thinking=asked.members,
            previous_failure=previous_failure,
        )

    def _encode_claude_thinking(self, request: ModelRequest, model: str, previous_failure: str) -> ThinkingRequest:
        """Return the thinking members for Claude, in the format of its own wire."""
        family, thinking, most = get_family(model), request.settings.thinking, request.settings.max_tokens
        if disables_unavoidable_thinking(request, family):
            return ThinkingRequest({"output_config": {"effort": "low"}}, CANNOT.format(model=model, least="low effort"))
        asked = encode_thinking(request, model, family, is_off=previous_failure == FORCED_THINKING)
        if thinking is None or asked is None:
            return ThinkingRequest({} if asked is None else {"thinking": asked})
        if most is not None and asked.get("budget_tokens", 0) >= most:
            asked = {**asked, "budget_tokens": max(MIN_BUDGET_TOKENS, most - 1)}
        members: dict[str, Any] = {"thinking": asked}
        if asked["type"] == "adaptive" and (thinking.effort is not None or thinking.tokens is not None):
            members["output_config"] = {"effort": family.get_nearest_effort(effort_from_thinking(thinking))}
        return ThinkingRequest({**members, **({"anthropic_beta": [BINDING_BETA]} if "block_binding" in asked else {})})

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request*, with strict tools only if all of them can be strict together; the path selects model and stream."""
        ways = self._make_request_options_and_warn(request, previous_failure)
        tools = self._tools if self._can_send_strict_tools(request, previous_failure) else self._loose
        request = self._select_tools_and_add_answer_tool(request, previous_failure)
        path = f"/model/{quote(ways.model, safe=':;')}/converse{'-stream' if stream else ''}"
        return RequestBody(converse.encode(request, ways, tools(request.tools)), path=path)

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody | None:
        """Encode a request that counts the tokens of *request*; ``None`` except for Claude."""
        model = self.strip_prefix(request.model)
        if parse_maker(model) != "anthropic":
            return None
        request = self._select_tools_and_add_answer_tool(request, is_token_count=True)
        content = converse.encode_token_count_request(
            request, self._make_request_options_and_warn(request), self._loose(request.tools)
        )
        return RequestBody(content, path=f"/model/{quote(model[model.index('anthropic.') :], safe=':;')}/count-tokens")


# --- Vertex AI --------------------------------------------------------------------------------------------------------


class VertexProvider(_MultiProvider):
    """
    Gemini and Claude on Google's Vertex AI: ``vertex/gemini-...``, ``vertex/claude-...``.

    Requests have a token of Google's credentials, which ``google-auth`` finds and renews.

    Args:
        project: The project; by default from ``GOOGLE_CLOUD_PROJECT`` or ``ANTHROPIC_VERTEX_PROJECT_ID``, else that of the
            credentials.
        location: Such as ``"us-east5"``; by default from ``GOOGLE_CLOUD_LOCATION``, for Claude ``CLOUD_ML_REGION`` before
            that, else ``"global"``.
        credentials: Credentials of ``google-auth``, or a token; by default ``google-auth`` looks for them.
        base_url: Another server, without the version in the path.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        max_tokens: The output limit of requests to Claude that set none; the largest output of the model by default.
        prompt_cache: Whether Claude's prompts are cached, and for how long: true is five minutes, ``"1h"`` an hour.
        name: The provider name that is stored with ids, signatures and opaque parts.
        timeouts: Time limits of calls.
        headers: HTTP headers to send with every request.
    """

    def __init__(
        self,
        project: str | None = None,
        location: str | None = None,
        credentials: object = None,
        *,
        base_url: str | None = None,
        transport: object = None,
        max_tokens: int | None = None,
        prompt_cache: bool | Literal["5m", "1h"] = True,
        name: str = "vertex",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name)
        access = GoogleAuth(name, project=project, location=location, credentials=credentials)
        shared: dict[str, object] = {"transport": transport, "timeouts": timeouts, "headers": headers}
        self._wires["gemini"] = _VertexGemini(access, base_url, name=name, **shared)
        claude = {"name": f"{name}_claude", "max_tokens": max_tokens, "prompt_cache": prompt_cache}
        self._wires["claude"] = _VertexClaude(access, _append_path_to_url(base_url, "/v1"), **claude, **shared)

    def _select_wire_provider(self, model: str) -> HttpProvider:
        """Return the provider for Claude or for Gemini by the model's name."""
        return self._wires["claude" if model.startswith("claude-") else "gemini"]


class _VertexBase(_NoFilesProvider, _GoogleCloudProvider, HttpProvider):
    """The base class of the two wires of Vertex AI, which load the credentials before the first request."""

    location_variables: tuple[str, ...]

    def __init__(self, access: GoogleAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(api_key=None, base_url=base_url, **options)
        self._google = access

    @property
    def _location(self) -> str:
        return self._google.resolve_location(*self.location_variables)

    def _find_default_base_url(self) -> str:
        """Return the URL of Vertex AI for the location."""
        place = self._location
        if place in MULTI_REGIONS:
            return f"https://aiplatform.{place}.rep.googleapis.com"
        return f"https://{'' if place == 'global' else f'{place}-'}aiplatform.googleapis.com"

    @asynccontextmanager
    async def _send_request(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[HttpExchange]:
        """Load the credentials if they are missing, send *request*, and yield the response."""
        await self._google.load_credentials_if_missing(request.model)
        async with super()._send_request(request, stream=stream) as exchange:
            yield exchange

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Query Vertex AI for the number of tokens in *request*; ``None`` if the API for the model does not count tokens.

        Raises:
            ModelError: when the query fails.
        """
        await self._google.load_credentials_if_missing(request.model)
        return await super().count_tokens(request)


class _VertexClaude(_VertexBase, _CloudClaudeProvider):
    site = VERTEX
    base_url_variable = "ANTHROPIC_VERTEX_BASE_URL"
    location_variables = ("CLOUD_ML_REGION", "GOOGLE_CLOUD_LOCATION")

    def _find_default_base_url(self) -> str:
        """Return the URL of Vertex AI for the location, with the version of the API."""
        return f"{super()._find_default_base_url()}/v1"

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create Anthropic's client for Vertex AI with project, location and credentials."""
        access = {"project_id": self._google.project, "credentials": self._google.credentials}
        return self._create_client("AsyncAnthropicVertex", base_url, http_client, region=self._location, **access)

    @property
    def _models_path(self) -> str:
        project, place = quote(self._google.project or "", safe=":"), quote(self._location, safe="")
        return f"/projects/{project}/locations/{place}/publishers/anthropic/models"

    def _make_request_path(self, model: str, *, stream: bool) -> str:
        return f"{self._models_path}/{quote(model, safe='@:')}:{'streamRawPredict' if stream else 'rawPredict'}"

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody:
        """Encode a request that counts the tokens of *request*, with the API version in its body."""
        body = super()._encode_token_count_request(request)
        version = f'{{"anthropic_version":"{VERSION}",'.encode()
        return attrs.evolve(
            body, content=version + body.content[1:], path=f"{self._models_path}/count-tokens:rawPredict"
        )


class _VertexGemini(_VertexBase, GoogleProvider):
    is_vertex = True
    base_url_variable = "GOOGLE_VERTEX_BASE_URL"
    location_variables = ("GOOGLE_CLOUD_LOCATION", "CLOUD_ML_REGION")

    def _make_client(self, credentials: Credentials, base_url: str, http_client: object) -> Any:
        """Create Google's clients for Vertex AI with project, location and credentials."""
        access = {
            "enterprise": True,
            "project": self._google.project,
            "location": self._location,
            "credentials": self._google.credentials,
        }
        return transport.create_clients(self._load_sdk(), access, base_url, self._api_version, http_client)


# --- Foundry ----------------------------------------------------------------------------------------------------------


class FoundryProvider(_NoFilesProvider, AnthropicProvider):
    """
    Claude on Microsoft's Foundry: ``foundry/claude-...``.

    Args:
        api_key: The key; by default from ``ANTHROPIC_FOUNDRY_API_KEY``.
        base_url: The base URL; by default from ``ANTHROPIC_FOUNDRY_BASE_URL``, else derived from *resource*.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        resource: The name of the resource; by default from ``ANTHROPIC_FOUNDRY_RESOURCE``.
        token_provider: A function, also an asynchronous one, that returns an Entra ID token for each request in place of a key.
            By default, without a key, the credentials of ``azure-identity``, if environment variables configure them.
        name: The provider name that is stored with ids, signatures and opaque parts.
        options: Other arguments of ``AnthropicProvider``.

    Raises:
        ModelError: when both *api_key* and *token_provider* are set.
    """

    site = FOUNDRY
    model_patterns = ()
    describe = Provider.describe  # type: ignore[assignment]

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: Any = None,
        *,
        resource: str | None = None,
        token_provider: TokenSource | None = None,
        name: str = "foundry",
        **options: Any,
    ) -> None:
        require_at_most_one_argument(name, api_key=api_key, token_provider=token_provider)
        super().__init__(api_key, base_url, transport, name=name, **options)
        self._resource = resource
        self._token_provider = token_provider

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's key and base URL; raise ``ModelError`` for an invalid resource."""
        resource = self._resource or os.environ.get("ANTHROPIC_FOUNDRY_RESOURCE", "").strip()
        if resource:
            source = "resource=" if self._resource else "ANTHROPIC_FOUNDRY_RESOURCE"
            require_host_label(self.name, resource, "resource", source)
        return ProviderSettings(
            key_variables=(self._key_env or "ANTHROPIC_FOUNDRY_API_KEY",),
            base_url_variable="ANTHROPIC_FOUNDRY_BASE_URL",
            base_url=f"https://{resource}.services.ai.azure.com/anthropic" if resource else None,
            given_url=self._base_url,
        )

    def _make_token_source(self) -> TokenSource | None:
        """Return the source of Entra ID tokens; ``None`` with a key, without credentials, or for a server on this machine."""
        settings = self.settings()
        if self._token_provider is None:
            has_key = self._api_key is not None or settings.key_from is not None
            url, _ = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
            # Entra ID credentials of the environment are only sent to hosts that a key of the environment may be sent to.
            if has_key or not select_key_variables_for_url(
                self.name, (AZURE_TOKEN, *ENTRA_SIGNS), url, settings.base_url
            ):
                return None
        return (
            None if self._api_key is not None else make_entra_token_source(self.name, self._token_provider, ENTRA_SCOPE)
        )

    def _resolve_credentials_and_url(self) -> tuple[Credentials, str]:
        """Return Entra ID as the source of credentials, or the key, and the base URL."""
        settings = self.settings()
        url, _ = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        if self._make_token_source() is None or url is None:
            return super()._resolve_credentials_and_url()
        return Credentials(None, "Entra ID", told=ENTRA_TOLD), url

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create Anthropic's client for Foundry, with Entra ID tokens or a key."""
        tokens = self._make_token_source()
        access: dict[str, object] = {"azure_ad_token_provider": tokens}
        if tokens is None:
            access = {"api_key": NO_KEY if credentials.key is None else credentials.key.reveal()}
        return self._create_client("AsyncAnthropicFoundry", base_url, http_client, **access)


# --- run by Anthropic on a cloud ----------------------------------------------------------------------------------------


class _PlatformProvider(_CloudProvider, AnthropicProvider):
    """Anthropic's own API, files and batches included, authenticated and billed by a cloud."""

    model_patterns = ()
    workspace_variable: str

    def __init__(self, base_url: str | None, workspace_id: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._workspace_id = workspace_id

    @property
    def _workspace(self) -> str:
        """The workspace of the argument or the environment; raises ``ModelError`` without one."""
        found = self._workspace_id or os.environ.get(self.workspace_variable, "").strip()
        if not found:
            msg = f"{self.name!r} has no workspace: set {self.workspace_variable}, or pass {type(self).__name__}(workspace_id=...)"
            raise ModelError(msg, kind="missing_workspace")
        return found

    def _resolve_credentials_and_url(self) -> tuple[Credentials, str]:
        """Return the source of the credentials and the base URL; raise ``ModelError`` without a workspace, too."""
        found = super()._resolve_credentials_and_url()
        _ = self._workspace
        return found


class AnthropicAwsProvider(_AwsProvider, _PlatformProvider):
    """
    Claude as Anthropic runs it on AWS: ``anthropic_aws/claude-...``.

    Requests are signed with AWS credentials (Signature Version 4), which AWS's own packages find, or have an API key of the
    platform. Signatures need the extra ``bedrock``.

    Args:
        api_key: An API key; by default from ``ANTHROPIC_AWS_API_KEY``.
        base_url: Another server; by default from ``ANTHROPIC_AWS_BASE_URL``, else derived from the region.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        workspace_id: The workspace; by default from ``ANTHROPIC_AWS_WORKSPACE_ID``.
        region: Such as ``"us-east-1"``; by default from ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the profile.
        profile: A profile of AWS's configuration files; by default from ``AWS_PROFILE``.
        access_key: The id of an access key, together with *secret_key*; by default AWS's packages look for one.
        secret_key: The access key itself.
        session_token: The token of a temporary access key.
        name: The provider name that is stored with ids, signatures and opaque parts.
        options: Other arguments of ``AnthropicProvider``.

    Raises:
        ModelError: for an incomplete access key, or one together with an API key.
    """

    site = Site(name="Claude on AWS")
    base_url_variable = "ANTHROPIC_AWS_BASE_URL"
    regional = "https://aws-external-anthropic.{}.api.aws"
    workspace_variable = "ANTHROPIC_AWS_WORKSPACE_ID"

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: Any = None,
        *,
        workspace_id: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | Secret | None = None,
        session_token: str | Secret | None = None,
        name: str = "anthropic_aws",
        **options: Any,
    ) -> None:
        self._aws = AwsPlatformAuth(
            name,
            region=region,
            profile=profile,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            api_key=api_key,
        )
        super().__init__(base_url, workspace_id, transport=transport, name=name, **options)

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create Anthropic's client for its platform on AWS, with the workspace."""
        access = self._make_auth_options()
        return self._create_client("AsyncAnthropicAWS", base_url, http_client, workspace_id=self._workspace, **access)


class AnthropicGoogleProvider(_GoogleCloudProvider, _PlatformProvider):
    """
    Claude as Anthropic runs it on Google Cloud: ``anthropic_google/claude-...``.

    Requests have a token of Google's credentials, which ``google-auth`` finds and renews.

    Args:
        project: The project; by default from ``ANTHROPIC_GOOGLE_CLOUD_PROJECT`` or ``GOOGLE_CLOUD_PROJECT``, else that of the
            credentials.
        location: By default from ``ANTHROPIC_GOOGLE_CLOUD_LOCATION``, else ``"global"``.
        credentials: Credentials of ``google-auth``, or a token; by default ``google-auth`` looks for them.
        workspace_id: The workspace; by default from ``ANTHROPIC_GOOGLE_CLOUD_WORKSPACE_ID``.
        base_url: Another server; by default from ``ANTHROPIC_GOOGLE_CLOUD_BASE_URL``. Project, location and workspace are added
            unless it ends in ``/invoke``.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        name: The provider name that is stored with ids, signatures and opaque parts.
        options: Other arguments of ``AnthropicProvider``.
    """

    site = Site(name="Claude on Google Cloud")
    base_url_variable = "ANTHROPIC_GOOGLE_CLOUD_BASE_URL"
    workspace_variable = "ANTHROPIC_GOOGLE_CLOUD_WORKSPACE_ID"

    def __init__(
        self,
        project: str | None = None,
        location: str | None = None,
        credentials: Any = None,
        *,
        workspace_id: str | None = None,
        base_url: str | None = None,
        transport: Any = None,
        name: str = "anthropic_google",
        **options: Any,
    ) -> None:
        self._google = GooglePlatformAuth(name, project=project, location=location, credentials=credentials)
        super().__init__(base_url, workspace_id, transport=transport, name=name, **options)

    def _find_default_base_url(self) -> str:
        return "https://claude.googleapis.com"

    @asynccontextmanager
    async def _send_body(
        self, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[HttpExchange]:
        """Load the credentials if they are missing, send *body*, and yield the response."""
        await self._google.load_credentials_if_missing(request.model)
        async with super()._send_body(body, request, stream=stream) as exchange:
            yield exchange

    async def _run_file_operation(self, operation: Callable[[Any], Awaitable[Any]]) -> Any:
        """Load Google's credentials if they are missing, then call the file operation as the base class does."""
        await self._google.load_credentials_if_missing(self.name)
        return await super()._run_file_operation(operation)

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create the SDK's client, with project, location and workspace in a base URL that does not end in ``/invoke``."""
        project, place = self._google.project or "", self._google.resolve_location("ANTHROPIC_GOOGLE_CLOUD_LOCATION")
        if not base_url.rstrip("/").endswith("/invoke"):
            parts = [quote(part, safe=":") for part in (project, place, self._workspace)]
            path = "/v1/projects/{}/locations/{}/workspaces/{}/invoke".format(*parts)
            base_url = f"{base_url.rstrip('/')}{path}"
        return self._create_client(
            "AsyncAnthropicGoogleCloud",
            base_url,
            http_client,
            project=project,
            location=place,
            workspace_id=self._workspace,
            credentials=self._google.credentials,
        )
