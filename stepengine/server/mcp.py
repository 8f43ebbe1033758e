"""
The route for MCP clients: the agents are tools, and each call is a run that belongs to its caller.

It needs the extra ``mcp``, which is imported at the first request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from stepengine.adapters.mcp.agent_server import AgentServer, OfferedAgent, OfferedCall, WaitingCall
from stepengine.data.events import RunFinished
from stepengine.errors import DefinitionError, StepEngineError
from stepengine.runtime.logs import LOGGER
from stepengine.server.access import require_caller
from stepengine.server.openapi import Operation
from stepengine.server.pages import require_turns
from stepengine.server.problems import Problem
from stepengine.server.run_requests import StartRequest

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from stepengine.data.events import Event
    from stepengine.data.questions import AnswerLike
    from stepengine.data.state import RunResult
    from stepengine.engine import Engine
    from stepengine.server.access import Caller
    from stepengine.server.run_service import RunService
    from stepengine.server.run_turns import RunTurns

__all__ = ("OPERATIONS", "McpEndpoint")

RUN = "stepengine/run"
"""The member of a result's ``_meta`` that names its run."""

OnEvent = Callable[["Event"], Awaitable[object]]


class McpEndpoint:
    """
    The MCP endpoint of a run server, from its first client until the server stops.

    Args:
        runs: The runs.
    """

    def __init__(self, runs: RunService) -> None:
        self._runs = runs
        self._opening = asyncio.Lock()
        self._server: AgentServer | None = None
        self._engine: Engine | None = None
        self._answer: Callable[..., Awaitable[None]] | None = None
        self._task: asyncio.Task[None] | None = None

    async def get_or_start_handler(self) -> Callable[..., Awaitable[None]]:
        """
        Return the ASGI handler ``answer(scope, receive, send, owner=...)``; start the MCP server, or offer it reloaded agents.

        Raises:
            Problem: If the agents cannot be offered over MCP, or the server is shutting down.
        """
        await self._runs.rebuild_engine_if_changed()
        async with self._opening:
            if self._answer is None:
                await self._start_mcp_server()
            elif self._engine is not self._runs.engine:
                self._offer_reloaded_agents()
        if self._answer is None or self._runs.state.stopping.is_set():
            msg = "the server is shutting down; try again in a moment"
            raise Problem(msg, status=503, kind="stopping", headers={"retry-after": "5"})
        return self._answer

    async def _start_mcp_server(self) -> None:
        """Start an MCP server for the current agents in a task; raise ``Problem`` 501 if that is impossible."""
        if find_spec("mcp") is None:
            msg = "this server does not support MCP without the package mcp: pip install 'stepengine[mcp]'"
            raise Problem(msg, status=501, kind="extra_missing", members={"extra": "mcp"})
        runs, turns = self._runs, require_turns(self._runs)
        try:
            self._engine, offered = runs.engine, self._list_offered_agents()
            # What it imports takes half a second.
            self._server = server = await asyncio.to_thread(AgentServer, offered, runner=ServerCallRunner(runs, turns))
        except DefinitionError as error:
            raise Problem(error.message, status=501, kind="not_offered") from error
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run_until_stopped(server, opened))
        await asyncio.wait((self._task, opened), return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            self._task.result()  # raises the error of the failed start; the next call tries again

    def _list_offered_agents(self) -> list[OfferedAgent]:
        """Return the agents that clients may start, as offered over MCP."""
        engine = self._runs.engine
        return [OfferedAgent(engine, engine.agent(name)) for name in self._runs.agents]

    def _offer_reloaded_agents(self) -> None:
        """Offer the agents of the rebuilt engine; if they cannot be tools, log that and still offer the earlier ones."""
        self._engine = self._runs.engine
        assert self._server is not None  # noqa: S101 - it was started
        try:
            self._server.replace_agents(self._list_offered_agents())
        except DefinitionError as error:
            LOGGER.error("the reloaded agents cannot be offered over MCP: %s", error.message)

    async def _run_until_stopped(self, server: AgentServer, opened: asyncio.Future[None]) -> None:
        """Open the MCP server, serve until the run server stops, and close it. The same task must open and close it."""
        async with server.open_http() as answer:
            self._answer = answer
            opened.set_result(None)
            await self._runs.state.stopping.wait()
            self._answer = None

    async def wait_until_stopped(self) -> None:
        """Wait until the MCP server has stopped."""
        if self._task is not None:
            await asyncio.wait((self._task,))


class ServerCallRunner:
    """
    Executes the tool calls of MCP clients as runs of a server.

    Args:
        runs: The runs.
        turns: Their turns.
    """

    def __init__(self, runs: RunService, turns: RunTurns) -> None:
        self._runs = runs
        self._turns = turns
        self._ending: set[asyncio.Task[None]] = set()

    async def start_and_wait(
        self, ctx: Any, offered: OfferedAgent, prompt: str, params: Any, on_event: OnEvent
    ) -> tuple[OfferedCall, RunResult]:  # fmt: skip
        """Start a run and wait until it ends or is suspended; *on_event* receives its events."""
        caller, asked = (
            require_caller(ctx.request),
            StartRequest(agent=offered.definition.id, prompt=prompt, params=params, is_patient=False),
        )
        with _raise_problems_as_engine_errors():
            run, _ = await self._runs.launcher.start(caller, asked)
            row = await self._runs.reader.get_run(caller, run)
        events = self._turns.events(caller, row)
        return _make_offered_call(offered, run), await self._wait_for_result(caller, run, events, on_event)

    async def answer_and_wait(self, ctx: Any, call: OfferedCall, answers: Mapping[str, AnswerLike]) -> RunResult:
        """Answer a suspended run, and wait until it ends or is suspended again."""
        caller = require_caller(ctx.request)
        with _raise_problems_as_engine_errors():
            caller.must("answer")
            row = await self._runs.reader.get_run(caller, call.run)
            events = await self._turns.answer_and_stream(caller, row, answers)
        return await self._wait_for_result(caller, row.run, events, _ignore_event)

    async def _wait_for_result(
        self, caller: Caller, run: str, events: AsyncGenerator[Event, None], on_event: OnEvent
    ) -> RunResult:
        """
        Wait for the end of a run and return its result; cancel the run if the client cancels its call.

        Raises:
            StepEngineError: If the events end before the result, as when the server stops.
        """
        result: RunResult | None = None
        try:
            async for event in events:
                await on_event(event)
                if isinstance(event, RunFinished) and not event.path:
                    result = event.result
        except asyncio.CancelledError:
            # Not when the server stops: the next process resumes the run.
            if not self._runs.state.stopping.is_set():
                task = asyncio.create_task(self._cancel_ignoring_errors(caller, run))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            raise
        finally:
            await events.aclose()
        if result is None:
            msg = f"the run {run} goes on, and what comes of it is not shown here"
            raise StepEngineError(msg)
        return result

    async def _cancel_ignoring_errors(self, caller: Caller, run: str) -> None:
        """Cancel a run because its client cancelled the call; errors are ignored."""
        with contextlib.suppress(StepEngineError, Problem):
            await self._runs.messenger.cancel(
                await self._runs.reader.get_run(caller, run), "the client took its call back"
            )

    def may_answer(self, ctx: Any) -> bool:
        """Return whether the caller has the scope ``answer``."""
        return require_caller(ctx.request).may("answer")

    def store_waiting_call(self, waiting: WaitingCall) -> str:
        """Return the id of the run as the key. Nothing is stored, since the ledger already has the run."""
        return str(waiting.call.run)

    async def find_waiting_call(self, ctx: Any, key: str) -> WaitingCall | None:
        """Return the call whose run has the id *key*; ``None`` if it is not the caller's or waits for no answer."""
        try:
            row = await self._runs.reader.get_run(require_caller(ctx.request), key)
        except Problem:
            return None
        questions = (await self._runs.reader.load_details(row)).questions
        if not questions or row.agent not in self._runs.agents:
            return None
        engine = self._runs.engine
        return WaitingCall(_make_offered_call(OfferedAgent(engine, engine.agent(row.agent)), row.run), questions)


def _make_offered_call(offered: OfferedAgent, run: str) -> OfferedCall:
    """Return the call of an agent with its run id and the text for the client while the run waits."""
    goes_on = f"it is kept as the run {run!r} of this server, and goes on when what it waits for has come"
    return OfferedCall(offered, run, {RUN: run}, goes_on)


async def _ignore_event(event: Event) -> None:
    """Ignore the event."""


@contextlib.contextmanager
def _raise_problems_as_engine_errors() -> Any:
    """Raise a ``Problem`` of the block as a ``StepEngineError``, whose message the client reads in the tool result."""
    try:
        yield
    except Problem as problem:
        raise StepEngineError(problem.message) from problem


class _DelegatedResponse(Response):
    """A response that another ASGI application sends."""

    def __init__(self, answer: Callable[..., Awaitable[None]]) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send, owner=require_caller(scope).name)


async def forward_to_mcp(request: Request) -> Response:
    """Return a response from the MCP server, which the first request starts."""
    door: McpEndpoint = request.app.state.mcp
    return _DelegatedResponse(await door.get_or_start_handler())


ABOUT = (
    "{}, for clients of MCP over streamable HTTP.\n"
    "Each agent is a tool, and each call is a run of its caller. Protocol errors are JSON-RPC errors. 501 means that the server "
    "was installed without the extra mcp."
)
OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST", path="/mcp", name="send_mcp_message", scope="run", handler=forward_to_mcp, refuses=(406, 415, 501),
        gives={200: "text/event-stream", 202: None}, about=ABOUT.format("Send a message"),
    ),
    Operation(
        method="GET", path="/mcp", name="listen_to_mcp", scope="run", handler=forward_to_mcp, refuses=(406, 501),
        gives={200: "text/event-stream"}, about=ABOUT.format("Receive the messages that the server sends on its own"),
    ),
    Operation(
        method="DELETE", path="/mcp", name="end_mcp_session", scope="run", handler=forward_to_mcp, refuses=(404, 501),
        gives={200: None}, about=ABOUT.format("End a session"),
    ),
)  # fmt: skip
