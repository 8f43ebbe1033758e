"""``stepengine scan``: keys that must not be in a repository."""

from __future__ import annotations

import sys
from typing import Annotated

import attrs
import typer

from stepengine.cli.exits import Exit

__all__ = ("scan",)


def scan(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Files and folders.")],
    *,
    allow: Annotated[
        list[str] | None, typer.Option(help="Hash of a value to let pass; may be given several times.", metavar="HASH")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    Look for keys and tokens in files of any kind.

    A folder stands for the files in it.

    Finds texts with the shape of a key (providers, GitHub, Slack, AWS, JWT, PEM), the values of environment variables that
    are named like secrets (API_KEY, TOKEN, PGPASSWORD, DB_PASS, ...), and passwords in addresses (DATABASE_URL), plain,
    escaped or in base64. The values themselves are not printed. Exits with 1 when something was found: for a commit hook or CI.

    Examples:
      stepengine scan .
      stepengine scan journals/ cassettes/
      stepengine scan README.md --json        each with its hash
      stepengine scan . --allow sha256:...    a value that only looks like a key
    """
    from stepengine.cli.screen.render import dumps, say
    from stepengine.journal.scanning import scan

    leaks = list(scan(paths, allow_secrets=allow or ()))
    if as_json:
        print(dumps([attrs.asdict(leak) for leak in leaks]))
    elif leaks:
        say("\n".join([str(leak) for leak in leaks]), hang=2)
        where = len({leak.path for leak in leaks})
        advice = "take them out, and change keys that were shared"
        print(f"{len(leaks)} found in {where} files; {advice}", file=sys.stderr)
    return Exit.FAILED if leaks else Exit.COMPLETED
