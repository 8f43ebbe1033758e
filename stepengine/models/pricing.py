"""
Prices and context windows from the data in ``genai_prices``, read on first use and never over the network.

This module has the public functions. ``_price_book`` computes costs and is loaded with the first reply.
"""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING

from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage

if TYPE_CHECKING:
    from stepengine.models.base import ModelInfo


class ListPrices:
    """
    The packaged price lists, as a callable that returns costs in US dollars, or ``None`` if a price or the usage is unknown.

    The arguments are a model string ``provider/model``, a usage and a time, because prices change. The result is the cost of
    ordinary text tokens. ``price_reply`` includes everything that the provider reported.
    """

    def __call__(self, model: str, usage: Usage | None, at: datetime) -> Decimal | None:
        """Return the cost of *usage* of *model* at the time *at* in US dollars; ``None`` if it is unknown. A fallback has its dearest cost."""
        if usage is None:
            return None
        from stepengine.models._price_book import PriceBook
        from stepengine.models.routing import parse_route

        route = parse_route(model)
        if route is not None:
            # It is unknown which model will answer, so the dearest is the bound. A reply names its model.
            costs = [self(name, usage, at) for name in route.models]
            known = [cost for cost in costs if cost is not None]
            return max(known) if len(known) == len(costs) else None
        return PriceBook.get_current().price_usage(model, usage, at)

    def price_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """
        Return the cost in US dollars of *reply* to a request for *model* at the time *at*; ``None`` if it is unknown.

        It includes images and audio, cache lifetimes, the service tier, searches and other server tools. If a gateway answers
        with an unknown model name, the price of the requested model applies.
        """
        if reply.usage is None:
            return None
        from stepengine.models._price_book import PriceBook, list_price_names

        costs = (PriceBook.get_current().price_reply(name, reply, at) for name in list_price_names(model, reply))
        return next((cost for cost in costs if cost is not None), None)

    def list_unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """
        Return the billed items of *reply* without a known price, for which its cost is a lower bound.

        These are tiers, kinds of tokens or tools, by the provider's own names. Most replies have none.
        """
        from stepengine.models._json import find_object

        if not find_object(reply.provider_data, "usage"):
            return ()
        from stepengine.models._price_book import PriceBook, list_price_names

        book = PriceBook.get_current()
        name = next((name for name in list_price_names(model, reply) if book.find_price_data(name) is not None), None)
        return () if name is None else book.list_unpriced(name, reply, at)


LIST_PRICES = ListPrices()
"""The default prices of an engine."""


def get_model_info(model: str) -> ModelInfo:
    """Return the context window and the largest output of *model* from price data and our table, ``None`` for unknown limits."""
    from stepengine.models._limits import fill_model_limits
    from stepengine.models._price_book import PriceBook
    from stepengine.models.base import ModelInfo

    known = PriceBook.get_current().find_price_data(model)
    return fill_model_limits(model, ModelInfo(context_window=None if known is None else known.context_window))


def find_nearest_names(model: str) -> tuple[str, ...]:
    """Return up to three known model names of the same provider that are similar to *model*."""
    from genai_prices.data_snapshot import get_snapshot

    from stepengine.models._price_book import PRICE_LISTS

    provider, _, name = model.partition("/")
    listed = PRICE_LISTS.get(provider, provider)
    known = [m.id for p in get_snapshot().providers if p.id == listed for m in p.models]
    from difflib import get_close_matches

    return tuple([n for n in get_close_matches(name, known, n=4) if n != name][:3])


def find_listed_family_and_name(provider: str, model: str) -> tuple[str, str] | None:
    """
    Return *model* as (family, name) in a provider's price list; ``None`` if it is not listed.

    Args:
        provider: The name of the provider in ``genai_prices``.
        model: ``family/name``, where only the family must be listed, or the start of a name without its family.
    """
    from genai_prices.data_snapshot import get_snapshot

    listed = [m.id for p in get_snapshot().providers if p.id == provider for m in p.models]
    known = [(family, name) for family, slash, name in (each.partition("/") for each in listed) if slash]
    family, slash, name = model.partition("/")
    if slash:
        return (family, name) if any(family == one for one, _ in known) else None
    return min((each for each in known if each[1].startswith(model)), key=lambda each: len(each[1]), default=None)
