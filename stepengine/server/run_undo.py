"""``RunUndo``: restores the files that a run of a server wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.errors import DefinitionError, JournalError
from stepengine.journal.file_undo import undo
from stepengine.runtime.logs import LOGGER
from stepengine.server.problems import Problem
from stepengine.server.run_requests import error_for_client

if TYPE_CHECKING:
    from stepengine.journal.file_undo import UndoResult
    from stepengine.server.ledger import RunRow
    from stepengine.server.live_runs import LiveRuns
    from stepengine.server.run_store import RunStore
    from stepengine.workspace.workspace import Workspace


class RunUndo:
    """
    Restores files in the folders that runs write in.

    Args:
        store: The journals, which have the former content of the files.
        live: The runs of this process.
        roots: The folders.
    """

    def __init__(self, store: RunStore, live: LiveRuns, roots: Iterable[str | Path | Workspace]) -> None:
        self._store = store
        self._live = live
        self._roots = tuple(roots)

    async def restore(self, row: RunRow, *, at: int | str, dry_run: bool, partial: bool) -> UndoResult:
        """
        Restore the files that a run wrote: all of them or none, unless *partial*.

        Args:
            row: The run; it is not running.
            at: The last effect whose writes stay.
            dry_run: Only report what would be done.
            partial: Leave the files that cannot be restored.

        Raises:
            Problem: when the run is running, there is no such effect, or this server has no folder to undo in.
            UndoRefused: when a file cannot be restored; nothing was changed.
        """
        if not self._roots:
            msg = "this server was told of no folder that runs write in, so nothing can be undone here"
            raise Problem(msg, status=409, kind="no_folder")
        if row.run in self._live:
            msg = f"the run {row.run} is under way; what it wrote is undone when it rests"
            raise Problem(msg, status=409, kind="under_way")
        journal = self._store.journal(row.run)
        options: dict[str, Any] = {"at": at, "dry_run": dry_run, "partial": partial}
        try:
            # Trusted: only servers of this place write here, and the state folder of this machine need not know the journal.
            return await asyncio.to_thread(undo, journal, self._roots, trust=True, **options)
        except JournalError as error:
            raise error_for_client(error, JournalError, row, journal, status=422, kind="no_such_place") from None
        except DefinitionError as error:
            LOGGER.error("the folders that runs write in cannot be used: %s", error.message)
            msg = "the folders that runs write in cannot be used"
            raise Problem(msg, status=503, kind="no_folder") from error
