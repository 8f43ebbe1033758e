"""The routes for AG-UI pages: start a turn of a thread, and reconnect to it. They need the extra ``ag-ui``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import attrs
from attrs import frozen
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from stepengine.adapters.ag_ui import PageRequest, ag_ui, parse_page_request, parse_run_input, sse, stream_reconnection
from stepengine.adapters.ag_ui.asked import find_page_tool_name, select_next_page_answer
from stepengine.data.codec import plain
from stepengine.data.events import RunFinished
from stepengine.data.messages import UserMessage
from stepengine.errors import AnswerRejected
from stepengine.redaction import KNOWN
from stepengine.server.access import require_caller
from stepengine.server.bodies import read_json_body
from stepengine.server.openapi import Operation
from stepengine.server.pages import CallerConversation, StartedTurn, add_ping_comments, require_agent_id
from stepengine.server.problems import Problem
from stepengine.sessions import Session, SessionInfo

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from starlette.requests import Request

    from stepengine.data.events import Event
    from stepengine.data.messages import Message
    from stepengine.data.state import AgentState
    from stepengine.server.ledger import RunRow

__all__ = ("OPERATIONS",)

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class AgentRun(BaseModel):
    """The JSON body of an AG-UI 1 request, `RunAgentInput`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    threadId: Annotated[str, Field(description="The conversation.", min_length=1, max_length=200)]  # noqa: N815
    runId: Annotated[str, Field(description="The id that the page gives to this request.")]  # noqa: N815
    messages: Annotated[
        list[dict[str, Any]], Field(description="Only the last message and the results of the page's tools are used.")
    ]
    protocolVersion: str | None = None  # noqa: N815
    parentRunId: str | None = None  # noqa: N815
    state: Annotated[Any, Field(description="Only the shared members are used.")] = None
    tools: list[dict[str, Any]] | None = None
    context: list[dict[str, Any]] | None = None
    forwardedProps: Any = None  # noqa: N815
    resume: Annotated[list[dict[str, Any]] | None, Field(description="Answers to interrupts.")] = None


async def start_agent_turn(request: Request) -> Response:
    """Start the next turn of a conversation from an AG-UI request, and stream its events."""
    given = await _parse_agent_run_input(request)
    agent, thread = require_agent_id(request), await CallerConversation.load(request, given.thread_id)
    thread.require_not_running()
    asked = parse_page_request(given, _session_from_state(thread.name, thread.state), shares=request.app.state.shares)
    _require_may_answer_last_run(request, thread, given)
    results = select_next_page_answer(thread.state, asked.results)
    page_questions = [question for question, answer in results.items() if asked.answers.get(question) == answer]
    taken = await thread.start_next_turn(
        agent, asked.prompt, asked.answers, metadata=asked.metadata, page_questions=page_questions
    )
    events = _stream_turn_and_follow_ups(request, taken, asked)
    return _make_event_stream_response(
        thread, ag_ui(events, thread_id=asked.thread_id, run_id=asked.run_id, asked=asked)
    )


async def _parse_agent_run_input(request: Request) -> Any:
    """Parse the ``RunAgentInput`` of an AG-UI request; raise ``Problem`` 501 if AG-UI is not installed."""
    if find_spec("ag_ui") is None:
        msg = "this server does not support AG-UI without the package ag-ui-protocol: pip install 'stepengine[ag-ui]'"
        raise Problem(msg, status=501, kind="extra_missing", members={"extra": "ag-ui"})
    return parse_run_input(plain(await read_json_body(request)))


def _require_may_answer_last_run(request: Request, thread: CallerConversation, run_input: Any) -> None:
    """Raise if the caller answers without the scope for it, or answers questions of another run than the last one."""
    asks = thread.state is not None and any(not find_page_tool_name(question) for question in thread.state.pending)
    if run_input.resume or asks:
        require_caller(request).must("answer")
    runs = {entry.interrupt_id.partition(":")[0] for entry in run_input.resume or ()}
    if runs - {"" if thread.last is None else thread.last.run}:
        msg = "the answers are not for the last run of this conversation, so none was accepted; reload the conversation"
        raise AnswerRejected(msg)


async def _stream_turn_and_follow_ups(
    request: Request, turn: StartedTurn, page_request: PageRequest
) -> AsyncGenerator[Event, None]:
    """Yield the events of a turn, and of further turns with results that the page sent early; only the last end is yielded."""
    while True:
        results: dict[str, Any] = {}
        try:
            async for event in turn.events:
                if isinstance(event, RunFinished) and not event.path:
                    results = (
                        select_next_page_answer(event.result.state, page_request.results)
                        if event.result.pending_questions
                        else {}
                    )
                if not results:
                    yield event
        finally:
            await turn.events.aclose()
        if not results:
            return
        thread = await CallerConversation.load(request, page_request.thread_id)
        turn = await thread.start_next_turn(require_agent_id(request), "", results, page_questions=results)


async def reconnect_to_turn(request: Request) -> Response:
    """Stream the running turn of a conversation to a page again; for an idle conversation, send its messages."""
    given, agent = await _parse_agent_run_input(request), require_agent_id(request)
    thread = await CallerConversation.load(request, given.thread_id)
    shares = request.app.state.shares
    if thread.last is None or not thread.has_running_run:
        return _make_event_stream_response(
            thread, stream_reconnection(given, _session_from_state(thread.name, thread.state), shares=shares)
        )
    if thread.last.agent != agent:
        msg = f"the agent {thread.last.agent!r} is running in this conversation; connect to that agent, or wait until it ends"
        raise Problem(msg, status=409, kind="under_way", members={"run_id": thread.last.run})
    turn = thread.last.request.get("turn") or {}
    before = turn.get("after") and await thread.turns.load_or_replay_state(
        await thread.runs.reader.get_run(thread.caller, turn["after"])
    )
    session = _session_from_state(thread.name, before or None)
    watched = _ReconnectedTurn([*session.messages, UserMessage(thread.last.request["prompt"])], thread, thread.last)
    return _make_event_stream_response(thread, stream_reconnection(given, session, watched, shares=shares))


@frozen
class _ReconnectedTurn:
    """A running turn that a page reconnects to: the messages before it, and its events."""

    history: Sequence[Message]
    thread: CallerConversation
    run: RunRow

    def events(self) -> AsyncIterable[Event]:
        """Yield the events of the run from the first one."""
        return self.thread.stream_events(self.run)


def _session_from_state(thread: str, state: AgentState | None) -> Session:
    """Return the conversation of a thread with the messages of its last state."""
    info = SessionInfo(session_id=thread)
    if state is None:
        return Session(info=info)
    return Session(info=attrs.evolve(info, agent_id=state.agent_id), messages=state.message_history, state=state)


def _make_event_stream_response(thread: CallerConversation, events: AsyncGenerator[Any, None]) -> Response:
    """Return a response that streams AG-UI events with secrets redacted, and comments during pauses."""
    return StreamingResponse(
        add_ping_comments(_encode_redacted_events(events), thread.runs.state.stopping),
        media_type="text/event-stream",
        headers=HEADERS,
    )


async def _encode_redacted_events(events: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
    """Yield events as server-sent events, with secrets redacted."""
    lines = sse(events)
    try:
        async for line in lines:
            yield str(KNOWN.redact_keeping_machine_details(line))
    finally:
        await lines.aclose()


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST", path="/ag-ui/{agent}", name="run_agent", scope="run", handler=start_agent_turn, body=AgentRun,
        gives={200: "text/event-stream"}, refuses=(404, 409, 415, 429, 501, 503),
        about=(
            "Start a turn of a conversation, for pages that use AG-UI.\n"
            "The page sends a user message, results of its tools, or answers to interrupts; answers need the scope answer. The server "
            "stores the conversation for the caller. 501 means that the server was installed without the extra ag-ui."
        ),
    ),
    Operation(
        method="POST", path="/ag-ui/{agent}/connect", name="come_back_to_thread", scope="read", handler=reconnect_to_turn, body=AgentRun,
        gives={200: "text/event-stream"}, refuses=(404, 409, 415, 501),
        about="Reconnect to a conversation of AG-UI: its messages, its shared state, and its running run or open questions.",
    ),
)  # fmt: skip
