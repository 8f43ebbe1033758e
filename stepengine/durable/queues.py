"""
The queues of runs: the options of an enqueued run, and ``Queues``, with which a worker takes runs without polling each queue.

The package has a thread for each queue, which asks the database for the queue's limits and then for runs, also when there are none. Here
one statement asks which of all queues hold something, and only from those the package takes, by one turn of its own loop: what bounds a
queue is read, and what is taken is locked, as it always does.

``DBOS.listen_queues`` with the names of the queues would replace ``Queues``. With dbos 3.4, an idle worker then made 83 transactions a second
instead of 21, its first run started a second later, and closing it took a second longer: only ``DBOS.destroy`` stops the threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

from stepengine.durable.database import WORKFLOW, queue_name
from stepengine.durable.wire import SubmittedRun
from stepengine.errors import StepEngineError

MAX_LOOK_SECONDS = 0.2
"""Seconds between two looks at all queues, at most. A queue from which runs were just taken rests longer, for its own pause."""
FULL = """
select queue.name from unnest(%s::text[]) as queue (name) where exists (
    select from dbos.workflow_status where queue_name = queue.name and status = 'ENQUEUED'
    and (application_version = %s or application_version is null) and (application_name = %s or application_name is null)
)
"""


def make_queue_options(
    order: SubmittedRun, attributes: Mapping[str, object], *, release: str | None, queue: str | None = None
) -> dict[str, object]:
    """
    Return the options of DBOS that put an order on its queue.

    Args:
        order: The order.
        attributes: The attributes of its row.
        release: The release that runs it; ``None`` for the latest.
        queue: The queue; by default that of its depth.
    """
    # A queue for each depth: on a common queue, waiting parents would block the children that they wait for forever
    # (durable:U5).
    options: dict[str, object] = {
        "workflow_name": WORKFLOW,
        "queue_name": queue or queue_name(order.pool, len(order.spawns)),
        "workflow_id": order.id,
        "attributes": attributes,
    }
    options |= {"priority": order.priority} if order.priority else {}
    return options | ({} if release is None else {"app_version": release})


class Queues:
    """
    The queues of one worker.

    Args:
        app: The deployment's name.
        release: The release of the worker.

    Raises:
        StepEngineError: when the installed package takes runs in another way.
    """

    def __init__(self, app: str, release: str) -> None:
        from dbos import _dbos, _queue

        turn, instance = getattr(_queue, "queue_worker_thread", None), getattr(_dbos, "_get_dbos_instance", None)
        if turn is None or instance is None:
            msg = "the queues of this version of dbos are not supported; use dbos>=3.4,<3.5"
            raise StepEngineError(msg)
        self._turn: Callable[[Any, Any, Any], None] = turn
        self._instance: Callable[[], Any] = instance
        self._known = app, release
        self._queues: dict[str, Any] = {}
        self._pauses: dict[str, float] = {}
        self._due: dict[str, float] = {}
        self._busy: set[str] = set()
        self._is_closed = False
        self._at_rest = asyncio.Event()
        self._at_rest.set()

    def add_queue(self, queue: Any, pause: float) -> None:
        """Add a registered queue, from which runs are taken at most every *pause* seconds."""
        self._queues[queue.name] = queue
        self._pauses[queue.name] = pause

    @property
    def next_poll_seconds(self) -> float:
        """The seconds until the queues are polled next, with a new random jitter at each access."""
        return min([MAX_LOOK_SECONDS, *self._pauses.values()]) * random.uniform(0.95, 1.05)  # noqa: S311 - no secret

    async def start_dequeuing(self, connection: Any) -> None:
        """Start to dequeue runs from all queues that are not empty according to *connection*."""
        now = asyncio.get_running_loop().time()
        due = [name for name in self._queues if name not in self._busy and self._due.get(name, now) <= now]
        if not due or self._is_closed:
            return
        app, release = self._known
        for (name,) in await (await connection.execute(FULL, (due, release, app))).fetchall():
            self._due[name] = now + self._pauses[name]
            self._busy.add(name)
            self._at_rest.clear()
            # Whoever is stuck there while the database is away must not keep the process from ending.
            threading.Thread(
                target=self._run_queue_loop_once, args=(name, asyncio.get_running_loop()), daemon=True
            ).start()

    def _run_queue_loop_once(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Take runs from a queue once, in this thread, and mark it as idle in *loop*."""
        try:
            self._turn(_StopAfterOneTurn(), self._instance(), self._queues[name])
        finally:
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now, where this was waited for in vain
                loop.call_soon_threadsafe(self._mark_idle, name)

    def _mark_idle(self, name: str) -> None:
        """Record that a queue is no longer read, and wake whoever waits until none is."""
        self._busy.discard(name)
        if not self._busy:
            self._at_rest.set()

    async def close(self, seconds: float) -> None:
        """Take no more runs, and wait up to *seconds* for those being taken."""
        self._is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._at_rest.wait()


class _StopAfterOneTurn:
    """A stop event whose second ``wait()`` returns True, so that the queue loop runs once."""

    def __init__(self) -> None:
        self._has_waited = False

    def is_set(self) -> bool:
        """Return ``False``, so that the loop starts; ``wait`` ends it."""
        return False

    def wait(self, timeout: float | None = None) -> bool:
        """Return ``False`` at the first call and ``True`` from the second on, at once; *timeout* is ignored."""
        del timeout
        waited, self._has_waited = self._has_waited, True
        return waited
