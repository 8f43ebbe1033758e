"""
A fork with ``tools=``: a recorded run is repeated for nothing up to a place, and goes on from there with models that are asked anew.

What happened outside is not done again: after the place a tool call is answered from the record when an equal one stands
there, by a function of the caller's, by the tool itself where that may be repeated, or not at all, which ends the run as
unknown. What lies beside the place, such as a sibling that had begun with it, stays as recorded.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal, TypeAlias, cast, get_args

import attrs
from attrs import frozen

from stepengine.data.effects import KINDS, AskPerson, CallFunction, CallModel, CallTool
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import ChildResult, RunResult
from stepengine.data.usage import Usage, add_cost
from stepengine.errors import JournalCorrupt, JournalError, LimitExceeded, ReplayDivergence
from stepengine.journal.finding import JournalLike, as_journal
from stepengine.journal.history import created_of
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.questions import outcome_for
from stepengine.journal.records import Address, Head, Intent, Result, shown_address
from stepengine.journal.replayer import RecordedPart, Replayer, address_of
from stepengine.journal.store import Journal
from stepengine.runtime.performer import IO, Item, Performer, is_repeatable
from stepengine.runtime.sizes import estimated_tokens

__all__ = ("Called", "ForkReport", "ForkTools", "Purse", "Simulator", "fork_from_record", "place_after")

ForkTools: TypeAlias = Literal["recorded", "idempotent", "working-copy"]


@frozen
class Called:
    """
    A call of a tool, or of a function of ``Perform``.

    Attributes:
        name: The tool's name, or the function's.
        input: The tool's input; for a function ``{"args": [...], "kwargs": {...}}``.
        address: Its effect, such as ``"#5"``.
        result: What a recorded one came to: a ``ToolResult``, the JSON value of a ``Perform``, or the error.
    """

    name: str
    input: Mapping[str, Any]
    address: str = ""
    result: Any = None


Simulator: TypeAlias = Callable[[Called, Sequence[Called]], Any]
"""
Makes up what a call gives that is not recorded, from the recorded calls of the same name, which have results.

It returns a ``ToolResult``, text or JSON, an error of ``stepengine.errors`` for a failure, or ``None`` when it cannot say.
"""


class Purse:
    """
    What several forks may spend together; each call is reserved for before it is made.

    Args:
        dollars: US dollars; ``None`` for no bound.

    Attributes:
        spent: What was spent so far, as far as prices are known.
        unpriced: How many calls were made whose price nobody knows; they are not in that.
        is_empty: Whether a call was refused because there was no room for it.

    Raises:
        JournalError: for what is not an amount above 0.
    """

    def __init__(self, dollars: Decimal | float | str | None = None) -> None:
        self.dollars = None if dollars is None else _amount(dollars)
        self.spent = Decimal(0)
        self.unpriced = 0
        self.is_empty = False
        self._reserved = Decimal(0)

    def reserve(self, cost: Decimal | None) -> LimitExceeded | None:
        """Set room aside for a call of about *cost*, or return why it must not be made."""
        if self.dollars is None:
            return None
        if cost is None:
            msg = f"the budget is {self.dollars} US dollars, but the price of the model is unknown; pass Engine(pricing=...) that knows it"
            return LimitExceeded(msg, kind="unpriced_model", limit=float(self.dollars))
        if self.spent + self._reserved + cost > self.dollars:
            self.is_empty = True
            msg = f"{self.spent + self._reserved} of the budget of {self.dollars} US dollars are spent or reserved; the next model call needs about {cost}"
            return LimitExceeded(msg, kind="cost", limit=float(self.dollars))
        self._reserved += cost
        return None

    def settle(self, reserved: Decimal | None, cost: Decimal | None) -> None:
        """Count the cost of a call for which *reserved* was set aside; an unknown cost counts as that."""
        if self.dollars is not None:
            self._reserved -= reserved or Decimal(0)
        known = reserved if cost is None else cost
        if known is None:
            self.unpriced += 1
        else:
            self.spent += known

    @property
    def known(self) -> Decimal | None:
        """What was spent; ``None`` when the price of a call is unknown."""
        return None if self.unpriced else self.spent


def _amount(dollars: Decimal | float | str) -> Decimal:
    try:
        amount = Decimal(str(dollars))
    except InvalidOperation:
        amount = Decimal("NaN")
    if amount.is_finite() and amount > 0:
        return amount
    msg = f"a budget is an amount of US dollars above 0, such as 0.50, not {dollars!r}"
    raise JournalError(msg)


@frozen
class ForkReport:
    """
    How a recorded run went when it was run again from one place on.

    Attributes:
        result: How it ended. Where a call left the record its status is ``failed``, and nobody knows how it would have ended.
        broke_at: The first effect that is not as recorded, such as ``"#5"``; ``""`` for a run that went as recorded.
        difference: How that effect differs; ``None`` for a place that the caller named.
        by_request: Whether the difference is what a model is asked; if not, the handler does something else.
        served: Tool calls and functions after that place that the record answered.
        simulated: Those that the caller's function answered.
        performed: Those that were performed, because that may be done twice.
        refused: The call that none of these could answer; it ended the run.
        reused: Model calls after that place that the record answered.
        model_calls: Model calls that were made.
        cost: What those cost in US dollars; ``None`` when that is unknown.
        is_unpaid: Whether the budget had no room for a model call, so that nobody knows how the run would have ended.
        journal: What was recorded of it; its head names the run and the place that it came from.
    """

    result: RunResult
    broke_at: str
    difference: ReplayDivergence | None
    by_request: bool
    served: int
    simulated: int
    performed: int
    refused: Called | None
    reused: int
    model_calls: int
    cost: Decimal | None
    is_unpaid: bool
    journal: Journal


@attrs.define
class _Count:
    """What happens in one fork after its place."""

    broke_at: str = ""
    difference: ReplayDivergence | None = None
    by_request: bool = False
    served: int = 0
    simulated: int = 0
    performed: int = 0
    refused: Called | None = None
    reused: int = 0
    model_calls: int = 0
    cost: Decimal | None = attrs.field(factory=Decimal)
    is_unpaid: bool = False


@frozen
class _Rules:
    """How a fork goes on after its place."""

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
    budget: Purse | Decimal | float | str | None = None,
    into: JournalLike | None = None,
) -> ForkReport:
    """
    Run a recorded run again from one place on; the journal is only read.

    Args:
        journal: The journal, or the path of its file.
        launch: Brings a run to its end.
        at: The last effect to keep: a number of the root's effects, or ``"path#number"``; -1 keeps none. By default that
            before the first one that is not as recorded.
        tools: Which calls are performed that nothing else answers: none (``"recorded"``), those of tools that are
            ``idempotent`` or ``read_only`` and of ``Perform.idempotent`` (``"idempotent"``), or all (``"working-copy"``),
            for tools that work on something that may be thrown away.
        simulate: Makes up the results of calls that are not recorded; see ``Simulator``.
        reuse: Whether a model call after the place that equals a recorded one is answered by that.
        budget: US dollars that model calls may cost, or a ``Purse`` that several forks share.
        into: Where the new journal goes; by default into memory.

    Raises:
        JournalError: when the journal is damaged or of a newer version, has no such effect, or *into* is not empty; when
            *simulate* fails.
        ReplayDivergence: when what is recorded before *at* does not fit the code.
    """
    source = as_journal(journal)
    if tools not in get_args(ForkTools):
        msg = f"tools is one of {', '.join(get_args(ForkTools))}, not {tools!r}"
        raise JournalError(msg)
    rules = _Rules(place_after(source, at), tools, simulate, reuse)
    purse = budget if isinstance(budget, Purse) else Purse(budget)
    count = _Count()
    run = JournaledRun.fork(
        source, lambda run, past: ForkReplayer(run, past, rules, count), _Counting.around(count, purse)
    )
    try:
        result = await launch(run)
    finally:
        run.close()
    _check_way(result.error, source, rules, count)
    made = _journal_of_fork(run.journal, count, into)
    return ForkReport(attrs.evolve(result, journal=made), **attrs.asdict(count, recurse=False), journal=made)


def place_after(source: Journal, at: int | str | None) -> Address | None:
    """
    Return the first effect after *at*, the last one that is kept; ``None`` where the first difference decides.

    Raises:
        JournalError: when nothing is recorded after it.
    """
    if at is None:
        return None
    path, last = address_of(at)
    address = (path, last + 1)
    if address not in source.history().intents:
        msg = f"{source.name} has no effect after {shown_address(path, last)} that could be asked for anew"
        raise JournalError(msg)
    return address


def _check_way(error: BaseException | None, source: Journal, rules: _Rules, count: _Count) -> None:
    """Raise what kept the run from reaching its place, or from going on as its rules say."""
    if isinstance(error, JournalError) and count.refused is None:
        raise error
    if rules.at is not None and not count.broke_at:
        where = shown_address(*rules.at)
        msg = f"the run ended before effect {where} of {source.name} was asked for: {error or 'the code does less now'}"
        raise JournalError(msg) from error


def _journal_of_fork(journal: Journal, count: _Count, into: JournalLike | None) -> Journal:
    """Return the journal of a fork under a name of its own, with its origin in its head."""
    records = journal.records()
    run = ""
    if count.broke_at and records and isinstance(records[0], Head):
        head = records[0]
        run = f"{head.run[:40]}-{secrets.token_hex(4)}"
        records[0] = attrs.evolve(
            head, run=run, parent={"run": head.run, "at": count.broke_at}, workspace="", line=None
        )
        journal.replace(records)
    if into is None:
        return journal
    target = as_journal(into).bound(run or str(records[0].run) if records and isinstance(records[0], Head) else "")
    if target.records():
        msg = f"{target.name} holds a run already; a fork needs a journal of its own"
        raise JournalError(msg)
    target.replace(journal.records())
    return target


class ForkReplayer(Replayer):
    """
    Answers a fork: by address up to its place, after it by the rules of the fork.

    Args:
        run: The run.
        past: What was recorded.
        rules: How it goes on after its place.
        count: What is told of it.
    """

    def __init__(self, run: JournaledRun, past: RecordedPart, rules: _Rules, count: _Count) -> None:
        super().__init__(run, past)
        self._rules = rules
        self._count = count
        # Results that are given to effects which are not recorded at their own address.
        self._given: dict[Address, Result] = {}
        self._by_name: dict[tuple[str, str], list[Called]] | None = None
        self._waiting: dict[Address, asyncio.Future[None]] = {}

    @property
    def _is_broken(self) -> bool:
        return bool(self._past.cut)

    def meets(self, item: Item, asked: Intent) -> bool:
        """
        Return whether an effect needs no intent any more, because the record answers it, here or elsewhere.

        Raises:
            ReplayDivergence: when it is before the place and not as recorded, or after it and nothing may answer it.
        """
        address = (item.path, item.effect.seq)
        if address == self._rules.at:
            self._break(address)
        known = self._past.intent(address)
        if known is None:
            return self._meets_no_record(address, asked, item)
        if self._is_broken and not asked.begins_run and self._past.result(address) is None:
            return self._goes_on(address, asked, item)  # it was begun when a crash ended the record
        if self._past.equals(known, asked) or self._past.was_kept(address, asked.fp):
            self._past.use(address)
            self._run.append(asked)
            return True
        error = self._past.changed(known, asked, item, self._run.machines.get(item.path))
        self._differs(address, error, by_request=known.type == asked.type == "model_call")
        return self._goes_on(address, asked, item)

    def _meets_no_record(self, address: Address, asked: Intent, item: Item) -> bool:
        """Deal with an effect after the place, or after the end of what is recorded."""
        if address in self._past.history.intents:
            return self._goes_on(address, asked, item)
        ended = self._end_of(item.path)
        if ended is not None and self._stop_in(ended) is not None:
            return True  # it stops there, as it did
        if not self._is_broken or ended is not None:
            if ended is None and not self._past.history.is_complete:
                return True
            error = self._past.beyond(asked, item, self._run.machines.get(item.path))
            self._differs(address, error, by_request=False)
        return self._goes_on(address, asked, item)

    def _differs(self, address: Address, error: ReplayDivergence, *, by_request: bool) -> None:
        if self._rules.at is not None and not self._is_broken:
            raise self._run.fail(error)
        if not self._is_broken:
            self._count.difference, self._count.by_request = error, by_request
        self._break(address)

    def _break(self, address: Address) -> None:
        """Discard the record from an effect on; what follows live continues from the recorded time."""
        run, history = self._run, self._past.history
        if not self._is_broken:
            self._count.broke_at = shown_address(*address)
            assert history.head is not None  # noqa: S101 - an opening was read from it
            created = created_of(history.head)
            run.timing.go_on(run.timing.last, created, created)
        self._past.cut.at(address)
        for waiting, future in self._waiting.items():
            if self._past.result(waiting) is None and not future.done():
                future.set_result(None)

    # --- after the place ----------------------------------------------------------------------------------------------

    def _goes_on(self, address: Address, asked: Intent, item: Item) -> bool:
        """Return whether something recorded or invented answers an effect; if not, it is performed."""
        count, past, rules = self._count, self._past, self._rules
        # Which children have ended, and who was told or ended, is so of the children of today.
        if asked.begins_run or KINDS[asked.type].follows_children:
            return False
        place = past.same_elsewhere(asked, models=rules.reuse and address != rules.at)
        if place is not None:
            known = past.history.results[place]
            self._give(address, asked, past.history.outcome(known), known)
            count.reused += asked.type == "model_call"
            count.served += KINDS[asked.type].changes_world
            return True
        if not KINDS[asked.type].changes_world:
            return False
        made = self._made_up(asked)
        if made is not None:
            count.simulated += 1
            self._give(address, asked, made)
            return True
        if rules.tools == "working-copy" or (rules.tools == "idempotent" and is_repeatable(item)):
            return False
        error = past.not_recorded(asked, item, self._run.machines.get(item.path))
        count.refused = count.refused or _call_of_intent(past.history.form(asked), asked)
        raise self._run.fail(error)

    def _give(self, address: Address, asked: Intent, outcome: Value | Failure, known: Result | None = None) -> None:
        run = self._run
        run.append(asked)
        at = max(run.timing.last, known.at if known is not None else 0)
        attempts = known.attempts if known is not None else ()
        self._given[address] = Result(*address, at, attrs.evolve(outcome, at=at), attempts)

    def _made_up(self, asked: Intent) -> Value | Failure | None:
        """Return what the caller's function invents for a call; ``None`` when it cannot say."""
        if self._rules.simulate is None:
            return None
        history = self._past.history
        call = _call_of_intent(history.form(asked), asked)
        try:
            said = self._rules.simulate(call, tuple(self._recorded_calls(asked.type, call.name)))
            return None if said is None else outcome_for(history, asked, said, 0)
        except Exception as error:
            msg = f"simulate= failed for {call.name} {call.address}: {type(error).__name__}: {error}"
            raise self._run.fail(JournalError(msg)) from error

    def _recorded_calls(self, kind: str, name: str) -> Sequence[Called]:
        """Return the recorded calls of a tool or function, with their results."""
        if self._by_name is None:
            self._by_name = {}
            history = self._past.history
            for address, intent in history.intents.items():
                if KINDS[intent.type].changes_world and address in history.results:
                    outcome = history.outcome(history.results[address])
                    result = outcome.value if isinstance(outcome, Value) else outcome.error
                    called = attrs.evolve(_call_of_intent(history.form(intent), intent), result=result)
                    self._by_name.setdefault((intent.type, called.name), []).append(called)
        return self._by_name.get((kind, name), ())

    # --- for the recorder ---------------------------------------------------------------------------------------------

    def result(self, address: Address) -> Result | None:
        """Return what answers an effect."""
        return self._given.get(address) or self._past.result(address)

    def is_live(self, path: str) -> bool:
        """Return whether what has no result may be performed."""
        return self._is_broken and self._end_of(path) is None

    def halts(self, item: Item) -> bool:
        """Return whether the run stops before an effect that has no result: nobody is asked anything."""
        return isinstance(item.effect, AskPerson) or super().halts(item)

    def halt(self, path: str, questions: tuple[Question, ...], *, waits: bool = False) -> Stop:
        """Return how a run stops where its record does, or waits for what nobody is asked."""
        if self._is_broken and (questions or waits):
            return Stop("suspended", self._run.timing.last, questions=questions)
        return super().halt(path, questions, waits=waits)

    def until_cut(self, known: Result, item: Item) -> tuple[asyncio.Future[None], Sequence[str]] | None:
        """Return what is done once a result of background children no longer holds: any of them may come to the place."""
        try:
            outcome = self._past.history.outcome(known)
        except JournalCorrupt:
            return None  # who takes it says so
        if not isinstance(outcome, Value):
            return None
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[item.path, item.effect.seq] = future
        return future, outcome.value.done

    def was_begun(self, address: Address) -> bool:
        """Return false: what a crash left open is decided when it is asked for."""
        return False

    def confirm(self, known: Result, outcome: Single, item: Item) -> Single | None:
        """Return the result of a run that was run again; ``None`` when it ended differently from its record."""
        error = self._other(self._past.history.outcome(known), outcome, item)
        if error is None:
            return super().confirm(known, outcome, item)
        self._differs((item.path, item.effect.seq + 1), error, by_request=False)
        return None

    def _other(self, recorded: Any, outcome: Single, item: Item) -> ReplayDivergence | None:
        """Return how a child, or the body of a tool, ended differently from its record; ``None`` when it did not."""
        past, machine = self._past, self._run.machines.get(item.path)
        given: Any = outcome.value if isinstance(outcome, Value) else None
        if isinstance(given, ChildResult):
            same = past.same_child(recorded, given)
            return None if same else past.other_child(recorded, outcome, item, machine)
        if isinstance(given, ToolResult):
            ended = attrs.evolve(cast("Value", outcome), inputs=recorded.inputs)
            same = past.same_result(recorded, ended)
            return None if same else past.other_result(recorded, ended, item, machine, "changed")
        return None

    def starts_alike(self, asked: Intent) -> None:
        """Let the run start with something other than what was recorded: then nothing of the record holds."""
        error = self._past.other_start(asked)
        self._differs(("", 0), error, by_request=False)
        self._past.history.prompts.clear()
        self._past.history.windows.clear()

    def ends(self, error: ReplayDivergence | None) -> None:
        """Note that the run ended before its record does, if it did."""
        if error is not None:
            self._count.difference, self._count.broke_at = error, error.address


def _call_of_intent(form: Mapping[str, Any], intent: Intent) -> Called:
    where = shown_address(intent.path, intent.seq)
    if intent.type == "tool_call":
        return Called(form["tool_name"], form["input"], where)
    return Called(form["name"], {"args": form["args"], "kwargs": form["kwargs"]}, where)


class _Counting:
    """
    The innermost performer's wrapper in a fork: whatever comes here is live.

    Args:
        inner: What performs.
        count: Where it is counted.
        purse: What model calls are paid from.
        price: What a call of a request will cost at most, as far as one can tell.
    """

    def __init__(
        self, inner: Performer, count: _Count, purse: Purse, price: Callable[[str, Usage], Decimal | None]
    ) -> None:
        self._inner = inner
        self._count = count
        self._purse = purse
        self._price = price
        self.begin = inner.begin

    @classmethod
    def around(cls, count: _Count, purse: Purse) -> Callable[..., Performer]:
        """Return what wraps a performer, given the prices of the run."""
        return lambda inner, price: cls(inner, count, purse, price)

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Count an effect and pass it on; a model call only when there is money for it."""
        if isinstance(item.effect, CallModel):
            return self._ask_and_count(item, item.effect, io)
        self._count.performed += type(item.effect) in (CallTool, CallFunction)
        return self._inner.perform(item, io)

    async def _ask_and_count(self, item: Item, effect: CallModel, io: IO) -> Single:
        request = effect.request
        most = Usage(input_tokens=estimated_tokens(request), output_tokens=request.settings.max_tokens or 0)
        room = self._price(request.model, most) if self._purse.dollars is not None else None
        refusal = self._purse.reserve(room)
        if refusal is not None:
            self._count.is_unpaid = True
            return Failure(refusal, 0)
        self._count.model_calls += 1
        cost: Decimal | None = None
        try:
            outcome = await self._inner.perform(item, io)
            reply = outcome.value if isinstance(outcome, Value) else None
            cost = reply.cost if isinstance(reply, ModelReply) else None
        finally:
            self._purse.settle(room, cost)
        self._count.cost = add_cost(self._count.cost, cost)
        return outcome
