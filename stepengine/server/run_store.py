"""``RunStore``: the journals of the runs of a server, and the ledger with their owners, in one folder or SQLite file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from stepengine.data.visible import cut_end
from stepengine.errors import JournalError, JournalLocked, JournalMissing, StepEngineError
from stepengine.journal.files import FileJournal
from stepengine.journal.sleepers import open_wake_index
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import SqliteJournal
from stepengine.runtime.logs import LOGGER
from stepengine.server.access import resolve_trusted_path
from stepengine.server.ledger import Act, Ledger, RunRow, make_store_status_act

if TYPE_CHECKING:
    from stepengine.server.quotas import QuotaUsage

Made = TypeVar("Made")
MAX_RESUME_TRIES = 3
"""A run that failed to resume this often has the same fault each time, and is left to its owner."""
TRIES_SECONDS = 3600.0
"""Failures that are further apart have different causes: a run with one fault fails once a second."""
NEVER_STARTED = 0
"""The tries of a stranded run that has no journal: a resume starts it. One whose journal was deleted is never started again."""


class RunStore:
    """
    The journals and the ledger in one folder or database. Any number of servers may share them.

    Args:
        store_path: A folder of journals, created if it is missing, or an SQLite file.

    Attributes:
        ledger: The register of runs, read and written in worker threads.
        place: The folder or file.
        is_database: Whether *place* is an SQLite file.
    """

    def __init__(self, store_path: str | Path) -> None:
        self.place = Path(store_path)
        self.ledger = Ledger(store_path)
        self.is_database = parse_database_path(str(store_path)) is not None
        self._scans = WeakValueDictionary[str, asyncio.Lock]()
        self._scanning = asyncio.Lock()
        self._acts: list[tuple[Act, asyncio.Future[Any]]] = []
        self._writing: asyncio.Task[None] | None = None

    def create_and_validate_files(self) -> None:
        """
        Create the folder and the missing files, and raise if other users could change them or they cannot be read.

        Raises:
            JournalError: If other users could write to the store, or it cannot be used.
        """
        folder = self.place.parent if self.is_database else self.place
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            msg = f"{str(folder)!r} is a file; runs are stored in a folder or in a database such as 'runs.db'"
            raise JournalError(msg) from None
        except OSError as error:
            msg = f"the folder of runs {str(folder)!r} cannot be created: {error.strerror or type(error).__name__}"
            raise JournalError(msg) from error
        resolve_trusted_path(folder)
        if self.is_database and self.place.exists():
            resolve_trusted_path(self.place)
        self.ledger.list_active_run_ids()
        with open_wake_index(self.place) as index:
            index.list_all()

    async def close(self) -> None:
        """Wait for the requested writes, and close the ledger."""
        if self._writing is not None:
            await self._writing
        await asyncio.to_thread(self.ledger.close)

    def journal(self, run: str) -> FileJournal | SqliteJournal:
        """Return the journal of a run."""
        return SqliteJournal(self.place, run) if self.is_database else FileJournal(self.place / f"{run}.jsonl")

    async def find(self, run: str) -> RunRow | None:
        """Return the row of a run; ``None`` if the run is not registered."""
        return await asyncio.to_thread(self.ledger.find, run)

    async def measure_usage(self, owner: str) -> QuotaUsage:
        """Return the open runs and stored bytes of an owner, counted in the ledger and its files."""
        return await self.run_slow_read(owner, partial(self.ledger.measure_usage, owner))

    async def run_slow_read(self, owner: str, work: Callable[[], Made]) -> Made:
        """Run a read of the ledger that may take seconds in a thread, one read at a time; owners take turns."""
        # Without this, the searches of one owner with many runs would occupy all threads.
        lock = self._scans.setdefault(owner, asyncio.Lock())
        async with lock, self._scanning:
            return await asyncio.to_thread(work)

    async def write(self, act: Act) -> Any:
        """Perform *act* on the ledger and return its result; acts that arrive together share one transaction."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # SQLite has one writer and each commit is a sync: a thousand starts at once were a thousand syncs, one after
        # the other. So all requests that arrive during one commit go into the next.
        self._acts.append((act, future))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write_waiting_acts())
        # A cancelled request must not cancel the writes of others, nor its own, which a client may have been told of.
        return await asyncio.shield(future)

    async def _write_waiting_acts(self) -> None:
        """Write the waiting acts to the ledger in batches, and set their results, until none is left."""
        try:
            while self._acts:
                batch, self._acts = self._acts, []
                try:
                    made = await asyncio.to_thread(self.ledger.write, [act for act, _ in batch])
                except Exception as error:  # noqa: BLE001 - the callers get it
                    made = [error] * len(batch)
                for (_, future), value in zip(batch, made, strict=True):
                    if future.done():
                        continue
                    if isinstance(value, Exception):
                        future.set_exception(value)
                    else:
                        future.set_result(value)
        finally:
            self._writing = None

    async def record_failed_resume(self, run: str, error: BaseException) -> None:
        """Store that a run could not be resumed; the third failure within an hour makes it stranded. Ignore a locked journal."""
        row = await self.find(run)
        if row is None or isinstance(error, JournalLocked):
            return
        now = time.time()
        is_another_cause = row.tries < MAX_RESUME_TRIES and now - row.changed >= TRIES_SECONDS
        tries = 1 if is_another_cause else row.tries + 1
        reason = error.message if isinstance(error, StepEngineError) else f"{type(error).__name__}: {error}"
        LOGGER.error("run %s could not be resumed (try %d of %d): %s", run, tries, MAX_RESUME_TRIES, reason)
        status = "started" if row.status == "started" else "running"
        if tries >= MAX_RESUME_TRIES:
            status = "stranded"
            if row.status == "started" and not await asyncio.to_thread(self.has_record, run):
                tries = NEVER_STARTED
        await self.write(make_store_status_act(run, status, now, tries=tries, error=self._shorten_error(run, reason)))

    def has_record(self, run: str) -> bool:
        """Return whether the journal of a run has a record, also one that cannot be read."""
        try:
            return self.journal(run).head() is not None
        except JournalMissing:
            return False
        except JournalError:
            return True

    def _shorten_error(self, run: str, reason: str) -> str:
        """Return the first line of an error, without the journal's path. Other lines have files and commands of this server."""
        return cut_end(reason.partition("\n")[0].replace(self.journal(run).name, "its record"), 2_000)
