"""
The usage of requests without a reply: stopped ones, which pass it to the caller with the exception, and failed ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from stepengine.data.usage import Usage
from stepengine.errors import ModelError

NAME = "stepengine_usage"
UNSENT = "stepengine_unsent"


def attach_usage_to_exception(stopped: BaseException, usage: Usage | None) -> None:
    """Store the usage of a stream on *stopped*, the exception that ends it."""
    if usage is not None:
        vars(stopped)[NAME] = usage


def get_attached_usage(stopped: BaseException) -> Usage | None:
    """Return the usage of the stream that *stopped* ended; ``None`` if it is unknown."""
    usage = vars(stopped).get(NAME)
    return usage if isinstance(usage, Usage) else None


def mark_request_unsent(stopped: BaseException) -> None:
    """Mark on *stopped*, the exception that ends a request, that the request was never sent."""
    vars(stopped)[UNSENT] = True


def may_have_been_sent(stopped: BaseException) -> bool:
    """Return whether a stopped request may have been sent."""
    return not vars(stopped).get(UNSENT, False)


def get_failed_attempt_usage(error: ModelError) -> Usage | None:
    """
    Return the usage of a failed attempt, which is a lower bound if the answer was lost; ``None`` if it has none.

    A provider that answers with an error status does not bill. An attempt with a lost answer may have been billed.
    """
    used = error.usage
    if isinstance(used, Usage):
        return used if used.requests or used == Usage() else attrs.evolve(used, requests=1)
    return Usage(requests=1, at_least=True) if error.retryable and error.status is None else None


@contextmanager
def attach_usage_on_cancel(used: Callable[[], Usage | None]) -> Iterator[None]:
    """Attach the usage reported so far to a cancellation of the block."""
    try:
        yield
    except asyncio.CancelledError as stopped:
        attach_usage_to_exception(stopped, used())
        raise
