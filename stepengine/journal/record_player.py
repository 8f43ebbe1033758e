"""
``RecordPlayer``: the middleware of a run with a past. It decides for each effect whether the record answers it or it is performed.

The ``Replayer`` compares effects with the record; the ``Recorder`` performs and records those that are live.
"""

from __future__ import annotations

from collections.abc import Awaitable

import attrs

from stepengine.data.effects import CHILD_ENDS, WAITS, AskPerson, CallBody, CallModel, Spawn
from stepengine.data.json import ABSENT
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.questions import Answer
from stepengine.data.usage import NOTHING_USED
from stepengine.errors import UnknownOutcome
from stepengine.journal.encoding import encode_stored
from stepengine.journal.history import History
from stepengine.journal.modes import OpenJournal
from stepengine.journal.questions import make_unknown_call_question
from stepengine.journal.recorded_part import RecordedPart
from stepengine.journal.recorded_permissions import is_permission
from stepengine.journal.recorder import STARTS, Recorder, add_ended_run, find_ended_run
from stepengine.journal.records import Input, Result
from stepengine.journal.replayer import Replayer
from stepengine.journal.run_mailbox import RunMailbox
from stepengine.journal.unknown_calls import UnknownCalls, replace_failure_by_denial
from stepengine.runtime.core_performer import is_deferred_call
from stepengine.runtime.failfast import make_race_loss_outcome
from stepengine.runtime.limits import RecordState
from stepengine.runtime.performer import IO, Item, Performer, child_path, is_repeatable
from stepengine.runtime.questions import render_questions


class RecordPlayer:
    """
    Answers effects from the record, or has them recorded.

    Args:
        recorder: Performs and records live effects.
        inner: Performs live effects.
        journal: The journal of the run.
        mail: The mailbox messages of the run.
        past: The recorded part of the run.
        replayer: Compares effects with the record.
    """

    def __init__(
        self,
        recorder: Recorder,
        inner: Performer,
        journal: OpenJournal,
        *,
        mail: RunMailbox,
        past: RecordedPart,
        replayer: Replayer,
    ) -> None:
        self.begin = recorder.begin
        self._recorder = recorder
        self._inner = inner
        self._mode, self._writer = journal.mode, journal.writer
        self._answers, self._timing = journal.answers, journal.timing
        self._mail = mail
        self._past = past
        self._replayer = replayer
        self._unknown_calls = UnknownCalls(past, inner) if past.leeway.asks_about_calls else None

    # The order of these questions is the whole of resuming: a recorded outcome is given; a run that is recorded to its
    # end stops where the record does; what lost its race stays lost; what was begun and has no result is in doubt; and
    # only then is anything performed. Children are asked about first, since they are never answered from a record: they
    # run again over their own.
    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Answer an effect from the record, or perform and record it."""
        replayer = self._replayer
        if self._writer.fatal is not None:
            return self._return_divergence_stop()
        starts = isinstance(item.effect, STARTS)
        if starts:
            is_background = isinstance(item.effect, Spawn) and item.effect.is_background
            return self._start_background_child(item, io) if is_background else self._repeat_run(item, io)
        address = item.address
        known = replayer.find_result(address)
        if self._unknown_calls is not None and isinstance(item.effect, CallModel):
            self._unknown_calls.record_model_call_source(item, is_recorded=known is not None)
        if known is not None:
            again = not isinstance(item.effect, CHILD_ENDS) and self._past.leeway.performs_again(item.effect)
            return self._perform_and_compare(known, item, io) if again else self._answer_from_record(known, item, io)
        if replayer.stops_before(item):
            return self._make_record_end_stop(item, io)
        if item.gather is not None and replayer.ends.has_lost_race(item):
            return self._recorder.commit_outcome(item, make_race_loss_outcome(item, 0), [])
        if self._unknown_calls is not None:
            return self._perform_after_approval(self._unknown_calls, item, io)
        return self._perform_unanswered(item, io)

    def _perform_unanswered(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect without a recorded outcome; resume or decide one whose start is recorded."""
        has_recorded_start = self._replayer.has_recorded_start(item.address)
        return self._resume_effect_in_doubt(item, io) if has_recorded_start else self._recorder.perform_live(item, io)

    async def _perform_after_approval(self, unknown: UnknownCalls, item: Item, io: IO) -> Single:
        """Perform an effect without a recorded outcome; first ask a person if only an untrusted record requests the effect."""
        if unknown.needs_approval(item):
            refused = await self._ask_about_unknown_call(unknown, item, io)
            return await self._perform_unanswered(item, io) if refused is None else refused
        outcome = await self._perform_unanswered(item, io)
        if is_permission(item):
            unknown.record_approval(item, outcome)
        return outcome

    async def _ask_about_unknown_call(self, unknown: UnknownCalls, item: Item, io: IO) -> Single | None:
        """Ask a person about a call; return ``None`` if the call may start, else record and return its denial or stop."""
        answers, history = self._answers, self._past.history
        given = answers.find_decision(item.address)
        if given is None:
            asked = await unknown.ask_person(item, io)
            if isinstance(asked, Stop):
                return await self._recorder.commit_outcome(item, asked, [])
            answers.decisions[make_unknown_call_question(item).id] = asked
        decided = answers.decide_doubtful_outcome(item, history)
        if decided is None:
            return None
        self._record_result_author(item, decided)
        return await self._recorder.commit_outcome(item, replace_failure_by_denial(item, decided), [])

    def get_record_state(self, item: Item) -> RecordState:
        """Return ``"answered"`` if the record answers an effect, ``"begun"`` if it has only its start, else ``"new"``."""
        replayer, address = self._replayer, item.address
        lost = item.gather is not None and replayer.ends.has_lost_race(item)
        if replayer.find_result(address) is not None or replayer.stops_before(item) or lost:
            return "answered"
        return "begun" if replayer.has_recorded_start(address) else "new"

    async def _return_divergence_stop(self) -> Single:
        return self._make_divergence_stop()

    def _make_divergence_stop(self) -> Stop:
        return Stop("diverged", self._timing.last, self._writer.fatal)

    async def _answer_from_record(self, recorded_result: Result, item: Item, io: IO) -> Single:
        """Return a recorded outcome at the pace of the replay; a wait for children first waits for their recorded ends."""
        if self._timing.pace is not None:
            await self._timing.pace.sleep_until(recorded_result.at)
        is_of_children = isinstance(item.effect, CHILD_ENDS)
        waits = self._replayer.make_invalidation_future(recorded_result, item) if is_of_children else None
        if waits is not None:
            cut, children = waits
            ended = await io.wait_for_children(item, children, cut)
            if cut.done():  # one of them left its record: what is recorded of the wait holds no longer
                return await self._recorder.perform_live(item, io)
            if ended is None:
                return Stop(
                    "suspended" if self._writer.fatal is None else "diverged", self._timing.last, self._writer.fatal
                )
        outcome = self._replayer.answer_from_record(recorded_result, item)
        return await self._wait_for_child_ends(outcome, item, io) if is_of_children else outcome

    async def _perform_and_compare(self, recorded_result: Result, item: Item, io: IO) -> Single:
        """Perform a recorded effect again and compare the results; raise for an effect that only an untrusted record requests."""
        if self._unknown_calls is not None and self._unknown_calls.needs_approval(item):
            raise self._writer.keep_first_fatal_error(self._unknown_calls.make_refusal_error(item))
        outcome = await self._inner.perform(item, io)
        if not isinstance(outcome, Stop):
            outcome = self._recorder.to_replayed_outcome(item, outcome, recorded_result.at)
        return self._replayer.confirm_repeated_outcome(recorded_result, outcome, item)

    async def _wait_for_child_ends(self, outcome: Single, item: Item, io: IO) -> Single:
        """Wait until background children reach their recorded ends, and return the outcome with these ends added."""
        if not isinstance(outcome, Value):
            return outcome
        ended = await io.wait_for_children(item, outcome.value.done)
        if ended is None:
            return Stop("cancelled", self._timing.last, self._writer.fatal)
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))

    # A replay ends where its record ends, and as that one did. Only a run that was suspended there still waits for
    # something: that is told to the tree, so that its result names the questions and times again. A run that was
    # cancelled or cut off waits for nothing.
    async def _make_record_end_stop(self, item: Item, io: IO) -> Single:
        """Return the stop of a run that must not continue after its record; register the waiting effect of a suspended one."""
        questions = render_questions(item) if isinstance(item.effect, AskPerson) else ()
        stop = self._replayer.ends.make_record_end_stop(item.path, questions, waits=isinstance(item.effect, WAITS))
        if stop.kind == "suspended":
            io.record_suspension(item)
        return attrs.evolve(stop, begun=self._replayer.find_stopped_call_usage(item))

    async def _start_background_child(self, item: Item, io: IO) -> Single:
        """Start a child in the background; the start is an outcome at once, and the end is recorded separately."""
        replayer, address = self._replayer, item.address
        known, refused = replayer.find_result(address), replayer.consume_unstarted_outcome(address, item)
        if refused is not None:
            return refused
        if known is None and replayer.stops_before(item):
            return await self._make_record_end_stop(item, io)
        if known is None and (denied := await self._ask_before_start(item, io)) is not None:
            return denied
        if known is not None and self._unknown_calls is not None:
            self._unknown_calls.record_started_child(item)
        outcome = await self._inner.perform(item if known is None else item._replace(has_begun=True), io)
        if self._writer.fatal is not None:
            return self._make_divergence_stop()
        return (
            await self._recorder.commit_outcome(item, outcome, [])
            if known is None
            else replayer.answer_from_record(known, item)
        )

    # A child that is recorded to have ended is run all the same. Its result alone would answer the parent, but then
    # nobody would compare what it asks for, a divergence below would go unseen, and an output of the author's own type
    # could not be made from JSON.
    async def _repeat_run(self, item: Item, io: IO) -> Single:
        """Run a child or tool body over its own records and compare its result with the recorded one."""
        replayer, address = self._replayer, item.address
        instead = await self._decide_outcome_without_start(item, io)
        if instead is not None:
            return instead
        known, begun = replayer.find_result(address), replayer.has_recorded_progress(address)
        if item.gather is not None and replayer.ends.has_lost_race(item):
            replayer.ends.mark_race_loser(child_path(*address))
            item = item._replace(gather=None)
        # One that is recorded to have ended comes to that end, whoever is first this time in a race that it was part of.
        asked = item if known is None else item._replace(gather=None)
        outcome = await self._inner.perform(asked._replace(has_begun=True) if begun else asked, io)
        if self._writer.fatal is not None:
            return add_ended_run(self._make_divergence_stop(), find_ended_run(outcome))
        if known is not None:
            if self._recorder.cleans and isinstance(outcome, Value) and isinstance(item.effect, CallBody):
                outcome = self._recorder.to_replayed_outcome(item, outcome, known.at)
            confirmed = replayer.confirm_child_end(known, outcome, item)
            if confirmed is not None:
                return confirmed
        return (
            await self._recorder.commit_run_outcome(item, outcome)
            if replayer.ends.can_perform_effects(item.path)
            else self._make_stop_after_child(item, outcome)
        )

    async def _decide_outcome_without_start(self, item: Item, io: IO) -> Single | None:
        """Return, and record for a lost race, the outcome of a child or body that must not start; else ``None``."""
        replayer, address = self._replayer, item.address
        refused = replayer.consume_unstarted_outcome(address, item)
        if refused is not None:
            return refused
        if item.gather is not None and replayer.ends.has_lost_race(item):
            return (
                None
                if replayer.has_recorded_progress(address)
                else await self._recorder.commit_outcome(item, make_race_loss_outcome(item, 0), [])
            )
        if replayer.stops_before_starting_run(item):
            return await self._make_record_end_stop(item, io)
        return await self._ask_before_start(item, io) if replayer.find_result(address) is None else None

    async def _ask_before_start(self, item: Item, io: IO) -> Single | None:
        """Ask a person about a child or tool body that only an untrusted record requests; record and return the outcome of a refused one."""
        unknown = self._unknown_calls
        # Where the record ends, a replay runs a child that has begun over its own records and starts nothing.
        if unknown is None or self._replayer.stops_before(item) or not unknown.needs_approval(item):
            return None
        refused = await self._ask_about_unknown_call(unknown, item, io)
        if refused is None:
            unknown.record_reply_source(child_path(*item.address), is_recorded=False)
        return refused

    def _make_stop_after_child(self, item: Item, outcome: Single) -> Single:
        """Return the stop of a run whose child stopped where its record stops."""
        child = find_ended_run(outcome)
        waits = isinstance(outcome, Stop) and outcome.kind == "suspended"
        stop = self._replayer.ends.make_record_end_stop(
            item.path, child.questions if child is not None else (), waits=waits
        )
        return add_ended_run(stop, child)

    # The process died between intent and result, and nothing here can know whether the mail was sent. What is harmless
    # twice is done again; what waits is waited for again; of the rest somebody decides (`in_doubt`), and that decision
    # is recorded like a result, so that it is never asked for a second time (replay:J31).
    async def _resume_effect_in_doubt(self, item: Item, io: IO) -> Single:
        """Resume or decide an effect that was started and has no result; return its outcome."""
        history, address = self._past.history, item.address
        if self._mode.copies:
            self._copy_input_records(item, history)
        # Whoever sent its result knows that it happened.
        is_waiting = is_deferred_call(item) and (
            address in history.facts.pending_results or address in self._mail.results_sent
        )
        if is_waiting and self._answers.find_decision(address) is None:
            return await self._recorder.perform_live(item._replace(has_begun=True), io, is_start_recorded=True)
        if isinstance(item.effect, WAITS):
            return await self._recorder.perform_live(item._replace(has_begun=True), io, is_start_recorded=True)
        if is_repeatable(item):
            lost = self._list_lost_attempts(item) if isinstance(item.effect, CallModel) else ()
            return await self._recorder.perform_live(item, io, lost, is_start_recorded=True)
        decided = self._answers.decide_doubtful_outcome(item, history)
        if decided is None:
            return await self._recorder.perform_live(item, io, is_start_recorded=True)
        self._record_result_author(item, decided)
        return await self._recorder.commit_outcome(item, decided, [])

    def _copy_input_records(self, item: Item, history: History) -> None:
        """Copy the inputs of a started effect, returned body and partial usage, into a rewritten journal."""
        address = item.address
        if address in history.facts.pending_results:
            self._recorder.append_result_pending(item)
        begun = history.facts.partial_usage.get(address)
        if begun is not None:
            self._recorder.append_stopped_usage(item, begun, self._timing.last)

    def _list_lost_attempts(self, item: Item) -> list[object]:
        """Return the attempt that a process lost by ending before the reply was recorded; none if no request was sent."""
        lost = {"error": encode_stored(UnknownOutcome("the process ended before the reply was recorded"))}
        begun = self._replayer.find_stopped_call_usage(item)
        # A call that was stopped before it was sent is no attempt.
        return [] if begun is None or begun.usage == NOTHING_USED else [{**lost, "usage": encode_stored(begun.usage)}]

    def _record_result_author(self, item: Item, outcome: Single) -> None:
        """Record who stated the outcome of an effect in doubt, and why, if a person stated it."""
        seq = item.effect.seq
        given = self._answers.find_decision((item.path, seq))
        if not isinstance(outcome, Stop) and isinstance(given, Answer) and given.result is not ABSENT:
            said = {"by": given.by, "reason": given.reason}
            self._recorder.append_external_input(
                Input(item.path, seq, self._timing.last, {"type": "manual_result", **said})
            )
