"""
Runs in the background: how they are started, found and ended (requirements N1, N4, N13).

What a server needs of an engine: it holds no ids and no tasks of its own, and asks the engine for a run by its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Unpack, overload

from typing_extensions import TypeVar

from stepengine.data.definition import AgentDefinition
from stepengine.data.inputs import Shutdown
from stepengine.data.outcomes import Stop
from stepengine.data.run import RunResult
from stepengine.engine.live import LiveRun
from stepengine.engine.options import AgentLike, ForkOptions, ResumeOptions, StartOptions, given
from stepengine.engine.recorded import Recorded
from stepengine.errors import InputError, StepEngineError
from stepengine.runtime.handle import RunHandle, Runner, Turns
from stepengine.runtime.tree import Tree

if TYPE_CHECKING:
    from stepengine.journal import JournalLike, Session

__all__ = ("Background", "end")

Out = TypeVar("Out", default=Any)


class Background(Recorded):
    """The part of an engine that starts runs in the background, and finds them again."""

    @overload
    def start(
        self, agent: AgentDefinition[Out], prompt: str = ..., **options: Unpack[StartOptions]
    ) -> RunHandle[Out]: ...
    @overload
    def start(self, agent: str, prompt: str = ..., **options: Unpack[StartOptions]) -> RunHandle[Any]: ...
    def start(self, agent: AgentLike, prompt: str = "", **options: Unpack[StartOptions]) -> RunHandle[Any]:
        """
        Start a run in the background of the running event loop and return its handle; ``async with`` ends it on exit.

        Its events are kept from the first one on, so that nobody has to be there in time to see them.

        Args:
            agent: An agent's id, or its definition.
            prompt: What it should do.
            options: See ``StartOptions``.

        Raises:
            StepEngineError: when no event loop runs here; for the rest, see ``run``.
        """
        _need_loop()
        asked = given("start", StartOptions, options)
        keeps_open = asked.pop("keep_open", False)
        default = None if self._sessions is None and asked.get("journal") is None else 0.0
        patience = asked.pop("wait_for_answers", default)
        if keeps_open and asked.get("journal") is not None:
            msg = (
                "journal= holds one run, and a handle that is kept open has one in each turn; with "
                "Engine(sessions=...) each of them has a journal of its own"
            )
            raise InputError(msg, issues=("journal does not go with keep_open",))
        live = self._begin(agent, prompt, **asked)
        live.tree.desk.patience = patience

        def turn(last: RunResult[Any], text: str) -> tuple[Tree, Runner]:
            following = {**asked, "answers": None, "session_id": handle.session_id, "hub": live.tree.hub}
            following["previous"] = None if self._sessions is not None else last.state
            known = self._begin(agent, text, **following)
            known.tree.desk.patience = patience
            known.handle = handle
            return known.tree, known

        handle = self._in_background(live, turn if keeps_open else None)
        return handle

    def _in_background(self, live: LiveRun, turns: Turns | None = None) -> RunHandle[Any]:
        handle = live.start(turns)
        self._handles[handle] = None
        handle.on_end(lambda: self._handles.pop(handle, None))
        return handle

    async def start_resume(self, journal: JournalLike, **options: Unpack[ResumeOptions]) -> RunHandle[Any]:
        """
        Go on with a recorded run in the background and return its handle; arguments and errors are those of ``resume``.

        What is recorded shows no events. A divergence is raised by ``handle.result()``.
        """
        from stepengine import journal as journals

        asked = given("resume", ResumeOptions, options)
        other = {"agent": asked.pop("agent", None), "limits": asked.pop("limits", None)}
        launch = _Launch(self, other, raises=asked.get("on_divergence", "raise") == "raise")
        return await launch.handle(journals.resume(journal, launch, **asked))

    async def start_fork(
        self, journal: JournalLike, *, at: int | str, **options: Unpack[ForkOptions]
    ) -> RunHandle[Any]:
        """Go on from the middle of a recorded run in the background; arguments and errors are those of ``fork``."""
        from stepengine import journal as journals

        asked = given("fork", ForkOptions, options)
        source = journals.as_journal(journal)
        other = {"agent": asked.pop("agent", None), "limits": asked.pop("limits", None)}
        launch = _Launch(self, {**other, "forked": source}, raises=True)
        return await launch.handle(journals.fork(source, launch, at=at, **asked))

    # --- by id --------------------------------------------------------------------------------------------------------

    def get(self, run: str) -> RunHandle[Any] | None:
        """
        Return the handle of what is under way, an idle one that is kept open included; ``None`` when there is none.

        Args:
            run: A session's id, or that of a run. Of several handles in a session it is the one that was made first.
        """
        return next(iter(self._named(run)[0]), None)

    def is_running(self, run: str) -> bool:
        """Return whether something is under way in the session, or as the run, of that id; what is idle, too."""
        return any(self._named(run))

    def active(self) -> tuple[str, ...]:
        """Return what is under way, with and without a handle: the ids of sessions, and of runs without one."""
        handles = [handle.session_id or handle.run_id for handle in list(self._handles)]
        roots = [live.tree.root for live in list(self._active)]
        return tuple(dict.fromkeys([*handles, *[root.plan.session_id or root.state.run_id for root in roots]]))

    async def shutdown(self, run: str) -> bool:
        """End what is under way in the session, or as the run, of that id, and wait for it; return whether there was any."""
        handles, lives = self._named(run)
        end(handles, lives)
        for live in lives:
            await live.ended()
        return bool(handles or lives)

    async def shutdown_all(self) -> None:
        """End everything that is under way, and wait for it. The engine stays open; ``aclose`` also gives things back."""
        lives = list(self._active)
        end(list(self._handles), lives)
        for live in lives:
            await live.ended()

    def _named(self, run: str) -> tuple[list[RunHandle[Any]], list[LiveRun]]:
        """Return the handles and the runs under way of a session, or of a run."""
        roots = [(live, live.tree.root) for live in list(self._active)]
        lives = [live for live, root in roots if run in (root.plan.session_id, root.state.run_id)]
        return [h for h in list(self._handles) if run in (h.session_id, h.run_id)], lives


class _Launch:
    """Starts the run of a session in the background, for the functions that run one to its end."""

    def __init__(self, engine: Background, options: dict[str, Any], *, raises: bool) -> None:
        self._engine = engine
        self._options = options
        self._raises = raises
        self._started: asyncio.Future[RunHandle[Any]] = asyncio.get_running_loop().create_future()

    async def __call__(self, session: Session) -> RunResult[Any]:
        engine = self._engine
        live = engine._again(session, **self._options)  # noqa: SLF001  (it is a part of the engine)
        session.raises = self._raises
        live.tree.desk.patience = 0.0
        handle = engine._in_background(live)  # noqa: SLF001
        self._started.set_result(handle)
        return await handle.wait()

    async def handle(self, run: Coroutine[Any, Any, RunResult[Any]]) -> RunHandle[Any]:
        """Return the handle, once the run has begun; raise why it did not."""
        task = asyncio.create_task(run)
        task.add_done_callback(_looked_at)
        await asyncio.wait((task, self._started), return_when=asyncio.FIRST_COMPLETED)
        if not self._started.done():
            task.result()
        return self._started.result()


def _looked_at(task: asyncio.Task[Any]) -> None:
    """Look at how it ended: whoever has the handle is told, or it was raised before there was one."""
    if not task.cancelled():
        task.exception()


def end(handles: Iterable[RunHandle[Any]], lives: Iterable[LiveRun]) -> None:
    """Tell handles and runs to end; who wants to wait does so with ``LiveRun.ended``."""
    for handle in handles:
        handle.send(Shutdown())
    for live in lives:
        live.tree.root.stop(Stop("shutdown"))


def _need_loop() -> None:
    """Refuse to start where nothing would go on, before anything is made."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        msg = "start() needs a running event loop: call it inside `async def`, or use run_sync(), which needs none"
        raise StepEngineError(msg) from None
