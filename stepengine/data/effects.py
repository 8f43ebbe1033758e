"""
What the machine asks the outside world for: a closed union of frozen descriptions.

``seq`` is the effect's number on its run's path, in program order. A ``Gather`` has no number; its members have
consecutive ones. Fields that are marked as not compared carry what a performer needs and a record does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import attrs

from stepengine.data.estimate import Measured
from stepengine.data.events import Event
from stepengine.data.json import JsonDict, JsonValue, freeze, freeze_object
from stepengine.data.makers import maker_of
from stepengine.data.messages import Source
from stepengine.data.models import ModelRequest
from stepengine.data.questions import Question
from stepengine.data.state import AgentState
from stepengine.data.yields import Perform

__all__ = (
    "RUNS",
    "AskPerson",
    "CallBody",
    "CallFunction",
    "CallModel",
    "CallTool",
    "Effect",
    "Gather",
    "Leaf",
    "Notify",
    "Spawn",
    "quick_call_model",
    "quick_call_tool",
)


def _hidden(**kwargs: Any) -> Any:
    return attrs.field(eq=False, repr=False, kw_only=True, **kwargs)


@attrs.frozen(weakref_slot=False)
class CallModel:
    """
    One model call. Outcome: ``Value(ModelReply)`` or ``Failure(ModelError | LimitExceeded)``.

    Attributes:
        seq: Its number.
        request: What to send.
        purpose: ``"step"``, ``"final_answer"``, ``"candidate"`` or ``"complete"``.
        call_id: Gives the id that the tool call of the reply with this number, from 0, will have; ``None`` where none is run.
    """

    seq: int
    request: ModelRequest
    purpose: Literal["step", "final_answer", "candidate", "complete"] = "step"
    call_id: Callable[[int], str] | None = _hidden(default=None)


quick_call_model = maker_of(CallModel)


@attrs.frozen(weakref_slot=False)
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
        measured: What the provider last reported of the run's prompt.
    """

    seq: int
    tool_name: str
    input: JsonDict = attrs.field(converter=freeze_object)
    tool_call_id: str = ""
    source: Source = "model"
    arguments: Mapping[str, Any] | None = _hidden(default=None)
    state: Callable[[], AgentState] = _hidden(default=AgentState)
    step_index: int = _hidden(default=0)
    measured: Measured | None = _hidden(default=None)


quick_call_tool = maker_of(CallTool)


@attrs.frozen(weakref_slot=False)
class CallBody(CallTool):
    """
    One call of a tool that yields: its body is a run of its own, without a model, at the path of this run and *seq* joined by a dot.

    Outcome as that of ``CallTool``; a ``Value`` and a ``Stop`` hold as ``body`` what the body leaves beside its result.

    Attributes:
        at: What time it is for the caller, which is when the body begins; milliseconds since the root's start.
        values: What hooks of the caller share with later ones.
    """

    at: int = _hidden(default=0)
    values: Mapping[str, Any] = _hidden(factory=JsonDict)


@attrs.frozen
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
        is_inline: Whether the child goes on from the parent's history, and leaves its own in ``ChildResult.left``.
        of: How many children are asked for at once.
        at: What time it is for the parent, which is when the child begins; milliseconds since the root's start.
    """

    seq: int
    agent_id: str
    prompt: str = ""
    params: JsonValue = attrs.field(default=None, converter=freeze)
    tool_call_id: str = ""
    definition: Any = _hidden(default=None)
    parent: Callable[[], AgentState] = _hidden(default=AgentState)
    is_inline: bool = _hidden(default=False)
    of: int = _hidden(default=1)
    at: int = _hidden(default=0)


@attrs.frozen
class CallFunction:
    """
    The author's own I/O. Outcome: ``Value(JSON)`` or ``Failure(PerformError | UnknownOutcome)``.

    Attributes:
        seq: Its number.
        call: The function and its arguments.
    """

    seq: int
    call: Perform[Any]


@attrs.frozen
class AskPerson:
    """
    Questions to a person. Outcome: ``Value(tuple[Answer, ...])`` in question order, or ``Stop("suspended")``.

    Attributes:
        seq: Its number.
        questions: What to ask.
        purpose: ``"question"`` or ``"permission"``.
        tool_call_id: For a permission, the call that waits for it.
    """

    seq: int
    questions: tuple[Question, ...]
    purpose: Literal["question", "permission"] = "question"
    tool_call_id: str = ""


RUNS = (Spawn, CallBody)
"""The effects that start a run: compare with ``type(effect) in RUNS``."""

Leaf: TypeAlias = CallModel | CallTool | CallBody | Spawn | CallFunction | AskPerson
"""An effect that has a number."""


@attrs.frozen
class Gather:
    """
    Several effects at once. Outcome: ``Gathered``, one outcome per member in request order.

    Attributes:
        effects: The members.
        concurrency: How many may be under way at once, whatever their kind: the width of a window that moves on by one when
            one of them has ended. It stands in the place of default limits; those that somebody set hold beside it. With
            ``None`` all begin at once, and the limits in force say how many of a kind run at once.
        fail_fast: Whether the other children are cancelled as soon as one member fails.
        has_failed: Whether one failed before the others could begin.
    """

    effects: tuple[Leaf, ...]
    concurrency: int | None = None
    fail_fast: bool = False
    has_failed: bool = False


@attrs.frozen
class Notify:
    """Show *event* to whoever watches. No number, no outcome: the driver sends ``None``."""

    event: Event


Effect: TypeAlias = CallModel | CallTool | CallBody | Spawn | CallFunction | AskPerson | Gather | Notify
