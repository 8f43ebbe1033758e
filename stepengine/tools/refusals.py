"""The error for an input that does not fit its tool (generator-contract T4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stepengine.data.json import compact
from stepengine.errors import ToolInputError

__all__ = ("refusal",)

SHOWN_CHARS = 1_000


def refusal(tool_name: str, issues: Sequence[str], given: Mapping[str, Any]) -> ToolInputError:
    """Return the error that lists *issues*, one sentence per offending field, and what was given."""
    shown = compact(given)
    if len(shown) > SHOWN_CHARS:
        shown = f"{shown[:SHOWN_CHARS]}... ({len(shown):,} characters in all)"
    msg = f"Invalid parameters for {tool_name}: {'; '.join(issues)}\nThe input was: {shown}"
    return ToolInputError(msg, tool_name=tool_name, issues=tuple(issues))
