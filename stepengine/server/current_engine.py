"""``CurrentEngine``: the engine that starts runs, rebuilt when its files were saved; runs keep the engine that started them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from stepengine.server.problems import Problem

if TYPE_CHECKING:
    from stepengine.engine import Engine
    from stepengine.engine.scheduler import Scheduler
    from stepengine.runtime.hub import ObserverLike
    from stepengine.server.sources import EngineSources


class CurrentEngine:
    """
    The engine of a server.

    Args:
        engine: The engine to start with.
        agents: The ids of the agents that may be started; ``None`` for all of the engine.
        sources: The files from which the engine is rebuilt when they were saved; ``None`` if it never is.

    Attributes:
        engine: The engine of runs that start from now on.
        load_problem: Why the current files cannot be loaded; ``None`` if they can.
        scheduler: The scheduler, which gets each rebuilt engine; ``None`` without schedules.
    """

    def __init__(self, engine: Engine, agents: Iterable[str] | None, sources: EngineSources | None) -> None:
        self.engine = engine
        self.load_problem: Problem | None = None
        self.scheduler: Scheduler | None = None
        self._sources = sources
        self._chosen = None if agents is None else [engine.agent(agent).id for agent in agents]
        self._rebuilding = asyncio.Lock()
        self._old: list[Engine] = []
        self._in_use: Counter[Engine] = Counter()
        self._observers: list[ObserverLike] = []

    @property
    def agents(self) -> tuple[str, ...]:
        """The ids of the agents that may be started."""
        known = [agent.id for agent in self.engine.agents]
        return tuple(known if self._chosen is None else [one for one in self._chosen if one in known])

    def add_observer(self, observer: ObserverLike) -> None:
        """Send the events of every run to one more observer, also those of rebuilt engines."""
        self._observers.append(observer)
        self.engine.add_observer(observer)

    def get_engine_for_run(self, run: str) -> Engine:
        """Return the replaced engine that still executes a run, else the current engine."""
        return next((engine for engine in self._old if engine.is_running(run)), self.engine)

    async def rebuild_if_files_changed(self, *, retry: bool = True) -> None:
        """
        Rebuild the engine if its files were saved, and close replaced engines without runs; raise if they cannot be loaded.

        Args:
            retry: Whether to load files again that could not be loaded before and have not changed since.

        Raises:
            Problem: If the current files cannot be loaded; the engine is not replaced.
        """
        if self._sources is None:
            return
        # One at a time: a thousand requests at once import one version, once.
        async with self._rebuilding:
            if not await asyncio.to_thread(self._sources.mark_and_report_changed_files, retry=retry):
                if not self._sources.has_load_failed:
                    self.load_problem = None
                return
            try:
                await self._sources.require_loadable_in_child_process()
                made = await asyncio.to_thread(self._sources.reload_engine)
            except Problem as problem:
                self.load_problem = problem
                raise
            self.load_problem = None
            for observer in self._observers:
                made.add_observer(observer)
            self._old.append(self.engine)
            self.engine = made
            if self.scheduler is not None:
                self.scheduler.engine = made
        await self.close_idle_replaced_engines()

    async def try_rebuild(self) -> None:
        """Rebuild the engine if its files were saved and can be loaded; otherwise do not replace it."""
        with contextlib.suppress(Problem):
            await self.rebuild_if_files_changed(retry=False)

    @contextlib.contextmanager
    def hold_current_engine(self) -> Iterator[Engine]:
        """Yield the current engine, and leave it open until the end of the block, which starts a run in it."""
        engine = self.engine
        self._in_use[engine] += 1
        try:
            yield engine
        finally:
            self._in_use[engine] -= 1

    @property
    def has_replaced_engines(self) -> bool:
        """Whether an engine that was replaced is still open."""
        return bool(self._old)

    async def close_idle_replaced_engines(self) -> None:
        """Close the replaced engines that execute no run any more."""
        unused = [engine for engine in self._old if not self._in_use[engine] and not engine.active()]
        self._old = [engine for engine in self._old if engine not in unused]
        async with contextlib.AsyncExitStack() as stack:
            for engine in unused:
                del self._in_use[engine]
                stack.push_async_callback(engine.aclose)

    async def close_replaced_engines(self) -> None:
        """Close every replaced engine; the current one belongs to the application."""
        async with contextlib.AsyncExitStack() as stack:
            for engine in self._old:
                stack.push_async_callback(engine.aclose)
