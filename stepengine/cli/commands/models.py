"""``stepengine agents models``: the providers that a model string can name, which keys are there, and what is known of a model."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import registry_of
from stepengine.cli.exits import Exit
from stepengine.cli.options import Config
from stepengine.cli.screen.render import dumps, say, visible
from stepengine.cli.settings import UsageProblem, in_force
from stepengine.data.usage import Usage
from stepengine.errors import MissingKey, ModelError

if TYPE_CHECKING:
    from stepengine.models import Models, Provider, ProviderSettings

__all__ = ("KnownModel", "ListedProvider", "describe_model", "known", "list_providers", "models")


PRICED_TOKENS = 1_000
PER_MILLION = 1_000
USER = re.compile("//[^/]*@")
"""What an address may hold beside the place: a name and a password."""
KINDS = {
    "input": Usage(input_tokens=PRICED_TOKENS),
    "output": Usage(output_tokens=PRICED_TOKENS),
    "cache_read": Usage(cache_read_tokens=PRICED_TOKENS),
    "cache_write": Usage(cache_write_tokens=PRICED_TOKENS),
}


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models to describe; without one, all providers are list_providers."),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask", help="Ask the provider of each MODEL what it takes; Anthropic, Google and OpenRouter say so."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    config: Config = None,
) -> Exit:
    """
    List the providers of models, and whether their keys are set.

    Keys themselves are never shown. For a MODEL: its context window, its largest reply and its price, where the data of the
    package know them. Nothing is asked over the network but with --ask; `stepengine ask MODEL hi` tries a model.

    Examples:
      stepengine agents models
      stepengine agents models openai/gpt-5 google/gemini-2.5-flash
      stepengine agents models anthropic/claude-sonnet-5 --ask
    """
    if ask and not names:
        msg = "--ask asks about models: name one, such as anthropic/claude-sonnet-5"
        raise UsageProblem(msg)
    registry = registry_of(in_force(config))
    if ask:
        asyncio.run(_query_providers(registry, names or ()))
    found = [entry for name in names or () for entry in known(registry, name)]
    entries: list[Any] = list(found or list_providers(registry))
    if as_json:
        print(dumps([_json_of(entry) for entry in entries]))
    elif found:
        print("\n\n".join([describe_model(entry) for entry in found]))
    else:
        _print_table(entries)
    return Exit.COMPLETED


async def _query_providers(registry: Models, names: Iterable[str]) -> None:
    """Let *registry* know what the providers of the models *names* state of them."""
    try:
        for name in names:
            await registry.ask(name)
    finally:
        await registry.close()


@frozen
class ListedProvider:
    """
    One provider.

    Attributes:
        prefix: What its model strings begin with.
        key_variables: The environment variables that may hold its key.
        key: ``"set"``, ``"missing"``, ``"not needed"``, or why it cannot be used. Never the key itself.
        key_from: The variable that holds the key, if one does.
        base_url: Where requests go; ``None`` when that is not known before.
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
        thinking: The kinds of thinking that it takes, as its provider stated; ``None`` when that was not asked.
        efforts: How hard it can be asked to think, likewise.
    """

    model: str
    provider: ListedProvider
    context_window: int | None
    max_output: int | None
    prices: dict[str, Decimal]
    thinking: tuple[str, ...] | None = None
    efforts: tuple[str, ...] | None = None


def list_providers(models: Models) -> Iterator[ListedProvider]:
    """Give every provider of a registry, in order."""
    for prefix in models.providers:
        yield _list_provider(models, prefix)


def known(models: Models, name: str) -> Iterator[KnownModel]:
    """
    Give what is known of the model *name*, or of each model of a fallback, without any request.

    Raises:
        UnknownModel: when no provider fits.
    """
    ref = models.parse(name)
    if not ref.provider:  # a fallback
        for one in ref.model.partition(" on ")[0].split("|"):
            yield from known(models, one.strip())
        return
    info = models.info(str(ref))
    window, output, prices = info.context_window, info.max_output, _prices(str(ref))
    yield KnownModel(
        str(ref), _list_provider(models, ref.provider), window, output, prices, info.thinking, info.efforts
    )


def _list_provider(models: Models, prefix: str) -> ListedProvider:
    try:
        provider = models.provider_for(f"{prefix}/any")
        settings = provider.settings()
    except Exception as error:  # noqa: BLE001  (providers of other packages do what they like)
        return ListedProvider(prefix, (), f"cannot be used: {type(error).__name__}: {error}", None, None)
    holder = settings.key_from
    return ListedProvider(prefix, settings.key_variables, _key(provider, prefix, holder), holder, _base_url(settings))


def _key(provider: Provider, prefix: str, holder: str | None) -> str:
    try:
        provider.check(f"{prefix}/any")
    except MissingKey:
        return "missing"
    except ModelError as error:
        return f"cannot be used: {error.message}"
    return "set" if holder else "not needed"


def _base_url(settings: ProviderSettings) -> str | None:
    from stepengine.models.keys import base_url_for

    url = base_url_for(settings.given_url, settings.base_url_variable, settings.base_url)[0]
    return None if url is None else USER.sub("//***@", url.partition("?")[0])


def _prices(model: str) -> dict[str, Decimal]:
    """Return what a million tokens of each kind cost, at the price of small requests."""
    from stepengine.models.pricing import cost_of

    now = datetime.now(UTC)
    costs = {kind: cost_of(model, usage, now) for kind, usage in KINDS.items()}
    return {kind: (cost * PER_MILLION).normalize() for kind, cost in costs.items() if cost is not None}


# --- how it is shown --------------------------------------------------------------------------------------------------


def _print_table(entries: list[ListedProvider]) -> None:
    rows = [("PREFIX", "KEY", "VARIABLE", "ADDRESS")]
    for entry in entries:
        key = entry.key if len(entry.key) <= len("not needed") else "unusable"
        variable = entry.key_from or " or ".join(entry.key_variables) or "-"
        rows.append((f"{entry.prefix}/...", key, variable, visible(entry.base_url or "-", strict=True)))
    widths = [max([len(row[column]) for row in rows]) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        say("  ".join([*cells, row[3]]), hang=4)
    for entry in entries:
        if entry.key.startswith("cannot"):
            print(f"stepengine: {entry.prefix}: {visible(entry.key)}", file=sys.stderr)


def describe_model(entry: KnownModel) -> str:
    """Return what is known of a model as lines for a terminal."""
    provider = entry.provider
    variables = " or ".join(provider.key_variables)
    key = f"{provider.key_from} is set" if provider.key_from else f"{visible(provider.key)}; {variables}".rstrip("; ")
    prices = [f"{kind.replace('_', ' ')} ${price:f}" for kind, price in entry.prices.items()]
    lines = [
        visible(entry.model, strict=True),
        f"  key      {key}",
        f"  address  {visible(provider.base_url or 'unknown', strict=True)}",
        f"  window   {_tokens(entry.context_window)}",
        f"  output   {_tokens(entry.max_output)}",
        f"  price    {', '.join(prices) + ' per million tokens' if prices else 'unknown'}",
    ]
    stated = {"thinking": entry.thinking, "efforts": entry.efforts}
    lines += [
        f"  {name:8} {visible(', '.join(words) or 'none')}" for name, words in stated.items() if words is not None
    ]
    return "\n".join(lines)


def _tokens(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,} tokens"


def _json_of(entry: ListedProvider | KnownModel) -> dict[str, object]:
    if isinstance(entry, ListedProvider):
        return attrs.asdict(entry)
    prices = {kind: f"{price:f}" for kind, price in entry.prices.items()}
    return {**attrs.asdict(entry), "prices": prices or None}
