"""The HTTP API of a provider: its key and URL, requests through the SDK's client, and the errors of failed ones."""

from __future__ import annotations

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ClassVar

import attrs
from attrs import frozen

from stepengine.data.models import ModelRequest
from stepengine.errors import ModelError
from stepengine.models._byte_reader import HttpExchange, make_timeout_error, parse_json_lines
from stepengine.models._connections import Connections, LoopClients
from stepengine.models._failures import RequestLabel, error_from_sdk, format_address_without_secrets
from stepengine.models._log_redaction import install_secret_filter
from stepengine.models._sdks import Sdk
from stepengine.models._wire import merge_headers, parse_extra_headers
from stepengine.models.base import Provider, Timeouts
from stepengine.models.keys import (
    WITHHELD,
    Credentials,
    Secret,
    find_defined_variable,
    hash_account,
    register_secret,
    register_secret_headers,
    register_url_password,
    resolve_base_url,
    resolve_key,
    select_key_variables_for_url,
)
from stepengine.redaction import GIVEN

NO_KEY = "none"
MAX_RESULTS = 256 * 1024 * 1024
"""The most bytes of the results of a batch."""
MAX_BATCH_ID_CHARS = 200
"""Enough for ids of batches, which have some dozen characters and become part of a URL and a database key."""


@frozen
class RequestBody:
    """
    An encoded request.

    Attributes:
        content: The bytes of the body.
        headers: Additional headers.
        path: The URL path, if it differs from the provider's ``path``.
        is_get: Whether the request is a GET without a body, in place of a POST.
    """

    content: bytes
    headers: Mapping[str, str] = attrs.field(factory=dict)
    path: str = ""
    is_get: bool = False


def require_batch_id(provider: str, reply: Mapping[str, object], id_member: str = "id") -> str:
    """
    Return the id in the *reply* that accepted a batch.

    Raises:
        ModelError: without a valid id. The error is final, because a retry might be billed twice.
    """
    name = reply.get(id_member)
    if isinstance(name, str) and 0 < len(name) <= MAX_BATCH_ID_CHARS:
        return name
    msg = f"{provider} accepted a batch, but its reply has no valid {id_member!r}, which has 1 to {MAX_BATCH_ID_CHARS} characters"
    raise ModelError(msg, kind="protocol")


class ApiProvider(Provider):
    """
    A provider with an HTTP API, mostly through the client of an SDK, which a subclass creates.

    The SDK provides the URL, the authentication, headers and error classes. It neither retries nor decodes.

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

    path: ClassVar[str]
    sdk: ClassVar[Sdk | None] = None
    """The SDK that sends requests; ``None`` without one."""
    _key_required: bool = True

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
        self._timeouts = timeouts or Timeouts()
        self._headers = dict(headers or {})
        register_secret(name, self._api_key)
        register_secret_headers(name, self._headers)
        self._connections = Connections(repr(self), transport, self._timeouts)
        self._has_sdk = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _load_sdk(self) -> Any:
        """Import the SDK and return its module, ``None`` for a provider without one; raise ``ModelError`` if it is missing."""
        return None if self.sdk is None else self.sdk.load()

    @abstractmethod
    def _make_client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        """Create the SDK's client."""

    def check(self, model: str) -> None:
        """
        Raise an error if there is no key or base URL, or if the SDK is not installed; the SDK is not loaded.

        Raises:
            MissingKey: when there is no key.
            ModelError: when the SDK is not installed.
        """
        self._resolve_credentials_and_url()
        if self.sdk is not None and not self._has_sdk:  # cached, because the search for the package is slow
            self.sdk.require_installed()
            self._has_sdk = True

    def get_account(self) -> str:
        """Return a hash of the provider's key, or of the base URL without a key; raise an error without the needed key or URL."""
        credentials, url = self._resolve_credentials_and_url()
        return hash_account(credentials.key, url)

    def _resolve_credentials_and_url(self) -> tuple[Credentials, str]:
        """
        Return the key and the base URL for requests, and register the key for redaction; raise an error if one is missing.

        Raises:
            MissingKey: without a required key, and for a key of the environment that belongs to another host.
            ModelError: without a base URL.
        """
        settings = self.settings()
        default = settings.base_url
        url, elsewhere = resolve_base_url(self._base_url, settings.base_url_variable, default)
        required = self._key_env is not None or (self._key_required and not (elsewhere and default is not None))
        argument = f"{type(self).__name__}(api_key=...)"
        variables = settings.key_variables if self._api_key is None else ()
        # A key is only sent to its own host, because a URL in the environment may point anywhere. If code passes both
        # key_env and base_url, that is an explicit choice.
        is_chosen = self._key_env is not None and self._base_url is not None
        usable = variables if is_chosen else select_key_variables_for_url(self.name, variables, url, default)
        credentials = resolve_key(self.name, self._api_key, usable, is_required=required, argument=argument)
        if credentials.key is None and not usable and find_defined_variable(variables) is not None:
            credentials = Credentials(None, WITHHELD)
        if url is None:
            variable = f" or set {settings.base_url_variable}" if settings.base_url_variable else ""
            msg = f"there is no base URL for {self.name!r}: pass base_url={variable}"
            raise ModelError(msg, kind="missing_base_url")
        register_url_password(self.name, url)
        return credentials, url

    def _get_or_create_clients(self) -> LoopClients:
        """Return the clients of this event loop, created at the first call; install the redaction of keys in logs."""
        clients = self._connections.find_loop_clients()
        if clients is None:
            credentials, base_url = self._resolve_credentials_and_url()
            self._load_sdk()
            http_client = self._connections.create_http_client()
            # Keys may have been set since the process started; they are registered for redaction (reliability:R11).
            GIVEN.add_from_environment(os.environ)
            client = self._make_client(credentials, base_url, http_client)
            clients = LoopClients(client, credentials, http_client, format_address_without_secrets(base_url))
            self._connections.add_loop_clients(clients)
        install_secret_filter()
        return clients

    async def _request_json(self, body: RequestBody, request: ModelRequest) -> Mapping[str, Any]:
        """Send *body* and return the JSON object of the response, for requests other than model calls."""
        async with self._send_body(body, request, stream=False) as exchange:
            return exchange.parse_json_object(await exchange.read_content())

    async def _call_api(
        self, error_subject: str, path: str, content: bytes | None = None, **headers: str
    ) -> Mapping[str, Any]:
        """Send a GET, or a POST of *content*, and return the JSON object of the response; errors name *error_subject* in place of a model."""
        body = RequestBody(content or b"", headers, path=path, is_get=content is None)
        return await self._request_json(body, ModelRequest(f"{self.name}/{error_subject}"))

    async def _fetch_json_lines(self, path: str) -> list[Mapping[str, object]]:
        """Fetch a file of batch results, of at most 256 MB, and return the JSON object of each line."""
        body = RequestBody(b"", path=path, is_get=True)
        async with self._send_body(body, ModelRequest(f"{self.name}/batches"), stream=False) as exchange:
            return parse_json_lines(await exchange.read_content(MAX_RESULTS), exchange.call)

    async def _run_file_operation(self, operation: Callable[[Any], Awaitable[object]]) -> Any:
        """Call *operation* with the SDK's client and return its result; convert its failures to ``ModelError``."""
        ready = self._get_or_create_clients()
        call = RequestLabel(
            provider=self.name, model=f"{self.name}/files", credentials=ready.credentials, address=ready.address
        )
        failure: BaseException
        try:
            async with ready.lease_connections(), asyncio.timeout(self._timeouts.total):
                return await operation(ready.client)
        except TimeoutError:
            failure = make_timeout_error(call, "total", self._timeouts)
        except Exception as error:  # noqa: BLE001 - `_convert_error` returns other errors unchanged
            failure = self._convert_error(error, call)
        raise failure

    async def close(self) -> None:
        """Close the connections of this event loop and of other running loops; running requests end first."""
        await self._connections.close()

    @asynccontextmanager
    async def _send_body(
        self, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> AsyncGenerator[HttpExchange]:
        """Send *body* and yield the response; during the block the connections stay open, even if the provider is closed."""
        ready = self._get_or_create_clients()
        async with ready.lease_connections():
            exchange = await self._start_exchange(ready, body, request, stream=stream)
            try:
                yield exchange
            finally:
                await exchange.response.aclose()

    async def _start_exchange(
        self, ready: LoopClients, body: RequestBody, request: ModelRequest, *, stream: bool
    ) -> HttpExchange:
        """Send *body* and return the response before its body is read; raise failures and timeouts as ``ModelError``."""
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
                response = await self._send_and_open_response(ready.client, body, stream=stream)
        except TimeoutError:
            failure = make_timeout_error(call, limit, timeouts)
        except Exception as error:  # noqa: BLE001 - `_convert_error` returns other errors unchanged
            failure = self._convert_error(error, call)
        else:
            return HttpExchange(response, call, timeouts, started)
        # Raised outside the handler, so that the SDK's error, which holds the key, is not its context (reliability:SC05).
        raise failure

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the ``ModelError`` to raise for an *error* of the SDK or the HTTP library; any other *error* unchanged."""
        return error_from_sdk(error, self._load_sdk(), call)

    async def _send_and_open_response(self, client: Any, body: RequestBody, *, stream: bool) -> object:
        """
        Send *body* and return the HTTP library's response before its body is read.

        The SDK never reads the body, not even of a reply without a stream, so that its size is limited.
        """
        send = client.get if body.is_get else partial(client.post, content=body.content)
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
