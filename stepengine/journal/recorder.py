"""
``Recorder``: the middleware that records effects, and answers from the record what was recorded already.

It stands between the meter of limits and the gate, so that a refusal is recorded like any other outcome. The order is
always the same: intent, effect, result, durable, and only then does the machine see it. Recorded too is
what a run looks up when it starts and its time over all processes that worked on it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import attrs

from stepengine.data.effects import (
    CHILD_ENDS,
    RUNS,
    WAITS,
    AskPerson,
    CallBody,
    CallModel,
    CallTool,
    RunInBackground,
    Spawn,
)
from stepengine.data.json import ABSENT
from stepengine.data.messages import ToolCallPart
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Begun, BodyEnd, Failure, Single, Stop, Value
from stepengine.data.questions import Answer, AnswerLike, answered
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.usage import Usage, add_cost
from stepengine.errors import StepEngineError, UnknownOutcome
from stepengine.journal.encoding import (
    bare,
    describe,
    describe_call,
    must_last,
    outcome_members,
    outcome_of,
    storable,
)
from stepengine.journal.history import History
from stepengine.journal.modes import RunToReplay
from stepengine.journal.questions import DOUBT, InDoubt, decision_about
from stepengine.journal.records import Address, Input, Intent, Result, computed_record, shown_address, to_text
from stepengine.journal.run_mailbox import RunMailbox
from stepengine.journal.store import Journal
from stepengine.journal.timing import Pace
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.asking import shown_questions
from stepengine.runtime.failfast import given_up
from stepengine.runtime.performer import IO, Item, Performer, child_path, is_repeatable
from stepengine.runtime.performing import defers, is_deferred
from stepengine.workspace.writes import FileWrite

if TYPE_CHECKING:
    from stepengine.journal.replayer import RecordedPart, Replayer

__all__ = (
    "Attempts",
    "Recorder",
    "RunToRecord",
    "lookups",
    "recall_lookups",
)


# A prompt that is written down in the code comes from the code, so that a change of it is found at the first request;
# one that is computed comes from the record, since it may come out differently each time.
def recall_lookups(history: History, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
    """Return *plan* and *state* of a run with what was looked up for it when it was recorded, as far as it was."""
    if plan.body is not None:
        return plan, state
    prompt = history.prompts.get(plan.path)
    if prompt is not None and not isinstance(plan.definition.system_prompt, str):
        state = attrs.evolve(state, system_prompt=prompt)
    if plan.path in history.windows or (plan.path, 0) in history.intents:
        plan = attrs.evolve(plan, context_window=history.windows.get(plan.path))
    return plan, state


def lookups(plan: RunPlan, state: AgentState) -> Iterator[Input]:
    """Give the records of what was looked up for a run."""
    if plan.body is not None:
        return
    if not isinstance(plan.definition.system_prompt, str):
        yield Input(plan.path, -1, 0, {"type": "system_prompt", "text": state.system_prompt})
    if plan.context_window is not None:
        yield Input(plan.path, -1, 0, {"type": "context_window", "tokens": plan.context_window})


STARTS = frozenset({*RUNS, RunInBackground})
MAX_NOTED_CHARS = 1_000
"""The outcome is lost otherwise, so more than a line of it is shown; a whole document would hide the error."""
Kept: TypeAlias = "Sequence[tuple[Item, Value | Failure]]"
"""Outcomes with what they are outcomes of."""


class RunToRecord(RunToReplay, Protocol):
    """What a recorder needs of its run; see ``JournaledRun``."""

    source: Journal
    past: RecordedPart | None
    replayer: Replayer | None
    fatal: StepEngineError | None
    pace: Pace | None
    waits: bool
    is_traced: bool
    decisions: dict[str, AnswerLike]
    in_doubt: InDoubt
    mail: RunMailbox
    writes: dict[Address, list[FileWrite]]

    @property
    def durable(self) -> Callable[[], asyncio.Future[None] | None]:
        """Commits; the future is done once all that was appended is durable."""

    def writes_of(self, item: Item, *, again: bool) -> list[Mapping[str, Any]]:
        """Return the stored form of the writes of a call."""


class Recorder:
    """
    Records, and answers from the record.

    Args:
        inner: What performs live.
        run: The run, with its journal.
        beside: Who records in the same record already, of a new run.
    """

    def __init__(self, inner: Performer, run: RunToRecord, beside: Recorder | None = None) -> None:
        self._inner = inner
        self._run = run
        self._begin = inner.begin
        self._replayer = run.replayer
        self._cleans = run.source.redactor.shapes
        self._next: dict[str, int] = {}
        self._has_begun = False
        # Replies that the machine has, and that are durable before anything else is begun or anybody is told.
        self._owed: list[tuple[Item, Value | Failure]] = []
        self._unseen: tuple[RunPlan | None, bool] = None, False
        if beside is not None:
            self._begin, self._next, self._owed = beside._begin, beside._next, beside._owed  # noqa: SLF001 - of the same class

    # Write-ahead, as a database does: that an effect begins is written before it begins, or a crash in the middle of it
    # would look as if it had never been asked for, and it would happen twice. What must be on the disk by then, and not
    # only in the file, is what must not happen twice; an idempotent call may be lost with its intent
    # (reliability:JR41).
    #
    # It returns an awaitable and is no coroutine: for a run in memory nothing is waited for. The same holds of `perform`.
    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """
        Compare effects with the record, or write down that they are about to happen.

        Raises:
            ReplayDivergence: when one is not what was recorded at its address.
            JournalWriteFailed: when an intent cannot be written; then nothing of the batch happens.
        """
        run, replayer = self._run, self._replayer
        if run.fatal is not None:
            raise run.fatal
        # The first of a run lasts, whatever it is.
        lasts = not (self._next if replayer is None else self._has_begun)
        fresh: list[Item] = []
        for item in batch:
            is_new, must = self._begin_one(item)
            if is_new:
                fresh.append(item)
                lasts = lasts or must
        if fresh:
            self._has_begun = True
        begin = self._begin
        if not (self._owed or (lasts and fresh and run.waits)):
            return begin(fresh)
        owed, waiting = self._lasting()
        return begin(fresh) if waiting is None else self._begin_after(waiting, owed, fresh)

    def _begin_one(self, item: Item) -> tuple[bool, bool]:
        """Compare an effect with the record or write that it begins; return whether it is new, and whether that must last."""
        run, replayer = self._run, self._replayer
        path, effect, _, gather, _ = item
        kind, seq = type(effect), effect.seq
        together = None if gather is None else gather.effects[0].seq
        if isinstance(effect, CallModel):
            intent, must = Intent(path, seq, effect, "", together), False
        else:
            intent, must = _intent_of(item, together)
        is_new = replayer is None or not replayer.meets(item, intent)
        if is_new:
            if seq != self._next.get(path, 0):
                # Numbers that the machine gave to effects which it then did not ask for are recorded.
                self._append(Input(path, seq, run.timing.last, {"type": "gap"}))
            try:
                run.append(intent)
            except StepEngineError as error:
                raise run.fail(error) from error.__cause__
        self._next[path] = seq + 1
        if kind in RUNS:
            run.mail.begins((path, seq))
        if kind in WAITS and (is_new or self._copies_begun((path, seq))):
            self._keep_waking(item)
        return is_new, must

    # A sync of the disk takes milliseconds, more than all other work of a step; so it is never waited for by itself
    # where it can go with one that comes anyway. That is what is "owed": a reply that only the machine has seen need
    # not be durable before the calls in it begin, as their intents stand behind it in the same file and cannot be
    # durable without it.
    def _lasting(self) -> tuple[Kept, asyncio.Future[None] | None]:
        """
        Commit the intents of effects that must not happen twice, or may be undone: their beginning must outlive a power cut (reliability:JR41).

        So must what people are asked: who has seen a question may answer it, whatever became of the process that asked.
        The first of a run waits, too, so that whatever was paid for belongs to a run that can be resumed. So does whatever
        comes after a reply that is owed: nothing follows from a reply that may be lost.

        Returns:
            What becomes durable with them, and what to wait for until then.
        """
        owed, durable = self._owed.copy(), self._run.durable
        self._owed.clear()
        try:
            return owed, durable()
        except StepEngineError as error:
            raise self._note_unwritten(error, owed) from error.__cause__

    async def _begin_after(self, waiting: asyncio.Future[None], owed: Kept, batch: Sequence[Item]) -> None:
        await self._before_more(waiting, owed)
        await self._inner.begin(batch)

    async def _before_more(self, waiting: asyncio.Future[None], owed: Kept) -> None:
        """Wait until what is owed is durable, if more is to come: a run that is stopped meanwhile ends here."""
        try:
            await waiting
        except StepEngineError as error:
            raise self._note_unwritten(error, owed) from error.__cause__

    def _copies_begun(self, address: Address) -> bool:
        """Return whether the intent of an effect that had begun was just written into a copy of its journal."""
        replayer = self._replayer
        mode = self._run.mode
        # A replay takes over what was recorded when the wait began, with its time.
        return replayer is not None and mode.copies and not mode.takes_over and replayer.was_begun(address)

    def _keep_waking(self, item: Item) -> None:
        """Record when a wait ends at the latest, for whoever wakes runs; the machine alone would compute the same time again."""
        wakes = item.effect.wakes  # type: ignore[union-attr]
        if wakes is not None:
            said = {"type": "wake_time", "until": wakes}
            self._append(Input(item.path, item.effect.seq, self._run.timing.last, said))

    def _append(self, record: Input) -> None:
        try:
            self._run.append(record)
        except StepEngineError as error:
            raise self._run.fail(error) from error.__cause__

    def around(self, inner: Performer) -> Performer:
        """Return who records in one and the same record what *inner* performs, which starts no run."""
        return self if self._replayer is not None else Recorder(inner, self._run, self)

    # The order of these questions is the whole of resuming: a recorded outcome is given; a run that is recorded to its
    # end stops where the record does; what lost its race stays lost; what was begun and has no result is in doubt; and
    # only then is anything performed. Children are asked about first, since they are never answered from a record: they
    # run again over their own.
    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Answer an effect from the record, or perform and record it."""
        run, replayer = self._run, self._replayer
        if run.fatal is not None:
            return self._stop_diverged(run.fatal)
        starts = type(item.effect) in STARTS
        if starts or replayer is None:
            return self._start(item, io) if starts else self._live(item, io)
        address = (item.path, item.effect.seq)
        known = replayer.result(address)
        if known is not None:
            again = type(item.effect) not in CHILD_ENDS and replayer.is_performed(item)
            return self._again(known, item, io) if again else self._answer_from_record(known, item, io)
        if replayer.halts(item):
            return self._halt(item, io)
        if item.gather is not None and replayer.has_lost(item):
            return self._commit(item, given_up(item, 0), [])
        return self._doubtful(item, io) if replayer.was_begun(address) else self._live(item, io)

    # --- from the record ----------------------------------------------------------------------------------------------

    async def _stop_diverged(self, error: StepEngineError) -> Single:
        return Stop("diverged", self._run.timing.last, error)

    async def _answer_from_record(self, known: Result, item: Item, io: IO) -> Single:
        assert self._replayer is not None  # noqa: S101 - it found the result
        run = self._run
        if run.pace is not None:
            await run.pace.reach(known.at)
        is_of_children = type(item.effect) in CHILD_ENDS
        waits = self._replayer.until_cut(known, item) if is_of_children else None
        if waits is not None:
            cut, children = waits
            ended = await io.ends(item, children, cut)
            if cut.done():  # one of them left its record: what is recorded of the wait holds no longer
                return await self._live(item, io)
            if ended is None:
                return Stop("suspended" if run.fatal is None else "diverged", run.timing.last, run.fatal)
        outcome = self._replayer.answer(known, item)
        return await self._when_ended(outcome, item, io) if is_of_children else outcome

    async def _again(self, known: Result, item: Item, io: IO) -> Single:
        """Perform a recorded effect once more; its result must be the same."""
        assert self._replayer is not None  # noqa: S101 - it found the result
        outcome = await self._inner.perform(item, io)
        if not isinstance(outcome, Stop):
            outcome = self._as_read_back(item, outcome, known.at)
        return self._replayer.compare(known, outcome, item)

    async def _when_ended(self, outcome: Single, item: Item, io: IO) -> Single:
        """Return what is recorded of children in the background, once these have come to their recorded ends again."""
        if not isinstance(outcome, Value):
            return outcome
        ended = await io.ends(item, outcome.value.done)
        if ended is None:
            return Stop("cancelled", self._run.timing.last, self._run.fatal)
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))

    # A replay ends where its record ends, and as that one did. Only a run that was suspended there still waits for
    # something: that is told to the tree, so that its result names the questions and times again. A run that was
    # cancelled or cut off waits for nothing.
    async def _halt(self, item: Item, io: IO) -> Single:
        assert self._replayer is not None  # noqa: S101 - it said that nothing is live
        questions = shown_questions(item) if isinstance(item.effect, AskPerson) else ()
        stop = self._replayer.halt(item.path, questions, waits=type(item.effect) in WAITS)
        if stop.kind == "suspended":
            io.stands(item)
        return attrs.evolve(stop, begun=self._replayer.begun(item))

    def _start(self, item: Item, io: IO) -> Awaitable[Single]:
        """Start what an effect starts: a child in the background, or a run that is waited for."""
        is_background = isinstance(item.effect, Spawn) and item.effect.is_background
        return self._start_in_background(item, io) if is_background else self._start_run(item, io)

    async def _start_in_background(self, item: Item, io: IO) -> Single:
        """Start a child in the background; the start is an outcome at once, and the end is recorded separately."""
        replayer, address = self._replayer, (item.path, item.effect.seq)
        known = replayer.result(address) if replayer is not None else None
        if replayer is not None:
            refused = replayer.refused_run(address, item)
            if refused is not None:
                return refused
            if known is None and replayer.halts(item):
                return await self._halt(item, io)
        outcome = await self._inner.perform(item if known is None else item._replace(has_begun=True), io)
        if self._run.fatal is not None:
            return Stop("diverged", self._run.timing.last, self._run.fatal)
        if known is None or replayer is None:
            return await self._commit(item, outcome, [])
        return replayer.answer(known, item)

    async def _start_run(self, item: Item, io: IO) -> Single:
        """Run a child, or the body of a tool."""
        if self._replayer is not None:
            return await self._start_again(item, io, self._replayer)
        outcome, fatal = await self._inner.perform(item, io), self._run.fatal
        if fatal is not None:
            return _halted_with(Stop("diverged", self._run.timing.last, fatal), _child(outcome))
        return await self._kept_run(item, outcome)

    # A child that is recorded to have ended is run all the same. Its result alone would answer the parent, but then
    # nobody would compare what it asks for, a divergence below would go unseen, and an output of the author's own type
    # could not be made from JSON.
    async def _start_again(self, item: Item, io: IO, replayer: Replayer) -> Single:
        """Run a child, or the body of a tool, over its own records; the result in its parent's record serves as a check."""
        run, address = self._run, (item.path, item.effect.seq)
        instead = await self._instead_of_run(item, io, replayer)
        if instead is not None:
            return instead
        known, begun = replayer.result(address), replayer.has_begun(address)
        if item.gather is not None and replayer.has_lost(item):
            replayer.give_up(child_path(*address))
            item = item._replace(gather=None)
        # One that is recorded to have ended comes to that end, whoever is first this time in a race that it was part of.
        asked = item if known is None else item._replace(gather=None)
        outcome = await self._inner.perform(asked._replace(has_begun=True) if begun else asked, io)
        if run.fatal is not None:
            return _halted_with(Stop("diverged", run.timing.last, run.fatal), _child(outcome))
        if known is not None:
            if self._cleans and isinstance(outcome, Value) and isinstance(item.effect, CallBody):
                outcome = self._as_read_back(item, outcome, known.at)
            confirmed = replayer.confirm(known, outcome, item)
            if confirmed is not None:
                return confirmed
        return await self._kept_run(item, outcome) if replayer.is_live(item.path) else self._ended_with(item, outcome)

    async def _kept_run(self, item: Item, outcome: Single) -> Single:
        """Return the outcome of a child, or of the body of a tool, that is durable; what was worked out in a body stands before it."""
        if isinstance(outcome, Value) and outcome.body is not None and outcome.body.computed:
            address = (item.path, item.effect.seq)
            self._append(computed_record(address, self._run.timing.of(*address, outcome.at), outcome.body.computed))
        return await self._commit(item, outcome, [])

    async def _instead_of_run(self, item: Item, io: IO, replayer: Replayer) -> Single | None:
        """Return the outcome of a child, or of the body of a tool, that does not start according to the record; else ``None``."""
        address = (item.path, item.effect.seq)
        refused = replayer.refused_run(address, item)
        if refused is not None:
            return refused
        if item.gather is not None and replayer.has_lost(item):
            return None if replayer.has_begun(address) else await self._commit(item, given_up(item, 0), [])
        return await self._halt(item, io) if replayer.halts_before_run(address, item) else None

    def _ended_with(self, item: Item, outcome: Single) -> Single:
        """Return how a run that started another stops where its record stops."""
        assert self._replayer is not None  # noqa: S101 - it said that nothing is live
        child = _child(outcome)
        waits = isinstance(outcome, Stop) and outcome.kind == "suspended"
        stop = self._replayer.halt(item.path, child.questions if child is not None else (), waits=waits)
        return _halted_with(stop, child)

    async def _keep_waiting(self, item: Item) -> None:
        """Keep, durably, that the body of a call has returned: its result may come to another process."""
        self._append_waits(item)
        owed, waiting = self._lasting() if self._run.waits else ((), None)
        if waiting is not None:
            await self._before_more(waiting, owed)

    def _append_waits(self, item: Item) -> None:
        self._append(Input(item.path, item.effect.seq, self._run.timing.last, {"type": "result_pending"}))

    # --- live ---------------------------------------------------------------------------------------------------------

    def _note_stopped(self, item: Item, io: IO) -> None:
        """Record what a model call had used when it was stopped; if that fails, the run ends, as it does anyway."""
        begun = io.begun(item) if isinstance(item.effect, CallModel) else None
        if begun is not None:
            with contextlib.suppress(StepEngineError):
                self._keep_begun(item, begun, self._run.timing.last)

    def _keep_begun(self, item: Item, begun: Begun, at: int) -> None:
        cost = {} if begun.cost is None else {"cost": str(begun.cost)}
        said = {"type": "partial_usage", "usage": bare(begun.usage), **cost}
        self._append(Input(item.path, item.effect.seq, at, said))

    # The process died between intent and result, and nothing here can know whether the mail was sent. What is harmless
    # twice is done again; what waits is waited for again; of the rest somebody decides (`in_doubt`), and that decision
    # is recorded like a result, so that it is never asked for a second time (replay:J31).
    async def _doubtful(self, item: Item, io: IO) -> Single:
        """Deal with an effect that was begun and has no result."""
        run, address = self._run, (item.path, item.effect.seq)
        assert run.past is not None  # noqa: S101 - it says what was begun
        if run.mode.copies:
            self._copy_begun(item, run.past.history)
        # Whoever sent its result knows that it happened.
        is_waiting = is_deferred(item) and (address in run.past.history.waiting or address in run.mail.results_sent)
        if is_waiting and f"{DOUBT}{shown_address(*address)}" not in run.decisions:
            return await self._live(item._replace(has_begun=True), io, again=True)
        if type(item.effect) in WAITS:
            return await self._live(item._replace(has_begun=True), io, again=True)
        if is_repeatable(item):
            lost = self._lost_attempt(item) if isinstance(item.effect, CallModel) else ()
            return await self._live(item, io, lost, again=True)
        decided = decision_about(item, run.in_doubt, run.decisions, run.past.history)
        if decided is None:
            return await self._live(item, io, again=True)
        self._keep_taken(item, decided)
        return await self._commit(item, decided, [])

    def _copy_begun(self, item: Item, history: History) -> None:
        """Copy what is known of an effect into a rewritten journal, since it may have no result this time either."""
        address = (item.path, item.effect.seq)
        if address in history.waiting:
            self._append_waits(item)
        begun = history.begun.get(address)
        if begun is not None:
            self._keep_begun(item, begun, self._run.timing.last)

    def _lost_attempt(self, item: Item) -> list[object]:
        """Return the attempt of a process that ended before the reply was recorded, with what is known of its usage."""
        assert self._replayer is not None  # noqa: S101 - it said that the call was begun
        lost = {"error": bare(UnknownOutcome("the process ended before the reply was recorded"))}
        begun = self._replayer.begun(item)
        return [lost if begun is None else {**lost, "usage": bare(begun.usage)}]

    # What was used is written down also where the call is stopped: the exception takes nothing along, and nobody who
    # comes later could know.
    async def _live(self, item: Item, io: IO, attempts: Sequence[object] = (), *, again: bool = False) -> Single:
        run, effect, plan = self._run, item.effect, item.plan
        if run.fatal is not None and self._replayer is None:
            return Stop("diverged", run.timing.last, run.fatal)
        kind, noted, noting = type(effect), attempts, io
        if kind is CallModel:
            noted = [*attempts]
            noting = quick_attempts((io, noted, io.emit))
        elif kind is CallTool and defers(plan.tools.get(effect.tool_name)) and not run.source.stable:  # type: ignore[union-attr]
            # Whether a result comes before its body has returned is a matter of time, and a stable recording tells of none.
            noting = DeferredIO(io, self._keep_waiting)
        try:
            outcome: Any = await self._inner.perform(item, noting)
        except BaseException:
            self._note_stopped(item, io)
            raise
        if again and self._replayer is not None:
            outcome = _with_earlier(outcome, self._replayer.begun(item))
        kept, owed, waiting = self._keep(item, outcome, noted, io, again=again)
        if waiting is not None:
            await self._until(waiting, owed)
        return kept

    async def _commit(self, item: Item, outcome: Single, attempts: Sequence[object]) -> Single:
        """Return an outcome that is durable; several that finish together share one commit."""
        kept, owed, waiting = self._keep(item, outcome, attempts)
        if waiting is not None:
            await self._until(waiting, owed)
        return kept

    # Encoded before anybody sees it: what cannot be stored must fail here, at the effect that gave it, and not when the
    # run is read back. What the machine gets is what a replay will get (`_as_read_back`).
    def _keep(
        self, item: Item, outcome: Single, attempts: Sequence[Any], io: IO | None = None, *, again: bool = False
    ) -> tuple[Single, Kept, asyncio.Future[None] | None]:
        """
        Write down an outcome, and let it be made durable, unless that may be owed: *io* tells who watches, ``None`` that it must not be.

        Returns:
            The outcome as it is kept, what becomes durable with it, and what to wait for until then.
        """
        run = self._run
        path, effect, plan, _, _ = item
        seq = effect.seq
        at = run.timing.of(path, seq, outcome.at)
        writes = run.writes_of(item, again=again) if run.writes else ()
        if isinstance(outcome, Stop):
            self._keep_answers(item, outcome, at)
            if outcome.begun is not None:
                self._keep_begun(item, outcome.begun, at)
            return attrs.evolve(outcome, at=at), (), None
        settled = self._as_read_back(item, outcome, at)
        given: Any = settled
        if isinstance(settled, Value) and not settled.inputs and settled.value is not None:
            given = settled.value
        try:
            run.append(Result(path, seq, at, given, tuple(attempts), None, writes))
        except StepEngineError as error:
            raise self._note_unwritten(error, [(item, settled)]) from error.__cause__
        if not run.waits:
            return settled, (), None
        self._owed.append((item, settled))
        is_seen = not isinstance(effect, CallModel) or io is None or io.watched or not self._is_unseen(plan)
        if not is_seen and _asks_for_more(settled):
            return settled, (), None
        return settled, *self._lasting()

    # With nobody between the model and its calls, a reply that is lost in a crash has led to nothing: it may wait for
    # the next commit. A handler, a hook or a watcher could already have told somebody of it.
    def _is_unseen(self, plan: RunPlan) -> bool:
        """Return whether nobody but the machine sees a reply: the run has no handler and no hooks, and nothing traces it."""
        known, is_unseen = self._unseen
        if known is not plan:
            is_alone = plan.definition.handle_steps is None and plan.body is None
            is_unseen = is_alone and not plan.hooks and not self._run.is_traced
            self._unseen = plan, is_unseen
        return is_unseen

    async def _until(self, waiting: asyncio.Future[None] | None, owed: Kept) -> None:
        """
        Wait until what is owed is durable, and do not stop waiting when the run is stopped: what has happened is not called cancelled.

        A run that was cancelled meanwhile is noticed by whoever drives it.
        """
        try:
            while waiting is not None:
                try:
                    return await waiting
                except asyncio.CancelledError:
                    # Cancelling took the future along. The commit goes on, and the next one ends no sooner.
                    waiting = self._run.durable()
        except StepEngineError as error:
            raise self._note_unwritten(error, owed) from error.__cause__
        return None

    def _note_unwritten(self, error: StepEngineError, owed: Kept) -> StepEngineError:
        """Say in the error what happened although no record of it could be kept (reliability:JR09), and let nothing go on."""
        for item, outcome in owed:
            _note_outcome(error, item, outcome)
        return self._run.fail(error)

    # Live and replay must see the same value, or a handler would take another way the second time. So what storing
    # changes (secrets that are taken out, errors of classes that only this process knows) is changed before the machine
    # sees it, too. The first `return` is for nearly every outcome: there nothing is changed.
    def _as_read_back(self, item: Item, outcome: Value | Failure, at: int) -> Value | Failure:
        """Return an outcome as it will be read back, so that recording and replay see the same (replay:K14)."""
        if isinstance(outcome, Value) and outcome.at == at and not self._cleans:
            # The run's clock started with this process, as it does in nearly every run.
            return outcome
        if isinstance(outcome, Failure):
            outcome = Failure(storable(outcome.error), at, outcome.inputs)
        else:
            outcome = Value(outcome.value, at, outcome.inputs, outcome.body)
        if not self._cleans or isinstance(item.effect, Spawn):
            return outcome
        redactor = self._run.source.redactor
        members = outcome_members(outcome)
        clean = redactor.seen(members) if redactor.suspicious(to_text(members)) else members
        if clean == members:
            return outcome
        cleaned = outcome_of({**clean, "at": at})
        if isinstance(cleaned, Value) and isinstance(outcome, Value) and outcome.body is not None:
            # What a body leaves is its caller's, and is not a record.
            return attrs.evolve(cleaned, body=outcome.body)
        return cleaned

    def _keep_taken(self, item: Item, outcome: Single) -> None:
        """Record who stated the outcome of an effect in doubt: nothing but their word supports it."""
        run, seq = self._run, item.effect.seq
        given = run.decisions.get(f"{DOUBT}{shown_address(item.path, seq)}")
        if not isinstance(outcome, Stop) and isinstance(given, Answer) and given.result is not ABSENT:
            said = {"by": given.by, "reason": given.reason}
            self._append(Input(item.path, seq, run.timing.last, {"type": "manual_result", **said}))

    # Of two questions of one effect the first may be answered days before the second. The effect has no result until
    # then, so the answer stands by itself.
    def _keep_answers(self, item: Item, stop: Stop, at: int) -> None:
        """Keep what was answered while other questions of the same effect stay open: no answer is lost."""
        run = self._run
        effect = item.effect
        if not isinstance(effect, AskPerson) or stop.kind != "suspended":
            return
        waiting = {question.id for question in stop.questions}
        run.mail.leaves_open((item.path, effect.seq), stop.questions)
        for question in effect.questions:
            given = run.answers.get(question.id, run.answers.get(question.text))
            if question.id not in waiting and given is not None:
                said = {"question_id": question.id, "answer": bare(answered(given, question))}
                self._append(Input(item.path, effect.seq, at, {"type": "answer", **said}))


def _intent_of(item: Item, together: int | None) -> tuple[Intent, bool]:
    """Return the record that an effect begins, no model call, and whether that must last."""
    path, effect, plan, _, _ = item
    if isinstance(effect, CallTool):
        form, lasts = describe_call(effect, plan)
        return Intent(path, effect.seq, form, "", together, None, "", None, effect.program_line), lasts
    form = cast("Mapping[str, Any]", describe(item))
    line = getattr(effect, "program_line", 0)
    return Intent(path, effect.seq, form, "", together, None, "", None, line), must_last(item, form)


def _halted_with(stop: Stop, ended: ChildResult | BodyEnd | None) -> Stop:
    """Return *stop* with how the run ended that an effect started."""
    if isinstance(ended, BodyEnd):
        return attrs.evolve(stop, body=ended)
    return attrs.evolve(stop, child=ended)


def _child(outcome: Single) -> ChildResult | BodyEnd | None:
    """Return how the run ended that an effect started."""
    if isinstance(outcome, Stop):
        return outcome.child or outcome.body
    if isinstance(outcome, Value) and outcome.body is not None:
        return outcome.body
    value = getattr(outcome, "value", None)
    return value if isinstance(value, ChildResult) else None


def _with_earlier(outcome: Single, earlier: Begun | None) -> Single:
    """Return the outcome of a call that was made again, with what it had used when it was stopped before."""
    if earlier is None or not isinstance(outcome, Value) or not isinstance(outcome.value, ModelReply):
        return outcome
    reply = outcome.value
    usage, cost = earlier.usage + (reply.usage or Usage()), add_cost(earlier.cost, reply.cost)
    return attrs.evolve(outcome, value=attrs.evolve(reply, usage=usage, cost=cost))


def _note_outcome(error: StepEngineError, item: Item, outcome: Value | Failure) -> None:
    value = outcome.value if isinstance(outcome, Value) else getattr(outcome, "error", None)
    said = str(getattr(value, "text", value))[:MAX_NOTED_CHARS]
    asked = Intent(item.path, item.effect.seq, describe(item))
    what = f"{asked.type} {asked.path}#{asked.seq}"
    error.add_note(f"{what} happened, but its result is not in the journal, so resuming calls it in doubt: {said}")


def _asks_for_more(outcome: Single) -> bool:
    """Return whether an outcome is a reply with calls, so that what comes of it is an effect first of all."""
    if not isinstance(outcome, Value) or outcome.inputs:
        return False
    return ToolCallPart in map(type, outcome.value.content)


# A wrapper for one call in place of a field of the effect: the effect is a frozen value that the machine made, and
# knows no attempts.
class Attempts(tuple[Any, ...]):
    """
    The ``IO`` of one model call: notes its failed attempts, passes everything on.

    It is made of the other ``IO``, a list of what is noted and what shows events; a tuple, as one is made for each model call.
    """

    __slots__ = ()

    _io: IO = property(itemgetter(0))  # type: ignore[assignment]
    _noted: list[object] = property(itemgetter(1))  # type: ignore[assignment]
    emit: Any = property(itemgetter(2), doc="Shows an event.")
    # As in ``RunTree``, in which the question ends.
    watched = property(attrgetter("_io.watched"), doc="Whether anybody is shown events.")

    def attempt(self, failure: Failure, usage: Usage | None) -> None:
        """Note a failed attempt."""
        entry: dict[str, object] = {"error": bare(storable(failure.error))}
        self._noted.append(entry | ({"usage": bare(usage)} if usage is not None else {}))
        self._io.attempt(failure, usage)

    def begun(self, item: Item) -> Begun | None:
        """Return what a model call had used that was stopped."""
        return self._io.begun(item)

    def waits(self, item: Item) -> Awaitable[None]:
        """Take note that a call waits."""
        return self._io.waits(item)

    def ends(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> Awaitable[dict[str, Any] | None]:
        """Return how children ended."""
        return self._io.ends(item, paths, cut)

    def stands(self, item: Item) -> None:
        """Take note that a wait goes on."""
        self._io.stands(item)

    def drive(self, plan: RunPlan, state: AgentState, path: str) -> Awaitable[Finished]:
        """Run a child."""
        return self._io.drive(plan, state, path)


quick_attempts = partial(tuple.__new__, Attempts)


class DeferredIO:
    """The ``IO`` of one call of a deferred tool: says when its body has returned, passes everything on."""

    __slots__ = ("_io", "attempt", "begun", "drive", "emit", "ends", "stands", "waits")

    def __init__(self, io: IO, waits: Callable[[Item], Awaitable[None]]) -> None:
        self._io = io
        self.waits = waits
        self.emit, self.attempt, self.begun, self.drive = io.emit, io.attempt, io.begun, io.drive
        self.ends, self.stands = io.ends, io.stands

    @property
    def watched(self) -> bool:
        """Whether anybody is shown events."""
        return self._io.watched
