"""
``improve`` searches for a better version of an agent, writes the results and returns them; ``stepengine compare improve`` prints them.

The search is a recorded run of the bundled agent ``improver``. Nothing here prints, and nothing asks a person.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.definition import AgentDefinition
from stepengine.data.messages import to_string_tuple
from stepengine.data.state import RunStatus
from stepengine.data.usage import Usage
from stepengine.data.visible import to_ascii_json, visible
from stepengine.engine import Engine
from stepengine.engine.agent_family import collect_agent_family
from stepengine.engine.loader import find_bundled_agent, locate_agent
from stepengine.engine.options import ModelsLike
from stepengine.engine.trust import is_sandboxed
from stepengine.errors import DataError, JournalMissing
from stepengine.evaluation.alterations import AgentFile
from stepengine.evaluation.case_runs import EngineMaker, Evaluation, make_digest_text
from stepengine.evaluation.criteria import Case, digest_json, hash_files, hash_function
from stepengine.evaluation.evaluation_files import load_evaluation
from stepengine.evaluation.evaluation_report import (
    MAX_SEED,
    get_evaluation_root,
    load_evaluation_agent,
    make_sample_engine,
    try_making_engines,
)
from stepengine.evaluation.improvement import Improvement, Trials, find_improvement_problems, split_cases
from stepengine.evaluation.reply_book import CachingProvider, ReplyBook
from stepengine.evaluation.report_pages import render_improvement
from stepengine.evaluation.result_folders import RESULTS, replace_file, require_own_result_folder
from stepengine.evaluation.scoring import PASS
from stepengine.journal import FileJournal
from stepengine.journal.show import get_run_status
from stepengine.models import Models
from stepengine.models.pricing import LIST_PRICES
from stepengine.models.scripted import ScriptedModel
from stepengine.redaction import make_redactor
from stepengine.runtime.prices import Pricing

IMPROVER = "improver"
SCRIPTED = "scripted/model"
JOURNAL, BOOK = "improver.jsonl", "bought.jsonl"
DEFAULTS = {"blame": 4, "versions": 60, "at_once": 4}
OPTIONS = {"at_once": ("concurrency", "concurrency"), "model": ("reflect_model", "reflect-model")}
"""The options whose names differ from those of the plan: in Python, and of the command."""


async def improve(
    agent: str | Path,
    evaluation: Evaluation | str | Path,
    *,
    budget: Decimal | float | str | None = None,
    replies: Any = None,
    models: ModelsLike = None,
    agent_models: Mapping[str, str] | None = None,
    default_model: str | None = None,
    reflect_model: str | None = None,
    pricing: Pricing = LIST_PRICES,
    n: int | None = None,
    by: str = PASS,
    only: Iterable[str] = (),
    blame: int | None = None,
    versions: int | None = None,
    concurrency: int | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    root: str | Path | None = None,
    resume: str | Path | None = None,
    write: bool = False,
    agent_folders: Iterable[Path] = (),
    on_progress: Callable[[str], object] = lambda _: None,
    make_engine: EngineMaker | None = None,
) -> Improvement:
    """
    Search for a better version of an agent, test it on held-out cases, and return the result.

    The options are those of ``stepengine compare improve``. Without *replies*, models are requested for real. The folder of the
    results contains ``results.json``, ``report.html``, the journals of all runs, and ``improvement.diff`` for a better version.

    Args:
        agent: The file of the agent, or its id.
        evaluation: The evaluation, or the path of a file that holds one. Its own agents are not used.
        budget: The US dollars that the whole search may cost; required unless a search is resumed.
        replies: A script of model replies, as for ``ScriptedModel``, also for the reflecting model. A case's own go first.
        models: The providers, as for ``Engine(models=...)``.
        agent_models: Models in place of those that agents name, as for ``Engine(agent_models=...)``.
        default_model: The model of agents that name none.
        reflect_model: The model that proposes changes; by default that of the agent.
        pricing: The prices of models. All models need one, so that the budget holds.
        n: The number of samples of each case; that of the evaluation by default.
        by: What to improve: ``"pass"``, or the name of a check.
        only: Change only parts whose name matches one of these patterns, such as ``"tools.*"``.
        blame: The number of runs from each step of a failed run, to find the step to blame; 4 by default, 0 for none.
        versions: The most versions to try; 60 by default.
        concurrency: The number of cases at a time; 4 by default.
        seed: Decides all random choices; random by default.
        folder: The folder for the results; a new temporary one by default.
        root: The folder that the paths of agents and files start from: that of the evaluation's file, or the working folder.
        resume: The folder of an interrupted search, which is continued.
        write: Change the agent's file if the new version is better, unless the file was edited during the search.
        agent_folders: More folders in which agents are looked up by id.
        on_progress: Called with a line of text when the search starts, and after each case.
        make_engine: Creates the engine of a sample, in place of one with *models* and the bundled tools.

    Raises:
        DataError: when the agent cannot be improved by the evaluation; all problems at once, and nothing was spent.
    """
    where, folders, patterns = get_evaluation_root(evaluation, root), tuple(agent_folders), to_string_tuple(only)
    amount = "" if resume and not budget else _validate_budget(budget)
    loaded = evaluation if isinstance(evaluation, Evaluation) else load_evaluation(Path(evaluation))
    file = _load_unsandboxed_agent_file(agent, folders)
    original = file.load_with_changes({})
    sides: dict[str, Any] = {original.id: original}
    default = default_model or (None if replies is None else SCRIPTED)
    asked = _SearchModels(replies, Models.from_value(models), agent_models or {}, default, pricing)
    search = _PlannedSearch(
        file,
        attrs.evolve(loaded, n=loaded.n if n is None else n, agents=sides),
        {
            name: part.value
            for name, part in file.parts.items()
            if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
        },
        by,
        asked.by_agent,
        Path(resume or folder or tempfile.mkdtemp(prefix="stepengine-improve-")),
        where,
    )
    given = {"seed": seed, "blame": blame, "versions": versions, "at_once": concurrency, "model": reflect_model}
    given = {name: value for name, value in given.items() if value is not None}
    require_own_result_folder(search.folder)
    if resume:
        search.load_and_check_plan(amount, given)
    else:
        search.store_new_plan(amount, {**DEFAULTS, "model": asked.find_model_name(original), **given})
    search.refuse_problems_and_split_cases(is_restricted=bool(patterns))
    make = make_engine or partial(
        make_sample_engine, models=models, agent_models=asked.by_agent, default_model=default_model
    )
    await try_making_engines([original], make)
    asked.refuse_unusable_models(search, collect_agent_family(original, str(file.file), folders))
    search.folder.mkdir(parents=True, exist_ok=True)
    on_progress(f"seed {search.plan['seed']}; to continue after a crash: --continue {shlex.quote(str(search.folder))}")
    with ReplyBook(search.folder / BOOK, Decimal(search.plan["budget"])) as book:
        trials = Trials(
            file, search.evaluation, search.folder, book, make, where,
            partial(load_evaluation_agent, root=where, folders=folders), asked.models_for_case, pricing,
            by=by, is_scripted=asked.is_scripted, done=partial(_report_case_result, on_progress),
        )  # fmt: skip
        improvement = await search.run_and_compare(trials, resumes=bool(resume))
    # First: if the process dies after the agent's file was changed, the results show why.
    _write_results(improvement)
    if write and improvement.is_better and file.is_file_unchanged():
        # Of a linked file the content changes, not the link.
        replace_file(file.file.resolve(), file.source_with_changes(improvement.found["changes"]))
        improvement = attrs.evolve(improvement, is_written=True)
        _write_results(improvement)
    return improvement


def improve_sync(agent: str | Path, evaluation: Evaluation | str | Path, **options: Any) -> Improvement:
    """Search for a better version without an event loop; options and errors are those of ``improve``."""
    return asyncio.run(improve(agent, evaluation, **options))


def _validate_budget(budget: Decimal | float | str | None) -> str:
    """Return a budget as text; raise ``DataError`` if it is not an amount above 0."""
    try:
        amount = Decimal(str(budget or ""))
    except InvalidOperation:
        amount = Decimal("NaN")
    if amount.is_finite() and amount > 0:
        return str(budget)
    msg = f"budget= or --budget must be an amount of US dollars above 0, such as 2 or 0.50, not {budget!r}"
    raise DataError(msg)


def _load_unsandboxed_agent_file(agent: str | Path, folders: Iterable[Path]) -> AgentFile:
    """Load the agent of a file with its changeable parts; raise ``DataError`` if the agent may run only in the sandbox."""
    location = locate_agent(str(agent), folders=folders)
    if location.sandboxed or is_sandboxed(location.file):
        msg = f"{location.file} may run only in the sandbox, but improve imports the versions that it tries; use another agent"
        raise DataError(msg)
    return AgentFile.load(location)


def _report_case_result(
    on_progress: Callable[[str], object], version: str, case: str, result: Mapping[str, Any]
) -> None:
    """Report score and cost of a case by *on_progress*."""
    score = "not measured" if result["score"] is None else f"{result['score']:.2f}"
    on_progress(f"{version} {case}: {score}, ${result['spent']}")


@frozen
class _SearchModels:
    """The models of a search: a script, or real ones by agent."""

    replies: Any
    registry: Models
    by_agent: Mapping[str, str]
    default: str | None
    pricing: Pricing

    def is_scripted(self, case: Case | None) -> bool:
        """Return True if a script replaces the model in *case*; *case* is ``None`` for the reflecting model."""
        return self.replies is not None or (case is not None and case.replies is not None)

    def models_for_case(self, case: Case | None) -> Models:
        """Return the scripted models of a case or search, else the real ones; *case* is ``None`` for the reflecting model."""
        script = self.replies if case is None or case.replies is None else case.replies
        return self.registry if script is None else Models.from_value(ScriptedModel(script))

    def find_model_name(self, agent: AgentDefinition) -> str | None:
        """Return the model string of an agent; ``None`` if none is named."""
        return self.by_agent.get(agent.id) or self.by_agent.get("") or agent.model or self.default

    def refuse_unusable_models(self, search: _PlannedSearch, family: Iterable[AgentDefinition]) -> None:
        """Raise for a model of *family*, or the reflecting one, that cannot be called or whose price is unknown."""
        if self.replies is not None:
            return
        asked = {search.plan["model"]}
        if any(case.replies is None for case in search.evaluation.cases):
            asked |= {name for one in family if (name := self.find_model_name(one))}
        for model in sorted(asked):
            self.registry.check(model)
            if self.pricing(model, Usage(input_tokens=1000, output_tokens=1000), datetime.now(UTC)) is None:
                msg = f"the price of {model!r} is unknown, so a budget cannot be enforced; pass it with pricing= or --price"
                raise DataError(msg)


@attrs.define
class _PlannedSearch:
    """
    A search with its inputs; nothing is spent before ``run_and_compare``.

    Attributes:
        file: The agent's file.
        evaluation: The cases and checks.
        parts: The parts that may be changed, by name.
        by: What to improve.
        models: The chosen models by agent.
        folder: The folder of the results.
        root: The folder of the evaluation's files.
        plan: The params of the agent ``improver``.
    """

    file: AgentFile
    evaluation: Evaluation
    parts: Mapping[str, Any]
    by: str
    models: Mapping[str, str]
    folder: Path
    root: Path
    plan: dict[str, Any] = attrs.field(factory=dict)

    @property
    def journal(self) -> FileJournal:
        return FileJournal(self.folder / JOURNAL, sync="write")

    def has_first_record(self) -> bool:
        """Return whether the journal of the search contains the start of a run."""
        try:
            return bool(self.journal.history().root)
        except JournalMissing:
            return False

    def store_new_plan(self, budget: str, options: Mapping[str, Any]) -> None:
        """
        Store the plan of a new search, made of its options; raise ``DataError`` if the folder has a search or no model is named.

        Raises:
            DataError: when the folder contains a search, or no model for the search is named.
        """
        if self.has_first_record():
            msg = f"{self.folder} already contains a search; continue it with resume= or --continue, or name another folder"
            raise DataError(msg)
        if options["model"] is None:
            msg = (
                "the search needs a model that proposes changes: pass reflect_model= or --reflect-model provider/model"
            )
            raise DataError(msg)
        self.plan = {"seed": secrets.randbelow(MAX_SEED), **options, "parts": dict(self.parts), "budget": budget}
        self.plan["source"] = self._digest_inputs()

    def load_and_check_plan(self, budget: str, options: Mapping[str, Any]) -> None:
        """
        Load the plan of a search to continue; raise ``DataError`` if it differs from the current inputs or options.

        Raises:
            DataError: when the folder contains no search, or the search had other inputs.
        """
        if not self.has_first_record():
            msg = f"{str(self.folder)!r} contains no search: it has no {JOURNAL} with a run; start a search with folder= or --out"
            raise DataError(msg)
        self.plan = plain(self.journal.history().root["params"])
        if self.plan["source"] != self._digest_inputs():
            msg = f"{self.file.file}, the evaluation, n, by, only or model differs from the search in {self.folder}; start a new search"
            raise DataError(msg)
        if budget and Decimal(budget) != Decimal(self.plan["budget"]):
            msg = f"the budget of {self.folder} is {self.plan['budget']} US dollars; omit budget= or --budget, or start a new search"
            raise DataError(msg)
        for name, value in options.items():
            if value != self.plan[name]:
                option, flag = OPTIONS.get(name, (name, name))
                msg = f"{option}= or --{flag} of {self.folder} is {self.plan[name]}; omit it, or start a new search"
                raise DataError(msg)

    def _digest_inputs(self) -> str:
        """
        Return a digest of the inputs that a continued search must have unchanged.

        It covers the agent's file, the cases with their files and checks, n, limits, the measure, the parts and ``agent_models``. It
        does not cover the options in the plan.
        """
        cases = [
            [
                case.id,
                case.prompt,
                repr(case.params),
                make_digest_text(case.answers),
                make_digest_text(case.replies),
                self._digest_case_files(case),
                case.group,
                [*case.tags],
                [hash_function(c) for c in self.evaluation.get_named_checks(case).values()],
            ]
            for case in self.evaluation.cases
        ]
        source = self.file.source.decode()
        limits, models = repr(self.evaluation.limits), sorted(self.models.items())
        return digest_json([source, cases, self.evaluation.n, limits, self.by, [*self.parts], models])

    def _digest_case_files(self, case: Case) -> str:
        files = self.evaluation.get_files(case)
        folder = None if files is None or isinstance(files, Mapping) else (self.root / files).resolve()
        return digest_json(hash_files(folder) if folder is not None and folder.is_dir() else repr(files))

    def refuse_problems_and_split_cases(self, *, is_restricted: bool) -> None:
        """
        Raise for problems of the agent or evaluation; otherwise store the search and held-out cases in the plan.

        Args:
            is_restricted: Whether the caller has chosen the parts to change.

        Raises:
            DataError: with all problems of the agent and the evaluation.
        """
        found = self.evaluation.problems(self.root)
        if self.evaluation.cases:
            found += find_improvement_problems(self.file, [*self.parts], self.evaluation, self.by)
        if "system_prompt" in self.file.fixed and not is_restricted:
            found.append(
                f"system_prompt of {self.file.agent_id!r}: {self.file.fixed['system_prompt']}; or leave it as it is with --only 'tools.*'"
            )
        if found:
            msg = "\n  ".join(
                [f"{self.file.file} cannot be improved by {self.evaluation.name}:", *dict.fromkeys(found)]
            )
            raise DataError(msg)
        self.plan["search"], self.plan["held_out"] = split_cases(self.evaluation, self.plan["seed"])

    async def run_and_compare(self, trials: Trials, *, resumes: bool) -> Improvement:
        """
        Run or resume the search, and compare the best version with the original on held-out cases.

        Raises:
            DataError: when the search fails; its journal shows the progress.
        """
        improver = find_bundled_agent(IMPROVER)
        assert improver is not None  # noqa: S101 - it comes with the package
        journal, book, pricing = self.journal, trials.book, trials.pricing
        models = CachingProvider(
            book, "reflecting", trials.models(None), pricing, may_be_unpriced=trials.is_scripted(None)
        )
        async with Engine([improver], models=models, pricing=pricing, resources=[trials]) as engine:
            if resumes and not self._archive_failed_run():
                result = await engine.resume(journal, agent=improver, in_doubt="retry")
            else:
                if not self.has_first_record():  # a search killed before its first record may have left a file
                    (self.folder / JOURNAL).unlink(missing_ok=True)
                result = await engine.run(improver, params=self.plan, journal=journal)
        if trials.error is not None:
            raise trials.error
        if result.status is not RunStatus.COMPLETED:
            msg = f"the search ended as {result.status.value}: {result.error}; {journal.address} shows its progress"
            raise DataError(msg)
        found = plain(result.output)
        scores = None
        if found["changes"] and not found["stopped"]:
            scores = await trials.compare_with_original(found["changes"], self.plan["held_out"], self.plan["seed"])
        return Improvement(
            found, self.by, scores, self.file.diff_changes(found["changes"]), book.spent, file=self.file.file,
            agent_id=self.file.agent_id, parts=self.parts, folder=self.folder, seed=self.plan["seed"], budget=self.plan["budget"],
        )  # fmt: skip

    def _archive_failed_run(self) -> bool:
        """Rename the journal if the search failed, so that a new search can start; return whether it failed."""
        history = self.journal.history()
        if not history.is_complete or get_run_status(history) == RunStatus.COMPLETED.value:
            return False
        number = 1 + len([*self.folder.glob(f"{Path(JOURNAL).stem}.before-*.jsonl")])
        (self.folder / JOURNAL).replace(self.folder / f"{Path(JOURNAL).stem}.before-{number}.jsonl")
        return True


def _write_results(improvement: Improvement) -> None:
    """Write ``results.json``, ``report.html``, and ``improvement.diff`` for a better version."""
    redactor = make_redactor("all", os.environ)
    page = render_improvement(improvement, lambda text: visible(redactor.text(text)))
    files = {RESULTS: f"{to_ascii_json(redactor.value(improvement.to_json()))}\n", "report.html": page}
    for name, text in (files | ({"improvement.diff": improvement.diff} if improvement.is_better else {})).items():
        replace_file(improvement.folder / name, text.encode())
