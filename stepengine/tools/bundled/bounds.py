"""Upper bounds of parameters: a larger value is replaced by the bound, and the result reports it."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def make_softly_bounded_field(maximum: int, minimum: int = 1) -> Any:
    """
    Return a field for an integer of at least *minimum*; its schema states *maximum*, but a larger value is accepted.

    A tool lowers a larger value to the maximum, which helps a model more than an error.
    """
    return Field(ge=minimum, json_schema_extra={"maximum": maximum})


def make_excess_notes(name: str, value: int, maximum: int) -> list[str]:
    """Return a note that *value* is lowered to *maximum*; an empty list if it is not above it."""
    return [f"{name} was {value:,} and is at most {maximum:,}"] if value > maximum else []
