"""
``DurableScheduler``: submits agents at the times of their schedules.

A time is claimed in the database's book and submitted under the id that follows from schedule and time. If the worker dies between
the two, the next worker that looks submits the run: the same id again is the same run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime

import attrs

from stepengine.durable.engine import DurableEngine
from stepengine.durable.operator import Operator
from stepengine.durable.schedule_book import DatabaseBook
from stepengine.engine.schedule_book import STARTED, ClaimedTime
from stepengine.engine.scheduler import DueTime, ScheduledRun, Scheduler, ScheduleStatus, make_schedule_statuses
from stepengine.engine.schedules import Schedule, make_run_metadata
from stepengine.errors import DatabaseUnavailable, StepEngineError
from stepengine.runtime.clock import TimeSource
from stepengine.runtime.logs import LOGGER


class DurableScheduler(Scheduler):
    """
    Submits agents at the times of their schedules, each time once for each deployment and database.

    ``async with`` does so in the background, ``tick`` once. Every worker of a deployment may have one with the same schedules. A run's
    id is the schedule's with its time; it has ``metadata`` as any run of a schedule, and is otherwise like any submitted run.

    Args:
        engine: The open engine that submits the runs.
        schedules: The schedules; their ids are unique.
        clock: Date and sleep; the machine's by default.

    Raises:
        AgentError: when the engine has no agent that a schedule names.
        DefinitionError: when two schedules have one id.
    """

    def __init__(
        self, engine: DurableEngine, schedules: Iterable[Schedule] = (), *, clock: TimeSource | None = None
    ) -> None:
        super().__init__(engine.embedded_engine, schedules, runs="", clock=clock)
        self.book = DatabaseBook(engine.setting.url, app=engine.setting.app)
        self._durable = engine

    def _recover_unstarted_claims(self) -> list[DueTime]:
        """Return claimed times without a submitted run, because their worker died or has not submitted them yet."""
        known = {schedule.id: schedule for schedule in self.schedules}
        return [
            DueTime(known[ran.schedule], ran.at)
            for ran in self.book.load_unstarted_claims()
            if ran.schedule in known and ran.run not in self._under_way
        ]

    async def _start_due_run(self, due: DueTime) -> ScheduledRun | None:
        """Submit the run in the background, and return ``None``: it has no handle in this process."""
        # The database has the run once it is submitted, so no entry in the index of wake times is needed.
        self._under_way[due.run] = asyncio.create_task(self._submit_due_run(due))
        self._under_way[due.run].add_done_callback(lambda _: self._forget_run(due.run))
        return None

    async def _submit_due_run(self, due: DueTime) -> None:
        """Submit the run of a due time and store its status; log errors, and leave the time claimed if the database is unreachable."""
        schedule = due.schedule
        metadata = make_run_metadata(schedule, due.at, len(due.missed))
        try:
            await self._durable.submit(
                schedule.agent, schedule.prompt, id=due.run, params=schedule.params, metadata=metadata
            )
        except DatabaseUnavailable as error:
            LOGGER.warning("schedule %r: %s; its run is submitted when the database is back", schedule.id, error)
        except StepEngineError as error:
            LOGGER.error("schedule %r could not start its run of %s: %s", schedule.id, due.at.isoformat(), error)
            await self._store_run_status(due, "failed", str(error))
        else:
            await self._store_run_status(due, STARTED)


async def load_durable_schedule_statuses(
    operator: Operator, schedules: Iterable[Schedule], *, now: datetime
) -> list[ScheduleStatus]:
    """
    Return the state of schedules whose runs are in a deployment; nothing is changed or created.

    Of the last time ``status`` is the state of its run, as in ``DurableRunView.state``; ``"started"`` where the run is no more.

    Raises:
        JournalError: when the book of what was started cannot be used.
        DatabaseUnavailable: when the database cannot be reached.
    """
    told = await asyncio.to_thread(DatabaseBook(operator.url, app=operator.app).load_known_schedules)
    runs = [known.last.run for known in told.values() if known.last is not None]
    states = {view.id: view.state for view in await operator.deployment.find_runs(runs)}

    def with_run_state(claimed: ClaimedTime) -> ClaimedTime:
        return (
            attrs.evolve(claimed, status=states.get(claimed.run, claimed.status))
            if claimed.status == STARTED
            else claimed
        )

    return make_schedule_statuses(schedules, told, now, with_run_state)
