"""
What recorded runs would have cost with other models, as a range.

Only tokens are taken over: another model would have decided otherwise, which no arithmetic tells. What is not known widens
the range: how its tokenizer counts, what its cache would have held, whether it would have thought.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.usage import Usage, add_cost
from stepengine.evaluation.samples import in_program_order
from stepengine.journal import Journal
from stepengine.journal.history import History
from stepengine.runtime.sizes import estimated_tokens

__all__ = ("FORMAT", "Priced", "RecordedCall", "calls_of", "family_of", "priced", "recorded_cost")

FORMAT = "stepengine.price/1"
FACTORS = (0.8, 1.35)
"""How many tokens another tokenizer makes of one: the fewest and the most."""
NO_FACTOR = (1.0,)
FAMILY = re.compile(r"[a-z]+")
OF_OPENAI = frozenset({"chatgpt", "gpt", "o"})


@frozen
class RecordedCall:
    """
    A recorded model call.

    Attributes:
        model: The model that was asked.
        usage: What it used; ``None`` when that is unknown.
        cost: What it cost; ``None`` when that is unknown.
        shared: Which share of its prompt the request before it in the same run had, too, from 0 to 1.
    """

    model: str
    usage: Usage | None
    cost: Decimal | None
    shared: float


@frozen
class Priced:
    """
    What a run would have cost.

    Attributes:
        model: The model.
        low: US dollars at the least; ``None`` when there is no price.
        high: US dollars at the most.
        recorded: What the run cost; ``None`` when that is unknown.
        unknown: How many model calls say nothing of what they used; they are not in the sums.
    """

    model: str
    low: Decimal | None
    high: Decimal | None
    recorded: Decimal | None
    unknown: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; money is text."""
        money = {name: _text(getattr(self, name)) for name in ("low", "high", "recorded")}
        return {"model": self.model, **money, "unknown": self.unknown}


def _text(dollars: Decimal | None) -> str | None:
    return None if dollars is None else str(dollars)


def calls_of(journal: Journal) -> list[RecordedCall]:
    """
    Return the model calls of a run that were answered.

    Raises:
        JournalError: when the journal cannot be read.
    """
    return [*_calls(journal.history())]


def _calls(history: History) -> Iterator[RecordedCall]:
    before: dict[str, ModelRequest] = {}
    for address, intent in in_program_order(history):
        result = history.results.get(address) if intent.type == "model_call" else None
        if result is None:
            continue
        request = history.request(intent)
        shared = _shareable_part(before.get(address[0]), request)
        before[address[0]] = request
        reply = getattr(history.outcome(result), "value", None)
        if isinstance(reply, ModelReply):
            yield RecordedCall(request.model, reply.usage, reply.cost, shared)


def _shareable_part(before: ModelRequest | None, request: ModelRequest) -> float:
    """Return which share of a prompt a cache could have held: what the one before begins with, if nothing else differs."""
    if before is None or (before.system_prompt, before.tools) != (request.system_prompt, request.tools):
        return 0.0
    same = before.messages.shared_prefix(request.messages)
    if not same or not len(before.messages):
        return 0.0
    whole = estimated_tokens(request)
    held = estimated_tokens(attrs.evolve(before, tail=())) * same / len(before.messages)
    return min(1.0, held / whole) if whole else 0.0


def family_of(model: str) -> str:
    """Return the family whose tokenizer a model shares, as far as its name tells: ``claude``, ``gpt``, ``gemini`` ..."""
    found = FAMILY.search(model.rpartition("/")[2].lower()[:100])
    name = "" if found is None else found[0]
    return "gpt" if name in OF_OPENAI else name


def recorded_cost(calls: Sequence[RecordedCall]) -> Decimal | None:
    """Return what calls cost together; ``None`` when one of them is unknown."""
    total: Decimal | None = Decimal(0)
    for call in calls:
        total = add_cost(total, call.cost)
    return total


def priced(
    calls: Sequence[RecordedCall], model: str, price: Callable[[str, Usage, datetime], Decimal | None], now: datetime
) -> Priced:
    """
    Return what *calls* would cost with another model.

    Args:
        calls: What was recorded.
        model: The model, ``provider/name``.
        price: What usage costs.
        now: When: prices change.
    """
    known = [call for call in calls if call.usage is not None]
    low, high = Decimal(0), Decimal(0)
    is_priced = bool(known) or not calls
    for call in known:
        costs = [price(model, usage, now) for usage in _variants(call, model)]
        sums = [cost for cost in costs if cost is not None]
        if len(sums) != len(costs):
            is_priced = False
            break
        low, high = low + min(sums), high + max(sums)
    unknown = len(calls) - len(known)
    if not is_priced:
        return Priced(model, None, None, recorded_cost(calls), unknown)
    return Priced(model, low, high, recorded_cost(calls), unknown)


def _variants(call: RecordedCall, model: str) -> Iterator[Usage]:
    """Give what a call may use with another model: another tokenizer, other luck with its cache, no thoughts."""
    usage = call.usage or Usage()
    factors = NO_FACTOR if family_of(call.model) == family_of(model) else FACTORS
    held = min(usage.prompt_tokens, round(usage.prompt_tokens * call.shared))
    caches = (
        usage,
        attrs.evolve(usage, input_tokens=usage.prompt_tokens, cache_read_tokens=0, cache_write_tokens=0),
        attrs.evolve(usage, input_tokens=usage.prompt_tokens - held, cache_read_tokens=held, cache_write_tokens=0),
    )
    for factor, cached, thoughts in itertools.product(factors, caches, (1, 0)):
        yield Usage(
            round(cached.input_tokens * factor),
            round(cached.output_tokens * factor),
            round(cached.cache_read_tokens * factor),
            round(cached.cache_write_tokens * factor),
            round(cached.reasoning_tokens * factor) * thoughts,
            cached.requests,
        )
