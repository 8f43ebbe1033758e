"""
``DeploymentMaintenance``: lists live and dead workers, takes over runs, deletes old runs, and creates the tables.

DBOS leaves the runs of a dead worker to a restart of that worker. Here a worker holds a lock for as long as it lives, and ``takeover``
returns the runs of a worker whose lock is free to their queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from attrs import frozen

from stepengine.durable.database import (
    WORKFLOW,
    convert_database_errors,
    fetch_value,
    migrate_dbos_tables,
    open_connection,
    parse_database_url,
)
from stepengine.durable.deployment import OVER
from stepengine.durable.indexes import (
    child_condition_sql,
    create_indexes,
    root_id_sql,
    session_turns_sql,
    turn_kind_sql,
    turn_number_sql,
)
from stepengine.durable.operator import Operator
from stepengine.durable.process import LOCK, make_release_lock_name, make_worker_lock_name
from stepengine.durable.rates import create_rate_tables
from stepengine.durable.register import create_register_tables_over
from stepengine.durable.schedule_book import create_schedule_tables
from stepengine.durable.step_names import ASK, CHILD, SPAWN, parse_step_kind
from stepengine.durable.workers import create_worker_table, list_workers
from stepengine.errors import DatabaseUnavailable, DefinitionError, ExecutorBusy
from stepengine.runtime.logs import LOGGER

MAX_TAKEOVERS = 5
"""Deployments and lost machines end a worker now and then; five at the same step mean that the step kills it."""
BATCH_RUNS = 500
"""Deleted in one transaction: it holds locks for a fraction of a second, and millions of runs do not fill the memory."""
GRACE_SECONDS = 30.0
"""A worker that restarts takes its runs back itself within this time; longer, and people wait for runs of a dead one."""
LOOK_SECONDS = 1.0
"""Small beside the grace, and one query in a second."""
# The server lets go of a killed worker's lock only when it has noticed that the connection is gone.
GONE_SECONDS = 2.0
LOOK_AGAIN_SECONDS = 0.05
"""A command waits two seconds at most for the lock, so it looks some dozen times."""
ELECT = "select pg_advisory_lock(hashtextextended(%s, 0))"
UNLOCK = "select pg_advisory_unlock(hashtextextended(%s, 0))"
HELD = """
select exists (
  select 1 from pg_locks
  where locktype = 'advisory' and granted and objsubid = 1
    and database = (select oid from pg_database where datname = current_database())
    and ((classid::bigint << 32) | objid::bigint) = hashtextextended(%s, 0)
)
"""
STATES = """
select status, count(*), min(created_at), coalesce(executor_id, ''), coalesce(application_version, ''),
       count(*) filter (where attributes ? 'poison')
from dbos.workflow_status where name = %s and application_name = %s
group by status, coalesce(executor_id, ''), coalesce(application_version, '')
"""
QUEUES = """
select name, worker_concurrency, concurrency, rate_limit_max, rate_limit_period_sec, polling_interval_sec
from dbos.queues where application_name = %s and name like 'se.%%' order by name
"""
RATES = """
with now_is as (select extract(epoch from clock_timestamp()) as moment),
accounts as (select account from stepengine.rate_seconds union select account from stepengine.rate_workers)
select account, coalesce(w.running, 0), coalesce(w.waiting, 0), coalesce(s.requests, 0), coalesce(s.tokens, 0)
from accounts
left join (
  select account, sum(running) as running, count(*) filter (where waits is not null and asked > moment - 5) as waiting
  from stepengine.rate_workers, now_is group by account
) w using (account)
left join (
  select account, sum(requests) as requests, sum(tokens) as tokens
  from stepengine.rate_seconds, now_is where second > floor(moment) - 61 group by account
) s using (account)
order by account
"""
HAS_RATES = "select to_regclass('stepengine.rate_workers') is not null"
UNFINISHED = """
select workflow_uuid from dbos.workflow_status
where name = %s and application_name = %s and application_version = %s and position('/' in workflow_uuid) = 0
  and status <> all(%s)
order by created_at
"""
LAST_STEP = """
select function_id, function_name from dbos.operation_outputs where workflow_uuid = %s order by function_id desc limit 1
"""
CODED = ("workflow_status", "operation_outputs", "notifications", "workflow_events", "streams")
"""The tables with a column that says how a value is written."""
WORKERS = "select distinct executor_id from dbos.workflow_status where status = 'PENDING' and name = %s and application_name = %s"
ROOT_SESSION = "(root.attributes->>'session')"
FINISHED_ROOTS = f"""
select workflow_uuid from dbos.workflow_status root
where name = %s and application_name = %s and position('/' in workflow_uuid) = 0 and workflow_uuid > %s
  and status = any(%s) and coalesce(completed_at, updated_at) < %s
  and not exists (
    select 1 from dbos.workflow_status below
    where {child_condition_sql("below.")} and {root_id_sql("below.")} = root.workflow_uuid and below.status <> all(%s)
  )
  and (
    not coalesce(attributes ? 'session', false)
    or exists (
      select 1 from dbos.workflow_status later
      where {session_turns_sql("root.application_name", ROOT_SESSION, "later.")} and {turn_kind_sql("later.")} = 'done'
        and {turn_number_sql("later.")} > {turn_number_sql("root.")}
    )
    or not exists (
      select 1 from dbos.workflow_status other
      where {session_turns_sql("root.application_name", ROOT_SESSION, "other.")}
        and (other.status <> all(%s) or coalesce(other.completed_at, other.updated_at) >= %s)
    )
  )
order by workflow_uuid limit %s
"""  # noqa: S608
CHILDREN = f"select workflow_uuid from dbos.workflow_status where {child_condition_sql()} and {root_id_sql()} = any(%s)"  # noqa: S608


@frozen
class ExecutorView:
    """
    A running worker, or a dead worker that has runs.

    Attributes:
        id: The executor id.
        is_alive: Whether a process holds the worker's lock.
        pending: The number of the worker's runs.
        releases: The releases of these runs; without runs, the worker's own release.
    """

    id: str
    is_alive: bool
    pending: int
    releases: tuple[str, ...]


@frozen
class ReleaseView:
    """
    A release with runs that have not ended.

    Attributes:
        id: The release.
        has_worker: Whether a running worker has this release; without one, the runs wait forever.
        runs: The number of runs that have not ended.
    """

    id: str
    has_worker: bool
    runs: int


@frozen
class QueueView:
    """
    The settings of a queue in the database. Workers follow these and not the ones that they were started with.

    Attributes:
        name: ``se.POOL.dDEPTH``.
        worker_concurrency: How many runs one worker holds at once.
        global_concurrency: How many all workers hold; ``None`` for no bound.
        limit: Starts per ``period`` seconds; ``None`` for no bound.
        period: Seconds.
        polling: Seconds between two looks of a worker.
    """

    name: str
    worker_concurrency: int | None
    global_concurrency: int | None
    limit: int | None
    period: float | None
    polling: float


@frozen
class RateView:
    """
    The load of one provider account: the requests of all workers that limit it.

    Attributes:
        account: The provider's prefix, and the fingerprint of the key.
        under_way: Running requests; those of a dead worker count until another worker needs the room.
        waiting: How many workers wait for a turn.
        requests: Requests that began in the last 60 seconds.
        tokens: Their tokens: what they used, or are expected to use.
    """

    account: str
    under_way: int
    waiting: int
    requests: int
    tokens: int


@frozen
class DeploymentOverview:
    """
    A deployment at a glance.

    Attributes:
        states: State to the number of runs, children included.
        oldest: State to the age of its oldest run, in seconds.
        executors: The live workers, and the dead ones that still have runs.
        releases: Releases with runs that have not ended.
        poison: How many runs were cancelled because they killed their workers.
        unreadable: Rows that are not portable JSON, by table; ``None`` if they were not counted.
    """

    states: dict[str, int]
    oldest: dict[str, float]
    executors: tuple[ExecutorView, ...]
    releases: tuple[ReleaseView, ...]
    poison: int
    unreadable: dict[str, int] | None = None


@frozen
class TakeoverResult:
    """
    The result of the takeover of one run of a dead worker.

    Attributes:
        run: The run id.
        executor: The dead worker.
        outcome: ``resumed``: the run is in its queue again. ``poison``: the run was cancelled, since workers repeatedly died of it
            without progress. ``would resume`` and ``would cancel`` in a dry run.
        times: The number of takeovers without progress.
    """

    run: str
    executor: str
    outcome: str
    times: int


class DeploymentMaintenance:
    """
    Operations on a whole deployment.

    Args:
        operator: The client of the database.
    """

    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    @contextlib.asynccontextmanager
    async def _connect(self) -> AsyncIterator[Any]:
        """Yield a connection of its own; raise ``DatabaseUnavailable`` if the database is away now or during the block."""
        with convert_database_errors(self._operator.url):
            async with await open_connection(self._operator.url) as own:
                yield own

    # --- looking ------------------------------------------------------------------------------------------------------

    async def overview(self, *, check: bool = False) -> DeploymentOverview:
        """
        Return how many runs are in each state, the workers and releases with unfinished runs, and the number of poison runs.

        Args:
            check: Whether every row is counted that is not portable JSON, which reads whole tables.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        async with self._connect() as own:
            rows = await _fetch_all(own, STATES, WORKFLOW, self._operator.app)
            now, states, oldest = time.time(), dict[str, int](), dict[str, float]()
            for state, count, created, *_ in rows:
                states[state] = states.get(state, 0) + count
                oldest[state] = max(oldest.get(state, 0.0), now - created / 1000)
            having: dict[str, dict[str, int]] = {}
            unfinished: dict[str, int] = {}
            for state, count, _, executor, release, _ in rows:
                if state == "PENDING":
                    by_release = having.setdefault(executor, {})
                    by_release[release] = by_release.get(release, 0) + count
                if state not in OVER:
                    unfinished[release] = unfinished.get(release, 0) + count
            # Listed workers without runs may be dead.
            listed = {name: {release: 0} for name, release in (await list_workers(own, self._operator.app)).items()}
            executors = [
                ExecutorView(name, is_alive, sum(found.values()), tuple(sorted(found)))
                for name, found in sorted((listed | having).items())
                if (is_alive := await _is_lock_held(own, make_worker_lock_name(name))) or name in having
            ]
            releases = [
                ReleaseView(name, await _is_lock_held(own, make_release_lock_name(self._operator.app, name)), count)
                for name, count in sorted(unfinished.items())
            ]
            unreadable = {t: n for t in CODED if (n := await _count_nonportable_rows(own, t))} if check else None
        poison = sum([row[5] for row in rows])
        return DeploymentOverview(states, oldest, tuple(executors), tuple(releases), poison, unreadable)

    async def list_queue_settings(self) -> list[QueueView]:
        """Return the settings of each queue, as the database has them."""
        return [QueueView(*row) for row in await self._operator.deployment.fetch_rows(QUEUES, self._operator.app)]

    async def list_rates(self) -> list[RateView]:
        """Return the shared rate limits and their current use."""
        ((is_there,),) = await self._operator.deployment.fetch_rows(HAS_RATES)
        found = await self._operator.deployment.fetch_rows(RATES) if is_there else ()
        return [RateView(row[0], *[int(count) for count in row[1:]]) for row in found]

    async def list_unfinished(self, release: str) -> list[str]:
        """
        Return the ids of the root runs of a release that have not ended, the oldest first.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        rows = await self._operator.deployment.fetch_rows(UNFINISHED, WORKFLOW, self._operator.app, release, list(OVER))
        return [row[0] for row in rows]

    # --- taking over --------------------------------------------------------------------------------------------------

    async def takeover(self, executor: str, *, force: bool = False, dry_run: bool = False) -> list[TakeoverResult]:
        """
        Put the runs of a dead worker back into their queues; a second time finds nothing.

        A run of which workers died five times without its getting a step further is cancelled as poison.

        Args:
            executor: The worker's executor id.
            force: Whether to do it even if a process holds the worker's lock. The database then refuses the steps of that
                process, but running effects may happen twice.
            dry_run: Whether to return the results without changing anything.

        Raises:
            ExecutorBusy: When the worker is alive, or another process is taking over.
            DatabaseUnavailable: when the database cannot be reached.
        """
        async with self._connect() as own:
            got = await self._try_acquire_worker_lock(own, executor, seconds=0 if force else GONE_SECONDS)
            if not got and not force:
                msg = (
                    f"executor {executor!r} is alive: a process holds its lock, or another process is taking over its runs; "
                    "stop it first, or use force (--force) if its machine is unreachable"
                )
                raise ExecutorBusy(msg)
            try:
                return await self._requeue_runs(executor, dry_run=dry_run)
            finally:
                if got:
                    await own.execute(UNLOCK, (make_worker_lock_name(executor),))

    @staticmethod
    async def _try_acquire_worker_lock(connection: object, executor: str, *, seconds: float) -> bool:
        """Try for *seconds* to acquire the lock of a worker; return whether it succeeded."""
        until = time.monotonic() + seconds
        while True:
            ((got,),) = await _fetch_all(connection, LOCK, make_worker_lock_name(executor))
            if got or time.monotonic() >= until:
                return bool(got)
            await asyncio.sleep(LOOK_AGAIN_SECONDS)

    async def _requeue_runs(self, executor: str, *, dry_run: bool) -> list[TakeoverResult]:
        """Put the pending runs of a worker back on their queues, or cancel them as poison; children come first."""
        operator = self._operator
        left = await operator.client.list_workflows_async(
            status="PENDING", executor_id=executor, application_name=operator.app, load_input=False, load_output=False
        )
        # Children first: one that is put back after its parent was cancelled as poison would run without it.
        left.sort(key=lambda status: len(status.workflow_id), reverse=True)
        return [await self._requeue_or_cancel_run(status, executor, dry_run=dry_run) for status in left]

    async def _requeue_or_cancel_run(self, status: Any, executor: str, *, dry_run: bool) -> TakeoverResult:
        """Put a run of a dead worker back on its queue, or cancel it as poison after ``MAX_TAKEOVERS`` takeovers at one step."""
        operator, run = self._operator, status.workflow_id
        # Only the last one: a record may be long, and unreadable rows in it must not prevent a takeover.
        (last, name) = next(iter(await operator.deployment.fetch_rows(LAST_STEP, run)), (0, ""))
        known = (status.attributes or {}).get("takeover", {})
        # One that only waits gets no further however often its workers die of something else.
        stuck = known.get("step") == last and not _is_wait_step(name)
        times = known.get("times", 0) + 1 if stuck else 1
        is_poison = times > MAX_TAKEOVERS
        if dry_run:
            return TakeoverResult(run, executor, "would cancel" if is_poison else "would resume", times)
        counted = {"takeover": {"times": times, "step": last}}
        if is_poison:
            counted["poison"] = {"executor": executor, "step": last}
        await operator.client.update_workflow_attributes_async(run, counted, merge=True)
        if is_poison:
            # Children are enqueued outside their parent's workflow, so DBOS does not know them as its children.
            tree = [view.id for view in await operator.tree(run) if not view.is_over]
            await operator.client.cancel_workflows_async(tree)
            return TakeoverResult(run, executor, "poison", times)
        await operator.client.resume_workflow_async(run, queue_name=status.queue_name or operator.get_queue_name(run))
        return TakeoverResult(run, executor, "resumed", times)

    async def watch(self, *, grace: float = GRACE_SECONDS, look: float = LOOK_SECONDS) -> AsyncIterator[TakeoverResult]:
        """
        Take over every worker whose lock has been free for *grace* seconds, forever.

        Of several that watch one deployment, one acts and the others stand by. A database that is away is waited for.

        Args:
            grace: Seconds that a worker may be away.
            look: Seconds between two looks.
        """
        away: dict[str, float] = {}
        while True:
            with contextlib.suppress(DatabaseUnavailable):
                async with self._connect() as own:
                    await own.execute(ELECT, (f"stepengine-takeover:{self._operator.app}",))
                    while True:
                        for taken in await self._requeue_runs_of_dead_workers(own, away, grace):
                            yield taken
                        await asyncio.sleep(look)
            away.clear()
            await asyncio.sleep(look)

    async def _requeue_runs_of_dead_workers(
        self, connection: object, away: dict[str, float], grace: float
    ) -> list[TakeoverResult]:
        """Take over workers that have been dead for *grace* seconds, and return the results; record when others died."""
        rows = await _fetch_all(connection, WORKERS, WORKFLOW, self._operator.app)
        taken: list[TakeoverResult] = []
        having = sorted([name for (name,) in rows if name])
        # Since when one was away once is nothing for the next time that it is.
        for executor in away.keys() - having:
            del away[executor]
        for executor in having:
            if await _is_lock_held(connection, make_worker_lock_name(executor)):
                away.pop(executor, None)
                continue
            if time.monotonic() - away.setdefault(executor, time.monotonic()) >= grace:
                try:
                    taken += await self.takeover(executor)
                except ExecutorBusy:  # it came back just now
                    continue
                except DatabaseUnavailable:
                    raise
                except Exception as error:  # noqa: BLE001  (whatever it is, the runs of the others go on)
                    LOGGER.warning("the runs of %r could not be taken over: %s", executor, error)
                    away[executor] = time.monotonic()
        return taken

    # --- cleaning up --------------------------------------------------------------------------------------------------

    async def collect(self, older_than: float, *, dry_run: bool = False) -> list[str]:
        """
        Delete trees of runs that ended more than *older_than* seconds ago, and return the ids of their roots.

        Args:
            older_than: Seconds; a tree stays while any run of it has not ended. The last result of a session stays until
                the session was idle for that long.
            dry_run: Whether to return the ids without deleting anything.

        Raises:
            DefinitionError: for a negative number.
            DatabaseUnavailable: when the database cannot be reached.
        """
        if older_than < 0:
            msg = f"an age must be 0 or more seconds, not {older_than!r}"
            raise DefinitionError(msg)
        before, deleted, last = int((time.time() - older_than) * 1000), list[str](), ""
        async with self._connect() as own:
            while True:
                limit = 10**9 if dry_run else BATCH_RUNS
                over = list(OVER)
                found = await _fetch_all(
                    own, FINISHED_ROOTS, WORKFLOW, self._operator.app, last, over, before, over, over, before, limit
                )
                roots = [row[0] for row in found]
                deleted += roots
                if dry_run or not roots:
                    return deleted
                below = [row[0] for row in await _fetch_all(own, CHILDREN, roots)]
                await self._operator.client.delete_workflows_async([*roots, *below])
                last = roots[-1]


def _is_wait_step(name: str) -> bool:
    """Return whether a step waits: for an answer, a child, or something of the database package."""
    return parse_step_kind(name) in (ASK, SPAWN, CHILD) or name.startswith("DBOS.")


async def _fetch_all(connection: Any, sql: str, *values: Any) -> list[Any]:
    rows: list[object] = await (await connection.execute(sql, values)).fetchall()
    return rows


async def _is_lock_held(connection: object, name: str) -> bool:
    """Return whether a process holds the advisory lock of this name."""
    return bool(await fetch_value(connection, HELD, name))


async def _count_nonportable_rows(connection: object, table: str) -> int:
    """Return the number of rows of a table with a serialization other than portable JSON."""
    sql = f"select count(*) from dbos.{table} where coalesce(serialization, 'portable_json') <> 'portable_json'"  # noqa: S608
    return int(await fetch_value(connection, sql))


async def migrate(url: str, *, role: str | None = None) -> None:
    """
    Make and update the tables, with a role that may; workers then need none of its rights (``migrate=False``).

    Args:
        url: The database, or ``@FILE`` with its URL.
        role: Role of workers and clients; it gets the rights that they need.

    Raises:
        DatabaseUnavailable: when the database cannot be reached.
        DefinitionError: when the URL is none.
        StepEngineError: when the role of the URL may not, or the extra is not installed.
    """
    real = parse_database_url(url)
    await asyncio.to_thread(migrate_dbos_tables, real, role=role)
    with convert_database_errors(real):
        async with await open_connection(real) as own:
            # Every step locks its run's row, which is written three or four times: room beside it, and early cleaning.
            await own.execute(
                "alter table dbos.workflow_status set (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02)"
            )
            await create_indexes(own)
            await create_rate_tables(own, role=role)
            await create_worker_table(own, role=role)
            await create_schedule_tables(own, role=role)
            await create_register_tables_over(own, role=role)
