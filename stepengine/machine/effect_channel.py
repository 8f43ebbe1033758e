"""The effects that one run asks for, and the outcomes that it receives: their numbers, the run's clock, and the stop that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from stepengine.data.effects import AskPerson, CallModel, Compute, Gather, Leaf
from stepengine.data.outcomes import Failure, Gathered, Single, Stop, Value, find_failure_usage
from stepengine.data.usage import NOTHING_USED
from stepengine.errors import StepEngineError
from stepengine.machine.budget import Budget, is_spent_budget_error, to_raisable_error
from stepengine.machine.history import RunHistory
from stepengine.machine.protocol import Flow
from stepengine.machine.signals import Stopped
from stepengine.machine.sources import RunSources
from stepengine.machine.usage_totals import UsageTotals


class EffectChannel:
    """
    Numbers the effects of a run and receives their outcomes.

    ``record_outcome`` sets the run's time, collects the messages that an outcome carries, and records spent limits and stops.

    Attributes:
        seq: The number of the next effect.
        now: Milliseconds since the root was created, as of the latest outcome.
        stop: Why the run was stopped from outside; ``None`` while it was not.
        sources: Where the received values come from; ``None`` if no policy asks for that.
    """

    __slots__ = ("_budget", "_created", "_history", "_spent", "now", "seq", "sources", "stop")

    def __init__(
        self,
        created: datetime,
        starts_at: int,
        history: RunHistory,
        budget: Budget,
        spent: UsageTotals,
        *,
        sources: RunSources | None,
    ) -> None:
        """Start the clock at *starts_at* milliseconds after *created*."""
        self._created = created
        self._history = history
        self._budget = budget
        self._spent = spent
        self.sources = sources
        # A child's time begins where its parent's is, as it is told in its `Spawn`: one clock for the tree, whatever
        # process drives which part.
        self.seq, self.now = 0, starts_at
        self.stop: Stop | None = None

    @property
    def time(self) -> datetime:
        """The run's recorded time."""
        # A handler that asks for the time must be told the same on replay, so it is told the time of the last outcome,
        # which is recorded (generator-contract:G2).
        return self._created + timedelta(milliseconds=self.now)

    def allocate_number(self) -> int:
        """Reserve and return the number of the next effect."""
        # When the effect is made, not when it begins or ends: so an address follows from the program alone, whoever is
        # faster (reliability:I2).
        seq = self.seq
        self.seq = seq + 1
        return seq

    def gather(self, effects: Sequence[Leaf], **options: Any) -> Flow[Sequence[Single]]:
        """Emit several effects as a ``Gather`` with *options*; return one outcome each, in order."""
        # Of nothing there is no effect: an empty Gather would take a turn of the loop, and a place in the record, for
        # no outcome.
        return (yield Gather(tuple(effects), **options)).outcomes if effects else ()  # type: ignore[union-attr]

    def record_outcome(self, outcome: Any, effect: Leaf | Gather | Compute) -> Single | Gathered:
        """
        Return the outcome of *effect* after recording its time, inbox, usage and stop.

        A suspension that names no questions is given those of the ``AskPerson`` that it answers.
        """
        if isinstance(effect, Gather):
            return self._record_group_outcome(outcome, effect.effects)
        # A driver that answers with something else is a bug in that driver, and there are several (the loop, walks, the
        # simulation, the debugger). Without this it would show much later, as an AttributeError in an author's handler.
        if not isinstance(outcome, (Value, Failure, Stop)):
            msg = f"the driver returned {outcome!r} as the outcome of a {type(effect).__name__}"
            raise StepEngineError(msg)
        # The only clock of a run: the time of its latest outcome. Outcomes of a group may come back in another order
        # than they ended, hence the maximum; time never goes back (reliability:MP32).
        self.now = max(self.now, outcome.at)
        if isinstance(outcome, Stop):
            return self._record_stop(outcome, effect)
        # Messages that were sent to the run travel inside the outcome of the effect during which they came. So they
        # stand in its record, and a replay has them at the same place (replay:J16).
        if outcome.inputs:
            self._history.inbox.extend(outcome.inputs)
        if isinstance(outcome, Failure):
            self._record_failure(outcome.error, effect)
        return outcome

    def _record_group_outcome(self, outcome: Any, effects: Sequence[Leaf]) -> Gathered:
        """Record each outcome of a group; raise unless the driver returned one for each effect."""
        # The number is checked, since outcomes belong to their effects by position alone: one that is missing would
        # give everybody behind it the result of its neighbour.
        if not isinstance(outcome, Gathered) or len(outcome.outcomes) != len(effects):
            msg = f"the driver returned {outcome!r} as the outcome of a Gather of {len(effects)}"
            raise StepEngineError(msg)
        pairs = zip(outcome.outcomes, effects, strict=True)
        return Gathered(tuple([self.record_outcome(one, effect) for one, effect in pairs]))  # type: ignore[misc]  # none is a Gather

    def _record_stop(self, stop: Stop, effect: Leaf | Compute) -> Stop:
        """Record the first stop and the usage of a cut model call; return the stop, with its questions added if it lacks them."""
        if isinstance(effect, AskPerson) and stop.kind == "suspended" and not stop.questions:
            stop = Stop(stop.kind, stop.at, stop.error, effect.questions)
        # The first stop is why the run ends; members of a group that are cut because of it bring stops of their own.
        self.stop = self.stop or stop
        # What a model call had used when it was cut off was paid for, although no reply ever came (reliability:R3).
        begun = stop.begun
        if begun is not None and begun.usage != NOTHING_USED and isinstance(effect, CallModel):
            self._spent.count_usage(effect.request.model, begun.usage, begun.cost, begun.usage.requests)
        return stop

    def _record_failure(self, error: StepEngineError, effect: Leaf | Compute) -> None:
        """Count the usage of a failed model call, and record a spent budget."""
        # By name: some errors of models tell what the failed attempts had used, and the sums of the run hold it
        # (reliability:I4).
        lost = find_failure_usage(error)
        if isinstance(effect, CallModel) and lost is not None:
            self._spent.count_usage(effect.request.model, lost.usage, lost.cost, lost.usage.requests)
        if is_spent_budget_error(error):
            self._budget.record_spent_budget(error)

    def unwrap(self, outcome: Single) -> Any:
        """Return the value of a received outcome, or raise its error or stop."""
        if isinstance(outcome, Value):
            return outcome.value
        if isinstance(outcome, Failure):
            # A spent limit is raised as a `BaseException`: an author's `except Exception` around a step must not take
            # it for a tool that failed, or the handler would go on without a budget (reliability:GN09).
            raise to_raisable_error(outcome.error)
        self._spent.count_stopped_child(outcome)
        raise Stopped(outcome)
