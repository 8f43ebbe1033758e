"""What a caller says of a run, ``RunInfo``, and how it ended: ``RunResult`` for callers, ``ChildResult`` for parents."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum
from typing import Any, Generic

import attrs
from typing_extensions import TypeVar

from stepengine.data.json import JsonDict, freeze_object
from stepengine.data.models import StopReason
from stepengine.data.parts import tuple_of
from stepengine.data.questions import Question
from stepengine.data.results import ToolCallLog
from stepengine.data.state import AgentState
from stepengine.data.usage import Spending, Usage
from stepengine.errors import ChildError, StepEngineError

__all__ = ("ChildResult", "Ended", "RunInfo", "RunPhase", "RunResult", "RunStatus")

Out = TypeVar("Out", default=Any)


class RunStatus(StrEnum):
    """How a run ended (requirements D12)."""

    COMPLETED = "completed"
    SUSPENDED = "suspended"
    MAX_STEPS = "max_steps"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TRUNCATED = "truncated"


class RunPhase(StrEnum):
    """What a run is doing (requirements X6)."""

    IDLE = "idle"
    CALLING_MODEL = "calling_model"
    AWAITING_PERMISSION = "awaiting_permission"
    AWAITING_ANSWER = "awaiting_answer"
    EXECUTING_TOOL = "executing_tool"
    AWAITING_AGENT = "awaiting_agent"
    DONE = "done"
    FAILED = "failed"


@attrs.frozen
class RunInfo:
    """
    What a caller says of a run beside what it asks for; the same for every run of a tree.

    Attributes:
        session_id: The conversation's id, if there is one.
        user_id: The user's id, if the caller gave one.
        metadata: The caller's metadata, for hooks and tools.
    """

    session_id: str | None = None
    user_id: str | None = None
    metadata: JsonDict = attrs.field(factory=JsonDict, converter=freeze_object)


@attrs.frozen(kw_only=True)
class ChildResult(Generic[Out]):
    """
    How a child run ended, as its parent sees it (requirements J6).

    Attributes:
        agent_id: The child's agent.
        run_id: The child's run id; ``""`` when it never started.
        status: How it ended.
        output: Its output by its ``output_mode``; of one that did not complete, what there was when its budget was spent
            or its last reply was cut, else ``None``.
        text: What it said or set as its output, when that is text; see ``RunResult.text``.
        error: Why it failed, or the limit that ended it as ``max_steps``.
        spending: What it and its own children spent.
        questions: Its open questions when it is suspended.
        left: Of an inline child, the state that it leaves to its parent; never stored.
    """

    agent_id: str
    run_id: str = ""
    status: RunStatus = attrs.field(default=RunStatus.COMPLETED, converter=RunStatus)
    output: Out = None  # type: ignore[assignment]
    text: str = ""
    error: StepEngineError | None = None
    spending: Spending = Spending()
    questions: tuple[Question, ...] = attrs.field(default=(), converter=tuple_of)
    left: AgentState | None = attrs.field(default=None, eq=False, repr=False, metadata={"stored": False})

    @property
    def is_error(self) -> bool:
        """Whether the child did not complete."""
        return self.status is not RunStatus.COMPLETED

    @property
    def why(self) -> str:
        """Why it did not complete, when more is known of that than its status; else ``""``."""
        if self.error is not None:
            return self.error.message
        return "its last reply was cut off at the output limit" if self.status is RunStatus.TRUNCATED else ""

    def unwrap(self) -> Out:
        """
        Return the output.

        Raises:
            ChildError: unless the child completed; its ``__cause__`` is the child's error.
        """
        if not self.is_error:
            return self.output
        why = f": {self.why}" if self.why else ""
        msg = f"agent {self.agent_id!r} ended as {self.status.value}{why}"
        raise ChildError(msg, agent_id=self.agent_id, status=self.status.value, result=self) from self.error


@attrs.frozen(kw_only=True, weakref_slot=False)
class Ended(Generic[Out]):
    """How a run ended, as the machine that ran it and its caller both see it; ``RunResult`` says what the fields are."""

    status: RunStatus
    state: AgentState
    stop_reason: StopReason | None = None
    output: Out = None  # type: ignore[assignment]
    text: str = ""
    spending: Spending = Spending()
    tool_calls: tuple[ToolCallLog, ...] = ()
    thinking: tuple[str, ...] = ()
    children: tuple[ChildResult[Any], ...] = ()
    error: BaseException | None = None
    warnings: tuple[str, ...] = attrs.field(default=(), eq=False)


@attrs.frozen(kw_only=True)
class RunResult(Ended[Out]):
    """
    How a run ended, for the caller (requirements D9-D15, design 9).

    A replay's result is equal to the recorded run's: ``journal``, ``leaked`` and ``warnings`` are not compared, because
    they tell of the process that ran it.

    Attributes:
        status: How it ended.
        stop_reason: Why the last model reply stopped; ``None`` when no model was called.
        output: The output; see ``AgentDefinition.output_mode``.
        text: What the handler returned or ``set_output`` set, when that is text; else the message of ``end_turn``; else what
            the last assistant message of this run that says anything says, without thoughts that the model wrote into its
            text. ``""`` when suspended or when there is none.
        state: The final state, ready to be stored and passed back as ``previous=``.
        spending: Usage, cost and credits, children and failed attempts included.
        tool_calls: All tool calls in order, those of the handler included.
        pending_questions: Open questions when it is suspended.
        thinking: The thinking texts in order, also those that a model wrote into its text.
        children: The results of the children in spawn order.
        session_id: The conversation's id, if there is one.
        error: The error when it failed.
        journal: The journal it was recorded in, if any.
        leaked: Names of what could not be stopped, such as threads of sync tools that hang.
        warnings: What was logged and dropped: failing observers, hooks and handlers that ignored their close; and background
            jobs that were ended with the run.
        session_saved: Whether the session was saved; ``None`` when there is none.
    """

    pending_questions: tuple[Question, ...] = ()
    session_id: str | None = None
    journal: Any = attrs.field(default=None, repr=False, eq=False)
    leaked: tuple[str, ...] = attrs.field(default=(), eq=False)
    session_saved: bool | None = None

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

    def __repr__(self) -> str:
        """Return one line: ``asyncio`` formats what a task returned, however long a history is."""
        error = "" if self.error is None else f", error {type(self.error).__name__}: {reprlib.repr(str(self.error))}"
        what = f"{self.status.value}, output {reprlib.repr(self.output)}{error}"
        return f"<RunResult of {self.state.agent_id!r}: {what}, {len(self.state.message_history)} messages>"

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
        questions = f"; it waits for {[q.text for q in self.pending_questions]}" if self.pending_questions else ""
        msg = f"the run of {self.state.agent_id!r} ended as {self.status.value}{questions}"
        raise StepEngineError(msg)
