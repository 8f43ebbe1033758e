"""``stepengine compare diff``: the differences between two runs."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import open_journal_or_cassette
from stepengine.cli.options import Json
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.cli.state_folder import get_newest_run
from stepengine.errors import JournalError


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, named as for `stepengine show`.")] = "",
    b: Annotated[str, typer.Argument(metavar="B", help="The run to compare it with.")] = "",
    *,
    last: Annotated[bool, typer.Option("--last", help="The newest run of this folder, in place of B.")] = False,
    as_json: Json = False,
) -> Exit:
    """
    Show what two runs did differently.

    A and B are files or names of runs, or cassettes. Reports added, removed and changed effects, different
    outcomes, tokens and cost.

    Ids and times that differ in every run do not count. Exits with 0 if there is no difference, with 1 if there is
    one.

    Examples:
      stepengine compare diff before.jsonl after.jsonl
      stepengine compare diff before.jsonl --last      the newest run
      stepengine compare diff --last                   the two newest runs
      stepengine compare diff before.jsonl after.jsonl --json
    """
    from stepengine.journal import diff

    try:
        before, after = _choose_two_runs(a, b, last=last)
        found = diff(open_journal_or_cassette(before), open_journal_or_cassette(after))
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)
    if as_json:
        print(to_ascii_json(found.to_json()))
    else:
        print_visible(str(found))
    return Exit.FAILED if found else Exit.COMPLETED


def _choose_two_runs(a: str, b: str, *, last: bool) -> tuple[str, str]:
    """Return the names of the two typed runs; with *last*, the newest run is the second one."""
    if last and b:
        msg = f"--last, {a!r} and {b!r} name three runs; pass two"
        raise UsageProblem(msg)
    if last:
        return a or get_newest_run(skip=1).journal, get_newest_run().journal
    if not a or not b:
        msg = "name two runs, A and B, as files or by their names in `stepengine runs`; --last is the newest one"
        raise UsageProblem(msg)
    return a, b
