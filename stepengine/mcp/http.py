"""
A server behind an address: the client of its requests, and what its refusals mean.

The package tells no status of a request that failed, so it is noted here as it comes in: by the request, since several are
under way at once. The package sends each in the context of whoever asked, and so the note finds its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

import attrs

from stepengine.data.visible import visible
from stepengine.mcp._caps import CHALLENGE_CHARS
from stepengine.tooling.conversion import cut

__all__ = ("ANSWER", "Answer", "Answers")

TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
"""Refusals that another try may not meet."""
SIGN_IN = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
GIVE = "mcp_tools(headers={'Authorization': 'Bearer ...'})"


@attrs.define(eq=False)
class Answer:
    """
    The status of an answer, and what it says of signing in.

    Attributes:
        status: The status; 0 before there is one.
        challenge: Its header ``www-authenticate``.
    """

    status: int = 0
    challenge: str = ""


ANSWER: ContextVar[Answer | None] = ContextVar("stepengine_mcp_answer", default=None)
"""Where the answer to the request is noted that is sent now; ``None`` for the greeting."""


class Answers:
    """
    What an endpoint answers to requests.

    Each of its words is about one of them: *answer*, by default the last that came.

    Args:
        url: The endpoint.
        headers: What goes with every request.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._last = Answer()

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
            challenge = response.headers.get("www-authenticate", "")
            for answer in (self._last, ANSWER.get() or self._last):
                answer.status, answer.challenge = response.status_code, challenge

    def is_about_sign_in(self, answer: Answer) -> bool:
        """Return whether a message was refused for who sent it."""
        return answer.status in SIGN_IN

    def failure(self, answer: Answer | None = None) -> str:
        """Return the status in words; ``""`` when it was none of a failure."""
        status = (answer or self._last).status
        phrase = f" {HTTPStatus(status).phrase}" if status in [*HTTPStatus] else ""
        return f"it answered {status}{phrase}" if status >= HTTPStatus.BAD_REQUEST else ""

    def refusal(self, answer: Answer | None = None) -> str:
        """Return why a message was refused, in words, with what helps; ``""`` for none that stays as it is."""
        answer = answer or self._last
        status = answer.status
        if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR or status in TRANSIENT:
            return ""
        said = visible(cut(answer.challenge, CHALLENGE_CHARS), strict=True)
        return f"{self.failure(answer)}{f' ({said})' if said else ''}{self._remedy(status)}"

    def _remedy(self, status: int) -> str:
        has_token = any(name.lower() == "authorization" for name in self._headers)
        if status == HTTPStatus.UNAUTHORIZED:
            if has_token:
                return "; the token in headers= is not one that it takes, or is no longer: get another one"
            return f"; it has to be signed in to, which is not done here: get a token, and give it with {GIVE}"
        if status == HTTPStatus.FORBIDDEN:
            what = "the token in headers= may not do this" if has_token else f"it may want a token, given with {GIVE}"
            return f"; {what}"
        if status == HTTPStatus.NOT_FOUND:
            return "; nothing that speaks MCP is at this address, which often ends in /mcp"
        return ""
