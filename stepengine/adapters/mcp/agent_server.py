"""
Agents as tools of an MCP server: one tool for each agent. Questions of a run are asked through elicitation.

A call is a run with a journal, in memory or in a folder that the caller names. When the run asks something, a client of the
newest protocol is sent the questions and calls again with the answers; one of an older protocol is asked in the middle of its
call; for one that cannot be asked everything is declined, so that nothing happens which a person had to allow, and the result
says so.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import frozen

from stepengine.adapters.mcp._caps import MAX_ATTEMPTS, QUESTION_CHARS
from stepengine.adapters.mcp.connection import require_mcp_package
from stepengine.adapters.mcp.owned_sessions import OwnedSessions
from stepengine.data.alike import list_names
from stepengine.data.call_text import PreviewPart, preview_parts
from stepengine.data.choices import answer_from_form, answer_schema, describe_options
from stepengine.data.definition import AgentDefinition
from stepengine.data.events import Event, RunFinished, ToolStarted
from stepengine.data.json import compact, thaw
from stepengine.data.questions import Answer, AnswerLike, Question
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.visible import cut_middle, visible
from stepengine.data.waits import describe_waits
from stepengine.engine import Engine
from stepengine.engine.schemas import compile_schemas
from stepengine.errors import DefinitionError, StepEngineError
from stepengine.journal import FileJournal, MemoryJournal
from stepengine.tools.agent_tools import make_spawnable_agent_tool
from stepengine.tools.conversion import encode
from stepengine.workspace.http_connections import (
    limit_connection_logs,
    report_verified_token,
    uvicorn_connection_options,
)
from stepengine.workspace.installed import get_installed_version
from stepengine.workspace.urls import MAX_PORT, find_listen_problem, is_loopback_host

if TYPE_CHECKING:
    from mcp.server import Server

WAITING = 100
"""How many runs may wait for answers at once; then the oldest one is removed."""
SHUTDOWN_SECONDS = 2
"""Open streams never end by themselves; a person who pressed Ctrl-C waits no longer."""
UNASKED = 10
"""The most unasked questions that a result names."""
JOURNAL = "stepengine/journal"
"""The member of a result's ``_meta`` that names the journal of its run."""


@frozen
class OfferedAgent:
    """
    One agent that is offered.

    Attributes:
        engine: What runs it.
        definition: The agent.
        options: Options of its runs, such as ``limits``.
    """

    engine: Engine
    definition: AgentDefinition
    options: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.define
class OfferedCall:
    """
    A call of an agent.

    Attributes:
        offered: The agent.
        run: The run, in the form that the ``CallRunner`` uses; a journal for ``LocalRuns``.
        meta: The ``_meta`` of the result.
        goes_on: How to resume a run that waits for something else than answers; ``""`` if that is impossible.
        unasked: The questions that were declined because the client shows no questions.
    """

    offered: OfferedAgent
    run: Any
    meta: dict[str, Any] | None = None
    goes_on: str = ""
    unasked: list[Question] = attrs.field(factory=list)


@frozen
class WaitingCall:
    """A call whose run waits for answers."""

    call: OfferedCall
    questions: tuple[Question, ...]


class CallRunner(Protocol):
    """Executes the calls of clients; ``ctx`` is the package's context of a request."""

    async def start_and_wait(
        self, ctx: Any, offered: OfferedAgent, prompt: str, params: Any, on_event: Callable[[Event], Awaitable[object]]
    ) -> tuple[OfferedCall, RunResult]:
        """Run an agent until it ends or waits, and call *on_event* with its events."""

    async def answer_and_wait(self, ctx: Any, call: OfferedCall, answers: Mapping[str, AnswerLike]) -> RunResult:
        """Resume a waiting run with *answers* until it ends or waits again."""

    def may_answer(self, ctx: Any) -> bool:
        """Return whether the caller may answer the questions of a run."""

    def store_waiting_call(self, waiting: WaitingCall) -> str:
        """Store a call whose run waits for answers, and return a key that only its caller can use."""

    async def find_waiting_call(self, ctx: Any, key: str) -> WaitingCall | None:
        """Return the call stored under *key*, which may be removed; ``None`` if this caller has none."""


class LocalRuns:
    """
    Executes calls as runs of this process, with journals in memory or in a folder, and stores the last waiting calls.

    Args:
        journals: The folder in which each call's run is recorded, in a file of its own; by default in memory.
    """

    def __init__(self, journals: str | os.PathLike[str] | None = None) -> None:
        self._journals = None if journals is None else Path(journals)
        self._waiting: dict[str, WaitingCall] = {}

    async def start_and_wait(
        self, ctx: Any, offered: OfferedAgent, prompt: str, params: Any, on_event: Callable[[Event], Awaitable[object]]
    ) -> tuple[OfferedCall, RunResult]:
        """Run an agent until it ends or waits, and call *on_event* with its events. *ctx* is ignored."""
        call = self._make_call_with_journal(offered)
        return call, await _run_in_own_task(self._run_and_forward_events(call, prompt, params, on_event))

    def _make_call_with_journal(self, offered: OfferedAgent) -> OfferedCall:
        if self._journals is None:
            return OfferedCall(offered, MemoryJournal())
        try:
            self._journals.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            msg = f"the journal folder {str(self._journals)!r} cannot be created: {error.strerror}"
            raise StepEngineError(msg) from error
        path = self._journals / f"{offered.definition.id}-{secrets.token_hex(6)}.jsonl"
        goes_on = (
            f"it is kept as the run {path.stem!r}, and goes on when what it waits for has come, by `stepengine resume --due` on the "
            "folder of this server's journals"
        )
        return OfferedCall(offered, FileJournal(path), {JOURNAL: path.name}, goes_on)

    async def _run_and_forward_events(
        self, call: OfferedCall, prompt: str, params: Any, on_event: Callable[[Event], Awaitable[object]]
    ) -> RunResult:  # fmt: skip
        """Run an agent until it ends or waits, call *on_event* with each event, and return the result."""
        offered = call.offered
        result: RunResult | None = None
        options: dict[str, Any] = {**offered.options, "journal": call.run, "params": params}
        async for event in offered.engine.stream(offered.definition, prompt, **options):
            await on_event(event)
            if isinstance(event, RunFinished):
                result = event.result
        if result is None:
            msg = f"the run of {offered.definition.id!r} ended without a result"
            raise StepEngineError(msg)
        return result

    async def answer_and_wait(self, ctx: Any, call: OfferedCall, answers: Mapping[str, AnswerLike]) -> RunResult:
        """Resume a waiting run with *answers* until it ends or waits again. *ctx* is ignored."""
        return await _run_in_own_task(call.offered.engine.resume(call.run, answers=answers))

    def may_answer(self, ctx: Any) -> bool:
        """Return True: every caller may answer."""
        return True

    def store_waiting_call(self, waiting: WaitingCall) -> str:
        """Store a call whose run waits for answers, and return an unguessable key."""
        while len(self._waiting) >= WAITING:
            self._waiting.pop(next(iter(self._waiting)))
        key = secrets.token_urlsafe(32)
        self._waiting[key] = waiting
        return key

    async def find_waiting_call(self, ctx: Any, key: str) -> WaitingCall | None:
        """Remove and return the call stored under *key*; ``None`` for an unknown key. *ctx* is ignored."""
        return self._waiting.pop(key, None)


def _make_mcp_tool(agent: AgentDefinition) -> Any:
    import mcp_types as types

    spec, promise = make_spawnable_agent_tool(agent).spec, _find_object_output_schema(agent)
    return types.Tool(
        name=spec.name,
        title=agent.display_name,
        description=spec.description,
        input_schema=thaw(spec.input_schema),
        output_schema=None if promise is None else thaw(promise),
    )


class AgentServer:
    """
    An MCP server whose tools are agents; ``server`` is the object of the package ``mcp`` for any transport.

    Args:
        offered: The agents; each is a tool with its id, ``-`` as ``_``.
        journals: The folder in which the run of each call is recorded in its own file, whose path is in the result's ``_meta``; by
            default nothing is stored on disk.
        runner: Executes the calls; a ``LocalRuns`` with *journals* by default.

    Raises:
        DefinitionError: If two agents have the same tool name, *offered* is empty, or the package is not installed.
    """

    def __init__(
        self,
        offered: Sequence[OfferedAgent],
        *,
        journals: str | os.PathLike[str] | None = None,
        runner: CallRunner | None = None,
    ) -> None:
        require_mcp_package()
        from mcp.server import Server

        self._runner: CallRunner = LocalRuns(journals) if runner is None else runner
        self._offered: dict[str, OfferedAgent] = {}
        self._tools: list[Any] = []
        self.replace_agents(offered)
        self.server: Server[Any] = Server(
            "stepengine",
            version=get_installed_version("stepengine") or "0",
            on_list_tools=self._list_tools,
            on_call_tool=self._call_agent_tool,
        )

    def replace_agents(self, offered: Sequence[OfferedAgent]) -> None:
        """
        Offer these agents in place of the present ones, to all clients from their next request on.

        Raises:
            DefinitionError: If two agents have the same tool name, or *offered* is empty; nothing was changed.
        """
        known: dict[str, OfferedAgent] = {}
        for one in offered:
            name = make_spawnable_agent_tool(one.definition).spec.name
            if name in known:
                msg = f"two agents have the tool name {name!r}; offer only one of them"
                raise DefinitionError(msg)
            known[name] = one
        if not known:
            msg = "an MCP server of agents needs at least one agent"
            raise DefinitionError(msg)
        self._tools = [_make_mcp_tool(one.definition) for one in offered]
        self._offered = known

    async def serve_stdio(self) -> None:
        """Answer one client on standard input and output, until it closes them."""
        from mcp.server.stdio import stdio_server

        async with stdio_server() as (read, write):
            await self.server.run(read, write, self.server.create_initialization_options())

    async def serve_http(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str = "",
        ready: Callable[[str], object] | None = None,
    ) -> None:
        """
        Answer any number of clients over streamable HTTP at ``/mcp``, until the task is cancelled.

        Requests that are open then have two seconds. Signals are the caller's. Connections have the limits of ``stepengine serve``.

        Args:
            host: The address to listen at.
            port: The port; 0 selects a free one.
            token: The token that requests need as ``Authorization: Bearer ...``; with ``""`` every request is accepted.
            ready: Called with the URL when the port is open.

        Raises:
            DefinitionError: Without a token, for an address that other machines can reach; and for an address that is not available.
        """
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol

        if problem := find_listen_problem(host):
            msg = f"cannot listen at {host}:{port}: {problem}"
            raise DefinitionError(msg)
        if not token and not is_loopback_host(host):
            msg = f"anyone who reaches {host!r} could run these agents; set a token that clients must send, or listen at 127.0.0.1"
            raise DefinitionError(msg)
        app: Any = self.server.streamable_http_app(host=host)
        with _open_listening_socket(host, port) as listener:
            config = uvicorn.Config(
                _wrap_with_token_check(app, token) if token else app,
                log_level="warning",
                lifespan="on",
                **uvicorn_connection_options(H11Protocol),
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
            if ready is not None:
                shown = f"[{host}]" if ":" in host else host
                ready(f"http://{shown}:{listener.getsockname()[1]}/mcp")
            server = uvicorn.Server(config)
            server.capture_signals = nullcontext  # type: ignore[method-assign,assignment]  # they are not this one's
            with limit_connection_logs():
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                try:
                    await asyncio.shield(serving)
                except asyncio.CancelledError:
                    server.should_exit = True
                    await asyncio.wait((serving,))
                    raise

    @asynccontextmanager
    async def open_http(self) -> AsyncIterator[Callable[..., Awaitable[None]]]:
        """
        Yield an ASGI handler for streamable HTTP: ``answer(scope, receive, send, owner=...)``.

        A session of the protocol is known to its owner alone, and an owner has a hundred at most: those that it used least
        recently end. Its caller decides who may ask at all.
        """
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

        manager = StreamableHTTPSessionManager(app=self.server)

        async def handle_as_owner(scope: Any, receive: Any, send: Any, *, owner: str) -> None:
            """Handle a request in the sessions of *owner*."""
            user = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
            await sessions.forward_request({**scope, "user": user}, receive, send, owner=owner)

        sessions = OwnedSessions(manager.handle_request)
        async with manager.run():
            yield handle_as_owner

    # --- requests -----------------------------------------------------------------------------------------------------

    async def _list_tools(self, ctx: object, params: object) -> Any:
        import mcp_types as types

        return types.ListToolsResult(tools=self._tools)

    async def _call_agent_tool(self, ctx: Any, params: Any) -> Any:
        """Run an agent, or resume a run with answers, and return its result or questions; an error becomes an error result."""
        try:
            if params.request_state is not None:
                return await self._resume_with_answers(ctx, params)
            offered = self._offered.get(params.name)
            if offered is None:
                known = list_names(self._offered, params.name)
                return _make_call_error(f"there is no agent {visible(params.name, strict=True)!r}; known are: {known}")
            call, result = await self._run_agent(ctx, offered, params.arguments or {})
            return await self._make_result_or_questions(ctx, call, result)
        except StepEngineError as error:
            return _make_call_error(
                "\n  ".join([error.message, *[i for i in getattr(error, "issues", ()) if i not in error.message]])
            )

    async def _run_agent(
        self, ctx: Any, offered: OfferedAgent, arguments: Mapping[str, Any]
    ) -> tuple[OfferedCall, RunResult]:
        """Run an agent, and notify the client of its tool calls if requested."""
        count = 0

        async def report_tool_start(event: Event) -> None:
            """Report a started tool call to the client as progress; ignore errors."""
            nonlocal count
            if isinstance(event, ToolStarted):
                count += 1
                with suppress(Exception):  # the client may be gone; the run has its own end
                    await ctx.session.report_progress(count, None, event.tool_name)

        return await self._runner.start_and_wait(
            ctx, offered, str(arguments.get("prompt") or ""), arguments.get("params"), report_tool_start
        )  # fmt: skip

    async def _resume_with_answers(self, ctx: object, params: Any) -> object:
        """Resume a waiting run with the answers of a client; return its questions again if an accepted form lacks its answer."""
        waiting = await self._runner.find_waiting_call(ctx, params.request_state)
        if waiting is None:
            return _make_call_error(
                "the run that asked this is not known here any more; call again without request state"
            )
        given, call = params.input_responses or {}, waiting.call
        if any(_is_accepted_without_answer(given.get(q.id)) for q in waiting.questions):
            return self._store_call_and_make_questions(waiting)
        answers = {q.id: _parse_answer(given.get(q.id), q) for q in waiting.questions}
        call.unasked += [q for q in waiting.questions if given.get(q.id) is None]
        return await self._make_result_or_questions(ctx, call, await self._runner.answer_and_wait(ctx, call, answers))

    async def _make_result_or_questions(self, ctx: object, call: OfferedCall, result: RunResult) -> object:
        """Return the result of a run or its questions; ask older clients at once, and resume the run."""
        while questions := result.pending_questions:
            if not self._runner.may_answer(ctx):
                break
            if _supports_elicitation(ctx) and _has_modern_protocol(ctx):
                return self._store_call_and_make_questions(WaitingCall(call, questions))
            answers = {q.id: await _ask_older_client(ctx, q) for q in questions}
            call.unasked += [q for q in questions if answers[q.id] is UNSHOWN]
            result = await self._runner.answer_and_wait(ctx, call, answers)
        return _make_result_with_notes(call, result)

    def _store_call_and_make_questions(self, waiting: WaitingCall) -> object:
        """Return the questions, with a key for the answers."""
        import mcp_types as types

        requests: Any = {q.id: types.ElicitRequest(params=_make_question_form(q)) for q in waiting.questions}
        return types.InputRequiredResult(
            input_requests=requests, request_state=self._runner.store_waiting_call(waiting)
        )


# --- over HTTP --------------------------------------------------------------------------------------------------------


def _open_listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address; raise ``DefinitionError`` if the address cannot be used."""
    if not 0 <= port <= MAX_PORT:
        msg = f"cannot listen at {host}:{port}: a port must be 0 to {MAX_PORT}"
        raise DefinitionError(msg)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        msg = f"cannot listen at {host}:{port}: {error.strerror or error}"
        raise DefinitionError(msg) from error


def _wrap_with_token_check(app: Any, token: str) -> Any:
    """Return an application that accepts only requests with the token."""
    expected = f"bearer {token}".encode()

    async def check_token(scope: Any, receive: Any, send: Any) -> None:
        """Answer 401 to an HTTP request without the token; pass others to the application."""
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            kind, _, rest = given.partition(b" ")
            if not hmac.compare_digest(kind.lower() + b" " + rest, expected):
                head = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
                await send({"type": "http.response.start", "status": 401, "headers": head})
                await send({"type": "http.response.body", "body": b""})
                return
            report_verified_token(scope)
        await app(scope, receive, send)

    return check_token


async def _run_in_own_task(work: Coroutine[object, Any, RunResult]) -> RunResult:
    """Run *work* in its own task. Cancelling the caller cancels the task without waiting for its end."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


UNSHOWN = Answer(declined=True)
"""The answer of a client that shows no questions, or could not show this one."""


# --- questions --------------------------------------------------------------------------------------------------------


def _supports_elicitation(ctx: Any) -> bool:
    """Return whether the client can show questions to its user."""
    import mcp_types as types

    able: bool = ctx.session.check_client_capability(
        types.ClientCapabilities(elicitation=types.ElicitationCapability())
    )
    return able


def _has_modern_protocol(ctx: Any) -> bool:
    """Return whether the client uses a protocol version in which a result may ask for input."""
    from mcp_types.version import MODERN_PROTOCOL_VERSIONS

    return ctx.session.protocol_version in MODERN_PROTOCOL_VERSIONS


def _make_question_form(question: Question) -> Any:
    """Return a question as a form with one field. The message has the preview of the call and the complete call."""
    import mcp_types as types

    lines = [visible(text) for text in (question.text, *question.origins)]
    lines += [_format_preview_part(part) for part in preview_parts(question.preview or {})]
    lines += [] if question.details is None else [visible(compact(question.details))]
    # A form has lists of options, and no lists of texts.
    field = answer_schema(attrs.evolve(question, allow_text=question.allow_text and not question.multi_select))
    told = [text for text in (field.get("description", ""), visible(describe_options(question))) if text]
    field |= {"description": "\n".join(told)} if told else {}
    schema = {"type": "object", "properties": {"answer": field}, "required": ["answer"]}
    return types.ElicitRequestFormParams(message="\n".join(lines), requested_schema=schema)


def _format_preview_part(part: PreviewPart) -> str:
    text = visible(part.value if isinstance(part.value, str) else compact(part.value))
    label = visible(part.name, strict=True) if part.kind == "member" else ""
    return f"$ {text}" if part.kind == "command" else f"{label}: {text}".removeprefix(": ")


async def _ask_older_client(ctx: Any, question: Question) -> AnswerLike:
    """Ask a client of an older protocol by a form, at most three times; ``UNSHOWN`` if it shows no questions."""
    from mcp import MCPError

    if not _supports_elicitation(ctx):
        return UNSHOWN
    form = _make_question_form(question)
    try:
        for _ in range(MAX_ATTEMPTS):
            given = await ctx.session.elicit_form(form.message, form.requested_schema)
            if not _is_accepted_without_answer(given):
                return _parse_answer(given, question)
    except MCPError:
        return UNSHOWN
    return Answer(declined=True, reason="The client accepted the form without an answer")


def _is_accepted_without_answer(response: Any) -> bool:
    """Return whether a client accepted a form without the one member that the form requires."""
    return getattr(response, "action", "") == "accept" and "answer" not in (response.content or {})


def _parse_answer(response: Any, question: Question) -> Answer:
    """Return the answer of a client. An invalid answer declines, so that the run is not lost."""
    if response is None or getattr(response, "action", "") != "accept":
        return Answer(declined=True)
    return answer_from_form(question, (response.content or {}).get("answer"))


def _find_object_output_schema(definition: AgentDefinition) -> Any:
    """Return the output schema of an agent; ``None`` if its output may be no object."""
    output = compile_schemas(definition).output
    return output.json_schema if output is not None and output.json_schema.get("type") == "object" else None


# --- results ----------------------------------------------------------------------------------------------------------


def _make_result_with_notes(call: OfferedCall, result: RunResult) -> object:
    """Return the call result for a run, with notes about declined questions; an error unless the run completed or can be resumed."""
    import mcp_types as types

    notes = [types.TextContent(type="text", text=_describe_unasked_questions(call.unasked))] if call.unasked else []
    meta: Any = call.meta
    if result.status is RunStatus.SUSPENDED:
        told = types.TextContent(type="text", text=_describe_suspended_run(call, result))
        # Where a result of the shape of the output was promised, only an error may be without one.
        is_error = not call.goes_on or _find_object_output_schema(call.offered.definition) is not None
        return types.CallToolResult(content=[told, *notes], is_error=is_error, _meta=meta)
    if result.status is not RunStatus.COMPLETED:
        why = f": {result.error}" if result.error is not None else ""
        said = f"\nIt said before: {result.text}" if result.text else ""
        failed = f"the agent {call.offered.definition.id!r} ended as {result.status.value}{why}{said}"
        text = types.TextContent(type="text", text=failed)
        return types.CallToolResult(content=[text, *notes], is_error=True, _meta=meta)
    output: object = None if result.output is None else thaw(encode(result.output))
    text = types.TextContent(
        type="text", text=result.text or (output if isinstance(output, str) else compact(encode(result.output)))
    )
    more: dict[str, Any] = {"structured_content": output} if isinstance(output, dict) else {}
    return types.CallToolResult(content=[text, *notes], _meta=meta, **more)


def _describe_suspended_run(call: OfferedCall, result: RunResult) -> str:
    """Return a description of waits that no client can answer, and of how the run is resumed."""
    waits = visible(describe_waits(result.waits_for))
    said = f"\nIt said before: {result.text}" if result.text else ""
    if not call.goes_on:
        return (
            f"{waits} It cannot go on: this server keeps no runs, so what it did is lost. Whoever runs it gives it a folder "
            f"for their journals.{said}"
        )
    asks = "".join(
        [f"\n- {visible(cut_middle(one.text, QUESTION_CHARS))}" for one in result.pending_questions[:UNASKED]]
    )
    asked = f" It asks, and whoever called may not answer:{asks}\n" if asks else ""
    return (
        f"{waits}{asked} This is not its result: {call.goes_on}. A second call would begin another run.{said}".strip()
    )


def _describe_unasked_questions(questions: Sequence[Question]) -> str:
    """Return a note about questions that were not asked, so that the result is not read as a denial."""
    named = [f"- {visible(cut_middle(question.text, QUESTION_CHARS))}" for question in questions[:UNASKED]]
    more = [f"- and {len(questions) - UNASKED:,} more"] if len(questions) > UNASKED else []
    head = "This client shows no questions (elicitation), so nobody was asked, and what the run asked was declined:"
    return "\n".join([head, *named, *more])


def _make_call_error(text: str) -> object:
    import mcp_types as types

    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)
