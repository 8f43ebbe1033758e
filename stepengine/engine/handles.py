"""
Runs in the background: how a handle of them is made, found and ended.

What a server needs of an engine: it holds no ids and no tasks of its own, and asks the engine for a run by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from stepengine.data.inputs import Shutdown
from stepengine.data.outcomes import Stop
from stepengine.data.state import RunResult
from stepengine.engine.run import EngineRun
from stepengine.runtime.handle import RunHandle, Turns

if TYPE_CHECKING:
    from stepengine.engine.launcher import Launcher
    from stepengine.journal.journaled_run import JournaledRun


def start_in_background(launcher: Launcher, live: EngineRun, turns: Turns | None = None) -> RunHandle:
    """Start a run in the background of the running event loop; its handle can be found until it ends."""
    handle = live.start(turns)
    launcher.handles[handle] = None
    handle.on_end(lambda: launcher.handles.pop(handle, None))
    return handle


def find_runs(launcher: Launcher, run: str) -> tuple[list[RunHandle], list[EngineRun]]:
    """Return the handles and the running runs whose session or run has the id *run*."""
    roots = [(live, live.tree.root) for live in list(launcher.active)]
    lives = [live for live, root in roots if run in (root.plan.info.session_id, root.state.run_id)]
    return [h for h in list(launcher.handles) if run in (h.session_id, h.run_id)], lives


class BackgroundLaunch:
    """Starts the run of a session in the background, for the functions that run one to its end."""

    def __init__(self, launcher: Launcher, options: dict[str, Any], *, raises: bool, patience: float | None) -> None:
        self._launcher = launcher
        self._options = options
        self._raises = raises
        self._patience = patience
        self._started: asyncio.Future[RunHandle] = asyncio.get_running_loop().create_future()

    async def __call__(self, session: JournaledRun) -> RunResult:
        """Run the session in the background, to its end."""
        live = self._launcher.again(session, **self._options)
        session.raises = self._raises
        live.tree.questions.patience = self._patience
        handle = start_in_background(self._launcher, live)
        self._started.set_result(handle)
        return await handle.wait()

    async def handle(self, run: Coroutine[object, Any, RunResult]) -> RunHandle:
        """Return the handle, once the run has begun; raise why it did not."""
        task = asyncio.create_task(run)
        task.add_done_callback(_retrieve_exception)
        await asyncio.wait((task, self._started), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            task.result()
        return self._started.result()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's exception, so that asyncio does not log it; the handle or the caller reports it."""
    if not task.cancelled():
        task.exception()


def request_shutdown(handles: Iterable[RunHandle], lives: Iterable[EngineRun]) -> None:
    """Tell handles and runs to end; to wait for their end, use ``EngineRun.ended``."""
    for handle in handles:
        handle.send(Shutdown())
    for live in lives:
        live.tree.root.stop(Stop("shutdown"))
