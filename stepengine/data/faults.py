"""Errors about a value that was read or is to be stored: each names the place, as in ``$.messages[2].text``."""

from __future__ import annotations

from typing import Any

from stepengine.data.visible import cut_after
from stepengine.errors import DataError

SHOWN_CHARS = 60
"""A longer value is cut in an error: the message also names the place and the rule, and all of it should fit on two lines."""


def fault(why: str) -> DataError:
    """Return an error for an invalid value at the root, ``$``."""
    return DataError(f"{why} at $", path="$")


def prefix_path(error: DataError, step: str) -> DataError:
    """
    Return *error* with *step* prepended to its path.

    Each reader adds its own step on the way out, so none needs the path on the way in.

    Args:
        error: The error of the inner value.
        step: The step from the container to that value, such as ``".text"`` or ``"[2]"``.
    """
    path = f"${step}{error.path[1:]}"
    before, found, after = error.message.rpartition(f" at {error.path}")
    return DataError(f"{before} at {path}{after}" if found else f"{error.message} at {path}", path=path)


def format_value(value: Any) -> str:
    """Return the repr of a text, number or ``None`` for an error message, cut if it is long; of any other value the type."""
    if isinstance(value, (str, int, float, type(None))):
        text = repr(value) if not isinstance(value, int) or value.bit_length() <= SHOWN_CHARS else "a huge number"
        return cut_after(text, SHOWN_CHARS)
    return f"a {type(value).__name__}"
