"""Finds the version of an installed distribution without ``importlib.metadata``, which is slow to import."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

ENDING = ".dist-info"


def get_installed_version(name: str) -> str | None:
    """
    Return the version of a distribution; ``None`` if it is not installed.

    Args:
        name: Its name, of lower-case letters and digits.
    """
    # `importlib.metadata` reads it as an e-mail, for which it loads as much as asyncio does. So it is used only for packages that
    # are not unpacked in a folder.
    for place in sys.path:
        with suppress(OSError):
            for entry in os.listdir(place or "."):  # noqa: PTH208 - a path for each of hundreds of names
                if entry.startswith(f"{name}-") and entry.endswith(ENDING):
                    return entry[len(name) + 1 : -len(ENDING)]
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None
