"""Helpers of the decoders of all wires: build the reply, resolve the stop reason, and parse usage and costs."""

from __future__ import annotations

import base64
import logging
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import combinations
from typing import Any

import attrs

from stepengine.data.json import compact, freeze
from stepengine.data.media_types import UNKNOWN, resolve_media_type
from stepengine.data.messages import AssistantPart, DocumentPart, ImagePart, RefusalPart, TextPart, ToolCallPart
from stepengine.data.models import ModelReply, StopReason
from stepengine.data.usage import Usage
from stepengine.data.visible import cut_after
from stepengine.models._failures import RequestLabel, make_malformed_call_error, make_protocol_error
from stepengine.models._json import find_object, find_text
from stepengine.models.keys import make_safe_excerpt

SHOWN_CHARS = 4_000
"""One or two screens of text."""
MAX_UNREAD_NAMES = 20
"""The most names of unknown members in a reply; a new kind of reply has a few."""
MAX_NAME = 80
"""The most characters of a reported name."""
TICKS_PER_DOLLAR = 10**10
"""XAI documents its costs in ten-thousand-millionths of a US dollar."""
MAX_DOLLARS = 10**6
"""No request costs as much; a larger number is an error, and would exhaust every budget."""
MAX_TICKS = MAX_DOLLARS * TICKS_PER_DOLLAR
"""The same limit in the unit of xAI."""
MAX_FIGURE_CHARS = 40
"""Costs have some dozen digits; longer texts are not parsed."""
FIGURE = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[eE]-?[0-9]{1,2})?", re.ASCII)

logger = logging.getLogger("stepengine.models")
_warned: set[str] = set()


def make_validated_reply(
    content: tuple[AssistantPart, ...],
    call: RequestLabel,
    model: str,
    *,
    stop_reason: StopReason | None,
    raw_stop_reason: str | None,
    usage: Usage | None,
    answering_model: str | None,
    request_id: str | None,
    data_to_store: Mapping[str, object],
    cost: Decimal | None = None,
) -> ModelReply:
    """
    Return the reply with *content* to the request *call*; raise for calls that cannot be executed.

    *raw_stop_reason* is the provider's stop reason, and *stop_reason* is ours for it, ``None`` if it is unknown.
    *answering_model* is the name of the model that answered. *data_to_store* has the other members of its message for
    ``provider_data``.

    Raises:
        ModelError: for a call without a name, and for two calls with the same id, name and arguments, which would run twice.
    """
    stop_reason = _infer_stop_reason(stop_reason, raw_stop_reason, content)
    keys = [_make_call_key(part) for part in content if isinstance(part, ToolCallPart)]
    for one, other in combinations([key for key in keys if key[0]], 2):
        if one == other:
            what = f"the call {one[0]!r} of {one[1]!r} is repeated with the same arguments"
            raise make_protocol_error(call, what, usage)
    for part in content[:-1] if stop_reason is StopReason.MAX_TOKENS else content:
        if isinstance(part, ToolCallPart) and not part.tool_name.strip():
            raise make_malformed_call_error(call, "it has no name", usage)
    return ModelReply(
        _mark_truncated_call(content) if stop_reason is StopReason.MAX_TOKENS else content,
        usage=usage,
        stop_reason=stop_reason,
        raw_stop_reason=raw_stop_reason,
        cost=cost,
        model=f"{call.provider}/{answering_model}" if answering_model and answering_model != model else None,
        request_id=request_id,
        provider_data={"provider": call.provider, "model": model, **data_to_store},
    )


def _make_call_key(part: ToolCallPart) -> tuple[str, str, object, object]:
    """Return (id, name, arguments, raw arguments) of a call; two calls with equal keys are duplicates."""
    return find_text(part.provider_data, "id"), part.tool_name, part.input, part.raw_input


def add_unread_names(reply: ModelReply, names: Sequence[str]) -> ModelReply:
    """Return *reply* with the *names* of ignored events and members added to ``unread`` in its ``provider_data``."""
    # (reliability:MP59)
    if not names:
        return reply
    known = reply.provider_data.get("unread", ())
    told = [*known, *[make_safe_excerpt(name, MAX_NAME) for name in names]][:MAX_UNREAD_NAMES]
    return attrs.evolve(reply, provider_data={**reply.provider_data, "unread": list(dict.fromkeys(told))})


def select_members(source: Mapping[str, object], *names: str) -> dict[str, Any]:
    """Return the members *names* of *source* that are present and not ``None``."""
    return {name: source[name] for name in names if source.get(name) is not None}


def _infer_stop_reason(stop: StopReason | None, raw_stop: str | None, content: tuple[AssistantPart, ...]) -> StopReason:
    """
    Return *stop*, or the reason that *content* shows if *stop* is unknown, an end or a tool use.

    Calls in the content mean tool use, and a refusal means refusal (ecosystem:EC97). An unknown reason is logged once per process.
    """
    if stop is None and raw_stop and raw_stop not in _warned:
        _warned.add(raw_stop)
        logger.warning("unknown stop reason %r; the reply's content decides", raw_stop)
    if stop is None or stop in {StopReason.END_TURN, StopReason.TOOL_USE}:
        kinds = {type(part) for part in content}
        if ToolCallPart in kinds:
            return StopReason.TOOL_USE
        return StopReason.REFUSAL if RefusalPart in kinds else StopReason.END_TURN
    return stop


def _mark_truncated_call(content: tuple[AssistantPart, ...]) -> tuple[AssistantPart, ...]:
    """Return *content*, which the output limit cut, with ``raw_input`` set for its last call, the sign of an incomplete call."""
    parts = list(content)
    for index in range(len(parts) - 1, -1, -1):
        part = parts[index]
        if isinstance(part, ToolCallPart):
            if part.raw_input is None:
                parts[index] = attrs.evolve(part, raw_input=compact(part.input))
            break
    return tuple(parts)


def media_part_from_base64(
    encoded: object, mime_type: str, provider_data: Mapping[str, object]
) -> ImagePart | DocumentPart | None:
    """
    Return the image or file in a base64 text from a model; ``None`` for other values. An empty type is detected from the bytes.

    The result is also ``None`` if the bytes do not encode to the same text. The caller then stores the original.
    """
    try:
        data = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except ValueError:
        return None
    if not data or base64.b64encode(data).decode() != encoded:
        return None
    mime = resolve_media_type(mime_type, data)
    if mime.startswith("image/"):
        return ImagePart(data=data, mime_type=mime, provider_data=freeze(dict(provider_data)))
    return DocumentPart(data=data, mime_type=mime or UNKNOWN, provider_data=freeze(dict(provider_data)))


def cut_at_stop_sequence(reply: ModelReply, stops: tuple[str, ...]) -> ModelReply:
    """
    Return *reply* cut before the first of *stops* in its text, for APIs without stop sequences.

    Everything after the cut, including calls, is left out. The provider bills it anyway, and a stream has shown it.
    """
    for index, part in enumerate(reply.content):
        if not isinstance(part, TextPart):
            continue
        found = [(part.text.find(stop), stop) for stop in stops if stop and stop in part.text]
        if found:
            position, stop = min(found)
            kept = (*reply.content[:index], TextPart(part.text[:position], provider_data=part.provider_data))
            data = {**reply.provider_data, "stop_sequence": stop}
            return attrs.evolve(reply, content=kept, stop_reason=StopReason.STOP_SEQUENCE, provider_data=data)
    return reply


def find_stated_cost(raw: object) -> Decimal | None:
    """
    Return the cost in US dollars that a usage states, including server tools and discounts; ``None`` if it states no cost.

    xAI states ticks, OpenRouter and LiteLLM a number, Perplexity the total of an object. With the user's own key at
    OpenRouter the cost of the actual provider is added (providers:PV81).
    """
    if not isinstance(raw, Mapping):
        return None
    ticks, cost = raw.get("cost_in_usd_ticks"), raw.get("cost")
    paid = parse_dollars(cost.get("total_cost") if isinstance(cost, Mapping) else cost)
    if paid is None:
        return Decimal(ticks) / TICKS_PER_DOLLAR if type(ticks) is int and 0 <= ticks <= MAX_TICKS else None
    if raw.get("is_byok") is not True:
        return paid
    upstream = parse_dollars(find_object(raw, "cost_details").get("upstream_inference_cost"))
    return None if upstream is None else paid + upstream


def parse_dollars(value: object) -> Decimal | None:
    """Return a stated number of US dollars; ``None`` for other types, and for numbers below 0 or above a million."""
    return (
        Decimal(str(value))
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_DOLLARS
        else None
    )


def parse_dollar_text(text: object) -> Decimal | None:
    """Parse a text, such as a header, as US dollars; ``None`` for other values, and for more than a million."""
    if not isinstance(text, str) or len(text) > MAX_FIGURE_CHARS or not FIGURE.fullmatch(text):
        return None
    cost = Decimal(text)
    return cost if cost <= MAX_DOLLARS else None


# --- readable texts of opaque parts; they never raise an error --------------------------------------------------------


def shorten_text(text: str) -> str:
    """Return *text*, cut to 4,000 characters with ``...`` at the end if it is longer."""
    return cut_after(text, SHOWN_CHARS)


def format_sources(sources: list[tuple[str, str]]) -> str:
    """Return a line ``title URL`` for each source (title, URL) that is not empty; a text above 4,000 characters is cut."""
    return shorten_text("\n".join([" ".join(filter(None, source)) for source in sources if any(source)]))


def get_cited_text(citation: Mapping[str, object], text: str) -> str:
    """Return the part of *text* between the offsets of a citation of OpenAI; ``""`` without valid offsets."""
    # Checked, because a negative number would cut from the end and cite the wrong text.
    start, end = citation.get("start_index"), citation.get("end_index")
    return text[start:end] if type(start) is int and type(end) is int and 0 <= start <= end else ""
