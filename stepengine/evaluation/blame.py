"""
``blame``: finds the step at which a failed run lost its chance to pass.

The run is forked several times at each model step: the record answers up to the step, and its model call is made again. Forks at or
before the bad step mostly pass, since they repeat it. Forks after it mostly fail, since its recorded reply is kept. The last step
before the pass rate falls is blamed.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import attrs
from attrs import frozen

from stepengine.data.definition import AgentDefinition
from stepengine.data.state import RunResult, RunStatus
from stepengine.engine import Engine
from stepengine.errors import DataError
from stepengine.evaluation.checks import Check
from stepengine.evaluation.samples import (
    Confirm,
    CostEstimate,
    Models,
    confirm_cost_and_get_budget,
    finished_model_call_addresses,
    fork_sample,
    format_dollars,
    run_concurrently,
    sum_costs,
    summarize_run_from,
)
from stepengine.evaluation.statistics import wilson_interval
from stepengine.journal import ForkReport, Journal, JournalLike, SharedBudget, as_journal
from stepengine.journal.history import History
from stepengine.journal.recorded_part import parse_address

FORMAT = "stepengine.blame/1"
MOST_STEPS = 12
"""With more model steps, a binary search replaces the repetition of each step."""
LIKELY = 1.92
"""How much less likely, as a logarithm, a change may be at another step that is still named: 95 % of the likelihood."""


@frozen
class RetriedStep:
    """
    A model step that was repeated with new model calls.

    Attributes:
        index: Its number among the model steps of the whole run, from 1.
        step: The number of the root's step that contains it, as in ``stepengine show``.
        address: The address of its model call.
        ok: The number of repeated runs that passed.
        failed: The number of repeated runs that did not pass.
        unknown: The number of runs that left the record, waited for an answer, or were not paid.
        tool: The tool that most of the runs called when they left the record.
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
        """The number of repeated runs that ended."""
        return self.ok + self.failed

    @property
    def rate(self) -> float | None:
        """The share of ended runs that passed; ``None`` if none ended."""
        return self.ok / self.known if self.known else None

    @property
    def is_measurable(self) -> bool:
        """Whether at least half of the repeated runs ended."""
        return self.known > 0 and self.unknown <= self.known

    def to_json(self) -> dict[str, Any]:
        """Return the step as JSON."""
        low, high = wilson_interval(self.ok, self.known)
        counts = {"ok": self.ok, "failed": self.failed, "unknown": self.unknown}
        return {"step": self.step, "address": self.address, **counts, "rate": self.rate, "low": low, "high": high}


@frozen
class Blamed:
    """
    The step at which the pass rate falls, and the steps nearby that are also likely.

    Attributes:
        step: The most likely step.
        first: The first likely step.
        last: The last likely step.
    """

    step: RetriedStep
    first: RetriedStep
    last: RetriedStep

    def to_json(self) -> dict[str, Any]:
        """Return the steps as JSON."""
        ends = {"first": self.first.step, "last": self.last.step}
        return {"step": self.step.step, "address": self.step.address, **ends}


@frozen
class Blame:
    """
    The report of repeating the steps of a run.

    Attributes:
        check: The condition that the run does not meet.
        k: The number of runs from each step.
        steps: The repeated steps, in order.
        blamed: The step at which the pass rate falls; ``None`` if there is none.
        why: The reason for this result, in a sentence.
        spent: The cost in US dollars; ``None`` if it is unknown.
        performed: The number of tool calls that were performed and not served from the record.
        stopped: The reason why the report is incomplete; ``""`` if it is complete.
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
        """Return the report as JSON; money is text, and unknown values are ``None``."""
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
        """Yield the report as lines of text: a row for each step, then the conclusions."""
        width = max([8, *[len(step.address) for step in self.steps]])
        for step in self.steps:
            low, high = wilson_interval(step.ok, step.known)
            rate = "not measurable" if not step.is_measurable else f"{step.ok} of {step.known} pass"
            odd = f", {step.unknown} unknown" + (f" (called {step.tool})" if step.tool else "") if step.unknown else ""
            mark = " <- blamed" if self.blamed is not None and self.blamed.step == step else ""
            yield f"step {step.step:>3}  {step.address:<{width}} {rate}{odd}  {low:.0%}-{high:.0%}{mark}"
        yield self.why
        done = f"; {self.performed} tool calls were performed live" if self.performed else ""
        yield f"spent {format_dollars(self.spent)}{done}" + (f"; stopped: {self.stopped}" if self.stopped else "")


class PassRateDrop(NamedTuple):
    """
    The most likely position of a drop in the pass rate; a position is the number of steps before the drop.

    Attributes:
        position: The most likely position.
        earliest: The first likely position.
        latest: The last likely position.
    """

    position: int
    earliest: int
    latest: int


def find_pass_rate_drop(counts: Sequence[tuple[int, int]]) -> PassRateDrop | None:
    """
    Return the most likely position of a drop in the pass rate, with the range of likely ones; ``None`` if chance explains the difference.

    Args:
        counts: For each step in order: the number of runs that passed, and the number of runs that ended.

    Returns:
        ``None`` if chance explains the difference: the Wilson intervals of the rates before and after the drop overlap.
    """
    likely: dict[int, float] = {}
    for place in range(1, len(counts)):
        before, after = _sum_counts(counts[:place]), _sum_counts(counts[place:])
        if before[1] and after[1] and before[0] / before[1] > after[0] / after[1]:
            likely[place] = _log_likelihood(*before) + _log_likelihood(*after)
    if not likely:
        return None
    best = max(likely, key=lambda place: likely[place])
    if wilson_interval(*_sum_counts(counts[:best]))[0] <= wilson_interval(*_sum_counts(counts[best:]))[1]:
        return None
    near = [place for place, value in likely.items() if value >= likely[best] - LIKELY]
    return PassRateDrop(best, min(near), max(near))


def _sum_counts(counts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of both members of the pairs: passed runs, and ended runs."""
    passed = known = 0
    for ok, of in counts:
        passed, known = passed + ok, known + of
    return passed, known


def _log_likelihood(passed: int, ended: int) -> float:
    """Return the logarithm of the likelihood of *passed* of *ended* runs, at their own rate."""
    parts = ((passed, passed / ended), (ended - passed, 1 - passed / ended))
    return sum(number * math.log(share) for number, share in parts if number)


def estimate_blame_cost(journal: Journal, k: int, steps: tuple[int, int] | None = None) -> CostEstimate:
    """Return the approximate number of model calls of ``blame``, and their cost by the recorded prices."""
    history = journal.history()
    chosen = _get_addresses_in_range(finished_model_call_addresses(history), steps)
    # The cost after a step is summed up for each step separately, so of many steps a selection suffices.
    looked_at = chosen[:: max(1, -(-len(chosen) // MOST_STEPS))]
    courses = [summarize_run_from(history, address) for address in looked_at]
    # The binary search repeats the first step and each middle, then the four steps near its result twice as often.
    tried = len(chosen) if len(chosen) <= MOST_STEPS else 9 + len(chosen).bit_length()
    share = tried / len(looked_at) if looked_at else 0.0
    calls = round(sum(course.steps for course in courses) * k * share)
    total = sum_costs([course.cost for course in courses])
    if total is None:
        return CostEstimate(calls, None, None)
    cost = total * k * Decimal(str(round(share, 4)))
    return CostEstimate(calls, cost, 2 * cost)


def _get_addresses_in_range(addresses: Sequence[str], steps: tuple[int, int] | None) -> list[str]:
    """Return the addresses of the model steps in a range, all by default; raise ``DataError`` for a range outside."""
    if steps is None:
        return [*addresses]
    first, last = steps
    if not 1 <= first <= last <= len(addresses):
        msg = f"the steps {first}:{last} are outside of the run; its model steps are 1:{len(addresses)}"
        raise DataError(msg)
    return [*addresses[first - 1 : last]]


async def blame(
    engine: Engine,
    journal: JournalLike,
    check: Check | str | Callable[[RunResult], object],
    *,
    agent: AgentDefinition | None = None,
    k: int = 8,
    steps: tuple[int, int] | None = None,
    budget: SharedBudget | None = None,
    models: Models | None = None,
    confirm: Confirm | None = None,
    **options: Any,
) -> Blame:
    """
    Find the step at which the chance to pass *check* falls.

    Args:
        engine: The engine that performs the runs.
        journal: A run that does not pass.
        check: The condition of *journal*: an expression over ``output, text, status, tools, steps, cost, error, result``, ``MODULE:FN``, or
            a function of the result.
        agent: The current agent of the run; by default the engine's agent with the recorded id.
        k: The number of runs from each step; 8 by default.
        steps: The first and the last model step to try, from 1; by default all.
        budget: The budget; unlimited by default.
        models: Creates the models of each run, in place of the engine's.
        confirm: Called with the estimated cost before models are called. It raises to refuse, and may return the budget.
        options: ``tools`` and ``simulate``, as for ``Engine.fork``; tools that may be repeated are performed by default.

    Raises:
        DataError: when *k* is not above 0, there are no such steps, or the check itself fails.
        ReplayDivergence: when the record does not fit the code.
    """
    if k < 1:
        msg = f"k is {k}; it must be at least 1"
        raise DataError(msg)
    journal, check = as_journal(journal), Check.from_any(check)
    spent = (budget or SharedBudget()).spent_if_known
    options.setdefault("tools", "idempotent")
    recorded = await engine.replay(journal, agent=agent)
    if not check.find_failure(recorded):
        return Blame(check.text, k, (), None, "this run passes the check, so no step is to blame", spent)
    history = journal.history()
    chosen = _get_addresses_in_range(finished_model_call_addresses(history), steps)
    if not chosen:
        return Blame(check.text, k, (), None, "this run called no model, so no step is to blame", spent)
    money = await confirm_cost_and_get_budget(confirm, partial(estimate_blame_cost, journal, k, steps), budget)
    first = 1 if steps is None else steps[0]
    search = _BlameSearch(
        [RetriedStep(index, step, a) for index, (step, a) in enumerate(zip(_list_root_step_numbers(history, chosen), chosen, strict=True), first)],
        partial(fork_sample, engine, journal, budget=money, models=models, agent=agent, reuse=False,
                **options),
        check, k,
    )  # fmt: skip
    await search.repeat_needed_steps()
    tried = tuple([search.steps[i] for i in sorted(search.tried)])
    measurable = [step for step in tried if step.is_measurable]
    found = find_pass_rate_drop([*[(step.ok, step.known) for step in measurable], (0, k)])
    blamed = None if found is None else Blamed(*[measurable[place - 1] for place in found])
    why = _explain_blame(tried, blamed, str(options["tools"]))
    stopped = "the budget is spent; unfinished samples are left out" if money.is_empty else ""
    return Blame(check.text, k, tried, blamed, why, money.spent_if_known, search.performed, stopped)


def _list_root_step_numbers(history: History, addresses: Iterable[str]) -> Iterator[int]:
    """Yield the numbers of the root's steps in which it or its children made model calls."""
    calls = sorted([seq for (path, seq), intent in history.intents.items() if not path and intent.type == "model_call"])
    for path, seq in map(parse_address, addresses):
        yield bisect_right(calls, int(path.partition(".")[0]) if path else seq)


def _explain_blame(tried: Sequence[RetriedStep], blamed: Blamed | None, tools: str) -> str:
    """Return the reason for the result in a sentence: the blamed steps, why none is measurable, or that none is to blame."""
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
            "--simulate MODULE:FN can simulate its results"
            if tools != "recorded"
            else "--tools idempotent may perform it"
        )
        waits = "most runs wait for an unrecorded answer, or the budget did not cover them"
        return f"not measurable: {f'most runs call {tool} with input that is not recorded; {hint}' if tool else waits}"
    passed, known = _sum_counts([(step.ok, step.known) for step in tried])
    return f"no step is to blame: {passed} of {known} runs pass, whichever step they start from"


class _BlameSearch:
    """
    Repeats the steps of a run that the search needs.

    Args:
        steps: The steps.
        again: Forks the journal at the address ``at=``.
        check: The condition of a run that passes.
        k: The number of runs from each step.
    """

    def __init__(
        self, steps: Sequence[RetriedStep], fork_at: Callable[..., Awaitable[ForkReport | None]], check: Check, k: int
    ) -> None:
        self.steps = [*steps]
        self.tried: set[int] = set()
        self.performed = 0
        self._again = fork_at
        self._check = check
        self._k = k

    async def repeat_needed_steps(self) -> None:
        """Repeat all steps with new model calls; of more than 12 steps only those of a binary search and near its result."""
        last = len(self.steps) - 1
        if last < MOST_STEPS:
            await self._fork_steps_and_count(range(last + 1), self._k)
            return
        await self._fork_steps_and_count([0], self._k)
        low, high = 0, last + 1  # from `low` on runs pass as from the start, from `high` on they do not
        start = self.steps[0].rate or 0.0
        while high - low > 1:
            middle = (low + high) // 2
            await self._fork_steps_and_count([middle], self._k)
            rate = self.steps[middle].rate
            low, high = (middle, high) if rate is not None and rate > start / 2 else (low, middle)
        await self._fork_steps_and_count(
            [place for place in (low - 1, low, high, high + 1) if 0 <= place <= last], 2 * self._k
        )

    async def _fork_steps_and_count(self, step_indices: Iterable[int], run_count: int) -> None:
        """Fork the run *run_count* times at each of the steps, with new model calls, and add the results to the counts."""
        works = [
            partial(self._again, at=self.steps[step_index].address)
            for step_index in step_indices
            for _ in range(run_count)
        ]
        given = await run_concurrently(works)
        for number, step_index in enumerate(step_indices):
            self.tried.add(step_index)
            self._add_report_counts(step_index, given[number * run_count : (number + 1) * run_count])

    def _add_report_counts(self, step_index: int, reports: Sequence[ForkReport | None]) -> None:
        """Add passed, failed and unknown forks to the counts of a step, and store the tool that most unknown forks called."""
        step, called = self.steps[step_index], Counter[str]()
        ok = failed = unknown = 0
        for report in reports:
            if report is None or report.refused is not None or report.result.status is RunStatus.SUSPENDED:
                unknown += 1
                if report is not None and report.refused is not None:
                    called[report.refused.name] += 1
            elif self._check.find_failure(report.result):
                failed += 1
            else:
                ok += 1
            self.performed += 0 if report is None else report.performed
        self.steps[step_index] = attrs.evolve(
            step,
            ok=step.ok + ok,
            failed=step.failed + failed,
            unknown=step.unknown + unknown,
            tool=called.most_common(1)[0][0] if called else step.tool,
        )
