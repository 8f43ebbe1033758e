"""One root run from plan to result, its events as a stream, and the machine of a run that fails before it could start."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import TYPE_CHECKING, Any

from stepengine.data.effects import Notify
from stepengine.data.events import Event, RunFailed, RunFinished, RunStarted
from stepengine.data.outcomes import Outcome, Stop
from stepengine.data.run import RunResult, RunStatus
from stepengine.data.state import AgentState
from stepengine.errors import LimitExceeded, ReplayDivergence, StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.handle import RunHandle
from stepengine.runtime.tree import Machine, Tree

if TYPE_CHECKING:
    from stepengine.journal import Session

__all__ = ("LiveRun", "failing", "streamed", "warn_of")


class LiveRun:
    """
    A root run under way; call it to run it.

    Args:
        tree: The run's tree.
        active: The runs of the engine that are under way; it puts itself in and takes itself out.

    Attributes:
        session: The run's journal, if it has one; it is given back when the run has ended.
    """

    def __init__(self, tree: Tree, active: set[LiveRun]) -> None:
        self.tree = tree
        self.session: Session | None = None
        self._active = active
        self._begun = False

    async def __call__(self) -> RunResult[Any]:
        """
        Run to the end; the events' last one is shown before this returns or raises.

        Raises:
            asyncio.CancelledError: when the task was cancelled; the run has ended nevertheless.
            ReplayDivergence: when the run went otherwise than the journal of a test says.
            LimitExceeded: at the step limit with ``on_max_steps="raise"``; it carries the result.
        """
        result = await self.run()
        error = result.error
        if (
            isinstance(error, LimitExceeded)
            and error.kind == "steps"
            and self.tree.root.plan.limits.on_max_steps == "raise"
        ):
            error.result = result
            raise error
        return result

    async def run(self) -> RunResult[Any]:
        """Run to the end as ``__call__`` does, but return the result of a run that reached its step limit."""
        tree = self.tree
        self._begun = True
        self._active.add(self)
        try:
            finished = await tree.run()
            if self.session is not None:
                finished = await self._recorded(self.session, finished)
            result = self._result(finished)
            tree.hub.finish(RunFinished(path="", seq=0, result=result))
        finally:
            self._active.discard(self)
            if self.session is not None:
                self.session.close()
        if tree.reraise is not None:
            raise tree.reraise
        if self.session is not None and self.session.raises and isinstance(result.error, ReplayDivergence):
            raise result.error
        if tree.root.cancelled:
            raise asyncio.CancelledError
        return result

    async def _recorded(self, session: Session, finished: Finished) -> Finished:
        """Let the journal say how the run ended, to the end however often this task is cancelled."""
        work = asyncio.create_task(session.finish(finished))
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                self.tree.root.cancelled = True
        return work.result()

    def forsake(self) -> None:
        """Give the journal back if the run was never begun, because nobody iterated its stream."""
        if self.session is not None and not self._begun:
            self.session.close()

    def _result(self, finished: Finished) -> RunResult[Any]:
        tree = self.tree
        warnings = [*finished.warnings, *tree.hub.warnings]
        warnings += [f"nobody asked the question {key!r}, for which an answer was given" for key in tree.desk.unused]
        if tree.inbox:
            warnings.append(
                f"the run ended before {len(tree.inbox)} of the messages that were sent to it were delivered"
            )
        return RunResult(
            status=finished.status,
            state=finished.state,
            stop_reason=finished.stop_reason,
            output=finished.output,
            text=finished.text,
            spending=finished.spending,
            tool_calls=finished.tool_calls,
            pending_questions=finished.pending,
            thinking=finished.thinking,
            children=finished.children,
            session_id=tree.root.plan.session_id,
            error=finished.error,
            journal=None if self.session is None else self.session.journal,
            leaked=tuple(tree.leaked),
            warnings=tuple(warnings),
        )


async def streamed(live: LiveRun) -> AsyncGenerator[Event, None]:
    """Run, and give the events; whoever stops iterating cancels the run and waits for its end."""
    subscription = live.tree.hub.subscribe()
    task = asyncio.create_task(live.run())
    try:
        async for event in subscription.events():
            yield event
    finally:
        live.tree.root.stop(Stop("cancelled"))
        while not task.done():
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


def failing(error: StepEngineError) -> Machine:
    """Return a machine whose run fails at once, for what goes wrong while a run is prepared."""

    def machine(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
        yield Notify(RunStarted(path=plan.path, run_id=plan.run_id, agent_id=plan.definition.id, prompt=plan.prompt))
        yield Notify(RunFailed(path=plan.path, error=error.message, kind=type(error).__name__))
        return Finished(status=RunStatus.FAILED, state=state, error=error)

    return machine


def warn_of(handles: Sequence[RunHandle[Any]]) -> None:
    """Warn of background runs that were ended although nobody had asked for their results."""
    if handles:
        ids = ", ".join([h.run_id for h in handles])
        msg = f"the engine was closed while nobody had asked for the result of {ids}; await handle.result() or use `async with`"
        warnings.warn(msg, ResourceWarning, stacklevel=3)
