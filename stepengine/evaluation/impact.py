"""
``impact``: the effect of a change of an agent on recorded runs.

Each run is first replayed, which costs nothing. If the current code reaches the same end, nothing changes. Where a request or the
handler differs, the run is forked several times. Models are called again, and by default the record answers tool calls. The tool
choices, cost and end of these samples are compared with the record.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from statistics import fmean
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.codec import plain
from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunStatus
from stepengine.data.visible import format_count
from stepengine.engine import Engine
from stepengine.errors import DataError, ReplayDivergence, StepEngineError
from stepengine.evaluation.samples import (
    Confirm,
    CostEstimate,
    Course,
    Models,
    confirm_cost_and_get_budget,
    fork_sample,
    format_dollars,
    run_concurrently,
    sum_costs,
    summarize_run_from,
)
from stepengine.evaluation.statistics import (
    COMPARE,
    Estimate,
    Ratio,
    estimate_difference,
    estimate_geometric_mean_ratio,
    estimate_mean,
    estimate_rate,
)
from stepengine.journal import ForkReport, Journal, JournalLike, SharedBudget, as_journal
from stepengine.journal.divergence import FieldDifference
from stepengine.journal.history import History
from stepengine.journal.recorded_part import parse_address

FORMAT = "stepengine.impact/1"
SAME, ASKED, HANDLER, UNREADABLE = "same", "asked", "handler changed", "unreadable"
END = "#-1"
"""The address of a difference that is only in the end of the run."""


@frozen
class RepeatedJournal:
    """
    A journal that was replayed with the current code.

    Attributes:
        file: Its name.
        kind: ``"same"``, ``"asked"`` (a request differs first), ``"handler changed"`` (something else does), ``"unreadable"``.
        journal: The journal; ``None`` for one that cannot be read.
        broke_at: The first effect that differs; ``""`` for none.
        step: The step that it belongs to.
        difference: What differs there.
        message: A description of the difference, or of the error.
        engine: The engine that replayed it, which performs its samples.
        agent: The current agent of the run; ``None`` for the engine's agent with the recorded id.
    """

    file: str
    kind: str
    journal: Journal | None = None
    broke_at: str = ""
    step: int = 0
    difference: tuple[FieldDifference, ...] = ()
    message: str = ""
    engine: Engine | None = attrs.field(default=None, eq=False, repr=False)
    agent: AgentDefinition | None = attrs.field(default=None, eq=False, repr=False)

    @property
    def needs_model_calls(self) -> bool:
        """Whether models are called again: not for an unreadable journal, nor where nothing or only the end differs."""
        return self.kind in (ASKED, HANDLER) and self.broke_at != END


async def replay_to_first_difference(
    engine: Engine, file: str, journal: Journal, agent: AgentDefinition | None = None
) -> RepeatedJournal:
    """Replay *journal* with the current code, and return its first difference; nothing is performed."""
    try:
        result = await engine.replay(journal, agent=agent, on_divergence="stop")
        if isinstance(result.error, ReplayDivergence):
            found = _make_repeated_journal(file, journal, journal.history(), result.error)
            return attrs.evolve(found, engine=engine, agent=agent)
    except StepEngineError as error:
        return RepeatedJournal(file, UNREADABLE, message=error.message)
    return RepeatedJournal(file, SAME, journal, engine=engine, agent=agent)


def _make_repeated_journal(file: str, journal: Journal, history: History, error: ReplayDivergence) -> RepeatedJournal:
    """Return a journal with the first difference that its replay found."""
    known = history.intents.get(parse_address(error.address))
    by_request = error.kind == "changed" and known is not None and known.type == "model_call"
    fields = tuple([FieldDifference(*field) for field in error.diff])
    said = error.message.partition("\n")[0]
    return RepeatedJournal(file, ASKED if by_request else HANDLER, journal, error.address, error.step, fields, said)


def estimate_impact_cost(repeated_journals: Sequence[RepeatedJournal], n: int) -> CostEstimate:
    """Return the estimated model calls and cost of *n* samples of each journal."""
    parts = [
        summarize_run_from(one.journal.history(), one.broke_at)
        for one in repeated_journals
        if one.needs_model_calls and one.journal is not None
    ]
    calls = n * sum(part.steps for part in parts)
    cost = sum_costs([part.cost for part in parts])
    return CostEstimate(calls, None, None) if cost is None else CostEstimate(calls, n * cost, 2 * n * cost)


@frozen
class ForkSample:
    """
    A fork, compared with its recorded run.

    Attributes:
        course: The course of the fork from the first difference on.
        changed: Whether the first reply called other tools or used other inputs; texts are not compared.
        output_equal: Whether the fork ended with the recorded status and output.
        report: The report of the fork.
    """

    course: Course
    changed: bool
    output_equal: bool
    report: ForkReport

    @property
    def has_left_record(self) -> bool:
        """Whether a call differs from the record, so that the rest of the run is unknown."""
        return self.report.refused is not None

    @property
    def has_failed(self) -> bool:
        """Whether the forked run failed by itself."""
        return not self.has_left_record and self.course.status == RunStatus.FAILED.value


@frozen
class Judged:
    """A journal with its samples, and with samples of the old agent if they were requested."""

    found: RepeatedJournal
    recorded: Course | None = None
    samples: tuple[ForkSample, ...] = ()
    baseline: tuple[ForkSample, ...] = ()

    def share_of_samples(self, attribute: str, *, of_baseline: bool = False) -> float | None:
        """Return the share of samples whose *attribute* is true; 0 if no model was called, ``None`` without samples."""
        if not self.found.needs_model_calls:
            return 0.0
        samples = self.baseline if of_baseline else self.samples
        return fmean([getattr(each, attribute) for each in samples]) if samples else None

    def get_old_and_new_value(self, measure: str) -> tuple[float | None, float | None]:
        """Return cost, steps or tokens of the old agent or the record, and their mean over new samples that follow the record."""
        if self.recorded is None:
            return None, None
        before = (
            _mean_within_record(self.baseline, measure)
            if self.baseline
            else _float_or_none(getattr(self.recorded, measure))
        )
        return before, _mean_within_record(self.samples, measure)


def _mean_within_record(samples: Sequence[ForkSample], measure: str) -> float | None:
    """Return the mean of a measure over samples that follow the record; ``None`` if one of its values is unknown."""
    values = [_float_or_none(getattr(each.course, measure)) for each in samples if not each.has_left_record]
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _float_or_none(value: Any) -> float | None:
    """Return a number as float; ``None`` unchanged."""
    return None if value is None else float(value)


@frozen
class Impact:
    """
    The effect of a change on recorded runs.

    Attributes:
        agent: The agent's id.
        n: The number of samples of each run.
        tools: Which calls were performed; see ``Engine.fork``.
        journals: The runs.
        spent: The cost in US dollars; ``None`` if it is unknown.
        stopped: The reason why the report is incomplete; ``""`` if it is complete.
    """

    agent: str
    n: int
    tools: str
    journals: tuple[Judged, ...]
    spent: Decimal | None
    stopped: str = ""

    @property
    def has_baseline(self) -> bool:
        """Whether the old agent was sampled, too."""
        return any(one.baseline for one in self.journals)

    def estimate_rate(self, attribute: str) -> Estimate:
        """Return the share of samples whose *attribute* is true, as mean over the runs; with a baseline, the difference to it."""
        # By number: journals may have equal names, such as all in memory.
        runs = {
            str(number): one.share_of_samples(attribute)
            for number, one in enumerate(self.journals)
            if one.found.kind != UNREADABLE
        }
        now = {number: share for number, share in runs.items() if share is not None}
        if not self.has_baseline:
            return (
                estimate_rate([bool(share) for share in now.values()])
                if self.n == 1
                else estimate_mean([*now.values()])
            )
        base = {str(i): one.share_of_samples(attribute, of_baseline=True) for i, one in enumerate(self.journals)}
        return estimate_difference({number: share for number, share in base.items() if share is not None}, now)

    def estimate_ratio(self, measure: str) -> Ratio:
        """Return the ratio of new to old cost, steps or tokens, from the first difference on."""
        return estimate_geometric_mean_ratio(
            [one.get_old_and_new_value(measure) for one in self.journals if one.samples]
        )

    def values(self) -> dict[str, float | None]:
        """Return the values that gates can compare."""
        changed, left, failed = [self.estimate_rate(what) for what in ("changed", "has_left_record", "has_failed")]
        ratios = {what: self.estimate_ratio(what).ratio for what in ("cost", "steps", "tokens")}
        return {"changed": changed.mean, "left": left.mean, "failed": failed.mean, **ratios}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON; money is text, and unknown values are ``None``."""
        changed, cost = self.estimate_rate("changed"), self.estimate_ratio("cost")
        return {
            "format": FORMAT,
            "agent": self.agent,
            "n": self.n,
            "tools": self.tools,
            "baseline": self.has_baseline,
            "journals": [_judged_to_json(one) for one in self.journals],
            "summary": {
                "changed": _nan_to_none(changed.mean),
                "low": changed.low,
                "high": changed.high,
                "left": _nan_to_none(self.estimate_rate("has_left_record").mean),
                "failed": _nan_to_none(self.estimate_rate("has_failed").mean),
                "cost_ratio": cost.ratio,
                "cost_low": cost.low,
                "cost_high": cost.high,
            },
            "spent": None if self.spent is None else str(self.spent),
            "stopped": self.stopped or None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the report as lines of text."""
        asked = [one for one in self.journals if one.samples]
        left = [one for one in asked if any(each.has_left_record for each in one.samples)]
        if asked and 2 * len(left) > len(asked):
            yield "mostly unknown: most of the repeated runs left the record; use --tools idempotent, or `stepengine eval`"
        yield f"{format_count(len(self.journals), 'journal')}: {self._describe_journal_counts()}"
        if asked:
            yield from self._describe_findings(left)
        yield f"spent {format_dollars(self.spent)}" + (f"; stopped: {self.stopped}" if self.stopped else "")

    def _describe_journal_counts(self) -> str:
        """Return how many journals had each result of the replay, as text."""
        counts = Counter([_describe_replay_result(one.found) for one in self.journals])
        return ", ".join([f"{number} {what}" for what, number in {"unchanged": 0, **counts}.items()])

    def _describe_findings(self, left_record: Sequence[Judged]) -> Iterator[str]:
        """Yield lines about changed decisions, status, output and costs of the new samples."""
        changed, number = (
            self.estimate_rate("changed"),
            len([one for one in self.journals if one.found.kind != UNREADABLE]),
        )
        if self.has_baseline and math.isnan(changed.mean):
            yield "whether the choice of tools changed is unknown: no run has samples of both agents"
        elif self.has_baseline:
            yield f"the choice of tools changed {_format_signed_interval(changed)} more often than the old agent's own noise"
        else:
            runs = sum((one.share_of_samples("changed") or 0) >= 0.5 for one in self.journals)  # noqa: PLR2004 - most of the samples
            yield f"{runs} of {number} chose another tool in most samples ({_format_rate_interval(changed)})"
        calls = [each.report.refused for one in left_record for each in one.samples if each.report.refused is not None]
        if calls:
            called = f"{calls[0].name} {json.dumps(plain(calls[0].input), ensure_ascii=False)}"
            yield f"{len(left_record)} left the record: {called}"
        failed = self.estimate_rate("has_failed")
        if self.has_baseline and not math.isnan(failed.mean):
            yield f"failed {_format_signed_interval(failed)} more often than the old agent"
        else:
            yield f"failed: {_format_rate_interval(failed)}"
        than = "the repeated old agent" if self.has_baseline else "the record"
        ratios = [f"{what} {_format_ratio_change(self.estimate_ratio(what))}" for what in ("cost", "steps", "tokens")]
        yield f"from the first difference on, against {than}: {', '.join(ratios)}"
        performed = sum(each.report.performed for one in self.journals for each in one.samples)
        served = sum(each.report.served for one in self.journals for each in one.samples)
        yield f"tool calls: {served} answered from the record, {performed} performed live"
        if not self.has_baseline:
            yield "model noise is not subtracted (--baseline repeats the runs with the old agent to measure it)"


def _describe_replay_result(repeated: RepeatedJournal) -> str:
    """Return the result of a replay in words: unchanged, unreadable, or where it differs."""
    if repeated.kind == SAME:
        return "unchanged"
    if repeated.kind == UNREADABLE:
        return UNREADABLE
    if repeated.broke_at == END:
        return "with a different end"
    return f"repeated from step {repeated.step}" if repeated.kind == ASKED else "with a different handler"


def _format_rate_interval(estimate: Estimate) -> str:
    """Return a rate in percent with its interval; ``"unknown"`` without one."""
    if math.isnan(estimate.mean):
        return "unknown"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:.0%}, too few runs for an interval"
    return f"{estimate.mean:.0%}, {estimate.low * 100:.0f}-{estimate.high:.0%}"


def _format_signed_interval(estimate: Estimate) -> str:
    """Return a difference of rates in percent with its sign and interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.mean:+.0%} (too few runs for an interval)"
    return f"{estimate.mean:+.0%} ({estimate.low * 100:+.0f} to {estimate.high:+.0%})"


def _format_ratio_change(ratio: Ratio) -> str:
    """Return the change of a ratio in percent with its sign and interval; ``"unknown"`` without one."""
    if ratio.ratio is None:
        return "unknown"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.ratio - 1:+.0%}"
    return f"{ratio.ratio - 1:+.0%} ({(ratio.low - 1) * 100:+.0f} to {ratio.high - 1:+.0%})"


def _nan_to_none(value: float) -> float | None:
    """Return a number; ``None`` for NaN."""
    return None if math.isnan(value) else value


def _judged_to_json(judged: Judged) -> dict[str, object]:
    """Return a journal with its samples as JSON."""
    found = judged.found
    return {
        "file": found.file,
        "class": found.kind,
        "break": found.broke_at or None,
        "step": found.step or None,
        "difference": [field._asdict() for field in found.difference],
        "message": found.message or None,
        "samples": [_sample_to_json(each) for each in judged.samples],
        "baseline": [_sample_to_json(each) for each in judged.baseline],
    }


def _sample_to_json(sample: ForkSample) -> dict[str, object]:
    """Return a sample as JSON: status, course, cost and refused calls."""
    course, report = sample.course, sample.report
    head = report.journal.history().head
    refused = report.refused
    return {
        "status": "unknown" if sample.has_left_record else course.status,
        "decision": None if course.decision is None else [{"tool": t, "input": given} for t, given in course.decision],
        "changed": sample.changed,
        "tools": list(course.tools),
        "output_equal": None if sample.has_left_record else sample.output_equal,
        "steps": course.steps,
        "tokens": course.tokens,
        "cost": None if course.cost is None else str(course.cost),
        "served": report.served,
        "performed": report.performed,
        "refused": None if refused is None else {"tool": refused.name, "input": plain(refused.input)},
        "reused": report.reused,
        "journal": None if head is None else head.run,
    }


# --- asking ---------------------------------------------------------------------------------------------------------


async def impact(
    engine: Engine,
    journals: Sequence[RepeatedJournal | JournalLike],
    *,
    agent: AgentDefinition | None = None,
    old: AgentDefinition | None = None,
    n: int = 5,
    budget: SharedBudget | None = None,
    models: Models | None = None,
    confirm: Confirm | None = None,
    **options: Any,
) -> Impact:
    """
    Call models again from the first difference of each run on, and compare the new samples with the record.

    Args:
        engine: The engine that performs the runs.
        journals: The runs, or the results of ``replay_to_first_difference`` for them, which are performed by their own engines.
        agent: The current agent; by default the engine's agent with the recorded id.
        old: The agent before the change. It gets as many samples from the same effect, and the report compares with them.
        n: The number of samples of each run; 5 by default.
        budget: The budget; unlimited by default.
        models: Creates the models of each sample, in place of the engine's.
        confirm: Called with the estimated cost before models are called. It raises to refuse, and may return the budget.
        options: ``tools``, ``simulate`` and ``reuse``, as for ``Engine.fork``.

    Raises:
        DataError: when *n* is not above 0.
        StepEngineError: when a model cannot be called, such as for a missing key.
    """
    if n < 1:
        msg = f"n is {n}; it must be at least 1"
        raise DataError(msg)
    found = [
        one
        if isinstance(one, RepeatedJournal)
        else await replay_to_first_difference(engine, (journal := as_journal(one)).name, journal, agent)
        for one in journals
    ]
    money = await confirm_cost_and_get_budget(
        confirm, partial(estimate_impact_cost, found, n * (1 if old is None else 2)), budget
    )
    ask = partial(fork_sample, budget=money, models=models, **options)
    asked = [one for one in found if one.needs_model_calls]
    made_by = [(partial(ask, one.engine or engine), one) for one in asked for _ in range(n)]
    new = [partial(_fork_and_compare, own, one, agent=one.agent or agent) for own, one in made_by]
    before = [partial(_fork_and_compare, own, one, agent=old, is_old=True) for own, one in made_by] if old else []
    # A sample and its baseline are made one after the other, so that a budget that ends early leaves pairs.
    made = await run_concurrently(
        [work for pair in (zip(new, before, strict=True) if old else zip(new, strict=True)) for work in pair]
    )
    now, was = (made[::2], made[1::2]) if old else (made, [])
    judged: list[Judged] = []
    for one in found:
        if not one.needs_model_calls or one.journal is None:
            judged.append(Judged(one))
            continue
        start = next(i for i, each in enumerate(asked) if each is one) * n
        mine = [tuple([each for each in some[start : start + n] if each is not None]) for some in (now, was)]
        judged.append(Judged(one, summarize_run_from(one.journal.history(), one.broke_at), *mine))
    agents = [_get_current_or_recorded_agent_id(one, agent) for one in found if one.journal is not None]
    stopped = "the budget is spent; unfinished samples are left out" if money.is_empty else ""
    tools = str(options.get("tools", "recorded"))
    return Impact(", ".join(dict.fromkeys(agents)), n, tools, tuple(judged), money.spent_if_known, stopped)


def _get_current_or_recorded_agent_id(repeated: RepeatedJournal, agent: AgentDefinition | None) -> str:
    """Return the id of the journal's current agent, else of *agent*, else the recorded id; ``""`` without a journal."""
    known = repeated.agent or agent
    if known is not None:
        return known.id
    return "" if repeated.journal is None else str(repeated.journal.history().root["agent_id"])


async def _fork_and_compare(
    fork: Callable[..., Any], repeated: RepeatedJournal, *, agent: AgentDefinition | None, is_old: bool = False
) -> ForkSample | None:
    """
    Fork a run at its first difference with new model calls, and compare the fork with the record; return ``None`` if it could not fork.

    Returns:
        ``None`` if the budget does not suffice, or the old agent does not reach the difference.
    """
    assert repeated.journal is not None  # noqa: S101 - a run that is asked was read
    if is_old and parse_address(repeated.broke_at) not in repeated.journal.history().intents:
        return None  # the old agent does nothing there
    place = {"at": repeated.broke_at, "reuse": False} if is_old else {}
    report: ForkReport | None = await fork(repeated.journal, agent=agent, **place)
    if report is None:
        return None
    before = repeated.journal.history()
    now = report.journal.history()
    recorded, course = (
        summarize_run_from(before, repeated.broke_at),
        summarize_run_from(now, report.broke_at or repeated.broke_at),
    )
    if not now.is_complete:
        course = attrs.evolve(course, status=report.result.status.value)
    equal = (recorded.status, recorded.output) == (course.status, course.output)
    # Without a model call in one of them there is no choice to compare.
    changed = None not in (recorded.decision, course.decision) and recorded.decision != course.decision
    return ForkSample(course, changed, equal, report)


# --- gates ----------------------------------------------------------------------------------------------------------

GATE = re.compile(r"\s*([a-z]+)\s*(<=|>=|<|>)\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*")
NAMES = ("changed", "left", "failed", "cost", "steps", "tokens")


@frozen
class ImpactGate:
    """A condition on a report, such as ``changed > 0.1``: a share of samples, or for cost, steps and tokens a ratio."""

    name: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> ImpactGate:
        """
        Parse a gate.

        Raises:
            DataError: when it is not such a condition.
        """
        found = GATE.fullmatch(text[:100])
        if found is None or found[1] not in NAMES:
            names = list_names(NAMES, text[:100].split(" ", maxsplit=1)[0])
            msg = f"{text[:100]!r} is not a condition; write a name, a sign and a number, such as 'changed > 0.1'. Names: {names}"
            raise DataError(msg)
        return cls(found[1], found[2], float(found[3]))

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Return whether the condition is true; False if the value is unknown."""
        value = values[self.name]
        return value is not None and COMPARE[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.bound:g}"
