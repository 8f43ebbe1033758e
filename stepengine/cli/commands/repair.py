"""``stepengine journal repair``: keep the sound start of a damaged journal, or make an edited journal valid."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import create_journal, open_journal
from stepengine.cli.options import File
from stepengine.cli.screen.render import print_visible
from stepengine.cli.settings import UsageProblem
from stepengine.errors import JournalError


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --seal: only show the edited records.")] = False,
) -> Exit:
    """
    Repair a damaged journal, or make an edited one valid.

    --until copies the start of FILE to a new file that can be resumed; FILE does not change. `stepengine journal
    check FILE` names the damaged record and the number to pass.

    --seal shows the edited records and writes new checksums to FILE. Edit a tool's result or a model's reply, seal
    the file, and replay it: the run uses the edited value. --against shows the difference in meaning.

    Examples:
      stepengine journal repair run.jsonl --until 41
      stepengine journal repair run.jsonl --until 41 --into good.jsonl
      stepengine journal repair run.jsonl --seal --dry-run
      git show HEAD:./run.jsonl > before.jsonl
      stepengine journal repair run.jsonl --seal --against before.jsonl
    """
    if seal == (until is not None) or (seal and into) or (not seal and (against or dry_run)):
        msg = "pass --until N (optionally --into FILE), or --seal (optionally --against FILE and --dry-run)"
        raise UsageProblem(msg)
    try:
        return (
            _copy_first_records(file, until, into)
            if until is not None
            else _print_and_seal_edits(file, against, dry_run=dry_run)
        )
    except JournalError as error:
        return print_error(error.message, Exit.FAILED)


def _copy_first_records(file: str, record_count: int, into: str) -> Exit:
    """Copy the first *record_count* records of a journal to a new one, *into* or a file next to it."""
    from stepengine.journal import repair
    from stepengine.journal.sources import get_journal_file

    source = get_journal_file(file)
    made = create_journal(into or str(source.with_name(f"{source.stem}.repaired.jsonl")))
    repair(open_journal(file), record_count, made)
    print_error(
        f"kept {record_count} records in {made.address}; resume it with: stepengine resume {shlex.quote(made.address)}"
    )
    return Exit.COMPLETED


def _print_and_seal_edits(file: str, against: str, *, dry_run: bool) -> Exit:
    """Print the edited records of a journal, and write new checksums to it unless *dry_run* is set."""
    from stepengine.journal import diff, seal_journal
    from stepengine.journal.provenance import replace_records_by_derived

    journal = open_journal(file)
    made = seal_journal(journal)
    told = [f"record {edit.number}, {edit.what}: {edit.now}" for edit in made.edits]
    if against:
        told += ["what the edits change:", *[f"  {line}" for line in str(diff(against, made.journal)).splitlines()]]
    print_visible("\n".join(told or [f"{file} is valid as it is"]), hanging_indent=2)
    if made.edits and not dry_run:
        replace_records_by_derived(journal, made.journal.records(), made.journal)
        print_error(f"sealed {file}: {len(made.edits)} records were edited")
    return Exit.COMPLETED
