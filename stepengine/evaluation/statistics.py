"""
Rates, means, paired differences and ratios, each with its 95 % interval.

The unit is the case. Samples of one case are not independent, so callers average them first (``mean_by_case``). This module knows
no runs, and needs only the standard library.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, stdev

import attrs
from attrs import frozen

FEWEST_CASES = 5
"""With fewer cases there are values, and no interval."""
LEVEL = 0.95
DETECTABLE = 2.8
"""Standard errors of a difference that is found in four of five repetitions."""
RULE_OF_THREE = 3.0
"""What n equal values leave open is this through n: what happens more often would have shown in 95 of 100 such samples."""
EVEN = 1e-12
"""Differences of values from 0 to 1 that are no larger are those of floats."""
MAX_TERMS = 300
TINY = 1e-300
COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
"""The comparisons of gates."""


@frozen
class Estimate:
    """
    A mean over cases.

    Attributes:
        mean: The mean.
        low: The lower end of its 95 % interval; ``None`` with too few cases.
        high: The upper end.
        cases: The number of cases.
        p: The p value of the hypothesis that the true mean is 0, by the method of the interval: it is below 0.05 exactly if the
            interval excludes 0. ``None`` if it was not requested, or there is no interval.
        error: The standard error; ``None`` with fewer than two cases.
        detectable: The smallest difference that this number of cases can show; ``None`` if it was not requested.
    """

    mean: float
    low: float | None
    high: float | None
    cases: int
    p: float | None = None
    error: float | None = None
    detectable: float | None = None


@frozen
class Ratio:
    """
    A ratio of costs, steps or tokens, with its interval.

    Attributes:
        ratio: The geometric mean of the pairs' ratios; ``None`` if no pair can be compared.
        low: The lower end of its 95 % interval; ``None`` with too few pairs.
        high: The upper end.
        pairs: The number of pairs.
        left_out: The number of pairs that were not used, because a side is unknown or zero.
    """

    ratio: float | None
    low: float | None
    high: float | None
    pairs: int
    left_out: int


def mean_by_case(samples: Mapping[str, Iterable[float]]) -> dict[str, float]:
    """Return the mean of each case that has samples."""
    means = {case: [*values] for case, values in samples.items()}
    return {case: fmean(values) for case, values in means.items() if values}


def wilson_interval(successes: int, tries: int) -> tuple[float, float]:
    """
    Return the 95 % confidence interval of a rate: *successes* of *tries* independent tries.

    Without a try the interval is 0 to 1.

    Raises:
        ValueError: when *successes* is below 0 or above *tries*.
    """
    if not 0 <= successes <= tries:
        msg = f"{successes} of {tries} is not a rate"
        raise ValueError(msg)
    if tries == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
    p, n = successes / tries, tries
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)


def estimate_rate(passed: Sequence[bool]) -> Estimate:
    """Return the rate of passed cases, each tried once; if all passed or all failed, by the rule of three."""
    number, successes = len(passed), sum(passed)
    if number < FEWEST_CASES:
        return Estimate(fmean(passed) if passed else math.nan, None, None, number)
    if successes in (0, number):
        far = RULE_OF_THREE / number
        low, high = (0.0, far) if successes == 0 else (1 - far, 1.0)
    else:
        low, high = wilson_interval(successes, number)
    return Estimate(successes / number, low, high, number)


def estimate_mean(cases: Sequence[float]) -> Estimate:
    """Return the mean of the case means *cases*, each from 0 to 1, with an interval within 0 and 1."""
    made = _estimate_mean_with_t_interval(cases, spread=1.0)
    if made.low is None or made.high is None:
        return made
    return attrs.evolve(made, low=max(0.0, made.low), high=min(1.0, made.high))


def estimate_difference(base: Mapping[str, float], side: Mapping[str, float], *, spread: float = 1.0) -> Estimate:
    """
    Return the mean of *side* minus *base* over the cases that both have, with its interval and p value.

    Args:
        base: The value of each case.
        side: The value of each case for the other side.
        spread: The largest possible difference of two values; it scales the rule of three if all differences are equal.
    """
    differences = [side[case] - base[case] for case in base if case in side]
    made = _estimate_mean_with_t_interval(differences, spread=spread)
    if made.error is None:
        return made
    p = None if made.low is None else _compute_p_value(made.mean, made.error, made.cases, spread)
    return attrs.evolve(made, p=p, detectable=DETECTABLE * made.error)


def estimate_geometric_mean_ratio(pairs: Iterable[tuple[float | None, float | None]]) -> Ratio:
    """
    Return the geometric mean of second / first in *pairs*, with a confidence interval; each case has one pair.

    Pairs with ``None``, zero or a negative number are not used.
    """
    known = [*pairs]
    logs = [math.log(b / a) for a, b in known if a is not None and b is not None and a > 0 and b > 0]
    left = len(known) - len(logs)
    if not logs:
        return Ratio(None, None, None, 0, left)
    made = _estimate_mean_with_t_interval(logs, spread=0.0)
    low, high = [None if end is None else math.exp(end) for end in (made.low, made.high)]
    return Ratio(math.exp(made.mean), low, high, len(logs), left)


def adjust_p_values(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p values adjusted for their number by Holm's method; ``None`` values stay and are not counted."""
    known = sorted([(p, index) for index, p in enumerate(p_values) if p is not None])
    made: list[float | None] = [None] * len(p_values)
    reached = 0.0
    for rank, (p, index) in enumerate(known):
        reached = max(reached, min(1.0, p * (len(known) - rank)))
        made[index] = reached
    return made


def _estimate_mean_with_t_interval(values: Sequence[float], *, spread: float) -> Estimate:
    """Return the mean of values with its t interval, or by the rule of three if all are equal; few values have no interval."""
    number = len(values)
    if number < 2:  # noqa: PLR2004 - one value has no spread
        return Estimate(values[0] if values else math.nan, None, None, number)
    are_equal = max(values) - min(values) <= EVEN * max(1.0, *map(abs, values))
    mean, error = fmean(values), 0.0 if are_equal else stdev(values) / math.sqrt(number)
    if number < FEWEST_CASES:
        return Estimate(mean, None, None, number, error=error)
    half = t_quantile(0.5 + LEVEL / 2, number - 1) * error if error else RULE_OF_THREE / number * spread
    return Estimate(mean, mean - half, mean + half, number, error=error)


def _compute_p_value(mean: float, error: float, number: int, spread: float) -> float:
    """Return the p value that fits the interval of ``_estimate_mean_with_t_interval``: 0.05 if one end of it is 0."""
    if error:
        return 2 * (1 - _compute_t_cdf(abs(mean / error), number - 1))
    return float((1 - LEVEL) ** (number * abs(mean) / (RULE_OF_THREE * spread))) if spread else float(mean == 0)


# --- Student's t ------------------------------------------------------------------------------------------------------


def t_quantile(probability: float, degrees_of_freedom: int) -> float:
    """Return the quantile of Student's t with *degrees_of_freedom* degrees of freedom at *probability*."""
    if probability < 0.5:  # noqa: PLR2004 - the middle of a symmetric distribution
        return -t_quantile(1 - probability, degrees_of_freedom)
    low, high = 0.0, 1.0
    while _compute_t_cdf(high, degrees_of_freedom) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _compute_t_cdf(middle, degrees_of_freedom) < probability else (low, middle)
    return high


def _compute_t_cdf(t: float, degrees_of_freedom: int) -> float:
    """Return P(T <= t) of Student's t distribution, for t >= 0."""
    return 1 - _incomplete_beta(degrees_of_freedom / (degrees_of_freedom + t * t), degrees_of_freedom / 2, 0.5) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function, computed by its continued fraction."""
    if x <= 0 or x >= 1:
        return min(1.0, max(0.0, x))
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(1 - x, b, a)
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Lentz's method; no denominator may become zero.
    c, d = 1.0, 1 / _avoid_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _avoid_zero(1 + term * d)
            c = _avoid_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-15:  # noqa: PLR2004 - as far as floats go
            break
    return math.exp(scale) * value / a


def _avoid_zero(value: float) -> float:
    """Return *value*, or a tiny number if *value* is near zero."""
    return value if abs(value) > TINY else TINY
