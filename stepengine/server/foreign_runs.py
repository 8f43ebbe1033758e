"""``ForeignRuns``: the journals in the storage location of a server that no server of it started."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from attrs import frozen

from stepengine.journal.sleepers import is_backup_name
from stepengine.journal.sqlite import SqliteJournal

if TYPE_CHECKING:
    from stepengine.journal.store import Journal
    from stepengine.server.access import Caller
    from stepengine.server.run_launcher import RunLauncher
    from stepengine.server.run_store import RunStore

SUFFIX = ".jsonl"


@frozen
class ForeignFile:
    """
    A journal that no server started.

    Attributes:
        name: Its name.
        changed: Its modification time in seconds since 1970; 0 in a database.
        size: Its size in bytes; 0 in a database.
    """

    name: str
    changed: float
    size: int = 0


class ForeignRuns:
    """
    The journals that the ledger does not list.

    Args:
        store: The journals and the ledger.
        launcher: Resumes one of them.
    """

    def __init__(self, store: RunStore, launcher: RunLauncher) -> None:
        self._store = store
        self._launcher = launcher

    def list_journals(self) -> list[ForeignFile]:
        """Return the journals in the store that the ledger does not list, newest first, without backups."""
        own = {run for (run,) in self._store.ledger.read("SELECT run FROM served")}
        store_path = self._store.place
        if self._store.is_database:
            runs = sorted(SqliteJournal(store_path).runs(), reverse=True)
            return [ForeignFile(run, 0.0) for run in runs if run not in own and not is_backup_name(run)]
        found = []
        with os.scandir(store_path) as entries:
            for one in entries:
                name = one.name.removesuffix(SUFFIX)
                if not one.name.endswith(SUFFIX) or not name or name in own or is_backup_name(name):
                    continue
                if one.is_file(follow_symlinks=False):
                    # It may be deleted in the meantime.
                    with contextlib.suppress(OSError):
                        status = one.stat(follow_symlinks=False)
                        found.append(ForeignFile(name, status.st_mtime, status.st_size))
        return sorted(found, key=lambda one: (one.changed, one.name), reverse=True)

    def journal(self, name: str) -> Journal:
        """Return a journal by its name, without a check that it exists."""
        return self._store.journal(name)

    async def resume(self, caller: Caller, name: str, *, listed_agent: str, listed_prompt: str) -> None:
        """
        Resume a journal as a run of *caller*; the ledger lists it with *listed_agent* and *listed_prompt*.

        Raises:
            JournalError: If the journal cannot be resumed; ``JournalLocked`` if another process has it.
            Problem: If too many runs are executed, or the caller's quota is exceeded.
        """
        await self._launcher.resume_foreign_journal(
            caller, name, listed_agent=listed_agent, listed_prompt=listed_prompt
        )
