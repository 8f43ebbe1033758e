"""``OwnedSessions``: a bound of the sessions that each owner has at an MCP server over HTTP; the SDK bounds only all together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

SESSIONS_PER_OWNER = 100
"""A client opens one. The SDK allows 10,000 in all, so an owner leaves nearly all of them to others."""
SESSION_HEADER = b"mcp-session-id"
HTTP_OK_BELOW = 300
"""A status below it says that a session was opened, or ended."""

Handler: TypeAlias = Callable[[Any, Any, Any], Awaitable[None]]


class OwnedSessions:
    """
    Passes requests to an ASGI handler, and ends sessions of an owner that opens more than it may have.

    The session that was used least recently ends; one with a request under way stays. How many of these there are is
    bounded by the connections that an owner may have.

    Args:
        handle: The handler of the SDK, which adds the user to the scope.
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        # Requests under way by session, of each owner; the session that was used least recently comes first.
        self._sessions: dict[str, dict[str, int]] = {}

    async def forward_request(self, scope: Any, receive: Any, send: Any, *, owner: str) -> None:
        """Answer a request of *owner*, and end its oldest sessions if it opened one too many."""
        sessions = self._sessions.setdefault(owner, {})
        session = _find_session_id(scope["headers"])
        status = 0

        async def watch_for_new_session(message: Any) -> None:
            """Pass on a message of the response; store the id of a session that it opens, and end the oldest idle sessions."""
            nonlocal session, status
            if message["type"] == "http.response.start":
                status, opened = message["status"], _find_session_id(message.get("headers", ()))
                if session is None and opened is not None and status < HTTP_OK_BELOW:
                    session = opened
                    sessions[session] = 1
                    await self._end_oldest_idle_sessions(scope, sessions)
            await send(message)

        if session in sessions:
            sessions[session] = sessions.pop(session) + 1
        try:
            await self._handle(scope, receive, watch_for_new_session)
        finally:
            if session is not None and session in sessions:
                sessions[session] -= 1
                if scope["method"] == "DELETE" and status < HTTP_OK_BELOW:
                    del sessions[session]

    async def _end_oldest_idle_sessions(self, scope: Any, sessions: dict[str, int]) -> None:
        """End the oldest sessions without a running request until an owner has at most the allowed number."""
        idle = [one for one, under_way in sessions.items() if not under_way]
        for one in idle[: max(0, len(sessions) - SESSIONS_PER_OWNER)]:
            del sessions[one]
            # As its client would end it. One that has ended for its time already answers 404.
            headers = [(SESSION_HEADER, one.encode("latin-1"))]
            await self._handle({**scope, "method": "DELETE", "headers": headers}, _receive_empty_body, _ignore_message)


def _find_session_id(headers: Any) -> str | None:
    return next((value.decode("latin-1") for name, value in headers if name.lower() == SESSION_HEADER), None)


async def _receive_empty_body() -> dict[str, Any]:
    """Return an empty request body, as ASGI's ``receive``."""
    return {"type": "http.request", "body": b"", "more_body": False}


async def _ignore_message(_message: Any) -> None:
    """Ignore the message."""
