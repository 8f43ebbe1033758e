"""The adapter for Chat Completions: OpenAI, OpenRouter, Ollama, vLLM, and whatever else speaks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.data.models import ModelReply, ModelRequest
from stepengine.errors import ModelError
from stepengine.models._failures import Call
from stepengine.models._http import NO_KEY, Body, HttpProvider
from stepengine.models._wire import ToolsCache
from stepengine.models.keys import Credentials, Secret
from stepengine.models.openai_chat.decode import ChatAccumulator, decode
from stepengine.models.openai_chat.encode import encode, encode_tool
from stepengine.models.openai_chat.presets import preset_of

__all__ = ("OpenAIChatProvider",)


class OpenAIChatProvider(HttpProvider):
    """
    Models behind an OpenAI-compatible Chat Completions endpoint.

    *name* picks what is known of the server: ``"openrouter"``, ``"ollama"``, ``"vllm"``, ``"openai_chat"`` (OpenAI
    itself), or ``"openai"``, which also goes to Chat Completions as long as this package has no adapter for OpenAI's
    Responses API. Any other name, and ``"openai_chat"`` with a *base_url*, is a server that nothing is known of.

    Args:
        name: The provider's name; ids and thinking are kept and sent back under it.
        api_key: The key; by default from the environment variable of the server, such as ``OPENROUTER_API_KEY``.
        base_url: Another address; by default from the environment. With one, no key is demanded.
        key_env: The environment variable that holds the key, in place of the server's own.
        transport: An ``httpx2.AsyncBaseTransport`` in place of the network, for replay and tests.
    """

    path = "/chat/completions"

    def __init__(
        self,
        name: str = "openai_chat",
        api_key: str | Secret | None = None,
        base_url: str | None = None,
        key_env: str | None = None,
        transport: Any = None,
    ) -> None:
        super().__init__(name, api_key, base_url, transport)
        self._preset = preset_of(name, base_url)
        self._key_env = key_env
        self._tools = ToolsCache(encode_tool)
        self.model_patterns = self._preset.model_patterns

    @property
    def _home(self) -> tuple[str | None, str | None]:
        return self._preset.base_url_variable, self._preset.base_url

    @property
    def _key_variables(self) -> tuple[str, ...]:
        variable = self._key_env or self._preset.key_variable
        return (variable,) if variable else ()

    @property
    def _key_required(self) -> bool:
        return self._preset.key_required or self._key_env is not None

    def _sdk(self) -> Any:
        try:
            import openai
        except ImportError:
            msg = "the package 'openai' is not installed: pip install 'stepengine[openai]'"
            raise ModelError(msg, kind="missing_sdk") from None
        return openai

    def _client(self, credentials: Credentials, base_url: str, http_client: Any) -> Any:
        client = self._sdk().AsyncOpenAI(
            api_key=NO_KEY if credentials.key is None else credentials.key.reveal(),
            base_url=base_url,
            max_retries=0,
            timeout=http_client.timeout,
            http_client=http_client,
        )
        if self._preset.key_variable != "OPENAI_API_KEY":
            # Read from the environment by the SDK; another company's server has no business with them.
            client.organization = client.project = None
        return client

    def _encode(self, request: ModelRequest, *, stream: bool) -> Body:
        tools = self._tools(request.tools)
        return Body(encode(request, self.bare(request.model), self._preset, tools, stream=stream))

    def _accumulator(self, request: ModelRequest, call: Call, request_id: str | None) -> ChatAccumulator:
        return ChatAccumulator(call, self.bare(request.model), request_id)

    def _decode(self, data: Mapping[str, Any], request: ModelRequest, call: Call, request_id: str | None) -> ModelReply:
        return decode(data, call, self.bare(request.model), request_id)
