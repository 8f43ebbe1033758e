"""``stepengine compare diff``: what two runs did differently."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import readable_journal
from stepengine.cli.options import Json
from stepengine.cli.recording import latest
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

__all__ = ("diff",)


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, as `stepengine show` takes it.")] = "",
    b: Annotated[str, typer.Argument(metavar="B", help="The run that is compared with it.")] = "",
    *,
    last: Annotated[bool, typer.Option("--last", help="The newest run of this folder, in place of B.")] = False,
    as_json: Json = False,
) -> Exit:
    """
    Show what two runs did differently.

    A and B are files or names of runs, or cassettes. Told are effects that were added, removed or changed, other outcomes,
    tokens and cost.

    Ids and times that differ in every run do not count. Leaves with 0 when there is no difference, with 1 when there
    is.

    Examples:
      stepengine compare diff before.jsonl after.jsonl
      stepengine compare diff before.jsonl --last      the newest run
      stepengine compare diff --last                   the two newest runs
      stepengine compare diff before.jsonl after.jsonl --json
    """
    from stepengine.journal import diff

    try:
        before, after = _two(a, b, last=last)
        found = diff(readable_journal(before), readable_journal(after))
    except JournalError as error:
        return complain(error.message, Exit.FAILED)
    if as_json:
        print(dumps(found.to_json()))
    else:
        say(str(found))
    return Exit.FAILED if found else Exit.COMPLETED


def _two(a: str, b: str, *, last: bool) -> tuple[str, str]:
    if last and b:
        msg = f"--last, {a!r} and {b!r} name three runs; give two of them"
        raise UsageProblem(msg)
    if last:
        return a or latest(before=1).journal, latest().journal
    if not a or not b:
        msg = "name two runs, A and B, as files or as `stepengine runs` lists them; --last stands for the newest one"
        raise UsageProblem(msg)
    return a, b
