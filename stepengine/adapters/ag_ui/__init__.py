"""
Runs for web pages that speak AG-UI, the agent-user interaction protocol.

An observer of events and nothing more: each event of a run becomes one or several of theirs, in order, and what a page sends becomes a
prompt or answers. What their protocol cannot say travels in its custom events. Conversations are kept here and not taken from the
browser, which may have changed them: of what a page sends only what is new, and what answers an open question, is read.

What lives here: our events as its events; ``asked`` reads its input. The package ``ag_ui`` is imported only here, on first use.

Must not be here: HTTP (the application has a server, and the package an encoder for its lines), and history from a browser.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from stepengine.adapters.ag_ui.asked import (
    PageRequest,
    find_page_tool_name,
    find_permission_call_id,
    list_waiting_page_call_ids,
    page_hooks,
    parse_page_request,
    run_turns,
)
from stepengine.adapters.display_items import FAILURES, CallEvent, CallItems, TextEvent, TextItem, TextItems
from stepengine.data.choices import answer_schema, make_approval_schema, question_to_json
from stepengine.data.codec import plain
from stepengine.data.events import (
    SENT_AS_DATA,
    AgentFinished,
    AgentSpawned,
    AnswerReceived,
    Event,
    PermissionDecided,
    PermissionRequested,
    QuestionAsked,
    ReplyDiscarded,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextCompleted,
    TextDelta,
    ThinkingCompleted,
    ThinkingDelta,
    TodosChanged,
    ToolFinished,
    ToolInputDelta,
    ToolLog,
    ToolProgress,
    ToolStarted,
    WaitFinished,
    WaitStarted,
)
from stepengine.data.json import ABSENT, thaw
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunResult, RunStatus, find_suspended_reply_index
from stepengine.data.waits import describe_waits
from stepengine.errors import DefinitionError, InputError, StepEngineError
from stepengine.sessions import Session

if TYPE_CHECKING:
    from ag_ui.core import BaseEvent, RunAgentInput

    from stepengine.runtime.handle import RunHandle

__all__ = (
    "PageRequest",
    "RunningTurn",
    "ag_ui",
    "page_hooks",
    "parse_page_request",
    "parse_run_input",
    "run_turns",
    "sse",
    "stream_reconnection",
)


async def ag_ui(
    events: AsyncIterable[Event],
    *,
    thread_id: str,
    run_id: str,
    verbose: bool = False,
    asked: PageRequest | None = None,
) -> AsyncGenerator[BaseEvent, None]:
    """
    Yield the events of a run as AG-UI 1.0 events.

    A suspended run ends with the outcome ``interrupt``, which has its open questions; ``parse_page_request`` parses the answers. A run
    that fails, or an error that *events* raises, ends with ``RUN_ERROR``. Leaving the iteration early closes *events*.

    Args:
        events: The events of a run, such as ``engine.stream(...)`` or ``handle.events()``.
        thread_id: The id that the page gave to the conversation.
        run_id: The id that the page gave to the run; the engine's id is in the metadata of ``RUN_STARTED``.
        verbose: Whether events without an equivalent in the protocol are sent as ``CUSTOM``.
        asked: The request of the page. With it, the page executes calls of its own tools, calls that it saw before the run was suspended
            are not started again, and the shared members of the state are sent: as ``STATE_SNAPSHOT`` at the start, as
            ``STATE_DELTA`` when a tool changes them, and as ``STATE_SNAPSHOT`` at the end after other changes.

    Raises:
        DefinitionError: If ``ag_ui`` is not installed.
    """
    async for shown in _translate_events(
        events, _EventTranslator(_import_core(), thread_id, run_id, verbose=verbose, asked=asked)
    ):
        yield shown


def parse_run_input(value: object) -> RunAgentInput:
    """
    Validate the request body of a page, and return it as the protocol's object.

    Args:
        value: The JSON of the body.

    Raises:
        DefinitionError: If ``ag_ui`` is not installed.
        InputError: With an issue for each invalid member, and for another major version of the protocol.
    """
    core = _import_core()
    from pydantic import ValidationError

    try:
        given: RunAgentInput = core.RunAgentInput.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        issues = tuple([f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in found])
        msg = f"a page sent an invalid AG-UI request: {'; '.join(issues[:5])}"
        raise InputError(msg, issues=issues) from None
    known = core.PROTOCOL_VERSION.partition(".")[0]
    if given.protocol_version is not None and given.protocol_version.partition(".")[0] != known:
        msg = f"protocolVersion: {given.protocol_version[:20]!r} is not supported; use the major version {known}"
        raise InputError(msg, issues=(msg,))
    return given


async def sse(events: AsyncIterable[BaseEvent]) -> AsyncGenerator[str, None]:
    """Yield *events* as server-sent events. Leaving the iteration early closes *events*."""
    try:
        async for event in events:
            yield f"data: {event.model_dump_json(by_alias=True)}\n\n"
    finally:
        await _close_if_generator(events)


class RunningTurn(Protocol):
    """The part of ``RunHandle`` that a reconnecting page needs, also for a run that another process executes."""

    @property
    def history(self) -> Sequence[Message]:
        """The messages so far, starting with the conversation before the run."""

    def events(self) -> AsyncIterable[Event]:
        """Yield all events of the run from the first one."""


async def stream_reconnection(
    given: RunAgentInput,
    session: Session,
    handle: RunHandle | RunningTurn | None = None,
    *,
    shares: Collection[str] = (),
) -> AsyncGenerator[BaseEvent, None]:
    """
    Yield the events for a page that reconnects: the conversation, and the current run or the end of the last.

    The conversation is a ``MESSAGES_SNAPSHOT``, the shared state a ``STATE_SNAPSHOT``. A running run is shown from its start; a run that
    waits for answers is an interrupt again.

    Args:
        given: The request of the page, of which only the ids of thread and run are used.
        session: The session of its thread.
        handle: The running run, such as ``engine.get(thread_id)``; ``None`` if no run is running.
        shares: As for ``parse_page_request``.

    Raises:
        DefinitionError: If ``ag_ui`` is not installed.
    """
    asked = PageRequest(given.thread_id, given.run_id, "", {}, {}, session, tuple(shares))
    page = _EventTranslator(_import_core(), asked.thread_id, asked.run_id, verbose=False, asked=asked)
    page.history = to_protocol_messages(page.core, _list_messages_before_run(asked.session, handle), asked.thread_id)
    if handle is not None:
        async for shown in _translate_events(handle.events(), page):
            yield shown
        return
    for shown in page.show_idle_session():
        yield shown


def _list_messages_before_run(session: Session, handle: RunHandle | RunningTurn | None) -> Sequence[Message]:
    """Return a session's messages and the prompt of the running turn. The other messages of the turn are in its events."""
    more = [] if handle is None else handle.history[len(session.messages) :]
    return [*session.messages, *takewhile(lambda message: isinstance(message, UserMessage), more)]


async def _translate_events(
    events: AsyncIterable[Event], translator: _EventTranslator
) -> AsyncGenerator[BaseEvent, None]:
    """Yield the protocol's events for *events*, and an error event if they raise; close *events* at the end."""
    try:
        async for event in events:
            for shown in translator.translate(event):
                yield shown
    except StepEngineError as error:
        for shown in translator.end_with_error(error.message, _error_code_from_class_name(error)):
            yield shown
    finally:
        await _close_if_generator(events)


async def _close_if_generator(events: object) -> None:
    """Close *events* if they are an async generator."""
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def _import_core() -> ModuleType:
    """Return the module ``ag_ui.core``; raise ``DefinitionError`` with a remedy if it is not installed."""
    try:
        from ag_ui import core
    except ImportError:
        msg = "AG-UI needs the package ag-ui-protocol: pip install 'stepengine[ag-ui]'"
        raise DefinitionError(msg) from None
    return core


def _error_code_from_class_name(error: BaseException) -> str:
    """Return the class name of an error in snake case, as the code of an error event."""
    name = type(error).__name__
    return "".join([f"_{c.lower()}" if c.isupper() else c for c in name]).lstrip("_")


@attrs.define(eq=False)
class _Lane:
    """The agent's name and the open step of one run of the tree."""

    name: str = ""
    step: str = ""


class _EventTranslator:
    """Translates the events of one run to AG-UI events; closes all open messages and steps before the run ends, innermost first."""

    def __init__(
        self, core: ModuleType, thread_id: str, run_id: str, *, verbose: bool, asked: PageRequest | None
    ) -> None:
        self.core = core
        self.history: list[object] | None = None
        self._ids = {"thread_id": thread_id, "run_id": run_id}
        self._verbose = verbose
        self._page = asked
        self._state: dict[str, Any] = {} if asked is None else asked.state
        self._calls = CallItems(() if asked is None else _list_session_call_ids(asked.session))
        self._pages: set[str] = set()
        self._last_call: dict[str, str] = {}
        self._awaited: dict[tuple[str, int], dict[str, object]] = {}
        self._root = ""
        self._lanes: dict[str, _Lane] = {}
        self._asked: dict[str, str] = {}
        self._texts = TextItems()
        self._has_begun = False
        self._is_over = False

    def translate(self, event: Event) -> Iterator[BaseEvent]:
        """Yield the AG-UI events for *event*."""
        if self._is_over:
            return
        yield from self._start_run_or_lane_if_new(event)
        show = self.SHOWN.get(type(event))
        if show is not None:
            yield from show(self, event)
        elif self._verbose or isinstance(event, SENT_AS_DATA):
            value = {name: held for name, held in event.to_json().items() if name not in ("type", "request")}
            yield self._make_custom_event(event.path, event.type, value)

    def end_with_error(self, message: str, code: str) -> Iterator[BaseEvent]:
        """Yield the ends of all that is open and an error event; nothing if the run has ended."""
        if self._is_over:
            return
        if not self._has_begun:
            yield from self._start_run()
        yield from self._end_lane_and_children("", RunStatus.FAILED)
        self._is_over = True
        yield self.core.RunErrorEvent(message=message, code=code)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _start_run_or_lane_if_new(self, event: Event) -> Iterator[BaseEvent]:
        """Yield the start of the run at its first event, and the start of a child at the first event of the child."""
        if not self._has_begun:
            self._root, about = event.run_id, {"run_id": event.run_id}
            if isinstance(event, RunStarted):
                about["agent_id"] = event.agent_id
            yield from self._start_run(metadata={"stepengine": about})
        if event.path not in self._lanes:
            name = event.agent_id if isinstance(event, RunStarted) else "agent"
            yield from self._start_lane_once(event.path, name)

    def _start_run(self, **members: object) -> Iterator[BaseEvent]:
        """Yield the start of the run with these *members*, then its history, shared state and warnings."""
        self._has_begun = True
        yield self.core.RunStartedEvent(**self._ids, protocol_version=self.core.PROTOCOL_VERSION, **members)
        if self.history is not None:
            yield self.core.MessagesSnapshotEvent(messages=self.history)
        if self._page is not None and self._page.shares:
            yield self.core.StateSnapshotEvent(snapshot=dict(self._state))
        for warning in () if self._page is None else self._page.warnings:
            yield self.core.CustomEvent(name="stepengine.warned", value={"message": warning})

    def show_idle_session(self) -> Iterator[BaseEvent]:
        """Yield an empty run with the end of the last one, for the page of an idle session."""
        state = None if self._page is None else self._page.session.state
        self._root = "" if state is None else state.run_id
        yield from self._start_run()
        yield self.core.RunFinishedEvent(
            **self._ids, outcome=self._make_waiting_outcome(() if state is None else state.pending, state)
        )

    def _make_waiting_outcome(self, pending: Sequence[Question], state: AgentState | None) -> object:
        """Return the outcome of a run that waits: interrupts for questions, else success with the calls of the page's tools."""
        questions = [question for question in pending if self._page is None or not find_page_tool_name(question)]
        for question in questions:
            if question.id not in self._asked and (call := find_permission_call_id(state, question)):
                self._asked[question.id] = call
        if questions:
            asked = [self._make_interrupt(question) for question in questions]
            return self.core.RunFinishedInterruptOutcome(type="interrupt", interrupts=asked)
        return self.core.RunFinishedSuccessOutcome(
            type="success", pending_tool_call_ids=list_waiting_page_call_ids(state) or None
        )

    def _show_state_if_changed(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Yield the shared state if hooks or children changed it."""
        page = self._page
        if page is None or event.path:
            return
        held = {name: plain(value) for name, value in event.result.state.context.items() if name in page.shares}
        if held != self._state:
            self._state = held
            yield self.core.StateSnapshotEvent(snapshot=dict(held))

    def _warn_of_missing_page_tools(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Yield a warning if the run was not offered some tools of the page."""
        page = self._page
        if page is None or event.path:
            return
        if missing := [name for name in page.tools if name not in event.result.state.tool_definitions]:
            told = f"the page's tools {', '.join(missing)} were not offered to the run; pass Engine(hooks=page_hooks())"
            yield self._make_custom_event(event.path, "warned", {"message": told})

    def _show_tool_state_change(self, event: ToolFinished) -> Iterator[BaseEvent]:
        """Yield and store the changes that a tool of the root made to shared members of the state."""
        change = event.result.change
        if self._page is None or event.path or change is None or change.context is None:
            return
        delta = []
        for name, value in change.context.items():
            if name in self._page.shares and (value is not None or name in self._state):
                place = "/" + name.replace("~", "~0").replace("/", "~1")
                if value is None:
                    del self._state[name]
                    delta.append({"op": "remove", "path": place})
                else:
                    self._state[name] = plain(value)
                    delta.append({"op": "add", "path": place, "value": self._state[name]})
        if delta:
            yield self.core.StateDeltaEvent(delta=delta)

    def _start_lane_once(self, path: str, name: str, *, call: str | None = None) -> Iterator[BaseEvent]:
        """Store a run of the tree, and yield the start of a child or tool body; nothing for a known one."""
        if path in self._lanes:
            return
        self._lanes[path] = _Lane(name)
        if path:
            above = path.rpartition(".")[0]
            yield self.core.SubagentStartedEvent(
                subagent_run_id=self._make_subagent_run_id(path),
                name=name,
                parent_subagent_run_id=self._make_subagent_run_id(above),
                parent_tool_call_id=call,
            )

    def _show_child_start(self, event: AgentSpawned) -> Iterator[BaseEvent]:
        call = self._make_call_id(event.path, event.tool_call_id) if event.tool_call_id else None
        yield from self._start_lane_once(event.child_path, event.display_name or event.agent_id, call=call)

    def _show_child_end(self, event: AgentFinished) -> Iterator[BaseEvent]:
        """Yield the ends of a child run and of all that is open in it."""
        yield from self._end_lane_and_children(event.child_path, event.status, event.error)

    def _end_lane_and_children(self, path: str, status: RunStatus, error: str = "") -> Iterator[BaseEvent]:
        """End a run of the tree and the open runs below it, the deepest first."""
        inside = [lane for lane in self._lanes if lane == path or not path or lane.startswith(f"{path}.")]
        for each in sorted(inside, key=lambda lane: lane.count(".") if lane else -1, reverse=True):
            yield from self._end_open_texts_and_calls(each)
            yield from self._end_open_step(each)
            lane = self._lanes.pop(each)
            if each:
                yield self._make_agent_end_event(each, status, lane, error if each == path else "")

    def _make_agent_end_event(self, path: str, status: RunStatus, lane: _Lane, error: str) -> BaseEvent:
        """Return the event for the end of a child: an error, a suspension or a success."""
        core, agent = self.core, {"subagent_run_id": self._make_subagent_run_id(path)}
        if status in FAILURES:
            message = f"{lane.name} ended as {status}{f': {error}' if error else ''}"
            ended: BaseEvent = core.SubagentErrorEvent(**agent, message=message, code=status.value)
        elif status is RunStatus.SUSPENDED:
            ended = core.SubagentFinishedEvent(**agent, outcome=core.SubagentFinishedSuspendedOutcome(type="suspended"))
        else:
            ended = core.SubagentFinishedEvent(**agent, outcome=core.SubagentFinishedSuccessOutcome(type="success"))
        return ended

    def _show_run_end(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Yield changed state, warnings, the ends of all that is open, and the end of the run with its outcome."""
        result, core = event.result, self.core
        yield from self._show_state_if_changed(event)
        yield from self._warn_of_missing_page_tools(event)
        match result.status:
            case RunStatus.FAILED | RunStatus.MAX_STEPS:
                message = "the step limit was reached" if result.error is None else str(result.error)
                code = (
                    "max_steps"
                    if result.status is RunStatus.MAX_STEPS
                    else _error_code_from_class_name(result.error or StepEngineError(""))
                )
                yield from self.end_with_error(message, code)
                return
            case RunStatus.SUSPENDED:
                yield from self._show_waiting_calls(result.state)
                yield from self._show_non_question_waits(event)
                outcome = self._make_waiting_outcome(result.pending_questions, result.state)
            case RunStatus.CANCELLED:
                outcome = core.RunFinishedCancelledOutcome(type="cancelled")
            case _:
                outcome = core.RunFinishedSuccessOutcome(type="success")
        yield from self._end_lane_and_children("", result.status)
        self._is_over = True
        yield core.RunFinishedEvent(
            **self._ids,
            outcome=outcome,
            result=plain(result.output),
            usage=self._make_usage_by_model(result),
            metadata={"stepengine": {"run_id": event.run_id, "status": result.status.value}},
        )

    def _make_usage_by_model(self, result: RunResult) -> list[object]:
        """Return the tokens of a run by provider and model."""
        return [
            self.core.TokenUsage(
                provider=model.partition("/")[0] if "/" in model else None,
                model=model.partition("/")[2] or model,
                input_tokens=used.prompt_tokens,
                output_tokens=used.completion_tokens,
                total_tokens=used.total_tokens,
                reasoning_tokens=used.reasoning_tokens,
                cached_input_tokens=used.cache_read_tokens,
                cache_write_input_tokens=used.cache_write_tokens,
            )
            for model, used in result.usage_by_model.items()
        ]

    def _show_waiting_calls(self, state: AgentState) -> Iterator[BaseEvent]:
        """Yield the waiting calls of a suspended run that were not shown, as in a journal, where only a start shows a call."""
        at = find_suspended_reply_index(state.message_history)
        reply = None if at is None else state.message_history[at]
        for part in reply.content if isinstance(reply, AssistantMessage) else ():
            if isinstance(part, ToolCallPart):
                yield from self._show_call_input(
                    ToolStarted(tool_name=part.tool_name, tool_call_id=part.tool_call_id, input=part.input)
                )

    def _show_non_question_waits(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Yield the event ``stepengine.waits`` with the waits other than questions, and a text about them."""
        result = event.result
        said = describe_waits(result.waits_for)
        if not said or event.path:
            return
        waits = [
            {
                "kind": one.kind,
                "path": one.path,
                "wakesAt": one.wakes_at and one.wakes_at.isoformat(),
                "topic": one.topic,
                "children": list(one.children),
                "said": one.description,
            }
            for one in result.waits_for
            if one.kind != "question"
        ]
        yield self._make_custom_event(event.path, "waits", {"waits": waits})
        yield from self._end_open_texts_and_calls("")
        yield from self._show_text_items(self._texts.make_output_items(event, said))

    def _record_page_call(self, event: QuestionAsked) -> Iterator[BaseEvent]:
        """Store the last call as one that the page executes, if the question is about its result; yield nothing."""
        if find_page_tool_name(event.question):
            self._pages.add(self._last_call.get(event.path, ""))
        yield from ()

    def _show_permission_request(self, event: PermissionRequested) -> Iterator[BaseEvent]:
        """Yield the call. Its question follows at the end of the run, which is suspended."""
        self._asked[event.question.id] = self._make_call_id(event.path, event.tool_call_id)
        yield from self._show_call_input(event)

    def _make_interrupt(self, question: Question) -> object:
        """Return a question as an interrupt, with the schema of its answer."""
        is_permission = question.tool_name is not None
        return self.core.Interrupt(
            id=f"{self._root}:{question.id}",
            reason="stepengine.permission" if is_permission else "stepengine.question",
            message=question.text,
            tool_call_id=self._asked.get(question.id),
            subagent_run_id=self._make_subagent_run_id(question.path),
            response_schema=make_approval_schema() if is_permission else answer_schema(question),
            metadata={"stepengine": question_to_json(question)},
        )

    # --- steps and messages -------------------------------------------------------------------------------------------

    def _show_step_start(self, event: StepStarted) -> Iterator[BaseEvent]:
        """Yield the end of the open step and the start of a new one."""
        yield from self._end_open_step(event.path)
        self._lanes[event.path].step = name = f"{event.path}#{event.step}"
        yield self.core.StepStartedEvent(step_name=name, subagent_run_id=self._make_subagent_run_id(event.path))

    def _end_texts_calls_and_step(self, event: StepFinished) -> Iterator[BaseEvent]:
        yield from self._end_open_texts_and_calls(event.path)
        yield from self._end_open_step(event.path)

    def _end_open_step(self, path: str) -> Iterator[BaseEvent]:
        """Yield the end of the open step of a run; nothing without one."""
        lane = self._lanes[path]
        if lane.step:
            yield self.core.StepFinishedEvent(step_name=lane.step, subagent_run_id=self._make_subagent_run_id(path))
            lane.step = ""

    def _show_text(self, event: TextEvent) -> Iterator[BaseEvent]:
        """Yield the start, pieces or end of a text or thought."""
        yield from self._show_text_items(self._texts.make_items(event))

    def _show_text_items(self, items: Iterable[TextItem]) -> Iterator[BaseEvent]:
        """Yield the protocol's events for the starts, pieces and ends of texts and thoughts."""
        core = self.core
        for step, text, piece, is_discarded in items:
            agent = {"subagent_run_id": self._make_subagent_run_id(text.path)}
            message = {"message_id": f"{self._root}-{text.path}-{text.epoch}-{text.number}", **agent}
            if is_discarded:
                yield self._make_custom_event(text.path, "discarded", {"messageId": message["message_id"]})
            match text.kind, step:
                case "text", "start":
                    yield core.TextMessageStartEvent(role="assistant", **message)
                case "text", "piece":
                    yield core.TextMessageContentEvent(delta=piece, **message)
                case "text", _:
                    yield core.TextMessageEndEvent(**message)
                case _, "start":
                    yield core.ReasoningStartEvent(**message)
                    yield core.ReasoningMessageStartEvent(role="reasoning", **message)
                case _, "piece":
                    yield core.ReasoningMessageContentEvent(delta=piece, **message)
                case _:
                    yield core.ReasoningMessageEndEvent(**message)
                    yield core.ReasoningEndEvent(**message)

    def _end_discarded_texts_and_calls(self, event: ReplyDiscarded) -> Iterator[BaseEvent]:
        """Yield the ends of the open texts and calls of a discarded reply, with an event that marks each."""
        yield from self._show_text_items(self._texts.end_texts(event.path, discarded=event.seq))
        calls = self._calls.end_incomplete_inputs(event.path, are_over=False)
        for call in calls:
            yield self._make_custom_event(event.path, "discarded", {"toolCallId": self._make_call_id(event.path, call)})
        yield from self._end_open_texts_and_calls(event.path)
        yield from self._end_calls(event.path, calls)

    def _end_open_texts_and_calls(self, path: str) -> Iterator[BaseEvent]:
        """Yield the ends of the open texts of a run, and of its calls with incomplete input."""
        yield from self._show_text_items(self._texts.end_texts(path))
        yield from self._end_calls(path, self._calls.end_incomplete_inputs(path, are_over=True))

    def _end_calls(self, path: str, calls: Iterable[str]) -> Iterator[BaseEvent]:
        for call in calls:
            yield self.core.ToolCallEndEvent(
                tool_call_id=self._make_call_id(path, call), subagent_run_id=self._make_subagent_run_id(path)
            )

    # --- tools --------------------------------------------------------------------------------------------------------

    def _show_call_input(self, event: CallEvent) -> Iterator[BaseEvent]:
        """Yield the start, arguments and end of the input of a call; the whole input only once."""
        core = self.core
        for step, path, call, name, piece, given, is_streamed in self._calls.make_items(event):
            about = {
                "tool_call_id": self._make_call_id(path, call),
                "subagent_run_id": self._make_subagent_run_id(path),
            }
            if step == "start" or not is_streamed:
                yield core.ToolCallStartEvent(tool_call_name=name, **about)
            if step == "piece" or not (is_streamed or given is ABSENT):
                yield core.ToolCallArgsEvent(delta=piece or _to_json_text(given), **about)
            if step == "input":
                yield core.ToolCallEndEvent(**about)

    def _show_tool_start(self, event: ToolStarted) -> Iterator[BaseEvent]:
        """Yield the input of a call unless shown before, and the start of a body with effects as a child."""
        self._last_call[event.path] = event.tool_call_id
        yield from self._show_call_input(event)
        if event.child_path:
            # The effects of a tool's body are shown below its call, like those of a child.
            call = self._make_call_id(event.path, event.tool_call_id)
            yield from self._start_lane_once(event.child_path, event.tool_name, call=call)

    def _show_tool_end(self, event: ToolFinished) -> Iterator[BaseEvent]:
        """Yield the end of a body, changes of the state, and the result unless it is pending or from the page."""
        if event.child_path and event.result.status != "pending":
            failed = event.result.is_error
            status = RunStatus.FAILED if failed else RunStatus.COMPLETED
            yield from self._end_lane_and_children(event.child_path, status, event.result.text if failed else "")
        yield from self._show_call_input(event)
        call = self._make_call_id(event.path, event.tool_call_id)
        yield from self._show_tool_state_change(event)
        if event.result.status == "pending":
            return  # its result comes with the answer that it waits for
        if self._page is not None and not event.path and call in self._pages and call in self._page.results:
            return  # it came from the page
        yield self.core.ToolCallResultEvent(
            message_id=f"{call}-result",
            tool_call_id=call,
            content=event.result.text,
            role="tool",
            subagent_run_id=self._make_subagent_run_id(event.path),
            metadata={"stepengine": {"status": event.result.status, "duration_ms": event.duration_ms}},
        )

    def _show_tool_progress(self, event: ToolProgress | ToolLog) -> Iterator[BaseEvent]:
        """Yield the progress of a call as an activity that replaces the one before."""
        call = self._make_call_id(event.path, event.tool_call_id)
        content = {"toolCallId": call, "message": event.message, "percent": getattr(event, "percent", None)}
        yield self._make_activity_snapshot(event.path, "progress", f"{call}-progress", content)

    def _show_todos(self, event: TodosChanged) -> Iterator[BaseEvent]:
        """Yield the todos of a run as an activity that replaces the one before."""
        id_ = f"{self._make_subagent_run_id(event.path) or self._root}-todos"
        yield self._make_activity_snapshot(event.path, "todos", id_, {"todos": thaw(event.todos)})

    def _show_wait(self, event: WaitStarted | WaitFinished) -> Iterator[BaseEvent]:
        """Yield a wait as one activity; a suspended run continues it in another message."""
        is_over = isinstance(event, WaitFinished) and event.is_over
        about = self._awaited.setdefault((event.path, event.seq), {"kind": event.kind})
        if isinstance(event, WaitStarted):
            about |= {"wakesAt": event.wakes_at, "topic": event.topic, "children": list(event.children)}
        id_ = f"{self._make_subagent_run_id(event.path) or self._root}-wait-{event.seq}"
        yield self._make_activity_snapshot(event.path, "wait", id_, {**about, "isOver": is_over})

    def _show_answer_or_decision(self, event: AnswerReceived | PermissionDecided) -> Iterator[BaseEvent]:
        """Yield the answer to a question, or the decision about a call, as a custom event."""
        if isinstance(event, AnswerReceived):
            told = {"questionId": event.question_id, "answer": event.answer}
        else:
            told = {"toolCallId": self._make_call_id(event.path, event.tool_call_id), "decision": event.decision}
        yield self._make_custom_event(event.path, "answer", told)

    # --- words --------------------------------------------------------------------------------------------------------

    def _make_activity_snapshot(
        self, path: str, name: str, message_id: str, content: Mapping[str, object]
    ) -> BaseEvent:
        """Return a snapshot of an activity; it replaces earlier ones with the same id."""
        activity: BaseEvent = self.core.ActivitySnapshotEvent(
            message_id=message_id,
            activity_type=f"stepengine.{name}",
            content=content,
            replace=True,
            subagent_run_id=self._make_subagent_run_id(path),
        )
        return activity

    def _make_custom_event(self, path: str, name: str, value: Mapping[str, object]) -> BaseEvent:
        """Return an event of our own, ``stepengine.NAME``, about the run at *path*."""
        custom: BaseEvent = self.core.CustomEvent(
            name=f"stepengine.{name}", value=dict(value), subagent_run_id=self._make_subagent_run_id(path)
        )
        return custom

    def _make_subagent_run_id(self, path: str) -> str | None:
        """Return the id of the child run at *path*; ``None`` for the root."""
        return f"{self._root}-{path}" if path else None

    def _make_call_id(self, path: str, call: str) -> str:
        """Return the id of a call for the page; for a call of a child, it starts with the id of the child."""
        # Those of a root run count on through its conversation, also where a run goes on as another one.
        return f"{self._make_subagent_run_id(path)}:{call}" if path else call

    SHOWN: ClassVar[Mapping[type[Event], Callable[[_EventTranslator, Any], Iterable[BaseEvent]]]] = {
        RunStarted: lambda *_: (),
        RunFinished: _show_run_end,
        AgentSpawned: _show_child_start,
        AgentFinished: _show_child_end,
        StepStarted: _show_step_start,
        StepFinished: _end_texts_calls_and_step,
        TextDelta: _show_text,
        ThinkingDelta: _show_text,
        TextCompleted: _show_text,
        ThinkingCompleted: _show_text,
        ReplyDiscarded: _end_discarded_texts_and_calls,
        ToolInputDelta: _show_call_input,
        ToolStarted: _show_tool_start,
        ToolFinished: _show_tool_end,
        ToolProgress: _show_tool_progress,
        ToolLog: _show_tool_progress,
        TodosChanged: _show_todos,
        QuestionAsked: _record_page_call,
        PermissionRequested: _show_permission_request,
        AnswerReceived: _show_answer_or_decision,
        PermissionDecided: _show_answer_or_decision,
        WaitStarted: _show_wait,
        WaitFinished: _show_wait,
    }
    """The events for which the protocol has a form. The others are custom events, or are left out."""


def _list_session_call_ids(session: Session) -> set[str]:
    """Return the ids of all tool calls in the messages of a session, which the page already has."""
    replies = [message for message in session.messages if isinstance(message, AssistantMessage)]
    return {part.tool_call_id for reply in replies for part in reply.content if isinstance(part, ToolCallPart)}


def to_protocol_messages(core: ModuleType, messages: Sequence[Message], thread_id: str) -> list[object]:
    """Return a conversation as AG-UI messages, without thoughts, instructions and the results of waiting calls."""
    found: list[object] = []
    for number, message in enumerate(messages):
        own = f"{thread_id}-{number}"
        if isinstance(message, AssistantMessage):
            calls = [
                core.ToolCall(
                    id=p.tool_call_id, function=core.FunctionCall(name=p.tool_name, arguments=_to_json_text(p.input))
                )
                for p in message.content
                if isinstance(p, ToolCallPart)
            ]
            found.append(core.AssistantMessage(id=own, content=message.text or None, tool_calls=calls or None))
        elif isinstance(message, ToolMessage):
            if message.status != "pending":
                call = message.tool_call_id
                found.append(core.ToolMessage(id=own, tool_call_id=call, content=message.text))
        elif "INSTRUCTIONS_PROMPT" not in message.tags:
            found.append(core.UserMessage(id=own, content=message.text))
    return found


def _to_json_text(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False)
