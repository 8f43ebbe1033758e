"""The adapter for Gemini's Interactions API, for models and tools that ``generateContent`` does not support."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.models import ModelRequest
from stepengine.models._api import RequestBody
from stepengine.models._settings import warn_once
from stepengine.models._wire import ToolsCache, resolve_tool_choice
from stepengine.models.base import Provider, Timeouts
from stepengine.models.google import GoogleProvider, transport
from stepengine.models.google.interactions.decode import InteractionsAccumulator
from stepengine.models.google.interactions.request import (
    encode,
    encode_provider_settings,
    encode_thinking,
    encode_tool,
)
from stepengine.models.keys import Secret

__all__ = ("GoogleInteractionsProvider",)


class GoogleInteractionsProvider(GoogleProvider):
    """
    Gemini models through the Interactions API: ``google_interactions/gemini-...``.

    Each request contains its whole history, so a run needs only its journal. Google stores nothing unless
    ``ModelSettings(store=True)`` is set. Google's own agents, which run in the background, are not supported.

    Args:
        api_key: The key; by default from ``GOOGLE_API_KEY``, else ``GEMINI_API_KEY``.
        base_url: Another server; by default from ``GOOGLE_GEMINI_BASE_URL``. With one, no key is required.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        api_version: Such as ``"v1beta"``; by default the SDK's own.
        name: The provider name that is stored with ids, signatures and opaque parts.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own.
    """

    model_patterns = ()
    accumulator = InteractionsAccumulator
    encode_batch_member = Provider.encode_batch_member  # raises an error, because the API has no batches

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: object = None,
        *,
        api_version: str | None = None,
        name: str = "google_interactions",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        key_env: str | None = None,
    ) -> None:
        super().__init__(
            api_key,
            base_url,
            transport,
            api_version=api_version,
            name=name,
            timeouts=timeouts,
            headers=headers,
            key_env=key_env,
        )
        self._tools = ToolsCache(encode_tool)

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that the Interactions API does not support."""
        dropped = [*encode_provider_settings(request, self.strip_prefix(request.model), self.name).dropped]
        if request.tools and request.settings.parallel_tool_calls is False:
            dropped.append("parallel_tool_calls")
        if resolve_tool_choice(request) not in {None, "auto"} and not request.tools:
            dropped.append("tool_choice")
        return tuple(dropped)

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request* for the Interactions API, and warn of unsupported thinking options."""
        request, model = (
            self._select_tools_and_add_answer_tool(request, previous_failure),
            self.strip_prefix(request.model).removeprefix("models/"),
        )
        warn_once(encode_thinking(request.settings, model).note)
        content = encode(
            request, model, self.name, self._tools(request.tools), stream=stream, previous_failure=previous_failure
        )
        return RequestBody(content, path=transport.INTERACTIONS)

    def _encode_token_count_request(self, request: ModelRequest) -> Any:
        """Return ``None``, because the API does not count tokens."""
        return None
