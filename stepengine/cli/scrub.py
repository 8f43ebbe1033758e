"""``stepengine scrub``: a journal without what looks like a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit, leave
from stepengine.cli.options import File

__all__ = ("scrub_command",)

SCRUB = """\
Write a copy of the journal in FILE without anything that looks like a secret, to put into git or a bug report.

The copy can be shown, compared and replayed like the original, which stays as it is. A journal holds the whole
conversation: what is private in it, but no key, is still there.

\b
Examples:
  stepengine scrub run.jsonl run-public.jsonl"""


def scrub_command(file: str, target: str) -> Exit:
    """Write a copy of a journal without secrets."""
    from stepengine.cli.exits import explained
    from stepengine.cli.journals import journal_at, name_of, new_journal
    from stepengine.journal import scrub

    def scrubbed() -> Exit:
        made = new_journal(target)
        scrub(journal_at(file)).copy_to(made)
        print(f"wrote {name_of(made)}", file=sys.stderr)
        return Exit.COMPLETED

    return explained(scrubbed)


def _scrub(
    file: File,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The new journal.")],
) -> None:
    leave(scrub_command(file, str(copy)))
