"""``stepengine tokens``: who may use a server of runs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.options import parse_age_option
from stepengine.cli.screen.render import dumps, say
from stepengine.cli.settings import UsageProblem
from stepengine.cli.trusting import refuse_inside
from stepengine.errors import DataError, DefinitionError
from stepengine.server.access import SCOPES, KnownToken, Tokens

__all__ = ("add", "listed", "revoke")

File: TypeAlias = Annotated[Path, typer.Option("--file", help="The server's file of tokens.", metavar="FILE")]
Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="What the token is listed and revoked by.")]


def add(
    name: Name,
    *,
    file: File,
    scopes: Annotated[
        str, typer.Option(help=f"What it allows, of {', '.join(SCOPES)}; several with commas.", metavar="SCOPES")
    ] = "read,run,answer",
    expires: Annotated[
        str, typer.Option(help="How long it is good: 12h, 30d, 8w; without it, until it is revoked.", metavar="AGE")
    ] = "",
    owner: Annotated[
        str, typer.Option(help="Whose runs these are; default: NAME. Tokens of one owner see the same.", metavar="NAME")
    ] = "",
) -> Exit:
    r"""
    Make a token, and print it: it is shown this one time.

    The file, which is made if it is missing, holds a digest of it, and nobody else may read or write that file. A server that
    runs lets the token in at once.

    What a scope allows:
      read    look at runs of one's own, and follow them
      run     start, fork, cancel and resume them
      answer  answer what they ask, and say something to them
      debug   see what a handler holds: its locals and walks
      metrics read /metrics: numbers of everybody's runs
      admin   all of this, and what goes beyond a run

    Keep the token in a file that agents cannot read. A command that an agent runs as you can read what you can; a sandbox
    alone keeps it from that.

    Examples:
      stepengine tokens add ci --scopes read,run --expires 30d \
          --file tokens.json > ci.token
      stepengine tokens add anna-laptop --owner anna --file tokens.json
    """
    refuse_inside("stepengine tokens add")
    until = _until(expires)
    wanted: Any = [part.strip() for part in scopes.split(",")]
    try:
        token = Tokens.open(file).add(name, wanted, expires=until, owner=owner or None)
    except (DefinitionError, DataError) as error:
        return complain(error.message)
    print(token, flush=True)
    complain(f"{_in_words(name, until)}; it is not shown again", Exit.COMPLETED)
    return Exit.COMPLETED


def listed(
    *,
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    List who has a token, and for what.

    The tokens themselves stand nowhere: a lost one is revoked, and another one made.

    Examples:
      stepengine tokens list --file tokens.json
      stepengine tokens list --file tokens.json --json
    """
    try:
        found = _there(file).listed()
    except (DefinitionError, DataError) as error:
        return complain(error.message)
    if as_json:
        print(dumps([_json_of(one) for one in found]))
    elif found:
        say("\n".join([_line(one) for one in found]), hang=4)
    else:
        complain(f"{str(file)!r} holds no token; `stepengine tokens add` makes one", Exit.COMPLETED)
    return Exit.COMPLETED


def revoke(name: Name, *, file: File) -> Exit:
    """
    Revoke a token: its holder is refused from then on.

    A server that runs refuses it from its next request on; what it is sending already goes on until it ends.

    Examples:
      stepengine tokens revoke ci --file tokens.json
    """
    refuse_inside("stepengine tokens revoke")
    try:
        was_there = _there(file).remove(name)
    except (DefinitionError, DataError) as error:
        return complain(error.message)
    if was_there:
        return complain(f"revoked {name}", Exit.COMPLETED)
    return complain(f"there is no token {name!r} in {str(file)!r}; `stepengine tokens list` shows those that are there")


def _there(file: Path) -> Tokens:
    tokens = Tokens.open(file)
    if not file.exists():
        msg = f"there is no {str(file)!r}; `stepengine tokens add` makes it"
        raise UsageProblem(msg)
    return tokens


def _until(expires: str) -> datetime | None:
    if not expires:
        return None
    age = parse_age_option("--expires", expires)
    if not age:
        msg = f"--expires {expires!r}: the token would expire immediately; 30d, 12h, 90m and 2w are valid"
        raise UsageProblem(msg)
    return datetime.now(UTC).replace(microsecond=0) + age


def _in_words(name: str, until: datetime | None) -> str:
    return f"the token {name} is good until {f'{until:%Y-%m-%d %H:%M} UTC' if until else 'it is revoked'}"


def _line(one: KnownToken) -> str:
    owner = "" if one.owner == one.name else f", of {one.owner}"
    now = datetime.now(UTC)
    ended = one.expires is not None and one.expires <= now
    until = f"{'expired' if ended else 'until'} {one.expires:%Y-%m-%d %H:%M} UTC" if one.expires else "until revoked"
    return f"{one.name}{owner}: {', '.join(s for s in SCOPES if s in one.scopes)}; {until}"


def _json_of(one: KnownToken) -> dict[str, object]:
    return {
        "name": one.name,
        "owner": one.owner,
        "scopes": [scope for scope in SCOPES if scope in one.scopes],
        "created": one.created.isoformat(),
        "expires": one.expires and one.expires.isoformat(),
    }
