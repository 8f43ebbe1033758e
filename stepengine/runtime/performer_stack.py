"""
The performers of one run tree: the innermost one and its wrappers.

A run to which nothing of that applies takes a shorter way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from stepengine.data.ceilings import ceiling_from_answer
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Single
from stepengine.data.questions import Answer, Question
from stepengine.machine.plan import RunPlan
from stepengine.runtime.core_performer import CorePerformer
from stepengine.runtime.failfast import StopOnFailure
from stepengine.runtime.limits import Ledgers, LimitGate, RecordState, Refusals, Repeats, SpendingLedger, UsageMeter
from stepengine.runtime.performer import IO, Item, Middleware, Performer
from stepengine.runtime.prices import Prices


class _Wrapping(NamedTuple):
    """The wrappers of the innermost performer, from the inside out."""

    group_stopper: StopOnFailure
    recording: Performer
    meter: UsageMeter
    repeats: Repeats


class PerformerStack:
    """
    The performers of one run tree.

    Attributes:
        innermost: What performs effects in the end.
        prices: Computes the cost of model calls.
    """

    __slots__ = (
        "_elapsed",
        "_find_output_limit",
        "_ledgers",
        "_make_group_stopper",
        "_middlewares",
        "_wrapping",
        "innermost",
        "prices",
    )

    def __init__(
        self,
        innermost: CorePerformer,
        prices: Prices,
        middlewares: Sequence[Middleware],
        *,
        make_group_stopper: Callable[[Performer, Refusals], StopOnFailure],
        elapsed: Callable[[], int],
        find_output_limit: Callable[[ModelRequest], int | None],
    ) -> None:
        """
        Wrap *innermost* in *middlewares*, such as recorders.

        *make_group_stopper* makes the ``StopOnFailure`` around a performer; *elapsed* is the tree's time in milliseconds;
        *find_output_limit* returns the longest reply to a request in tokens, if it is known.
        """
        self.innermost = innermost
        self.prices = prices
        self._middlewares = middlewares
        self._make_group_stopper = make_group_stopper
        self._elapsed = elapsed
        self._find_output_limit = find_output_limit
        self._ledgers = Ledgers()
        # Put up when it is first needed. A run of its own that nothing wraps never needs it, and thousands of runs are
        # started at once.
        self._wrapping: _Wrapping | None = None
        if middlewares:
            self._wrap_innermost()  # who records has to know of the run before it starts

    @property
    def outermost(self) -> Performer:
        """The outermost performer."""
        return (self._wrapping or self._wrap_innermost()).repeats

    @property
    def recording(self) -> Performer:
        """The outermost performer that records, or the gate for refusals if none records; limits are around it."""
        return (self._wrapping or self._wrap_innermost()).recording

    @property
    def group_stopper(self) -> StopOnFailure:
        """The performer that stops the siblings of a failed child and the losers of a race."""
        return (self._wrapping or self._wrap_innermost()).group_stopper

    def count_startable(self, items: Sequence[Item]) -> int:
        """Return how many of the first *items*, at least one, can begin together within the limits."""
        return (self._wrapping or self._wrap_innermost()).meter.count_startable(items)

    def count_repeated_call(self, item: Item, outcome: Single, io: IO) -> None:
        """Count a call that repeats the last one."""
        (self._wrapping or self._wrap_innermost()).repeats.count_repeated_call(item, outcome, io)

    def _wrap_innermost(self) -> _Wrapping:
        """Build, store and return all wrappers around the innermost performer."""
        # From the inside out, and the order is not free. The gate stands inside of who records, so that its refusals
        # are recorded like any other outcome and a replay needs no limits to find them again. The meter stands outside,
        # so that it counts also what comes out of a record: a run that goes on has spent what it had spent.
        refusals = Refusals()
        group_stopper = self._make_group_stopper(self.innermost, refusals)
        performer: Performer = LimitGate(group_stopper, refusals, self._elapsed)
        for wrap in self._middlewares:
            performer = wrap(performer)
        recording = performer
        get_record_state: Callable[[Item], RecordState] | None = getattr(recording, "get_record_state", None)
        meter = UsageMeter(
            recording,
            refusals,
            self._ledgers,
            self.prices,
            find_output_limit=self._find_output_limit,
            get_record_state=get_record_state,
        )
        # Outside of the recorder, so that a run that goes on counts what was recorded, too: three equal calls are
        # three, also when a crash stands between them.
        self._wrapping = _Wrapping(group_stopper, recording, meter, Repeats(meter, refusals))
        return self._wrapping

    def open_ledger_and_find_shortcut(self, path: str, plan: RunPlan) -> Performer | None:
        """
        Open the ledger of a starting run; return the performer for its effects other than children, if there is a shortcut.

        The shortcut is the recorder, or the innermost performer without one. It exists if no budget is set, repeated calls are not
        counted, and the run is in no fail-fast group. It saves about 10 % of the time of a bare step.
        """
        ledger = self._ledgers.create_ledger(path, plan)
        # Decided once for a run, when it starts: none of what is asked here changes while it runs.
        wrapping = self._wrapping
        if plan.limits.max_identical_calls is not None or ledger.bounded:
            return None
        if wrapping is not None and wrapping.group_stopper.can_stop_run(path):
            return None
        if wrapping is None or not self._middlewares:
            return self.innermost
        # Nothing is refused and nothing stopped here, which is what stands between who records and the innermost.
        wrap: Callable[[Performer], Performer] | None = getattr(wrapping.recording, "wrap_performer", None)
        return wrapping.recording if wrap is None or len(self._middlewares) > 1 else wrap(self.innermost)

    def get_ledger(self, path: str) -> SpendingLedger:
        """Return the ledger of the running run at *path*."""
        return self._ledgers.get_ledger(path)

    def increase_limit(self, question: Question, answer: Answer) -> None:
        """Raise the limit that *question* is about; the run itself counts steps."""
        ceiling = ceiling_from_answer(question, answer)
        if ceiling is not None:
            self._ledgers.increase_limit(ceiling)
            if self._wrapping is not None:
                self._wrapping.meter.start_waiting_calls()

    def forget_run(self, path: str) -> None:
        """Release the reservations and drop the counters and the ledger of an ended run."""
        if self._wrapping is not None:
            self._wrapping.meter.release_run_reservations(path)
            self._wrapping.repeats.forget_run(path)
        if path:
            self._ledgers.close_ledger(path)
