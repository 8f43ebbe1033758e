"""
``ChildBudgets``: the limits that a run shares with children on other workers.

No ledger reaches over machines. A child gets a part of the remaining budgets, which counts as used in this run until the child has
ended and its real usage is known (durable:U23).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

from stepengine.data.effects import RUNS, CallBody, Spawn
from stepengine.data.limits import Limits
from stepengine.data.usage import Usage
from stepengine.durable.executions import DurableRun
from stepengine.runtime.limits import SpendingLedger
from stepengine.runtime.performer import Item
from stepengine.runtime.tree import RunTree


class ChildBudgets:
    """
    Reserves parts of the budgets of a run's tree for its children.

    Args:
        run: The execution, whose tree has the ledgers.
    """

    def __init__(self, run: DurableRun) -> None:
        self._run = run
        self._siblings: dict[tuple[str, int], _Siblings] = {}

    @contextlib.contextmanager
    def reserve_share_for_child(self, item: Item) -> Iterator[Limits | None]:
        """
        Reserve a part of the run's budgets for a child until it has ended.

        Children that run at once get equal parts. A child that runs alone gets all remaining budgets.
        """
        siblings = self._get_or_create_siblings(item)
        try:
            with self.reserve_equal_part(item.path, siblings.count_start_and_get_part_count()) as share:
                yield share
        finally:
            siblings.count_end()

    @contextlib.contextmanager
    def reserve_equal_part(self, path: str, parts: int) -> Iterator[Limits | None]:
        """Reserve one of *parts* equal parts of the remaining budgets of the run at *path*, while the block runs."""
        ledger = self._run.tree.performers.get_ledger(path)
        given = _divide_remaining_budgets(ledger, parts)
        deadline = _find_deadline(self._run.tree, path)
        if deadline is not None:
            given["max_seconds"] = max(0.0, deadline - asyncio.get_running_loop().time())
        room = given.get("max_tokens", 0), given.get("max_cost_usd", Decimal(0))
        ledger.reserve(*room)
        children = given.get("max_total_children", 0)
        ledger.count_children(children, by_model=False)
        try:
            yield Limits(**given) if given else None
        # Released as a whole; `count_child_usage` counts the child's real usage with its result.
        finally:
            ledger.reserve(-room[0], -room[1])
            ledger.count_children(-children, by_model=False)

    def count_child_usage(self, item: Item, usage: Usage, cost: Decimal | None, descendant_count: int) -> None:
        """Count the usage of a child or remote body and its *descendant_count* runs against this run's budgets."""
        ledger = self._run.tree.performers.get_ledger(item.path)
        ledger.count_children(descendant_count, by_model=_was_requested_by_model(item))
        # The child's own process has counted it there; here it is counted a second time, in the budget that the
        # parent's next call is judged by.
        ledger.add_usage(usage.total_tokens, cost or Decimal(0))

    def _get_or_create_siblings(self, item: Item) -> _Siblings:
        """Return the siblings of a child, shared by its group; those of earlier groups are dropped."""
        first = item.path, item.effect.seq if item.gather is None else item.gather.effects[0].seq
        known = self._siblings.get(first)
        if known is None:
            # The children of earlier groups have ended.
            self._siblings = {first: (known := _Siblings(item))}
        return known


class _Siblings:
    """Counts the children of one group that are running or still to start."""

    def __init__(self, item: Item) -> None:
        together = (item.effect,) if item.gather is None else item.gather.effects
        width = item.plan.limits.max_concurrent_children if item.gather is None else item.gather.concurrency
        self._width = width or item.plan.limits.max_concurrent_children or len(together)
        self._to_come = sum(isinstance(effect, RUNS) for effect in together)
        self._running = 0

    def count_start_and_get_part_count(self) -> int:
        """Count a child as running. Return into how many parts to split the remaining budgets: one for each child that can start now."""
        # Only those of the group that may run at once share the remaining budgets: of ten children of which two run at
        # a time each gets half, and the next two get what these leave.
        among = max(1, min(self._width - self._running, self._to_come))
        self._to_come -= 1
        self._running += 1
        return among

    def count_end(self) -> None:
        self._running -= 1


def _was_requested_by_model(item: Item) -> bool:
    """Return whether a model asked for the run that an effect starts."""
    effect, body = item.effect, item.plan.body
    if isinstance(effect, CallBody):
        return effect.source == "model" if body is None else body.by_model
    return bool(cast("Spawn", effect).tool_call_id)


def _divide_remaining_budgets(ledger: SpendingLedger, parts: int) -> dict[str, Any]:
    """Return the remaining budgets of a run, divided by *parts*. For each budget the smallest of the run and its ancestors counts."""
    found: dict[str, list[Any]] = {}
    for around in (ledger, *ledger.above):
        limits = around.limits
        if limits.max_tokens is not None:
            left = limits.max_tokens - around.tokens - around.reserved_tokens
            found.setdefault("max_tokens", []).append(max(0, left) // parts)
        if limits.max_cost_usd is not None:
            dollars = Decimal(str(limits.max_cost_usd)) - around.cost - around.reserved_cost
            found.setdefault("max_cost_usd", []).append(max(Decimal(0), dollars) / parts)
        if around.given.max_total_children is not None:
            more = around.given.max_total_children - around.children
            found.setdefault("max_total_children", []).append(max(0, more) // parts)
    return {name: min(values) for name, values in found.items()}


def _find_deadline(tree: RunTree, path: str) -> float | None:
    """Return the earliest deadline of a run and its ancestors in seconds of the event loop; ``None`` without a deadline."""
    paths = [path, *[path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)], ""]
    ends = [tree.clock.deadlines[each][0] for each in paths if each in tree.clock.deadlines]
    return min(ends, default=None)
