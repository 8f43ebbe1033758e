"""
Numbers of samples: known values, and intervals that hold what they promise (evaluation JG90-JG95).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepengine.evaluation.statistics import (
    adjust_p_values,
    estimate_difference,
    estimate_geometric_mean_ratio,
    estimate_mean,
    estimate_rate,
    mean_by_case,
    t_quantile,
    wilson_interval,
)


@pytest.mark.spec("evaluation:JG90")
@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (4, 2.7764), (30, 2.0423), (10_000, 1.9602)],
)
def test_the_quantiles_of_t_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    """
    The 97.5 % quantiles, as printed in any table, to four digits; below the middle they are mirrored.
    """
    assert quantile == pytest.approx(t_quantile(0.975, freedom), abs=5e-5)
    assert -t_quantile(0.975, freedom) == pytest.approx(t_quantile(0.025, freedom))


@pytest.mark.spec("evaluation:JG90")
def test_rate_intervals_follow_wilson_or_the_rule_of_three() -> None:
    """
    Values worked out by hand; without a try nothing is known.
    """
    assert (0.2366, 0.7634) == pytest.approx(wilson_interval(5, 10), abs=5e-5)
    assert (0.1078, 0.6032) == pytest.approx(wilson_interval(3, 10), abs=5e-4)
    assert (0.0, 0.2775) == pytest.approx(wilson_interval(0, 10), abs=5e-5)
    assert (0.0, 1.0) == wilson_interval(0, 0)
    assert (0.0, 0.0, 0.3) == pytest.approx(
        (estimate_rate([False] * 10).mean, estimate_rate([False] * 10).low, estimate_rate([False] * 10).high)
    )
    assert (0.97, 1.0) == pytest.approx((estimate_rate([True] * 100).low, estimate_rate([True] * 100).high))
    with pytest.raises(ValueError, match="4 of 3 is not a rate"):
        wilson_interval(4, 3)


@pytest.mark.spec("evaluation:JG90")
def test_a_paired_difference_counts_cases_and_not_samples() -> None:
    """
    Ten times the samples of each case change nothing; the figures are those of the paired t test by hand.
    """
    base = {"a": [0.0], "b": [0.2], "c": [0.4], "d": [0.6], "e": [0.8], "f": [0.5]}
    side = {"a": [0.1], "b": [0.5], "c": [0.5], "d": [0.9], "e": [0.8], "g": [1.0]}
    once = estimate_difference(mean_by_case(base), mean_by_case(side))
    often = estimate_difference(
        mean_by_case({k: v * 10 for k, v in base.items()}), mean_by_case({k: v * 10 for k, v in side.items()})
    )

    assert (once.mean, once.low, once.high, once.p) == pytest.approx((often.mean, often.low, often.high, often.p))
    assert 5 == once.cases
    assert (0.16, -0.0066, 0.3266, 0.0560) == pytest.approx((once.mean, once.low, once.high, once.p), abs=5e-4)
    assert 2.8 * 0.06 == pytest.approx(once.detectable)


VALUES = st.one_of(
    st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=2, max_size=40),
    st.lists(st.floats(-1, 1), min_size=2, max_size=40),
    st.tuples(st.floats(-1, 1), st.integers(2, 40)).map(lambda drawn: [drawn[0]] * drawn[1]),
)


@pytest.mark.deep
@pytest.mark.smoke
@pytest.mark.spec("evaluation:JG90")
@given(differences=VALUES)
def test_the_p_value_and_the_interval_are_of_one_method(differences: list[float]) -> None:
    """
    One says that there is a difference where the other does; without an interval there is no p value.
    """
    made = estimate_difference(
        {str(i): 0.0 for i in range(len(differences))}, {str(i): d for i, d in enumerate(differences)}
    )

    if made.low is None or made.high is None:
        assert len(differences) < 5
        assert made.p is None
    else:
        nearest = min(abs(made.low), abs(made.high))
        assert made.p is not None
        assert nearest < 1e-9 or (made.p < 0.05) == (not made.low <= 0 <= made.high)


def test_rounding_errors_make_no_significant_difference() -> None:
    base = {str(i): i / 10 for i in range(10)}

    made = estimate_difference(base, {case: value + 0.1 for case, value in base.items()})

    assert (0.1, -0.2, 0.4) == pytest.approx((made.mean, made.low, made.high))
    assert made.p is not None
    assert made.p > 0.05


@pytest.mark.spec("evaluation:JG90")
def test_under_five_cases_there_are_values_and_no_interval() -> None:
    """
    Four cases have a mean; five have an interval, and five equal ones that of the rule of three.
    """
    four, five = estimate_mean([0.2, 0.4, 0.6, 0.8]), estimate_mean([0.0, 0.4, 0.6, 0.8, 1.0])
    alike = estimate_mean([1.0] * 6)

    assert (0.5, None, None, 4) == (pytest.approx(four.mean), four.low, four.high, four.cases)
    assert (0.0823, 1.0) == pytest.approx((five.low, five.high), abs=5e-4)
    assert (0.5, 1.0) == pytest.approx((alike.low, alike.high))
    assert (None, None) == (estimate_rate([True] * 4).low, estimate_difference({"a": 1.0}, {"a": 0.0}).low)
    assert math.isnan(estimate_mean([]).mean)


@pytest.mark.spec("evaluation:JG92")
def test_unknown_and_zero_values_are_excluded_from_a_ratio() -> None:
    """
    Twice as much in every pair is a ratio of two; costs are compared as logarithms.
    """
    made = estimate_geometric_mean_ratio(
        [(1.0, 2.0), (3.0, 6.0), (None, 1.0), (0.0, 1.0), (5.0, 10.0), (2.0, 4.0), (1.0, 2.0)]
    )
    none = estimate_geometric_mean_ratio([(None, 1.0)])

    assert (2.0, 2.0, 2.0, 5, 2) == pytest.approx((made.ratio, made.low, made.high, made.pairs, made.left_out))
    assert (None, None, 0, 1) == (none.ratio, none.low, none.pairs, none.left_out)


@pytest.mark.spec("evaluation:JG90")
def test_holm_adjusts_for_how_many_comparisons_are_shown() -> None:
    """
    The textbook's example; an adjusted value never falls below one that was smaller.
    """
    made = adjust_p_values([0.01, 0.04, 0.03, None])

    assert [0.03, 0.06, 0.06] == pytest.approx(made[:3])
    assert made[3] is None
    assert [] == adjust_p_values([])


@given(st.lists(st.floats(0, 1), max_size=8))
def test_adjusted_p_values_keep_their_order_and_are_never_smaller(values: list[float]) -> None:
    """
    For any values: at least what they were, at most 1, in the same order.
    """
    made: list[Any] = adjust_p_values(values)

    assert all(p <= a <= 1 for p, a in zip(values, made, strict=True))
    assert sorted(made) == [made[i] for i in sorted(range(len(values)), key=lambda i: (values[i], made[i]))]
