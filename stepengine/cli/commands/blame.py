"""``stepengine compare blame``: the step at which a run that failed lost its chance."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import attrs
import typer
from attrs import frozen

from stepengine.cli.evaluation import (
    Budget,
    CheckText,
    Simulate,
    Tools,
    Yes,
    agree_to_cost,
    case_of,
    clean_lines,
    clean_report,
    interrupted_or,
    purse_of,
    to_the_end,
)
from stepengine.cli.exits import Exit
from stepengine.cli.journals import find_journal
from stepengine.cli.options import File, Last, Options, with_options
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.scripts import ScriptFile, models_of_script
from stepengine.cli.settings import UsageProblem

if TYPE_CHECKING:
    from stepengine.evaluation.blame import Blame

__all__ = ("blame",)


@frozen
class BlameOptions:
    """What is asked about a run, as it was typed."""

    check: str
    k: int
    steps: str
    tools: str
    simulate: str
    script: str
    budget: str
    yes: bool


@partial(with_options, without=("verbose",))
def blame(
    options: Options,
    file: File = "",
    *,
    last: Last = False,
    check: CheckText,
    k: Annotated[int, typer.Option("-k", help="Runs from each step.", min=1, metavar="K")] = 8,
    steps: Annotated[str, typer.Option(help="Only these model steps.", metavar="A:B")] = "",
    tools: Tools = "idempotent",
    simulate: Simulate = "",
    script: ScriptFile = "",
    budget: Budget = "",
    yes: Yes = False,
) -> Exit:
    """
    Find the step at which a failed run lost its chance.

    From the record up to each model step the run goes on anew, -k times, and --check says whether it passes. While the
    step that spoiled the run is still ahead, runs mostly pass; once it stands in the record, they mostly fail. Blamed
    is the last step before that. Runs of more than 12 model steps are searched by halves.

    Tool calls are answered from the record while they are equal to recorded ones, then by --simulate; tools that are
    idempotent or read-only are performed, in the world of today, and counted; nothing else is ever repeated. With
    --tools recorded none is performed. A run that needs another call is unknown, which is not a failure.

    --check is an expression over output, text, status, tools, steps, cost, error and result, or MODULE:FN, a function
    of the result. It is your own code and runs as such.

    Leaves with:
      0    a step is to blame
      1    none is, or the run passes
      2    wrong usage; the journal or its agent cannot be used
      4    the budget is spent, the report is partial
      5    what is recorded does not fit the present code

    Examples:
      stepengine compare blame run.jsonl --check "output == 42" --budget 0.50
      stepengine compare blame --last --check checks:is_polite -k 4 --steps 3:9
    """
    options = attrs.evolve(options, journal=file, last=last)
    asked = BlameOptions(check, k, steps, tools, simulate, script, budget, yes)
    return interrupted_or(lambda: _blame(find_journal(options).in_force(), asked))


def _blame(options: Options, asked: BlameOptions) -> Exit:
    from stepengine.evaluation.blame import blame, expected_calls
    from stepengine.evaluation.checks import Check, function_at

    if asked.tools not in ("recorded", "idempotent"):
        msg = f"--tools is {asked.tools!r}; it is recorded or idempotent"
        raise UsageProblem(msg)
    check, steps, models = Check.of_text(asked.check), _steps(asked.steps), models_of_script(asked.script)
    purse = purse_of(asked.budget)
    simulate = function_at(asked.simulate) if asked.simulate else None
    case = case_of(options.journal, options, performs=asked.tools != "recorded")

    async def made() -> Blame:
        calls, cost = expected_calls(case.journal, asked.k, steps)
        engine = case.bench.engine
        passes = check.of(await engine.replay(case.journal, agent=case.agent)).passed
        if calls and not passes and models is None:
            agree_to_cost(calls, cost, None if cost is None else 2 * cost, yes=asked.yes or bool(asked.budget))
        return await blame(
            engine, case.journal, check, agent=case.agent, k=asked.k, steps=steps, purse=purse, models=models,
            tools=asked.tools, simulate=simulate,
        )  # fmt: skip

    report = to_the_end(made, [case.bench.engine])
    if options.as_json:
        print(dumps(clean_report(report.to_json())))
    else:
        say(clean_lines([*report.lines(), *_hint(report, options)]), hang=4)
    if report.stopped:
        return Exit.LIMIT
    return Exit.FAILED if report.blamed is None else Exit.COMPLETED


def _hint(report: Blame, options: Options) -> list[str]:
    if report.blamed is None:
        return []
    name, at = options.stem or options.journal, report.blamed.step.address
    return [f"look at it: stepengine show {name}; try another reply: stepengine fork {name} --at '{at}' --edit TEXT"]


def _steps(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    first, colon, last = text.partition(":")
    if not (first.isdecimal() and len(text) < 20 and (last.isdecimal() or not colon)):  # noqa: PLR2004
        msg = f"--steps {text!r} is no A:B, such as 3:9"
        raise UsageProblem(msg)
    return int(first), int(last or first)
