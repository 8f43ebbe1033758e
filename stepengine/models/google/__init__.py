"""The adapter for the Gemini API through google-genai."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import quote

from stepengine.data.models import ModelRequest
from stepengine.errors import ModelError
from stepengine.models._api import NO_KEY, RequestBody, require_batch_id
from stepengine.models._byte_reader import Accumulator
from stepengine.models._failures import RequestLabel, error_from_body, error_from_response, error_from_transport
from stepengine.models._http import HttpProvider
from stepengine.models._json import find_object, find_objects, find_text, parse_token_count
from stepengine.models._sdks import GOOGLE
from stepengine.models._settings import warn_once
from stepengine.models._thinking_levels import encode_thinking_for_gemini
from stepengine.models._wire import ToolsCache, resolve_tool_choice
from stepengine.models.base import BatchMember, ModelInfo, ProviderSettings, Timeouts
from stepengine.models.google import transport
from stepengine.models.google.decode import GoogleAccumulator
from stepengine.models.google.encode import parse_generation
from stepengine.models.google.request import (
    CIRCULATES_SINCE,
    encode,
    encode_provider_settings,
    encode_token_count_request,
    encode_tool,
    has_guaranteed_strict_tool,
    make_request_path,
)
from stepengine.models.keys import Credentials, Secret

__all__ = ("GoogleProvider",)


ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"})
LOST = {"CANCELLED": "canceled", "EXPIRED": "expired"}


def _parse_batch_result(answer: Mapping[str, object]) -> Mapping[str, Any]:
    """Return the result in an inlined response, in the form for ``decode_batch_reply``; ``{}`` for an unknown form."""
    match answer:
        case {"response": Mapping() as response}:
            return {"reply": response}
        case {"error": Mapping() as error}:
            return {"error": error}
        case _:
            return {}


class GoogleProvider(HttpProvider):
    """
    Gemini models through the Gemini Developer API.

    Args:
        api_key: The key; by default from ``GOOGLE_API_KEY``, else ``GEMINI_API_KEY``.
        base_url: Another server; by default from ``GOOGLE_GEMINI_BASE_URL``. With one, no key is required.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        api_version: Such as ``"v1beta"``, which knows aliases like ``gemini-flash-latest``; by default the SDK's own.
        name: The provider name that is stored with ids, signatures and opaque parts.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own.
    """

    model_patterns: tuple[str, ...] = (r"gemini-.+", r"models/gemini-.+")
    sdk = GOOGLE
    accumulator: ClassVar[type[Accumulator]] = GoogleAccumulator
    path = ""
    count_member = "totalTokens"
    is_vertex: ClassVar[bool] = False

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: object = None,
        *,
        api_version: str | None = None,
        name: str = "google",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        key_env: str | None = None,
    ) -> None:
        super().__init__(name, api_key, base_url, transport, timeouts=timeouts, headers=headers, key_env=key_env)
        self._api_version = api_version
        self._tools = ToolsCache(encode_tool)
        self._described: dict[str, ModelInfo] = {}

    def settings(self) -> ProviderSettings:
        """Return the sources of the provider's key and base URL."""
        return ProviderSettings(
            key_variables=(self._key_env,) if self._key_env else ("GOOGLE_API_KEY", "GEMINI_API_KEY"),
            base_url_variable="GOOGLE_GEMINI_BASE_URL",
            base_url="https://generativelanguage.googleapis.com",
            given_url=self._base_url,
        )

    def _make_client(self, credentials: Credentials, base_url: str, http_client: object) -> Any:
        """Create Google's clients with the key, or a placeholder without one."""
        key = NO_KEY if credentials.key is None else credentials.key.reveal()
        access = {"api_key": key, "vertexai": False}
        return transport.create_clients(self._load_sdk(), access, base_url, self._api_version, http_client)

    def _convert_error(self, error: Exception, call: RequestLabel) -> BaseException:
        """Return the error to raise for *error*, an ``APIError`` of the SDK or an error of the HTTP library."""
        if isinstance(error, self._load_sdk().errors.APIError):
            return error_from_response(error.response, call)
        return error_from_transport(error, call)

    async def _send_and_open_response(self, client: Any, body: RequestBody, *, stream: bool) -> object:
        """Send *body* with the SDK's URL and headers, and return the response before its body is read."""
        return await transport.send_with_sdk_headers(
            client, body.path, None if body.is_get else body.content, body.headers
        )

    async def describe(self, model: str) -> ModelInfo:
        """
        Query the API once for the context window, the largest output and the thinking support of *model*.

        Raises:
            ModelError: when the query fails, such as for an unknown model.
        """
        model = self.strip_prefix(model)
        if model not in self._described:
            told = await self._call_api(model, quote(make_request_path(model, "")[:-1]))
            thinks = told.get("thinking")
            self._described[model] = ModelInfo(
                parse_token_count(told.get("inputTokenLimit")),
                parse_token_count(told.get("outputTokenLimit")),
                thinking=("thinking",) if thinks is True else () if thinks is False else None,
            )
        return self._described[model]

    def encode_batch_member(self, request: ModelRequest) -> BatchMember:
        """
        Encode *request* for a batch; all requests of a batch have the same model.

        Raises:
            ModelError: when the request cannot be sent.
        """
        return BatchMember(request, request.model, self._encode_for_batch(request).content)

    async def submit_batch(self, members: Mapping[str, BatchMember]) -> str:
        """
        Send requests together and return the name of their batch.

        Raises:
            ModelError: when the API rejects them.
        """
        parts = [
            b'{"request":%s,"metadata":{"key":"%s"}}' % (member.content, name.encode())
            for name, member in members.items()
        ]
        model = self.strip_prefix(next(iter(members.values())).request.model)
        content = b'{"batch":{"displayName":"stepengine","inputConfig":{"requests":{"requests":[%s]}}}}' % b",".join(
            parts
        )
        answer = await self._call_api("batches", make_request_path(model, "batchGenerateContent"), content)
        return require_batch_id(self.name, answer, "name")

    async def fetch_batch_results(self, batch: str) -> Mapping[str, object] | None:
        """
        Return the result of each request of a batch by name, ``None`` while it is not done; raise ``ModelError`` if the whole batch failed.

        Raises:
            ModelError: when the query fails, or the batch failed as a whole.
        """
        told = await self._call_api("batches", f"batches/{quote(batch.rpartition('/')[2], safe='')}")
        about = find_object(told, "metadata")
        state = str(about.get("state")).rpartition("_STATE_")[2]
        if state not in ENDED:
            return None
        if state == "FAILED":
            call = RequestLabel(
                provider=self.name, model=f"{self.name}/batches", credentials=self._get_or_create_clients().credentials
            )
            raise error_from_body({"error": told.get("error")}, None, {}, call)
        results: dict[str, object] = {} if state not in LOST else {"": {"ended": LOST[state]}}
        for place in (about.get("output"), told.get("response")):
            for answer in find_objects(place, "inlinedResponses", "inlinedResponses"):
                # Results without a name are dropped: the name "" is for all requests.
                if name := find_text(answer, "metadata", "key"):
                    results[name] = _parse_batch_result(answer)
        return results

    async def upload(self, data: bytes, *, mime_type: str, name: str = "", expires_in: int | None = None) -> str:
        """
        Upload a file, wait until the API has processed it, and return its URL, which is the id of the file in requests.

        Raises:
            ModelError: when the upload fails, and for *expires_in*: the API stores every file for 48 hours.
        """
        if expires_in is not None:
            msg = f"{self.name} stores every file for 48 hours; omit expires_in=, and delete the file after use"
            raise ModelError(msg, kind="settings")
        held = await self._run_file_operation(
            lambda to: transport.upload_file_and_wait(to, data, mime_type, name, self._headers)
        )
        if held.state != "ACTIVE" or not held.uri:
            msg = f"{self.name} could not read the file {name!r} of type {mime_type!r}: its state is {held.state}"
            raise ModelError(msg, kind="unsupported_part")
        return str(held.uri)

    async def delete_file(self, file_id: str) -> None:
        """
        Delete an uploaded file.

        Raises:
            ModelError: when the API does not delete it, such as for an unknown file.
        """
        await self._run_file_operation(lambda at: transport.delete_uploaded_file(at, file_id, self._headers))

    def _explain_unsupported_schema(self, request: ModelRequest) -> str:
        """Return a reason if the model is older than Gemini 3 and *request* has tools; else ``""``."""
        if request.tools and parse_generation(self.strip_prefix(request.model)) < CIRCULATES_SINCE:
            return "models before Gemini 3 do not accept a schema together with tools"
        return ""

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that the model does not support."""
        model = self.strip_prefix(request.model)
        dropped = [*encode_provider_settings(request, model, is_vertex=self.is_vertex).dropped]
        choice = resolve_tool_choice(request)
        if request.tools and request.settings.parallel_tool_calls is False:
            dropped.append("parallel_tool_calls")
        if any(tool.strict for tool in request.tools) and not has_guaranteed_strict_tool(request, model):
            dropped.append("strict")
        if choice not in {None, "auto"} and not request.tools:
            dropped.append("tool_choice")
        return tuple(dropped)

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request*; after a rejected signature (*previous_failure*), omit earlier thoughts and signatures."""
        request = self._select_tools_and_add_answer_tool(request, previous_failure)
        model = self.strip_prefix(request.model)
        warn_once(encode_thinking_for_gemini(request.settings.thinking, model).note)
        tools, is_vertex = self._tools(request.tools), self.is_vertex
        content = encode(request, model, self.name, tools, previous_failure=previous_failure, is_vertex=is_vertex)
        method = "streamGenerateContent?alt=sse" if stream else "generateContent"
        return RequestBody(content, path=make_request_path(model, method, is_vertex=is_vertex))

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody:
        request = self._select_tools_and_add_answer_tool(request)
        model = self.strip_prefix(request.model)
        content = encode_token_count_request(
            request, model, self.name, self._tools(request.tools), is_vertex=self.is_vertex
        )
        return RequestBody(content, path=make_request_path(model, "countTokens", is_vertex=self.is_vertex))
