"""``AgentState``: the whole state of a run as one value; and the results of runs."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, Generic

import attrs
from attrs import frozen
from typing_extensions import TypeVar

from stepengine.data.estimate import Measured, estimate_tokens, tool_tokens, transcript_tokens
from stepengine.data.json import JsonDict, freeze, freeze_object
from stepengine.data.messages import AssistantMessage, Message, ToolCallLog, ToolMessage, UserMessage, to_tuple
from stepengine.data.models import StopReason
from stepengine.data.object_codec import ObjectCodec, StoredType
from stepengine.data.provenance import Trust
from stepengine.data.questions import Question
from stepengine.data.stored_values import VALUE_TYPES
from stepengine.data.tools import ToolSpec
from stepengine.data.transcript import Transcript
from stepengine.data.usage import Spending, Usage, to_json_dict
from stepengine.data.visible import cut_end
from stepengine.data.waits import ChildRef, Waits
from stepengine.data.wire import read_history
from stepengine.errors import AgentError, ChildError, DataError, StepEngineError

OWN_CALL_ID = re.compile(r"c([0-9]{1,9})")


def _default_view(self: Any) -> Transcript:
    record: Transcript = self.message_history
    return record


def _freeze_output(value: Any) -> Any:
    """Return an output in the form of a state: immutable JSON, or the pydantic model of the agent's ``output_schema``."""
    return value if hasattr(type(value), "model_dump") else freeze(value)


@frozen(weakref_slot=False)
class AgentState:
    """
    The state of one run, an immutable value.

    Attributes:
        run_id: Unique id of the run.
        agent_id: The id of the agent definition.
        parent_id: The run id of the parent; ``None`` for a root run.
        ancestor_run_ids: Run ids from the root down to the parent.
        child_run_ids: Run ids of children in spawn order.
        message_history: The record: the whole conversation.
        view: What the model is shown; the record itself until a policy changes it.
        system_prompt: The resolved system prompt, sent with every request, never part of the history.
        tool_definitions: Name to specification of exactly the tools that this agent can use.
        output: The output set so far; ``None`` until set. A handler gets the pydantic model of its agent's
            ``output_schema``, as the caller gets it in the result; elsewhere it is JSON.
        steps_remaining: Model steps that are left.
        step_index: The number of steps that have begun.
        usage: Tokens spent by this run and its children.
        cost: US dollars spent by this run and its children, a lower bound where ``usage.at_least``; ``None`` when a part is
            unknown.
        credits_used: Credits that tools reported.
        context: A JSON object that hooks and tools share between steps.
        pending: Questions that the run waits for.
        next_call: The number of the next tool call id.
        id_prefix: The prefix of tool call ids: ``"c"``, or for a child that inherited its history one such as ``"c3_"``.
        left_out: Messages that replacements removed from the record, oldest first; kept only if the agent of the run
            has the tool ``recall_history``.
        handed_to: The id of the agent to which the conversation was handed over: the next message goes to it, whichever
            agent is named then. ``None`` where it was never handed over.
    """

    run_id: str = ""
    agent_id: str = ""
    parent_id: str | None = None
    ancestor_run_ids: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    child_run_ids: tuple[str, ...] = attrs.field(default=(), converter=to_tuple)
    message_history: Transcript = attrs.field(factory=Transcript)
    view: Transcript = attrs.field(default=attrs.Factory(_default_view, takes_self=True))
    system_prompt: str = ""
    tool_definitions: Mapping[str, ToolSpec] = attrs.field(default=JsonDict(), converter=to_json_dict)
    output: Any = attrs.field(default=None, converter=_freeze_output)
    steps_remaining: int = 0
    step_index: int = 0
    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    credits_used: float = 0
    context: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object)
    pending: tuple[Question, ...] = attrs.field(default=(), converter=to_tuple)
    next_call: int = 1
    id_prefix: str = "c"
    left_out: tuple[Message, ...] = attrs.field(default=(), converter=to_tuple)
    handed_to: str | None = None

    @property
    def context_tokens(self) -> int:
        """The estimated size of the next request in tokens: view, system prompt and tools."""
        tools = tool_tokens(self.tool_definitions.values())
        return transcript_tokens(self.view) + estimate_tokens(self.system_prompt) + tools

    @classmethod
    def from_messages(cls, messages: Iterable[Message], **fields: Any) -> AgentState:
        """
        Return a state with a history, for ``previous=``.

        Raises:
            TranscriptError: when calls and results do not pair.
        """
        history = Transcript(messages)
        taken = [OWN_CALL_ID.fullmatch(m.tool_call_id) for m in history if isinstance(m, ToolMessage)]
        next_call = 1 + max([int(match[1]) for match in taken if match], default=0)
        return cls(message_history=history, next_call=next_call, **fields)

    @classmethod
    def from_dicts(cls, messages: Iterable[object], **fields: object) -> AgentState:
        """
        Return a state with a history in the ``{"role", "content"}`` form; system messages become its system prompt.

        That prompt is sent by an agent that has no system prompt of its own.

        Raises:
            DataError: when a message cannot be read.
            TranscriptError: when calls and results do not pair.
        """
        history = read_history(messages)
        return cls.from_messages(history.messages, system_prompt=history.system_prompt, **fields)

    def to_json(self) -> dict[str, Any]:
        """
        Return this state as a JSON object for ``json.dumps``; ``from_json`` reads it.

        The whole conversation is in it as it was said, secrets included: keep it where the conversation may be kept.

        Raises:
            DataError: when something in it cannot be stored, such as a number that is not finite, naming the place.
        """
        return _get_state_codec().to_json(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> AgentState:
        """
        Return the state in *data*, as stored by ``to_json``, for ``previous=``.

        Raises:
            DataError: for what is no such object, or was made by a newer version; it names the place.
        """
        state = _get_state_codec().from_json(data)
        if isinstance(state, AgentState):
            return state
        msg = f"AgentState.from_json needs the output of AgentState.to_json, not a stored {type(state).__name__}"
        raise DataError(msg)


STATE_TYPES = (
    StoredType("transcript", Transcript, "messages", items=(UserMessage, AssistantMessage, ToolMessage)),
    StoredType(
        "agent_state",
        AgentState,
        "run_id agent_id parent_id ancestor_run_ids child_run_ids message_history view system_prompt tool_definitions "
        "output steps_remaining step_index usage cost credits_used context pending next_call id_prefix left_out "
        "handed_to",
    ),
)
"""The rows of the table of stored types for a state and its conversation."""


@cache
def _get_state_codec() -> ObjectCodec:
    return ObjectCodec((*VALUE_TYPES, *STATE_TYPES))


def find_suspended_reply_index(record: Sequence[Message]) -> int | None:
    """
    Return the index of the reply whose calls wait for an answer, or ``None`` if the last step of *record* is finished.

    Only people may have said something after it.
    """
    at = len(record) - 1
    while at >= 0 and isinstance(record[at], UserMessage):
        at -= 1
    waits = False
    while at >= 0 and isinstance(record[at], ToolMessage):
        waits = waits or record[at].status == "pending"  # type: ignore[union-attr]
        at -= 1
    return at if waits else None


def estimate_next_prompt_tokens(state: AgentState, measured: Measured | None) -> int:
    """
    Return the estimated size of a run's next prompt in tokens, based on the provider's last count if there is one.

    It is the last number that the provider reported, plus an estimate of the newer messages. Without a report, or after the
    prompt was rewritten, the whole size is estimated.
    """
    tokens = None if measured is None else measured.estimate_next_prompt_size(state.system_prompt, state.view)
    return state.context_tokens if tokens is None else tokens


Out = TypeVar("Out", default=Any)


class RunStatus(StrEnum):
    """How a run ended."""

    COMPLETED = "completed"
    SUSPENDED = "suspended"
    MAX_STEPS = "max_steps"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TRUNCATED = "truncated"


class RunPhase(StrEnum):
    """The current activity of a run."""

    IDLE = "idle"
    CALLING_MODEL = "calling_model"
    AWAITING_PERMISSION = "awaiting_permission"
    AWAITING_ANSWER = "awaiting_answer"
    EXECUTING_TOOL = "executing_tool"
    AWAITING_AGENT = "awaiting_agent"
    AWAITING_TIME = "awaiting_time"
    AWAITING_MESSAGE = "awaiting_message"
    DONE = "done"
    FAILED = "failed"


@frozen
class RunInfo:
    """
    The caller's information about a run, apart from the request; the same for every run of a tree.

    Attributes:
        session_id: The conversation's id, if there is one.
        user_id: The user's id, if the caller gave one.
        metadata: The caller's metadata, for hooks and tools.
    """

    session_id: str | None = None
    user_id: str | None = None
    metadata: JsonDict = attrs.field(default=JsonDict(), converter=freeze_object)


class SpendingMixin:
    """The spending of a run, with the same names for its caller and for its parent."""

    __slots__ = ()
    spending: Spending

    @property
    def usage(self) -> Usage:
        """Tokens, children and failed attempts included."""
        return self.spending.usage

    @property
    def cost(self) -> Decimal | None:
        """US dollars; ``None`` when a part is unknown."""
        return self.spending.cost

    @property
    def credits_used(self) -> float:
        """Credits that tools reported."""
        return self.spending.credits_used

    @property
    def usage_by_agent(self) -> Mapping[str, Usage]:
        """Usage per agent id."""
        return self.spending.by_agent

    @property
    def usage_by_model(self) -> Mapping[str, Usage]:
        """Usage per model string."""
        return self.spending.by_model

    @property
    def cost_by_agent(self) -> Mapping[str, Decimal | None]:
        """US dollars per agent id; ``None`` where a part is unknown."""
        return self.spending.cost_by_agent

    @property
    def cost_by_model(self) -> Mapping[str, Decimal | None]:
        """US dollars per model string; ``None`` where a part is unknown."""
        return self.spending.cost_by_model


@frozen(kw_only=True)
class ChildResult(SpendingMixin, Generic[Out]):
    """
    How a child run ended, as its parent sees it.

    Attributes:
        agent_id: The child's agent.
        run_id: The child's run id; ``""`` when it never started.
        status: How it ended.
        output: Its output by its ``output_mode``; of one that did not complete, what there was when its budget was spent
            or its last reply was cut, else ``None``.
        text: What it said or set as its output, when that is text; see ``RunResult.text``.
        error: Why it failed, or the limit that ended it as ``max_steps``.
        spending: What it and its own children spent; ``usage``, ``cost`` and the others are those of ``RunResult``.
        questions: Its open questions when it is suspended.
        left: Of an inline child, its whole end, with the state that it leaves to its parent; never stored.
        trust: ``"trusted"`` where the output can hold no text of third parties, in a run whose policy follows data.
        text_trust: ``"trusted"`` where neither text nor error can hold any, since the child received none.
        warnings: Its warnings and those of the runs below it, each with the path of its run.
    """

    agent_id: str
    run_id: str = ""
    status: RunStatus = attrs.field(default=RunStatus.COMPLETED, converter=RunStatus)
    output: Out = None  # type: ignore[assignment]
    text: str = ""
    error: StepEngineError | None = None
    spending: Spending = Spending()
    questions: tuple[Question, ...] = attrs.field(default=(), converter=to_tuple)
    left: EndedRun | None = attrs.field(default=None, eq=False, repr=False, metadata={"stored": False})
    trust: Trust = attrs.field(default="untrusted", kw_only=True)
    text_trust: Trust = attrs.field(default="untrusted", kw_only=True)
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False, converter=to_tuple)

    @property
    def is_error(self) -> bool:
        """Whether the child did not complete."""
        return self.status is not RunStatus.COMPLETED

    @property
    def why(self) -> str:
        """The reason why it did not complete, if more is known than its status; else ``""``."""
        if self.error is not None:
            return self.error.message
        return "its last reply was cut off at the output limit" if self.status is RunStatus.TRUNCATED else ""

    def unwrap(self) -> Out:
        """
        Return the output of a completed child; raise ``ChildError`` for any other.

        Raises:
            ChildError: unless the child completed; its ``__cause__`` is the child's error.
        """
        if not self.is_error:
            return self.output
        why = f": {self.why}" if self.why else ""
        msg = f"agent {self.agent_id!r} ended as {self.status.value}{why}"
        raise ChildError(msg, agent_id=self.agent_id, status=self.status.value, result=self) from self.error


@frozen
class Waited(Generic[Out]):
    """
    The result of ``Wait``.

    Attributes:
        done: The results of the children that have ended, in that order.
        open: The children that are still running, in the order of the request.
    """

    done: tuple[ChildResult[Out], ...]
    open: tuple[ChildRef[Out], ...] = ()

    def __getitem__(self, ref: ChildRef[Out]) -> ChildResult[Out]:
        """Return the result of the child of *ref*; raises ``AgentError`` if it is not among them."""
        for child in self.done:
            if child.run_id == ref.id:
                return child
        state = "is still at work" if ref in self.open else "was not waited for here"
        msg = f"the child {ref.agent_id!r} at {ref.path!r} {state}"
        raise AgentError(msg)

    def __contains__(self, ref: object) -> bool:
        return isinstance(ref, ChildRef) and any(child.run_id == ref.id for child in self.done)


def mark_suspended_as_cancelled(child: ChildResult[Out]) -> ChildResult[Out]:
    """Return a child's result with a suspension turned into a cancellation without questions."""
    if child.status is not RunStatus.SUSPENDED:
        return child
    return attrs.evolve(child, status=RunStatus.CANCELLED, questions=())


MAX_WARNINGS = 200
"""Warnings that a run passes on: a person reads no more, and a parent of thousands of children records theirs."""
MAX_WARNING_CHARS = 4_000
"""About a page. A warning may quote an error, whose text can be as long as its author likes."""


def label_warning(text: str, path: str, agent_id: str) -> str:
    """Return the text of a warning of the run at *path*, with that path unless it is the root."""
    return f"run {path} ({agent_id}): {text}" if path else text


def join_run_and_child_warnings(run_warnings: Sequence[str], children: Iterable[ChildResult]) -> tuple[str, ...]:
    """Return the warnings of a run and those of its children, shortened if there are too many."""
    texts = [cut_end(text, MAX_WARNING_CHARS) for text in run_warnings]
    for child in children:
        texts += child.warnings
    if len(texts) > MAX_WARNINGS:
        texts[MAX_WARNINGS - 1 :] = [f"there are more than {MAX_WARNINGS} warnings; the others are left out"]
    return tuple(texts)


@frozen(kw_only=True, weakref_slot=False)
class EndedRun(SpendingMixin, Generic[Out]):
    """The end of a run, for its machine and for its caller; for the fields see ``RunResult``."""

    status: RunStatus
    state: AgentState
    stop_reason: StopReason | None = None
    output: Out = None  # type: ignore[assignment]
    text: str = ""
    spending: Spending = Spending()
    tool_calls: tuple[ToolCallLog, ...] = ()
    thinking: tuple[str, ...] = ()
    children: tuple[ChildResult, ...] = ()
    error: BaseException | None = None
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False)


@frozen(kw_only=True)
class RunResult(EndedRun[Out]):
    """
    How a run ended, for the caller.

    A replay's result is equal to the recorded run's: ``journal``, ``leaked`` and ``warnings`` are not compared, because
    they tell of the process that ran it.

    Attributes:
        status: How it ended.
        stop_reason: Why the last model reply stopped; ``None`` when no model was called.
        output: The output; see ``AgentDefinition.output_mode``.
        text: What the handler returned or ``set_output`` set, when that is text; else the message of ``end_turn``; else what
            the last assistant message of this run that says anything says, without thoughts that the model wrote into its
            text, or the results of a call of the handler that ends the run. ``""`` when suspended or when there is none.
        state: The final state, ready to be stored and passed back as ``previous=``.
        spending: Usage, cost and credits, children and failed attempts included.
        tool_calls: All tool calls in order, those of the handler included. After a hand-off those of the later agents follow,
            and likewise in ``thinking`` and ``children``.
        pending_questions: Open questions when it is suspended.
        thinking: The thinking texts in order, also those that a model wrote into its text.
        children: The results of the children in spawn order.
        session_id: The conversation's id, if there is one.
        error: The error when it failed.
        journal: The journal it was recorded in, if any.
        leaked: Names of what could not be stopped, such as threads of sync tools that hang.
        warnings: What was logged and dropped: failing observers, hooks and handlers that ignored their close; and background
            jobs that were ended with the run. Those of children follow, each with the path of its run.
        session_saved: Whether the session was saved; ``None`` when there is none.
        waits_for: What it waits for when it is suspended: its open questions and everything else.
    """

    pending_questions: tuple[Question, ...] = ()
    waits_for: tuple[Waits, ...] = ()
    session_id: str | None = None
    journal: Any = attrs.field(default=None, repr=False, eq=False)
    leaked: tuple[str, ...] = attrs.field(default=(), eq=False)
    session_saved: bool | None = None

    def __repr__(self) -> str:
        """Return one line, since ``asyncio`` formats the results of tasks, however long the history is."""
        error = "" if self.error is None else f", error {type(self.error).__name__}: {reprlib.repr(str(self.error))}"
        what = f"{self.status.value}, output {reprlib.repr(self.output)}{error}"
        return f"<RunResult of {self.state.agent_id!r}: {what}, {len(self.state.message_history)} messages>"

    @property
    def wakes_at(self) -> datetime | None:
        """The earliest wake time of a suspended run, at which ``resume`` continues it; ``None`` without one."""
        return min([one.wakes_at for one in self.waits_for if one.wakes_at is not None], default=None)

    def unwrap(self) -> Out:
        """
        Return the output of a completed run, else raise.

        Raises:
            StepEngineError: the run's own error, or one that names its status.
        """
        if self.status is RunStatus.COMPLETED:
            return self.output
        if self.error is not None:
            raise self.error
        waits = [q.text for q in self.pending_questions]
        waits += [said for one in self.waits_for if (said := one.awaited_text)]
        what = f"; it waits for {waits}" if waits else ""
        msg = f"the run of {self.state.agent_id!r} ended as {self.status.value}{what}"
        raise StepEngineError(msg)
