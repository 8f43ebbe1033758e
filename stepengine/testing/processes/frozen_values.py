"""Recorded values of the clock and the seed of random values, as a cassette file stores them."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Self

from stepengine.errors import DataError

MEMBER = "frozen"
TEMPORARY = re.compile(r"\d+")
"""Numbers in a command: spawned processes get numbers of pipes, which differ in every run."""


class FrozenValues:
    """
    The values of all processes of a program.

    Args:
        kinds: What is frozen: some of ``"time"``, ``"random"`` and ``"uuid"``.
        seed: From which random values follow.
        times: Nanoseconds by process and calling function.
    """

    def __init__(
        self, kinds: Iterable[str], seed: str = "", times: dict[str, dict[str, list[int]]] | None = None
    ) -> None:
        self.kinds = [*kinds]
        self.seed = seed or secrets.token_hex(16)
        self._times = times or {}
        self._started: dict[str, int] = {}
        self._lock = threading.Lock()

    @classmethod
    def from_extras(cls, extras: dict[str, Any], source: str) -> Self | None:
        """
        Return the values in the *extras* of a cassette, ``None`` if nothing was frozen; raise ``DataError`` for invalid ones.

        Raises:
            DataError: if they cannot be read.
        """
        tree = extras.get(MEMBER)
        if tree is None:
            return None
        try:
            times = {
                str(process): {str(site): [int(value) for value in values] for site, values in sites.items()}
                for process, sites in tree.get("times", {}).items()
            }
            return cls([str(kind) for kind in tree["kinds"]], str(tree["seed"]), times)
        except (AttributeError, KeyError, TypeError, ValueError):
            msg = f"{source}: x_stepengine.{MEMBER} cannot be read. Record the cassette again"
            raise DataError(msg) from None

    def to_extras(self) -> dict[str, Any]:
        """Return the values as a cassette file stores them."""
        return {MEMBER: {"kinds": self.kinds, "seed": self.seed, "times": self._times}}

    def register_process(self, command: Sequence[str]) -> dict[str, Any]:
        """Return key, seed and recorded times of a process that starts. Equal commands are numbered in order."""
        text = TEMPORARY.sub("0", "\n".join(command[1:]))
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:12]
        with self._lock:
            number = self._started[digest] = self._started.get(digest, 0) + 1
            key = f"{digest}-{number}"
            times = {name: sites for name, sites in self._times.items() if name == key or name.startswith(f"{key}/")}
            return {"key": key, "seed": self.seed, "kinds": self.kinds, "times": times}

    def add_times(self, process: str, values: dict[str, list[int]]) -> None:
        """Append clock values that *process* recorded, by calling function."""
        with self._lock:
            sites = self._times.setdefault(process, {})
            for site, found in values.items():
                sites.setdefault(site, []).extend(found)
