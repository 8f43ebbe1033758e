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
    Asked,
    answers_of,
    asked_of,
    page_calls,
    page_hooks,
    page_tool_of,
    prompt_of,
    turns,
    waiting_calls,
)
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
from stepengine.data.json import thaw
from stepengine.data.messages import AssistantMessage, Message, ToolCallPart, ToolMessage, UserMessage
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, RunResult, RunStatus
from stepengine.data.waiting import waits_in_words
from stepengine.errors import DefinitionError, InputError, StepEngineError
from stepengine.sessions import Session

if TYPE_CHECKING:
    from ag_ui.core import BaseEvent, RunAgentInput

    from stepengine.runtime.handle import RunHandle

__all__ = (
    "Asked",
    "UnderWay",
    "ag_ui",
    "answers_of",
    "asked_of",
    "connected",
    "input_of",
    "page_hooks",
    "prompt_of",
    "sse",
    "turns",
)


async def ag_ui(
    events: AsyncIterable[Event], *, thread_id: str, run_id: str, verbose: bool = False, asked: Asked | None = None
) -> AsyncGenerator[BaseEvent, None]:
    """
    Give the events of a run as those of AG-UI 1.0.

    A suspended run ends with the outcome ``interrupt``, which has its open questions; ``answers_of`` reads what comes back. What
    ends in an error, also one that *events* raises, ends with ``RUN_ERROR``. Leaving the iteration early closes *events*.

    Args:
        events: Those of a run, such as ``engine.stream(...)`` or ``handle.events()``.
        thread_id: The conversation's id, as the page gave it.
        run_id: The run's id, as the page gave it; ours is in the metadata of ``RUN_STARTED``.
        verbose: Whether events that the protocol has no place for are given as ``CUSTOM``, too.
        asked: What the page asks for: with it, calls of the page's own tools are left to the page, calls that it has been shown
            before the run was suspended are not begun again, and the members of the state that it shares are ``STATE_SNAPSHOT`` at
            the beginning, ``STATE_DELTA`` where a tool changes them, and ``STATE_SNAPSHOT`` at the end where more has changed.

    Raises:
        DefinitionError: when ``ag_ui`` is not installed.
    """
    async for shown in _show_events(events, _Page(_core(), thread_id, run_id, verbose=verbose, asked=asked)):
        yield shown


def input_of(value: object) -> RunAgentInput:
    """
    Return what a page sends.

    Args:
        value: The JSON of its request's body.

    Raises:
        DefinitionError: when ``ag_ui`` is not installed.
        InputError: with a sentence for each member that cannot be used, and for another major version of the protocol.
    """
    core = _core()
    from pydantic import ValidationError

    try:
        given: RunAgentInput = core.RunAgentInput.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        issues = tuple([f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in found])
        msg = f"a page sent what AG-UI has no place for: {'; '.join(issues[:5])}"
        raise InputError(msg, issues=issues) from None
    known = core.PROTOCOL_VERSION.partition(".")[0]
    if given.protocol_version is not None and given.protocol_version.partition(".")[0] != known:
        msg = f"protocolVersion: {given.protocol_version[:20]!r} is not known; the major version {known} would be fine"
        raise InputError(msg, issues=(msg,))
    return given


async def sse(events: AsyncIterable[BaseEvent]) -> AsyncGenerator[str, None]:
    """Give *events* as server-sent events. Leaving the iteration early closes *events*."""
    try:
        async for event in events:
            yield f"data: {event.model_dump_json(by_alias=True)}\n\n"
    finally:
        await _close(events)


class UnderWay(Protocol):
    """A run as a page comes back to it: what a ``RunHandle`` is, also where another process has the run."""

    @property
    def history(self) -> Sequence[Message]:
        """The messages up to now, those of the conversation before it first."""

    def events(self) -> AsyncIterable[Event]:
        """Give its events, from the first one on."""


async def connected(
    given: RunAgentInput, session: Session, handle: RunHandle | UnderWay | None = None, *, shares: Collection[str] = ()
) -> AsyncGenerator[BaseEvent, None]:
    """
    Give what a page is shown that comes back: the conversation, and the run that is under way, or how the last one ended.

    The conversation is ``MESSAGES_SNAPSHOT``, what the page shares ``STATE_SNAPSHOT``. A run that is under way is shown from its beginning;
    one that waits for answers is an interrupt again.

    Args:
        given: What the page sends; its thread and run count.
        session: The session of its thread.
        handle: The run that is under way, such as ``engine.get(thread_id)``.
        shares: As for ``asked_of``.

    Raises:
        DefinitionError: when ``ag_ui`` is not installed.
    """
    asked = Asked(given.thread_id, given.run_id, "", {}, {}, session, tuple(shares))
    page = _Page(_core(), asked.thread_id, asked.run_id, verbose=False, asked=asked)
    page.history = messages_of(page.core, _messages_of(asked.session, handle), asked.thread_id)
    if handle is not None:
        async for shown in _show_events(handle.events(), page):
            yield shown
        return
    for shown in page.rest():
        yield shown


def _messages_of(session: Session, handle: RunHandle | UnderWay | None) -> Sequence[Message]:
    """Return the messages of a session, and what the run under way was asked to do; what it does itself is in its events."""
    more = [] if handle is None else handle.history[len(session.messages) :]
    return [*session.messages, *takewhile(lambda message: isinstance(message, UserMessage), more)]


async def _show_events(events: AsyncIterable[Event], page: _Page) -> AsyncGenerator[BaseEvent, None]:
    try:
        async for event in events:
            for shown in page.show(event):
                yield shown
    except StepEngineError as error:
        for shown in page.fail(error.message, _code(error)):
            yield shown
    finally:
        await _close(events)


async def _close(events: object) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def _core() -> ModuleType:
    try:
        from ag_ui import core
    except ImportError:
        msg = "AG-UI needs the package ag-ui-protocol: pip install 'stepengine[ag-ui]'"
        raise DefinitionError(msg) from None
    return core


def _code(error: BaseException) -> str:
    name = type(error).__name__
    return "".join([f"_{c.lower()}" if c.isupper() else c for c in name]).lstrip("_")


@attrs.define(eq=False)
class _OpenMessage:
    """A message that is open: its id, and what was shown of it."""

    id: str
    shown: str = ""


@attrs.define(eq=False)
class _Lane:
    """What is open of one run of the tree; calls by id, whether their input is still to come."""

    name: str = ""
    step: str = ""
    texts: dict[int, _OpenMessage] = attrs.field(factory=dict)
    thoughts: dict[int, _OpenMessage] = attrs.field(factory=dict)
    calls: dict[str, bool] = attrs.field(factory=dict)


class _Page:
    """What a page was shown of one run; everything that is begun is ended before the run is, the innermost first."""

    def __init__(self, core: ModuleType, thread_id: str, run_id: str, *, verbose: bool, asked: Asked | None) -> None:
        self.core = self._core = core
        self.history: list[object] | None = None
        self._ids = {"thread_id": thread_id, "run_id": run_id}
        self._verbose = verbose
        self._page = asked
        self._state: dict[str, Any] = {} if asked is None else asked.state
        self._known = set() if asked is None else _calls_of(asked.session)
        self._pages: set[str] = set()
        self._last_call: dict[str, str] = {}
        self._awaited: dict[tuple[str, int], dict[str, object]] = {}
        self._root = ""
        self._lanes: dict[str, _Lane] = {}
        self._asked: dict[str, str] = {}
        self._made = 0
        self._has_begun = False
        self._is_over = False

    def show(self, event: Event) -> Iterator[BaseEvent]:
        """Give what stands for *event*."""
        if self._is_over:
            return
        yield from self._begin(event)
        show = self.SHOWN.get(type(event))
        if show is not None:
            yield from show(self, event)
        elif self._verbose or type(event) in SENT_AS_DATA:
            value = {name: held for name, held in event.to_json().items() if name not in ("type", "request")}
            yield self._custom(event, event.type, value)

    def fail(self, message: str, code: str) -> Iterator[BaseEvent]:
        """Give the end of a run that failed; nothing when it has ended."""
        if self._is_over:
            return
        if not self._has_begun:
            self._has_begun = True
            yield self._core.RunStartedEvent(**self._ids, protocol_version=self._core.PROTOCOL_VERSION)
            yield from self._snapshots()
        yield from self._end_all()
        self._is_over = True
        yield self._core.RunErrorEvent(message=message, code=code)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> Iterator[BaseEvent]:
        if not self._has_begun:
            self._has_begun, self._root = True, event.run_id
            about = {"run_id": event.run_id}
            if isinstance(event, RunStarted):
                about["agent_id"] = event.agent_id
            started = {"protocol_version": self._core.PROTOCOL_VERSION, "metadata": {"stepengine": about}}
            yield self._core.RunStartedEvent(**self._ids, **started)
            yield from self._snapshots()
        if event.path not in self._lanes:
            name = event.agent_id if isinstance(event, RunStarted) else "agent"
            yield from self._open_lane(event.path, name)

    def _snapshots(self) -> Iterator[BaseEvent]:
        if self.history is not None:
            yield self._core.MessagesSnapshotEvent(messages=self.history)
        if self._page is not None and self._page.shares:
            yield self._core.StateSnapshotEvent(snapshot=dict(self._state))
        for warning in () if self._page is None else self._page.warnings:
            yield self._core.CustomEvent(name="stepengine.warned", value={"message": warning})

    def rest(self) -> Iterator[BaseEvent]:
        """Give a run in which nothing happens: where nothing is under way, it ends as the last one did."""
        state = None if self._page is None else self._page.session.state
        self._root = "" if state is None else state.run_id
        yield self._core.RunStartedEvent(**self._ids, protocol_version=self._core.PROTOCOL_VERSION)
        yield from self._snapshots()
        yield self._core.RunFinishedEvent(
            **self._ids, outcome=self._waits(() if state is None else state.pending, state)
        )

    def _waits(self, pending: Sequence[Question], state: AgentState | None) -> object:
        """Return what a run that has ended waits for: interrupts, or results of the page's tools, of which it knows by itself."""
        questions = [question for question in pending if self._page is None or not page_tool_of(question)]
        waiting = {} if state is None else {m.tool_name: m.tool_call_id for m in reversed(waiting_calls(state))}
        for question in questions:
            if not question.path and question.tool_name in waiting:
                self._asked.setdefault(question.id, waiting[question.tool_name])
        if questions:
            asked = [self._interrupt(question) for question in questions]
            return self._core.RunFinishedInterruptOutcome(type="interrupt", interrupts=asked)
        return self._core.RunFinishedSuccessOutcome(type="success", pending_tool_call_ids=page_calls(state) or None)

    def _show_final_state(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Give the shared state where hooks, or children that take the conversation over, changed it, and say what was not used."""
        page = self._page
        if page is None or event.path:
            return
        state = event.result.state
        held = {name: plain(value) for name, value in state.context.items() if name in page.shares}
        if held != self._state:
            self._state = held
            yield self._core.StateSnapshotEvent(snapshot=dict(held))
        if missing := [name for name in page.tools if name not in state.tool_definitions]:
            told = (
                f"the page's tools {', '.join(missing)} were not offered: Engine(hooks=page_hooks()) gives them to runs"
            )
            yield self._custom(event, "warned", {"message": told})

    def _show_state_change(self, event: ToolFinished) -> Iterator[BaseEvent]:
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
            yield self._core.StateDeltaEvent(delta=delta)

    def _open_lane(self, path: str, name: str, *, call: str | None = None) -> Iterator[BaseEvent]:
        if path in self._lanes:
            return
        self._lanes[path] = _Lane(name)
        if path:
            above = path.rpartition(".")[0]
            yield self._core.SubagentStartedEvent(
                subagent_run_id=self._agent(path),
                name=name,
                parent_subagent_run_id=self._agent(above),
                parent_tool_call_id=call,
            )

    def _show_child(self, event: AgentSpawned) -> Iterator[BaseEvent]:
        call = self._call_id(event.path, event.tool_call_id) if event.tool_call_id else None
        yield from self._open_lane(event.child_path, event.display_name or event.agent_id, call=call)

    def _agent_finished(self, event: AgentFinished) -> Iterator[BaseEvent]:
        yield from self._end_lanes(event.child_path, event.status, event.error)

    def _end_lanes(self, path: str, status: RunStatus, error: str = "") -> Iterator[BaseEvent]:
        """End a run of the tree and what is open below it, the deepest first."""
        inside = [lane for lane in self._lanes if lane == path or not path or lane.startswith(f"{path}.")]
        for each in sorted(inside, key=lambda lane: lane.count(".") if lane else -1, reverse=True):
            yield from self._end_blocks(each)
            yield from self._end_step(each)
            lane = self._lanes.pop(each)
            if each:
                yield self._agent_end(each, status, lane, error if each == path else "")

    def _agent_end(self, path: str, status: RunStatus, lane: _Lane, error: str) -> BaseEvent:
        core, agent = self._core, {"subagent_run_id": self._agent(path)}
        if status in (RunStatus.FAILED, RunStatus.CANCELLED, RunStatus.MAX_STEPS):
            message = f"{lane.name} ended as {status}{f': {error}' if error else ''}"
            ended: BaseEvent = core.SubagentErrorEvent(**agent, message=message, code=status.value)
        elif status is RunStatus.SUSPENDED:
            ended = core.SubagentFinishedEvent(**agent, outcome=core.SubagentFinishedSuspendedOutcome(type="suspended"))
        else:
            ended = core.SubagentFinishedEvent(**agent, outcome=core.SubagentFinishedSuccessOutcome(type="success"))
        return ended

    def _end_all(self, status: RunStatus = RunStatus.FAILED) -> Iterator[BaseEvent]:
        yield from self._end_lanes("", status)

    def _run_finished(self, event: RunFinished) -> Iterator[BaseEvent]:
        result, core = event.result, self._core
        yield from self._show_final_state(event)
        match result.status:
            case RunStatus.FAILED | RunStatus.MAX_STEPS:
                message = "the step limit was reached" if result.error is None else str(result.error)
                code = (
                    "max_steps" if result.status is RunStatus.MAX_STEPS else _code(result.error or StepEngineError(""))
                )
                yield from self.fail(message, code)
                return
            case RunStatus.SUSPENDED:
                yield from self._sleeping(event)
                outcome = self._waits(result.pending_questions, result.state)
            case RunStatus.CANCELLED:
                outcome = core.RunFinishedCancelledOutcome(type="cancelled")
            case _:
                outcome = core.RunFinishedSuccessOutcome(type="success")
        yield from self._end_all(result.status)
        self._is_over = True
        yield core.RunFinishedEvent(
            **self._ids,
            outcome=outcome,
            result=plain(result.output),
            usage=self._usage(result),
            metadata={"stepengine": {"run_id": event.run_id, "status": result.status.value}},
        )

    def _usage(self, result: RunResult) -> list[object]:
        return [
            self._core.TokenUsage(
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

    def _sleeping(self, event: RunFinished) -> Iterator[BaseEvent]:
        """Say what a run waits for that no page can answer: in words, and for a page that knows better as ``stepengine.waits``."""
        result = event.result
        said = waits_in_words(result.waits_for)
        if not said or event.path:
            return
        waits = [
            {
                "kind": one.kind,
                "path": one.path,
                "wakesAt": one.wakes_at and one.wakes_at.isoformat(),
                "topic": one.topic,
                "children": list(one.children),
                "said": one.words,
            }
            for one in result.waits_for
            if one.kind != "question"
        ]
        yield self._custom(event, "waits", {"waits": waits})
        yield from self._end_blocks("")
        yield from self._more_text(event, said)
        yield from self._end_text("", event.seq)

    def _note_page_call(self, event: QuestionAsked) -> Iterator[BaseEvent]:
        if page_tool_of(event.question):
            self._pages.add(self._last_call.get(event.path, ""))
        yield from ()

    def _note_permission_request(self, event: PermissionRequested) -> Iterator[BaseEvent]:
        # The end of the run tells it: a suspended one ends with its open questions.
        self._asked[event.question.id] = self._call_id(event.path, event.tool_call_id)
        yield from ()

    def _interrupt(self, question: Question) -> object:
        is_permission = question.tool_name is not None
        about = {"tool_name": question.tool_name, "input": thaw(question.details), "preview": thaw(question.preview)}
        return self._core.Interrupt(
            id=f"{self._root}:{question.id}",
            reason="stepengine.permission" if is_permission else "stepengine.question",
            message=question.text,
            tool_call_id=self._asked.get(question.id),
            subagent_run_id=self._agent(question.path),
            response_schema=_schema(question),
            metadata={"stepengine": about} if is_permission else None,
        )

    # --- steps and messages -------------------------------------------------------------------------------------------

    def _step_started(self, event: StepStarted) -> Iterator[BaseEvent]:
        yield from self._end_step(event.path)
        self._lanes[event.path].step = name = f"{event.path}#{event.step}"
        yield self._core.StepStartedEvent(step_name=name, subagent_run_id=self._agent(event.path))

    def _step_finished(self, event: StepFinished) -> Iterator[BaseEvent]:
        yield from self._end_blocks(event.path)
        yield from self._end_step(event.path)

    def _end_step(self, path: str) -> Iterator[BaseEvent]:
        lane = self._lanes[path]
        if lane.step:
            yield self._core.StepFinishedEvent(step_name=lane.step, subagent_run_id=self._agent(path))
            lane.step = ""

    def _text(self, event: TextDelta) -> Iterator[BaseEvent]:
        yield from self._more_text(event, event.text)

    def _more_text(self, event: Event, text: str) -> Iterator[BaseEvent]:
        lane, core, agent = self._lanes[event.path], self._core, {"subagent_run_id": self._agent(event.path)}
        block = lane.texts.get(event.seq)
        if block is None:
            block = lane.texts[event.seq] = _OpenMessage(self._new_id(event))
            yield core.TextMessageStartEvent(message_id=block.id, role="assistant", **agent)
        block.shown += text
        yield core.TextMessageContentEvent(message_id=block.id, delta=text, **agent)

    def _show_thought(self, event: ThinkingDelta) -> Iterator[BaseEvent]:
        yield from self._more_thought(event, event.text)

    def _more_thought(self, event: Event, text: str) -> Iterator[BaseEvent]:
        lane, core, agent = self._lanes[event.path], self._core, {"subagent_run_id": self._agent(event.path)}
        block = lane.thoughts.get(event.seq)
        if block is None:
            block = lane.thoughts[event.seq] = _OpenMessage(self._new_id(event))
            yield core.ReasoningStartEvent(message_id=block.id, **agent)
            yield core.ReasoningMessageStartEvent(message_id=block.id, role="reasoning", **agent)
        block.shown += text
        yield core.ReasoningMessageContentEvent(message_id=block.id, delta=text, **agent)

    def _text_completed(self, event: TextCompleted) -> Iterator[BaseEvent]:
        yield from self._complete_block(event, self._lanes[event.path].texts, self._more_text, self._end_text)

    def _thinking_completed(self, event: ThinkingCompleted) -> Iterator[BaseEvent]:
        yield from self._complete_block(event, self._lanes[event.path].thoughts, self._more_thought, self._end_thought)

    def _complete_block(
        self,
        event: TextCompleted | ThinkingCompleted,
        blocks: dict[int, _OpenMessage],
        more: Callable[[Event, str], Iterator[BaseEvent]],
        end: Callable[[str, int], Iterator[BaseEvent]],
    ) -> Iterator[BaseEvent]:
        """End a message; what a reader who fell behind did not get is made up for, what it got wrongly is taken back."""
        shown = blocks[event.seq].shown if event.seq in blocks else ""
        if not event.text.startswith(shown):
            yield self._custom(event, "discarded", {"messageId": blocks[event.seq].id})
            yield from end(event.path, event.seq)
            shown = ""
        if event.text[len(shown) :]:
            yield from more(event, event.text[len(shown) :])
        yield from end(event.path, event.seq)

    def _end_text(self, path: str, seq: int) -> Iterator[BaseEvent]:
        block = self._lanes[path].texts.pop(seq, None)
        if block is not None:
            yield self._core.TextMessageEndEvent(message_id=block.id, subagent_run_id=self._agent(path))

    def _end_thought(self, path: str, seq: int) -> Iterator[BaseEvent]:
        block = self._lanes[path].thoughts.pop(seq, None)
        if block is not None:
            agent = {"subagent_run_id": self._agent(path)}
            yield self._core.ReasoningMessageEndEvent(message_id=block.id, **agent)
            yield self._core.ReasoningEndEvent(message_id=block.id, **agent)

    def _discard_reply(self, event: ReplyDiscarded) -> Iterator[BaseEvent]:
        lane = self._lanes[event.path]
        for blocks in (lane.thoughts, lane.texts):
            if event.seq in blocks:
                yield self._custom(event, "discarded", {"messageId": blocks[event.seq].id})
        calls = [call for call, is_open in lane.calls.items() if is_open]
        for call in calls:
            yield self._custom(event, "discarded", {"toolCallId": self._call_id(event.path, call)})
        yield from self._end_blocks(event.path)
        for call in calls:
            del lane.calls[call]

    def _end_blocks(self, path: str) -> Iterator[BaseEvent]:
        lane = self._lanes[path]
        for seq in list(lane.thoughts):
            yield from self._end_thought(path, seq)
        for seq in list(lane.texts):
            yield from self._end_text(path, seq)
        for call in [call for call, is_open in lane.calls.items() if is_open]:
            yield from self._end_call(path, call)

    # --- tools --------------------------------------------------------------------------------------------------------

    def _input(self, event: ToolInputDelta) -> Iterator[BaseEvent]:
        if event.tool_call_id:
            yield from self._begin_call(event.path, event.tool_call_id, event.tool_name)
            yield self._arguments(event.path, event.tool_call_id, event.text)

    def _tool_started(self, event: ToolStarted) -> Iterator[BaseEvent]:
        self._last_call[event.path] = event.tool_call_id
        if event.tool_call_id not in self._lanes[event.path].calls:
            yield from self._begin_call(event.path, event.tool_call_id, event.tool_name)
            if self._lanes[event.path].calls[event.tool_call_id]:
                yield self._arguments(event.path, event.tool_call_id, _json(event.input))
        yield from self._end_call(event.path, event.tool_call_id)
        if event.child_path:
            # What a tool that yields asks for stands below its call, as what a child does.
            call = self._call_id(event.path, event.tool_call_id)
            yield from self._open_lane(event.child_path, event.tool_name, call=call)

    def _tool_finished(self, event: ToolFinished) -> Iterator[BaseEvent]:
        if event.child_path and event.result.status != "pending":
            failed = event.result.is_error
            status = RunStatus.FAILED if failed else RunStatus.COMPLETED
            yield from self._end_lanes(event.child_path, status, event.result.text if failed else "")
        if event.tool_call_id not in self._lanes[event.path].calls:
            yield from self._begin_call(event.path, event.tool_call_id, event.tool_name)
        yield from self._end_call(event.path, event.tool_call_id)
        call = self._call_id(event.path, event.tool_call_id)
        yield from self._show_state_change(event)
        if event.result.status == "pending":
            return  # its result comes with the answer that it waits for
        if self._page is not None and not event.path and call in self._pages and call in self._page.results:
            return  # it came from the page
        yield self._core.ToolCallResultEvent(
            message_id=f"{call}-result",
            tool_call_id=call,
            content=event.result.text,
            role="tool",
            subagent_run_id=self._agent(event.path),
            metadata={"stepengine": {"status": event.result.status, "duration_ms": event.duration_ms}},
        )

    def _begin_call(self, path: str, call: str, name: str) -> Iterator[BaseEvent]:
        lane = self._lanes[path]
        if not path and call in self._known:
            lane.calls.setdefault(call, False)
        elif call not in lane.calls:
            lane.calls[call] = True
            yield self._core.ToolCallStartEvent(
                tool_call_id=self._call_id(path, call), tool_call_name=name, subagent_run_id=self._agent(path)
            )

    def _arguments(self, path: str, call: str, text: str) -> BaseEvent:
        args: BaseEvent = self._core.ToolCallArgsEvent(
            tool_call_id=self._call_id(path, call), delta=text, subagent_run_id=self._agent(path)
        )
        return args

    def _end_call(self, path: str, call: str) -> Iterator[BaseEvent]:
        lane = self._lanes[path]
        if lane.calls.get(call):
            lane.calls[call] = False
            agent = self._agent(path)
            yield self._core.ToolCallEndEvent(tool_call_id=self._call_id(path, call), subagent_run_id=agent)

    def _progress(self, event: ToolProgress | ToolLog) -> Iterator[BaseEvent]:
        call = self._call_id(event.path, event.tool_call_id)
        content = {"toolCallId": call, "message": event.message, "percent": getattr(event, "percent", None)}
        yield self._core.ActivitySnapshotEvent(
            message_id=f"{call}-progress",
            activity_type="stepengine.progress",
            content=content,
            replace=True,
            subagent_run_id=self._agent(event.path),
        )

    def _todos(self, event: TodosChanged) -> Iterator[BaseEvent]:
        yield self._core.ActivitySnapshotEvent(
            message_id=f"{self._agent(event.path) or self._root}-todos",
            activity_type="stepengine.todos",
            content={"todos": thaw(event.todos)},
            replace=True,
            subagent_run_id=self._agent(event.path),
        )

    def _wait(self, event: WaitStarted | WaitFinished) -> Iterator[BaseEvent]:
        """Give a wait as one activity; a run that is suspended goes on with it in another message."""
        is_over = isinstance(event, WaitFinished) and event.is_over
        about = self._awaited.setdefault((event.path, event.seq), {"kind": event.kind})
        if isinstance(event, WaitStarted):
            about |= {"wakesAt": event.wakes_at, "topic": event.topic, "children": list(event.children)}
        yield self._core.ActivitySnapshotEvent(
            message_id=f"{self._agent(event.path) or self._root}-wait-{event.seq}",
            activity_type="stepengine.wait",
            content={**about, "isOver": is_over},
            replace=True,
            subagent_run_id=self._agent(event.path),
        )

    def _show_answer(self, event: AnswerReceived | PermissionDecided) -> Iterator[BaseEvent]:
        if isinstance(event, AnswerReceived):
            told = {"questionId": event.question_id, "answer": event.answer}
        else:
            told = {"toolCallId": self._call_id(event.path, event.tool_call_id), "decision": event.decision}
        yield self._custom(event, "answer", told)

    # --- words --------------------------------------------------------------------------------------------------------

    def _custom(self, event: Event, name: str, value: Mapping[str, object]) -> BaseEvent:
        custom: BaseEvent = self._core.CustomEvent(
            name=f"stepengine.{name}", value=dict(value), subagent_run_id=self._agent(event.path)
        )
        return custom

    def _agent(self, path: str) -> str | None:
        return f"{self._root}-{path}" if path else None

    def _call_id(self, path: str, call: str) -> str:
        # Those of a root run count on through its conversation, also where a run goes on as another one.
        return f"{self._agent(path)}:{call}" if path else call

    def _new_id(self, event: Event) -> str:
        self._made += 1
        return f"{self._root}-{event.path}-{event.epoch}-{self._made}"

    SHOWN: ClassVar[Mapping[type[Event], Callable[[_Page, Any], Iterable[BaseEvent]]]] = {
        RunStarted: lambda *_: (),
        RunFinished: _run_finished,
        AgentSpawned: _show_child,
        AgentFinished: _agent_finished,
        StepStarted: _step_started,
        StepFinished: _step_finished,
        TextDelta: _text,
        ThinkingDelta: _show_thought,
        TextCompleted: _text_completed,
        ThinkingCompleted: _thinking_completed,
        ReplyDiscarded: _discard_reply,
        ToolInputDelta: _input,
        ToolStarted: _tool_started,
        ToolFinished: _tool_finished,
        ToolProgress: _progress,
        ToolLog: _progress,
        TodosChanged: _todos,
        QuestionAsked: _note_page_call,
        PermissionRequested: _note_permission_request,
        AnswerReceived: _show_answer,
        PermissionDecided: _show_answer,
        WaitStarted: _wait,
        WaitFinished: _wait,
    }
    """The events for which the protocol has a form. The others are custom events, or are left out."""


def _calls_of(session: Session) -> set[str]:
    """Return the ids of the calls that a page has been shown."""
    replies = [message for message in session.messages if isinstance(message, AssistantMessage)]
    return {part.tool_call_id for reply in replies for part in reply.content if isinstance(part, ToolCallPart)}


def messages_of(core: ModuleType, said: Sequence[Message], thread_id: str) -> list[object]:
    """Return a conversation as the messages of the protocol; thoughts and instructions are left out, as is what waits for an answer."""
    found: list[object] = []
    for number, message in enumerate(said):
        own = f"{thread_id}-{number}"
        if isinstance(message, AssistantMessage):
            calls = [
                core.ToolCall(id=p.tool_call_id, function=core.FunctionCall(name=p.tool_name, arguments=_json(p.input)))
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


def _json(value: object) -> str:
    return json.dumps(plain(value), ensure_ascii=False)


def _schema(question: Question) -> dict[str, Any]:
    """Return the JSON Schema of what answers *question*."""
    if question.tool_name is not None:
        said = {"approved": {"type": "boolean"}, "reason": {"type": "string"}, "editedInput": {"type": "object"}}
        return {"type": "object", "properties": said, "required": ["approved"]}
    one: dict[str, object] = {"type": "string"}
    if question.options and not question.allow_text:
        one["enum"] = list(question.options)
    return {"type": "array", "items": one} if question.multi_select else one
