"""
Prices and context windows from the data in ``genai_prices``, read on first use and never over the network.

Rules: requirements G17 and G18, ecosystem EC77 and EC78.
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, ClassVar, NamedTuple

from stepengine.data.usage import Usage
from stepengine.models.base import ModelInfo
from stepengine.models.routing import route_of

__all__ = ("cost_of", "info_of", "nearest_names")

PRICE_LISTS = {"openai_chat": "openai", "xai": "x-ai"}
"""Our prefix to the name under which ``genai_prices`` lists the provider, where they differ."""
MILLION = 1_000_000
REMEMBERED = 1_000


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
    return _Book.current().cost(model, usage, at)


def info_of(model: str) -> ModelInfo:
    """Return the context window of *model* as far as the price data know it."""
    known = _Book.current().model(model)
    return ModelInfo(context_window=None if known is None else known.context_window)


def nearest_names(model: str) -> tuple[str, ...]:
    """Return up to three known model names of the same provider that look like *model*."""
    from genai_prices.data_snapshot import get_snapshot

    provider, _, name = model.partition("/")
    listed = PRICE_LISTS.get(provider, provider)
    known = [m.id for p in get_snapshot().providers if p.id == listed for m in p.models]
    return tuple([n for n in get_close_matches(name, known, n=4) if n != name][:3])


class _Rates(NamedTuple):
    """What a call costs: *fixed*, and dollars for a million tokens; those from and to a cache count as prompt, too."""

    fixed: Decimal
    prompt: Decimal
    completion: Decimal
    read: Decimal
    write: Decimal

    def of(self, usage: Usage) -> Decimal:
        """Return what *usage* costs."""
        tokens = self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens
        tokens += self.read * usage.cache_read_tokens + self.write * usage.cache_write_tokens
        return self.fixed + tokens / MILLION


class _Book:
    """
    What was looked up in one state of the price data.

    The library prices a call in a fifth of a millisecond, as it finds out anew each time what is priced and how. Below one
    tier a price is linear in the tokens, so it is asked once how much a million of each kind costs.
    """

    _current: ClassVar[_Book | None] = None

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot
        self._models: dict[str, Any] = {}
        self._lists: dict[int, _PriceList] = {}

    @classmethod
    def current(cls) -> _Book:
        """Return the book of the price data in force."""
        from genai_prices.data_snapshot import get_snapshot

        snapshot, book = get_snapshot(), cls._current
        if book is None or book.snapshot is not snapshot:
            cls._current = book = cls(snapshot)
        return book

    def model(self, model: str) -> Any:
        """Return what the data say of *model*, ``None`` when they do not know it."""
        try:
            return self._models[model]
        except KeyError:
            pass
        provider, _, name = model.partition("/")
        try:
            _, found = self.snapshot.find_provider_model(name, None, PRICE_LISTS.get(provider, provider), None)
        except (LookupError, ValueError):
            found = None
        if len(self._models) >= REMEMBERED:
            self._models.clear()
        self._models[model] = found
        return found

    def cost(self, model: str, usage: Usage, at: datetime) -> Decimal | None:
        """Return what *usage* of *model* cost at the time *at*, or ``None``."""
        known = self.model(model)
        if known is None:
            return None
        prices = known.get_prices(at)
        listed = self._lists.get(id(prices))
        if listed is None or listed.prices is not prices:
            if len(self._lists) >= REMEMBERED:
                self._lists.clear()
            self._lists[id(prices)] = listed = _PriceList(prices)
        return listed.cost(usage)


class _PriceList:
    """What one model costs during one time, tier by tier."""

    def __init__(self, prices: Any) -> None:
        self.prices = prices
        self._starts = sorted({tier.start for price in vars(prices).values() for tier in getattr(price, "tiers", ())})
        self._rates: dict[int, _Rates | None] = {}

    def cost(self, usage: Usage) -> Decimal | None:
        """Return what *usage* costs, or ``None`` when the prices cannot be applied to it."""
        tier = bisect_left(self._starts, usage.prompt_tokens) if self._starts else 0
        if tier not in self._rates:
            self._rates[tier] = _rates_of(self.prices, usage.prompt_tokens)
        rates = self._rates[tier]
        return None if rates is None else rates.of(usage)


def _rates_of(prices: Any, prompt_tokens: int) -> _Rates | None:
    """Return what *prices* come to at a prompt of that size; ``None`` when they cannot be applied."""
    from genai_prices.types import ModelPrice
    from genai_prices.types import Usage as PricedUsage

    def at_size(price: Any) -> Any:
        reached = [tier.price for tier in getattr(price, "tiers", ()) if prompt_tokens > tier.start]
        return reached[-1] if reached else getattr(price, "base", price)

    flat = ModelPrice(**{name: at_size(price) for name, price in vars(prices).items()})

    def total(prompt: int = 0, completion: int = 0, read: int = 0, write: int = 0) -> Decimal:
        usage = PricedUsage(
            input_tokens=prompt, output_tokens=completion, cache_read_tokens=read, cache_write_tokens=write
        )
        return Decimal(flat.calc_price(usage)["total_price"])

    try:
        fixed, prompt = total(), total(prompt=MILLION)
        return _Rates(
            fixed,
            prompt - fixed,
            total(completion=MILLION) - fixed,
            total(prompt=MILLION, read=MILLION) - prompt,
            total(prompt=MILLION, write=MILLION) - prompt,
        )
    except (LookupError, ValueError):
        return None
