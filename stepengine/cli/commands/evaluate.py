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

from stepengine.cli.bench import make_engine_setup
from stepengine.cli.evaluation import (
    Budget,
    Yes,
    ask_for_confirmation,
    check_result_folder,
    make_report_redactor,
    make_result_folder_path,
    parse_budget,
    redact_lines,
    redact_report,
    run_and_close_engines,
    run_reporting_errors,
)
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import Model, Options, with_options
from stepengine.cli.screen.render import print_visible, to_ascii_json, visible
from stepengine.cli.scripts import ScriptFile, make_scripted_models
from stepengine.cli.settings import UsageProblem
from stepengine.data.alike import list_names
from stepengine.data.definition import AgentDefinition
from stepengine.errors import DataError, JournalError

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation.case_runs import Evaluation, Outcome, Sample
    from stepengine.evaluation.criteria import Case
    from stepengine.evaluation.scoring import GateOfScores, Scores

MAX_RESULTS = 64 * 1024 * 1024


@frozen
class EvaluateOptions:
    """The typed options of the command."""

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
    n: Annotated[int | None, typer.Option("-n", help="Samples per case and side; default: as in FILE.", min=1)] = None,
    model: Model = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            help="A side to compare, in place of those in FILE; the first is the base.", metavar="NAME=PATH|ID"
        ),
    ] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases with a matching id.", metavar="GLOB")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="Only cases with this tag.", metavar="WORD")] = None,
    concurrency: Annotated[int, typer.Option(help="Number of concurrent runs.", min=1, max=64)] = 4,
    budget: Budget = "",
    seed: Annotated[
        int | None, typer.Option(help="Seed of the order of runs; default: random, and printed.", min=0)
    ] = None,
    out: Annotated[str, typer.Option(help="Folder of the results; default: evals/NAME/TIME.", metavar="DIR")] = "",
    against: Annotated[str, typer.Option(help="Earlier results: run only what has changed.", metavar="DIR")] = "",
    recheck: Annotated[str, typer.Option(help="Repeat the checks on these results; run nothing.", metavar="DIR")] = "",
    goes_on: Annotated[str, typer.Option("--continue", help="Finish these results.", metavar="DIR")] = "",
    script: ScriptFile = "",
    gate: Annotated[
        list[str] | None, typer.Option(help="Condition that must hold; may be repeated.", metavar="EXPR")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the working copies.")] = False,
    html: Annotated[bool, typer.Option("--html", help="Write report.html and a page for each run.")] = False,
    yes: Yes = False,
) -> Exit:
    """
    Evaluate agents on a set of cases, with confidence intervals.

    Each case runs with each side, -n times, in a private working copy, and is recorded. Checks decide what counts
    as a success. The table shows the mean of each check with its 95 % interval, and the difference of each side
    from the first one, case by case. Results, notes and journals are kept in a folder: open a failed run with
    `stepengine debug`.

    --against and --continue run only cases without an equal record; --recheck repeats the checks without a model. A
    gate compares a check, cost, steps or tokens: 'pass >= 0.8', 'new.pass - base.pass > -0.05', 'new.cost <= 1.2 *
    base.cost'. A comparison of sides holds if it holds for the bound of the interval; with ~ before the sign, for
    the mean. FILE is executed as your own code.

    Exit codes:
      0    every gate holds
      1    a gate does not hold or is undecided, or a check is broken
      2    wrong usage, or the evaluation cannot run; nothing was spent
      4    the budget is spent; the report is partial
      5    a journal of --recheck does not fit the current code

    Examples:
      stepengine eval evals.py --budget 2
      stepengine eval evals.py --agent old=base.py --agent new=mine.py -n 3 --yes
      stepengine eval evals.py --recheck evals/mine/20260102-101500
    """
    asked = EvaluateOptions(
        file, n, tuple(agent or ()), tuple(case or ()), tuple(tag or ()), concurrency, budget, seed, out, against,
        recheck, goes_on, script, tuple(gate or ()), keep, html, yes,
    )  # fmt: skip
    return run_reporting_errors(lambda: _run_evaluation(attrs.evolve(options, agent="", model=model).in_force(), asked))


def _run_evaluation(options: Options, asked: EvaluateOptions) -> Exit:
    from stepengine.evaluation.evaluation_files import load_evaluation
    from stepengine.evaluation.scoring import check_gates, parse_gates, score_outcome

    evaluation = _select_cases(load_evaluation(Path(asked.file)), asked)
    _check_evaluation(evaluation, asked)
    gates = parse_gates(evaluation, asked.gates)
    folder, outcome = _run_samples(evaluation, options, asked)
    scores = score_outcome(outcome)
    found = [*check_gates(gates, scores)] if outcome.samples else []
    _write_results(scores, folder, found, asked)
    _print_report(scores, folder, found, options, asked)
    return _choose_exit_code(scores, found)


def _choose_exit_code(scores: Scores, found: Sequence[tuple[GateOfScores, str]]) -> Exit:
    if scores.outcome.stopped == "interrupted":
        return Exit.INTERRUPTED
    if scores.outcome.stopped:
        return Exit.LIMIT
    return Exit.FAILED if scores.broken or any(problem for _, problem in found) else Exit.COMPLETED


# --- what was typed ---------------------------------------------------------------------------------------------------


def _select_cases(evaluation: Evaluation, asked: EvaluateOptions) -> Evaluation:
    """Return the evaluation with only the requested cases and sides."""
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
            msg = f"--agent {wrong[0]!r} is not a side; write NAME=PATH, such as --agent new=./agents/mine.py"
            raise UsageProblem(msg)
        sides = {name: path for name, _, path in pairs}
    if sum(map(bool, (asked.against, asked.recheck, asked.goes_on))) > 1:
        msg = "--against, --recheck and --continue do not go together"
        raise UsageProblem(msg)
    return attrs.evolve(evaluation, cases=cases, agents=sides)


def _check_evaluation(evaluation: Evaluation, asked: EvaluateOptions) -> None:
    if problems := evaluation.problems(Path(asked.file).resolve().parent):
        msg = "\n  ".join([f"{asked.file} cannot be run:", *problems])
        raise DataError(msg)


def _run_samples(evaluation: Evaluation, options: Options, asked: EvaluateOptions) -> tuple[Path, Outcome]:
    from stepengine.evaluation.case_runs import EvaluationMode, run_samples
    from stepengine.evaluation.evaluation_report import MAX_SEED
    from stepengine.testing import ScriptedModel

    root = Path(asked.file).resolve().parent
    agents_of = _EvaluationAgents(options, root)
    agents = {name: agents_of.load(agent) for name, agent in evaluation.agents.items()}
    scripted, budget = make_scripted_models(asked.script), parse_budget(asked.budget)
    same = _read_results(asked.recheck or asked.goes_on)
    n = asked.n or same.get("n", evaluation.n)

    def models(case: Case) -> Any:
        if case.replies is not None:
            return ScriptedModel(case.replies)
        return None if scripted is None else scripted()

    is_live = scripted is None and any(case.replies is None for case in evaluation.cases)
    if not asked.recheck:
        _check_tools(agents, agents_of)
        _confirm_live_runs(len(evaluation.cases) * len(agents) * n, asked, is_live=is_live)
    earlier = asked.against or asked.recheck or asked.goes_on
    if earlier and not Path(earlier).is_dir():
        msg = f"{earlier!r} is not a folder of results"
        raise UsageProblem(msg)
    folder = Path(asked.recheck or asked.goes_on or asked.out or make_result_folder_path("evals", evaluation.name))
    check_result_folder(folder)
    seed = same.get("seed", secrets.randbelow(MAX_SEED)) if asked.seed is None else asked.seed
    mode = EvaluationMode(Path(earlier) if earlier else None, recheck=bool(asked.recheck), keep=asked.keep)
    made = partial(
        run_samples, evaluation, folder, agents_of.bench, agents=agents, root=root, load=agents_of.load, models=models, n=n, seed=seed,
        concurrency=asked.concurrency, budget=budget.dollars, mode=mode, done=_make_sample_printer(options),
    )  # fmt: skip
    return folder, run_and_close_engines(made, [])


def _read_results(folder: str) -> dict[str, int]:
    """Return the number of samples and the seed in the results of an earlier evaluation, if they can be read."""
    try:
        if not folder:
            return {}
        with (Path(folder) / "results.json").open(encoding="utf-8") as file:
            told = json.loads(file.read(MAX_RESULTS))
        return {name: int(told[name]) for name in ("n", "seed") if name in told}
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


class _EvaluationAgents:
    """Loads the agents of an evaluation and makes engines for them."""

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._root = root
        self._files: list[tuple[AgentDefinition, str]] = []

    def load(self, agent: Any) -> AgentDefinition:
        """Load the agent that an evaluation names, and store its file for agents that it may spawn."""
        from stepengine.engine.loader import load_agent
        from stepengine.evaluation.evaluation_files import resolve_agent_path

        if isinstance(agent, AgentDefinition):
            return agent
        named = resolve_agent_path(agent, self._root)
        made = load_agent(named, folders=self._options.settings.agent_folders)
        self._files.append((made, named))
        return made

    def bench(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine whose tools may write in a working copy, and run programs there with ``--shell``."""
        file = next((file for known, file in self._files if known is agent), "")
        own = attrs.evolve(self._options, agent=file, cwd=root, write=True, quiet=True)
        return make_engine_setup(
            own, agent, performs=performs, is_new=True, asks_nobody=True, unattended=True, headless=False
        ).engine


def _check_tools(agents: dict[str, AgentDefinition], of: _EvaluationAgents) -> None:
    """Raise if an agent needs a tool that the options do not allow."""
    with tempfile.TemporaryDirectory(prefix="stepengine-eval-") as folder:
        for agent in agents.values():
            with of.bench(agent, Path(folder).resolve(), performs=True):
                pass


def _confirm_live_runs(runs: int, asked: EvaluateOptions, *, is_live: bool) -> None:
    """Ask for confirmation of live model calls, unless there is a budget or ``--yes``."""
    said = f"models will be asked in up to {runs} runs, at an unknown cost"
    if not is_live or asked.budget or asked.yes:
        return
    ask_for_confirmation(said)


def _make_sample_printer(options: Options) -> Callable[[Sample], object]:
    def print_sample(sample: Sample) -> None:
        passed = "unknown" if sample.passed is None else "passed" if sample.passed else "failed"
        print_error(f"{sample.case} {sample.side} {sample.n}: {sample.status}, {passed} ({sample.reused})")

    return (lambda _: None) if options.quiet else print_sample


# --- what is told -----------------------------------------------------------------------------------------------------


def _write_results(
    scores: Scores, folder: Path, found: Sequence[tuple[GateOfScores, str]], asked: EvaluateOptions
) -> None:
    from stepengine.evaluation.report_pages import render_report

    folder.mkdir(parents=True, exist_ok=True)
    results = {**scores.to_json(), "created": datetime.now(UTC).isoformat(timespec="seconds")}
    _replace_file(folder / "results.json", to_ascii_json(redact_report(results)) + "\n")
    if asked.html:
        redactor = make_report_redactor()
        page = render_report(
            scores,
            [_describe_gate(gate, problem) for gate, problem in found],
            lambda text: visible(redactor.text(text)),
            _write_pages(scores, folder),
        )
        _replace_file(folder / "report.html", page)


def _write_pages(scores: Scores, folder: Path) -> dict[str, str]:
    """Write the page of each run next to its journal; return the pages by journal."""
    from stepengine.debugging import render_run

    written: dict[str, str] = {}
    for sample in scores.outcome.samples:
        journal = folder / sample.journal
        # A run that ended before its first record has none; one that is damaged is named by the report as it is.
        with contextlib.suppress(JournalError):
            _replace_file(journal.with_suffix(".html"), render_run(journal))
            written[sample.journal] = Path(sample.journal).with_suffix(".html").as_posix()
    return written


def _replace_file(path: Path, text: str) -> None:
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(text, encoding="utf-8")
    made.replace(path)


def _describe_gate(gate: GateOfScores, problem: str) -> str:
    return f"gate {gate.text}: {problem or 'holds'}"


def _print_report(
    scores: Scores, folder: Path, found: Sequence[tuple[GateOfScores, str]], options: Options, asked: EvaluateOptions
) -> None:
    from stepengine.evaluation.report_pages import failed_lines, summary_lines

    if options.as_json:
        print(to_ascii_json(redact_report({**scores.to_json(), "folder": str(folder)})))
    else:
        lines = [
            *summary_lines(scores),
            *failed_lines(scores, folder, _make_agent_option_formatter(scores, Path(asked.file).parent)),
            *[_describe_gate(*one) for one in found],
        ]
        print_visible(redact_lines([*lines, f"results: {folder}"]), hang=4)
    for gate, problem in found:
        if problem:
            print_error(_describe_gate(gate, problem))


def _make_agent_option_formatter(scores: Scores, root: Path) -> Callable[[Sample], str]:
    """Return a function that gives the ``--agent`` option for a command on a sample's journal."""
    from stepengine.evaluation.evaluation_files import resolve_agent_path

    agents = scores.outcome.evaluation.agents
    files = {n: resolve_agent_path(each, root) for n, each in agents.items() if not isinstance(each, AgentDefinition)}
    return lambda sample: f" --agent {shlex.quote(files[sample.side])}" if sample.side in files else ""
