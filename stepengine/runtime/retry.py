"""
The one retry coordinator (reliability R21, MP06-MP15, MP30-MP33): who waits how long before a model is asked again.

SDK retries are off, so that attempts never multiply.
"""

from __future__ import annotations

from random import Random

import attrs

from stepengine.data.usage import Usage
from stepengine.errors import ModelError

__all__ = ("Retries", "RetryPolicy", "known_usage")


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """
    How often and how patiently a failed model call is tried again.

    Attributes:
        attempts: Requests per model call at most, the first included.
        base: Seconds; the bound of the first random wait, doubled for each further one.
        cap: Seconds; the bound that no random wait exceeds.
        obey: Seconds up to which a provider's ``retry-after`` is waited for; above it the call fails at once.
        extra: Further attempts of all calls of a run tree together.
    """

    attempts: int = 4
    base: float = 0.5
    cap: float = 30.0
    obey: float = 60.0
    extra: int = 20


class Retries:
    """What is left of a run tree's further attempts."""

    def __init__(self, policy: RetryPolicy, random: Random) -> None:
        self._policy = policy
        self._random = random
        self._left = policy.extra

    def wait_before_next(self, error: ModelError, attempt: int) -> float | None:
        """
        Return the seconds to wait before the next attempt, or ``None`` when there must be none.

        Args:
            error: Why attempt number *attempt* failed.
            attempt: Counts from 1.
        """
        policy = self._policy
        if not error.retryable or attempt >= policy.attempts or self._left <= 0:
            return None
        wait = self._random.uniform(0, min(policy.cap, policy.base * 2 ** (attempt - 1)))
        asked = error.retry_after
        if asked is not None and asked >= 0:
            if asked > policy.obey:
                return None
            wait = max(asked, min(wait, policy.obey))
        self._left -= 1
        return wait


def known_usage(error: ModelError) -> Usage | None:
    """
    Return what a failed attempt counts for; ``None`` for nothing.

    A provider that answered with an error status did not bill; an attempt whose answer was lost may have been billed, so
    the total is only a lower bound (reliability MP30).
    """
    if isinstance(error.usage, Usage):
        return error.usage
    return Usage(at_least=True) if error.retryable and error.status is None else None
