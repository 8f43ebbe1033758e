"""``stepengine eval``: evaluate agents, or versions of one, on a set of cases."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from stepengine.cli.evaluation import (
    Budget,
    Yes,
    join_and_redact_lines,
    make_result_folder_path,
    make_sample_engine,
    parse_budget,
    redact_report,
    require_user_confirmation,
    run_reporting_errors,
    run_until_signal,
)
from stepengine.cli.exits import Exit, get_exit_code_of_signal, print_error
from stepengine.cli.options import Model, Options, make_unique_dict, with_shared_options
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.scripts import ScriptFile, load_script
from stepengine.cli.settings import UsageProblem
from stepengine.data.definition import AgentDefinition

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.evaluation import EvaluationReport
    from stepengine.evaluation.case_runs import Sample
    from stepengine.evaluation.samples import CostEstimate
    from stepengine.evaluation.scoring import Scores


@partial(with_shared_options, without=("cwd", "write", "verbose"))
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

    def run_evaluation() -> Exit:
        """Run or recheck the evaluation, print its report, and return the exit code."""
        from stepengine.debugging import render_run
        from stepengine.evaluation import evaluate as run_samples
        from stepengine.evaluation.evaluation_files import load_evaluation

        own, root = attrs.evolve(options, agent="", model=model).with_settings(), Path(file).resolve().parent
        if sum(map(bool, (against, recheck, goes_on))) > 1:
            msg = "--against, --recheck and --continue exclude one another; pass one of them"
            raise UsageProblem(msg)
        evaluation, agents = load_evaluation(Path(file)), _EvaluationAgents(own, root)
        evaluated = partial(
            run_samples, evaluation, root=root, replies=load_script(script) if script else None, n=n,
            budget=parse_budget(budget).dollars, gates=gate or (), concurrency=concurrency, seed=seed,
            folder=out or make_result_folder_path("evals", evaluation.name), cases=case or (), tags=tag or (),
            agents=_parse_agent_sides(agent or ()), against=against, recheck=recheck, resume=goes_on,
            keep=keep, confirm=None if budget or yes else _confirm_live_runs,
            on_sample=(lambda _: None) if options.quiet else _print_sample, render_page=render_run if html else None,
            load_agent=agents.load_agent_and_store_file, make_engine=agents.make_engine,
        )  # fmt: skip
        report, received = run_until_signal(evaluated, [])
        _print_report(report, Path(file).parent, as_json=options.as_json)
        if report.scores.outcome.stopped == "interrupted":
            return get_exit_code_of_signal(received)
        if not report.is_complete and not recheck:
            return Exit.LIMIT
        return Exit.COMPLETED if report.passed else Exit.FAILED

    return run_reporting_errors(run_evaluation)


def _parse_agent_sides(texts: Sequence[str]) -> dict[str, str]:
    """Parse ``NAME=PATH`` options into paths by name; raise ``UsageProblem`` for an invalid one."""
    pairs = [text.partition("=") for text in texts]
    if wrong := [text for text, (_, sign, path) in zip(texts, pairs, strict=True) if not (sign and path)]:
        msg = f"--agent {wrong[0]!r} is not a side; write NAME=PATH, such as --agent new=./agents/mine.py"
        raise UsageProblem(msg)
    return make_unique_dict("--agent", [(name, path) for name, _, path in pairs])


class _EvaluationAgents:
    """Loads the agents of an evaluation and makes engines for them."""

    def __init__(self, options: Options, root: Path) -> None:
        self._options = options
        self._root = root
        self._files: list[tuple[AgentDefinition, str]] = []

    def load_agent_and_store_file(self, agent: Any) -> AgentDefinition:
        """Load an agent of an evaluation, and store its file for the agents that it may spawn."""
        from stepengine.engine.loader import load_agent
        from stepengine.evaluation.evaluation_files import resolve_agent_path

        if isinstance(agent, AgentDefinition):
            return agent
        named = resolve_agent_path(agent, self._root)
        made = load_agent(named, folders=self._options.settings.agent_folders)
        self._files.append((made, named))
        return made

    def make_engine(self, agent: AgentDefinition, root: Path, *, performs: bool) -> Engine:
        """Return an engine for a sample of *agent*, whose tools work in *root*."""
        file = next((file for known, file in self._files if known is agent), "")
        return make_sample_engine(self._options, agent, file, root, performs=performs)


def _confirm_live_runs(estimate: CostEstimate) -> None:
    """Ask for confirmation of live model calls; raise ``UsageProblem`` without it."""
    require_user_confirmation(f"up to {estimate.calls} runs will call models, at an unknown cost")


def _print_sample(sample: Sample) -> None:
    """Print a line about an ended sample on stderr."""
    passed = "unknown" if sample.passed is None else "passed" if sample.passed else "failed"
    print_error(f"{sample.case} {sample.side} {sample.n}: {sample.status}, {passed} ({sample.reused})")


def _print_report(report: EvaluationReport, root: Path, *, as_json: bool) -> None:
    """Print the scores, failed samples and gates of an evaluation as text or JSON, with secrets redacted."""
    from stepengine.evaluation.report_pages import failed_sample_lines, summary_lines

    scores, folder = report.scores, report.folder
    if as_json:
        print(to_ascii_json(redact_report({**scores.to_json(), "folder": str(folder)})))
    else:
        failed = failed_sample_lines(scores, folder, _make_agent_option_formatter(scores, root))
        lines = [*summary_lines(scores), *failed, *report.gate_lines]
        print_visible(join_and_redact_lines([*lines, f"results: {folder}"]), hanging_indent=4)
    for line, problem in zip(report.gate_lines, report.gates.values(), strict=True):
        if problem:
            print_error(line)


def _make_agent_option_formatter(scores: Scores, root: Path) -> Callable[[Sample], str]:
    """Return a function that returns the ``--agent`` option for commands on a sample's journal."""
    from stepengine.evaluation.evaluation_files import resolve_agent_path

    agents = scores.outcome.evaluation.agents
    files = {n: resolve_agent_path(each, root) for n, each in agents.items() if not isinstance(each, AgentDefinition)}
    return lambda sample: f" --agent {shlex.quote(files[sample.side])}" if sample.side in files else ""
