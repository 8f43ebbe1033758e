"""
This process as one of the workers: one database, one event loop, one executor, until it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import os
import socket
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.json import canonical
from stepengine.data.tools import Yielding
from stepengine.durable.body import execute_run_and_encode_result
from stepengine.durable.database import (
    WORKFLOW,
    close_locking_connection,
    convert_database_errors,
    fetch_value,
    import_patched_dbos,
    make_serializer,
    open_connection,
    queue_name,
    require_deployment_name,
    require_label,
)
from stepengine.durable.deployment import Deployment
from stepengine.durable.executions import DurableRun, ExecutionEnd, WorkflowSteps
from stepengine.durable.indexes import create_indexes
from stepengine.durable.queues import MAX_LOOK_SECONDS, Queues
from stepengine.durable.rates import SharedRates
from stepengine.durable.schedule_book import create_schedule_tables
from stepengine.durable.sessions import Sessions
from stepengine.durable.wire import SCHEMA_VERSION, StartOutcomes, SubmittedRun
from stepengine.durable.workers import add_worker, create_worker_table, remove_worker
from stepengine.engine.catalog import Catalog
from stepengine.engine.launcher import Launcher
from stepengine.errors import DatabaseUnavailable, DefinitionError, ExecutorBusy, StepEngineError
from stepengine.journal.fingerprints import definition_fingerprint
from stepengine.redaction import Redactor, find_environment_secrets, make_redactor
from stepengine.runtime.logs import LOGGER
from stepengine.tools.definition import Tool

POOL_CONNECTIONS = 8
"""A connection costs the server some megabytes, and it has 100 by default; effects share these for milliseconds each."""
MAX_EXECUTOR_THREADS = 64
"""Runs that wait for an answer hold one each while they ask the database; an idle thread costs little."""
WATCH_SECONDS = 0.5
"""How fast a cancelled run stops here: a person sees it happen, and one small query twice in a second is cheap."""
PATIENCE_SECONDS = 1.0
"""The server needs a moment to notice that a process has ended. A second is enough, and a person who stops a worker accepts it."""
SETTLE_SECONDS = 0.1
"""Queries that are in progress take milliseconds."""
LOCK = "select pg_try_advisory_lock(hashtextextended(%s, 0))"
SHARED_LOCK = "select pg_advisory_lock_shared(hashtextextended(%s, 0))"


def make_worker_lock_name(executor: str) -> str:
    """Return the name of the lock that an executor holds while it runs."""
    return f"stepengine:{executor}"


def make_release_lock_name(app: str, release: str) -> str:
    """Return the name of the lock that all running workers of a release share."""
    return f"stepengine-release:{app}:{release}"


@frozen(kw_only=True)
class WorkerSetting:
    """
    The settings of a worker.

    Attributes:
        url: The database.
        app: The deployment's name; clients use the same.
        pool: Which runs it takes: those that are submitted to this pool.
        executor: Its own id: stable, and held by one process at a time.
        release: The release of this worker. It executes no runs of other releases.
        concurrency: How many runs of each depth it holds at once, those that wait included.
        global_concurrency: How many roots all workers of the pool hold at once; ``None`` for no bound.
        starts_per_minute: How many roots all workers of the pool begin within any 60 seconds; ``None`` for no bound.
        effects: How many effects it performs at once.
        depth: How deep run trees may be; every level has its queue.
        polling: Seconds that the queue of roots rests after roots were taken from it.
        migrate: Whether it creates missing tables, and updates those of DBOS.
        allow_async_commit: Whether a database may call committed what a power cut still loses.
    """

    url: str
    app: str = "stepengine"
    pool: str = "default"
    executor: str = attrs.field(factory=socket.gethostname)
    release: str = ""
    concurrency: int = 500
    global_concurrency: int | None = None
    starts_per_minute: int | None = None
    effects: int = 32
    depth: int = 4
    polling: float = 1.0
    migrate: bool = True
    allow_async_commit: bool = False

    def __attrs_post_init__(self) -> None:
        require_deployment_name(self.app)
        if not self.executor or self.executor == "local":
            msg = f"an executor id must be stable and unique, such as the host's name, not {self.executor!r}"
            raise DefinitionError(msg)
        require_label("an executor id", self.executor)
        require_label("the name of a pool", self.pool)
        if self.release:
            require_label("the name of a release", self.release)
        for name in ("concurrency", "global_concurrency", "starts_per_minute", "effects", "depth"):
            number = getattr(self, name)
            if number is not None and number < 1:
                msg = f"{name}={number} allows no work; use 1 or more"
                raise DefinitionError(msg)


def compute_release_id(catalog: Catalog) -> str:
    """Return the version of the agents: a hash of definitions, tool specs, and the source of handlers and of tools that yield."""
    known = {}
    for agent in map(catalog.get_agent, catalog.definitions):
        definition = agent.definition
        specs = [agent.tools[name].spec for name in agent.offered]
        yielding = [(name, tool.runs.steps) for name, tool in agent.tools.items() if isinstance(tool.runs, Yielding)]
        bodies = [getattr(steps, "__self__", None) or steps for _, steps in sorted(yielding, key=lambda each: each[0])]
        # The bodies of tools are driven over what is recorded as handlers are.
        handlers = [definition.handle_steps, *[body.body.fn if isinstance(body, Tool) else body for body in bodies]]
        known[definition.id] = [definition_fingerprint(definition, specs), *map(_read_handler_source, handlers)]
    return f"se{SCHEMA_VERSION}-{hashlib.sha256(canonical(known).encode()).hexdigest()[:12]}"


def _read_handler_source(handler: Any) -> str:
    """Return the source of a handler, or a hash of its bytecode if it has none; ``""`` for no handler."""
    if handler is None:
        return ""
    try:
        return inspect.getsource(inspect.unwrap(handler))
    except (OSError, TypeError):
        code = getattr(handler, "__code__", None)
        return "" if code is None else hashlib.sha256(code.co_code).hexdigest()


class WorkerProcess:
    """
    A worker in this process, from ``open`` to ``close``. A process has at most one (durable:U35).

    Args:
        setting: The settings of the worker.
        launcher: The engine's launcher, which creates the runs.
        rates: The rate limits that all workers share; ``None`` for no limits.

    Attributes:
        sessions: A future of the sessions, in which turns look up earlier turns; ``set_database_clients`` sets its result.
    """

    current: WorkerProcess | None = None

    def __init__(self, setting: WorkerSetting, launcher: Launcher, rates: SharedRates | None) -> None:
        self.setting = setting
        self._launcher = launcher
        self._rates = rates
        self._lock: Any = None
        self._dbos: Any = None
        self._errors: Any = None
        self._effects = asyncio.Semaphore(setting.effects)
        self._under_way: dict[asyncio.Task[Any], DurableRun] = {}
        self._closing = False
        self._known: Mapping[str, str] = {}
        self._cleans = make_redactor("known", {})
        self._keeper: asyncio.Task[None] | None = None
        self._queues: Queues | None = None
        self._deployment: Deployment | None = None
        self.sessions: asyncio.Future[Sessions] = asyncio.get_running_loop().create_future()

    @property
    def runs(self) -> Collection[DurableRun]:
        """The runs that it executes now."""
        return self._under_way.values()

    def set_database_clients(self, deployment: Deployment, sessions: Sessions) -> None:
        """Set the deployment and its sessions, which are connected after the worker was opened."""
        self._deployment = deployment
        self.sessions.set_result(sessions)

    async def open(self) -> None:
        """
        Acquire the executor's lock, connect, and start to dequeue runs.

        Raises:
            ExecutorBusy: when another process has the same executor id.
            DatabaseUnavailable: when the database cannot be reached.
            StepEngineError: when a worker of another engine runs in this process, or commits are not durable.
        """
        package = import_patched_dbos()
        if WorkerProcess.current is not None:
            msg = "a process can run only one worker: close the other DurableEngine first"
            raise StepEngineError(msg)
        # Before the first await: another worker that is opened meanwhile finds it.
        WorkerProcess.current = self
        self._errors = package.error
        self._dbos = package.DBOS
        try:
            await self._connect_and_lock()
        except BaseException:
            WorkerProcess.current = None
            raise
        try:
            if self._rates is not None:
                await self._rates.open(self._effects, migrate=self.setting.migrate)
            queues = await self._launch_dbos(package)
            with convert_database_errors(self.setting.url):
                if self.setting.migrate:
                    await create_indexes(self._lock)
                    await create_worker_table(self._lock)
                    await create_schedule_tables(self._lock)
                await add_worker(
                    self._lock, self.setting.app, self.setting.executor, self.setting.pool, self.setting.release
                )
        except BaseException:
            await self.close(drain=0)
            raise
        self._keeper = asyncio.create_task(self._poll_queues_and_watch_runs(queues))

    async def _connect_and_lock(self) -> None:
        """Open a connection and acquire this worker's locks over it; close it if that fails."""
        lock = await open_connection(self.setting.url)
        try:
            with convert_database_errors(self.setting.url):
                await self._acquire_locks(lock)
        except BaseException:
            await close_locking_connection(lock)
            raise
        self._lock = lock

    async def _poll_queues_and_watch_runs(self, queues: Queues) -> None:
        """Take runs, restore the lock after a lost connection, and end waiting executions of cancelled or lost runs."""
        loop, looked = asyncio.get_running_loop(), 0.0
        while True:
            try:
                if loop.time() - looked >= WATCH_SECONDS:
                    looked = loop.time()
                    with contextlib.suppress(DatabaseUnavailable):
                        await self._end_lost_executions()
                if self._lock.closed:
                    await self._connect_and_lock()
                with convert_database_errors(self.setting.url):
                    await queues.start_dequeuing(self._lock)
            except DatabaseUnavailable:
                await self._lock.close()
            except Exception as error:  # noqa: BLE001  (without this task the lock would not be acquired again)
                LOGGER.warning("the ownership of this worker's runs could not be checked: %s", error)
            await asyncio.sleep(queues.next_poll_seconds)

    async def _end_lost_executions(self) -> None:
        """End waiting executions whose run was cancelled or taken over."""
        waiting = {run.order.id: run for run in self._under_way.values() if run.activity.waits}
        if not waiting or self._deployment is None:
            return
        for view in await self._deployment.find_runs(list(waiting)):
            if view.state == "CANCELLED":
                waiting[view.id].end.stop_without_result(
                    self._errors.DBOSWorkflowCancelledError(f"the run {view.id!r} was cancelled")
                )
            elif view.state != "PENDING" or view.executor != self.setting.executor:
                waiting[view.id].end.stop_without_result(self._errors.DBOSWorkflowConflictIDError(view.id))

    async def _acquire_locks(self, connection: Any) -> None:
        """Take the locks of the executor and its release, and check that commits are durable."""
        setting = self.setting
        until = asyncio.get_running_loop().time() + PATIENCE_SECONDS
        while not await fetch_value(connection, LOCK, make_worker_lock_name(setting.executor)):
            # The connection of one that has just ended takes the database a moment to notice.
            if asyncio.get_running_loop().time() < until:
                await asyncio.sleep(0.05)
                continue
            msg = f"another process already runs as executor {setting.executor!r}; give each process its own id (executor=, --executor)"
            raise ExecutorBusy(msg)
        await connection.execute(SHARED_LOCK, (make_release_lock_name(setting.app, setting.release),))
        if await fetch_value(connection, "show synchronous_commit") == "off" and not setting.allow_async_commit:
            msg = "the database has synchronous_commit=off: a power cut would lose committed steps, and repeat effects; turn it on"
            raise StepEngineError(msg)

    async def _launch_dbos(self, package: Any) -> Queues:
        """Configure and launch DBOS, and return the queues of this worker, one for each depth."""
        setting = self.setting
        config: dict[str, object] = {
            "name": setting.app,
            "system_database_url": setting.url,
            "executor_id": setting.executor,
            "application_version": setting.release,
            "serializer": make_serializer(),
            "sys_db_pool_size": POOL_CONNECTIONS,
            "max_executor_threads": MAX_EXECUTOR_THREADS,
            "run_migrations": setting.migrate,
            "log_level": "WARNING",
            "console_log_level": "WARNING",
        }
        package.DBOS(config=config)
        _register_workflow(package.DBOS)
        # DBOS polls no queue by itself: the module queues gives the reason.
        package.DBOS.listen_queues([])
        package.DBOS.launch()
        queues = Queues(setting.app, setting.release)
        for depth in range(setting.depth + 1):
            # Only roots: a bound on children of all trees together would let trees wait for each other.
            most, starts = (setting.global_concurrency, setting.starts_per_minute) if depth == 0 else (None, None)
            pause = setting.polling if depth == 0 else min(MAX_LOOK_SECONDS, setting.polling)
            queue = await package.DBOS.register_queue_async(
                queue_name(setting.pool, depth),
                worker_concurrency=setting.concurrency if most is None else min(setting.concurrency, most),
                global_concurrency=most,
                limiter=None if starts is None else {"limit": starts, "period": 60.0},
                polling_interval_sec=pause,
                on_conflict="update_if_latest_version",
            )
            queues.add_queue(queue, pause)
        self._queues = queues
        return queues

    async def execute_submitted_run(self, form: dict[str, object], seed: dict[str, object] | None) -> dict[str, Any]:
        """Execute the run that *form* orders, starting from the outcomes in *seed*. Both are emptied."""
        order = SubmittedRun.from_json(form)
        known = StartOutcomes() if seed is None else StartOutcomes.from_json(seed)
        # The package keeps what it gave until the run ends, and a conversation or a journal in it would be there twice.
        form.clear()
        if seed is not None:
            seed.clear()
        end = ExecutionEnd(order.id)
        run = DurableRun(
            order,
            WorkflowSteps(self._dbos, self._errors, order.id, end),
            end,
            release=self.setting.release,
            effects=self._effects,
            redactor=self._get_redactor(),
            seed=known,
            sessions=self.sessions,
        )
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a workflow is executed in one
        if self._closing:
            raise asyncio.CancelledError
        self._under_way[task] = run
        try:
            return await execute_run_and_encode_result(self._launcher, order, run, depth=self.setting.depth)
        finally:
            del self._under_way[task]

    def _get_redactor(self) -> Redactor:
        """Return the redactor of known secrets, shared by all runs until the environment changes."""
        known = find_environment_secrets(os.environ)
        if known != self._known:
            self._known, self._cleans = known, make_redactor("known", os.environ)
        return self._cleans

    async def close(self, *, drain: float = 30.0) -> None:
        """
        Take no more runs, wait up to *drain* seconds for running effects, and close all connections.

        The next process under this id, or another worker after a takeover, resumes the runs that were left.
        """
        loop = asyncio.get_running_loop()
        try:
            if self._dbos is not None and WorkerProcess.current is self:
                if self._queues is not None:
                    await self._queues.close(PATIENCE_SECONDS)
                await self._stop_executions(drain)
                with ThreadPoolExecutor(1) as own:
                    await loop.run_in_executor(own, self._dbos.destroy)
        finally:
            if self._rates is not None:
                await self._rates.close()
            if WorkerProcess.current is self:
                WorkerProcess.current = None
                # The loop was lent the package's threads, which are gone.
                loop.set_default_executor(ThreadPoolExecutor())
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait((self._keeper,))
            if self._lock is not None:
                lock, self._lock = self._lock, None
                with contextlib.suppress(DatabaseUnavailable, TimeoutError), convert_database_errors(self.setting.url):
                    async with asyncio.timeout(PATIENCE_SECONDS):
                        await remove_worker(lock, self.setting.app, self.setting.executor)
                await close_locking_connection(lock)

    async def _stop_executions(self, drain: float) -> None:
        """Stop all executions without a recorded result, so that other workers resume the runs."""
        self._closing = True
        for run in self._under_way.values():
            run.end.is_leaving = True
        busy = [asyncio.create_task(run.activity.wait_until_idle()) for run in self._under_way.values()]
        if busy:
            _, late = await asyncio.wait(busy, timeout=drain)
            for waiting in late:
                waiting.cancel()
        left = list(self._under_way)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
            # What their threads were asking the database is answered before it is closed.
            await asyncio.sleep(SETTLE_SECONDS)


_registered: dict[str, Callable[..., Coroutine[Any, Any, Any]]] = {}


def _register_workflow(dbos: Any) -> None:
    """Register the one workflow of this package, once in a process."""

    async def run(form: dict[str, Any], seed: dict[str, Any] | None = None) -> dict[str, Any]:
        process = WorkerProcess.current
        assert process is not None  # noqa: S101 - it took the run from its queue
        return await process.execute_submitted_run(form, seed)

    if WORKFLOW not in _registered:
        _registered[WORKFLOW] = dbos.workflow(name=WORKFLOW)(run)
