"""Errors about a value that was read or is to be stored: each names the place, as in ``$.messages[2].text``."""

from __future__ import annotations

from typing import Any

from stepengine.errors import DataError

__all__ = ("fault", "shown", "within")

SHOWN_CHARS = 60
"""A longer value is cut: the message also names the place and the rule, and all of it should fit on a line or two."""


def fault(why: str) -> DataError:
    """Return an error for a value that is wrong at the root, ``$``."""
    return DataError(f"{why} at $", path="$")


def within(error: DataError, step: str) -> DataError:
    """
    Return *error* as its container reports it.

    Places are put together on the way out, so readers carry no path on the way in.

    Args:
        error: The error of the inner value.
        step: The step from the container to that value, such as ``".text"`` or ``"[2]"``.
    """
    path = f"${step}{error.path[1:]}"
    before, found, after = error.message.rpartition(f" at {error.path}")
    return DataError(f"{before} at {path}{after}" if found else f"{error.message} at {path}", path=path)


def shown(value: Any) -> str:
    """Return a short text for *value* in a message."""
    if isinstance(value, (str, int, float, type(None))):
        text = repr(value) if not isinstance(value, int) or value.bit_length() <= SHOWN_CHARS else "a huge number"
        return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
    return f"a {type(value).__name__}"
