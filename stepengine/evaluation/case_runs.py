"""
Runs evaluations: agents, or versions of one, on the same cases. Each sample is recorded in a journal.

``run_samples`` runs the samples that are not recorded yet, in an order that mixes the sides. Next to each journal is a note with
the files at the end of the run. So a sample without a change is replayed, and a changed check needs no model. ``scoring`` computes
the means.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import attrs
from attrs import frozen

from stepengine.data.checks import with_keyword_hints
from stepengine.data.codec import plain
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import KINDS
from stepengine.data.limits import Limits
from stepengine.data.messages import CUT_OFF, ToolResult
from stepengine.data.outcomes import Failure
from stepengine.data.state import RunResult, RunStatus
from stepengine.engine import Engine
from stepengine.errors import (
    DataError,
    JournalError,
    LimitExceeded,
    MissingKey,
    ModelError,
    ReplayDivergence,
    StepEngineError,
    UnknownModel,
)
from stepengine.evaluation.criteria import (
    Case,
    CheckFunction,
    Criterion,
    Files,
    FilesGone,
    JudgedRun,
    JudgeNeeded,
    WorkingFiles,
    as_tuple_or_raise,
    digest_json,
    get_check_name,
    hash_files,
    hash_function,
    read_capped_text,
    run_check,
)
from stepengine.evaluation.samples import run_concurrently, sort_effects_in_program_order, summarize_run_from
from stepengine.journal import FileJournal, Journal, SharedBudget
from stepengine.journal.history import History
from stepengine.journal.records import format_address
from stepengine.workspace.open_files import is_open_database

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MAX_SAMPLES = 10_000
MAX_FILES = 20_000
MAX_BYTES = 256 * 1024 * 1024
MAX_QUESTIONS = 20
MAX_NOTE = 64 * 1024 * 1024
ERROR = "error"
"""The status of a sample whose provider failed, or a call of which was cut off."""
INTERRUPTED = "interrupted"
START = "#0"
MEASURED = ("pass", "cost", "steps", "tokens")
"""The names in tables and gates that no check can have."""
UNREACHED = ("CancelledError", "ConnectionLost", "ToolServerError")
"""Kinds of errors of a ``Perform`` whose server is gone, or whose work was cancelled from outside."""
ROOM = 2
"""The reservation of a run, as a multiple of the highest cost of a run so far."""


@partial(with_keyword_hints, elsewhere={"replies": "Case(id, replies=[...])", "agent": "agents={'base': ...}"})
@frozen
class Evaluation:
    """
    A set of cases, and the agents to compare on them.

    Attributes:
        name: Its name; also that of the folder of its results.
        cases: The cases.
        agents: The sides by their names; the first is the base that others are compared with. A definition, or the path or
            id of an agent.
        checks: Checks of every case.
        n: Samples of each case and side.
        limits: Limits of each run.
        files: The files of cases that name none.
        keep: Patterns of files whose text at the end of a run is stored, for a later recheck.
        gates: The conditions that have to hold, such as ``"new.pass - base.pass > -0.05"``.
    """

    name: str
    cases: tuple[Case, ...] = attrs.field(converter=as_tuple_or_raise)
    agents: Mapping[str, Any] = attrs.field(converter=dict)
    checks: tuple[CheckFunction, ...] = attrs.field(default=(), converter=as_tuple_or_raise)
    n: int = 1
    limits: Limits | None = None
    files: Files = None
    keep: tuple[str, ...] = attrs.field(default=(), converter=as_tuple_or_raise)
    gates: tuple[str, ...] = attrs.field(default=(), converter=as_tuple_or_raise)

    def get_named_checks(self, case: Case) -> dict[str, CheckFunction]:
        """Return the checks of the evaluation and of a case by name; a name that is used already gets a number."""
        named: dict[str, CheckFunction] = {}
        for check in (*self.checks, *case.checks):
            name = get_check_name(check)
            free = (name if number == 1 else f"{name}-{number}" for number in count(1))
            named[next(each for each in free if each not in named)] = check
        return named

    def problems(self, root: Path) -> list[str]:
        """Return the reasons why the evaluation cannot run; *root* is the folder of its files."""
        names: list[tuple[str, object]] = [("evaluation name", self.name)]
        names += [("case id", case.id) for case in self.cases] + [("agent name", name) for name in self.agents]
        found = [
            f"the {what} {name!r} is not valid: use a text of at most 100 letters, digits, '.', '_' and '-'"
            for what, name in names
            if not isinstance(name, str) or not NAME.fullmatch(name)
        ]
        ids = Counter([str(case.id).casefold() for case in self.cases])
        found += [
            f"{number} cases have the id {name!r}; give each its own id" for name, number in ids.items() if number > 1
        ]
        if not self.cases:
            found.append("it has no cases; add cases=[Case(...)]")
        if not self.agents:
            found.append("it has no agents; add agents={'base': ..., 'new': ...}")
        if type(self.n) is not int or not 1 <= self.n <= MAX_SAMPLES:
            found.append(f"n is {self.n!r}; the number of samples must be at least 1 and at most {MAX_SAMPLES:,}")
        named = dict.fromkeys([name for case in self.cases for name in self.get_named_checks(case)])
        found += [
            f"the check {name!r} has the name of a built-in measure; rename it, such as {f'my_{name}'!r}"
            for name in named
            if name in MEASURED
        ]
        return found + [
            f"case {case.id!r}: {problem}" for case in self.cases for problem in self._find_case_problems(case, root)
        ]

    def _find_case_problems(self, case: Case, root: Path) -> Iterator[str]:
        """Yield the problems of a case: no checks, invalid checks and invalid files."""
        checks: list[object] = [*self.checks, *case.checks]
        if not checks:
            yield "it has no check; add at least one with checks=[...]"
        if not isinstance(case.prompt, str):
            yield f"the prompt must be a text, not {case.prompt!r}"
        yield from [f"{check!r} is not a check; a check must be a function" for check in checks if not callable(check)]
        yield from _find_file_problems(self.get_files(case), root)

    def get_files(self, case: Case) -> Files:
        """Return the files that a case starts with."""
        return self.files if case.files is None else case.files


def _find_file_problems(files: Files, root: Path) -> Iterator[str]:
    """Yield the problems of a case's files: paths outside of the copy, and a missing folder."""
    if files is None:
        return
    if isinstance(files, Mapping):
        for name, text in files.items():
            path = Path(str(name))
            if path.is_absolute() or ".." in path.parts or not path.parts or not isinstance(text, str):
                yield f"files: {name!r} must be a path inside the working copy, with a string as its content"
        return
    if not isinstance(files, str | Path):
        yield f"files: {files!r} must be the path of a folder, or an object of texts by path"
    elif not (folder := (root / files).resolve()).is_relative_to(root.resolve()):
        yield f"files: {str(files)!r} is outside of {root}"
    elif not folder.is_dir():
        yield f"files: {str(files)!r} is not a folder"


# --- what comes of it -------------------------------------------------------------------------------------------------


@frozen
class Score:
    """
    The verdict of a check on a sample.

    Attributes:
        score: From 0 to 1; ``None`` without a verdict.
        passed: Whether the run passes; ``None`` without a verdict.
        reason: The reason for the verdict.
        state: ``"ok"``; ``"broken"`` if the check raised an error; ``"unknown"`` if its files or its judge are missing; ``"not asked"``
            for a run that did not complete, which scores 0.
        is_judge: Whether an agent decided.
        of: A digest of the check; a recheck without the data of the check reuses only a verdict with the same digest.
    """

    score: float | None
    passed: bool | None
    reason: str = ""
    state: str = "ok"
    is_judge: bool = False
    of: str = attrs.field(default="", repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the score as in ``results.json``."""
        return {"score": self.score, "passed": self.passed, "reason": self.reason, "state": self.state}


@frozen
class Sample:
    """
    One run of a case.

    Attributes:
        case: The id of the case.
        side: The side.
        n: Its number, from 1.
        journal: The path of its journal, relative to the folder of the results.
        status: The status of the run; ``"error"`` if its provider failed after all retries, or a tool server was lost.
        scores: The verdicts of the checks, by name.
        cost: The cost in US dollars; ``None`` if it is unknown.
        tokens: The number of tokens.
        steps: The number of steps.
        seconds: The duration of the run.
        reused: ``"new"``; ``"journal"`` for a replayed run; ``"from #14"`` for a recorded run that was continued from there.
        counts: Whether the summary includes it: not if its status is ``"error"``, nor if the sample of another side is missing.
    """

    case: str
    side: str
    n: int
    journal: str
    status: str
    scores: Mapping[str, Score]
    cost: Decimal | None
    tokens: int
    steps: int
    seconds: float
    reused: str = "new"
    counts: bool = True

    @property
    def passed(self) -> bool | None:
        """Whether all function checks pass; ``None`` if that is unknown or there are none."""
        asked = [score for score in self.scores.values() if not score.is_judge]
        if not asked or any(score.passed is None for score in asked):
            return None
        return all(score.passed for score in asked)

    def to_json(self) -> dict[str, Any]:
        """Return the sample as in ``results.json``."""
        return {
            "side": self.side, "n": self.n, "journal": self.journal, "status": self.status,
            "scores": {name: score.to_json() for name, score in self.scores.items()},
            "cost": None if self.cost is None else str(self.cost), "tokens": self.tokens, "steps": self.steps,
            "seconds": round(self.seconds, 3), "reused": self.reused, "counts": self.counts,
        }  # fmt: skip


@frozen
class Side:
    """
    A compared agent.

    Attributes:
        name: Its name in the evaluation.
        agent: The agent.
        definition: The digest of its definition and of those of its children.
        tools: The digest of each tool's function, by the name of the tool.
        models: The models of the agent and of its children.
    """

    name: str
    agent: AgentDefinition
    definition: str
    tools: Mapping[str, str]
    models: tuple[str, ...]


@frozen
class Outcome:
    """
    The samples of an evaluation.

    Attributes:
        evaluation: The evaluation, with the cases that were chosen.
        sides: Its sides.
        samples: The samples, by case, side and number.
        seed: The seed.
        spent: The cost of the new runs in US dollars, as far as prices are known.
        stopped: Why some samples were not run; ``""`` if all were.
    """

    evaluation: Evaluation
    sides: tuple[Side, ...]
    samples: tuple[Sample, ...]
    seed: int
    spent: Decimal
    stopped: str = ""

    @property
    def n(self) -> int:
        """The number of samples of each case and side."""
        return self.evaluation.n

    @property
    def planned(self) -> int:
        """The number of samples of the whole evaluation."""
        return len(self.evaluation.cases) * len(self.sides) * self.n

    @property
    def missing(self) -> int:
        """The number of samples that were not run."""
        return self.planned - len(self.samples)


# --- definitions ------------------------------------------------------------------------------------------------------


def make_side(name: str, agent: AgentDefinition) -> Side:
    """Return a side with the digests that identify its samples later."""
    tools: dict[str, str] = {}
    models: list[str] = []
    told = [*_collect_identifying_texts(agent, tools, models, set())]
    return Side(name, agent, digest_json(told), dict(sorted(tools.items())), tuple(dict.fromkeys(models)))


def _collect_identifying_texts(
    agent: AgentDefinition, tool_digests: dict[str, str], model_names: list[str], seen_ids: set[str]
) -> Iterator[str]:
    """Yield texts that identify a definition and its children; add tool digests and model names to the two collections."""
    if agent.id in seen_ids:
        return
    seen_ids.add(agent.id)
    model_names += [agent.model] if agent.model else []
    for tool in agent.tools:
        spec = getattr(tool, "spec", None)
        if spec is not None:
            tool_digests[spec.name] = hash_function(getattr(getattr(tool, "body", None), "fn", tool))
        yield f"tool {tool if spec is None else spec!r}"
    for child in agent.spawnable_agents:
        yield f"child {getattr(child, 'id', child)}"
        if isinstance(child, AgentDefinition):
            yield from _collect_identifying_texts(child, tool_digests, model_names, seen_ids)
    for field in attrs.fields(AgentDefinition):
        value = getattr(agent, field.name, None)
        if field.name not in ("tools", "spawnable_agents"):
            yield f"{field.name} {make_digest_text(value)}"


def make_digest_text(value: object) -> str:
    """Return a stable text of a value for a digest: the digest of a function, or a ``repr`` without memory addresses."""
    is_code = callable(value) and not isinstance(value, type)
    return hash_function(value) if is_code else ADDRESS.sub("", repr(value))


ADDRESS = re.compile(r" at 0x[0-9a-f]{1,16}")


# --- working copies ---------------------------------------------------------------------------------------------------


@frozen
class WorkingCopy:
    """A private working copy of the files of a case, and a list of its initial content."""

    root: Path
    before: Mapping[str, str]

    @classmethod
    def create(cls, files: Files, root: Path) -> WorkingCopy:
        """
        Copy *files*, without links, to a new temporary folder that only its owner can read, and hash them.

        Raises:
            DataError: when they are too many or too large.
        """
        folder = Path(tempfile.mkdtemp(prefix="stepengine-eval-")).resolve() / "work"
        folder.mkdir()
        try:
            if isinstance(files, Mapping):
                for name, text in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(text.encode())
            elif files is not None:
                _copy_regular_files((root / files).resolve(), folder)
            return cls(folder, hash_files(folder))
        except BaseException:
            shutil.rmtree(folder.parent, ignore_errors=True)
            raise

    def snapshot_files(self, patterns: Sequence[str]) -> WorkingFiles:
        """Hash the files, and return their hashes at the start and now, with the texts of files that match *patterns*."""
        after = hash_files(self.root)
        wanted = [path for path in after if any(fnmatchcase(path, pattern) for pattern in patterns)]
        return WorkingFiles(
            self.before, after, {path: read_capped_text(self.root / path) for path in wanted}, self.root
        )

    def remove(self) -> None:
        """Delete the working copy."""
        shutil.rmtree(self.root.parent, ignore_errors=True)


def _copy_regular_files(source: Path, target: Path) -> None:
    """Copy the files of a folder, without links and open databases; raise ``DataError`` if they are too many or too large."""
    number = size = 0
    folders = [(source, target)]
    while folders:
        here, there = folders.pop()
        with os.scandir(here) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.is_dir(follow_symlinks=False):
                    (there / entry.name).mkdir()
                    folders.append((Path(entry.path), there / entry.name))
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    if is_open_database(status):
                        continue
                    number, size = number + 1, size + status.st_size
                    if number > MAX_FILES or size > MAX_BYTES:
                        msg = f"{source} contains more than {MAX_FILES} files or {MAX_BYTES} bytes; name a smaller folder in files="
                        raise DataError(msg)
                    shutil.copy2(entry.path, there / entry.name, follow_symlinks=False)


# --- money ------------------------------------------------------------------------------------------------------------


class EvaluationBudget:
    """
    The budget of all runs; each run reserves a part of it before it starts, and pays each model call from it.

    A reservation decides when a run starts. A dearer run pays the rest from what is left of the budget. The first run is alone,
    since it shows what a run costs.

    Args:
        budget: US dollars; ``None`` for no bound.
        at_once: How many runs there are at a time.
    """

    def __init__(self, budget: Decimal | None, at_once: int) -> None:
        self.budget = budget
        self.spent = Decimal(0)
        self.stopped = ""
        self.shared_budget = None if budget is None else SharedBudget(budget, allow_unpriced=True)
        self._at_once = at_once
        self._reserved: list[Decimal] = []
        self._is_price_known = False
        self._dearest = Decimal(0)
        self._settled = asyncio.Event()

    def make_run_limits(self, limits: Limits, *, is_scripted: bool) -> Limits:
        """Return *limits* with the whole budget as the highest cost, unless they set one; a scripted run may be unpriced."""
        most = self.budget if limits.max_cost_usd is None else limits.max_cost_usd
        # A script states the cost of a reply itself, or none.
        return attrs.evolve(limits, max_cost_usd=most, allow_unpriced=is_scripted or None)

    def stop_if_run_spent_budget(self, result: RunResult) -> bool:
        """Prevent further runs if *result* shows that the whole budget is spent, and return whether it does."""
        error = result.error
        if self.budget is None or not isinstance(error, LimitExceeded):
            return False
        has_ended = error.kind == "cost" and error.limit == float(self.budget)
        if has_ended:
            self.prevent_further_runs()
        return has_ended

    async def wait_and_reserve_cost(self, limits: Limits) -> Decimal | None:
        """
        Wait until the budget has room for a run, reserve a part of it, and return the US dollars; ``None`` if nothing is left.

        Returns:
            ``None`` if nothing is left; then no further run starts.
        """
        assert self.budget is not None  # noqa: S101 - whoever asks has one
        own = limits.max_cost_usd
        while not self.stopped:
            if self.shared_budget is not None and self.shared_budget.is_empty:
                self.prevent_further_runs()
                break
            free = self.budget - self.spent - sum(self._reserved)
            wanted = Decimal(str(own)) if own is not None else ROOM * self._dearest or self.budget / self._at_once
            has_room = free > 0 and free >= min(wanted, self._dearest or wanted)
            if has_room and (self._is_price_known or not self._reserved):
                self._reserved.append(min(wanted, free))
                return self._reserved[-1]
            if not self._reserved:
                self.prevent_further_runs()
                break
            await self._settled.wait()
        return None

    def prevent_further_runs(self) -> None:
        """Prevent further runs from starting, and store the spent budget as the reason."""
        self.stopped = self.stopped or f"the budget of {self.budget} US dollars is spent"

    def settle_run_cost(self, reserved: Decimal | None, cost: Decimal | None) -> None:
        """Replace the reservation of a run by its cost, and wake the runs that wait for room; an unknown cost counts as 0."""
        if reserved is not None:
            self._reserved.remove(reserved)
            self._is_price_known = True
        self.spent += cost or 0
        self._dearest = max(self._dearest, cost or Decimal(0))
        # Wakes those that wait now; later ones wait for the next call.
        self._settled.set()
        self._settled.clear()


# --- running ----------------------------------------------------------------------------------------------------------


class EngineMaker(Protocol):
    """A function that creates the engine of a sample."""

    def __call__(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine for *agent*; its tools work in *root*. Without *performs* it replays runs only, and calls no tool."""


async def run_samples(
    evaluation: Evaluation,
    folder: Path,
    bench: EngineMaker,
    *,
    agents: Mapping[str, AgentDefinition],
    root: Path,
    load: Callable[[Any], AgentDefinition],
    models: Callable[[Case], object],
    seed: int = 0,
    concurrency: int = 4,
    budget: Decimal | None = None,
    earlier: Path | None = None,
    recheck: bool = False,
    keep: bool = False,
    numbers: Sequence[int] | None = None,
    done: Callable[[Sample], object] = lambda _: None,
) -> Outcome:
    """
    Run the samples of an evaluation that are not recorded yet, and return all of them.

    Args:
        evaluation: The evaluation, which has no problems.
        folder: The folder of the results.
        bench: Makes engines.
        agents: The sides.
        root: The folder that contains the files of cases.
        load: Loads the agent of a judge.
        models: The models of one sample, such as a script; ``None`` for real ones.
        seed: Decides the order of the runs.
        concurrency: The number of runs at a time.
        budget: The US dollars that all runs may cost together.
        earlier: The folder of earlier results: unchanged samples are replayed from their journals.
        recheck: Run nothing: repeat the checks on the samples in *earlier*; samples without a journal are missing.
        keep: Keep the working copies.
        numbers: The numbers of the samples of each case and side; ``None`` for all.
        done: Called with each sample when it has ended.

    Returns:
        The samples. A cancelled evaluation returns the ended samples; ``stopped`` then contains the reason.

    Raises:
        ReplayDivergence: when a journal is to be read again and does not fit the code.
    """
    sides = tuple([make_side(name, agent) for name, agent in agents.items()])
    ledger = EvaluationBudget(budget, concurrency)
    run = _EvaluationRun(evaluation, folder, bench, root, load, models, ledger, earlier, recheck, keep, done)
    order = random.Random(seed)  # noqa: S311 - an order, no secret
    numbers = range(1, evaluation.n + 1) if numbers is None else numbers
    slots: list[_SampleSlot] = []
    for number in numbers:
        for case in order.sample(evaluation.cases, len(evaluation.cases)):
            slots += [_SampleSlot(case, side, number, folder) for side in order.sample(sides, len(sides))]
    stopped = ""
    try:
        await run_concurrently([partial(run.reuse_or_run_sample, slot) for slot in slots], concurrency)
    except asyncio.CancelledError:
        stopped = INTERRUPTED
    finally:
        await run.close()
    samples: list[Sample] = []
    for case in evaluation.cases:
        made = [[run.made.get((case.id, side.name, number)) for number in numbers] for side in sides]
        is_whole = [None not in block for block in zip(*made, strict=True)]
        for row in made:
            kept = [(sample, whole) for sample, whole in zip(row, is_whole, strict=True) if sample is not None]
            samples += [attrs.evolve(sample, counts=whole and sample.status != ERROR) for sample, whole in kept]
    if recheck and len(samples) < len(slots):
        stopped = stopped or f"{len(slots) - len(samples)} of {len(slots)} samples are not recorded in {earlier}"
    return Outcome(evaluation, sides, tuple(samples), seed, ledger.spent, stopped or ledger.stopped)


@frozen
class _SampleSlot:
    """The case, side and number of a sample in a folder of results."""

    case: Case
    side: Side
    number: int
    folder: Path

    @property
    def journal_path(self) -> Path:
        return self.folder / "cases" / self.case.id / self.side.name / f"{self.number}.jsonl"

    def create_folder_and_delete_old_files(self) -> None:
        """Create the folder of the journal, and delete the files of an earlier attempt at this sample."""
        self.journal_path.parent.mkdir(parents=True, exist_ok=True)
        for path in self.journal_path.parent.glob(f"{self.number}.*"):
            path.unlink(missing_ok=True)

    def replace_files_from(self, other: _SampleSlot) -> None:
        """Replace the files of this slot by copies of the files of *other*, the same sample in another folder."""
        if other.journal_path != self.journal_path:
            self.create_folder_and_delete_old_files()
            for path in other.journal_path.parent.glob(f"{self.number}.*"):
                shutil.copy2(path, self.journal_path.parent / path.name, follow_symlinks=False)


@frozen
class _EndedSample:
    """A run that has ended: its result, its note, the part of it that is reused, and the models for its judges."""

    result: RunResult
    note: _Note
    reused: str
    models: Any = None


@attrs.define
class _EvaluationRun:
    """An evaluation that is running."""

    evaluation: Evaluation
    folder: Path
    bench: EngineMaker
    root: Path
    load: Callable[[Any], AgentDefinition]
    models: Callable[[Case], Any]
    ledger: EvaluationBudget
    earlier: Path | None
    recheck: bool
    keep: bool
    done: Callable[[Sample], object]
    made: dict[tuple[str, str, int], Sample] = attrs.field(factory=dict)
    readers: dict[str, Engine] = attrs.field(factory=dict)

    async def reuse_or_run_sample(self, slot: _SampleSlot) -> None:
        """Judge a recorded sample or run a new one, and report it; do nothing if the budget is spent or a recheck has no record."""
        made = await self._replay_or_continue_sample(slot)
        if made is not None:
            sample = await self._judge_and_store(slot, made)
        elif self.recheck:
            return
        else:
            found = await self._run_and_judge_live_sample(slot)
            if found is None:
                return
            sample = found
        self.made[slot.case.id, slot.side.name, slot.number] = sample
        self.done(sample)

    async def close(self) -> None:
        """Close the engines that replayed runs."""
        for engine in self.readers.values():
            await engine.aclose()

    def get_or_create_replay_engine(self, side: Side) -> Engine:
        """Return the engine that replays the runs of *side*; the first call creates the engine."""
        if side.name not in self.readers:
            self.readers[side.name] = self.bench(side.agent, self.root, performs=False)
        return self.readers[side.name]

    # --- a new run ----------------------------------------------------------------------------------------------------

    async def _run_and_judge_live_sample(self, slot: _SampleSlot) -> Sample | None:
        """Run a sample with a new engine, and judge it; return ``None`` if the budget is spent."""
        limits, reserved, models = self.evaluation.limits, None, self.models(slot.case)
        if self.ledger.budget is not None:
            limits = (limits or Limits()).resolve(slot.side.agent.limits)
            reserved = await self.ledger.wait_and_reserve_cost(limits)
            if reserved is None:
                return None
            limits = self.ledger.make_run_limits(limits, is_scripted=models is not None)
        slot.create_folder_and_delete_old_files()

        async def run_and_settle_cost(engine: Engine) -> tuple[RunResult, str]:
            """Run the case, and replace the reservation of the budget by the cost."""
            result: RunResult | None = None
            try:
                result = await _run_case_with_answers(engine, slot, limits)
            finally:
                self.ledger.settle_run_cost(reserved, None if result is None else result.cost)
            return result, "new"

        async with self._open_working_copy(slot.case) as copy:
            made = await self._run_and_store_note(slot, copy, run_and_settle_cost, models)
            error = made.result.error
            if isinstance(error, UnknownModel | MissingKey):
                raise error  # it would be so in every run
            if reserved is not None and isinstance(error, LimitExceeded) and error.kind == "unpriced_model":
                raise error
            if self.ledger.stop_if_run_spent_budget(made.result):
                slot.create_folder_and_delete_old_files()
                return None
            # The files are still there for checks that need them.
            return await self._judge_and_store(slot, made)

    async def _run_and_store_note(
        self,
        slot: _SampleSlot,
        copy: WorkingCopy,
        run_sample: Callable[[Engine], Awaitable[tuple[RunResult, str]]],
        models: Any,
    ) -> _EndedSample:
        """Run a sample with a new engine, and store its files and duration in its note."""
        began = time.monotonic()
        async with self.bench(slot.side.agent, copy.root, performs=True) as engine:
            with engine.override(models=models, budget=self.ledger.shared_budget):
                result, reused = await run_sample(engine)
        seconds = time.monotonic() - began
        files = await asyncio.to_thread(copy.snapshot_files, self.evaluation.keep)
        note = _Note(self.make_case_key(slot.case, copy.before), slot.side.definition, slot.side.tools, files, seconds)
        note.write(slot.journal_path)
        return _EndedSample(result, note, reused, models)

    @asynccontextmanager
    async def _open_working_copy(self, case: Case) -> AsyncIterator[WorkingCopy]:
        """Yield a working copy of the files of a case, and delete it afterwards unless copies are kept."""
        # In the loop's own thread: one that is cancelled would go on copying when everything was removed.
        copy = WorkingCopy.create(self.evaluation.get_files(case), self.root)
        try:
            yield copy
        finally:
            if not self.keep:
                copy.remove()

    def make_case_key(self, case: Case, files: Mapping[str, str]) -> str:
        """Return the digest of the parts of a case that a run depends on: prompt, params, answers, files and limits."""
        answers = make_digest_text(case.answers)
        return digest_json([case.prompt, repr(case.params), answers, dict(files), repr(self.evaluation.limits)])

    # --- an earlier run -----------------------------------------------------------------------------------------------

    async def _replay_or_continue_sample(self, slot: _SampleSlot) -> _EndedSample | None:
        """
        Replay the recorded run of a sample, or continue the run with new calls from the first change; ``None`` without a usable record.

        A recheck replays the run even if the case has changed. Otherwise a changed case or a damaged journal returns ``None``.
        """
        if self.earlier is None:
            return None
        old = attrs.evolve(slot, folder=self.earlier)
        note = _Note.read(old.journal_path) if old.journal_path.is_file() else None
        if note is None:
            return None
        if self.recheck:
            result = await self.get_or_create_replay_engine(slot.side).replay(
                FileJournal(old.journal_path), agent=slot.side.agent
            )
            return _EndedSample(result, note, "journal")
        before = self._hash_case_files(slot.case)
        if note.key != self.make_case_key(slot.case, before):
            return None
        try:
            return await self._replay_or_continue_run(slot, old, note)
        except JournalError:
            return None

    async def _replay_or_continue_run(self, slot: _SampleSlot, old: _SampleSlot, note: _Note) -> _EndedSample | None:
        """Replay an earlier run, or continue it with new calls from its first change; ``None`` if neither is possible."""
        journal = FileJournal(old.journal_path)
        history = journal.history()
        if not history.is_complete or _describe_first_interrupted_effect(history):
            return None
        changed, differs = self._find_call_of_changed_tool(history, slot.side, note), ""
        try:
            result = await self.get_or_create_replay_engine(slot.side).replay(journal, agent=slot.side.agent)
        except ReplayDivergence as error:
            differs = error.address
        else:
            if not changed and result.status is not RunStatus.CANCELLED and _get_status_or_error(result) != ERROR:
                slot.replace_files_from(old)
                return _EndedSample(result, note, "journal", self.models(slot.case))
        # Calls answered from the record write no files, and a journal cannot be replaced by its own continuation.
        if note.files.changed or self.ledger.budget is not None or old.journal_path == slot.journal_path:
            return None
        if bool(changed) == bool(differs) or START in (changed, differs):
            return None
        return await self._continue_from_change(slot, journal, changed)

    async def _continue_from_change(self, slot: _SampleSlot, journal: Journal, changed: str) -> _EndedSample:
        """Fork a run with new calls at the address *changed* of a changed tool's call, or at the first request that differs."""
        slot.create_folder_and_delete_old_files()
        into, agent, limits = FileJournal(slot.journal_path), slot.side.agent, self.evaluation.limits

        async def fork_and_answer_questions(engine: Engine) -> tuple[RunResult, str]:
            """Fork the run before the change, and answer its questions until it ends."""
            if changed:
                path, _, number = changed.rpartition("#")
                before = f"{path}#{int(number) - 1}"
                # With ``tools=`` the record would answer the call of the old tool. Repeated calls act on a copy of the files.
                result = await engine.fork(journal, at=before, agent=agent, limits=limits, allow_repeat=True, into=into)
                result = await _resume_with_answers(engine, slot, result)
                self.ledger.settle_run_cost(None, summarize_run_from(into.history(), changed).cost)
                return result, f"from {changed}"
            made = await engine.fork(journal, agent=agent, tools="working-copy", limits=limits, into=into)
            self.ledger.settle_run_cost(None, made.cost)
            result = await _resume_with_answers(engine, slot, made.result)
            if result.cost is not None and made.result.cost is not None:
                self.ledger.settle_run_cost(None, result.cost - made.result.cost)
            return result, f"from {made.broke_at}"

        async with self._open_working_copy(slot.case) as copy:
            return await self._run_and_store_note(slot, copy, fork_and_answer_questions, self.models(slot.case))

    def _hash_case_files(self, case: Case) -> Mapping[str, str]:
        """Return the hashes of the files of a case, from a temporary working copy."""
        copy = WorkingCopy.create(self.evaluation.get_files(case), self.root)
        copy.remove()
        return copy.before

    def _find_call_of_changed_tool(self, history: History, side: Side, note: _Note) -> str:
        """Return the address of the first call of a tool whose function has changed, such as ``"#4"``; ``""`` if there is none."""
        changed = {name for name, digest in side.tools.items() if note.tools.get(name, digest) != digest}
        for address, intent in sort_effects_in_program_order(history):
            if intent.type == "tool_call" and history.form(intent)["tool_name"] in changed:
                return format_address(*address)
        return ""

    # --- checks -------------------------------------------------------------------------------------------------------

    async def _judge_and_store(self, slot: _SampleSlot, ended_sample: _EndedSample) -> Sample:
        """Run the checks of an ended run, store their verdicts in its note, and return its sample."""
        result, note = ended_sample.result, ended_sample.note
        cut = _describe_first_interrupted_effect(FileJournal(slot.journal_path).history())
        status = ERROR if cut else _get_status_or_error(result)
        checks = self.evaluation.get_named_checks(slot.case)
        if status == RunStatus.COMPLETED.value:
            run = JudgedRun(slot.case, result, FileJournal(slot.journal_path), note.files)
            scores = dict[str, Score]()
            for name, check in checks.items():
                judged = attrs.evolve(run, ask=partial(self._recall_or_ask_judge, slot, name, ended_sample.models))
                scores[name] = await _run_and_score_check(check, judged, note.scores.get(name))
        else:
            reason = f"the run ended as {status}" + (f": {result.error}" if result.error is not None else "")
            reason = f"{cut}, so the run is no measure of the agent" if cut else reason
            scores = {
                name: Score(0.0, False, reason, "not asked", _is_judge(check), hash_function(check))
                for name, check in checks.items()
            }
        known = {name: score for name, score in scores.items() if score.state == "ok"}
        attrs.evolve(note, scores={**note.scores, **known}).write(slot.journal_path)
        return Sample(
            case=slot.case.id,
            side=slot.side.name,
            n=slot.number,
            journal=slot.journal_path.relative_to(self.folder).as_posix(),
            status=status,
            scores=scores,
            cost=result.cost,
            tokens=result.usage.total_tokens,
            steps=result.state.step_index,
            seconds=note.seconds,
            reused=ended_sample.reused,
        )

    async def _recall_or_ask_judge(self, slot: _SampleSlot, check: str, models: Any, agent: Any, prompt: str) -> Any:
        """
        Return the recorded output of a judge for the same question, or run the judge; raise ``JudgeNeeded`` if it may not run.

        Args:
            slot: The sample.
            check: The name of the check, which is in the name of the judge's journal.
            models: The models of the sample; ``None`` for real ones.
            agent: The judge, or a value from which ``load`` finds it.
            prompt: The question.

        Raises:
            JudgeNeeded: if nothing is recorded and only records count, or the budget is spent.
            DataError: if the judge does not complete.
        """
        journal_path = slot.journal_path.with_name(f"{slot.journal_path.stem}.{check}.jsonl")
        definition = agent if isinstance(agent, AgentDefinition) else self.load(agent)
        copy = WorkingCopy.create(None, self.root)
        try:
            if journal_path.is_file():
                async with self.bench(definition, copy.root, performs=False) as engine:
                    known = await _replay_judge_output(engine, definition, prompt, journal_path)
                if known is not None:
                    return known
            if self.recheck:
                msg = "no verdict of the judge is recorded for this sample, and recheck calls no model"
                raise JudgeNeeded(msg)
            return await self._run_and_record_judge(definition, prompt, journal_path, copy, models)
        finally:
            copy.remove()

    async def _run_and_record_judge(
        self, definition: AgentDefinition, prompt: str, journal_path: Path, copy: WorkingCopy, models: Any
    ) -> Any:
        """Run a judge, record it at *journal_path*, and return its output; arguments and errors are those of ``_recall_or_ask_judge``."""
        limits, reserved = definition.limits, None
        if self.ledger.budget is not None:
            reserved = await self.ledger.wait_and_reserve_cost(limits)
            if reserved is None:
                raise JudgeNeeded(self.ledger.stopped)
            limits = self.ledger.make_run_limits(limits, is_scripted=models is not None)
        result: RunResult | None = None
        try:
            journal_path.unlink(missing_ok=True)  # noqa: ASYNC240 - one call of the system
            async with self.bench(definition, copy.root, performs=True) as engine:
                with engine.override(models=models, budget=self.ledger.shared_budget):
                    journal = FileJournal(journal_path, sync="write")
                    result = await engine.run(definition, prompt, journal=journal, limits=limits)
        finally:
            self.ledger.settle_run_cost(reserved, None if result is None else result.cost)
        if self.ledger.stop_if_run_spent_budget(result):
            raise JudgeNeeded(self.ledger.stopped)
        if result.status is not RunStatus.COMPLETED:
            msg = f"the judge {definition.id} ended as {result.status.value}: {result.error}"
            raise DataError(msg)
        return plain(result.output)


async def _run_and_score_check(check: CheckFunction, run: JudgedRun, earlier_score: Score | None) -> Score:
    """Run a check and return its score; *earlier_score* if the check is unchanged and its files are gone."""
    of, is_judge = hash_function(check), _is_judge(check)
    try:
        verdict = await run_check(check, run)
    except FilesGone as gone:
        return (
            earlier_score
            if earlier_score is not None and earlier_score.of == of
            else Score(None, None, str(gone), "unknown", is_judge, of)
        )
    except JudgeNeeded as needed:
        # The known verdict is that of another judge or question: a recorded one would have been found.
        return Score(None, None, str(needed), "unknown", is_judge, of)
    except Exception as error:  # noqa: BLE001 - whatever it raises, the run is not to blame
        return Score(None, None, f"{type(error).__name__}: {error}", "broken", is_judge, of)
    reason = f"{verdict.label}: {verdict.reason}" if verdict.label else verdict.reason
    return Score(float(verdict.score), verdict.has_passed, reason, "ok", is_judge, of)


def _is_judge(check: CheckFunction) -> bool:
    """Return whether an agent decides a check."""
    return isinstance(check, Criterion) and check.is_judge


def _get_status_or_error(result: RunResult) -> str:
    """Return the status of a run; ``"error"`` if its provider failed after all retries."""
    is_provider = result.status is RunStatus.FAILED and isinstance(result.error, ModelError)
    return ERROR if is_provider else result.status.value


def _describe_first_interrupted_effect(history: History) -> str:
    """Return address and cause of the first effect that was interrupted, for example by a lost tool server, or ``""``."""
    for address, intent in sort_effects_in_program_order(history):
        known = history.results.get(address)
        if known is None or not KINDS[intent.type].changes_world:
            continue
        outcome = history.outcome(known)
        if isinstance(outcome, Failure):
            said = outcome.error.message if getattr(outcome.error, "kind", "") in UNREACHED else ""
        else:
            said = _find_interruption_message(outcome.value)
        if said:
            return f"{format_address(*address)} was cut off: {said}"
    return ""


def _find_interruption_message(value: object) -> str:
    """Return the message of an outcome that a lost connection or server interrupted; ``""`` for other outcomes."""
    if isinstance(value, Mapping) and value.get("lost") is True and "error" in value:
        return str(value["error"])  # what a server said when a person had answered it
    if not isinstance(value, ToolResult) or not value.is_error:
        return ""
    is_cut = any(effect.kind == CUT_OFF for effect in value.side_effects)
    # Earlier recordings hold no other trace of a connection that was closed under a call.
    return value.text if is_cut or value.text == "CancelledError" else ""


async def _run_case_with_answers(engine: Engine, slot: _SampleSlot, limits: Limits | None) -> RunResult:
    """Run a case to its end, and answer its questions with the answers of the case."""
    case, agent, journal = slot.case, slot.side.agent, FileJournal(slot.journal_path, sync="write")
    ahead = case.answers if isinstance(case.answers, Mapping) else None
    result = await engine.run(agent, case.prompt, params=case.params, limits=limits, answers=ahead, journal=journal)
    return await _resume_with_answers(engine, slot, result)


async def _resume_with_answers(engine: Engine, slot: _SampleSlot, result: RunResult) -> RunResult:
    """Resume a run with the answers of its case until it ends, in at most ``MAX_QUESTIONS`` rounds."""
    given, journal = slot.case.answers, FileJournal(slot.journal_path, sync="write")
    for _ in range(MAX_QUESTIONS):
        if result.status is not RunStatus.SUSPENDED or given is None:
            break
        if isinstance(given, Mapping):
            answers = {
                q.id: given.get(q.id, given.get(q.text)) for q in result.pending_questions if {q.id, q.text} & {*given}
            }
            if not answers:
                break
        else:
            answers = {q.id: given(q) if callable(given) else str(given) for q in result.pending_questions}
        result = await engine.resume(journal, agent=slot.side.agent, answers=answers)
    return result


# --- judges -----------------------------------------------------------------------------------------------------------


async def _replay_judge_output(engine: Engine, agent: AgentDefinition, prompt: str, journal_path: Path) -> object:
    """Replay a judge's journal, and return the output if the prompt is the same; ``None`` if it differs or the run is incomplete."""
    journal = FileJournal(journal_path)
    try:
        if not journal.records():
            return None
        result = await engine.replay(journal, agent=agent)
    except StepEngineError:
        return None
    first = next((message.text for message in result.state.message_history if message.role == "user"), None)
    return plain(result.output) if result.status is RunStatus.COMPLETED and first == prompt else None


# --- notes ------------------------------------------------------------------------------------------------------------


@frozen
class _Note:
    """
    The data stored next to the journal of a sample.

    Attributes:
        key: The digest of the case; a sample with another one is not reused.
        definition: The digest of the agent's definition; a replay, not this digest, shows whether the agent has changed.
        tools: The digest of each tool's function.
        files: The files at the start and at the end of the run.
        seconds: The duration of the run.
        scores: The verdicts of the checks, without broken and unknown ones.
    """

    key: str
    definition: str
    tools: Mapping[str, str]
    files: WorkingFiles
    seconds: float
    scores: Mapping[str, Score] = attrs.field(factory=dict)

    @staticmethod
    def get_note_path(journal: Path) -> Path:
        return journal.with_name(f"{journal.stem}.note.json")

    def write(self, journal: Path) -> None:
        files = self.files
        told = {
            "key": self.key, "definition": self.definition, "tools": dict(self.tools), "seconds": self.seconds,
            "files": {"before": dict(files.before), "after": dict(files.after), "kept": dict(files.kept)},
            "scores": {name: attrs.asdict(score) for name, score in self.scores.items()},
        }  # fmt: skip
        self.get_note_path(journal).write_text(json.dumps(told), encoding="utf-8")

    @classmethod
    def read(cls, journal: Path) -> _Note | None:
        """Return the note next to a journal; ``None`` if there is no readable one."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError):
            with cls.get_note_path(journal).open(encoding="utf-8") as file:
                told = json.loads(file.read(MAX_NOTE))
            files = WorkingFiles(**told["files"])
            scores = {name: Score(**score) for name, score in told["scores"].items()}
            return cls(told["key"], told["definition"], told["tools"], files, float(told["seconds"]), scores)
        return None
