"""
``RunTree``: the shared state of one root run and the runs below it.

It starts and ends runs, and is the ``IO`` of its performers. Everything else is the work of its parts, each behind a small interface:

- ``runs`` and ``loop`` (``active_runs``): the running runs, interrupts, objects that tools keep for runs; calls from other threads.
- ``clock`` (``clock``): time, and the time limits of runs.
- ``performers`` (``performer_stack``): performers, ledgers of spending, prices.
- ``mail`` and ``inboxes`` (``messages``): messages; ``outside_messages`` carries out those for the tree itself.
- ``questions`` (``questions``): questions. ``deferred`` (``deferred_calls``): calls that wait for their results from outside.
- ``suspension``: the waits of the runs, and when the tree is suspended. ``background``: children in the background.
- ``hub``: the event stream. ``leftovers``: data that cancelled waits could not return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from stepengine.data.events import Event, PhaseChanged, RunFailed
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Failure, PartialUsage, Stop
from stepengine.data.questions import AnswerLike, Question
from stepengine.data.state import AgentState, RunPhase, RunStatus
from stepengine.data.usage import Usage
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import belongs_to_caller
from stepengine.runtime.active_runs import ActiveRuns, TreeLoop
from stepengine.runtime.background import BackgroundChildren
from stepengine.runtime.clock import TreeClock, make_time_limit_stop
from stepengine.runtime.core_performer import CorePerformer, OutcomeMaker
from stepengine.runtime.deferred_calls import DeferredCalls
from stepengine.runtime.driver import RunTask, drive, stop_for_exception
from stepengine.runtime.failfast import StopOnFailure
from stepengine.runtime.hub import Hub
from stepengine.runtime.leftovers import Leftovers
from stepengine.runtime.messages import Inboxes, Message, RunMessages
from stepengine.runtime.outside_messages import apply_outside_message
from stepengine.runtime.performer import Item, RoomWait, wrap_error
from stepengine.runtime.performer_stack import PerformerStack
from stepengine.runtime.prices import Prices
from stepengine.runtime.questions import AdvanceAnswers, OpenQuestions
from stepengine.runtime.retry import Retries
from stepengine.runtime.services import Services
from stepengine.runtime.suspension import SuspensionDetector, list_waits
from stepengine.runtime.waiting_effects import WaitingEffects
from stepengine.runtime.watchdog import Watchdog


class RunTree:
    """
    One root run and the children below it, or one child and those below it, whose parent is driven elsewhere.

    Args:
        services: The parts of the engine that the tree uses.
        plan: The plan of the root.
        state: The state that the root starts from.
        hub: Its event stream.
        answers: Answers given in advance, by question id or text.
        earlier: The questions that suspended the run which this one continues, with their answers.

    Attributes:
        services: The parts of the engine that the tree uses.
        root: The root run.
        runs: The running runs, and their interrupts.
        loop: The event loop in which they run.
        clock: Their time, and their time limits.
        performers: The performers of their effects, with their ledgers.
        hub: Their event stream; *emit* shows an event.
        questions: Their questions.
        mail: The messages that were sent to them.
        inboxes: User messages that they have not received yet.
        deferred: The tool calls that wait for their results from outside.
        suspension: Their waits.
        background: The children in the background.
        leftovers: Data that cancelled waits could not return.
    """

    # Thousands of trees may wait at a time; with slots none has a table of its attributes.
    __slots__ = (
        "__weakref__",
        "background",
        "clock",
        "deferred",
        "emit",
        "hub",
        "inboxes",
        "leftovers",
        "loop",
        "mail",
        "performers",
        "questions",
        "root",
        "runs",
        "services",
        "suspension",
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
        given = AdvanceAnswers(answers or {}, earlier)
        self.root = RunTask(self, plan, state, plan.path)
        self.questions = OpenQuestions(
            given,
            services.interactor,
            services.tools.threads,
            services.remembered,
            is_task_cancelled=self.root.cancellation.is_task_cancelled,
        )
        self.leftovers = Leftovers()
        self.inboxes = Inboxes()
        self.deferred = DeferredCalls()
        self.suspension = SuspensionDetector(self)
        self.background = BackgroundChildren(self)
        self.loop = TreeLoop()
        self.runs = ActiveRuns(self.root, self.loop, hub.failures.warnings)
        self._use_services(services, plan)

    def set_plan(
        self,
        services: Services,
        plan: RunPlan,
        state: AgentState,
        answers: Mapping[str, AnswerLike] | None = None,
        *,
        earlier: Sequence[tuple[Question, AnswerLike]] = (),
    ) -> None:
        """Set services, plan and state of the root before it runs, since a session loads them late."""
        # The tree exists before it is known what it runs: a caller has a handle and reads events while the run still
        # waits for its turn in a session.
        self.root.plan, self.root.state, self.root.path = plan, state, plan.path
        self.questions.given = AdvanceAnswers(answers or {}, earlier)
        self._use_services(services, plan)

    def _use_services(self, services: Services, plan: RunPlan) -> None:
        """Set *services*, the run id of events and whether the tree replays; create the clock, mail and performers."""
        self.services = services
        self.hub.set_run_id(plan.run_id)
        self.clock = TreeClock(services.time.clock, plan.created, services.time.since)
        self.mail = RunMessages(
            services.mail,
            partial(apply_outside_message, self),
            self.hub.failures.warnings.append,
            partial(stop_for_exception, self.root),
        )
        self.suspension.is_replaying = services.record is not None
        prices = Prices(services.models.pricing, self.clock.now)
        retries, outcomes = Retries(services.models.retry, services.seed or plan.run_id), OutcomeMaker(self)
        self.performers = PerformerStack(
            CorePerformer(self, retries, prices, outcomes, WaitingEffects(self, outcomes).perform),
            prices,
            services.middlewares,
            make_group_stopper=partial(StopOnFailure, now=self.clock.elapsed_ms, tree=self),
            elapsed=self.clock.elapsed_ms,
            find_output_limit=services.models.output_limit,
        )

    @property
    def watched(self) -> bool:
        """Whether anyone receives events."""
        return self.hub.watched

    def report_failed_attempt(self, failure: Failure, usage: Usage | None) -> RoomWait | None:
        """Return ``None`` and do nothing; the wrappers of this ``IO`` record and settle failed attempts."""
        return None

    async def record_waiting_call(self, item: Item) -> None:
        """Do nothing; a recorder wraps this ``IO`` and records that a call only waits for its result."""

    def wait_for_children(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> Awaitable[dict[str, Any] | None]:
        """Wait for background children and return their results; see ``BackgroundChildren.wait_for_children``."""
        return self.background.wait_for_children(item, paths, cut)

    def record_suspension(self, item: Item) -> None:
        """Store the waits of *item*, for which the tree is suspended."""
        self.suspension.waits[item.address] = list_waits(item)

    def send(self, message: Message) -> bool:
        """Send a message to a running run of the tree; return whether it is new. Not from the loop's thread."""
        # Kept first, told then: what the sender was told is kept must not be lost when this process ends in between.
        # The loop is told afterwards, and finds the message in the mailbox if this is too late.
        is_new = self.mail.send(message)
        if is_new:
            self.loop.call_soon(self.mail.deliver, message)
        return is_new

    def find_stopped_call_usage(self, item: Item) -> PartialUsage | None:
        """Return the known usage of a model call without a result; ``None`` if no request was sent."""
        return self.leftovers.stopped_calls.get(item.address)

    async def wait_before_run(self, wait: Callable[[], Awaitable[object]]) -> bool:
        """
        Await *wait* before the root runs, such as for its turn; return False if the run was stopped meanwhile.

        Returns:
            ``False`` if the run was stopped or cancelled first, or the wait took longer than ``max_seconds``.
        """
        root, seconds = self.root, self.root.plan.limits.max_seconds
        # The driver's own time limit begins with the run; who waits for a turn in a session must be stopped by it, too.
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, root.stop, make_time_limit_stop(seconds))
        root.cancellation.attach_current_task()
        # There is no effect to name, but a stop has to find something that it can cancel.
        root.busy = True
        try:
            if root.stopping is None:
                await wait()
        except asyncio.CancelledError:
            root.absorb_cancellation()
        finally:
            root.busy = None
            if timer is not None:
                timer.cancel()
            root.cancellation.detach_task()
        return root.stopping is None

    async def run(self) -> Finished:
        """
        Run the root in the current task and return its end.

        ``root.cancelled`` says whether the task was cancelled from outside; ``leftovers.reraise`` is an error for the caller.
        """
        self.loop.set_running_loop()
        watchdog = Watchdog.for_running_loop()
        watchdog.watch_tree(self)
        # An observer may raise what is the caller's (a failing test): the run ends because of it, and does not go on to
        # the next step.
        self.hub.failures.on_crash = self.root.crash_tree
        self.runs.by_path[self.root.path] = self.root
        self.mail.apply_earlier_messages()
        try:
            finished = await self._run_to_end(self.root)
            return _mark_failed_by_caller_error(finished, self.leftovers.reraise)
        finally:
            watchdog.unwatch_tree(self)
            self._break_cycles()

    def _break_cycles(self) -> None:
        """Break reference cycles, so that a finished tree is freed without the garbage collector."""
        self.runs.close()
        self.mail.close()
        self.suspension.close()
        self.background.close()
        del self.performers
        self.hub.failures.on_crash = self.hub.root.history = None
        del self.root.tree

    async def run_child(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Run a child in a task of its own; a cancelled wait stops the child and waits for it."""
        run = self.runs.by_path[path] = RunTask(self, plan, state, path)
        if self.root.is_in_grace:
            run.stopping = self.root.stopping
        elif self.background.children:
            run.stopping = self.background.find_child_stop(path)
        # A task of its own, shielded: if the parent's wait is cancelled the child must not be struck in the middle of
        # an effect, but be told to stop, so that it closes its handler and says what it has spent.
        task = asyncio.create_task(self._run_to_end(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.stop(Stop("cancelled"))
            # However often the parent is cancelled meanwhile: no child outlives its parent (generator-contract:L6).
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError:
                    continue
            finished = task.result()
            # The wait ends with an exception and can return nothing. What the child came to is put aside, and `make_stop` of
            # the parent's driver hands it on: its spending counts, and its questions are its parent's.
            self.leftovers.ended_children[path] = (
                finished.to_child_result() if plan.body is None else finished.to_body_end()
            )
            raise

    async def _run_to_end(self, run: RunTask) -> Finished:
        """Drive a run and await its background children; return its end, also after an internal or a caller's error."""
        plan = run.plan
        # Before the machine is made: its first effect reserves in the ledger.
        run.direct = self.performers.open_ledger_and_find_shortcut(run.path, plan)
        self.hub.log.add_run(run.path, run.state.run_id, plan.agent.definition.id)
        run.cancellation.attach_current_task()
        if self.mail.is_kept:
            # What was said to a resumed run before and did not reach it.
            self.inboxes.add(run.path, *map(UserMessage, self.mail.list_unreceived_texts(run.path)))
        seconds = plan.limits.max_seconds if self.services.time.is_timed else None
        timer = None if seconds is None else self.clock.start_time_limit_timer(run.path, seconds, run.stop)
        try:
            finished = await drive(self.services.machine(plan, run.state), run)
            has_background = run.path in self.background.by_parent_path
            return await self.background.await_children_at_end(run, finished) if has_background else finished
        # The loop is closing and takes the tasks with it: nobody is left to be told of an end.
        except (asyncio.CancelledError, GeneratorExit):
            raise
        # Only a bug of the machine's or of a driver gets here, or what is the caller's. The first takes this run down
        # and no other: a parent sees a failed child.
        except BaseException as error:  # noqa: BLE001
            if not belongs_to_caller(error):
                return _make_failed_end(run, error)
            run.crash_tree(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                self.emit(RunFailed(path=run.path, error=str(error), kind=type(error).__name__))
                self.emit(PhaseChanged(path=run.path, phase=RunPhase.FAILED))
            return _mark_failed_by_caller_error(Finished(status=RunStatus.CANCELLED, state=run.state), error)
        finally:
            if timer is not None:
                timer.cancel()
            if run.path in self.runs.belongings.by_path:
                await self.runs.belongings.close_run_objects(run)
            run.direct = None  # refers to the tree
            run.cancellation.detach_task()
            self._forget_run(run.path)

    def _forget_run(self, path: str) -> None:
        """Drop all data of an ended run."""
        self.runs.by_path.pop(path, None)
        self.clock.deadlines.pop(path, None)
        self.inboxes.by_path.pop(path, None)
        if self.suspension.parked or self.suspension.held:
            self.suspension.release_or_suspend_idle_tree()
        if self.leftovers.stopped_calls:
            self.leftovers.forget_run(path)
        self.performers.forget_run(path)
        if path:
            self.hub.log.remove_run(path)
            self.runs.spawned_by.pop(path, None)


def _mark_failed_by_caller_error(finished: Finished, error: BaseException | None) -> Finished:
    """Return the end of a run as failed if *error* of the caller ended it; an interrupted one is unchanged."""
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        return finished
    return attrs.evolve(finished, status=RunStatus.FAILED, error=error)


def _make_failed_end(run: RunTask, error: BaseException) -> Finished:
    """Return the failed end of a run whose machine raised an internal error."""
    error = wrap_error(error, f"the run of {run.plan.agent.definition.id!r} broke")
    return Finished(status=RunStatus.FAILED, state=run.state, error=error)
