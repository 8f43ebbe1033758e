"""``LiveRuns``: the handles of the runs that this process executes, and of those that ended here a short time ago."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import JournalError
from stepengine.journal.sleepers import read_wake_row
from stepengine.server.background_tasks import BackgroundTasks
from stepengine.server.ended_runs import EndedRuns
from stepengine.server.ledger import RunRow, make_store_conversation_state_act, make_store_status_act, make_suspend_act
from stepengine.server.owner_shares import OwnerShares
from stepengine.server.problems import Problem
from stepengine.server.run_requests import require_not_closing
from stepengine.server.stored_states import encode_state_with_references

if TYPE_CHECKING:
    from stepengine.runtime.handle import RunHandle
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.run_store import RunStore

RESERVE = 0.25
"""The part of the free room that the runs of one owner leave to others, as for its event streams (`Caps.reserve`)."""
RUNNING = ("started", "running")
"""The statuses of a run that some process executes, or is about to."""


class LiveRuns:
    """
    The runs of this process, from the start or resume of each until its end is in the ledger.

    Args:
        store: The journals and the ledger.
        engines: The current engine, and the replaced ones.
        max_live: The most runs that may be executed at a time.
        drain: Seconds that the runs may continue when the server stops.
        resume: Resumes a suspended run that got a message while it was being suspended.

    Attributes:
        handles: The handles of the runs that are executed, by run id.
        is_closing: Whether the server shuts down and starts nothing more.
        tasks: The background tasks of the server.
    """

    def __init__(
        self,
        store: RunStore,
        engines: CurrentEngine,
        *,
        max_live: int,
        drain: float,
        resume: Callable[[RunRow], Coroutine[Any, Any, None]],
    ) -> None:
        self.handles: dict[str, RunHandle] = {}
        self.is_closing = False
        self.tasks = BackgroundTasks()
        self._store = store
        self._engines = engines
        self._max_live = max_live
        self._drain = drain
        self._shares = OwnerShares(max_live, RESERVE)
        self._slots: dict[str, ExitStack] = {}
        self._reserved = 0
        self._resume = resume
        self._ended = EndedRuns()
        self._ended_at: dict[str, float] = {}
        self._resumed: set[str] = set()
        self._watching: dict[str, asyncio.Task[Any]] = {}

    def __contains__(self, run: object) -> bool:
        return run in self.handles

    def __len__(self) -> int:
        return len(self.handles)

    @property
    def open_question_count(self) -> int:
        """The number of unanswered questions of these runs."""
        return sum([len(handle.questions) for handle in list(self.handles.values())])

    def has_room(self) -> bool:
        """Return whether one more run may start: fewer than *max_live* are open or about to, and the server is not closing."""
        return len(self.handles) + self._reserved < self._max_live and not self.is_closing

    def has_room_for(self, owner: str) -> bool:
        """Return whether one more run of an owner may start, and still leave room for other owners."""
        return self.has_room() and self._shares.has_room(owner)

    def require_room(self, owner: str) -> None:
        """Raise ``Problem`` if no run of *owner* may start here now."""
        require_not_closing(is_closing=self.is_closing)
        # Refused and not queued: the client knows best whether waiting makes sense, and a queue in memory is lost with
        # the process.
        if not self.has_room():
            msg = f"{self._max_live:,} runs are running, which is the maximum of this server; try again in a moment"
            raise Problem(msg, status=429, kind="too_many_runs", headers={"retry-after": "5"})
        if not self._shares.has_room(owner):
            count = self._shares.count_used_slots(owner)
            msg = (
                f"{count:,} runs of this caller are running, and the remaining capacity is reserved for other callers; "
                "wait until some of them end, or cancel them"
            )
            raise Problem(msg, status=429, kind="too_many_at_once", headers={"retry-after": "5"})

    @contextmanager
    def reserve_room(self, owner: str) -> Iterator[None]:
        """
        Reserve room for a run of *owner* within the block, which adds the run.

        Raises:
            Problem: If no run of *owner* may start here now.
        """
        self.require_room(owner)
        # A start waits for the disk before its run is added: all requests that arrive meanwhile would find the same room.
        self._reserved += 1
        try:
            with self._shares.use_slot(owner):
                yield
        finally:
            self._reserved -= 1

    # --- from the start of a run to its end ----------------------------------------------------------------------------

    def add_and_watch_run(self, run: str, handle: RunHandle, owner: str, *, is_resumed: bool = False) -> None:
        """Add a started or resumed run of *owner*, and start a task that records its end in the ledger."""
        self._forget_ended_run(run)
        self._free_slot(run)
        self.handles[run] = handle
        self._slots[run] = slot = ExitStack()
        slot.enter_context(self._shares.use_slot(owner))
        if is_resumed:
            self._resumed.add(run)
        self._watching[run] = task = self.tasks.spawn(self._finish_run_when_ended(run, handle))
        task.add_done_callback(lambda _: self._watching.get(run) is task and self._watching.pop(run))

    def _forget_ended_run(self, run: str) -> None:
        """Remove the handle of an ended run, its end time, and the mark that this process resumed it."""
        self._ended.remove(run)
        self._ended_at.pop(run, None)
        self._resumed.discard(run)

    def _free_slot(self, run: str) -> None:
        """Free the slot of a run in the share of its owner, if it has one."""
        slot = self._slots.pop(run, None)
        if slot is not None:
            slot.close()

    async def _finish_run_when_ended(self, run: str, handle: RunHandle) -> None:
        """
        Wait until a run ends, free its slot, and store its end in the ledger.

        A suspended run with new messages is resumed instead. A run that could not be resumed is recorded as a failed resume. A run that
        shutdown interrupted is left for the next process.
        """
        error: BaseException | None = None
        try:
            result: RunResult | None = await handle.result()
        except asyncio.CancelledError:
            raise
        except Exception as problem:  # noqa: BLE001 - a divergence or a broken agent is recorded in the ledger
            result, error = None, problem
        self.handles.pop(run, None)
        self._free_slot(run)
        if self._engines.has_replaced_engines:
            self.tasks.spawn(self._engines.close_idle_replaced_engines())
        self._store_handle_and_evict_old(run, handle)
        if result is not None:
            error = await self._find_resume_error(run, result)
        if error is not None:
            await self._store.record_failed_resume(run, error)
        # A run that shutdown cut off is resumed by the next process, so no end is recorded.
        elif result is not None and not (self.is_closing and result.status is RunStatus.CANCELLED):
            await self._record_end_or_resume(run, handle, result)
        size = await asyncio.to_thread(self._store.journal(run).size)
        if self._ended.get(run) is handle:
            self._store_handle_and_evict_old(run, handle, size)

    async def _find_resume_error(self, run: str, result: RunResult) -> BaseException | None:
        """Return the error because of which a run could not be resumed; ``None`` if its journal has the end."""
        if isinstance(result.error, JournalError):
            return result.error
        # A failed extension leaves the journal as it was.
        row = await self._store.find(run) if result.status is RunStatus.FAILED else None
        return result.error if row is not None and row.status == "stranded" else None

    def _store_handle_and_evict_old(self, run: str, handle: RunHandle, size: int = 0) -> None:
        """Store the handle of an ended run, and remove the oldest ones above the limits of number and size."""
        self._ended.put(run, handle, size)
        for one in self._ended.list_excess_runs():
            self._forget_ended_run(one)

    async def _record_end_or_resume(self, run: str, handle: RunHandle, result: RunResult) -> None:
        """
        Store the conversation state and the end or suspension of a run.

        A suspended run for which a message arrived in the meantime is resumed instead.
        """
        if handle.session_id is not None:
            left = await asyncio.to_thread(encode_state_with_references, result.state, self._store.journal(run))
            await self._store.write(
                make_store_conversation_state_act(handle.session_id, run, result.status.value, left)
            )
        now = time.time()
        if result.status is RunStatus.SUSPENDED:
            # In this order: the counter shows messages that arrive after it was read, the mailbox those from before. If
            # this process dies in between, the ledger still says "running", and the next sweep resumes the run.
            woken = await asyncio.to_thread(self._store.ledger.count_messages_since_suspend, run)
            has_mail = woken > 0 and await asyncio.to_thread(self._is_due_now, run)
            if has_mail or not await self._store.write(make_suspend_act(run, now, woken)):
                row = await self._store.find(run)
                if row is not None:
                    self.tasks.spawn(self._resume(row))
                return
        else:
            await self._store.write(make_store_status_act(run, result.status.value, now))
        if self._ended.get(run) is handle:
            self._ended_at[run] = now

    def _is_due_now(self, run: str) -> bool:
        """Return whether a suspended run has unread messages, or its waiting time is over."""
        found = read_wake_row(self._store.journal(run), run)
        return found is not None and found.wakes_at is not None and found.wakes_at.timestamp() <= time.time()

    def has_run_without_recorded_end(self, run: str) -> bool:
        """Return whether this process started or resumed the run and has not stored its end in the ledger yet."""
        return run in self._watching

    async def wait_until_end_recorded(self, run: str) -> None:
        """Wait until the end of a run of this process is in the ledger; return at once if there is none to store."""
        task = self._watching.get(run)
        if task is not None:
            await asyncio.wait((task,))

    async def wait_for_run_ends(self) -> list[asyncio.Future[Any]]:
        """Wait up to *drain* seconds for the ends of the runs; return the futures of their ends, some of which may be unfinished."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(handle.wait()) for handle in self.handles.values()]
        if waits:
            await asyncio.wait(waits, timeout=self._drain)
        return waits

    async def interrupt_all(self) -> None:
        """Interrupt the executing runs, and wait until each has stopped. The next process resumes them."""
        await asyncio.gather(*[handle.shutdown() for handle in self.handles.values()])

    # --- the handles that have the events of a run ---------------------------------------------------------------------

    def find_ended_handle(self, run: str) -> RunHandle | None:
        """Return the handle of a run that ended in this process, if it is still in memory; else ``None``."""
        return self._ended.get(run)

    def was_resumed_here(self, run: str) -> bool:
        """Return whether this process resumed the run, so that its handle lacks the events from before."""
        return run in self._resumed

    def find_newest_handle(self, row: RunRow) -> RunHandle | None:
        """Return the handle that has the newest events of a run, or ``None`` if another process has them."""
        handle, ended = self.handles.get(row.run), self._ended_at.get(row.run, math.inf)
        # Another server may have resumed a run that was suspended here; and the row of one that just ended may be older.
        is_newest = row.changed < ended or (row.changed == ended and row.status not in RUNNING)
        return handle if handle is not None or not is_newest else self._ended.get(row.run)

    def find_complete_handle(self, row: RunRow) -> RunHandle | None:
        """Return the handle that has all events of a run, pieces of texts included; ``None`` if there is none here."""
        return self.find_newest_handle(row) if row.run not in self._resumed else None
