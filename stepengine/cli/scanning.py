"""``stepengine scan`` and ``stepengine scrub``: keys that must not be in a repository, and journals without them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import typer

from stepengine.cli.ending import leave
from stepengine.cli.options import File
from stepengine.cli.report import Exit

__all__ = ("add_scanning_commands", "scan_command", "scrub_command")

SCAN = """\
Look for keys and tokens in files of any kind; a folder stands for the files in it.

Found are texts with the shape of a key (providers, GitHub, Slack, AWS, JWT, PEM), and the values of variables of the
environment that are named like secrets (..._KEY, ..._TOKEN, ..._SECRET, ..._PASSWORD), in plain, escaped and base64 form.
The values themselves are not printed. Leaves with 1 when something was found: for a commit hook or CI.

\b
Examples:
  stepengine scan .
  stepengine scan journals/ cassettes/
  stepengine scan README.md --json           each with its hash
  stepengine scan . --allow sha256:...       a value that only looks like a key"""

SCRUB = """\
Write a copy of the journal in FILE without anything that looks like a secret, to put into git or a bug report.

The copy can be shown, compared and replayed like the original, which stays as it is. A journal holds the whole
conversation: what is private in it, but no key, is still there.

\b
Examples:
  stepengine scrub run.jsonl run-public.jsonl"""


def scan_command(paths: Sequence[str], allow: Sequence[str] = (), *, as_json: bool = False) -> Exit:
    """Print what looks like a secret in *paths*."""
    from stepengine.cli.running import explained
    from stepengine.cli.screen import dumps, visible
    from stepengine.journal.scanning import scan

    def scanned() -> Exit:
        leaks = list(scan(paths, allow_secrets=allow))
        if as_json:
            print(dumps([attrs.asdict(leak) for leak in leaks]))
        elif leaks:
            print("\n".join([visible(str(leak)) for leak in leaks]))
            where = len({leak.path for leak in leaks})
            advice = "take them out, and change keys that were shared"
            print(f"{len(leaks)} found in {where} files; {advice}", file=sys.stderr)
        return Exit.FAILED if leaks else Exit.COMPLETED

    return explained(scanned)


def scrub_command(file: str, target: str) -> Exit:
    """Write a copy of a journal without secrets."""
    from stepengine.cli.journals import journal_at
    from stepengine.cli.running import explained, name_of, new_journal
    from stepengine.journal import scrub

    def scrubbed() -> Exit:
        made = new_journal(target)
        scrub(journal_at(file)).copy_to(made)
        print(f"wrote {name_of(made)}", file=sys.stderr)
        return Exit.COMPLETED

    return explained(scrubbed)


def _scan(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files and folders.")],
    *,
    allow: Annotated[
        list[str] | None, typer.Option(help="Hash of a value to let pass; may be given several times.", metavar="HASH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    leave(scan_command(paths, allow or (), as_json=as_json))


def _scrub(
    file: File,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The new journal.")],
) -> None:
    leave(scrub_command(file, str(copy)))


def add_scanning_commands(app: typer.Typer) -> None:
    """Add ``scan`` and ``scrub``."""
    app.command("scan", help=SCAN)(_scan)
    app.command("scrub", help=SCRUB)(_scrub)
