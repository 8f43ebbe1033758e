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
from stepengine.data.outcomes import Begun, Failure, Single, Value
from stepengine.data.state import AgentState, ChildResult
from stepengine.data.usage import Usage
from stepengine.errors import AgentError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.limits import Ledgers, LimitGate, Refusals, UsageMeter
from stepengine.runtime.performer import IO, Item, Middleware, Performer
from stepengine.runtime.performing import NOTHING
from stepengine.runtime.prices import Prices
from stepengine.runtime.sizes import expected_tokens
from stepengine.testing.invariants import Watched, name_of, refuse

__all__ = ("Budgets", "Passing", "at_once")
__tracebackhide__ = True  # a failed test ends at its author's line

Act = Callable[[Item], Single]
Ended = Callable[[Sequence[str]], dict[str, Any] | None]
DOLLARS_PER_TOKEN = Decimal("0.000001")
"""What a simulated model costs."""


def _price(_: str, usage: Usage, at: datetime) -> Decimal:  # noqa: ARG001 - called by position
    return usage.total_tokens * DOLLARS_PER_TOKEN


PRICES = Prices(_price, lambda: datetime.fromtimestamp(0, UTC))


class _Acting:
    """A performer that is a function."""

    def __init__(self, act: Act) -> None:
        self._act = act

    def begin(self, _: Sequence[Item]) -> Awaitable[None]:
        """Do nothing."""
        return NOTHING

    async def perform(self, item: Item, _: IO) -> Single:
        """Do it at once."""
        return self._act(item)


class Passing:
    """
    A performer that hands effects on, and looks at what comes of them.

    Args:
        inner: What performs.
        look: Is given each effect and its outcome, and returns the outcome.
    """

    def __init__(self, inner: Performer, look: Callable[[Item, Single], Single]) -> None:
        self._inner = inner
        self._look = look
        self.begin = inner.begin

    async def perform(self, item: Item, io: IO) -> Single:
        """Hand an effect on."""
        return self._look(item, await self._inner.perform(item, io))


class _Unheard:
    """The ``IO`` of simulated effects: nobody listens, and children are driven by the world, which says how they *ended*."""

    watched = False

    def __init__(self, ended: Ended) -> None:
        self._ended = ended

    def emit(self, event: Event) -> None:
        """Do nothing."""

    def attempt(self, failure: Failure, usage: Usage | None) -> None:
        """Do nothing."""

    def begun(self, item: Item) -> Begun | None:
        """Return that nothing is known."""

    def waits(self, item: Item) -> Awaitable[None]:
        """Do nothing."""
        return NOTHING

    async def ends(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> dict[str, Any] | None:
        """Return how children in the background ended, which do so now."""
        return self._ended(paths)

    def stands(self, item: Item) -> None:
        """Do nothing."""

    def drive(self, plan: RunPlan, state: AgentState, path: str) -> Awaitable[Finished]:
        """Refuse: the world drives children without a task."""
        msg = f"a simulated world drives the run at {path!r} itself"
        raise AssertionError(msg)


def at_once(awaitable: Awaitable[object]) -> Any:
    """Return what *awaitable* gives; nothing in a simulated world waits."""
    try:
        next(awaitable.__await__())
    except StopIteration as stop:
        return stop.value
    msg = "a simulated effect waited"
    raise AssertionError(msg)


class Budgets:
    """
    What the effects of a simulated tree pass through, from the outside in: meter, recorder, gate, world.

    Args:
        recording: Puts the recorder around the gate.
        happens: Lets an effect happen.
        now: Milliseconds since the simulated process began.
        ended: Says how children in the background ended.
    """

    def __init__(self, recording: Middleware, happens: Act, now: Callable[[], int], ended: Ended) -> None:
        self._io = _Unheard(ended)
        self._refusals = Refusals()
        self._ledgers = Ledgers()
        gate = LimitGate(_Acting(happens), self._refusals, now)
        self._recording = recording(gate)
        self._meter = UsageMeter(self._recording, self._refusals, self._ledgers, PRICES)
        self._nodes: dict[str, _Node] = {}
        self._held: dict[tuple[str, int], int] = {}

    def opens(self, plan: RunPlan) -> None:
        """Begin to count for a run."""
        self._ledgers.open(plan.path, plan)
        self._nodes[plan.path] = _Node(plan.limits, plan.given)

    def closes(self, path: str) -> None:
        """
        Forget a run that has ended.

        Raises:
            Violation: when something is still reserved for it.
        """
        self._meter.forget(path)
        for at in [at for at in self._held if at[0] == path]:
            self._release(at)
        ledger = self._ledgers.of(path)
        self._ledgers.close(path)
        if ledger.reserved_tokens or ledger.reserved_cost:
            refuse("I8", f"{ledger.reserved_tokens} tokens are still reserved after the end of run {path or 'root'}")
        del self._nodes[path]

    def begin(self, run: Watched, members: Sequence[Leaf], gather: Gather | None) -> None:
        """
        Reserve for what is asked for at once.

        Raises:
            Violation: when more was let through than there is room for.
            ReplayDivergence: when something else is recorded.
        """
        path = run.plan.path
        at_once(self._meter.begin([Item(path, effect, run.plan, gather) for effect in members]))
        together: Counter[str] = Counter()
        for effect in members:
            if not isinstance(effect, (CallModel, Spawn)) or (path, effect.seq) in self._refusals:
                continue
            if isinstance(effect, CallModel):
                self._admitted(path, effect)
            elif isinstance(effect, Spawn):
                together[effect.tool_call_id] += 1
                self._count_start(path, effect, together[effect.tool_call_id])

    def run(self, item: Item) -> Single:
        """Run a child in the background; what it uses counts when it does."""
        outcome: Single = at_once(self._recording.perform(item, self._io))
        return outcome

    def perform(self, run: Watched, effect: Leaf, gather: Gather | None = None) -> Single:
        """Return what *effect* gives, and count what it used."""
        outcome: Single = at_once(self._meter.perform(Item(run.plan.path, effect, run.plan, gather), self._io))
        at = (run.plan.path, effect.seq)
        if at in self._held:
            used = _used_tokens(outcome)
            held = self._release(at)
            for node in self._lineage(at[0]):
                node.tokens += held if used is None else used
        child = getattr(outcome, "value", None)
        if isinstance(child, ChildResult) and not child.run_id and isinstance(effect, Spawn):
            for node in self._lineage(at[0]):
                node.count(effect, -1)
        return outcome

    def give_up(self, path: str, effect: Spawn) -> None:
        """Keep a child from being started, because another one of its group failed."""
        self._refusals.refuse(path, (effect,), AgentError("given up, because another child failed"))

    # --- the second count ---------------------------------------------------------------------------------------------

    def _lineage(self, path: str) -> Iterator[_Node]:
        while True:
            yield self._nodes[path]
            if not path:
                return
            path = path.rpartition(".")[0]

    def _admitted(self, path: str, effect: CallModel) -> None:
        nodes = [*self._lineage(path)]
        if all(node.most is None for node in nodes):
            return
        tokens = expected_tokens(effect.request)
        for node in nodes:
            if node.most is not None and node.tokens + node.reserved + tokens > node.most:
                refuse(
                    "I8",
                    f"the model call {name_of((path, effect.seq))} needs {tokens} tokens and was let through, with "
                    f"{node.tokens} of {node.most} used and {node.reserved} reserved",
                )
            node.reserved += tokens
        self._held[(path, effect.seq)] = tokens

    def _release(self, at: tuple[str, int]) -> int:
        tokens = self._held.pop(at)
        for node in self._lineage(at[0]):
            node.reserved -= tokens
        return tokens

    def _count_start(self, path: str, effect: Spawn, together: int) -> None:
        depth = path.count(".") + 1 + bool(path)
        nodes = [*self._lineage(path)]
        for node in nodes:
            node.count(effect, 1)
        by_model = bool(effect.tool_call_id)
        own = nodes[0].limits if by_model else nodes[0].given
        due = (
            ("level of children", depth, nodes[0].limits.max_depth),
            ("child of one call", together, own.max_children),
            *[("child of the tree", node.children, node.given.max_total_children) for node in nodes],
            *[("child for a model", node.asked, node.limits.max_total_children) for node in nodes if by_model],
        )
        for what, number, most in due:
            if most is not None and number > most:
                refuse("I8", f"{name_of((path, effect.seq))} starts {what} number {number}, and {most} are allowed")


@attrs.define
class _Node:
    """What one run and those below it used, as counted here."""

    limits: Limits
    given: Limits
    tokens: int = 0
    reserved: int = 0
    children: int = 0
    asked: int = 0

    def count(self, child: Spawn, number: int) -> None:
        """Count a child, and whether a model asked for it."""
        self.children += number
        self.asked += number if child.tool_call_id else 0

    @property
    def most(self) -> int | None:
        """How many tokens there may be: by their number, or by what they cost."""
        dollars = self.limits.max_cost_usd
        bounds = [] if self.limits.max_tokens is None else [self.limits.max_tokens]
        if dollars is not None:
            bounds.append(int(Decimal(str(dollars)) / DOLLARS_PER_TOKEN))
        return min(bounds, default=None)


def _used_tokens(outcome: Single) -> int | None:
    """Return what a model call used; ``None`` when nobody said it."""
    if isinstance(outcome, Value) and isinstance(outcome.value, ModelReply):
        return None if outcome.value.usage is None else outcome.value.usage.total_tokens
    used: Usage | None = getattr(getattr(outcome, "error", None), "usage", None)
    return used.total_tokens if used is not None else 0
