"""
``Places``: what one execution of a run knows of the numbered places that its steps have in the database, and what it writes there.

The package would look into each place in a transaction of its own before the step, and write what came of it in another, over two or three
changes of the thread. What is needed before several effects begin is known at once, so here one statement looks into all of their places,
sees whether the run may go on and is still this execution's, and makes the marks that are missing: that an effect which must not be
repeated begins, that a child starts, that the run ends. A mark is durable when ``look`` returns, and so before anything that it stands for
begins. A result is written by one statement, too, and durable before anybody gets it. The rows are the package's own, down to the
name, so that its commands, forks and rewinds meet what they know.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from stepengine.durable.database import DatabaseAway, lost_errors, plain_connection, portable
from stepengine.errors import StepEngineError
from stepengine.runtime.logs import LOGGER

__all__ = ("Drawn", "Places", "Records", "check_package", "performed")

T = TypeVar("T")

FRESH_SECONDS = 0.5
"""For how long it is enough to have looked before an effect begins: a run may be cancelled, or taken over, while it waits for its turn."""
AHEAD = 200
AHEAD_BYTES = 1_000_000
"""How much is read along while a run only repeats what is recorded."""
FIRST_PAUSE, MOST_PAUSE = 0.1, 5.0
CONNECTIONS = 4
ROWS = "function_id, function_name, output, error, serialization"
LOOK = f"""
with found as (
    select {ROWS}, sum(coalesce(octet_length(output), 0)) over (order by function_id) as so_far
    from dbos.operation_outputs where workflow_uuid = %(run)s and function_id between %(low)s and %(high)s::int + %(ahead)s::int
)
select run.status, run.owner_xid, 0, found.* from dbos.workflow_status run
left join found on found.function_id <= %(high)s or (found.so_far < %(bytes)s and found.function_name not like 'DBOS.%%')
where run.workflow_uuid = %(run)s order by found.function_id
"""  # noqa: S608 - only names of columns
MARK = f"""
with run as (
    select status, owner_xid from dbos.workflow_status where workflow_uuid = %(run)s for no key update
), found as (
    select {ROWS} from dbos.operation_outputs where workflow_uuid = %(run)s and function_id between %(low)s and %(high)s
), made as (
    insert into dbos.operation_outputs (
        workflow_uuid, function_id, function_name, output, serialization, started_at_epoch_ms, completed_at_epoch_ms,
        application_name, retention_timestamp
    )
    select %(run)s, mark.number, mark.name, mark.output, %(serialization)s, %(now)s, %(now)s, %(app)s,
        (extract(epoch from now()) * 1000)::bigint
    from run, json_to_recordset(%(marks)s) as mark (number int, name text, output text)
    where run.owner_xid = %(owner)s and run.status <> 'CANCELLED' and (%(sure)s or not exists (select from found))
    on conflict do nothing returning function_id
)
select run.status, run.owner_xid, (select count(*) from made), found.* from run left join found on true
"""  # noqa: S608 - only names of columns
"""
One statement is one transaction. The run's row is locked until it is committed, as by the package's own writes, so that nobody takes the
run over between the look at its owner and the marks.
"""

RECORD = """
with run as (
    select owner_xid from dbos.workflow_status where workflow_uuid = %(run)s for no key update
), made as (
    insert into dbos.operation_outputs (
        workflow_uuid, function_id, function_name, output, serialization, started_at_epoch_ms, completed_at_epoch_ms,
        application_name, retention_timestamp
    )
    select %(run)s, %(number)s, %(name)s, %(output)s, %(serialization)s, %(began)s, %(now)s, %(app)s,
        (extract(epoch from now()) * 1000)::bigint
    from run where owner_xid = %(owner)s
    on conflict do nothing returning function_id
)
select owner_xid, (select count(*) from made), (
    select completed_at_epoch_ms from dbos.operation_outputs where workflow_uuid = %(run)s and function_id = %(number)s
) from run
"""


class Drawn(NamedTuple):
    """
    A place that was drawn for a step.

    Attributes:
        number: Its number.
        name: The step's name.
        mark: What is recorded there at once, where the step is a mark; ``None`` for one whose result comes later.
    """

    number: int
    name: str
    mark: Mapping[str, object] | None = None


class _Row(NamedTuple):
    """What is recorded in a place."""

    name: str
    output: str | None
    error: str | None
    serialization: str | None


class Records:
    """
    A few connections for what stands in places, which all runs of a process share; a database that is away is waited for.

    Args:
        url: The database.
        app: The deployment's name, which stands in every row.
    """

    def __init__(self, url: str, app: str) -> None:
        self.app = app
        self._url = url
        self._idle: list[Any] = []
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._is_closed = False

    async def rows(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Return what a statement selects; one that a lost connection may have cut off is sent again, so it must bear that."""
        # What a task is cancelled for must not cut off a statement: what it has written by then is not known.
        return await asyncio.shield(self._selected(statement, values))

    async def _selected(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        pause = FIRST_PAUSE
        while True:
            try:
                async with self._connection() as connection:
                    found: list[tuple[Any, ...]] = await (await connection.execute(statement, values)).fetchall()
                    return found
            except Exception as error:
                if not isinstance(error, lost_errors()) and not isinstance(error, DatabaseAway):
                    raise
                LOGGER.debug("what is recorded of steps waits for the database: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        async with self._places:
            if self._is_closed:
                raise asyncio.CancelledError
            # The one that was used last, so that where little is to be done one is enough.
            own = self._idle.pop() if self._idle else await plain_connection(self._url)
            try:
                yield own
            finally:
                if own.broken or own.closed or self._is_closed:
                    await own.close()
                else:
                    self._idle.append(own)

    async def close(self) -> None:
        """Give the connections back; nobody waits for the database any more."""
        self._is_closed = True
        while self._idle:
            await self._idle.pop().close()


class Places:
    """
    The places of one execution.

    Args:
        records: Where it looks.
        run: The run's id.
    """

    def __init__(self, records: Records, run: str) -> None:
        self._records = records
        self._run = run
        self._known: dict[int, _Row] = {}
        self._empty: dict[int, float] = {}

    async def look(self, drawn: Sequence[Drawn], *, is_live: bool) -> bool:
        """
        Look into places that were drawn one after another, and make those marks that are missing; return whether any was full.

        Args:
            drawn: The places, in the order of their numbers.
            is_live: Whether nothing is likely to be recorded there.

        Raises:
            Exception: of the package: when something else is recorded in one of them, when the run was cancelled, and when it is
                another execution's by now. No mark was made then.
        """
        from dbos import _error
        from dbos._context import current_owner_xid

        if any(place.number not in self._known for place in drawn):
            owner = current_owner_xid(self._run)
            assert owner is not None  # noqa: S101 - whoever executes a run owns it
            await self._ask(drawn, owner, _error, is_live=is_live)
        self._check(drawn, _error)
        return any(place.number in self._known for place in drawn)

    async def _ask(self, drawn: Sequence[Drawn], owner: str, errors: Any, *, is_live: bool) -> None:
        marks = [place for place in drawn if place.mark is not None and place.number not in self._known]
        if is_live and marks:
            made = await self._select(drawn, owner, errors, MARK, self._marking(marks, owner, sure=False))
        else:
            ahead = {"ahead": 0 if is_live else AHEAD, "bytes": AHEAD_BYTES}
            made = await self._select(drawn, owner, errors, LOOK, ahead)
        while made < len(marks):
            # Nothing is marked where another step stands already. What a lost connection had committed is found.
            self._check(drawn, errors)
            marks = [place for place in marks if place.number not in self._known]
            made = not marks or await self._select(drawn, owner, errors, MARK, self._marking(marks, owner, sure=True))
        now = asyncio.get_running_loop().time()
        self._empty.update({p.number: now for p in drawn if p.mark is None and p.number not in self._known})

    def _marking(self, marks: Sequence[Drawn], owner: str, *, sure: bool) -> dict[str, object]:
        serializer = portable()
        made = [{"number": mark.number, "name": mark.name, "output": serializer.serialize(mark.mark)} for mark in marks]
        return {
            "marks": json.dumps(made),
            "serialization": serializer.name(),
            "now": int(time.time() * 1000),
            "app": self._records.app,
            "owner": owner,
            "sure": sure,
        }

    async def _select(
        self, drawn: Sequence[Drawn], owner: str, errors: Any, statement: str, values: Mapping[str, object]
    ) -> int:
        """Take note of what is found in these places; return how many marks were made."""
        span = {"run": self._run, "low": drawn[0].number, "high": drawn[-1].number}
        rows = await self._records.rows(statement, {**values, **span})
        status, is_owned_by, made = rows[0][:3] if rows else ("CANCELLED", None, 0)
        if status == "CANCELLED":
            msg = f"Workflow {self._run} is cancelled. Aborting function."
            raise errors.DBOSWorkflowCancelledError(msg)
        if is_owned_by != owner:
            raise errors.DBOSWorkflowConflictIDError(self._run)
        self._known.update({row[3]: _Row(*row[4:8]) for row in rows if row[3] is not None})
        return int(made)

    def _check(self, drawn: Sequence[Drawn], errors: Any) -> None:
        for place in drawn:
            row = self._known.get(place.number)
            if row is not None and row.name != place.name:
                raise errors.DBOSUnexpectedStepError(
                    workflow_id=self._run, step_id=place.number, expected_name=place.name, recorded_name=row.name
                )

    def marked(self, place: Drawn) -> Any:
        """Return what stands at the place of a mark: what this execution wrote there, or an earlier one."""
        row = self._known.pop(place.number, None)
        return place.mark if row is None else _value_of(row)

    def is_empty(self, number: int) -> bool:
        """Return whether a place held nothing when it was looked into just now; asked once, when a step begins."""
        looked = self._empty.pop(number, None)
        return looked is not None and asyncio.get_running_loop().time() - looked < FRESH_SECONDS

    def recorded(self, number: int) -> tuple[Any, bool] | None:
        """Return what was found in a place, and whether it is a result rather than an error that the package raises."""
        row = self._known.pop(number, None)
        return None if row is None else (None if row.error is not None else _value_of(row), row.error is None)

    async def record(self, place: Drawn, output: object, *, began: int) -> None:
        """
        Write the result of a step that began at *began*, in milliseconds of the epoch.

        Raises:
            Exception: of the package: when the run is another execution's by now, and when another result stands there.
        """
        from dbos import _error
        from dbos._context import current_owner_xid

        serializer, now = portable(), int(time.time() * 1000)
        owner = current_owner_xid(self._run)
        values = {
            "run": self._run,
            "number": place.number,
            "name": place.name,
            "output": serializer.serialize(output),
            "serialization": serializer.name(),
            "began": began,
            "now": now,
            "app": self._records.app,
            "owner": owner,
        }
        ((is_owned_by, made, completed),) = await self._records.rows(RECORD, values) or [(None, 0, None)]
        if is_owned_by != owner:
            raise _error.DBOSWorkflowConflictIDError(self._run)
        # One that a lost connection had committed after all was completed at the same time.
        if not made and completed not in (None, now):
            raise _error.DBOSStepNondeterminismError(self._run, place.number)


async def performed(reservation: Any, name: str, act: Callable[[], Coroutine[Any, Any, T]], *, preemptible: bool) -> T:
    """Return what *act* returns, done as the package does a step: in its context, and interrupted when the run is cancelled."""
    from dbos._context import EnterDBOSStepCtx
    from dbos._core import _supervise_step
    from dbos._dbos import _get_dbos_instance

    context = reservation._step_ctx  # noqa: SLF001 - the package's own
    with EnterDBOSStepCtx({"name": name, "operationType": "step"}, context):
        if not preemptible:
            return await act()
        return await _supervise_step(
            _get_dbos_instance(),
            context.workflow_id,
            act,
            (),
            {},
            step_name=name,
            preemptible=True,
            timeout_seconds=None,
            shard_key=None,
        )


def check_package() -> None:
    """
    Do nothing where the installed package has what is used of it here.

    Raises:
        StepEngineError: when it has not.
    """
    from dbos import _context, _core, _dbos

    needed = (
        (_context, "EnterDBOSStepCtx"),
        (_context, "current_owner_xid"),
        (_core, "_supervise_step"),
        (_dbos, "_get_dbos_instance"),
    )
    missing = [name for module, name in needed if not hasattr(module, name)]
    if missing:
        msg = (
            f"this version of dbos performs steps in another way ({', '.join(missing)} is missing); use dbos>=3.4,<3.5"
        )
        raise StepEngineError(msg)


def _value_of(row: _Row) -> Any:
    """Return what a row holds; raises ``StepEngineError`` where that is pickled."""
    from dbos._serialization import deserialize_value

    return deserialize_value(row.output, row.serialization, portable())
