"""The adapter for OpenAI's Responses API and for services that speak it, such as xAI."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.server_tools import Programs
from stepengine.models._api import RequestBody
from stepengine.models._cloud_auth import TokenSource
from stepengine.models._preset_provider import PresetProvider
from stepengine.models._programs import merge_programs
from stepengine.models._reply import cut_at_stop_sequence
from stepengine.models._schemas import has_strict_tool_unsupported_by_openai
from stepengine.models._settings import warn_once
from stepengine.models._thinking_levels import encode_thinking_for_responses
from stepengine.models._wire import ToolsCache
from stepengine.models.base import Timeouts
from stepengine.models.keys import Secret
from stepengine.models.openai.decode import ResponsesAccumulator
from stepengine.models.openai.request import (
    TOOL_SEARCH,
    encode,
    encode_provider_settings,
    encode_token_count_request,
    encode_tool,
    has_extra_tool_search,
)

__all__ = ("OpenAIProvider",)

MOST_WAYS = 32
"""The number of cached encodings of tools."""


class OpenAIProvider(PresetProvider):
    """
    Models through OpenAI's Responses API, with nothing stored at the provider.

    The API has no stop sequences, so replies are cut at them here. A thinking budget becomes an effort.

    Args:
        api_key: The key; by default from ``OPENAI_API_KEY``.
        base_url: Another server; by default from ``OPENAI_BASE_URL``. With one, no key is required.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        name: The preset, such as ``"xai"``; it is stored with ids, reasoning and opaque items.
        key_env: The environment variable that holds the key, in place of the preset's own.
        timeouts: Time limits of calls; by default those of the preset.
        headers: HTTP headers to send with every request.
        token_provider: A function that returns a token for each request, in place of a key, as for every preset provider.
    """

    accumulator = ResponsesAccumulator
    path = "/responses"

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: object = None,
        *,
        name: str = "openai",
        key_env: str | None = None,
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        token_provider: TokenSource | None = None,
    ) -> None:
        super().__init__(
            name,
            api_key,
            base_url,
            key_env,
            transport,
            timeouts=timeouts,
            headers=headers,
            token_provider=token_provider,
        )
        self._tools: dict[tuple[Programs | None, bool], ToolsCache] = {}

    def _encode_tools_cached(self, request: ModelRequest) -> bytes:
        """Return the encoded tools, cached for each combination of programs and tool search."""
        programs, search = merge_programs(request.settings), None if has_extra_tool_search(request) else TOOL_SEARCH
        key = (programs, search is None)
        if key not in self._tools:
            if len(self._tools) >= MOST_WAYS:
                self._tools.clear()
            self._tools[key] = ToolsCache(partial(encode_tool, programs=programs), search=search)
        return self._tools[key](request.tools)

    def _supports_tool_search(self, model: str) -> bool:
        """Return whether the service has a tool search for *model*, by the pattern of the preset."""
        return bool(self._preset.searches and re.match(self._preset.searches, model))

    def _list_unsupported_settings(self, request: ModelRequest) -> tuple[str, ...]:
        """Return the names of the settings of *request* that the service does not support."""
        dropped = encode_provider_settings(request, self.strip_prefix(request.model), self._preset).dropped
        return (*dropped, "strict") if has_strict_tool_unsupported_by_openai(request.tools) else dropped

    def _encode(self, request: ModelRequest, *, stream: bool, previous_failure: str = "") -> RequestBody:
        """Encode *request* for the Responses API, and warn of unsupported thinking options."""
        request = self._select_tools_and_add_answer_tool(request, previous_failure)
        model, tools = self.strip_prefix(request.model), self._encode_tools_cached(request)
        warn_once(encode_thinking_for_responses(request.settings.thinking, self._preset.thinking, model).note)
        return RequestBody(
            encode(request, model, self._preset, tools, stream=stream, previous_failure=previous_failure)
        )

    def _encode_token_count_request(self, request: ModelRequest) -> RequestBody:
        request = self._select_tools_and_add_answer_tool(request)
        content = encode_token_count_request(
            request, self.strip_prefix(request.model), self._preset, self._encode_tools_cached(request)
        )
        return RequestBody(content, path=f"{self.path}/input_tokens")

    def _postprocess_reply(self, reply: ModelReply, request: ModelRequest) -> ModelReply:
        """Return *reply* cut at its first stop sequence, because the API has none."""
        return cut_at_stop_sequence(reply, request.settings.stop_sequences)
