"""
The work behind the bundled agent ``improver``: run cases with versions of an agent, blame a step, report the result.

``Trials`` runs and judges as ``evaluate`` does. Each sample of each version has a journal, and each model call is paid once
(``reply_book``). The improver decides which versions are tried. This module compares them: on held-out cases, by the paired
difference and its interval.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import attrs
from attrs import frozen

from stepengine.data.alike import list_names
from stepengine.data.codec import plain
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import canonical, compact
from stepengine.data.messages import AssistantMessage, ToolMessage, UserMessage
from stepengine.data.state import RunResult
from stepengine.data.visible import cut_middle, visible
from stepengine.errors import DataError, DefinitionError, LimitExceeded, StepEngineError
from stepengine.evaluation.alterations import AgentFile
from stepengine.evaluation.blame import blame
from stepengine.evaluation.case_runs import (
    ERROR,
    EngineMaker,
    Evaluation,
    Outcome,
    Sample,
    WorkingCopy,
    make_side,
    run_samples,
)
from stepengine.evaluation.checks import Check
from stepengine.evaluation.criteria import PASSES, Case, Criterion, FilesGone, JudgedRun, Verdict
from stepengine.evaluation.reply_book import CachingProvider, ReplyBook
from stepengine.evaluation.samples import sum_costs
from stepengine.evaluation.scoring import PASS, Pair, Scores, make_sample_value_reader, score_outcome
from stepengine.evaluation.statistics import FEWEST_CASES
from stepengine.journal import FileJournal
from stepengine.models import Models
from stepengine.runtime.prices import Pricing

HELD_OUT = "held-out"
"""The tag of held-out cases; if no case has it, the seed draws them."""
SHARE = 0.4
FEWEST_SEARCHED = 3
BEFORE, AFTER = "before", "after"
SIDE = "agent"
MAX_TEXT = 400
MAX_COURSE = 4_000
MAX_SAID = 600


# --- before anything is spent -----------------------------------------------------------------------------------------


def split_cases(evaluation: Evaluation, seed: int) -> tuple[list[str], list[str]]:
    """
    Return (ids of the cases for the search, ids of those held out for the final test); raise ``DataError`` for too few cases.

    Cases with the tag ``held-out`` are held out, or if there are none, a random part by *seed*. Cases of one group stay together.

    Raises:
        DataError: when they are too few for both.
    """
    units: dict[str, list[Case]] = {}
    for case in evaluation.cases:
        units.setdefault(case.group or case.id, []).append(case)
    tagged = [unit for unit, cases in units.items() if any(HELD_OUT in case.tags for case in cases)]
    if tagged:
        held = set(tagged)
    else:
        number = max(FEWEST_CASES, math.ceil(SHARE * len(units)))
        held = set(random.Random(seed).sample(sorted(units), min(number, len(units))))  # noqa: S311 - a draw, no secret
    if len(held) < FEWEST_CASES or len(units) - len(held) < FEWEST_SEARCHED:
        msg = (
            f"{evaluation.name} has {len(units) - len(held)} cases for the search and {len(held)} held-out cases (a group counts as one); "
            f"a confidence interval needs at least {FEWEST_SEARCHED} and {FEWEST_CASES}: write more cases"
            + (f", or tag others {HELD_OUT!r}" if tagged else "")
        )
        raise DataError(msg)
    split: dict[bool, list[str]] = {True: [], False: []}
    for unit, cases in units.items():
        split[unit in held] += [case.id for case in cases]
    return split[False], split[True]


def find_improvement_problems(file: AgentFile, parts: Sequence[str], evaluation: Evaluation, by: str) -> list[str]:
    """Return the reasons why an agent cannot be improved by an evaluation, as sentences."""
    found: list[str] = []
    if not parts:
        found.append(
            f"{file.file} has no changeable part of {file.agent_id!r}: write a prompt, tool text, setting or default as a literal"
        )
        if "system_prompt" in file.fixed:
            found.append(f"system_prompt: {file.fixed['system_prompt']}")
    names = {name for case in evaluation.cases for name in evaluation.get_named_checks(case)}
    if by != PASS and by not in names:
        found.append(f"by= or --by {by!r} is not a check; checks: {list_names([PASS, *sorted(names)], by)}")
    if by == PASS:
        alone = [case.id for case in evaluation.cases if not _list_non_judge_checks(evaluation, case)]
        if alone:
            found.append(
                f"case {alone[0]!r} has only checks by a judge, which do not count for {PASS}; choose one with by= or --by"
            )
    return found


def _list_non_judge_checks(evaluation: Evaluation, case: Case) -> list[str]:
    """Return the names of the checks of a case that no agent decides."""
    checks = evaluation.get_named_checks(case)
    return [name for name, check in checks.items() if not (isinstance(check, Criterion) and check.is_judge)]


# --- trials -----------------------------------------------------------------------------------------------------------


@attrs.define
class Trials:
    """
    Runs cases with versions of an agent.

    Attributes:
        file: The agent's file.
        evaluation: The cases and their checks.
        folder: Where journals go: ``versions/<version>/cases/<case>/agent/<n>.jsonl``.
        book: The replies bought so far, and the budget of all model calls.
        bench: Makes engines, as for ``run_samples``.
        root: The folder that contains the files of cases.
        load: Loads the agent of a judge.
        models: Returns the models of a case; for ``None`` those of the reflecting model.
        pricing: The prices of models.
        by: The measure to improve: ``"pass"``, or the name of a check.
        is_scripted: Returns whether models without a price may be called for a case, such as scripted ones.
        done: Called after each case with the version, the case, and the return value of ``run_case``.
        error: The error that prevented the run of a case, such as a missing key.
    """

    file: AgentFile
    evaluation: Evaluation
    folder: Path
    book: ReplyBook
    bench: EngineMaker
    root: Path
    load: Callable[[Any], AgentDefinition]
    models: Callable[[Case | None], Models]
    pricing: Pricing
    by: str = PASS
    is_scripted: Callable[[Case | None], bool] = lambda _: False
    done: Callable[[str, str, Mapping[str, Any]], object] = lambda *_: None
    error: StepEngineError | None = None
    _agents: dict[str, AgentDefinition] = attrs.field(factory=dict, init=False)

    async def run_case(
        self, changes: Mapping[str, Any], case: str, parent_changes: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """
        Run a case with a version of the agent, and return the score with a description of the run.

        Args:
            changes: The new values of changed parts, by name; ``{}`` for the unchanged agent.
            case: The id of the case.
            parent_changes: The changes of the version from which this one was made; its recorded replies answer equal requests.

        Returns:
            ``score`` from 0 to 1, or ``None`` with a ``problem``; ``said``, the reasons of the failed checks; ``did``, the course of
            a run that does not pass; ``steps``; ``spent`` and ``cost`` in US dollars; ``served``, the number of replies that were not
            paid again; ``journal``; ``stopped``, the reason if the budget is spent.
        """
        try:
            made = await self._run_and_summarize_samples(changes, self._get_case(case), parent_changes)
            self.done(version_name(changes), case, made)
            return made
        except DefinitionError as error:
            return _make_unmeasured_result(f"the version cannot be loaded: {error.message}")
        except LimitExceeded as error:
            return {**_make_unmeasured_result(error.message), "stopped": error.message}
        except StepEngineError as error:
            self.error = error
            raise

    async def _run_and_summarize_samples(
        self, changes: Mapping[str, Any], case: Case, parent_changes: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Run all samples of a case, and return their mean score, problems, costs and a description of the worst one."""
        made = [
            await self._get_or_run_sample(changes, case, number, parent_changes)
            for number in range(1, self.evaluation.n + 1)
        ]
        samples = [sample for sample, _ in made]
        scores = [self._find_sample_score(sample) for sample in samples]
        problem = next((said for sample in samples if (said := self._explain_unmeasured(sample))), "")
        worst = self._get_worst_sample(samples)
        known = [score for score in scores if score is not None]
        cost = sum_costs([sample.cost for sample in samples])
        return {
            "score": sum(known) / len(known) if known and not problem else None,
            "problem": problem,
            "said": [
                f"{name}: {_visible_excerpt(x.reason, MAX_SAID)}"
                for name, x in worst.scores.items()
                if x.passed is not True
            ],
            "did": "" if min(known, default=0.0) >= 1 else await self._replay_and_describe_run(changes, worst),
            "steps": worst.steps,
            "spent": str(
                sum(
                    (
                        self.book.get_amount_paid(_reply_page_name(changes, case, k))
                        for k in range(1, self.evaluation.n + 1)
                    ),
                    Decimal(0),
                )
            ),
            "cost": None if cost is None else str(cost),
            "served": sum(served for _, served in made),
            "journal": self._journal_path(changes, worst).relative_to(self.folder).as_posix(),
            "stopped": "",
        }

    async def _get_or_run_sample(
        self, changes: Mapping[str, Any], case: Case, number: int, parent_changes: Mapping[str, Any] | None
    ) -> tuple[Sample, int]:
        """Return a recorded sample, or run a new one, with the number of reused replies; raise if the budget is spent."""
        agent, folder = self._load_agent_version(changes), self.folder / "versions" / version_name(changes)
        pages = [] if parent_changes is None else [_reply_page_name(parent_changes, case, number)]
        provider = self._make_caching_provider(_reply_page_name(changes, case, number), case, pages)
        agents: dict[str, Any] = {SIDE: agent}
        outcome = await run_samples(
            attrs.evolve(self.evaluation, cases=[case], agents=agents), folder, self.bench, agents=agents, root=self.root,
            load=self.load, models=lambda _: provider, concurrency=1, earlier=folder, numbers=[number],
        )  # fmt: skip
        if outcome.stopped:
            raise asyncio.CancelledError
        if provider.refused is not None:
            raise provider.refused
        return outcome.samples[0], provider.served

    def _make_caching_provider(self, page: str, case: Case, earlier_pages: Sequence[str] = ()) -> CachingProvider:
        """Return a provider that answers from the reply book, and calls the models of *case* for other requests."""
        free = self.is_scripted(case)
        return CachingProvider(
            self.book, page, self.models(case), self.pricing, before=earlier_pages, may_be_unpriced=free
        )

    def _get_case(self, case: str) -> Case:
        """Return the case with an id; raise ``DataError`` for an unknown one."""
        for known in self.evaluation.cases:
            if known.id == case:
                return known
        msg = f"{self.evaluation.name} has no case {case!r}"
        raise DataError(msg)

    def _load_agent_version(self, changes: Mapping[str, Any]) -> AgentDefinition:
        """Return the agent with *changes*; the first call for a version loads the changed source from memory."""
        version = version_name(changes)
        if version not in self._agents:
            self._agents[version] = self.file.load_with_changes(changes)
        return self._agents[version]

    def _journal_path(self, changes: Mapping[str, Any], sample: Sample) -> Path:
        """Return the path of the journal of a version's sample."""
        return self.folder / "versions" / version_name(changes) / sample.journal

    def _find_sample_score(self, sample: Sample) -> float | None:
        """Return the score of a sample in the measure to improve; ``None`` if it has none."""
        if sample.status == ERROR:
            return None
        return make_sample_value_reader(self.by)(sample)

    def _get_worst_sample(self, samples: Sequence[Sample]) -> Sample:
        """Return the first sample with the lowest score; an unknown score counts as 0."""
        return min(samples, key=lambda sample: self._find_sample_score(sample) or 0.0)

    def _explain_unmeasured(self, sample: Sample) -> str:
        """Return why a sample has no score: a failed provider, or a check without a verdict; ``""`` if it has a score."""
        if sample.status == ERROR:
            return f"in case {sample.case}, the provider failed or the connection to a tool server was lost"
        broken = {name: score.reason for name, score in sample.scores.items() if score.state in ("broken", "unknown")}
        for name, reason in broken.items():
            if self.by in (PASS, name):
                return f"the check {name} has no verdict for case {sample.case}: {reason}"
        return ""

    async def _replay_and_describe_run(self, changes: Mapping[str, Any], sample: Sample) -> str:
        """Replay a recorded sample, and return its conversation as shortened text."""
        agent = self._load_agent_version(changes)
        async with self.bench(agent, self.root, performs=False) as engine:
            result = await engine.replay(FileJournal(self._journal_path(changes, sample)), agent=agent)
        return _visible_excerpt("\n".join(_conversation_lines(result)), MAX_COURSE)

    # --- blame --------------------------------------------------------------------------------------------------------

    async def find_blamed_step(self, version: Mapping[str, Any], case: str, runs_per_step: int) -> dict[str, Any]:
        """
        Find the step at which the chance to pass falls in a version's worst sample of a case, with *runs_per_step* new runs from each step.

        Returns:
            ``step``, 0 if none is found; ``why``, the reason for the step, or an error such as a check that needs files; ``spent``
            in US dollars; ``stopped``, the reason why nothing more may be spent, or ``""``.
        """
        known, page = self._get_case(case), f"blame/{version_name(version)}/{case}"
        agent, provider = self._load_agent_version(version), self._make_caching_provider(page, known)
        numbers = range(1, self.evaluation.n + 1)
        copy = WorkingCopy.create(self.evaluation.get_files(known), self.root)
        step, why = 0, ""
        try:
            samples = [(await self._get_or_run_sample(version, known, number, None))[0] for number in numbers]
            file = FileJournal(self._journal_path(version, self._get_worst_sample(samples)))
            async with self.bench(agent, copy.root, performs=True) as engine:
                found = await blame(
                    engine, file, self._make_blame_check(known), agent=agent, k=runs_per_step, models=lambda: provider
                )
            if found.blamed is not None:
                step, why = found.blamed.step.step, found.why
        except StepEngineError as error:
            why = error.message
        finally:
            copy.remove()
        return {
            "step": step, "why": why, "spent": str(self.book.get_amount_paid(page)),
            "stopped": "" if provider.refused is None else provider.refused.message,
        }  # fmt: skip

    def _make_blame_check(self, case: Case) -> Check:
        """Return a check for ``blame`` that runs the measured check of a case, or all its checks without a judge."""
        checks = self.evaluation.get_named_checks(case)
        asked = (
            [checks[self.by]]
            if self.by in checks
            else [checks[name] for name in _list_non_judge_checks(self.evaluation, case)]
        )

        def passes_all_checks(result: RunResult) -> bool:
            """Return whether a run passes all checks of the case that are no judges."""
            run = JudgedRun(case, result, result.journal or FileJournal("none"), cast("Any", _NoFiles()))
            return all(_is_passing_verdict(check(run)) for check in asked)

        return Check(f"of case {case.id}", passes_all_checks)

    # --- the end ------------------------------------------------------------------------------------------------------

    async def compare_with_original(self, changes: Mapping[str, Any], cases: Sequence[str], seed: int) -> Scores:
        """
        Run the missing samples of *cases*, and return the scores of the agent before and after *changes*.

        Raises:
            LimitExceeded: when the budget is spent.
        """
        sides, samples = [], []
        for name, version in ((BEFORE, {}), (AFTER, changes)):
            sides.append(make_side(name, self._load_agent_version(version)))
            for case in cases:
                for number in range(1, self.evaluation.n + 1):
                    sample, _ = await self._get_or_run_sample(version, self._get_case(case), number, None)
                    place = self._journal_path(version, sample).relative_to(self.folder).as_posix()
                    samples.append(attrs.evolve(sample, side=name, journal=place, counts=sample.status != ERROR))
        chosen = [self._get_case(case) for case in cases]
        agents: dict[str, Any] = {side.name: side.agent for side in sides}
        evaluation = attrs.evolve(self.evaluation, cases=chosen, agents=agents)
        return score_outcome(Outcome(evaluation, tuple(sides), tuple(samples), seed, self.book.spent))


class _NoFiles:
    """The missing files of a continued run. A check that uses them gets ``FilesGone`` instead of an empty list."""

    def __getattr__(self, name: str) -> Any:
        msg = "a run that continues from a recorded step has no files"
        raise FilesGone(msg)

    def __contains__(self, path: object) -> bool:
        return bool(self.root)


def _is_passing_verdict(result: object) -> bool:
    """
    Return whether the return value of a check passes: a passing ``Verdict``, ``True``, or at least ``PASSES``; else raise ``DataError``.

    Raises:
        DataError: for another value, such as the coroutine of an asynchronous check.
    """
    if isinstance(result, Verdict):
        return result.has_passed
    if isinstance(result, int | float):
        return result >= PASSES
    if inspect.iscoroutine(result):
        result.close()
    msg = "a check must return a bool, a number or a Verdict, and cannot be asynchronous here"
    raise DataError(msg)


def version_name(changes: Mapping[str, Any]) -> str:
    """Return the name of the version with *changes*, which is also the name of its folder."""
    return hashlib.sha256(canonical(plain(changes)).encode()).hexdigest()[:12] if changes else "as-it-is"


def _reply_page_name(changes: Mapping[str, Any], case: Case, sample_number: int) -> str:
    """Return the name of the page with the replies of a version's sample."""
    return f"{version_name(changes)}/{case.id}/{sample_number}"


def _make_unmeasured_result(problem: str) -> dict[str, Any]:
    """Return the result of a case that could not be measured because of a *problem*."""
    return {
        "score": None, "problem": problem, "said": [], "did": "", "steps": 0, "spent": "0", "cost": None, "served": 0,
        "journal": "", "stopped": "",
    }  # fmt: skip


def _visible_excerpt(text: str, max_chars: int) -> str:
    """Return *text* with visible control characters, its middle cut after *max_chars*."""
    return cut_middle(visible(text), max_chars, "[...]")


def _conversation_lines(result: RunResult) -> list[str]:
    told, step = [], 0
    for message in result.state.message_history:
        if isinstance(message, UserMessage):
            told.append(f"user: {_visible_excerpt(message.text, MAX_TEXT)}")
        elif isinstance(message, AssistantMessage):
            step += 1
            told += [f"step {step}: {_visible_excerpt(message.text_without_thoughts.strip(), MAX_TEXT)}"]
            told += [
                f"step {step} calls {call.tool_name} {_visible_excerpt(compact(call.input), MAX_TEXT)}"
                for call in message.tool_calls
            ]
        elif isinstance(message, ToolMessage):
            told.append(f"{message.tool_name} gave: {_visible_excerpt(message.result.text, MAX_TEXT)}")
    if result.output is not None and plain(result.output) != result.text:
        told.append(f"output: {_visible_excerpt(compact(plain(result.output)), MAX_TEXT)}")
    return told


# --- what came of it --------------------------------------------------------------------------------------------------


@frozen
class Improvement:
    """
    The result of the search for a better version.

    Attributes:
        found: The output of the agent ``improver``: ``changes`` of the best version, ``versions`` that were tried, ``why`` it ended.
        by: The measure to improve: ``"pass"``, or the name of a check.
        scores: The held-out cases before and after; ``None`` if they were not run.
        diff: The changes as a diff of the agent's file; ``""`` for none.
        spent: The cost of the search in US dollars.
        file: The agent's file.
        agent_id: The id of the agent.
        parts: The parts that could be changed, with their values before the search.
        folder: The folder of the results.
        seed: The seed of all random choices.
        budget: The US dollars that the search could cost.
        is_written: Whether the agent's file was changed.
    """

    found: Mapping[str, Any]
    by: str
    scores: Scores | None
    diff: str
    spent: Decimal
    file: Path
    agent_id: str
    parts: Mapping[str, Any]
    folder: Path
    seed: int
    budget: str
    is_written: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the result as in ``results.json``."""
        return {
            "format": "stepengine.improve/1", "agent": self.agent_id, "file": str(self.file), "by": self.by,
            "is_better": self.is_better, "told": self.describe(), **self.found, "diff": self.diff, "seed": self.seed,
            "budget": self.budget, "spent": str(self.spent), "folder": str(self.folder),
            "held_out": None if self.scores is None else self.scores.to_json(),
        }  # fmt: skip

    @property
    def pair(self) -> Pair | None:
        """The difference on the held-out cases between the new and the old version."""
        pairs = () if self.scores is None else self.scores.pairs
        return next((pair for pair in pairs if pair.check == self.by), None)

    @property
    def is_better(self) -> bool:
        """Whether the interval of the difference excludes 0."""
        return self.pair is not None and self.pair.difference.low is not None and self.pair.difference.low > 0

    @property
    def is_undecided(self) -> bool:
        """Whether the budget was spent before a version was found, or before the found one was tested on the held-out cases."""
        return bool(self.found["stopped"])

    def describe(self) -> str:
        """Return the result in a sentence."""
        number = max(0, len(self.found["versions"]) - 1)
        tried = "1 version was tried" if number == 1 else f"{number} versions were tried"
        if self.is_undecided:
            return f"undecided: {self.found['stopped']}; {tried}, and the file is unchanged"
        made = None if self.pair is None else self.pair.difference
        if made is None:
            return f"no better version was found: {self.found['why']}; {tried}, and the file is unchanged"
        ends = "" if made.low is None or made.high is None else f" ({made.low:+.2f} to {made.high:+.2f})"
        on = f"{self.by} {made.mean:+.2f}{ends} on {made.cases} held-out cases"
        if self.is_better:
            return f"better: {on}; {tried}"
        return f"no better version was found: the best one has {on}, which may be chance; {tried}, and the file is unchanged"
