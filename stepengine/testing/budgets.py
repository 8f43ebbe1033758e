"""
The budgets of a simulated tree.

Here stand the meter and the gate of real runs, driven without an event loop, and a second count that judges what they let
through.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.effects import CallModel, Gather, Leaf, Spawn
from stepengine.data.events import Event
from stepengine.data.limits import Limits
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Failure, PartialUsage, Single, Value
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.usage import Usage
from stepengine.errors import AgentError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.limits import Ledgers, LimitGate, Refusals, UsageMeter
from stepengine.runtime.performer import IO, Item, Middleware, Performer, RoomWait
from stepengine.runtime.prices import Prices
from stepengine.runtime.services import get_requested_output_limit
from stepengine.runtime.sizes import estimate_request_tokens
from stepengine.testing.invariants import WatchedRun, format_address, raise_violation

__tracebackhide__ = True  # a failed test ends at its author's line

Act = Callable[[Item], Single]
Ended = Callable[[Sequence[str]], dict[str, Any] | None]
DOLLARS_PER_TOKEN = Decimal("0.000001")
"""What a simulated model costs."""


PRICES = Prices(lambda _, usage, __: usage.total_tokens * DOLLARS_PER_TOKEN, lambda: datetime.fromtimestamp(0, UTC))


class _FunctionPerformer:
    """A performer that calls a function."""

    def __init__(self, act: Act) -> None:
        self._act = act

    async def begin(self, _: Sequence[Item]) -> None:
        """Do nothing."""

    async def perform(self, item: Item, _: IO) -> Single:
        """Call the function and return its outcome."""
        return self._act(item)


class ForwardingPerformer:
    """
    A performer that forwards effects and can replace their outcomes.

    Args:
        inner: The performer of the effects.
        replace_outcome: Receives each effect with its outcome, and returns the outcome to use.
    """

    def __init__(self, inner: Performer, replace_outcome: Callable[[Item, Single], Single]) -> None:
        self._inner = inner
        self._replace_outcome = replace_outcome
        self.begin = inner.begin

    async def perform(self, item: Item, io: IO) -> Single:
        """Forward an effect, and return the outcome that *replace_outcome* returns for it."""
        return self._replace_outcome(item, await self._inner.perform(item, io))


class _SilentIO:
    """The ``IO`` of simulated effects: events are dropped, and *run_children* runs background children."""

    watched = False

    def __init__(self, run_children: Ended) -> None:
        self._run_children = run_children

    def emit(self, event: Event) -> None:
        """Do nothing."""

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """Do nothing."""
        return None

    def find_stopped_call_usage(self, item: Item) -> PartialUsage | None:
        """Return ``None``: no stopped call is known."""

    async def record_waiting_call(self, item: Item) -> None:
        """Do nothing."""

    async def wait_for_children(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> dict[str, Any] | None:
        """Run the background children *paths* to their end, and return their results."""
        return self._run_children(paths)

    def record_suspension(self, item: Item) -> None:
        """Do nothing."""

    def run_child(self, plan: RunPlan, state: AgentState, path: str) -> Awaitable[Finished]:
        """Raise an error: the world drives children without a task."""
        msg = f"a simulated world drives the run at {path!r} itself"
        raise AssertionError(msg)


def run_without_waiting(awaitable: Awaitable[object]) -> Any:
    """Return the result of an awaitable that must not wait; raise ``AssertionError`` if it waits."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        return stop.value
    msg = "a simulated effect waited"
    raise AssertionError(msg)


class Budgets:
    """
    The limits of a simulated tree; its effects pass through meter, recorder, gate and world.

    Args:
        recording: Puts the recorder around the gate.
        perform_effect: Returns the outcome of an effect in the world.
        now: Returns the milliseconds since the simulated process started.
        run_children: Runs background children and returns their results.
    """

    def __init__(self, recording: Middleware, perform_effect: Act, now: Callable[[], int], run_children: Ended) -> None:
        self._io = _SilentIO(run_children)
        self._refusals = Refusals()
        self._ledgers = Ledgers()
        gate = LimitGate(_FunctionPerformer(perform_effect), self._refusals, now)
        self._recording = recording(gate)
        self._meter = UsageMeter(
            self._recording, self._refusals, self._ledgers, PRICES, find_output_limit=get_requested_output_limit
        )
        self._nodes: dict[str, _Node] = {}

    def open_run(self, plan: RunPlan) -> None:
        """Start to count the usage of a run."""
        self._ledgers.create_ledger(plan.path, plan)
        self._nodes[plan.path] = _Node(plan.limits, plan.given)

    def close_run(self, path: str) -> None:
        """
        Remove a run that has ended, and release what it has reserved.

        Raises:
            Violation: when something is still reserved for it.
        """
        self._meter.release_run_reservations(path)
        for at in [at for at in self._nodes[path].held if at[0] == path]:
            self._release_reserved_tokens(at)
        ledger = self._ledgers.get_ledger(path)
        self._ledgers.close_ledger(path)
        running = ledger.running
        if running.count or running.tokens or running.cost:
            raise_violation("I8", f"{running.tokens} tokens are still reserved after the end of run {path or 'root'}")
        del self._nodes[path]

    def has_bounded_calls(self, path: str) -> bool:
        """Return whether a limit on tokens or cost applies to the model calls of a run, so that a call may wait for room."""
        return self._ledgers.get_ledger(path).bounded

    def count_startable(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather | None) -> int:
        """Return how many of the first *members* can start together within the limits; at least one."""
        return self._meter.count_startable([Item(run.plan.path, effect, run.plan, gather) for effect in members])

    def start_effects(self, run: WatchedRun, members: Sequence[Leaf], gather: Gather | None) -> None:
        """
        Start effects together: reserve their tokens and count their children.

        Raises:
            Violation: when more was let through than there is room for.
            ReplayDivergence: when something else is recorded.
        """
        path = run.plan.path
        run_without_waiting(self._meter.begin([Item(path, effect, run.plan, gather) for effect in members]))
        together: Counter[str] = Counter()
        for effect in members:
            if not isinstance(effect, (CallModel, Spawn)) or (path, effect.seq) in self._refusals.errors:
                continue
            if isinstance(effect, CallModel):
                self._check_and_reserve_tokens(path, effect)
            elif isinstance(effect, Spawn):
                together[effect.tool_call_id] += 1
                self._count_and_check_child_start(path, effect, together[effect.tool_call_id])

    def run_background_child(self, item: Item) -> Single:
        """Run a background child to its end by the run's recorder, without waiting, and return its outcome."""
        outcome: Single = run_without_waiting(self._recording.perform(item, self._io))
        return outcome

    def perform(self, run: WatchedRun, effect: Leaf, gather: Gather | None = None) -> Single:
        """Return the outcome of *effect*, and count its tokens; a child that was refused does not count."""
        outcome: Single = run_without_waiting(
            self._meter.perform(Item(run.plan.path, effect, run.plan, gather), self._io)
        )
        at = (run.plan.path, effect.seq)
        if at in self._nodes[at[0]].held:
            used = _count_used_tokens(outcome)
            held = self._release_reserved_tokens(at)
            for node in self._iterate_run_and_ancestors(at[0]):
                node.tokens += held if used is None else used
        child = getattr(outcome, "value", None)
        if isinstance(child, ChildResult) and not child.run_id and isinstance(effect, Spawn):
            for node in self._iterate_run_and_ancestors(at[0]):
                node.add_children(effect, -1)
        return outcome

    def refuse_child_start(self, path: str, effect: Spawn) -> None:
        """Refuse the planned start of a child, because another child of its group failed."""
        self._refusals.refuse(path, (effect,), AgentError("not started, because another child failed"))

    # --- the second count ---------------------------------------------------------------------------------------------

    def _iterate_run_and_ancestors(self, path: str) -> Iterator[_Node]:
        """Yield the counts of the run at *path*, then those of each run above it."""
        while True:
            yield self._nodes[path]
            if not path:
                return
            path = path.rpartition(".")[0]

    def _check_and_reserve_tokens(self, path: str, effect: CallModel) -> None:
        """Reserve the tokens of a model call; raise ``Violation`` if they exceed a limit of its run or of one above."""
        nodes = [*self._iterate_run_and_ancestors(path)]
        if all(node.token_limit is None for node in nodes):
            return
        prompt, named = estimate_request_tokens(effect.request), effect.request.settings.max_tokens
        call = _RunningCall(prompt + (named or 0), is_bounded=named is not None)
        for node in nodes:
            # A call may run alone if what is known of it fits, and beside others only if all of that is known.
            is_open = bool(node.held) and not all(each.is_bounded for each in (call, *node.held.values()))
            reserved = sum(each.tokens for each in node.held.values())
            if node.token_limit is not None and (is_open or node.tokens + reserved + call.tokens > node.token_limit):
                raise_violation(
                    "I8",
                    f"the model call {format_address((path, effect.seq))} needs {call.tokens} tokens and was allowed, with "
                    f"{node.tokens} of {node.token_limit} used and {reserved} reserved",
                )
            node.held[path, effect.seq] = call

    def _release_reserved_tokens(self, address: tuple[str, int]) -> int:
        """Remove a running model call from its run and the runs above, and return the tokens that it had reserved."""
        held = [node.held.pop(address) for node in self._iterate_run_and_ancestors(address[0])]
        return held[0].tokens

    def _count_and_check_child_start(self, path: str, effect: Spawn, group_size: int) -> None:
        """Count the start of a child; raise ``Violation`` if it exceeds a limit on depth or number of children."""
        depth = path.count(".") + 1 + bool(path)
        nodes = [*self._iterate_run_and_ancestors(path)]
        for node in nodes:
            node.add_children(effect, 1)
        by_model = bool(effect.tool_call_id)
        own = nodes[0].limits if by_model else nodes[0].given
        due = (
            ("level of children", depth, nodes[0].limits.max_depth),
            ("child of one call", group_size, own.max_children),
            *[("child of the tree", node.children, node.given.max_total_children) for node in nodes],
            *[("child for a model", node.asked, node.limits.max_total_children) for node in nodes if by_model],
        )
        for what, number, most in due:
            if most is not None and number > most:
                raise_violation(
                    "I8",
                    f"{format_address((path, effect.seq))} starts {what} number {number}, but only {most} are allowed",
                )


@attrs.frozen
class _RunningCall:
    """A running model call: its tokens as far as they are known, and whether it can use no more."""

    tokens: int
    is_bounded: bool


@attrs.define
class _Node:
    """The usage of one run and of the runs below it."""

    limits: Limits
    given: Limits
    tokens: int = 0
    held: dict[tuple[str, int], _RunningCall] = attrs.field(factory=dict)
    children: int = 0
    asked: int = 0

    def add_children(self, child: Spawn, change: int) -> None:
        """Add *change* to the number of children, and to that of children that a model requested if it requested *child*."""
        self.children += change
        self.asked += change if child.tool_call_id else 0

    @property
    def token_limit(self) -> int | None:
        """The lower of the token limit and the cost limit in tokens; None without both."""
        dollars = self.limits.max_cost_usd
        bounds = [] if self.limits.max_tokens is None else [self.limits.max_tokens]
        if dollars is not None:
            bounds.append(int(Decimal(str(dollars)) / DOLLARS_PER_TOKEN))
        return min(bounds, default=None)


def _count_used_tokens(outcome: Single) -> int | None:
    """Return the tokens of a finished model call, 0 if it failed without usage; None if its usage is unknown."""
    if isinstance(outcome, Value) and isinstance(outcome.value, ModelReply):
        return None if outcome.value.usage is None else outcome.value.usage.total_tokens
    used: Usage | None = getattr(getattr(outcome, "error", None), "usage", None)
    return used.total_tokens if used is not None else 0
