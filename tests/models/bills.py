"""
What recorded replies cost: by the service's own bill, by our records, and by the library of prices alone.

A bill is a number of US dollars that stands in a reply. Where there is none, ours is what the price lists say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import parsedate_to_datetime
from typing import Any

import attrs

from stepengine.data.json import thaw
from stepengine.data.models import ModelReply
from stepengine.models._iterations import list_uncounted_iterations
from stepengine.models._price_book import DEFAULT_FLAVORS, FLAVORS, PRICE_LISTS, compute_search_cost
from stepengine.models._unpriced import find_service_tier
from stepengine.models.pricing import cost_of
from tests.models.recorded import Recording

TICKS = 10**10
ROUNDING = Decimal("1e-12")
LATELY = datetime(2026, 11, 1, tzinfo=UTC)
"""When a reply was made that does not say so."""


@attrs.frozen
class Bill:
    """
    What one reply cost, in US dollars; ``None`` where that is not known.

    Attributes:
        name: The exchange.
        model: Provider and model.
        service: What the service says.
        ours: What a run would record.
        listed: What we would record if the service said nothing.
        library: What the library of prices makes of the body by itself.
        beside: What of it no list has a price for, by the provider's names.
        tokens: The service's total of tokens, and ours where that is another one.
        why: What the library leaves out, where it comes to another figure than we do.
    """

    name: str
    model: str
    service: Decimal | None
    ours: Decimal | None
    listed: Decimal | None
    library: Decimal | None
    beside: tuple[str, ...] = ()
    tokens: str = ""
    why: str = ""


def bill_of(recording: Recording, reply: ModelReply) -> Bill:
    """The bill of one reply, by three readers."""
    call, at = recording.call, when(recording)
    raw = thaw(reply.provider_data.get("usage"))
    stated = stated_in(raw if isinstance(raw, dict) else {}, recording)
    listed = cost_of.of_reply(call.model, reply, at)
    ours = reply.cost if reply.cost is not None else listed
    beside = cost_of.unpriced(call.model, reply, at)
    library = by_library(recording, raw, reply, at)
    why = "" if listed == library else why_of(recording, reply, listed, library)
    return Bill(recording.name, call.model, stated, ours, listed, library, beside, total_of(raw, reply), why)


def why_of(recording: Recording, reply: ModelReply, listed: Decimal | None, library: Decimal | None) -> str:
    """What the library leaves out of a reply that it prices otherwise than we do."""
    data, provider = reply.provider_data, recording.call.model.partition("/")[0]
    if library is None:
        return "a body or a name that it does not know"
    if listed is None:
        return "a tier whose price nobody lists, which it takes for the ordinary one"
    searches = compute_search_cost(reply, provider, reply.model or recording.call.model)
    if searches and abs(listed - library - searches) < ROUNDING:
        return "searches"
    if list_uncounted_iterations(data["usage"]):
        return "what ran beside the message"
    return "the service tier" if find_service_tier(data, data["usage"]) else ""


def when(recording: Recording) -> datetime:
    try:
        return parsedate_to_datetime(recording.answer["date"])
    except (LookupError, ValueError, TypeError):
        return LATELY


def stated_in(raw: dict[str, Any], recording: Recording) -> Decimal | None:
    """The dollars that a reply states: read here, and not by what our providers read them with."""
    cost: Any = raw.get("cost")
    if isinstance(cost, dict):
        cost = cost.get("total_cost")
    if cost is None and raw.get("cost_in_usd_ticks") is not None:
        return Decimal(raw["cost_in_usd_ticks"]) / TICKS
    if cost is None:
        return None if (told := recording.answer.get("x-litellm-response-cost")) is None else Decimal(told)
    found = Decimal(str(cost))
    if raw.get("is_byok"):
        found += Decimal(str((raw.get("cost_details") or {}).get("upstream_inference_cost") or 0))
    return found


def by_library(recording: Recording, raw: Any, reply: ModelReply, at: datetime) -> Decimal | None:
    """What the library's own reader of bodies and its prices come to."""
    from genai_prices import calc_price, extract_usage

    provider, _, asked = recording.call.model.partition("/")
    flavor = FLAVORS.get(provider, "default" if provider in DEFAULT_FLAVORS else "chat")
    flavor = "responses" if recording.wire == "openai-responses" else flavor
    listed = PRICE_LISTS.get(provider, provider)
    for name in dict.fromkeys([(reply.model or "").partition("/")[2] or asked, asked]):
        body = {"usage": raw, "usageMetadata": raw, "model": name, "modelVersion": name}
        with suppress(LookupError, ValueError, TypeError, AttributeError):
            found = extract_usage(body, provider_id=listed, api_flavor=flavor)
            return Decimal(calc_price(found.usage, name, provider_id=listed, genai_request_timestamp=at).total_price)
    return None


def total_of(raw: Any, reply: ModelReply) -> str:
    """The service's total of tokens and ours, where they are not one."""
    told = raw.get("total_tokens", raw.get("totalTokenCount")) if isinstance(raw, dict) else None
    usage = reply.usage
    if usage is None or told is None or told == usage.prompt_tokens + usage.completion_tokens:
        return ""
    return f"{told} and {usage.prompt_tokens} + {usage.completion_tokens}"


def table(bills: Iterable[Bill]) -> list[str]:
    """A Markdown table of sums by provider: stated bills first, then what no service states."""
    groups: dict[tuple[bool, str], list[Bill]] = {}
    for bill in bills:
        groups.setdefault((bill.service is None, bill.model.partition("/")[0]), []).append(bill)
    lines = [
        "| provider | replies | the service's | ours | ours, if it said nothing | the library's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for (_, provider), group in sorted(groups.items()):
        columns = [summed([getattr(bill, name) for bill in group]) for name in ("service", "ours", "listed", "library")]
        lines.append(f"| {provider} | {len(group)} | {' | '.join(columns)} |")
    return lines


def summed(figures: list[Decimal | None]) -> str:
    """A sum of dollars, and of how many replies it is the sum where some have no figure."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return "-"
    return f"{sum(known):.6f}" + ("" if len(known) == len(figures) else f" ({len(known)} of {len(figures)})")


def left_out(bills: Iterable[Bill]) -> list[str]:
    """What the library leaves out, by reason, and in how many replies of whom."""
    counted = Counter([(bill.model.partition("/")[0], bill.why or "unexplained") for bill in bills if differs(bill)])
    return [f"  {count:>4}  {name}: the library leaves out {why}" for (name, why), count in sorted(counted.items())]


def differs(bill: Bill) -> bool:
    """Whether the library comes to another figure than we do."""
    return bill.listed != bill.library
