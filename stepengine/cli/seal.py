"""``stepengine seal``: making a journal that was edited valid again."""

from __future__ import annotations

from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain, explained, leave
from stepengine.cli.journals import journal_at
from stepengine.cli.options import File
from stepengine.cli.render import visible
from stepengine.errors import JournalError

__all__ = (
    "seal",
    "seal_command",
)

SEAL = """\
Make FILE valid again after it was edited by hand: show what was edited, then make its checksums anew.

Edit what a tool or a model said, seal the file, and replay it: the run takes the edited value. With --against, which names
the file as it was, the difference is told by meaning.

\b
Examples:
  stepengine seal run.jsonl
  stepengine seal run.jsonl --dry-run
  git show HEAD:./run.jsonl > before.jsonl; stepengine seal run.jsonl --against before.jsonl"""


def seal(
    file: File,
    *,
    against: Annotated[str, typer.Option(help="The journal as it was before it was edited.", metavar="FILE")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what was edited.")] = False,
) -> None:
    """Make an edited journal valid; ``SEAL`` is what users read."""
    leave(seal_command(file, against=against, dry_run=dry_run))


def seal_command(file: str, *, against: str, dry_run: bool) -> Exit:
    """Show what was edited in a journal, then make it valid."""

    def command() -> Exit:
        from stepengine.journal import diff, sealed

        journal = journal_at(file)
        try:
            made = sealed(journal)
            told = [f"record {edit.number}, {edit.what}: {edit.now}" for edit in made.edits]
            if against:
                told += ["what that means:", *[f"  {line}" for line in str(diff(against, made.journal)).splitlines()]]
            print(visible("\n".join(told or [f"{file} is valid as it is"])))
            if made.edits and not dry_run:
                made.journal.copy_to(journal)
                complain(f"sealed {file}: {len(made.edits)} records were edited")
        except JournalError as error:
            return complain(error.message, Exit.FAILED)
        return Exit.COMPLETED

    return explained(command)
