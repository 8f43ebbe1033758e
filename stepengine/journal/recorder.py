"""
``Recorder``: the middleware that records effects.

It is between the meter of limits and the gate, so that a refusal is recorded like any other outcome. The order is
always the same: intent, effect, result, durable, and only then does the machine see it. Of a run with a past, ``RecordPlayer`` is in
its place, and hands on the effects that are live.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from stepengine.data.effects import (
    RUNS,
    WAITS,
    AskPerson,
    CallModel,
    CallTool,
    RunInBackground,
    Spawn,
)
from stepengine.data.messages import ToolCallPart
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import BodyEnd, Failure, PartialUsage, Single, Stop, Value
from stepengine.data.questions import to_answer
from stepengine.data.record_sizes import find_length_problem
from stepengine.data.state import ChildResult
from stepengine.data.usage import NOTHING_USED, Usage, add_cost, add_lost_usage
from stepengine.errors import ModelError, StepEngineError
from stepengine.journal.call_writes import CallWrites
from stepengine.journal.encoding import (
    decode_outcome,
    encode_call_with_durability,
    encode_effect,
    encode_outcome_members,
    encode_stored,
    must_start_be_durable,
    to_storable_error,
)
from stepengine.journal.modes import OpenJournal
from stepengine.journal.records import Address, Input, Intent, Result, make_computed_record, to_compact_json
from stepengine.journal.run_mailbox import RunMailbox
from stepengine.journal.run_writer import Outcomes, PendingOutcomes
from stepengine.machine.plan import RunPlan
from stepengine.runtime.core_performer import is_deferred_call
from stepengine.runtime.performer import IO, ForwardingIO, Item, Performer, RoomWait

if TYPE_CHECKING:
    from stepengine.journal.replayer import Replayer


STARTS = (*RUNS, RunInBackground)


class Recorder:
    """
    Records effects.

    Args:
        inner: Performs live effects.
        journal: The journal of the run.
        mail: The mailbox messages of the run.
        writes: The file writes of calls without a recorded result.
        replayer: Compares effects with the record; ``None`` for a new run.

    Attributes:
        cleans: Whether texts that look like secrets are redacted in outcomes.
    """

    def __init__(
        self,
        inner: Performer,
        journal: OpenJournal,
        mail: RunMailbox,
        writes: CallWrites,
        replayer: Replayer | None,
    ) -> None:
        self._inner = inner
        self._mode, self._writer = journal.mode, journal.writer
        self._answers, self._timing = journal.answers, journal.timing
        self._mail = mail
        self._writes = writes
        self._begin = inner.begin
        self._replayer = replayer
        self.cleans = journal.writer.source.redactor.shapes
        self._next: dict[str, int] = {}
        self._has_begun = False
        self._pending = PendingOutcomes(journal.writer)

    # Write-ahead, as a database does: that an effect begins is written before it begins, or a crash in the middle of it
    # would look as if it had never been asked for, and it would happen twice. What must be on the disk by then, and not
    # only in the file, is what must not happen twice; an idempotent call may be lost with its intent
    # (reliability:R1).
    #
    # It returns an awaitable and is no coroutine: for a run in memory nothing is waited for. The same holds of `perform`.
    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """
        Compare effects with the record, or record that they start.

        Raises:
            ReplayDivergence: when an effect differs from the record at its address.
            JournalWriteFailed: when an intent cannot be written; then no effect of the batch is performed.
        """
        replayer = self._replayer
        if self._writer.fatal is not None:
            raise self._writer.fatal
        # The first of a run lasts, whatever it is.
        lasts = not (self._next if replayer is None else self._has_begun)
        fresh: list[Item] = []
        for item in batch:
            is_new, must = self._match_or_record_start(item)
            if is_new:
                fresh.append(item)
                lasts = lasts or must
        if fresh:
            self._has_begun = True
        begin = self._begin
        if not (self._pending.owed or (lasts and fresh and self._writer.waits)):
            return begin(fresh)
        owed, waiting = self._pending.start_commit()
        return begin(fresh) if waiting is None else self._start_after_commit(waiting, owed, fresh)

    def _match_or_record_start(self, item: Item) -> tuple[bool, bool]:
        """Match an effect with the record, or append its intent; return whether it is new, and whether its start must be durable."""
        replayer = self._replayer
        path, effect, seq = item.path, item.effect, item.effect.seq
        gather_seq = None if item.gather is None else item.gather.effects[0].seq
        if isinstance(effect, CallModel):
            intent, must = Intent(path, seq, effect, gather=gather_seq), False
        else:
            intent, must = _make_intent_with_durability(item, gather_seq)
        is_new = replayer is None or not replayer.match_with_record(item, intent)
        if is_new:
            if seq != self._next.get(path, 0):
                # Numbers that the machine gave to effects which it then did not ask for are recorded.
                self.append_external_input(Input(path, seq, self._timing.last, {"type": "gap"}))
            try:
                self._writer.append(intent)
            except StepEngineError as error:
                raise self._writer.keep_first_fatal_error(error) from error.__cause__
        self._next[path] = seq + 1
        if isinstance(effect, RUNS):
            self._mail.register_run((path, seq))
        if isinstance(effect, WAITS) and (is_new or self._is_recopied_intent((path, seq))):
            self._record_wake_time(item)
        return is_new, must

    async def _start_after_commit(
        self, waiting: asyncio.Future[None], owed_outcomes: Outcomes, batch: Sequence[Item]
    ) -> None:
        """Begin effects once their starts are durable."""
        await self._pending.wait(waiting, owed_outcomes)
        await self._inner.begin(batch)

    def _is_recopied_intent(self, address: Address) -> bool:
        """Return whether the intent of a started effect was just copied into a rewritten journal."""
        replayer = self._replayer
        mode = self._mode
        # A replay takes over what was recorded when the wait began, with its time.
        return replayer is not None and mode.copies and not mode.takes_over and replayer.has_recorded_start(address)

    def _record_wake_time(self, item: Item) -> None:
        """Record when a wait ends, if it has a time."""
        wakes = item.effect.wakes  # type: ignore[union-attr]
        if wakes is not None:
            said = {"type": "wake_time", "until": wakes}
            self.append_external_input(Input(*item.address, self._timing.last, said))

    def append_external_input(self, record: Input) -> None:
        """Append the record of an external input or fact; an error is raised and stops the run."""
        try:
            self._writer.append(record)
        except StepEngineError as error:
            raise self._writer.keep_first_fatal_error(error) from error.__cause__

    def wrap_performer(self, inner: Performer) -> Performer:
        """Return a recorder that writes to the same record as this one the effects of *inner*, which starts no run."""
        recorder = copy.copy(self)
        recorder._inner = inner  # noqa: SLF001 - of the same class
        return recorder

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect of a new run and record it."""
        return self._perform_child_or_body(item, io) if isinstance(item.effect, STARTS) else self.perform_live(item, io)

    async def _perform_child_or_body(self, item: Item, io: IO) -> Single:
        """Start a background child, or run a child or tool body to its end; record the outcome."""
        if self._writer.fatal is not None:
            return Stop("diverged", self._timing.last, self._writer.fatal)
        outcome, fatal = await self._inner.perform(item, io), self._writer.fatal
        is_background = isinstance(item.effect, Spawn) and item.effect.is_background
        if fatal is not None:
            stop = Stop("diverged", self._timing.last, fatal)
            return stop if is_background else add_ended_run(stop, find_ended_run(outcome))
        return await (
            self.commit_outcome(item, outcome, []) if is_background else self.commit_run_outcome(item, outcome)
        )

    async def commit_run_outcome(self, item: Item, outcome: Single) -> Single:
        """Record the outcome of a child or tool body, with its computed values before it, and return it once it is durable."""
        computed = outcome.body.computed if isinstance(outcome, Value) and outcome.body is not None else ()
        # Each value is short enough for a record; where all together are not, a replay works the program out again.
        if computed and not find_length_problem(computed):
            address = item.address
            self.append_external_input(
                make_computed_record(address, self._timing.record_time(*address, outcome.at), computed)
            )
        return await self.commit_outcome(item, outcome, [])

    async def _record_deferred_body_end(self, item: Item) -> None:
        """Record durably that the body of a deferred call returned, since its result may reach another process."""
        self.append_result_pending(item)
        owed, waiting = self._pending.start_commit() if self._writer.waits else ((), None)
        if waiting is not None:
            await self._pending.wait(waiting, owed)

    def append_result_pending(self, item: Item) -> None:
        """Record that the body of a deferred call returned."""
        self.append_external_input(Input(*item.address, self._timing.last, {"type": "result_pending"}))

    # --- live ---------------------------------------------------------------------------------------------------------

    def _record_stopped_usage(self, item: Item, io: IO) -> None:
        """Record the usage of a stopped model call; if that fails, the run ends."""
        begun = io.find_stopped_call_usage(item) if isinstance(item.effect, CallModel) else None
        if begun is not None:
            with contextlib.suppress(StepEngineError):
                self.append_stopped_usage(item, begun, self._timing.last)

    def append_stopped_usage(self, item: Item, usage: PartialUsage, at: int) -> None:
        """Record the usage of a stopped model call."""
        cost = {} if usage.cost is None else {"cost": str(usage.cost)}
        said = {"type": "partial_usage", "usage": encode_stored(usage.usage), **cost}
        self.append_external_input(Input(*item.address, at, said))

    # What was used is written down also where the call is stopped: the exception takes nothing along, and nobody who
    # comes later could know.
    async def perform_live(
        self, item: Item, io: IO, attempts: Sequence[object] = (), *, is_start_recorded: bool = False
    ) -> Single:
        """Perform an effect, record its outcome and return it once it is durable; *is_start_recorded*: its start is recorded already."""
        if self._writer.fatal is not None and self._replayer is None:
            return Stop("diverged", self._timing.last, self._writer.fatal)
        noted, noting = [*attempts], io
        if isinstance(item.effect, CallModel):
            noting = AttemptsIO(io, noted)
        # Whether a result comes before its body has returned is a matter of time, and a stable recording tells of none.
        elif is_deferred_call(item) and not self._writer.source.stable:
            noting = DeferredIO(io, self._record_deferred_body_end)
        try:
            outcome: Any = await self._inner.perform(item, noting)
        except BaseException:
            self._record_stopped_usage(item, io)
            raise
        if is_start_recorded and self._replayer is not None:
            outcome = _add_earlier_usage(outcome, self._replayer.find_stopped_call_usage(item))
        kept, owed, waiting = self._append_outcome_and_start_commit(
            item, outcome, noted, io, is_start_recorded=is_start_recorded
        )
        if waiting is not None:
            await self._pending.wait_ignoring_cancellation(waiting, owed)
        return kept

    async def commit_outcome(self, item: Item, outcome: Single, attempts: Sequence[object]) -> Single:
        """Record an outcome, and return it once it is durable; several that finish together share one commit."""
        kept, owed, waiting = self._append_outcome_and_start_commit(item, outcome, attempts)
        if waiting is not None:
            await self._pending.wait_ignoring_cancellation(waiting, owed)
        return kept

    # Encoded before anybody sees it: what cannot be stored must fail here, at the effect that gave it, and not when the
    # run is read back. What the machine gets is what a replay will get (`to_replayed_outcome`).
    def _append_outcome_and_start_commit(
        self,
        item: Item,
        outcome: Single,
        attempts: Sequence[Any],
        io: IO | None = None,
        *,
        is_start_recorded: bool = False,
    ) -> tuple[Single, Outcomes, asyncio.Future[None] | None]:
        """
        Append an outcome to the journal and start its commit, except for a reply with calls that no one watches.

        The next commit includes such a reply. A ``Stop`` is not appended as a result. Without *io* every outcome counts as watched.

        Returns:
            The recorded outcome, the outcomes of the started commit, and the future of this commit; ``None`` if there is nothing to
            wait for.
        """
        path, effect, seq = item.path, item.effect, item.effect.seq
        at = self._timing.record_time(path, seq, outcome.at)
        writes = (
            self._writes.pop_writes_as_json(item, was_started_earlier=is_start_recorded) if self._writes.pending else ()
        )
        if isinstance(outcome, Stop):
            self._record_partial_answers(item, outcome, at)
            if outcome.begun is not None:
                self.append_stopped_usage(item, outcome.begun, at)
            return attrs.evolve(outcome, at=at), (), None
        settled = self.to_replayed_outcome(item, outcome, at)
        given: Any = settled
        if isinstance(settled, Value) and not settled.inputs and settled.value is not None:
            given = settled.value
        extras = {name: value for name, value in {"attempts": [*attempts], "writes": writes}.items() if value}
        try:
            self._writer.append(Result(path, seq, at, given, extras))
        except StepEngineError as error:
            raise self._pending.stop_with_unrecorded_outcomes(error, [(item, settled)]) from error.__cause__
        if not self._writer.waits:
            return settled, (), None
        self._pending.owed.append((item, settled))
        is_seen = not isinstance(effect, CallModel) or io is None or io.watched or not self._is_reply_unseen(item.plan)
        if not is_seen and _is_reply_with_calls(settled):
            return settled, (), None
        return settled, *self._pending.start_commit()

    # With nobody between the model and its calls, a reply that is lost in a crash has led to nothing: it may wait for
    # the next commit. A handler, a hook or a watcher could already have told somebody of it.
    def _is_reply_unseen(self, plan: RunPlan) -> bool:
        """Return whether only the machine sees replies of this run: it has no handler or hooks and is no tool body."""
        return plan.agent.definition.handle_steps is None and plan.body is None and not plan.agent.hooks

    # Live and replay must see the same value, or a handler would take another way the second time. So what storing
    # changes (secrets that are taken out, errors of classes that only this process knows) is changed before the machine
    # sees it, too. The first `return` is for nearly every outcome: there nothing is changed.
    def to_replayed_outcome(self, item: Item, outcome: Value | Failure, at: int) -> Value | Failure:
        """Return an outcome as a replay reads it: without secrets, with errors that can be stored, at the run's time (replay:K14)."""
        if isinstance(outcome, Value) and outcome.at == at and not self.cleans:
            # The run's clock started with this process, as it does in nearly every run.
            return outcome
        if isinstance(outcome, Failure):
            outcome = Failure(to_storable_error(outcome.error), at, outcome.inputs)
        else:
            outcome = Value(outcome.value, at, outcome.inputs, outcome.body)
        if not self.cleans or isinstance(item.effect, Spawn):
            return outcome
        redactor = self._writer.source.redactor
        members = encode_outcome_members(outcome)
        clean = (
            redactor.redact_keeping_machine_details(members)
            if redactor.may_contain_secret(to_compact_json(members))
            else members
        )
        if clean == members:
            return outcome
        cleaned = decode_outcome({**clean, "at": at})
        if isinstance(cleaned, Value) and isinstance(outcome, Value) and outcome.body is not None:
            # What a body leaves is its caller's, and is not a record.
            return attrs.evolve(cleaned, body=outcome.body)
        return cleaned

    # Of two questions of one effect the first may be answered days before the second. The effect has no result until
    # then, so the answer stands by itself.
    def _record_partial_answers(self, item: Item, stop: Stop, at: int) -> None:
        """Record the answers to some questions of an effect whose others stay open."""
        effect = item.effect
        if not isinstance(effect, AskPerson) or stop.kind != "suspended":
            return
        waiting = {question.id for question in stop.questions}
        self._mail.register_open_questions((item.path, effect.seq), stop.questions)
        for question in effect.questions:
            given = self._answers.find_answer(question)
            if question.id not in waiting and given is not None:
                said = {"question_id": question.id, "answer": encode_stored(to_answer(given, question))}
                self.append_external_input(Input(item.path, effect.seq, at, {"type": "answer", **said}))


def _make_intent_with_durability(item: Item, gather_seq: int | None) -> tuple[Intent, bool]:
    """Return the intent of an effect other than a model call, and whether it must be durable before the effect starts."""
    effect = item.effect
    if isinstance(effect, CallTool):
        form, lasts = encode_call_with_durability(effect, item.plan)
    else:
        form = cast("Mapping[str, Any]", encode_effect(item))
        lasts = must_start_be_durable(item, form)
    line = getattr(effect, "program_line", 0)
    return Intent(item.path, effect.seq, form, gather=gather_seq, program_line=line), lasts


def add_ended_run(stop: Stop, ended: ChildResult | BodyEnd | None) -> Stop:
    """Return *stop* with the ended run that an effect started."""
    if isinstance(ended, BodyEnd):
        return attrs.evolve(stop, body=ended)
    return attrs.evolve(stop, child=ended)


def find_ended_run(outcome: Single) -> ChildResult | BodyEnd | None:
    """Return the ended run in an outcome, or ``None``."""
    if isinstance(outcome, Stop):
        return outcome.child or outcome.body
    if isinstance(outcome, Value) and outcome.body is not None:
        return outcome.body
    value = getattr(outcome, "value", None)
    return value if isinstance(value, ChildResult) else None


def _add_earlier_usage(outcome: Single, earlier: PartialUsage | None) -> Single:
    """Return the outcome of a repeated call with the usage of its lost requests added."""
    if earlier is None or earlier.usage == NOTHING_USED or isinstance(outcome, Stop):
        return outcome
    if isinstance(outcome, Failure):
        if not isinstance(outcome.error, ModelError):
            return outcome
        error = copy.copy(outcome.error)  # a provider may raise the same one again
        error.usage = earlier.usage + (error.usage or Usage())
        return attrs.evolve(outcome, error=error)
    reply = outcome.value
    if not isinstance(reply, ModelReply):
        return outcome
    usage, cost = add_lost_usage(earlier.usage, reply.usage), add_cost(earlier.cost, reply.cost)
    return attrs.evolve(outcome, value=attrs.evolve(reply, usage=usage, cost=cost))


def _is_reply_with_calls(outcome: Single) -> bool:
    """Return whether a model call's outcome is a reply with tool calls that came without user input."""
    if not isinstance(outcome, Value) or outcome.inputs:
        return False
    return ToolCallPart in map(type, outcome.value.content)


@attrs.define(eq=False)
class AttemptsIO(ForwardingIO):
    """The ``IO`` of one model call: adds its failed attempts to a list of record entries."""

    _entries: list[object]

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """Record a failed attempt and report it; return the wait before the retry, if it must wait."""
        entry: dict[str, object] = {"error": encode_stored(to_storable_error(failure.error))}
        self._entries.append(entry | ({"usage": encode_stored(usage)} if usage is not None else {}))
        return super().report_failed_attempt(failure, usage)


@attrs.define(eq=False)
class DeferredIO(ForwardingIO):
    """The ``IO`` of one call of a deferred tool: calls *note* when its body has returned."""

    _note: Callable[[Item], Awaitable[None]]

    def record_waiting_call(self, item: Item) -> Awaitable[None]:
        """Record that the body has returned and the call waits for its result."""
        return self._note(item)
