"""
What the runs of one tree share. A ``RunTree`` is made for one root run and forgotten with it.

It starts and ends runs, and is the ``IO`` of its performers. Everything else is the work of its parts, each behind a small interface:

- ``runs`` and ``loop`` (``active_runs``): which runs are running, interrupts, what tools keep for runs; calls from other threads.
- ``clock`` (``clock``): time, and the time limits of runs.
- ``performers`` (``performer_stack``): performers, ledgers of what is spent, prices.
- ``mail`` and ``inboxes`` (``mail``): messages; ``steering`` does what those ask that are for the tree itself.
- ``desk`` (``asking``): questions. ``deferred`` (``performing``): calls that wait for their results from outside.
- ``standstill``: what the runs wait for, and when the tree is suspended. ``background``: children in the background.
- ``hub``: what is shown. ``leftovers``: what cancelled waits could not return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from stepengine.data.events import Event, PhaseChanged, RunFailed
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Begun, Failure, Stop
from stepengine.data.questions import AnswerLike, Question
from stepengine.data.state import AgentState, RunPhase, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import is_callers
from stepengine.runtime.active_runs import ActiveRuns, TreeLoop
from stepengine.runtime.asking import OpenQuestions
from stepengine.runtime.background import BackgroundChildren
from stepengine.runtime.clock import TreeClock, stop_for_time
from stepengine.runtime.deferred_calls import Deferred
from stepengine.runtime.driver import RunTask, drive
from stepengine.runtime.failfast import StopOnFailure
from stepengine.runtime.hub import Hub
from stepengine.runtime.leftovers import Leftovers
from stepengine.runtime.mail import Inboxes, Mail, Message
from stepengine.runtime.performer import Item
from stepengine.runtime.performer_stack import PerformerStack
from stepengine.runtime.performing import NOTHING, Innermost
from stepengine.runtime.prices import Prices
from stepengine.runtime.retry import Retries
from stepengine.runtime.services import Services
from stepengine.runtime.standstill import Standstill, waits_of
from stepengine.runtime.steering import steer
from stepengine.runtime.watchdog import Watchdog

__all__ = ("RunTree",)


class RunTree:
    """
    One root run and the children below it, or one child and those below it, whose parent is driven elsewhere.

    Args:
        services: What the engine lends.
        plan: What the root is started with.
        state: The state that it is started with.
        hub: Its event stream.
        answers: Answers given up front, by question id or text.
        earlier: Questions that the run which this one continues was suspended for, with their answers.

    Attributes:
        services: What the engine lends.
        root: The root run.
        runs: The runs that are running, and how they are interrupted.
        loop: The event loop in which they run.
        clock: Their time, and their time limits.
        performers: What performs their effects, and what they may spend.
        hub: What is shown of them; *emit* shows an event.
        desk: Their questions.
        mail: The messages that were sent to them.
        inboxes: What people said to them and they have not received yet.
        deferred: The tool calls that wait for their results from outside.
        standstill: What they wait for.
        background: The children in the background.
        leftovers: What cancelled waits could not return.
    """

    # Thousands of trees may wait at a time; with slots none has a table of its attributes.
    __slots__ = (
        "__weakref__",
        "background",
        "clock",
        "deferred",
        "desk",
        "emit",
        "hub",
        "inboxes",
        "leftovers",
        "loop",
        "mail",
        "performers",
        "root",
        "runs",
        "services",
        "standstill",
    )

    def __init__(
        self,
        services: Services,
        plan: RunPlan,
        state: AgentState,
        hub: Hub,
        answers: Mapping[str, AnswerLike] | None = None,
        *,
        earlier: Sequence[tuple[Question, AnswerLike]] = (),
    ) -> None:
        self.hub = hub
        # The bound method, looked up once: performers call it for each delta of each reply.
        self.emit: Callable[[Event], None] = hub.emit
        self.desk = OpenQuestions(
            answers or {}, services.interactor, services.tools.threads, earlier, of_session=services.remembered
        )
        self.leftovers = Leftovers()
        self.inboxes = Inboxes()
        self.deferred = Deferred()
        self.standstill = Standstill(self)
        self.background = BackgroundChildren(self)
        self.root = RunTask(self, plan, state, plan.path)
        self.loop = TreeLoop()
        self.runs = ActiveRuns(self.root, self.loop, hub.warnings)
        self._lend(services, plan)

    def seat(
        self,
        services: Services,
        plan: RunPlan,
        state: AgentState,
        answers: Mapping[str, AnswerLike] | None = None,
        *,
        earlier: Sequence[tuple[Question, AnswerLike]] = (),
    ) -> None:
        """Make the root start from these, before it runs: what a session holds is known only once it is loaded."""
        # The tree exists before it is known what it runs: a caller has a handle and reads events while the run still
        # waits for its turn in a session.
        self.root.plan, self.root.state, self.root.path = plan, state, plan.path
        self.desk.give(answers or {}, earlier)
        self._lend(services, plan)

    def _lend(self, services: Services, plan: RunPlan) -> None:
        self.services = services
        self.hub.give_places()
        self.hub.run_id = plan.run_id
        self.clock = TreeClock(services.clock, plan.created, services.since)
        self.mail = Mail(services.mail, partial(steer, self), self.hub.warnings.append)
        self.standstill.is_replaying = services.record is not None
        prices = Prices(services.pricing, self.clock.now)
        self.performers = PerformerStack(
            Innermost(self, Retries(services.retry, services.seed or plan.run_id), prices),
            prices,
            services.middlewares,
            services.outermost,
            make_brake=partial(StopOnFailure, now=self.clock.elapsed, tree=self),
            elapsed=self.clock.elapsed,
        )

    @property
    def watched(self) -> bool:
        """Whether anybody is shown events."""
        return self.hub.watched

    def attempt(self, failure: Failure, usage: Usage | None) -> None:
        """Take note of a failed attempt; whoever records wraps this."""

    def waits(self, item: Item) -> Awaitable[None]:
        """Take note that a call only waits for its result; whoever records wraps this."""
        return NOTHING

    def ends(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> Awaitable[dict[str, Any] | None]:
        """Return how children in the background ended, once they have, as ``BackgroundChildren.ends`` says."""
        return self.background.ends(item, paths, cut)

    def stands(self, item: Item) -> None:
        """Note that the tree is suspended for this wait."""
        self.standstill.waits[item.path, item.effect.seq] = waits_of(item)

    def post(self, message: Message) -> bool:
        """Send a message to a run of the tree, which is under way; return whether it is new. From any thread but the loop's."""
        # Kept first, told then: what the sender was told is kept must not be lost when this process ends in between.
        # The loop is told afterwards, and finds the message in the mailbox if this is too late.
        is_new = self.mail.post(message)
        if is_new:
            self.loop.call_soon(self.mail.arrive, message)
        return is_new

    def begun(self, item: Item) -> Begun | None:
        """Return what a model call had used that was stopped."""
        return self.leftovers.stopped_calls.get((item.path, item.effect.seq))

    async def wait_for(self, coming: Callable[[], Awaitable[object]]) -> bool:
        """
        Wait for something before the root runs, such as its turn; return whether it came.

        It did not when the run was stopped or cancelled meanwhile, or when the wait took longer than the run may take.
        """
        root, seconds = self.root, self.root.plan.limits.max_seconds
        # The driver's own time limit begins with the run; who waits for a turn in a session must be stopped by it, too.
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, seconds), root.stop, stop_for_time(seconds))
        root.enter()
        # There is no effect to name, but a stop has to find something that it can cancel.
        root.busy = True
        try:
            if root.stopping is None:
                await coming()
        except asyncio.CancelledError:
            root.interrupted()
        finally:
            root.busy = None
            if timer is not None:
                timer.cancel()
            root.leave()
        return root.stopping is None

    async def run(self) -> Finished:
        """Run the root in the current task; what cancelled it is left in ``root.cancelled`` and ``reraise``."""
        self.loop.enter()
        watchdog = Watchdog.of_running_loop()
        watchdog.enter(self)
        # An observer may raise what is the caller's (a failing test): the run ends because of it, and does not go on to
        # the next step.
        self.hub.on_crash = self.root.crashed
        self.runs.by_path[self.root.path] = self.root
        self.mail.begin()
        try:
            finished = await self._run(self.root)
            return _broken_off(finished, self.leftovers.reraise)
        finally:
            watchdog.leave(self)
            self._let_go()

    def _let_go(self) -> None:
        """Cut the circles, so that a finished tree is freed at once and not by the collector."""
        self.runs.close()
        self.mail.close()
        self.standstill.close()
        self.background.close()
        del self.performers
        self.hub.on_crash = self.hub.history = None
        self.root.release()

    async def drive(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Run a child in a task of its own; a cancelled wait stops the child, waits for it, then goes on."""
        run = self.runs.by_path[path] = RunTask(self, plan, state, path)
        if self.root.spares:
            run.stopping = self.root.stopping
        elif self.background.children:
            run.stopping = self.background.stopping(path)
        # A task of its own, shielded: if the parent's wait is cancelled the child must not be struck in the middle of
        # an effect, but be told to stop, so that it closes its handler and says what it has spent.
        task = asyncio.create_task(self._run(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.stop(Stop("cancelled"))
            # However often the parent is cancelled meanwhile: no child outlives its parent (generator-contract:L12).
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError:
                    continue
            finished = task.result()
            # The wait ends with an exception and can return nothing. What the child came to is put aside, and `halt` of
            # the parent's driver hands it on: its spending counts, and its questions are its parent's.
            self.leftovers.orphans[path] = finished.as_child() if plan.body is None else finished.as_body()
            raise

    async def _run(self, run: RunTask) -> Finished:
        plan = run.plan
        # Before the machine is made: its first effect reserves in the ledger.
        run.direct = self.performers.open(run.path, plan)
        self.hub.seat(run.path, run.state.run_id, plan.definition.id)
        run.enter()
        if self.mail.is_kept:
            # What was said to a resumed run before and did not reach it.
            self.inboxes.add(run.path, *map(UserMessage, self.mail.unheard(run.path)))
        seconds = plan.limits.max_seconds
        timer = None if seconds is None else self.clock.start_timer(run.path, seconds, run.stop)
        try:
            finished = await drive(self.services.machine(plan, run.state), run)
            has_background = run.path in self.background.of
            return await self.background.settle(run, finished) if has_background else finished
        # The loop is closing and takes the tasks with it: nobody is left to be told of an end.
        except (asyncio.CancelledError, GeneratorExit):
            raise
        # Only a bug of the machine's or of a driver gets here, or what is the caller's. The first takes this run down
        # and no other: a parent sees a failed child.
        except BaseException as error:  # noqa: BLE001
            if not is_callers(error):
                return _lost_run(run, error)
            run.crashed(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                self.emit(RunFailed(path=run.path, error=str(error), kind=type(error).__name__))
                self.emit(PhaseChanged(path=run.path, phase=RunPhase.FAILED))
            return _broken_off(Finished(status=RunStatus.CANCELLED, state=run.state), error)
        finally:
            if timer is not None:
                timer.cancel()
            if run.path in self.runs.belongings.by_path:
                await self.runs.belongings.end(run)
            run.leave()
            self._forget(run.path)

    def _forget(self, path: str) -> None:
        """Forget a run that has ended, so that ten thousand children leave no more behind than one."""
        self.runs.by_path.pop(path, None)
        self.clock.deadlines.pop(path, None)
        self.inboxes.by_path.pop(path, None)
        if self.standstill.parked or self.standstill.held:
            self.standstill.look()
        if self.leftovers.stopped_calls:
            self.leftovers.forget(path)
        self.performers.forget(path)
        if path:
            self.hub.unseat(path)
            self.runs.spawned_by.pop(path, None)


def _broken_off(finished: Finished, error: BaseException | None) -> Finished:
    """Return how a run ended that *error* of the caller's broke off, if it did; one that was interrupted is cancelled."""
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        return finished
    return attrs.evolve(finished, status=RunStatus.FAILED, error=error)


def _lost_run(run: RunTask, error: BaseException) -> Finished:
    """Return the end of a run whose machine broke, which takes nothing else down."""
    if not isinstance(error, StepEngineError):
        msg = f"the run of {run.plan.definition.id!r} broke with {type(error).__name__}: {error}"
        wrapped = StepEngineError(msg)
        wrapped.__cause__ = error
        return Finished(status=RunStatus.FAILED, state=run.state, error=wrapped)
    return Finished(status=RunStatus.FAILED, state=run.state, error=error)
