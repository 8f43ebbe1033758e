"""``stepengine seal``: making a journal that was edited valid again."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at
from stepengine.cli.options import File
from stepengine.cli.screen.render import say
from stepengine.errors import JournalError

__all__ = ("seal",)


def seal(
    file: File,
    *,
    against: Annotated[str, typer.Option(help="The journal as it was before it was edited.", metavar="FILE")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what was edited.")] = False,
) -> Exit:
    """
    Make a journal valid again after it was edited by hand.

    Shows what was edited in FILE, then makes its checksums anew.

    Edit what a tool or a model said, seal the file, and replay it: the run takes the edited value. With --against,
    which names the file as it was, the difference is told by meaning.

    Examples:
      stepengine seal run.jsonl
      stepengine seal run.jsonl --dry-run
      git show HEAD:./run.jsonl > before.jsonl
      stepengine seal run.jsonl --against before.jsonl
    """
    from stepengine.journal import diff, sealed

    journal = journal_at(file)
    try:
        made = sealed(journal)
        told = [f"record {edit.number}, {edit.what}: {edit.now}" for edit in made.edits]
        if against:
            told += ["what that means:", *[f"  {line}" for line in str(diff(against, made.journal)).splitlines()]]
        say("\n".join(told or [f"{file} is valid as it is"]), hang=2)
        if made.edits and not dry_run:
            made.journal.copy_to(journal)
            complain(f"sealed {file}: {len(made.edits)} records were edited")
    except JournalError as error:
        return complain(error.message, Exit.FAILED)
    return Exit.COMPLETED
