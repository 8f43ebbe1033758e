"""
``blame``: the step at which a run that failed lost its chance to succeed.

Each model step is asked anew several times, from the record up to its request on. While the step that spoiled the run is
still ahead, runs mostly succeed; once it stands in the record, they mostly fail. Blamed is the last step before that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunStatus
from stepengine.engine import Engine
from stepengine.errors import DataError
from stepengine.evaluation.checks import Check
from stepengine.evaluation.samples import Models, at_once, course_from, model_calls, sample, shown_dollars
from stepengine.evaluation.statistics import wilson
from stepengine.journal import ForkReport, Journal, Purse
from stepengine.journal.history import History
from stepengine.journal.replayer import address_of

__all__ = ("Blame", "Blamed", "RetriedStep", "blame", "change_point", "expected_calls")

FORMAT = "stepengine.blame/1"
MOST_STEPS = 12
"""With more model steps than these they are searched by halves."""
LIKELY = 1.92
"""How much less likely, as a logarithm, a change may be at another step that is still named: 95 % of the likelihood."""


@frozen
class RetriedStep:
    """
    A model step, asked anew.

    Attributes:
        index: Its number among the model steps of the whole run, from 1.
        step: The step of the root that it belongs to, as ``stepengine show`` numbers them.
        address: Its model call.
        ok: How many runs from there passed.
        failed: How many did not.
        unknown: How many left the record, waited for an answer, or could not be paid.
        tool: The tool that most of those called which left the record.
    """

    index: int
    step: int
    address: str
    ok: int = 0
    failed: int = 0
    unknown: int = 0
    tool: str = ""

    @property
    def known(self) -> int:
        """How many runs from there came to an end."""
        return self.ok + self.failed

    @property
    def rate(self) -> float | None:
        """How many of those passed."""
        return self.ok / self.known if self.known else None

    @property
    def is_measurable(self) -> bool:
        """Whether at least half of the runs came to an end."""
        return self.known > 0 and self.unknown <= self.known

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        low, high = wilson(self.ok, self.known)
        counts = {"ok": self.ok, "failed": self.failed, "unknown": self.unknown}
        return {"step": self.step, "address": self.address, **counts, "rate": self.rate, "low": low, "high": high}


@frozen
class Blamed:
    """
    The step to blame, and its neighbours that may be.

    Attributes:
        step: The most likely one.
        first: The first that is likely.
        last: The last that is likely.
    """

    step: RetriedStep
    first: RetriedStep
    last: RetriedStep

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        ends = {"first": self.first.step, "last": self.last.step}
        return {"step": self.step.step, "address": self.step.address, **ends}


@frozen
class Blame:
    """
    What asking anew has shown.

    Attributes:
        check: What the run was to do.
        k: How many runs there were from each step.
        steps: The steps that were tried, in order.
        blamed: The one to blame; ``None`` when none is.
        why: Why, in a sentence.
        spent: What it cost in US dollars; ``None`` when that is unknown.
        performed: How many tool calls were performed in the world of today.
        stopped: Why it is not complete; ``""`` when it is.
    """

    check: str
    k: int
    steps: tuple[RetriedStep, ...]
    blamed: Blamed | None
    why: str
    spent: Decimal | None
    performed: int = 0
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; money is text, and what is unknown is ``None``."""
        return {
            "format": FORMAT,
            "check": self.check,
            "k": self.k,
            "steps": [step.to_json() for step in self.steps],
            "blamed": None if self.blamed is None else self.blamed.to_json(),
            "why": self.why,
            "performed": self.performed,
            "spent": None if self.spent is None else str(self.spent),
            "stopped": self.stopped or None,
        }

    def lines(self) -> Iterator[str]:
        """Give it as lines of text: a row for each step, then what follows from them."""
        width = max([8, *[len(step.address) for step in self.steps]])
        for step in self.steps:
            low, high = wilson(step.ok, step.known)
            rate = "not measurable" if not step.is_measurable else f"{step.ok} of {step.known} pass"
            odd = f", {step.unknown} unknown" + (f" (called {step.tool})" if step.tool else "") if step.unknown else ""
            mark = " <- blamed" if self.blamed is not None and self.blamed.step == step else ""
            yield f"step {step.step:>3}  {step.address:<{width}} {rate}{odd}  {low:.0%}-{high:.0%}{mark}"
        yield self.why
        done = f"; {self.performed} tool calls were performed in the world of today" if self.performed else ""
        yield f"spent {shown_dollars(self.spent)}{done}" + (f"; stopped: {self.stopped}" if self.stopped else "")


def change_point(counts: Sequence[tuple[int, int]]) -> tuple[int, int, int] | None:
    """
    Return where a rate falls: how many of *counts* stand before the most likely place, and before the first and last likely one.

    Args:
        counts: For each step in order how many runs passed, and how many came to an end.

    Returns:
        ``None`` where the rates before and after do not differ more than chance explains: their Wilson intervals overlap.
    """
    likely: dict[int, float] = {}
    for place in range(1, len(counts)):
        before, after = _sum_counts(counts[:place]), _sum_counts(counts[place:])
        if before[1] and after[1] and before[0] / before[1] > after[0] / after[1]:
            likely[place] = _likelihood(*before) + _likelihood(*after)
    if not likely:
        return None
    best = max(likely, key=lambda place: likely[place])
    if wilson(*_sum_counts(counts[:best]))[0] <= wilson(*_sum_counts(counts[best:]))[1]:
        return None
    near = [place for place, value in likely.items() if value >= likely[best] - LIKELY]
    return best, min(near), max(near)


def _sum_counts(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    passed = known = 0
    for ok, of in counts:
        passed, known = passed + ok, known + of
    return passed, known


def _likelihood(passed: int, known: int) -> float:
    parts = ((passed, passed / known), (known - passed, 1 - passed / known))
    return sum(number * math.log(share) for number, share in parts if number)


def expected_calls(journal: Journal, k: int, steps: tuple[int, int] | None = None) -> tuple[int, Decimal | None]:
    """Return about how many model calls blaming will take, and what they cost as recorded; ``None`` when that is unknown."""
    history = journal.history()
    chosen = _select_steps(model_calls(history), steps)
    # What follows a step is added up for each of them anew: of many steps some tell enough.
    looked_at = chosen[:: max(1, -(-len(chosen) // MOST_STEPS))]
    courses = [course_from(history, address) for address in looked_at]
    # By halves: the first step, each middle, and twice as often the four at the place.
    tried = len(chosen) if len(chosen) <= MOST_STEPS else 9 + len(chosen).bit_length()
    share = tried / len(looked_at) if looked_at else 0.0
    costs = [course.cost for course in courses]
    cost = None if None in costs else sum([c for c in costs if c is not None], Decimal(0)) * k
    calls = round(sum(course.steps for course in courses) * k * share)
    return calls, None if cost is None else cost * Decimal(str(round(share, 4)))


def _select_steps(addresses: Sequence[str], steps: tuple[int, int] | None) -> list[str]:
    if steps is None:
        return [*addresses]
    first, last = steps
    if not 1 <= first <= last <= len(addresses):
        msg = f"the steps are {first}:{last}; the run has the model steps 1:{len(addresses)}"
        raise DataError(msg)
    return [*addresses[first - 1 : last]]


async def blame(
    engine: Engine,
    journal: Journal,
    check: Check,
    *,
    agent: AgentDefinition | None = None,
    k: int = 8,
    steps: tuple[int, int] | None = None,
    purse: Purse | None = None,
    models: Models | None = None,
    **options: Any,
) -> Blame:
    """
    Find the step at which the chance to pass *check* falls.

    Args:
        engine: What runs are performed with.
        journal: A run that does not pass.
        check: What it was to do.
        agent: Its agent as it is now; by default the engine's of the recorded id.
        k: How many runs from each step.
        steps: The first and the last model step to try, from 1; by default all.
        purse: What may be spent; without bound by default.
        models: Gives the models of each run, in place of the engine's.
        options: ``tools`` and ``simulate``, as for ``Engine.fork``; tools that may be repeated are performed by default.

    Raises:
        DataError: when *k* is not above 0, there are no such steps, or the check itself fails.
        ReplayDivergence: when the record does not fit the code.
    """
    if k < 1:
        msg = f"k is {k}; each step has to be asked at least once"
        raise DataError(msg)
    money = purse or Purse()
    options.setdefault("tools", "idempotent")
    recorded = await engine.replay(journal, agent=agent)
    if check.of(recorded).passed:
        return Blame(check.text, k, (), None, "this run passes, so that no step is to blame", money.known)
    history = journal.history()
    chosen = _select_steps(model_calls(history), steps)
    if not chosen:
        return Blame(check.text, k, (), None, "this run asked no model, so that no step is to blame", money.known)
    first = 1 if steps is None else steps[0]
    search = _BlameSearch(
        [RetriedStep(index, step, a) for index, (step, a) in enumerate(zip(_root_steps(history, chosen), chosen, strict=True), first)],
        partial(sample, engine, journal, purse=money, models=models, agent=agent, reuse=False,
                **options),
        check, k,
    )  # fmt: skip
    await search.run()
    tried = tuple([search.steps[i] for i in sorted(search.tried)])
    found = change_point([*[(s.ok, s.known) for s in tried if s.is_measurable], (0, k)])
    measurable = [step for step in tried if step.is_measurable]
    blamed = None if found is None else Blamed(*[measurable[place - 1] for place in found])
    why = _why(tried, blamed, str(options["tools"]))
    stopped = "the budget is spent; what is not finished is left out" if money.is_empty else ""
    return Blame(check.text, k, tried, blamed, why, money.known, search.performed, stopped)


def _root_steps(history: History, addresses: Iterable[str]) -> Iterator[int]:
    """Give the steps of the root in which model calls of it or of its children were made."""
    calls = sorted([seq for (path, seq), intent in history.intents.items() if not path and intent.type == "model_call"])
    for path, seq in map(address_of, addresses):
        yield bisect_right(calls, int(path.partition(".")[0]) if path else seq)


def _why(tried: Sequence[RetriedStep], blamed: Blamed | None, tools: str) -> str:
    if blamed is not None:
        step = blamed.step
        if blamed.first == blamed.last:
            return f"the chance to pass falls with step {step.step} ({step.address})"
        return (
            f"the chance to pass falls in steps {blamed.first.step} to {blamed.last.step} "
            f"({blamed.first.address} to {blamed.last.address}), most likely with step {step.step} ({step.address})"
        )
    lost = [step for step in tried if not step.is_measurable]
    if lost and 2 * len(lost) >= len(tried):
        tool = next((step.tool for step in lost if step.tool), "")
        hint = (
            "--simulate MODULE:FN makes up its results" if tools != "recorded" else "--tools idempotent may perform it"
        )
        waits = "most runs wait for an answer that is not recorded, or were not paid for"
        return f"not measurable: {f'most runs call {tool} as nobody recorded it; {hint}' if tool else waits}"
    passed, known = _sum_counts([(step.ok, step.known) for step in tried])
    return f"no step is to blame: {passed} of {known} runs pass, wherever they begin"


class _BlameSearch:
    """
    Asks the steps anew that have to be.

    Args:
        steps: The steps.
        again: Runs the journal again, given ``at=``.
        check: What a run has to do.
        k: How many runs from each step.
    """

    def __init__(
        self, steps: Sequence[RetriedStep], again: Callable[..., Awaitable[ForkReport | None]], check: Check, k: int
    ) -> None:
        self.steps = [*steps]
        self.tried: set[int] = set()
        self.performed = 0
        self._again = again
        self._check = check
        self._k = k

    async def run(self) -> None:
        """Try all steps; of many those that halving leads to, and twice as often those beside the place."""
        last = len(self.steps) - 1
        if last < MOST_STEPS:
            await self._try(range(last + 1), self._k)
            return
        await self._try([0], self._k)
        low, high = 0, last + 1  # from `low` on runs pass as from the start, from `high` on they do not
        start = self.steps[0].rate or 0.0
        while high - low > 1:
            middle = (low + high) // 2
            await self._try([middle], self._k)
            rate = self.steps[middle].rate
            low, high = (middle, high) if rate is not None and rate > start / 2 else (low, middle)
        await self._try([place for place in (low - 1, low, high, high + 1) if 0 <= place <= last], 2 * self._k)

    async def _try(self, places: Iterable[int], times: int) -> None:
        works = [partial(self._again, at=self.steps[place].address) for place in places for _ in range(times)]
        given = await at_once(works)
        for number, place in enumerate(places):
            self.tried.add(place)
            self._count(place, given[number * times : (number + 1) * times])

    def _count(self, place: int, reports: Sequence[ForkReport | None]) -> None:
        step, called = self.steps[place], dict[str, int]()
        ok = failed = unknown = 0
        for report in reports:
            if report is None or report.refused is not None or report.result.status is RunStatus.SUSPENDED:
                unknown += 1
                if report is not None and report.refused is not None:
                    called[report.refused.name] = called.get(report.refused.name, 0) + 1
            elif self._check.of(report.result).passed:
                ok += 1
            else:
                failed += 1
            self.performed += 0 if report is None else report.performed
        most: Mapping[str, int] = called
        self.steps[place] = attrs.evolve(
            step,
            ok=step.ok + ok,
            failed=step.failed + failed,
            unknown=step.unknown + unknown,
            tool=max(most, key=lambda name: most[name]) if most else step.tool,
        )
