"""``stepengine journal scrub``: copy a journal without anything that looks like a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from stepengine.cli.exits import Exit
from stepengine.cli.options import File


def scrub(
    file: File,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The new journal.")],
) -> Exit:
    """
    Copy a journal without anything that looks like a secret.

    Use it to share a journal in git or a bug report.

    The copy can be shown, compared and replayed like the original, which does not change. A journal holds the whole
    conversation: private content other than keys is still in the copy.

    Examples:
      stepengine journal scrub run.jsonl run-public.jsonl
    """
    from stepengine.cli.journals import create_journal, open_journal
    from stepengine.journal import scrub
    from stepengine.journal.provenance import replace_records_by_derived

    made = create_journal(str(copy))
    scrubbed = scrub(open_journal(file))
    replace_records_by_derived(made, scrubbed.records(), scrubbed)
    print(f"wrote {made.address}", file=sys.stderr)
    return Exit.COMPLETED
