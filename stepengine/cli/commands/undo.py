"""``stepengine undo``: from a recorded run to its folder as it was before."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial as partial_of
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import find_journal, journal_at, name_of
from stepengine.cli.options import File, Last, Options
from stepengine.cli.screen.render import say
from stepengine.cli.trusting import can_ask, refuse_inside
from stepengine.errors import DefinitionError, JournalError, UndoRefused, WorkspaceLost

if TYPE_CHECKING:
    from stepengine.journal import Journal, Undone
    from stepengine.workspace.workspace import Workspace

__all__ = ("root_of", "undo")


def undo(
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[
        str, typer.Option(help="The last effect whose writes stay; default: none.", metavar="N|PATH#N")
    ] = "-1",
    cwd: Annotated[
        Path | None, typer.Option(help="Folder that the tools worked in; default: as the run was started.")
    ] = None,
    workspace: Annotated[
        str,
        typer.Option(
            help="Where the tools ran, if not on this machine; default: as the run was started.", metavar="KIND:WHERE"
        ),
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave the files that were changed since, and bring back the rest.")
    ] = False,
    moved: Annotated[
        bool, typer.Option("--moved", help="The folder stands at another place than when the run wrote.")
    ] = False,
    allow_protected: Annotated[
        list[str] | None,
        typer.Option(help="Protected files that may be brought back, such as .github/workflows/.", metavar="PATTERN"),
    ] = None,
    trust_journal: Annotated[
        bool, typer.Option("--trust-journal", help="Do not ask about a journal that no run of yours wrote.")
    ] = False,
) -> Exit:
    """
    Bring back the files that a run wrote.

    All files that the run in FILE and its children wrote are brought back to what they were before it; FILE itself is
    only read.

    All of it or nothing: when one of the files was changed since, by a person, a command or another run, nothing is
    done, and the files are named. With --partial these are left, and the rest is brought back. A file that had more
    than 4 MiB is not undoable, and what programs did is not undone: that is said, too.

    If your state folder does not know FILE as written by a run of yours, the files are listed with their new content
    and you are asked. Without a terminal it is refused. --trust-journal skips the question.

    Examples:
      stepengine undo --last --dry-run
      stepengine undo --last
      stepengine undo run.jsonl --cwd project
      stepengine undo run.jsonl --at 5          what was written after effect 5
      stepengine undo run.jsonl --workspace ssh:box:/srv/project

    Leaves with 0 when it is done, with 1 when it is refused.
    """
    from stepengine.journal import undo
    from stepengine.journal.provenance import is_own

    if trust_journal:
        refuse_inside("undo --trust-journal")
    options = find_journal(Options(journal=file, last=last))
    journal = journal_at(options.journal)
    try:
        with _named_root(options, cwd, workspace) as root:
            undone = partial_of(
                undo, journal, root, at=at, partial=partial, moved=moved, allow_protected=allow_protected or ()
            )
            trusts = trust_journal
            if not (dry_run or trusts or is_own(journal)):
                plan = undone(dry_run=True)
                trusts = not _changes_files(plan) or _is_agreed(journal, plan)
                if not trusts:
                    return complain("nothing was undone; --trust-journal undoes a journal that you trust", Exit.FAILED)
            done = undone(dry_run=dry_run, trust=trusts)
    except UndoRefused as error:
        for path, why in error.files:
            say(f"changed   {path}: {why}", hang=10)
        return complain("nothing was undone; --partial leaves these files and brings back the rest", Exit.FAILED)
    except (JournalError, DefinitionError, WorkspaceLost) as error:
        return complain(error.message, Exit.FAILED)
    say(str(done))
    return Exit.COMPLETED


def _changes_files(plan: Undone) -> bool:
    return bool(plan.restored or plan.removed or plan.created)


def _is_agreed(journal: Journal, plan: Undone) -> bool:
    """Show all changes that an unknown journal asks for, with the new content, and return the answer of the person."""
    complain(f"no run of yours is known to have written {name_of(journal)}. It would change these files:")
    say(str(plan))
    for path, content in plan.contents:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            say(f"{path} would have {len(content):,} bytes that are no text, sha256 {sha256(content).hexdigest()}")
            continue
        say(f"{path} would have this content:")
        for line in text.splitlines():
            say(f"  | {line}", hang=4)
    if not can_ask():
        return False
    print("stepengine: write this content? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@contextmanager
def _named_root(options: Options, cwd: Path | None, workspace: str) -> Iterator[Path | Workspace]:
    """Give where that is undone which a run wrote: what is named, and else where the run was started."""
    if workspace:
        root = root_of(attrs.evolve(options, workspace=workspace, cwd=options.cwd if cwd is None else cwd))
    else:
        root = root_of(options) if cwd is None else cwd
    try:
        yield root
    finally:
        if not isinstance(root, Path):
            root.close()


def root_of(options: Options) -> Path | Workspace:
    """Return what the tools of a run write to: a folder of this machine, or the place where it works."""
    if not options.workspace:
        return options.cwd
    from stepengine.workspace.workspace import Workspace

    place = Workspace.named(options.workspace, options.cwd.resolve())
    return place.here or place
