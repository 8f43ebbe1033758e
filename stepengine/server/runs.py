"""
``Runs``: the runs of a server on a folder of journals or an SQLite file, composed of parts that do one thing each.

``RunStore`` has the journals and the ledger. ``CurrentEngine`` is the engine, rebuilt when its files change. ``LiveRuns`` are the runs
of this process. ``RunLauncher`` starts, resumes and forks; ``RunRecovery`` resumes what is due or lost its process; ``RunSchedules``
starts agents by schedule. ``RunReader`` finds and reads runs, ``RunWatcher`` streams their events, ``RunMessenger`` delivers answers and
messages, ``RunConversations`` groups runs, ``RunTurns`` are the turns of pages, ``restore_files`` restores files, and ``ForeignRuns`` are
third-party journals.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from stepengine.engine.agent_description import explain_missing_model
from stepengine.server.current_engine import CurrentEngine
from stepengine.server.foreign_runs import ForeignRuns
from stepengine.server.live_runs import LiveRuns
from stepengine.server.quotas import Quotas, QuotaTable
from stepengine.server.run_conversations import RunConversations
from stepengine.server.run_launcher import RunLauncher
from stepengine.server.run_messenger import RunMessenger
from stepengine.server.run_reader import RunReader
from stepengine.server.run_recovery import RunRecovery
from stepengine.server.run_schedules import RunSchedules
from stepengine.server.run_store import RunStore
from stepengine.server.run_turns import RunTurns
from stepengine.server.run_undo import restore_files
from stepengine.server.run_watcher import RunWatcher
from stepengine.server.service_state import ServiceState

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.scheduler import ScheduleStatus
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.file_undo import UndoResult
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.ledger import Ledger, RunRow
    from stepengine.server.problems import Problem
    from stepengine.server.sources import EngineSources
    from stepengine.workspace.workspace import Workspace

GRACE_SECONDS = 10.0
"""How long runs may continue when the server stops: what `docker stop` and Kubernetes wait for at least."""


class Runs:
    """
    The runs of one engine in one folder or SQLite file.

    Args:
        engine: The engine of the runs.
        store_path: A folder of journals, created if it is missing, or an SQLite file. Any number of servers may share it.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        max_live: The most runs that may be executed in this process at a time.
        wait_for_answers: Seconds that a question waits in memory before the run is suspended and uses no resources.
        schedules: When agents are started automatically.
        roots: The folders that the tools of its agents write in; writes there can be undone.
        drain: Seconds that runs may continue when the server is told to stop.
        sources: The files from which the engine is rebuilt when they were saved; ``None`` if it never is.
        quotas: The limits of each owner.

    Attributes:
        state: Whether the server stops, and whether runs can be started.
        quotas: What each owner uses.
        store: The journals and the ledger.
        engines: The current engine, and the replaced ones.
        live: The runs of this process.
        launcher: Starts, resumes and forks runs.
        reader: Finds and reads runs.
        watcher: The event streams of runs.
        messenger: Delivers answers, messages and cancels.
        conversations: The conversations of the runs.
        turns: The turns of conversations over AG-UI, Vercel's protocol and MCP.
        foreign: The journals of the store that no server started.
    """

    def __init__(
        self,
        engine: Engine,
        store_path: str | Path,
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
        self.state = ServiceState()
        self.store = store = RunStore(store_path)
        self.quotas = QuotaTable(quotas or Quotas(), store.measure_usage)
        self.engines = engines = CurrentEngine(engine, agents, sources)
        self.live = live = LiveRuns(
            store, engines, max_live=max_live, drain=drain, resume=self._resume_or_record_failure
        )
        self.reader = reader = RunReader(store, live, engines)
        self.launcher = RunLauncher(store, live, engines, reader, self.quotas, wait_for_answers=wait_for_answers)
        self.watcher = RunWatcher(store, live)
        self.messenger = RunMessenger(
            store, live, engines=engines, reader=reader, launcher=self.launcher, quotas=self.quotas
        )
        self.conversations = RunConversations(store, engines, reader)
        self.turns = RunTurns(store, live, reader, self.messenger)
        self.foreign = ForeignRuns(store, self.launcher)
        self._schedules = RunSchedules(store, engines, self.launcher, schedules)
        self._recovery = RunRecovery(store, live, self.launcher, self.watcher.stop_following_idle_runs)
        self._roots = tuple(roots)

    async def _resume_or_record_failure(self, row: RunRow) -> None:
        """Resume a run, and record an error in the ledger instead of raising it."""
        # The launcher needs the live runs, so they get it through this method.
        await self.launcher.resume_or_record_failure(row)

    @property
    def ledger(self) -> Ledger:
        """The ledger from which webhooks are sent."""
        return self.store.ledger

    @property
    def engine(self) -> Engine:
        """The engine in which new runs start."""
        return self.engines.engine

    @property
    def agents(self) -> tuple[str, ...]:
        """The ids of the agents that may be started."""
        return self.engines.agents

    @property
    def load_problem(self) -> Problem | None:
        """Why the files of the engine cannot be loaded as they are now; ``None`` if they can."""
        return self.engines.load_problem

    @property
    def live_count(self) -> int:
        """The number of runs that this process executes."""
        return len(self.live)

    @property
    def open_question_count(self) -> int:
        """The number of unanswered questions of the runs that this process executes."""
        return self.live.open_question_count

    def add_observer(self, observer: ObserverLike) -> None:
        """Send the events of every run to one more observer."""
        self.engines.add_observer(observer)

    def explain_missing_model(self, engine: Engine, agent: str) -> str:
        """Return why the model of an agent of *engine* cannot be called; ``""`` if it can."""
        return explain_missing_model(engine, agent)

    async def start(self) -> None:
        """
        Resume interrupted runs, and start the recovery and the scheduler.

        Raises:
            JournalError: If other users could write to the store, or it cannot be used.
        """
        await asyncio.to_thread(self.store.create_and_validate_files)
        await self._recovery.start()
        await self._schedules.start()
        self.state.is_ready = True

    async def close(self) -> None:
        """Stop starting runs, end all streams, wait up to *drain* seconds, and interrupt the rest, which the next process resumes."""
        self.live.is_closing, self.state.is_ready = True, False
        self.state.stopping.set()
        await self._schedules.stop()
        waits = await self.live.wait_for_run_ends()
        # `stopping` has ended the streams before the runs are interrupted: a client reconnects to the next process.
        self.watcher.close()
        await self.live.interrupt_all()
        self._recovery.stop()
        # These record the ends of runs that have just ended.
        await self.live.tasks.wait()
        await asyncio.gather(*waits, return_exceptions=True)
        await self.engines.close_replaced_engines()
        await self.store.close()

    async def close_engine(self) -> None:
        """Close the engine, after the runs were closed."""
        await self.engine.aclose()

    async def rebuild_engine_if_changed(self) -> None:
        """Rebuild the engine if its files were saved and can be loaded; otherwise do not replace it."""
        await self.engines.try_rebuild()

    async def load_schedule_statuses(self) -> list[ScheduleStatus]:
        """Return each schedule with its next and last run."""
        return await self._schedules.load_statuses()

    async def undo(
        self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False
    ) -> UndoResult:
        """Restore the files that a run wrote, by default all; arguments and errors are those of ``restore_files``."""
        journal, is_live = self.store.journal(row.run), row.run in self.live
        return await restore_files(row, journal, self._roots, is_live=is_live, at=at, dry_run=dry_run, partial=partial)
