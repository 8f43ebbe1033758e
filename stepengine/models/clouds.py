"""
Models of others in the clouds: Bedrock, Vertex AI, Foundry, and Anthropic's own platform on AWS and Google Cloud.

The wires are those of the models' makers. The SDKs' own clients supply address and authentication; what a cloud wants in the
path or the body instead is said here, so that the encoded conversation goes out as it is.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal
from urllib.parse import quote

import attrs

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest
from stepengine.errors import ModelError
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
    check_exclusive,
    check_host,
    make_credentials_error,
    make_entra_source,
)
from stepengine.models._failures import FORCED_THINKING, GRAMMAR, RequestLabel, error_from_body, error_from_transport
from stepengine.models._http import NO_KEY, HttpProvider, RequestBody, warn_once
from stepengine.models._schemas import count_optional_members
from stepengine.models._thinking_levels import CANNOT, ThinkingRequest, effort_from_thinking
from stepengine.models._wire import ToolsCache
from stepengine.models.anthropic import VERSION, AnthropicProvider
from stepengine.models.anthropic.families import find_family
from stepengine.models.anthropic.request import (
    BINDING_BETA,
    MIN_BUDGET_TOKENS,
    Site,
    encode_thinking,
    limit_strict_tools,
    thinks_anyway,
)
from stepengine.models.base import BatchMember, ModelInfo, Provider, ProviderSettings, Timeouts
from stepengine.models.bedrock_converse import request as converse
from stepengine.models.bedrock_converse.families import find_family as family_of_converse
from stepengine.models.bedrock_converse.families import parse_maker
from stepengine.models.bedrock_converse.stream import ConverseAccumulator
from stepengine.models.bedrock_converse.transport import ConverseErrorReply, Signer
from stepengine.models.google import GoogleProvider, transport
from stepengine.models.keys import (
    Credentials,
    Secret,
    hash_account,
    register_secret,
    resolve_base_url,
    usable_variables,
)
from stepengine.models.openai import OpenAIProvider
from stepengine.models.presets import OPENAI

RUNTIME = Site(
    name="Amazon Bedrock",
    names_model=False,
    says_stream=False,
    betas_in_body=True,
    marks_whole=False,
    is_fast=False,
    has_tiers=False,
    opens_pages=False,
    searches=False,
    stands_in=False,
    runs_programs=False,
)
MANTLE = Site(name="Amazon Bedrock", is_fast=False, stands_in=False, runs_programs=False)
VERTEX = Site(
    name="Vertex AI",
    names_model=False,
    marks_whole=False,
    is_fast=False,
    has_tiers=False,
    stands_in=False,
    runs_programs=False,
)
FOUNDRY = Site(name="Foundry", is_fast=False, stands_in=False)
MULTI_REGIONS = frozenset({"us", "eu"})


class _NoFilesProvider(HttpProvider):
    """A provider of a wire that elsewhere holds files and takes batches, and does not here."""

    def batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Refuse the batch: nothing there takes any.

        Raises:
            ModelError: always.
        """
        return Provider.batch_member(self, request)

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Refuse the file: nothing there holds files.

        Raises:
            ModelError: always.
        """
        return await Provider.upload(self, data, mime_type=mime_type, name=name, expires_in=expires_in)

    async def delete_file(self, file_id: str) -> None:
        """
        Refuse to delete a file: nothing there holds files.

        Raises:
            ModelError: always.
        """
        await Provider.delete_file(self, file_id)


class _CloudProvider(HttpProvider):
    """A provider without a key of its own, whose address depends on a region; a cloud authenticates it."""

    base_url_variable: str

    @property
    @abstractmethod
    def _cloud(self) -> CloudAuth:
        """The authentication of the cloud."""

    @abstractmethod
    def _get_home_url(self) -> str | None:
        """Return the cloud's own address; ``None`` while region or resource is not known."""

    def settings(self) -> ProviderSettings:
        """Return where its credentials and its address come from."""
        return ProviderSettings(
            key_variables=tuple(self._cloud.variables),
            base_url_variable=self.base_url_variable,
            base_url=self._get_home_url(),
            given_url=self._base_url,
        )

    def _resolve_access(self) -> tuple[Credentials, str]:
        credentials, home = self._cloud.check(self.name), self._get_home_url()
        url, _ = resolve_base_url(self._base_url, self.base_url_variable, home)
        if url is None:
            msg = f"there is no address for {self.name!r}: pass base_url= or set {self.base_url_variable}"
            raise ModelError(msg, kind="missing_base_url")
        check_host(self.name, self._cloud, url, home)
        return credentials, url

    def get_account(self) -> str:
        """Return what tells its account in the cloud, or where that is not known its address, from others."""
        return hash_account(self._cloud.identity(), self._resolve_access()[1])

    def _list_errors(self) -> tuple[type[Exception], ...]:
        return (*super()._list_errors(), *self._cloud.list_errors())

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        if isinstance(error, self._cloud.list_errors()):
            # The SDK says with a plain RuntimeError that there are none; any other one is not about them.
            if type(error) is RuntimeError and "credentials" not in str(error):
                return error
            return make_credentials_error(self.name, call.model, error, call.credentials.origin)
        return super()._convert_error(error, call)


class _AwsProvider(_CloudProvider):
    """What wires behind AWS's signatures share; *regional* is their address, with room for the region."""

    regional: str
    _aws: AwsAuth

    @property
    def _cloud(self) -> CloudAuth:
        return self._aws

    def _get_home_url(self) -> str | None:
        region = self._aws.region()
        return None if region is None else self.regional.format(region)

    def _make_signing_options(self) -> dict[str, Any]:
        """Return what Anthropic's clients for AWS sign with: a key, else what AWS's own packages found."""
        bearer = self._aws.bearer()
        if bearer is not None:
            return {"api_key": bearer.reveal()}
        return {f"aws_{name}": value for name, value in self._aws.keys().items()}


class _GoogleCloudProvider(_CloudProvider):
    """What wires behind Google's credentials share: a token that a request renewed is known for a secret after it."""

    _google: GoogleAuth

    @property
    def _cloud(self) -> CloudAuth:
        return self._google

    async def _post(self, client: object, body: RequestBody, *, stream: bool) -> object:
        try:
            return await super()._post(client, body, stream=stream)
        finally:
            token = getattr(self._google.credentials, "token", None)
            register_secret(self.name, Secret(token) if isinstance(token, str) else None, "access_token")


class _CloudClaudeProvider(_NoFilesProvider, _CloudProvider, AnthropicProvider):
    """Claude where its maker is not asked what a model takes."""

    async def describe(self, model: str) -> ModelInfo | None:  # type: ignore[override]
        """Return nothing: the cloud states nothing of a model."""
        return None


class _MultiProvider(Provider):
    """One prefix behind which several wires are, by the model's name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._wires: dict[str, HttpProvider] = {}

    @abstractmethod
    def _select_wire(self, model: str) -> HttpProvider:
        """Return the provider of *model*, which has no prefix."""

    def _get_provider(self, model: str) -> HttpProvider:
        wire = self._select_wire(self.strip_prefix(model))
        for prefix in (self.name, *self._prefixes):
            wire.add_prefix(prefix)
        return wire

    def settings(self) -> ProviderSettings:
        """Return where its credentials and its address come from."""
        return self._get_provider("").settings()

    def get_account(self) -> str:
        """Return what tells its account in the cloud, or where that is not known its address, from others."""
        return self._get_provider("").get_account()

    def check(self, model: str) -> None:
        """
        Look for credentials, region and packages, without asking anybody.

        Raises:
            MissingKey: when there is no sign of credentials.
            ModelError: when a package or a setting is missing.
        """
        self._get_provider(model).check(model)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*.

        Raises:
            ModelError: when there is none.
        """
        return await self._get_provider(request.model).complete(request)

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Give the reply in pieces, and last one ``ReplyDone``.

        Raises:
            ModelError: when there is no reply.
        """
        inner: Any = self._get_provider(request.model).stream(request)
        async with aclosing(inner) as deltas:
            async for delta in deltas:
                yield delta

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Return how many tokens the cloud counts in *request*; ``None`` when it cannot be asked.

        Raises:
            ModelError: when the question fails.
        """
        return await self._get_provider(request.model).count_tokens(request)

    def output_limit(self, request: ModelRequest) -> int | None:
        """Return the output limit in tokens that is sent with *request* if it names none; ``None`` where none is."""
        return self._get_provider(request.model).output_limit(request)

    async def close(self) -> None:
        """Give back connections."""
        for wire in self._wires.values():
            await wire.close()


# --- Amazon Bedrock ---------------------------------------------------------------------------------------------------


class BedrockProvider(_MultiProvider):
    """
    Models on Amazon Bedrock: ``bedrock/us.anthropic.claude-...``, ``bedrock/openai.gpt-...``, ``bedrock/amazon.nova-...``.

    Claude is asked by its own wire, OpenAI's models by Responses, and all others by Bedrock's own API, Converse. A model is
    known by the maker in its name; one whose name tells of none, such as an application's inference profile, is taken for
    Claude, unless *endpoint* says otherwise.

    Requests are signed with AWS credentials (Signature Version 4), found as AWS's own packages find them, or carry a key of
    Bedrock's own. The first needs the extra ``bedrock``.

    Args:
        api_key: A key of Bedrock's own; by default from ``AWS_BEARER_TOKEN_BEDROCK``.
        base_url: Another server, without the paths that belong to a wire.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        region: Such as ``"us-east-1"``; by default from ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the profile.
        profile: A profile of AWS's configuration files; by default from ``AWS_PROFILE``.
        access_key: The id of an access key, by default as AWS's packages find it; *secret_key* belongs to it.
        secret_key: The access key itself.
        session_token: What belongs to a temporary access key.
        endpoint: Where Claude is: ``"runtime"`` knows inference profiles and names of AWS's own, ``"mantle"`` is Anthropic's
            API as it is. OpenAI's models are behind the second. With ``"converse"`` all models are asked by Converse, which
            has guardrails, and for models that were trained or imported.
        max_tokens: The output limit of requests to Claude that set none; the largest output of the model by default.
        prompt_cache: Whether prompts of Claude and Nova are cached, and for how long: true is five minutes, ``"1h"`` an hour
            where the model has that.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.

    Raises:
        ModelError: when an access key is given by half or beside a key of Bedrock's own, and for any other endpoint.
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
            msg = f"endpoint={endpoint!r} is none of Amazon Bedrock's: 'runtime', 'mantle' or 'converse'"
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
                self._aws, _join_url(base_url, "/anthropic"), name=name, **own, **shared
            )
        elif endpoint == "runtime":
            self._wires["claude"] = _RuntimeClaude(self._aws, base_url, name=name, **own, **shared)
        openai = _BedrockOpenAI(self._aws, _join_url(base_url, "/openai/v1"), name=f"{name}_openai", **shared)
        self._wires["openai"] = openai
        called = name if self._is_converse else f"{name}_converse"
        self._wires["converse"] = _Converse(self._aws, base_url, name=called, prompt_cache=prompt_cache, **shared)

    def _select_wire(self, model: str) -> HttpProvider:
        maker = "" if self._is_converse else parse_maker(model)
        if self._is_converse or maker not in {"", "anthropic", "openai"}:
            return self._wires["converse"]
        return self._wires["openai" if maker == "openai" else "claude"]


def _join_url(url: str | None, path: str) -> str | None:
    return None if url is None else url.rstrip("/") + path


class _AwsClaude(_AwsProvider, _CloudClaudeProvider):
    client_name: str

    def __init__(self, aws: AwsAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._aws = aws

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        return getattr(self._load_sdk(), self.client_name)(
            **self._make_signing_options(),
            aws_region=self._aws.region(),
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )


class _RuntimeClaude(_AwsClaude):
    """Claude by InvokeModel: the model in the path, and streams in AWS's own form."""

    site = RUNTIME
    client_name = "AsyncAnthropicBedrock"
    base_url_variable = "ANTHROPIC_BEDROCK_BASE_URL"
    regional = "https://bedrock-runtime.{}.amazonaws.com"

    def _make_path(self, model: str, *, stream: bool) -> str:
        return f"/model/{quote(model, safe=':;')}/invoke{'-with-response-stream' if stream else ''}"

    def _encode_count(self, request: ModelRequest) -> RequestBody | None:  # type: ignore[override]
        return None


class _MantleClaude(_AwsClaude):
    """Claude by Anthropic's API as it is, behind AWS's signatures."""

    site = MANTLE
    client_name = "AsyncAnthropicBedrockMantle"
    base_url_variable = "ANTHROPIC_BEDROCK_MANTLE_BASE_URL"
    regional = "https://bedrock-mantle.{}.api.aws/anthropic"


class _BedrockOpenAI(_NoFilesProvider, _AwsProvider, OpenAIProvider):
    """OpenAI's models by Responses, behind AWS's signatures."""

    base_url_variable = "AWS_BEDROCK_BASE_URL"
    regional = "https://bedrock-mantle.{}.api.aws/openai/v1"

    def __init__(self, aws: AwsAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._aws = aws
        self._preset = attrs.evolve(OPENAI, name=self.name, holds_files=False, takes_batches=False)

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        from openai.providers import bedrock

        bearer = self._aws.bearer()
        access: dict[str, Any]
        if bearer is not None:
            access = {"api_key": bearer.reveal()}
        else:
            keys = self._aws.keys()
            words = {"access_key": "access_key_id", "secret_key": "secret_access_key"}
            access = {"api_key": None, **{words.get(name, name): value for name, value in keys.items()}}
        provider = bedrock(region=self._aws.region(), base_url=base_url, endpoint="mantle", **access)
        return self._load_sdk().AsyncOpenAI(
            provider=provider, max_retries=0, timeout=http_client.timeout, http_client=http_client
        )

    def _list_errors(self) -> tuple[type[Exception], ...]:
        return (*super()._list_errors(), self._load_sdk().OpenAIError)

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        sdk = self._load_sdk()
        if isinstance(error, sdk.OpenAIError) and not isinstance(error, sdk.APIError):
            return make_credentials_error(self.name, call.model, error.__cause__ or error, call.credentials.origin)
        return super()._convert_error(error, call)


class _Converse(_NoFilesProvider, _AwsProvider, HttpProvider):
    """Models of any maker by Bedrock's own API, for which AWS has no asynchronous SDK."""

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

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Signer:
        return Signer(self._aws, self.name, base_url, http_client)

    def _list_errors(self) -> tuple[type[Exception], ...]:
        import httpx2

        http = (httpx2.HTTPError, httpx2.InvalidURL, httpx2.StreamError, OSError)
        return (ConverseErrorReply, *http, *self._cloud.list_errors())

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        if isinstance(error, ConverseErrorReply):
            response = error.response
            return error_from_body(response.content, response.status_code, response.headers, call)
        if isinstance(error, self._cloud.list_errors()):
            return super()._convert_error(error, call)
        return error_from_transport(error, call)

    async def _post(self, client: Signer, body: RequestBody, *, stream: bool) -> object:
        return await client.post(body.path, body.content, body.headers)

    def _explain_no_schema(self, request: ModelRequest) -> str:
        schema = request.settings.response_schema
        if not family_of_converse(self.strip_prefix(request.model)).promises:
            return "Bedrock does not promise that for the model"
        if schema is not None and count_optional_members(schema, "anthropic") is None:
            return "the schema has open objects, more than 24 optional members, or no object at its root"
        return ""

    def _can_be_strict(self, request: ModelRequest, after: str = "") -> bool:
        """Return whether the tools of *request* that shall be strict can be so, all together."""
        strict = [tool for tool in request.tools if tool.strict]
        if not strict or after == GRAMMAR or not family_of_converse(self.strip_prefix(request.model)).promises:
            return False
        return limit_strict_tools(request.tools, request.settings.response_schema) == request.tools

    def _list_dropped_settings(self, request: ModelRequest) -> tuple[str, ...]:
        model = self.strip_prefix(request.model)
        family, settings = family_of_converse(model), request.settings
        dropped = [*converse.encode_settings(request, model, family, self.name).dropped]
        if any(tool.strict for tool in request.tools) and not self._can_be_strict(request):
            dropped.append("strict")
        if request.tools and settings.parallel_tool_calls is False:
            dropped.append("parallel_tool_calls")
        if converse.demands_unsupported_call(self._prepare_request(request), family):
            dropped.append("tool_choice")
        return (*dropped, *converse.find_unsupported_limits(self._make_request_options(request), settings))

    def _make_request_options(self, request: ModelRequest, after: str = "") -> converse.ConverseRequestOptions:
        model, cache = self.strip_prefix(request.model), request.settings.cache
        family = family_of_converse(model)
        asked = self._thinking_for_claude(request, model, after) if family.thinking == "claude" else None
        asked = converse.make_thinking_request(request.settings, model, family) if asked is None else asked
        warn_once(asked.note)
        return converse.ConverseRequestOptions(
            provider=self.name,
            model=model,
            family=family,
            cache=self._cache if cache is None else None if cache == "off" else cache,
            thinking=asked.members,
            after=after,
        )

    def _thinking_for_claude(self, request: ModelRequest, model: str, after: str) -> ThinkingRequest:
        """Return what is said of thinking to Claude, in the words of its own wire."""
        family, thinking, most = find_family(model), request.settings.thinking, request.settings.max_tokens
        if thinks_anyway(request, family):
            return ThinkingRequest({"output_config": {"effort": "low"}}, CANNOT.format(model=model, least="low effort"))
        asked = encode_thinking(request, model, family, off=after == FORCED_THINKING)
        if thinking is None or asked is None:
            return ThinkingRequest({} if asked is None else {"thinking": asked})
        if most is not None and asked.get("budget_tokens", 0) >= most:
            asked = {**asked, "budget_tokens": max(MIN_BUDGET_TOKENS, most - 1)}
        members: dict[str, Any] = {"thinking": asked}
        if asked["type"] == "adaptive" and (thinking.effort is not None or thinking.tokens is not None):
            members["output_config"] = {"effort": family.effort(effort_from_thinking(thinking))}
        return ThinkingRequest({**members, **({"anthropic_beta": [BINDING_BETA]} if "block_binding" in asked else {})})

    def _encode(self, request: ModelRequest, *, stream: bool, after: str = "") -> RequestBody:
        ways = self._make_request_options(request, after)
        tools = self._tools if self._can_be_strict(request, after) else self._loose
        request = self._prepare_request(request, after)
        path = f"/model/{quote(ways.model, safe=':;')}/converse{'-stream' if stream else ''}"
        return RequestBody(converse.encode(request, ways, tools(request.tools)), path=path)

    def _encode_count(self, request: ModelRequest) -> RequestBody | None:
        """Encode the question how many tokens *request* has, which Bedrock answers for Claude, by its name without a geography."""
        model = self.strip_prefix(request.model)
        if parse_maker(model) != "anthropic":
            return None
        request = self._prepare_request(request, is_count=True)
        content = converse.encode_token_count_request(
            request, self._make_request_options(request), self._loose(request.tools)
        )
        return RequestBody(content, path=f"/model/{quote(model[model.index('anthropic.') :], safe=':;')}/count-tokens")


# --- Vertex AI --------------------------------------------------------------------------------------------------------


class VertexProvider(_MultiProvider):
    """
    Gemini and Claude on Google's Vertex AI: ``vertex/gemini-...``, ``vertex/claude-...``.

    Requests carry a token that Google's credentials give, found and renewed as ``google-auth`` does it.

    Args:
        project: The project; by default from ``GOOGLE_CLOUD_PROJECT`` or ``ANTHROPIC_VERTEX_PROJECT_ID``, else that of the
            credentials.
        location: Such as ``"us-east5"``; by default from ``GOOGLE_CLOUD_LOCATION``, for Claude ``CLOUD_ML_REGION`` before
            that, else ``"global"``.
        credentials: Credentials of ``google-auth``, or a token; by default those that ``google-auth`` finds.
        base_url: Another server, without the version in the path.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        max_tokens: The output limit of requests to Claude that set none; the largest output of the model by default.
        prompt_cache: Whether Claude's prompts are cached, and for how long: true is five minutes, ``"1h"`` an hour.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        timeouts: How long calls may take.
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
        self._wires["claude"] = _VertexClaude(access, _join_url(base_url, "/v1"), **claude, **shared)

    def _select_wire(self, model: str) -> HttpProvider:
        return self._wires["claude" if model.startswith("claude-") else "gemini"]


class _VertexBase(_NoFilesProvider, _GoogleCloudProvider):
    """What the two wires of Vertex AI share: credentials are looked for before the first request."""

    location_variables: tuple[str, ...]

    @property
    def _location(self) -> str:
        return self._google.location(*self.location_variables)

    def _get_home_url(self) -> str:
        place = self._location
        if place in MULTI_REGIONS:
            return f"https://aiplatform.{place}.rep.googleapis.com"
        return f"https://{'' if place == 'global' else f'{place}-'}aiplatform.googleapis.com"

    @asynccontextmanager
    async def _send_request(self, request: ModelRequest, *, stream: bool) -> AsyncGenerator[HttpExchange]:
        await self._google.find_credentials(request.model)
        async with super()._send_request(request, stream=stream) as exchange:
            yield exchange

    async def count_tokens(self, request: ModelRequest) -> int | None:
        """
        Return how many tokens Vertex AI counts in *request*.

        Raises:
            ModelError: when the question fails.
        """
        await self._google.find_credentials(request.model)
        return await super().count_tokens(request)


class _VertexClaude(_VertexBase, _CloudClaudeProvider):
    site = VERTEX
    base_url_variable = "ANTHROPIC_VERTEX_BASE_URL"
    location_variables = ("CLOUD_ML_REGION", "GOOGLE_CLOUD_LOCATION")

    def __init__(self, access: GoogleAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._google = access

    def _get_home_url(self) -> str:
        return f"{super()._get_home_url()}/v1"

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        return self._load_sdk().AsyncAnthropicVertex(
            region=self._location,
            project_id=self._google.project,
            credentials=self._google.credentials,
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )

    @property
    def _models(self) -> str:
        project, place = quote(self._google.project or "", safe=":"), quote(self._location, safe="")
        return f"/projects/{project}/locations/{place}/publishers/anthropic/models"

    def _make_path(self, model: str, *, stream: bool) -> str:
        return f"{self._models}/{quote(model, safe='@:')}:{'streamRawPredict' if stream else 'rawPredict'}"

    def _encode_count(self, request: ModelRequest) -> RequestBody:
        body = super()._encode_count(request)
        version = f'{{"anthropic_version":"{VERSION}",'.encode()
        return RequestBody(version + body.content[1:], path=f"{self._models}/count-tokens:rawPredict")


class _VertexGemini(_VertexBase, GoogleProvider):
    is_vertex = True
    base_url_variable = "GOOGLE_VERTEX_BASE_URL"
    location_variables = ("GOOGLE_CLOUD_LOCATION", "CLOUD_ML_REGION")

    def __init__(self, access: GoogleAuth, base_url: str | None, **options: Any) -> None:
        super().__init__(None, base_url, **options)
        self._google = access

    def _make_client(self, credentials: Credentials, base_url: str, http_client: object) -> Any:
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
        base_url: The address; by default from ``ANTHROPIC_FOUNDRY_BASE_URL``, else made from *resource*.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        resource: The name of the resource; by default from ``ANTHROPIC_FOUNDRY_RESOURCE``.
        token_provider: A function that gives a token of Entra ID for each request, in place of a key; it may be asynchronous.
            By default, where no key is, what ``azure-identity`` finds, if the environment speaks of it.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        options: What ``AnthropicProvider`` takes beside that.

    Raises:
        ModelError: when a key is given and a function that gives tokens, too.
    """

    site = FOUNDRY
    model_patterns = ()

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
        check_exclusive(name, api_key=api_key, token_provider=token_provider)
        super().__init__(api_key, base_url, transport, name=name, **options)
        self._resource = resource
        self._token_provider = token_provider

    def settings(self) -> ProviderSettings:
        """Return where its key and address come from."""
        resource = self._resource or os.environ.get("ANTHROPIC_FOUNDRY_RESOURCE", "").strip()
        return ProviderSettings(
            key_variables=(self._key_env or "ANTHROPIC_FOUNDRY_API_KEY",),
            base_url_variable="ANTHROPIC_FOUNDRY_BASE_URL",
            base_url=f"https://{resource}.services.ai.azure.com/anthropic" if resource else None,
            given_url=self._base_url,
        )

    def _make_token_source(self) -> TokenSource | None:
        settings = self.settings()
        if self._token_provider is None:
            has_key = self._api_key is not None or settings.key_from is not None
            url, _ = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
            # What the environment holds for Entra ID goes where a key of the environment would go, and nowhere else.
            if has_key or not usable_variables(self.name, (AZURE_TOKEN, *ENTRA_SIGNS), url, settings.base_url):
                return None
        return None if self._api_key is not None else make_entra_source(self.name, self._token_provider, ENTRA_SCOPE)

    def _resolve_access(self) -> tuple[Credentials, str]:
        settings = self.settings()
        url, _ = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        if self._make_token_source() is None or url is None:
            return super()._resolve_access()
        return Credentials(None, "Entra ID", told=ENTRA_TOLD), url

    async def describe(self, model: str) -> ModelInfo | None:  # type: ignore[override]
        """Return nothing: Foundry states nothing of a model."""
        return None

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        tokens = self._make_token_source()
        access: dict[str, object] = {"azure_ad_token_provider": tokens}
        if tokens is None:
            access = {"api_key": NO_KEY if credentials.key is None else credentials.key.reveal()}
        return self._load_sdk().AsyncAnthropicFoundry(
            **access,
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )


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
        found = self._workspace_id or os.environ.get(self.workspace_variable, "").strip()
        if not found:
            msg = f"{self.name!r} has no workspace: set {self.workspace_variable}, or pass {type(self).__name__}(workspace_id=...)"
            raise ModelError(msg, kind="missing_workspace")
        return found

    def _resolve_access(self) -> tuple[Credentials, str]:
        found = super()._resolve_access()
        _ = self._workspace
        return found


class AnthropicAwsProvider(_AwsProvider, _PlatformProvider):
    """
    Claude as Anthropic runs it on AWS: ``anthropic_aws/claude-...``.

    Requests are signed with AWS credentials (Signature Version 4), found as AWS's own packages find them, which needs the extra
    ``bedrock``, or carry a key of their own.

    Args:
        api_key: A key; by default from ``ANTHROPIC_AWS_API_KEY``.
        base_url: Another server; by default from ``ANTHROPIC_AWS_BASE_URL``, else made from the region.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        workspace_id: The workspace; by default from ``ANTHROPIC_AWS_WORKSPACE_ID``.
        region: Such as ``"us-east-1"``; by default from ``AWS_REGION``, ``AWS_DEFAULT_REGION`` or the profile.
        profile: A profile of AWS's configuration files; by default from ``AWS_PROFILE``.
        access_key: The id of an access key, by default as AWS's packages find it; *secret_key* belongs to it.
        secret_key: The access key itself.
        session_token: What belongs to a temporary access key.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        options: What ``AnthropicProvider`` takes beside that.

    Raises:
        ModelError: when an access key is given by half or beside a key.
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
        return self._load_sdk().AsyncAnthropicAWS(
            **self._make_signing_options(),
            aws_region=self._aws.region(),
            workspace_id=self._workspace,
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )


class AnthropicGoogleProvider(_GoogleCloudProvider, _PlatformProvider):
    """
    Claude as Anthropic runs it on Google Cloud: ``anthropic_google/claude-...``.

    Requests carry a token that Google's credentials give, found and renewed as ``google-auth`` does it.

    Args:
        project: The project; by default from ``ANTHROPIC_GOOGLE_CLOUD_PROJECT`` or ``GOOGLE_CLOUD_PROJECT``, else that of the
            credentials.
        location: By default from ``ANTHROPIC_GOOGLE_CLOUD_LOCATION``, else ``"global"``.
        credentials: Credentials of ``google-auth``, or a token; by default those that ``google-auth`` finds.
        workspace_id: The workspace; by default from ``ANTHROPIC_GOOGLE_CLOUD_WORKSPACE_ID``.
        base_url: Another server; by default from ``ANTHROPIC_GOOGLE_CLOUD_BASE_URL``. Project, location and workspace are added
            where it does not end in ``/invoke``.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        options: What ``AnthropicProvider`` takes beside that.
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

    def _get_home_url(self) -> str:
        return "https://claude.googleapis.com"

    @asynccontextmanager
    async def _send_body(
        self, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[HttpExchange]:
        await self._google.find_credentials(request.model)
        async with super()._send_body(body, request, stream=stream) as exchange:
            yield exchange

    async def _call_file_api(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        await self._google.find_credentials(self.name)
        return await super()._call_file_api(ask)

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        project, place = self._google.project or "", self._google.location("ANTHROPIC_GOOGLE_CLOUD_LOCATION")
        if not base_url.rstrip("/").endswith("/invoke"):
            parts = [quote(part, safe=":") for part in (project, place, self._workspace)]
            path = "/v1/projects/{}/locations/{}/workspaces/{}/invoke".format(*parts)
            base_url = f"{base_url.rstrip('/')}{path}"
        return self._load_sdk().AsyncAnthropicGoogleCloud(
            project=project,
            location=place,
            workspace_id=self._workspace,
            credentials=self._google.credentials,
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )
