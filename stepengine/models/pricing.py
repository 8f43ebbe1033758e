"""
Prices and context windows from the data in ``genai_prices``, read on first use and never over the network.

What is asked stands here; how a reply is priced, in ``_price_book``, which is loaded with the first reply.
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
    What model calls cost by the packaged price lists, in US dollars; ``None`` when a price or the usage is not known.

    Called with a model string ``provider/model``, a usage and a time (prices change), it gives the cost of those tokens as
    text that nothing special was done with. ``price_reply`` looks at all that the provider reported.
    """

    def __call__(self, model: str, usage: Usage | None, at: datetime) -> Decimal | None:
        """Return what *usage* of *model* costs at the time *at*, or ``None``."""
        if usage is None:
            return None
        from stepengine.models._price_book import PriceBook
        from stepengine.models.routing import parse_route

        route = parse_route(model)
        if route is not None:
            # Before a call nobody knows which model will answer: the dearest is the bound. A reply names its own.
            costs = [self(name, usage, at) for name in route.models]
            known = [cost for cost in costs if cost is not None]
            return max(known) if len(known) == len(costs) else None
        return PriceBook.get_current().price_usage(model, usage, at)

    def price_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """
        Return what *reply* cost that *model* was asked for at the time *at*, or ``None``.

        Counted beside its tokens are images and audio, how long a cache holds, the service tier, searches, and what else
        the provider ran for it. A gateway that answers under a name of its own is priced by the name that was asked.
        """
        if reply.usage is None:
            return None
        from stepengine.models._price_book import PriceBook, list_price_names

        costs = (PriceBook.get_current().price_reply(name, reply, at) for name in list_price_names(model, reply))
        return next((cost for cost in costs if cost is not None), None)

    def list_unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """
        Return what the provider of *reply* did and asks money for, and no list has a price for: its cost is a lower bound.

        That is a dearer tier, a kind of tokens, or a tool, by the provider's own name for it. Empty for most replies.
        """
        from stepengine.models._json import find_object

        if not find_object(reply.provider_data, "usage"):
            return ()
        from stepengine.models._price_book import PriceBook, list_price_names

        book = PriceBook.get_current()
        name = next((name for name in list_price_names(model, reply) if book.find_model(name) is not None), None)
        return () if name is None else book.list_unpriced(name, reply, at)


LIST_PRICES = ListPrices()
"""The prices that an engine goes by when it is given no others."""


def find_model_info(model: str) -> ModelInfo:
    """Return the context window and the largest output of *model*, as far as price data and our table know them."""
    from stepengine.models._limits import fill_model_limits
    from stepengine.models._price_book import PriceBook
    from stepengine.models.base import ModelInfo

    known = PriceBook.get_current().find_model(model)
    return fill_model_limits(model, ModelInfo(context_window=None if known is None else known.context_window))


def nearest_names(model: str) -> tuple[str, ...]:
    """Return up to three known model names of the same provider that look like *model*."""
    from genai_prices.data_snapshot import get_snapshot

    from stepengine.models._price_book import PRICE_LISTS

    provider, _, name = model.partition("/")
    listed = PRICE_LISTS.get(provider, provider)
    known = [m.id for p in get_snapshot().providers if p.id == listed for m in p.models]
    from difflib import get_close_matches

    return tuple([n for n in get_close_matches(name, known, n=4) if n != name][:3])


def find_listed_name(provider: str, model: str) -> tuple[str, str] | None:
    """
    Return under which family, and how, a provider that serves models of many lists *model*; ``None`` when it does not.

    Args:
        provider: How ``genai_prices`` calls the provider.
        model: ``family/name``, of which only the family has to be known, or the beginning of a name without its family.
    """
    from genai_prices.data_snapshot import get_snapshot

    listed = [m.id for p in get_snapshot().providers if p.id == provider for m in p.models]
    known = [(family, name) for family, slash, name in (each.partition("/") for each in listed) if slash]
    family, slash, name = model.partition("/")
    if slash:
        return (family, name) if any(family == one for one, _ in known) else None
    return min((each for each in known if each[1].startswith(model)), key=lambda each: len(each[1]), default=None)
