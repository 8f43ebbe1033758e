"""``stepengine eval``: how good agents, or versions of one, are at a set of tasks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer
from attrs import frozen

from stepengine.cli.bench import bench_for
from stepengine.cli.evaluation import (
    Budget,
    Yes,
    clean_lines,
    clean_report,
    cleaner,
    confirm,
    interrupted_or,
    purse_of,
    to_the_end,
)
from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.screen.render import dumps, say, visible
from stepengine.cli.scripts import ScriptFile, models_of_script
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition
from stepengine.errors import DataError, JournalError

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation.criteria import Case
    from stepengine.evaluation.evaluating import Evaluation, Outcome, Sample
    from stepengine.evaluation.scoring import GateOfScores, Scores

__all__ = ("evaluate",)

MAX_RESULTS = 64 * 1024 * 1024


@frozen
class EvaluateOptions:
    """What is asked for, as it was typed."""

    file: str
    n: int | None
    sides: tuple[str, ...]
    cases: tuple[str, ...]
    tags: tuple[str, ...]
    concurrency: int
    budget: str
    seed: int | None
    out: str
    against: str
    recheck: str
    goes_on: str
    script: str
    gates: tuple[str, ...]
    keep: bool
    html: bool
    yes: bool


@partial(with_options, without=("cwd", "write", "verbose"))
def evaluate(
    options: Options,
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .py file with `evaluation = ...`, or a .yaml file.")],
    *,
    n: Annotated[
        int | None, typer.Option("-n", help="Samples of each case and side; default: what FILE says.", min=1)
    ] = None,
    model: Model = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(help="A side in place of those in FILE; the first is the base.", metavar="NAME=PATH|ID"),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases with such an id.", metavar="GLOB")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only cases with this tag.", metavar="WORD")] = None,
    concurrency: Annotated[int, typer.Option(help="Runs at a time.", min=1, max=64)] = 4,
    budget: Budget = "",
    seed: Annotated[int | None, typer.Option(help="Order of the runs; drawn and told by default.", min=0)] = None,
    out: Annotated[str, typer.Option(help="Folder of the results; default: evals/NAME/TIME.", metavar="DIR")] = "",
    against: Annotated[str, typer.Option(help="Earlier results: only what changed is run again.", metavar="DIR")] = "",
    recheck: Annotated[
        str, typer.Option(help="Ask the checks again of these results; run nothing.", metavar="DIR")
    ] = "",
    goes_on: Annotated[str, typer.Option("--continue", help="Finish these results.", metavar="DIR")] = "",
    script: ScriptFile = "",
    gate: Annotated[
        list[str] | None, typer.Option(help="What has to hold; may be given several times.", metavar="EXPR")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave working copies where they are.")] = False,
    html: Annotated[
        bool, typer.Option("--html", help="Write report.html, and a page of each run that it leads to.")
    ] = False,
    yes: Yes = False,
) -> Exit:
    """
    Say how good agents are at a set of tasks, with intervals.

    Each case is run with each side, -n times, in a private working copy of its files, and recorded. Checks say what is
    a success. The table holds the mean of each check over the cases with its 95 % interval, and how far each side is
    above the first one, case by case. Results, notes and journals stay in a folder: a failed run is opened with
    `stepengine debug`.

    --against and --continue run only what is not recorded as it would be now; --recheck asks the checks again and no
    model. A gate compares a check or cost, steps, tokens: 'pass >= 0.8', 'new.pass - base.pass > -0.05',
    'new.cost <= 1.2 * base.cost'. A comparison of sides holds when the end of its interval does, with ~ before the
    sign when the mean does. FILE is code of yours and runs as such.

    Leaves with:
      0    every gate holds
      1    a gate does not hold or is not decided, or a check is broken
      2    wrong usage, or the evaluation cannot be run; nothing was spent
      4    the budget is spent, the report is partial
      5    a journal of --recheck does not fit the present code

    Examples:
      stepengine eval evals.py --budget 2
      stepengine eval evals.py --agent old=base.py --agent new=mine.py -n 3 --yes
      stepengine eval evals.py --recheck evals/mine/20260102-101500
    """
    asked = EvaluateOptions(
        file, n, tuple(agent or ()), tuple(case or ()), tuple(tag or ()), concurrency, budget, seed, out, against,
        recheck, goes_on, script, tuple(gate or ()), keep, html, yes,
    )  # fmt: skip
    return interrupted_or(lambda: _evaluate(attrs.evolve(options, agent="", model=model).in_force(), asked))


def _evaluate(options: Options, asked: EvaluateOptions) -> Exit:
    from stepengine.evaluation.evaluation_files import load_evaluation
    from stepengine.evaluation.scoring import checked, parse_gates, scores_of

    evaluation = _select(load_evaluation(Path(asked.file)), asked)
    _refuse_problems(evaluation, asked)
    gates = parse_gates(evaluation, asked.gates)
    folder, outcome = _outcome(evaluation, options, asked)
    scores = scores_of(outcome)
    found = [*checked(gates, scores)] if outcome.samples else []
    _write(scores, folder, found, asked)
    _tell(scores, folder, found, options, asked)
    return _code(scores, found)


def _code(scores: Scores, found: Sequence[tuple[GateOfScores, str]]) -> Exit:
    if scores.outcome.stopped == "interrupted":
        return Exit.INTERRUPTED
    if scores.outcome.stopped:
        return Exit.LIMIT
    return Exit.FAILED if scores.broken or any(problem for _, problem in found) else Exit.COMPLETED


# --- what was typed ---------------------------------------------------------------------------------------------------


def _select(evaluation: Evaluation, asked: EvaluateOptions) -> Evaluation:
    """Return the evaluation with the cases and sides that were asked for."""
    cases = [
        case
        for case in evaluation.cases
        if (not asked.cases or any(fnmatchcase(case.id, pattern) for pattern in asked.cases))
        and (not asked.tags or {*asked.tags} & {*case.tags})
    ]
    if evaluation.cases and not cases:
        msg = f"no case of {asked.file} is chosen by --case and --tag; it has {list_names([c.id for c in evaluation.cases], asked.cases[0] if asked.cases else '')}"
        raise UsageProblem(msg)
    sides = dict(evaluation.agents)
    if asked.sides:
        pairs = [text.partition("=") for text in asked.sides]
        if wrong := [text for text, (_, sign, path) in zip(asked.sides, pairs, strict=True) if not (sign and path)]:
            msg = f"--agent {wrong[0]!r} is no side; write NAME=PATH, such as --agent new=./agents/mine.py"
            raise UsageProblem(msg)
        sides = {name: path for name, _, path in pairs}
    if sum(map(bool, (asked.against, asked.recheck, asked.goes_on))) > 1:
        msg = "--against, --recheck and --continue do not go together"
        raise UsageProblem(msg)
    return attrs.evolve(evaluation, cases=cases, agents=sides)


def _refuse_problems(evaluation: Evaluation, asked: EvaluateOptions) -> None:
    if problems := evaluation.problems(Path(asked.file).resolve().parent):
        msg = "\n  ".join([f"{asked.file} cannot be run:", *problems])
        raise DataError(msg)


def _outcome(evaluation: Evaluation, options: Options, asked: EvaluateOptions) -> tuple[Path, Outcome]:
    from stepengine.evaluation.evaluating import EvaluationMode, run_samples
    from stepengine.evaluation.evaluation_report import MAX_SEED
    from stepengine.testing import ScriptedModel

    root = Path(asked.file).resolve().parent
    agents_of = _EvaluationAgents(options, root)
    agents = {name: agents_of.load(agent) for name, agent in evaluation.agents.items()}
    scripted, purse = models_of_script(asked.script), purse_of(asked.budget)
    same = _told_before(asked.recheck or asked.goes_on)
    n = asked.n or same.get("n", evaluation.n)

    def models(case: Case) -> Any:
        if case.replies is not None:
            return ScriptedModel(case.replies)
        return None if scripted is None else scripted()

    is_live = scripted is None and any(case.replies is None for case in evaluation.cases)
    if not asked.recheck:
        _check_tools(agents, agents_of)
        _agree_to_live_runs(len(evaluation.cases) * len(agents) * n, asked, is_live=is_live)
    earlier = asked.against or asked.recheck or asked.goes_on
    if earlier and not Path(earlier).is_dir():
        msg = f"{earlier!r} is not a folder of results"
        raise UsageProblem(msg)
    folder = Path(asked.recheck or asked.goes_on or asked.out or _new_folder(evaluation.name))
    seed = same.get("seed", secrets.randbelow(MAX_SEED)) if asked.seed is None else asked.seed
    mode = EvaluationMode(Path(earlier) if earlier else None, recheck=bool(asked.recheck), keep=asked.keep)
    made = partial(
        run_samples, evaluation, folder, agents_of.bench, agents=agents, root=root, load=agents_of.load, models=models, n=n, seed=seed,
        concurrency=asked.concurrency, budget=purse.dollars, mode=mode, done=_progress(options),
    )  # fmt: skip
    return folder, to_the_end(made, [])


def _told_before(folder: str) -> dict[str, int]:
    """Return the samples and the seed of results that are continued or judged again, as far as they are known."""
    try:
        if not folder:
            return {}
        with (Path(folder) / "results.json").open(encoding="utf-8") as file:
            told = json.loads(file.read(MAX_RESULTS))
        return {name: int(told[name]) for name in ("n", "seed") if name in told}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


class _EvaluationAgents:
    """The agents of an evaluation, as they are named beside its file, and engines for them."""

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._root = root
        self._files: list[tuple[AgentDefinition, str]] = []

    def load(self, agent: Any) -> AgentDefinition:
        """Return the agent that an evaluation names, and remember its file: those that it may spawn are found there."""
        from stepengine.engine.loading import load_agent
        from stepengine.evaluation.evaluation_files import path_of_agent

        if isinstance(agent, AgentDefinition):
            return agent
        named = path_of_agent(agent, self._root)
        made = load_agent(named, folders=self._options.settings.agent_folders)
        self._files.append((made, named))
        return made

    def bench(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine: tools may write in a working copy, and run programs there where ``--shell`` was typed."""
        file = next((file for known, file in self._files if known is agent), "")
        own = attrs.evolve(self._options, agent=file, cwd=root, write=True, quiet=True)
        return bench_for(
            own, agent, performs=performs, is_new=True, asks_nobody=True, unattended=True, headless=False
        ).engine


def _check_tools(agents: dict[str, AgentDefinition], of: _EvaluationAgents) -> None:
    """Refuse before anything is spent what an agent names and the options do not allow."""
    with tempfile.TemporaryDirectory(prefix="stepengine-eval-") as folder:
        for agent in agents.values():
            with of.bench(agent, Path(folder).resolve(), performs=True):
                pass


def _agree_to_live_runs(runs: int, asked: EvaluateOptions, *, is_live: bool) -> None:
    """Ask before models are, unless that was agreed to, or is bounded."""
    said = f"models will be asked in up to {runs} runs, at a cost that nobody knows yet"
    if not is_live or asked.budget or asked.yes:
        return
    confirm(said)


def _new_folder(name: str) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    found = Path("evals") / name / stamp
    number = 1
    while found.exists():
        number += 1
        found = found.with_name(f"{stamp}-{number}")
    return found


def _progress(options: Options) -> Callable[[Sample], object]:
    def told(sample: Sample) -> None:
        passed = "unknown" if sample.passed is None else "passed" if sample.passed else "failed"
        complain(f"{sample.case} {sample.side} {sample.n}: {sample.status}, {passed} ({sample.reused})")

    return (lambda _: None) if options.quiet else told


# --- what is told -----------------------------------------------------------------------------------------------------


def _write(scores: Scores, folder: Path, found: Sequence[tuple[GateOfScores, str]], asked: EvaluateOptions) -> None:
    from stepengine.evaluation.reporting import page_of

    folder.mkdir(parents=True, exist_ok=True)
    results = {**scores.to_json(), "created": datetime.now(UTC).isoformat(timespec="seconds")}
    _replace(folder / "results.json", dumps(clean_report(results)) + "\n")
    if asked.html:
        redactor = cleaner()
        page = page_of(
            scores,
            [_describe_gate(gate, problem) for gate, problem in found],
            lambda text: visible(redactor.text(text)),
            _write_pages(scores, folder),
        )
        _replace(folder / "report.html", page)


def _write_pages(scores: Scores, folder: Path) -> dict[str, str]:
    """Write the page of each run beside its journal, and return their files by the journals."""
    from stepengine.debugging import render_run

    written: dict[str, str] = {}
    for sample in scores.outcome.samples:
        journal = folder / sample.journal
        # A run that ended before its first record has none; one that is damaged is named by the report as it is.
        with contextlib.suppress(JournalError):
            _replace(journal.with_suffix(".html"), render_run(journal))
            written[sample.journal] = Path(sample.journal).with_suffix(".html").as_posix()
    return written


def _replace(path: Path, text: str) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(text, encoding="utf-8")
    made.replace(path)


def _describe_gate(gate: GateOfScores, problem: str) -> str:
    return f"gate {gate.text}: {problem or 'holds'}"


def _tell(
    scores: Scores, folder: Path, found: Sequence[tuple[GateOfScores, str]], options: Options, asked: EvaluateOptions
) -> None:
    from stepengine.evaluation.reporting import failed_lines, summary_lines

    if options.as_json:
        print(dumps(clean_report({**scores.to_json(), "folder": str(folder)})))
    else:
        lines = [
            *summary_lines(scores),
            *failed_lines(scores, folder, _agent_of(scores, Path(asked.file).parent)),
            *[_describe_gate(*one) for one in found],
        ]
        say(clean_lines([*lines, f"results: {folder}"]), hang=4)
    for gate, problem in found:
        if problem:
            complain(_describe_gate(gate, problem))


def _agent_of(scores: Scores, root: Path) -> Callable[[Sample], str]:
    """Return how a command on a sample's journal finds its agent: that of a file is named."""
    from stepengine.evaluation.evaluation_files import path_of_agent

    agents = scores.outcome.evaluation.agents
    files = {n: path_of_agent(each, root) for n, each in agents.items() if not isinstance(each, AgentDefinition)}
    return lambda sample: f" --agent {shlex.quote(files[sample.side])}" if sample.side in files else ""
