"""
The retry coordinator: the delays before a model call is repeated.

SDK retries are off, so that attempts never multiply. Which failures may be tried again is said by the provider, on the
error itself; here is decided whether and when.
"""

from __future__ import annotations

from random import Random

from attrs import frozen

from stepengine.data.checks import with_keyword_hints
from stepengine.errors import DefinitionError, ModelError


@with_keyword_hints
@frozen(kw_only=True)
class RetryPolicy:
    """
    The number of attempts of a failing model call, and the waits between them.

    Waits are random between 0 and a bound that doubles ("full jitter"). The ``retry-after`` of a provider is added.

    Attributes:
        attempts: Requests per model call at most, the first included.
        base_seconds: The bound of the first random wait, doubled for each further one.
        cap_seconds: The bound that no random wait exceeds.
        max_retry_after_seconds: The longest ``retry-after`` of a provider that is waited for; after a longer one the call fails at once.
        extra_attempts: Further attempts of all calls of a run tree together.

    Raises:
        DefinitionError: when there is no first attempt, or a number is negative.
    """

    # Most overloads pass at once. Four attempts with these waits span 3.5 s at most; a caller who waits longer has to hear of it.
    attempts: int = 4
    base_seconds: float = 0.5
    # Rate limits of providers are by the minute, and a request after half of one may pass again.
    cap_seconds: float = 30.0
    # For the same reason; a longer time is a quota of hours or days.
    max_retry_after_seconds: float = 60.0
    # A provider that fails for all children of a tree is down. Each of them would otherwise repeat its requests three times.
    extra_attempts: int = 20

    def __attrs_post_init__(self) -> None:
        seconds = (self.base_seconds, self.cap_seconds, self.max_retry_after_seconds)
        if self.attempts < 1 or not all(value >= 0 for value in (*seconds, self.extra_attempts)):
            msg = f"{self} is not valid: attempts must be at least 1, and the other numbers at least 0"
            raise DefinitionError(msg)


class Retries:
    """
    The remaining retries of a run tree and their delays.

    Args:
        policy: How often and how patiently.
        seed: The run's. A wait depends on it, on the call's address and on the attempt alone: neither on what runs beside
            it nor on the random source that handlers use, which is not touched.
    """

    def __init__(self, policy: RetryPolicy, seed: str) -> None:
        self._policy = policy
        self._seed = seed
        self._left = policy.extra_attempts

    def count_retry_and_find_delay(self, error: ModelError, attempt: int, address: tuple[str, int]) -> float | None:
        """
        Count the next attempt and return the seconds to wait before it; ``None`` if there must be no further attempt.

        Args:
            error: The error of the failed attempt.
            attempt: The number of the failed attempt, from 1.
            address: The address of the model call: run path and number.
        """
        policy, asked = self._policy, error.retry_after
        if not error.retryable or attempt >= policy.attempts or self._left <= 0:
            return None
        if asked is None or not asked >= 0:
            asked = 0.0
        if asked > policy.max_retry_after_seconds:
            return None
        self._left -= 1
        path, seq = address
        random = Random(f"{self._seed}:{path}:{seq}:{attempt}")  # noqa: S311
        jitter = random.uniform(0, min(policy.cap_seconds, policy.base_seconds * 2 ** (attempt - 1)))
        return min(asked + jitter, max(policy.max_retry_after_seconds, jitter))
