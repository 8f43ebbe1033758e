"""``stepengine compare impact``: what a change does to recorded runs, before it is merged."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import frozen

from stepengine.cli.evaluation import (
    Budget,
    Fresh,
    RecordedCase,
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
from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import spread
from stepengine.cli.options import Files, Options, with_options
from stepengine.cli.screen.render import cut, dumps, say, visible
from stepengine.cli.scripts import ScriptFile, models_of_script
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DataError, DefinitionError, StepEngineError

if TYPE_CHECKING:
    from stepengine.evaluation.impact import Impact, ImpactGate, RepeatedJournal
    from stepengine.journal import Purse

__all__ = ("impact",)

MARK = "<!-- stepengine-impact -->"
MAX_COMMENT = 65_000
MAX_TEXT = 300
FIELDS = 3


@frozen
class ImpactOptions:
    """What is asked about a change, as it was typed."""

    n: int
    budget: str
    fresh: bool
    baseline: str
    script: str
    tools: str
    simulate: str
    gates: tuple[str, ...]
    strict: bool
    markdown: bool
    yes: bool


@partial(with_options, without=("verbose",))
def impact(
    options: Options,
    files: Files,
    *,
    n: Annotated[int, typer.Option("-n", help="Samples of each run.", min=1, metavar="N")] = 5,
    budget: Budget = "",
    fresh: Fresh = False,
    baseline: Annotated[
        str, typer.Option(help="The agent as it was; asked again, too, to take out its noise.", metavar="PATH|ID")
    ] = "",
    script: ScriptFile = "",
    tools: Tools = "recorded",
    simulate: Simulate = "",
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Leave with 1 when it holds; may be given several times.", metavar="EXPR")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Leave with 5 when a handler differs first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a comment for a pull request.")] = False,
    yes: Yes = False,
) -> Exit:
    """
    Say what a change of an agent does to recorded runs.

    Each run is repeated for nothing as far as the present code asks what it asked. From the first request that differs
    on models are asked anew, -n times; tool calls are answered from the record while they are equal to recorded ones,
    by --simulate, or with --tools idempotent by tools that may be repeated. A call that none of these answers has left
    the record: how that run would have gone on is unknown. A folder stands for the *.jsonl files in it.

    Compared are the first decision (which tools, with which inputs), the tools, the end, and steps, tokens and cost
    from the difference on. With --baseline the agent as it was is asked again from the same place, and what is told is
    the difference to that.

    --fail-on is a name, a sign and a number: changed, left and failed are shares of samples, cost, steps and tokens
    ratios, such as 'changed > 0.1' or 'cost > 1.1'.

    Leaves with:
      0    the report is complete
      1    a --fail-on holds
      2    wrong usage; a journal cannot be read, or its agent is not found
      4    the budget is spent, the report is partial
      5    with --strict: a handler does something else than it did

    Examples:
      stepengine compare impact journals/ --agent ./agents/mine.py --budget 0.50
      stepengine compare impact journals/ --script replies.json
      stepengine compare impact run.jsonl --model openai/gpt-5-mini -n 3 --yes
      stepengine compare impact journals/ --fail-on 'changed > 0.1' --markdown
    """
    asked = ImpactOptions(
        n, budget, fresh, baseline, script, tools, simulate, tuple(fail_on or ()), strict, markdown, yes
    )
    return interrupted_or(lambda: _impact(files, options.in_force(), asked))


def _impact(files: Sequence[str], options: Options, asked: ImpactOptions) -> Exit:
    from stepengine.evaluation.impact import ImpactGate

    try:
        gates = [ImpactGate.parsed(text) for text in asked.gates]
    except DataError as error:
        msg = f"--fail-on: {error.message}"
        raise UsageProblem(msg) from None
    if asked.tools not in ("recorded", "idempotent"):
        msg = f"--tools is {asked.tools!r}; it is recorded or idempotent"
        raise UsageProblem(msg)
    report = _make_report(files, options, asked)
    holding = [gate for gate in gates if gate.holds(report.values())]
    if options.as_json:
        print(dumps(clean_report(report.to_json())))
    elif asked.markdown:
        print(_comment(report, holding))
    else:
        say(clean_lines([*report.lines(), *_rows(report)]), hang=4)
    for gate in holding:
        complain(f"--fail-on {gate} holds")
    return _code(report, holding, strict=asked.strict)


def _code(report: Impact, holding: Sequence[ImpactGate], *, strict: bool) -> Exit:
    kinds = [one.found.kind for one in report.journals]
    if "unreadable" in kinds:
        return Exit.USAGE
    if report.stopped:
        return Exit.LIMIT
    if holding:
        return Exit.FAILED
    return Exit.DIVERGED if strict and "handler changed" in kinds else Exit.COMPLETED


def _make_report(files: Sequence[str], options: Options, asked: ImpactOptions) -> Impact:
    """Return the report of all runs; each is performed with an engine for its own agent."""
    from stepengine.engine import load_agent
    from stepengine.evaluation.checks import function_at
    from stepengine.evaluation.impact import RepeatedJournal, expected_of, first_difference, impact
    from stepengine.evaluation.samples import at_once

    models, purse = models_of_script(asked.script), purse_of(asked.budget)
    simulate = function_at(asked.simulate) if asked.simulate else None
    old = load_agent(asked.baseline, folders=options.settings.agent_folders) if asked.baseline else None
    cases: list[RecordedCase | RepeatedJournal] = []
    for file in spread(files):
        try:
            own = [case for case in cases if isinstance(case, RecordedCase)]
            cases.append(case_of(file, options, performs=asked.tools != "recorded", beside=own))
        except StepEngineError as error:
            what = "its agent cannot be loaded" if isinstance(error, DefinitionError) else "its journal cannot be read"
            cases.append(RepeatedJournal(file, "unreadable", message=f"{what}: {error.message}"))
    own = [case for case in cases if isinstance(case, RecordedCase)]

    async def made() -> Impact:
        found = {c.file: await first_difference(c.bench.engine, c.file, c.journal, c.agent) for c in own}
        expected = expected_of([*found.values()], asked.n * (1 if old is None else 2))
        if expected.calls and models is None:
            agree_to_cost(expected.calls, expected.low, expected.high, yes=asked.yes or bool(asked.budget))
        works = [
            partial(
                impact,
                case.bench.engine, [found[case.file]], agent=case.agent, old=old, n=asked.n, purse=purse, models=models,
                tools=asked.tools, simulate=simulate, reuse=not asked.fresh,
            )
            for case in own
        ]  # fmt: skip
        parts = await at_once(works, 2)
        return _join_parts(parts, [case for case in cases if isinstance(case, RepeatedJournal)], asked, purse)

    return to_the_end(made, [case.bench.engine for case in own])


def _join_parts(
    parts: Sequence[Impact], unread: Sequence[RepeatedJournal], asked: ImpactOptions, purse: Purse
) -> Impact:
    from stepengine.evaluation.impact import Impact, Judged

    return Impact(
        agent=", ".join(dict.fromkeys([part.agent for part in parts])),
        n=asked.n,
        tools=asked.tools,
        journals=(*[one for part in parts for one in part.journals], *[Judged(one) for one in unread]),
        spent=purse.known,
        stopped=next((part.stopped for part in parts if part.stopped), ""),
    )


def _rows(report: Impact) -> Iterator[str]:
    """Give lines for each run that came out differently, or may have, and how many did not."""
    asked = [one for one in report.journals if one.samples and one.found.kind == "asked"]
    calm = [one for one in asked if not any(map(_is_told, one.samples))]
    for one in report.journals:
        found = one.found
        if found.kind == "same" or one in calm:
            continue
        if found.kind == "unreadable":
            yield f"{found.file}  not compared: {found.message}"
            continue
        said = found.message.partition(": ")[2] if found.message.startswith("the run diverged") else found.message
        yield f"{found.file}  {found.broke_at or found.kind}: {said}"
        yield from [f"    {f.pointer}  recorded {f.recorded}   now {f.now}" for f in found.difference[:FIELDS]]
        if one.samples:
            yield f"    {_summarize_samples(one.samples)}"
    if calm:
        yield f"{len(calm)} more were asked again, and decided and ended as recorded"


def _is_told(each: Any) -> bool:
    return bool(each.changed or not each.output_equal)


def _summarize_samples(samples: Sequence[Any]) -> str:
    changed, left = sum(each.changed for each in samples), sum(each.has_left for each in samples)
    ends = ", ".join(dict.fromkeys(["unknown" if each.has_left else each.course.status for each in samples]))
    return f"of {len(samples)} samples {changed} chose another tool, {left} left the record; they ended: {ends}"


# --- a comment ------------------------------------------------------------------------------------------------------

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~@-])")


def _comment(report: Impact, holding: Sequence[ImpactGate]) -> str:
    """Return the report as Markdown: one table, with the texts of journals as code that cannot be anything else."""
    lines = [MARK, f"### What this change does to {len(report.journals)} recorded runs", ""]
    lines += [f"- {_plain(line)}" for line in report.lines()]
    lines += [f"- **{_plain(f'--fail-on {gate} holds')}**" for gate in holding]
    lines += ["", "| run | first difference | samples | another tool | left the record |", "|---|---|---|---|---|"]
    length = sum(len(line) + 1 for line in lines)
    for number, one in enumerate(report.journals):
        first = one.found.difference[0] if one.found.difference else None
        where = f"{one.found.broke_at} {first.pointer}: {first.recorded} → {first.now}" if first else one.found.kind
        where = f"not compared: {one.found.message}" if one.found.kind == "unreadable" else where
        cells = [_code_span(one.found.file), _code_span(where), len(one.samples), *_counts(one.samples)]
        row = f"| {' | '.join(map(str, cells))} |"
        length += len(row) + 1
        if length > MAX_COMMENT - 100:
            lines.append(f"| and {len(report.journals) - number} more | | | | |")
            break
        lines.append(row)
    return "\n".join(lines)


def _counts(samples: Sequence[object]) -> list[int]:
    counted: list[Callable[[Any], bool]] = [lambda each: each.changed, lambda each: each.has_left]
    return [sum(map(count, samples)) for count in counted]


def _plain(text: str) -> str:
    """Return text that Markdown takes for nothing but text."""
    return SPECIAL.sub(r"\\\1", _short(text))


def _code_span(text: str) -> str:
    """Return text as code; a fence of more backticks than it holds, and no cell ends within it."""
    short = _short(text)
    longest = max((len(run) for run in re.findall("`+", short)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {short.replace('|', chr(92) + '|')} {fence}"


def _short(text: str) -> str:
    return cut(visible(" ".join(str(clean_report(text)).split()), strict=True), MAX_TEXT)
