"""
Quotas: how much one owner may use of a server, and the bookkeeping of it.

Launchers and messengers admit each start, fork and mailbox message through a ``QuotaTable``. It measures what an owner uses, adds what was
admitted since, and measures again before it refuses. Answers, results of deferred tools and cancels are never refused: a waiting run
depends on them.

Storage does not belong here: a function of the caller measures usage.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import attrs
from attrs import field, frozen

from stepengine.data.quantities import parse_size
from stepengine.errors import DefinitionError
from stepengine.server.problems import Problem

MIB = 1024 * 1024
MINUTE = 60
MAX_AGE_SECONDS = 10.0
"""The most seconds that a measurement is used: other servers of the same store add runs, too."""
MIN_AGE_SECONDS = 1.0
"""Seconds between two measurements of an owner at a limit."""
OWNERS_KEPT = 1_000
RETRY_SECONDS = 5


def _require_valid_amount(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Raise ``DefinitionError`` unless a quota is a positive integer or ``None``."""
    if value is not None and (type(value) is not int or value < 1):
        msg = f"Quotas({attribute.name}=...) must be a positive number or None, not {value!r}"
        raise DefinitionError(msg)


@frozen(kw_only=True)
class Quotas:
    """
    How much one owner may use of a server. ``None`` means no limit.

    Attributes:
        open_runs: Runs that have not ended, waiting ones included.
        stored_bytes: Bytes of the owner's runs in storage: requests, journals, mailbox messages and states of conversations. Of runs in
            PostgreSQL only what clients sent is counted.
        bytes_per_minute: Bytes of starts, forks and mailbox messages within 60 seconds, counted by each server process.
        event_streams: Event streams that are open, counted by each server process. ``Caps`` limits them in any case.
    """

    open_runs: int | None = field(default=10_000, validator=_require_valid_amount)
    stored_bytes: int | None = field(default=8 * 1024 * MIB, validator=_require_valid_amount)
    bytes_per_minute: int | None = field(default=64 * MIB, validator=_require_valid_amount)
    event_streams: int | None = field(default=None, validator=_require_valid_amount)


@frozen
class QuotaUsage:
    """
    The open runs and stored bytes of an owner.

    Attributes:
        open_runs: See ``Quotas``.
        stored_bytes: See ``Quotas``.
    """

    open_runs: int = 0
    stored_bytes: int = 0

    def __add__(self, other: QuotaUsage) -> QuotaUsage:
        return QuotaUsage(self.open_runs + other.open_runs, self.stored_bytes + other.stored_bytes)

    def __sub__(self, other: QuotaUsage) -> QuotaUsage:
        return QuotaUsage(self.open_runs - other.open_runs, self.stored_bytes - other.stored_bytes)


Measure: TypeAlias = Callable[[str], Awaitable[QuotaUsage]]


class AdmittedUse:
    """A use that was admitted."""

    def __init__(self) -> None:
        self.is_refunded = False

    def refund(self) -> None:
        """Mark this use as not stored, so that the end of the ``admit_request`` block removes it from the counts."""
        self.is_refunded = True


class _MinuteWindow:
    """Bytes of the last minute, summed up by second."""

    def __init__(self) -> None:
        self._seconds: deque[list[int]] = deque()
        self.total = 0

    def add(self, size: int, now: float) -> None:
        """Add bytes that were sent at the time *now*."""
        if not self._seconds or self._seconds[-1][0] != math.floor(now):
            self._seconds.append([math.floor(now), 0])
        self._seconds[-1][1] += size
        self.total += size

    def remove(self, size: int, added: float) -> None:
        """Remove bytes that were added at the time *added*, unless they have expired."""
        for second in self._seconds:
            if second[0] == math.floor(added):
                second[1] -= size
                self.total -= size

    def expire(self, now: float) -> None:
        """Remove the bytes that were sent more than a minute before *now*."""
        while self._seconds and self._seconds[0][0] + MINUTE < now:
            self.total -= self._seconds.popleft()[1]

    def get_seconds_until_at_most(self, total: int, now: float) -> int:
        """Return after how many seconds the bytes of the last minute are at most *total*."""
        left = self.total
        for second, size in self._seconds:
            left -= size
            if left <= total:
                return max(1, math.ceil(second + MINUTE - now))
        return MINUTE


class _OwnerUsage:
    """The bookkeeping of one owner."""

    def __init__(self) -> None:
        self.measuring: asyncio.Task[None] | None = None
        self.measured, self.measured_at = QuotaUsage(), -math.inf
        self.added = QuotaUsage()
        """What was admitted since the last measurement."""
        self.pending = QuotaUsage()
        """The part of it that may not be stored yet, which a measurement cannot see."""
        self.window = _MinuteWindow()

    def is_idle(self, now: float) -> bool:
        """Return whether no measurement runs, no use is pending, and no byte was sent in the last minute."""
        self.window.expire(now)
        return self.measuring is None and self.pending == QuotaUsage() and not self.window.total


class QuotaTable:
    """
    What each owner uses, as one server process knows it.

    Args:
        quotas: The limits.
        measure: Returns what an owner uses in storage.
        clock: A monotonic clock in seconds.

    Attributes:
        on_refusal: Is called with the name of a quota when a request exceeds it.
    """

    def __init__(self, quotas: Quotas, measure: Measure, clock: Callable[[], float] = time.monotonic) -> None:
        self.quotas = quotas
        self.on_refusal: Callable[[str], object] = lambda _: None
        self._measure, self._clock = measure, clock
        self._owners: dict[str, _OwnerUsage] = {}

    @asynccontextmanager
    async def admit_request(self, owner: str, size: int, *, runs: int = 0) -> AsyncIterator[AdmittedUse]:
        """
        Admit a request that stores *size* bytes and starts *runs* runs. If the block raises, the request is not counted.

        Raises:
            Problem: If the request exceeds a quota of *owner*.
        """
        known, use, wanted = self._get_or_create_owner_usage(owner), AdmittedUse(), QuotaUsage(runs, size)
        added = await self._count_request_or_raise(owner, known, wanted)
        try:
            yield use
        except BaseException:
            use.refund()
            raise
        finally:
            known.pending -= wanted
            if use.is_refunded:
                known.added -= wanted
                known.window.remove(size, added)

    def _get_or_create_owner_usage(self, owner: str) -> _OwnerUsage:
        """Return the bookkeeping of an owner; create it if it is missing, and then remove idle owners if there are too many."""
        if owner not in self._owners and len(self._owners) >= OWNERS_KEPT:
            now = self._clock()
            self._owners = {name: one for name, one in self._owners.items() if not one.is_idle(now)}
        return self._owners.setdefault(owner, _OwnerUsage())

    async def _count_request_or_raise(self, owner: str, owner_usage: _OwnerUsage, requested: QuotaUsage) -> float:
        """Count a request and return the time of its count; measure usage again if needed. Raise ``Problem`` above a quota."""
        age = self._clock() - owner_usage.measured_at
        if age > MAX_AGE_SECONDS or (
            age > MIN_AGE_SECONDS and self._find_exceeded_quota(owner_usage, requested) is not None
        ):
            # Requests that arrive together share a measurement and continue together: their runs are then registered together.
            owner_usage.measuring = owner_usage.measuring or asyncio.ensure_future(
                self._measure_usage(owner, owner_usage)
            )
            await asyncio.shield(owner_usage.measuring)
        now, exceeded = self._clock(), self._find_exceeded_quota(owner_usage, requested)
        self._require_bytes_per_minute(owner_usage, requested.stored_bytes, now)
        if exceeded is not None:
            self._report_and_raise_exceeded(*exceeded)
        owner_usage.added += requested
        owner_usage.pending += requested
        owner_usage.window.add(requested.stored_bytes, now)
        return now

    async def _measure_usage(self, owner: str, owner_usage: _OwnerUsage) -> None:
        """Measure and store the open runs and bytes of an owner; only pending and later uses are added to the result."""
        started = self._clock()
        owner_usage.added = owner_usage.pending
        try:
            owner_usage.measured, owner_usage.measured_at = await self._measure(owner), started
        finally:
            owner_usage.measuring = None

    def require_event_stream_quota(self, count: int) -> None:
        """Raise ``Problem`` if *count* event streams are more than one owner may have."""
        limit = self.quotas.event_streams
        if limit is not None and count > limit:
            self._report_and_raise_exceeded("event_streams", limit)

    def _find_exceeded_quota(self, owner_usage: _OwnerUsage, requested: QuotaUsage) -> tuple[str, int] | None:
        """Return (name, limit) of the quota that *requested* would exceed; ``None`` if it exceeds none."""
        total = owner_usage.measured + owner_usage.added + requested
        if requested.open_runs and self.quotas.open_runs is not None and total.open_runs > self.quotas.open_runs:
            return "open_runs", self.quotas.open_runs
        if requested.stored_bytes and self.quotas.stored_bytes is not None and total.stored_bytes > self.quotas.stored_bytes:  # fmt: skip
            return "stored_bytes", self.quotas.stored_bytes
        return None

    def _require_bytes_per_minute(self, owner_usage: _OwnerUsage, size: int, now: float) -> None:
        """Raise ``Problem`` if *size* more bytes exceed the quota of a minute. A request without others in that minute may be larger."""
        owner_usage.window.expire(now)
        limit = self.quotas.bytes_per_minute
        # So a journal that is larger than the quota can be forked.
        if limit is not None and size and owner_usage.window.total and owner_usage.window.total + size > limit:
            self._report_and_raise_exceeded(
                "bytes_per_minute", limit, owner_usage.window.get_seconds_until_at_most(max(0, limit - size), now)
            )

    def _report_and_raise_exceeded(self, quota: str, limit: int, seconds: int = RETRY_SECONDS) -> None:
        """Call ``on_refusal``, and raise ``Problem`` 429 with the quota, its limit and when to try again."""
        self.on_refusal(quota)
        # Stored bytes decrease only when runs are deleted, so no time can be named.
        headers = {} if quota == "stored_bytes" else {"retry-after": str(seconds)}
        members = {"quota": quota, "limit": limit}
        raise Problem(
            MESSAGES[quota].format(limit), status=429, kind="quota_exceeded", members=members, headers=headers
        )


MESSAGES = {
    "open_runs": "this owner would have more than {:,} runs that have not ended; wait until one ends, or cancel one",
    "stored_bytes": "the runs of this owner would store more than {:,} bytes; the operator of this server can delete old ones",
    "event_streams": "this owner would have more than {:,} event streams; close some of them first",
    "bytes_per_minute": "this owner would send more than {:,} bytes within a minute; send this request again later",
}


def get_json_size(value: object) -> int:
    """Return the size of a value as JSON, in bytes."""
    return len(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace"))


def parse_quotas(texts: Iterable[str]) -> Quotas:
    """
    Parse texts such as ``"open-runs=100"``, ``"stored-bytes=2GiB"`` and ``"bytes-per-minute=none"``.

    Raises:
        DefinitionError: If a text is not a quota, or two are the same quota.
    """
    names = {one.name.replace("_", "-"): one.name for one in attrs.fields(Quotas)}
    given: dict[str, int | None] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        if names.get(name) in given:
            msg = f"the quota {name!r} is given twice; keep one of them"
            raise DefinitionError(msg)
        try:
            given[names[name]] = _parse_amount(amount.strip().lower(), is_size="bytes" in name)
        except (KeyError, ValueError):
            examples = ", ".join(f"{one}={'2GiB' if 'bytes' in one else '100'}" for one in names)
            msg = f"{text!r} is not a quota. Write one of these, with a number or `none`: {examples}"
            raise DefinitionError(msg) from None
    return Quotas(**given)


def _parse_amount(text: str, *, is_size: bool) -> int | None:
    """Return the number or size in a text; ``None`` for ``none``. Raise ``ValueError`` for other texts."""
    if text == "none":
        return None
    if not is_size and not text.isdecimal():
        msg = f"{text!r} is not a number"
        raise ValueError(msg)
    return parse_size(text)
