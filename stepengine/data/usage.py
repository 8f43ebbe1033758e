"""The usage and cost of model calls."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.faults import format_value
from stepengine.data.json import JsonDict
from stepengine.errors import DataError

MAX_COST_USD = 10**12
"""In US dollars, of one call: far above any bill, and sums of such costs stay far below the largest decimal number."""
MAX_EXPONENT = 1_000
"""Of a stored number, in powers of ten. Python adds numbers up to a million of them, and raises beyond."""


@frozen(weakref_slot=False)
class Usage:
    """
    Tokens of model calls in disjoint buckets that add up to the total.

    Attributes:
        input_tokens: Prompt tokens that came from no cache.
        output_tokens: Visible reply tokens.
        cache_read_tokens: Prompt tokens read from the provider's cache.
        cache_write_tokens: Prompt tokens written to the provider's cache.
        reasoning_tokens: Reply tokens spent on thinking.
        requests: Requests that were sent: those that were answered with a reply, and those whose reply was lost or cut off.
            In the usage of a single reply, its own and the lost ones before it; 0 means its own alone.
        at_least: Whether some part is unknown, so that the numbers are lower bounds.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0
    requests: int = 0
    at_least: bool = False

    @property
    def prompt_tokens(self) -> int:
        """All input tokens, cached or not."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens

    @property
    def completion_tokens(self) -> int:
        """All output tokens, thinking included."""
        return self.output_tokens + self.reasoning_tokens

    @property
    def total_tokens(self) -> int:
        """The sum of prompt and completion tokens."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.requests + other.requests,
            self.at_least or other.at_least,
        )


def parse_amount(text: object) -> Decimal | None:
    """Return the decimal number in a stored *text*, or ``None`` if it is not a finite number of ordinary size."""
    try:
        value = Decimal(text if isinstance(text, str) else "")
    except InvalidOperation:
        return None
    return value if is_amount(value) else None


def is_amount(value: object) -> bool:
    """Return whether *value* is a finite ``Decimal`` of ordinary size, which can be added to others; it may be negative."""
    return isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) <= MAX_EXPONENT


def require_cost(cost: Decimal | None) -> Decimal | None:
    """
    Return *cost* if it is a number of dollars or ``None``; else raise.

    Raises:
        DataError: for any other value, for negative and huge numbers, and for NaN, which no budget can be compared with.
    """
    if cost is None or (is_amount(cost) and 0 <= cost <= MAX_COST_USD):
        return cost
    msg = f"a cost is a Decimal from 0 to {MAX_COST_USD:,} US dollars, or None, not {format_value(cost)}"
    raise DataError(msg)


def add_cost(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    """Return the sum of two costs in US dollars; unknown if either is (reliability:I4)."""
    return None if a is None or b is None else a + b


def add_lost_usage(lost: Usage, own: Usage | None) -> Usage:
    """Return *own*, the usage of a reply, plus that of the lost requests before it; an unknown one counts as at least one request."""
    own = own or Usage(at_least=True)
    return lost + attrs.evolve(own, requests=own.requests or 1)


def to_json_dict(value: Mapping[str, Any]) -> JsonDict:
    """Return a mapping of frozen values as a ``JsonDict``."""
    return value if isinstance(value, JsonDict) else JsonDict(value)


@frozen(weakref_slot=False)
class Spending:
    """
    The tokens and money that a run and its children spent.

    Attributes:
        usage: Tokens.
        cost: US dollars; ``None`` when a part is unknown.
        credits_used: Credits that tools reported, never money.
        by_agent: Usage per agent id.
        by_model: Usage per model string.
        agent_costs: US dollars per agent id, of those that used something whose cost is known; see ``cost_by_agent``.
        model_costs: The same per model string; see ``cost_by_model``.
    """

    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    credits_used: float = 0
    by_agent: Mapping[str, Usage] = attrs.field(default=JsonDict(), converter=to_json_dict)
    by_model: Mapping[str, Usage] = attrs.field(default=JsonDict(), converter=to_json_dict)
    # Only known costs are stored, so unknown ones add nothing to journals.
    agent_costs: Mapping[str, Decimal] = attrs.field(default=JsonDict(), converter=to_json_dict)
    model_costs: Mapping[str, Decimal] = attrs.field(default=JsonDict(), converter=to_json_dict)

    @property
    def cost_by_agent(self) -> Mapping[str, Decimal | None]:
        """US dollars per agent id of ``by_agent``; ``None`` where a part is unknown."""
        return JsonDict(_get_costs_by_key(self.by_agent, self.agent_costs))

    @property
    def cost_by_model(self) -> Mapping[str, Decimal | None]:
        """US dollars per model string of ``by_model``; ``None`` where a part is unknown."""
        return JsonDict(_get_costs_by_key(self.by_model, self.model_costs))

    def __add__(self, other: Spending) -> Spending:
        if not isinstance(other, Spending):
            return NotImplemented
        by_agent, agent_costs = _add_usage_and_costs(self.by_agent, self.agent_costs, other.by_agent, other.agent_costs)
        by_model, model_costs = _add_usage_and_costs(self.by_model, self.model_costs, other.by_model, other.model_costs)
        return Spending(
            self.usage + other.usage,
            add_cost(self.cost, other.cost),
            self.credits_used + other.credits_used,
            by_agent,
            by_model,
            agent_costs,
            model_costs,
        )


def _add_usage_and_costs(
    a: Mapping[str, Usage], a_costs: Mapping[str, Decimal], b: Mapping[str, Usage], b_costs: Mapping[str, Decimal]
) -> tuple[Mapping[str, Usage], Mapping[str, Decimal]]:
    """Return the sums of usage and of known costs per key; a used part without a cost makes the sum unknown."""
    if not (a and b):
        return (a, a_costs) if a else (b, b_costs)
    used = dict(a)
    for key, usage in b.items():
        used[key] = used[key] + usage if key in used else usage
    known = {}
    for key in used:
        mine, other = a_costs.get(key), b_costs.get(key)
        if mine is not None and other is not None:
            known[key] = mine + other
        elif mine is not None and b.get(key, NOTHING_USED) == NOTHING_USED:
            known[key] = mine
        elif other is not None and a.get(key, NOTHING_USED) == NOTHING_USED:
            known[key] = other
    return JsonDict(used), JsonDict(known)


def _get_costs_by_key(used: Mapping[str, Usage], known_costs: Mapping[str, Decimal]) -> dict[str, Decimal | None]:
    """Return the cost per key of *used*, ``None`` if unknown; zero usage costs zero."""
    return {key: known_costs.get(key, None if usage != NOTHING_USED else Decimal(0)) for key, usage in used.items()}


def filter_known_costs(used: Mapping[str, Usage], costs: Mapping[str, Decimal | None]) -> JsonDict:
    """Return the known costs of *used*, without keys of zero usage."""
    known = {}
    for key, usage in used.items():
        cost = costs.get(key, Decimal(0))
        if cost is not None and usage != NOTHING_USED:
            known[key] = cost
    return JsonDict(known) if known else NO_COSTS


NOTHING_USED = Usage()
NO_COSTS = JsonDict()
