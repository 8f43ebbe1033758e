"""``stepengine show``: a recorded run, step by step, at the terminal or as a page for a browser."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any

import attrs
import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import add_journal_to_options, open_journal_or_cassette
from stepengine.cli.options import Json, Last, Options, Recorded
from stepengine.cli.run_page import MAX_MB, PageOptions, write_or_serve_page
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.data.codec import plain
from stepengine.data.json import freeze_object
from stepengine.data.origins import describe_origins, describe_source, redact_origin
from stepengine.data.visible import visible
from stepengine.errors import InputError, JournalError
from stepengine.redaction import make_redactor

_page_option = partial(typer.Option, rich_help_panel="Options of --html")


def show(  # noqa: C901 - one line for each thing that is shown
    file: Recorded = "",
    other: Annotated[
        str,
        typer.Argument(
            metavar="FILE2",
            help="With --html: another run, shown side by side. With --provenance: a value, or the address of a call.",
        ),
    ] = "",
    *,
    last: Last = False,
    step: Annotated[str, typer.Option(help="Show one step or effect completely.", metavar="N|PATH#N")] = "",
    left_out: Annotated[
        bool, typer.Option("--left-out", help="Show what each compaction removed from the conversation.")
    ] = False,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Show where the arguments of each call come from.")
    ] = False,
    as_json: Json = False,
    html: Annotated[bool, typer.Option("--html", help="Write the run as one page for a browser.")] = False,
    output: Annotated[
        str, _page_option("--out", "-o", help="The page; default: next to FILE, ending in .html.", metavar="PATH")
    ] = "",
    opens: Annotated[bool, _page_option("--open", help="Open the page in the browser.")] = False,
    serve: Annotated[
        bool, _page_option("--serve", help="Serve the page locally and follow a running run; write no file.")
    ] = False,
    port: Annotated[int, _page_option(help="Port of --serve; 0 for any.", min=0, max=65_535)] = 0,
    force: Annotated[
        bool, _page_option("--force", help="Overwrite an existing page; show the intact part of a damaged FILE.")
    ] = False,
    agent: Annotated[
        str, _page_option(help="File or id of the agent; default: the id in FILE.", metavar="PATH|ID")
    ] = "",
    no_code: Annotated[
        bool, _page_option("--no-code", help="Do not run the agent's code: no source lines, no variables.")
    ] = False,
    no_locals: Annotated[bool, _page_option("--no-locals", help="Show lines without the handler's variables.")] = False,
    max_mb: Annotated[
        float, _page_option(help="Truncate long texts in pages larger than this.", metavar="N", min=0.1)
    ] = MAX_MB,
    title: Annotated[str, _page_option(help="Title of the page.", metavar="TEXT")] = "",
    strict: Annotated[
        bool, _page_option("--strict", help="Exit with 5 if source lines and variables are missing.")
    ] = False,
) -> Exit:
    """
    Show a run step by step, here or as a page for a browser.

    Shows requests, results, times and costs. Nothing is run, and no agent is needed.

    --step shows the complete model request, the reply and the calls of one step. It takes the number of a step, or
    an effect such as 3.2#1. --left-out shows each compaction: the removed messages with their tokens, and the
    summary or notes that replaced them. A cassette is shown as a run: its model calls in order, and other HTTP
    requests with their status.

    --provenance shows where the value of each argument of each call occurs: in the request, an answer or a result.
    After FILE, name one call by its address, or type a value.

    --html writes one self-contained HTML file: agents, time line, every step with request, reply, calls and
    results, usage, cost and context over time, search. Source lines and handler variables come from a replay with
    the agent's code, which performs no effects. Texts that look like secrets are removed.

    Examples:
      stepengine show --last
      stepengine show run.jsonl --step 2
      stepengine show tests/cassettes/test_it/test_answer.yaml
      stepengine show run.jsonl --json | jq .effects
      stepengine show run.jsonl --provenance
      stepengine show run.jsonl --provenance eve@example.org
      stepengine show --last --html --open
      stepengine show run.jsonl --html -o run.html --no-code
      stepengine show before.jsonl after.jsonl --html
      stepengine show --last --html --serve
    """
    selected = ""
    if provenance:
        selected, file, other = (file, "", other) if last else (other, file, "")
    page = PageOptions(
        other=other, output=output, force=force, opens=opens, agent=agent, code=not no_code, locals=not no_locals,
        max_mb=max_mb, serve=serve, port=port, title=title, strict=strict,
    )  # fmt: skip
    if html:
        if step or left_out or provenance or as_json:
            msg = "--html shows the whole run as a page; leave out --step, --left-out, --provenance and --json"
            raise UsageProblem(msg)
        return write_or_serve_page(Options(journal=file, last=last, agent=agent, quiet=True), page)
    if page != PageOptions():
        msg = "FILE2 and the options of a page need --html; add --html"
        raise UsageProblem(msg)
    if left_out and step:
        msg = "--left-out shows the compactions of the whole run; leave out --step"
        raise UsageProblem(msg)
    if provenance:
        if step or left_out:
            msg = "--provenance shows the calls of the whole run; leave out --step and --left-out. Name one call after FILE, such as '#3'"
            raise UsageProblem(msg)
        return _print_provenance(Options(journal=file, last=last), selected, as_json=as_json)
    from stepengine import debugging

    try:
        journal = open_journal_or_cassette(add_journal_to_options(Options(journal=file, last=last)).journal)
        if as_json:
            told = debugging.describe_compactions(journal) if left_out else debugging.describe_run(journal, step=step)
            print(to_ascii_json(told))
        else:
            text = debugging.render_compactions(journal) if left_out else debugging.render_text(journal, step=step)
            print_visible(text, _get_hanging_indent)
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)
    except InputError as error:
        raise UsageProblem(error.message) from None
    return Exit.COMPLETED


def _print_provenance(options: Options, selected: str, *, as_json: bool) -> Exit:
    """Print the origins of the arguments of all calls, or of one; or print the sources of a value."""
    from stepengine.journal.origins import call_origins, value_sources

    try:
        journal = open_journal_or_cassette(add_journal_to_options(options).journal)
        calls = call_origins(journal)
        chosen = [call for call in calls if not selected or call.address == selected]
        found = {} if chosen else value_sources(journal, selected)
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)
    clean = make_redactor("all", os.environ).value
    cleaned = [
        attrs.evolve(call, origins=tuple([freeze_object(redact_origin(one, clean)) for one in call.origins]))
        for call in chosen
    ]
    if as_json:
        told: dict[str, Any] = {"calls": [attrs.asdict(call) for call in cleaned]}
        if selected:
            told["sources"] = {path: [attrs.asdict(one) for one in sources] for path, sources in found.items()}
        print(to_ascii_json(clean(plain(told))))
        return Exit.COMPLETED
    lines: list[str] = []
    for call in cleaned:
        asked = " (asked)" if call.is_question else ""
        lines += [f"{call.address} {call.name}{asked}", *_indent_lines(describe_origins(call.origins))]
    for path, sources in found.items():
        lines += [f"run {path}" if path else "the run", *_indent_lines(dict.fromkeys(map(describe_source, sources)))]
    print_visible(clean("\n".join(lines)) or f"{selected or 'no call'} is not in this run", _get_hanging_indent)
    return Exit.COMPLETED


def _indent_lines(lines: Iterable[str]) -> list[str]:
    """Return lines indented, with control characters made visible."""
    # A line break in a value must not look like the next origin.
    return [f"  {visible(line, strict=True)}" for line in lines]


def _get_hanging_indent(line: str) -> int:
    """Return the indent of a line's continuation: after an address, a dash or a member name."""
    first = line.lstrip(" ").partition(" ")[0]
    if first == "-":
        return 2
    return 5 if "#" in first and first[-1:].isdigit() else 0
