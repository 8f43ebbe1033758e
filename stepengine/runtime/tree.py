"""
What the runs of one tree share: performer, events, clock, ledgers, retries, and the way in which children are driven.

A ``RunTree`` is the ``IO`` of its performers. It is made for one root run and forgotten with it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import frozen

from stepengine.data.effects import Spawn
from stepengine.data.events import Event, PhaseChanged, RunFailed
from stepengine.data.json import thaw
from stepengine.data.messages import UserMessage
from stepengine.data.outcomes import Begun, Failure, Outcome, Stop
from stepengine.data.questions import AnswerLike, Interactor, Question
from stepengine.data.state import AgentState, RunPhase, RunStatus
from stepengine.data.usage import Usage
from stepengine.errors import AgentError, AnswerRejected, StepEngineError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.signals import is_callers
from stepengine.runtime.asking import OpenQuestions, Remembered
from stepengine.runtime.background import BackgroundChildren
from stepengine.runtime.clock import Clock, SystemClock, TreeClock, stop_for_time
from stepengine.runtime.driver import RunTask, drive
from stepengine.runtime.hub import Hub
from stepengine.runtime.mail import Mail, Message, PostBox, answer_in
from stepengine.runtime.performer import Item, Middleware
from stepengine.runtime.performer_stack import PerformerStack
from stepengine.runtime.performing import NOTHING, Deferred, ModelRegistry, ToolSetting
from stepengine.runtime.prices import Pricing
from stepengine.runtime.rates import Rates
from stepengine.runtime.retry import RetryPolicy
from stepengine.runtime.standstill import Standstill, waits_of
from stepengine.runtime.watchdog import Watchdog
from stepengine.tooling.context import Belongings

if TYPE_CHECKING:
    from stepengine.system.writes import FileWrite

__all__ = ("ChildPlanner", "MachineMaker", "RunTree", "Services")

# A letter comes from somebody who does not hold the run and cannot press again, so what is under way gets a chance to
# be no doubt later. Whoever holds the run says how long.
GRACE = 5.0
"""Seconds that effects which cannot simply happen again have to come to their end when a letter cancels their run."""
MachineMaker = Callable[[RunPlan, AgentState], Generator[Any, Outcome | None, Finished]]
"""Makes the machine of a run; ``stepengine.machine.run_agent`` is one."""
ChildPlanner = Callable[[RunPlan, Any, str], tuple[RunPlan, AgentState]]
"""Gives what the child at a path is started with that the run of a plan asks for, or raises why it must not start."""


def _no_children(_: RunPlan, effect: Spawn, path: str) -> tuple[RunPlan, AgentState]:
    # A tree without an engine, as in tests of performers: to ask for a child there is an error that says so, and no
    # AttributeError.
    msg = f"agent {effect.agent_id!r} is not known here; nothing was started at {path!r}"
    raise StepEngineError(msg)


def _no_window(_: str) -> int | None:
    return None


class Level(Protocol):
    """What is recorded of a tree that goes on at several places at once."""

    def has_begun(self, item: Item) -> bool:
        """Return whether an effect was begun, or never will be."""

    def has_outcome(self, item: Item) -> bool:
        """Return whether nothing new has to happen for an effect; when it starts a run, the effects of that run are asked about one by one."""


@frozen(kw_only=True, weakref_slot=False)
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
        sleep_in_process: Seconds up to which a wait for a time is none for which a tree is suspended.
        since: What time it was for the run when this process took over, in milliseconds since the root was created; ``None``
            where its times are made up.
        resumable: Whether somebody can resume a tree that is suspended, because it is recorded.
        wakes_now: Whether sleeps that are recorded are over at once, whatever time it is.
        mail: What keeps the messages that were sent to its runs; ``None`` for this process alone.
        record: Says what is in the record of a tree that goes on at several places at once: nothing else begins before all of its
            runs have come to the end of what is. ``None`` for any other tree.
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
    sleep_in_process: float = 60.0
    since: int | None = 0
    resumable: bool = False
    wakes_now: bool = False
    mail: PostBox | None = None
    record: Level | None = None


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
        performers: What performs the effects of its runs.
        orphans: How children ended whose parent could not wait for them any more, by path.
        stopped_calls: What model calls had used that were stopped, by path and number, until their outcome says so.
        leaked: Names of threads that could not be stopped.
        spawned_by: The tool call that spawned the child at a path; ``""`` for a handler's.
        signal: ``is_set()`` says whether the tree is being stopped.
        reraise: What is the caller's and not the run's, such as a ``KeyboardInterrupt`` out of a tool; it is raised when the
            tree has ended.
        inbox: Messages for the root run that were not delivered yet; *inboxes* has those of its children, by path.
        standstill: What its runs wait for.
        background: The children in the background.
        mail: The messages that were sent to its runs.
        suspended: The open questions of children in the background that were suspended, by id.
        is_held: Whether somebody has a handle of it.
        is_replaying: Whether nothing new may begin before every run of it has come to the end of its record.
        deferred: The tool calls that wait for their results from outside.
        runs: Those that are under way, by path.
        elsewhere: What says that a child must end, of those that another process drives, by path.
    """

    # Of a class of more than 30 attributes each object has a table of their names of its own: 1.3 KB of each run that waits.
    __slots__ = (
        "__weakref__",
        "_belongings",
        "_loop",
        "_patience",
        "_thread",
        "background",
        "clock",
        "deferred",
        "desk",
        "elsewhere",
        "emit",
        "hub",
        "inbox",
        "inboxes",
        "leaked",
        "mail",
        "orphans",
        "performers",
        "reraise",
        "root",
        "runs",
        "services",
        "signal",
        "spawned_by",
        "standstill",
        "stopped_calls",
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
        self.leaked: list[str] = []
        self.spawned_by: dict[str, str] = {}
        self.inbox: list[UserMessage] = []
        self.deferred = Deferred()
        self.runs: dict[str, RunTask] = {}
        self.elsewhere: dict[str, asyncio.Future[Stop]] = {}
        # The next three hold what a cancelled wait cannot return, until the outcome that tells of it is made. They are
        # the tree's, since whoever makes that outcome may be another run of it than the one that was cancelled.
        self.orphans: dict[str, Any] = {}
        self.stopped_calls: dict[tuple[str, int], Begun] = {}
        self.reraise: BaseException | None = None
        self.standstill = Standstill(self)
        self.background = BackgroundChildren(self)
        self.inboxes: dict[str, list[UserMessage]] = {}
        self.root = RunTask(self, plan, state, plan.path)
        self.signal = _Signal(self.root)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._patience: asyncio.TimerHandle | None = None
        self._belongings: dict[str, Belongings] = {}
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
        self.mail = Mail(services.mail, self.steer, self.hub.warnings.append)
        self.standstill.is_replaying = services.record is not None
        self.performers = PerformerStack(self, services, plan.run_id)

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

    def stop_child(self, path: str, stop: Stop) -> None:
        """End the child in the background at *path*, and all below it."""
        self._stop_run(path, stop)
        self.standstill.release(path)

    def end_run(self, path: str, reason: str) -> None:
        """End the run at *path*, and all below it."""
        self._stop_run(path, Stop("cancelled", error=AgentError(reason)))

    def _stop_run(self, path: str, stop: Stop) -> None:
        # A child is driven here, or by another worker: who ends it need not know which. A future that is done already
        # has said why.
        run, ending = self.runs.get(path), self.elsewhere.get(path)
        if run is not None:
            run.stop(stop)
        if ending is not None and not ending.done():
            ending.set_result(stop)

    def post(self, message: Message) -> bool:
        """Send a message to a run of the tree, which is under way; return whether it is new. From any thread but the loop's."""
        # Kept first, told then: what the sender was told is kept must not be lost when this process ends in between.
        # The loop is told afterwards, and finds the message in the mailbox if this is too late.
        is_new = self.mail.post(message)
        loop = self._loop
        if is_new and loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.mail.arrive, message)
        return is_new

    def steer(self, message: Message) -> None:
        """Do what somebody outside sent: answer a question, end a run, say something to one."""
        said = str(message.value)
        match message.kind:
            case "input" if message.path:
                self.inboxes.setdefault(message.path, []).append(UserMessage(said))
            case "input":
                self.inbox.append(UserMessage(said))
            # A child in the background is ended by way of who keeps account of it: how it ended is told to its parent,
            # and the reason with it.
            case "cancel" if message.path:
                known = self.background.is_at_work(message.path)
                self.background.end((message.path,), said) if known else self.end_run(message.path, said)
            case "cancel":
                self.hub.warnings.append(f"the run was cancelled by a letter{f': {said}' if said else ''}")
                self.interrupt(GRACE)
            case "answer":
                self._answer(message)
            case "result":
                self.deferred.settle((message.path, int(message.topic)), thaw(message.value))
            case "message":
                pass

    def _answer(self, message: Message) -> None:
        try:
            self.desk.answer(message.topic, answer_in(message.value))
        # Somebody was told that the answer arrived, so it cannot simply vanish: that it was left out, and why, stands
        # in the record and in the run's warnings.
        except AnswerRejected as error:
            if self.desk.is_left(message.topic):
                return  # it came in the moment in which the run lies down, and is there for whoever goes on
            self.mail.refuse(message, error.message)
            self.hub.warnings.append(f"an answer that was sent was left out: {error.message}")

    def begun(self, item: Item) -> Begun | None:
        """Return what a model call had used that was stopped."""
        return self.stopped_calls.get((item.path, item.effect.seq))

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
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        watchdog = Watchdog.of_running_loop()
        watchdog.enter(self)
        # An observer may raise what is the caller's (a failing test): the run ends because of it, and does not go on to
        # the next step.
        self.hub.on_crash = self.root.crashed
        self.runs[self.root.path] = self.root
        self.mail.begin()
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
        # A second call is somebody who has lost patience. The first one set `stopping` already.
        if grace <= 0 or root.stopping is not None or loop is None or loop.is_closed():
            root.stop(Stop("cancelled"))
            return
        root.spares = True
        root.stopping = Stop("cancelled")
        loop.call_soon_threadsafe(self._spare, root.stopping, grace)

    def _spare(self, stop: Stop, grace: float) -> None:
        if not self.root.spares:
            return
        # Nothing under way would be in doubt, so there is nothing to be patient for.
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
        # The timer would hold the whole tree for the seconds that it has left.
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        # Each run refers to its tree and the tree to its runs. Left alone, thousands of finished trees wait for the
        # collector of cycles, which then stops the process for as long as all of them take.
        self.runs.clear()
        self.mail.close()
        self.standstill.close()
        self.background.close()
        del self.performers
        self.hub.on_crash = self.hub.history = None
        self.root.release()

    def belongings(self, path: str) -> Belongings:
        """Return what tools keep for the run at *path* until it ends."""
        return self._belongings.setdefault(path, Belongings())

    async def _end_belongings(self, run: RunTask) -> None:
        """End what tools kept for a run, to the end however often this task is cancelled; the result mentions it."""
        kept = self._belongings.pop(run.path)
        # A task of its own, waited for to its end: what is closed are processes and temporary folders, which a
        # cancellation in the middle would leave behind (reliability:R10).
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
        # At once where that is possible: sent by way of the loop, an event of a tool would come behind the end of its
        # own call.
        if threading.get_ident() == self._thread:
            self.emit(event)
        # A tool in a thread may outlive its run by a moment; what it says then is for nobody.
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.emit, event)

    async def drive(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Run a child in a task of its own; a cancelled wait stops the child, waits for it, then goes on."""
        run = self.runs[path] = RunTask(self, plan, state, path)
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
            self.orphans[path] = finished.as_child() if plan.body is None else finished.as_body()
            raise

    async def _run(self, run: RunTask) -> Finished:
        plan = run.plan
        # Before the machine is made: its first effect reserves in the ledger.
        run.direct = self.performers.open(run)
        self.hub.seat(run.path, run.state.run_id, plan.definition.id)
        run.enter()
        if self.mail.is_kept:
            self._hear(run.path)
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
            if run.path in self._belongings:
                await self._end_belongings(run)
            run.leave()
            self._forget(run.path)

    def _hear(self, path: str) -> None:
        """Give a resumed run what was said to it before and did not reach it."""
        unheard = [UserMessage(text) for text in self.mail.unheard(path)]
        if unheard:
            (self.inboxes.setdefault(path, []) if path else self.inbox).extend(unheard)

    def _forget(self, path: str) -> None:
        """Forget a run that has ended, so that ten thousand children leave no more behind than one."""
        self.runs.pop(path, None)
        self.clock.forget(path)
        self.inboxes.pop(path, None)
        if self.standstill.parked or self.standstill.held:
            self.standstill.look()
        # Addresses are few at any time: only calls that were stopped and not told of yet.
        for address in [address for address in self.stopped_calls if address[0] == path]:
            del self.stopped_calls[address]
        self.performers.forget(path)
        if path:
            self.hub.unseat(path)
            self.spawned_by.pop(path, None)


class _Signal:
    """Says whether a run is being stopped; what ``ToolContext.cancelled`` asks."""

    __slots__ = ("_root",)

    def __init__(self, root: RunTask) -> None:
        self._root = root

    def is_set(self) -> bool:
        """Return whether what is under way has to end."""
        # Not while it is spared: a tool that looks at this ends by itself, and what it does is to be finished.
        return self._root.stopping is not None and not self._root.spares


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
