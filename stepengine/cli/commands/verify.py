"""``stepengine verify``: whether signed journals are as they were written, and who decided what in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import journal_at
from stepengine.cli.options import File, Json
from stepengine.cli.screen.render import dumps, one_line, say
from stepengine.errors import JournalError

if TYPE_CHECKING:
    from stepengine.journal import Decided, Verified

__all__ = ("verify",)

SAID_CHARS = 200


def verify(
    file: File,
    *,
    key: Annotated[
        list[str],
        typer.Option(help="File of the public key, such as audit.pub; may be given several times.", metavar="PUB"),
    ],
    seen: Annotated[
        str, typer.Option(help="The digest that an earlier look showed: FILE has to begin so.", metavar="DIGEST")
    ] = "",
    allow_unsigned: Annotated[
        bool,
        typer.Option("--allow-unsigned", help="Succeed although something is unsigned, as after a crash; it is told."),
    ] = False,
    as_json: Json = False,
) -> Exit:
    """
    Tell whether a signed journal is as it was written.

    A run is signed while it is recorded: `stepengine run ... --journal run.jsonl --sign audit`, where audit is a key that
    `ssh-keygen -t ed25519` made. Whoever has audit.pub can tell whether a record of FILE was altered, removed, moved
    or added since, and which; also when its checksums were made anew. Shown, too, is who answered what.

    Nothing is run or changed. Leaves with 1 when FILE was altered, and when some of it is not signed: what a crash
    left behind the last signature, or an end without a signature that closes it, since the rest may have been cut off.
    A whole journal that was cut back to where it was once suspended can be told by --seen alone.

    Examples:
      stepengine verify run.jsonl --key audit.pub
      stepengine verify run.jsonl --key audit.pub --seen 9f86d081...
      stepengine verify RUNS.db#3f2a --key audit.pub --json
    """
    from stepengine.journal import decisions, verify

    journal = journal_at(file)
    try:
        verified = verify(journal, key, seen=seen)
        made = decisions(journal) if verified.is_unaltered else []
    except JournalError as error:
        return complain(error.message, Exit.FAILED)
    is_fine = verified.is_unaltered and (allow_unsigned or bool(verified))
    if as_json:
        answers = [
            {**attrs.asdict(one), "time": one.time.isoformat(), "signed": one.record <= verified.signed} for one in made
        ]
        print(dumps({"ok": is_fine, **attrs.asdict(verified), "decisions": answers}))
    else:
        say("\n".join([*_describe_verification(verified), *[_decision(one, verified) for one in made]]), hang=4)
    return Exit.COMPLETED if is_fine else Exit.FAILED


def _describe_verification(verified: Verified) -> Iterator[str]:
    state = "ok" if verified else "ALTERED" if verified.problems else "UNSIGNED"
    yield f"{state:<9}{verified.name}  run {verified.run} of {verified.agent}, {verified.records} records"
    yield from [f"  {problem}" for problem in verified.problems]
    yield from [f"  {told}" for told in verified.unsigned]
    if verified.signatures:
        yield f"  signed up to record {verified.signed}, last at {verified.time}, by {verified.key}"
        yield f"  digest {verified.digest}"


def _decision(one: Decided, verified: Verified) -> str:
    who = one.by or "somebody"
    said = (
        "declined"
        if one.declined
        else one_line(one.said, SAID_CHARS) or ("gave what came of it" if one.kind == "result" else "yes")
    )
    more = [
        one.tool,
        "with another input" if one.edited else "",
        f"for the {one.remembered}" if one.remembered == "session" else "",
    ]
    more += [
        "for good" if one.remembered == "always" else "",
        f"because: {one_line(one.reason, SAID_CHARS)}" if one.reason else "",
    ]
    more += ["NOT SIGNED" if one.record > verified.signed else ""]
    about = "; ".join(filter(None, more))
    when = one.time.isoformat(timespec="seconds")
    return f"  {when}  {one.address}  {who}: {said}  to {one_line(one.asked, SAID_CHARS)!r}" + (
        f" ({about})" if about else ""
    )
