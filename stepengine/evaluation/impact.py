"""
``impact``: what a change of an agent does to runs that are recorded.

Each run is first repeated for nothing. Where the present code comes to the same end, nothing changes. Where a request or the
handler differs, the run goes on from there several times, with models asked anew and tools answered from the record, and
what it decides, calls, costs and ends with is compared with what it did.
"""

from __future__ import annotations

import json
import math
import re
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
from stepengine.engine import Engine
from stepengine.errors import DataError, ReplayDivergence, StepEngineError
from stepengine.evaluation.samples import Course, Models, at_once, course_from, sample, shown_dollars
from stepengine.evaluation.statistics import Estimate, Ratio, log_ratio, mean_of, paired, rate
from stepengine.journal import ForkReport, Journal, Purse
from stepengine.journal.divergence import Field, fields_between
from stepengine.journal.encoding import comparable
from stepengine.journal.history import History
from stepengine.journal.replayer import address_of
from stepengine.journal.show import ended_of

__all__ = ("Expected", "Impact", "ImpactGate", "RepeatedJournal", "Sample", "expected_of", "first_difference", "impact")

FORMAT = "stepengine.impact/1"
SAME, ASKED, HANDLER, UNREADABLE = "same", "asked", "handler changed", "unreadable"
END = "#-1"
"""The place of a difference that is only in how the run ends."""
FAILED = (RunStatus.FAILED.value,)


@frozen
class RepeatedJournal:
    """
    One journal, repeated by the present code.

    Attributes:
        file: Its name.
        kind: ``"same"``, ``"asked"`` (a request differs first), ``"handler changed"`` (something else does), ``"unreadable"``.
        journal: The journal; ``None`` for one that cannot be read.
        broke_at: The first effect that differs; ``""`` for none.
        step: The step that it belongs to.
        difference: What differs there.
        message: What is to be said of it.
    """

    file: str
    kind: str
    journal: Journal | None = None
    broke_at: str = ""
    step: int = 0
    difference: tuple[Field, ...] = ()
    message: str = ""

    @property
    def is_asked(self) -> bool:
        """Whether models are asked anew: not where nothing differs, or only the end does."""
        return self.kind in (ASKED, HANDLER) and self.broke_at != END


async def first_difference(
    engine: Engine, file: str, journal: Journal, agent: AgentDefinition | None = None
) -> RepeatedJournal:
    """Return where the present code first does something else than *journal* says; nothing is performed."""
    try:
        result = await engine.replay(journal, agent=agent, on_divergence="stop")
        history = journal.history()
        if isinstance(result.error, ReplayDivergence):
            return _find_divergence(file, journal, history, result.error)
        made = None if result.journal is None else ended_of(result.journal.history())
        recorded = ended_of(history)
    except StepEngineError as error:
        return RepeatedJournal(file, UNREADABLE, message=error.message)
    if recorded is None or made is None:
        return RepeatedJournal(file, SAME, journal)
    before, after = [{**comparable(end), "status": end.status.value} for end in (recorded, made)]
    fields = tuple(fields_between(before, after))
    if not fields:
        return RepeatedJournal(file, SAME, journal)
    said = "every effect is as recorded, but the run ends in another way"
    return RepeatedJournal(file, HANDLER, journal, END, result.state.step_index, fields, said)


def _find_divergence(file: str, journal: Journal, history: History, error: ReplayDivergence) -> RepeatedJournal:
    known = history.intents.get(address_of(error.address))
    by_request = error.kind == "changed" and known is not None and known.type == "model_call"
    fields = tuple([Field(*field) for field in error.diff])
    said = error.message.partition("\n")[0]
    return RepeatedJournal(file, ASKED if by_request else HANDLER, journal, error.address, error.step, fields, said)


@frozen
class Expected:
    """
    What asking anew will take, going by what is recorded.

    Attributes:
        calls: How many model calls.
        low: US dollars if they cost what was recorded; ``None`` when that is unknown.
        high: US dollars if they cost twice that.
    """

    calls: int
    low: Decimal | None
    high: Decimal | None


def expected_of(found: Sequence[RepeatedJournal], n: int) -> Expected:
    """Return what *n* samples of each journal will take."""
    calls, cost = 0, Decimal(0)
    is_known = True
    for one in found:
        if one.is_asked and one.journal is not None:
            part = course_from(one.journal.history(), one.broke_at)
            calls += part.steps * n
            is_known = is_known and part.cost is not None
            cost += (part.cost or Decimal(0)) * n
    return Expected(calls, cost if is_known else None, 2 * cost if is_known else None)


@frozen
class Sample:
    """
    One fork, compared with what was recorded.

    Attributes:
        course: What it did from the place on.
        changed: Whether the first reply there called other tools, or with other inputs; texts are not compared.
        output_equal: Whether it ended with the recorded status and output.
        report: How the fork went.
    """

    course: Course
    changed: bool
    output_equal: bool
    report: ForkReport

    @property
    def has_left(self) -> bool:
        """Whether a call left the record, so that nobody knows how the run would have gone on."""
        return self.report.refused is not None

    @property
    def has_failed(self) -> bool:
        """Whether the run failed by itself."""
        return not self.has_left and self.course.status in FAILED


@frozen
class Judged:
    """A journal with its samples, and those of the old agent, if that was asked, too."""

    found: RepeatedJournal
    recorded: Course | None = None
    samples: tuple[Sample, ...] = ()
    baseline: tuple[Sample, ...] = ()

    def share(self, what: Callable[[Sample], bool], *, of_baseline: bool = False) -> float | None:
        """Return how many of the samples do something; nothing changes where nothing was asked."""
        if not self.found.is_asked:
            return 0.0
        samples = self.baseline if of_baseline else self.samples
        return fmean([what(each) for each in samples]) if samples else None

    def ratio(self, what: str) -> tuple[float | None, float | None]:
        """Return cost, steps or tokens as recorded, or of the old agent, and their mean now; those that left do not count."""
        if self.recorded is None:
            return None, None
        before = _mean_of(self.baseline, what) if self.baseline else _number(getattr(self.recorded, what))
        return before, _mean_of(self.samples, what)


def _mean_of(samples: Sequence[Sample], what: str) -> float | None:
    values = [_number(getattr(each.course, what)) for each in samples if not each.has_left]
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


@frozen
class Impact:
    """
    What a change does to recorded runs.

    Attributes:
        agent: The agent's id.
        n: How many samples there were of each run.
        tools: Which calls were performed; see ``Engine.fork``.
        journals: The runs.
        spent: What it cost in US dollars; ``None`` when that is unknown.
        stopped: Why it is not complete; ``""`` when it is.
    """

    agent: str
    n: int
    tools: str
    journals: tuple[Judged, ...]
    spent: Decimal | None
    stopped: str = ""

    @property
    def has_baseline(self) -> bool:
        """Whether the old agent was asked, too."""
        return any(one.baseline for one in self.journals)

    def rate_of(self, what: Callable[[Sample], bool]) -> Estimate:
        """Return how often something happens: its mean over the runs, or the difference to the old agent."""
        runs = {one.found.file: one.share(what) for one in self.journals if one.found.kind != UNREADABLE}
        now = {file: share for file, share in runs.items() if share is not None}
        if not self.has_baseline:
            return rate([bool(share) for share in now.values()]) if self.n == 1 else mean_of([*now.values()])
        base = {one.found.file: one.share(what, of_baseline=True) for one in self.journals}
        return paired({file: share for file, share in base.items() if share is not None}, now)

    def ratio_of(self, what: str) -> Ratio:
        """Return how many times as much the runs cost, or take of steps or tokens, from the first difference on."""
        return log_ratio([one.ratio(what) for one in self.journals if one.samples])

    def values(self) -> dict[str, float | None]:
        """Return what a gate may look at."""
        changed, left, failed = [self.rate_of(what) for what in (_has_changed, _has_left, _has_failed)]
        ratios = {what: self.ratio_of(what).ratio for what in ("cost", "steps", "tokens")}
        return {"changed": changed.mean, "left": left.mean, "failed": failed.mean, **ratios}

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON; money is text, and what is unknown is ``None``."""
        changed, cost = self.rate_of(_has_changed), self.ratio_of("cost")
        return {
            "format": FORMAT,
            "agent": self.agent,
            "n": self.n,
            "tools": self.tools,
            "baseline": self.has_baseline,
            "journals": [_journal_json(one) for one in self.journals],
            "summary": {
                "changed": _float(changed.mean),
                "low": changed.low,
                "high": changed.high,
                "left": _float(self.rate_of(_has_left).mean),
                "failed": _float(self.rate_of(_has_failed).mean),
                "cost_ratio": cost.ratio,
                "cost_low": cost.low,
                "cost_high": cost.high,
            },
            "spent": None if self.spent is None else str(self.spent),
            "stopped": self.stopped or None,
        }

    def lines(self) -> Iterator[str]:
        """Give the report as lines of text."""
        asked = [one for one in self.journals if one.samples]
        left = [one for one in asked if any(each.has_left for each in one.samples)]
        if asked and 2 * len(left) > len(asked):
            yield "mostly unknown: most of the runs that were asked again left the record; use --tools idempotent, or eval"
        yield f"{_format_count(len(self.journals), 'journal')}: {self._classes()}"
        if asked:
            yield from self._findings(left)
        yield f"spent {shown_dollars(self.spent)}" + (f"; stopped: {self.stopped}" if self.stopped else "")

    def _classes(self) -> str:
        counts: dict[str, int] = {}
        for one in self.journals:
            counts[_class_of(one.found)] = counts.get(_class_of(one.found), 0) + 1
        return ", ".join([f"{number} {what}" for what, number in {"unchanged": 0, **counts}.items()])

    def _findings(self, left: Sequence[Judged]) -> Iterator[str]:
        changed, number = (
            self.rate_of(_has_changed),
            len([one for one in self.journals if one.found.kind != UNREADABLE]),
        )
        if self.has_baseline and math.isnan(changed.mean):
            yield "whether the choice of tools changed is unknown: no run was asked of both agents"
        elif self.has_baseline:
            yield f"the choice of tools changed {_format_signed(changed)} more often than the old agent's own noise"
        else:
            runs = sum((one.share(_has_changed) or 0) >= 0.5 for one in self.journals)  # noqa: PLR2004 - most of the samples
            yield f"{runs} of {number} chose another tool in most samples ({_percent(changed)})"
        calls = [each.report.refused for one in left for each in one.samples if each.report.refused is not None]
        if calls:
            called = f"{calls[0].name} {json.dumps(plain(calls[0].input), ensure_ascii=False)}"
            yield f"{len(left)} left the record: {called}"
        failed = self.rate_of(_has_failed)
        yield f"{'failed more often' if self.has_baseline else 'failed'}: {_percent(failed)}"
        than = "the old agent asked again" if self.has_baseline else "as recorded"
        ratios = [f"{what} {_change(self.ratio_of(what))}" for what in ("cost", "steps", "tokens")]
        yield f"from the first difference on, against {than}: {', '.join(ratios)}"
        performed = sum(each.report.performed for one in self.journals for each in one.samples)
        served = sum(each.report.served for one in self.journals for each in one.samples)
        yield f"tool calls: {served} answered from the record, {performed} performed in the world of today"
        if not self.has_baseline:
            yield "model noise is not taken out (--baseline compares with the old agent, asked again)"


def _has_changed(each: Sample) -> bool:
    return each.changed


def _has_left(each: Sample) -> bool:
    return each.has_left


def _has_failed(each: Sample) -> bool:
    return each.has_failed


def _class_of(found: RepeatedJournal) -> str:
    if found.kind == SAME:
        return "unchanged"
    if found.kind == UNREADABLE:
        return UNREADABLE
    if found.broke_at == END:
        return "with another end"
    return f"asked again from step {found.step}" if found.kind == ASKED else "with another handler"


def _format_count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _percent(made: Estimate) -> str:
    if math.isnan(made.mean):
        return "unknown"
    if made.low is None or made.high is None:
        return f"{made.mean:.0%}, too few runs for an interval"
    return f"{made.mean:.0%}, {made.low * 100:.0f}-{made.high:.0%}"


def _format_signed(made: Estimate) -> str:
    if made.low is None or made.high is None:
        return f"{made.mean:+.0%} (too few runs for an interval)"
    return f"{made.mean:+.0%} ({made.low * 100:+.0f} to {made.high:+.0%})"


def _change(made: Ratio) -> str:
    if made.ratio is None:
        return "unknown"
    if made.low is None or made.high is None:
        return f"{made.ratio - 1:+.0%}"
    return f"{made.ratio - 1:+.0%} ({(made.low - 1) * 100:+.0f} to {made.high - 1:+.0%})"


def _float(value: float) -> float | None:
    return None if math.isnan(value) else value


def _journal_json(one: Judged) -> dict[str, object]:
    found = one.found
    return {
        "file": found.file,
        "class": found.kind,
        "break": found.broke_at or None,
        "step": found.step or None,
        "difference": [field._asdict() for field in found.difference],
        "message": found.message or None,
        "samples": [_sample_json(each) for each in one.samples],
        "baseline": [_sample_json(each) for each in one.baseline],
    }


def _sample_json(each: Sample) -> dict[str, object]:
    course, report = each.course, each.report
    head = report.journal.history().head
    refused = report.refused
    return {
        "status": "unknown" if each.has_left else course.status,
        "decision": None if course.decision is None else [{"tool": t, "input": given} for t, given in course.decision],
        "changed": each.changed,
        "tools": list(course.tools),
        "output_equal": None if each.has_left else each.output_equal,
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
    found: Sequence[RepeatedJournal],
    *,
    agent: AgentDefinition | None = None,
    old: AgentDefinition | None = None,
    n: int = 5,
    purse: Purse | None = None,
    models: Models | None = None,
    **options: Any,
) -> Impact:
    """
    Ask models anew from the first difference of each run on, and compare.

    Args:
        engine: What runs are performed with.
        found: The runs, as ``first_difference`` gives them.
        agent: The agent as it is now; by default the engine's of the recorded id.
        old: The agent as it was: it is asked again from the same place as often, and what is told is the difference to it.
        n: How many samples of each run.
        purse: What may be spent; without bound by default.
        models: Gives the models of each sample, in place of the engine's.
        options: ``tools``, ``simulate`` and ``reuse``, as for ``Engine.fork``.

    Raises:
        DataError: when *n* is not above 0.
        StepEngineError: what keeps a model from being asked, such as a missing key.
    """
    if n < 1:
        msg = f"n is {n}; at least one sample of each run has to be made"
        raise DataError(msg)
    money = purse or Purse()
    ask = partial(sample, engine, purse=money, models=models, **options)
    asked = [one for one in found if one.is_asked]
    new = [partial(_take_sample, ask, one, agent=agent) for one in asked for _ in range(n)]
    before = [partial(_take_sample, ask, one, agent=old, is_old=True) for one in asked for _ in range(n)] if old else []
    # A sample and its baseline are made one after the other, so that a budget that ends early leaves pairs.
    made = await at_once(
        [work for pair in (zip(new, before, strict=True) if old else zip(new, strict=True)) for work in pair]
    )
    now, was = (made[::2], made[1::2]) if old else (made, [])
    judged: list[Judged] = []
    for one in found:
        if not one.is_asked or one.journal is None:
            judged.append(Judged(one))
            continue
        start = asked.index(one) * n
        mine = [tuple([each for each in some[start : start + n] if each is not None]) for some in (now, was)]
        judged.append(Judged(one, course_from(one.journal.history(), one.broke_at), *mine))
    agents = [str(one.journal.history().root["agent_id"]) for one in found if one.journal is not None]
    stopped = "the budget is spent; what is not finished is left out" if money.is_empty else ""
    tools = str(options.get("tools", "recorded"))
    return Impact(agent.id if agent else next(iter(agents), ""), n, tools, tuple(judged), money.known, stopped)


async def _take_sample(
    ask: Callable[..., Any], one: RepeatedJournal, *, agent: AgentDefinition | None, is_old: bool = False
) -> Sample | None:
    assert one.journal is not None  # noqa: S101 - a run that is asked was read
    if is_old and address_of(one.broke_at) not in one.journal.history().intents:
        return None  # the old agent does nothing there
    place = {"at": one.broke_at, "reuse": False} if is_old else {}
    report: ForkReport | None = await ask(one.journal, agent=agent, **place)
    if report is None:
        return None
    before = one.journal.history()
    now = report.journal.history()
    recorded, course = course_from(before, one.broke_at), course_from(now, report.broke_at or one.broke_at)
    if not now.is_complete:
        course = attrs.evolve(course, status=report.result.status.value)
    equal = (recorded.status, recorded.output) == (course.status, course.output)
    # Where either of them asked no model, nobody chose.
    changed = None not in (recorded.decision, course.decision) and recorded.decision != course.decision
    return Sample(course, changed, equal, report)


# --- gates ----------------------------------------------------------------------------------------------------------

GATE = re.compile(r"\s*([a-z]+)\s*(<=|>=|<|>)\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*")
COMPARED: Mapping[str, Callable[[float, float], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
NAMES = ("changed", "left", "failed", "cost", "steps", "tokens")


@frozen
class ImpactGate:
    """A condition on a report, such as ``changed > 0.1``: a share of samples, or for cost, steps and tokens a ratio."""

    name: str
    sign: str
    bound: float

    @classmethod
    def parsed(cls, text: str) -> ImpactGate:
        """
        Return what *text* says.

        Raises:
            DataError: when it is not such a condition.
        """
        found = GATE.fullmatch(text[:100])
        if found is None or found[1] not in NAMES:
            msg = f"{text[:100]!r} is no condition; one is a name, a sign and a number, such as 'changed > 0.1'. Names: {list_names(NAMES, text[:100].split(' ', maxsplit=1)[0])}"
            raise DataError(msg)
        return cls(found[1], found[2], float(found[3]))

    def holds(self, values: Mapping[str, float | None]) -> bool:
        """Return whether it holds; not for what is unknown."""
        value = values[self.name]
        return value is not None and COMPARED[self.sign](value, self.bound)

    def __str__(self) -> str:
        return f"{self.name} {self.sign} {self.bound:g}"
