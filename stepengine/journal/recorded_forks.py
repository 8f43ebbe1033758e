"""
A fork with ``tools=``: a recorded run is repeated up to an address, then continues with new model calls.

Recorded calls are not performed again. After the address, a tool call is answered by an equal recorded call, by a function of the
caller or by the tool itself, if *tools* allows it. Any other call ends the run with an error. Siblings that started together with the
effect at the address stay as recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
from attrs import frozen

from stepengine.data.effects import KINDS, AskPerson, CallFunction, CallModel, CallTool
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunResult
from stepengine.data.usage import add_cost
from stepengine.errors import JournalCorrupt, JournalError, LimitExceeded, ReplayDivergence
from stepengine.journal.history import parse_created
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.modes import OpenJournal
from stepengine.journal.permission_reset import refuse_approvals_of_others
from stepengine.journal.provenance import are_calls_trusted, replace_records_by_derived
from stepengine.journal.questions import make_edited_outcome
from stepengine.journal.record_ends import RecordEnds
from stepengine.journal.recorded_machines import RecordedMachines
from stepengine.journal.recorded_part import AllowedDifferences, RecordedPart, parse_address
from stepengine.journal.records import NO_EXTRAS, Address, Head, Intent, Result, format_address
from stepengine.journal.replayer import Replayer
from stepengine.journal.sources import JournalLike, as_journal, bind_fork_journal, make_fork_id
from stepengine.journal.store import Journal
from stepengine.machine.plan import Finished
from stepengine.runtime.limits import CallEstimate, CallQueue, MeteredCall, SpendingLedger
from stepengine.runtime.performer import IO, Item, Performer, is_repeatable

ForkTools: TypeAlias = Literal["recorded", "idempotent", "working-copy"]


@frozen
class ExternalCall:
    """
    A call of a tool, or of a function of ``Perform``.

    Attributes:
        name: The tool's name, or the function's.
        input: The tool's input; for a function ``{"args": [...], "kwargs": {...}}``.
        address: The address of its effect, such as ``"#5"``.
        result: The result of a recorded call: a ``ToolResult``, the JSON value of a ``Perform``, or the error.
    """

    name: str
    input: Mapping[str, Any]
    address: str = ""
    result: Any = None


Simulator: TypeAlias = Callable[[ExternalCall, Sequence[ExternalCall]], Any]
"""
Makes up what a call gives that is not recorded, from the recorded calls of the same name, which have results.

It returns a ``ToolResult``, text or JSON, an error of ``stepengine.errors`` for a failure, or ``None`` when it cannot say.
"""


class SharedBudget:
    """
    A shared spending limit of several runs. Model calls run together while the most that they may cost fits; the others wait.

    Args:
        dollars: The limit in US dollars; ``None`` for no limit.
        allow_unpriced: Whether models without a known price may be called, one call at a time.

    Attributes:
        dollars: The limit in US dollars, or ``None``.
        unpriced: The number of calls with an unknown price, which are not included in ``spent``.
        is_empty: Whether a call was refused because it would exceed the limit.

    Raises:
        JournalError: when *dollars* is not an amount above 0.
    """

    def __init__(self, dollars: Decimal | float | str | None = None, *, allow_unpriced: bool = False) -> None:
        self.dollars = None if dollars is None else _parse_dollars(dollars)
        self.unpriced = 0
        self.is_empty = False
        limits = Limits(max_cost_usd=self.dollars, allow_unpriced=allow_unpriced)
        self._ledger = SpendingLedger(limits, limits)
        self._queue = CallQueue()

    @property
    def spent(self) -> Decimal:
        """The amount spent so far in US dollars, without calls of unknown price."""
        return self._ledger.cost

    async def reserve(self, estimate: CallEstimate) -> MeteredCall:
        """
        Reserve money for a model call; wait for the costs of running calls while the call does not fit.

        Raises:
            LimitExceeded: when the limit does not allow it.
        """
        call = MeteredCall(self._ledger, estimate)
        self._queue.admit_refuse_or_queue(call)
        await self._queue.wait_for_turn(call)
        if call.error is None:
            return call
        if call.error.kind == "unpriced_model":
            msg = f"the budget is {self.dollars} US dollars, but the price of the model {estimate.model!r} is unknown; pass Engine(pricing=...) that knows it"
        else:
            self.is_empty = True
            msg = f"{self.spent} of the budget of {self.dollars} US dollars are spent; the next model call needs about {estimate.cost}"
        raise LimitExceeded(msg, kind=call.error.kind, limit=call.error.limit)

    def settle(self, call: MeteredCall, cost: Decimal | None) -> None:
        """Replace the reservation of a call by its cost. An unknown cost counts as the lower bound of the estimate."""
        known = (call.estimate.cost if self.dollars is not None else None) if cost is None else cost
        if known is None:
            self.unpriced += 1
        else:
            self._ledger.add_usage(0, known)
        self._queue.end_call(call)

    async def perform_within_budget(self, estimate: CallEstimate, perform: Callable[[], Awaitable[Single]]) -> Single:
        """
        Perform a model call once the budget can reserve money for it, and return the outcome.

        Raises:
            LimitExceeded: when the limit does not allow it.
        """
        call = await self.reserve(estimate)
        cost: Decimal | None = None
        try:
            outcome = await perform()
            reply = outcome.value if isinstance(outcome, Value) else None
            cost = reply.cost if isinstance(reply, ModelReply) else None
        finally:
            self.settle(call, cost)
        return outcome

    @property
    def spent_if_known(self) -> Decimal | None:
        """The amount spent, or ``None`` if the price of a call is unknown."""
        return None if self.unpriced else self.spent


def _parse_dollars(dollars: Decimal | float | str) -> Decimal:
    """Return a positive amount of dollars; raise ``JournalError`` for anything else."""
    try:
        amount = Decimal(str(dollars))
    except InvalidOperation:
        amount = Decimal("NaN")
    if amount.is_finite() and amount > 0:
        return amount
    msg = f"a budget must be an amount of US dollars above 0, such as 0.50, not {dollars!r}"
    raise JournalError(msg)


@frozen
class ForkReport:
    """
    The report of a recorded run that was repeated from one address on.

    Attributes:
        result: The result of the run. If a call could not be answered, the status is ``failed`` and the real end is unknown.
        broke_at: The first effect that differs from the record, such as ``"#5"``; ``""`` for a run that matched its record.
        difference: The difference of that effect; ``None`` for an address that the caller named.
        by_request: Whether a model request differs; if not, the handler requests another effect.
        served: The number of tool calls and functions after the fork address that the record answered.
        simulated: The number of those that the caller's function answered.
        performed: The number of those that were performed, since they may be repeated.
        refused: The call that could not be answered and ended the run, or ``None``.
        reused: The number of model calls after the fork address that the record answered.
        model_calls: The number of model calls that were made.
        cost: The cost of these in US dollars; ``None`` if unknown.
        is_unpaid: Whether the budget refused a model call, so that the real end is unknown.
        journal: The journal of the fork; its head names the original run and the fork address.
    """

    result: RunResult
    broke_at: str
    difference: ReplayDivergence | None
    by_request: bool
    served: int
    simulated: int
    performed: int
    refused: ExternalCall | None
    reused: int
    model_calls: int
    cost: Decimal | None
    is_unpaid: bool
    journal: Journal


@attrs.define
class _ForkCounts:
    """The counts of one fork after its place."""

    broke_at: str = ""
    difference: ReplayDivergence | None = None
    by_request: bool = False
    served: int = 0
    simulated: int = 0
    performed: int = 0
    refused: ExternalCall | None = None
    reused: int = 0
    model_calls: int = 0
    cost: Decimal | None = attrs.field(factory=Decimal)
    is_unpaid: bool = False


@frozen
class _ForkRules:
    """The rules for continuing a fork after its place."""

    at: Address | None
    tools: ForkTools
    simulate: Simulator | None
    reuse: bool


async def fork_from_record(
    journal: JournalLike,
    launch: Callable[[JournaledRun], Awaitable[RunResult]],
    *,
    at: int | str | None = None,
    tools: ForkTools = "recorded",
    simulate: Simulator | None = None,
    reuse: bool = True,
    budget: SharedBudget | Decimal | float | str | None = None,
    into: JournalLike | None = None,
    trust: bool | None = None,
) -> ForkReport:
    """
    Run a recorded run again from one address on; the journal is only read.

    Args:
        journal: The journal, or the path of its file.
        launch: Runs a run to its end.
        at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none. By default the
            effect before the first difference.
        tools: The otherwise unanswered calls that are performed: none (``"recorded"``), those of tools that are
            ``idempotent`` or ``read_only`` and of ``Perform.idempotent`` (``"idempotent"``), or all (``"working-copy"``),
            for tools that work on a disposable copy.
        simulate: Returns simulated results for calls that are not recorded; see ``Simulator``.
        reuse: Whether a model call after the fork address is answered by an equal recorded one.
        budget: The limit for model calls in US dollars, or a ``SharedBudget`` that several forks share.
        into: The new journal; by default one in memory.
        trust: Whether the journal is this user's. If not, a person is asked about each call that only the journal requests.
            ``None``: the user's state folder decides.

    Raises:
        JournalError: when the journal is damaged or of a newer version, has no such effect, or *into* is not empty; when
            *simulate* fails; when calls may be performed, and a journal that is not this user's holds approvals.
        ReplayDivergence: when the run differs from its record before *at*.
    """
    source = as_journal(journal)
    if tools not in get_args(ForkTools):
        msg = f"tools must be one of {', '.join(get_args(ForkTools))}, not {tools!r}"
        raise JournalError(msg)
    rules = _ForkRules(find_address_after(source, at), tools, simulate, reuse)
    if tools != "recorded":
        refuse_approvals_of_others(source, source.history(), trust=trust)
    shared = budget if isinstance(budget, SharedBudget) else SharedBudget(budget)
    count = _ForkCounts()
    asks_about_calls = tools != "recorded" and not are_calls_trusted(source, trust=trust)
    leeway = AllowedDifferences(asks_about_calls=asks_about_calls)
    run = JournaledRun.fork(
        source,
        partial(ForkReplayer, rules=rules, count=count),
        lambda inner, estimate: _CountingPerformer(inner, count, shared, estimate),
        leeway,
    )
    try:
        result = await launch(run)
    finally:
        run.writer.close()
    _check_reached_fork_address(result.error, source, rules, count)
    made = _label_and_store_fork(run.writer.journal, count, into, since=run.timing.takeover_ms or 0)
    return ForkReport(attrs.evolve(result, journal=made), **attrs.asdict(count, recurse=False), journal=made)


def find_address_after(source: Journal, at: int | str | None) -> Address | None:
    """
    Return the first effect after *at*, the last copied effect; ``None`` if the fork starts at the first difference.

    Raises:
        JournalError: when nothing is recorded after it.
    """
    if at is None:
        return None
    path, last = parse_address(at)
    address = (path, last + 1)
    if address not in source.history().intents:
        msg = f"{source.name} has no effect after {format_address(path, last)} to request again"
        raise JournalError(msg)
    return address


def _check_reached_fork_address(
    error: BaseException | None, source: Journal, rules: _ForkRules, count: _ForkCounts
) -> None:
    """Raise the journal error that stopped the run, or an error if the run ended before its fork address."""
    if isinstance(error, JournalError) and count.refused is None:
        raise error
    if rules.at is not None and not count.broke_at:
        where = format_address(*rules.at)
        msg = f"the run ended before effect {where} of {source.name} was requested: {error or 'the code now does less'}"
        raise JournalError(msg) from error


def _label_and_store_fork(journal: Journal, count: _ForkCounts, into: JournalLike | None, *, since: int) -> Journal:
    """Write id, origin and start time of a fork into its head, copy it to *into* if given, and return its journal."""
    records = journal.records()
    run = ""
    if count.broke_at and records and isinstance(records[0], Head):
        head = records[0]
        run = make_fork_id(head.run)
        records[0] = attrs.evolve(
            head, run=run, parent={"run": head.run, "at": count.broke_at}, since=since, workspace="", line=None
        )
        replace_records_by_derived(journal, records, journal)
    if into is None:
        return journal
    name = run or str(records[0].run) if records and isinstance(records[0], Head) else ""
    target = bind_fork_journal(as_journal(into), name)
    replace_records_by_derived(target, journal.records(), journal)
    return target


class _ForkEnds(RecordEnds):
    """The ends of the runs in a fork. After the fork address, runs are live and wait for answers."""

    def can_perform_effects(self, path: str) -> bool:
        """Return whether effects without result may be performed: after the fork's address, in a run without a recorded end."""
        return bool(self._past.cut) and self.find_own_or_enclosing_end(path) is None

    def make_record_end_stop(self, path: str, questions: tuple[Question, ...], *, waits: bool = False) -> Stop:
        """Return the stop of a run where its record stops, or where it waits for an answer."""
        if self._past.cut and (questions or waits):
            return Stop("suspended", self._timing.last, questions=questions)
        return super().make_record_end_stop(path, questions, waits=waits)


class ForkReplayer(Replayer):
    """
    Answers the effects of a fork: from the record up to the fork address, then by the rules of the fork.

    Args:
        journal: The journal of the run.
        past: The recorded part of the run.
        machines: The machines of the tree.
        rules: The rules after the fork address.
        count: The counts for the report.
    """

    def __init__(
        self,
        journal: OpenJournal,
        past: RecordedPart,
        machines: RecordedMachines,
        *,
        rules: _ForkRules,
        count: _ForkCounts,
    ) -> None:
        super().__init__(journal, past, machines)
        self._rules = rules
        self._count = count
        self.ends = _ForkEnds(past, journal.timing, is_record_only=False)
        # Results that are given to effects which are not recorded at their own address.
        self._given: dict[Address, Result] = {}
        self._by_name: dict[tuple[str, str], list[ExternalCall]] | None = None
        self._waiting: dict[Address, asyncio.Future[None]] = {}

    @property
    def _has_left_record(self) -> bool:
        return bool(self._past.cut)

    def match_with_record(self, item: Item, requested: Intent) -> bool:
        """
        Match an effect with the record; return True if a record or a rule answers it, or the run stops before it.

        False means that the effect is performed. The record is discarded from the fork's address on, or from the first difference.

        Raises:
            ReplayDivergence: when the effect differs from the record before the fork address, or nothing may answer it after.
        """
        address = item.address
        if address == self._rules.at:
            self._discard_record_from(address)
        known = self._past.find_intent(address)
        if known is None:
            return self._try_answer_unrecorded(requested, item)
        if self._has_left_record and not requested.starts_child_or_body and self._past.find_result(address) is None:
            return self._try_answer_by_rules(requested, item)  # it was begun when a crash ended the record
        if self._past.is_same_effect(known, requested) or self._past.was_difference_accepted(address, requested.fp):
            self._past.mark_used(address)
            self._writer.append(requested)
            return True
        error = self._errors.make_changed_error(known, requested, item)
        self._leave_record_or_raise(address, error, is_model_request=known.type == requested.type == "model_call")
        return self._try_answer_by_rules(requested, item)

    def _try_answer_unrecorded(self, requested: Intent, item: Item) -> bool:
        """
        Return True if an effect without a valid record is answered, or its run stops before it; False if it is performed.

        Raises:
            ReplayDivergence: when the fork has not reached its address, or nothing may answer the effect.
        """
        if requested.address in self._past.history.intents:
            return self._try_answer_by_rules(requested, item)
        ended = self.ends.find_own_or_enclosing_end(item.path)
        if ended is not None and self.ends.find_stop(ended) is not None:
            return True  # it stops there, as it did
        if not self._has_left_record or ended is not None:
            if ended is None and not self._past.history.is_complete:
                return True
            error = self._errors.make_extra_effect_error(requested, item)
            self._leave_record_or_raise(requested.address, error, is_model_request=False)
        return self._try_answer_by_rules(requested, item)

    def _leave_record_or_raise(self, address: Address, error: ReplayDivergence, *, is_model_request: bool) -> None:
        """Leave the record at an effect that differs; raise *error* if the fork has an address that is not reached yet."""
        if self._rules.at is not None and not self._has_left_record:
            raise self._writer.keep_first_fatal_error(error)
        if not self._has_left_record:
            self._count.difference, self._count.by_request = error, is_model_request
        self._discard_record_from(address)

    def _discard_record_from(self, address: Address) -> None:
        """Discard the record from an effect on, continue the clock from the recorded time, and end waits that no longer hold."""
        history = self._past.history
        if not self._has_left_record:
            self._count.broke_at = format_address(*address)
            assert history.head is not None  # noqa: S101 - an opening was read from it
            created = parse_created(history.head)
            self._timing.continue_from(self._timing.last, created, created)
        self._past.cut.cut_at(address)
        for waiting, future in self._waiting.items():
            if self._past.find_result(waiting) is None and not future.done():
                future.set_result(None)

    # --- after the place ----------------------------------------------------------------------------------------------

    def _try_answer_by_rules(self, requested: Intent, item: Item) -> bool:
        """Answer an effect by a recorded or simulated outcome; return False for one to be performed, or raise."""
        count, past, rules = self._count, self._past, self._rules
        # Which children have ended, and who was told or ended, is so of the children of today.
        if requested.starts_child_or_body or KINDS[requested.type].follows_children:
            return False
        place = past.pop_equal_unused_address(
            requested, includes_model_calls=rules.reuse and requested.address != rules.at
        )
        if place is not None:
            known = past.history.results[place]
            self._append_intent_with_answer(requested, past.history.outcome(known), known)
            count.reused += requested.type == "model_call"
            count.served += KINDS[requested.type].changes_world
            return True
        if not KINDS[requested.type].changes_world:
            return False
        made = self._simulate_outcome(requested)
        if made is not None:
            count.simulated += 1
            self._append_intent_with_answer(requested, made)
            return True
        if rules.tools == "working-copy" or (rules.tools == "idempotent" and is_repeatable(item)):
            return False
        error = self._errors.make_unrecorded_error(requested, item)
        count.refused = count.refused or _external_call_from_json(past.history.form(requested), requested)
        raise self._writer.keep_first_fatal_error(error)

    def _append_intent_with_answer(
        self, requested: Intent, outcome: Value | Failure, recorded_result: Result | None = None
    ) -> None:
        """Append the intent of an effect, and store the recorded or simulated outcome, with which ``find_result`` answers it."""
        self._writer.append(requested)
        at = max(self._timing.last, recorded_result.at if recorded_result is not None else 0)
        attempts = (
            {"attempts": recorded_result.attempts}
            if recorded_result is not None and recorded_result.attempts
            else NO_EXTRAS
        )
        self._given[requested.address] = Result(*requested.address, at, attrs.evolve(outcome, at=at), attempts)

    def _simulate_outcome(self, requested: Intent) -> Value | Failure | None:
        """Return the caller's simulated result of a call, or ``None`` if there is none."""
        if self._rules.simulate is None:
            return None
        history = self._past.history
        call = _external_call_from_json(history.form(requested), requested)
        try:
            said = self._rules.simulate(call, tuple(self._find_recorded_calls(requested.type, call.name)))
            return None if said is None else make_edited_outcome(history, requested, said, 0)
        except Exception as error:
            msg = f"simulate= failed for {call.name} {call.address}: {type(error).__name__}: {error}"
            raise self._writer.keep_first_fatal_error(JournalError(msg)) from error

    def _find_recorded_calls(self, kind: str, name: str) -> Sequence[ExternalCall]:
        """Return the recorded calls of a tool or function, with their results."""
        if self._by_name is None:
            self._by_name = {}
            history = self._past.history
            for address, intent in history.intents.items():
                if KINDS[intent.type].changes_world and address in history.results:
                    outcome = history.outcome(history.results[address])
                    result = outcome.value if isinstance(outcome, Value) else outcome.error
                    called = attrs.evolve(_external_call_from_json(history.form(intent), intent), result=result)
                    self._by_name.setdefault((intent.type, called.name), []).append(called)
        return self._by_name.get((kind, name), ())

    # --- for the recorder ---------------------------------------------------------------------------------------------

    def find_result(self, address: Address) -> Result | None:
        """Return the result that answers an effect: recorded at its address, of an equal effect, or simulated."""
        return self._given.get(address) or self._past.find_result(address)

    def stops_before(self, item: Item) -> bool:
        """Return whether the run stops before an effect without result: always before a question, as a fork asks no one."""
        return isinstance(item.effect, AskPerson) or super().stops_before(item)

    def make_invalidation_future(
        self, recorded_result: Result, item: Item
    ) -> tuple[asyncio.Future[None], Sequence[str]] | None:
        """Return a future that is done when a result of background children no longer holds, and their paths."""
        try:
            outcome = self._past.history.outcome(recorded_result)
        except JournalCorrupt:
            return None  # who takes it says so
        if not isinstance(outcome, Value):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[item.address] = future
        return future, outcome.value.done

    def has_recorded_start(self, address: Address) -> bool:
        """Return False, so that a fork treats no effect as in doubt here; this is decided when the effect is requested."""
        return False

    def confirm_child_end(self, recorded_result: Result, outcome: Single, item: Item) -> Single | None:
        """Return the result of a repeated run, or ``None`` if it differs from its record."""
        error = self._find_child_end_difference(self._past.history.outcome(recorded_result), outcome, item)
        if error is None:
            return super().confirm_child_end(recorded_result, outcome, item)
        self._leave_record_or_raise((item.path, item.effect.seq + 1), error, is_model_request=False)
        return None

    def _find_child_end_difference(self, recorded: Any, outcome: Single, item: Item) -> ReplayDivergence | None:
        """Return the error for a child or tool body whose end differs from its record, or ``None``."""
        past = self._past
        given: Any = outcome.value if isinstance(outcome, Value) else None
        if isinstance(given, ChildResult):
            same = past.is_same_child_end(recorded, given)
            return None if same else self._errors.make_child_end_error(recorded, outcome, item)
        if isinstance(given, ToolResult):
            ended = attrs.evolve(cast("Value", outcome), inputs=recorded.inputs)
            same = past.is_same_outcome(recorded, ended)
            return None if same else self._errors.make_different_result_error(recorded, ended, item, "changed")
        return None

    def accept_or_raise_start_difference(self, requested: Intent) -> None:
        """Discard the record because the run starts with something other than recorded."""
        error = self._errors.make_start_error(requested)
        self._leave_record_or_raise(("", 0), error, is_model_request=False)
        self._past.history.facts.system_prompts.clear()
        self._past.history.facts.context_windows.clear()

    def handle_unused_records_error(self, error: ReplayDivergence | None) -> None:
        """Store *error*, if there is one, as the difference of the fork; unlike a replay, never raise it."""
        self._store_end_difference(error)

    def confirm_root_end(self, finished: Finished) -> Finished:
        """Return *finished*; store a difference from the recorded end as the difference of the fork."""
        self._store_end_difference(self._past.find_end_difference(finished, is_record_only=False))
        return finished

    def _store_end_difference(self, error: ReplayDivergence | None) -> None:
        """Store an error about the end of the run, if there is one, as the difference of the fork."""
        if error is not None:
            self._count.difference, self._count.broke_at = error, error.address


def _external_call_from_json(form: Mapping[str, Any], intent: Intent) -> ExternalCall:
    """Return the tool or function call of a stored effect, without its result."""
    where = format_address(intent.path, intent.seq)
    if intent.type == "tool_call":
        return ExternalCall(form["tool_name"], form["input"], where)
    return ExternalCall(form["name"], {"args": form["args"], "kwargs": form["kwargs"]}, where)


class PaidPerformer:
    """
    A performer whose model calls are paid from a budget.

    Args:
        inner: The wrapped performer.
        budget: The money for the model calls.
        estimate: Returns how much a model call may use.
    """

    def __init__(
        self, inner: Performer, budget: SharedBudget, estimate: Callable[[ModelRequest], CallEstimate]
    ) -> None:
        self._inner = inner
        self._budget = budget
        self._estimate = estimate
        self.begin = inner.begin

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Pass an effect on; a model call only when there is money for it."""
        if isinstance(item.effect, CallModel):
            return self._perform_model_call(item, item.effect, io)
        return self._inner.perform(item, io)

    async def _perform_model_call(self, item: Item, effect: CallModel, io: IO) -> Single:
        """Perform a model call once the budget has room for it; return the failure of one that the budget refuses."""
        try:
            return await self._budget.perform_within_budget(
                self._estimate(effect.request), lambda: self._perform_paid(item, io)
            )
        except LimitExceeded as refusal:
            return self._make_refusal(refusal)

    def _perform_paid(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform a model call for which the budget has reserved the money."""
        return self._inner.perform(item, io)

    def _make_refusal(self, refusal: LimitExceeded) -> Failure:
        """Return the failure of a model call that the budget refuses."""
        return Failure(refusal, 0)


class _CountingPerformer(PaidPerformer):
    """
    The performer of the live effects in a fork, which counts them.

    Args:
        inner: The wrapped performer.
        count: The counts of the fork.
        budget: The money for the model calls.
        estimate: Returns how much a model call may use.
    """

    def __init__(
        self,
        inner: Performer,
        count: _ForkCounts,
        budget: SharedBudget,
        estimate: Callable[[ModelRequest], CallEstimate],
    ) -> None:
        super().__init__(inner, budget, estimate)
        self._count = count

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Count an effect and pass it on; a model call only when there is money for it."""
        # By exact class: the effects of a body of a tool count, and not its call.
        self._count.performed += type(item.effect) in (CallTool, CallFunction)
        return super().perform(item, io)

    async def _perform_paid(self, item: Item, io: IO) -> Single:
        """Perform a model call, and add the call and its cost to the counts of the fork."""
        self._count.model_calls += 1
        outcome = await self._inner.perform(item, io)
        reply = outcome.value if isinstance(outcome, Value) else None
        self._count.cost = add_cost(self._count.cost, reply.cost if isinstance(reply, ModelReply) else None)
        return outcome

    def _make_refusal(self, refusal: LimitExceeded) -> Failure:
        """Return the failure of a refused model call, and mark the fork as over its budget."""
        self._count.is_unpaid = True
        return super()._make_refusal(refusal)
