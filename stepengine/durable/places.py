"""
``Places``: what one execution of a run knows of the numbered places that its steps have in the database.

The package looks into a place before each step, in a transaction of its own, and writes what came of it in another. What is needed before
several effects begin is known at once, so here one statement looks into all of their places, sees whether the run may go on and is still
this execution's, and makes the marks that are missing: that an effect which must not be repeated begins, that a child starts, that the run
ends. A mark is durable when ``look`` returns, and so before anything that it stands for begins. Results are written by the package alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from stepengine.durable.database import DatabaseAway, lost_errors, plain_connection, portable
from stepengine.errors import StepEngineError
from stepengine.runtime.logs import LOGGER

__all__ = ("Drawn", "Places", "Records", "looks_are_known")

FRESH_SECONDS = 0.5
"""For how long it is enough to have looked before an effect begins: a run may be cancelled, or taken over, while it waits for its turn."""
AHEAD = 200
AHEAD_BYTES = 1_000_000
"""How much is read along while a run only repeats what is recorded."""
FIRST_PAUSE, MOST_PAUSE = 0.1, 5.0
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
    from run, unnest(%(numbers)s::int[], %(names)s::text[], %(outputs)s::text[]) as mark (number, name, output)
    where run.owner_xid = %(owner)s and run.status <> 'CANCELLED' and (%(sure)s or not exists (select from found))
    on conflict do nothing returning function_id
)
select run.status, run.owner_xid, (select count(*) from made), found.* from run left join found on true
"""  # noqa: S608 - only names of columns
"""
One statement is one transaction. The run's row is locked until it is committed, as by the package's own writes, so that nobody takes the
run over between the look at its owner and the marks.
"""

_looked: contextvars.ContextVar[tuple[str, int] | None] = contextvars.ContextVar("looked", default=None)
"""The place that is known to hold nothing: its run and its number."""


def looks_are_known() -> None:
    """
    Let the package begin a step in a place that was looked into just now without looking there again.

    Raises:
        StepEngineError: when the installed package looks in another way.
    """
    from dbos._sys_db import SystemDatabase

    look = getattr(SystemDatabase, "check_operation_execution", None)
    if look is None:
        msg = "this version of dbos looks for recorded steps elsewhere; use dbos>=3.4,<3.5"
        raise StepEngineError(msg)
    if getattr(look, "is_ours", False):
        return

    def check(self: object, workflow_id: str, function_id: int, function_name: str, **options: object) -> object:
        if _looked.get() == (workflow_id, function_id):
            return None
        return look(self, workflow_id, function_id, function_name, **options)

    check.is_ours = True  # type: ignore[attr-defined]
    SystemDatabase.check_operation_execution = check  # type: ignore[method-assign,assignment]


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
    A connection for looks into places, which all runs of a process share; a database that is away is waited for.

    Args:
        url: The database.
        app: The deployment's name, which stands in every row.
    """

    def __init__(self, url: str, app: str) -> None:
        self.app = app
        self._url = url
        self._connection: Any = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def rows(self, statement: str, values: Mapping[str, object]) -> list[tuple[Any, ...]]:
        """Return what a statement selects; one that a lost connection may have cut off is sent again, so it must bear that."""
        pause = FIRST_PAUSE
        while True:
            try:
                connection = await self._opened()
                found: list[tuple[Any, ...]] = await (await connection.execute(statement, values)).fetchall()
                return found
            except Exception as error:
                if not isinstance(error, lost_errors()) and not isinstance(error, DatabaseAway):
                    raise
                LOGGER.debug("a look at recorded steps waits for the database: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE)

    async def _opened(self) -> Any:
        async with self._opening:
            if self._is_closed:
                raise asyncio.CancelledError
            if self._connection is None or self._connection.broken or self._connection.closed:
                self._connection = await plain_connection(self._url)
            return self._connection

    async def close(self) -> None:
        """Give the connection back; nobody waits for the database any more."""
        self._is_closed = True
        async with self._opening:
            if self._connection is not None:
                await self._connection.close()


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
            # What the task is cancelled for must not cut off a statement of the connection that all runs share.
            await asyncio.shield(self._ask(drawn, owner, _error, is_live=is_live))
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
        return {
            "numbers": [mark.number for mark in marks],
            "names": [mark.name for mark in marks],
            "outputs": [serializer.serialize(mark.mark) for mark in marks],
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
        """Return what stands in the place of a mark: what this execution wrote there, or an earlier one."""
        row = self._known.pop(place.number, None)
        return place.mark if row is None else _value_of(row)

    def recorded(self, number: int) -> tuple[Any] | None:
        """Return the result that was found in a place; ``None`` where the package has to look itself."""
        row = self._known.pop(number, None)
        return None if row is None or row.error is not None else (_value_of(row),)

    @contextlib.contextmanager
    def beginning(self, number: int) -> Iterator[None]:
        """Let a step begin without another look in a place that held nothing just now."""
        looked = self._empty.pop(number, None)
        is_fresh = looked is not None and asyncio.get_running_loop().time() - looked < FRESH_SECONDS
        token = _looked.set((self._run, number) if is_fresh else None)
        try:
            yield
        finally:
            _looked.reset(token)


def _value_of(row: _Row) -> Any:
    """Return what a row holds; raises ``StepEngineError`` where that is pickled."""
    from dbos._serialization import deserialize_value

    return deserialize_value(row.output, row.serialization, portable())
