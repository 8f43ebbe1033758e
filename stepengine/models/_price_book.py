"""
What a reply costs by the data in ``genai_prices``: its tokens, and what else the provider counts and asks money for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple

from stepengine.data.json import freeze, thaw
from stepengine.data.messages import ImagePart, OpaquePart
from stepengine.data.models import ModelReply
from stepengine.data.usage import Usage
from stepengine.models._iterations import list_uncounted_iterations
from stepengine.models._json import find_object, parse_token_count
from stepengine.models._unpriced import (
    DEARER,
    IMAGES,
    count_web_searches,
    find_service_tier,
    list_unpriced_tools,
    unlisted_kinds,
)

PRICE_LISTS = {
    "anthropic_aws": "anthropic",
    "anthropic_google": "anthropic",
    "azure_responses": "azure",
    "bedrock": "aws",
    "bedrock_converse": "aws",
    "bedrock_mantle": "aws",
    "bedrock_mantle_converse": "aws",
    "bedrock_mantle_openai": "aws",
    "bedrock_openai": "aws",
    "foundry": "azure",
    "google_interactions": "google",
    "moonshot": "moonshotai",
    "openai_chat": "openai",
    "vertex": "google",
    "vertex_claude": "google",
    "xai": "x-ai",
}
"""Our prefix to the name under which ``genai_prices`` lists the provider, where they differ."""
FLAVORS = {
    **dict.fromkeys(("openai", "xai", "azure_responses", "bedrock_openai", "bedrock_mantle_openai"), "responses"),
    **dict.fromkeys(("bedrock", "bedrock_mantle", "foundry", "vertex_claude"), "anthropic"),
}
"""The form of usage, by the name that ``genai_prices`` gives it, where it is not that of chat completions."""
DEFAULT_FLAVORS = frozenset(
    {
        *("anthropic", "anthropic_aws", "anthropic_google", "google", "groq", "mistral", "vertex"),
        *("bedrock_converse", "bedrock_mantle_converse"),
    }
)
ORDINARY = frozenset(
    {
        *("input_tokens", "output_tokens", "total_tokens", "prompt_tokens", "completion_tokens", "cached_tokens"),
        *("cache_read_input_tokens", "cache_creation_input_tokens", "ephemeral_5m_input_tokens", "cache_write_tokens"),
        *(
            "reasoning_tokens",
            "thinking_tokens",
            "text_tokens",
            "accepted_prediction_tokens",
            "rejected_prediction_tokens",
        ),
        *("prompt_cache_hit_tokens", "prompt_cache_miss_tokens", "promptTokenCount", "candidatesTokenCount"),
        *("totalTokenCount", "cachedContentTokenCount", "thoughtsTokenCount", "toolUsePromptTokenCount", "tokenCount"),
    }
)
"""Counts that every price of tokens takes in; any other count is looked at by the library of prices."""
WEB_SEARCH = dict.fromkeys(
    (
        "anthropic",
        "anthropic_aws",
        "anthropic_google",
        "openai",
        "azure_responses",
        "bedrock_mantle",
        "foundry",
        "vertex_claude",
    ),
    Decimal("0.01"),
)
"""US dollars for a search where the price list of a model has none, as the providers' price pages say."""
FILE_SEARCH = Decimal("0.0025")
XAI = {
    "web_search_calls": Decimal("0.005"),
    "x_search_calls": Decimal("0.005"),
    "code_interpreter_calls": Decimal("0.005"),
    "file_search_calls": Decimal("0.0025"),
    "document_search_calls": Decimal("0.01"),
}
"""What xAI counts of its own tools, and US dollars for a call, where a reply does not state its cost."""
GOOGLE_QUERY, GOOGLE_PROMPT = Decimal("0.014"), Decimal("0.035")
"""A search of Gemini 3 and later, and a prompt of earlier models that led to any."""
MILLION_TOKENS = 1_000_000
"""Providers state their prices for a million tokens."""
KEPT_MODELS = 1_000
"""More models than a process asks; a full table is emptied, which costs looking each up once more."""


def list_price_names(model: str, reply: ModelReply) -> list[str]:
    """Return the names under which *reply* may be priced, the likeliest first."""
    from stepengine.models.routing import parse_route

    names = [name for name in (reply.model, model) if name and parse_route(name) is None]
    if PRICE_LISTS.get(model.partition("/")[0]) == "aws":
        names.reverse()  # prices there hang on the geography, which only the name that was asked for says
    return names


class _Rates(NamedTuple):
    """What a call costs: *fixed*, and dollars for a million tokens; those from and to a cache count as prompt, too."""

    fixed: Decimal
    prompt: Decimal
    completion: Decimal
    read: Decimal
    write: Decimal

    def compute_cost(self, usage: Usage) -> Decimal:
        """Return the cost of *usage*."""
        tokens = self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens
        tokens += self.read * usage.cache_read_tokens + self.write * usage.cache_write_tokens
        return self.fixed + tokens / MILLION_TOKENS


class PriceBook:
    """
    A cache of look-ups in one snapshot of the price data.

    The library prices a call in a fifth of a millisecond, as it finds out anew each time what is priced and how. Below one
    tier a price is linear in the tokens, so it is asked once how much a million of each kind costs.
    """

    _current: ClassVar[PriceBook | None] = None

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot
        self._models: dict[str, Any] = {}
        self._lists: dict[int, _PriceList] = {}

    @classmethod
    def get_current(cls) -> PriceBook:
        """Return the book of the price data in force."""
        from genai_prices.data_snapshot import get_snapshot

        # By identity: the library puts new price data in place of the old ones when it has loaded some, and all
        # that was looked up in the old ones is wrong then.
        snapshot, book = get_snapshot(), cls._current
        if book is None or book.snapshot is not snapshot:
            cls._current = book = cls(snapshot)
        return book

    def find_model(self, model: str) -> Any:
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
        # All at once and not the oldest: it happens to who invents names of models, and costs a look-up each.
        if len(self._models) >= KEPT_MODELS:
            self._models.clear()
        self._models[model] = found
        return found

    def price_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """Return what *reply* of *model* cost, with all that was reported of it, or ``None``."""
        data: Mapping[str, object] = reply.provider_data or {}
        raw, provider = data.get("usage"), str(data.get("provider") or "")
        tokens = None if reply.usage is None else self.price_usage(model, reply.usage, at)
        if tokens is None or not isinstance(raw, Mapping):
            return tokens
        tier = self._resolve_tier(model, data, raw, at)
        if tier is None:
            return None
        context, beside = tier.context, list_uncounted_iterations(raw)
        images = self._price_images(model, data, at) or Decimal(0)
        # The short way for nearly all replies: ordinary tier, nothing beside, only kinds of tokens that we have buckets
        # for. What the provider reported in its own words is read again only where there is more in it.
        if not context and not beside and not _has_special_prices(raw):
            return tokens + images + compute_search_cost(reply, provider, model)
        whole = self._price_by_library(model, provider, raw, context, at)
        if whole is None:
            return None if context else tokens + images + compute_search_cost(reply, provider, model)
        for entry in beside:
            name = f"{provider}/{entry['model']}" if entry.get("model") else model
            dollars = self._price_by_library(name, provider, entry, {}, at)
            # A sum that lacks a part looks like a cheap call; `None` says that nobody knows, and limits on cost act on
            # that.
            if dollars is None:
                return None
            whole += dollars
        return whole + images + compute_search_cost(reply, provider, model)

    def list_unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """Return what of *reply* of *model* has a price in no list, by the provider's own words."""
        data: Mapping[str, Any] = reply.provider_data
        raw, provider = data["usage"], str(data.get("provider") or "")
        tier = self._resolve_tier(model, data, raw, at)
        found = [] if tier is None else list(tier.unpriced)
        if _has_special_prices(raw):
            extracted = self._extract_usage(model, provider, raw)
            found += unlisted_kinds(extracted, self.find_model(model).get_prices(at))
        if _image_tokens(data) and self._price_images(model, data, at) is None:
            found.append(IMAGES)
        found += list_unpriced_tools(data, _opaque_items(reply), XAI, searches=provider in WEB_SEARCH)
        if _has_tool_images(reply) and not isinstance(data.get("tool_usage"), Mapping):
            found.append(IMAGES)
        return tuple(dict.fromkeys(found))

    def _resolve_tier(self, model: str, data: Mapping[str, Any], raw: Mapping[str, Any], at: datetime) -> _Tier | None:
        """
        Return the price context of a reply's tier and speed, and what of it has no price; else ``None``.

        Flex costs what a batch does, where only that is listed, and at Groq what the ordinary tier does.
        """
        context = {"processing": "batch"} if data.get("processing") == "batch" else {}
        unpriced, tier, speed = [], _billed_tier(model, data, raw), raw.get("speed")
        if not tier and speed is None:
            return _Tier(context, ())
        known = self.find_model(model)
        if tier and _has_price_variant(known, "service_tier", tier, at):
            context["service_tier"] = tier
        elif tier in {"flex", "batch"} and _has_price_variant(known, "processing", "batch", at):
            context["processing"] = "batch"
        # Its price is in no list and is higher than the one that is: the call is priced by the list, and said to be
        # priced too low.
        elif tier in DEARER:
            unpriced.append(tier)
        elif tier and tier != context.get("processing"):
            return None
        if isinstance(speed, str) and speed != "standard":
            if _has_price_variant(known, "speed", speed, at):
                context["speed"] = speed
            else:
                unpriced.append(speed)
        return _Tier(context, tuple(unpriced))

    def _price_images(self, model: str, data: Mapping[str, Any], at: datetime) -> Decimal | None:
        """Return what the images cost that another model made for a reply; ``None`` when there are none, or nobody knows."""
        tokens, name = _image_tokens(data), data.get("image_model")
        if not tokens or not isinstance(name, str):
            return None
        provider = model.partition("/")[0]
        painter = f"{provider}/{name}"
        return None if self.find_model(painter) is None else self._price_by_library(painter, provider, tokens, {}, at)

    def _extract_usage(self, model: str, provider: str, raw: Mapping[str, Any]) -> Any:
        """Return what the library reads of the usage in the provider's own words, or ``None``."""
        name = model.partition("/")[2]
        flavor = FLAVORS.get(provider, "default" if provider in DEFAULT_FLAVORS else "chat")
        # Under the names of several APIs at once: which one the library looks for is decided by the flavour.
        named = {"usage": raw, "usageMetadata": raw, "model": name, "modelVersion": name}
        try:
            found = self.snapshot.extract_usage(thaw(freeze(named)), PRICE_LISTS.get(provider, provider), None, flavor)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None  # the usage is foreign, and the library takes its kinds for granted
        return found.usage

    def _price_by_library(
        self, model: str, provider: str, raw: Mapping[str, Any], context: Mapping[str, str], at: datetime
    ) -> Decimal | None:
        """Return the cost that the price library computes from a provider's own usage, or ``None``."""
        known, name = self.find_model(model), model.partition("/")[2]
        extracted = self._extract_usage(model, provider, raw)
        if extracted is None:
            return None
        try:
            total = self.snapshot.calc(
                extracted, name, PRICE_LISTS.get(provider, provider), None, at, context or None
            ).total_price
        except (LookupError, ValueError, TypeError, AttributeError):
            return None
        searches = vars(extracted).get("web_searches") or 0
        # Where the list of a model has no price for searches, that of its provider holds for all of its models.
        if searches and getattr(known.get_prices(at), "web_searches_kcount", None) is None:
            total += WEB_SEARCH.get(provider, Decimal(0)) * searches
        return Decimal(total)

    def price_usage(self, model: str, usage: Usage, at: datetime) -> Decimal | None:
        """Return what *usage* of *model* cost at the time *at*, or ``None``."""
        known = self.find_model(model)
        if known is None:
            return None
        prices = known.get_prices(at)
        # By identity: price objects are compared by value and have no hash. The check behind it is for an id that is
        # used again.
        listed = self._lists.get(id(prices))
        if listed is None or listed.prices is not prices:
            if len(self._lists) >= KEPT_MODELS:
                self._lists.clear()
            self._lists[id(prices)] = listed = _PriceList(prices)
        return listed.price_usage(usage)


class _PriceList:
    """What one model costs during one time, tier by tier."""

    def __init__(self, prices: object) -> None:
        self.prices = prices
        self._starts = sorted({tier.start for price in vars(prices).values() for tier in getattr(price, "tiers", ())})
        self._rates: dict[int, _Rates | None] = {}

    def price_usage(self, usage: Usage) -> Decimal | None:
        """Return what *usage* costs, or ``None`` when the prices cannot be applied to it."""
        # Which tier a call is in follows from the size of its prompt, cached tokens among it. The rates of a tier are
        # found once by asking the library for a million of each kind.
        tier = bisect_left(self._starts, usage.prompt_tokens) if self._starts else 0
        if tier not in self._rates:
            self._rates[tier] = _compute_rates(self.prices, usage.prompt_tokens)
        rates = self._rates[tier]
        return None if rates is None else rates.compute_cost(usage)


def _billed_tier(model: str, data: Mapping[str, Any], raw: Mapping[str, Any]) -> str:
    """Return the tier by which a reply is billed, in small letters; ``""`` for the ordinary one."""
    tier = find_service_tier(data, raw)
    # More requests at a time for the same price: https://console.groq.com/docs/flex-processing
    return "" if tier == "flex" and model.startswith("groq/") else tier


def _compute_rates(prices: object, prompt_tokens: int) -> _Rates | None:
    """Return what *prices* come to at a prompt of that size; ``None`` when they cannot be applied."""
    from genai_prices.types import ModelPrice
    from genai_prices.types import Usage as PricedUsage

    def at_size(price: object) -> Any:
        reached = [tier.price for tier in getattr(price, "tiers", ()) if prompt_tokens > tier.start]
        return reached[-1] if reached else getattr(price, "base", price)

    flat = ModelPrice(**{name: at_size(price) for name, price in vars(prices).items()})

    def total(prompt: int = 0, completion: int = 0, read: int = 0, write: int = 0) -> Decimal:
        usage = PricedUsage(
            input_tokens=prompt, output_tokens=completion, cache_read_tokens=read, cache_write_tokens=write
        )
        return Decimal(flat.calc_price(usage)["total_price"])

    try:
        fixed, prompt = total(), total(prompt=MILLION_TOKENS)
        return _Rates(
            fixed,
            prompt - fixed,
            total(completion=MILLION_TOKENS) - fixed,
            total(prompt=MILLION_TOKENS, read=MILLION_TOKENS) - prompt,
            total(prompt=MILLION_TOKENS, write=MILLION_TOKENS) - prompt,
        )
    except (LookupError, ValueError):
        return None


# --- what a reply reports beside its tokens ---------------------------------------------------------------------------


def _has_special_prices(raw: object) -> bool:
    """Return whether a usage counts anything that is priced otherwise than as text."""
    if isinstance(raw, Mapping):
        return any(
            _has_special_prices(value)
            if isinstance(value, Mapping | list | tuple)
            else (bool(value) and type(value) is int and name not in ORDINARY)
            or (name == "modality" and value != "TEXT")
            for name, value in raw.items()
        )
    return isinstance(raw, list | tuple) and any(_has_special_prices(entry) for entry in raw)


class _Tier(NamedTuple):
    """The price context of a reply beside its tokens, and the tier and speed that have no price."""

    context: dict[str, str]
    unpriced: tuple[str, ...]


def _has_price_variant(known: Any, kind: str, word: str, at: datetime) -> bool:
    """Return whether the data have prices of their own for a tier, a speed or a way of processing."""
    return any(
        variant.when == {kind: word} and (variant.constraint is None or variant.constraint.active(at))
        for variant in getattr(known, "price_variants", None) or ()
    )


def _image_tokens(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the tokens that images of a reply of OpenAI took; ``None`` for none."""
    used = data.get("tool_usage")
    tokens = used.get(IMAGES) if isinstance(used, Mapping) else None
    if not isinstance(tokens, Mapping) or not any(parse_token_count(count) for count in tokens.values()):
        return None
    return tokens


def _opaque_items(reply: ModelReply) -> list[Mapping[str, Any]]:
    """Return the parts of a reply that only its provider understands."""
    return [part.data for part in reply.content if isinstance(part, OpaquePart)]


def _has_tool_images(reply: ModelReply) -> bool:
    """Return whether a tool of OpenAI made an image of *reply*, and not its model itself."""
    made = [find_object(part.provider_data, "item") for part in reply.content if isinstance(part, ImagePart)]
    return any(item.get("type") == "image_generation_call" for item in (*made, *_opaque_items(reply)))


def compute_search_cost(reply: ModelReply, provider: str, model: str) -> Decimal:
    """Return what the searches of *reply* cost that are no part of the price of its tokens."""
    data: Mapping[str, object] = reply.provider_data or {}
    raw = data.get("usage")
    counted = raw.get("server_side_tool_usage_details") if isinstance(raw, Mapping) else None
    if provider == "xai" and isinstance(counted, Mapping):
        return sum([price * (parse_token_count(counted.get(name)) or 0) for name, price in XAI.items()], Decimal(0))
    kinds = _opaque_items(reply)
    web = count_web_searches(data, kinds)
    files = sum(item.get("type") == "file_search_call" for item in kinds)
    total: Decimal = WEB_SEARCH.get(provider, Decimal(0)) * web + FILE_SEARCH * files
    grounding = data.get("groundingMetadata")
    queries = grounding.get("webSearchQueries") if isinstance(grounding, Mapping) else None
    if queries and isinstance(queries, list | tuple):
        newer = not model.partition("/")[2].removeprefix("models/").startswith(("gemini-1", "gemini-2"))
        total += GOOGLE_QUERY * len(queries) if newer else GOOGLE_PROMPT
    return total
