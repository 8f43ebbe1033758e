"""``stepengine repair``: keeping the sound start of a damaged journal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at, name_of, new_journal
from stepengine.cli.options import File
from stepengine.errors import JournalError

__all__ = ("repair",)


def repair(
    file: File,
    *,
    until: Annotated[int, typer.Option(help="The number of the last record to keep.", metavar="N")],
    into: Annotated[str, typer.Option(help="The new journal; default: beside FILE.", metavar="FILE")] = "",
) -> Exit:
    """
    Keep the sound start of a damaged journal in a new file.

    FILE itself is only read; the new file can be resumed.

    `stepengine check FILE` says which record is damaged, and which number to give here.

    Examples:
      stepengine repair run.jsonl --until 41
      stepengine repair run.jsonl --until 41 --into good.jsonl
    """
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
