"""
A server behind an address: the client of its requests, and what its refusals mean.

The package tells no status of a request that failed, so it is noted here as it comes in.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from stepengine.data.visible import visible
from stepengine.mcp._caps import CHALLENGE_CHARS
from stepengine.tooling.conversion import cut

__all__ = ("Answers",)

TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
"""Refusals that another try may not meet."""
SIGN_IN = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
GIVE = "mcp_tools(headers={'Authorization': 'Bearer ...'})"


class Answers:
    """
    What an endpoint answers to requests.

    Args:
        url: The endpoint.
        headers: What goes with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._status = 0
        self._challenge = ""

    @asynccontextmanager
    async def opened(self) -> Any:
        """Give the streams to the endpoint."""
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with create_mcp_http_client(headers=self._headers) as client:
            client.event_hooks["response"].append(self._noted)
            async with streamable_http_client(self._url, http_client=client) as streams:
                yield streams

    async def _noted(self, response: Any) -> None:
        """Take note of the answer to a message; many servers refuse the stream beside them, which they need not have."""
        if response.request.method == "POST":
            self._status = response.status_code
            self._challenge = response.headers.get("www-authenticate", "")

    @property
    def is_about_sign_in(self) -> bool:
        """Whether the last message was refused for who sent it."""
        return self._status in SIGN_IN

    @property
    def failure(self) -> str:
        """The status of the last answer in words; ``""`` when it was none of a failure."""
        status = self._status
        phrase = f" {HTTPStatus(status).phrase}" if status in [*HTTPStatus] else ""
        return f"it answered {status}{phrase}" if status >= HTTPStatus.BAD_REQUEST else ""

    @property
    def refusal(self) -> str:
        """Why the last message was refused, in words, with what helps; ``""`` for none that stays as it is."""
        status = self._status
        if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR or status in TRANSIENT:
            return ""
        said = visible(cut(self._challenge, CHALLENGE_CHARS), strict=True)
        return f"{self.failure}{f' ({said})' if said else ''}{self._remedy()}"

    def _remedy(self) -> str:
        has_token = any(name.lower() == "authorization" for name in self._headers)
        if self._status == HTTPStatus.UNAUTHORIZED:
            if has_token:
                return "; the token in headers= is not one that it takes, or is no longer: get another one"
            return f"; it has to be signed in to, which is not done here: get a token, and give it with {GIVE}"
        if self._status == HTTPStatus.FORBIDDEN:
            what = "the token in headers= may not do this" if has_token else f"it may want a token, given with {GIVE}"
            return f"; {what}"
        if self._status == HTTPStatus.NOT_FOUND:
            return "; nothing that speaks MCP is at this address, which often ends in /mcp"
        return ""
