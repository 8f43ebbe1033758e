"""``RunSchedules``: starts the agents of a server at the times of their schedules."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from stepengine.engine.scheduler import Scheduler, ScheduleStatus, load_schedule_statuses

if TYPE_CHECKING:
    from stepengine.engine.schedules import Schedule
    from stepengine.server.current_engine import CurrentEngine
    from stepengine.server.run_launcher import RunLauncher
    from stepengine.server.run_store import RunStore


class RunSchedules:
    """
    The schedules of the agents of a server.

    Args:
        store: The journals.
        engines: The engine, whose successors the scheduler gets.
        launcher: Registers the runs that the scheduler starts.
        schedules: When agents are started.

    Raises:
        AgentError: If a schedule names an agent that the engine does not have.
        DefinitionError: If two schedules have the same id.
    """

    def __init__(
        self, store: RunStore, engines: CurrentEngine, launcher: RunLauncher, schedules: Iterable[Schedule]
    ) -> None:
        self._store = store
        self._schedules = tuple(schedules)
        if self._schedules:
            engines.scheduler = Scheduler(
                engines.engine, self._schedules, runs=store.place, tell=launcher.register_scheduled_run
            )
        self._scheduler = engines.scheduler
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start the scheduler if there are schedules."""
        if self._scheduler is not None:
            await self._stack.enter_async_context(self._scheduler)

    async def stop(self) -> None:
        """Stop the scheduler."""
        await self._stack.aclose()

    async def load_statuses(self) -> list[ScheduleStatus]:
        """Return each schedule with its next and last run."""
        return await asyncio.to_thread(
            load_schedule_statuses, self._schedules, runs=self._store.place, now=datetime.now(UTC)
        )
