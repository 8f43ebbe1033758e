"""``stepengine compare improve``: a search for a better version of an agent, judged by an evaluation."""

from __future__ import annotations

import hashlib
import os
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

from stepengine.cli.bench import bench_for, family, pricing_of, served_models
from stepengine.cli.evaluation import clean_lines, clean_report, cleaner, interrupted_or, to_the_end
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.screen.render import dumps, say, visible
from stepengine.cli.scripts import ScriptFile, script_of
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition
from stepengine.data.json import canonical
from stepengine.data.state import RunResult, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import DataError

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation.altering import AgentFile
    from stepengine.evaluation.criteria import Case
    from stepengine.evaluation.evaluating import Evaluation
    from stepengine.evaluation.improving import Improvement
    from stepengine.journal import Journal
    from stepengine.models import Models

__all__ = ("improve",)

IMPROVER = "improver"
SCRIPTED = "scripted/model"
JOURNAL, BOOK = "improver.jsonl", "bought.jsonl"


@frozen
class ImproveOptions:
    """What is asked for, as it was typed."""

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
        str, typer.Option("--budget", help="What all of it may cost together, in US dollars.", metavar="USD")
    ] = "",
    n: Annotated[int | None, typer.Option("-n", help="Samples of each case; default: what FILE says.", min=1)] = None,
    by: Annotated[str, typer.Option(help="What is to get better: pass, or a check.", metavar="CHECK")] = "pass",
    only: Annotated[
        list[str] | None, typer.Option(help="Change only such parts, such as 'tools.*'.", metavar="GLOB")
    ] = None,
    model: Model = None,
    reflect_model: Annotated[
        str, typer.Option(help="The model that reflects; default: that of AGENT.", metavar="MODEL")
    ] = "",
    blame: Annotated[
        int | None,
        typer.Option(
            help="Runs from each step of a failed run, to find the one to blame; 0 for none; default: 4.",
            min=0,
            max=20,
        ),
    ] = None,
    versions: Annotated[
        int | None, typer.Option(help="The most versions that are tried; default: 60.", min=1, max=1000)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Cases that are run at a time; default: 4.", min=1, max=64)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="All chance; drawn and told by default.", min=0)] = None,
    out: Annotated[
        str, typer.Option(help="Folder of the results; default: improvements/AGENT/TIME.", metavar="DIR")
    ] = "",
    goes_on: Annotated[
        str, typer.Option("--continue", help="Go on with a search that was cut off.", metavar="DIR")
    ] = "",
    script: ScriptFile = "",
    writes: Annotated[bool, typer.Option("--write", help="Change the agent's file where that is better.")] = False,
) -> Exit:
    r"""
    Search for a better version of an agent, and prove it.

    What can change are texts and values that stand in AGENT's file: its prompts, the texts of its tools, settings, defaults of
    its params; never its code. A model that reflects is shown failed runs with the step to blame and changes one of them;
    versions that are best at some case are kept and merged. Some cases of FILE are held out, those with the tag held-out or
    drawn ones: only where the best version is better there, beyond the interval of `stepengine eval`, it is one.

    --budget holds for everything, and is exceeded by no more than one model call. No reply is bought twice: not after a
    crash, and not where a version asks what the one before it asked. Results stay in a folder: improvement.diff,
    report.html, and journals of all runs, that of the search included. FILE and AGENT are code of yours and run as such.

    Leaves with:
      0    a better version was found
      1    none was found, or AGENT was edited meanwhile; nothing is changed
      2    wrong usage, or the agent cannot be improved; nothing was spent
      4    the budget was spent before it was decided; nothing is changed

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
    return interrupted_or(lambda: _improve(attrs.evolve(options, agent="", model=model).in_force(), asked))


def _improve(options: Options, asked: ImproveOptions) -> Exit:
    from stepengine.evaluation.buying import ReplyBook

    search = _PlannedSearch.of(options, asked)
    search.refuse_problems()
    folder = search.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not options.quiet:
        complain(f"seed {search.plan['seed']}; to go on after a crash: --continue {folder}")
    with ReplyBook(folder / BOOK, Decimal(search.plan["budget"])) as book:
        made = to_the_end(lambda: search.ended(book), [])
    _write(search, made)
    is_edited = made.is_better and asked.writes and not search.file.is_as_read()
    if made.is_better and asked.writes and not is_edited:
        _replace(search.file.file, search.file.altered(made.found["changes"]))
    _tell(search, made, options, is_edited=is_edited)
    if is_edited:
        return Exit.FAILED
    return Exit.LIMIT if made.is_undecided else Exit.COMPLETED if made.is_better else Exit.FAILED


# --- what was typed ---------------------------------------------------------------------------------------------------


def _budget(text: str) -> str:
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
    """A search, as far as it is known before anything is spent."""

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
    def of(cls, options: Options, asked: ImproveOptions) -> _PlannedSearch:
        """Return what was asked for, with all that can be known of it; errors say what cannot be."""
        from stepengine.engine.loading import agent_place
        from stepengine.engine.trust import is_sandboxed
        from stepengine.evaluation.altering import AgentFile
        from stepengine.evaluation.evaluation_files import load_evaluation

        if not asked.file:
            msg = "--eval FILE says what the agent is judged by; `stepengine eval` runs such a file"
            raise UsageProblem(msg)
        budget = "" if asked.goes_on and not asked.budget else _budget(asked.budget)
        if asked.out and asked.goes_on:
            msg = "--out and --continue do not go together"
            raise UsageProblem(msg)
        evaluation = load_evaluation(Path(asked.file))
        evaluation = attrs.evolve(evaluation, n=asked.n or evaluation.n)
        place = agent_place(asked.agent, folders=options.settings.agent_folders)
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
        made._plan(budget)
        return made

    def _plan(self, budget: str) -> None:
        from stepengine.evaluation.evaluation_report import MAX_SEED

        asked = self.asked
        self.folder = Path(asked.goes_on or asked.out or _new_folder(self.agent.id))
        if asked.goes_on:
            self.plan = self._plan_form(budget)
            return
        if self._has_begun():
            msg = f"{self.folder} holds a search already; go on with it with --continue, or name another folder"
            raise UsageProblem(msg)
        self.plan = {
            "parts": dict(self.parts), "budget": budget, "seed": secrets.randbelow(MAX_SEED) if asked.seed is None else asked.seed,
            "blame": _or(asked.blame, 4), "versions": _or(asked.versions, 60), "at_once": _or(asked.concurrency, 4),
            "model": self._reflecting(), "source": self._source(),
        }  # fmt: skip

    def _plan_form(self, budget: str) -> dict[str, Any]:
        """Return the plan of a search that is continued."""
        from stepengine.data.codec import plain

        if not self._has_begun():
            msg = f"{str(self.folder)!r} is not a folder of a search: it has no {JOURNAL} with a run; --out begins one there"
            raise UsageProblem(msg)
        plan: dict[str, Any] = plain(self.journal.history().root["params"])
        if plan["source"] != self._source():
            msg = f"{self.folder} is a search with another {self.file.file}, {self.asked.file}, -n, --by, --only or --model; begin a new one"
            raise UsageProblem(msg)
        if budget and Decimal(budget) != Decimal(plan["budget"]):
            msg = (
                f"the budget of {self.folder} is {plan['budget']} US dollars; leave --budget out, or begin a new search"
            )
            raise UsageProblem(msg)
        asked = self.asked
        typed = {
            "seed": ("seed", asked.seed), "blame": ("blame", asked.blame), "versions": ("versions", asked.versions),
            "concurrency": ("at_once", asked.concurrency), "reflect-model": ("model", asked.reflecting or None),
        }  # fmt: skip
        for option, (name, value) in typed.items():
            if value is not None and value != plan[name]:
                msg = f"--{option} of {self.folder} is {plan[name]}; leave it out, or begin a new search"
                raise UsageProblem(msg)
        return plan

    def _has_begun(self) -> bool:
        """Return whether a search has begun: one that was killed before its first record has not."""
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

    def _reflecting(self) -> str:
        chosen = (
            self.asked.reflecting or self.options.main_model or self.agent.model or self.options.settings.get("model")
        )
        if not chosen and not self.asked.script:
            msg = "no model is named that could reflect: --reflect-model provider/model"
            raise UsageProblem(msg)
        return chosen or SCRIPTED

    def _source(self) -> str:
        """Return a digest of all that decides what a search finds, beside its seed and its budget."""
        from stepengine.evaluation.criteria import digest_of_function

        cases = [
            [
                case.id,
                case.prompt,
                repr(case.params),
                case.group,
                [*case.tags],
                [digest_of_function(c) for c in self.evaluation.checks_of(case).values()],
            ]
            for case in self.evaluation.cases
        ]
        models = sorted(self.options.models.items())
        text = canonical([self.file.source.decode(), cases, self.evaluation.n, self.asked.by, [*self.parts], models])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    # --- before anything is spent -------------------------------------------------------------------------------------

    def refuse_problems(self) -> None:
        """Refuse what cannot be searched, with all that is wrong at once, and draw the cases that are held out."""
        from stepengine.evaluation.improving import problems_of, split_of

        sides: dict[str, Any] = {"agent": self.asked.agent}
        evaluation = attrs.evolve(self.evaluation, agents=sides)
        found = evaluation.problems(self.root)
        if evaluation.cases:
            found += problems_of(self.file, [*self.parts], evaluation, self.asked.by)
        if "system_prompt" in self.file.fixed and not self.asked.only:
            found.append(
                f"system_prompt of {self.agent.id!r}: {self.file.fixed['system_prompt']}; or leave it as it is with --only 'tools.*'"
            )
        if found:
            msg = "\n  ".join([f"{self.asked.agent} cannot be improved by {self.asked.file}:", *dict.fromkeys(found)])
            raise DataError(msg)
        split = split_of(evaluation, self.plan["seed"])
        self.plan |= {"search": [*split.search], "held_out": [*split.held_out]}
        self._check_models()

    def _check_models(self) -> None:
        """Refuse models that cannot be asked, or whose price nobody knows, and tools that the options do not allow."""
        import tempfile

        with (
            tempfile.TemporaryDirectory(prefix="stepengine-improve-") as folder,
            self.bench(self.agent, Path(folder).resolve(), performs=True),
        ):
            pass
        agents = family(self.agent, str(self.file.file), self.options.settings.agent_folders)
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
        models, pricing = self.models(None), pricing_of(self.options)
        for model in sorted(filter(None, asked)):
            models.check(model)
            if pricing(model, Usage(input_tokens=1000, output_tokens=1000), datetime.now(UTC)) is None:
                msg = f"the price of {model!r} is unknown, so that no budget can hold; say it with --price"
                raise UsageProblem(msg)

    # --- running ------------------------------------------------------------------------------------------------------

    def models(self, case: Case | None) -> Models:
        """Return what answers in a case, or reflects."""
        from stepengine.models import Models
        from stepengine.testing import ScriptedModel

        if case is not None and case.replies is not None:
            return Models.of(ScriptedModel(case.replies))
        if self.asked.script:
            return Models.of(ScriptedModel(script_of(self.asked.script)))
        return served_models(self.options, family(self.agent, str(self.file.file), self.options.settings.agent_folders))

    def is_free(self, case: Case | None) -> bool:
        """Return whether a script answers."""
        return bool(self.asked.script) or (case is not None and case.replies is not None)

    def bench(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine: tools may write in a working copy, and run programs there where ``--shell`` was typed."""
        file = str(self.file.file) if agent.id == self.agent.id else ""
        own = attrs.evolve(self.options, agent=file, cwd=root, write=True, quiet=True)
        return bench_for(
            own, agent, performs=performs, is_new=True, asks_nobody=True, unattended=True, headless=False
        ).engine

    def load(self, agent: Any) -> AgentDefinition:
        """Return the agent of a judge."""
        from stepengine.engine.loading import load_agent
        from stepengine.evaluation.evaluation_files import path_of_agent

        return load_agent(path_of_agent(agent, self.root), folders=self.options.settings.agent_folders)

    async def ended(self, book: Any) -> Improvement:
        """Search to the end, and return what came of it."""
        from stepengine.engine import Engine
        from stepengine.engine.loading import bundled_agent
        from stepengine.evaluation.buying import Buyer
        from stepengine.evaluation.improving import Improvement, Trials

        improver = bundled_agent(IMPROVER)
        assert improver is not None  # noqa: S101 - it comes with the package
        pricing = pricing_of(self.options)
        trials = Trials(
            self.file, self.evaluation, self.folder, book, self.bench, self.root, self.load, self.models, pricing, by=self.asked.by,
            n=self.evaluation.n, is_free=self.is_free, done=self._print_score,
        )  # fmt: skip
        reflecting = Buyer(book, "reflecting", self.models(None), pricing, may_be_unpriced=self.is_free(None))
        journal = self.journal
        async with Engine([improver], models=reflecting, pricing=pricing, resources=[trials]) as engine:
            if self.asked.goes_on and not self._has_failed(journal):
                result = await engine.resume(journal, agent=improver, in_doubt="retry")
            else:
                if not self._has_begun():  # what was killed before its first record may have left a file
                    (self.folder / JOURNAL).unlink(missing_ok=True)
                result = await engine.run(improver, params=self.plan, journal=journal)
        if trials.error is not None:
            raise trials.error
        found = self._output(result)
        scores = None
        if found["changes"] and not found["stopped"]:
            scores = await trials.compared(found["changes"], self.plan["held_out"], self.plan["seed"])
        diff = self.file.diff(found["changes"]) if found["changes"] else ""
        return Improvement(found, self.asked.by, scores, diff, book.spent)

    def _has_failed(self, journal: Journal) -> bool:
        """Return whether the search ended by an error, and put its journal aside: what it bought and ran is there for another one."""
        from stepengine.journal.show import status_of

        history = journal.history()
        if not history.is_complete or status_of(history) == RunStatus.COMPLETED.value:
            return False
        number = 1 + len([*self.folder.glob(f"{Path(JOURNAL).stem}.before-*.jsonl")])
        (self.folder / JOURNAL).replace(self.folder / f"{Path(JOURNAL).stem}.before-{number}.jsonl")
        return True

    def _output(self, result: RunResult) -> Mapping[str, Any]:
        from stepengine.data.codec import plain

        if result.status is not RunStatus.COMPLETED:
            msg = f"the search ended as {result.status.value}: {result.error}; {self.folder / JOURNAL} says how far it came"
            raise DataError(msg)
        found: Mapping[str, Any] = plain(result.output)
        return found

    def _print_score(self, version: str, case: str, made: Mapping[str, Any]) -> None:
        if not self.options.quiet:
            score = "not measured" if made["score"] is None else f"{made['score']:.2f}"
            complain(f"{version} {case}: {score}, ${made['spent']}")


def _or(typed: int | None, default: int) -> int:
    return default if typed is None else typed


def _new_folder(name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    found = Path("improvements") / name / stamp
    number = 1
    while found.exists():
        number += 1
        found = found.with_name(f"{stamp}-{number}")
    return found


# --- what is told -----------------------------------------------------------------------------------------------------


def _replace(path: Path, data: bytes) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_bytes(data)
    made.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
    made.replace(path)


def _json_of(search: _PlannedSearch, made: Improvement) -> dict[str, Any]:
    return {
        "format": "stepengine.improve/1", "agent": search.agent.id, "file": str(search.file.file), "by": made.by,
        "is_better": made.is_better, "told": made.told(), **made.found, "diff": made.diff, "seed": search.plan["seed"],
        "budget": search.plan["budget"], "spent": str(made.spent), "folder": str(search.folder),
        "held_out": None if made.scores is None else made.scores.to_json(),
    }  # fmt: skip


def _write(search: _PlannedSearch, made: Improvement) -> None:
    from stepengine.evaluation.reporting import page_of_improvement

    redactor = cleaner()
    page = page_of_improvement(made, search.parts, lambda text: visible(redactor.text(text)))
    told = dumps(clean_report(_json_of(search, made))) + "\n"
    files = {"results.json": told, "report.html": page} | ({"improvement.diff": made.diff} if made.is_better else {})
    for name, text in files.items():
        _replace(search.folder / name, text.encode())


def _tell(search: _PlannedSearch, made: Improvement, options: Options, *, is_edited: bool) -> None:
    if options.as_json:
        print(dumps(clean_report(_json_of(search, made))))
        return
    patch = f"`patch -p1 < {search.folder / 'improvement.diff'}`"
    lines: Sequence[str] = [made.told(), *(made.diff.rstrip("\n").split("\n") if made.is_better else [])]
    done = "changed" if search.asked.writes else f"not changed; --write does that, or {patch}"
    if is_edited:
        done = f"not changed, since somebody edited it while the search went on; {patch} puts both together"
    lines = [
        *lines,
        *([f"{search.file.file}: {done}"] if made.is_better else []),
        f"spent ${made.spent}; results: {search.folder}",
    ]
    say(clean_lines(lines), hang=4)
