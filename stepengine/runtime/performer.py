"""
The protocols of performing effects: ``Performer``, ``Middleware``, and their arguments ``Item`` and ``IO``.

Middlewares stand between the driver and the innermost performer: they see every effect of a run and of its children, in the
order in which the driver begins them, and may answer instead of the performer that they wrap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias

import attrs

from stepengine.data.effects import ROWS, CallBody, CallFunction, CallTool, Compute, Gather, Leaf, RunObjects
from stepengine.data.events import Event
from stepengine.data.outcomes import Failure, PartialUsage, Single, Value
from stepengine.data.record_sizes import cut_error_texts
from stepengine.data.state import AgentState
from stepengine.data.usage import Usage
from stepengine.data.waits import Waits
from stepengine.errors import ReplayDivergence, StepEngineError
from stepengine.machine.plan import Finished, RunPlan

RoomWait: TypeAlias = Callable[[], Awaitable[StepEngineError | None]]


class Item(NamedTuple):
    """
    One effect with its run.

    Attributes:
        path: The path of the run.
        effect: The effect.
        plan: The plan of the run.
        gather: The group that the effect is a member of; ``None`` if it was requested alone.
        has_begun: Whether its start is recorded, for three kinds: a child that ran, which no limit can refuse any more; a call
            whose body has returned, which only waits for its result; and a wait of an earlier process.
    """

    path: str
    effect: Leaf
    plan: RunPlan
    gather: Gather | None = None
    has_begun: bool = False

    @property
    def address(self) -> tuple[str, int]:
        """The address of the effect: the path of its run, and its number there."""
        return self.path, self.effect.seq

    @property
    def is_first(self) -> bool:
        """Whether it was requested alone, or is the first of its group."""
        return self.gather is None or self.gather.effects[0].seq == self.effect.seq


class IO(Protocol):
    """The actions of a performer other than returning an outcome."""

    @property
    def watched(self) -> bool:
        """Whether anyone receives events; without receivers they need not be created."""

    def emit(self, event: Event) -> None:
        """Emit an event to all receivers; call it in the run's event loop."""

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """
        Report a failed attempt that is to be retried, and its known usage; return the wait before the retry, if it must wait.

        Returns:
            Waits until the retry may start, and returns the error if it may not; ``None`` where it may at once.
        """

    def find_stopped_call_usage(self, item: Item) -> PartialUsage | None:
        """Return the known usage of a model call without a result; ``None`` if no request was sent."""

    def record_waiting_call(self, item: Item) -> Awaitable[None]:
        """Record that the body of a deferred tool has returned and its call only waits."""

    def wait_for_children(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> Awaitable[dict[str, Any] | None]:
        """
        Wait for the background children at *paths* and return their results; ``None`` if one was stopped with its tree.

        With *cut* it is also ``None`` once *cut* is done, because they will not end as recorded, or once the tree is suspended.
        """

    def record_suspension(self, item: Item) -> None:
        """Record that the tree is suspended for this wait."""

    def run_child(self, plan: RunPlan, state: AgentState, path: str) -> Awaitable[Finished]:
        """Run a child to its end in a task of its own; cancelling the wait ends the child first."""


@attrs.define(eq=False)
class ForwardingIO:
    """An ``IO`` that passes everything on to another one. A subclass changes what it is for."""

    _io: IO

    @property
    def watched(self) -> bool:
        """Whether anyone receives events."""
        return self._io.watched

    def emit(self, event: Event) -> None:
        """Emit an event to all receivers."""
        self._io.emit(event)

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """Report a failed attempt that is to be retried."""
        return self._io.report_failed_attempt(failure, usage)

    def find_stopped_call_usage(self, item: Item) -> PartialUsage | None:
        """Return the known usage of a model call without a result; ``None`` if no request was sent."""
        return self._io.find_stopped_call_usage(item)

    def record_waiting_call(self, item: Item) -> Awaitable[None]:
        """Record that the body of a deferred tool has returned and its call only waits."""
        return self._io.record_waiting_call(item)

    def wait_for_children(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> Awaitable[dict[str, Any] | None]:
        """Wait for background children and return their results; ``None`` as in ``IO.wait_for_children``."""
        return self._io.wait_for_children(item, paths, cut)

    def record_suspension(self, item: Item) -> None:
        """Record that the tree is suspended for this wait."""
        self._io.record_suspension(item)

    def run_child(self, plan: RunPlan, state: AgentState, path: str) -> Awaitable[Finished]:
        """Run a child to its end."""
        return self._io.run_child(plan, state, path)


class Performer(Protocol):
    """Performs effects. Both methods may be ``async def``."""

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """
        Prepare effects before they are performed: record intents, reserve budgets. A single one is a batch of one.

        The members of a ``Gather`` come in request order, all in one batch, or through its window in several.
        """

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform one effect of a prepared batch; failures are outcomes, not exceptions."""


Middleware: TypeAlias = Callable[[Performer], Performer]
"""Wraps a performer, once for each run tree."""


def is_repeatable(item: Item) -> bool:
    """Return whether an effect may be repeated if its outcome is unknown."""
    match effect := item.effect:
        case CallBody():  # what it has done is in its own record
            return True
        case CallTool():
            binding = item.plan.tools.get(effect.tool_name)
            notes = binding.spec.annotations if binding is not None else None
            return notes is not None and (notes.idempotent or notes.read_only)
        case CallFunction():
            return effect.call.is_idempotent
        case _:
            return True


def make_wait(item: Item) -> Waits:
    """Return the wait of an effect that only waits: its attributes have the names of those of ``Waits``."""
    effect: Any = item.effect
    kind = ROWS[type(effect)].waits_for
    assert kind is not None  # noqa: S101 - it only waits
    return Waits(
        kind=kind,
        path=item.path,
        seq=effect.seq,
        wakes_at=None if effect.wakes is None else item.plan.created + timedelta(milliseconds=effect.wakes),
        topic=getattr(effect, "topic", ""),
        children=getattr(effect, "children", ()),
    )


def child_path(path: str, seq: int) -> str:
    """Return the path of the child that effect *seq* of the run at *path* spawns."""
    return f"{path}.{seq}" if path else str(seq)


def run_compute(effect: Compute, run_objects: RunObjects) -> Value | Failure:
    """
    Run the work of a ``Compute`` in this thread and return its outcome, with the time 0.

    Raises:
        ReplayDivergence: when the recorded state of a body cannot be restored, so that its run must not continue.
    """
    try:
        return Value(effect.work(run_objects, effect.known))
    except ReplayDivergence:
        raise
    except StepEngineError as error:
        return Failure(cut_error_texts(error))


def wrap_error(error: BaseException, failure: str) -> StepEngineError:
    """Return a ``StepEngineError`` as it is, and any other error as the cause of one whose message starts with *failure*."""
    if isinstance(error, StepEngineError):
        return error
    wrapped = StepEngineError(f"{failure} with {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
