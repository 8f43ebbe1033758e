"""
Rate limits of providers across all runs: ``RateLimit``, and the queue that enforces it.

``make_rate_limited_provider`` puts the queue around a provider. An engine has one limiter for each provider, shared by all its runs in all its event
loops. Calls are let through in the order in which they came. Limits count over the last 60 seconds, not per calendar minute, so no
burst doubles them. Where several processes share limiters, other classes take the place of ``RateLimits`` and ``Limiter``; the
protocols ``LimiterSource`` and ``RequestLimiter`` say what they have to offer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.checks import with_keyword_hints
from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.data.usage import Usage
from stepengine.errors import DefinitionError, ModelError
from stepengine.models._stopped_usage import find_failed_attempt_usage, mark_request_unsent
from stepengine.models.base import ModelRef, Provider
from stepengine.models.routing import Fallback, parse_route
from stepengine.runtime.clock import TimeSource
from stepengine.runtime.sizes import estimate_total_tokens
from stepengine.workspace.after_fork import Lock, register_for_fork_reset

WINDOW_MS = 60_000
"""Providers state their limits for requests and tokens per minute."""


@with_keyword_hints
@frozen(kw_only=True)
class RateLimit:
    """
    The limits of one provider; ``None`` is without limit.

    Attributes:
        requests_per_minute: The number of requests that may start within any 60 seconds; each attempt of a call counts.
        tokens_per_minute: The number of tokens of the requests that start within any 60 seconds. A request counts with its
            estimated prompt and its ``max_tokens``, and with its actual usage once that is known. A request that is larger
            than the limit runs alone.
        max_concurrency: The number of requests that may run at once.

    Raises:
        DefinitionError: when a limit would admit no request.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None

    def __attrs_post_init__(self) -> None:
        if any(limit is not None and limit < 1 for limit in attrs.astuple(self)):
            msg = f"{self} allows no requests; every limit must be at least 1, or None for no limit"
            raise DefinitionError(msg)


RateLimitsLike: TypeAlias = "RateLimit | Mapping[str, RateLimit] | None"
"""One limit that holds for each provider by itself, or limits by provider prefix; ``None`` for no limits."""


class WaitReason(NamedTuple):
    """
    Why a request must wait.

    Attributes:
        limit: The name of the reached limit; ``"queue"`` if earlier requests are waiting.
        seconds: The longest wait in seconds; ``None`` if it depends on other requests.
    """

    limit: Literal["requests", "tokens", "concurrency", "queue"]
    seconds: float | None = None


class AdmittedRequest:
    """An admitted request: its start time in milliseconds and its number of tokens."""

    __slots__ = ("at", "counts", "tokens")

    def __init__(self, at: int, tokens: int) -> None:
        self.at = at
        self.tokens = tokens
        self.counts = True


class RequestLimiter(Protocol):
    """Lets the requests to one provider through."""

    async def enter(self, tokens: int, notice: Callable[[WaitReason], None]) -> Any:
        """Wait for a turn as ``Limiter.enter`` does, and return the ticket for ``leave``."""

    def leave(self, ticket: Any, used: int | None) -> None:
        """Record that a request has ended and used *used* tokens; ``None`` if unknown."""


class LimiterSource(Protocol):
    """The source of the limiters of providers."""

    def find_limiter(self, provider: str, source: Provider) -> RequestLimiter | None:
        """
        Return the limiter of the provider with this prefix, or ``None`` if it has no limit.

        *source* is the provider itself. An implementation may have one limiter for each of its keys.
        """


class _Waiter:
    """A request that waits, in its own event loop."""

    __slots__ = ("_loop", "woken")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken = asyncio.Event()

    def wake(self) -> bool:
        """Wake it from any thread; return whether its loop is still open."""
        try:
            self._loop.call_soon_threadsafe(self.woken.set)
        except RuntimeError:  # the loop is closed
            return False
        return True


class Limiter:
    """
    Lets the requests to one provider through.

    Args:
        limit: What holds.
        clock: Time and sleep.
    """

    def __init__(self, limit: RateLimit, clock: TimeSource) -> None:
        self._limit = limit
        self._clock = clock
        self._lock = Lock()
        self._recent: deque[AdmittedRequest] = deque()
        self._tokens = 0
        self._running = 0
        self._queue: deque[_Waiter] = deque()
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Reset the limiter in a forked child; running and waiting requests belong to the parent."""
        self._running = 0
        self._queue.clear()

    async def enter(self, tokens: int, notice: Callable[[WaitReason], None]) -> AdmittedRequest:
        """
        Wait for a turn and return its ticket; *notice* receives the reason of a wait.

        Args:
            tokens: How many the request is expected to use.
            notice: Called once with the reason if the request has to wait.
        """
        with self._lock:
            # Whoever comes while others wait stands behind them, also where there is room for a small request: else a large
            # one would wait for ever.
            obstacle = WaitReason("queue") if self._queue else self._drop_old_and_find_obstacle(tokens)
            if obstacle is None:
                return self._admit_request(tokens)
            waiter = _Waiter()
            self._queue.append(waiter)
            self._wake_first_waiter()
        try:
            notice(obstacle)
            return await self._wait_in_queue(waiter, tokens)
        finally:
            with self._lock:
                with suppress(ValueError):  # it was taken out because its loop was closed
                    self._queue.remove(waiter)
                self._wake_first_waiter()

    def leave(self, ticket: AdmittedRequest, used: int | None) -> None:
        """Record that a request has ended and used *used* tokens; ``None`` if unknown."""
        with self._lock:
            self._running -= 1
            # Corrected by what was really used, as long as the minute lasts: an estimate that is always too high would
            # halve what the provider allows.
            if used is not None and ticket.counts:
                self._tokens += used - ticket.tokens
                ticket.tokens = used
            self._wake_first_waiter()

    async def _wait_in_queue(self, waiter: _Waiter, tokens: int) -> AdmittedRequest:
        """Wait until *waiter* is first and no limit is reached; return its ticket."""
        while True:
            with self._lock:
                obstacle = self._drop_old_and_find_obstacle(tokens) if self._queue[0] is waiter else WaitReason("queue")
                if obstacle is None:
                    return self._admit_request(tokens)
                waiter.woken.clear()
            await self._wait_for_wake(waiter, obstacle.seconds)

    async def _wait_for_wake(self, waiter: _Waiter, seconds: float | None) -> None:
        """Wait until *waiter* is woken, at most *seconds*."""
        if seconds is None:
            await waiter.woken.wait()
            return
        # On the clock of the run, which a test moves by hand.
        asleep = asyncio.ensure_future(self._clock.sleep(seconds))
        asleep.add_done_callback(lambda _: waiter.woken.set())
        try:
            await waiter.woken.wait()
        finally:
            asleep.cancel()
            await asyncio.wait((asleep,))

    def _drop_old_and_find_obstacle(self, tokens: int) -> WaitReason | None:
        """Drop requests older than a minute; return the limit that a request of *tokens* would exceed, or ``None``."""
        limit, recent, now = self._limit, self._recent, self._clock.now_ms()
        # The last 60 seconds and not the calendar's minute: at the turn of a minute twice the limit could go out within
        # a second.
        while recent and recent[0].at <= now - WINDOW_MS:
            old = recent.popleft()
            old.counts = False
            self._tokens -= old.tokens
        most = limit.max_concurrency
        if most is not None and self._running >= most:
            return WaitReason("concurrency")
        most = limit.requests_per_minute
        if most is not None and len(recent) >= most:
            return WaitReason("requests", (recent[0].at + WINDOW_MS - now) / 1000)
        most = limit.tokens_per_minute
        # One that is larger than the limit goes alone, when nothing else counts: it would otherwise never go.
        if most is not None and recent and self._tokens + tokens > most:
            return WaitReason("tokens", (self._find_last_start_to_expire(most - tokens) + WINDOW_MS - now) / 1000)
        return None

    def _find_last_start_to_expire(self, max_tokens: int) -> int:
        """Return the start time in ms of the last recent request that must expire until at most *max_tokens* tokens count."""
        left = self._tokens
        for ticket in self._recent:
            left -= ticket.tokens
            if left <= max_tokens:
                return ticket.at
        return self._recent[-1].at

    def _admit_request(self, tokens: int) -> AdmittedRequest:
        """Count a request that starts now, and return its ticket."""
        ticket = AdmittedRequest(self._clock.now_ms(), tokens)
        self._running += 1
        self._tokens += tokens
        self._recent.append(ticket)
        return ticket

    def _wake_first_waiter(self) -> None:
        """Wake the first request in the queue; those whose loop is closed are removed."""
        # Somebody's loop may be closed by now; a place in the queue that nobody takes would stop all who stand behind
        # it.
        while self._queue and not self._queue[0].wake():
            self._queue.popleft()


def find_rate_limit(limits: RateLimit | Mapping[str, RateLimit], provider: str) -> RateLimit | None:
    """Return the limit of the provider with a prefix, or ``None``."""
    return limits if isinstance(limits, RateLimit) else limits.get(provider)


class RateLimits:
    """
    The limiters of an engine, one for each provider that has a limit.

    Args:
        limits: One limit that holds for each provider, or limits by provider prefix.
        clock: Time and sleep.

    Attributes:
        limits: What was given.
    """

    def __init__(self, limits: RateLimit | Mapping[str, RateLimit], clock: TimeSource) -> None:
        self.limits = limits
        self._clock = clock
        self._limiters: dict[str, Limiter] = {}

    def find_limiter(self, provider: str, source: Provider) -> Limiter | None:
        """
        Return the limiter of the provider with this prefix, or ``None`` if it has no limit.

        The first call creates it. All providers with the prefix share it; *source* is ignored.
        """
        limit = find_rate_limit(self.limits, provider)
        if limit is None:
            return None
        return self._limiters.get(provider) or self._limiters.setdefault(provider, Limiter(limit, self._clock))


Notice: TypeAlias = Callable[[str, WaitReason], None]
"""Told the provider and the obstacle when a request must wait."""


class ParsingRegistry(Protocol):
    """The members of ``stepengine.models.Models`` that are used here."""

    @property
    def providers(self) -> Sequence[str]:
        """The registered prefixes."""

    def provider_for(self, model: str) -> Any:
        """Return the provider of a model string."""

    def parse(self, model: str) -> ModelRef:
        """Parse a model string."""


def make_rate_limited_provider(models: ParsingRegistry, rates: LimiterSource, model: str, notice: Notice) -> Provider:
    """
    Return the provider of *model* behind its limiter; each model of a fallback has its own.

    Raises:
        UnknownModel: when no provider fits.
    """
    ref = models.parse(model)
    route = None if ref.provider else parse_route(ref.model)
    if route is not None:
        return Fallback(route, lambda name: make_rate_limited_provider(models, rates, name, notice))
    provider: Provider = models.provider_for(model)
    # A registry of one provider serves model strings with any prefix; they share its key and so its limit.
    prefix = models.providers[0] if len(models.providers) == 1 else ref.provider
    limiter = rates.find_limiter(prefix, provider)
    return provider if limiter is None else _RateLimitedProvider(provider, prefix, limiter, notice)


class _RateLimitedProvider(Provider):
    """A provider that waits for its turn before each request."""

    def __init__(self, provider: Provider, prefix: str, limiter: RequestLimiter, notice: Notice) -> None:
        self.name = prefix
        self._provider = provider
        self._limiter = limiter
        self._notice = notice

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Wait for a turn and return the reply."""
        ticket = await self._wait_for_turn(request)
        with self._report_usage_at_end(ticket) as record_usage:
            reply = await self._provider.complete(request)
            record_usage(reply)
        return reply

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Wait for a turn and yield the stream."""
        ticket = await self._wait_for_turn(request)
        with self._report_usage_at_end(ticket) as record_usage:
            inner: Any = self._provider.stream(request)
            async with aclosing(inner) as deltas:
                async for delta in deltas:
                    if isinstance(delta, ReplyDone):
                        record_usage(delta.reply)
                    yield delta

    async def _wait_for_turn(self, request: ModelRequest) -> object:
        """Wait for a turn and return its ticket; mark the request of a cancelled wait as not sent."""
        try:
            return await self._limiter.enter(
                estimate_total_tokens(request), lambda obstacle: self._notice(self.name, obstacle)
            )
        except asyncio.CancelledError as stopped:
            mark_request_unsent(stopped)
            raise

    @contextmanager
    def _report_usage_at_end(self, ticket: object) -> Iterator[Callable[[ModelReply], None]]:
        """Yield a function for the reply; at the end of the block, leave the limiter with the request's actual usage, if known."""
        usage: Usage | None = None

        def record_usage(reply: ModelReply) -> None:
            nonlocal usage
            usage = getattr(reply, "usage", None)

        try:
            yield record_usage
        except ModelError as error:
            usage = find_failed_attempt_usage(error) or Usage()
            raise
        finally:
            self._limiter.leave(ticket, None if usage is None or usage.at_least else usage.total_tokens)
