"""``stepengine tokens``: the tokens of a run server."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.options import parse_age_option
from stepengine.cli.screen.render import print_visible, to_ascii_json
from stepengine.cli.settings import UsageProblem
from stepengine.errors import DataError, DefinitionError
from stepengine.server.access import SCOPES, KnownToken, Tokens

File: TypeAlias = Annotated[Path, typer.Option("--file", help="The server's file of tokens.", metavar="FILE")]
Name: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="Name of the token, to list and revoke it.")]


def create_token(
    name: Name,
    *,
    file: File,
    scopes: Annotated[
        str, typer.Option(help=f"Scopes of the token, separated by commas: {', '.join(SCOPES)}.", metavar="SCOPES")
    ] = "read,run,answer",
    expires: Annotated[
        str, typer.Option(help="Lifetime, such as 12h, 30d or 8w; default: until it is revoked.", metavar="AGE")
    ] = "",
    owner: Annotated[
        str,
        typer.Option(help="Owner of the runs; default: NAME. Tokens of one owner see the same runs.", metavar="NAME"),
    ] = "",
) -> Exit:
    r"""
    Create a token, and print it once.

    The file stores a digest of the token. It is created if missing, readable and writable by its owner alone. A
    running server accepts the token at once.

    Scopes:
      read    list and follow your own runs
      run     start, fork, cancel and resume runs
      answer  answer questions, and send messages
      debug   see a handler's variables and replays
      metrics read /metrics, which covers all owners
      admin   all of these, and server-wide operations

    Keep the token in a file that agents cannot read. A command that an agent runs has your rights; only a sandbox
    prevents it from reading your files.

    Examples:
      stepengine tokens add ci --scopes read,run --expires 30d \
          --file tokens.json > ci.token
      stepengine tokens add anna-laptop --owner anna --file tokens.json
    """
    refuse_inside_tool("stepengine tokens add")
    until = _parse_expiry(expires)
    wanted: Any = [part.strip() for part in scopes.split(",")]
    try:
        token = Tokens.open(file).add(name, wanted, expires=until, owner=owner or None)
    except (DefinitionError, DataError) as error:
        return print_error(error.message)
    print(token, flush=True)
    end = f"{until:%Y-%m-%d %H:%M} UTC" if until else "it is revoked"
    print_error(f"the token {name} is valid until {end}; it is not shown again", Exit.COMPLETED)
    return Exit.COMPLETED


def list_tokens(
    *,
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> Exit:
    """
    List tokens, their owners and scopes.

    Tokens are not stored in plain text: to replace a lost one, revoke it and create another.

    Examples:
      stepengine tokens list --file tokens.json
      stepengine tokens list --file tokens.json --json
    """
    try:
        found = _open_existing_tokens(file).list_tokens()
    except (DefinitionError, DataError) as error:
        return print_error(error.message)
    if as_json:
        print(to_ascii_json([_token_to_dict(one) for one in found]))
    elif found:
        print_visible("\n".join([_format_token(one) for one in found]), hanging_indent=4)
    else:
        print_error(f"{str(file)!r} has no tokens; `stepengine tokens add` creates one", Exit.COMPLETED)
    return Exit.COMPLETED


def revoke_token(name: Name, *, file: File) -> Exit:
    """
    Revoke a token: requests with it are refused.

    A running server refuses it from the next request on. Responses that have started continue to their end.

    Examples:
      stepengine tokens revoke ci --file tokens.json
    """
    refuse_inside_tool("stepengine tokens revoke")
    try:
        was_there = _open_existing_tokens(file).remove(name)
    except (DefinitionError, DataError) as error:
        return print_error(error.message)
    if was_there:
        return print_error(f"revoked {name}", Exit.COMPLETED)
    return print_error(f"there is no token {name!r} in {str(file)!r}; `stepengine tokens list` lists them")


def _open_existing_tokens(file: Path) -> Tokens:
    """Return the tokens of a file; raise ``UsageProblem`` if the file is missing."""
    tokens = Tokens.open(file)
    if not file.exists():
        msg = f"there is no {str(file)!r}; `stepengine tokens add` creates it"
        raise UsageProblem(msg)
    return tokens


def _parse_expiry(expires: str) -> datetime | None:
    """Return the time at which a lifetime such as ``30d`` ends, from now on; ``None`` for an empty text."""
    if not expires:
        return None
    age = parse_age_option("--expires", expires)
    if not age:
        msg = f"--expires {expires!r}: the token would expire immediately; 30d, 12h, 90m and 2w are valid"
        raise UsageProblem(msg)
    return datetime.now(UTC).replace(microsecond=0) + age


def _format_token(token: KnownToken) -> str:
    """Return a line with the name, owner, scopes and end of a token."""
    owner = "" if token.owner == token.name else f", of {token.owner}"
    now = datetime.now(UTC)
    ended = token.expires is not None and token.expires <= now
    until = (
        f"{'expired' if ended else 'until'} {token.expires:%Y-%m-%d %H:%M} UTC" if token.expires else "until revoked"
    )
    return f"{token.name}{owner}: {', '.join(s for s in SCOPES if s in token.scopes)}; {until}"


def _token_to_dict(token: KnownToken) -> dict[str, object]:
    """Return a token as JSON values, without its hash."""
    return {
        "name": token.name,
        "owner": token.owner,
        "scopes": [scope for scope in SCOPES if scope in token.scopes],
        "created": token.created.isoformat(),
        "expires": token.expires and token.expires.isoformat(),
    }
