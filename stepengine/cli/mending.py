"""``stepengine seal`` and ``repair``: making an edited or a damaged journal usable again. Each is an explicit act."""

from __future__ import annotations

import shlex
from pathlib import Path

from stepengine.cli.journals import journal_at
from stepengine.cli.report import Exit
from stepengine.cli.running import complain, explained, name_of, new_journal
from stepengine.cli.screen import visible
from stepengine.errors import JournalError

__all__ = ("repair_command", "seal_command")


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


def repair_command(file: str, *, until: int, into: str) -> Exit:
    """Keep the first records of a damaged journal in a new file."""

    def command() -> Exit:
        from stepengine.journal import repair

        source = Path(file.partition("#")[0])
        target = into or str(source.with_name(f"{source.stem}.repaired.jsonl"))
        made = new_journal(target)
        try:
            repair(journal_at(file), until, made)
        except JournalError as error:
            return complain(error.message, Exit.FAILED)
        complain(f"kept {until} records in {name_of(made)}; go on with: stepengine resume {shlex.quote(name_of(made))}")
        return Exit.COMPLETED

    return explained(command)
