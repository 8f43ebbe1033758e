"""Providers that are asked when it is the call's turn: what the engine's rate limits put around them (requirements N15)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol, TypeAlias

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.data.usage import Usage
from stepengine.errors import ModelError
from stepengine.models.base import ModelRef, Provider
from stepengine.models.routing import Fallback, route_of
from stepengine.runtime.rates import Limiter, Obstacle, RateLimits, Ticket
from stepengine.runtime.retry import known_usage
from stepengine.runtime.sizes import expected_tokens

__all__ = ("Notice", "Registry", "queued")

Notice: TypeAlias = Callable[[str, Obstacle], None]
"""Told the provider and the obstacle when a request must wait."""


class Registry(Protocol):
    """What is needed of ``stepengine.models.Models``."""

    @property
    def providers(self) -> Sequence[str]:
        """The registered prefixes."""

    def provider_for(self, model: str) -> Any:
        """Return the provider of a model string."""

    def parse(self, model: str) -> ModelRef:
        """Take a model string apart."""


def queued(models: Registry, rates: RateLimits, model: str, notice: Notice) -> Provider:
    """
    Return the provider of *model* behind its limiter; of a fallback, each of its models behind the limiter of its own.

    Raises:
        UnknownModel: when no provider fits.
    """
    ref = models.parse(model)
    route = None if ref.provider else route_of(ref.model)
    if route is not None:
        return Fallback(route, lambda name: queued(models, rates, name, notice))
    provider: Provider = models.provider_for(model)
    # A registry of one provider serves model strings with any prefix; they share its key and so its limit.
    prefix = models.providers[0] if len(models.providers) == 1 else ref.provider
    limiter = rates.of(prefix)
    return provider if limiter is None else _Queued(provider, prefix, limiter, notice)


class _Queued(Provider):
    """A provider that waits for its turn before each request."""

    def __init__(self, provider: Provider, prefix: str, limiter: Limiter, notice: Notice) -> None:
        self.name = prefix
        self._provider = provider
        self._limiter = limiter
        self._notice = notice

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the reply when it is this request's turn."""
        ticket = await self._enter(request)
        with self._counted(ticket) as used:
            reply = await self._provider.complete(request)
            used(reply)
        return reply

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Give the stream when it is this request's turn."""
        ticket = await self._enter(request)
        with self._counted(ticket) as used:
            inner: Any = self._provider.stream(request)
            async with aclosing(inner) as deltas:
                async for delta in deltas:
                    if type(delta) is ReplyDone:
                        used(delta.reply)
                    yield delta

    async def _enter(self, request: ModelRequest) -> Ticket:
        return await self._limiter.enter(expected_tokens(request), lambda obstacle: self._notice(self.name, obstacle))

    @contextmanager
    def _counted(self, ticket: Ticket) -> Iterator[Callable[[ModelReply], None]]:
        """Correct the estimate by what the request used; where nobody knows that, the estimate stays."""
        usage: Usage | None = None

        def used(reply: ModelReply) -> None:
            nonlocal usage
            usage = getattr(reply, "usage", None)

        try:
            yield used
        except ModelError as error:
            usage = known_usage(error) or Usage()
            raise
        finally:
            self._limiter.leave(ticket, None if usage is None or usage.at_least else usage.total_tokens)
