"""
The performers of one run tree: the innermost one, what is wrapped around it, and what is counted on the way.

A run to which nothing of that applies takes a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from stepengine.data.ceilings import ceiling_of
from stepengine.data.outcomes import Single
from stepengine.data.questions import Answer, Question
from stepengine.runtime.failfast import StopOnFailure
from stepengine.runtime.limits import Ledgers, LimitGate, Refusals, Repeats, SpendingLedger, UsageMeter
from stepengine.runtime.performer import Item, Performer
from stepengine.runtime.performing import Innermost
from stepengine.runtime.prices import Prices
from stepengine.runtime.retry import Retries

if TYPE_CHECKING:
    from stepengine.runtime.driver import RunTask
    from stepengine.runtime.tree import RunTree, Services

__all__ = ("PerformerStack",)


class _Wrapping(NamedTuple):
    """What wraps the innermost performer, from the inside out; nobody asks for the gate."""

    brake: StopOnFailure
    recording: Performer
    meter: UsageMeter
    repeats: Repeats
    outermost: Performer


class PerformerStack:
    """
    The performers of one run tree.

    Attributes:
        innermost: What performs effects in the end.
        prices: Computes the cost of model calls.
    """

    __slots__ = ("_ledgers", "_services", "_tree", "_wrapping", "innermost", "prices")

    def __init__(self, tree: RunTree, services: Services, run_id: str) -> None:
        """Prepare the performers of *tree*; *run_id* is that of its root."""
        self._tree = tree
        self._services = services
        self._ledgers = Ledgers()
        self.prices = Prices(services.pricing, tree.clock.now)
        self.innermost = Innermost(tree, Retries(services.retry, services.seed or run_id), self.prices)
        # Put up when it is first needed. A run of its own that nothing wraps never needs it, and thousands of runs are
        # started at once.
        self._wrapping: _Wrapping | None = None
        if services.middlewares or services.outermost:
            self._wrap()  # who records has to know of the run before it starts

    @property
    def outermost(self) -> Performer:
        """The outermost performer."""
        return (self._wrapping or self._wrap()).outermost

    @property
    def recording(self) -> Performer:
        """The outermost performer that records; limits and traces are around it."""
        return (self._wrapping or self._wrap()).recording

    @property
    def brake(self) -> StopOnFailure:
        """What stops the children of a group of which one has failed."""
        return (self._wrapping or self._wrap()).brake

    def compare(self, item: Item, outcome: Single) -> None:
        """Count a call that has ended, if it is like the one before."""
        (self._wrapping or self._wrap()).repeats.compare(item, outcome, self._tree)

    def _wrap(self) -> _Wrapping:
        # From the inside out, and the order is not free. The gate stands inside of who records, so that its refusals
        # are recorded like any other outcome and a replay needs no limits to find them again. The meter stands outside,
        # so that it counts also what comes out of a record: a run that goes on has spent what it had spent. What traces
        # stands outermost, and sees what the machine sees.
        services, refusals, elapsed = self._services, Refusals(), self._tree.clock.elapsed
        brake = StopOnFailure(self.innermost, refusals, elapsed, self._tree)
        performer: Performer = LimitGate(brake, refusals, elapsed)
        for wrap in services.middlewares:
            performer = wrap(performer)
        recording = performer
        performer = meter = UsageMeter(performer, refusals, self._ledgers, self.prices)
        # Outside of the recorder, so that a run that goes on counts what was recorded, too: three equal calls are
        # three, also when a crash stands between them.
        performer = repeats = Repeats(performer, refusals)
        for wrap in services.outermost:
            performer = wrap(performer)
        self._wrapping = _Wrapping(brake, recording, meter, repeats, performer)
        return self._wrapping

    def open(self, run: RunTask) -> Performer | None:
        """
        Open the ledger of a run that starts; return what all of its effects but its children may go to directly, if there is that.

        It is who records, or the innermost performer, where nothing traces, no budget is set, repeated calls are not counted, and
        the run is in no group of which one failure ends all. Through all of them a bare step took 33.8 us instead of 29.8, one that
        is recorded in memory 56.5 instead of 53.7, side by side.
        """
        self._ledgers.open(run.path, run.plan)
        # Decided once for a run, when it starts: none of what is asked here changes while it runs.
        services, wrapping = self._services, self._wrapping
        if services.outermost or run.plan.limits.max_identical_calls is not None or self._ledgers.of(run.path).bounded:
            return None
        if wrapping is not None and wrapping.brake.reaches(run.path):
            return None
        if wrapping is None or not services.middlewares:
            return self.innermost
        # Nothing is refused and nothing stopped here, which is what stands between who records and the innermost.
        around: Callable[[Performer], Performer] | None = getattr(wrapping.recording, "around", None)
        return wrapping.recording if around is None or len(services.middlewares) > 1 else around(self.innermost)

    def ledger(self, path: str) -> SpendingLedger:
        """Return what the run at *path*, which is under way, has spent and reserved."""
        return self._ledgers.of(path)

    def allow(self, question: Question, answer: Answer) -> None:
        """Raise the limit that *question* is about as *answer* says; steps are counted by the run itself."""
        ceiling = ceiling_of(question, answer)
        if ceiling is not None:
            self._ledgers.allow(ceiling)

    def forget(self, path: str) -> None:
        """Forget a run that has ended."""
        if self._wrapping is not None:
            self._wrapping.meter.forget(path)
            self._wrapping.repeats.forget(path)
        if path:
            self._ledgers.close(path)
