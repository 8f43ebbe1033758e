"""The origins of a call's arguments, as data for questions and records, and in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from stepengine.data.json import JsonDict, JsonValue, freeze_object, thaw
from stepengine.data.provenance import Provenance, Source, iterate_leaves

ORIGIN_HOOK = "permission_by_origin"
"""
The name of the hook of a policy with rules about untrusted data. A journal lists it, so that a resumed run is judged by such rules again.
"""
ASKED = "May {} run with data that is not from you?"
"""The question about a call that would be allowed but for its untrusted data; `{}` is the tool."""
MAX_SOURCES = 5
"""Places of one value that are named: a reader follows the first few, and a word may be in hundreds."""
MAX_COUNTED_SOURCES = 25
"""So many are counted; a value that every call repeats would cost the square of the calls."""
MAX_VALUE_CHARS = 60
"""Beginning and end of a longer value are shown."""
KEPT_CHARS = 24
"""Characters at each end: an account or an address is recognized by them."""


def make_origin(provenance: Provenance, parameter: str, value: JsonValue, *, is_id: bool) -> JsonDict:
    """
    Return the origin of an argument as JSON: its value, the sources in which it occurs, and whether it is trusted.

    Its members are ``parameter``, the location in the input; ``value``; ``trusted``; ``sources``, each with the non-empty members of
    ``Source``; and ``more``, the number of further sources, if any.
    """
    sources = provenance.find_sources(value, is_id=is_id, max_sources_per_text=MAX_COUNTED_SOURCES)
    shown = [attrs.asdict(source, filter=lambda _, value: value not in (None, "")) for source in sources[:MAX_SOURCES]]
    found: dict[str, Any] = {
        "parameter": parameter,
        "value": value,
        "trusted": provenance.is_trusted(value, is_id=is_id),
        "sources": shown,
    }
    return freeze_object(found | ({"more": len(sources) - len(shown)} if len(sources) > len(shown) else {}))


def make_origins(
    provenance: Provenance, values: Iterable[tuple[str, JsonValue]], *, is_id: bool = False
) -> tuple[JsonDict, ...]:
    """Return the origin of each text and number in *values*, by parameter; with *is_id* short numbers are ids."""
    found = [one for place, value in values for one in iterate_leaves(value, place)]
    return tuple([make_origin(provenance, at, leaf, is_id=is_id) for at, leaf in found])


def describe_origin(origin: Mapping[str, Any]) -> str:
    """Return an origin in words: ``recipient US13...2212: from the result of read_file('bill.txt') in step 2; not in your request``."""
    if origin["value"] is None:
        return "the run has received data that may be from third parties"
    sources = [Source(**source) for source in origin["sources"]]
    places = list(dict.fromkeys(map(describe_source, sources)))
    where = " and ".join(places) if places else "written by the model"
    least = "at least " if origin.get("more", 0) >= MAX_COUNTED_SOURCES - MAX_SOURCES else ""
    more = f" and {least}{origin['more']} more places" if origin.get("more") else ""
    # Only for values that were searched and not found in a trusted source.
    missing = "" if origin["trusted"] else "; not in your request"
    name = f"{origin['parameter']} " if origin["parameter"] else ""
    return f"{name}{_shorten(str(origin['value']))}: {where}{more}{missing}"


def sort_origins(origins: Iterable[JsonDict]) -> list[JsonDict]:
    """Return origins in the order in which a person should see them: those of untrusted values first."""
    return sorted(origins, key=lambda origin: bool(origin["trusted"]))


def describe_origins(origins: Iterable[JsonDict]) -> tuple[str, ...]:
    """Return a sentence for each origin, those of untrusted values first."""
    return tuple(map(describe_origin, sort_origins(origins)))


def redact_origin(origin: JsonDict, clean: Callable[[Any], Any]) -> dict[str, Any]:
    """Return an origin with secrets redacted by *clean*; its value is redacted as a member with its own name."""
    value: Any = origin["value"]
    for name in reversed(re.split(r"[.\[\]]+", origin["parameter"].rstrip("]"))):
        value = {name: value}
    value = clean(value)
    while isinstance(value, Mapping):
        (value,) = value.values()
    return {**clean(thaw(origin)), "value": value}


def describe_untrusted_origins(origins: Iterable[Mapping[str, Any]]) -> str:
    """Return the origins of untrusted values in words, in one line."""
    return "; ".join(map(describe_origin, [origin for origin in origins if not origin["trusted"]]))


def describe_source(source: Source) -> str:  # noqa: C901 - one line for each kind
    """Return a source in words, such as ``from the result of read_file('bill.txt') in step 2``."""
    call = f"{source.tool}({source.about!r})" if source.about else source.tool
    step = "" if source.step is None else f" in step {source.step + 1}"
    where = f" at {source.path}" if source.path and source.kind != "prompt" else ""
    match source.kind:
        case "prompt":
            return "from your request" if source.trust == "trusted" else "from the prompt of this agent"
        case "handler":
            return "from the code of the agent"
        case "person":
            return f"written by {'you' if source.trust == 'trusted' else 'someone'}{step}"
        case "tool":
            return f"from the result of {call}{step}{where}"
        case "child":
            return f"from the output of the agent {source.tool}{step}{where}"
        case "message":
            return f"from a message on {source.tool!r}{step}{where}"
        case "perform":
            return f"from {source.tool}{step}{where}"
        case "model":
            return f"from a tool of the model's provider{step}"
        case "history" if source.tool:
            return f"from an earlier result of {source.tool}"
        case "history":
            return f"from {'your earlier request' if source.trust == 'trusted' else 'earlier in the conversation'}"
        case "error":
            return f"from an error{step}"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:KEPT_CHARS]}...{text[-KEPT_CHARS:]}"
