"""Parse ages and sizes such as ``30d`` and ``2GiB``, and format ages. Pure."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

AGE: Final = re.compile(r"([0-9]{1,9})([smhdw])")
AGE_UNITS: Final = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
MAX_AGE: Final = timedelta(days=36_525)
"""100 years: a date that is this far from now can still be computed and stored."""
IDEMPOTENCY_KEY_SECONDS: Final = 24 * 60 * 60
"""Clients repeat a request within hours at most; a day later, its idempotency key may be used for another one."""
SHOWN_CHARS: Final = 40
"""A longer text is cut in an error message: an age or a size is much shorter."""
SIZE: Final = re.compile(r"([0-9]{1,15}) ?(|kib|mib|gib)")
SIZE_UNITS: Final = {"": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def parse_age(text: str) -> timedelta:
    """
    Return the duration of a text such as ``30d``: a whole number and one of the units s, m, h, d, w.

    Raises:
        ValueError: for any other text, and for more than 100 years.
    """
    found = AGE.fullmatch(text)
    # The largest number of weeks is more than a timedelta can hold, so it is compared first.
    if found is None or int(found[1]) > MAX_AGE // AGE_UNITS[found[2]]:
        msg = f"{text[:SHOWN_CHARS]!r} is not an age of at most 100 years; 30d, 12h, 90m and 2w are valid"
        raise ValueError(msg)
    return int(found[1]) * AGE_UNITS[found[2]]


def parse_size(text: str) -> int:
    """
    Return the bytes of a text such as ``2GiB``: a whole number, alone or with KiB, MiB or GiB in any case.

    Raises:
        ValueError: for any other text, decimal units such as ``GB`` included.
    """
    found = SIZE.fullmatch(text.lower())
    if found is None:
        msg = f"{text[:SHOWN_CHARS]!r} is not a size; 100, 64KiB, 8MiB and 2GiB are valid"
        raise ValueError(msg)
    return int(found[1]) * SIZE_UNITS[found[2]]


def format_age(age: timedelta) -> str:
    """Return an age in whole days, hours, minutes or seconds, the largest unit that it fills: ``5m``. A negative age is ``0s``."""
    unit = next((unit for unit in "dhm" if age >= AGE_UNITS[unit]), "s")
    return f"{max(age, timedelta()) // AGE_UNITS[unit]}{unit}"
