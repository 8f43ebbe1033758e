"""``stepengine compare impact``: the effect of a change on recorded runs, before it is merged."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepengine.cli.evaluation import (
    Budget,
    Fresh,
    RecordedCase,
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
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import expand_to_journals, require_choice
from stepengine.cli.options import Files, Options, with_shared_options
from stepengine.cli.screen.render import print_visible, to_ascii_json, truncate_text, visible
from stepengine.cli.scripts import ScriptFile, make_scripted_model_factory
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DataError, DefinitionError, StepEngineError

if TYPE_CHECKING:
    from stepengine.evaluation.impact import Impact, ImpactGate, RepeatedJournal
    from stepengine.journal import SharedBudget

MARK = "<!-- stepengine-impact -->"
MAX_COMMENT = 65_000
MAX_TEXT = 300
FIELDS = 3


@partial(with_shared_options, without=("verbose",))
def impact(
    options: Options,
    files: Files,
    *,
    n: Annotated[int, typer.Option("-n", help="Samples of each run.", min=1, metavar="N")] = 5,
    budget: Budget = "",
    fresh: Fresh = False,
    baseline: Annotated[
        str, typer.Option(help="The old agent; run again, too, to remove its noise.", metavar="PATH|ID")
    ] = "",
    script: ScriptFile = "",
    tools: Tools = "recorded",
    simulate: Simulate = "",
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Exit with 1 if this holds; may be repeated.", metavar="EXPR")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 5 if a handler diverges first.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a comment for a pull request.")] = False,
    yes: Yes = False,
) -> Exit:
    """
    Report how a change to an agent affects recorded runs.

    Each run is replayed for free as long as the current code makes the recorded requests. From the first different
    request on, models are called again, -n times. Tool calls are answered from equal recorded calls, by --simulate,
    or with --tools idempotent by tools that may be repeated. A call without an answer leaves the record: how that
    run would continue is unknown. A folder means the *.jsonl files in it.

    Compares the first decision (tools and inputs), the tools, the end, and steps, tokens and cost from the
    difference on. --baseline also runs the old agent from the same point, and reports the difference between both.

    --fail-on is a name, an operator and a number: changed, left and failed are shares of samples; cost, steps and
    tokens are ratios. Examples: 'changed > 0.1', 'cost > 1.1'.

    Exit codes:
      0    the report is complete
      1    a --fail-on holds
      2    wrong usage; a journal cannot be read, or its agent is not found
      4    the budget is spent; the report is partial
      5    with --strict: a handler diverges from its record

    Examples:
      stepengine compare impact journals/ --agent ./agents/mine.py --budget 0.50
      stepengine compare impact journals/ --script replies.json
      stepengine compare impact run.jsonl --model openai/gpt-5-mini -n 3 --yes
      stepengine compare impact journals/ --fail-on 'changed > 0.1' --markdown
    """

    def measure_and_report() -> Exit:
        """Measure the impact on the runs within the budget, print the report, and return the exit code."""
        from stepengine.engine import load_agent
        from stepengine.evaluation.checks import load_function
        from stepengine.evaluation.impact import ImpactGate

        own = options.with_settings()
        try:
            gates = [ImpactGate.parse(text) for text in fail_on or ()]
        except DataError as error:
            msg = f"--fail-on: {error.message}"
            raise UsageProblem(msg) from None
        require_choice("--tools", tools, ("recorded", "idempotent"))
        models, shared = make_scripted_model_factory(script), parse_budget(budget)
        report = _measure_impact(
            files, own, n=n, budget=shared, models=models, tools=tools, reuse=not fresh,
            simulate=load_function(simulate) if simulate else None,
            old=load_agent(baseline, folders=own.settings.agent_folders) if baseline else None,
            confirm=partial(confirm_cost, yes=yes or bool(budget)) if models is None else None,
        )  # fmt: skip
        holding = [gate for gate in gates if gate.holds(report.values())]
        if own.as_json:
            print(to_ascii_json(redact_report(report.to_json())))
        elif markdown:
            print(_format_markdown_comment(report, holding))
        else:
            print_visible(join_and_redact_lines([*report.lines(), *_format_report_lines(report)]), hanging_indent=4)
        for gate in holding:
            print_error(f"--fail-on {gate} holds")
        return _choose_exit_code(report, holding, strict=strict)

    return run_reporting_errors(measure_and_report)


def _choose_exit_code(report: Impact, holding: Sequence[ImpactGate], *, strict: bool) -> Exit:
    """Return the exit code for a report: unreadable runs, budget, gates and divergences, in this order."""
    kinds = [one.found.kind for one in report.journals]
    if "unreadable" in kinds:
        return Exit.USAGE
    if report.stopped:
        return Exit.LIMIT
    if holding:
        return Exit.FAILED
    return Exit.DIVERGED if strict and "handler changed" in kinds else Exit.COMPLETED


def _measure_impact(
    files: Sequence[str], options: Options, *, n: int, budget: SharedBudget, tools: str, **impact_options: Any
) -> Impact:
    """Return the report of all runs; the runs of each agent share an engine. *impact_options* are passed to ``impact``."""
    from stepengine.evaluation.impact import Impact, Judged, RepeatedJournal, impact, replay_to_first_difference

    own: list[RecordedCase] = []
    unread: list[RepeatedJournal] = []
    for file in expand_to_journals(files):
        try:
            own.append(load_recorded_case(file, options, performs=tools != "recorded", share_engines_of=own))
        except StepEngineError as error:
            what = "its agent cannot be loaded" if isinstance(error, DefinitionError) else "its journal cannot be read"
            unread.append(RepeatedJournal(file, "unreadable", message=f"{what}: {error.message}"))
    if not own:
        return Impact("", n, tools, tuple(map(Judged, unread)), budget.spent_if_known)

    async def run_impact() -> Impact:
        """Replay each run to its first difference, then sample it from there; return the report."""
        found = [
            await replay_to_first_difference(case.bench.engine, case.file, case.journal, case.agent) for case in own
        ]
        return await impact(own[0].bench.engine, [*found, *unread], n=n, budget=budget, tools=tools, **impact_options)

    return run_and_close_engines(run_impact, [case.bench.engine for case in own])


def _format_report_lines(report: Impact) -> Iterator[str]:
    """Yield lines for each run with a difference, and the number of runs without one."""
    asked = [one for one in report.journals if one.samples and one.found.kind == "asked"]
    calm = [one for one in asked if not any(map(_has_difference, one.samples))]
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
        yield f"{len(calm)} more runs were repeated, with the same decisions and end as recorded"


def _has_difference(sample: Any) -> bool:
    """Return whether a sample called other tools or had another output than the recorded run."""
    return bool(sample.changed or not sample.output_equal)


def _summarize_samples(samples: Sequence[Any]) -> str:
    """Return a text about the samples of a run: changed tools, samples that left the record, and ends."""
    changed, left = _count_changed_and_left(samples)
    ends = ", ".join(dict.fromkeys(["unknown" if each.has_left_record else each.course.status for each in samples]))
    return f"of {len(samples)} samples {changed} chose another tool, {left} left the record; they ended: {ends}"


# --- a comment ------------------------------------------------------------------------------------------------------

SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~@-])")


def _format_markdown_comment(report: Impact, holding: Sequence[ImpactGate]) -> str:
    """Return the report as a Markdown table; texts of journals are escaped as code."""
    lines = [MARK, f"### What this change does to {len(report.journals)} recorded runs", ""]
    lines += [f"- {_redact_and_escape_markdown(line)}" for line in report.lines()]
    lines += [f"- **{_redact_and_escape_markdown(f'--fail-on {gate} holds')}**" for gate in holding]
    lines += ["", "| run | first difference | samples | another tool | left the record |", "|---|---|---|---|---|"]
    length = sum(len(line) + 1 for line in lines)
    for number, one in enumerate(report.journals):
        first = one.found.difference[0] if one.found.difference else None
        where = f"{one.found.broke_at} {first.pointer}: {first.recorded} → {first.now}" if first else one.found.kind
        where = f"not compared: {one.found.message}" if one.found.kind == "unreadable" else where
        cells = [
            _format_code_span(one.found.file),
            _format_code_span(where),
            len(one.samples),
            *_count_changed_and_left(one.samples),
        ]
        row = f"| {' | '.join(map(str, cells))} |"
        length += len(row) + 1
        if length > MAX_COMMENT - 100:
            lines.append(f"| and {len(report.journals) - number} more | | | | |")
            break
        lines.append(row)
    return "\n".join(lines)


def _count_changed_and_left(samples: Sequence[Any]) -> tuple[int, int]:
    """Return how many samples chose another tool, and how many left the record."""
    return sum(each.changed for each in samples), sum(each.has_left_record for each in samples)


def _redact_and_escape_markdown(text: str) -> str:
    """Return a text with secrets redacted, shortened, and all Markdown characters escaped."""
    return SPECIAL.sub(r"\\\1", _redact_and_shorten(text))


def _format_code_span(text: str) -> str:
    """Return a redacted, shortened text as a Markdown code span for a table cell."""
    short = _redact_and_shorten(text)
    longest = max((len(run) for run in re.findall("`+", short)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {short.replace('|', chr(92) + '|')} {fence}"


def _redact_and_shorten(text: str) -> str:
    """Return a text in one line, with secrets redacted, visible control characters and limited length."""
    return truncate_text(visible(" ".join(str(redact_report(text)).split()), strict=True), MAX_TEXT)
