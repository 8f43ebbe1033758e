"""The spending of a run: tokens, money and credits of its model calls, tools and children."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.effects import CallModel
from stepengine.data.json import JsonDict
from stepengine.data.models import ModelReply
from stepengine.data.outcomes import Stop
from stepengine.data.state import ChildResult, RunStatus
from stepengine.data.usage import Spending, Usage, add_cost, filter_known_costs
from stepengine.errors import LimitExceeded

ZERO = Decimal(0)


class UsageTotals:
    """
    Running totals of tokens and cost; a part with an unknown cost makes the total unknown for good (reliability:I4).

    Attributes:
        children: The children, in the order in which they ended.
        child_run_ids: The run ids of those that ran.
        cost: What the run and its children cost in US dollars; ``None`` when a part is unknown.
        credits_used: The credits that they used.
        entries: How often something was added. A cached sum is current while this number is the same.
    """

    __slots__ = (
        "_by_model",
        "_children",
        "_own_cost",
        "_own_credits",
        "_usage",
        "child_run_ids",
        "children",
        "cost",
        "credits_used",
        "entries",
    )

    def __init__(self) -> None:
        self._by_model: dict[str, _Tally] = {}
        self._own_cost: Decimal | None = ZERO
        self._own_credits: float = 0
        self._usage: Usage | None = None
        self.cost: Decimal | None = ZERO
        self.credits_used: float = 0
        self.children: list[ChildResult] = []
        self.child_run_ids: tuple[str, ...] = ()
        self._children = NOTHING
        self.entries = 0

    def count_usage(self, model: str, usage: Usage | None, cost: Decimal | None, requests: int) -> None:
        """Add the usage of a model call that sent *requests* requests; a tool that reports usage counts under its own name."""
        self.entries += 1
        self._usage = None
        tally = self._by_model.get(model)
        if tally is None:
            tally = self._by_model[model] = _Tally()
        tally.add_call(usage, requests, cost)
        own = self._own_cost = None if cost is None or self._own_cost is None else self._own_cost + cost
        self.cost = add_cost(own, self._children.cost) if self._children is not NOTHING else own

    def count_reply(self, effect: CallModel, reply: ModelReply) -> None:
        """Add usage and cost of a reply."""
        sent = 1 if reply.usage is None else reply.usage.requests or 1
        self.count_usage(reply.model or effect.request.model, reply.usage, reply.cost, sent)

    def count_credits(self, credits_used: float) -> None:
        """Add credits that a tool reported."""
        self.entries += 1
        self._own_credits += credits_used
        self.credits_used = self._own_credits + self._children.credits_used

    def count_child(self, child: ChildResult) -> None:
        """Add a child and its spending; the changes of an inline child are not applied here."""
        # What an inline child leaves is taken over once, by its parent; kept here it would hold a second conversation
        # for as long as the run lasts.
        self.add_children([child if child.left is None else attrs.evolve(child, left=None)], child.spending)

    def add_children(self, children: Sequence[ChildResult], spending: Spending) -> None:
        """Append *children* to the list and add *spending*, which includes theirs, to the totals."""
        self.entries += 1
        self.children += children
        self.child_run_ids += tuple([child.run_id for child in children if child.run_id])
        others = self._children = self._children + spending
        self._usage = None
        self.cost = add_cost(self._own_cost, others.cost)
        self.credits_used = self._own_credits + others.credits_used

    def count_stopped_child(self, stop: Stop) -> None:
        """Add the child whose end a stop reports, if it reports one."""
        if stop.child is not None:
            self.count_child(mark_stopped_as_cancelled(stop.child))

    def get_total_usage(self) -> Usage:
        """Return the usage of the run and its children."""
        # Added up when somebody looks: at each step of a run that nobody watches nobody does.
        if self._usage is None:
            if len(self._by_model) == 1:
                (only,) = self._by_model.values()
                own = only.compute_usage()
            else:
                own = sum([tally.compute_usage() for tally in self._by_model.values()], Usage())
            self._usage = own + self._children.usage if self._children is not NOTHING else own
        return self._usage

    def make_spending(self, agent_id: str) -> Spending:
        """Return all spending, by agent and by model; *agent_id* is the run's own agent."""
        by_model = JsonDict({model: tally.compute_usage() for model, tally in self._by_model.items()})
        own = self.get_total_usage() if self._children is NOTHING else sum(by_model.values(), Usage())
        by_agent = JsonDict({agent_id: own})
        agent_costs = filter_known_costs(by_agent, {agent_id: self._own_cost})
        model_costs = filter_known_costs(by_model, {model: tally.cost for model, tally in self._by_model.items()})
        mine = Spending(own, self._own_cost, self._own_credits, by_agent, by_model, agent_costs, model_costs)
        return mine + self._children if self._children is not NOTHING else mine


NOTHING = Spending()


class _Tally:
    """A running sum of ``Usage`` and cost; the value is created on demand."""

    __slots__ = ("_at_least", "_numbers", "cost")

    def __init__(self) -> None:
        self.cost: Decimal | None = ZERO
        self._numbers = [0, 0, 0, 0, 0, 0]
        self._at_least = False

    def add_call(self, usage: Usage | None, request_count: int, cost: Decimal | None) -> None:
        """Add a call. Without *usage* the total is a lower bound; without *cost* the total cost is unknown."""
        self.cost = None if cost is None or self.cost is None else self.cost + cost
        numbers = self._numbers
        numbers[5] += request_count
        if usage is None:
            self._at_least = True
            return
        numbers[0] += usage.input_tokens
        numbers[1] += usage.output_tokens
        numbers[2] += usage.cache_read_tokens
        numbers[3] += usage.cache_write_tokens
        numbers[4] += usage.reasoning_tokens
        self._at_least = self._at_least or usage.at_least

    def compute_usage(self) -> Usage:
        sent, said, read, written, thought, requests = self._numbers
        return Usage(sent, said, read, written, thought, requests, self._at_least)


def mark_stopped_as_cancelled(child: ChildResult[Any]) -> ChildResult[Any]:
    """Return *child* as cancelled and without error if it was cancelled or ran out of time with its parent; else unchanged."""
    # Both may come at the same moment, and which of them was first for the child is recorded nowhere.
    is_late = isinstance(child.error, LimitExceeded) and child.error.kind == "seconds"
    if is_late or child.status is RunStatus.CANCELLED:
        return attrs.evolve(child, status=RunStatus.CANCELLED, error=None)
    return child
