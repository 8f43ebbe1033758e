"""``stepengine journal repair``: keep the sound start of a damaged journal, or make an edited journal valid."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at, name_of, new_journal
from stepengine.cli.options import File
from stepengine.cli.screen.render import say
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError

__all__ = ("repair",)


def repair(
    file: File,
    *,
    until: Annotated[
        int | None, typer.Option(help="Keep the records up to this number, in a new file.", metavar="N", min=1)
    ] = None,
    into: Annotated[
        str, typer.Option(help="With --until: the new journal; default: next to FILE.", metavar="FILE")
    ] = "",
    seal: Annotated[bool, typer.Option("--seal", help="Make FILE valid again after you edited it.")] = False,
    against: Annotated[
        str, typer.Option(help="With --seal: the journal before the edit, to show what it changes.", metavar="FILE")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --seal: only show what was edited.")] = False,
) -> Exit:
    """
    Repair a damaged journal, or make an edited one valid.

    With --until the start of FILE is kept in a new file that can be resumed; FILE is only read. `stepengine journal check FILE`
    names the damaged record, and the number to give here.

    With --seal the edited records are shown, and FILE gets new checksums. Edit what a tool or a model said, seal the file,
    and replay it: the run takes the edited value. --against shows the difference by meaning.

    Examples:
      stepengine journal repair run.jsonl --until 41
      stepengine journal repair run.jsonl --until 41 --into good.jsonl
      stepengine journal repair run.jsonl --seal --dry-run
      git show HEAD:./run.jsonl > before.jsonl
      stepengine journal repair run.jsonl --seal --against before.jsonl
    """
    if seal == (until is not None) or (seal and into) or (not seal and (against or dry_run)):
        msg = "give --until N, with --into FILE if you like, or --seal, with --against FILE and --dry-run if you like"
        raise UsageProblem(msg)
    try:
        return _keep_start(file, until, into) if until is not None else _seal(file, against, dry_run=dry_run)
    except JournalError as error:
        return complain(error.message, Exit.FAILED)


def _keep_start(file: str, until: int, into: str) -> Exit:
    from stepengine.journal import repair

    source = Path(file.partition("#")[0])
    made = new_journal(into or str(source.with_name(f"{source.stem}.repaired.jsonl")))
    repair(journal_at(file), until, made)
    complain(f"kept {until} records in {name_of(made)}; go on with: stepengine resume {shlex.quote(name_of(made))}")
    return Exit.COMPLETED


def _seal(file: str, against: str, *, dry_run: bool) -> Exit:
    from stepengine.journal import diff, sealed

    journal = journal_at(file)
    made = sealed(journal)
    told = [f"record {edit.number}, {edit.what}: {edit.now}" for edit in made.edits]
    if against:
        told += ["what that means:", *[f"  {line}" for line in str(diff(against, made.journal)).splitlines()]]
    say("\n".join(told or [f"{file} is valid as it is"]), hang=2)
    if made.edits and not dry_run:
        made.journal.copy_to(journal)
        complain(f"sealed {file}: {len(made.edits)} records were edited")
    return Exit.COMPLETED
