"""
Compute the cost of a reply from the data in ``genai_prices``, for its tokens and all other billed items.
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
from stepengine.models._json import find_object, parse_token_count, usage_from_totals
from stepengine.models._unpriced_items import (
    DEARER,
    IMAGES,
    count_openai_web_searches,
    find_service_tier,
    list_unpriced_token_kinds,
    list_unpriced_tools,
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
"""The provider names of ``genai_prices`` by our prefix, where they differ."""
FLAVORS = {
    **dict.fromkeys(("openai", "xai", "azure_responses", "bedrock_openai", "bedrock_mantle_openai"), "responses"),
    **dict.fromkeys(("bedrock", "bedrock_mantle", "foundry", "vertex_claude"), "anthropic"),
}
"""The names in ``genai_prices`` for formats of usage other than that of chat completions."""
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
"""Counts that ordinary token prices cover; for any other count the price library computes the cost."""
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
"""US dollars for a search if the price list of a model has none, from the providers' price pages."""
FILE_SEARCH = Decimal("0.0025")
XAI = {
    "web_search_calls": Decimal("0.005"),
    "x_search_calls": Decimal("0.005"),
    "code_interpreter_calls": Decimal("0.005"),
    "file_search_calls": Decimal("0.0025"),
    "document_search_calls": Decimal("0.01"),
}
"""US dollars for a call of each of xAI's own tools, for replies without a stated cost."""
GOOGLE_QUERY, GOOGLE_PROMPT = Decimal("0.014"), Decimal("0.035")
"""US dollars for a search of Gemini 3 and later, and for a prompt with searches of earlier models."""
MILLION_TOKENS = 1_000_000
"""Providers state their prices for a million tokens."""
KEPT_MODELS = 1_000
"""More models than a process uses; a full cache is cleared."""


def list_price_names(model: str, reply: ModelReply) -> list[str]:
    """Return the model names to look up the prices of *reply* by, the most specific first."""
    from stepengine.models.routing import parse_route

    names = [name for name in (reply.model, model) if name and parse_route(name) is None]
    if PRICE_LISTS.get(model.partition("/")[0]) == "aws":
        names.reverse()  # prices there depend on the geography, which only the requested name contains
    return names


class _Rates(NamedTuple):
    """The price of a call, and of a million tokens of each kind; cached tokens are also counted as prompt."""

    fixed: Decimal
    prompt: Decimal
    completion: Decimal
    read: Decimal
    write: Decimal

    def compute_cost(self, usage: Usage) -> Decimal:
        """Return the cost of one call with *usage* at these rates."""
        tokens = self.prompt * usage.prompt_tokens + self.completion * usage.completion_tokens
        tokens += self.read * usage.cache_read_tokens + self.write * usage.cache_write_tokens
        return self.fixed + tokens / MILLION_TOKENS


class PriceBook:
    """
    A cache of prices from one snapshot of the price data.

    The price library is slow, because it resolves the price rules for each call. Within one tier a price is linear in the
    tokens, so the library is called once for a million tokens of each kind.
    """

    _current: ClassVar[PriceBook | None] = None

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot
        self._models: dict[str, Any] = {}
        self._lists: dict[int, _PriceList] = {}

    @classmethod
    def get_current(cls) -> PriceBook:
        """Return the price book of the current price data; create a new one if the library has loaded newer data."""
        from genai_prices.data_snapshot import get_snapshot

        # By identity: the library replaces its snapshot when it loads new data, and cached prices are then outdated.
        snapshot, book = get_snapshot(), cls._current
        if book is None or book.snapshot is not snapshot:
            cls._current = book = cls(snapshot)
        return book

    def find_price_data(self, model: str) -> Any:
        """Return the price data of *model*, cached; ``None`` if it is unknown."""
        try:
            return self._models[model]
        except KeyError:
            pass
        provider, _, name = model.partition("/")
        try:
            _, found = self.snapshot.find_provider_model(name, None, PRICE_LISTS.get(provider, provider), None)
        except (LookupError, ValueError):
            found = None
        # Cleared at once, because only invented model names fill it.
        if len(self._models) >= KEPT_MODELS:
            self._models.clear()
        self._models[model] = found
        return found

    def price_reply(self, model: str, reply: ModelReply, at: datetime) -> Decimal | None:
        """Return the cost of *reply* of *model* in US dollars, with all billed items that it reports; ``None`` if it is unknown."""
        data: Mapping[str, object] = reply.provider_data or {}
        raw_usage, provider = data.get("usage"), str(data.get("provider") or "")
        tokens = None if reply.usage is None else self.price_usage(model, reply.usage, at)
        if tokens is None or not isinstance(raw_usage, Mapping):
            return tokens
        context, _ = self._resolve_price_context(model, data, raw_usage, at)
        if context is None:
            return None
        beside = list_uncounted_iterations(raw_usage)
        images = self._compute_image_cost(model, data, at) or Decimal(0)
        # The fast way for nearly all replies: ordinary tier, no other iterations, and only token kinds in our buckets.
        # Otherwise the price library reads the provider's own usage.
        if not context and not beside and not _has_specially_priced_counts(raw_usage):
            return tokens + images + compute_server_tool_cost(reply, provider, model)
        whole = self._compute_cost_by_library(model, provider, raw_usage, context, at)
        if whole is None:
            return None if context else tokens + images + compute_server_tool_cost(reply, provider, model)
        for entry in beside:
            name = f"{provider}/{entry['model']}" if entry.get("model") else model
            dollars = self._compute_cost_by_library(name, provider, entry, {}, at)
            # A sum without a part would look like a cheap call. `None` means unknown, and cost limits handle that.
            if dollars is None:
                return None
            whole += dollars
        return whole + images + compute_server_tool_cost(reply, provider, model)

    def list_unpriced(self, model: str, reply: ModelReply, at: datetime) -> tuple[str, ...]:
        """Return the provider's names of billed items in *reply* without a known price."""
        data: Mapping[str, Any] = reply.provider_data
        raw_usage, provider = data["usage"], str(data.get("provider") or "")
        _, found = self._resolve_price_context(model, data, raw_usage, at)
        if _has_specially_priced_counts(raw_usage):
            extracted = self._parse_usage_by_library(model, provider, raw_usage)
            found += list_unpriced_token_kinds(extracted, self.find_price_data(model).get_prices(at))
        if _find_image_token_counts(data) and self._compute_image_cost(model, data, at) is None:
            found.append(IMAGES)
        found += list_unpriced_tools(data, _list_opaque_part_data(reply), XAI, has_search_price=provider in WEB_SEARCH)
        if _has_generated_images(reply) and not isinstance(data.get("tool_usage"), Mapping):
            found.append(IMAGES)
        return tuple(dict.fromkeys(found))

    def _resolve_price_context(
        self, model: str, data: Mapping[str, Any], raw_usage: Mapping[str, Any], at: datetime
    ) -> tuple[dict[str, str] | None, list[str]]:
        """
        Return (context, unpriced): the price context of a reply, ``None`` for an unknown tier, and its tiers and speeds without a price.

        Flex has the price of a batch if only that is listed, and at Groq the ordinary price.
        """
        context = {"processing": "batch"} if data.get("processing") == "batch" else {}
        unpriced, tier, speed = list[str](), _find_billed_tier(model, data, raw_usage), raw_usage.get("speed")
        if not tier and speed is None:
            return context, unpriced
        known = self.find_price_data(model)
        if tier and _has_price_variant(known, "service_tier", tier, at):
            context["service_tier"] = tier
        elif tier in {"flex", "batch"} and _has_price_variant(known, "processing", "batch", at):
            context["processing"] = "batch"
        # A dearer tier without a listed price: the call is priced by the list, and the tier is reported as unpriced.
        elif tier in DEARER:
            unpriced.append(tier)
        elif tier and tier != context.get("processing"):
            return None, unpriced
        if isinstance(speed, str) and speed != "standard":
            if _has_price_variant(known, "speed", speed, at):
                context["speed"] = speed
            else:
                unpriced.append(speed)
        return context, unpriced

    def _compute_image_cost(self, model: str, data: Mapping[str, Any], at: datetime) -> Decimal | None:
        """Return the cost of a reply's images from a separate image model; ``None`` without such images, or if the cost is unknown."""
        tokens, name = _find_image_token_counts(data), data.get("image_model")
        if not tokens or not isinstance(name, str):
            return None
        provider = model.partition("/")[0]
        painter = f"{provider}/{name}"
        return (
            None
            if self.find_price_data(painter) is None
            else self._compute_cost_by_library(painter, provider, tokens, {}, at)
        )

    def _parse_usage_by_library(self, model: str, provider: str, raw_usage: Mapping[str, Any]) -> Any:
        """Return the provider's own usage as parsed by the price library; ``None`` if it cannot parse it."""
        name = model.partition("/")[2]
        flavor = FLAVORS.get(provider, "default" if provider in DEFAULT_FLAVORS else "chat")
        # Under the names of several APIs at once; the flavor decides which one the library reads.
        named = {"usage": raw_usage, "usageMetadata": raw_usage, "model": name, "modelVersion": name}
        try:
            found = self.snapshot.extract_usage(thaw(freeze(named)), PRICE_LISTS.get(provider, provider), None, flavor)
        except (LookupError, ValueError, TypeError, AttributeError):
            return None  # the library does not check types
        usage, counted = found.usage, _parse_totals(raw_usage, flavor)
        if counted is not None:
            # Some services count cached or reasoning tokens separately, which the library knows only of a few.
            usage.input_tokens, usage.output_tokens = counted.prompt_tokens, counted.completion_tokens
        return usage

    def _compute_cost_by_library(
        self, model: str, provider: str, raw_usage: Mapping[str, Any], context: Mapping[str, str], at: datetime
    ) -> Decimal | None:
        """Return the cost that the price library computes from a provider's own usage; ``None`` if it cannot."""
        known, name = self.find_price_data(model), model.partition("/")[2]
        extracted = self._parse_usage_by_library(model, provider, raw_usage)
        if extracted is None:
            return None
        try:
            total = self.snapshot.calc(
                extracted, name, PRICE_LISTS.get(provider, provider), None, at, context or None
            ).total_price
        except (LookupError, ValueError, TypeError, AttributeError):
            return None
        searches = vars(extracted).get("web_searches") or 0
        # If the list of a model has no price for searches, the provider's general price applies.
        if searches and getattr(known.get_prices(at), "web_searches_kcount", None) is None:
            total += WEB_SEARCH.get(provider, Decimal(0)) * searches
        return Decimal(total)

    def price_usage(self, model: str, usage: Usage, at: datetime) -> Decimal | None:
        """Return the cost of *usage* of *model* at the time *at* in US dollars; ``None`` if it is unknown."""
        known = self.find_price_data(model)
        if known is None:
            return None
        prices = known.get_prices(at)
        # By identity: price objects have no hash. The second check is for a reused id.
        listed = self._lists.get(id(prices))
        if listed is None or listed.prices is not prices:
            if len(self._lists) >= KEPT_MODELS:
                self._lists.clear()
            self._lists[id(prices)] = listed = _PriceList(prices)
        return listed.price_usage(usage)


class _PriceList:
    """The rates of one model in one period, tier by tier."""

    def __init__(self, prices: object) -> None:
        self.prices = prices
        self._starts = sorted({tier.start for price in vars(prices).values() for tier in getattr(price, "tiers", ())})
        self._rates: dict[int, _Rates | None] = {}

    def price_usage(self, usage: Usage) -> Decimal | None:
        """Return the cost of *usage*; ``None`` if the prices cannot be applied to it."""
        # The size of the prompt, including cached tokens, determines the tier. The rates of a tier are computed once.
        tier = bisect_left(self._starts, usage.prompt_tokens) if self._starts else 0
        if tier not in self._rates:
            self._rates[tier] = _compute_rates(self.prices, usage.prompt_tokens)
        rates = self._rates[tier]
        return None if rates is None else rates.compute_cost(usage)


def _find_billed_tier(model: str, data: Mapping[str, Any], raw_usage: Mapping[str, Any]) -> str:
    """Return the service tier that a reply is billed by, in lower case; ``""`` for the ordinary tier."""
    tier = find_service_tier(data, raw_usage)
    # Groq's flex tier has the ordinary price: https://console.groq.com/docs/flex-processing
    return "" if tier == "flex" and model.startswith("groq/") else tier


def _compute_rates(prices: object, prompt_tokens: int) -> _Rates | None:
    """Return the rates of *prices* for a prompt of *prompt_tokens*; ``None`` if the prices cannot be applied."""
    from genai_prices.types import ModelPrice
    from genai_prices.types import Usage as PricedUsage

    def resolve_tier_price(price: object) -> Any:
        """Return the price for a prompt of this size: that of the last tier that it reaches, else the base price."""
        reached = [tier.price for tier in getattr(price, "tiers", ()) if prompt_tokens > tier.start]
        return reached[-1] if reached else getattr(price, "base", price)

    flat = ModelPrice(**{name: resolve_tier_price(price) for name, price in vars(prices).items()})

    def compute_total_price(prompt: int = 0, completion: int = 0, read: int = 0, write: int = 0) -> Decimal:
        """Return the price of these numbers of tokens in US dollars."""
        usage = PricedUsage(
            input_tokens=prompt, output_tokens=completion, cache_read_tokens=read, cache_write_tokens=write
        )
        return Decimal(flat.calc_price(usage)["total_price"])

    try:
        fixed, prompt = compute_total_price(), compute_total_price(prompt=MILLION_TOKENS)
        return _Rates(
            fixed,
            prompt - fixed,
            compute_total_price(completion=MILLION_TOKENS) - fixed,
            compute_total_price(prompt=MILLION_TOKENS, read=MILLION_TOKENS) - prompt,
            compute_total_price(prompt=MILLION_TOKENS, write=MILLION_TOKENS) - prompt,
        )
    except (LookupError, ValueError):
        return None


# --- other billed items of a reply ------------------------------------------------------------------------------------


def _parse_totals(raw_usage: Mapping[str, Any], flavor: str) -> Usage | None:
    """Parse a usage that states totals of all prompt and output tokens; ``None`` for other formats."""
    if "prompt_tokens" in raw_usage or "completion_tokens" in raw_usage:
        return usage_from_totals(raw_usage, "prompt_tokens", "completion_tokens")
    return usage_from_totals(raw_usage, "input_tokens", "output_tokens") if flavor == "responses" else None


def _has_specially_priced_counts(raw_usage: object) -> bool:
    """Return whether a usage counts anything that has no ordinary token price."""
    if isinstance(raw_usage, Mapping):
        return any(
            _has_specially_priced_counts(value)
            if isinstance(value, Mapping | list | tuple)
            else (bool(value) and type(value) is int and name not in ORDINARY)
            or (name == "modality" and value != "TEXT")
            for name, value in raw_usage.items()
        )
    return isinstance(raw_usage, list | tuple) and any(_has_specially_priced_counts(entry) for entry in raw_usage)


def _has_price_variant(price_data: Any, dimension: str, value: str, at: datetime) -> bool:
    """Return whether *price_data* has separate prices for a *value* of a *dimension*: a service tier, a speed or batch processing."""
    return any(
        variant.when == {dimension: value} and (variant.constraint is None or variant.constraint.active(at))
        for variant in getattr(price_data, "price_variants", None) or ()
    )


def _find_image_token_counts(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the token counts of the images in a reply of OpenAI; ``None`` without images."""
    used = data.get("tool_usage")
    tokens = used.get(IMAGES) if isinstance(used, Mapping) else None
    if not isinstance(tokens, Mapping) or not any(parse_token_count(count) for count in tokens.values()):
        return None
    return tokens


def _list_opaque_part_data(reply: ModelReply) -> list[Mapping[str, Any]]:
    return [part.data for part in reply.content if isinstance(part, OpaquePart)]


def _has_generated_images(reply: ModelReply) -> bool:
    """Return whether OpenAI's image generation tool made an image in *reply*."""
    made = [find_object(part.provider_data, "item") for part in reply.content if isinstance(part, ImagePart)]
    return any(item.get("type") == "image_generation_call" for item in (*made, *_list_opaque_part_data(reply)))


def compute_server_tool_cost(reply: ModelReply, provider: str, model: str) -> Decimal:
    """Return the cost of the searches in *reply* in US dollars, at xAI of all server tools; token prices do not cover them."""
    data: Mapping[str, object] = reply.provider_data or {}
    raw_usage = data.get("usage")
    counted = raw_usage.get("server_side_tool_usage_details") if isinstance(raw_usage, Mapping) else None
    if provider == "xai" and isinstance(counted, Mapping):
        return sum([price * (parse_token_count(counted.get(name)) or 0) for name, price in XAI.items()], Decimal(0))
    kinds = _list_opaque_part_data(reply)
    web = count_openai_web_searches(data, kinds)
    files = sum(item.get("type") == "file_search_call" for item in kinds)
    total: Decimal = WEB_SEARCH.get(provider, Decimal(0)) * web + FILE_SEARCH * files
    grounding = data.get("groundingMetadata")
    queries = grounding.get("webSearchQueries") if isinstance(grounding, Mapping) else None
    if queries and isinstance(queries, list | tuple):
        newer = not model.partition("/")[2].removeprefix("models/").startswith(("gemini-1", "gemini-2"))
        total += GOOGLE_QUERY * len(queries) if newer else GOOGLE_PROMPT
    return total
