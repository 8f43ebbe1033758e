"""Upper bounds of parameters: a larger value is replaced by the bound, and the result reports it."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def bounded_field(most: int, least: int = 1) -> Any:
    """
    Return the field of an integer from *least* on; its schema states *most*, which is not enforced.

    A larger value is accepted, since a model or a ported agent that asks for more is best served with the most there is.
    """
    return Field(ge=least, json_schema_extra={"maximum": most})


def excess_notes(name: str, value: int, most: int) -> list[str]:
    """Return a note that *value* was lowered to *most*; an empty list if it was not."""
    return [f"{name} was {value:,} and is at most {most:,}"] if value > most else []
