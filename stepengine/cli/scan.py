"""``stepengine scan``: keys that must not be in a repository."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import attrs
import typer

from stepengine.cli.exits import Exit, leave

__all__ = ("scan_command",)

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


def scan_command(paths: Sequence[str], allow: Sequence[str] = (), *, as_json: bool = False) -> Exit:
    """Print what looks like a secret in *paths*."""
    from stepengine.cli.exits import explained
    from stepengine.cli.render import dumps, visible
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


def _scan(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...", help="Files and folders.")],
    *,
    allow: Annotated[
        list[str] | None, typer.Option(help="Hash of a value to let pass; may be given several times.", metavar="HASH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    leave(scan_command(paths, allow or (), as_json=as_json))
