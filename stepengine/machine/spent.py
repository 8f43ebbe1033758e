"""What a run and its children spent so far."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from stepengine.data.run import ChildResult
from stepengine.data.usage import Spending, Usage, add_cost, quick_usage

__all__ = ("Spent",)

NOTHING = Usage()
UNKNOWN = Usage(at_least=True)
ZERO = Decimal(0)


class Spent:
    """Sums that only grow; a part of the cost that is unknown makes the sum unknown for ever (reliability I4)."""

    def __init__(self) -> None:
        self.by_model: dict[str, Usage] = {}
        self.own_cost: Decimal | None = Decimal(0)
        self.own_credits: float = 0
        self.children: list[ChildResult[Any]] = []
        self._children = Spending()

    def count(self, model: str, usage: Usage | None, cost: Decimal | None, requests: int) -> None:
        """Add what one attempt of a model call used; *requests* is 1 when it gave a reply, else 0."""
        known = usage or UNKNOWN
        old = self.by_model.get(model) or NOTHING
        self.by_model[model] = quick_usage(
            old.input_tokens + known.input_tokens,
            old.output_tokens + known.output_tokens,
            old.cache_read_tokens + known.cache_read_tokens,
            old.cache_write_tokens + known.cache_write_tokens,
            old.reasoning_tokens + known.reasoning_tokens,
            old.requests + requests,
            old.at_least or known.at_least,
        )
        if cost is not ZERO:
            self.own_cost = add_cost(self.own_cost, cost)

    def count_child(self, child: ChildResult[Any]) -> None:
        """Add a child and what it spent."""
        self.children.append(child)
        self._children = self._children + child.spending

    @property
    def _own_usage(self) -> Usage:
        own = list(self.by_model.values())
        return own[0] if len(own) == 1 else sum(own, Usage())

    @property
    def usage(self) -> Usage:
        """Tokens of the run and its children."""
        return self._own_usage + self._children.usage if self.children else self._own_usage

    @property
    def cost(self) -> Decimal | None:
        """US dollars of the run and its children."""
        return add_cost(self.own_cost, self._children.cost)

    @property
    def credits_used(self) -> float:
        """Credits that tools of the run and its children reported."""
        return self.own_credits + self._children.credits_used

    def total(self, agent_id: str) -> Spending:
        """Return everything, by agent and by model; *agent_id* is the run's own agent."""
        own = self._own_usage
        mine = Spending(own, self.own_cost, self.own_credits, {agent_id: own}, self.by_model)
        return mine + self._children if self.children else mine
