"""What the decoders of all wires share: the reply itself, the stop reason that its content bears out, and usage."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import attrs

from stepengine.data.json import compact
from stepengine.data.messages import AssistantPart, RefusalPart, TextPart, ToolCallPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.usage import Usage
from stepengine.models._failures import Call
from stepengine.models._json import count_of

__all__ = ("cut_at_stops", "kept_of", "reply_of", "usage_in_totals")

logger = logging.getLogger("stepengine.models")
_warned: set[str] = set()


def reply_of(
    content: tuple[AssistantPart, ...],
    call: Call,
    model: str,
    *,
    stop: StopReason | None,
    raw: str | None,
    usage: Usage | None,
    answered: str | None,
    request_id: str | None,
    kept: Mapping[str, Any],
    cost: Decimal | None = None,
) -> ModelReply:
    """
    Return the reply of *content* to *call* of *model*.

    *raw* is the provider's stop reason and *stop* what it means, ``None`` when that is not known; *answered* is its name
    of the model that answered, and *kept* what else is kept of its message.
    """
    stop = _stop_of(stop, raw, content)
    return ModelReply(
        _cut_off(content) if stop is StopReason.MAX_TOKENS else content,
        usage=usage,
        stop_reason=stop,
        raw_stop_reason=raw,
        cost=cost,
        model=f"{call.provider}/{answered}" if answered and answered != model else None,
        request_id=request_id,
        provider_data={"provider": call.provider, "model": model, **kept},
    )


def kept_of(source: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return those members *names* of *source* that are there."""
    return {name: source[name] for name in names if source.get(name) is not None}


def _stop_of(stop: StopReason | None, raw: str | None, content: tuple[AssistantPart, ...]) -> StopReason:
    """
    Return the stop reason: the content decides between the end, tool use and refusal, and for words of the future (EC97).

    A word of the future is said once per process.
    """
    if stop is None and raw and raw not in _warned:
        _warned.add(raw)
        logger.warning("unknown stop reason %r; the reply's content decides", raw)
    if stop is None or stop in {StopReason.END_TURN, StopReason.TOOL_USE}:
        kinds = {type(part) for part in content}
        if ToolCallPart in kinds:
            return StopReason.TOOL_USE
        return StopReason.REFUSAL if RefusalPart in kinds else StopReason.END_TURN
    return stop


def _cut_off(content: tuple[AssistantPart, ...]) -> tuple[AssistantPart, ...]:
    """Mark the last call of a reply that the output limit cut: it keeps its raw text (reliability MP55)."""
    parts = list(content)
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, ToolCallPart):
            if part.raw_input is None:
                parts[index] = attrs.evolve(part, raw_input=compact(part.input))
            break
    return tuple(parts)


def cut_at_stops(reply: ModelReply, stops: tuple[str, ...]) -> ModelReply:
    """
    Return *reply* cut before the first of *stops* in its text, for wires that have no stop sequences of their own.

    What comes after the cut, calls included, is left out; the provider bills it all the same, and a stream has shown it.
    """
    for index, part in enumerate(reply.content):
        if type(part) is not TextPart:
            continue
        found = [(part.text.find(stop), stop) for stop in stops if stop and stop in part.text]
        if found:
            position, stop = min(found)
            kept = (*reply.content[:index], TextPart(part.text[:position], provider_data=part.provider_data))
            data = {**reply.provider_data, "stop_sequence": stop}
            return attrs.evolve(reply, content=kept, stop_reason=StopReason.STOP_SEQUENCE, provider_data=data)
    return reply


def usage_in_totals(raw: Any, prompt: str, completion: str, *, hits: str = "") -> Usage | None:
    """
    Return in our buckets the usage of an API whose totals hold what was cached and what was thought (EC76).

    *prompt* and *completion* name the totals, whose parts are in objects of these names with ``_details``; *hits* is
    another name for the tokens that were read from the cache. Without a total the result is ``None``.
    """
    if not isinstance(raw, Mapping) or (raw.get(prompt) is None and raw.get(completion) is None):
        return None
    inside, outside = raw.get(f"{prompt}_details"), raw.get(f"{completion}_details")
    whole, output = _figure(raw, prompt), _figure(raw, completion)
    read = min(whole, _figure(inside, "cached_tokens") or _figure(raw, hits))
    written = min(whole - read, _figure(inside, "cache_write_tokens"))
    reasoning = min(output, _figure(outside, "reasoning_tokens"))
    unsure = any(count_of(raw.get(name)) is None for name in (prompt, completion))
    return Usage(whole - read - written, output - reasoning, read, written, reasoning, at_least=unsure)


def _figure(details: Any, name: str) -> int:
    return count_of(details.get(name)) or 0 if isinstance(details, Mapping) else 0
