"""``stepengine agents models``: the providers of models, their keys, and the known properties of a model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import Config
from stepengine.cli.screen.render import print_visible, to_ascii_json, visible
from stepengine.cli.settings import UsageProblem, load_settings
from stepengine.models import KnownModel, ListedProvider, find_known_models, list_providers

if TYPE_CHECKING:
    from stepengine.models import Models


def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models to describe; default: list all providers."),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="Query the provider for the limits of each MODEL; Anthropic, Google and OpenRouter report them.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    config: Config = None,
) -> Exit:
    """
    List the providers of models, and whether their keys are set.

    Keys are never shown. For each MODEL: context window, largest reply and price, if the package's data has them.
    The network is used only with --ask; `stepengine ask MODEL hi` tries a model.

    Examples:
      stepengine agents models
      stepengine agents models openai/gpt-5 google/gemini-2.5-flash
      stepengine agents models anthropic/claude-sonnet-5 --ask
    """
    if ask and not names:
        msg = "--ask needs a model: name one, such as anthropic/claude-sonnet-5"
        raise UsageProblem(msg)
    registry = load_settings(config).make_models()
    if ask:
        asyncio.run(_fetch_model_limits(registry, names or ()))
    found = [entry for name in names or () for entry in find_known_models(registry, name)]
    entries: list[Any] = list(found or list_providers(registry))
    if as_json:
        print(to_ascii_json([_entry_to_dict(entry) for entry in entries]))
    elif found:
        print("\n\n".join([describe_model(entry) for entry in found]))
    else:
        _print_providers(entries)
    return Exit.COMPLETED


async def _fetch_model_limits(registry: Models, names: Iterable[str]) -> None:
    """Ask the providers of the models *names* for their properties, and store them in *registry*."""
    try:
        for name in names:
            await registry.ask(name)
    finally:
        await registry.close()


# --- how it is shown --------------------------------------------------------------------------------------------------


def _print_providers(entries: list[ListedProvider]) -> None:
    """Print a table of the providers with the state and the variable of their keys."""
    rows = [("PREFIX", "KEY", "VARIABLE", "ADDRESS")]
    for entry in entries:
        key = entry.key if len(entry.key) <= len("not needed") else "unusable"
        variable = entry.key_from or " or ".join(entry.key_variables) or "-"
        rows.append((f"{entry.prefix}/...", key, variable, visible(entry.base_url or "-", strict=True)))
    widths = [max([len(row[column]) for row in rows]) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print_visible("  ".join([*cells, row[3]]), hanging_indent=4)
    for entry in entries:
        if entry.key.startswith("cannot"):
            print(f"stepengine: {entry.prefix}: {visible(entry.key)}", file=sys.stderr)


def describe_model(entry: KnownModel) -> str:
    """Return the known properties of a model as lines."""
    provider = entry.provider
    variables = " or ".join(provider.key_variables)
    key = f"{provider.key_from} is set" if provider.key_from else f"{visible(provider.key)}; {variables}".rstrip("; ")
    prices = [f"{kind.replace('_', ' ')} ${price:f}" for kind, price in entry.prices.items()]
    lines = [
        visible(entry.model, strict=True),
        f"  key      {key}",
        f"  address  {visible(provider.base_url or 'unknown', strict=True)}",
        f"  window   {_format_tokens(entry.context_window)}",
        f"  output   {_format_tokens(entry.max_output)}",
        f"  price    {', '.join(prices) + ' per million tokens' if prices else 'unknown'}",
    ]
    stated = {"thinking": entry.thinking, "efforts": entry.efforts}
    lines += [
        f"  {name:8} {visible(', '.join(words) or 'none')}" for name, words in stated.items() if words is not None
    ]
    return "\n".join(lines)


def _format_tokens(count: int | None) -> str:
    """Return a number of tokens as text; "unknown" for ``None``."""
    return "unknown" if count is None else f"{count:,} tokens"


def _entry_to_dict(entry: ListedProvider | KnownModel) -> dict[str, object]:
    if isinstance(entry, ListedProvider):
        return attrs.asdict(entry)
    prices = {kind: f"{price:f}" for kind, price in entry.prices.items()}
    return {**attrs.asdict(entry), "prices": prices or None}
