"""``stepengine journal scrub``: a journal without what looks like a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import File

__all__ = ("scrub",)


def scrub(
    file: File,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The new journal.")],
) -> Exit:
    """
    Copy a journal without what looks like a secret.

    To put the COPY into git or a bug report.

    The copy can be shown, compared and replayed like the original, which stays as it is. A journal holds the whole
    conversation: what is private in it, but no key, is still there.

    Examples:
      stepengine journal scrub run.jsonl run-public.jsonl
    """
    from stepengine.cli.journals import journal_at, name_of, new_journal
    from stepengine.journal import scrub

    made = new_journal(str(copy))
    scrub(journal_at(file)).copy_to(made)
    print(f"wrote {name_of(made)}", file=sys.stderr)
    return Exit.COMPLETED
