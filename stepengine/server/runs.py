"""
``Runs``: the runs of a server on a folder of journals or an SQLite file, composed of parts that do one thing each.

``RunStore`` has the journals and the ledger. ``CurrentEngine`` is the engine, rebuilt when its files change. ``LiveRuns`` are the runs
of this process. ``RunLauncher`` starts, resumes and forks; ``RunRecovery`` resumes what is due or lost its process. ``RunReader`` finds
and reads runs, ``RunWatcher`` streams their events, ``RunMessenger`` delivers answers and messages, ``RunConversations`` groups them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepengine.engine.scheduler import Scheduler, ScheduleStatus, load_schedule_statuses
from stepengine.errors import DefinitionError, JournalError
from stepengine.journal.file_undo import undo
from stepengine.runtime.logs import LOGGER
from stepengine.server.background_tasks import BackgroundTasks
from stepengine.server.current_engine import CurrentEngine
from stepengine.server.ledger import RunRow
from stepengine.server.live_runs import LiveRuns
from stepengine.server.problems import Problem
from stepengine.server.quotas import Quotas, QuotaTable
from stepengine.server.run_conversations import RunConversations
from stepengine.server.run_launcher import RunLauncher
from stepengine.server.run_messenger import RunMessenger
from stepengine.server.run_reader import RunReader
from stepengine.server.run_recovery import RunRecovery
from stepengine.server.run_requests import error_for_client
from stepengine.server.run_store import RunStore
from stepengine.server.run_watcher import RunWatcher

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.file_undo import UndoResult
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.sources import EngineSources
    from stepengine.workspace.workspace import Workspace

GRACE_SECONDS = 10.0
"""How long runs may continue when the server stops: what `docker stop` and Kubernetes wait for at least."""


class Runs:
    """
    The runs of one engine in one place.

    Args:
        engine: The engine of the runs.
        place: A folder of journals, created if there is none, or an SQLite file. Any number of servers may share it.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        max_live: How many runs may be executed in this process at a time.
        wait_for_answers: Seconds that a question waits in memory before the run is suspended and uses no resources.
        schedules: When agents are started automatically.
        roots: The folders that the tools of its agents write in; writes there can be undone.
        drain: Seconds that runs may continue when the server is told to stop.
        sources: The files from which the engine is rebuilt when they were saved; ``None`` if it never is.
        quotas: How much one owner may use.

    Attributes:
        quotas: What each owner uses.
        store: The journals and the ledger.
        engines: The engine of runs that start from now on, and those that it replaced.
        live: The runs of this process.
        launcher: Starts, resumes and forks runs.
        reader: Finds and reads runs.
        watcher: The event streams of runs.
        messenger: Delivers answers, messages and cancels.
        conversations: The conversations of the runs.
        stopping: Set when the server is told to stop.
        is_ready: Whether runs can be started.
        is_away: Whether the store cannot be reached; never of one on a disk.
    """

    def __init__(
        self,
        engine: Engine,
        place: str | Path,
        *,
        agents: Iterable[str] | None = None,
        max_live: int = 64,
        wait_for_answers: float = 60.0,
        schedules: Iterable[Schedule] = (),
        roots: Iterable[str | Path | Workspace] = (),
        drain: float = GRACE_SECONDS,
        sources: EngineSources | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self.is_ready = self.is_away = False
        self.stopping = asyncio.Event()
        self.store = store = RunStore(place)
        self.quotas = QuotaTable(quotas or Quotas(), store.usage)
        self.engines = CurrentEngine(engine, agents, sources)
        self._tasks = BackgroundTasks()
        self.live = live = LiveRuns(store, self.engines, self._tasks, max_live=max_live, resume=self._resume)
        self.reader = RunReader(store, live, self.engines)
        self.launcher = RunLauncher(
            store, live, self.engines, self.reader, self.quotas, wait_for_answers=wait_for_answers
        )
        self.watcher = RunWatcher(store, live)
        self.messenger = RunMessenger(
            store,
            live,
            engines=self.engines,
            reader=self.reader,
            launcher=self.launcher,
            tasks=self._tasks,
            quotas=self.quotas,
        )
        self.conversations = RunConversations(store, live, self.engines, self.reader)
        self._recovery = RunRecovery(store, live, self.launcher, self.watcher.drop_idle)
        self._schedules = tuple(schedules)
        self._roots = tuple(roots)
        self._drain = drain
        self._watching: asyncio.Task[Any] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def _resume(self, row: RunRow) -> None:
        # The launcher needs the live runs, so they get it through this method.
        await self.launcher.resume_in_background(row)

    @property
    def engine(self) -> Engine:
        """The engine in which new runs start."""
        return self.engines.engine

    @property
    def agents(self) -> tuple[str, ...]:
        """The ids of the agents that may be started."""
        return self.engines.agents

    @property
    def live_count(self) -> int:
        """The number of runs that this process executes."""
        return len(self.live)

    @property
    def open_question_count(self) -> int:
        """The number of unanswered questions of the runs that this process executes."""
        return self.live.open_question_count

    def observe(self, observer: ObserverLike) -> None:
        """Send the events of every run to one more observer."""
        self.engines.observe(observer)

    async def open(self) -> None:
        """
        Resume interrupted runs, and start the recovery and the scheduler.

        Raises:
            DefinitionError: when others could write the place.
            JournalError: when it cannot be used.
        """
        await asyncio.to_thread(self.store.prepare)
        # Before the first request: a client of a run whose server was killed finds it running. Runs for which there is no
        # room now are resumed when others make some, which may need an answer, and so a server.
        await self._recovery.sweep(at_once=True)
        self._watching = self._tasks.spawn(self._recovery.watch())
        if self._schedules:
            scheduler = Scheduler(self.engine, self._schedules, runs=self.store.place, tell=self.launcher.add_scheduled)
            self.engines.scheduler = scheduler
            await self._stack.enter_async_context(scheduler)
        self.is_ready = True

    async def close(self) -> None:
        """Stop starting runs, wait a while for the open ones, and interrupt the rest, which the next process resumes."""
        self.live.is_closing, self.is_ready = True, False
        self.stopping.set()
        await self._stack.aclose()
        waits = await self.live.wait_for_ends(self._drain)
        # Streams end before the runs are cut off: a client sees a shutdown, and reconnects to the next process.
        self.watcher.close()
        await self.live.interrupt_all()
        if self._watching is not None:
            self._watching.cancel()
        # These record the ends of runs that have just ended.
        await self._tasks.wait()
        await asyncio.gather(*waits, return_exceptions=True)
        await self.engines.close_all_replaced()
        await self.store.close()

    async def load_schedule_statuses(self) -> list[ScheduleStatus]:
        """Return the state of each schedule."""
        return await asyncio.to_thread(
            load_schedule_statuses, self._schedules, runs=self.store.place, now=datetime.now(UTC)
        )

    async def undo(
        self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False
    ) -> UndoResult:
        """
        Restore the files that a run wrote: all of them or none, unless *partial*.

        Args:
            row: The run; it is not running.
            at: The last effect whose writes stay; by default none.
            dry_run: Only report what would be done.
            partial: Leave the files that cannot be restored.

        Raises:
            Problem: when the run is running, there is no such effect, or this server has no folder to undo in.
            UndoRefused: when a file cannot be restored; nothing was changed.
        """
        if not self._roots:
            msg = "this server was told of no folder that runs write in, so nothing can be undone here"
            raise Problem(msg, status=409, kind="no_folder")
        if row.run in self.live:
            msg = f"the run {row.run} is under way; what it wrote is undone when it rests"
            raise Problem(msg, status=409, kind="under_way")
        journal = self.store.journal(row.run)
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
