"""``restore_files``: restores the files that a run of a server wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.errors import DefinitionError, JournalError
from stepengine.journal.file_undo import undo
from stepengine.journal.provenance import is_written_by_user
from stepengine.runtime.logs import LOGGER
from stepengine.server.problems import Problem
from stepengine.server.run_requests import make_client_error

if TYPE_CHECKING:
    from stepengine.journal.file_undo import UndoResult
    from stepengine.journal.store import Journal
    from stepengine.server.ledger import RunRow
    from stepengine.workspace.workspace import Workspace


async def restore_files(
    row: RunRow,
    journal: Journal,
    roots: Sequence[str | Path | Workspace],
    *,
    is_live: bool,
    at: int | str,
    dry_run: bool,
    partial: bool,
) -> UndoResult:
    """
    Restore the files that a run wrote: all of them or none, unless *partial*.

    Args:
        row: The run.
        journal: Its journal, which has the earlier content of the files.
        roots: The folders that runs write in.
        is_live: Whether this process executes the run; then nothing can be restored.
        at: The last effect whose writes are not undone.
        dry_run: Only report what would be done.
        partial: Skip files that cannot be restored, and restore the others.

    Raises:
        JournalLocked: If another process executes the run.
        Problem: If this process executes the run, there is no such effect, *roots* is empty, or the journal is a third-party one.
        UndoRefused: If a file cannot be restored; nothing was changed.
    """
    if not roots:
        msg = "this server was started without a folder that runs write in, so it cannot undo their writes"
        raise Problem(msg, status=409, kind="no_folder")
    if is_live:
        msg = f"the run {row.run} is running; undo its writes when it has ended or is suspended"
        raise Problem(msg, status=409, kind="under_way")
    if row.request.get("is_third_party") and not dry_run and not await asyncio.to_thread(is_written_by_user, journal):
        msg = (
            f"the run {row.run} has a third-party journal, which decides what an undo writes. Check it with dry_run, then undo it on the "
            "machine that has its file: stepengine undo JOURNAL --cwd FOLDER --trust-journal"
        )
        raise Problem(msg, status=409, kind="not_possible")
    try:
        # Trusted, because the state folder of this machine need not know journals of other servers of the storage location.
        return await asyncio.to_thread(undo, journal, roots, trust=True, at=at, dry_run=dry_run, partial=partial)
    except JournalError as error:
        raise make_client_error(error, JournalError, row, journal, status=422, kind="no_such_place") from None
    except DefinitionError as error:
        LOGGER.error("the folders that runs write in cannot be used: %s", error.message)
        msg = "the folders that runs write in cannot be used"
        raise Problem(msg, status=503, kind="no_folder") from error
