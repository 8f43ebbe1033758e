"""Upper bounds of parameters: a larger value is replaced by the bound, and the result reports it."""

from __future__ import annotations

from typing import Any

from pydantic import Field

__all__ = ("over_bound", "up_to")


def up_to(most: int, least: int = 1) -> Any:
    """
    Return the field of a parameter from *least* to *most*, as its schema shows it.

    A larger value is accepted, since a model or a ported agent that asks for more is best served with the most there is.
    """
    return Field(ge=least, json_schema_extra={"maximum": most})


def over_bound(name: str, value: int, most: int) -> list[str]:
    """Return the note that *value* was replaced by *most*; empty where it was not."""
    return [f"{name} was {value:,} and is at most {most:,}"] if value > most else []
