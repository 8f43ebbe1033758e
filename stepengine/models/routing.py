"""
Fallback between models as an ordinary model string: ``"anthropic/a | openai/b"``.

As a string it works wherever a model string does: in a definition, in ``StepWith``, in a journal and on the command line.
``Models`` parses it. The reply names the model that answered, so the choice is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.models import ModelDelta, ModelReply, ModelRequest, ReplyDone
from stepengine.data.usage import Usage, add_lost_usage
from stepengine.errors import ContextOverflow, MissingKey, ModelError, UnknownModel
from stepengine.models._stopped_usage import find_failed_attempt_usage
from stepengine.models.base import Provider

BAR, ON = " | ", " on "
DEFAULT = ("unavailable", "rate_limit", "no_credit", "auth")
TOO_MANY, FORBIDDEN, NOT_FOUND = 429, frozenset({401, 403}), 404
KEPT_REQUESTS = 32
"""More requests than one run sends at once; the oldest are dropped."""

CAUSES: dict[str, Callable[[ModelError], bool]] = {
    "unavailable": lambda error: error.retryable and error.status != TOO_MANY,
    "rate_limit": lambda error: error.status == TOO_MANY and error.kind != "no_credit",
    "no_credit": lambda error: error.kind == "no_credit",
    "overflow": lambda error: isinstance(error, ContextOverflow),
    "auth": lambda error: isinstance(error, MissingKey) or error.status in FORBIDDEN or error.kind == "auth",
    "unknown_model": lambda error: (
        isinstance(error, UnknownModel) or error.status == NOT_FOUND or error.kind == "unknown_model"
    ),
    "invalid": lambda error: not error.retryable,
}
"""The values of ``fallback(on=...)`` and their failures."""


@frozen
class Route:
    """
    A parsed fallback string.

    Attributes:
        models: The models in the order of their calls.
        causes: The failures after which the next model is called.
    """

    models: tuple[str, ...]
    causes: tuple[str, ...] = DEFAULT

    def __str__(self) -> str:
        return BAR.join(self.models) + ("" if self.causes == DEFAULT else ON + ",".join(self.causes))

    def is_fallback_cause(self, error: ModelError) -> bool:
        """Return whether the next model is called after *error*."""
        return any(CAUSES[cause](error) for cause in self.causes)


def fallback(*models: str, on: str | Iterable[str] = DEFAULT) -> str:
    """
    Return a model string that calls *models* in turn, each after a failure of the one before.

    Args:
        models: Model strings; at least two.
        on: The failures after which the next model is called. ``"unavailable"`` means connection errors, timeouts, 5xx,
            broken replies and other retryable errors; ``"rate_limit"`` means 429. ``"auth"`` means 401, 403, and a missing or
            wrong key. ``"overflow"`` means a full context, and ``"invalid"`` all errors that are not retryable.
            ``"no_credit"`` and ``"unknown_model"`` are also possible. The default is ``"unavailable"``, ``"rate_limit"``,
            ``"no_credit"`` and ``"auth"``, the failures of a provider or an account.

    The next model is called at once. A failure of the last one is an ordinary failed attempt: if the retry policy allows, all
    models are tried again after a pause. If a failed stream has already yielded deltas, the next attempt starts with the next
    model, so that subscribers can discard these deltas first.

    Raises:
        UnknownModel: for fewer than two models, and for an unknown value in *on*.
    """
    causes = (on,) if isinstance(on, str) else tuple(on)
    return str(_validate_route(Route(tuple(models), causes)))


def parse_route(model: str) -> Route | None:
    """
    Return the parsed fallback string; ``None`` if *model* is an ordinary model string.

    Raises:
        UnknownModel: for an invalid fallback string.
    """
    if "|" not in model:
        return None
    listed, _, words = model.partition(ON)
    models = tuple([name.strip() for name in listed.split("|")])
    causes = tuple([word.strip() for word in words.split(",")]) if words else DEFAULT
    return _validate_route(Route(models, causes))


def _validate_route(route: Route) -> Route:
    """Return *route*; raise ``UnknownModel`` for fewer than two models or an unknown cause."""
    if len(route.models) < 2 or not all(route.models):  # noqa: PLR2004 - one and one to fall back to
        msg = f"a fallback needs two models or more, such as 'anthropic/a | openai/b', not {str(route)!r}"
        raise UnknownModel(msg, kind="unknown_model")
    odd = [cause for cause in route.causes if cause not in CAUSES]
    if odd or not route.causes:
        msg = (
            f"invalid causes of a fallback: {', '.join(map(repr, odd)) or '(none)'}; valid causes: {', '.join(CAUSES)}"
        )
        raise UnknownModel(msg, kind="unknown_model")
    return route


class Fallback(Provider):
    """
    Calls the models of a route in turn.

    Args:
        route: The canonical model strings, and the causes of a fallback.
        get_provider: Returns the provider of a model string.
    """

    name = "fallback"

    def __init__(self, route: Route, get_provider: Callable[[str], Provider]) -> None:
        self._route = route
        self._get_provider = get_provider
        self._left_off: OrderedDict[int, tuple[ModelRequest, int]] = OrderedDict()

    def check(self, model: str) -> None:
        """Raise an error if requests for any model of the route cannot succeed, because each of them may be needed."""
        for name in self._route.models:
            self._get_provider(name).check(name)

    async def complete(self, request: ModelRequest) -> ModelReply:
        """Return the reply of the first model that does not fail."""
        spent: Usage | None = None
        models = self._route.models
        for number, model in enumerate(models):
            try:
                reply = await self._get_provider(model).complete(attrs.evolve(request, model=model))
            except ModelError as error:
                spent = _add_usage(spent, find_failed_attempt_usage(error))
                error.usage = spent
                if number + 1 == len(models) or not self._route.is_fallback_cause(error):
                    raise
            else:
                return _add_model_and_usage(reply, model, spent)
        raise AssertionError  # the last model returns or raises

    async def stream(self, request: ModelRequest) -> AsyncIterator[ModelDelta]:
        """
        Yield the stream of the first model that does not fail.

        After the first delta a failure that has a next model is raised as retryable, and the next attempt starts there.
        """
        spent: Usage | None = None
        models = self._route.models
        _, first = self._left_off.pop(id(request), (None, 0))
        for number, model in list(enumerate(models))[first:]:
            shown = False
            try:
                inner: Any = self._get_provider(model).stream(attrs.evolve(request, model=model))
                async with aclosing(inner) as deltas:
                    async for delta in deltas:
                        shown = True
                        yield (
                            ReplyDone(_add_model_and_usage(delta.reply, model, spent))
                            if isinstance(delta, ReplyDone)
                            else delta
                        )
                return
            except ModelError as error:
                spent = _add_usage(spent, find_failed_attempt_usage(error))
                error.usage = spent
                if number + 1 == len(models) or not self._route.is_fallback_cause(error):
                    raise
                if shown:
                    self._store_next_model(request, number + 1)
                    error.retryable = True
                    raise

    def _store_next_model(self, request: ModelRequest, index: int) -> None:
        """Store the index of the model with which the next attempt of *request* starts."""
        self._left_off[id(request)] = (request, index)
        while len(self._left_off) > KEPT_REQUESTS:
            self._left_off.popitem(last=False)


def _add_usage(spent: Usage | None, more: object) -> Usage | None:
    """Return the sum of both usages; ignore *more* if it is not a ``Usage``."""
    if not isinstance(more, Usage):
        return spent
    return more if spent is None else spent + more


def _add_model_and_usage(reply: ModelReply, model: str, spent: Usage | None) -> ModelReply:
    """Return *reply* with the model that answered, and with the usage of the failed models added."""
    named = reply if reply.model is not None else attrs.evolve(reply, model=model)
    if spent is None:
        return named
    return attrs.evolve(named, usage=add_lost_usage(spent, named.usage))
