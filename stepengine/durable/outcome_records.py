"""
``OutcomeRecorder``: the outcomes of one run's effects, recorded as the results of reserved steps.

An outcome is recorded under the number that was reserved for it, whenever it arrives. A ``RaceRecord`` collects the ends of a race's
members in memory, so that a member which lost in an earlier execution is not performed after all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from stepengine.data.effects import WAITS
from stepengine.data.outcomes import Single, Stop
from stepengine.durable.executions import DurableRun
from stepengine.durable.step_names import RESULT
from stepengine.durable.step_records import ReservedStep
from stepengine.durable.wire import encode_outcome, parse_outcome
from stepengine.errors import DataError, ReplayDivergence
from stepengine.journal.records import format_address
from stepengine.runtime.failfast import make_race_loss_outcome
from stepengine.runtime.performer import Item


# A step of the database records the result of its function, and an exception as well. A run that only stops here
# (the process leaves, the run is cancelled) must record neither, or the next execution would be answered with that
# stop. So the outcome leaves the function by an exception that no `except Exception` on the way takes, the package's
# own included.
class UnrecordedStop(BaseException):
    """Carries an outcome out of a step without recording it, because the run only stopped there."""

    def __init__(self, outcome: Stop) -> None:
        super().__init__()
        self.outcome = outcome


class ReservedSteps(NamedTuple):
    """
    The reserved steps of an effect that has started.

    Attributes:
        name: The step's name.
        step: The reserved step; ``None`` for a question, and for a body in this run, whose effects are recorded before its result.
        is_doubtful: Whether an earlier execution started the effect, so that it must not happen again.
        intent: The mark with the execution that started the effect.
        asked: The record of a question: its outcome if it was answered in advance, or the open questions.
        answer: The wait for the answer to a question.
        seeded: The outcome in the seed.
        is_early: Whether this execution had performed nothing before, so that an earlier one may have started the effect.
        is_settled: Whether the outcome in the seed is complete, so that nothing is performed again.
        race: The record of the race that it is a member of.
    """

    name: str
    step: ReservedStep | None = None
    is_doubtful: bool = False
    intent: ReservedStep | None = None
    asked: Mapping[str, Any] | None = None
    answer: asyncio.Task[Any] | None = None
    seeded: Mapping[str, Any] | None = None
    is_early: bool = False
    is_settled: bool = False
    race: RaceRecord | None = None


class RaceRecord:
    """Whether a race is won in this execution, kept in memory. A member waits for the look-ups of the others before it acts."""

    def __init__(self) -> None:
        self._looking: set[int] = set()
        self._is_won = False
        self._news = asyncio.Event()

    def add_pending_lookup(self, item: Item) -> None:
        """Mark the record of a member as being looked up; the caller does the look-up."""
        self._looking.add(item.effect.seq)

    def record_member_end(self, item: Item, *, is_won: bool) -> None:
        """Store in memory that a member has ended and whether it won the race, and wake the waiting members."""
        self._looking.discard(item.effect.seq)
        self._is_won = self._is_won or is_won
        self._news.set()

    async def has_lost_after_lookups(self, item: Item) -> bool:
        """Wait for pending look-ups and return whether another member has won."""
        # Members look up their records at the same time. A member without one waits for the others' look-ups, since
        # one of them may have won in an earlier execution. Without this the loser's effect would happen after all.
        self._looking.discard(item.effect.seq)
        self._news.set()
        while self._looking and not self._is_won:
            self._news.clear()
            await self._news.wait()
        return self._is_won


def find_race_bounds(item: Item) -> tuple[int, int] | None:
    """Return the slice of a group that contains the race of an effect, as start and end; ``None`` for an effect in no race."""
    together = item.gather
    if together is not None:
        for race in together.races:
            if any(effect.seq == item.effect.seq for effect in together.effects[slice(*race)]):
                return race
    return None


class OutcomeRecorder:
    """
    Records the outcomes of one run's effects.

    Args:
        run: The execution.
    """

    def __init__(self, run: DurableRun) -> None:
        self._run = run

    def encode(self, item: Item, outcome: Single, attempts: Sequence[object] = ()) -> dict[str, Any]:
        """Return the stored form of an outcome; nothing is recorded, and the time of the outcome is not changed."""
        run = self._run
        return encode_outcome(item.effect.seq, outcome, run.redactor, attempts=attempts) | run.make_path_member(item)

    def consume_and_encode_outcome(
        self, item: Item, outcome: Single, attempts: Sequence[object] = (), *, at: int | None = None
    ) -> dict[str, Any]:
        """
        Advance the run's clock to a new outcome, and return its stored form with the pending keys of consumed messages.

        The keys are removed from the run, so call this once for each outcome.

        Args:
            item: The effect.
            outcome: The outcome of the effect.
            attempts: The failed attempts before the outcome.
            at: The time of the outcome in the run's own milliseconds. The clock is advanced only without it.

        Raises:
            UnrecordedStop: For every stop except that of a spent limit.
        """
        # A spent limit is an outcome like any other and recorded, so that the same run ends the same way; every
        # other stop is of this execution alone.
        if isinstance(outcome, Stop) and outcome.kind != "limit":
            raise UnrecordedStop(outcome)
        run = self._run
        time = run.clock.advance_time(outcome.at) if at is None else at
        return self.encode(item, attrs.evolve(outcome, at=time), attempts) | run.messages.pop_consumed_message_keys(
            outcome
        )

    def encode_race_loss(self, item: Item) -> dict[str, Any]:
        """Return the stored form of the outcome of an effect that lost its race."""
        return self.encode(item, make_race_loss_outcome(item, self._run.clock.elapsed_ms()))

    async def perform_and_record(
        self, item: Item, steps: ReservedSteps, act: Callable[[], Coroutine[object, Any, object]]
    ) -> tuple[Single, Mapping[str, Any]]:
        """Load or perform an effect; return its outcome and the stored form, which is empty if the run only stopped there."""
        run, where = self._run, format_address(*item.address)
        if steps.race is not None:
            steps.race.add_pending_lookup(item)
        try:
            only_waits = isinstance(item.effect, WAITS)
            assert steps.step is not None  # noqa: S101 - only a question and a body in this run have none
            form = await run.workflow.load_or_perform_step(steps.step, act, where, preemptible=not only_waits)
            if steps.race is not None:
                steps.race.record_member_end(item, is_won="stop" not in form)
        except UnrecordedStop as stopped:
            if steps.race is not None:
                steps.race.record_member_end(item, is_won=False)
            if isinstance(stopped.outcome.error, ReplayDivergence):
                # The child can be resumed, so this run has not ended either.
                run.end.record_divergence(stopped.outcome.error)
            return stopped.outcome, {}
        # A new outcome is read back from its form, too: a tuple that is a list on replay must be a list
        # live (durable:U12).
        return self.load_outcome_and_advance_clock(form, where), form

    def load_outcome_and_advance_clock(self, form: Mapping[str, object], where: str) -> Single:
        """
        Return a stored outcome, and advance the run's clock to its time.

        Raises:
            ReplayDivergence: When the outcome cannot be read.
        """
        try:
            outcome = parse_outcome(form)
        # A divergence and no failure of the run: the record is of a newer release or was damaged, and under the code that
        # can read it the run continues.
        except (DataError, LookupError, TypeError, AttributeError) as error:
            msg = f"the recorded outcome of {where} cannot be read: {error}"
            raise ReplayDivergence(msg, kind="undecodable", address=where) from error
        self._run.clock.advance_to(outcome.at)
        return outcome

    def require_equal_body_result(
        self, item: Item, recorded: Mapping[str, Any] | None, current: Mapping[str, Any]
    ) -> None:
        """
        Raise if the *recorded* result of a body differs from the *current* one, unless none is recorded or a limit stopped the body.

        Raises:
            ReplayDivergence: when they differ in value or error.
        """
        if recorded is None or "stop" in recorded or "stop" in current:
            return
        # Time and usage may differ between two executions that did the same.
        was, is_ = ({name: form.get(name) for name in ("value", "error")} for form in (recorded, current))
        if was != is_:
            names = [f"{RESULT}:{self._run.prints.for_value(each)}" for each in (was, is_)]
            raise self._run.end.make_and_record_divergence(format_address(*item.address), names)
