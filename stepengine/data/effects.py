"""
Effects, the requests of the machine to the outside world: a closed union of immutable classes, and the table ``EFFECTS``.

``seq`` is the effect's number on its run's path, in program order. A ``Gather`` has no number; its members have
consecutive ones. Fields that are marked as not compared carry what a performer needs and a record does not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from datetime import datetime
from types import MappingProxyType, NoneType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.estimate import Measured
from stepengine.data.events import Event
from stepengine.data.json import JsonDict, JsonValue, compact, freeze, freeze_object
from stepengine.data.messages import Source, ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Gathered
from stepengine.data.programs import RunningProgram
from stepengine.data.provenance import Provenance
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.waits import Awaited, ChildRef, Received, WaitsFor
from stepengine.data.yields import Perform


def _make_hidden_field(**kwargs: Any) -> Any:
    return attrs.field(eq=False, repr=False, kw_only=True, **kwargs)


@frozen(weakref_slot=False)
class CallModel:
    """
    One model call. Outcome: ``Value(ModelReply)`` or ``Failure(ModelError | LimitExceeded)``.

    Attributes:
        seq: Its number.
        request: The request to send.
        purpose: ``"step"``, ``"final_answer"``, ``"candidate"`` or ``"complete"``.
        call_id: Gives the id that the tool call of the reply with this number, from 0, will have; ``None`` where none is run.
    """

    seq: int
    request: ModelRequest
    purpose: Literal["step", "final_answer", "candidate", "complete"] = "step"
    call_id: Callable[[int], str] | None = _make_hidden_field(default=None)


@frozen(weakref_slot=False)
class CallTool:
    """
    One call of an ordinary tool. Outcome: ``Value(ToolResult)`` or ``Failure(UnknownOutcome | LimitExceeded)``.

    Attributes:
        seq: Its number.
        tool_name: The tool.
        input: The validated input as JSON.
        tool_call_id: The call's id.
        source: Who asked for it.
        arguments: The validated Python arguments; ``None`` asks the performer to validate *input* itself.
        state: Gives the state before the step, for the tool's context; call it before the effect's outcome is sent.
        step_index: The step in which it runs.
        measured: The provider's last token count for the run's prompt.
        program_line: The line of the program that asks for it, from 1; 0 where no program does, here and in other effects.
    """

    seq: int
    tool_name: str
    input: JsonDict = attrs.field(converter=freeze_object)
    tool_call_id: str = ""
    source: Source = "model"
    arguments: Mapping[str, Any] | None = _make_hidden_field(default=None)
    state: Callable[[], AgentState] = _make_hidden_field(default=AgentState)
    step_index: int = _make_hidden_field(default=0)
    measured: Measured | None = _make_hidden_field(default=None)
    program_line: int = _make_hidden_field(default=0)


@frozen(weakref_slot=False)
class CallBody(CallTool):
    """
    One call of a tool that yields. Its body is a separate run without a model, at the path of this run and *seq* joined by a dot.

    The outcome is that of ``CallTool``. ``body`` of a ``Value`` or ``Stop`` is the data of the body apart from its result.

    Attributes:
        at: The caller's time at the start of the body, in milliseconds since the root's start.
        values: The values that hooks of the caller share with later ones.
        provenance: The data that the body has received at its start; ``None`` if no policy needs it.
    """

    at: int = _make_hidden_field(default=0)
    values: Mapping[str, Any] = _make_hidden_field(default=JsonDict())
    provenance: Provenance | None = _make_hidden_field(default=None)


@frozen
class Spawn:
    """
    One child run. Outcome: ``Value(ChildResult)``, ``Failure(LimitExceeded)`` or ``Stop("suspended")``.

    Attributes:
        seq: Its number; the child's path is the parent's path and this number joined by a dot.
        agent_id: The agent to run, by normalised id.
        prompt: The child's prompt.
        params: The child's params.
        tool_call_id: The call that spawned it; ``""`` for a handler's ``AgentCall``.
        definition: The definition, when the handler gave one; else the engine looks *agent_id* up.
        parent: Gives the parent's state as the child may inherit it.
        is_inline: Whether the child continues the parent's history, and returns its own in ``ChildResult.left``.
        of: How many children are asked for at once.
        at: What time it is for the parent, which is when the child begins; milliseconds since the root's start.
        provenance: What the child has received when it begins; ``None`` where no policy asks.
        is_background: Whether the parent continues at once, with a ``ChildRef`` as the outcome. The end of the child is a separate
            outcome, at the child's path and -1.
    """

    seq: int
    agent_id: str
    prompt: str = ""
    params: JsonValue = attrs.field(default=None, converter=freeze)
    tool_call_id: str = ""
    is_background: bool = False
    definition: Any = _make_hidden_field(default=None)
    parent: Callable[[], AgentState] = _make_hidden_field(default=AgentState)
    is_inline: bool = _make_hidden_field(default=False)
    of: int = _make_hidden_field(default=1)
    at: int = _make_hidden_field(default=0)
    program_line: int = _make_hidden_field(default=0)
    provenance: Provenance | None = _make_hidden_field(default=None)

    @property
    def is_hand_off(self) -> bool:
        """Whether the child continues the conversation with its own prompt and tools; no call waits for it."""
        return self.is_inline and not self.tool_call_id


@frozen
class CallFunction:
    """
    The author's own I/O. Outcome: ``Value(JSON)`` or ``Failure(PerformError | UnknownOutcome)``.

    Attributes:
        seq: Its number.
        call: The function and its arguments.
    """

    seq: int
    call: Perform[Any]


@frozen
class AskPerson:
    """
    Questions to a person. Outcome: ``Value(tuple[Answer, ...])`` in question order, or ``Stop("suspended")``.

    Attributes:
        seq: Its number.
        questions: The questions to ask.
        purpose: ``"question"``, ``"permission"``, or ``"limit"`` where a limit asks for more.
        tool_call_id: For a permission, the call that waits for it.
        place: For a call of a program, the program and its line, from 1; the person is shown both.
    """

    seq: int
    questions: tuple[Question, ...]
    purpose: Literal["question", "permission", "limit"] = "question"
    tool_call_id: str = ""
    program_line: int = _make_hidden_field(default=0)
    place: tuple[str, int] | None = _make_hidden_field(default=None)


@frozen
class RunInBackground:
    """
    A child in the background, from its first effect to its end. Outcome: ``Value(ChildResult)`` or ``Stop``.

    No machine yields it. The starter of the child requests it at the child's own path, so that its end is recorded there.

    Attributes:
        agent_id: The agent.
        plan: What the child is started with; *state* is the state that it starts from.
        seq: -1, which is the number of a run as a whole.
    """

    agent_id: str
    plan: Any = _make_hidden_field(default=None)
    state: AgentState = _make_hidden_field(factory=AgentState)
    seq: int = -1


@frozen
class AwaitTime:
    """
    A wait for a time. Outcome: ``Value(None)``, whose ``at`` is the time of the wake-up, or ``Stop("suspended")``.

    Attributes:
        seq: Its number.
        seconds: The duration of the wait, if it was requested by duration.
        until: The date to wait for, if it was requested by date.
        wakes: The time of the wake-up, in milliseconds since the root run was created.
        asked: The time of the request, in the same unit.
    """

    seq: int
    seconds: float | None = None
    until: datetime | None = None
    wakes: int = _make_hidden_field(default=0)
    asked: int = _make_hidden_field(default=0)
    program_line: int = _make_hidden_field(default=0)


@frozen
class AwaitMessage:
    """
    The next message on a topic of this run. Outcome: ``Value(Received)``, ``Value(None)`` at the timeout, or ``Stop("suspended")``.

    Attributes:
        seq: Its number.
        topic: The topic.
        timeout: How many seconds it is waited for; ``None`` for ever.
        schema: What a message has to fit: a JSON Schema or a pydantic model; ``None`` for any JSON.
        wakes: When the patience ends, in milliseconds since the root run was created; ``None`` for never.
        asked: When it was asked for, in the same.
    """

    seq: int
    topic: str
    timeout: float | None = None
    schema: Any = _make_hidden_field(default=None)
    wakes: int | None = _make_hidden_field(default=None)
    asked: int = _make_hidden_field(default=0)


@frozen
class AwaitRuns:
    """
    The end of children in the background. Outcome: ``Value(Awaited)`` or ``Stop("suspended")``.

    Attributes:
        seq: Its number.
        children: Their paths.
        need: How many must have ended.
        timeout: How many seconds they are waited for; ``None`` for ever.
        wakes: When the patience ends, in milliseconds since the root run was created; ``None`` for never.
        asked: When it was asked for, in the same.
    """

    seq: int
    children: tuple[str, ...]
    need: int
    timeout: float | None = None
    wakes: int | None = _make_hidden_field(default=None)
    asked: int = _make_hidden_field(default=0)


@frozen
class SendToRun:
    """
    A message to a child in the background. Outcome: ``Value(bool)``, whether the child is still running.

    Attributes:
        seq: Its number.
        child: The child's path.
        value: The message: a text for its inbox, or JSON on a topic.
        topic: The topic; ``""`` for the inbox.
    """

    seq: int
    child: str
    value: JsonValue = attrs.field(default=None, converter=freeze)
    topic: str = ""


@frozen
class EndRuns:
    """
    The end of children in the background, at once. Outcome: ``Value(Awaited)``.

    Attributes:
        seq: Its number.
        children: Their paths.
        reason: Why.
    """

    seq: int
    children: tuple[str, ...]
    reason: str = ""


def split_program_lines(text: str) -> list[str]:
    """Return the lines of a program as Python counts them; ``str.splitlines`` splits at further characters."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def get_program_line(text: str, line: int) -> str:
    """Return a line of a program, from 1, without indent; ``""`` if there is no such line."""
    lines = split_program_lines(text)
    return lines[line - 1].strip() if 0 < line <= len(lines) else ""


Leaf: TypeAlias = (
    CallModel
    | CallTool
    | CallBody
    | Spawn
    | RunInBackground
    | CallFunction
    | AskPerson
    | AwaitTime
    | AwaitMessage
    | AwaitRuns
    | SendToRun
    | EndRuns
)
"""An effect that has a number."""


@frozen
class Gather:
    """
    Several effects at once. Outcome: ``Gathered``, one outcome per member in request order.

    Attributes:
        effects: The members.
        concurrency: How many may run at once, of any kind; when one ends, the next starts. It replaces default limits, and limits
            that were set apply, too. With ``None`` all start at once, and limits decide how many of a kind run at once.
        fail_fast: Whether the other children are cancelled as soon as one member fails.
        has_failed: Whether one failed before the others could start.
        races: The index of the first member of each race and the index after its last. When one member of a race ends, the others
            are abandoned.
    """

    effects: tuple[Leaf, ...]
    concurrency: int | None = None
    fail_fast: bool = False
    has_failed: bool = False
    races: tuple[tuple[int, int], ...] = ()


@frozen(weakref_slot=False)
class Notify:
    """Emit *event* to observers. No number, no outcome: the driver sends ``None``."""

    event: Event


class RunObjects(Protocol):
    """A store of objects for one run until it ends."""

    def get(self, key: Hashable, make: Callable[[], Any], /) -> Any:
        """Return the object stored under *key*, created by *make* on first use. It has ``async aclose()``."""


@frozen(eq=False)
class Compute:
    """
    Work outside the event loop for the body of a tool, with a result that is always the same. It has no number and no intent.

    The outcome is ``Value`` with the result of *work*, or ``Failure`` with the ``StepEngineError`` that it raised. The results of a
    body's work are recorded with the result of its call, so a replay does not repeat the work.

    Attributes:
        work: Does the work in another thread, with the run's objects; it returns a JSON object. If the second argument is a
            recorded result, it restores its state from that and returns it without work.
        stop: Ends the work at once, from the loop's thread; *work* returns or raises soon after.
        program: The program of the work: people and errors are shown the line at which it waits; ``None`` for none.
        known: The recorded result; ``None`` if the work has to be done.
    """

    work: Callable[[RunObjects, JsonValue], JsonValue]
    stop: Callable[[], None]
    program: RunningProgram | None = None
    known: JsonValue = None


Effect: TypeAlias = Leaf | Gather | Notify | Compute


class EffectRow(NamedTuple):
    """
    One effect: everything that more than one package needs to know of it.

    Packages keep what only they need (an encoder, a performer) in tables of their own over the same effects. ``tests/test_rows.py``
    lists these tables and names each row that is missing.

    Attributes:
        cls: The class.
        asks: The request, as documentation names it.
        outcome: The types that the ``Value`` may hold. For ``Gather`` and ``Notify``, what is sent instead of an outcome.
        kind: The type of its record in journals; ``""`` without a record. Written out: renaming a class must not change journals.
        verb: The kind in ``show``, on pages and in reports.
        name: The member of the record that names it in lists; ``""`` without one.
        members: The members of its record and their types; one that ends in ``?`` may be missing. Written out for the same reason. A
            member is the attribute of the same name, where ``journal/encoding.py`` and ``journal/event_stream.py`` say nothing else.
        fingerprint: The members of the record that make up its fingerprint, if the record has them; ``()`` where the journal
            computes the fingerprint in another way.
        waits_for: What it waits for, if it only waits. A run whose effects all wait is suspended.
        starts_run: Whether it starts a run at a path below its own.
        follows_children: Whether its outcome depends on which children in the background have ended.
        changes_world: Whether it runs code that may change something outside the run: a tool's or the author's. A replay may perform it
            for real, a fork may simulate it, and cutting it off needs ``allow_repeat``.
        replaced_by: What a fork puts in place of its outcome, as the editor names it; ``""`` where the outcome cannot be replaced.
    """

    cls: type[Effect]
    asks: str
    outcome: type | tuple[type, ...]
    kind: str = ""
    verb: str = ""
    name: str = ""
    members: Mapping[str, type] = MappingProxyType({})
    fingerprint: tuple[str, ...] = ()
    waits_for: WaitsFor | None = None
    starts_run: bool = False
    follows_children: bool = False
    changes_world: bool = False
    replaced_by: str = ""


_CALL = EffectRow(
    CallTool,
    asks="a tool",
    outcome=ToolResult,
    kind="tool_call",
    verb="tool",
    name="tool_name",
    members={
        "tool_name": str,
        "input": object,
        "tool_call_id": str,
        "source": str,
        "idempotent?": bool,
        "yields?": bool,
        "sandbox?": str,
    },
    fingerprint=("type", "tool_name", "input"),
    changes_world=True,
    replaced_by="result",
)

EFFECTS: tuple[EffectRow, ...] = (
    EffectRow(
        CallModel,
        asks="a model",
        outcome=ModelReply,
        kind="model_call",
        verb="model",
        members={"purpose": str, "request": dict},
        replaced_by="reply",
    ),
    _CALL,
    _CALL._replace(cls=CallBody, asks="a tool that yields, as a separate run", starts_run=True, replaced_by=""),
    EffectRow(
        Spawn,
        asks="a child run",
        outcome=(ChildResult, ChildRef),
        kind="agent_call",
        verb="spawn",
        name="agent_id",
        members={"agent_id": str, "prompt": str, "params": object, "tool_call_id?": str, "background?": bool},
        fingerprint=("type", "agent_id", "prompt", "params", "background"),
        starts_run=True,
    ),
    EffectRow(
        CallFunction,
        asks="your function",
        outcome=object,
        kind="perform",
        verb="perform",
        name="name",
        members={"name": str, "args": list, "kwargs": dict, "idempotent?": bool},
        fingerprint=("type", "name", "args", "kwargs"),
        changes_world=True,
        replaced_by="result",
    ),
    EffectRow(
        AskPerson,
        asks="a person",
        outcome=tuple,
        kind="ask",
        verb="ask",
        members={"questions": list, "purpose": str, "tool_call_id?": str},
        replaced_by="answer",
    ),
    EffectRow(
        AwaitTime,
        asks="a clock",
        outcome=NoneType,
        kind="sleep",
        verb="sleep",
        members={"seconds?": float, "until?": str},
        fingerprint=("type", "seconds", "until"),
        waits_for="time",
    ),
    EffectRow(
        AwaitMessage,
        asks="the sender of a message",
        outcome=(Received, NoneType),
        kind="receive",
        verb="receive",
        members={"topic": str, "timeout?": float},
        fingerprint=("type", "timeout", "topic"),
        waits_for="message",
    ),
    EffectRow(
        AwaitRuns,
        asks="background children",
        outcome=Awaited,
        kind="wait",
        verb="wait",
        members={"children": list, "need": int, "timeout?": float},
        fingerprint=("type", "children", "need", "timeout"),
        waits_for="child",
        follows_children=True,
    ),
    EffectRow(
        SendToRun,
        asks="a background child",
        outcome=bool,
        kind="send",
        verb="send",
        members={"child": str, "value": object, "topic?": str},
        fingerprint=("type", "child", "value", "topic"),
        follows_children=True,
    ),
    EffectRow(
        EndRuns,
        asks="background children",
        outcome=Awaited,
        kind="cancel",
        verb="cancel",
        members={"children": list, "reason?": str},
        fingerprint=("type", "children"),
        follows_children=True,
    ),
    EffectRow(RunInBackground, asks="the run of a child that its parent does not wait for", outcome=ChildResult),
    EffectRow(Gather, asks="several of these at once", outcome=Gathered),
    EffectRow(Compute, asks="another thread; not recorded", outcome=object),
    EffectRow(Notify, asks="observers", outcome=NoneType),
)
"""Every effect. A numbered effect may be answered with a ``Failure`` or a ``Stop`` as well."""

KINDS: Mapping[str, EffectRow] = {row.kind: row for row in EFFECTS if row.kind} | {_CALL.kind: _CALL}
"""The row of each kind of record; that of ``CallTool`` for calls of tools."""

ROWS: Mapping[type[Effect], EffectRow] = {row.cls: row for row in EFFECTS}
"""The row of each effect. Only numbered ones have a kind; ``RunInBackground`` has no record of its own."""

RUNS: tuple[type[Effect], ...] = tuple([row.cls for row in EFFECTS if row.starts_run])
"""The effects that start a run: those for which ``isinstance(effect, RUNS)`` holds."""

WAITS: tuple[type[Effect], ...] = tuple([row.cls for row in EFFECTS if row.waits_for])
"""The effects that only wait: for these alone, and for people, a run is suspended."""

CHILD_ENDS: tuple[type[Effect], ...] = tuple([row.cls for row in EFFECTS if row.outcome is Awaited])
"""The effects that report how children in the background ended."""


def summarize_effect(effect: Effect) -> str:
    """Return a line with the verb of an effect and its recorded members that are not empty; they must be JSON."""
    row = ROWS[type(effect)]
    values = [getattr(effect, member.rstrip("?")) for member in row.members]
    return " ".join([row.verb, *[compact(value) for value in values if value not in (None, "")]])
