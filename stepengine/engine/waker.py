"""
``Waker``: resumes the due runs of a folder or database.

Any number of wakers may work on one place: a run belongs to whoever has its journal's lock. Before a run is resumed its next try is
noted, so that one whose waker is killed is due again; whoever resumes it then finds in the record what was done. Lives here: when and in
which order. Must not be here: where agents come from, and what is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.state import RunResult, RunStatus
from stepengine.errors import JournalLocked, JournalMissing, StepEngineError
from stepengine.journal.sleepers import open_journal, open_wake_index, read_wake_row
from stepengine.runtime.clock import SystemClock, TimeSource
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from stepengine.journal import Journal
    from stepengine.journal.wake_index import Sleeping

Resume: TypeAlias = "Callable[[Journal, Sleeping], Awaitable[RunResult]]"
"""Goes on with the run of a journal, to its end or until it is suspended again."""

LEASE = timedelta(seconds=60)
"""After how long a run that a killed waker had is tried again."""
FIRST_PAUSE_SECONDS = 5.0
"""A provider that refused, or a file that was locked, is often usable again after some seconds."""
MAX_PAUSE_SECONDS = 3600.0
"""A run that fails for good costs one attempt in an hour, and one whose cause is mended resumes within the hour."""
MAX_DOUBLINGS = 20
"""Five seconds doubled so often are far above the longest pause; a power of two beyond 1,023 is no float."""
MIN_PAUSE_SECONDS = 0.01
"""A run that is due now is found again at once, without a loop that takes all of a processor."""
MAX_RUNS = 4
"""After a night many runs are due together: four keep model providers below their limits, and none waits long."""
BATCH_RUNS = 100
"""More than can be started until the next look; a folder with a million sleeping runs is not read whole."""


@frozen(kw_only=True)
class WakeResult:
    """
    The result of an attempt to resume a run that was due.

    Attributes:
        run: The name of the run in its store: of a file, or of a run in a database.
        agent_id: The agent of the root run.
        state: ``"woken"``: the run was resumed. ``"held"``: another process has it. ``"failed"``: it could not be resumed.
            ``"gone"``: its journal no longer exists.
        due: The time at which the run was due; ``None`` if it was resumed because of a message or an answer.
        result: The result of a resumed run, which may be suspended again.
        error: The reason why the run could not be resumed.
        again_at: The time of the next attempt.
    """

    run: str
    agent_id: str
    state: Literal["woken", "held", "failed", "gone"]
    due: datetime | None = None
    result: RunResult | None = None
    error: BaseException | None = None
    again_at: datetime | None = None


class Waker:
    """
    Resumes due runs.

    Args:
        place: A folder of journals, or an SQLite file of journals.
        resume: Resumes one run.
        journals: The journals of a store that is not *place*, by the names that their ``wake_place`` returns. *place* then has only their
            wake times.
        tell: Called in the event loop with the result of each due run.
        at_once: The maximum number of concurrent runs.
        clock: The source of time.

    Raises:
        JournalError: for a place that is neither.
    """

    def __init__(
        self,
        place: str | Path,
        resume: Resume,
        *,
        journals: Mapping[str, Journal] | None = None,
        tell: Callable[[WakeResult], object] = id,
        at_once: int = MAX_RUNS,
        clock: TimeSource | None = None,
    ) -> None:
        self._place = Path(place)
        self._journals = journals
        self._index = open_wake_index(place, journals)
        self._resume = resume
        self._tell = tell
        self._at_once = at_once
        self._clock = clock or SystemClock()
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._tries: dict[str, int] = {}

    async def once(self) -> None:
        """Resume every run that is due now, each once, wait for all of them, and close the index."""
        now = self._clock.now()
        seen: set[str] = set()
        try:
            while True:
                due = await asyncio.to_thread(self._index.list_due, now, BATCH_RUNS + len(seen))
                new = [sleeping for sleeping in due if sleeping.run not in seen]
                if not new:
                    break
                for sleeping in new:
                    await self._wait_until_fewer_than(self._at_once)
                    seen.add(sleeping.run)
                    self._start_resume_task(sleeping)
                # Those that begun have put themselves off before the next look, or are in `seen`.
            await self._wait_until_fewer_than(1)
        finally:
            await self._cancel_and_close()

    async def watch(self, every: float = 1.0) -> None:
        """
        Resume runs as they become due, until this is cancelled; then close the index.

        Args:
            every: Seconds between two looks at the index while nothing is due by time before that.
        """
        try:
            while True:
                pause = every
                try:
                    pause = await self._resume_due_runs(every)
                except StepEngineError as error:
                    self._notify(WakeResult(run="", agent_id="", state="failed", error=error))
                if self._under_way:
                    tasks = list(self._under_way.values())
                    await asyncio.wait(tasks, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.sleep(pause)
        finally:
            await self._cancel_and_close()

    async def _resume_due_runs(self, max_pause: float) -> float:
        """Resume due runs up to the limit; return the seconds to wait before the next call, at most *max_pause*."""
        room = self._at_once - len(self._under_way)
        if room <= 0:
            return max_pause
        now = self._clock.now()
        for sleeping in await asyncio.to_thread(self._index.list_due, now, room + len(self._under_way)):
            if sleeping.run in self._under_way:
                # It takes long, or something came for it that it takes in by itself.
                await self._set_wake_time(sleeping.run, LEASE)
            elif len(self._under_way) < self._at_once:
                self._start_resume_task(sleeping)
        next_at = await asyncio.to_thread(self._index.find_next_wake_time)
        if next_at is None or len(self._under_way) >= self._at_once:
            return max_pause
        return min(max_pause, max(MIN_PAUSE_SECONDS, (next_at - self._clock.now()).total_seconds()))

    def _start_resume_task(self, sleeping: Sleeping) -> None:
        """Resume a run in a task, which counts as under way until it ends."""
        task = asyncio.create_task(self._resume_run(sleeping), name=f"wakes {sleeping.run}")
        self._under_way[sleeping.run] = task
        task.add_done_callback(lambda _: self._under_way.pop(sleeping.run, None))

    async def _wait_until_fewer_than(self, count: int) -> None:
        """Wait until this waker resumes fewer than *count* runs."""
        while len(self._under_way) >= count:
            await asyncio.wait(list(self._under_way.values()), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0)

    async def _cancel_and_close(self) -> None:
        """End the running resumes, and close the index."""
        for task in list(self._under_way.values()):
            task.cancel()
        await self._wait_until_fewer_than(1)
        self._index.close()

    # --- one run ------------------------------------------------------------------------------------------------------

    async def _resume_run(self, sleeping: Sleeping) -> None:
        """Resume a run, update the index, and report the result with ``tell``; after an error, only this run is postponed."""
        about = WakeResult(run=sleeping.run, agent_id=sleeping.agent_id, state="woken", due=sleeping.wakes_at)
        try:
            await self._set_wake_time(sleeping.run, LEASE)
            journal = await asyncio.to_thread(open_journal, self._place, sleeping.run, self._journals)
            result = await self._resume(journal, sleeping)
            again_at = await self._update_index_after_resume(sleeping, journal, result)
            outcome = attrs.evolve(about, result=result, again_at=again_at)
        except asyncio.CancelledError:
            # This waker ends, and not the run: the next one resumes it.
            await asyncio.to_thread(self._record_as_due_now, sleeping)
            raise
        except JournalMissing:
            await asyncio.to_thread(self._index.remove_run, sleeping.run)
            outcome = attrs.evolve(about, state="gone")
        except JournalLocked as error:
            # Whoever has it may be killed at any time, and then it is due within the time that he was given himself.
            again_at = await self._postpone_run(sleeping.run, LEASE.total_seconds())
            outcome = attrs.evolve(about, state="held", error=error, again_at=again_at)
        except Exception as error:  # noqa: BLE001 - an agent file, a hook, whatever: it stops no other run
            outcome = attrs.evolve(about, state="failed", error=error, again_at=await self._postpone_run(sleeping.run))
        self._notify(outcome)

    def _notify(self, outcome: WakeResult) -> None:
        """Call ``tell`` with the outcome of a run; an error that it raises is only logged."""
        try:
            self._tell(outcome)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not an error of the run
            LOGGER.error("run %s: `tell` of the Waker raised %s: %s", outcome.run, type(error).__name__, error)

    async def _update_index_after_resume(
        self, sleeping: Sleeping, journal: Journal, result: RunResult
    ) -> datetime | None:
        """Update the index after a run was resumed; return when it is retried, ``None`` if it made progress."""
        if result.status is RunStatus.SUSPENDED:
            stands_still = result.wakes_at is not None and result.wakes_at <= self._clock.now()
        else:
            # One whose end could not be written goes on from where it was.
            stands_still = await asyncio.to_thread(read_wake_row, journal, sleeping.run) is not None
            if not stands_still:
                await asyncio.to_thread(self._index.remove_run, sleeping.run)
        if stands_still:
            return await self._postpone_run(sleeping.run)
        self._tries.pop(sleeping.run, None)
        return None

    async def _postpone_run(self, run: str, longest: float = MAX_PAUSE_SECONDS) -> datetime | None:
        """Postpone a run, longer each time; return until when, or ``None`` if that cannot be stored."""
        tries = self._tries[run] = self._tries.get(run, 0) + 1
        pause = timedelta(seconds=min(longest, FIRST_PAUSE_SECONDS * 2 ** min(tries - 1, MAX_DOUBLINGS)))
        with contextlib.suppress(StepEngineError):
            return await self._set_wake_time(run, pause)
        return None

    async def _set_wake_time(self, run: str, pause: timedelta) -> datetime:
        until = self._clock.now().astimezone(UTC) + pause
        await asyncio.to_thread(self._index.postpone, run, until)
        return until

    def _record_as_due_now(self, sleeping: Sleeping) -> None:
        """Record that a run is due now; ignore an index that cannot be used."""
        with contextlib.suppress(StepEngineError):
            self._index.record_sleep(sleeping.run, self._clock.now(), sleeping.kinds, sleeping.agent_id)
