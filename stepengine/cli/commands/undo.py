"""``stepengine undo``: restore the files that a recorded run wrote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial as partial_of
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from stepengine.cli.code_trust import refuse_inside_tool
from stepengine.cli.exits import Exit, print_error
from stepengine.cli.journals import add_journal_to_options, open_journal
from stepengine.cli.options import File, Last, Options
from stepengine.cli.screen.confirm import can_ask_at_terminal, confirm
from stepengine.cli.screen.render import print_visible
from stepengine.errors import DefinitionError, JournalError, UndoRefused, WorkspaceLost

if TYPE_CHECKING:
    from stepengine.journal import Journal, UndoResult
    from stepengine.workspace.workspace import Workspace


def undo(
    file: File = "",
    *,
    last: Last = False,
    at: Annotated[
        str, typer.Option(help="The last effect whose writes are kept; default: none.", metavar="N|PATH#N")
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    partial: Annotated[
        bool, typer.Option("--partial", help="Skip files that were changed since, and restore the rest.")
    ] = False,
    moved: Annotated[bool, typer.Option("--moved", help="The folder was moved since the run.")] = False,
    allow_protected: Annotated[
        list[str] | None,
        typer.Option(help="Protected files that may be restored, such as .github/workflows/.", metavar="PATTERN"),
    ] = None,
    trust_journal: Annotated[
        bool, typer.Option("--trust-journal", help="Do not ask about a journal that no run of yours wrote.")
    ] = False,
) -> Exit:
    """
    Restore the files that a run wrote.

    Restores all files that the run in FILE and its children wrote to their content before the run. FILE itself does
    not change.

    All files or none: if one of them was changed since, by a person, a command or another run, nothing is restored
    and the changed files are listed. --partial restores the others. Files above 4 MiB and changes made by programs
    cannot be undone; they are reported.

    If FILE was not recorded by one of your own runs, the files and their new content are listed and you are asked.
    Without a terminal, the command refuses. --trust-journal skips the question.

    Examples:
      stepengine undo --last --dry-run
      stepengine undo --last
      stepengine undo run.jsonl --cwd project
      stepengine undo run.jsonl --at 5          what was written after effect 5
      stepengine undo run.jsonl --workspace ssh:box:/srv/project

    Exits with 0 when the files are restored, with 1 when the command refuses.
    """
    from stepengine.journal import undo
    from stepengine.journal.provenance import is_written_by_user

    if trust_journal:
        refuse_inside_tool("undo --trust-journal")
    options = add_journal_to_options(Options(journal=file, last=last))
    journal = open_journal(options.journal)
    try:
        with _open_write_root(options, cwd, workspace) as root:
            undone = partial_of(
                undo, journal, root, at=at, partial=partial, moved=moved, allow_protected=allow_protected or ()
            )
            trusts = trust_journal
            if not (dry_run or trusts or is_written_by_user(journal)):
                plan = undone(dry_run=True)
                has_changes = plan.restored or plan.removed or plan.created
                trusts = not has_changes or _print_and_confirm_changes(journal, plan)
                if not trusts:
                    return print_error(
                        "nothing was undone; --trust-journal undoes a journal that you trust", Exit.FAILED
                    )
            done = undone(dry_run=dry_run, trust=trusts)
    except UndoRefused as error:
        for path, why in error.files:
            print_visible(f"changed   {path}: {why}", hanging_indent=10)
        return print_error("nothing was undone; --partial skips these files and restores the rest", Exit.FAILED)
    except (JournalError, DefinitionError, WorkspaceLost) as error:
        return print_error(error.message, Exit.FAILED)
    print_visible(str(done))
    return Exit.COMPLETED


def _print_and_confirm_changes(journal: Journal, plan: UndoResult) -> bool:
    """Print all changes of an unknown journal with their content; return whether a person approves them in a terminal."""
    print_error(f"{journal.address} was not written by a known run of yours. Undoing it would change these files:")
    print_visible(str(plan))
    modes = dict(plan.modes)
    for path, content in plan.contents:
        try:
            text = content.decode()
        except UnicodeDecodeError:
            print_visible(
                f"{path} would have the mode {modes[path]:o} and {len(content):,} bytes of binary content, sha256 {sha256(content).hexdigest()}"
            )
            continue
        print_visible(f"{path} would have the mode {modes[path]:o} and this content:")
        for line in text.splitlines():
            print_visible(f"  | {line}", hanging_indent=4)
    return can_ask_at_terminal() and confirm("stepengine: write this content?")


@contextmanager
def _open_write_root(options: Options, cwd: Path | None, workspace: str) -> Iterator[Path | Workspace]:
    """Yield the folder or workspace in which writes are undone: the named one, else the one of the run. Close a workspace at the end."""
    if workspace:
        root = get_write_root(attrs.evolve(options, workspace=workspace, cwd=options.cwd if cwd is None else cwd))
    else:
        root = get_write_root(options) if cwd is None else cwd
    try:
        yield root
    finally:
        if not isinstance(root, Path):
            root.close()


def get_write_root(options: Options) -> Path | Workspace:
    """Return the folder or workspace that the tools of a run write to."""
    if not options.workspace:
        return options.cwd
    from stepengine.workspace.workspace import Workspace

    place = Workspace.parse(options.workspace, options.cwd.resolve())
    return place.local_folder or place
