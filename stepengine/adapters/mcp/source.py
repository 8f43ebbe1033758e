"""
``mcp_tools``: the tools of one MCP server, as a source that an agent lists among its tools.

When a run begins, the server is asked for its list by a recorded ``Perform``. What the model sees is made of that record, so a
replay needs no server, not even the package. Calls are ordinary tool calls.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import attrs

from stepengine.adapters.mcp._caps import DEFER_TOKENS, DEFER_TOOLS, RUN_LIST_BYTES, TOOLS
from stepengine.adapters.mcp.client_requests import IsOpen, ServerQuestions, mark_oversized_requests
from stepengine.adapters.mcp.connection import (
    ConnectionLost,
    ConnectionOptions,
    ServerConnection,
    ServerRequests,
    SessionUnknown,
)
from stepengine.adapters.mcp.connections import ServerConnections, needs_run_for_headers
from stepengine.adapters.mcp.http import NO_RUN, McpRun
from stepengine.adapters.mcp.names import require_valid_server_name
from stepengine.adapters.mcp.notices import LEVELS, LogLevel, Notice
from stepengine.adapters.mcp.resources import make_prompt_tool, make_resource_tools
from stepengine.adapters.mcp.results import (
    Channel,
    find_schema_mismatch,
    make_error_result,
    make_failed_call_result,
    make_lost_server_result,
    make_recordable,
    make_result,
)
from stepengine.adapters.mcp.stdio import ServerProgram
from stepengine.adapters.mcp.tool_list import (
    ListedTool,
    annotations_from_hints,
    compute_definition_digest,
    is_for_page_only,
    parse_tool_list,
    select_usable_prompts,
)
from stepengine.data.definition import HookContext
from stepengine.data.estimate import CHARS_PER_TOKEN
from stepengine.data.events import ToolProgress
from stepengine.data.functions import accepts_one_argument
from stepengine.data.hooks import Change
from stepengine.data.json import JsonDict, JsonValue, compact, freeze_object
from stepengine.data.messages import CUT_OFF, ToolResult
from stepengine.data.tools import Ordinary, ToolBinding, ToolLike
from stepengine.data.visible import visible
from stepengine.data.yields import Perform
from stepengine.errors import DataError, DefinitionError, PerformError, StepEngineError, ToolError, ToolServerError
from stepengine.runtime.logs import LOGGER
from stepengine.tools.context import ToolContext
from stepengine.tools.definition import Tool
from stepengine.workspace.after_fork import register_for_fork_reset

CATEGORY = "mcp"
GREW = "list_changed"
"""The member of a pending result that holds its status while the run lists changed tools."""
LEFT_OUT_TEXT = (
    "The MCP server {server!r} offers an item that this run cannot use. Fix the server, or select its tools with include= and "
    "exclude= of mcp_tools. The item is left out: {reason}"
)
SETTLED = ("ok", "error")
GONE = (ToolServerError.__name__, ConnectionLost.__name__)


def mcp_tools(
    server: object,
    *,
    name: str,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    auth: object = None,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    resources: bool = False,
    prompts: bool = False,
    results: Channel = "once",
    trust_hints: bool = False,
    roots: Sequence[str | os.PathLike[str]] | None = None,
    log_level: LogLevel | None = None,
    subscribe: Sequence[str] = (),
    on_notice: Callable[[Notice], object] | None = None,
    elicitation: bool = True,
    sampling: bool = False,
    defer: bool | Literal["auto"] = "auto",
    pins: Mapping[str, str] | None = None,
    about: Mapping[str, str | Sequence[str]] | None = None,
    timeout: float = 60.0,
    start_timeout: float = 10.0,
    protocol: Literal["auto", "legacy"] = "auto",
) -> McpTools:
    """
    Return the tools of an MCP server, for ``AgentDefinition(tools=[...])`` or ``Engine(tools=[...])``.

    The engine starts the server, or connects to it, when a run first needs it, once in each event loop, and closes it with the engine. A
    server that ends is restarted at most twice in a run; an open call gets an error result, since its outcome is unknown.

    Definitions of a server are untrusted: the model sees descriptions without hidden characters, and hints relax no rule unless
    *trust_hints* is set. Its tools are named ``name__tool``, in the category ``"mcp"``.

    Args:
        server: The command as a list of words (no shell is used), the URL of a streamable HTTP endpoint, a
            ``StdioServerParameters`` of the package ``mcp``, or a server object of it in this process.
        name: The prefix of the names of its tools: letters, digits and ``-``.
        env: Variables that the process gets in addition to ``PATH``, ``HOME``, ``USER``, ``LOGNAME``, ``TMPDIR``, ``TZ`` and the locale.
        cwd: The working folder of the process.
        headers: HTTP headers of every request to a URL, such as its authorization.
        auth: Authenticates requests to a URL: an ``Auth`` of httpx2 or httpx, such as ``OAuthClientProvider`` of the package
            ``mcp``; or a function of the ``McpRun``, ``async`` or not, that returns headers. It is called before every
            request, and once more after status 401. With a function each owner has a separate session.
        include: The server's names of the tools to include; all by default.
        exclude: The server's names of tools to leave out.
        resources: Whether to offer ``mcp_resources_NAME``, which lists them, and ``mcp_read_NAME``, which reads one.
        prompts: Whether to offer ``mcp_prompt_NAME``, which reads one of the server's prompts.
        results: The parts of a result with texts and a structured value that the model sees: ``"once"`` both, without repetitions;
            ``"text"`` the texts, so that the value is only ``ToolResult.data``; ``"structured"`` the value and no texts. Media are
            never shown as JSON.
        trust_hints: Whether to trust the server's hints: ``readOnlyHint`` for rules, ``idempotentHint`` for repeated calls.
        roots: Folders, or URLs that start with ``file:``, for the server's request for roots; by default the request is not
            supported. They do not restrict the process: use ``cwd``, its own arguments or a sandbox for that.
        log_level: The lowest level of the server's log lines that go to the logger ``stepengine``, such as ``"warning"``; none by
            default.
        subscribe: URIs of resources whose changes are passed to *on_notice*.
        on_notice: Is called in the event loop with each ``Notice``: a line of the server's log, or a change of a list or a
            resource. Its errors are logged.
        elicitation: Whether the server may ask a person; its questions become questions of the run.
        sampling: Whether the server may call the run's model, within the run's limits; it gets the reply.
        defer: Whether the model searches the tools instead of seeing all, as with ``defer_loading=True`` of ``tool``;
            ``"auto"`` from 41 tools or about 8,000 tokens on.
        pins: Digests of definitions, by the server's name of the tool; a tool with another definition is left out. A tool without a
            pin must match the first list that this process received.
        about: The files and web addresses of calls, by the server's name of the tool, such as ``{"write_file": "{path}"}``; see
            ``ToolOptions``. For other tools, rules about files check each text that may name a file.
        timeout: The most seconds of a call, without the time in which a person is asked.
        start_timeout: The most seconds until the server has started.
        protocol: ``"legacy"`` initializes the connection as before 2026-07-28, for a server that does not answer the newer request.

    Raises:
        DefinitionError: For an invalid name, server or option.
    """
    require_valid_server_name(name)
    target = _make_target(server, env, cwd)
    _require_valid_options(
        name, target, headers=headers, auth=auth, results=results, log_level=log_level, subscribe=subscribe
    )
    options = ConnectionOptions(
        name=name,
        server=target,
        headers=headers,
        auth=auth,
        roots=None if roots is None else tuple([_make_root_url(name, one) for one in roots]),
        log_level=log_level,
        subscribe=tuple(subscribe),
        on_notice=on_notice,
        elicitation=elicitation,
        sampling=sampling,
        timeout=timeout,
        start_timeout=start_timeout,
        protocol=protocol,
    )
    return McpTools(
        options,
        include=None if include is None else tuple(include),
        exclude=tuple(exclude),
        resources=resources,
        prompts=prompts,
        results=results,
        trust_hints=trust_hints,
        defer=defer,
        pins=dict(pins or {}),
        about=dict(about or {}),
    )


def _require_valid_options(
    name: str,
    target: object,
    *,
    headers: object,
    auth: object,
    results: object,
    log_level: object,
    subscribe: Sequence[str],
) -> None:
    """Raise ``DefinitionError`` for options that the server cannot have."""
    if isinstance(target, ServerProgram) and (headers or auth is not None):
        what = "headers=" if headers else "auth="
        msg = f"the MCP server {name!r} is a process, but {what} is for a URL; pass variables with env="
        raise DefinitionError(msg)
    if auth is not None and not callable(auth) and not hasattr(auth, "async_auth_flow"):
        msg = (
            f"auth= of the MCP server {name!r} must be an Auth of httpx2, such as OAuthClientProvider of the package mcp, or a "
            f"function that returns headers, not a {type(auth).__name__}"
        )
        raise DefinitionError(msg)
    if needs_run_for_headers(auth) and not accepts_one_argument(auth):
        msg = (
            f"the function auth= of the MCP server {name!r} must take one argument, the run of the request. Write "
            "`def auth(run): ...`; it has run.id, run.owner and run.params"
        )
        raise DefinitionError(msg)
    if results not in get_args(Channel):
        msg = f"results= of the MCP server {name!r} must be one of {', '.join(get_args(Channel))}, not {results!r}"
        raise DefinitionError(msg)
    if log_level is not None and log_level not in LEVELS:
        msg = f"log_level= of the MCP server {name!r} must be one of {', '.join(LEVELS)}, not {log_level!r}"
        raise DefinitionError(msg)
    if isinstance(subscribe, str):
        msg = f"subscribe= of the MCP server {name!r} must be a list of addresses, not the text {subscribe!r}"
        raise DefinitionError(msg)


def _make_root_url(name: str, root: str | os.PathLike[str]) -> str:
    """Return the ``file:`` URL of a root folder; raise an error for an address of another kind."""
    if isinstance(root, str) and root.startswith("file://"):
        return root
    if isinstance(root, str) and "://" in root:
        msg = f"roots= of the MCP server {name!r} must be folders, or addresses that start with file://, not {root!r}"
        raise DefinitionError(msg)
    return Path(root).absolute().as_uri()


def _make_target(server: Any, env: Mapping[str, str] | None, cwd: Any) -> object:
    """Return a command as a ``ServerProgram``, a URL or server object unchanged; raise an error for anything else."""
    parameters = getattr(server, "args", None)
    if isinstance(parameters, list) and isinstance(getattr(server, "command", None), str):
        more = {**(server.env or {}), **(env or {})}
        where = server.cwd if cwd is None else cwd
        return ServerProgram((server.command, *parameters), more, None if where is None else str(Path(where)))
    if isinstance(server, list | tuple) and server and all(isinstance(word, str) for word in server):
        return ServerProgram(tuple(server), env, None if cwd is None else str(Path(cwd)))
    if env or cwd is not None:
        msg = f"env= and cwd= are for a server that is a process, such as ['npx', 'some-server'], not for {server!r}"
        raise DefinitionError(msg)
    if isinstance(server, str):
        if server.startswith(("http://", "https://")):
            return server
        msg = (
            f"an MCP server must be a list of words such as ['npx', 'some-server'], or a URL that starts with http:// or https://, "
            f"not the text {server!r}"
        )
        raise DefinitionError(msg)
    if not any(kind.__module__.partition(".")[0] == "mcp" for kind in type(server).__mro__):
        msg = f"an MCP server must be a list of words, a URL, or a server of the package mcp, not {server!r}"
        raise DefinitionError(msg)
    return server


class McpTools:
    """A source of tools; ``mcp_tools`` makes one. It can be listed by any number of agents and engines."""

    def __init__(
        self,
        options: ConnectionOptions,
        *,
        include: tuple[str, ...] | None,
        exclude: tuple[str, ...],
        resources: bool,
        prompts: bool,
        results: Channel,
        trust_hints: bool,
        defer: bool | Literal["auto"],
        pins: dict[str, str],
        about: dict[str, str | Sequence[str]],
    ) -> None:
        self._options = options
        self._include = include
        self._exclude = exclude
        self._resources = resources
        self._prompts = prompts
        self._channel = results
        self._trusts = trust_hints
        self._defer = defer
        self._pins = pins
        self._about = about
        self._asking = ServerQuestions(
            options.name, options.roots or (), elicitation=options.elicitation, sampling=options.sampling
        )
        self._connections = ServerConnections(options)
        self._is_shared = False
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Drop the connections in a forked child, which starts its own servers."""
        self._connections.drop_after_fork()

    def for_engine(self) -> McpTools:
        """Return this source for one engine: closing it ends a server only if no other engine uses it."""
        mine = copy(self)
        mine._is_shared = True  # noqa: SLF001 - a copy of this one
        return mine

    @property
    def name(self) -> str:
        """The prefix of its tool names."""
        return self._options.name

    def __repr__(self) -> str:
        return f"McpTools({self.name!r})"

    # --- what a run has of it -----------------------------------------------------------------------------------------

    def pre_run(self, ctx: HookContext) -> Generator[Any, Any, Change]:
        """Fetch the tools of the server, or read them from the record of the run, and add them to the run."""
        run = McpRun(ctx.state.run_id, ctx.user_id or "", ctx.params)
        try:
            recorded = yield from Perform.idempotent(partial(self.listing, run=run), self.name)
        except PerformError as error:
            kind = ToolServerError if error.kind in GONE else ToolError
            # Without the name of the function that raised it.
            raise kind(error.message.partition(" raised ")[2].partition(": ")[2] or error.message) from error
        for reason in recorded["left_out"]:
            ctx.logger.warning(LEFT_OUT_TEXT.format(server=self.name, reason=reason))
        listed = [ListedTool.from_json(one) for one in recorded["tools"]]
        known = _ServerOfRun(run, {one.name: one.digest for one in listed}, frozenset(ctx.state.tool_definitions))
        known.reported.update(recorded["left_out"])
        known.reserve_tool_room(len(listed), recorded)
        tools = self._make_tools(listed, known)
        session = partial(self.open_connection_and_session, run)
        beside: list[ToolLike] = (
            [make_prompt_tool(self.name, recorded["prompts"], session)] if recorded["prompts"] else []
        )
        if self._resources:
            beside += make_resource_tools(self.name, session)
        return Change(tools=(*tools, *beside))

    def _make_tools(self, listed: Sequence[ListedTool], server_state: _ServerOfRun) -> list[ToolLike]:
        """Return the tools of a list, all with deferred loading if the options or their number or size require it."""
        tools = [self._make_tool(one, server_state) for one in listed]
        return (
            [self._make_tool(one, server_state, defer_loading=True) for one in listed]
            if self._should_defer_loading(tools)
            else tools
        )

    def _should_defer_loading(self, tools: Sequence[ToolLike]) -> bool:
        """Return whether tools are loaded on demand: by the option, or by their number and size."""
        if self._defer != "auto":
            return self._defer
        return len(tools) > DEFER_TOOLS or sum(t.spec.char_count for t in tools) > DEFER_TOKENS * CHARS_PER_TOKEN

    def _make_tool(self, listed: ListedTool, server_state: _ServerOfRun, *, defer_loading: bool = False) -> ToolLike:
        """Return a tool of the server for a run; a call may also add new tools of the server to the run."""
        annotations = annotations_from_hints(listed.hints, trusted=self._trusts)

        async def call_server_tool(ctx: ToolContext, input: dict[str, Any]) -> ToolResult:
            result = await self._call_tool_with_retry(listed, server_state.run, ctx, input)
            return await self._make_pending_if_new_tools(result, server_state) if ctx.has_run else result

        return _ServerTool(
            listed.tool,
            listed.description,
            listed.input_schema,
            call_server_tool,
            follow=partial(self._continue_pending_call, listed, server_state),
            category=CATEGORY,
            annotations=annotations,
            about=self._about.get(listed.name),
            parallel_safe=self._trusts and annotations.read_only,
            timeout=self._options.timeout,
            defer_loading=defer_loading,
        )

    # --- outside of the machine -----------------------------------------------------------------------------------------

    async def open_connection_and_session(self, run: McpRun) -> tuple[ServerConnection, Any]:
        """Return the connection for a run in the running event loop, and its session."""
        connection = self._get_connection(run)
        return connection, await connection.get_or_start_session()

    def _get_connection(self, run: McpRun) -> ServerConnection:
        """Return the connection for a run, and register this source as its user."""
        return self._connections.get_connection_and_add_user(run, self)

    async def listing(self, name: str, *, run: McpRun = NO_RUN) -> dict[str, Any]:
        """
        Fetch the tools and prompts of the server; runs in the effect that records them.

        Raises:
            ToolServerError: If the server cannot be reached.
        """
        connection = self._get_connection(run)
        try:
            raw = await connection.fetch_lists(prompts=self._prompts)
        except ToolServerError:
            raise
        except ToolError as error:
            raise ToolServerError(error.message) from error
        tools, left_out = parse_tool_list(
            name, raw["tools"], include=self._include, exclude=self._exclude, tasks=raw["tasks"]
        )
        connection.digests = {**_compute_tool_digests(raw["tools"]), **{one.name: one.digest for one in tools}}
        connection.promises = {one.name: one.promise for one in tools if one.promise}
        kept = []
        for tool in tools:
            pinned = self._pins.setdefault(tool.name, tool.digest)
            if pinned == tool.digest:
                kept.append(tool.to_json())
            else:
                left_out.append(
                    f"{visible(tool.name, strict=True)!r}: its definition changed: the accepted one has the digest "
                    f"{pinned}, the new one {tool.digest}; accept the new one with accept({tool.name!r}, digest)"
                )
        connection.offered = {tool["name"]: tool["digest"] for tool in kept}
        prompts = select_usable_prompts(raw["prompts"], left_out) if self._prompts else []
        left_out += [f"its prompts: {raw['prompts_problem']}"] if raw["prompts_problem"] else []
        return freeze_object({"tools": kept, "prompts": prompts, "left_out": left_out})

    def accept(self, name: str, digest: str) -> None:
        """Pin the definition with *digest* for the server's tool *name*, from the next run on."""
        self._pins[name] = digest

    @property
    def pins(self) -> Mapping[str, str]:
        """The pinned digests of definitions by the server's tool name, for ``mcp_tools(pins=...)``."""
        return dict(self._pins)

    async def _call_tool_with_retry(
        self, listed: ListedTool, run: McpRun, ctx: ToolContext, input: Mapping[str, object]
    ) -> ToolResult:
        """
        Call a tool; a failure becomes an error result, and a question of the server a pending result.

        A lost call is repeated once if the server did not perform it, or a trusted hint allows it.
        """
        try:
            return await self._call_tool_once(listed, run, ctx, input)
        except ConnectionLost as lost:
            is_repeatable = self._trusts and listed.hints.get("idempotentHint")
            if not (is_repeatable or isinstance(lost, SessionUnknown)):
                return make_failed_call_result(self.name, lost)
        except ToolError as error:
            return make_failed_call_result(self.name, error)
        try:
            return await self._call_tool_once(listed, run, ctx, input)  # the caller vouches for it (reliability:MC05)
        except ToolError as error:
            return make_failed_call_result(self.name, error)

    async def _call_tool_once(
        self, listed: ListedTool, run: McpRun, ctx: ToolContext, input: Mapping[str, object]
    ) -> ToolResult:
        """Call a tool unless its definition changed, and return its result, or a pending one with a question of the server."""
        connection = self._get_connection(run)

        async def emit_progress(done: float, total: float | None, message: str | None) -> None:
            """Emit the progress that the server reports for the call."""
            percent = min(100.0, max(0.0, 100 * done / total)) if total else None
            ctx.emit(ToolProgress(message=visible(message or ""), percent=percent))

        session = await connection.get_or_start_session((*ctx.ancestor_run_ids, ctx.run_id)[0])
        refusal = await self._find_definition_change(connection, listed, run)
        if refusal:
            return make_error_result(refusal)
        more: dict[str, Any] = {"task": {}} if listed.task else {}
        ticket, call = connection.start_call(connection.call_tool(session, listed.name, input, emit_progress, **more))
        try:
            outcome = await call.wait_for_result_or_request()
        finally:
            if call.task.done():
                connection.remove_call(ticket)
        if not call.task.done() and ctx.has_run:
            ctx.get_or_create_run_object(("mcp", ticket), partial(_HeldRequest, connection, ticket))
        return self._make_result_or_pending(connection, listed, outcome, ticket)

    async def _find_definition_change(self, connection: ServerConnection, listed: ListedTool, run: McpRun) -> str:
        """Return why a tool differs from the list of the run; ``""`` if it does not. A list that may be outdated is fetched first."""
        if not connection.digests or connection.is_stale:
            # The list was read from a record, or the server has another one by now.
            await self.listing(self.name, run=run)
        now = connection.digests.get(listed.name)
        if now == listed.digest:
            return ""
        if now is None:
            return f"the MCP server {self.name!r} does not have the tool {listed.name!r} any more"
        return (
            f"the definition of {listed.tool!r} changed since the list of this run was made, so it is not called: it had the "
            f"digest {listed.digest}, and has {now}"
        )

    def _make_result_or_pending(
        self, connection: ServerConnection, listed: ListedTool, outcome: Any, ticket: str
    ) -> ToolResult:
        """Return the result of a call, or a pending result with the requests of the server; an error if the schema is violated."""
        if isinstance(outcome, ServerRequests):
            return ToolResult.json(freeze_object(self._requests_to_json(outcome, ticket)), status="pending")
        wrong = _find_schema_problem(connection, listed, outcome)
        return make_error_result(wrong) if wrong else make_result(outcome, self._channel, page=listed.page)

    # --- lists that change during a run -----------------------------------------------------------------------------------

    async def _make_pending_if_new_tools(self, result: ToolResult, server_state: _ServerOfRun) -> ToolResult:
        """Return the result as pending if the server has new tools, which the run then adds first."""
        if result.status not in SETTLED or any(effect.kind == CUT_OFF for effect in result.side_effects):
            return result
        connection = self._get_connection(server_state.run)
        if connection.is_stale:
            try:
                await self.listing(self.name, run=server_state.run)
            except StepEngineError as error:
                LOGGER.warning(
                    "the MCP server %r changed its list of tools, but the new list cannot be read: %s", self.name, error
                )
                return result
        if not server_state.has_unknown_tool(connection.offered):
            return result
        return attrs.evolve(result, status="pending", structured={GREW: result.status, "data": result.structured})

    def _list_and_add_new_tools(
        self, server_state: _ServerOfRun, result: ToolResult, pending_data: Mapping[str, Any]
    ) -> Generator[object, Any, ToolResult]:
        """List the server's tools again, and return the call's result with a change that adds the new ones, within limits."""
        settled = attrs.evolve(result, status=pending_data[GREW], structured=pending_data["data"])
        try:
            recorded = yield from Perform.idempotent(partial(self.listing, run=server_state.run), self.name)
        except PerformError:
            return settled
        for reason in recorded["left_out"]:
            if reason not in server_state.reported:
                server_state.reported.add(reason)
                LOGGER.warning("%s", LEFT_OUT_TEXT.format(server=self.name, reason=reason))
        listed = [ListedTool.from_json(one) for one in recorded["tools"]]
        new = [one for one in listed if server_state.is_new(one)]
        kept = server_state.reserve_tool_room(len(new), recorded)
        if kept < len(new):
            LOGGER.warning(
                "the MCP server %r has more tools than one run can hold (%d, and %d bytes of lists): %d are left out, and this run "
                "ignores later lists",
                self.name, TOOLS, RUN_LIST_BYTES, len(new) - kept,
            )  # fmt: skip
            new = new[:kept]
        server_state.digests.update({one.name: one.digest for one in listed})
        tools = [tool for tool in self._make_tools(listed, server_state) if tool.spec.name in {one.tool for one in new}]
        return attrs.evolve(settled, change=Change(tools=tools)) if tools else settled

    # --- what a server wants to know first --------------------------------------------------------------------------------

    def _continue_pending_call(
        self, listed: ListedTool, server_state: _ServerOfRun, input: JsonDict, result: ToolResult
    ) -> Generator[object, Any, ToolResult]:
        """Answer the server's requests in the run and continue the call, or add new tools to the run."""
        waits: Any = result.data
        if isinstance(result.structured, Mapping) and GREW in result.structured:
            return (yield from self._list_and_add_new_tools(server_state, result, result.structured))
        for _ in range(self._asking.rounds):
            answers = yield from self._asking.answer_requests(
                waits["requests"], _make_waiting_check(partial(self._get_connection, server_state.run), waits)
            )
            outcome: Any = yield from Perform(
                partial(self.going_on, run=server_state.run),
                listed.to_json(),
                input,
                waits["ticket"],
                waits["state"],
                answers,
            )
            if "requests" not in outcome:
                return self._result_from_recorded_outcome(listed, outcome)
            waits = outcome
        return make_error_result(f"{listed.tool!r} asked more than {self._asking.rounds} times, so it was given up")

    def _result_from_recorded_outcome(self, listed: ListedTool, outcome: Mapping[str, Any]) -> ToolResult:
        if "error" not in outcome:
            return make_result(outcome["result"], self._channel, page=listed.page)
        return (
            make_lost_server_result(self.name, outcome["error"])
            if outcome.get("lost")
            else make_error_result(outcome["error"])
        )

    async def going_on(
        self,
        tool: Mapping[str, Any],
        input: Mapping[str, Any],
        ticket: str,
        state: str | None,
        answers: Mapping[str, Any],
        *,
        run: McpRun,
    ) -> JsonValue:
        """Send the answers to the server, and return the result, an error or more questions."""
        connection = self._get_connection(run)
        listed = ListedTool.from_json(tool)
        call = connection.find_call(ticket)
        try:
            if call is None or call.task.done():
                if state is None:
                    return {
                        "error": f"the MCP server {self.name!r} does not wait for the answer any more; the outcome is unknown"
                    }
                connection.remove_call(ticket)
                more = {"input_responses": self._asking.make_responses(answers), "request_state": state or None}
                session = await connection.get_or_start_session()
                ticket, call = connection.start_call(connection.call_tool(session, listed.name, input, None, **more))
            else:
                call.answer_server_request(self._asking.make_response(answers["asked"]))
            async with asyncio.timeout(self._options.timeout):
                outcome = await call.wait_for_result_or_request()
            if isinstance(outcome, ServerRequests):
                return self._requests_to_json(outcome, ticket)
        except ToolServerError as error:
            return {"error": error.message, "lost": True}
        except ToolError as error:
            return {"error": error.message}
        except TimeoutError:
            return {"error": f"the MCP server {self.name!r} did not answer within {self._options.timeout:g} s"}
        finally:
            if call is not None and call.task.done():
                connection.remove_call(ticket)
        wrong = _find_schema_problem(connection, listed, outcome)
        return {"error": wrong} if wrong else {"result": make_recordable(outcome)}

    def _requests_to_json(self, wanted: ServerRequests, ticket: str) -> dict[str, Any]:
        """Return the requests of a server for the journal; raise ``ToolError`` if they are too large."""
        requests = mark_oversized_requests(self.name, wanted.requests, wanted.state)
        return {"requests": requests, "state": wanted.state, "ticket": ticket}

    # --- the end ------------------------------------------------------------------------------------------------------

    async def aclose(self, blocked: Any = None) -> None:
        """
        End the server in every event loop; in a stopped loop it is only signalled. The next run starts it again.

        An engine that is closed ends those which no other engine has.
        """
        await self._connections.aclose(self, is_shared=self._is_shared, blocked=blocked)


def _make_waiting_check(connect: Callable[[], ServerConnection], waits: Mapping[str, Any]) -> IsOpen | None:
    """Return the check whether a server of an older protocol still waits; ``None`` for newer ones, which are called again."""
    if waits["state"] is not None:
        return None

    async def is_waiting(ticket: str) -> bool:
        call = connect().find_call(ticket)
        return call is not None and not call.task.done()

    def check_waiting() -> Generator[Any, Any, bool]:
        return (yield from Perform.idempotent(is_waiting, waits["ticket"]))

    return check_waiting


def _find_schema_problem(connection: ServerConnection, listed: ListedTool, outcome: Mapping[str, object]) -> str:
    """Return why a result does not match the output schema of its tool, with the result; ``""`` if it matches."""
    promise = connection.promises.get(listed.name)
    wrong = find_schema_mismatch(listed.tool, promise, outcome) if promise else ""
    if not wrong:
        return ""
    given = make_result(outcome).text
    said = f"\nThe call was carried out, and gave: {given}" if given else ""
    return f"the result is not what {listed.tool!r} promises: {wrong}{said}"


@attrs.define
class _ServerOfRun:
    """
    The tools of a server that one run has, and how many more it may add.

    Attributes:
        run: The run.
        digests: The digests of its tools, by the server's names.
        taken: Names of the tools that the run had before; tools of the server do not replace them.
        reported: The reasons for omitted tools that were logged already.
    """

    run: McpRun
    digests: dict[str, str]
    taken: frozenset[str]
    tools_left: int = TOOLS
    bytes_left: int = RUN_LIST_BYTES
    reported: set[str] = attrs.field(factory=set)

    def reserve_tool_room(self, tool_count: int, recorded: Mapping[str, Any]) -> int:
        """Count a recorded list with *tool_count* new tools, and return how many of them the run may add."""
        self.bytes_left -= len(compact(freeze_object(recorded)))
        kept = min(tool_count, self.tools_left) if self.bytes_left >= 0 else 0
        # A server that fills the room has no more of it: each further list would be one more record.
        self.tools_left = self.tools_left - kept if kept == tool_count else 0
        return kept

    def has_unknown_tool(self, offered: Mapping[str, str]) -> bool:
        """Return whether the server offers a new or changed tool that the run may still add."""
        if self.tools_left <= 0 or self.bytes_left <= 0:
            return False
        return any(self.digests.get(name) != digest for name, digest in offered.items())

    def is_new(self, listed: ListedTool) -> bool:
        """Return whether the run lacks this definition of a tool, and had no other tool of its name before."""
        return self.digests.get(listed.name) != listed.digest and listed.tool not in self.taken


class _HeldRequest:
    """A request that waits for a person; the end of the run cancels it."""

    def __init__(self, connection: ServerConnection, ticket: str) -> None:
        self._connection = connection
        self._ticket = ticket

    async def aclose(self) -> list[str]:
        """Cancel the call that the server still waits with, and return no warnings."""
        await self._connection.cancel_call(self._ticket)
        return []


class _ServerTool(Tool):
    """A tool whose call may continue after its body; see ``Ordinary.follow``."""

    def __init__(self, *args: Any, follow: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._binding: ToolBinding = attrs.evolve(self._binding, runs=Ordinary(self, follow))


def _compute_tool_digests(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the digests of tool definitions by name, without unrecordable tools and those for pages only."""
    made: dict[str, str] = {}
    for tool in tools:
        if is_for_page_only(tool):
            continue
        with suppress(DataError):
            made[tool["name"]] = compute_definition_digest(tool)
    return made
