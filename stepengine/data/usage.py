"""What model calls use and cost."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.json import JsonDict
from stepengine.data.makers import maker_of

__all__ = ("Spending", "Usage", "add_cost", "quick_spending", "quick_usage")


@attrs.frozen(weakref_slot=False)
class Usage:
    """
    Tokens of model calls in disjoint buckets that add up to the total (requirements G16).

    Attributes:
        input_tokens: Prompt tokens that came from no cache.
        output_tokens: Visible reply tokens.
        cache_read_tokens: Prompt tokens read from the provider's cache.
        cache_write_tokens: Prompt tokens written to the provider's cache.
        reasoning_tokens: Reply tokens spent on thinking.
        requests: Completed model calls.
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
        """Everything that was sent, cached or not."""
        return self.input_tokens + self.cache_read_tokens + self.cache_write_tokens

    @property
    def completion_tokens(self) -> int:
        """Everything that was generated, thinking included."""
        return self.output_tokens + self.reasoning_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens together."""
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        if type(other) is not Usage:
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


quick_usage = maker_of(Usage)


def add_cost(a: Decimal | None, b: Decimal | None) -> Decimal | None:
    """Add two costs in US dollars; unknown plus anything is unknown, for ever after (reliability I4)."""
    return None if a is None or b is None else a + b


def _mapping(value: Any) -> JsonDict:
    return value if type(value) is JsonDict else JsonDict(value)


@attrs.frozen(weakref_slot=False)
class Spending:
    """
    What a run and its children spent (requirements D15).

    Attributes:
        usage: Tokens.
        cost: US dollars; ``None`` when a part is unknown.
        credits_used: Credits that tools reported, never money.
        by_agent: Usage per agent id.
        by_model: Usage per model string.
    """

    usage: Usage = Usage()
    cost: Decimal | None = Decimal(0)
    credits_used: float = 0
    by_agent: Mapping[str, Usage] = attrs.field(factory=JsonDict, converter=_mapping)
    by_model: Mapping[str, Usage] = attrs.field(factory=JsonDict, converter=_mapping)

    def __add__(self, other: Spending) -> Spending:
        if type(other) is not Spending:
            return NotImplemented
        return Spending(
            self.usage + other.usage,
            add_cost(self.cost, other.cost),
            self.credits_used + other.credits_used,
            _merged(self.by_agent, other.by_agent),
            _merged(self.by_model, other.by_model),
        )


quick_spending = maker_of(Spending)


def _merged(a: Mapping[str, Usage], b: Mapping[str, Usage]) -> Mapping[str, Usage]:
    if not (a and b):
        return a or b
    merged: dict[str, Usage] = dict(a)
    for key, usage in b.items():
        merged[key] = merged[key] + usage if key in merged else usage
    return JsonDict(merged)
