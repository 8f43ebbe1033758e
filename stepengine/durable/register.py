"""
The register of a deployment: the owner, the request and the key of each served run, in a table next to the runs.

A row is written before the run is submitted. If the process dies in between, another server finds the row and submits the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from attrs import frozen

from stepengine.data.quantities import IDEMPOTENCY_KEY_SECONDS
from stepengine.durable.database import (
    WORKFLOW,
    convert_database_errors,
    create_missing_tables,
    nul_free_sql,
    open_connection,
)
from stepengine.durable.deployment import Deployment
from stepengine.errors import InputError

MAX_LATE_SECONDS = 5.0
"""
Registering and submitting are two statements in a row: after so long, the process between them is dead and another one
submits the run.
"""
THERE = "select to_regclass('stepengine.served_events') is not null"
TABLES = (
    "create schema if not exists stepengine",
    """
    create table if not exists stepengine.served (
        app text not null, run text primary key, owner text not null, agent text not null, created double precision not null,
        request text not null, session text, key text, is_submitted boolean not null default false, ended text,
        tries integer not null default 0, error text not null default '', bytes bigint not null default 0
    )
    """,
    "create unique index if not exists served_key on stepengine.served (app, owner, key) where key is not null",
    "create index if not exists served_list on stepengine.served (app, owner, created, run)",
    "create index if not exists served_all on stepengine.served (app, created, run)",
    "create index if not exists served_promised on stepengine.served (app, created) where not is_submitted",
    "create index if not exists served_open on stepengine.served (app, run) where ended is null",
    """
    create table if not exists stepengine.served_events (
        run text, first integer, keys text[] not null, primary key (run, first)
    )
    """,
)
GRANTS = (
    "grant usage on schema stepengine",
    "grant select, insert, update, delete on stepengine.served, stepengine.served_events",
)
OVER = ("completed", "failed", "cancelled", "max_steps", "truncated", "stranded")
"""The statuses of runs that no worker resumes by itself."""
ENDED = f"({nul_free_sql('coalesce(o.output, a.output)')}::json->>'status')"
STATUS = f"""
    coalesce(v.ended, case
        when s.attributes->>'rejected' is not null then 'failed'
        when a.status = 'SUCCESS' then {ENDED}
        when a.status = 'CANCELLED' then 'cancelled'
        when a.status in ('ERROR', 'MAX_RECOVERY_ATTEMPTS_EXCEEDED') then 'stranded'
        when a.status = 'PENDING' then 'running'
        else 'started' end)
"""
"""
The status of a run; one that waits is ``running``. A turn that was an answer has the status of the run that it answered.
"""
COLUMNS = f"""
    coalesce(v.run, s.workflow_uuid), coalesce(v.owner, ''), coalesce(v.agent, s.attributes->>'agent', ''), {STATUS},
    coalesce(v.created, s.created_at / 1000.0)::double precision, coalesce(v.request, 'null'),
    coalesce(v.session, s.attributes->>'session'), coalesce(v.tries, 0), coalesce(v.error, s.attributes->>'rejected', ''),
    coalesce(v.is_submitted, true) or s.workflow_uuid is not null
"""
"""
The columns of a run. A run in the database was submitted, even if its process died before it recorded that.
"""
ANSWERED = """
    left join dbos.workflow_status a on a.workflow_uuid = coalesce(s.attributes->>'answered', s.workflow_uuid)
    left join dbos.workflow_output o on o.workflow_uuid = a.workflow_uuid
"""
# A submitted run that is missing was deleted by a cleanup, and is not listed.
REGISTERED_RUNS = f"""
    from stepengine.served v left join dbos.workflow_status s on s.workflow_uuid = v.run {ANSWERED}
    where v.app = %(app)s and (s.workflow_uuid is not null or not v.is_submitted)
"""
OTHER_RUNS = f"""
    from dbos.workflow_status s left join stepengine.served v on v.run = s.workflow_uuid {ANSWERED}
    where s.application_name = %(app)s and s.name = '{WORKFLOW}' and position('/' in s.workflow_uuid) = 0 and v.run is null
"""
"""Root runs that are not in the register: those of a schedule, a command, a program."""
USAGE = f"""
    select count(*) filter (where {STATUS} in ('started', 'running')), coalesce(sum(v.bytes), 0)::bigint
    {REGISTERED_RUNS} and v.owner = %(owner)s
"""
NAMES = "as found (run, owner, agent, status, created, request, session, tries, error, is_submitted)"
FREE_KEY = """
    update stepengine.served set key = null where app = %s and owner = %s and key = %s and created < %s returning run
"""
REGISTER = """
    insert into stepengine.served (app, run, owner, agent, created, request, session, key, bytes)
    values (%s, %s, %s, %s, %s, %s, %s, %s, %s) on conflict (app, owner, key) where key is not null do nothing returning run
"""
OF_KEY = "select run, agent, session, request from stepengine.served where app = %s and owner = %s and key = %s"
SUBMITTED = "update stepengine.served set is_submitted = true where run = %s returning run"
REMOVE = "delete from stepengine.served where run = %s and not is_submitted returning run"
REFUSE = "update stepengine.served set ended = 'failed', error = %s where run = %s returning run"
NOTE = "update stepengine.served set error = %s where run = %s returning run"
COUNT_TRY = "update stepengine.served set tries = tries + 1 where run = %s returning run"
MORE_BYTES = "update stepengine.served set bytes = bytes + %s where run = %s returning run"
HAS_KEY = "select run from stepengine.served where app = %s and owner = %s and key = %s and created >= %s"
SETTLE = f"""
    update stepengine.served v set ended = {ENDED}
    from dbos.workflow_status s {ANSWERED}
    where v.app = %s and v.ended is null and s.workflow_uuid = v.run and a.status = 'SUCCESS' returning v.run
"""  # noqa: S608 - of names of ours
FORGET = """
    delete from stepengine.served v
    where v.app = %s and (v.is_submitted or v.ended is not null) and v.created < %s
        and not exists (select from dbos.workflow_status s where s.workflow_uuid = v.run)
    returning v.run
"""
FORGET_EVENTS = """
    delete from stepengine.served_events e
    where not exists (select from dbos.workflow_status s where s.workflow_uuid = e.run) returning e.run
"""


@frozen(kw_only=True)
class RegisteredRun:
    """
    A registered run.

    Attributes:
        run: Its id.
        owner: Who started it; ``""`` for one that was submitted past the register.
        agent: Its agent.
        status: ``"started"`` until a worker has it, then ``"running"``, also where it waits; or one of ``OVER``.
        created: When it was asked for, in seconds since 1970.
        request: The client's request.
        session: The conversation.
        tries: How many times it was retried after it had stopped.
        error: Why it was cancelled, or could not be submitted.
        is_submitted: Whether there is a run.
    """

    run: str
    owner: str
    agent: str
    status: str
    created: float
    request: Any
    session: str | None = None
    tries: int = 0
    error: str = ""
    is_submitted: bool = True


async def create_register_tables(url: str) -> None:
    """
    Create the missing tables of served runs; without the right to do so, log it and return.

    Raises:
        DatabaseUnavailable: when the database cannot be reached.
    """
    with convert_database_errors(url):
        async with await open_connection(url) as own:
            await create_register_tables_over(own)


async def create_register_tables_over(connection: Any, *, role: str | None = None) -> None:
    """Create the missing tables of served runs, as ``create_register_tables``, over *connection*; let *role* use them."""
    await create_missing_tables(
        connection,
        "the tables of served runs",
        lock="stepengine-served",
        exists_query=THERE,
        tables=TABLES,
        grants=GRANTS,
        role=role,
    )


class Register:
    """
    The runs of a deployment with their owners. Any number of processes may use it.

    Args:
        database: The database of the deployment.

    Raises:
        DatabaseUnavailable: by each call, when the database cannot be reached, or has no such tables.
    """

    def __init__(self, database: Deployment) -> None:
        self._database = database
        self._app = database.app

    async def add_run(self, row: RegisteredRun, key: str | None) -> str | None:
        """
        Register a run and return ``None``; if a run of the last day has the same *key*, register nothing and return its id.

        Raises:
            InputError: When that run was started by a different request.
        """
        rows = self._database.fetch_rows
        request = json.dumps(row.request, sort_keys=True, separators=(",", ":"))
        if key is not None:
            await rows(FREE_KEY, self._app, row.owner, key, row.created - IDEMPOTENCY_KEY_SECONDS)
        given = (self._app, row.run, row.owner, row.agent, row.created, request, row.session, key, len(request))
        while not await rows(REGISTER, *given):
            for run, agent, session, asked in await rows(OF_KEY, self._app, row.owner, key):
                if (agent, session, asked) != (row.agent, row.session, request):
                    msg = (
                        f"the idempotency key was already used for another request, which started the run {run}; "
                        "use a key for only one request within a day"
                    )
                    raise InputError(msg)
                return str(run)
        return None

    async def has_recent_key(self, owner: str, key: str, now: float) -> bool:
        """Return whether *owner* started a run under an idempotency key within the day before *now*."""
        return bool(await self._database.fetch_rows(HAS_KEY, self._app, owner, key, now - IDEMPOTENCY_KEY_SECONDS))

    async def count_open_runs_and_bytes(self, owner: str) -> tuple[int, int]:
        """Return how many runs of *owner* have not ended, and how many bytes clients sent to all of them."""
        found = await self._database.fetch_rows(USAGE, {"app": self._app, "owner": owner})
        return int(found[0][0]), int(found[0][1])

    async def add_client_bytes(self, run: str, size: int) -> None:
        """Add *size* to the number of bytes that clients sent to a run."""
        await self._database.fetch_rows(MORE_BYTES, size, run)

    async def record_submitted(self, run: str) -> None:
        """Record that a run was submitted."""
        await self._database.fetch_rows(SUBMITTED, run)

    async def remove_unsubmitted(self, run: str) -> None:
        """Delete a run that was never submitted."""
        await self._database.fetch_rows(REMOVE, run)

    async def record_refusal(self, run: str, reason: str) -> None:
        """Record that a registered run cannot be submitted: it has failed."""
        await self._database.fetch_rows(REFUSE, reason.replace("\0", ""), run)

    async def record_cancellation(self, run: str, reason: str) -> None:
        """Store why a run was cancelled."""
        await self._database.fetch_rows(NOTE, reason.replace("\0", ""), run)

    async def increment_retry_count(self, run: str) -> None:
        """Increase the number of retries of a stopped run by one."""
        await self._database.fetch_rows(COUNT_TRY, run)

    async def list_late_unsubmitted(self) -> list[RegisteredRun]:
        """Return up to 100 registered runs that were not submitted within ``MAX_LATE_SECONDS``, the oldest first."""
        late = f"select {COLUMNS} {REGISTERED_RUNS} and not v.is_submitted and v.ended is null and v.created < %(late)s order by v.created limit 100"
        given = {"app": self._app, "late": time.time() - MAX_LATE_SECONDS}
        return [_registered_run_from_row(row) for row in await self._database.fetch_rows(late, given)]

    async def find_run(self, run: str) -> RegisteredRun | None:
        """Return the root run with this id, of any owner; ``None`` if there is none."""
        one = f"select {COLUMNS} {REGISTERED_RUNS} and v.run = %(run)s union all select {COLUMNS} {OTHER_RUNS} and s.workflow_uuid = %(run)s"
        rows = await self._database.fetch_rows(one, {"app": self._app, "run": run})
        return _registered_run_from_row(rows[0]) if rows else None

    async def list_runs(
        self,
        *,
        owner: str | None,
        agent: str | None,
        statuses: Sequence[str],
        before: tuple[float, str] | None,
        limit: int,
        search: str | None = None,
    ) -> list[RegisteredRun]:
        """
        Return runs, newest first: those of *owner* after the position *before*; for ``None`` every root run.

        *statuses* are such as ``RegisteredRun.status`` has. *search* leaves the registered ones whose
        request, id or agent holds it; of letters beyond ASCII only as they are written.
        """
        given: dict[str, Any] = {
            "app": self._app, "owner": owner, "agent": agent, "statuses": list(statuses), "limit": limit,
            "created": None if before is None else before[0], "run": None if before is None else before[1],
        }  # fmt: skip
        own = [
            *(["v.owner = %(owner)s"] if owner is not None else []),
            *(["v.agent = %(agent)s"] if agent is not None else []),
            *(["(v.created, v.run) < (%(created)s, %(run)s)"] if before is not None else []),
            *([f"({STATUS}) = any(%(statuses)s)"] if statuses else []),
        ]
        if search is not None:
            # A request is stored as JSON, with letters beyond ASCII as escapes; lowered before, they would be others.
            given |= {"search": search, "escaped": json.dumps(search)[1:-1]}
            own.append(
                "(position(lower(%(escaped)s) in lower(v.request)) > 0 or position(lower(%(search)s) in lower(v.agent)) > 0 "
                "or position(lower(%(search)s) in lower(v.run)) > 0)"
            )
        found = f"(select {COLUMNS} {_join_conditions(REGISTERED_RUNS, own)} order by v.created desc, v.run desc limit %(limit)s)"
        if owner is None and search is None:
            others = [
                *(["s.attributes->>'agent' = %(agent)s"] if agent is not None else []),
                *(["s.created_at <= %(created)s * 1000.0"] if before is not None else []),
                *(
                    ["((s.created_at / 1000.0)::double precision, s.workflow_uuid) < (%(created)s, %(run)s)"]
                    if before is not None
                    else []
                ),
                *([f"({STATUS}) = any(%(statuses)s)"] if statuses else []),
            ]
            found += f" union all (select {COLUMNS} {_join_conditions(OTHER_RUNS, others)} order by s.created_at desc, s.workflow_uuid desc limit %(limit)s)"
        every = f"select * from ({found}) {NAMES} order by created desc, run desc limit %(limit)s"  # noqa: S608 - of names of ours
        return [_registered_run_from_row(row) for row in await self._database.fetch_rows(every, given)]

    async def count_by_agent_and_status(self) -> list[tuple[str, str, int]]:
        """Return how many registered runs there are of each agent in each state."""
        every = (
            f"select agent, status, count(*) from (select {COLUMNS} {REGISTERED_RUNS}) {NAMES} group by agent, status"  # noqa: S608 - of names of ours
        )
        found = await self._database.fetch_rows(every, {"app": self._app})
        return [(agent, status, count) for agent, status, count in found]

    async def store_ends_and_remove_stale(self) -> None:
        """Store the ends of runs for listing, and delete the entries of deleted runs."""
        await self._database.fetch_rows(SETTLE, self._app)
        await self._database.fetch_rows(FORGET, self._app, time.time() - IDEMPOTENCY_KEY_SECONDS)
        await self._database.fetch_rows(FORGET_EVENTS)


def _join_conditions(source: str, conditions: Sequence[str]) -> str:
    return " and ".join([source, *conditions])


def _registered_run_from_row(row: tuple[Any, ...]) -> RegisteredRun:
    run, owner, agent, status, created, request, session, tries, error, is_submitted = row
    return RegisteredRun(
        run=run, owner=owner, agent=agent, status=status, created=created, request=json.loads(request), session=session,
        tries=tries, error=error, is_submitted=is_submitted,
    )  # fmt: skip
