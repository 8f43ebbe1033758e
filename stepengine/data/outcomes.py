"""
The outcomes of effects: ``Value``, ``Failure`` or ``Stop``; for a ``Gather`` one of them per member.

``at`` is milliseconds since the root run was created, stamped by the innermost live performer and read back from the
record on replay. ``inputs`` are messages that were sent to the run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.json import JsonValue
from stepengine.data.messages import ToolResult, UserMessage
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult
from stepengine.data.usage import Spending, Usage
from stepengine.errors import RaceLost, StepEngineError


@frozen
class SetOutput:
    """The body of a tool has set the output of its caller to *value*, which fits."""

    value: JsonValue


@frozen(kw_only=True, weakref_slot=False)
class BodyEnd:
    """
    The outcome of a yielding tool's body for its caller, apart from the result.

    Attributes:
        spending: The spending of the body and of the children that it started.
        children: The results of these children.
        questions: The open questions of a suspended body.
        changes: The changes for the caller's run, in the order of their addresses: ``Change`` or ``SetOutput``. A ``UserMessage`` is
            a message that was sent to the body.
        computed: The result of each ``Compute`` of the body, in order; ``None`` for a failed one.
        warnings: The warnings of the body without those of its children.
    """

    spending: Spending = Spending()
    children: tuple[ChildResult, ...] = ()
    questions: tuple[Question, ...] = ()
    changes: tuple[Any, ...] = ()
    computed: tuple[JsonValue, ...] = ()
    warnings: tuple[str, ...] = ()


StopKind: TypeAlias = Literal["suspended", "cancelled", "shutdown", "limit", "diverged", "crashed"]


@frozen(weakref_slot=False)
class Value:
    """
    An effect happened.

    Attributes:
        value: ``ModelReply`` for ``CallModel``, ``ToolResult`` for ``CallTool``, ``ChildResult`` for ``Spawn``, frozen
            JSON for ``CallFunction``, a tuple of ``Answer`` for ``AskPerson``; for what only waits see the effects.
        at: Milliseconds since the root's ``created``.
        inputs: User messages that arrived meanwhile.
        body: For a ``CallBody``, what its body leaves; never stored, since a replay goes through the body again.
    """

    value: Any
    at: int = 0
    inputs: tuple[UserMessage, ...] = ()
    body: BodyEnd | None = attrs.field(default=None, eq=False, repr=False, metadata={"stored": False})


@frozen
class Failure:
    """
    An effect failed; *error* is thrown at the author's own ``yield``.

    A ``LimitExceeded`` means that the effect was refused because a budget is spent.
    """

    error: StepEngineError
    at: int = 0
    inputs: tuple[UserMessage, ...] = ()


@frozen
class PartialUsage:
    """
    The usage of a model call that was stopped or failed.

    Attributes:
        usage: A lower bound of the tokens: those that the provider had reported, else those that were streamed.
        cost: The cost of these tokens in US dollars; ``None`` if unknown.
    """

    usage: Usage
    cost: Decimal | None


def find_failure_usage(error: object) -> PartialUsage | None:
    """Return the usage of the failed attempts that an error reports, or ``None``."""
    usage = getattr(error, "usage", None)
    if not isinstance(usage, Usage):
        return None
    # Without known tokens the known part has no cost, and the usage is marked as a lower bound.
    return PartialUsage(usage, None if usage.total_tokens else Decimal(0))


@frozen
class Stop:
    """
    The run must end now; never shown to author code.

    Attributes:
        kind: Why.
        at: Milliseconds since the root's ``created``.
        error: For ``"limit"``, ``"diverged"`` and ``"crashed"``, the error that the result carries; for the last one that is
            what the caller of the run gets raised, such as the exception by which ``pytest.fail`` works.
        questions: For ``"suspended"``, the open questions, those of children included.
        child: For a ``Spawn``, how its child ended, so that what it spent counts.
        body: For a ``CallBody``, what its body leaves, so that what it spent counts; never stored.
        begun: For a ``CallModel``, what it had used when it was stopped; ``None`` when nothing is known of that.
    """

    kind: StopKind
    at: int = 0
    error: BaseException | None = None
    questions: tuple[Question, ...] = ()
    child: ChildResult | None = None
    begun: PartialUsage | None = None
    body: BodyEnd | None = attrs.field(default=None, metadata={"stored": False})


Single: TypeAlias = Value | Failure | Stop


def make_descendant_stop(stop: Stop) -> Stop:
    """
    Return the stop for the runs below a run that was stopped by *stop*.

    A limit or a cancellation becomes a cancellation without error and time; any other stop is the same for them.
    """
    return Stop("cancelled") if stop.kind in {"cancelled", "limit"} else stop


def has_lost_or_stopped(outcome: Single) -> bool:
    """Return whether a member of a race lost, was cancelled or was stopped, instead of ending normally."""
    if isinstance(outcome, Value):
        value = outcome.value
        return isinstance(value, ChildResult | ToolResult) and value.status == "cancelled"
    return isinstance(outcome, Stop) or isinstance(getattr(outcome, "error", None), RaceLost)


def get_race_winner_index(outcomes: Sequence[Single]) -> int:
    """
    Return the index of the first member of a race that ended by itself; if none did, of the first of the others.

    A failure can win. "First" is by recorded time, then by order. The real order of arrival does not count, so that a replay, in which
    all outcomes arrive at once, finds the same winner.
    """
    return min([(has_lost_or_stopped(outcome), outcome.at, number) for number, outcome in enumerate(outcomes)])[2]


@frozen
class Gathered:
    """The outcomes of a ``Gather``, one per member in request order; finished members survive a ``Stop``."""

    outcomes: tuple[Single, ...]


Outcome: TypeAlias = Value | Failure | Stop | Gathered
