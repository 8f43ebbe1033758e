"""What the decoders of all wires share: the stop reason that the content bears out, and the mark of a cut-off call."""

from __future__ import annotations

import logging

import attrs

from stepengine.data.json import compact
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.parts import AssistantPart, TextPart, ToolCallPart

__all__ = ("cut_at_stops", "cut_off", "stop_of")

logger = logging.getLogger("stepengine.models")
_warned: set[str] = set()


def stop_of(stop: StopReason | None, raw: str | None, content: tuple[AssistantPart, ...]) -> StopReason:
    """
    Return the stop reason: the content decides between the end and tool use, and for words of the future (EC97).

    Args:
        stop: What the provider's word means; ``None`` when it is not known, which is said once per process.
        raw: The provider's word.
        content: The reply.
    """
    if stop is None and raw and raw not in _warned:
        _warned.add(raw)
        logger.warning("unknown stop reason %r; the reply's content decides", raw)
    if stop is None or stop in {StopReason.END_TURN, StopReason.TOOL_USE}:
        calls = any(type(part) is ToolCallPart for part in content)
        return StopReason.TOOL_USE if calls else StopReason.END_TURN
    return stop


def cut_off(content: tuple[AssistantPart, ...]) -> tuple[AssistantPart, ...]:
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
