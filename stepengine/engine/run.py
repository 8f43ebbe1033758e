"""One root run from plan to result, its events as a stream, and the machine of a run that fails before it could start."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from stepengine.data.effects import Notify
from stepengine.data.events import Event, PhaseChanged, RunFailed, RunStarted
from stepengine.data.limits import Limits
from stepengine.data.outcomes import Outcome, Stop
from stepengine.data.state import AgentState, RunPhase, RunResult, RunStatus
from stepengine.data.waits import Waits
from stepengine.engine.event_loops import require_event_loop
from stepengine.errors import LimitExceeded, ReplayDivergence, StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.handle import RunHandle, Turns
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.services import MachineMaker
from stepengine.runtime.tree import RunTree

if TYPE_CHECKING:
    from stepengine.engine.session_turns import Turn
    from stepengine.journal.journaled_run import JournaledRun

CLOSE_SECONDS = 10.0
"""
Long enough for effects to notice that they are cancelled and for journals to be written; a person who closes a program
waits no longer.
"""
T = TypeVar("T")


class EngineRun:
    """
    A root run; call it to run it to its end.

    Args:
        tree: The run's tree.
        active: The running runs of the engine; it adds and removes itself.

    Attributes:
        journaled_run: The run in its journal, if it has one; it is closed when the run has ended.
        turn: Its turn in a session, if it has one: the turn loads the start state and saves the result.
        handle: The handle of a run in the background, as long as it runs.
        loop: The event loop that it runs in.
        began: Whether it got past its ``pre_run`` hooks.
    """

    def __init__(self, tree: RunTree, active: set[EngineRun]) -> None:
        self.tree = tree
        self.journaled_run: JournaledRun | None = None
        self.turn: Turn | None = None
        self.handle: RunHandle | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.began = False
        self._active = active
        self._is_started = False
        self._callbacks: list[Callable[[], object]] = []

    def __str__(self) -> str:
        root = self.tree.root
        leaked = f" ({', '.join(self.tree.leftovers.leaked)})" if self.tree.leftovers.leaked else ""
        return f"{root.state.run_id} of {root.plan.agent.definition.id!r}{leaked}"

    def start(self, turns: Turns | None = None) -> RunHandle:
        """Run in the background of the running event loop; *turns* makes the turns that follow in a kept-open handle."""
        self.handle = handle = RunHandle(self.tree, self, turns=turns)
        self._mark_active()
        handle.on_end(self._mark_ended)  # also where its task is cancelled before it begins
        return handle

    def _mark_active(self) -> None:
        """Add the run to the active ones, and remember its event loop."""
        self.loop = asyncio.get_running_loop()
        self._active.add(self)

    def _mark_ended(self) -> None:
        """Remove the run from the active ones, close a journal that was not used, and wake those that wait for its end."""
        self._active.discard(self)
        self.handle = None
        self.close_journal_if_unstarted()
        while self._callbacks:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody waits any more
                self._callbacks.pop()()

    async def wait_until_ended(self) -> None:
        """Wait until the run has ended; it may be in another event loop."""
        over = asyncio.Event()
        self._callbacks.append(partial(asyncio.get_running_loop().call_soon_threadsafe, over.set))
        if self in self._active:
            await over.wait()

    async def __call__(self) -> RunResult:
        """
        Run to the end; the events' last one is shown before this returns or raises.

        Raises:
            asyncio.CancelledError: when the task was cancelled; the run has ended nevertheless.
            BaseException: what author code raised for the caller, such as ``pytest.fail``; the run has ended as ``failed``.
            ReplayDivergence: when the run went otherwise than the journal of a test says.
            LimitExceeded: at the step limit with ``on_max_steps="raise"``; it carries the result.
        """
        result = await self.run()
        raise_at_step_limit(result, self.tree.root.plan.limits)
        return result

    async def run(self) -> RunResult:
        """Run to the end as ``__call__`` does, but return the result of a run that reached its step limit."""
        tree = self.tree
        self._is_started = True
        self._mark_active()
        try:
            result = (
                self._make_result(await self._run_and_record_end())
                if self.turn is None
                else await self._run_in_session(self.turn)
            )
            if tree.hub.is_kept_open:
                tree.hub.emit(PhaseChanged(phase=RunPhase.IDLE))
            tree.hub.finish(result)
        finally:
            # Whatever happened: nobody must wait for an event that does not come.
            tree.hub.end_stream_unless_kept_open()
            if self.journaled_run is not None:
                self.journaled_run.writer.close()
            self._mark_ended()
        crash = tree.leftovers.reraise or tree.hub.failures.crash
        if crash is not None:
            raise crash
        if self.journaled_run is not None and self.journaled_run.raises and isinstance(result.error, ReplayDivergence):
            raise result.error
        if tree.root.cancelled:
            raise asyncio.CancelledError
        return result

    async def _run_and_record_end(self, *, records_end: bool = True) -> Finished:
        """Run the tree, and record its end in the journal unless it never started, was broken off, or *records_end* is false."""
        finished = self._add_tree_warnings(await self.tree.run())
        self.began = finished.began
        # What never began or was broken off has no end that could be written down: who resumes it goes on where it was.
        if self.journaled_run is None or not (records_end and self.tree.root.has_ended):
            return finished
        from stepengine.journal.run_end import finish_run  # a run that is not recorded loads no journal

        recorded = finish_run(self.journaled_run, finished, self._list_waits(finished))
        return await self._await_despite_cancel(recorded)

    async def _run_in_session(self, turn: Turn) -> RunResult:
        """Wait for access to the session, run, and save the result in it; if stopped before, return an unsaved result."""
        tree = self.tree
        try:
            if not await tree.wait_before_run(turn.access.enter):
                assert tree.root.stopping is not None  # noqa: S101 - that is why it waits no longer
                error = tree.root.stopping.error
                machine = make_ended_machine(error if isinstance(error, StepEngineError) else None)
                tree.services = attrs.evolve(tree.services, machine=machine)
                return attrs.evolve(
                    self._make_result(await self._run_and_record_end(records_end=False)), session_saved=False
                )
            await turn.load_session_and_start(self)
            result = self._make_result(await self._run_and_record_end())
            return await self._await_despite_cancel(turn.save_result(result, tree.root.plan, has_started=self.began))
        finally:
            turn.access.leave()

    async def _await_despite_cancel(self, writing: Coroutine[object, Any, T]) -> T:
        """Await *writing*, the record of the run's end, to its end; a cancellation of this task is only recorded."""
        work = asyncio.create_task(writing)
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                self.tree.root.cancelled = True
        return work.result()

    def _list_waits(self, finished: Finished) -> tuple[Waits, ...]:
        """Return all that a suspended run waits for, the questions first."""
        if finished.status is not RunStatus.SUSPENDED:
            return ()
        own = {question.id: question for question in finished.pending}
        pending = own | dict(sorted(self.tree.background.suspended.items()))
        asks = [Waits(kind="question", path=q.path, question=q) for q in pending.values()]
        # By address: in which order runs come to stand still is a matter of time, and of a replay another one.
        standing = sorted(self.tree.suspension.waits.items())
        waits = [one for _, known in standing for one in known if one.kind != "question"]
        return (*asks, *waits)

    def close_journal_if_unstarted(self) -> None:
        """Close the journal if the run never started, because its stream was not iterated."""
        if self.journaled_run is not None and not self._is_started:
            self.journaled_run.writer.close()

    def _make_result(self, finished: Finished) -> RunResult:
        """Return the caller's result of this run from its end."""
        tree, waits = self.tree, self._list_waits(finished)
        return finished.to_run_result(
            pending_questions=tuple([one.question for one in waits if one.question is not None]),
            waits_for=waits,
            session_id=tree.root.plan.info.session_id,
            journal=None if self.journaled_run is None else self.journaled_run.writer.journal,
            leaked=tuple(tree.leftovers.leaked),
        )

    def _add_tree_warnings(self, finished: Finished) -> Finished:
        """Return the end of the root with warnings about observers, unused answers and undelivered messages."""
        tree = self.tree
        texts = [*tree.hub.failures.warnings, *tree.questions.given.unused_warnings]
        if tree.inboxes.root and not tree.hub.is_kept_open:
            texts.append(make_undelivered_messages_warning(len(tree.inboxes.root)))
        return finished.with_warnings(texts) if texts else finished


def raise_at_step_limit(result: RunResult, limits: Limits) -> None:
    """Raise the error of a run that ended at its step limit if *limits* say ``on_max_steps="raise"``; it has the result."""
    error = result.error
    if isinstance(error, LimitExceeded) and error.kind == "steps" and limits.on_max_steps == "raise":
        error.result = result
        raise error


def make_undelivered_messages_warning(count: int) -> str:
    """Return the warning about messages that did not reach a run."""
    return f"the run ended before it received {count} of the messages sent to it"


async def stream_run(run: EngineRun) -> AsyncGenerator[Event, None]:
    """Run, and yield the events; closing the generator cancels the run and waits for its end."""
    require_event_loop("stream()", "run_sync()")
    subscription = run.tree.hub.subscribe()
    task = asyncio.create_task(run.run())
    try:
        # As `Subscription.events`, whose generator inside of this one would cost every token.
        while True:
            for event in subscription.pop_events():
                yield event
            if not subscription.queue and not await subscription.wait_for_event():
                return
    finally:
        subscription.close()
        run.tree.root.stop(Stop("cancelled"))
        while not task.done():
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


def make_ended_machine(error: StepEngineError | None) -> MachineMaker:
    """
    Return a maker of machines that end at once: as failed with *error*, or as cancelled if *error* is ``None``.

    Author code is not called.
    """

    def end_at_once(plan: RunPlan, state: AgentState) -> Generator[Any, Outcome | None, Finished]:
        yield Notify(
            RunStarted(path=plan.path, own_id=plan.run_id, agent_id=plan.agent.definition.id, prompt=plan.input.prompt)
        )
        if error is not None:
            yield Notify(RunFailed(path=plan.path, error=error.message, kind=type(error).__name__))
        status = RunStatus.CANCELLED if error is None else RunStatus.FAILED
        return Finished(status=status, state=state, error=error, began=False)

    return end_at_once


def warn_of_abandoned_runs(unused: Sequence[EngineRun], still_running: Sequence[EngineRun]) -> None:
    """Warn of background runs whose handles were not used before they were ended, and of runs that are still running."""
    if unused:
        ids = ", ".join([live.tree.root.state.run_id for live in unused])
        msg = f"the engine was closed before the result of {ids} was read; await handle.result() or use `async with`"
        warnings.warn(msg, ResourceWarning, stacklevel=3)
    if still_running:
        msg = f"the engine was closed, but these runs could not be ended and are still running: {', '.join(map(str, still_running))}"
        LOGGER.warning(msg)
        warnings.warn(msg, ResourceWarning, stacklevel=3)


async def stop_runs_and_wait(
    active: Collection[EngineRun], blocked_loop: asyncio.AbstractEventLoop | None = None
) -> list[EngineRun]:
    """
    Stop runs, wait for them at most ten seconds, and return those that are left.

    Args:
        active: The running runs; each removes itself when it has ended.
        blocked_loop: An event loop that cannot continue during this wait; its runs are not stopped and not waited for.

    Returns:
        The runs that could not be ended, without those of *blocked_loop*.
    """

    def list_running() -> list[EngineRun]:
        return [live for live in list(active) if live.loop is not blocked_loop and live.loop and live.loop.is_running()]

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            while runs := list_running():
                for live in runs:
                    live.tree.root.stop(Stop("shutdown"))
                for live in runs:
                    await live.wait_until_ended()
    return [live for live in list(active) if live.loop is not blocked_loop]
