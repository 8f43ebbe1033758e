"""
Replace ``time.time``, ``time.time_ns``, ``uuid.uuid4`` and the seed of ``random`` in a process of a program.

Values of the clock are recorded and played by the function that calls, so that a library that is not called while replaying changes
nothing for the others. UUIDs follow from the recorded seed, the calling function and the number of its call. This module imports the
standard library alone.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

KINDS = ("time", "random", "uuid")
FLUSH_AT = 100
MAX_VALUES = 10_000
"""Values of the clock that are recorded of one function; a loop that waits on the clock calls it without end."""
NANOSECONDS = 1_000_000_000


class FrozenProcess:
    """
    The replaced functions of one process.

    Args:
        told: The broker's answer: ``key`` of the process, ``seed``, ``kinds`` and, while replaying, ``times`` by process and function.
        send: Called with the key of the process and recorded values by function; None while replaying.
    """

    def __init__(self, told: dict[str, Any], send: Callable[[str, dict[str, list[int]]], object] | None) -> None:
        self._key, self._seed = told["key"], told["seed"]
        self._times: dict[str, dict[str, list[int]]] = told["times"]
        self._send = send
        self._lock = threading.RLock()
        self._counts: dict[str, int] = {}
        self._pending: dict[str, list[int]] = {}
        self._real = time.time_ns
        self._last = (0, self._real())
        self._forks = 0
        if "time" in told["kinds"]:
            time.time, time.time_ns = self._frozen_time, self._frozen_time_ns
            atexit.register(self.flush)
        if "uuid" in told["kinds"]:
            uuid.uuid4 = self._derive_uuid4
        if "random" in told["kinds"]:
            random.seed(self._derive_number("random"))
        os.register_at_fork(
            before=self._count_fork, after_in_child=lambda: self._derive_child_key_after_fork(told["kinds"])
        )

    def flush(self) -> None:
        """Send the values of the clock that were recorded since the last call."""
        with self._lock:
            pending, self._pending = self._pending, {}
            if pending and self._send is not None:
                self._send(self._key, pending)

    def _derive_number(self, *names: object) -> int:
        """Return a number of 128 bits that follows from the seed, the process and *names*."""
        text = "\n".join(map(str, (self._seed, self._key, *names)))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])

    def _count_call(self, site: str) -> int:
        number = self._counts.get(site, 0)
        self._counts[site] = number + 1
        return number

    def _frozen_time(self) -> float:
        """Return the recorded or current time in seconds, in place of ``time.time``."""
        return self._record_or_replay_time(_format_caller("time")) / NANOSECONDS

    def _frozen_time_ns(self) -> int:
        """Return the recorded or current time in nanoseconds, in place of ``time.time_ns``."""
        return self._record_or_replay_time(_format_caller("time_ns"))

    def _record_or_replay_time(self, site: str) -> int:
        """Return the time in nanoseconds for the caller *site*: the real time, which is recorded, or the recorded one."""
        with self._lock:
            number = self._count_call(site)
            if self._send is not None:
                now = self._real()
                if number < MAX_VALUES:
                    self._pending.setdefault(site, []).append(now)
                if sum(map(len, self._pending.values())) >= FLUSH_AT:
                    self.flush()
                return now
            known = self._times.get(self._key, {}).get(site, [])
            if number < len(known):
                self._last = (known[number], self._real())
                return known[number]
            value, at = self._last
            now = self._real()
            # A call that was not recorded: the clock continues from the last value, so that loops with a deadline end.
            return value + now - at if value else now

    def _derive_uuid4(self) -> uuid.UUID:
        """Return a UUID that follows from the seed, the caller and the number of its call."""
        site = _format_caller("uuid4")
        with self._lock:
            return uuid.UUID(int=self._derive_number(site, self._count_call(site)), version=4)

    def _count_fork(self) -> None:
        self._forks += 1

    def _derive_child_key_after_fork(self, kinds: list[str]) -> None:
        """Derive a key for a forked process, so that its random values differ from its parent's, and clear its counts."""
        self._lock = threading.RLock()
        self._key = f"{self._key}/{self._forks}"
        self._forks, self._pending, self._counts = 0, {}, {}
        if "random" in kinds:
            random.seed(self._derive_number("random"))


def _format_caller(name: str) -> str:
    """Return *name* and the direct caller of the replaced function, such as ``time in module:function``; it may be a library."""
    frame = sys._getframe(2)  # noqa: SLF001 - `inspect` has no cheaper way
    return f"{name} in {frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
