"""``stepengine undo``: from a recorded run to its folder as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.exits import Exit, complain
from stepengine.cli.journals import find_journal, journal_at
from stepengine.cli.options import File, Last, Options
from stepengine.cli.screen.render import say
from stepengine.errors import DefinitionError, JournalError, UndoRefused, WorkspaceLost

if TYPE_CHECKING:
    from stepengine.system.workspace import Workspace

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
) -> Exit:
    """
    Bring back the files that a run wrote.

    All files that the run in FILE and its children wrote are brought back to what they were before it; FILE itself is
    only read.

    All of it or nothing: when one of the files was changed since, by a person, a command or another run, nothing is
    done, and the files are named. With --partial these are left, and the rest is brought back. A file that had more
    than 4 MiB is not undoable, and what programs did is not undone: that is said, too.

    Examples:
      stepengine undo --last --dry-run
      stepengine undo --last
      stepengine undo run.jsonl --cwd project
      stepengine undo run.jsonl --at 5          what was written after effect 5
      stepengine undo run.jsonl --workspace ssh:box:/srv/project

    Leaves with 0 when it is done, with 1 when it is refused.
    """
    from stepengine.journal import undo

    options = find_journal(Options(journal=file, last=last))
    try:
        with _named_root(options, cwd, workspace) as root:
            done = undo(
                journal_at(options.journal),
                root,
                at=at,
                dry_run=dry_run,
                partial=partial,
                moved=moved,
                allow_protected=allow_protected or (),
            )
    except UndoRefused as error:
        for path, why in error.files:
            say(f"changed   {path}: {why}", hang=10)
        return complain("nothing was undone; --partial leaves these files and brings back the rest", Exit.FAILED)
    except (JournalError, DefinitionError, WorkspaceLost) as error:
        return complain(error.message, Exit.FAILED)
    say(str(done))
    return Exit.COMPLETED


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
    from stepengine.system.workspace import Workspace

    place = Workspace.named(options.workspace, options.cwd.resolve())
    return place.here or place
