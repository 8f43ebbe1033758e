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


def attach_usage_to_exception(exception: BaseException, usage: Usage | None) -> None:
    """Store the usage of a stream on *exception*, which ends the stream; do nothing for ``None``."""
    if usage is not None:
        vars(exception)[NAME] = usage


def find_attached_usage(exception: BaseException) -> Usage | None:
    """Return the usage that is stored on *exception*, which ended a stream; ``None`` if none is stored."""
    usage = vars(exception).get(NAME)
    return usage if isinstance(usage, Usage) else None


def mark_request_unsent(exception: BaseException) -> None:
    """Mark on *exception*, which ends a request, that the request was never sent."""
    vars(exception)[UNSENT] = True


def may_have_been_sent(exception: BaseException) -> bool:
    """Return whether the request that *exception* ended may have been sent; false only if *exception* is marked as unsent."""
    return not vars(exception).get(UNSENT, False)


def find_failed_attempt_usage(error: ModelError) -> Usage | None:
    """
    Return the usage of a failed attempt, a lower bound if the answer was lost; ``None`` for an attempt that is not billed.

    A provider that answers with an error status does not bill. An attempt with a lost answer may have been billed.
    """
    used = error.usage
    if isinstance(used, Usage):
        return used if used.requests or used == Usage() else attrs.evolve(used, requests=1)
    return Usage(requests=1, at_least=True) if error.retryable and error.status is None else None


@contextmanager
def attach_usage_on_cancel(get_usage: Callable[[], Usage | None]) -> Iterator[None]:
    """Attach the usage so far, the result of *get_usage*, to a cancellation of the block."""
    try:
        yield
    except asyncio.CancelledError as stopped:
        attach_usage_to_exception(stopped, get_usage())
        raise
