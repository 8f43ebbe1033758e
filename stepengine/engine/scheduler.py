"""
``Scheduler``: starts agents at the times of their schedules, each time once, as recorded runs.

Of the processes that look after the same runs the one that claims a time starts it. The name of a run's journal follows from schedule
and time, so that a time whose claimant died before there was a journal is started by the next who looks, and by one of them: a
journal is begun once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import attrs
from attrs import frozen

from stepengine.data.state import RunResult, RunStatus
from stepengine.engine.schedule_book import CLAIMED, STARTED, ClaimedTime, KnownSchedule, ScheduleBook
from stepengine.engine.schedules import Schedule, list_newest_times, make_run_metadata, require_unique_ids
from stepengine.engine.waker import LEASE
from stepengine.errors import (
    DefinitionError,
    JournalCorrupt,
    JournalError,
    JournalLocked,
    JournalVersion,
    StepEngineError,
)
from stepengine.journal.files import FileJournal
from stepengine.journal.show import get_run_status
from stepengine.journal.sleepers import open_wake_index
from stepengine.journal.sources import parse_database_path
from stepengine.journal.sqlite import SqliteJournal
from stepengine.journal.store import Journal
from stepengine.runtime.clock import SystemClock, TimeSource
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.logs import LOGGER

if TYPE_CHECKING:
    from stepengine.engine.engine import Engine

# A clock that is set, and a machine that slept, are noticed within this time.
MAX_LOOK_SECONDS = 60.0
MAX_LATE_SECONDS = 300.0
"""A restart of the program or the machine takes less; a time that is missed by more counts as missed."""
MAX_RUNS = 8
"""Below the usual limits of concurrent requests for one account; many schedules start at the full hour."""
LIVE = (CLAIMED, STARTED, "suspended")


@frozen
class DueTime:
    """
    A time of a schedule that is due.

    Attributes:
        schedule: The schedule.
        at: The time that is to be started, in UTC.
        missed: The earlier times at which no scheduler ran and which are not started; the newest 1,000 at most.
    """

    schedule: Schedule
    at: datetime
    missed: tuple[datetime, ...] = ()

    @property
    def run(self) -> str:
        """The name of the run of this time."""
        return f"{self.schedule.id}-{self.at:%Y%m%dT%H%M%SZ}"


@frozen
class ScheduledRun:
    """
    A run that was started.

    Attributes:
        due: The schedule and its time.
        journal: The run's journal; it is there once the run has begun.
        handle: The run.
    """

    due: DueTime
    journal: Journal
    handle: RunHandle


@frozen
class ScheduleStatus:
    """
    The status of a schedule: its next time, its last run, and the times that were missed.

    Attributes:
        schedule: The schedule.
        next: The next time in UTC; ``None`` if the schedule is not enabled or has no time in the next 50 years.
        last: The newest started time, with the status of its run.
        missed: The total number of missed times.
        newest_missed: The newest missed time.
    """

    schedule: Schedule
    next: datetime | None
    last: ClaimedTime | None = None
    missed: int = 0
    newest_missed: datetime | None = None


class AnyScheduleBook(Protocol):
    """The methods of a ``ScheduleBook``, which may be in another store."""

    def register_and_get_decided_times(self, lines: Mapping[str, str], now: datetime) -> dict[str, datetime]:
        """Return up to when each schedule's times are decided; for a new or changed schedule that is *now*."""

    def claim_time(self, schedule: str, at: datetime, *, run: str, missed: tuple[datetime, ...] = ()) -> bool:
        """Claim a time; return whether it was unclaimed."""

    def skip_times_until(self, schedule: str, until: datetime, *, missed: tuple[datetime, ...] = ()) -> bool:
        """Skip all times up to *until*; return whether this had not been decided before."""

    def load_unstarted_claims(self) -> tuple[ClaimedTime, ...]:
        """Return the times that were claimed but have no reported journal."""

    def set_run_status(self, schedule: str, at: datetime, status: str, error: str = "") -> None:
        """Record the status and the error of the run of a claimed time."""

    def load_known_schedules(self) -> dict[str, KnownSchedule]:
        """Return the recorded state of each schedule by id."""


class Scheduler:
    """
    Starts agents at the times of their schedules. ``async with`` does so in the background; ``tick`` once, ``run_forever`` until cancelled.

    Started runs belong to the engine: they continue when the scheduler exits, and end with ``engine.aclose()``. A run whose process
    died is due for a ``Waker`` one minute after its start.

    Args:
        engine: The engine of the runs. Setting the attribute to another engine affects later runs.
        schedules: The schedules; their ids are unique.
        runs: The store of the runs and of the started times: a folder, or an SQLite file such as ``RUNS.db``.
        clock: The source of time; by default the machine's clock.
        at_once: The maximum number of concurrent runs. Further due runs start when one of them has ended.
        tell: Called for each started run with its name, its agent and its handle.

    Raises:
        AgentError: When the engine has no agent that a schedule names.
        DefinitionError: When two schedules have the same id.
    """

    def __init__(
        self,
        engine: Engine,
        schedules: Iterable[Schedule] = (),
        *,
        runs: str | Path,
        clock: TimeSource | None = None,
        at_once: int = MAX_RUNS,
        tell: Callable[[str, str, RunHandle], Awaitable[object]] | None = None,
    ) -> None:
        if type(at_once) is not int or at_once < 1:
            msg = f"Scheduler(at_once=...) must be the number of concurrent runs, at least 1, not {at_once!r}"
            raise DefinitionError(msg)
        self.book: AnyScheduleBook = ScheduleBook(runs)
        self.engine = engine
        self._runs = Path(runs)
        self._clock = clock or SystemClock()
        self._at_once = at_once
        self._tell = tell
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._ticking = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._schedules: dict[str, Schedule] = {}
        self.replace(schedules)

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedules."""
        return tuple(self._schedules.values())

    def replace(self, schedules: Iterable[Schedule]) -> None:
        """Use these schedules from now on; raise as the constructor does, and change nothing then."""
        found = require_unique_ids(schedules)
        for schedule in found:
            if isinstance(schedule.agent, str):
                self.engine.agent(schedule.agent)
        self._schedules = {schedule.id: schedule for schedule in found}
        self._changed.set()

    # --- what is due --------------------------------------------------------------------------------------------------

    def collect_due_and_skip_missed(self, now: datetime) -> list[DueTime]:
        """
        Return the due times to start now, oldest first, and record the missed times, which are only reported, as skipped.

        Raises:
            JournalError: when the book of what was started cannot be used.
        """
        passed = self.book.register_and_get_decided_times({s.id: f"{s.line} {s.timezone}" for s in self.schedules}, now)
        return sorted(
            [due for s in self.schedules for due in self._find_due_and_skip_missed(s, passed[s.id], now)],
            key=lambda due: due.at,
        )

    def _find_due_and_skip_missed(self, schedule: Schedule, passed: datetime, now: datetime) -> Sequence[DueTime]:
        """Return the due times of one schedule to start now; skip its times while it is disabled, or as ``catch_up`` says."""
        if not schedule.enabled:
            self.book.skip_times_until(schedule.id, now)
            return ()
        times = list_newest_times(schedule, passed, now)
        if not times:
            return ()
        if schedule.catch_up == "all":
            return [DueTime(schedule, at) for at in times]
        is_late = now - times[-1] > timedelta(seconds=MAX_LATE_SECONDS)
        if schedule.catch_up == "none" and is_late:
            if self.book.skip_times_until(schedule.id, times[-1], missed=times):
                _log_missed_times(schedule, times)
            return ()
        return [DueTime(schedule, times[-1], times[:-1])]

    async def tick(self, now: datetime | None = None) -> list[ScheduledRun]:
        """
        Start the runs that are due, and return them without waiting for their ends.

        If a run cannot be started, the error is logged and stored as its status, and the other runs are started.

        Args:
            now: The present moment; by default what the clock says.

        Raises:
            JournalError: when the book of what was started cannot be used; runs that were started before continue.
        """
        async with self._ticking:
            moment = now or self._clock.now()
            begun = [await self._start_due_run(due) for due in await asyncio.to_thread(self._recover_unstarted_claims)]
            for due in await asyncio.to_thread(self.collect_due_and_skip_missed, moment):
                if len(self._under_way) >= self._at_once:
                    break
                claim = asyncio.to_thread(self.book.claim_time, due.schedule.id, due.at, run=due.run, missed=due.missed)
                if await claim:
                    _log_missed_times(due.schedule, due.missed)
                    begun.append(await self._start_due_run(due))
            return [started for started in begun if started is not None]

    def _recover_unstarted_claims(self) -> list[DueTime]:
        """Return claimed times without a started journal; those with a journal are marked as started."""
        found: list[DueTime] = []
        for ran in self.book.load_unstarted_claims():
            schedule = self._schedules.get(ran.schedule)
            if ran.run in self._under_way or schedule is None:
                continue
            try:
                is_begun = _read_run_id(_make_run_journal(self._runs, ran.run)) != ""
            except JournalError as error:  # whether there is a run is not known: the next look says so
                LOGGER.warning("schedule %r: %s", ran.schedule, error)
                continue
            if is_begun:
                self.book.set_run_status(ran.schedule, ran.at, STARTED)
            elif len(found) + len(self._under_way) < self._at_once:
                found.append(DueTime(schedule, ran.at))
        return found

    # --- starting -----------------------------------------------------------------------------------------------------

    async def _start_due_run(self, due: DueTime) -> ScheduledRun | None:
        """Start the run of a due time and record its end in the background; return ``None``, and log the error, if it fails to start."""
        # While it is under way its journal is locked, and a waker that comes too early puts it off.
        await asyncio.to_thread(self._store_or_remove_wake_time, due, self._clock.now() + LEASE)
        schedule, journal = due.schedule, _make_run_journal(self._runs, due.run)
        metadata = make_run_metadata(schedule, due.at, len(due.missed))
        started: ScheduledRun | None = None
        try:
            handle = self.engine.start(
                schedule.agent, schedule.prompt, params=schedule.params, metadata=metadata, journal=journal
            )
        except Exception as error:  # noqa: BLE001 - whatever one schedule is wrong about, the others go on
            watch = self._report_run_error(due, journal, "", error)
        else:
            started = ScheduledRun(due, journal, handle)
            watch = self._wait_and_record_run_end(started)
        self._under_way[due.run] = asyncio.create_task(watch)
        self._under_way[due.run].add_done_callback(lambda _: self._forget_run(due.run))
        if started is not None:
            await self._notify_of_started_run(started)
        return started

    async def _notify_of_started_run(self, started: ScheduledRun) -> None:
        """Call ``tell``; if it raises, log the error, since the run continues."""
        due, handle = started.due, started.handle
        try:
            if self._tell is not None:
                await self._tell(due.run, handle.agent_id, handle)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is not an error of the run
            LOGGER.error(
                "the run %s of schedule %r was started and continues, but `tell` of the Scheduler raised %s: %s",
                due.run,
                due.schedule.id,
                type(error).__name__,
                error,
            )

    def _store_or_remove_wake_time(self, due: DueTime, wakes_at: datetime | None) -> None:
        """Store from when other processes may resume this run; ``None`` removes the entry of an ended run."""
        is_database = parse_database_path(str(self._runs)) is not None
        run, agent = due.run if is_database else f"{due.run}.jsonl", due.schedule.agent
        try:
            with open_wake_index(self._runs) as index:
                if wakes_at is None:
                    index.remove_run(run)
                else:
                    index.record_sleep(run, wakes_at, ("process",), agent if isinstance(agent, str) else agent.id)
        except StepEngineError as error:
            LOGGER.warning(
                "run %s of schedule %r: if its process dies, no other process will resume it: %s",
                due.run,
                due.schedule.id,
                error,
            )

    def _forget_run(self, run: str) -> None:
        """Remove an ended run from the running ones, and wake the loop, which may start another run now."""
        self._under_way.pop(run, None)
        self._changed.set()

    async def _wait_and_record_run_end(self, started: ScheduledRun) -> None:
        """Wait for the end of a run, log its error, store its status, and remove its wake time unless it is suspended."""
        due = started.due
        try:
            result: RunResult = await started.handle.result()
        except Exception as error:  # noqa: BLE001 - as in `_start_due_run`
            await self._report_run_error(due, started.journal, started.handle.run_id, error)
            return
        if isinstance(result.error, JournalError):
            await self._report_run_error(due, started.journal, started.handle.run_id, result.error)
            return
        if result.status is not RunStatus.SUSPENDED:
            await asyncio.to_thread(self._store_or_remove_wake_time, due, None)
        if result.error is not None:
            LOGGER.error("the run %s of schedule %r failed: %s", due.run, due.schedule.id, result.error)
        await self._store_run_status(due, result.status.value, "" if result.error is None else str(result.error))

    async def _report_run_error(self, due: DueTime, journal: Journal, run_id: str, error: Exception) -> None:
        """Log an error and store it as the status ``failed``, unless another process has this journal."""
        if isinstance(error, JournalLocked):
            return
        if isinstance(error, JournalError):
            with contextlib.suppress(JournalError):
                if await asyncio.to_thread(_read_run_id, journal) not in ("", run_id):
                    return
        LOGGER.error("the run of schedule %r for %s failed: %s", due.schedule.id, due.at.isoformat(), error)
        await self._store_run_status(due, "failed", str(error))

    async def _store_run_status(self, due: DueTime, status: str, error: str = "") -> None:
        """Store the status of a run in the book; log a book that cannot be used."""
        try:
            await asyncio.to_thread(self.book.set_run_status, due.schedule.id, due.at, status, error)
        except JournalError as problem:  # the journal says the same
            LOGGER.warning("%s", problem)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def run_forever(self) -> None:
        """Start due runs until this is cancelled; an error is logged, and the next attempt follows."""
        while True:
            self._changed.clear()
            now = self._clock.now()
            try:
                await self.tick(now)
            except JournalError as error:
                LOGGER.error("%s", error)
            except Exception:  # noqa: BLE001 - whatever it is, nobody waits for this loop, and no other schedule is to be lost
                LOGGER.exception("the scheduler failed to check its schedules; it retries within a minute")
            await self._wait_for_next_time(now)

    async def wait_until_idle(self) -> None:
        """Wait until all runs that this scheduler started have ended."""
        while self._under_way:
            await asyncio.wait(list(self._under_way.values()))
            await asyncio.sleep(0)

    def next_after(self, moment: datetime) -> datetime | None:
        """Return the earliest next time of the enabled schedules."""
        times = [comes for s in self.schedules if s.enabled and (comes := s.next_after(moment)) is not None]
        return min(times, default=None)

    async def _wait_for_next_time(self, last_check: datetime) -> None:
        """Wait until the next time after *last_check*, a change of schedules, or the end of a run, for one minute at most."""
        # From when it was looked: a time that came since then is one, too.
        comes, seconds = self.next_after(last_check), MAX_LOOK_SECONDS
        if comes is not None:
            seconds = max(0.0, min(seconds, (comes - self._clock.now()).total_seconds()))
        waits = [asyncio.ensure_future(self._clock.sleep(seconds)), asyncio.ensure_future(self._changed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self._loop = asyncio.create_task(self.run_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop


def load_schedule_statuses(schedules: Iterable[Schedule], *, runs: str | Path, now: datetime) -> list[ScheduleStatus]:
    """
    Return the status of each schedule whose runs are recorded in *runs*; nothing is changed or created.

    Raises:
        JournalError: when the book of what was started cannot be used.
    """
    return make_schedule_statuses(
        schedules, ScheduleBook(runs).load_known_schedules(), now, lambda ran: _with_journal_status(ran, Path(runs))
    )


def make_schedule_statuses(
    schedules: Iterable[Schedule],
    records: Mapping[str, KnownSchedule],
    now: datetime,
    update: Callable[[ClaimedTime], ClaimedTime],
) -> list[ScheduleStatus]:
    """Return schedules' statuses from a book's records; *update* returns a time with the status in its run's journal."""
    found: list[ScheduleStatus] = []
    for schedule in require_unique_ids(schedules):
        comes = schedule.next_after(now) if schedule.enabled else None
        known = records.get(schedule.id, KnownSchedule(now))
        last = known.last and update(known.last)
        found.append(ScheduleStatus(schedule, comes, last, known.missed, known.newest_missed))
    return found


def _with_journal_status(claimed: ClaimedTime, runs: Path) -> ClaimedTime:
    """Return a time with the status in its journal: a run that waited for a person may have been resumed."""
    journal = _make_run_journal(runs, claimed.run)
    try:
        if claimed.status not in LIVE or not _read_run_id(journal):
            return claimed
        return attrs.evolve(claimed, status=get_run_status(journal.history()))
    except JournalError as error:
        return attrs.evolve(claimed, status="unreadable", error=error.message)


def _make_run_journal(runs: Path, run: str) -> Journal:
    """Return the journal of a run in the folder or SQLite file *runs*, new or not."""
    is_database = parse_database_path(str(runs)) is not None
    return SqliteJournal(runs, run) if is_database else FileJournal(runs / f"{run}.jsonl")


def _read_run_id(journal: Journal) -> str:
    """
    Return the run id in a journal: ``""`` for none or a first line being written, ``"?"`` if unreadable.

    Raises:
        JournalError: when that cannot be known now.
    """
    try:
        head = journal.history().head if journal.is_there() else None
    except (JournalCorrupt, JournalVersion):
        return "?"
    return "" if head is None else head.run


def _log_missed_times(schedule: Schedule, missed: tuple[datetime, ...]) -> None:
    if missed:
        first, last = schedule.local(missed[0]).isoformat(), schedule.local(missed[-1]).isoformat()
        span = last if len(missed) == 1 else f"{first} to {last}"
        LOGGER.warning(
            "schedule %r missed %s time(s), %s: no scheduler was running", schedule.id, f"{len(missed):,}", span
        )
