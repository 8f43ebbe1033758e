"""
``Replayer``: compares the effects of a run with its record, and answers them from it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.effects import RUNS, CallBody, CallModel, Spawn
from stepengine.data.models import ModelRequest
from stepengine.data.outcomes import Failure, PartialUsage, Single, Stop, Value
from stepengine.data.state import ChildResult, RunStatus
from stepengine.errors import JournalCorrupt, JournalError, ReplayDivergence, UnknownModel
from stepengine.journal.divergence import DivergenceErrors
from stepengine.journal.modes import OpenJournal
from stepengine.journal.record_ends import RecordEnds
from stepengine.journal.recorded_machines import RecordedMachines
from stepengine.journal.recorded_part import RecordedPart
from stepengine.journal.recorded_permissions import RecordedPermissions, is_permission, limit_to_one_call
from stepengine.journal.records import (
    ROOT,
    Address,
    Input,
    Intent,
    Result,
    get_starter_address,
    make_computed_record,
)
from stepengine.machine.plan import Finished
from stepengine.runtime.performer import Item, child_path
from stepengine.runtime.services import ModelRegistry


def is_unstarted_child(value: object) -> bool:
    """Return whether a recorded child never started, because of a limit, an unknown agent or wrong params."""
    return isinstance(value, ChildResult) and not value.run_id


class Acceptance:
    """
    Decides which differences from a record the caller accepts, and records those of kept effects.

    Attributes:
        notes: Notes about recorded effects that answer different requested effects.
    """

    def __init__(self, journal: OpenJournal, past: RecordedPart) -> None:
        self.notes: list[Input] = []
        self._past = past
        self._leeway = past.leeway
        self._mode, self._writer, self._timing = journal.mode, journal.writer, journal.timing

    def record_accepted_difference(self, address: Address, fp: str) -> None:
        """Record that the record at an address answers an effect with this fingerprint, for later replays."""
        note = Input(*address, self._timing.last, {"type": "accepted_difference", "fp": fp})
        self.notes.append(note)
        if self._mode.appends_to_source(self._past.history):
            # Written with the next record: where nothing new is recorded, because the run cannot go on, nothing is accepted.
            self._writer.unwritten.append(note)

    def accept_or_raise(self, error: ReplayDivergence, address: Address, fp: str, *, keeps: bool | None = None) -> None:
        """
        Record a difference from a kept effect; raise *error* for any other, unless the caller accepts it.

        Raises:
            ReplayDivergence: *error*, when the effect is of another kind or the caller does not accept it.
        """
        if self._leeway.keeps if keeps is None else keeps:
            self.record_accepted_difference(address, fp)
        elif error.kind not in ("changed", "end") or self._leeway.accepts is None or not self._leeway.accepts(error):
            raise self._writer.keep_first_fatal_error(error)


class Replayer:
    """
    The part of a run that handles recorded effects.

    Args:
        journal: The journal of the run.
        past: The recorded part of the run.
        machines: The machines of the tree.

    Attributes:
        acceptance: Decides which differences are accepted.
        ends: The recorded ends of the runs.
        models: The registry of providers to notify of model calls answered from the record; ``None`` to notify none.
    """

    def __init__(self, journal: OpenJournal, past: RecordedPart, machines: RecordedMachines) -> None:
        self.acceptance = Acceptance(journal, past)
        self.models: ModelRegistry | None = None
        self._mode = journal.mode
        self._writer = journal.writer
        self._timing = journal.timing
        self._machines = machines
        self._past = past
        self._leeway = past.leeway
        # Asked once: whether the record has an end does not change while it is read.
        self._closed = self._mode.is_record_only(past.history)
        self.ends = RecordEnds(past, journal.timing, is_record_only=self._closed)
        self._permissions = RecordedPermissions(journal, past)
        self._errors = DivergenceErrors(past.history, past.prints, machines.running)

    def match_with_record(self, item: Item, requested: Intent) -> bool:
        """
        Match an effect with the record; return True if it is recorded or the run stops before it, False if it is new.

        Raises:
            ReplayDivergence: when the effect differs from the record, or a run continues after its recorded end.
            JournalError: when a new call would start on a permission that this user did not give.
        """
        is_matched = self._match_or_cut_off(item, requested)
        if not is_matched:
            self._permissions.refuse_untrusted_call(item)
        return is_matched

    def _match_or_cut_off(self, item: Item, requested: Intent) -> bool:
        """Return whether an effect is recorded or the run stops before it; cut the record off, or raise, if it differs."""
        past = self._past
        address = item.address
        known = past.find_intent(address)
        # A run that lost its race is cut in the middle, wherever it was; that it asks for one thing more, or less, than
        # last time is chance and no divergence.
        if known is None and self.ends.is_race_loser(item.path):
            return True
        if known is None:
            ended = self.ends.find_own_or_enclosing_end(item.path)
            # Nothing is recorded here: either the record just ends (it was cut off by a crash or a stop, and the run
            # goes on or stops there), or the run asks for something after its recorded end, which is a divergence of
            # the kind `extra`.
            over = self._closed and past.history.is_complete if ended is None else self.ends.find_stop(ended) is None
            if over and self._mode.cuts_off:
                self._cut_off_record(address)
                return False
            if over:
                raise self._writer.keep_first_fatal_error(self._errors.make_extra_effect_error(requested, item))
            ends = self._closed or ended is not None
            past.has_new_effects = past.has_new_effects or not ends
            return ends
        is_equal = past.is_same_effect(known, requested)
        # The comparison is by fingerprint of what the outside world would see (replay:D2). Compared by all fields, each
        # new default of ours would break every journal.
        if (not is_equal and not self._accepts_difference(known, requested, item)) or self._permissions.must_ask_again(
            item
        ):
            self._cut_off_record(address)
            return False
        past.mark_used(address)
        if self._mode.copies:
            self._writer.append(known if is_equal and self._mode.takes_over else requested)
        # Nothing is written again, but later requests are stored as differences to this one, so its messages have to be
        # known.
        elif is_equal:
            self._writer.set_request_base(requested)
        return True

    def _accepts_difference(self, recorded: Intent, requested: Intent, item: Item) -> bool:
        """Return whether the outcome of a different recorded effect answers this one; False to cut the record off; else raise."""
        past, address = self._past, requested.address
        # Somebody has looked at this difference before and accepted it; the journal says so, and for exactly this
        # fingerprint.
        if past.was_difference_accepted(address, requested.fp):
            return True
        if self._mode.cuts_off:
            return False
        is_kept_kind = self._leeway.keeps or (self._leeway.keeps_replies and requested.type == "model_call")
        keeps = is_kept_kind and recorded.type == requested.type and not self._permissions.has_wider_approval(item)
        error = self._errors.make_changed_error(recorded, requested, item)
        self.acceptance.accept_or_raise(error, address, requested.fp, keeps=keeps)
        return True

    def accept_or_raise_start_difference(self, requested: Intent) -> None:
        """
        Accept and record that the root run starts differently, if the caller accepts edited effects or did before; else raise.

        Raises:
            ReplayDivergence: when the caller does not keep recorded effects.
        """
        if self._past.was_difference_accepted(ROOT, requested.fp):
            return
        if not self._leeway.keeps:
            raise self._errors.make_start_error(requested)
        self.acceptance.record_accepted_difference(ROOT, requested.fp)

    def _cut_off_record(self, address: Address) -> None:
        """Discard the record from an address on; stop the run if an effect would be repeated that must not be."""
        try:
            self._past.cut_off(address)
        except JournalError as error:
            raise self._writer.keep_first_fatal_error(error) from None

    def find_result(self, address: Address) -> Result | None:
        """Return the recorded result at an address; ``None`` if there is none or it was cut off."""
        return self._past.find_result(address)

    def stops_before(self, item: Item) -> bool:
        """Return whether the run stops before an effect without result."""
        return not self.ends.can_perform_effects(item.path)

    def make_invalidation_future(
        self, recorded_result: Result, item: Item
    ) -> tuple[asyncio.Future[None], Sequence[str]] | None:
        """Return a future, done when a result of background children no longer holds, and their paths; ``None`` if it always holds."""
        return None

    def handle_unused_records_error(self, error: ReplayDivergence | None) -> None:
        """
        Raise *error*, if there is one, unless the mode allows records that the run did not reach.

        Raises:
            ReplayDivergence: that *error*.
        """
        if error is not None and not self._mode.may_leave_unused_records(self._past):
            raise error

    def has_recorded_start(self, address: Address) -> bool:
        """Return whether the start of an effect is recorded; without a result, it is unknown whether the effect happened."""
        return self._past.find_intent(address) is not None

    def answer_from_record(self, recorded_result: Result, item: Item) -> Value | Failure:
        """Return the recorded outcome of an effect; count it, notify a model's provider, and copy the result if the mode copies."""
        try:
            outcome = self._past.history.outcome(recorded_result)
        # Read only now: a journal of 10,000 steps is compared by fingerprints, and what nobody asks for is never
        # decoded. So what does not decode any more shows here, and is told as a divergence with its place, which ends
        # the run like one.
        except JournalCorrupt as error:
            raise self._writer.keep_first_fatal_error(
                self._errors.make_undecodable_error(error.message, item)
            ) from error
        # Providers that count (a rehearsed model, a test's script) have to be at the right place when the run goes
        # live; so they are told of each call that the record answers, with its lost attempts.
        if isinstance(item.effect, CallModel):
            _notify_provider(self.models, item.effect.request, 1 + len(recorded_result.attempts))
        # Written anew without its "for good", so that whoever goes on from this journal does not find it again.
        if self._leeway.doubts_yes and isinstance(outcome, Value) and is_permission(item):
            once = attrs.evolve(outcome, value=tuple(map(limit_to_one_call, outcome.value)))
            if once != outcome:
                self._writer.append(Result(*item.address, recorded_result.at, once, recorded_result.extras))
                self._timing.advance_to(recorded_result.at)
                self._past.answered += 1
                return once
        self._count_and_copy_result(recorded_result, outcome, item)
        return outcome

    def confirm_repeated_outcome(self, recorded_result: Result, outcome: Single, item: Item) -> Single:
        """
        Return the recorded outcome of a repeated effect, counted as answered; return a new stop unchanged.

        Raises:
            ReplayDivergence: when the outcomes differ.
        """
        past = self._past
        # The recorded value is what the run goes on with, though it was performed again: what is only equal may still
        # differ in what nobody compares.
        recorded = self.answer_from_record(recorded_result, item)
        if isinstance(outcome, Stop):
            return outcome
        if not past.is_same_outcome(recorded, outcome):
            raise self._writer.keep_first_fatal_error(self._errors.make_different_result_error(recorded, outcome, item))
        return recorded

    def _count_and_copy_result(self, recorded_result: Result, outcome: Value | Failure, item: Item) -> None:
        """Count an effect as answered, advance the clock, and copy its result into the new journal if the mode copies."""
        self._timing.advance_to(recorded_result.at)
        self._past.answered += 1
        # The very record is taken over, without its outcome being encoded again: a replay keeps no second copy of what
        # equals the first, and its journal is byte-equal by construction.
        if self._mode.takes_over:
            self._writer.append(recorded_result)
        elif self._mode.copies:
            self._writer.append(
                Result(*item.address, recorded_result.at, outcome, self._past.history.extras(recorded_result))
            )

    def consume_unstarted_outcome(self, address: Address, item: Item) -> Single | None:
        """Return the recorded outcome, counted as answered, of a child or tool body that never started, or ``None``."""
        known = self.find_result(address)
        if known is None:
            return None
        outcome = self._past.history.outcome(known)
        # A limit, or an agent that was unknown then, kept it from starting. Now it might well start, and would have
        # nothing recorded below it.
        refused = not isinstance(outcome, Value) or (
            isinstance(item.effect, Spawn) and is_unstarted_child(outcome.value)
        )
        if isinstance(item.effect, CallBody) and isinstance(outcome, Value) and outcome.value.status == "cancelled":
            # It was given up before it began, or before anything that it did.
            refused = (child_path(*address), 0) not in self._past.history.intents
        return self.answer_from_record(known, item) if refused else None

    def stops_before_starting_run(self, item: Item) -> bool:
        """Return whether an effect would start a child or tool body without a record, and the run stops before it."""
        return (
            isinstance(item.effect, RUNS) and self._past.find_intent(item.address) is None and self.stops_before(item)
        )

    def has_recorded_progress(self, address: Address) -> bool:
        """Return whether a child or tool body has a recorded end or first effect."""
        past = self._past
        path = address[0] if address[1] == -1 else child_path(*address)
        return (past.find_result(address) or past.find_intent((path, 0))) is not None

    def confirm_child_end(self, recorded_result: Result, outcome: Single, item: Item) -> Single | None:
        """
        Return the recorded end of a repeated child or tool body, or ``None`` if it differs and the record is cut off after it.

        Raises:
            ReplayDivergence: when the end differs, and the caller does not accept that.
        """
        past = self._past
        # A child is run again over its own records, although its parent's record has its result: only so are its
        # effects compared, and only so does its output exist as the author's own type, which no journal holds. What the
        # parent recorded is the check.
        recorded: Any = past.history.outcome(recorded_result)
        if isinstance(item.effect, CallBody):
            if isinstance(outcome, Value):
                outcome = attrs.evolve(
                    outcome, inputs=recorded.inputs
                )  # what came meanwhile is nothing that the body gave
            same = isinstance(outcome, Value) and past.is_same_outcome(recorded, outcome)
        else:
            same = isinstance(outcome, Value) and past.is_same_child_end(recorded, outcome.value)
        if same:
            self._copy_computed_values(recorded_result, outcome)
            self._count_and_copy_result(recorded_result, recorded, item)
            return Value(outcome.value, recorded_result.at, recorded.inputs, outcome.body)  # type: ignore[union-attr]  # it is the same
        if self._mode.cuts_off:
            told = past.history.tree.find_first_report_address(item.path) if item.effect.seq == -1 else None
            self._cut_off_record(told or (item.path, item.effect.seq + 1))
            return None
        return self._accept_or_raise_child_end(recorded_result, recorded, outcome, item)

    def confirm_root_end(self, finished: Finished) -> Finished:
        """
        Return the end of the root run: the recorded one where the caller accepts that it ends differently now.

        Raises:
            ReplayDivergence: when the end differs, and the caller does not accept that.
        """
        past = self._past
        error = past.find_end_difference(finished, is_record_only=self._closed)
        if error is None:
            return finished
        self.acceptance.accept_or_raise(error, ROOT, past.fingerprint_child_end(finished.to_child_result()))
        was = past.find_root_end()
        if was is None:
            return finished
        output = self._decode_output("", was, error)
        why = None if was.status is RunStatus.MAX_STEPS else was.error
        return attrs.evolve(finished, status=was.status, output=output, text=was.text, error=why)

    def _decode_output(self, path: str, was: ChildResult, error: ReplayDivergence) -> Any:
        """Return the recorded output of a run, decoded to its agent's output type; raise *error* if it does not fit the type."""
        decode = self._machines.decoders.get(path)
        if decode is None or was.output is None:
            return was.output
        try:
            return decode(was.output)
        except Exception as cause:
            raise self._writer.keep_first_fatal_error(error) from cause

    def _accept_or_raise_child_end(self, recorded_result: Result, recorded: Any, outcome: Single, item: Item) -> Single:
        """Return the recorded end of a child that ended differently now, if the caller accepts it; else raise."""
        past, address = self._past, item.address
        if isinstance(item.effect, CallBody):
            return self._accept_or_raise_body_result(recorded_result, recorded, outcome, item)
        error = self._errors.make_child_end_error(recorded, outcome, item)
        child: object = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            raise self._writer.keep_first_fatal_error(error)
        fp = past.fingerprint_child_end(child)
        if not past.was_difference_accepted(address, fp):
            self.acceptance.accept_or_raise(error, address, fp)
        path = item.path if item.effect.seq == -1 else child_path(*address)
        # The recorded output is JSON, and the handler expects its agent's own type: the child that was run again says
        # how to make it.
        was: ChildResult = recorded.value
        output = self._decode_output(path, was, error)
        self._count_and_copy_result(recorded_result, recorded, item)
        ended = attrs.evolve(child, status=was.status, output=output, text=was.text, error=was.error)
        return Value(ended, recorded_result.at, recorded.inputs)

    def _accept_or_raise_body_result(
        self, recorded_result: Result, recorded: Any, outcome: Single, item: Item
    ) -> Single:
        """Return the recorded result of a tool body that gave another one now, if accepted; else raise."""
        past = self._past
        if not isinstance(outcome, Value):
            msg = f"the body of the tool {item.effect.tool_name!r} was stopped, but the record shows that it ended"  # type: ignore[union-attr]
            raise self._writer.keep_first_fatal_error(JournalError(msg))
        error = self._errors.make_different_result_error(recorded, outcome, item, "changed")
        fp = past.fingerprint_result(outcome.value)
        if not past.was_difference_accepted(item.address, fp):
            self.acceptance.accept_or_raise(error, item.address, fp)
        self._copy_computed_values(recorded_result, outcome)
        self._count_and_copy_result(recorded_result, recorded, item)
        return Value(recorded.value, recorded_result.at, recorded.inputs, outcome.body)

    def _copy_computed_values(self, recorded_result: Result, outcome: Single) -> None:
        """Copy the computed values of a tool body into a rewritten journal, before its result."""
        body = getattr(outcome, "body", None)
        if self._mode.copies and body is not None and body.computed:
            self._writer.append(make_computed_record(recorded_result.address, recorded_result.at, body.computed))

    def find_stopped_call_usage(self, item: Item) -> PartialUsage | None:
        """Return the known usage of a model call without a result; ``None`` if no request was sent."""
        return self._past.history.facts.find_lost_usage(item.address)

    def find_computed_value(self, path: str, number: int) -> Any:
        """Return the recorded result of a ``Compute`` in the body at *path*; ``None`` to compute it; a stop at the end of the record."""
        call = get_starter_address(path)
        values = self._past.history.facts.computed.get(call)
        # Where the record was cut in the body, or after it, what was worked out is worked out again.
        if values is None or self._past.find_result(call) is None:
            return None
        return values[number] if number < len(values) else self.ends.make_record_end_stop(path, ())


@frozen
class ParallelRecord:
    """
    The record of a tree whose runs continue in parallel.

    Attributes:
        replayer: Knows where the record of each run ends.
        past: The recorded part of the run.
    """

    replayer: Replayer
    past: RecordedPart

    def has_begun(self, item: Item) -> bool:
        """Return whether an effect was started, or will never start."""
        return self.past.find_intent(item.address) is not None or self.replayer.stops_before(item)

    def has_outcome(self, item: Item) -> bool:
        """Return whether an effect has a recorded outcome or will never start; a started child run counts, too."""
        if isinstance(item.effect, RUNS):
            return self.has_begun(item)
        return self.past.find_result(item.address) is not None or self.replayer.stops_before(item)


def find_parallel_record(replayer: Replayer, past: RecordedPart) -> ParallelRecord | None:
    """
    Return the record of a tree whose runs continue in parallel, and must all reach the end of their records first; else ``None``.

    Otherwise a parent or the winner of a race could end another run in the middle of its recorded effects.
    """
    history = past.history
    goes_on_apart = any(
        i.is_background or (i.gather is not None and i.starts_child_or_body and address not in history.results)
        for address, i in history.intents.items()
    )
    return ParallelRecord(replayer, past) if goes_on_apart else None


def _notify_provider(models: ModelRegistry | None, request: ModelRequest, times: int) -> None:
    """Notify the provider that the record answers a model call, with all its attempts."""
    if models is None:
        return
    with contextlib.suppress(UnknownModel):
        provider = models.provider_for(request.model)
        for _ in range(times):
            getattr(provider, "skip_reply", _ignore_request)(request)


def _ignore_request(_: ModelRequest) -> None:
    """Ignore a request, for a provider without notifications."""
