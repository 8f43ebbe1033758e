"""
``EngineRuns``: the runs of an engine in this process, by id; and how a recorded run is started in the background.

What a server needs of an engine: it holds no ids and no tasks of its own, and asks the engine for a run by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from stepengine.data.inputs import Shutdown
from stepengine.data.outcomes import Stop
from stepengine.data.state import RunResult
from stepengine.engine.run import EngineRun
from stepengine.runtime.handle import RunHandle, Turns
from stepengine.workspace.after_fork import hold_references, register_for_fork_reset

if TYPE_CHECKING:
    from stepengine.journal.journaled_run import JournaledRun


class EngineRuns:
    """
    The runs of an engine in this process.

    Attributes:
        active: The running ones; each adds and removes itself.
        handles: The handles of those in the background, also idle ones, in the order in which they were made.
    """

    def __init__(self) -> None:
        self.active: set[EngineRun] = set()
        self.handles: dict[RunHandle, None] = {}
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the running runs in a forked child, because they belong to the parent process."""
        # After a fork the child has copies of objects whose threads, sockets and locks are the parent's. They are left
        # and not closed: closing would close the parent's connections.
        hold_references(list(self.active), list(self.handles))
        self.active.clear()
        self.handles.clear()

    def start_in_background(self, run: EngineRun, turns: Turns | None = None) -> RunHandle:
        """
        Start a run in the background of the running event loop; ``find_by_id`` finds the handle until the handle ends.

        Args:
            run: The run.
            turns: Creates the later turns of a handle that is kept open; ``None`` for a single run.
        """
        handle = run.start(turns)
        self.handles[handle] = None
        handle.on_end(lambda: self.handles.pop(handle, None))
        return handle

    def find_by_id(self, session_or_run_id: str) -> tuple[list[RunHandle], list[EngineRun]]:
        """Return the handles and the running runs whose session or run has the id *session_or_run_id*."""
        roots = [(live, live.tree.root) for live in list(self.active)]
        lives = [live for live, root in roots if session_or_run_id in (root.plan.info.session_id, root.state.run_id)]
        return [h for h in list(self.handles) if session_or_run_id in (h.session_id, h.run_id)], lives

    def list_ids(self) -> tuple[str, ...]:
        """Return the ids of the sessions that are running or idle here, and of runs without a session."""
        handles = [handle.session_id or handle.run_id for handle in list(self.handles)]
        roots = [live.tree.root for live in list(self.active)]
        return tuple(dict.fromkeys([*handles, *[root.plan.info.session_id or root.state.run_id for root in roots]]))

    async def shutdown(self, session_or_run_id: str | None = None) -> bool:
        """End the session or run with this id, or all without one, and wait; return whether there was one."""
        handles, lives = self.request_shutdown(session_or_run_id)
        for live in lives:
            await live.wait_until_ended()
        return bool(handles or lives)

    def request_shutdown(self, session_or_run_id: str | None = None) -> tuple[list[RunHandle], list[EngineRun]]:
        """Request the end of the session or run with this id, or of all without one; return the handles and the running runs."""
        handles, lives = (
            (list(self.handles), list(self.active)) if session_or_run_id is None else self.find_by_id(session_or_run_id)
        )
        for handle in handles:
            handle.send(Shutdown())
        for live in lives:
            live.tree.root.stop(Stop("shutdown"))
        return handles, lives

    def list_runs_with_unused_handles(self) -> list[EngineRun]:
        """Return the running runs in the background whose handles were never used."""
        return [live for live in list(self.active) if live.handle and not (live.handle.done or live.handle.is_used)]


class BackgroundLaunch:
    """
    Starts a recorded run in the background, for the functions that run one to its end.

    Args:
        runs: The runs of the engine.
        create_run: Returns the run of a journal.
        raises: Whether a divergence is raised by the handle.
        patience: How many seconds its questions stay open; ``None`` for ever.
    """

    def __init__(
        self, runs: EngineRuns, create_run: Callable[[JournaledRun], EngineRun], *, raises: bool, patience: float | None
    ) -> None:
        self._runs = runs
        self._create_run = create_run
        self._raises = raises
        self._patience = patience
        self._started: asyncio.Future[RunHandle] = asyncio.get_running_loop().create_future()

    async def __call__(self, session: JournaledRun) -> RunResult:
        """Run *session* in the background, to its end."""
        live = self._create_run(session)
        session.raises = self._raises
        live.tree.questions.patience = self._patience
        handle = self._runs.start_in_background(live)
        self._started.set_result(handle)
        return await handle.wait()

    async def start_and_get_handle(self, run: Coroutine[object, Any, RunResult]) -> RunHandle:
        """Start *run* as a task and return its handle once it has started; raise its error if it did not start."""
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
