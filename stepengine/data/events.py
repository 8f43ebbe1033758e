"""
Events, the progress of a run for observers, and ``EVENTS``, a table with a row for each. They change nothing.

Every event has ``run_id`` (the root run's), ``path`` (the run in the tree, ``""`` for the root), ``seq`` and ``epoch``. ``seq`` is
the number of the effect it belongs to, or of the next one. ``index`` is its position in the stream, -1 until it is emitted, and ``id``
is made of epoch and index. The order is guaranteed per path.

To show text as it arrives, keep the deltas of one ``(path, seq)`` together: ``TextCompleted`` and ``ThinkingCompleted`` replace them,
and ``ReplyDiscarded`` removes them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, Literal, NamedTuple

import attrs
from attrs import frozen

from stepengine.data.json import JsonValue, freeze
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.questions import Question
from stepengine.data.state import RunPhase, RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.data.waits import Waits, WaitsFor

__all__ = (
    "DELTAS",
    "EVENTS",
    "SENT_AS_DATA",
    "AgentFinished",
    "AgentSpawned",
    "AnswerReceived",
    "Compacted",
    "Event",
    "EventRow",
    "EventsDropped",
    "FileChanged",
    "FollowupsSuggested",
    "HandlerNotice",
    "HookFailed",
    "LogLine",
    "ModelFinished",
    "ModelRetry",
    "ModelStarted",
    "Notification",
    "PerformFinished",
    "PerformStarted",
    "PermissionDecided",
    "PermissionRequested",
    "PhaseChanged",
    "QuestionAsked",
    "RateLimited",
    "Repeat",
    "ReplyDiscarded",
    "RunFailed",
    "RunFinished",
    "RunStarted",
    "StepFinished",
    "StepStarted",
    "TextCompleted",
    "TextDelta",
    "ThinkingCompleted",
    "ThinkingDelta",
    "TodosChanged",
    "ToolFinished",
    "ToolInputDelta",
    "ToolLog",
    "ToolProgress",
    "ToolStarted",
    "WaitFinished",
    "WaitStarted",
    "Warned",
)


@frozen(kw_only=True)
class Event:
    """
    The base of all events.

    Attributes:
        path: The run's path in the tree; ``""`` for the root.
        seq: The number of the effect that the event belongs to, or of the next effect.
        run_id: The root run's id; ``""`` until the event is emitted.
        epoch: 8 hex digits, new each time that a process starts, resumes or forks the run.
        index: The event's place in the stream of its epoch, over the whole tree, from 0; -1 until it is emitted.
    """

    type: ClassVar[str] = "event"
    path: str = ""
    seq: int = 0
    run_id: str = attrs.field(default="", eq=False)
    epoch: str = attrs.field(default="", eq=False)
    index: int = attrs.field(default=-1, eq=False)

    @property
    def id(self) -> str:
        """``"<epoch>-<index>"`` for ``handle.events(after=)``; ``""`` if it is not in the stream (``EventsDropped``)."""
        return f"{self.epoch}-{self.index}" if self.index >= 0 else ""

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object; ``"type"`` names its kind in snake_case."""
        from stepengine.data.codec import plain  # noqa: PLC0415

        fields = {a.name: plain(getattr(self, a.name)) for a in attrs.fields(type(self))}
        return {"type": self.type, **fields}


@frozen(kw_only=True)
class RunStarted(Event):
    """
    A run began; *own_id* is its own id, *run_id* that of the root run.

    With *resumed* a root run continues from its journal; the events of its record are not shown again.
    """

    type: ClassVar[str] = "run_started"

    own_id: str
    agent_id: str
    prompt: str = ""
    params: JsonValue = attrs.field(default=None, converter=freeze)
    resumed: bool = False


@frozen(kw_only=True)
class StepStarted(Event):
    """
    A model step started; *step* counts from 0. *steps_remaining* is -1 for a followed run, whose limits are unknown here.

    With *resumed* another process had started the step before, and its reply may already have been shown.
    """

    type: ClassVar[str] = "step_started"

    step: int
    steps_remaining: int
    resumed: bool = False


@frozen(kw_only=True)
class StepFinished(Event):
    """
    A model step ended; it is emitted exactly once for each started step.

    *status* is ``COMPLETED``, or the status with which the run or the effect of the step ended: ``SUSPENDED``, ``CANCELLED`` or
    ``FAILED``. A suspended step starts and ends again, with the same *step*, when its run resumes. *usage* and *cost* are the
    run's totals so far, its children's included. *cost* is in US dollars, ``None`` if a part of it is unknown.
    """

    type: ClassVar[str] = "step_finished"

    step: int
    ended_turn: bool
    usage: Usage
    cost: Decimal | None = None
    status: RunStatus = RunStatus.COMPLETED


@frozen(kw_only=True)
class PhaseChanged(Event):
    """The run does something else now; *detail* is a tool name or a child's agent id."""

    type: ClassVar[str] = "phase_changed"

    phase: RunPhase
    detail: str = ""


@frozen(kw_only=True)
class ModelStarted(Event):
    """A model call began."""

    type: ClassVar[str] = "model_started"

    model: str
    purpose: str = "step"
    request: ModelRequest | None = attrs.field(default=None, eq=False, repr=False)


@frozen(kw_only=True)
class ModelFinished(Event):
    """
    A model call succeeded or failed; *reply* is ``None`` if it failed.

    *kind* is then the class of its error, such as ``"ModelError"``, or the reason for stopping the run, such as
    ``"cancelled"``. *call_ids* are the engine's ids of the tool calls in the reply, in order. They are used for running,
    recording and showing the calls; the ids within the reply are the provider's.
    """

    type: ClassVar[str] = "model_finished"

    model: str
    reply: ModelReply | None = None
    error: str = ""
    duration_ms: int = 0
    kind: str = ""
    call_ids: tuple[str, ...] = ()


@frozen(kw_only=True)
class ModelRetry(Event):
    """An attempt of a model call failed and another follows after *wait* seconds; *attempt* counts from 1."""

    type: ClassVar[str] = "model_retry"

    model: str
    attempt: int
    wait: float
    error: str


@frozen(kw_only=True)
class RateLimited(Event):
    """A model call waits for its turn, *wait* seconds at most if that is known; *limit* is the reason."""

    type: ClassVar[str] = "rate_limited"

    model: str
    provider: str
    limit: str
    wait: float | None = None


@frozen(kw_only=True)
class Repeat(Event):
    """The model made the same tool call *count* times in a row and got the same result each time."""

    type: ClassVar[str] = "repeat"

    tool_name: str
    tool_call_id: str = ""
    count: int


@frozen(kw_only=True)
class ReplyDiscarded(Event):
    """The deltas shown so far belong to a reply that was interrupted; discard them."""

    type: ClassVar[str] = "reply_discarded"

    model: str


@frozen(kw_only=True)
class TextDelta(Event):
    """More visible text."""

    type: ClassVar[str] = "text_delta"

    text: str


@frozen(kw_only=True)
class ThinkingDelta(Event):
    """More thinking text."""

    type: ClassVar[str] = "thinking_delta"

    text: str


@frozen(kw_only=True)
class ToolInputDelta(Event):
    """
    More of a tool call's arguments, as raw JSON text.

    *tool_call_id* is the id under which ``ToolStarted`` shows the call; ``""`` where the call of a reply is not run, such as a
    candidate's.
    """

    type: ClassVar[str] = "tool_input_delta"

    tool_name: str
    text: str
    tool_call_id: str = ""


@frozen(kw_only=True)
class TextCompleted(Event):
    """The visible text of a reply, whole."""

    type: ClassVar[str] = "text_completed"

    text: str


@frozen(kw_only=True)
class ThinkingCompleted(Event):
    """The thinking text of a reply, whole."""

    type: ClassVar[str] = "thinking_completed"

    text: str


@frozen(kw_only=True)
class ToolStarted(Event):
    """
    A tool call started; *category* is that of the tool, such as ``"write"``, for any caller.

    *child_path* is the path of the run of the tool's body, if the tool yields; the body's own calls are shown there. It is ``""``
    for other tools.
    """

    type: ClassVar[str] = "tool_started"

    tool_name: str
    tool_call_id: str = ""
    input: JsonValue = attrs.field(default=None, converter=freeze)
    source: str = "model"
    category: str = ""
    child_path: str = ""


@frozen(kw_only=True)
class ToolFinished(Event):
    """A tool call ended; *result* has ``is_error`` when it failed, *child_path* is as in ``ToolStarted``."""

    type: ClassVar[str] = "tool_finished"

    tool_name: str
    tool_call_id: str = ""
    result: ToolResult
    duration_ms: int = 0
    child_path: str = ""


@frozen(kw_only=True)
class ToolProgress(Event):
    """A tool reports its progress; *percent* is 0 to 100."""

    type: ClassVar[str] = "tool_progress"

    message: str
    percent: float | None = None
    tool_name: str = ""
    tool_call_id: str = ""


@frozen(kw_only=True)
class ToolLog(Event):
    """A tool logs a line."""

    type: ClassVar[str] = "tool_log"

    message: str
    level: str = "info"
    tool_name: str = ""
    tool_call_id: str = ""


@frozen(kw_only=True)
class FileChanged(Event):
    """A tool changed a file; *action* is ``"created"``, ``"modified"`` or ``"deleted"``."""

    type: ClassVar[str] = "file_changed"

    file: str
    action: str
    tool_name: str = ""
    tool_call_id: str = ""


@frozen(kw_only=True)
class FollowupsSuggested(Event):
    """A tool suggests the next prompts of the user: a list of objects with ``prompt`` and optionally ``label``."""

    type: ClassVar[str] = "followups_suggested"

    followups: JsonValue = attrs.field(default=None, converter=freeze)
    tool_name: str = ""
    tool_call_id: str = ""


@frozen(kw_only=True)
class PerformStarted(Event):
    """A ``Perform`` began."""

    type: ClassVar[str] = "perform_started"

    name: str


@frozen(kw_only=True)
class PerformFinished(Event):
    """A ``Perform`` ended; *error* is empty when it succeeded."""

    type: ClassVar[str] = "perform_finished"

    name: str
    error: str = ""
    duration_ms: int = 0


@frozen(kw_only=True)
class QuestionAsked(Event):
    """A person is asked."""

    type: ClassVar[str] = "question_asked"

    question: Question


@frozen(kw_only=True)
class AnswerReceived(Event):
    """A person answered."""

    type: ClassVar[str] = "answer_received"

    question_id: str
    answer: str


@frozen(kw_only=True)
class PermissionRequested(Event):
    """
    A tool call waits for a person's permission.

    *input* is what would run; *preview* and *remember* are those of the question; *category* is that of the tool.
    """

    type: ClassVar[str] = "permission_requested"

    question: Question
    tool_name: str
    tool_call_id: str = ""
    input: JsonValue = attrs.field(default=None, converter=freeze)
    preview: JsonValue = attrs.field(default=None, converter=freeze)
    remember: JsonValue = attrs.field(default=None, converter=freeze)
    category: str = ""


@frozen(kw_only=True)
class PermissionDecided(Event):
    """
    A tool call was allowed or denied; *rule_id* names the rule, if one decided.

    A rule that "always allow this" made is one that decided. *by* says who answered and *reason* why, where that was said;
    *edited_input* is what a person made of the input.
    """

    type: ClassVar[str] = "permission_decided"

    tool_name: str
    tool_call_id: str = ""
    decision: str
    rule_id: str | None = None
    by: str = ""
    reason: str = ""
    edited_input: JsonValue = attrs.field(default=None, converter=freeze)


@frozen(kw_only=True)
class AgentSpawned(Event):
    """
    A child run starts; its own events have *child_path*.

    *of* is the number of children that were requested at once; 0 for an unknown number above one. With *is_background* its parent
    continues meanwhile.
    """

    type: ClassVar[str] = "agent_spawned"

    agent_id: str
    child_path: str
    prompt: str = ""
    params: JsonValue = attrs.field(default=None, converter=freeze)
    display_name: str = ""
    parent_agent_id: str = ""
    only_child: bool = True
    of: int = 1
    tool_call_id: str = ""
    is_background: bool = False


@frozen(kw_only=True)
class AgentFinished(Event):
    """
    A child run ended, for better or worse.

    *text* is its last text, and *error* the reason if it did not complete; ``""`` without one. *usage* and *cost* are the totals of it
    and its own children. *cost* is in US dollars, ``None`` if a part of it is unknown.
    """

    type: ClassVar[str] = "agent_finished"

    agent_id: str
    child_path: str
    status: RunStatus
    usage: Usage = Usage()
    cost: Decimal | None = None
    text: str = ""
    error: str = ""
    is_background: bool = False


@frozen(kw_only=True)
class WaitStarted(Event):
    """
    A run waits for something that is not a person: ``kind`` is ``"time"``, ``"message"`` or ``"child"``.

    *wakes_at* is the latest time of its end (UTC, RFC 3339), ``""`` for none; *topic* is that of the message, *children* are the
    paths of the children.
    """

    type: ClassVar[str] = "wait_started"

    kind: WaitsFor
    wakes_at: str = ""
    topic: str = ""
    children: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """The wait in words, such as ``"waits for a message on 'go'"``."""
        until = datetime.fromisoformat(self.wakes_at) if self.wakes_at else None
        return Waits(kind=self.kind, wakes_at=until, topic=self.topic, children=self.children).description


@frozen(kw_only=True)
class WaitFinished(Event):
    """A wait of a run ended; *is_over* is false if the run was suspended or stopped while it waited."""

    type: ClassVar[str] = "wait_finished"

    kind: WaitsFor
    is_over: bool = True
    duration_ms: int = 0


@frozen(kw_only=True)
class TodosChanged(Event):
    """An agent replaced its todos: the whole list, objects with ``task`` and ``completed``."""

    type: ClassVar[str] = "todos_changed"

    todos: JsonValue = attrs.field(converter=freeze)


@frozen(kw_only=True)
class Notification(Event):
    """A message that a handler sent with ``ctx.notify``."""

    type: ClassVar[str] = "notification"

    message: str
    data: JsonValue = attrs.field(default=None, converter=freeze)


@frozen(kw_only=True)
class LogLine(Event):
    """A line that a handler or hook logged with ``ctx.logger``; *step* is the current or next step."""

    type: ClassVar[str] = "log_line"

    level: str
    message: str
    data: JsonValue = attrs.field(default=None, converter=freeze)
    step: int = 0


@frozen(kw_only=True)
class HookFailed(Event):
    """A hook raised; post-hooks are dropped, pre-hooks end the run."""

    type: ClassVar[str] = "hook_failed"

    point: str
    hook: str
    error: str


@frozen(kw_only=True)
class Compacted(Event):
    """
    A context policy or a handler shortened the history for the model: it cut, masked or summarized it.

    Attributes:
        by: The hook, or ``"set_messages"``.
        record: Whether the record itself was replaced, or only the view.
        tokens_before: The estimated size of the messages for the model before, in tokens.
        tokens_after: Their size afterwards.
        messages_before: The number of messages for the model before.
        messages_after: Their number afterwards.
    """

    type: ClassVar[str] = "compacted"

    by: str
    record: bool
    tokens_before: int
    tokens_after: int
    messages_before: int
    messages_after: int


@frozen(kw_only=True)
class HandlerNotice(Event):
    """Something odd about a handler that does not end the run: it ignored its close, or broke a text block."""

    type: ClassVar[str] = "handler_notice"

    kind: str
    message: str


@frozen(kw_only=True)
class Warned(Event):
    """A problem that needs attention, such as a tool that blocks the event loop."""

    type: ClassVar[str] = "warned"

    message: str


@frozen(kw_only=True)
class EventsDropped(Event):
    """
    A subscriber misses events. This event has no position in the stream and no ``id``.

    Attributes:
        count: The number of missing events of this epoch.
        reason: ``"buffer"``: the buffer of the subscriber overflowed. ``"epoch"``: the subscriber sent an id of another epoch,
            whose missing events are unknown. ``"journal"``: in a followed run, *count* events of the subscriber are no
            longer in the journal.
    """

    type: ClassVar[str] = "events_dropped"

    count: int
    reason: str = "buffer"


@frozen(kw_only=True)
class RunFailed(Event):
    """A run failed; ``RunFinished`` follows."""

    type: ClassVar[str] = "run_failed"

    error: str
    kind: str


@frozen(kw_only=True)
class RunFinished(Event):
    """The last event of a root run, exactly once."""

    type: ClassVar[str] = "run_finished"

    result: RunResult = attrs.field(repr=False)
    _clean: Callable[[Any], Any] | None = attrs.field(default=None, repr=False, eq=False)

    def to_json(self) -> dict[str, Any]:
        """Return the event as a JSON object with known secrets redacted; ``result`` itself has them."""
        told = super().to_json()
        del told["_clean"]
        return told if self._clean is None else self._clean(told)


class EventRow(NamedTuple):
    """
    One row of ``EVENTS``: the class of an event and its treatment.

    Attributes:
        cls: Its class. ``cls.type`` is its name in JSON.
        form: ``"own"`` if every surface has its own presentation for it, or a reason to omit it. ``"data"`` if a surface
            without a presentation sends its members to the page unchanged. ``"detail"`` if it is for observers and logs.
        by_machine: Whether the machine emits it, in the order of ``ORDER`` in ``machine/protocol.py``.
        is_recorded: Whether readers of the journal receive it, too, with the same path, number and type.
    """

    cls: type[Event]
    form: Literal["own", "data", "detail"] = "own"
    by_machine: bool = False
    is_recorded: bool = False


EVENTS: tuple[EventRow, ...] = (
    EventRow(RunStarted, by_machine=True, is_recorded=True),
    EventRow(RunFailed, form="detail", by_machine=True),
    EventRow(RunFinished, is_recorded=True),
    EventRow(StepStarted, by_machine=True, is_recorded=True),
    EventRow(StepFinished, by_machine=True, is_recorded=True),
    EventRow(PhaseChanged, form="detail", by_machine=True),
    EventRow(ModelStarted, form="detail", is_recorded=True),
    EventRow(ModelFinished, form="detail", is_recorded=True),
    EventRow(ModelRetry, form="data"),
    EventRow(RateLimited, form="data"),
    EventRow(TextDelta),
    EventRow(TextCompleted, by_machine=True, is_recorded=True),
    EventRow(ThinkingDelta),
    EventRow(ThinkingCompleted, by_machine=True, is_recorded=True),
    EventRow(ReplyDiscarded),
    EventRow(ToolInputDelta),
    EventRow(ToolStarted, by_machine=True, is_recorded=True),
    EventRow(ToolProgress),
    EventRow(ToolLog),
    EventRow(ToolFinished, by_machine=True, is_recorded=True),
    EventRow(FileChanged, form="data"),
    EventRow(FollowupsSuggested, form="data"),
    EventRow(Repeat, form="data"),
    EventRow(TodosChanged, by_machine=True),
    EventRow(PerformStarted, form="detail", is_recorded=True),
    EventRow(PerformFinished, form="detail", is_recorded=True),
    EventRow(QuestionAsked, is_recorded=True),
    EventRow(AnswerReceived, is_recorded=True),
    EventRow(PermissionRequested, is_recorded=True),
    EventRow(PermissionDecided, by_machine=True),
    EventRow(AgentSpawned, is_recorded=True),
    EventRow(AgentFinished, is_recorded=True),
    EventRow(WaitStarted, is_recorded=True),
    EventRow(WaitFinished, is_recorded=True),
    EventRow(Notification, form="data", by_machine=True),
    EventRow(Compacted, form="data", by_machine=True),
    EventRow(LogLine, form="detail", by_machine=True),
    EventRow(HookFailed, form="detail", by_machine=True),
    EventRow(HandlerNotice, form="detail", by_machine=True),
    EventRow(Warned, form="data", by_machine=True),
    EventRow(EventsDropped, form="data"),
)
"""Every event."""

DELTAS = (TextDelta, ThinkingDelta, ToolInputDelta)
"""The pieces of texts that other events contain completely."""

SENT_AS_DATA: tuple[type[Event], ...] = tuple([row.cls for row in EVENTS if row.form == "data"])
"""The events that a page whose protocol has no form for them gets as data."""
