"""
The driver of one run: the loop that passes outcomes to its machine, and the ways to stop it.

``drive`` awaits everything that a machine requests. It knows no records, no replay and no limits: those wrap the performer. One
effect is awaited in the run's own task; only the members of a ``Gather`` and the runs of children get tasks of their own.

A run ends early because of ``stop``, or because its task is cancelled from outside. ``stop`` cancels the task, too, to end the
running effect. ``TaskCancellation`` takes that cancellation back, but never one from outside: that is passed on when the run has
ended.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from stepengine.data.effects import (
    RUNS,
    AskPerson,
    AwaitMessage,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Compute,
    Effect,
    Gather,
    Leaf,
    Notify,
    RunObjects,
    Spawn,
)
from stepengine.data.outcomes import (
    Failure,
    Gathered,
    Outcome,
    Single,
    Stop,
    Value,
    get_race_winner_index,
    has_lost_or_stopped,
)
from stepengine.errors import ReplayDivergence
from stepengine.machine.plan import Finished
from stepengine.machine.signals import belongs_to_caller
from stepengine.runtime.background import TreeWithBackground
from stepengine.runtime.core_performer import is_deferred_call
from stepengine.runtime.effect_events import make_end_events, make_start_events
from stepengine.runtime.failfast import FailFastGroup, StopOnFailure
from stepengine.runtime.messages import find_received_message
from stepengine.runtime.performer import IO, Item, Performer, child_path, is_repeatable, run_compute, wrap_error
from stepengine.runtime.tree_protocols import Performers

if TYPE_CHECKING:
    from stepengine.data.questions import Answer, Question
    from stepengine.data.state import AgentState
    from stepengine.machine.plan import RunPlan

DIRECT = (CallModel, CallTool, CallFunction)
"""The effects for which ``RunTask.direct`` is enough, by their exact class: the body of a tool is a run, which the meter counts."""
EFFECTS_PER_TURN = 64
"""After so many effects other tasks get their turn: a scripted run would starve the loop."""
LAST_TURN_SECONDS = 1.0
"""
How long a stopped run waits for the current turn of a handler in a sandbox: long for a computation, short for a person
who pressed Ctrl-C.
"""


class DrivenPerformers(Performers, Protocol):
    """The performers of a tree as the driver sees them."""

    @property
    def innermost(self) -> Performer:
        """The innermost performer, which needs no preparation of effects."""

    @property
    def outermost(self) -> Performer:
        """The outermost performer."""

    @property
    def group_stopper(self) -> StopOnFailure:
        """Stops the members of groups."""

    def count_startable(self, items: Sequence[Item]) -> int:
        """Return how many of the first *items*, at least one, can begin together."""

    def count_repeated_call(self, item: Item, outcome: Single, io: IO) -> None:
        """Count a call that repeats the last one."""

    def increase_limit(self, question: Question, answer: Answer) -> None:
        """Raise the limit that a question is about."""


class DrivenTree(TreeWithBackground, Protocol):
    """A run tree as the driver sees it."""

    @property
    def performers(self) -> DrivenPerformers:
        """The performers of its effects."""


@attrs.define(eq=False)
class TaskCancellation:
    """
    Cancels the task that drives a run, and distinguishes this cancellation from those by others.

    The own cancellation is taken back before the task leaves the run. Those by others are never taken back.

    Attributes:
        task: The task; ``None`` while no task drives the run.
    """

    task: asyncio.Task[object] | None = None
    _earlier: int = 0
    _is_requested: bool = False

    def attach_current_task(self) -> None:
        """Register the current task as the one that drives the run, with the cancellations that it has already."""
        task = self.task = asyncio.current_task()
        assert task is not None  # noqa: S101
        # A task may carry cancellations that are none of ours when we enter it: the caller's `asyncio.timeout` around us
        # that has fired and is still unwinding. Only what is counted above them came while the run was driven.
        # Without it such a task would end every run that is started in its cleanup.
        self._earlier = task.cancelling()

    def detach_task(self) -> None:
        """Take back the cancellation by this run, and release the task."""
        if self._is_requested:
            self.revoke()
        self.task = None

    def schedule_cancel(self, cancel: Callable[[], None]) -> bool:
        """Schedule *cancel* in the task's event loop; return False if no task drives the run. May be called from any thread."""
        task = self.task
        if task is None or (loop := task.get_loop()).is_closed():
            return False
        loop.call_soon_threadsafe(cancel)
        return True

    def cancel(self) -> None:
        """Cancel the task, unless that was done before."""
        if self.task is not None and not self._is_requested:
            self._is_requested = True
            self.task.cancel()

    def revoke(self) -> None:
        """Take back the cancellation by ``cancel``, if there was one."""
        # `uncancel` takes back one count of the task, so it may be called exactly as often as we cancelled: once too
        # seldom, and the caller's next `await` behind a finished run sees a cancellation that nobody asked for; once too
        # often, and the caller's own is lost (reliability:SS12).
        if self.task is not None and self._is_requested:
            self._is_requested = False
            self.task.uncancel()

    def is_task_cancelled(self) -> bool:
        """Return whether the current task, that of the run or one that it started, was cancelled since it entered the run."""
        task = asyncio.current_task()
        return task is not None and task.cancelling() > (self._earlier if task is self.task else 0)

    @property
    def is_from_outside(self) -> bool:
        """Whether anyone else has cancelled the task since it entered the run."""
        assert self.task is not None  # noqa: S101
        return self.task.cancelling() - self._is_requested > self._earlier


@attrs.define(eq=False, repr=False)
class RunTask:
    """
    One run of a tree; ``stop`` may be called also before and after it is driven.

    Attributes:
        tree: The parts that all runs of the tree share.
        plan: The plan of the run.
        state: The state that it starts from.
        path: Its path.
        stopping: The reason why the run must end; ``None`` until it is stopped.
        busy: The running effect, the members of a ``Gather``, or ``True`` for a wait that is not an effect; ``None`` if there is
            nothing to cancel.
        is_in_grace: Whether running effects that cannot be repeated may end by themselves although the run must stop.
        cancelled: Whether the run's task was cancelled from outside.
        has_ended: Whether its machine has reached its end, and was not broken off.
        is_cut: Whether it was stopped at once, without grace.
        is_ending: Whether its machine has ended and it waits, or has waited, for its background children.
        direct: The innermost performer, or the recorder; ``None`` unless every wrapper around it would pass on the effects of
            the run unchanged, except for children and questions.
        cancellation: The cancellations of the task that drives the run.
    """

    tree: DrivenTree
    plan: RunPlan
    state: AgentState
    path: str
    stopping: Stop | None = None
    busy: Item | _RunningGroup | Literal[True] | None = None
    is_in_grace: bool = False
    cancelled: bool = False
    has_ended: bool = False
    is_cut: bool = False
    is_ending: bool = False
    direct: Performer | None = None
    cancellation: TaskCancellation = attrs.field(factory=TaskCancellation)

    def start_waiting_for_children(self) -> None:
        """Record that the run is at its end, and waits for its children in the background."""
        self.is_ending = self.busy = True

    def end_waiting_for_children(self) -> None:
        """Record that its children in the background have ended."""
        self.busy = None

    def stop(self, stop: Stop) -> None:
        """Stop the run; the first reason counts. May be called from any thread, any number of times."""
        # Whoever calls this does not wait for anything: a second, harder stop takes away the grace that an earlier one
        # gave. The first reason is the one that is told, since all later ones are mostly consequences of it.
        self.is_in_grace = False
        self.stopping = self.stopping or stop
        # Always by way of the loop, also from its own thread. A stop may be called by the effect itself (a tool that
        # cancels its run, an observer): to cancel the task right here would strike the frame that is calling. And from
        # another thread, or from a signal handler, `Task.cancel` is not safe at all. `is_cut` keeps a thousand stops
        # from filling the loop's queue (reliability:I12).
        self.is_cut = self.is_cut or self.cancellation.schedule_cancel(self._cancel_task)

    def list_unrepeatable_effects(self) -> list[Item]:
        """Return the running effects that would be in doubt if they were cancelled."""
        busy = self.busy
        items = [busy] if isinstance(busy, Item) else busy.running if isinstance(busy, _RunningGroup) else []
        return [item for item in items if self._would_be_in_doubt(item)]

    def stop_gracefully(self, stop: Stop) -> None:
        """Start nothing more, and cancel all running effects that can be repeated; children are stopped separately."""
        self.stopping = self.stopping or stop
        busy = self.busy
        if isinstance(busy, _RunningGroup):
            busy.cancel_running(self._is_spared)
        elif not isinstance(busy, Item) or not self._is_spared(busy):
            self._cancel_task()

    def _would_be_in_doubt(self, item: Item) -> bool:
        """Return whether an effect can neither be repeated nor only waits for its result from outside."""
        # What may happen again is cut at once, and so is a call that only waits for its result, since nothing of it is
        # under way here. The rest would be in doubt for whoever goes on with the run, and so gets some seconds.
        return not is_repeatable(item) and not self.tree.deferred.is_waiting(item)

    def _is_spared(self, item: Item) -> bool:
        """Return whether a graceful stop does not cancel an effect: a running child, or one that would be in doubt."""
        is_child = isinstance(item.effect, RUNS) and child_path(item.path, item.effect.seq) in self.tree.runs.by_path
        return is_child or self._would_be_in_doubt(item)

    def apply_time_limit_and_must_stop(self) -> bool:
        """Return whether nothing more may be performed; record the stop if a time limit of the run is exceeded."""
        if self.stopping is None and self.tree.clock.deadlines:
            self.stopping = self.tree.clock.find_time_limit_stop(self.path)
        return self.stopping is not None

    def absorb_cancellation(self) -> Stop:
        """Account for a ``CancelledError`` that reached the run's own task; return the outcome in its place."""
        # Ours first, so that what is left of the count is from outside. Where no stop of ours is known, it can only
        # have been the caller.
        self.cancellation.revoke()
        self.record_outside_cancel(certain=self.stopping is None)
        return self.make_stop()

    def record_outside_cancel(self, *, certain: bool = False) -> None:
        """Record a cancellation from outside, if there was one or it is *certain*."""
        if certain or self.cancellation.is_from_outside:
            self.cancelled = True
            self.stopping = self.stopping or Stop("cancelled")

    def crash_tree(self, error: BaseException) -> Stop:
        """Stop the whole tree for an exception that belongs to the caller, where it is raised afterwards."""
        self.tree.leftovers.reraise = self.tree.leftovers.reraise or error
        is_interrupt = isinstance(error, KeyboardInterrupt | SystemExit)
        stop = Stop("cancelled") if is_interrupt else Stop("crashed", error=error)
        # The whole tree ends, and not this run alone: a `KeyboardInterrupt` out of a child's tool is meant for the
        # person at the terminal. A parent that only saw a failed child would go on paying for model calls after Ctrl-C.
        self.tree.root.stop(stop)
        self.stop(stop)
        return self.make_stop()

    def stop_with_error(self, error: BaseException) -> Stop:
        """Stop the run because a performer raised an exception."""
        # Whoever sees it must not have to know the classes of SDKs (reliability:R22). It ends the run, and is not
        # thrown into the handler: a performer that lets an exception out is broken, and what the effect did is not
        # known, so nothing could follow from it.
        error = wrap_error(error, f"performing an effect of the run at {self.path!r} failed")
        self.stop(Stop("diverged", error=error))
        return self.make_stop()

    def is_task_cancelled(self) -> bool:
        """Return whether the current task, its own or one that it started, was cancelled since it entered the run."""
        return self.cancellation.is_task_cancelled()

    def make_stop(self, item: Item | None = None) -> Stop:
        """Return the outcome of an effect that was not performed, or not completely; remove its usage from the leftovers."""
        # What a stopped effect leaves behind was put aside by whoever was interrupted: a cancelled coroutine has no way
        # to return something. It is popped here, since this outcome is the only one that will ever tell of it.
        stop, tree = self.stopping or Stop("cancelled"), self.tree
        if item is None:
            return Stop(stop.kind, tree.clock.elapsed_ms(), stop.error, stop.questions)
        address = item.address
        left = tree.leftovers.ended_children.pop(child_path(*address), None) if isinstance(item.effect, RUNS) else None
        child, body = (None, left) if isinstance(item.effect, CallBody) else (left, None)
        begun = tree.leftovers.stopped_calls.pop(address, None)
        return Stop(stop.kind, tree.clock.elapsed_ms(), stop.error, stop.questions, child, begun, body)

    def make_stopped_outcome(self, effect: Effect) -> Outcome:
        """Return the stop as the outcome of an effect that the stopped run still requests; of a group, one for each member."""
        # The machine is answered, not abandoned: it asks for effects while it closes handlers and gives every call a
        # result, and it checks that a Gather has one outcome for each member.
        return (
            Gathered(tuple([self.make_stop() for _ in effect.effects]))
            if isinstance(effect, Gather)
            else self.make_stop()
        )

    def _cancel_task(self) -> None:
        """Cancel the task if it is awaiting something."""
        # Only while something is awaited. Between two effects the machine itself runs, synchronously; the drive loop
        # looks at `stopping` before the next effect, and a cancellation that was left pending would strike some
        # innocent `await` later.
        if self.busy:
            self.cancellation.cancel()


async def drive(machine: Generator[Any, Outcome | None, Finished], run: RunTask) -> Finished:
    """
    Run *machine* to its end, and return how it ended; it is closed on every way out.

    A cancellation becomes a ``Stop`` with which the machine ends the run. One from outside is recorded in ``run.cancelled``.
    """
    outcome: Outcome | None = None
    count = 0
    try:
        while True:
            effect = machine.send(outcome)
            # Events are no effects: they have no number and no outcome, and are shown even after a stop, which ends in
            # events, too.
            if isinstance(effect, Notify):
                run.tree.emit(effect.event)
                outcome = None
                continue
            if isinstance(effect, Compute):
                outcome = await (_run_handler_turn if run.plan.body is None else _run_body_compute)(run, effect)
                continue
            # Asked before each effect and not only by the timer: a model that answers without waiting never lets the
            # loop turn, so no timer fires.
            if run.apply_time_limit_and_must_stop():
                outcome = run.make_stopped_outcome(effect)
                continue
            if isinstance(effect, Gather):
                outcome = await _perform_group(run, effect)
            else:
                outcome = await _perform_alone(run, Item(run.path, effect, run.plan))
            count += 1
            # An effect that really waits gives the others their turn anyway.
            if count % EFFECTS_PER_TURN == 0:
                await _yield_to_loop(run)
    # A generator's return value arrives so. One `except` around the loop serves: nothing else in it can raise
    # `StopIteration`, since out of a coroutine that comes as a `RuntimeError`.
    except StopIteration as stop:
        result: Finished = stop.value
        run.has_ended = True
        return result
    finally:
        # On every way out, a `CancelledError` or a bug in the performer included: the handler inside holds files and
        # locks in its `finally`, and a generator that is left to the collector runs it at some other time, perhaps in
        # another thread (reliability:I6).
        machine.close()


async def _run_body_compute(run: RunTask, effect: Compute) -> Single:
    """Run work in a thread; if the run is stopped, stop the work and wait for it."""
    if run.apply_time_limit_and_must_stop():
        return run.make_stop()
    tree = run.tree
    # A body has the path of its call. What its sandbox keeps (a process, a loaded program) belongs to the run around
    # it, so that the next call of the same tool finds it warm.
    kept = tree.runs.belongings.get_or_create(run.path.rpartition(".")[0])
    if effect.known is not None:
        return _run_recorded_compute_in_place(run, effect, kept)
    run.busy = True
    work = asyncio.get_running_loop().run_in_executor(None, run_compute, effect, kept)
    try:
        # A thread cannot be cancelled. To let the `CancelledError` out here would leave it at work on a program whose
        # run has ended; so the work is told to stop, and waited for however often we are cancelled meanwhile.
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.absorb_cancellation()
                effect.stop()
        if run.stopping is not None:
            # Fetched only so that asyncio does not log at some later time that nobody did.
            work.exception()
            return run.make_stop()
        return work.result()
    except Exception as error:  # noqa: BLE001
        # A program that is worked out again over its record may come to something else; that is a divergence of the
        # whole tree and not a failure of one call.
        if isinstance(error, ReplayDivergence):
            tree.root.stop(Stop("diverged", error=error))
        return run.stop_with_error(error)
    finally:
        run.busy = None


async def _run_handler_turn(run: RunTask, effect: Compute) -> Single:
    """
    Run a turn of a handler in a thread.

    A handler that runs here is never stopped between two effects, since a stop is recorded at an effect. A running turn, which is
    recorded nowhere, may end, and the effect that it yields is refused; unless it takes too long.
    """
    kept, ended_by_itself = run.tree.runs.belongings.get_or_create(run.path), threading.Event()

    def run_turn() -> Value | Failure:
        try:
            return run_compute(effect, kept)
        finally:
            ended_by_itself.set()

    work = asyncio.get_running_loop().run_in_executor(None, run_turn)
    run.busy, is_ended = True, False
    try:
        # Without a time limit while the run goes on, and with one as soon as it is stopped: nobody waits for a handler
        # that works on, but one that is told to end in the middle of a turn leaves nothing that a replay could stop at.
        while not work.done():
            try:
                done, _ = await asyncio.wait((work,), timeout=None if run.stopping is None else LAST_TURN_SECONDS)
                if not done:
                    # The loop hears of the end of a thread some callbacks later. A turn that has its result is none
                    # that took too long: the handler has moved on, as it will when it is replayed.
                    is_ended = not ended_by_itself.is_set()
                    if is_ended:
                        effect.stop()
                    await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.absorb_cancellation()
        return run.make_stop() if is_ended else work.result()
    except Exception as error:  # noqa: BLE001
        return run.stop_with_error(error)
    finally:
        run.busy = None


def _run_recorded_compute_in_place(run: RunTask, effect: Compute, run_objects: RunObjects) -> Single:
    """Restore recorded work in the event loop's thread, and return its outcome; an exception stops the run."""
    try:
        return run_compute(effect, run_objects)
    except Exception as error:  # noqa: BLE001
        return run.stop_with_error(error)


async def _perform_alone(run: RunTask, item: Item) -> Single:
    """Perform one effect in the run's own task and emit its events; exceptions become outcomes."""
    tree, effect = run.tree, item.effect
    shows = tree.hub.watched and not (isinstance(effect, AskPerson) and _register_and_is_already_asked(tree, effect))
    # Before its intent is durable for everything but questions: who watches a call has nothing to do yet, and must not
    # wait for the disk to see it begin.
    began = _emit_start_events_and_get_time(tree, item) if shows and not isinstance(effect, AskPerson) else None
    direct = run.direct if type(effect) in DIRECT else None
    performer = tree.performers.outermost if direct is None else direct
    outcome: Single
    run.busy = item
    try:
        if tree.suspension.is_replaying:
            await tree.suspension.hold_effect_if_new(item, begins=True)
        if performer is not tree.performers.innermost:
            await performer.begin((item,))
        if tree.suspension.is_replaying:
            await tree.suspension.hold_effect_if_new(item, begins=False)
        if shows and began is None:
            # Who is shown a question can answer it: it is durable by now, and open before anybody gets to see it.
            began = _emit_start_events_and_get_time(tree, item)
        outcome = await performer.perform(item, tree)
        if run.cancellation.task.cancelling():  # type: ignore[union-attr]  # it is driven
            run.record_outside_cancel()
    # The machine takes outcomes, and nothing else: an exception that went past it would leave a handler parked, calls
    # without results, and a journal without an end. `_outcome_from_exception` sorts them: ours, the caller's, or a broken performer's.
    except BaseException as error:  # noqa: BLE001
        outcome = _outcome_from_exception(run, item, error, alone=True)
    finally:
        run.busy = None
    if direct is None or began is not None:
        _apply_outcome_to_tree(tree, item, outcome, began, is_direct=direct is not None)
    return outcome


async def _perform_member(run: RunTask, item: Item) -> Single:
    """Perform a member of a ``Gather`` and show its events; exceptions become outcomes."""
    tree, effect = run.tree, item.effect
    shows = tree.hub.watched and not (isinstance(effect, AskPerson) and _register_and_is_already_asked(tree, effect))
    began = _emit_start_events_and_get_time(tree, item) if shows else None
    outcome: Single
    try:
        if tree.suspension.is_replaying:
            await tree.suspension.hold_effect_if_new(item, begins=False)
        outcome = await tree.performers.outermost.perform(item, tree)
    # As for a single effect, but what reaches this task is never a cancellation of the run: that reaches the run's own
    # task, which then cancels this one.
    except BaseException as error:  # noqa: BLE001
        outcome = _outcome_from_exception(run, item, error, alone=False)
    _apply_outcome_to_tree(tree, item, outcome, began)
    return outcome


def _apply_outcome_to_tree(
    tree: DrivenTree, item: Item, outcome: Single, start_ms: int | None, *, is_direct: bool = False
) -> None:
    """Apply an outcome to the tree; emit the end events of an effect whose start events were emitted at *start_ms*, if they were."""
    if is_direct and isinstance(item.effect, CallTool):
        # Three equal calls in a row are an event of their own (reliability:MP65), and the direct performer counts none.
        tree.performers.count_repeated_call(item, outcome, tree)
    # Here, outside of all performers, since an answer that comes out of a record passes by those that would notice it.
    if isinstance(item.effect, AskPerson):
        _record_permissions_and_limits(tree, item.effect, outcome)
    elif isinstance(item.effect, AwaitMessage):
        _remove_received_message(tree, item, outcome)
    if start_ms is not None:
        _emit_end_events(tree, item, outcome, start_ms)


def _record_permissions_and_limits(tree: DrivenTree, effect: AskPerson, outcome: Single) -> None:
    """Record lasting permissions and raised limits from an outcome, live or replayed."""
    if not isinstance(outcome, Value):
        return
    if effect.purpose == "limit":
        tree.questions.limits.remember_answer(effect.questions[0], outcome.value[0])
        tree.performers.increase_limit(effect.questions[0], outcome.value[0])
    else:
        # A yes "for the rest of the run" must hold after a crash as it did before, so it is learnt from the outcome,
        # which is recorded, and not from the dialogue, which is not.
        for question, answer in zip(effect.questions, outcome.value, strict=True):
            tree.questions.remembered.add_from_answer(question, answer)


def _remove_received_message(tree: DrivenTree, item: Item, outcome: Single) -> None:
    """Remove the message that a run has received, live or replayed, from the waiting ones."""
    message = find_received_message(item, outcome)
    if message is not None:
        tree.mail.remove(message)


def _register_and_is_already_asked(tree: DrivenTree, effect: AskPerson) -> bool:
    """Register a limit's question; return True if no question is shown: that limit was asked about, or rules answer all."""
    if effect.purpose == "limit":
        return not tree.questions.limits.register_if_first(effect.questions[0])
    return all(map(tree.questions.has_answering_rule, effect.questions))


def _emit_start_events_and_get_time(tree: DrivenTree, item: Item) -> int:
    """Emit the start events of an effect, and let a deferred call receive its result; return the time in monotonic ms."""
    if isinstance(item.effect, CallTool) and is_deferred_call(item):
        # Whoever sees that it began may have its result at once, before the call has come to its body.
        tree.deferred.expect_result(item)
    questions = tree.questions.get_or_render_questions(item) if isinstance(item.effect, AskPerson) else ()
    for event in make_start_events(item, questions):
        tree.emit(event)
    return tree.clock.now_ms()


def _emit_end_events(tree: DrivenTree, item: Item, outcome: Single, start_ms: int) -> None:
    """Emit the end events of an effect that started at *start_ms*, and forget its rendered questions or deferred call."""
    duration_ms = tree.clock.now_ms() - start_ms
    if isinstance(item.effect, CallTool) and tree.deferred.expected:
        tree.deferred.forget_call(item)
    elif isinstance(item.effect, AskPerson):
        tree.questions.forget_rendered_questions(item)
    for event in make_end_events(item, outcome, duration_ms):
        tree.emit(event)


def _outcome_from_exception(run: RunTask, item: Item, error: BaseException, *, alone: bool) -> Single:
    """Return the stop as the outcome of an effect that raised an exception, which stops the run; members' cancellations do not."""
    if isinstance(error, asyncio.CancelledError):
        # A member's task is cancelled by `cut` or by its race; the run's own task has another count of cancellations,
        # which is not to be touched from here.
        if alone:
            run.absorb_cancellation()
    else:
        stop_for_exception(run, error)
    return run.make_stop(item)


def stop_for_exception(run: RunTask, error: BaseException) -> Stop:
    """Stop the run for an exception: the caller's is raised there later, any other fails the run."""
    return run.crash_tree(error) if belongs_to_caller(error) else run.stop_with_error(error)


async def _perform_group(run: RunTask, effect: Gather) -> Gathered:
    """Perform the members of a ``Gather``; on a stop the running ones are cancelled and waited for."""
    together = _RunningGroup(run, effect)
    run.busy = together
    try:
        # Most groups are neither a race nor end with their first failure: then nothing is entered, and there is no one
        # way through it for each of the four cases.
        with ExitStack() as around:
            group = None
            if effect.races:
                raced = [together.items[n] for race in effect.races for n in range(*race)]
                around.enter_context(run.tree.performers.group_stopper.register_race_members(raced))
            if effect.fail_fast:
                made = FailFastGroup(run.tree.performers.group_stopper, together.items, has_failed=effect.has_failed)
                group = around.enter_context(made)
            await together.run(group)
    finally:
        run.busy = None
    # One outcome for each member, in the order in which they were asked for, whatever ended first: what ends first is a
    # matter of the network, and must leave no trace in a history (reliability:I2). Members that never began were
    # stopped.
    return Gathered(tuple([outcome or run.make_stop() for outcome in together.outcomes]))


def _get_slot_kind(item: Item) -> type[Leaf]:
    """Return the effect kind whose slots an effect uses. The body of a tool uses a slot of ``CallTool``."""
    return CallTool if isinstance(item.effect, CallTool) else type(item.effect)


class _RunningGroup:
    """
    The members of one ``Gather`` while it runs.

    They are admitted in request order, up to the width of the window. Recorders and budgets count a member as begun when it is
    admitted. Each starts as soon as there is room for its kind, so waiting children do not block other kinds. A tool call is
    admitted only when there is room for it, because a call that is recorded as begun and has no result is in doubt after a crash.
    """

    def __init__(self, run: RunTask, effect: Gather) -> None:
        # A limit of how many run at once exists twice: as it is for calls of models (`limits`, with defaults that keep
        # a model from starting 10,000 searches), and as somebody set it (`given`). A `concurrency=` that an author
        # writes is known to be meant, so the defaults do not narrow it.
        plan, width = run.plan, effect.concurrency
        limits = plan.limits if width is None else plan.given
        bounds = {Spawn: limits.max_concurrent_children, CallTool: limits.max_concurrent_tools}
        gather = effect if len(effect.effects) > 1 else None
        self.items = [Item(run.path, member, plan, gather) for member in effect.effects]
        self._races = [range(*race) for race in effect.races] if effect.races else []
        self.outcomes: list[Single | None] = [None] * len(self.items)
        self._run = run
        self._group: FailFastGroup | None = None
        self._free = len(self.items) if width is None else width
        self._next = 0
        self._room = {kind: len(self.items) if most is None else max(1, most) for kind, most in bounds.items()}
        self._waiting: dict[type[Any], deque[int]] = {}
        # By task, since that is what a done-callback is given; the item says what is to be cut or spared on a stop, and
        # whose room becomes free. An ordered dict, so that a cut reaches members in the order in which they began.
        self._running: dict[asyncio.Task[None], Item] = {}
        self._ended: asyncio.Future[None] | None = None
        self._beginning: list[Item] = []

    @property
    def running(self) -> list[Item]:
        return list(self._running.values())

    def are_all_waiting(self, is_waiting: Callable[[Item], bool]) -> bool:
        """Return whether every running member is waiting, and none is about to start."""
        if not self._beginning and self._run.stopping is None and self._get_admissible_members():
            return False
        items = [*self._running.values(), *self._beginning]
        return bool(items) and all(map(is_waiting, items))

    def cancel_running(self, is_spared: Callable[[Item], bool]) -> None:
        """Cancel the running members, except for the spared ones."""
        for task, item in self._running.items():
            if not is_spared(item):
                task.cancel()

    async def run(self, group: FailFastGroup | None = None) -> None:
        """Run all members to their end; after a stop no more of them start."""
        self._group = group
        # Not an `asyncio.gather`, and no TaskGroup: both end their siblings when one fails, and a failure here is an
        # entry beside the others. A cancellation is taken note of and the loop goes on, since the members have to end
        # first: nothing of a run may outlive it (reliability:R10).
        while self._running or (self._run.stopping is None and self._next < len(self.items)):
            try:
                if self._run.stopping is None and self._get_admissible_members():
                    await self._admit_members()
                else:
                    await self._wait_for_one_end()
            except asyncio.CancelledError:
                self._run.absorb_cancellation()
                for task in self._running:
                    task.cancel()
            except BaseException as error:  # noqa: BLE001
                stop_for_exception(self._run, error)

    def _get_admissible_members(self) -> range:
        """Return the members that may start now: the width of the window, up to the first tool call without room."""
        # In order, and up to the first that finds no room, although one behind it might: members are begun in the order
        # of their numbers, so that the record has no gap when the process dies here.
        room, end = self._room.get(CallTool, 0), min(self._next + self._free, len(self.items))
        for race in self._races:
            if race.start < end < race.stop:
                # Else the first in order would win: the others of the race would only begin when it has ended.
                end = race.stop
        for index in range(self._next, end):
            if isinstance(self.items[index].effect, CallTool):
                if not room:
                    return range(self._next, index)
                room -= 1
        return range(self._next, end)

    async def _admit_members(self) -> None:
        """Begin the next members in order, and start those with room; while runs replay, new members are held first."""
        batch = self._get_admissible_members()
        items, tree = [self.items[index] for index in batch], self._run.tree
        if tree.suspension.is_replaying:
            # What was begun before goes on to the end of its record, while what is new waits for that of every run.
            record = tree.services.record
            known = [item for item in items if record is None or record.has_begun(item)]
            if known and len(known) < len(items):
                items, batch = known, range(batch.start, batch.start + len(known))
            else:
                self._beginning = items[:1]
                await tree.suspension.hold_effect_if_new(items[0], begins=True)
        if len(items) > 1:
            # A model call without room waits before it begins, and so before it is recorded as sent.
            count = tree.performers.count_startable(items)
            items, batch = items[:count], batch[:count]
        self._next += len(batch)
        self._free -= len(batch)
        self._beginning = items[:1]  # while a journal in a file takes its moment for them, others of them may wait
        # All intents of the window at once: a journal on a disk syncs once for them, and not once for each.
        await tree.performers.outermost.begin(items)
        # By kind, since children that wait for room must not keep a tool call waiting behind them, which has room of
        # its own.
        for index in batch:
            self._waiting.setdefault(_get_slot_kind(self.items[index]), deque()).append(index)
        self._start_members()
        self._beginning = []

    def _start_members(self) -> None:
        """Start the admitted members whose kind has room."""
        for kind, indices in self._waiting.items():
            while indices and self._room.setdefault(kind, len(self.items)) and self._run.stopping is None:
                self._room[kind] -= 1
                index = indices.popleft()
                # Made only now, and not for all members at the start with a semaphore in each: 10,000 members would be
                # 10,000 tasks with their frames before the first has begun, and which of them a semaphore lets in next
                # is nothing that an order of intents could be built on.
                task = asyncio.create_task(self._run_member(index))
                self._running[task] = self.items[index]
                task.add_done_callback(self._free_slot_and_start_members)

    async def _run_member(self, index: int) -> None:
        """Perform one member and store its outcome; it may stop a fail-fast group or win a race."""
        item = self.items[index]
        # Between `create_task` and this first line the loop has turned, and a stop may have come. The outcome stays
        # `None`, so it counts as never begun.
        if self._run.stopping is not None:
            return
        if self._group is not None:
            self._group.register_or_refuse_start(item)
        self.outcomes[index] = outcome = await _perform_member(self._run, item)
        if self._group is not None:
            self._group.stop_others_on_failure(outcome)
        # What a fork keeps of a race whose winner it cut off is no end of that race.
        for race in self._races:
            if index in race:
                self._finish_race(race, ends=not has_lost_or_stopped(outcome))

    def _finish_race(self, race: range, *, ends: bool) -> None:
        """Cancel the losers once a member *ends* a race; when all have ended, return a loser's message to its topic."""
        # A member is given up and not cancelled by its task: it may be a child with handlers to close, or have its
        # result already on the way. Whatever a loser had received is put back, or a message would be lost with the
        # race.
        left = [self.items[n] for n in race if self.outcomes[n] is None]
        if ends:
            self._run.tree.performers.group_stopper.cancel_race_losers(left)
        if left:
            return
        outcomes = [cast("Single", self.outcomes[n]) for n in race]
        won = race[get_race_winner_index(outcomes)]
        for n, outcome in zip(race, outcomes, strict=True):
            message = find_received_message(self.items[n], outcome)
            if message is not None and n != won:
                self._run.tree.mail.put_back_message(message)

    def _free_slot_and_start_members(self, task: asyncio.Task[None]) -> None:
        """Free the slot of a member that has ended, start waiting members and wake the group."""
        self._room[_get_slot_kind(self._running.pop(task))] += 1
        # A member turns everything into an outcome, so this is a bug of ours. Without it the missing outcome would be
        # told as a cancellation.
        if not task.cancelled() and (error := task.exception()) is not None:
            stop_for_exception(self._run, error)
        self._free += 1
        self._start_members()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        suspension = self._run.tree.suspension
        if suspension.parked or suspension.held:
            suspension.release_or_suspend_idle_tree()

    async def _wait_for_one_end(self) -> None:
        """Wait until a member ends."""
        # One future that the next end sets, and not `asyncio.wait(..., FIRST_COMPLETED)`: that puts a callback on each
        # running task and takes it off again at each end. With 100 members under way an end cost 24 us so and costs 6,
        # with 4,000 it was 729 and is 9.
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._ended
        finally:
            self._ended = None


async def _yield_to_loop(run: RunTask) -> None:
    """Let the event loop run once, so that a stop can arrive."""
    run.busy = True
    try:
        # A turn of the loop is a place where a stop arrives; `busy` says that there is something to cancel, and the
        # cancellation is taken note of like one in an effect.
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        run.absorb_cancellation()
    finally:
        run.busy = None
