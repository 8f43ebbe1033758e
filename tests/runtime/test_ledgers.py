"""
What a tree of runs may spend: calls are admitted, settled and refused in any order, and no cap is ever exceeded.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepengine.data.limits import Limits
from stepengine.runtime.limits import CallEstimate, RunningCalls, SpendingLedger

CAPS = st.none() | st.integers(10, 200)


@attrs.define
class Call:
    """
    A call under way, what was set aside for it, and where.
    """

    ledger: SpendingLedger
    tokens: int
    cost: Decimal


def limits(tokens: int | None, cents: int | None, children: int | None) -> Limits:
    dollars = None if cents is None else Decimal(cents) / 100
    return Limits(max_tokens=tokens, max_cost_usd=dollars, max_total_children=children)


class Trees(RuleBasedStateMachine):
    """
    A root and runs below it; beside each ledger, what was spent there and below.
    """

    @initialize(tokens=CAPS, cents=CAPS, children=st.none() | st.integers(0, 6))
    def begin(self, tokens: int | None, cents: int | None, children: int | None) -> None:
        given = limits(tokens, cents, children)
        self.root = SpendingLedger(given, given)
        self.ledgers = [self.root]
        self.parents: dict[int, SpendingLedger | None] = {id(self.root): None}
        self.calls: list[Call] = []
        self.spent = {id(self.root): [0, Decimal(0)]}
        self.started = {id(self.root): 0}

    def above(self, ledger: Any) -> list[SpendingLedger]:
        found = []
        while ledger is not None:
            found.append(ledger)
            ledger = self.parents[id(ledger)]
        return found

    @rule(
        at=st.integers(0, 9), tokens=CAPS, cents=CAPS, children=st.none() | st.integers(0, 3), count=st.integers(1, 3)
    )
    def spawn(self, at: int, tokens: int | None, cents: int | None, children: int | None, count: int) -> None:
        parent = self.ledgers[at % len(self.ledgers)]
        problem = parent.admit_children(count, by_model=False)
        caps = [(self.started[id(one)], one.given.max_total_children) for one in self.above(parent)]
        assert (problem is None) == all(most is None or started + count <= most for started, most in caps)
        if problem is not None:
            return
        for one in self.above(parent):
            self.started[id(one)] += count
        for _ in range(count):
            given = limits(tokens, cents, children)
            child = SpendingLedger(given, given, parent)
            self.ledgers.append(child)
            self.parents[id(child)] = parent
            self.spent[id(child)], self.started[id(child)] = [0, Decimal(0)], 0

    @rule(at=st.integers(0, 9), tokens=st.integers(1, 60), cents=st.integers(0, 60))
    def call(self, at: int, tokens: int, cents: int) -> None:
        """
        A call is admitted exactly when its worst case fits here and everywhere above.
        """
        ledger, cost = self.ledgers[at % len(self.ledgers)], Decimal(cents) / 100
        fits = True
        for one in self.above(ledger):
            most, dollars = one.limits.max_tokens, one.limits.max_cost_usd
            fits &= most is None or one.tokens + one.reserved_tokens + tokens <= most
            fits &= dollars is None or one.cost + one.reserved_cost + cost <= Decimal(str(dollars))
        refused = ledger.find_limit_error(tokens, cost, "test/m")
        assert (refused is None) == fits
        if refused is None:
            ledger.reserve(tokens, cost)
            self.calls.append(Call(ledger, tokens, cost))

    @precondition(lambda self: self.calls)
    @rule(at=st.integers(0, 9), share=st.fractions(0, 1))
    def settle(self, at: int, share: Any) -> None:
        """
        A call that has ended gives back what was set aside, and is counted with what it used.
        """
        done = self.calls.pop(at % len(self.calls))
        tokens, cost = int(done.tokens * share), done.cost * int(share * 100) / 100
        done.ledger.reserve(-done.tokens, -done.cost)
        done.ledger.add_usage(tokens, cost)
        for one in self.above(done.ledger):
            self.spent[id(one)] = [self.spent[id(one)][0] + tokens, self.spent[id(one)][1] + cost]

    @invariant()
    def no_cap_is_exceeded_and_the_sums_are_right(self) -> None:
        for one in getattr(self, "ledgers", ()):
            under_way = [call for call in self.calls if one in self.above(call.ledger)]
            reserved = (sum(call.tokens for call in under_way), sum(call.cost for call in under_way))
            assert (reserved, [one.tokens, one.cost]) == (
                (one.reserved_tokens, one.reserved_cost), self.spent[id(one)],
            )  # fmt: skip
            assert one.limits.max_tokens is None or one.tokens + one.reserved_tokens <= one.limits.max_tokens
            assert one.limits.max_cost_usd is None or one.cost + one.reserved_cost <= one.limits.max_cost_usd


TestTrees = pytest.mark.spec("reliability:I8", "reliability:R6")(Trees.TestCase)
TestTrees.settings = settings(max_examples=20, stateful_step_count=20)


@pytest.mark.parametrize(
    ("tokens", "cost", "tokens_left", "dollars_left", "fits"),
    [
        (60, "1", 100, None, True),
        (61, "1", 100, None, False),
        (None, "1", 100, None, False),
        (61, "0.5", None, "2.5", True),
        (61, "0.6", None, "2.5", False),
        (61, None, None, "2.5", False),
        (None, None, None, None, True),
    ],
)
def test_call_fits_beside_running_calls_within_remaining_limits(
    tokens: int | None, cost: str | None, tokens_left: int | None, dollars_left: str | None, fits: bool
) -> None:
    def estimate(tokens: int | None, cost: str | None) -> CallEstimate:
        return CallEstimate("test/m", 1, None, tokens, None if cost is None else Decimal(cost))

    running, first, call = RunningCalls(), estimate(40, "2"), estimate(tokens, cost)
    left = tokens_left, None if dollars_left is None else Decimal(dollars_left)

    assert running.fits(call, *left)
    running.count_call(first, 1)
    assert fits == running.fits(call, *left)
    running.count_call(first, -1)
    assert running.fits(call, *left)
