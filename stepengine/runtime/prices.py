"""
Prices of model calls, as the pricing of an engine returns them.

A pricing may be anyone's code. If it raises, the cost is unknown and the error is logged. This module knows nothing of limits and
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import TypeAlias, TypeVar

from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage, require_cost
from stepengine.runtime.logs import LOGGER

Priced = TypeVar("Priced")
Pricing: TypeAlias = Callable[[str, Usage, datetime], "Decimal | None"]
"""
Returns US dollars for a model string, what was used and when; ``None`` when the price is unknown.

A callable that also has a method ``price_reply(model, reply, at)`` is asked that for replies, and one that has ``list_unpriced`` of the
same form for the names of what has no price: where there is any, the cost is a lower bound.
"""


class Prices:
    """
    Computes costs with a pricing, at the current time of a run.

    Args:
        pricing: The pricing of the engine; ``None`` if it has none.
        now: Returns the time whose prices hold.
    """

    __slots__ = ("_now", "_pricing")

    def __init__(self, pricing: Pricing | None, now: Callable[[], datetime]) -> None:
        self._pricing = pricing
        self._now = now

    def compute_usage_cost(self, model: str, usage: Usage) -> Decimal | None:
        """Return the cost of *usage* by *model*, or ``None`` if it is unknown."""
        pricing = self._pricing
        return None if pricing is None else _compute_checked_cost(model, lambda: pricing(model, usage, self._now()))

    def compute_reply_cost(self, model: str, reply: ModelReply) -> Decimal | None:
        """
        Return the cost computed from the usage of *reply*, ignoring the cost it states; ``None`` if unknown.

        A reply may name a model that has no price, such as a gateway's own name. Then the requested *model* is priced.
        """
        usage = reply.usage
        if usage is None:
            return None
        whole: Callable[[str, ModelReply, datetime], Decimal | None] | None = getattr(
            self._pricing, "price_reply", None
        )
        if whole is not None:
            return _compute_checked_cost(model, lambda: whole(model, reply, self._now()))
        cost = self.compute_usage_cost(reply.model or model, usage)
        return self.compute_usage_cost(model, usage) if cost is None and reply.model is not None else cost

    def list_unpriced_parts(self, model: str, reply: ModelReply) -> tuple[str, ...]:
        """Return the parts of *reply* without a price, which make its cost a lower bound."""
        parts: Callable[[str, ModelReply, datetime], tuple[str, ...]] | None
        parts = getattr(self._pricing, "list_unpriced", None)
        return () if parts is None else _call_pricing_or_log(model, lambda: parts(model, reply, self._now())) or ()


def _compute_checked_cost(model: str, price: Callable[[], Decimal | None]) -> Decimal | None:
    """Return the result of *price*; ``None`` and a log line if it raises or is not a valid cost."""
    return _call_pricing_or_log(model, lambda: require_cost(price()))


def _call_pricing_or_log(model: str, price: Callable[[], Priced | None]) -> Priced | None:
    """Return the result of *price*; ``None`` and a log line if it raises."""
    try:
        return price()
    # A pricing that raises must not lose a reply that was paid for.
    except Exception as error:  # noqa: BLE001
        LOGGER.warning("the pricing of %r raised, so its cost is unknown", model, exc_info=error)
        return None
