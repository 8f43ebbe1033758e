"""
The cost of recorded runs with other models, as a range.

Only token counts are used: the decisions of another model cannot be computed. Unknown facts widen the range: its tokenizer, the
content of its cache, and its reasoning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.usage import Usage
from stepengine.evaluation.samples import sort_effects_in_program_order, sum_costs
from stepengine.journal import Journal, JournalLike, as_journal
from stepengine.journal.recorded_requests import RecordedRequests
from stepengine.models.pricing import LIST_PRICES
from stepengine.runtime.sizes import estimate_request_tokens

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
        model: The model that was called.
        usage: The usage; ``None`` if it is unknown.
        cost: The cost in US dollars; ``None`` if it is unknown.
        shared: The share of the prompt, from 0 to 1, that the previous request of the same run contains, too.
    """

    model: str
    usage: Usage | None
    cost: Decimal | None
    shared: float


@frozen
class RunPrice:
    """
    The cost of a recorded run with another model.

    Attributes:
        model: The model.
        low: The lowest cost in US dollars; ``None`` without a price, or if none of the model calls has recorded usage.
        high: The highest cost in US dollars; ``None`` in the same cases.
        recorded: The recorded cost of the run in US dollars; ``None`` when that is unknown.
        unknown: The number of model calls without recorded usage; they are not in the sums.
    """

    model: str
    low: Decimal | None
    high: Decimal | None
    recorded: Decimal | None
    unknown: int

    def to_json(self) -> dict[str, Any]:
        """Return the cost as JSON; money is text."""
        money = {"low": self.low, "high": self.high, "recorded": self.recorded}
        known = {name: None if dollars is None else str(dollars) for name, dollars in money.items()}
        return {"model": self.model, **known, "unknown": self.unknown}


def price(journal: JournalLike, *models: str) -> list[RunPrice]:
    """
    Return the cost of a recorded run with each of these models, at today's prices.

    Args:
        journal: The run.
        models: The models, ``provider/name``.

    Raises:
        JournalError: when the journal cannot be read.
    """
    calls, now = list_answered_calls(as_journal(journal)), datetime.now(UTC)
    return [price_calls(calls, model, LIST_PRICES, now) for model in models]


def list_answered_calls(journal: Journal) -> list[RecordedCall]:
    """
    Return the model calls of a run that have a recorded reply.

    Raises:
        JournalError: when the journal cannot be read.
    """
    history = journal.history()
    requests, before = RecordedRequests(history), dict[str, ModelRequest]()
    calls: list[RecordedCall] = []
    for address, intent in sort_effects_in_program_order(history):
        result = history.results.get(address) if intent.type == "model_call" else None
        if result is None:
            continue
        request = requests.get_request(intent)
        shared = _cacheable_share(before.get(address[0]), request)
        before[address[0]] = request
        reply = getattr(history.outcome(result), "value", None)
        if isinstance(reply, ModelReply):
            calls.append(RecordedCall(request.model, reply.usage, reply.cost, shared))
    return calls


def _cacheable_share(previous_request: ModelRequest | None, request: ModelRequest) -> float:
    """Return the share of a prompt that a cache could hold: the common start of both requests; 0 for another system prompt or tools."""
    if previous_request is None or (previous_request.system_prompt, previous_request.tools) != (
        request.system_prompt,
        request.tools,
    ):
        return 0.0
    same = previous_request.messages.shared_prefix_length(request.messages)
    if not same:
        return 0.0
    whole = estimate_request_tokens(request)
    held = estimate_request_tokens(attrs.evolve(previous_request, tail=())) * same / len(previous_request.messages)
    return min(1.0, held / whole) if whole else 0.0


def tokenizer_family(model: str) -> str:
    """Return the family of models with the same tokenizer, by the name of a model: ``claude``, ``gpt``, ``gemini`` ..."""
    found = FAMILY.search(model.rpartition("/")[2].lower()[:100])
    name = "" if found is None else found[0]
    return "gpt" if name in OF_OPENAI else name


def price_calls(
    calls: Sequence[RecordedCall], model: str, price: Callable[[str, Usage, datetime], Decimal | None], now: datetime
) -> RunPrice:
    """
    Return the cost of *calls* with another model.

    Args:
        calls: The recorded calls.
        model: The model, ``provider/name``.
        price: Returns the cost of a usage, or ``None``.
        now: The time whose prices are used.
    """
    known = [call for call in calls if call.usage is not None]
    low, high = Decimal(0), Decimal(0)
    is_priced = bool(known) or not calls
    for call in known:
        costs = [price(model, usage, now) for usage in _possible_usages(call, model)]
        sums = [cost for cost in costs if cost is not None]
        if len(sums) != len(costs):
            is_priced = False
            break
        low, high = low + min(sums), high + max(sums)
    ends: tuple[Decimal | None, Decimal | None] = (low, high) if is_priced else (None, None)
    return RunPrice(model, *ends, sum_costs([call.cost for call in calls]), len(calls) - len(known))


def _possible_usages(call: RecordedCall, model: str) -> Iterator[Usage]:
    """Yield possible usages of a call with another model: other token counts, cache hits, or no reasoning."""
    usage = call.usage or Usage()
    factors = NO_FACTOR if tokenizer_family(call.model) == tokenizer_family(model) else FACTORS
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
