"""
What the runs of one tree share: performer, events, clock, ledgers, retries, and the way in which children are driven.

A ``RunTree`` is the ``IO`` of its performers. It is made for one root run and forgotten with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs

from stepengine.data.effects import Spawn
from stepengine.data.events import Event, PhaseChanged, RunFailed
from stepengine.data.makers import changer_of
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Begun, Failure, Outcome, Stop
from stepengine.data.questions import AnswerLike, Interactor, Question
from stepengine.data.state import AgentState, RunPhase, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import LimitExceeded, StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import is_callers
from stepengine.runtime.asking import Desk, Remembered
from stepengine.runtime.clock import Clock, SystemClock
from stepengine.runtime.driver import RunTask, drive
from stepengine.runtime.failfast import Brake
from stepengine.runtime.hub import Hub
from stepengine.runtime.limits import Gate, Ledger, Ledgers, Meter, Refusals, Repeats
from stepengine.runtime.performer import Item, Middleware, Performer
from stepengine.runtime.performing import NOTHING, Deferred, Innermost, ModelRegistry, Pricing, ToolSetting
from stepengine.runtime.rates import Rates
from stepengine.runtime.retry import Retries, RetryPolicy
from stepengine.runtime.watchdog import Watchdog
from stepengine.tooling.context import Belongings

if TYPE_CHECKING:
    from stepengine.system.writes import FileWrite

__all__ = ("ChildPlanner", "MachineMaker", "RunTree", "Services", "lent")

MachineMaker = Callable[[RunPlan, AgentState], Generator[Any, Outcome | None, Finished]]
"""Makes the machine of a run; ``stepengine.machine.run_agent`` is one."""
ChildPlanner = Callable[[RunPlan, Any, str], tuple[RunPlan, AgentState]]
"""Gives what the child at a path is started with that the run of a plan asks for, or raises why it must not start."""


def _no_children(_: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
    msg = f"agent {effect.agent_id!r} is not known here; nothing was started at {path!r}"
    raise StepEngineError(msg)


def _no_window(_: str) -> int | None:
    return None


@attrs.frozen(kw_only=True, weakref_slot=False)
class Services:
    """
    What an engine lends to the trees of its runs.

    Attributes:
        machine: Makes the machine of a run.
        models: Where providers come from.
        tools: What tools are run with.
        pricing: What replies cost; ``None`` for nothing but what providers say.
        window: Gives a model's context length in tokens, when known.
        planner: Turns a ``Spawn`` into what its child is started with, or raises why it must not start.
        interactor: Somebody who answers questions in process.
        remembered: What people allowed for good in the conversation; by default the run tree stands alone.
        retry: How model calls are tried again.
        rates: How often providers are asked; ``None`` for no limits.
        seed: What is random while effects are performed depends on it; by default on the run's id.
        clock: Time and sleep.
        middlewares: What wraps the innermost performer of every tree, from the inside out: recorders and the like.
        outermost: What wraps everything else.
        keep_write: Takes the address of a call and what is needed to undo a write of it; ``None`` where nobody keeps that.
    """

    machine: MachineMaker
    models: ModelRegistry
    tools: ToolSetting = attrs.field(factory=ToolSetting)
    pricing: Pricing | None = None
    window: Callable[[str], int | None] = _no_window
    planner: ChildPlanner = _no_children
    interactor: Interactor | None = None
    remembered: Remembered | None = None
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)
    rates: Rates | None = None
    seed: str = ""
    clock: Clock = attrs.field(factory=SystemClock)
    middlewares: Sequence[Middleware] = ()
    outermost: Sequence[Middleware] = ()
    keep_write: Callable[[str, int, FileWrite], None] | None = None


lent = changer_of(Services, "models", "tools", "window", "planner", "remembered", "seed")
"""What one tree is lent of the services of an engine: these are its own."""


class _Wrapping(NamedTuple):
    """What stands around the innermost performer, from the inside out; the gate is not asked for by anybody."""

    brake: Brake
    recording: Performer
    meter: Meter
    repeats: Repeats
    outermost: Performer


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
        root: The root run.
        innermost: What performs effects in the end.
        orphans: How children ended whose parent could not wait for them any more, by path.
        stopped_calls: What model calls had used that were stopped, by path and number, until their outcome says so.
        leaked: Names of threads that could not be stopped.
        spawned_by: The tool call that spawned the child at a path; ``""`` for a handler's.
        signal: ``is_set()`` says whether the tree is being stopped.
        reraise: What is the caller's and not the run's, such as a ``KeyboardInterrupt`` out of a tool; it is raised when the
            tree has ended.
        inbox: Messages for the root run that were not delivered yet.
        deferred: The tool calls that wait for their results from outside.
        runs: Those that are under way, by path.
    """

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
        self.emit: Callable[[Event], None] = hub.emit
        self.desk = Desk(
            answers or {}, services.interactor, services.tools.threads, earlier, of_session=services.remembered
        )
        self.leaked: list[str] = []
        self.spawned_by: dict[str, str] = {}
        self.inbox: deque[UserMessage] = deque()
        self.deferred = Deferred()
        self.runs: dict[str, RunTask] = {}
        self.orphans: dict[str, Any] = {}
        self.stopped_calls: dict[tuple[str, int], Begun] = {}
        self.reraise: BaseException | None = None
        self.root = RunTask(self, plan, state, plan.path)
        self.signal = _Signal(self.root)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._patience: asyncio.TimerHandle | None = None
        self._ledgers = Ledgers()
        self.deadlines: dict[str, tuple[float, float]] = {}
        self._belongings: dict[str, Belongings] = {}
        self._wrapping: _Wrapping | None = None
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
        """Let the root start from these, before it runs: what a session holds is known only when it was loaded."""
        self.root.plan, self.root.state, self.root.path = plan, state, plan.path
        self.desk.give(answers or {}, earlier)
        self._lend(services, plan)

    def _lend(self, services: Services, plan: RunPlan) -> None:
        self.services = services
        self.hub.run_id = plan.run_id
        self._created: datetime = plan.created
        self._now_ms = services.clock.now_ms
        self._start = self._now_ms()
        self.innermost = Innermost(self, Retries(services.retry, services.seed or plan.run_id))
        self._wrapping = None
        if services.middlewares or services.outermost:
            self._wrap()  # who records has to know of the run before it starts

    @property
    def performer(self) -> Performer:
        """The outermost performer; what stands around the innermost is put up when it is first needed."""
        return (self._wrapping or self._wrap()).outermost

    @property
    def brake(self) -> Brake:
        """What stops the children of a group of which one has failed."""
        return (self._wrapping or self._wrap()).brake

    def _wrap(self) -> _Wrapping:
        services, refusals = self.services, Refusals()
        brake = Brake(self.innermost, refusals, self.elapsed)
        performer: Performer = Gate(brake, refusals, self.elapsed)
        for wrap in services.middlewares:
            performer = wrap(performer)
        recording = performer
        performer = meter = Meter(performer, refusals, self._ledgers, self._price)
        performer = repeats = Repeats(performer, refusals)
        for wrap in services.outermost:
            performer = wrap(performer)
        self._wrapping = _Wrapping(brake, recording, meter, repeats, performer)
        return self._wrapping

    def _direct(self, run: RunTask) -> Performer | None:
        """
        Return what all effects of a run but its children may go to: who records, or the innermost performer.

        That is so where nothing traces, no budget is set, repeated calls are not counted, and the run is in no group of which
        one failure ends all. Through all of them a bare step took 33.8 us instead of 29.8, one that is recorded in memory 56.5
        instead of 53.7, side by side.
        """
        services, wrapping = self.services, self._wrapping
        if services.outermost or run.plan.limits.max_identical_calls is not None or self._ledgers.of(run.path).bounded:
            return None
        if wrapping is not None and wrapping.brake.reaches(run.path):
            return None
        if wrapping is None or not services.middlewares:
            return self.innermost
        return wrapping.recording

    def _price(self, model: str, usage: Usage) -> Decimal | None:
        return None if self.services.pricing is None else self.services.pricing(model, usage, self.now())

    def ledger(self, path: str) -> Ledger:
        """Return what the run at *path*, which is under way, has spent and reserved."""
        return self._ledgers.of(path)

    @property
    def watched(self) -> bool:
        """Whether anybody is shown events."""
        return self.hub.watched

    def attempt(self, failure: Failure, usage: Usage | None) -> None:
        """Take note of a failed attempt; whoever records wraps this."""

    def waits(self, item: Item) -> Awaitable[None]:
        """Take note that a call only waits for its result; whoever records wraps this."""
        return NOTHING

    def begun(self, item: Item) -> Begun | None:
        """Return what a model call had used that was stopped."""
        return self.stopped_calls.get((item.path, item.effect.seq))

    def elapsed(self) -> int:
        """Return milliseconds since the root run was created."""
        return self._now_ms() - self._start

    def now(self) -> datetime:
        """Return the run's time (UTC)."""
        return self._created + timedelta(milliseconds=self.elapsed())

    async def wait_for(self, coming: Callable[[], Awaitable[object]]) -> bool:
        """
        Wait for something before the root runs, such as its turn; return whether it came.

        It did not when the run was stopped or cancelled meanwhile, or when the wait took longer than the run may take.
        """
        root, seconds = self.root, self.root.plan.limits.max_seconds
        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, seconds), root.stop, _too_late(seconds))
        root.enter()
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
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        watchdog = Watchdog.of_running_loop()
        watchdog.enter(self)
        self.hub.on_crash = self.root.crashed
        self.runs[self.root.path] = self.root
        try:
            finished = await self._run(self.root)
            return _broken_off(finished, self.reraise)
        finally:
            watchdog.leave(self)
            self._let_go()

    def interrupt(self, grace: float) -> None:
        """
        End all runs: what is under way and cannot happen again has *grace* seconds to come to its end; from any thread.

        Nothing else begins, and what may simply happen again is cut at once. Called again, or with any other reason to
        stop, everything is.
        """
        root, loop = self.root, self._loop
        if grace <= 0 or root.stopping is not None or loop is None or loop.is_closed():
            root.stop(Stop("cancelled"))
            return
        root.spares = True
        root.stopping = Stop("cancelled")
        loop.call_soon_threadsafe(self._spare, root.stopping, grace)

    def _spare(self, stop: Stop, grace: float) -> None:
        if not self.root.spares:
            return
        if not self.finishing():
            self.root.stop(stop)
            return
        assert self._loop is not None  # noqa: S101 - it is called in that loop
        self._patience = self._loop.call_later(grace, self.root.stop, stop)
        for run in list(self.runs.values()):
            run.spare(stop)

    def finishing(self) -> list[Item]:
        """Return what is under way, and would be in doubt if it were cut."""
        return [item for run in list(self.runs.values()) for item in run.lasting()]

    def _let_go(self) -> None:
        """Cut the circles, so that a finished tree is freed at once and not by the collector."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self.runs.clear()
        self._wrapping = None
        del self.innermost
        self.hub.on_crash = self.hub.history = None
        self.root.release()

    def belongings(self, path: str) -> Belongings:
        """Return what tools keep for the run at *path* until it ends."""
        return self._belongings.setdefault(path, Belongings())

    async def _end_belongings(self, run: RunTask) -> None:
        """End what tools kept for a run, to the end however often this task is cancelled; the result mentions it."""
        kept = self._belongings.pop(run.path)
        work = asyncio.create_task(kept.aclose())
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.notice_cancel()
        try:
            self.hub.warnings += work.result()
        except BaseException as error:
            if not is_callers(error):
                raise
            run.crashed(error)

    def emit_from_anywhere(self, event: Event) -> None:
        """Show an event of a tool, which may run in a thread of its own; the order of one caller's events is kept."""
        if threading.get_ident() == self._thread:
            self.emit(event)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.emit, event)

    async def drive(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Run a child in a task of its own; a cancelled wait stops the child, waits for it, then goes on."""
        run = self.runs[path] = RunTask(self, plan, state, path)
        if self.root.spares:
            run.stopping = self.root.stopping
        task = asyncio.create_task(self._run(run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.stop(Stop("cancelled"))
            while not task.done():
                try:
                    await asyncio.wait((task,))
                except asyncio.CancelledError:
                    continue
            finished = task.result()
            self.orphans[path] = finished.as_child() if plan.body is None else finished.as_body()
            raise

    async def _run(self, run: RunTask) -> Finished:
        plan = run.plan
        self._ledgers.open(run.path, plan)
        run.direct = self._direct(run)
        self.hub.seat(run.path, run.state.run_id, plan.definition.id)
        run.enter()
        seconds = plan.limits.max_seconds
        timer = None
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self.deadlines[run.path] = (loop.time() + seconds, seconds)
            timer = loop.call_later(max(0.0, seconds), run.stop, _too_late(seconds))
        try:
            return await drive(self.services.machine(plan, run.state), run)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001
            if not is_callers(error):
                return _lost(run, error)
            run.crashed(error)
            if not isinstance(error, KeyboardInterrupt | SystemExit):
                self.emit(RunFailed(path=run.path, error=str(error), kind=type(error).__name__))
                self.emit(PhaseChanged(path=run.path, phase=RunPhase.FAILED))
            return _broken_off(Finished(status=RunStatus.CANCELLED, state=run.state), error)
        finally:
            if timer is not None:
                timer.cancel()
            if run.path in self._belongings:
                await self._end_belongings(run)
            run.leave()
            self._forget(run.path)

    def too_late(self, path: str) -> Stop | None:
        """
        Return why the run at *path* must end because its time is over, or that of a run around it.

        Timers say so, too, but not while synchronous code keeps the loop from turning, such as a scripted model's.
        """
        own = True
        while self.deadlines and self._loop is not None:
            deadline = self.deadlines.get(path)
            if deadline is not None and self._loop.time() >= deadline[0]:
                return _too_late(deadline[1], self.elapsed()) if own else Stop("cancelled", self.elapsed())
            if not path:
                break
            path, own = path.rpartition(".")[0], False
        return None

    def _forget(self, path: str) -> None:
        """Keep nothing of a run that has ended, so that ten thousand children leave no more behind than one."""
        self.runs.pop(path, None)
        self.deadlines.pop(path, None)
        for address in [address for address in self.stopped_calls if address[0] == path]:
            del self.stopped_calls[address]
        if self._wrapping is not None:
            self._wrapping.meter.forget(path)
            self._wrapping.repeats.forget(path)
        if path:
            self.hub.unseat(path)
            self.spawned_by.pop(path, None)
            self._ledgers.close(path)


class _Signal:
    """Says whether a run is being stopped; what ``ToolContext.cancelled`` asks."""

    __slots__ = ("_root",)

    def __init__(self, root: RunTask) -> None:
        self._root = root

    def is_set(self) -> bool:
        """Return whether what is under way has to end."""
        return self._root.stopping is not None and not self._root.spares


def _too_late(seconds: float, at: int = 0) -> Stop:
    msg = f"the run took longer than max_seconds={seconds:g}"
    return Stop("limit", at, LimitExceeded(msg, kind="seconds", limit=seconds))


def _broken_off(finished: Finished, error: BaseException | None) -> Finished:
    """Return how a run ended that *error* of the caller's broke off, if it did; one that was interrupted is cancelled."""
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        return finished
    return attrs.evolve(finished, status=RunStatus.FAILED, error=error)


def _lost(run: RunTask, error: BaseException) -> Finished:
    """Return how a run ends whose machine broke: it takes nothing else down."""
    if not isinstance(error, StepEngineError):
        msg = f"the run of {run.plan.definition.id!r} broke with {type(error).__name__}: {error}"
        wrapped = StepEngineError(msg)
        wrapped.__cause__ = error
        return Finished(status=RunStatus.FAILED, state=run.state, error=wrapped)
    return Finished(status=RunStatus.FAILED, state=run.state, error=error)
