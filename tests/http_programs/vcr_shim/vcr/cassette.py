"""
Reads a file as vcrpy's tests do.
"""

from __future__ import annotations

from typing import Any


class Cassette:
    @staticmethod
    def load(path: Any, **_: Any) -> Any:
        from . import UsedCassette

        with UsedCassette(path, "none") as used:
            return used
