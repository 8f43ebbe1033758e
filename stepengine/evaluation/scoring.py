"""
The scores of an evaluation: means, paired differences and ratios with their intervals, and gates.

The unit is the case, or its group: its samples are averaged first. Checks that an agent decides are no part of ``pass``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import fmean
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.messages import to_tuple
from stepengine.errors import DataError
from stepengine.evaluation.case_runs import Evaluation, Outcome, Sample
from stepengine.evaluation.statistics import (
    COMPARE,
    FEWEST_CASES,
    Estimate,
    Ratio,
    adjust_p_values,
    estimate_difference,
    estimate_geometric_mean_ratio,
    estimate_mean,
    estimate_rate,
    mean_by_case,
)

FORMAT = "stepengine.eval/1"
PASS = "pass"  # noqa: S105 - a word of tables
MEASURES: Mapping[str, Callable[[Sample], float | None]] = {
    "cost": lambda sample: None if sample.cost is None else float(sample.cost),
    "steps": lambda sample: float(sample.steps),
    "tokens": lambda sample: float(sample.tokens),
}
TOO_MANY_ERRORS = 0.05
EVEN = 1e-12
MAX_GATE = 300


@frozen
class Row:
    """
    The score of a side in one check.

    Attributes:
        side: The side.
        check: The check; ``"pass"`` for all functions together.
        mean: The mean over cases, as an ``Estimate``.
        samples: The number of samples.
        errors: The number of omitted samples: with an error of the provider or a lost tool server, or without a verdict.
        is_judge: Whether an agent decides.
    """

    side: str
    check: str
    mean: Estimate
    samples: int
    errors: int
    is_judge: bool = False


@frozen
class Pair:
    """
    The difference of a side to the base in one check, by case.

    Attributes:
        base: The base.
        side: The side.
        check: The check.
        difference: The difference with its interval, and the p value that belongs to it; gates use both.
        better: The number of cases in which the side is above the base.
        worse: The number of cases in which the side is below the base.
        equal: The number of other cases.
        p_adjusted: The p value, adjusted by Holm's method for the number of all pairs.
    """

    base: str
    side: str
    check: str
    difference: Estimate
    better: int
    worse: int
    equal: int
    p_adjusted: float | None = None


@frozen
class Ratios:
    """The ratio of a side to the base in cost, steps or tokens."""

    base: str
    side: str
    of: str
    ratio: Ratio


@frozen
class Scores:
    """
    The scores of an evaluation.

    Attributes:
        outcome: The samples.
        rows: A row for each side and check.
        pairs: The differences of each side to the base.
        ratios: The ratios of cost, steps and tokens to the base.
        unmeasured: The number of samples with an error, for each side with too many of them.
        broken: The first error of each check that raised one.
    """

    outcome: Outcome
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...]
    ratios: tuple[Ratios, ...]
    unmeasured: Mapping[str, int]
    broken: Mapping[str, str]

    def means_by_unit(self, side: str, check: str) -> dict[str, float]:
        """Return the mean of each case or group of a side in a check or measure."""
        return mean_by_case(_values_by_unit(self.outcome, side, check))

    def to_json(self) -> dict[str, Any]:
        """Return the scores as in ``results.json``, without times except the seconds of samples."""
        outcome, evaluation = self.outcome, self.outcome.evaluation
        of_case: dict[str, list[Sample]] = {case.id: [] for case in evaluation.cases}
        for sample in outcome.samples:
            of_case[sample.case].append(sample)
        return {
            "format": FORMAT,
            "name": evaluation.name,
            "seed": outcome.seed,
            "n": evaluation.n,
            "sides": [
                {"name": s.name, "agent": s.agent.id, "definition": s.definition, "models": [*s.models]}
                for s in outcome.sides
            ],
            "checks": [*dict.fromkeys([name for case in evaluation.cases for name in evaluation.get_named_checks(case)])],
            "cases": [
                {
                    "id": case.id, "tags": [*case.tags], "group": case.group,
                    "samples": [sample.to_json() for sample in of_case[case.id]],
                }
                for case in evaluation.cases
            ],
            "summary": [
                {
                    "side": row.side, "check": row.check, **_estimate_to_json(row.mean), "cases": row.mean.cases,
                    "samples": row.samples, "errors": row.errors, "judge": row.is_judge,
                }
                for row in self.rows
            ],
            "pairs": [
                {
                    "base": p.base, "side": p.side, "check": p.check, **_estimate_to_json(p.difference, "difference"),
                    "p": p.difference.p, "p_adjusted": p.p_adjusted, "better": p.better, "worse": p.worse, "equal": p.equal,
                }
                for p in self.pairs
            ],
            "ratios": [
                {
                    "base": r.base, "side": r.side, "of": r.of, "ratio": r.ratio.ratio, "low": r.ratio.low,
                    "high": r.ratio.high, "pairs": r.ratio.pairs, "left_out": r.ratio.left_out,
                }
                for r in self.ratios
            ],
            "spent": str(outcome.spent),
            "stopped": outcome.stopped,
        }  # fmt: skip


def _estimate_to_json(estimate: Estimate, name: str = "mean") -> dict[str, float | None]:
    """Return an estimate as JSON, its mean under *name*."""
    mean = None if math.isnan(estimate.mean) else estimate.mean
    return {name: mean, "low": estimate.low, "high": estimate.high}


# --- counting ---------------------------------------------------------------------------------------------------------


def score_outcome(outcome: Outcome) -> Scores:
    """Return the scores of the samples of an evaluation."""
    sides = [side.name for side in outcome.sides]
    judges = {name for sample in outcome.samples for name, score in sample.scores.items() if score.is_judge}
    names = [*dict.fromkeys([name for sample in outcome.samples for name in sample.scores])]
    checks = [PASS, *names] if any(name not in judges for name in names) else names
    rows = [_make_score_row(outcome, side, check, is_judge=check in judges) for side in sides for check in checks]
    pairs = [_compare_with_base(outcome, sides[0], side, check) for side in sides[1:] for check in checks]
    adjusted = adjust_p_values([pair.difference.p for pair in pairs])
    ratios = [
        Ratios(sides[0], side, of, _estimate_side_ratio(outcome, sides[0], side, of))
        for side in sides[1:]
        for of in MEASURES
    ]
    broken: dict[str, str] = {}
    for sample in outcome.samples:
        for name, score in sample.scores.items():
            if score.state == "broken":
                broken.setdefault(name, f"{score.reason} (case {sample.case}, {sample.side})")
    return Scores(
        outcome,
        tuple(rows),
        tuple([attrs.evolve(pair, p_adjusted=p) for pair, p in zip(pairs, adjusted, strict=True)]),
        tuple(ratios),
        {side: errors for side in sides if (errors := _count_excessive_errors(outcome, side))},
        broken,
    )


def _count_excessive_errors(outcome: Outcome, side: str) -> int:
    """Return the number of samples of a side with an error; 0 if they are at most 5 %."""
    own = [sample for sample in outcome.samples if sample.side == side]
    errors = sum(sample.status == "error" for sample in own)
    return errors if errors > TOO_MANY_ERRORS * len(own) else 0


def make_sample_value_reader(check: str) -> Callable[[Sample], float | None]:
    """Return the function that reads the value of a sample in a check or measure; it returns ``None`` if there is none."""
    if check in MEASURES:
        return MEASURES[check]
    if check == PASS:
        return lambda sample: None if sample.passed is None else float(sample.passed)
    return lambda sample: sample.scores[check].score if check in sample.scores else None


def _values_by_unit(outcome: Outcome, side: str, check: str) -> dict[str, list[float]]:
    """Return the values of a side in a check or measure, by case or group."""
    read = make_sample_value_reader(check)
    units = {case.id: case.group or case.id for case in outcome.evaluation.cases}
    found: dict[str, list[float]] = {}
    for sample in outcome.samples:
        value = read(sample) if sample.counts and sample.side == side else None
        if value is not None:
            found.setdefault(units[sample.case], []).append(value)
    return found


def _make_score_row(outcome: Outcome, side: str, check: str, *, is_judge: bool) -> Row:
    """Return the mean of a side in a check, with its interval and counts."""
    values = _values_by_unit(outcome, side, check)
    own = [s for s in outcome.samples if s.side == side and (check == PASS or check in s.scores)]
    number = sum(map(len, values.values()))
    once = all(len(each) == 1 and each[0] in (0, 1) for each in values.values())
    means = mean_by_case(values)
    mean = estimate_rate([value == 1 for value in means.values()]) if once else estimate_mean([*means.values()])
    return Row(side, check, mean, number, len(own) - number, is_judge)


def _compare_with_base(outcome: Outcome, base: str, side: str, check: str) -> Pair:
    """Return the differences of a side to the base in one check, by case or group."""
    below, above = [mean_by_case(_values_by_unit(outcome, name, check)) for name in (base, side)]
    differences = [above[unit] - below[unit] for unit in below if unit in above]
    better, worse = sum(d > EVEN for d in differences), sum(d < -EVEN for d in differences)
    made = estimate_difference(below, above)
    if made.low is not None and made.high is not None:
        made = attrs.evolve(made, low=max(-1.0, made.low), high=min(1.0, made.high))
    return Pair(base, side, check, made, better, worse, len(differences) - better - worse)


def _estimate_side_ratio(outcome: Outcome, base: str, side: str, measure: str) -> Ratio:
    """Return the ratio of a side's measure to that of the base, over the cases that both have."""
    below, above = [mean_by_case(_values_by_unit(outcome, name, measure)) for name in (base, side)]
    return estimate_geometric_mean_ratio([(below.get(unit), above.get(unit)) for unit in {**below, **above}])


# --- gates ------------------------------------------------------------------------------------------------------------

SIGN = re.compile(r"(~?[<>]=?|[*])")
FORMS = "'pass >= 0.8', 'new.pass - base.pass > -0.05' or 'new.cost <= 1.2 * base.cost'"


@frozen
class GateOfScores:
    """
    A condition on the scores.

    Attributes:
        text: The gate as it was written.
        left: The compared check or measure, of one side or of all sides but the base.
        sign: ``>``, ``>=``, ``<`` or ``<=``.
        bound: The number on the right, or the factor.
        right: The name after ``-`` or ``*`` with which *left* is compared; ``""`` for none.
        is_ratio: Whether *right* is multiplied by the bound, and not subtracted.
        by_mean: Whether the mean decides, and not the end of the interval of a difference.
    """

    text: str
    left: str
    sign: str
    bound: float
    right: str = ""
    is_ratio: bool = False
    by_mean: bool = False

    @classmethod
    def parse(cls, text: str) -> GateOfScores:
        """
        Parse a gate.

        Raises:
            DataError: when *text* is not a gate.
        """
        words = SIGN.sub(r" \1 ", text[:MAX_GATE]).split() if len(text) <= MAX_GATE else []
        signs = [i for i, word in enumerate(words) if word.lstrip("~") in COMPARE]
        if len(signs) != 1:
            raise _make_gate_error(text)
        before, sign, after = words[: signs[0]], words[signs[0]], words[signs[0] + 1 :]
        made = partial(cls, text, sign=sign.lstrip("~"), by_mean=sign.startswith("~"))
        match before, after:
            case [left], [bound] if (number := _parse_finite_number(bound)) is not None:
                return made(left=_require_measure_name(left, text), bound=number)
            case [left, "-", right], [bound] if (number := _parse_finite_number(bound)) is not None:
                return made(
                    left=_require_name_with_side(left, text),
                    right=_require_name_with_side(right, text),
                    bound=number,
                )
            case [left], [right]:
                return made(
                    left=_require_name_with_side(left, text),
                    right=_require_name_with_side(right, text),
                    bound=1.0,
                    is_ratio=True,
                )
            case [left], [first, "*", second] if (_parse_finite_number(first) is None) != (
                _parse_finite_number(second) is None
            ):
                factor, right = (first, second) if _parse_finite_number(second) is None else (second, first)
                times = _parse_finite_number(factor) or 0.0
                return made(
                    left=_require_name_with_side(left, text),
                    right=_require_name_with_side(right, text),
                    bound=times,
                    is_ratio=True,
                )
        raise _make_gate_error(text)

    def get_compared_side_checks(self, evaluation: Evaluation) -> list[tuple[str, str]]:
        """
        Return the sides and checks of an evaluation that the gate compares; without a side, all but the base.

        Raises:
            DataError: when it names a side or check that does not exist, or compares two checks.
        """
        if not self.right:
            sides = [*evaluation.agents]
            if self.left in _list_checks_and_measures(evaluation):
                return [(side, self.left) for side in sides[1:] or sides]
            return [_split_side_and_check(self.left, evaluation)]
        (side, check), (base, other) = [_split_side_and_check(name, evaluation) for name in (self.left, self.right)]
        if check != other:
            msg = f"the gate {self.text!r} compares {check!r} with {other!r}; compare two sides in the same check"
            raise DataError(msg)
        return [(side, check), (base, check)]

    def find_problem(self, scores: Scores) -> str:
        """Return why the gate does not hold or is undecided; ``""`` if it holds."""
        named = self.get_compared_side_checks(scores.outcome.evaluation)
        outcome = scores.outcome
        if outcome.missing:
            return (
                f"not decided: {outcome.missing} of {outcome.planned} samples are missing; run them with `--continue`"
            )
        if outcome.stopped:
            return f"not decided: {outcome.stopped}"
        for side, _ in named:
            if side in scores.unmeasured:
                return f"not measured: {scores.unmeasured[side]} samples of {side} have an error of the provider or a tool server"
        if not self.right:
            return next((said for each in named if (said := self._find_side_mean_problem(*each, scores))), "")
        (side, check), (base, _) = named
        above, below = scores.means_by_unit(side, check), scores.means_by_unit(base, check)
        if check in MEASURES and self.is_ratio:
            made = _estimate_side_ratio(outcome, base, side, check)
            mean = math.nan if made.ratio is None else made.ratio
            return self._find_bound_problem(mean, made.low, made.high, self.bound, made.pairs)
        factor, threshold = (self.bound, 0.0) if self.is_ratio else (1.0, self.bound)
        spread = max(map(abs, (*above.values(), *below.values())), default=1.0) if check in MEASURES else 1.0
        found = estimate_difference({unit: factor * value for unit, value in below.items()}, above, spread=spread)
        return self._find_bound_problem(found.mean, found.low, found.high, threshold, found.cases)

    def _find_bound_problem(
        self, mean: float, low: float | None, high: float | None, threshold: float, cases: int
    ) -> str:
        """Return why a mean or the end of its interval misses a threshold; ``""`` if it does not."""
        which, value = ("the lower end", low) if self.sign.startswith(">") else ("the upper end", high)
        if self.by_mean:
            which, value = "the mean", mean
        if value is None:
            return f"{cases} cases are too few for a confidence interval, which needs {FEWEST_CASES}; ~{self.sign} compares means"
        if math.isnan(value):
            return "the two sides have no values to compare"
        if COMPARE[self.sign](value, threshold):
            return ""
        return f"{which} is {value:.4g}, not {self.sign} {threshold:g}"

    def _find_side_mean_problem(self, side: str, check: str, scores: Scores) -> str:
        """Return why the mean of a side in a check misses the bound; ``""`` if it does not."""
        values = [*scores.means_by_unit(side, check).values()]
        if not values:
            return f"{side}.{check} has no value"
        mean = fmean(values)
        holds = COMPARE[self.sign](mean, self.bound)
        return "" if holds else f"{side}.{check} is {mean:.4g}, not {self.sign} {self.bound:g}"


def parse_gates(evaluation: Evaluation, more: Iterable[str]) -> list[GateOfScores]:
    """
    Return the gates of an evaluation and *more* gates.

    Raises:
        DataError: when a text is not a gate, or names an agent or a check that does not exist.
    """
    gates = [GateOfScores.parse(str(text)) for text in (*evaluation.gates, *to_tuple(more))]
    for gate in gates:
        gate.get_compared_side_checks(evaluation)
    return gates


def _make_gate_error(text: str) -> DataError:
    """Return the error for a text that is not a gate, with the valid forms."""
    return DataError(f"{text[:MAX_GATE]!r} is not a gate; write one like {FORMS}; ~ before the sign compares means")


def _parse_finite_number(word: str) -> float | None:
    """Return the finite number in a text; ``None`` for other texts."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _require_measure_name(name: str, gate_text: str) -> str:
    """Return *name* if it can name a check or measure; else raise ``DataError`` about the gate."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,200}", name):
        raise _make_gate_error(gate_text)
    return name


def _require_name_with_side(name: str, gate_text: str) -> str:
    """Return a name of the form ``SIDE.CHECK``; raise ``DataError`` for another one."""
    if "." not in _require_measure_name(name, gate_text):
        msg = f"{gate_text!r} is not a gate: {name!r} has no side; write SIDE.{name}"
        raise DataError(msg)
    return name


def _list_checks_and_measures(evaluation: Evaluation) -> list[str]:
    """Return the checks and measures that gates can name."""
    every = [evaluation.get_named_checks(case) for case in evaluation.cases]
    return [PASS, *MEASURES, *dict.fromkeys([name for checks in every for name in checks])]


def _split_side_and_check(name: str, evaluation: Evaluation) -> tuple[str, str]:
    """
    Split a name of a gate into side and check. Both may contain dots, and ``base`` means the first side.

    Raises:
        DataError: when there is no such side or check.
    """
    sides, checks = [*evaluation.agents], _list_checks_and_measures(evaluation)
    for side, called in [*zip(sides, sides, strict=True), (sides[0], "base")]:
        rest = name.removeprefix(f"{called}.")
        if rest != name and rest in checks:
            return side, rest
    msg = (
        f"the gate has an unknown name {name!r}; sides: {list_names(sides, name)}; measures: {list_names(checks, name)}"
    )
    raise DataError(msg)
