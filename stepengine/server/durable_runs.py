"""
``DurableRuns``: the runs of a server in a PostgreSQL database, executed by this process or by workers elsewhere.

It has the same parts as ``Runs``: a launcher, a reader, a watcher, a messenger and conversations. The database has the runs, and a
register of their owners. A message to a run is stored as a row before the sender gets the receipt, and a worker finds it. So any
server of the database can answer a request, and a killed server loses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stepengine.durable import DeploymentMaintenance, DurableEngine, DurableScheduler, migrate
from stepengine.durable.register import create_register_tables
from stepengine.durable.schedules import load_durable_schedule_statuses
from stepengine.errors import DatabaseUnavailable, JournalError
from stepengine.runtime.logs import LOGGER
from stepengine.server.background_tasks import BackgroundTasks
from stepengine.server.durable_launcher import DurableLauncher
from stepengine.server.durable_messenger import DurableMessenger
from stepengine.server.durable_reader import DurableReader
from stepengine.server.durable_store import DurableStore, make_unsupported_problem
from stepengine.server.durable_watcher import DurableWatcher
from stepengine.server.quotas import Quotas, QuotaTable
from stepengine.server.runs import GRACE_SECONDS
from stepengine.server.service_state import ServiceState

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.scheduler import ScheduleStatus
    from stepengine.engine.schedules import Schedule
    from stepengine.journal.file_undo import UndoResult
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.access import Caller
    from stepengine.server.ledger import RunRow, SessionRow
    from stepengine.sessions import Session

LOOK_SECONDS = 1.0
"""Seconds between two searches for registered runs that were not submitted: a run starts at most this late after a crash."""
TIDY_SECONDS = 30.0
"""Seconds between two deletions of old idempotency keys."""
ANSWER_SECONDS = 5.0
"""How long the database may take to answer before the server reports that it is away."""


class DurableConversations:
    """
    Refuses requests about conversations: a database stores them by run alone.

    Attributes:
        stores_messages: Always ``True``: a run continues the messages of its conversation.
    """

    stores_messages = True

    async def list_sessions(
        self, caller: Caller, *, owner: str | None, before: tuple[float, str] | None, limit: int
    ) -> list[SessionRow]:
        """Raise ``Problem``, because conversations in a database cannot be listed."""
        msg = "conversations in a database are shown only as their runs; see GET /runs"
        raise make_unsupported_problem(msg)

    async def get_session(
        self, caller: Caller, session: str, *, owner: str | None
    ) -> tuple[SessionRow, Session | None]:
        """Raise ``Problem``, because a conversation in a database cannot be shown."""
        msg = "conversations in a database are shown only as their runs; see GET /runs"
        raise make_unsupported_problem(msg)

    async def delete_messages(self, caller: Caller, session: str, *, owner: str | None) -> None:
        """Raise ``Problem``, because a conversation in a database is deleted only with its runs."""
        msg = "conversations in a database are deleted with their runs, by `stepengine deploy gc`"
        raise make_unsupported_problem(msg)


class DurableRuns:
    """
    The runs of one durable engine, for many callers.

    Args:
        engine: Submits runs, and executes them unless it only submits; this class opens and closes it.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        wait_for_answers: Seconds that an event stream stays open while its run is suspended.
        schedules: When agents are started automatically.
        drain: Seconds that effects may continue when the server is told to stop.
        quotas: How much one owner may use.

    Attributes:
        state: Whether the server stops, and whether runs can be started.
        agents: The ids of the agents that may be started.
        quotas: What each owner uses.
        launcher: Starts, resumes and forks runs.
        reader: Finds and reads runs.
        watcher: The event streams of runs.
        messenger: Delivers answers, messages and cancels.
        conversations: Refuses what a database does not offer.
        turns: ``None``: runs in a database have no turns of pages and MCP clients.
        foreign: ``None``: a database has no third-party journals.
        ledger: ``None``: no webhooks are sent for runs in a database.
        load_problem: ``None``: each worker has its own code.
    """

    turns: None = None
    foreign: None = None
    ledger: None = None
    load_problem: None = None

    def __init__(
        self,
        engine: DurableEngine,
        *,
        agents: Iterable[str] | None = None,
        wait_for_answers: float = 60.0,
        schedules: Iterable[Schedule] = (),
        drain: float = GRACE_SECONDS,
        quotas: Quotas | None = None,
    ) -> None:
        self.state = ServiceState()
        known = [agent.id for agent in engine.agents]
        self.agents = tuple(known if agents is None else [engine.embedded_engine.agent(agent).id for agent in agents])
        self._store = store = DurableStore(engine)
        self.quotas = QuotaTable(quotas or Quotas(), store.measure_usage)
        self.launcher = DurableLauncher(store, self.agents, self.quotas)
        self.reader = DurableReader(store, self.launcher)
        self.watcher = DurableWatcher(store, self.launcher, wait_for_answers)
        self.messenger = DurableMessenger(store, self.launcher, self.quotas)
        self.conversations = DurableConversations()
        self._schedules = tuple(schedules)
        self._drain = drain
        self._tasks = BackgroundTasks()
        self._stack = contextlib.AsyncExitStack()

    @property
    def engine(self) -> Engine:
        """The engine that has the agents."""
        return self._store.engine.embedded_engine

    @property
    def live_count(self) -> int:
        """The number of runs that this process executes; 0 if only workers elsewhere do."""
        return self._store.engine.live

    @property
    def open_question_count(self) -> int:
        """The number of questions in the memory of this process: 0, since a run that asks is suspended at once."""
        return 0

    def add_observer(self, observer: ObserverLike) -> None:
        """Send the events of the runs that this process executes to one more observer."""
        self.engine.add_observer(observer)

    def explain_missing_model(self, engine: Engine, agent: str) -> str:
        """Return ``""``, because workers call the models, and their keys are not known here."""
        return ""

    async def start(self) -> None:
        """
        Connect, start to execute runs unless the engine only submits, and submit the registered runs of dead servers.

        Raises:
            DatabaseUnavailable: If the database cannot be reached, or has no tables.
            ExecutorBusy: If another process has the same executor id.
            StepEngineError: If the extra is not installed.
        """
        engine = self._store.engine
        setting = engine.setting
        if setting.migrate and not engine.works:
            await migrate(setting.url)
        if not engine.is_open:
            await engine.open()
        try:
            if setting.migrate:
                await create_register_tables(setting.url)
            await self._store.register.list_late_unsubmitted()
            if self._schedules:
                await self._stack.enter_async_context(DurableScheduler(engine, self._schedules))
        except BaseException:
            await engine.aclose(drain=0)
            raise
        self._tasks.spawn(self._submit_orphaned_runs_forever())
        if engine.works:
            self._tasks.spawn(self._reassign_orphaned_runs_forever())
        self.state.is_ready = True

    async def close(self) -> None:
        """Stop starting runs and end all streams, wait for running effects up to *drain* seconds, and close the engine."""
        self.launcher.is_closing, self.state.is_ready = True, False
        self.state.stopping.set()
        await self._stack.aclose()
        await self._tasks.cancel()
        await self.watcher.close()
        await self._store.engine.aclose(drain=self._drain)

    async def close_engine(self) -> None:
        """Close the engine; do nothing if it is closed."""
        await self._store.engine.aclose()

    async def rebuild_engine_if_changed(self) -> None:
        """Do nothing: each worker has its own code."""

    async def _submit_orphaned_runs_forever(self) -> None:
        """Each second, submit the runs of dead servers, delete old keys, and store whether the database can be reached."""
        tidied = -TIDY_SECONDS
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    unsubmitted = await self._store.register.list_late_unsubmitted()
                    if time.monotonic() - tidied >= TIDY_SECONDS:
                        await self._store.register.store_ends_and_remove_stale()
                        tidied = time.monotonic()
                self.state.is_ready, self.state.is_away = True, False
                for row in unsubmitted:
                    await self.launcher.submit_orphaned_run(row)
            except (DatabaseUnavailable, TimeoutError):
                self.state.is_ready, self.state.is_away = False, True
            except Exception:  # noqa: BLE001 - nobody awaits this loop, and without it registered runs are lost
                LOGGER.exception("runs could not be checked; the server tries again within seconds")
            await self.watcher.stop_following_idle_runs()
            await asyncio.sleep(LOOK_SECONDS)

    async def _reassign_orphaned_runs_forever(self) -> None:
        """Move the runs of dead workers to live ones, again and again; only one of all servers does so at a time."""
        async for taken in DeploymentMaintenance(self._store.operator).watch():
            LOGGER.warning("run %s of the dead worker %s: %s", taken.run, taken.executor, taken.outcome)

    async def undo(
        self, row: RunRow, *, at: int | str = -1, dry_run: bool = False, partial: bool = False
    ) -> UndoResult:
        """
        Raise ``Problem``, because the database does not store the content that a run overwrote.

        Raises:
            Problem: Always: only journals in files store the content that a run overwrote.
        """
        msg = "a run in a database cannot be undone: the database does not store what the run overwrote"
        raise make_unsupported_problem(msg)

    async def load_schedule_statuses(self) -> list[ScheduleStatus]:
        """Return each schedule with its next and last run; raise ``DatabaseUnavailable`` if the database cannot be reached."""
        try:
            return await load_durable_schedule_statuses(self._store.operator, self._schedules, now=datetime.now(UTC))
        except JournalError as error:
            if isinstance(error.__cause__, DatabaseUnavailable):
                raise error.__cause__ from None
            raise
