"""
The performers of one run tree: the innermost one, what is wrapped around it, and what is counted on the way.

A run to which nothing of that applies takes a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepengine.data.ceilings import ceiling_of
from stepengine.data.outcomes import Single
from stepengine.data.questions import Answer, Question
from stepengine.machine.plan import RunPlan
from stepengine.runtime.failfast import StopOnFailure
from stepengine.runtime.limits import Ledgers, LimitGate, Refusals, Repeats, SpendingLedger, UsageMeter
from stepengine.runtime.performer import IO, Item, Middleware, Performer
from stepengine.runtime.performing import Innermost
from stepengine.runtime.prices import Prices

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

    __slots__ = ("_elapsed", "_ledgers", "_make_brake", "_middlewares", "_tracers", "_wrapping", "innermost", "prices")

    def __init__(
        self,
        innermost: Innermost,
        prices: Prices,
        middlewares: Sequence[Middleware],
        tracers: Sequence[Middleware],
        *,
        make_brake: Callable[[Performer, Refusals], StopOnFailure],
        elapsed: Callable[[], int],
    ) -> None:
        """
        Put *middlewares* around *innermost*, such as recorders, and *tracers* around everything.

        *make_brake* makes the brake around a performer; *elapsed* is the tree's time in milliseconds.
        """
        self.innermost = innermost
        self.prices = prices
        self._middlewares = middlewares
        self._tracers = tracers
        self._make_brake = make_brake
        self._elapsed = elapsed
        self._ledgers = Ledgers()
        # Put up when it is first needed. A run of its own that nothing wraps never needs it, and thousands of runs are
        # started at once.
        self._wrapping: _Wrapping | None = None
        if middlewares or tracers:
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

    def compare(self, item: Item, outcome: Single, io: IO) -> None:
        """Count a call that has ended, if it is like the one before."""
        (self._wrapping or self._wrap()).repeats.compare(item, outcome, io)

    def _wrap(self) -> _Wrapping:
        # From the inside out, and the order is not free. The gate stands inside of who records, so that its refusals
        # are recorded like any other outcome and a replay needs no limits to find them again. The meter stands outside,
        # so that it counts also what comes out of a record: a run that goes on has spent what it had spent. What traces
        # stands outermost, and sees what the machine sees.
        refusals = Refusals()
        brake = self._make_brake(self.innermost, refusals)
        performer: Performer = LimitGate(brake, refusals, self._elapsed)
        for wrap in self._middlewares:
            performer = wrap(performer)
        recording = performer
        performer = meter = UsageMeter(performer, refusals, self._ledgers, self.prices)
        # Outside of the recorder, so that a run that goes on counts what was recorded, too: three equal calls are
        # three, also when a crash stands between them.
        performer = repeats = Repeats(performer, refusals)
        for wrap in self._tracers:
            performer = wrap(performer)
        self._wrapping = _Wrapping(brake, recording, meter, repeats, performer)
        return self._wrapping

    def open(self, path: str, plan: RunPlan) -> Performer | None:
        """
        Open the ledger of the run at *path*, which starts; return what all of its effects but its children may go to directly, if there is that.

        It is who records, or the innermost performer, where nothing traces, no budget is set, repeated calls are not counted, and
        the run is in no group of which one failure ends all. Through all of them a bare step took 33.8 us instead of 29.8, one that
        is recorded in memory 56.5 instead of 53.7, side by side.
        """
        self._ledgers.open(path, plan)
        # Decided once for a run, when it starts: none of what is asked here changes while it runs.
        wrapping = self._wrapping
        if self._tracers or plan.limits.max_identical_calls is not None or self._ledgers.of(path).bounded:
            return None
        if wrapping is not None and wrapping.brake.reaches(path):
            return None
        if wrapping is None or not self._middlewares:
            return self.innermost
        # Nothing is refused and nothing stopped here, which is what stands between who records and the innermost.
        around: Callable[[Performer], Performer] | None = getattr(wrapping.recording, "around", None)
        return wrapping.recording if around is None or len(self._middlewares) > 1 else around(self.innermost)

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
