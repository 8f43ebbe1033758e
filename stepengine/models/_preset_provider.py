"""The base class of the adapters of the ``openai`` SDK, with a client that a preset configures."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import attrs

from stepengine.data.json import compact
from stepengine.data.models import ModelRequest
from stepengine.errors import ModelError
from stepengine.models._api import NO_KEY, require_batch_id
from stepengine.models._cloud_auth import (
    AZURE_TOKEN,
    ENTRA_SCOPE,
    ENTRA_TOLD,
    TokenSource,
    make_entra_token_source,
    require_at_most_one_argument,
)
from stepengine.models._http import HttpProvider
from stepengine.models._sdks import OPENAI
from stepengine.models.base import BatchMember, ProviderSettings, Timeouts
from stepengine.models.keys import Credentials, Secret, find_defined_variable, make_safe_excerpt, resolve_base_url
from stepengine.models.presets import get_preset_or_safe_default

API_VERSION = "OPENAI_API_VERSION"
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
MAX_SAID_CHARS = 500
"""About three lines, the reason for a rejected batch."""
OK_STATUS = 200
"""The status of HTTP for success."""


def _parse_batch_result(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the result in a line of batch results, in the form for ``decode_batch_reply``; ``{}`` for an unknown form."""
    match line:
        case {"response": {"status_code": status, "body": Mapping() as body} as response}:
            if status == OK_STATUS:
                return {"reply": body, "request_id": response.get("request_id")}
            return {"error": body.get("error"), "status": status}
        case {"error": {"code": "batch_expired"}}:
            return {"ended": "expired"}
        case {"error": {"code": "batch_cancelled"}}:
            return {"ended": "canceled"}
        case {"error": Mapping() as error}:
            return {"error": error}
        case _:
            return {}


CLASSIC_SCOPE = "https://cognitiveservices.azure.com/.default"
"""The scope of tokens for Azure's dated APIs."""


async def remove_placeholder_key(request: Any) -> None:
    """Remove the placeholder key from a request; the SDK requires a key, but a server without keys receives none."""
    if request.headers.get("authorization") == f"Bearer {NO_KEY}":
        del request.headers["authorization"]


def create_client_without_openai_env(sdk_class: type[Any], **options: Any) -> Any:
    """
    Return a client of the SDK's class for a company other than OpenAI.

    It sends no organization, no project and no headers from OpenAI's environment variables. With the SDK, a header of
    ``OPENAI_CUSTOM_HEADERS`` could replace the key.
    """
    lines = os.environ.get("OPENAI_CUSTOM_HEADERS", "").split("\n")
    ambient = {line.partition(":")[0].strip().lower() for line in lines if ":" in line}

    class ForeignClient(sdk_class):  # type: ignore[misc]  # a class of a module that is loaded late
        @property
        def default_headers(self) -> dict[str, Any]:
            own = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": self.user_agent}
            kept = {name: value for name, value in super().default_headers.items() if name.lower() not in ambient}
            return {**own, **kept}

    client = ForeignClient(**options)
    client.organization = client.project = None
    return client


class PresetProvider(HttpProvider):
    """
    The base class of the adapters of the ``openai`` SDK; a preset has the address and the special features of the service.

    Args:
        name: The preset; any other name is an unknown server.
        api_key: The key; by default from the preset's environment variable.
        base_url: Another address; by default from the environment. With one, no key is required.
        key_env: The environment variable that holds the key, in place of the preset's own.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        timeouts: Time limits of calls; by default those of the preset.
        headers: HTTP headers to send with every request, such as OpenRouter's ``HTTP-Referer`` and ``X-Title``.
        written_calls: Whether ``<tool_call>`` and ``<codebuff_tool_call>`` blocks in the text are parsed as tool calls (Chat
            Completions), for servers without a parser for the model. By default as the preset.
        written_thoughts: Whether ``<think>`` and ``[THINK]`` blocks at the start of the text are parsed as thinking (Chat
            Completions). By default as the preset.
        token_provider: A function, also an asynchronous one, that returns a token for each request in place of a key, such as
            one of Entra ID. By default, on Azure without a key, the credentials of ``azure-identity``, if environment
            variables configure them.

    Raises:
        ModelError: when both *api_key* and *token_provider* are set.
    """

    sdk = OPENAI

    def __init__(
        self,
        name: str = "openai_chat",
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        key_env: str | None = None,
        transport: object = None,
        *,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        written_calls: bool | None = None,
        written_thoughts: bool | None = None,
        token_provider: TokenSource | None = None,
    ) -> None:
        require_at_most_one_argument(name, api_key=api_key, token_provider=token_provider)
        self._preset = get_preset_or_safe_default(name, base_url)
        if written_calls is not None:
            self._preset = attrs.evolve(self._preset, written_calls=written_calls)
        if written_thoughts is not None:
            self._preset = attrs.evolve(self._preset, written_thoughts=written_thoughts)
        patience = timeouts or self._preset.timeouts
        super().__init__(name, api_key, base_url, transport, timeouts=patience, headers=headers, key_env=key_env)
        self.model_patterns = self._preset.model_patterns
        self._key_required = self._preset.key_required
        self._token_provider = token_provider

    def settings(self) -> ProviderSettings:
        """Return the sources of the key and the base URL that the preset names."""
        variable = self._key_env or self._preset.key_variable
        return ProviderSettings(
            key_variables=(variable,) if variable else (),
            base_url_variable=self._preset.base_url_variable,
            base_url=self._preset.base_url,
            given_url=self._base_url,
        )

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Upload a file and return its id; without *expires_in* (3,600 to 2,592,000 seconds) it never expires.

        Raises:
            ModelError: when the service stores no files, or the upload fails.
        """
        if not self._preset.stores_files:
            return await super().upload(data, mime_type=mime_type, name=name, expires_in=expires_in)
        until: dict[str, object] = {}
        if expires_in is not None:
            until["expires_after"] = {"anchor": "created_at", "seconds": expires_in}
        file = (name or "file", data, mime_type)
        held = await self._run_file_operation(
            lambda to: to.files.create(file=file, purpose="user_data", extra_headers=self._headers, **until)
        )
        return str(held.id)

    async def delete_file(self, file_id: str) -> None:
        """
        Delete an uploaded file.

        Raises:
            ModelError: when the service stores no files or does not delete it, such as for an unknown id.
        """
        if not self._preset.stores_files:
            await super().delete_file(file_id)
        await self._run_file_operation(lambda at: at.files.delete(file_id, extra_headers=self._headers))

    def encode_batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Return *request* encoded for a batch; all requests of a batch have the same model.

        Raises:
            ModelError: when the service has no batches, or the request cannot be sent.
        """
        if not self._preset.supports_batches:
            return super().encode_batch_member(request)
        return BatchMember(request, request.model, self._encode_for_batch(request).content)

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        """
        Upload requests as a file, submit them as a batch of at most 24 hours, and return its id.

        Raises:
            ModelError: when the service rejects them.
        """
        url = f"/v1{self.path}"
        lines = [
            b'{"custom_id":"%s","method":"POST","url":"%s","body":%s}\n' % (name.encode(), url.encode(), member.content)
            for name, member in members.items()
        ]
        file = ("batch.jsonl", b"".join(lines), "application/jsonl")
        made = await self._run_file_operation(
            lambda to: to.files.create(file=file, purpose="batch", extra_headers=self._headers)
        )
        told = {"input_file_id": made.id, "endpoint": url, "completion_window": "24h"}
        return require_batch_id(self.name, await self._call_api("batches", "/batches", compact(told).encode()))

    async def fetch_batch_results(self, batch: str) -> Mapping[str, object] | None:
        """
        Return the result of each request of a batch by name, ``None`` while it is not done; raise ``ModelError`` if the whole batch failed.

        Raises:
            ModelError: when the query fails, or the batch was rejected as a whole.
        """
        told = await self._call_api("batches", f"/batches/{quote(batch, safe='')}")
        status = told.get("status")
        if status not in ENDED:
            return None
        if status == "failed":
            match told.get("errors"):
                case {"data": list(errors)}:
                    said = "; ".join([str(e.get("message")) for e in errors if isinstance(e, Mapping)][:3])
                case _:
                    said = ""
            msg = f"{self.name} rejected the batch {batch}: {make_safe_excerpt(said, MAX_SAID_CHARS) or 'no reason given'}"
            raise ModelError(msg, kind="batch")
        results: dict[str, object] = {}
        for member in ("output_file_id", "error_file_id"):
            file = told.get(member)
            if isinstance(file, str) and file:
                for line in await self._fetch_json_lines(f"/files/{quote(file, safe='')}/content"):
                    # Results without a name are dropped: the name "" is for all requests.
                    if line.get("custom_id"):
                        results[str(line["custom_id"])] = _parse_batch_result(line)
        return results

    def _make_token_source(self) -> TokenSource | None:
        """Return the source of tokens that replaces a key; ``None`` if there is a key, or no source is configured."""
        has_key = self._api_key is not None or (
            find_defined_variable((AZURE_TOKEN,)) is None and self.settings().key_from is not None
        )
        if self._token_provider is None and (has_key or not self._preset.azure):
            return None
        return make_entra_token_source(
            self.name, self._token_provider, CLASSIC_SCOPE if self._api_version else ENTRA_SCOPE
        )

    def _resolve_credentials_and_url(self) -> tuple[Credentials, str]:
        """Return the credentials, which may be a source of tokens, and the base URL with the suffix of the preset."""
        settings = self.settings()
        given, _ = resolve_base_url(self._base_url, settings.base_url_variable, settings.base_url)
        if given is not None and self._make_token_source() is not None:
            credentials, url = Credentials(None, "tokens", told=ENTRA_TOLD), given
        else:
            credentials, url = super()._resolve_credentials_and_url()
        suffix = self._preset.base_url_suffix
        if suffix and not self._api_version and not url.rstrip("/").endswith("/v1"):
            url = url.rstrip("/") + suffix
        return credentials, url

    @property
    def _api_version(self) -> str:
        """The date of Azure's dated API; ``""`` for other services and for the API without versions."""
        # (ecosystem:EC114)
        return os.environ.get(API_VERSION, "").strip() if self._preset.azure else ""

    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create the SDK's client of the preset; for a server without keys, *http_client* gets a hook that removes the placeholder key."""
        tokens, sdk = self._make_token_source(), self._load_sdk()
        key = self._preset.no_key if credentials.key is None else credentials.key.reveal()
        if tokens is None and not key:
            http_client.event_hooks = {**http_client.event_hooks, "request": [remove_placeholder_key]}
        shared: dict[str, Any] = {"max_retries": 0, "timeout": http_client.timeout, "http_client": http_client}
        if self._api_version:
            shared["azure_ad_token_provider" if tokens else "api_key"] = tokens or key or NO_KEY
            return create_client_without_openai_env(
                sdk.AsyncAzureOpenAI, azure_endpoint=base_url, api_version=self._api_version, **shared
            )
        shared |= {"base_url": base_url, "api_key": tokens or key or NO_KEY}
        if tokens is None and self._preset.key_variable == "OPENAI_API_KEY":
            return sdk.AsyncOpenAI(**shared)
        return create_client_without_openai_env(sdk.AsyncOpenAI, **shared)
