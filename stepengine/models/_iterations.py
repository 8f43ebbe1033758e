"""What Anthropic ran for one reply, iteration by iteration, as a usage lists it. Pure: no SDK, no clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepengine.models._json import parse_token_count

STOOD_IN = "fallback_message"
"""The iteration of a model that answered in place of the one that was asked."""


def list_iterations(usage: object) -> list[Mapping[str, Any]]:
    """Return the iterations of a usage; none where there is no list of them."""
    listed = usage.get("iterations") if isinstance(usage, Mapping) else None
    return [entry for entry in listed if isinstance(entry, Mapping)] if isinstance(listed, list | tuple) else []


def list_uncounted_iterations(usage: object) -> list[Mapping[str, Any]]:
    """
    Return the iterations of a *usage* that its totals leave out: compactions, advisors, models that gave way.

    Where a model stood in, the totals are those of its ``fallback_message``. One that declined before it said anything is
    not billed; one that had begun to answer is, by its own name.
    """
    iterations = list_iterations(usage)
    served = [entry for entry in iterations if entry.get("type") == STOOD_IN]
    model = served[-1].get("model") if served else None
    return [
        entry
        for entry in iterations
        if entry.get("type") not in {"message", STOOD_IN}
        or (
            entry.get("type") == "message"
            and model is not None
            and entry.get("model") not in {None, model}
            and parse_token_count(entry.get("output_tokens")) != 0
        )
    ]
