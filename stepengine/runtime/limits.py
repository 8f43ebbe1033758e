"""
Budgets of a run tree.

Each run has a ledger that knows its parent's, so that whatever a child spends counts for all above it. The ``UsageMeter`` wraps
everything that records: it reserves before effects start and adds up their usage, replayed ones included. The ``LimitGate``
is inside everything that records: it refuses the effects for which the meter found no room, so that a refusal is recorded
like any outcome. Where people are asked and allow more, the limit of that one ledger is raised (``Ledgers.increase_limit``).
``Repeats`` wraps the meter: it notices when a model makes the same tool call again and again.

Model calls run at the same time while the most that they can use fits together. Where it does not fit, or nothing bounds it, a
call waits for the bills of the running ones and then runs alone. So a limit is exceeded by one reply at most. A call waits before
it is recorded as started and before it reserves anything, so that no call ever waits for one that waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from decimal import ROUND_CEILING, Context, Decimal
from functools import partial
from typing import Literal, NamedTuple, TypeAlias, cast

import attrs

from stepengine.data.ceilings import Ceiling
from stepengine.data.effects import CallBody, CallModel, CallTool, Gather, Leaf, Spawn
from stepengine.data.events import Repeat
from stepengine.data.json import JsonDict
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.questions import SMALLEST
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded, ModelError, StepEngineError
from stepengine.machine.plan import RunPlan
from stepengine.runtime.performer import IO, ForwardingIO, Item, Performer, RoomWait, child_path
from stepengine.runtime.prices import Prices
from stepengine.runtime.sizes import estimate_request_tokens

NOTICE_AFTER_CALLS = 3
"""Two equal calls in a row are common, such as a retry; the third is worth a notice to observers."""

FREE = Decimal(0)
ROUNDED_UP = Context(prec=12, rounding=ROUND_CEILING)
"""What is missing in dollars has to survive the way through a float."""

RecordState: TypeAlias = Literal["new", "begun", "answered"]
"""Whether an effect is in a record: not at all, with its start, or so that nothing is performed."""

Bounds: TypeAlias = "tuple[int | None, Decimal | float | None]"
"""Limits in tokens and in dollars."""


class CallEstimate(NamedTuple):
    """
    How much a model call may use.

    Attributes:
        model: The model string.
        tokens: Its prompt, and the output limit that its settings name.
        cost: The US dollars of that; ``None`` if the price is unknown.
        max_tokens: Its prompt and its longest reply; ``None`` if nothing bounds them.
        max_cost: The US dollars of that; ``None`` if nothing bounds them.
    """

    model: str
    tokens: int
    cost: Decimal | None
    max_tokens: int | None
    max_cost: Decimal | None


class RunningCalls:
    """
    The most that the running model calls of a run, and of those below it, may use together.

    Attributes:
        count: How many are running.
        tokens: The most tokens of those that have a bound.
        cost: The most US dollars of those that have a bound.
        unbounded_tokens: How many have no bound in tokens.
        unbounded_costs: How many have no bound in dollars.
    """

    __slots__ = ("cost", "count", "tokens", "unbounded_costs", "unbounded_tokens")

    def __init__(self) -> None:
        self.count = self.tokens = self.unbounded_tokens = self.unbounded_costs = 0
        self.cost = FREE

    def count_call(self, call: CallEstimate, change: Literal[1, -1]) -> None:
        """Count a call as running (1), or as ended (-1)."""
        self.count += change
        self.tokens += change * (call.max_tokens or 0)
        self.cost += change * (call.max_cost or FREE)
        self.unbounded_tokens += change * (call.max_tokens is None)
        self.unbounded_costs += change * (call.max_cost is None)

    def fits(self, call: CallEstimate, tokens_left: int | None, dollars_left: Decimal | None) -> bool:
        """Return whether *call* fits into what is left beside the running calls, ``None`` for no limit; True if no call runs."""
        if not self.count:
            return True
        if tokens_left is not None and (
            call.max_tokens is None or self.unbounded_tokens or self.tokens + call.max_tokens > tokens_left
        ):
            return False
        if dollars_left is None:
            return True
        return call.max_cost is not None and not self.unbounded_costs and self.cost + call.max_cost <= dollars_left


class SpendingLedger:
    """
    The spending of one run and the runs below it, and the reservations for runs elsewhere.

    Args:
        limits: The run's limits in force.
        given: Those of them that were set explicitly.
        parent: The parent's ledger; ``None`` for a root run.
        path: The path of the run.
        own: The limits in tokens and in dollars that are the run's own, and not those of its parent; by default those of *limits*.

    Attributes:
        max_tokens: The run's own limit in tokens, with what people allowed beyond it; ``None`` without one.
        max_cost: The same in US dollars.
        above: The ledgers of the runs around it, the nearest first.
        running: The running model calls here and below.
    """

    __slots__ = (
        "above",
        "asked",
        "bounded",
        "children",
        "cost",
        "given",
        "limits",
        "max_cost",
        "max_tokens",
        "path",
        "reserved_cost",
        "reserved_tokens",
        "running",
        "tokens",
    )

    def __init__(
        self,
        limits: Limits,
        given: Limits,
        parent: SpendingLedger | None = None,
        path: str = "",
        own: Bounds | None = None,
    ) -> None:
        self.limits = limits
        self.given = given
        self.above: tuple[SpendingLedger, ...] = () if parent is None else (parent, *parent.above)
        self.path = path
        self.max_tokens, dollars = (limits.max_tokens, limits.max_cost_usd) if own is None else own
        self.max_cost = None if dollars is None else Decimal(str(dollars))
        # Asked once, when the run starts: a tree without such limits neither estimates sizes nor reserves, and its
        # calls go past the meter altogether.
        is_bounded = limits.max_tokens is not None or limits.max_cost_usd is not None
        self.bounded: bool = is_bounded or (parent is not None and parent.bounded)
        self.tokens = 0
        self.cost = FREE
        self.children = 0
        self.asked = 0
        self.reserved_tokens = 0
        self.reserved_cost = FREE
        self.running = RunningCalls()

    def has_room(self, call: CallEstimate) -> bool:
        """Return whether a call may run at the same time as the running ones, here and above; a call that is alone may."""
        for ledger in (self, *self.above):
            most, dollars = ledger.max_tokens, ledger.max_cost
            tokens_left = None if most is None else most - ledger.tokens - ledger.reserved_tokens
            dollars_left = None if dollars is None else dollars - ledger.cost - ledger.reserved_cost
            if not ledger.running.fits(call, tokens_left, dollars_left):
                return False
        return True

    def count_call(self, call: CallEstimate, change: Literal[1, -1]) -> None:
        """Count a call as running here and above (1), or as ended (-1)."""
        for ledger in (self, *self.above):
            ledger.running.count_call(call, change)

    def find_limit_error(self, tokens: int, cost: Decimal | None, model: str) -> LimitExceeded | None:
        """Return the error if a call of *model* of at most *tokens* and *cost* has no room here or above, or ``None``."""
        # From the run upwards: each of them has to have room, and the nearest that has none is the one that is named.
        for ledger in (self, *self.above):
            problem = ledger.find_own_limit_error(tokens, cost, model)
            if problem is not None:
                return problem
        return None

    def find_own_limit_error(self, tokens: int, cost: Decimal | None, model: str) -> LimitExceeded | None:
        """Return the error if this run's own limits have no room for a call, or ``None``."""
        most, used = self.max_tokens, self.tokens + self.reserved_tokens
        if most is not None and used + tokens > most:
            msg = f"the run and its children have used or reserved {used} of {most} tokens; the next model call needs about {tokens}; raise Limits(max_tokens=...)"
            more = max(self.limits.max_tokens or 0, used + tokens - most) if self.limits.ask else None
            return LimitExceeded(msg, kind="tokens", limit=most, path=self.path if more else "", more=more)
        dollars = self.max_cost
        if dollars is None:
            return None
        if cost is None and self.limits.allow_unpriced:
            cost = FREE
        # An unknown price is refused where money is limited: taken for nothing, the limit would not hold
        # (reliability:MP63).
        if cost is None:
            msg = (
                f"max_cost_usd is {dollars}, but the price of the model {model!r} is unknown; pass Engine(pricing=...) with "
                "its price, or Limits(allow_unpriced=True)"
            )
            return LimitExceeded(msg, kind="unpriced_model", limit=float(dollars))
        spent = self.cost + self.reserved_cost
        if spent + cost > dollars:
            msg = f"the run and its children have spent or reserved {spent} of {dollars} US dollars; the next model call needs about {cost}; raise Limits(max_cost_usd=...)"
            again = self._compute_dollars_to_add(spent + cost - dollars) if self.limits.ask else None
            return LimitExceeded(msg, kind="cost", limit=float(dollars), path=self.path if again else "", more=again)
        return None

    def _compute_dollars_to_add(self, missing: Decimal) -> float:
        """Return the dollars that an approval adds: the limit or the missing amount, whichever is more, but more than 0."""
        again = Decimal(str(self.limits.max_cost_usd or 0))
        return float(max(again, ROUNDED_UP.create_decimal(missing), SMALLEST))

    def reserve(self, tokens: int, cost: Decimal) -> None:
        """Reserve here and above; negative numbers release a reservation."""
        for ledger in (self, *self.above):
            ledger.reserved_tokens += tokens
            ledger.reserved_cost += cost

    def add_usage(self, tokens: int, cost: Decimal) -> None:
        """Add usage to this ledger and to those above it."""
        for ledger in (self, *self.above):
            ledger.tokens += tokens
            ledger.cost += cost

    def admit_children(self, count: int, *, by_model: bool) -> LimitExceeded | None:
        """
        Count *count* more children here and above, or return the error if there is no room.

        A limit that was set explicitly holds for every child; the default holds for those that models request (requirements:X50).
        """
        for ledger in (self, *self.above):
            most, started = ledger.given.max_total_children, ledger.children
            # An author who writes a loop over 10,000 items has meant it; the default is there for models, which spawn
            # without having meant anything.
            if most is None and by_model:
                most, started = ledger.limits.max_total_children, ledger.asked
            if most is not None and started + count > most:
                more = "" if count == 1 else f", {count} more are requested at once"
                msg = f"the run tree has started {started} children{more}, and max_total_children is {most}; raise Limits(max_total_children=...)"
                return LimitExceeded(msg, kind="children", limit=most)
        self.count_children(count, by_model=by_model)
        return None

    def count_children(self, count: int, *, by_model: bool) -> None:
        """Count children here and above; a negative number removes children that never started."""
        for ledger in (self, *self.above):
            ledger.children += count
            if by_model:
                ledger.asked += count


class Ledgers:
    """The ledgers of the running runs of one tree, by path."""

    __slots__ = ("_open",)

    def __init__(self) -> None:
        self._open: dict[str, SpendingLedger] = {}

    def create_ledger(self, path: str, plan: RunPlan) -> SpendingLedger:
        """Create and register the ledger of a run, below its parent's, and return it."""
        # The parent of a tree's own root is driven elsewhere, if it has one: what it may spend stands in its limits.
        parent = self._open.get(path.rpartition(".")[0]) if path else None
        is_bound = plan.limits.max_tokens is not None or plan.limits.max_cost_usd is not None
        own = _get_child_bounds(plan, parent.limits) if is_bound and parent is not None else None
        ledger = self._open[path] = SpendingLedger(plan.limits, plan.given, parent, path, own)
        return ledger

    def increase_limit(self, ceiling: Ceiling) -> None:
        """Raise a limit to the allowed value; repeated calls change nothing."""
        ledger = self._open.get(ceiling.path)
        if ledger is None:
            return
        if ceiling.kind == "tokens" and ledger.max_tokens is not None:
            ledger.max_tokens = max(ledger.max_tokens, int(ceiling.most))
        elif ceiling.kind == "cost" and ledger.max_cost is not None:
            ledger.max_cost = max(ledger.max_cost, ceiling.most)

    def get_ledger(self, path: str) -> SpendingLedger:
        """Return the ledger of a run."""
        return self._open[path]

    def close_ledger(self, path: str) -> None:
        """Remove the ledger of an ended run; its spending stays in those above."""
        del self._open[path]


def _get_child_bounds(plan: RunPlan, parent_limits: Limits) -> Bounds:
    """
    Return the token and dollar limits that a child has in addition to its parent's.

    Its plan has those of its parent where it has none, or larger ones. Were these kept in its ledger as well, people who allow
    the tree more would be asked once more for each child. The body of a tool has none but those around it.
    """
    if plan.body is not None:
        return None, None
    limits = plan.limits if plan.agent.source is None else plan.agent.source.limits
    tokens = None if limits.max_tokens == parent_limits.max_tokens else limits.max_tokens
    return tokens, None if limits.max_cost_usd == parent_limits.max_cost_usd else limits.max_cost_usd


class Refusals:
    """
    The effects that must not start, with the reasons.

    A performer outside of the gate calls ``refuse`` before the effect is performed; the gate calls ``pop_refusal_error``.

    Attributes:
        errors: The reasons, by address; mostly there are none.
    """

    __slots__ = ("errors",)

    def __init__(self) -> None:
        self.errors: dict[tuple[str, int], StepEngineError] = {}

    def refuse(self, path: str, effects: Iterable[Leaf], error: StepEngineError) -> None:
        """Store *error* as the outcome of *effects* of the run at *path*, which then do not start; raise nothing."""
        self.errors.update({(path, effect.seq): error for effect in effects})

    def pop_refusal_error(self, item: Item) -> StepEngineError | None:
        """Remove the error that refuses an effect, and return it; ``None`` without one, or if the effect is recorded as started."""
        error = self.errors.pop(item.address, None)
        return None if item.has_begun else error


class LimitGate:
    """Refuses the effects for which the meter found no room; passes all others."""

    def __init__(self, inner: Performer, refusals: Refusals, now: Callable[[], int]) -> None:
        self._inner = inner
        self._refusals = refusals
        self._now = now
        self.begin = inner.begin

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect, or return the outcome of its refusal."""
        error = self._refusals.pop_refusal_error(item) if self._refusals.errors else None
        return self._inner.perform(item, io) if error is None else self._make_refusal_outcome(item, error)

    async def _make_refusal_outcome(self, item: Item, error: StepEngineError) -> Single:
        """Return a failure, or for a child whose refusal its caller reads as a result, a failed or cancelled result."""
        if not isinstance(item.effect, Spawn) or item.effect.is_background or _is_raised_in_handler(item.effect, error):
            return Failure(error, self._now())
        status = RunStatus.FAILED if isinstance(error, LimitExceeded) else RunStatus.CANCELLED
        return Value(ChildResult(agent_id=item.effect.agent_id, status=status, error=error), self._now())


@attrs.define(eq=False)
class MeteredCall:
    """
    A model call from its start to its bill.

    Attributes:
        ledger: The ledger of its run.
        estimate: How much it may use.
        turn: Is done when it may run or is refused.
        error: Why it is refused; ``None`` if it is not.
        is_running: Whether it counts as running in the ledger.
        is_late: Whether it reserves only when it is performed.
        settled: The tokens and dollars of failed attempts, which are counted already.
    """

    ledger: SpendingLedger
    estimate: CallEstimate
    turn: asyncio.Future[None] | None = None
    error: LimitExceeded | None = None
    is_running: bool = False
    is_late: bool = False
    settled: tuple[int, Decimal] = (0, FREE)

    def find_permanent_limit_error(self) -> LimitExceeded | None:
        """Return the limit error if a call would not even fit once no other call runs, or ``None``."""
        return self.ledger.find_limit_error(self.estimate.tokens, self.estimate.cost, self.estimate.model)


class CallQueue:
    """
    Lets model calls run at the same time while the most that they may use fits together; the others wait in order.

    Only the first that waits may start next, so that small calls never pass a large one.
    """

    def __init__(self) -> None:
        self._line: list[MeteredCall] = []

    def has_room(self, call: MeteredCall) -> bool:
        """Return whether a call would run at once."""
        return not self._line and call.ledger.has_room(call.estimate)

    def admit_refuse_or_queue(self, call: MeteredCall) -> None:
        """Reserve room for a call, set the ``error`` of one that will never have room, or put it in line."""
        call.error = call.find_permanent_limit_error()
        if call.error is None:
            if self.has_room(call):
                self._mark_running(call)
            else:
                call.turn = asyncio.get_running_loop().create_future()
                self._line.append(call)

    async def wait_for_turn(self, call: MeteredCall) -> None:
        """Wait until a call runs or is refused, which sets its ``error``; a cancelled wait ends the call."""
        if call.turn is None:
            return
        try:
            await call.turn
        except BaseException:
            self.end_call(call)
            raise
        call.turn = None

    def end_call(self, call: MeteredCall) -> None:
        """Release the room of a call, and start others that wait for it."""
        if call.turn is not None:
            call.turn.cancel()
        if call.is_running:
            call.is_running = False
            call.ledger.count_call(call.estimate, -1)
        self.start_waiting_calls()

    def start_waiting_calls(self) -> None:
        """Start the waiting calls that have room now, and refuse those that never will."""
        while self._line:
            call = self._line[0]
            assert call.turn is not None  # noqa: S101 - it is in line
            if not call.turn.done():
                call.error = call.find_permanent_limit_error()
                if call.error is None:
                    if not call.ledger.has_room(call.estimate):
                        return
                    self._mark_running(call)
                call.turn.set_result(None)
            del self._line[0]

    def _mark_running(self, call: MeteredCall) -> None:
        """Mark a call as running, and count it in its ledger and those above."""
        call.is_running = True
        call.ledger.count_call(call.estimate, 1)


def estimate_call(
    request: ModelRequest, prices: Prices, find_output_limit: Callable[[ModelRequest], int | None]
) -> CallEstimate:
    """Return how much a model call may use: its estimated prompt and its longest reply."""
    model, prompt, named = request.model, estimate_request_tokens(request), request.settings.max_tokens or 0
    longest = find_output_limit(request)
    cost = prices.compute_usage_cost(model, Usage(input_tokens=prompt, output_tokens=named))
    if longest is None:
        return CallEstimate(model, prompt + named, cost, None, None)
    most = prices.compute_usage_cost(model, Usage(input_tokens=prompt, output_tokens=longest))
    return CallEstimate(model, prompt + named, cost, prompt + longest, most)


@attrs.define(eq=False)
class _MeteredIO(ForwardingIO):
    """The ``IO`` of a model call: settles its failed attempts."""

    _settle: Callable[[Usage | None], RoomWait | None]

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """Report a failed attempt and count its usage; return the wait for room before the next one, or ``None``."""
        super().report_failed_attempt(failure, usage)
        return self._settle(usage)


class UsageMeter:
    """
    Reserves before effects start, and counts their usage.

    Args:
        inner: What performs.
        refusals: Shared with the gate inside.
        ledgers: The ledgers of the tree.
        prices: What model calls cost, for limits in US dollars.
        find_output_limit: Returns how many tokens the reply to a request has at most, or ``None`` if nothing bounds it.
        get_record_state: Says whether a record answers an effect or has its start; ``None`` without a record.
    """

    def __init__(
        self,
        inner: Performer,
        refusals: Refusals,
        ledgers: Ledgers,
        prices: Prices,
        *,
        find_output_limit: Callable[[ModelRequest], int | None],
        get_record_state: Callable[[Item], RecordState] | None = None,
    ) -> None:
        self._inner = inner
        self._refusals = refusals
        self._ledgers = ledgers
        self._prices = prices
        self._find_output_limit = find_output_limit
        self._find_record = get_record_state
        self._calls: dict[str, dict[int, MeteredCall]] = {}
        self._queue = CallQueue()
        # Children that were counted and have not started, by path: their numbers, and whether a model asked for them.
        self._admitted: dict[str, dict[int, bool]] = {}

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Reserve budgets for the model calls and children of a batch, or refuse them, then begin the batch."""
        first = batch[0]
        if isinstance(first.effect, Spawn) or first.gather is not None:
            self._count_or_refuse_siblings(first)
        spawned: dict[str, int] = {}
        # Before anything is recorded as begun, and in the order of the numbers: who finds room does not depend on who
        # is faster (reliability:R6).
        for item in batch:
            effect = item.effect
            if isinstance(effect, CallModel):
                call = self._meter_and_admit_call(item)
                if call is not None and call.turn is not None and len(batch) == 1:
                    return self._begin_after_turn(item, call)
            elif isinstance(effect, Spawn) and effect.tool_call_id:
                self._count_or_refuse_child(item, effect, spawned)
            elif isinstance(effect, CallBody):
                self._refuse_body_if_too_deep(item, effect)
        return self._inner.begin(batch)

    def count_startable(self, items: Sequence[Item]) -> int:
        """Return how many of the first *items* can begin together: at least one, and no call that would have to wait for others."""
        started: list[MeteredCall] = []
        count = 0
        for item in items:
            call = self._make_metered_call(item) if isinstance(item.effect, CallModel) else None
            if call is not None and self._get_record_state(item) == "new" and call.find_permanent_limit_error() is None:
                if count and not self._queue.has_room(call):
                    break
                call.ledger.count_call(call.estimate, 1)
                started.append(call)
            count += 1
        for call in started:
            call.ledger.count_call(call.estimate, -1)
        return count

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect and count its usage if it was reserved for."""
        if isinstance(item.effect, Spawn):
            return self._perform_child_and_correct_count(item, io)
        if self._calls and item.effect.seq in self._calls.get(item.path, ()):
            return self._perform_metered(item, io)
        return self._inner.perform(item, io)

    def release_run_reservations(self, path: str) -> None:
        """Release the reservations of an ended run."""
        for by_model in self._admitted.pop(path, {}).values():
            self._ledgers.get_ledger(path).count_children(-1, by_model=by_model)
        for call in self._calls.pop(path, {}).values():
            self._queue.end_call(call)

    def start_waiting_calls(self) -> None:
        """Start the waiting calls that have room since a limit was raised."""
        self._queue.start_waiting_calls()

    def _get_record_state(self, item: Item) -> RecordState:
        """Return ``"answered"`` or ``"begun"`` if the record has the outcome or only the start of an effect; else ``"new"``."""
        return "new" if self._find_record is None else self._find_record(item)

    def _make_metered_call(self, item: Item) -> MeteredCall | None:
        """Return a model call with its estimate; ``None`` if no limit holds for it."""
        ledger = self._ledgers.get_ledger(item.path)
        if not ledger.bounded:
            return None
        request = cast("CallModel", item.effect).request
        return MeteredCall(ledger, estimate_call(request, self._prices, self._find_output_limit))

    def _meter_and_admit_call(self, item: Item) -> MeteredCall | None:
        """Return the metered call of an effect, whose room is reserved, waited for or refused; ``None`` if no limit applies to it."""
        call = self._make_metered_call(item)
        if call is None:
            return None
        # It is metered also if it is refused: where runs beside each other are replayed, one that is recorded to have
        # found room may come before what made that room, and what it spent counts.
        self._calls.setdefault(item.path, {})[item.effect.seq] = call
        state = self._get_record_state(item)
        # What a record answers is paid for. What it has the start of may have to wait until all runs have reached the end of
        # their records, so it reserves nothing before it is performed.
        if state == "new":
            self._queue.admit_refuse_or_queue(call)
            self._register_refusal_if_error(item, call)
        elif state == "begun":
            call.is_late = True
        return call

    def _register_refusal_if_error(self, item: Item, call: MeteredCall) -> None:
        if call.error is not None:
            self._refusals.refuse(item.path, (item.effect,), call.error)

    async def _begin_after_turn(self, item: Item, call: MeteredCall) -> None:
        """Wait until a model call runs or is refused, then begin it; a cancelled wait is not metered."""
        try:
            await self._wait_for_turn(item, call)
        except BaseException:
            self._calls.get(item.path, {}).pop(item.effect.seq, None)
            raise
        await self._inner.begin((item,))

    async def _wait_for_turn(self, item: Item, call: MeteredCall) -> None:
        """Wait until a model call runs or is refused; a refusal is registered for the gate."""
        await self._queue.wait_for_turn(call)
        self._register_refusal_if_error(item, call)

    def _count_or_refuse_child(self, item: Item, effect: Spawn, spawned: dict[str, int]) -> None:
        """Count a child that a model requested, or refuse it alone."""
        ledger = self._ledgers.get_ledger(item.path)
        limits = ledger.limits
        error = _find_depth_error(child_path(item.path, effect.seq), limits) or _count_child_or_find_error(
            effect, limits, spawned
        )
        error = error or ledger.admit_children(1, by_model=True)
        if error is not None:
            self._refusals.refuse(item.path, (effect,), error)
        else:
            self._admitted.setdefault(item.path, {})[effect.seq] = True

    def _refuse_body_if_too_deep(self, item: Item, effect: CallBody) -> None:
        """Refuse the body of a tool that is nested too deeply; it counts as a level, not as a child."""
        error = _find_depth_error(child_path(item.path, effect.seq), item.plan.limits, "body of the tool")
        if error is not None:
            self._refusals.refuse(item.path, (effect,), error)

    def _count_or_refuse_siblings(self, first_item: Item) -> None:
        """
        Count the children that a handler requests at once, or refuse the whole request.

        The whole ``Gather`` is judged before any of it begins, whatever the width of its window; so nothing has started.
        """
        effects = (first_item.effect,) if first_item.gather is None else first_item.gather.effects
        spawns = [e for e in effects if isinstance(e, Spawn) and not e.tool_call_id] if first_item.is_first else []
        if not spawns:
            return
        ledger = self._ledgers.get_ledger(first_item.path)
        path = first_item.path
        error = _find_depth_error(child_path(path, spawns[0].seq), ledger.limits)
        if error is not None and spawns[0].is_hand_off:
            error = _make_hand_off_limit_error(spawns[0], error)
        if error is not None:
            self._refusals.refuse(path, spawns, error)
            return
        error = _find_child_count_error(len(spawns), ledger.given)
        error = error or ledger.admit_children(len(spawns), by_model=False)
        if error is not None:
            self._refusals.refuse(path, effects, error)
        else:
            self._admitted.setdefault(path, {}).update({effect.seq: False for effect in spawns})

    async def _perform_child_and_correct_count(self, item: Item, io: IO) -> Single:
        """Perform a child, and remove it from the number of children if it never started."""
        by_model = self._admitted.get(item.path, {}).pop(item.effect.seq, None)
        outcome = await self._inner.perform(item, io)
        child = outcome.value if isinstance(outcome, Value) else None
        has_started = not isinstance(child, ChildResult) or bool(child.run_id)
        if cast("Spawn", item.effect).is_background:
            has_started = isinstance(outcome, Value)
        if by_model is not None and not has_started:
            self._ledgers.get_ledger(item.path).count_children(-1, by_model=by_model)
        return outcome

    async def _perform_metered(self, item: Item, io: IO) -> Single:
        """Perform a model call once it has room, and count what it used, also if it is cancelled."""
        call = self._calls[item.path].pop(item.effect.seq)
        if call.is_late:
            self._queue.admit_refuse_or_queue(call)
            self._register_refusal_if_error(item, call)
        if call.turn is not None:
            await self._wait_for_turn(item, call)
        tokens, cost = call.estimate.tokens, call.estimate.cost or FREE
        used: tuple[int, Decimal] = (0, FREE)
        metered = _MeteredIO(io, partial(self._settle_and_requeue_call, item, call))
        try:
            outcome = await self._inner.perform(item, metered)
            used = self._compute_call_usage(item, outcome, tokens, cost)
        # A call that was cut off has been paid for in part; what is known of it counts, before the cancellation goes
        # on.
        except BaseException:
            used = self._compute_call_usage(
                item, Stop("cancelled", begun=io.find_stopped_call_usage(item)), tokens, cost
            )
            raise
        finally:
            # A limit that was reached between two attempts has been counted up to there.
            call.ledger.add_usage(max(0, used[0] - call.settled[0]), max(FREE, used[1] - call.settled[1]))
            self._queue.end_call(call)
        return outcome

    def _settle_and_requeue_call(self, item: Item, call: MeteredCall, usage: Usage | None) -> RoomWait | None:
        """Count the usage of a failed attempt, if it had any; then the next attempt waits for room like a new call."""
        if usage is None or not usage.total_tokens:
            return None
        cost = self._prices.compute_usage_cost(cast("CallModel", item.effect).request.model, usage) or FREE
        call.settled = call.settled[0] + usage.total_tokens, call.settled[1] + cost
        call.ledger.add_usage(usage.total_tokens, cost)
        self._queue.end_call(call)
        self._queue.admit_refuse_or_queue(call)
        return partial(self._wait_for_retry, call)

    async def _wait_for_retry(self, call: MeteredCall) -> LimitExceeded | None:
        """Wait for room for the next attempt of a call; return the error if it is refused."""
        await self._queue.wait_for_turn(call)
        return call.error

    def _compute_call_usage(self, item: Item, outcome: Single, tokens: int, cost: Decimal) -> tuple[int, Decimal]:
        """Return the tokens and cost of a model call; unknown ones count as reserved."""
        model = cast("CallModel", item.effect).request.model
        stated: Decimal | None = None
        if isinstance(outcome, Value) and isinstance(outcome.value, ModelReply):
            reply = outcome.value
            usage, stated, computed = reply.usage, reply.cost, self._prices.compute_reply_cost(model, reply)
            if usage is not None and usage.at_least and not usage.total_tokens:
                usage = computed = None  # of a reply that reports nothing only lost requests are known
        elif isinstance(outcome, Failure) and isinstance(outcome.error, ModelError):
            usage = outcome.error.usage or Usage()
            computed = self._prices.compute_usage_cost(model, usage)
        elif isinstance(outcome, Stop) and outcome.begun is not None:
            usage, stated = outcome.begun.usage, outcome.begun.cost
            computed = self._prices.compute_usage_cost(model, usage)
        else:
            return 0, FREE
        # The larger cost counts: a gateway may state 0 for a model whose price it does not know. What a reply does not
        # report counts as reserved, or a service that reports nothing would have no limit (requirements:X76).
        known = [one for one in (stated, computed) if one is not None]
        return tokens if usage is None else usage.total_tokens, max(known, default=cost)


def _find_depth_error(path: str, limits: Limits, subject: str = "child") -> LimitExceeded | None:
    """Return the error if a run at *path* would be deeper than ``max_depth``, or ``None``."""
    depth, most = path.count(".") + 1, limits.max_depth
    if most is None or depth <= most:
        return None
    msg = f"the {subject} would be {depth} levels below the root, and max_depth is {most}; raise Limits(max_depth=...)"
    return LimitExceeded(msg, kind="depth", limit=most)


def _make_hand_off_limit_error(effect: Spawn, error: LimitExceeded) -> LimitExceeded:
    """Return the depth *error* of a hand-off with a message that explains that each hand-off adds a level."""
    msg = (
        f"the conversation cannot be handed over to agent {effect.agent_id!r}: each hand-off of a run counts as a level of children, "
        f"and max_depth is {error.limit}; raise Limits(max_depth=...) to allow more hand-offs"
    )
    return LimitExceeded(msg, kind=error.kind, limit=error.limit)


def _is_raised_in_handler(effect: Spawn, error: StepEngineError) -> bool:
    """Return whether a refusal is raised at the handler's yield; an exceeded depth is in the child's result instead."""
    return not effect.tool_call_id and isinstance(error, LimitExceeded) and error.kind == "children"


def _find_child_count_error(count: int, limits: Limits) -> LimitExceeded | None:
    """Return the error if *count* children at once are more than an explicit ``max_children``, or ``None``."""
    most = limits.max_children
    if most is None or count <= most:
        return None
    msg = f"{count} children are requested at once, and max_children is {most}; none has started. Request fewer at a time or raise Limits(max_children=...)"
    return LimitExceeded(msg, kind="children", limit=most)


def _count_child_or_find_error(effect: Spawn, limits: Limits, spawned: dict[str, int]) -> LimitExceeded | None:
    """Count one more child of a tool call; return the error if that exceeds ``max_children``, or ``None``."""
    count = spawned.get(effect.tool_call_id, 0) + 1
    spawned[effect.tool_call_id] = count
    most = limits.max_children
    if most is None or count <= most:
        return None
    msg = f"this is child {count} of one call, and max_children is {most}; raise Limits(max_children=...)"
    return LimitExceeded(msg, kind="children", limit=most)


_Last: TypeAlias = tuple[JsonDict, ToolResult, int]
"""The input and the result of the last call of one tool in one run, and how many in a row were like it."""


class _Group(NamedTuple):
    """
    A group with calls of a model, until all of them have ended.

    Attributes:
        gather: The request for the group.
        calls: The calls of the model, in order.
        outcomes: The outcomes of the ended ones, by number.
    """

    gather: Gather
    calls: Sequence[CallTool]
    outcomes: dict[int, Single]


class Repeats:
    """
    Counts calls that repeat the last one of the same tool, input and result included; only calls of models count.

    It wraps the recorder, so that a resumed run also counts recorded calls. Refusals go through the gate inside. Calls of one group
    are refused before the first of them starts, and counted when all have ended. So the speed of a call decides nothing.

    Args:
        inner: What performs.
        refusals: Shared with the gate.
    """

    def __init__(self, inner: Performer, refusals: Refusals) -> None:
        self._inner = inner
        self._refusals = refusals
        self._last: dict[str, dict[str, _Last]] = {}
        self._groups: dict[str, _Group] = {}

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Refuse calls that were repeated ``max_identical_calls`` times; equal calls of one group count as repeated."""
        first = batch[0]
        most = first.plan.limits.max_identical_calls
        if most is not None and first.is_first:
            effects = (first.effect,) if first.gather is None else first.gather.effects
            self._refuse_repeated_calls(first.path, _select_model_calls(effects), most)
        return self._inner.begin(batch)

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect and compare its result if it is a model's call."""
        effect = item.effect
        if not isinstance(effect, CallTool) or effect.source != "model":
            return self._inner.perform(item, io)
        if not io.watched and item.plan.limits.max_identical_calls is None:
            return self._inner.perform(item, io)
        return self._perform_and_compare(item, self._inner.perform(item, io), io)

    def forget_run(self, path: str) -> None:
        """Drop the calls of an ended run."""
        self._last.pop(path, None)
        self._groups.pop(path, None)

    def _refuse_repeated_calls(self, path: str, calls: Iterable[CallTool], max_repeats: int) -> None:
        """Refuse each of *calls* that follows *max_repeats* calls of its tool with the same input, and with the same result if it is known."""
        repeated = {name: (given, times) for name, (given, _, times) in self._last.get(path, {}).items()}
        for effect in calls:
            given, times = repeated.get(effect.tool_name, (None, 0))
            if given != effect.input:
                times = 0
            if times < max_repeats:
                repeated[effect.tool_name] = effect.input, times + 1
                continue
            msg = (
                f"the model called {effect.tool_name!r} {times} times in a row with the same input, one after another with the "
                f"same result or together in one reply, and max_identical_calls is {max_repeats}"
            )
            self._refusals.refuse(path, (effect,), LimitExceeded(msg, kind="repetition", limit=max_repeats))

    async def _perform_and_compare(self, item: Item, performed: Awaitable[Single], io: IO) -> Single:
        """Await the outcome of a call, count the call if it repeats the last one, and return the outcome."""
        outcome = await performed
        self.count_repeated_call(item, outcome, io)
        return outcome

    def count_repeated_call(self, item: Item, outcome: Single, io: IO) -> None:
        """Count an ended model's call, or all calls of its group after the last of them; report the third identical one in a row."""
        effect, path, gather = cast("CallTool", item.effect), item.path, item.gather
        if effect.source != "model":
            return
        if gather is None:
            self._compare_with_last_call(path, effect, outcome, io)
            return
        group = self._groups.get(path)
        if group is None or group.gather is not gather:
            group = self._groups[path] = _Group(gather, _select_model_calls(gather.effects), {})
        group.outcomes[effect.seq] = outcome
        if len(group.outcomes) == len(group.calls):
            del self._groups[path]
            for call in group.calls:
                self._compare_with_last_call(path, call, group.outcomes[call.seq], io)

    def _compare_with_last_call(self, path: str, effect: CallTool, outcome: Single, io: IO) -> None:
        """Count a call as the first or as another identical one in a row, and report the third."""
        result = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(result, ToolResult):
            return
        calls = self._last.get(path)
        if calls is None:
            calls = self._last[path] = {}
        name, given, count = effect.tool_name, effect.input, 1
        last = calls.get(name)
        if last is not None:
            was_given, was, times = last
            # Input and result: a model that polls gets new results and is at work, one that gets the same again is stuck.
            if was_given == given and was.status == result.status and was.content == result.content:
                count = times + 1
        calls[name] = given, result, count
        if count == NOTICE_AFTER_CALLS and io.watched:
            call_id = effect.tool_call_id
            io.emit(Repeat(path=path, seq=effect.seq, tool_name=name, tool_call_id=call_id, count=count))


def _select_model_calls(effects: Iterable[Leaf]) -> list[CallTool]:
    return [effect for effect in effects if isinstance(effect, CallTool) and effect.source == "model"]
