"""``stepengine compare improve``: a search for a better version of an agent, judged by an evaluation."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import make_engine_setup, make_pricing, models_for_agents
from stepengine.cli.evaluation import (
    make_report_redactor,
    make_result_folder_path,
    redact_lines,
    redact_report,
    run_and_close_engines,
    run_reporting_errors,
)
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.screen.render import print_visible, to_ascii_json, visible
from stepengine.cli.scripts import ScriptFile, load_script
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import canonical
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import DataError

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation.alterations import AgentFile
    from stepengine.evaluation.case_runs import Evaluation
    from stepengine.evaluation.criteria import Case
    from stepengine.evaluation.improvement import Improvement
    from stepengine.journal import Journal
    from stepengine.models import Models

IMPROVER = "improver"
SCRIPTED = "scripted/model"
JOURNAL, BOOK = "improver.jsonl", "bought.jsonl"


@frozen
class ImproveOptions:
    """The typed options of the command."""

    agent: str
    file: str
    budget: str
    n: int | None
    by: str
    only: tuple[str, ...]
    reflecting: str
    blame: int | None
    versions: int | None
    concurrency: int | None
    seed: int | None
    out: str
    goes_on: str
    script: str
    writes: bool


@partial(with_options, without=("cwd", "write", "verbose"))
def improve(
    options: Options,
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="File or id of the agent.")],
    *,
    file: Annotated[
        str, typer.Option("--eval", help="A .py file with `evaluation = ...`, or a .yaml file.", metavar="FILE")
    ] = "",
    budget: Annotated[
        str, typer.Option("--budget", help="Limit on the total cost, in US dollars.", metavar="USD")
    ] = "",
    n: Annotated[int | None, typer.Option("-n", help="Samples of each case; default: what FILE says.", min=1)] = None,
    by: Annotated[str, typer.Option(help="What to improve: pass, or a check.", metavar="CHECK")] = "pass",
    only: Annotated[
        list[str] | None, typer.Option(help="Change only matching parts, such as 'tools.*'.", metavar="GLOB")
    ] = None,
    model: Model = None,
    reflect_model: Annotated[
        str, typer.Option(help="The model that proposes changes; default: that of AGENT.", metavar="MODEL")
    ] = "",
    blame: Annotated[
        int | None,
        typer.Option(
            help="Runs from each step of a failed run, to find the step to blame; 0 for none; default: 4.",
            min=0,
            max=20,
        ),
    ] = None,
    versions: Annotated[int | None, typer.Option(help="Most versions to try; default: 60.", min=1, max=1000)] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Number of concurrent cases; default: 4.", min=1, max=64)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all random choices; default: random, and printed.", min=0)
    ] = None,
    out: Annotated[
        str, typer.Option(help="Folder of the results; default: improvements/AGENT/TIME.", metavar="DIR")
    ] = "",
    goes_on: Annotated[str, typer.Option("--continue", help="Continue an interrupted search.", metavar="DIR")] = "",
    script: ScriptFile = "",
    writes: Annotated[bool, typer.Option("--write", help="Change the agent's file where that is better.")] = False,
) -> Exit:
    r"""
    Search for a better version of an agent, and verify it.

    Changes only texts and values in AGENT's file: prompts, tool descriptions, settings, defaults of params; never
    code. A model reads failed runs with the step to blame and changes one text or value. Versions that are best at
    some case are kept and merged. Some cases of FILE are held out: those with the tag held-out, or random ones. The
    best version counts as better only if it is better on held-out cases, beyond the interval of `stepengine eval`.

    --budget limits the whole search, and is exceeded by at most one model call. No reply is paid for twice, not
    after a crash and not for equal requests of two versions. Results are kept in a folder: improvement.diff,
    report.html, and journals of all runs and of the search. FILE and AGENT are executed as your own code.

    Exit codes:
      0    a better version was found
      1    none was found, or AGENT was edited meanwhile; nothing changes
      2    wrong usage, or the agent cannot be improved; nothing was spent
      4    the budget was spent before a decision; nothing changes

    Examples:
      stepengine compare improve ./agents/mine.py --eval evals.py --budget 2
      stepengine compare improve ./mine.py --eval evals.py --budget 2 --write
      stepengine compare improve ./agents/mine.py --eval evals.py \
          --continue improvements/mine/20260102-101500
    """
    asked = ImproveOptions(
        agent,
        file,
        budget,
        n,
        by,
        tuple(only or ()),
        reflect_model,
        blame,
        versions,
        concurrency,
        seed,
        out,
        goes_on,
        script,
        writes,
    )
    return run_reporting_errors(lambda: _run_search(attrs.evolve(options, agent="", model=model).in_force(), asked))


def _run_search(options: Options, asked: ImproveOptions) -> Exit:
    from stepengine.evaluation.reply_book import ReplyBook
    from stepengine.evaluation.result_folders import replace_file

    search = _PlannedSearch.from_options(options, asked)
    search.check_before_search()
    folder = search.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not options.quiet:
        print_error(f"seed {search.plan['seed']}; to continue after a crash: --continue {folder}")
    with ReplyBook(folder / BOOK, Decimal(search.plan["budget"])) as book:
        made = run_and_close_engines(lambda: search.run_to_end(book), [])
    _write_results(search, made)
    is_edited = made.is_better and asked.writes and not search.file.is_unchanged()
    if made.is_better and asked.writes and not is_edited:
        replace_file(search.file.file, search.file.source_with_changes(made.found["changes"]))
    _print_report(search, made, options, is_edited=is_edited)
    if is_edited:
        return Exit.FAILED
    return Exit.LIMIT if made.is_undecided else Exit.COMPLETED if made.is_better else Exit.FAILED


# --- what was typed ---------------------------------------------------------------------------------------------------


def _check_budget(text: str) -> str:
    try:
        amount = Decimal(text)
    except InvalidOperation:
        amount = Decimal("NaN")
    if amount.is_finite() and amount > 0:
        return text
    msg = f"--budget is an amount of US dollars above 0, such as 2 or 0.50, not {text!r}"
    raise UsageProblem(msg)


@attrs.define
class _PlannedSearch:
    """The plan of a search, before any money is spent."""

    options: Options
    asked: ImproveOptions
    root: Path
    file: AgentFile
    agent: AgentDefinition
    evaluation: Evaluation
    parts: Mapping[str, Any]
    plan: dict[str, Any]
    folder: Path

    @classmethod
    def from_options(cls, options: Options, asked: ImproveOptions) -> _PlannedSearch:
        """Return the plan of a search; raise an error for options that are missing or do not fit together."""
        from stepengine.engine.loader import locate_agent
        from stepengine.engine.trust import is_sandboxed
        from stepengine.evaluation.alterations import AgentFile
        from stepengine.evaluation.evaluation_files import load_evaluation

        if not asked.file:
            msg = "--eval FILE defines how the agent is judged; `stepengine eval` runs such a file"
            raise UsageProblem(msg)
        budget = "" if asked.goes_on and not asked.budget else _check_budget(asked.budget)
        if asked.out and asked.goes_on:
            msg = "--out and --continue do not go together"
            raise UsageProblem(msg)
        evaluation = load_evaluation(Path(asked.file))
        evaluation = attrs.evolve(evaluation, n=asked.n or evaluation.n)
        place = locate_agent(asked.agent, folders=options.settings.agent_folders)
        if place.sandboxed or is_sandboxed(place.file):
            msg = f"{place.file} runs in the sandbox alone, and improve tries versions of a file that may be imported"
            raise UsageProblem(msg)
        file = AgentFile.read(place)
        parts = {
            name: part.value
            for name, part in file.parts.items()
            if not asked.only or any(fnmatchcase(name, pattern) for pattern in asked.only)
        }
        made = cls(
            options, asked, Path(asked.file).resolve().parent, file, file.version({}), evaluation, parts, {}, Path()
        )
        made._make_plan(budget)
        return made

    def _make_plan(self, budget: str) -> None:
        from stepengine.evaluation.evaluation_report import MAX_SEED
        from stepengine.evaluation.result_folders import check_result_folder

        asked = self.asked
        self.folder = Path(asked.goes_on or asked.out or make_result_folder_path("improvements", self.agent.id))
        check_result_folder(self.folder)
        if asked.goes_on:
            self.plan = self._load_started_plan(budget)
            return
        if self._has_started():
            msg = f"{self.folder} already contains a search; continue it with --continue, or name another folder"
            raise UsageProblem(msg)
        self.plan = {
            "parts": dict(self.parts), "budget": budget, "seed": secrets.randbelow(MAX_SEED) if asked.seed is None else asked.seed,
            "blame": _typed_or_default(asked.blame, 4), "versions": _typed_or_default(asked.versions, 60), "at_once": _typed_or_default(asked.concurrency, 4),
            "model": self._choose_reflection_model(), "source": self._digest_inputs(),
        }  # fmt: skip

    def _load_started_plan(self, budget: str) -> dict[str, Any]:
        """Load the plan of a search that is continued."""
        from stepengine.data.codec import plain

        if not self._has_started():
            msg = f"{str(self.folder)!r} is not a folder of a search: it has no {JOURNAL} with a run; --out starts one there"
            raise UsageProblem(msg)
        plan: dict[str, Any] = plain(self.journal.history().root["params"])
        if plan["source"] != self._digest_inputs():
            msg = f"{self.folder} is a search with another {self.file.file}, {self.asked.file}, -n, --by, --only or --model; start a new one"
            raise UsageProblem(msg)
        if budget and Decimal(budget) != Decimal(plan["budget"]):
            msg = f"the budget of {self.folder} is {plan['budget']} US dollars; omit --budget, or start a new search"
            raise UsageProblem(msg)
        asked = self.asked
        typed = {
            "seed": ("seed", asked.seed), "blame": ("blame", asked.blame), "versions": ("versions", asked.versions),
            "concurrency": ("at_once", asked.concurrency), "reflect-model": ("model", asked.reflecting or None),
        }  # fmt: skip
        for option, (name, value) in typed.items():
            if value is not None and value != plan[name]:
                msg = f"--{option} of {self.folder} is {plan[name]}; omit it, or start a new search"
                raise UsageProblem(msg)
        return plan

    def _has_started(self) -> bool:
        """Return whether the search has its first record."""
        from stepengine.errors import JournalMissing

        try:
            return bool(self.journal.history().root)
        except JournalMissing:
            return False

    @property
    def journal(self) -> Journal:
        """The journal of the search."""
        from stepengine.journal import FileJournal

        return FileJournal(self.folder / JOURNAL, sync="write")

    def _choose_reflection_model(self) -> str:
        chosen = (
            self.asked.reflecting or self.options.main_model or self.agent.model or self.options.settings.get("model")
        )
        if not chosen and not self.asked.script:
            msg = "no model is named that could reflect: --reflect-model provider/model"
            raise UsageProblem(msg)
        return chosen or SCRIPTED

    def _digest_inputs(self) -> str:
        """Return a digest of everything except seed and budget that determines the result of a search."""
        from stepengine.evaluation.criteria import hash_function

        cases = [
            [
                case.id,
                case.prompt,
                repr(case.params),
                case.group,
                [*case.tags],
                [hash_function(c) for c in self.evaluation.checks_of(case).values()],
            ]
            for case in self.evaluation.cases
        ]
        models = sorted(self.options.models.items())
        text = canonical([self.file.source.decode(), cases, self.evaluation.n, self.asked.by, [*self.parts], models])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # --- before anything is spent -------------------------------------------------------------------------------------

    def check_before_search(self) -> None:
        """Raise with all problems of the agent and the evaluation, and split off the held-out cases."""
        from stepengine.evaluation.improvement import find_problems, split_cases

        sides: dict[str, Any] = {"agent": self.asked.agent}
        evaluation = attrs.evolve(self.evaluation, agents=sides)
        found = evaluation.problems(self.root)
        if evaluation.cases:
            found += find_problems(self.file, [*self.parts], evaluation, self.asked.by)
        if "system_prompt" in self.file.fixed and not self.asked.only:
            found.append(
                f"system_prompt of {self.agent.id!r}: {self.file.fixed['system_prompt']}; or leave it as it is with --only 'tools.*'"
            )
        if found:
            msg = "\n  ".join([f"{self.asked.agent} cannot be improved by {self.asked.file}:", *dict.fromkeys(found)])
            raise DataError(msg)
        split = split_cases(evaluation, self.plan["seed"])
        self.plan |= {"search": [*split.search], "held_out": [*split.held_out]}
        self._check_models()

    def _check_models(self) -> None:
        """Raise for models that cannot be called or have no known price, and for tools that are not allowed."""
        import tempfile

        from stepengine.engine.agent_family import find_agent_family

        with (
            tempfile.TemporaryDirectory(prefix="stepengine-improve-") as folder,
            self.bench(self.agent, Path(folder).resolve(), performs=True),
        ):
            pass
        agents = find_agent_family(self.agent, str(self.file.file), self.options.settings.agent_folders)
        chosen = self.options.models
        named = [
            chosen.get(agent.id) or chosen.get("") or agent.model or self.options.settings.get("model")
            for agent in agents
        ]
        if self.asked.script:
            return
        asked = {
            self.plan["model"],
            *([] if all(case.replies is not None for case in self.evaluation.cases) else named),
        }
        models, pricing = self.models(None), make_pricing(self.options)
        for model in sorted(filter(None, asked)):
            models.check(model)
            if pricing(model, Usage(input_tokens=1000, output_tokens=1000), datetime.now(UTC)) is None:
                msg = f"the price of {model!r} is unknown, so a budget cannot be enforced; pass it with --price"
                raise UsageProblem(msg)

    # --- running ------------------------------------------------------------------------------------------------------

    def models(self, case: Case | None) -> Models:
        """Return the models for a case, or for reflection."""
        from stepengine.engine.agent_family import find_agent_family
        from stepengine.models import Models
        from stepengine.testing import ScriptedModel

        if case is not None and case.replies is not None:
            return Models.from_value(ScriptedModel(case.replies))
        if self.asked.script:
            return Models.from_value(ScriptedModel(load_script(self.asked.script)))
        return models_for_agents(
            self.options, find_agent_family(self.agent, str(self.file.file), self.options.settings.agent_folders)
        )

    def is_free(self, case: Case | None) -> bool:
        """Return whether a script replaces the model."""
        return bool(self.asked.script) or (case is not None and case.replies is not None)

    def bench(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine whose tools may write in a working copy, and run programs there with ``--shell``."""
        file = str(self.file.file) if agent.id == self.agent.id else ""
        own = attrs.evolve(self.options, agent=file, cwd=root, write=True, quiet=True)
        return make_engine_setup(
            own, agent, performs=performs, is_new=True, asks_nobody=True, unattended=True, headless=False
        ).engine

    def load(self, agent: Any) -> AgentDefinition:
        """Load the agent of a judge."""
        from stepengine.engine.loader import load_agent
        from stepengine.evaluation.evaluation_files import resolve_agent_path

        return load_agent(resolve_agent_path(agent, self.root), folders=self.options.settings.agent_folders)

    async def run_to_end(self, book: Any) -> Improvement:
        """Run the search to its end and return the improvement."""
        from stepengine.engine import Engine
        from stepengine.engine.loader import find_bundled_agent
        from stepengine.evaluation.improvement import Improvement, Trials
        from stepengine.evaluation.reply_book import Buyer

        improver = find_bundled_agent(IMPROVER)
        assert improver is not None  # noqa: S101 - it comes with the package
        pricing = make_pricing(self.options)
        trials = Trials(
            self.file, self.evaluation, self.folder, book, self.bench, self.root, self.load, self.models, pricing, by=self.asked.by,
            n=self.evaluation.n, is_free=self.is_free, done=self._print_score,
        )  # fmt: skip
        reflecting = Buyer(book, "reflecting", self.models(None), pricing, may_be_unpriced=self.is_free(None))
        journal = self.journal
        async with Engine([improver], models=reflecting, pricing=pricing, resources=[trials]) as engine:
            if self.asked.goes_on and not self._archive_failed_search(journal):
                result = await engine.resume(journal, agent=improver, in_doubt="retry")
            else:
                if not self._has_started():  # what was killed before its first record may have left a file
                    (self.folder / JOURNAL).unlink(missing_ok=True)
                result = await engine.run(improver, params=self.plan, journal=journal)
        if trials.error is not None:
            raise trials.error
        found = self._get_output(result)
        scores = None
        if found["changes"] and not found["stopped"]:
            scores = await trials.compare(found["changes"], self.plan["held_out"], self.plan["seed"])
        diff = self.file.diff(found["changes"]) if found["changes"] else ""
        return Improvement(found, self.asked.by, scores, diff, book.spent)

    def _archive_failed_search(self, journal: Journal) -> bool:
        """Rename the journal of a failed search, so that a new one can start; return whether it had failed."""
        from stepengine.journal.show import status_of

        history = journal.history()
        if not history.is_complete or status_of(history) == RunStatus.COMPLETED.value:
            return False
        number = 1 + len([*self.folder.glob(f"{Path(JOURNAL).stem}.before-*.jsonl")])
        (self.folder / JOURNAL).replace(self.folder / f"{Path(JOURNAL).stem}.before-{number}.jsonl")
        return True

    def _get_output(self, result: RunResult) -> Mapping[str, Any]:
        from stepengine.data.codec import plain

        if result.status is not RunStatus.COMPLETED:
            msg = (
                f"the search ended as {result.status.value}: {result.error}; {self.folder / JOURNAL} shows its progress"
            )
            raise DataError(msg)
        found: Mapping[str, Any] = plain(result.output)
        return found

    def _print_score(self, version: str, case: str, made: Mapping[str, Any]) -> None:
        if not self.options.quiet:
            score = "not measured" if made["score"] is None else f"{made['score']:.2f}"
            print_error(f"{version} {case}: {score}, ${made['spent']}")


def _typed_or_default(typed: int | None, default: int) -> int:
    return default if typed is None else typed


# --- what is told -----------------------------------------------------------------------------------------------------


def _improvement_to_dict(search: _PlannedSearch, made: Improvement) -> dict[str, Any]:
    return {
        "format": "stepengine.improve/1", "agent": search.agent.id, "file": str(search.file.file), "by": made.by,
        "is_better": made.is_better, "told": made.describe(), **made.found, "diff": made.diff, "seed": search.plan["seed"],
        "budget": search.plan["budget"], "spent": str(made.spent), "folder": str(search.folder),
        "held_out": None if made.scores is None else made.scores.to_json(),
    }  # fmt: skip


def _write_results(search: _PlannedSearch, made: Improvement) -> None:
    from stepengine.evaluation.report_pages import render_improvement
    from stepengine.evaluation.result_folders import replace_file

    redactor = make_report_redactor()
    page = render_improvement(made, search.parts, lambda text: visible(redactor.text(text)))
    told = to_ascii_json(redact_report(_improvement_to_dict(search, made))) + "\n"
    files = {"results.json": told, "report.html": page} | ({"improvement.diff": made.diff} if made.is_better else {})
    for name, text in files.items():
        replace_file(search.folder / name, text.encode())


def _print_report(search: _PlannedSearch, made: Improvement, options: Options, *, is_edited: bool) -> None:
    if options.as_json:
        print(to_ascii_json(redact_report(_improvement_to_dict(search, made))))
        return
    patch = f"`patch -p1 < {search.folder / 'improvement.diff'}`"
    lines: Sequence[str] = [made.describe(), *(made.diff.rstrip("\n").split("\n") if made.is_better else [])]
    done = "changed" if search.asked.writes else f"not changed; --write does that, or {patch}"
    if is_edited:
        done = f"not changed, because it was edited during the search; {patch} merges both"
    lines = [
        *lines,
        *([f"{search.file.file}: {done}"] if made.is_better else []),
        f"spent ${made.spent}; results: {search.folder}",
    ]
    print_visible(redact_lines(lines), hang=4)
