"""
Prices and context windows from the data in ``genai_prices``, read on first use and never over the network.

Rules: requirements G17 and G18, ecosystem EC77 and EC78.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from difflib import get_close_matches
from typing import Any

from stepengine.data.usage import Usage
from stepengine.models.base import ModelInfo
from stepengine.models.routing import route_of

__all__ = ("cost_of", "info_of", "nearest_names")

PRICE_LISTS = {"openai_chat": "openai", "xai": "x-ai"}
"""Our prefix to the name under which ``genai_prices`` lists the provider, where they differ."""


def cost_of(model: str, usage: Usage | None, at: datetime) -> Decimal | None:
    """
    Return what *usage* of *model* cost at the time *at*, in US dollars.

    Args:
        model: The model string, ``provider/model``.
        usage: Tokens; ``None`` when unknown.
        at: When the call was made; prices change.

    Returns:
        The cost, or ``None`` when the price or the usage is not known.
    """
    if usage is None:
        return None
    route = route_of(model)
    if route is not None:
        # Before a call nobody knows which model will answer: the dearest is the bound. A reply names its own.
        costs = [cost_of(name, usage, at) for name in route.models]
        known = [cost for cost in costs if cost is not None]
        return max(known) if len(known) == len(costs) else None
    calculated = _calculated(model, usage, at)
    return None if calculated is None else Decimal(calculated.total_price)


def info_of(model: str) -> ModelInfo:
    """Return the context window of *model* as far as the price data know it."""
    calculated = _calculated(model, Usage(), None)
    return ModelInfo(context_window=None if calculated is None else calculated.model.context_window)


def nearest_names(model: str) -> tuple[str, ...]:
    """Return up to three known model names of the same provider that look like *model*."""
    from genai_prices.data_snapshot import get_snapshot

    provider, _, name = model.partition("/")
    listed = PRICE_LISTS.get(provider, provider)
    known = [m.id for p in get_snapshot().providers if p.id == listed for m in p.models]
    return tuple([n for n in get_close_matches(name, known, n=4) if n != name][:3])


def _calculated(model: str, usage: Usage, at: datetime | None) -> Any:
    from genai_prices import Usage as PricedUsage
    from genai_prices import calc_price

    provider, _, name = model.partition("/")
    nested = PricedUsage(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_tokens=usage.cache_read_tokens,
        cache_write_tokens=usage.cache_write_tokens,
    )
    try:
        return calc_price(
            nested, model_ref=name, provider_id=PRICE_LISTS.get(provider, provider), genai_request_timestamp=at
        )
    except (LookupError, ValueError):
        return None
