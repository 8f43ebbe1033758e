"""
The HTTP client for a server with a URL, and descriptions of its error responses.

The package does not report the status of a failed request, so it is recorded here when the response arrives, for each request, since
several are concurrent. The package sends each request in the context of its caller, by which the record finds the request.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from functools import partial
from http import HTTPStatus
from typing import Any

import attrs

from stepengine.adapters.mcp._caps import CHALLENGE_CHARS, LINE_BYTES
from stepengine.adapters.mcp.lenient_messages import MessageRepair
from stepengine.data.json import JsonValue
from stepengine.data.visible import cut_middle, visible

TRANSIENT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_EARLY, HTTPStatus.TOO_MANY_REQUESTS)
"""Refusals that another try may not meet."""
PACKED_BYTES = LINE_BYTES // 1024
"""How much is taken of a reply that is packed although that was not asked for: it may unpack to a thousand times as much."""
REQUEST_SECONDS, READ_SECONDS = 30.0, 300.0
"""Time-outs of the HTTP client; a server may hold a stream of notifications open without a word."""
SIGN_IN = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
GIVE = "mcp_tools(headers={'Authorization': 'Bearer ...'})"
SIGN = "mcp_tools(auth=...), such as an OAuthClientProvider of the package mcp"


@attrs.define(eq=False)
class HttpAnswer:
    """
    The status of a response, and its instructions for signing in.

    Attributes:
        status: The status; 0 before there is one.
        challenge: Its header ``www-authenticate``.
    """

    status: int = 0
    challenge: str = ""


ANSWER: ContextVar[HttpAnswer | None] = ContextVar("stepengine_mcp_answer", default=None)
"""Stores the status of the response to the current request; ``None`` during initialization."""


@attrs.frozen
class McpRun:
    """
    The run on whose behalf a request is sent to an MCP server.

    Attributes:
        id: The run's id.
        owner: The user of the run, its ``user_id``; ``""`` if it has none.
        params: The run's params as JSON; ``None`` if it has none.
    """

    id: str = ""
    owner: str = ""
    params: JsonValue = None


NO_RUN = McpRun()
RUN: ContextVar[McpRun] = ContextVar("stepengine_mcp_run", default=NO_RUN)
"""The run whose request is being sent."""


ELSE = "its reply is a message of the protocol, and none to what was asked"


async def _run_header_auth_flow(make_headers: Callable[[McpRun], Any], request: Any) -> AsyncGenerator[Any, Any]:
    """Send a request with the run's headers from *make_headers*; after 401, send it once more if they are other headers now."""
    before: dict[str, str] | None = None
    for _ in range(2):
        given = make_headers(RUN.get())
        headers = dict(await given if inspect.isawaitable(given) else given)
        if headers == before:
            return
        before = headers
        request.headers.update(headers)
        response = yield request
        if response.status_code != HTTPStatus.UNAUTHORIZED:
            return


class _ReplyTooLong(Exception):
    """A reply exceeds the byte limit."""


async def _read_capped_body(response: Any) -> None:
    """
    Read the body of *response*, up to a limit that is far lower for compressed bodies.

    Raises:
        _ReplyTooLong: when it has more; the body of the response is an empty object then.
    """
    import httpx2

    stream, content = response.stream, bytearray()
    packed = response.headers.get("content-encoding", "").strip().lower() not in ("", "identity")
    most = PACKED_BYTES if packed else LINE_BYTES
    try:
        async for chunk in stream:
            content += chunk
            if len(content) > most:
                response.headers.pop("content-encoding", None)
                content = bytearray(b"{}")
                how = f"{most // 1024:,} KiB, packed, which was not asked for" if packed else f"{most // 1024:,} KiB"
                msg = f"its reply has more than {how}"
                raise _ReplyTooLong(msg)
    finally:
        response.stream = httpx2.ByteStream(bytes(content))
        await stream.aclose()


def _wrap_event_lines(response: Any, repair_line: Callable[[bytes], bytes]) -> None:
    """Pass each line of a stream of events through *repair_line* before the package reads it."""
    import httpx2

    stream = response.stream
    if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        return

    class Lines(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncGenerator[bytes, None]:
            begun = bytearray()
            async for chunk in stream:
                *lines, rest = bytes(chunk).split(b"\n")
                for line in lines:
                    yield repair_line(bytes(begun + line).removesuffix(b"\r")) + b"\n"
                    begun.clear()
                begun += rest
            yield bytes(begun)

        async def aclose(self) -> None:
            await stream.aclose()

    response.stream = Lines()


def _try_parse_message(content: bytes) -> Any:
    import mcp_types

    try:
        return mcp_types.jsonrpc_message_adapter.validate_json(content, by_name=False)
    except (ValueError, RecursionError):
        return None


async def _forward_messages(received: Any, incoming: Any, repair: MessageRepair | None) -> None:
    """Forward messages of the package to the reader, repaired by *repair*, until either ends."""
    from anyio import BrokenResourceError, ClosedResourceError

    with suppress(BrokenResourceError, ClosedResourceError):
        async for message in received:
            await incoming.send(message if repair is None else repair(message))
    incoming.close()


class EndpointAnswers:
    """
    The connection to an endpoint, and the status of its last responses, which explains failures.

    Its methods describe the response *answer*, by default the last one.

    Args:
        url: The endpoint.
        headers: What goes with every request.
        auth: What signs requests; see ``mcp_tools``.
        repair: Makes of each message one that the package can read; without it, messages stay as they are.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        auth: Any = None,
        repair: MessageRepair | None = None,
    ) -> None:
        self._url = url
        self._headers = dict(headers)
        self._auth = auth
        self._repair = repair
        self._last = HttpAnswer()
        self._failed = ""

    @asynccontextmanager
    async def connect_and_open_streams(self) -> Any:
        """Connect to the endpoint, and yield its streams of messages."""
        import anyio
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        incoming, read = anyio.create_memory_object_stream[Any](0)
        # What is packed could unpack to any size.
        headers = {"accept-encoding": "identity", **self._headers}
        timeout = httpx2.Timeout(REQUEST_SECONDS, read=READ_SECONDS)
        async with httpx2.AsyncClient(headers=headers, auth=self._make_auth(), timeout=timeout) as client:
            client.event_hooks["response"].append(partial(self._record_and_repair_response, incoming))
            async with streamable_http_client(self._url, http_client=client) as (received, write):
                passing = asyncio.create_task(_forward_messages(received, incoming, self._repair))
                try:
                    yield read, write
                finally:
                    passing.cancel()
                    await asyncio.wait((passing,))
                    incoming.close()
                    read.close()

    def _make_auth(self) -> Any:
        """Wrap the user's ``auth`` so that its errors are recorded; return ``None`` without one."""
        import httpx2

        auth, answers = self._auth, self
        if auth is None:
            return None

        class Signing(httpx2.Auth):
            requires_request_body = bool(getattr(auth, "requires_request_body", False))
            requires_response_body = bool(getattr(auth, "requires_response_body", False))

            async def async_auth_flow(self, request: Any) -> AsyncGenerator[Any, Any]:
                flow = (
                    auth.async_auth_flow(request)
                    if hasattr(auth, "async_auth_flow")
                    else _run_header_auth_flow(auth, request)
                )
                response: Any = None
                try:
                    while True:
                        try:
                            one = await flow.asend(response)
                        except StopAsyncIteration:
                            return
                        except Exception as error:
                            answers._failed = visible(
                                cut_middle(f"{type(error).__name__}: {error}", CHALLENGE_CHARS), strict=True
                            )
                            raise
                        response = yield one
                finally:
                    await flow.aclose()

        return Signing()

    async def _record_and_repair_response(self, incoming: Any, response: Any) -> None:
        """Record the status of a response to a message, and repair its content. Responses to the optional stream are ignored."""
        if response.request.method != "POST":
            return
        challenge = response.headers.get("www-authenticate", "")
        for answer in (self._last, ANSWER.get() or self._last):
            answer.status, answer.challenge = response.status_code, challenge
        if response.status_code >= HTTPStatus.BAD_REQUEST:
            return
        asked = _try_parse_message(response.request.content)
        kind = response.headers.get("content-type", "").lower()
        if self._repair is not None:
            self._repair.record_request(asked)
            if kind.startswith("text/event-stream"):
                _wrap_event_lines(response, partial(self._repair_event_line, asked))
        if kind.startswith("application/json"):
            await self._replace_unusable_reply(incoming, response, asked)

    def _repair_event_line(self, request: Any, line: bytes) -> bytes:
        """Return a line of events; a reply that the package cannot parse is replaced by a repaired one."""
        name, _, content = line.partition(b":")
        number = getattr(request, "id", None)
        if name != b"data" or number is None or self._repair is None or _try_parse_message(content.strip()) is not None:
            return line
        reply = self._repair.repair_list_reply(content.strip(), number)
        return line if reply is None else b"data: " + reply.model_dump_json(by_alias=True, exclude_unset=True).encode()

    async def _replace_unusable_reply(self, incoming: Any, response: Any, request: Any) -> None:
        """
        Send an error for an unusable JSON reply, so that the caller does not wait for its timeout, or a repaired reply.

        Other replies are left to the package, which handles text that is no message. It would pass on a reply to another request.
        """
        import mcp_types
        from mcp.shared.message import SessionMessage

        number = getattr(request, "id", None)
        if number is None or not hasattr(request, "method"):
            return
        problem = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message=ELSE)
        try:
            await _read_capped_body(response)
            content = await response.aread()
            reply = _try_parse_message(content)
            if reply is None and self._repair is not None:
                readable = self._repair.repair_list_reply(content, number)
                if readable is not None:
                    await incoming.send(self._repair(SessionMessage(readable)))
                return
            if reply is None or (not hasattr(reply, "method") and str(reply.id) == str(number)):
                return
            if isinstance(reply, mcp_types.JSONRPCError) and reply.id is None:
                problem = reply.error  # it could not, or did not, say to what
        except _ReplyTooLong as error:
            problem = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message=str(error))
        await incoming.send(SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=number, error=problem)))

    @property
    def signing_failure(self) -> str:
        """The reason why a request could not be signed; ``""`` if there is none."""
        return f"signing in with auth= failed: {self._failed}" if self._failed else ""

    def describe_failure(self, answer: HttpAnswer | None = None) -> str:
        """Return a description of a failure status; ``""`` for a success."""
        status = (answer or self._last).status
        phrase = f" {HTTPStatus(status).phrase}" if status in [*HTTPStatus] else ""
        return f"it answered {status}{phrase}" if status >= HTTPStatus.BAD_REQUEST else ""

    def describe_refusal(self, answer: HttpAnswer | None = None) -> str:
        """Return why a message was refused, with a remedy; ``""`` if it was not, or a retry may succeed."""
        answer = answer or self._last
        status = answer.status
        if self.signing_failure:
            return self.signing_failure
        if not HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR or status in TRANSIENT:
            return ""
        said = visible(cut_middle(answer.challenge, CHALLENGE_CHARS), strict=True)
        return f"{self.describe_failure(answer)}{f' ({said})' if said else ''}{self._find_remedy(status)}"

    def _find_remedy(self, status: int) -> str:
        """Return advice for a refused request by its status; it depends on the given token."""
        given = "in headers=" if any(name.lower() == "authorization" for name in self._headers) else ""
        given = "of auth=" if self._auth is not None else given
        if status == HTTPStatus.UNAUTHORIZED:
            if given:
                return f"; the token {given} is invalid or expired: get a new one"
            return f"; it requires a sign-in: get a token and pass it with {GIVE}, or sign in with {SIGN}"
        if status == HTTPStatus.FORBIDDEN:
            what = (
                f"the token {given} does not have the permission for this"
                if given
                else f"it may require a token, passed with {GIVE}"
            )
            return f"; {what}"
        if status == HTTPStatus.NOT_FOUND:
            return "; there is no MCP server at this URL, which often ends in /mcp"
        return ""
