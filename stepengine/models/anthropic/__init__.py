"""The adapter for Anthropic's Messages API and for servers that speak it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cache
from typing import Any, Literal, cast

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.errors import ModelError
from stepengine.models._http import NO_KEY, Body, HttpProvider
from stepengine.models._reading import Timeouts
from stepengine.models._wire import ToolsCache
from stepengine.models.anthropic.request import (
    BINDING_BETA,
    Ways,
    binds_thinking,
    encode,
    encode_count,
    encode_tool,
    limit_of,
    offered,
    thinks_anyway,
)
from stepengine.models.anthropic.stream import AnthropicAccumulator
from stepengine.models.base import ProviderSettings
from stepengine.models.keys import Credentials, Secret

__all__ = ("AnthropicProvider",)

logger = logging.getLogger("stepengine.models")

SAMPLING_VERSION = "2023-06-01"
"""The last API version that takes ``temperature`` and ``top_p``; newer ones answer 400 (ecosystem EC92)."""

MAX_UNSTREAMED = 21_333
"""Output tokens above which a reply may take longer than the ten minutes that the API gives to one without a stream."""


class AnthropicProvider(HttpProvider):
    """
    Claude models through Anthropic's Messages API.

    Temperature and top-p are not sent unless the request sets them; then the request asks for the last API version that
    takes them, and models that refuse them say so.

    Args:
        api_key: The key; by default from ``ANTHROPIC_API_KEY`` or ``ANTHROPIC_AUTH_TOKEN``.
        base_url: Another server; by default from ``ANTHROPIC_BASE_URL``. With one, no key is demanded.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
        max_tokens: The output limit of requests that set none; the largest output of the model by default, as far as it is
            known, else 8,192. The API demands a limit, and thinking counts.
        prompt_cache: Whether the API shall cache tools, system prompt and messages, and for how long: true is five
            minutes, ``"1h"`` an hour.
        name: The name under which ids, signatures and opaque parts are kept and sent back.
        timeouts: How long calls may take.
        headers: HTTP headers to send with every request.
        key_env: The environment variable that holds the key, in place of the provider's own.
    """

    model_patterns = (r"claude-.+",)
    accumulator = AnthropicAccumulator
    path = "/v1/messages"

    def __init__(
        self,
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        transport: Any = None,
        *,
        max_tokens: int | None = None,
        prompt_cache: bool | Literal["5m", "1h"] = True,
        name: str = "anthropic",
        timeouts: Timeouts | None = None,
        headers: Mapping[str, str] | None = None,
        key_env: str | None = None,
    ) -> None:
        super().__init__(name, api_key, base_url, transport, timeouts=timeouts, headers=headers, key_env=key_env)
        cache: Literal["5m", "1h"] | None = "5m" if prompt_cache is True else prompt_cache or None
        self._ways = Ways(provider=name, max_tokens=max_tokens, cache=cache)
        mark = self._ways.mark
        self._tools = ToolsCache(encode_tool, {"cache_control": mark} if mark else None)
        self._plain_tools = ToolsCache(encode_tool)

    def settings(self) -> ProviderSettings:
        """Return where its key and address come from."""
        return ProviderSettings(
            key_variables=(self._key_env,) if self._key_env else ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"),
            base_url_variable="ANTHROPIC_BASE_URL",
            base_url="https://api.anthropic.com",
            given_url=self._base_url,
        )

    def _sdk(self) -> Any:
        try:
            import anthropic
        except ImportError:
            msg = "the package 'anthropic' is not installed: pip install 'stepengine[anthropic]'"
            raise ModelError(msg, kind="missing_sdk") from None
        return anthropic

    def _client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        return self._sdk().AsyncAnthropic(
            api_key=NO_KEY if credentials.key is None else credentials.key.reveal(),
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
            open_telemetry=False,
        )

    async def complete(self, request: ModelRequest) -> ModelReply:
        """
        Return the reply to *request*; one that may take long is streamed, as an idle connection would be dropped.

        Raises:
            ModelError: when there is none.
        """
        if limit_of(request, self.bare(request.model), self._ways) <= MAX_UNSTREAMED:
            return await super().complete(request)
        async with aclosing(cast("AsyncGenerator[ModelDelta]", self.stream(request))) as deltas:
            replies = [delta.reply async for delta in deltas if isinstance(delta, ReplyDone)]
        return replies[-1]

    def _encode(self, request: ModelRequest, *, stream: bool, after: str = "") -> Body:
        model = self.bare(request.model)
        if thinks_anyway(request, model):
            _warn_of_thinking(model)
        tools = self._tools(offered(request, model))
        content = encode(request, model, self._ways, tools, stream=stream, after=after)
        headers: dict[str, str] = {}
        if request.settings.temperature is not None or request.settings.top_p is not None:
            headers["anthropic-version"] = SAMPLING_VERSION
        if binds_thinking(request, model):
            headers["anthropic-beta"] = BINDING_BETA
        return Body(content, headers)

    def _encode_count(self, request: ModelRequest) -> Body:
        tools = self._plain_tools(offered(request, self.bare(request.model)))
        content = encode_count(request, self.bare(request.model), self._ways, tools)
        return Body(content, path=f"{self.path}/count_tokens")


@cache
def _warn_of_thinking(model: str) -> None:
    """Say it once for each model of a process."""
    logger.warning("%s cannot be kept from thinking; Thinking('none') asks it for low effort", model)
