"""The iterations in Anthropic's usage: the model calls behind one reply. Pure: no SDK, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.models._json import parse_token_count

STOOD_IN = "fallback_message"
"""The type of the iteration of a fallback model."""


def list_iterations(usage: object) -> list[Mapping[str, Any]]:
    """Return the objects in the member ``iterations`` of a usage; ``[]`` if it has none."""
    listed = usage.get("iterations") if isinstance(usage, Mapping) else None
    return [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list | tuple) else []


def has_malformed_iterations(usage: Mapping[str, object]) -> bool:
    """Return whether a usage has ``iterations`` that are not a list of objects."""
    listed = usage.get("iterations")
    return listed is not None and not (isinstance(listed, list | tuple) and len(list_iterations(usage)) == len(listed))


def list_uncounted_iterations(usage: object) -> list[Mapping[str, Any]]:
    """
    Return the iterations of a *usage* that its totals leave out: compactions, advisors and replaced models.

    With a fallback model, the totals are those of its ``fallback_message``. A model that declined without output is not
    billed. A model that was replaced after some output is billed under its own name.
    """
    # Compared with tuples, because members of a type without a hash are possible.
    iterations = list_iterations(usage)
    served = [entry for entry in iterations if entry.get("type") == STOOD_IN]
    model = served[-1].get("model") if served else None
    return [
        entry
        for entry in iterations
        if entry.get("type") not in ("message", STOOD_IN)
        or (
            entry.get("type") == "message"
            and model is not None
            and entry.get("model") not in (None, model)
            and parse_token_count(entry.get("output_tokens")) != 0
        )
    ]
