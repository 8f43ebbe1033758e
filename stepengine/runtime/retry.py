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
    How often and how patiently a failed model call is tried again.

    Waits are random between 0 and a bound that doubles ("full jitter"); what a provider asks for with ``retry-after``
    comes on top.

    Attributes:
        attempts: Requests per model call at most, the first included.
        base: Seconds; the bound of the first random wait, doubled for each further one.
        cap: Seconds; the bound that no random wait exceeds.
        obey: Seconds up to which a provider's ``retry-after`` is waited for; above it the call fails at once.
        extra: Further attempts of all calls of a run tree together.

    Raises:
        DefinitionError: when there is no first attempt, or a number is negative.
    """

    attempts: int = 4
    base: float = 0.5
    cap: float = 30.0
    obey: float = 60.0
    extra: int = 20

    def __attrs_post_init__(self) -> None:
        if self.attempts < 1 or not all(value >= 0 for value in (self.base, self.cap, self.obey, self.extra)):
            msg = f"{self} cannot be followed: attempts is at least 1, base, cap, obey and extra are at least 0"
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
        self._left = policy.extra

    def next_delay(self, error: ModelError, attempt: int, address: tuple[str, int]) -> float | None:
        """
        Return the seconds to wait before the next attempt, or ``None`` when there must be none.

        Args:
            error: Why attempt number *attempt* failed.
            attempt: Counts from 1.
            address: Of the model call: path and number.
        """
        policy, asked = self._policy, error.retry_after
        if not error.retryable or attempt >= policy.attempts or self._left <= 0:
            return None
        if asked is None or not asked >= 0:
            asked = 0.0
        if asked > policy.obey:
            return None
        self._left -= 1
        path, seq = address
        random = Random(f"{self._seed}:{path}:{seq}:{attempt}")  # noqa: S311
        jitter = random.uniform(0, min(policy.cap, policy.base * 2 ** (attempt - 1)))
        return min(asked + jitter, max(policy.obey, jitter))
