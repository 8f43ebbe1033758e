"""The performer of ``CallModel``: one provider call, its deltas, its attempts, its turn among others and its price."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol, TypeAlias, assert_never, cast

import attrs

from stepengine.data.effects import CallModel
from stepengine.data.events import (
    ModelRetry,
    RateLimited,
    ReplyDiscarded,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
)
from stepengine.data.models import (
    ModelDelta,
    ModelReply,
    ModelRequest,
    ReplyDone,
    TextChunk,
    ThinkingChunk,
    ToolCallChunk,
    ToolCallEnded,
    ToolCallStarted,
)
from stepengine.data.outcomes import Failure
from stepengine.data.usage import Usage, add_cost
from stepengine.errors import ModelError, StepEngineError, TruncatedReply
from stepengine.runtime.clock import Clock
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.performer import IO, Item
from stepengine.runtime.rates import Obstacle, RateLimits
from stepengine.runtime.retry import Retries, known_usage
from stepengine.runtime.turns import Notice, Registry, queued

__all__ = ("ModelCaller", "ModelProvider", "ModelRegistry", "Pricing")

Pricing: TypeAlias = Callable[[str, Usage, datetime], "Decimal | None"]
"""Returns US dollars for a model string, what was used and when; ``None`` when the price is unknown."""


class ModelProvider(Protocol):
    """What the caller needs of a provider; ``stepengine.models.Provider`` has it."""

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the completed reply."""

    def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """Give deltas, last exactly one ``ReplyDone``."""


class ModelRegistry(Protocol):
    """What the caller needs of a registry without rate limits; ``stepengine.models.Models`` has it."""

    def provider_for(self, model: str) -> ModelProvider:
        """Return the provider of a model string or raise ``UnknownModel``."""


class ModelCaller:
    """
    Calls models for one run tree.

    Args:
        models: Where providers come from.
        pricing: What replies cost; ``None`` leaves cost to the provider.
        retries: The tree's retry coordinator.
        clock: Whose sleep is used between attempts.
        now: The run's time (UTC), for prices that change.
        rates: The engine's limiters; ``None`` for none.
    """

    def __init__(
        self,
        models: ModelRegistry,
        pricing: Pricing | None,
        retries: Retries,
        clock: Clock,
        now: Callable[[], datetime],
        *,
        rates: RateLimits | None = None,
    ) -> None:
        self._models = models
        self._providers: dict[str, ModelProvider] = {}
        self._pricing = pricing
        self._retries = retries
        self._clock = clock
        self._now = now
        self._rates = rates

    async def call(self, item: Item, io: IO) -> ModelReply:
        """
        Return the reply, with what failed attempts used added to its usage and its cost.

        Raises:
            ModelError: the last attempt's, with the usage of all of them.
        """
        request: ModelRequest = item.effect.request  # type: ignore[union-attr]
        provider = self._provider(item, io, request)
        spent: Usage | None = None
        attempt = 1
        while True:
            try:
                reply = await (_streamed(provider, request, item, io) if io.watched else provider.complete(request))
                return self._priced(request.model, _checked(reply, request), spent)
            except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001
                error = _model_error(request.model, raised)
                used = known_usage(error)
                spent = spent + used if spent and used else spent or used
                wait = self._retries.wait_before_next(error, attempt, (item.path, item.effect.seq))
                if wait is None:
                    error.usage = spent
                    raise error from error.__cause__
            io.attempt(Failure(error), used)
            if io.watched:
                io.emit(_retry(item, request, attempt, wait, error))
            await self._clock.sleep(wait)
            attempt += 1

    def _provider(self, item: Item, io: IO, request: ModelRequest) -> ModelProvider:
        model = request.model
        if self._rates is not None:
            return queued(cast("Registry", self._models), self._rates, model, _notice(item, io, request))
        provider = self._providers.get(model)
        if provider is None:
            provider = self._providers[model] = self._models.provider_for(model)
        return provider

    def _priced(self, model: str, reply: ModelReply, spent: Usage | None) -> ModelReply:
        usage, cost = reply.usage, reply.cost
        if cost is None and usage is not None:
            cost = self._cost(reply.model or model, usage)
        if spent is not None:
            cost = add_cost(cost, self._cost(model, spent) if spent.total_tokens else Decimal(0))
            usage = spent + (usage or Usage(at_least=True))
        if usage is reply.usage and cost is reply.cost:
            return reply
        return attrs.evolve(reply, usage=usage, cost=cost)

    def _cost(self, model: str, usage: Usage) -> Decimal | None:
        try:
            return None if self._pricing is None else self._pricing(model, usage, self._now())
        except Exception as error:  # noqa: BLE001
            LOGGER.warning("the pricing of %r raised, so its cost is unknown", model, exc_info=error)
            return None


def _checked(reply: object, request: ModelRequest) -> ModelReply:
    if isinstance(reply, ModelReply):
        return reply
    msg = f"the provider of {request.model!r} gave a {type(reply).__name__} instead of a ModelReply"
    raise ModelError(msg, kind="provider")


async def _streamed(provider: ModelProvider, request: ModelRequest, item: Item, io: IO) -> ModelReply:
    shown = False
    calls: dict[int, tuple[str, str]] = {}
    try:
        async with aclosing(cast("Any", provider.stream(request))) as deltas:
            async for delta in deltas:
                if type(delta) is ReplyDone:
                    return delta.reply
                shown = _show(delta, calls, item, io) or shown
    except BaseException:
        if shown:
            io.emit(ReplyDiscarded(path=item.path, seq=item.effect.seq, model=request.model))
        raise
    if shown:
        io.emit(ReplyDiscarded(path=item.path, seq=item.effect.seq, model=request.model))
    msg = f"the stream of {request.model!r} ended before its terminal marker; nothing of it counts"
    raise TruncatedReply(msg, retryable=True, kind="truncated")


def _show(delta: ModelDelta, calls: dict[int, tuple[str, str]], item: Item, io: IO) -> bool:
    path, seq = item.path, item.effect.seq
    match delta:
        case TextChunk(text=text):
            io.emit(TextDelta(path=path, seq=seq, text=text))
        case ThinkingChunk(text=text):
            io.emit(ThinkingDelta(path=path, seq=seq, text=text))
        case ToolCallStarted(index=index, tool_name=name):
            call_id = cast("CallModel", item.effect).call_id
            calls[index] = name, "" if call_id is None else call_id(len(calls))
            return False
        case ToolCallChunk(index=index, text=text):
            name, call = calls.get(index, ("", ""))
            io.emit(ToolInputDelta(path=path, seq=seq, tool_name=name, tool_call_id=call, text=text))
        case ToolCallEnded() | ReplyDone():
            return False
        case _ as never:
            assert_never(never)
    return True


def _retry(item: Item, request: ModelRequest, attempt: int, wait: float, error: ModelError) -> ModelRetry:
    return ModelRetry(
        path=item.path, seq=item.effect.seq, model=request.model, attempt=attempt, wait=wait, error=error.message
    )


def _notice(item: Item, io: IO, request: ModelRequest) -> Notice:
    def notice(provider: str, obstacle: Obstacle) -> None:
        if io.watched:
            at: dict[str, Any] = {"path": item.path, "seq": item.effect.seq, "model": request.model}
            io.emit(RateLimited(**at, provider=provider, limit=obstacle.limit, wait=obstacle.seconds))

    return notice


def _model_error(model: str, raised: BaseException) -> ModelError:
    """
    Return what a provider raised as a ``ModelError``.

    Raises:
        BaseException: *raised* itself, when it is a cancellation of ours, or an error of another kind of ours.
    """
    if isinstance(raised, ModelError):
        return raised
    if isinstance(raised, StepEngineError):
        raise raised
    if isinstance(raised, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise raised
    msg = f"the provider of {model!r} raised {type(raised).__name__}: {raised}"
    error = ModelError(msg, kind="provider")
    error.__cause__ = raised
    return error
