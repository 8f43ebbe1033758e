"""Ready SDK clients over one transport, for tests of code that uses the SDKs itself (replay C20-C28, Y4)."""

from __future__ import annotations

from functools import cached_property
from types import TracebackType
from typing import Any, Self

__all__ = ("Clients",)

GOOGLE_VERSION = "v1beta"


class Clients:
    """
    Clients of the three SDKs that reach nothing but one transport; each is made when it is first asked for.

    Base URLs are the providers' own, whatever the environment says, so that a recording fits everywhere. The SDKs do not
    try again: a replay must not wait (replay C26, C27).

    Args:
        transport: A sync and async transport of httpx2, such as ``ReplayTransport(cassette)``.
        key: The API key; ``None`` leaves it to the SDKs, which look into the environment.
    """

    def __init__(self, transport: Any, key: str | None = "replay") -> None:
        self._transport = transport
        self._key = key

    @cached_property
    def _http(self) -> Any:
        import httpx2

        return httpx2.Client(transport=self._transport)

    @cached_property
    def _async_http(self) -> Any:
        import httpx2

        return httpx2.AsyncClient(transport=self._transport)

    @cached_property
    def anthropic(self) -> Any:
        """An ``anthropic.Anthropic``."""
        return self._anthropic("Anthropic", self._http)

    @cached_property
    def async_anthropic(self) -> Any:
        """An ``anthropic.AsyncAnthropic``."""
        return self._anthropic("AsyncAnthropic", self._async_http)

    @cached_property
    def openai(self) -> Any:
        """An ``openai.OpenAI``."""
        return self._openai("OpenAI", self._http)

    @cached_property
    def async_openai(self) -> Any:
        """An ``openai.AsyncOpenAI``."""
        return self._openai("AsyncOpenAI", self._async_http)

    @cached_property
    def google(self) -> Any:
        """A ``google.genai.Client``; its async side is ``google.aio``. Both sides use the transport (replay C25)."""
        from stepengine.models.google import GoogleProvider

        provider = GoogleProvider("replay")
        sdk = provider._sdk()  # noqa: SLF001 - it alone may import the SDK
        options = sdk.types.HttpOptions(
            base_url=provider.settings().base_url,
            api_version=GOOGLE_VERSION,
            httpx_client=self._http,
            httpx_async_client=self._async_http,
        )
        return sdk.Client(api_key=self._key, vertexai=False, http_options=options)

    def _anthropic(self, name: str, http_client: Any) -> Any:
        from stepengine.models.anthropic import AnthropicProvider

        return self._client(AnthropicProvider("replay"), name, http_client)

    def _openai(self, name: str, http_client: Any) -> Any:
        from stepengine.models.openai import OpenAIProvider

        return self._client(OpenAIProvider("replay"), name, http_client)

    def _client(self, provider: Any, name: str, http_client: Any) -> Any:
        make = getattr(provider._sdk(), name)  # noqa: SLF001 - it alone may import the SDK
        url = provider.settings().base_url
        return make(api_key=self._key, base_url=url, max_retries=0, http_client=http_client)

    def close(self) -> None:
        """Give back the connections of the sync clients."""
        self._http.close()

    async def aclose(self) -> None:
        """Give back the connections of all clients."""
        self.close()
        await self._async_http.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
