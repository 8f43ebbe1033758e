"""
Tool calls that a model wrote into its text, as local servers give them that have no parser for the model's own form.

Text of a model is foreign: it is searched for fixed words, once from front to back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from stepengine.data.messages import AssistantPart, TextPart, ToolCallPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.models._json import call_part, read_json, utf8

__all__ = ("mark_in", "with_written_calls")

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, PARAMETER = "<function=", "<parameter="
MARKS = (OPEN, "<codebuff_tool_call>", "[TOOL_CALLS]", FUNCTION, "<|tool_call")
ENDED = frozenset({StopReason.END_TURN, StopReason.STOP_SEQUENCE, StopReason.TOOL_USE})


def mark_in(reply: ModelReply) -> str:
    """Return the word with which a call begins in the text of a reply without calls; ``""`` when there is none."""
    if reply.tool_calls:
        return ""
    text = reply.text
    return next((mark for mark in MARKS if mark in text), "")


def with_written_calls(reply: ModelReply) -> ModelReply:
    """
    Return *reply* with the blocks ``<tool_call>`` of its text as calls.

    Read are JSON, ``{"name": ..., "arguments": {...}}``, and Qwen's form, ``<function=name><parameter=at>...``. A block
    that is neither stays text, as does everything in a reply that did not come to its own end.
    """
    if reply.tool_calls or reply.stop_reason not in ENDED:
        return reply
    data = {name: reply.provider_data[name] for name in ("provider", "model") if name in reply.provider_data}
    content = [found for part in reply.content for found in _apart(part, data)]
    if not any(type(part) is ToolCallPart for part in content):
        return reply
    return attrs.evolve(reply, content=tuple(content), stop_reason=StopReason.TOOL_USE)


def _apart(part: AssistantPart, data: Mapping[str, Any]) -> list[AssistantPart]:
    if type(part) is not TextPart or OPEN not in part.text:
        return [part]
    first, *blocks = part.text.split(OPEN)
    found: list[AssistantPart] = []
    text = first
    for block in blocks:
        inside, _, after = block.partition(CLOSE)
        call = _call(inside.strip(), data)
        if call is None:
            text += OPEN + block
            continue
        if text.strip():
            found.append(TextPart(text.strip()))
        found.append(call)
        text = after
    if text.strip():
        found.append(TextPart(text.strip()))
    return found


def _call(block: str, data: Mapping[str, Any]) -> ToolCallPart | None:
    if block.startswith(FUNCTION):
        return _function(block, data)
    try:
        value = read_json(utf8(block))
    except ValueError:
        return None
    name = value.get("name") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or not name:
        return None
    return call_part(name, value.get("arguments", value.get("parameters")), data)


def _function(block: str, data: Mapping[str, Any]) -> ToolCallPart | None:
    head, *given = block.removesuffix("</function>").split(PARAMETER)
    name, closed, rest = head.removeprefix(FUNCTION).partition(">")
    if not closed or not name.strip() or rest.strip():
        return None
    arguments: dict[str, Any] = {}
    for entry in given:
        key, closed, value = entry.partition(">")
        if not closed:
            return None
        arguments[key.strip()] = _value(value.rstrip().removesuffix("</parameter>"))
    return call_part(name.strip(), arguments, data)


def _value(text: str) -> Any:
    """Return a parameter: an object or a list is JSON there, anything else a text between line breaks."""
    plain = text.removeprefix("\n").removesuffix("\n")
    if plain[:1] not in {"{", "["}:
        return plain
    try:
        return read_json(utf8(plain))
    except ValueError:
        return plain
