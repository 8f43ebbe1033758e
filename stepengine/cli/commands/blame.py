"""``stepengine compare blame``: find the step that made a run fail."""

from __future__ import annotations

import shlex
from functools import partial
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.evaluation import (
    Budget,
    CheckText,
    Simulate,
    Tools,
    Yes,
    confirm_cost,
    join_and_redact_lines,
    load_recorded_case,
    parse_budget,
    redact_report,
    run_and_close_engines,
    run_reporting_errors,
)
from stepengine.cli.exits import Exit
from stepengine.cli.journals import add_journal_to_options, require_choice
from stepengine.cli.options import File, Last, Options, with_shared_options
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.scripts import ScriptFile, make_scripted_model_factory
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.evaluation.blame import Blame


@partial(with_shared_options, without=("verbose",))
def blame(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    check: CheckText,
    k: Annotated[int, typer.Option("-n", help="Number of runs from each step.", min=1, metavar="N")] = 8,
    steps: Annotated[str, typer.Option(help="Only these model steps.", metavar="A:B")] = "",
    tools: Tools = "idempotent",
    simulate: Simulate = "",
    script: ScriptFile = "",
    budget: Budget = "",
    yes: Yes = False,
) -> Exit:
    """
    Find the step that made a run fail.

    Continues the run from each model step, -n times, and checks with --check whether it passes. Runs that continue
    before the bad step mostly pass; runs that include it mostly fail. The step between is to blame. Runs of more
    than 12 model steps are searched by bisection.

    Tool calls are answered from equal recorded calls, then by --simulate. Idempotent and read-only tools are
    performed for real and counted; no other tool is repeated. With --tools recorded, none is performed. A run that
    needs any other call counts as unknown, not as failed.

    --check is an expression over output, text, status, tools, steps, cost, error and result, or MODULE:FN, a
    function of the result. It is executed as your own code.

    Exit codes:
      0    a step is to blame
      1    none is, or the run passes
      2    wrong usage; the journal or its agent cannot be used
      4    the budget is spent; the report is partial
      5    the record does not fit the current code

    Examples:
      stepengine compare blame run.jsonl --check "output == 42" --budget 0.50
      stepengine compare blame --last --check checks:is_polite -n 4 --steps 3:9
    """

    def search_and_report() -> Exit:
        """Search for the blamed step within the budget, print the report, and return the exit code."""
        from stepengine.evaluation.blame import blame as find_step
        from stepengine.evaluation.checks import Check, load_function

        own = add_journal_to_options(attrs.evolve(options, journal=file, last=last)).with_settings()
        require_choice("--tools", tools, ("recorded", "idempotent"))
        wanted, chosen, models = Check.from_any(check), _parse_step_range(steps), make_scripted_model_factory(script)
        shared, simulated = parse_budget(budget), load_function(simulate) if simulate else None
        case = load_recorded_case(own.journal, own, performs=tools != "recorded")
        engine, confirm = case.bench.engine, partial(confirm_cost, yes=yes or bool(budget))
        made = partial(
            find_step, engine, case.journal, wanted, agent=case.agent, k=k, steps=chosen, budget=shared, models=models,
            confirm=confirm if models is None else None, tools=tools, simulate=simulated,
        )  # fmt: skip
        report = run_and_close_engines(made, [engine])
        if own.as_json:
            print(to_ascii_json(redact_report(report.to_json())))
        else:
            print_visible(join_and_redact_lines([*report.lines(), *_suggest_commands(report, own)]), hanging_indent=4)
        if report.stopped:
            return Exit.LIMIT
        return Exit.FAILED if report.blamed is None else Exit.COMPLETED

    return run_reporting_errors(search_and_report)


def _suggest_commands(report: Blame, options: Options) -> list[str]:
    """Return a line with commands for the blamed step; an empty list if there is none."""
    if report.blamed is None:
        return []
    name, at = shlex.quote(options.stem or options.journal), report.blamed.step.address
    return [f"look at it: stepengine show {name}; try another reply: stepengine fork {name} --at '{at}' --edit TEXT"]


def _parse_step_range(text: str) -> tuple[int, int] | None:
    """Parse ``A:B`` as the first and the last step; return ``None`` for an empty text."""
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and len(text) < 20 and (last.isdecimal() or not colon)):  # noqa: PLR2004
        msg = f"--steps {text!r} is not A:B, such as 3:9"
        raise UsageProblem(msg)
    return int(first), int(last or first)
