"""
One server in one event loop: owned by one task, started when it is needed, started again when it died, never left behind.

The package's client has to be left by the task that entered it, and a server that dies may cancel that task. So a task of its
own does nothing but own it; requests come from any other.
"""

from __future__ import annotations

import asyncio
import secrets
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from contextvars import Context
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import frozen

from stepengine.adapters.mcp._caps import (
    CLOSE_SECONDS,
    ERROR_CHARS,
    LEAST_POLL,
    LISTEN_MOST,
    LISTEN_SECONDS,
    MOST_POLL,
    PAGES,
    POLL_SECONDS,
    RESTART_WAITS,
    RUNS_KEPT,
    TOOLS,
)
from stepengine.adapters.mcp.client_requests import make_roots
from stepengine.adapters.mcp.http import ANSWER, RUN, SIGN_IN, EndpointAnswers, HttpAnswer
from stepengine.adapters.mcp.lenient_messages import (
    TASK,
    MessageRepair,
    describe_first_validation_issue,
    list_left_out_placeholders,
    read_result_as_sent,
)
from stepengine.adapters.mcp.notices import LogLevel, Notice, Notices
from stepengine.adapters.mcp.stdio import ServerProcess, ServerProgram
from stepengine.data.visible import cut_middle, visible
from stepengine.errors import DefinitionError, ToolError, ToolServerError
from stepengine.runtime.logs import LOGGER
from stepengine.workspace.installed import get_installed_version

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client.session import ClientSession

T = TypeVar("T")
CLOSED_CODE = -32000
CLOSED_TEXTS = ("Connection closed", "SSE stream ended", "SSE stream failed")
"""
The code of the MCP library for a connection that has ended, and how its messages begin. Servers use the code for errors of their own.
"""
NO_METHOD_CODE = -32601
"""The code that JSON-RPC 2.0 defines for an unknown method."""
FETCHERS = ("npx", "uvx", "bunx", "pipx", "uv", "pnpm", "yarn", "docker", "podman")
"""Commands that fetch the program first when it is not there yet."""
ENDED = ("completed", "failed", "cancelled")
"""What a task is called that does not go on."""
REMEDY = "the package mcp is not installed: pip install 'stepengine[mcp]'"


class NoSuchMethod(ToolError):
    """The server does not support the requested method."""


class ConnectionLost(ToolServerError):
    """The connection ended during a call, so that the outcome of the call is unknown."""


class SessionUnknown(ConnectionLost):
    """The server does not know the session of a request, as after a restart. It has performed nothing."""


@frozen(kw_only=True)
class ConnectionOptions:
    """
    The options of ``mcp_tools`` for the connection to a server.

    Attributes:
        name: The prefix of its tool names.
        server: A ``ServerProgram``, the URL of an endpoint, or a server in this process.
        headers: HTTP headers of every request to a URL.
        auth: What signs requests to a URL; see ``mcp_tools``.
        roots: URLs of the folders that are its roots; ``None`` offers no roots.
        log_level: The lowest level of its log lines that are logged.
        subscribe: URIs of the resources to watch.
        on_notice: Called with each notification of the server.
        elicitation: Whether it may ask people.
        sampling: Whether it may ask the run's model.
        timeout: Seconds that a request may take.
        start_timeout: Seconds that starting it may take, its greeting included.
        protocol: ``"auto"``, or ``"legacy"`` for the greeting of before 2026-07-28.
    """

    name: str
    server: Any
    headers: Mapping[str, str] | None = None
    auth: Any = None
    roots: tuple[str, ...] | None = None
    log_level: LogLevel | None = None
    subscribe: tuple[str, ...] = ()
    on_notice: Callable[[Notice], object] | None = None
    elicitation: bool = True
    sampling: bool = False
    timeout: float = 60.0
    start_timeout: float = 10.0
    protocol: str = "auto"


@frozen
class ServerRequests:
    """
    The requests of a server that must be answered before it continues a call.

    Attributes:
        requests: The requests by key, as JSON with ``method`` and ``params``.
        state: What has to be sent back with the answers, ``""`` for nothing; ``None`` where the request is still open.
    """

    requests: Mapping[str, Any]
    state: str | None = None


class OpenCall:
    """
    An open request to a server, and the requests that the server sends meanwhile.

    Args:
        request: The request.
        lost: The message of the error if something else than the waiting caller cancels the request.

    Attributes:
        task: The request.
        waiting: The future for the answer to the last request of the server; ``None`` before its first request.
    """

    def __init__(self, request: Coroutine[object, Any, object], lost: str = "the call was given up") -> None:
        self.task = _start_detached_task(request, "mcp call")
        self._lost = lost
        self.waiting: asyncio.Future[Any] | None = None
        self._asked: list[tuple[Any, asyncio.Future[Any]]] = []
        self._bell: asyncio.Future[None] | None = None

    def add_server_request(self, request: Any, answer: asyncio.Future[Any]) -> None:
        """Queue a request of the server with the future for its answer, and wake the waiting caller."""
        self._asked.append((request, answer))
        self._wake_waiter_if_asked()

    def _wake_waiter_if_asked(self) -> None:
        """Wake the waiting caller if a request of the server is queued."""
        if self._asked and self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    async def wait_for_result_or_request(self) -> Any:
        """
        Wait for the result of the request or the first request of the server, and return it.

        Raises:
            asyncio.CancelledError: when the caller was cancelled; the request is cancelled, too, and the server is notified.
            ConnectionLost: when the request was cancelled otherwise, such as by closing the connection.
        """
        bell = self._bell = asyncio.get_running_loop().create_future()
        self._wake_waiter_if_asked()
        try:
            await asyncio.wait((self.task, bell), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.cancel()
            raise
        if self.task.cancelled():
            raise ConnectionLost(self._lost)
        if self.task.done():
            return self.task.result()
        request, self.waiting = self._asked.pop(0)
        return ServerRequests({"asked": request.model_dump(mode="json", by_alias=True, exclude_none=True)})

    def answer_server_request(self, answer: object) -> None:
        """Answer the last request that the server sent."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(answer)

    async def cancel(self) -> None:
        """Cancel the request, notify the server, and end its unanswered requests."""
        import mcp_types as types

        self.task.cancel()
        given_up = types.ErrorData(code=types.INVALID_REQUEST, message="The call that this is about was given up")
        for answer in (self.waiting, *[answer for _, answer in self._asked]):
            if answer is not None and not answer.done():
                answer.set_result(given_up)
        await asyncio.wait((self.task,), timeout=CLOSE_SECONDS)


class _OpenClient:
    """An MCP client that is open, and the task that owns it."""

    def __init__(
        self, options: ConnectionOptions, answer: Callable[[Any], Awaitable[object]], on_tools: Callable[[], None]
    ) -> None:
        self._options = options
        self._answer = answer
        self._on_tools = on_tools
        self._notices = Notices(
            options.name, log_level=options.log_level, on_notice=options.on_notice, on_tools=on_tools
        )
        self._over = asyncio.Event()
        self._closed = False
        self.pipe: ServerProcess | None = None
        self.answers: EndpointAnswers | None = None
        self.why = ""
        self.client: Client = self._make_client_and_store_transport()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task = _start_detached_task(self._run_client(), f"mcp server {options.name}")

    @property
    def is_over(self) -> bool:
        """Whether the client has ended, or has been told to end."""
        return self._over.is_set() or self.task.done()

    @property
    def refusal_reason(self) -> str:
        """The reason why the endpoint refuses requests, with a remedy; ``""`` if it does not."""
        return "" if self.answers is None else self.answers.describe_refusal()

    def _make_client_and_store_transport(self) -> Client:
        """Return a client for the server, and store its pipe or the answers of its endpoint."""
        from mcp import Client
        from mcp_types import Implementation

        options = self._options
        server: Any = options.server
        repair = MessageRepair(self._find_protocol_version)
        if isinstance(server, ServerProgram):
            self.pipe = ServerProcess(server, self._over.set, repair)
            server = self.pipe.start_and_open_streams()
        elif isinstance(server, str):
            self.answers = EndpointAnswers(server, options.headers or {}, auth=options.auth, repair=repair)
            server = self.answers.connect_and_open_streams()
        asked: Any = self._answer_server_request
        roots: Any = None if options.roots is None else self._list_roots
        lowest: LogLevel | None = "debug" if options.on_notice is not None else None
        return Client(
            server,
            mode=options.protocol,
            elicitation_callback=asked if options.elicitation else None,
            sampling_callback=asked if options.sampling else None,
            list_roots_callback=roots,
            logging_callback=self._notices.forward_log_line,
            log_level=options.log_level or lowest,
            message_handler=self._notices.forward_notification,
            client_info=Implementation(name="stepengine", version=get_installed_version("stepengine") or "0"),
        )

    def _find_protocol_version(self) -> str | None:
        """Return the negotiated protocol version; ``None`` before the connection is open."""
        with suppress(RuntimeError):
            return self.client.session.protocol_version
        return None

    async def _answer_server_request(self, _: Any, params: Any) -> Any:
        """Return the answer to a request of the server, from the call that it belongs to."""
        return await self._answer(params)

    async def _list_roots(self, _: Any) -> Any:
        """Return the folders of the options as roots."""
        import mcp_types as types

        return types.ListRootsResult.model_validate(make_roots(self._options.roots or ()), by_name=False)

    async def _request_notifications(self) -> None:
        """
        Request change notifications; newer protocols listen until the connection ends, older ones also request the log.

        Errors of the server are not raised. They are logged if the options name resources to watch.
        """
        from mcp import MCPError
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS
        from pydantic import ValidationError

        ANSWER.set(HttpAnswer())  # what is answered here says nothing of anybody's request
        session = self.client.session
        try:
            if session.protocol_version in MODERN_PROTOCOL_VERSIONS:
                await self._listen_for_changes()
            else:
                await self._request_log_and_subscriptions(session)
        except (MCPError, ValidationError, RuntimeError, TimeoutError) as error:
            self._log_refused_notifications(error)

    def _log_refused_notifications(self, error: Exception) -> None:
        """Log a warning if the options name resources to watch and the connection is open."""
        if self._options.subscribe and not self.is_over:
            said = visible(cut_middle(str(error), ERROR_CHARS), strict=True)
            LOGGER.warning("the MCP server %r sends no notifications of changes: %s", self._options.name, said)

    async def _listen_for_changes(self) -> None:
        """Listen for offered changes until the connection ends. A stream that ends is reopened, and the tools count as changed."""
        from mcp.client.subscriptions import SubscriptionLost

        can = self.client.session.server_capabilities
        tools = bool(can and can.tools and can.tools.list_changed)
        more = self._options.on_notice is not None
        prompts = bool(more and can and can.prompts and can.prompts.list_changed)
        resources = bool(more and can and can.resources and can.resources.list_changed)
        if not (tools or prompts or resources or self._options.subscribe):
            return
        pause = LISTEN_SECONDS
        while not self.is_over:
            with suppress(SubscriptionLost):
                async with self.client.listen(
                    tools_list_changed=tools,
                    prompts_list_changed=prompts,
                    resources_list_changed=resources,
                    resource_subscriptions=self._options.subscribe,
                ) as told:
                    async for _ in told:
                        pause = LISTEN_SECONDS  # the notifications themselves come to whoever takes all of them
            await asyncio.sleep(pause)
            pause = min(2 * pause, LISTEN_MOST)
            self._on_tools()  # nobody told what changed meanwhile

    async def _request_log_and_subscriptions(self, session: ClientSession) -> None:
        """Request log lines if they are wanted, and changes of the named resources; log refusals."""
        import mcp_types as types
        from mcp import MCPError

        options, can = self._options, session.server_capabilities
        level, requests = options.log_level or "debug", list[Any]()
        if self._notices.wants_logs and can is not None and can.logging is not None:
            params: Any = types.SetLevelRequestParams(level=level)
            requests.append(types.SetLevelRequest(params=params))
        requests += [types.SubscribeRequest(params=types.SubscribeRequestParams(uri=uri)) for uri in options.subscribe]
        for request in requests:
            try:
                await session.send_request(request, types.EmptyResult)
            except MCPError as error:  # a server that refuses one may grant the others
                self._log_refused_notifications(error)

    async def _run_client(self) -> None:
        """Enter the client, wait until it ends, and leave it, all in this task; store why it ended."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self._options.start_timeout):
                    await stack.enter_async_context(self.client)
                attending = asyncio.create_task(self._request_notifications())
                stack.push_async_callback(_cancel_and_wait, attending)
                if not self._ready.done():
                    self._ready.set_result(None)
                await self._over.wait()
        except BaseException as error:
            self._over.set()
            self.why = self._describe_end(error)
            if not self._ready.done():
                failed = ToolServerError(self._describe_start_error())
                failed.__cause__ = _find_first_error(error)
                self._ready.set_exception(failed)
            if isinstance(error, asyncio.CancelledError) and _is_current_task_cancelled():
                raise
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
        finally:
            self._over.set()

    def _describe_start_error(self) -> str:
        """Return the message for a server that did not start or refuses requests."""
        name = self._options.name
        if self.refusal_reason:
            return f"the MCP server {name!r} cannot be used: {self.refusal_reason}"
        return f"the MCP server {name!r} did not start: {self.why}"

    def _describe_end(self, error: BaseException) -> str:
        """Return why the client ended: a problem of the pipe, a timeout, a failure status or the error; with the end of stderr."""
        leaf = _find_first_error(error)
        pipe = self.pipe
        if pipe is not None and pipe.problem:
            said = pipe.problem
        elif isinstance(leaf, TimeoutError):
            said = self._describe_start_timeout()
        elif self.answers is not None and self.answers.describe_failure():
            said = self.answers.describe_failure()
        else:
            said = visible(cut_middle(f"{type(leaf).__name__}: {leaf}", ERROR_CHARS), strict=True)
        words = pipe.get_stderr_tail() if pipe is not None else ""
        return f"{said}; its stderr ends with: {words}" if words else said

    def _describe_start_timeout(self) -> str:
        """Return a text about a server that did not answer in time, with advice."""
        said = f"it did not answer within {self._options.start_timeout:g} s"
        server = self._options.server
        word = PurePath(server.argv[0]).stem if isinstance(server, ServerProgram) else ""
        why = f"; {word} may still be downloading packages" if word in FETCHERS else ""
        return f"{said}{why}; give it more time with start_timeout={max(60, round(4 * self._options.start_timeout))}"

    async def wait_until_ready(self) -> None:
        """Wait until the client is ready; raise ``ToolError`` if it cannot start."""
        await asyncio.shield(self._ready)

    def request_end(self) -> None:
        """Let the task of the client leave it. It may be called twice."""
        self._over.set()

    async def end_and_wait(self) -> None:
        """Let the task of the client leave it, and wait for the end of the task."""
        self.request_end()
        await asyncio.wait((self.task,))


class ServerConnection:
    """
    The connection to a server in one event loop.

    Args:
        options: What it is.

    Attributes:
        loop: The event loop of the connection.
        digests: The digests of all definitions in its last list, by the server's names.
        offered: Those of the tools that runs are offered.
        promises: The output schemas of that list, by the server's names.
        is_stale: Whether that list may have changed since.
        used_at: The time of the last ``get_connection_and_add_user``, by the clock of the loop.
    """

    def __init__(self, options: ConnectionOptions) -> None:
        require_mcp_package()
        self._options = options
        self.loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._live: _OpenClient | None = None
        self._restarts: dict[str, int] = {}
        self._was_up = False
        self._open: dict[str, OpenCall] = {}
        self._asking: set[asyncio.Task[Any]] = set()
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.digests: dict[str, str] = {}
        self.offered: dict[str, str] = {}
        self.promises: dict[str, Mapping[str, Any]] = {}
        self.is_stale = False
        self.used_at = self.loop.time()

    @property
    def is_idle(self) -> bool:
        """Whether no call to the server is open."""
        return not self._open

    # --- who has it ---------------------------------------------------------------------------------------------------

    def add_user(self, user: object) -> None:
        """Register *user*; the connection stays open until its last user is removed."""
        self._users.add(user)

    def remove_user(self, user: object) -> bool:
        """Unregister *user*, and return True if there is no user left."""
        self._users.discard(user)
        return not self._users

    # --- starting and ending ------------------------------------------------------------------------------------------

    async def get_or_start_session(self, root_run: str = "") -> ClientSession:
        """
        Return the shared session of the server, started if needed; restarts are limited to two for each *root_run*.

        Raises:
            ToolError: If the server cannot be started, or has ended too often.
        """
        async with self._lock:
            while self._live is None or self._live.is_over:
                await self._start_or_restart_server(root_run)
            return self._live.client.session

    async def _start_or_restart_server(self, run: str) -> None:
        """Start the server, after a wait if it ended before; raise an error only if a retry cannot help."""
        before = self._live
        if before is not None:
            await before.end_and_wait()
        if before is not None or self._restarts.get(run, 0) > len(RESTART_WAITS):
            await self._count_and_wait_before_restart(run, "" if before is None else before.why)
        self._live = live = _OpenClient(self._options, self._pass_request_to_open_call, self._mark_stale)
        try:
            await live.wait_until_ready()
            self._was_up = True
        except ToolError as error:
            causes = FileNotFoundError | PermissionError | NotADirectoryError
            if live.refusal_reason or isinstance(error.__cause__, causes):
                self._live = None
                raise  # waiting helps nobody
        except BaseException:
            live.request_end()
            raise

    async def _count_and_wait_before_restart(self, run: str, why: str) -> None:
        """Count a restart for a root run, and wait; raise an error if it had all its restarts."""
        name, used = self._options.name, min(self._restarts.pop(run, 0), len(RESTART_WAITS))
        while len(self._restarts) >= RUNS_KEPT:
            self._restarts.pop(next(iter(self._restarts)))
        self._restarts[run] = used + 1
        if used >= len(RESTART_WAITS):
            self._live = None
            because = f": {why}" if why else ""
            gone = "is gone" if self._was_up else "did not start"
            msg = f"the MCP server {name!r} {gone}: it was started again {used} times in this run, and ended each time{because}"
            raise ToolServerError(msg)
        LOGGER.warning("the MCP server %r ended and is restarted%s", name, f": {why}" if why else "")
        await asyncio.sleep(RESTART_WAITS[used])

    async def aclose(self) -> None:
        """Cancel all open calls, and end the server."""
        for ticket in list(self._open):
            await self.cancel_call(ticket)
        if self._asking:
            await asyncio.wait(self._asking, timeout=CLOSE_SECONDS)
        live, self._live = self._live, None
        if live is not None:
            await live.end_and_wait()

    def end_without_waiting(self) -> None:
        """Let the server end, without waiting for it."""
        if self._live is not None:
            self._live.request_end()

    def _mark_stale(self) -> None:
        """Mark the tool list as changed, so that it is fetched again."""
        self.is_stale = True

    # --- lists --------------------------------------------------------------------------------------------------------

    async def fetch_lists(self, *, prompts: bool) -> dict[str, Any]:
        """
        Fetch all tools and, with *prompts*, all prompts; return them as sent, and whether tools may be tasks.

        A list of prompts that cannot be read costs the prompts, and ``prompts_problem`` says why.

        Raises:
            ToolError: If the server cannot be started, or returns no list of tools.
        """
        self._restarts.pop("", None)
        session = await self.get_or_start_session()
        self.is_stale = False
        can = session.server_capabilities
        has_tools = can is None or can.tools is not None
        tools = await self.fetch_pages(session.list_tools, "tools") if has_tools else []
        found, problem = list[dict[str, Any]](), ""
        if prompts and can is not None and can.prompts is not None:
            try:
                found = await self.fetch_pages(session.list_prompts, "prompts", optional=True)
            except ToolServerError:
                raise
            except ToolError as error:
                problem = error.message
        tasks = session.protocol_version == "2025-11-25"
        return {"tools": tools, "prompts": found, "prompts_problem": problem, "tasks": tasks}

    async def fetch_pages(
        self, fetch_page: Callable[..., Awaitable[Any]], member: str, *, optional: bool = False
    ) -> list[dict[str, Any]]:
        """
        Fetch the pages of a list, within the limits, and return its entries as sent.

        One that is *optional* is empty where the server does not have it after all; many say more of themselves than is so.
        """
        from mcp_types import PaginatedRequestParams

        found: list[dict[str, Any]] = []
        cursor: str | None = None
        for _ in range(PAGES):
            try:
                page = await self.await_response(
                    fetch_page(params=PaginatedRequestParams(cursor=cursor)), self._options.timeout
                )
            except NoSuchMethod:
                if optional:
                    break
                raise
            found += [one.model_dump(mode="json", by_alias=True, exclude_none=True) for one in getattr(page, member)]
            found += list_left_out_placeholders(page)
            cursor = page.next_cursor
            if cursor is None or len(found) > TOOLS:
                break
        return found

    # --- calls --------------------------------------------------------------------------------------------------------

    async def await_response(self, request: Awaitable[T], seconds: float | None = None) -> T:
        """
        Await a request to the server for at most *seconds*; convert the errors of the package to ``ToolError``.

        Raises:
            ConnectionLost: when the connection ended meanwhile.
            ToolError: For any other error of the server or the transport.
        """
        from anyio import BrokenResourceError, ClosedResourceError
        from mcp import MCPError
        from pydantic import ValidationError

        name, live, answer = self._options.name, self._live, HttpAnswer()
        token = ANSWER.set(answer)
        try:
            async with asyncio.timeout(seconds):
                return await request
        except TimeoutError as error:
            msg = f"the MCP server {name!r} did not answer within {seconds:g} s"
            raise ToolError(msg) from error
        except MCPError as error:
            raise self._make_error_from_answer(live, answer, error.code, error.message) from error
        except (BrokenResourceError, ClosedResourceError) as error:
            raise self._end_and_make_loss_error(live) from error
        except asyncio.CancelledError as error:
            if _is_current_task_cancelled():
                raise
            raise self._end_and_make_loss_error(
                live
            ) from error  # somebody closed the connection, and nobody cancelled the caller
        except ValidationError as error:
            msg = f"the MCP server {name!r} answered with what the protocol does not know: {describe_first_validation_issue(error)}"
            raise ToolError(msg) from error
        finally:
            ANSWER.reset(token)

    def _make_error_from_answer(
        self, live: _OpenClient | None, answer: HttpAnswer, code: int, message: str
    ) -> ToolError:
        """Return the ``ToolError`` for a protocol error; a lost connection or unknown session also ends the client."""
        name = self._options.name
        answers = None if live is None else live.answers
        if answers is not None and answer.status in SIGN_IN:
            return ToolServerError(f"the MCP server {name!r} refused the request: {answers.describe_refusal(answer)}")
        if code == CLOSED_CODE and message.startswith(CLOSED_TEXTS):
            return self._end_and_make_loss_error(live)
        # In a session this status means that the server has forgotten it (MCP specification, Streamable HTTP).
        if live is not None and answer.status == HTTPStatus.NOT_FOUND and code != NO_METHOD_CODE:
            live.request_end()
            return SessionUnknown(f"the MCP server {name!r} does not know its session any more; nothing was done")
        kind = NoSuchMethod if code == NO_METHOD_CODE else ToolError
        return kind(f"the MCP server {name!r} answered with an error: {_clean_error_text(message)}")

    def _end_and_make_loss_error(self, live: _OpenClient | None) -> ConnectionLost:
        """End *live* and return the error for its loss, without affecting a client that was started since."""
        if live is not None:
            live.request_end()
        pipe, answers = (None, None) if live is None else (live.pipe, live.answers)
        problem = pipe.problem if pipe is not None else answers.signing_failure if answers is not None else ""
        return ConnectionLost(self._describe_loss(problem))

    def _describe_loss(self, problem: str) -> str:
        """Return the message for a lost connection, with its *problem* if there is one."""
        because = f" ({problem})" if problem else ""
        return f"the connection to the MCP server {self._options.name!r} was lost{because}; the outcome is unknown"

    async def call_tool(
        self, session: ClientSession, tool: str, arguments: Mapping[str, Any], progress: Any, **more: Any
    ) -> Any:
        """Send one ``tools/call`` and return its result as JSON, or ``ServerRequests``; raise the errors of ``await_response``."""
        import mcp_types as types
        from pydantic import TypeAdapter

        params = types.CallToolRequestParams(name=tool, arguments=dict(arguments), **more)
        # The session's own method checks what came with a validator whose expressions can take for ever.
        answer: Any = TypeAdapter(types.InputRequiredResult | types.CallToolResult)
        sent = session.send_request(types.CallToolRequest(params=params), answer, progress_callback=progress)
        result = await self.await_response(sent)
        task = (result.meta or {}).get(TASK)
        if task is not None:
            result = await self._poll_until_task_result(session, task, progress)
        said = read_result_as_sent(result)
        if isinstance(result, types.InputRequiredResult):
            return ServerRequests(said.get("inputRequests") or {}, result.request_state or "")
        return said

    async def _poll_until_task_result(self, session: ClientSession, started: Any, progress: Any) -> Any:
        """Wait until a task ends, report its progress, and return its result. Cancellation also cancels the task."""
        import mcp_types as types
        from pydantic import ValidationError

        try:
            task = types.Task.model_validate(started, by_name=False)
        except ValidationError as error:
            msg = f"the MCP server {self._options.name!r} began a task that cannot be read: {_clean_error_text(str(error))}"
            raise ToolError(msg) from error
        number, said = task.task_id, ""
        try:
            while task.status not in ENDED:
                if task.status_message and task.status_message != said:
                    said = task.status_message
                    await progress(0, None, said)
                if task.status == "input_required":
                    break  # it asks while its result is waited for
                await asyncio.sleep(_clamp_poll_seconds(task.poll_interval))
                get = types.GetTaskRequest(params=types.GetTaskRequestParams(task_id=number))
                task = await self.await_response(session.send_request(get, types.GetTaskResult))
            payload = types.GetTaskPayloadRequest(params=types.GetTaskPayloadRequestParams(task_id=number))
            return await self.await_response(session.send_request(payload, types.CallToolResult))
        except asyncio.CancelledError:
            end = types.CancelTaskRequest(params=types.CancelTaskRequestParams(task_id=number))
            asking = _start_detached_task(
                self.await_response(session.send_request(end, types.CancelTaskResult), CLOSE_SECONDS), "mcp task"
            )
            asking.add_done_callback(_log_task_error)
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)
            raise

    def start_call(self, request: Coroutine[object, Any, object]) -> tuple[str, OpenCall]:
        """Start a request during which the server may send requests; return its ticket and the call."""
        ticket = secrets.token_hex(8)  # it stands in records, which other processes go on with
        call = self._open[ticket] = OpenCall(request, self._describe_loss("it was closed during the call"))
        return ticket, call

    def find_call(self, ticket: str) -> OpenCall | None:
        """Return the call with a ticket; ``None`` after its removal. Its request may have ended already."""
        return self._open.get(ticket)

    def remove_call(self, ticket: str) -> None:
        """Remove a call that has ended."""
        self._open.pop(ticket, None)

    async def cancel_call(self, ticket: str) -> None:
        """Cancel a call that will not be continued."""
        call = self._open.pop(ticket, None)
        if call is not None:
            await call.cancel()

    async def _pass_request_to_open_call(self, params: object) -> object:
        """Pass a request of the server, which does not name its call, to the first free open call, and return the answer."""
        import mcp_types as types

        waiting = [call for call in self._open.values() if not call.task.done()]
        free: Sequence[OpenCall] = [call for call in waiting if call.waiting is None or call.waiting.done()] or waiting
        if not free:
            return types.ErrorData(code=types.INVALID_REQUEST, message="No call is open that this could be about")
        answer: asyncio.Future[Any] = self.loop.create_future()
        free[0].add_server_request(params, answer)
        return await answer


def require_mcp_package() -> None:
    """Raise ``DefinitionError`` with a remedy if the package is not installed."""
    found = find_spec("mcp")
    if found is None or found.origin is None:  # a folder of that name beside the program is found, too
        raise DefinitionError(REMEDY)


def _start_detached_task(work: Coroutine[object, Any, T], name: str) -> asyncio.Task[T]:
    """Start a task that outlives the current tool call, in a new context with only the run."""
    context = Context()
    context.run(RUN.set, RUN.get())
    return asyncio.create_task(work, name=name, context=context)


async def _cancel_and_wait(task: asyncio.Task[None]) -> None:
    """Cancel a task, wait for its end, and log its error."""
    task.cancel()
    await asyncio.wait((task,))
    _log_task_error(task)


def _log_task_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        LOGGER.debug("%s: %s", task.get_name(), error)


def _clamp_poll_seconds(milliseconds: float | None) -> float:
    """Return the seconds to wait before a task is polled again: the time that the server named, within limits, or the default."""
    seconds = POLL_SECONDS if milliseconds is None else milliseconds / 1_000
    return min(max(seconds, LEAST_POLL), MOST_POLL)


def _is_current_task_cancelled() -> bool:
    """Return whether a cancellation of the current task was requested."""
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())


def _find_first_error(error: BaseException) -> BaseException:
    """Return the first error in nested exception groups."""
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    return error


def _clean_error_text(text: str) -> str:
    """Return the error text of a server, cut and without hidden characters."""
    return visible(cut_middle(text, ERROR_CHARS))
