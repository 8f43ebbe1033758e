"""
List the providers and models of a registry, with the state of keys, base URLs, known limits and prices.

Must not be here: requests (``Models.ask``), printing.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from decimal import Decimal

from attrs import frozen

from stepengine.data.usage import Usage
from stepengine.errors import MissingKey, ModelError
from stepengine.models.base import Provider, ProviderSettings
from stepengine.models.keys import resolve_base_url
from stepengine.models.pricing import LIST_PRICES
from stepengine.models.registry import Models
from stepengine.models.routing import parse_route

PRICED_TOKENS = 1_000
PER_MILLION = 1_000
USER = re.compile("//[^/]*@")
"""The user name and password in a URL."""
KINDS = {
    "input": Usage(input_tokens=PRICED_TOKENS),
    "output": Usage(output_tokens=PRICED_TOKENS),
    "cache_read": Usage(cache_read_tokens=PRICED_TOKENS),
    "cache_write": Usage(cache_write_tokens=PRICED_TOKENS),
}


@frozen
class ListedProvider:
    """
    One provider.

    Attributes:
        prefix: The prefix of its model strings, such as ``openai``.
        key_variables: The environment variables that may hold its key.
        key: ``"set"``, ``"missing"``, ``"not needed"``, or the reason why it cannot be used. Never the key itself.
        key_from: The variable that holds the key; ``None`` if none does.
        base_url: The base URL of requests, without query and password; ``None`` when unknown.
    """

    prefix: str
    key_variables: tuple[str, ...]
    key: str
    key_from: str | None
    base_url: str | None


@frozen
class KnownModel:
    """
    One model.

    Attributes:
        model: The canonical model string.
        provider: Its provider.
        context_window: Tokens; ``None`` when unknown.
        max_output: Tokens; ``None`` when unknown.
        prices: US dollars per million tokens, by kind; empty when unknown.
        thinking: The kinds of thinking that its provider lists; ``None`` when the provider was not queried.
        efforts: The levels of effort that its provider lists; ``None`` when the provider was not queried.
    """

    model: str
    provider: ListedProvider
    context_window: int | None
    max_output: int | None
    prices: dict[str, Decimal]
    thinking: tuple[str, ...] | None = None
    efforts: tuple[str, ...] | None = None


def list_providers(models: Models) -> list[ListedProvider]:
    """Return all providers of a registry, in order, with the state of their keys. No request is sent."""
    return [_describe_provider(models, prefix, f"{prefix}/any") for prefix in models.providers]


def find_known_models(models: Models, name: str) -> list[KnownModel]:
    """
    Return the known facts of the model *name*, or of each model of a fallback, without a request.

    Raises:
        UnknownModel: when no provider matches.
    """
    ref = models.parse(name)
    route = parse_route(str(ref))
    if route is not None:
        return [known for one in route.models for known in find_known_models(models, one)]
    info = models.info(str(ref))
    window, output, prices = info.context_window, info.max_output, _compute_token_prices(str(ref))
    # By the model, because another provider may serve it than that of its prefix.
    provider = _describe_provider(models, ref.provider, str(ref))
    return [KnownModel(str(ref), provider, window, output, prices, info.thinking, info.efforts)]


def _describe_provider(models: Models, prefix: str, model: str) -> ListedProvider:
    """Return the provider of *model* with the state of its key; for a provider that fails, the state is the reason."""
    try:
        provider = models.provider_for(model)
        settings = provider.settings()
    except Exception as error:  # noqa: BLE001  (providers of other packages may raise anything)
        return ListedProvider(prefix, (), f"cannot be used: {type(error).__name__}: {error}", None, None)
    holder = settings.key_from
    return ListedProvider(
        prefix or provider.name,
        settings.key_variables,
        _describe_key_state(provider, model, holder),
        holder,
        _resolve_redacted_base_url(settings),
    )


def _describe_key_state(provider: Provider, model: str, holder: str | None) -> str:
    """Return ``"set"``, ``"missing"`` or ``"not needed"``, or the reason why the provider cannot be used for *model*."""
    try:
        provider.check(model)
    except MissingKey:
        return "missing"
    except ModelError as error:
        return f"cannot be used: {error.message}"
    return "set" if holder else "not needed"


def _resolve_redacted_base_url(settings: ProviderSettings) -> str | None:
    """Return the base URL of requests without query, and with ``***`` as user name and password; ``None`` when unknown."""
    url = resolve_base_url(settings.given_url, settings.base_url_variable, settings.base_url)[0]
    return None if url is None else USER.sub("//***@", url.partition("?")[0])


def _compute_token_prices(model: str) -> dict[str, Decimal]:
    """Return the price in US dollars of a million tokens of each kind, for small requests; unknown prices are left out."""
    now = datetime.now(UTC)
    costs = {kind: LIST_PRICES(model, usage, now) for kind, usage in KINDS.items()}
    return {kind: (cost * PER_MILLION).normalize() for kind, cost in costs.items() if cost is not None}
