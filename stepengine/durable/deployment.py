"""
``Deployment``: a client of a deployment's database. It reads runs and their recorded steps, and enqueues new orders.

A run is a row with the id ``ROOT`` or ``ROOT/PATH``. Waits, answers and the turns of sessions are elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

import attrs
from attrs import frozen

from stepengine.data.limits import Limits
from stepengine.durable.database import (
    FetchRows,
    ReopeningConnection,
    convert_database_errors,
    make_dbos_client,
    parse_database_url,
    require_deployment_name,
)
from stepengine.durable.indexes import child_condition_sql, root_id_sql
from stepengine.durable.messages import parse_message_json
from stepengine.durable.queues import make_queue_options
from stepengine.durable.wire import StartOutcomes, SubmittedRun
from stepengine.errors import InputError, JournalCorrupt, JournalError, StepEngineError
from stepengine.runtime.performer import child_path

OVER = ("SUCCESS", "ERROR", "CANCELLED", "MAX_RECOVERY_ATTEMPTS_EXCEEDED")
"""The states of runs that no worker resumes by itself."""
DESCENDANTS = f"select workflow_uuid from dbos.workflow_status where {child_condition_sql()} and {root_id_sql()} = %s"  # noqa: S608
CHILD_ENDS = f"""
    select o.workflow_uuid, o.output from dbos.workflow_status s join dbos.operation_outputs o using (workflow_uuid)
    where (s.workflow_uuid = %s or ({child_condition_sql("s.")} and {root_id_sql("s.")} = %s))
        and o.function_name like 'child:%%' and o.serialization = 'portable_json' and o.output is not null
"""  # noqa: S608
"""The recorded ends of the children of a tree."""
STEP_COUNTS = (
    "select workflow_uuid, count(*) from dbos.operation_outputs where workflow_uuid = any(%s) group by workflow_uuid"
)
SENT_MESSAGE = """
    select message from dbos.notifications
    where destination_uuid = %s and message_uuid = %s and serialization = 'portable_json'
"""
WAIT_SECONDS = 0.1
"""One query looks at all runs that this process waits for, so ten in a second are cheap, and a short run is noticed at once."""
STEPS = """
    select function_id, function_name, output, serialization from dbos.operation_outputs
    where workflow_uuid = %s and function_id <> all(%s::int[]) order by function_id
"""


def refuse_asking_limits(limits: Limits | None, owner: str, error: type[StepEngineError]) -> None:
    """Raise *error* for limits with ``ask``, since each child of a durable run has its own part of the limit."""
    if limits is not None and limits.ask:
        msg = (
            f"{owner} has Limits(ask=True), which a durable run does not support: each of its children runs in its own process, with its "
            "own part of the limit; leave out ask=True, or run it with a journal"
        )
        raise error(msg)


@frozen(kw_only=True)
class DurableRunView:
    """
    A run in the database.

    Attributes:
        id: The run id.
        state: ``ENQUEUED``, ``DELAYED``, ``PENDING`` (a worker has the run), or one of ``OVER``. A run that ended as failed is
            ``SUCCESS``: its result has the status ``failed``.
        agent: The agent of this run.
        executor: The current or last worker of the run.
        release: The release of the run.
        queue: The current or last queue of the run.
        created: The time of the submission in milliseconds since 1970.
        updated: The time of the last change in milliseconds since 1970.
        attempts: The number of dispatches.
        attributes: The attributes of the run in the database.
    """

    id: str
    state: str
    agent: str = ""
    executor: str | None = None
    release: str | None = None
    queue: str | None = None
    created: int = 0
    updated: int = 0
    attempts: int = 0
    attributes: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def root(self) -> str:
        """The id of the root run of its tree."""
        return self.id.partition("/")[0]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, was cancelled or failed too often, so that workers leave it alone."""
        return self.state in OVER


@frozen
class Step:
    """
    A recorded step of a run.

    Attributes:
        number: Its number in the database, which is not that of an effect.
        name: ``kind:fingerprint``, or one of the package's own.
        form: Its result, as JSON.
    """

    number: int
    name: str
    form: Any


def _parse_step(run: str, number: int, name: str, output: str | None, serialization: str | None) -> Step:
    """Return a step from its row; raise ``JournalCorrupt`` if the result is not portable JSON."""
    if output is None:
        return Step(number, name, None)
    if serialization != "portable_json":
        msg = f"step {number} ({name}) of {run!r} contains {serialization}, which is never read; stepengine writes only portable JSON"
        raise JournalCorrupt(msg)
    return Step(number, name, parse_recorded_json(output, f"step {number} ({name}) of {run!r}"))


def parse_recorded_json(text: str, where: str) -> Any:
    """
    Return a recorded value from its JSON text; raise ``JournalCorrupt`` if it is not JSON.

    Raises:
        JournalCorrupt: When *text* is not valid JSON; *where* is part of the message.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        msg = f"{where} is not valid JSON: {error}"
        raise JournalCorrupt(msg) from None


class _AsyncClient:
    """The client of ``dbos``, whose asynchronous methods raise ``DatabaseUnavailable``."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self.destroy: Callable[[], None] = client.destroy

    def __getattr__(self, name: str) -> Callable[..., object]:
        method = getattr(self._client, name)

        async def call_method(*args: Any, **kwargs: Any) -> Any:
            with convert_database_errors(self._url):
                return await method(*args, **kwargs)

        return call_method


class _EndWatcher:
    """Polls for the ends of all awaited runs with one query."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._waiting: dict[str, set[asyncio.Future[str]]] = {}
        self._looking: asyncio.Task[None] | None = None

    async def wait_for_end(self, run: str, seconds: float) -> str | None:
        """Return the state of a run once it is over, ``None`` when it is not after *seconds*."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(run, set()).add(future)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._poll_states())
        try:
            await asyncio.wait((future,), timeout=seconds)
            return future.result() if future.done() else None
        finally:
            waiting = self._waiting[run]
            waiting.discard(future)
            future.cancel()
            if not waiting:
                del self._waiting[run]

    async def _poll_states(self) -> None:
        """Query the awaited runs until none is left; notify the waiters of ended and missing runs, and of errors."""
        while self._waiting:
            runs = list(self._waiting)
            try:
                states = {view.id: view.state for view in await self._deployment.find_runs(runs)}
            except Exception as error:  # noqa: BLE001  (without this task the callers would wait for ever)
                for run in runs:
                    self._notify_waiters(run, error)
            else:
                for run in runs:
                    state = states.get(run)
                    if state is None:
                        self._notify_waiters(run, _make_missing_run_error(run))
                    elif state in OVER:
                        self._notify_waiters(run, state)
            await asyncio.sleep(WAIT_SECONDS)

    def _notify_waiters(self, run: str, state_or_error: str | Exception) -> None:
        for future in self._waiting.get(run, ()):
            if future.done():
                continue
            if isinstance(state_or_error, str):
                future.set_result(state_or_error)
            else:
                future.set_exception(state_or_error)

    async def close(self) -> None:
        """Cancel the task that polls the states of runs, and wait for its end."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait((self._looking,))


class Deployment:
    """
    The runs of a deployment, in its database. Make one with ``await Deployment.connect(url)``; ``close`` it.

    Attributes:
        client: The package's own client.
        url: The database.
        app: The deployment's name.
    """

    def __init__(self, client: object, url: str, *, app: str) -> None:
        self.client: Any = _AsyncClient(client, url)
        self.url = url
        self.app = app
        self._connection = ReopeningConnection(url)
        self._watch = _EndWatcher(self)

    @classmethod
    async def connect(cls, url: str, *, app: str) -> Self:
        """
        Connect to a deployment.

        Args:
            url: The database, or ``@FILE`` with its URL.
            app: The deployment's name.

        Raises:
            DatabaseUnavailable: when it cannot be reached.
            DefinitionError: when the URL or the name is not valid.
            StepEngineError: when the extra is not installed.
        """
        real, name = parse_database_url(url), require_deployment_name(app)
        return cls(await asyncio.to_thread(make_dbos_client, real, app=name), real, app=name)

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._watch.close()
        await self._connection.close()
        await asyncio.to_thread(self.client.destroy)

    async def fetch_rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """
        Execute a statement and return its rows.

        Args:
            statement: The statement.
            values: The values of its placeholders, or one mapping if these have names.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        return await self._connection.fetch_rows(statement, *values)

    def open_snapshot(self) -> AbstractAsyncContextManager[FetchRows]:
        """Return a context that executes statements at one moment of the database; see ``ReopeningConnection.open_snapshot``."""
        return self._connection.open_snapshot()

    async def enqueue(
        self,
        order: SubmittedRun,
        *,
        seed: StartOutcomes | None = None,
        release: str | None,
        queue: str | None = None,
        attributes: Mapping[str, object] | None = None,
    ) -> None:
        """
        Put an order on its queue, unless it is there.

        Args:
            order: The order.
            seed: Recorded outcomes to start with; none by default.
            release: The release that runs it; by default the latest.
            queue: The queue; by default that of its depth.
            attributes: Attributes of its row in addition to its agent.

        Raises:
            InputError: when its limits have ``ask``.
            DatabaseUnavailable: when the database cannot be reached.
        """
        refuse_asking_limits(order.limits, f"the run {order.id!r}", InputError)
        stored = {"agent": order.agent_id, **(attributes or {})}
        options = make_queue_options(order, stored, release=release, queue=queue)
        await self.client.enqueue_async(options, order.to_json(), *([] if seed is None else [seed.to_json()]))

    async def find_runs(self, runs: Sequence[str]) -> list[DurableRunView]:
        """
        Return those of *runs* that the database has; one query however many.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
        """
        if not runs:
            return []
        found = await self.client.list_workflows_async(workflow_ids=list(runs), load_input=False, load_output=False)
        return [make_run_view(status) for status in found]

    async def get_run(self, run: str) -> DurableRunView:
        """
        Return the view of a run; raise ``JournalError`` if there is none.

        Raises:
            JournalError: when there is none of that id.
        """
        found = await self.find_runs([run])
        if not found:
            raise _make_missing_run_error(run)
        return found[0]

    async def get_tree(self, run: str) -> list[DurableRunView]:
        """
        Return a run, a root or a child, and every run below it; that run is first.

        Raises:
            JournalError: when there is none of that id.
        """
        root, _, path = run.partition("/")
        inside = f"{run}." if path else f"{run}/"
        below = [child for (child,) in await self.fetch_rows(DESCENDANTS, root) if child.startswith(inside)]
        views = sorted(await self.find_runs([run, *below]), key=lambda view: view.id != run)
        if not views or views[0].id != run:
            raise _make_missing_run_error(run)
        return views

    async def load_steps(self, run: str, known_numbers: Collection[int] = ()) -> list[Step]:
        """
        Return the recorded steps of one run in order, without those whose numbers are *known_numbers*.

        Raises:
            JournalCorrupt: when a row is not portable JSON.
        """
        return [_parse_step(run, *row) for row in await self.fetch_rows(STEPS, run, list(known_numbers))]

    async def list_children_with_recorded_end(self, root: str) -> set[str]:
        """
        Return the ids of the children in the tree of *root* whose end their parent has recorded.

        Raises:
            JournalCorrupt: when a row is not portable JSON.
        """
        found = set[str]()
        for run, text in await self.fetch_rows(CHILD_ENDS, root, root):
            form = parse_recorded_json(text, f"the end of a child of {run!r}")
            found.add(f"{root}/{child_path(form.get('path', run.partition('/')[2]), form['seq'])}")
        return found

    async def count_steps(self, runs: Sequence[str]) -> dict[str, int]:
        """Return how many steps of these runs are recorded, by id; a run without any is left out."""
        return {str(run): int(size) for run, size in await self.fetch_rows(STEP_COUNTS, list(runs))}

    async def has_run(self, run: str) -> bool:
        """Return whether the database has a run of this id in any deployment."""
        return bool(await self.find_runs([run]))

    async def find_message(self, run: str, key: str) -> Mapping[str, object] | None:
        """Return the message that was sent to a run with a key; ``None`` if there is none."""
        rows = await self.fetch_rows(SENT_MESSAGE, run, f"{key}::{run}")
        return parse_message_json(rows[0][0]) if rows else None

    async def wait_for_end(self, run: str, seconds: float) -> str | None:
        """
        Wait up to *seconds* for the end of a run and return its state; ``None`` if it has not ended.

        Raises:
            DatabaseUnavailable: when the database cannot be reached.
            JournalError: when there is no such run.
        """
        return await self._watch.wait_for_end(run, seconds)


def make_run_view(status: Any) -> DurableRunView:
    """Return a view of the status that ``dbos`` returns."""
    attributes = dict(status.attributes or {})
    return DurableRunView(
        id=status.workflow_id,
        state=status.status,
        agent=attributes.get("agent", ""),
        executor=status.executor_id,
        release=status.app_version,
        queue=status.queue_name,
        created=status.created_at or 0,
        updated=status.updated_at or 0,
        attempts=status.recovery_attempts or 0,
        attributes=attributes,
    )


def _make_missing_run_error(run: str) -> JournalError:
    return JournalError(f"there is no run {run!r} in this database")
