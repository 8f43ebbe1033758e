"""
``Steps``: the performer that makes the effects of one run durable.

It stands where a recorder stands, between the meter of limits and the gate. Before effects begin, everything whose number
in the database counts is reserved, in program order and in the run's own task: markers, intents, the steps of results.
What is performed then is recorded under the number that was reserved for it, whenever it ends. Here no rule of the machine
is known, and nothing that follows from one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import attrs

from stepengine.data.effects import (
    CHILD_ENDS,
    RUNS,
    WAITS,
    AskPerson,
    CallBody,
    CallModel,
    EndRuns,
    Leaf,
    RunInBackground,
    SendToRun,
    Spawn,
)
from stepengine.data.events import Event, Warned
from stepengine.data.json import freeze_object
from stepengine.data.limits import Limits
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import BodyEnd, Failure, Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.data.tools import Yielding
from stepengine.data.usage import Usage
from stepengine.durable.database import CHILD_POLL_SECONDS, WORKFLOW, list_driver_errors, queue_name
from stepengine.durable.messages import MessageDelivery, make_database_topic
from stepengine.durable.sessions import Sessions
from stepengine.durable.step_records import ReservedStep, StepRecords
from stepengine.durable.wire import (
    Ancestor,
    Order,
    Seed,
    encode_body_end,
    encode_outcome,
    encode_values,
    mark_usage_uncertain,
    parse_answers,
    parse_body_end,
    parse_child_end,
    parse_left,
    parse_outcome,
)
from stepengine.errors import AgentError, DataError, ReplayDivergence, StepEngineError, UnknownOutcome
from stepengine.journal.divergence import find_waiting_location
from stepengine.journal.encoding import bare, encode_effect, restored
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.recorded_clock import RunClock
from stepengine.journal.recorder import Attempts
from stepengine.journal.records import format_address
from stepengine.machine.plan import Finished, RunPlan
from stepengine.redaction import Redactor
from stepengine.runtime.failfast import LOST, make_race_loss_outcome
from stepengine.runtime.innermost import is_deferred
from stepengine.runtime.limits import SpendingLedger
from stepengine.runtime.logs import LOGGER
from stepengine.runtime.performer import IO, Item, Performer, child_path, is_repeatable
from stepengine.runtime.questions import render_questions
from stepengine.runtime.standstill import list_waits
from stepengine.runtime.tree import RunTree

T = TypeVar("T")
MODEL, TOOL = "model", "tool"
SPAWN, CHILD, ASK, INTENT, LOOKUP, END = "spawn", "child", "ask", "intent", "lookup", "end"
BODY, RESULT = "body", "result"
"""Kinds of steps: the body of a tool that was called alone begins; its result, where two are told apart."""
START = "start"
WAIT = "wait"
"""A kind of step: a wait begins, and what for; its outcome comes next."""
# Short names, since they stand in every row's name in the database, and fixed ones: a row that was written once is
# compared by its name for ever.
KINDS = {"model_call": MODEL, "tool_call": TOOL, "agent_call": CHILD, "wait": "await", "send": "tell"}
"""The kind of the step with the outcome of an effect, where it is not the kind of the effect's record."""
REASON = "reason"
"""An attribute of a child that its parent ended: why."""
AGAIN = ("takeover", "again")
"""Attributes of runs that an operator gave to another worker, which makes the count of their executions begin anew."""
LONG_RUN_EFFECTS = 5_000
"""How many effects a run may have before whoever watches it is told that resuming it takes long."""
# The package waits only with a time limit, so a question that has none gets one that nobody will see.
FOREVER_SECONDS = 10 * 365 * 24 * 3600.0
NAMES = re.compile(r"recorded|expected|(?P<name>[a-z]{1,16}:[0-9a-f]{32}|DBOS\.[A-Za-z]{1,64})")


def kind_of(name: str) -> str:
    """Return the kind of a step by its name, ``""`` for one of the database's own."""
    kind, _, print_ = name.partition(":")
    return kind if print_ else ""


def fingerprint_of(name: str) -> str:
    """Return the fingerprint in a step's name."""
    return name.partition(":")[2]


def kind_of_effect(form: CallModel | Mapping[str, Any]) -> str:
    """Return the kind of step that holds the outcome of the effect that *form* describes."""
    if isinstance(form, CallModel):
        return MODEL
    return START if form.get("background") else KINDS.get(form["type"], form["type"])


# A step of the database records whatever its function returns, and an exception as well. A run that only stops here
# (the process leaves, the run is cancelled) must record neither, or whoever goes on with it would be answered with that
# stop. So the outcome leaves the function by an exception that no `except Exception` on the way takes, the package's
# own included.
class _Unrecorded(BaseException):
    """Carries an outcome out of a step without recording it, because the run only stopped there."""

    def __init__(self, outcome: Stop) -> None:
        super().__init__()
        self.outcome = outcome


_Seeded: TypeAlias = "tuple[str, str, Mapping[str, Any] | None]"
"""What the seed knows of an effect: kind, fingerprint, and its outcome if it has one."""


class _ReservedSteps(NamedTuple):
    """
    The reserved steps of an effect that has started.

    Attributes:
        name: The step's name.
        step: The reserved step; ``None`` for a question, and for a body in this run, whose result comes after what is done in it.
        is_doubtful: Whether it was begun by an execution before this one, and must not happen again.
        intent: The mark that says who has begun it.
        asked: What a marker says of a question: who answered up front.
        answer: What waits for the answer to a question.
        seeded: The outcome in the seed.
        is_settled: Whether that is all that is needed, so that nothing is done again.
        is_early: Whether nothing was done by this execution before it began, so that an earlier one may have begun it.
        race: What is known of the race that it is a member of.
    """

    name: str
    step: ReservedStep | None = None
    is_doubtful: bool = False
    intent: ReservedStep | None = None
    asked: Mapping[str, Any] | None = None
    answer: asyncio.Task[Any] | None = None
    seeded: Mapping[str, Any] | None = None
    is_early: bool = False
    is_settled: bool = False
    race: _RaceRecord | None = None


class DurableRun:
    """
    One execution of a run: its clock, its stop conditions and its access to the database.

    Args:
        dbos: The package's class ``DBOS``.
        errors: The module with its errors.
        order: What the run was started with.
        release: The release that it belongs to.
        effects: How many effects this process performs at once.
        redactor: What takes secrets out of what is stored.
        seed: What it begins with.
        sessions: Where turns look up what was before them, once this process has connected to that.

    Attributes:
        parked: Why this execution ends without a result: the run was cancelled, or belongs to somebody else now.
        fatal: The divergence that ended the run.
        is_live: Whether something happened that is not recorded already.
        was_replayed: Whether something recorded was met, so that this is not the run's first execution.
        token: What tells this execution from every other one.
        started: How many runs were started below this one.
        leaves: Whether the process is about to leave the run, so that nothing more may begin.
        asking: How many questions wait for their answers.
        heard: The messages to the run that it has heard.
        bodies: The calls of tools that yield whose bodies are under way in this run, from the outermost on.
    """

    def __init__(
        self,
        dbos: Any,
        errors: Any,
        order: Order,
        *,
        release: str,
        effects: asyncio.Semaphore,
        redactor: Redactor,
        seed: Seed,
        sessions: asyncio.Future[Sessions],
    ) -> None:
        self.sessions = sessions
        self.records = StepRecords(dbos, errors, order.id)
        self.heard = MessageDelivery()
        self.dbos = dbos
        self.order = order
        self.release = release
        self.effects = effects
        self.redactor = redactor
        self.seed = seed
        self.prints = Fingerprints(redactor)
        self.timing = RunClock(stable=False)
        self.created = datetime.fromisoformat(order.created)
        self.parked: BaseException | None = None
        self.fatal: ReplayDivergence | None = None
        self.is_live = False
        self.was_replayed = False
        # An intent is a recorded step, so a second execution is given the first one's back. By the token it sees that
        # the intent was another execution's: then the effect was begun before, and is in doubt (durable:U18).
        self.token = secrets.token_hex(8)
        self.started = 0
        self.leaves = False
        self.asking = 0
        self.bodies: list[Ancestor] = []
        self._acting = 0
        self._idle: asyncio.Event | None = None
        self._is_again: bool | None = None
        self.tree: RunTree | None = None
        self.machine: Any = None
        self._diverges = (errors.DBOSUnexpectedStepError, errors.DBOSStepNondeterminismError)
        # Looked up in the module that was given: the package is imported by name and only on first use, so that the
        # facade can be read without the extra.
        self._leaves = (errors.DBOSWorkflowCancelledError, errors.DBOSWorkflowConflictIDError)
        self._away = list_driver_errors()
        self.errors = errors

    @property
    def root(self) -> str | None:
        """The run's id if it is a root."""
        return None if self.order.spawns else self.order.root

    @contextlib.contextmanager
    def count_running_effect(self) -> Iterator[None]:
        """Count an effect as running while the block runs."""
        # A worker that leaves waits for effects under way to be recorded, and for nothing else: cut off between doing
        # and recording they would be in doubt (durable:U40).
        self._acting += 1
        try:
            yield
        finally:
            self._acting -= 1
            if not self._acting and self._idle is not None:
                self._idle.set()
                self._idle = None

    async def idle(self) -> None:
        """Wait until no effect is running."""
        while self._acting:
            self._idle = self._idle or asyncio.Event()
            await self._idle.wait()

    def placed(self, item: Item) -> dict[str, str]:
        """Return the member with the path of an effect in a tool body; nothing for one of the run itself."""
        return {} if item.path == self.order.path else {"path": item.path}

    def check_can_continue(self) -> None:
        """
        Raise if this execution has to stop.

        Raises:
            ReplayDivergence: when the run did something else than is recorded.
            asyncio.CancelledError: when this execution must go no further.
        """
        if self.fatal is not None:
            raise self.fatal
        # A cancellation and no outcome: the machine would give an outcome to the handler, which would go on and do
        # things that belong to the next execution.
        if self.leaves or self.parked is not None:
            raise asyncio.CancelledError

    def shows(self, event: Event) -> bool:
        """Return whether an event is news."""
        # A run that was resumed repeats its recorded part, and whoever follows it has seen that already.
        return self.is_live or not self.was_replayed

    async def is_repeated_execution(self) -> bool:
        """Return whether this is not the run's first execution; asks the database where nothing recorded was met."""
        if self.was_replayed:
            return True
        if self._is_again is None:
            # In a context of its own: looking is no step.
            look = self.dbos.list_workflows_async(workflow_ids=[self.order.id], load_input=False, load_output=False)
            (status,) = await asyncio.create_task(look, context=contextvars.Context())
            known = status.attributes or {}
            # A takeover by an operator makes the package count from the beginning again, so its count alone would take
            # the second execution for the first; the attributes tell.
            self._is_again = (status.recovery_attempts or 0) > 1 or any(name in known for name in AGAIN)
        return self._is_again

    def warn_of_length(self) -> None:
        """Warn that the run grows long; no new run is started, since a handler's variables cannot move there."""
        message = (
            f"the run {self.order.id!r} has {LONG_RUN_EFFECTS:,} effects. Resuming it reads all of them first, a third of a second of CPU "
            "for each 1,000 or so. Give longer work to children: of these only the result is read"
        )
        LOGGER.warning(message)
        if self.tree is not None:
            self.tree.emit(Warned(message=message))

    def ends_children(self, stop: Stop) -> bool:
        """Return whether children in other processes end with *stop*; if only this execution ends, they continue."""
        # Where only this execution ends (the worker leaves, the database is away) the children of the run go on
        # elsewhere, and whoever goes on with the run finds them.
        goes_on = self.leaves or self.parked is not None or self.fatal is not None
        return not goes_on and stop.kind in ("cancelled", "limit")

    def elapsed_ms(self) -> int:
        """Return the milliseconds since the run was created, never less than the last recorded time."""
        return max(self.timing.last, (datetime.now(UTC) - self.created) // timedelta(milliseconds=1))

    def advance_time(self, at: int) -> int:
        """Advance the run's time to *at* milliseconds after this execution started, and return it."""
        time = max(self.timing.last, self.timing.record_time(self.order.path, 0, at))
        self.timing.advance_to(time)
        return time

    async def guarded(self, acting: Awaitable[T], where: str) -> T:
        """
        Await a database operation; turn divergences and lost databases into stops of this execution.

        Raises:
            ReplayDivergence: when the run does something else there than is recorded.
            asyncio.CancelledError: when this execution must go no further; ``parked`` says why.
        """
        try:
            return await acting
        # The package compares the name of a step with what is recorded at that number, and a name holds the fingerprint
        # of the effect: so a changed handler is found here, before anything of it is performed (durable:UT9).
        except self._diverges as error:
            self.fatal = self.fatal or self._parse_divergence(error, where)
            raise self.fatal from None
        except self._leaves as error:
            self.park(error)
            raise asyncio.CancelledError from None
        # A database that is away is not the fault of the run: ended as failed it would be lost, parked it is tried again
        # (durable:UF18).
        except self._away as error:
            # Nothing of the run is at fault: it has no result, and may be tried again.
            self.park(error)
            raise asyncio.CancelledError from None

    def park(self, error: BaseException) -> None:
        """End this execution without a result; the run itself has not ended because of that."""
        self.parked = self.parked or error
        if self.tree is not None:
            self.tree.root.stop(Stop("cancelled"))

    def _parse_divergence(self, error: BaseException, where: str) -> ReplayDivergence:
        return self.differs(where, [found["name"] for found in NAMES.finditer(str(error)) if found["name"]])

    def differs(self, where: str, names: Sequence[str]) -> ReplayDivergence:
        """Return the error for a run that does something else than is recorded; *names* are those of both steps."""
        site = find_waiting_location(self.machine)
        said = f"; the record and the run have {' and '.join(dict.fromkeys(names))}" if names else ""
        lines = [f"the run {self.order.id!r} does something else at {where} than is recorded{said}"]
        lines += [f"  {site}"] if site else []
        lines.append(
            "  what is recorded stays: go on with the release that it began with, or see `release move --check`"
        )
        return ReplayDivergence("\n".join(lines), kind="changed", address=where, site=site)

    def reserve(self, name: str, mark: Mapping[str, object] | None = None) -> ReservedStep:
        """Reserve the next number for a step of this name."""
        return ReservedStep(self.dbos.reserve_step(), name, mark)

    async def look_up(self, steps: Sequence[ReservedStep], where: str) -> None:
        """Read the records of reserved steps, and compare their names; errors as for ``guarded``."""
        self.was_replayed |= await self.guarded(self.records.look_up(steps), where)

    async def mark(self, name: str, form: Mapping[str, object], where: str) -> Any:
        """Record *form* as a step and return it, or return the record of an earlier execution."""
        return await self.record_mark(self.reserve(name, form), where)

    async def record_mark(self, step: ReservedStep, where: str) -> Any:
        """Record the mark of a reserved step and return it, or return the record of an earlier execution."""

        async def marked() -> Mapping[str, object] | None:
            return step.mark

        return await self.perform_step(step, marked, where, preemptible=False)

    async def step(self, name: str, act: Callable[[], Coroutine[Any, Any, Any]], where: str) -> Any:
        """Return the recorded result of a step of this name, or perform it now."""
        return await self.perform_step(self.reserve(name), act, where)

    async def perform_step(
        self,
        step: ReservedStep,
        act: Callable[[], Coroutine[Any, Any, object]],
        where: str,
        *,
        preemptible: bool = True,
    ) -> Any:
        """
        Return the recorded result of a reserved step, or perform it now.

        Args:
            step: The step.
            act: Performs it and returns its result.
            where: The address of the effect, for errors.
            preemptible: Whether cancelling the run interrupts it.
        """
        await self.look_up([step], where)
        known = self.records.pop(step)
        if known is not None:
            return known
        is_performed = False

        async def perform() -> object:
            nonlocal is_performed
            is_performed = True
            return await act()

        result = await self.guarded(
            step.reservation.run_async({"name": step.name, "preemptible": preemptible}, perform), where
        )
        self.was_replayed |= not is_performed
        return result


class Steps:
    """
    Performs the effects of one run, each of them once.

    Args:
        inner: What performs live.
        run: The execution.
    """

    def __init__(self, inner: Performer, run: DurableRun) -> None:
        self._inner = inner
        self._run = run
        self._places: dict[tuple[str, int], _ReservedSteps] = {}
        self._siblings: dict[tuple[str, int], _Siblings] = {}
        self._started: dict[str, _BackgroundStart] = {}
        self._races: dict[tuple[str, int], _RaceRecord] = {}

    async def begin(self, batch: Sequence[Item]) -> None:
        """
        Reserve the steps of effects, in order.

        Raises:
            ReplayDivergence: when one is not what was recorded here.
        """
        # Numbers are drawn here, in the run's own task and one after the other: the package numbers steps in the order
        # in which they are asked for. Were they drawn when members of a group are performed, whoever is faster would
        # have the lower number, and the next execution another record (durable:U20).
        run = self._run
        run.check_can_continue()
        is_early = not run.is_live
        if batch[0].effect.seq < LONG_RUN_EFFECTS <= batch[-1].effect.seq + 1 and not is_early:
            run.warn_of_length()
        places, reserved, marks = [], list[ReservedStep](), dict[int, Any]()
        for item in batch:
            places.append((item, await self._reserve_effect(item, reserved, marks)))
        await self._record_marks(reserved, marks, item)
        for item, place in places:
            if place.intent is not None:
                token = marks[place.intent.number]["token"]
                place = place._replace(is_doubtful=token != run.token)  # noqa: PLW2901
            self._places[item.path, item.effect.seq] = self._add_race(item, place._replace(is_early=is_early))
        await self._inner.begin(batch)

    async def _record_marks(self, reserved: list[ReservedStep], marks: dict[int, Any], item: Item) -> None:
        """Compare the steps reserved so far, up to *item*, record their marks and add them to *marks* by number."""
        if reserved:
            where = format_address(item.path, item.effect.seq)
            # All of them first: where one differs, nothing is marked.
            await self._run.look_up(reserved, where)
            for step in reserved:
                if step.mark is not None:
                    marks[step.number] = await self._run.record_mark(step, where)
            reserved.clear()

    async def _reserve_effect(self, item: Item, reserved: list[ReservedStep], marks: dict[int, Any]) -> _ReservedSteps:
        """Reserve the steps of an effect; those to look up before it starts are added to *reserved*."""
        run, effect = self._run, item.effect
        # Form and fingerprint are those of a journal: so a durable run can be exported as one, and is compared by the
        # same rules.
        form = encode_effect(item)
        print_ = run.prints.for_effect(form)
        name = f"{kind_of_effect(form)}:{print_}"
        _check_supported(item)
        seeded = run.seed.outcomes.get((item.path, effect.seq))
        if seeded is not None:
            place = self._reserve_from_seed(item, name, seeded)
            if place is not None:
                return place
        if isinstance(effect, AskPerson):
            # How many places it draws follows from what is recorded, so everything before it is settled first.
            await self._record_marks(reserved, marks, item)
            return await self._record_questions(item, name, format_address(item.path, effect.seq))
        wanted: list[tuple[str, Mapping[str, object]]] = []
        # What a run waits for is a step before the wait, since the wait itself is recorded only when it is over, and
        # `stepengine deploy status` has to see it meanwhile. What may be done again needs no mark: the step that holds its
        # outcome is enough.
        if type(effect) in WAITS:
            wanted.append((f"{WAIT}:{print_}", self._make_wait_form(item)))
        elif type(effect) in RUNS and not _starts_background_child(item):
            return self._reserve_start(item, name, seeded, reserved)
        elif not is_repeatable(item):
            wanted.append((f"{INTENT}:{print_}", {"seq": effect.seq, "token": run.token, **run.placed(item)}))
        made = [run.reserve(*mark) for mark in wanted]
        step = run.reserve(name)
        reserved += [*made, step]
        return _ReservedSteps(name, step, intent=made[0] if made and type(effect) not in WAITS else None)

    def _make_wait_form(self, item: Item) -> dict[str, Any]:
        """Return the stored form of a wait, for operators."""
        wait = list_waits(item)[0]
        until = None if wait.wakes_at is None else wait.wakes_at.isoformat(timespec="milliseconds")
        form: dict[str, Any] = {"seq": item.effect.seq, "path": item.path, "kind": wait.kind, "wakes_at": until}
        form |= {"topic": wait.topic} if wait.topic else {}
        return form | ({"children": list(wait.children)} if wait.children else {})

    def _add_race(self, item: Item, place: _ReservedSteps) -> _ReservedSteps:
        """Return the steps of an effect with the shared record of its race, if it is in one."""
        race = _find_race(item)
        if race is None:
            return place
        first = item.path, cast("Any", item.gather).effects[race[0]].seq
        # Races of before this group have ended, and a run may have thousands.
        for over in [
            key for key in self._races if key[0] == item.path and key[1] < cast("Any", item.gather).effects[0].seq
        ]:
            del self._races[over]
        return place._replace(race=self._races.setdefault(first, _RaceRecord()))

    def _reserve_start(
        self, item: Item, name: str, seeded: _Seeded | None, reserved: list[ReservedStep]
    ) -> _ReservedSteps:
        """Reserve the steps for the start of a child or tool body, and for the end of one driven elsewhere."""
        # The marker comes before the child is enqueued: the database compares names of steps and nothing else, and a
        # child's row is found by its id alone, so a changed spawn would be given another child's result (durable:U15).
        run, print_ = self._run, fingerprint_of(name)
        known = None if seeded is None else seeded[2]
        mark = {"seq": item.effect.seq, **run.placed(item)}
        if not _is_part_of_run(item):
            spawning = run.reserve(f"{SPAWN}:{print_}", mark)
            step = run.reserve(f"{CHILD}:{print_}")
            reserved += [spawning, step]
            return _ReservedSteps(step.name, step, seeded=known)
        if known is None:
            reserved.append(run.reserve(f"{BODY}:{print_}", mark))
        return _ReservedSteps(name, seeded=known)

    def _reserve_from_seed(self, item: Item, name: str, seeded: _Seeded) -> _ReservedSteps | None:
        """Return the steps of an effect that is in the seed; ``None`` if it has to be performed again."""
        run, (kind, fp, form) = self._run, seeded
        # The seed is a record from elsewhere (an import, another release), and is held to the same comparison as the
        # database's own.
        if f"{kind}:{fp}" != name:
            where = format_address(item.path, item.effect.seq)
            run.fatal = run.fatal or run.differs(where, [f"{kind}:{fp}", name])
            raise run.fatal
        if form is None:
            return None if is_repeatable(item) else _ReservedSteps(name, run.reserve(name), is_doubtful=True)
        # What an inline child or the body of a tool left stands in no journal: it is driven over its own part of the seed.
        return None if _has_unrecorded_changes(item, form) else _ReservedSteps(name, seeded=form, is_settled=True)

    def _encode_outcome(self, item: Item, outcome: Single, attempts: Sequence[object] = ()) -> dict[str, Any]:
        """
        Return the stored form of an outcome.

        Raises:
            _Unrecorded: for every stop except that of a spent limit.
        """
        # A spent limit is an outcome like any other and recorded, so that the same run ends the same way; every
        # other stop is of this execution alone.
        if isinstance(outcome, Stop) and outcome.kind != "limit":
            raise _Unrecorded(outcome)
        run = self._run
        stamped = attrs.evolve(outcome, at=run.advance_time(outcome.at))
        form = encode_outcome(item.effect.seq, stamped, run.redactor, attempts=attempts)
        return form | run.heard.taken_by(outcome) | run.placed(item)

    async def _record_questions(self, item: Item, name: str, where: str) -> _ReservedSteps:
        """Record questions, and start to wait for those without an answer."""
        run = self._run
        effect = cast("AskPerson", item.effect)

        async def asked() -> dict[str, Any]:
            outcome = await self._inner.perform(item, cast("IO", run.tree))
            run.is_live = True
            if not isinstance(outcome, Stop):
                return self._encode_outcome(item, outcome)
            if outcome.kind != "suspended":
                raise _Unrecorded(outcome)
            open_ = [bare(question) for question in render_questions(item)]
            form = {"seq": effect.seq, "path": item.path, "at": run.elapsed_ms(), "questions": open_}
            return cast("dict[str, Any]", run.redactor.value(form))

        found = await run.step(name, asked, where)
        if "questions" not in found:
            return _ReservedSteps(name, asked=found)
        topic = f"ask:{item.path}:{effect.seq}"
        waiting = asyncio.create_task(run.dbos.recv_async(topic, timeout_seconds=FOREVER_SECONDS))
        # The wait draws its numbers when it first runs: now, before anybody else draws any.
        await asyncio.sleep(0)
        return _ReservedSteps(name, asked=found, answer=waiting)

    # --- performing ---------------------------------------------------------------------------------------------------

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Return the outcome of an effect: the recorded one, or that of performing it."""
        kind = type(item.effect)
        if kind is RunInBackground:
            return self._await_background_child(item, io)
        place = self._places.pop((item.path, item.effect.seq))
        if place.is_settled:
            return self._read_seed_outcome(item, cast("Mapping[str, object]", place.seeded))
        if isinstance(item.effect, AskPerson):
            return self._wait_for_answers(item, place)
        if kind in WAITS or kind is EndRuns:
            return self._wait(item, io, place)
        if kind is SendToRun:
            return self._send_to_child(item, place)
        if _starts_background_child(item):
            return self._start_background_child(item, io, place)
        if kind in RUNS:
            return self._perform_body(item, io, place) if _is_part_of_run(item) else self._child(item, io, place)
        return self._perform_leaf(item, io, place)

    async def _read_seed_outcome(self, item: Item, form: Mapping[str, object]) -> Single:
        outcome = _decode_outcome(form, format_address(item.path, item.effect.seq))
        self._run.timing.advance_to(outcome.at)
        self._run.was_replayed = True
        child: object = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            return outcome
        self._count_usage(item, child.usage, child.cost, 0)
        self._run.started += bool(child.run_id)
        return attrs.evolve(
            cast("Value", outcome), value=attrs.evolve(child, output=self._decode_child_output(item, child))
        )

    async def _perform_leaf(self, item: Item, io: IO, place: _ReservedSteps) -> Single:
        run, seq = self._run, item.effect.seq
        attempts: list[object] = []

        async def act() -> dict[str, Any]:
            run.is_live = True
            # First of all: a race that is recorded as won must not be run for once more by a member whose own end was
            # not recorded.
            if place.race is not None and await place.race.is_lost(item):
                return encode_outcome(seq, make_race_loss_outcome(item, run.elapsed_ms()), run.redactor) | run.placed(
                    item
                )
            # A model call has no intent. Whether an earlier execution has made it cannot be seen, only that there was
            # one; so the sums say `at_least` (durable:U43).
            again = isinstance(item.effect, CallModel) and place.is_early and await run.is_repeated_execution()
            if place.is_doubtful:
                error = UnknownOutcome(
                    "the process ended before what it did was recorded; it may or may not have happened"
                )
                return encode_outcome(seq, Failure(error, run.elapsed_ms()), run.redactor) | run.placed(item)
            if again:
                attempts.append({"error": bare(UnknownOutcome("the process ended before the reply was recorded"))})
            # Inside the step, around the work alone: a worker holds hundreds of runs that wait, and only what is really
            # under way takes one of its places (durable:U21).
            async with run.effects:
                outcome = await self._inner.perform(
                    item, Attempts((io, attempts, io.emit)) if isinstance(item.effect, CallModel) else io
                )
            outcome = mark_usage_uncertain(outcome) if again else outcome
            return self._encode_outcome(item, outcome, attempts)

        with run.count_running_effect():
            return (await self._record_outcome(item, place, act))[0]

    async def _record_outcome(
        self, item: Item, place: _ReservedSteps, act: Callable[[], Coroutine[object, Any, object]]
    ) -> tuple[Single, Mapping[str, Any]]:
        """Return the outcome of an effect, and the form that it stands in; empty when it only stopped there."""
        run, where = self._run, format_address(item.path, item.effect.seq)
        if place.race is not None:
            place.race.begin(item)
        try:
            only_waits = type(item.effect) in WAITS
            assert place.step is not None  # noqa: S101 - only a question and a body in this run have none
            form = await run.perform_step(place.step, act, where, preemptible=not only_waits)
            if place.race is not None:
                place.race.settle(item, is_won="stop" not in form)
        except _Unrecorded as stopped:
            if place.race is not None:
                place.race.settle(item, is_won=False)
            if isinstance(stopped.outcome.error, ReplayDivergence):
                # What stands below can be resumed, so this run has not ended either.
                run.fatal = run.fatal or stopped.outcome.error
            return stopped.outcome, {}
        # Also what was performed just now is read back from its form: a tuple that is a list on replay must be a list
        # live (durable:U12).
        outcome = _decode_outcome(form, where)
        run.timing.advance_to(outcome.at)
        return outcome, form

    async def _wait_for_answers(self, item: Item, place: _ReservedSteps) -> Single:
        run, where = self._run, format_address(item.path, item.effect.seq)
        asked = cast("Mapping[str, Any]", place.asked)
        run.timing.advance_to(asked["at"])
        if place.answer is None:
            return _decode_outcome(asked, where)
        run.is_live = run.is_live or not place.answer.done()
        run.asking += 1
        try:
            said = await run.guarded(place.answer, where)
        finally:
            run.asking -= 1
            place.answer.cancel()
        questions: tuple[Question, ...] = tuple([restored(question) for question in asked["questions"]])
        # The time of an answer is that of who sent it, whose clock may be anywhere: it may neither turn the run's time
        # back nor move it into the future.
        run.timing.advance_to(max(run.timing.last, min(int(said["at"]), run.elapsed_ms())))
        try:
            return Value(parse_answers(said["answers"], questions), run.timing.last)
        # Answers of ours are checked before they are sent (durable:U37), so this is a message that some other client of
        # the database wrote. The question is used up by it: the package has delivered the message and recorded that. So
        # it can neither be asked again nor be left standing, and an exception would come again at each execution; a
        # failure is told to the handler, which may ask once more.
        except (DataError, LookupError, TypeError) as error:
            return Failure(StepEngineError(f"what was sent as the answer at {where} is none: {error}"), run.timing.last)

    # --- bodies of tools ----------------------------------------------------------------------------------------------

    async def _perform_body(self, item: Item, io: IO, place: _ReservedSteps) -> Single:
        """
        Run the body of a tool in this run, and return its result: the recorded one, with the current changes of the body.

        Its effects are recorded one by one as the run's own are, so whoever resumes the run goes through it again.
        """
        run, where = self._run, format_address(item.path, item.effect.seq)
        run.bodies.append(make_ancestor(item))
        try:
            outcome = await self._inner.perform(item, io)
        finally:
            run.bodies.pop()
        run.check_can_continue()
        if isinstance(outcome, Stop) and outcome.kind != "limit":
            return outcome
        now = encode_outcome(item.effect.seq, outcome, run.redactor)

        async def act() -> dict[str, Any]:
            run.is_live = True
            return now | {"at": run.advance_time(outcome.at)} | run.heard.taken_by(outcome) | run.placed(item)

        # The result is recorded, and still the body is gone through again by whoever goes on with the run: what it left
        # (changes of the conversation, what it spent) is in no record, and follows from its effects alone.
        known = place.seeded or await run.step(place.name, act, where)
        self._check_body_result(item, known, now)
        ended = _decode_outcome(known, where)
        run.timing.advance_to(ended.at)
        return _add_body_end(ended, getattr(outcome, "body", None))

    def _check_body_result(self, item: Item, known: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
        """
        Compare the recorded result of a body with what it gave now; where a limit stopped it, the time alone may differ.

        Raises:
            ReplayDivergence: when it gave something else.
        """
        if known is None or "stop" in known or "stop" in now:
            return
        # Not the time and not what was used: these differ between two executions that did the same.
        was, is_ = ({name: form.get(name) for name in ("value", "error")} for form in (known, now))
        if was != is_:
            run, where = self._run, format_address(item.path, item.effect.seq)
            names = [f"{RESULT}:{run.prints.value(each)}" for each in (was, is_)]
            run.fatal = run.fatal or run.differs(where, names)
            raise run.fatal

    # --- children -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reserve_share(self, item: Item) -> Iterator[Limits | None]:
        """
        Reserve a part of the run's budgets for a child until it has ended.

        Of children that run at once each gets as much; one that runs alone gets all that is left.
        """
        siblings = self._find_siblings(item)
        try:
            with self._reserve_budgets(item.path, siblings.begin()) as share:
                yield share
        finally:
            siblings.end()

    @contextlib.contextmanager
    def _reserve_budgets(self, path: str, among: int) -> Iterator[Limits | None]:
        """Reserve one of *among* equal parts of the remaining budgets of the run at *path*."""
        tree = cast("RunTree", self._run.tree)
        # A child runs on another machine, where nobody can ask this ledger. So it is given a part of what is left,
        # which counts as used here until it has ended and says what it used: limits hold without a word between
        # machines (durable:U23).
        ledger = tree.performers.ledger(path)
        given = _remaining_budgets(ledger, among)
        deadline = _find_deadline(tree, path)
        if deadline is not None:
            given["max_seconds"] = max(0.0, deadline - asyncio.get_running_loop().time())
        room = given.get("max_tokens", 0), given.get("max_cost_usd", Decimal(0))
        ledger.reserve(*room)
        children = given.get("max_total_children", 0)
        ledger.count_children(children, by_model=False)
        try:
            yield Limits(**given) if given else None
        # Taken back as a whole; what the child really used is counted by `_count_users`, with its result.
        finally:
            ledger.reserve(-room[0], -room[1])
            ledger.count_children(-children, by_model=False)

    def _find_siblings(self, item: Item) -> _Siblings:
        first = item.path, item.effect.seq if item.gather is None else item.gather.effects[0].seq
        known = self._siblings.get(first)
        if known is None:
            # Whatever was asked for before has ended.
            self._siblings = {first: (known := _Siblings(item))}
        return known

    async def _child(self, item: Item, io: IO, place: _ReservedSteps) -> Single:
        run, seq = self._run, item.effect.seq
        ended: dict[str, object] = {}

        async def act() -> dict[str, Any]:
            if place.race is not None and await place.race.is_lost(item):
                await _cancel_subtree(run, f"{run.order.root}/{child_path(item.path, seq)}", LOST)
                return encode_outcome(seq, make_race_loss_outcome(item, run.elapsed_ms()), run.redactor) | run.placed(
                    item
                )
            outcome = _find_unknown_body_error(item) or await self._perform_remotely(item, io, ended)
            run.is_live = True
            if isinstance(outcome, Stop) and outcome.kind != "limit":
                raise _Unrecorded(outcome)
            at = run.advance_time(outcome.at) if place.seeded is None else place.seeded["at"]
            form = encode_outcome(seq, attrs.evolve(outcome, at=at), run.redactor)
            form |= run.heard.taken_by(outcome) | run.placed(item)
            return form | {name: ended[name] for name in ("left", "started", "rules", "body") if name in ended}

        outcome, form = await self._record_outcome(item, place, act)
        for rule in form.get("rules", ()):
            cast("RunTree", run.tree).questions.remembered.add(freeze_object(rule))
        if "body" in form:
            self._check_body_result(item, place.seeded, form)
            body = parse_body_end(form["body"])
            run.started += form["started"]
            self._count_usage(item, body.spending.usage, body.spending.cost, form["started"])
            return _add_body_end(outcome, body)
        child = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            return outcome
        run.started += form.get("started", 0) + bool(child.run_id)
        self._count_usage(item, child.usage, child.cost, form.get("started", 0))
        left = parse_left(form["left"]) if "left" in form else None
        return attrs.evolve(
            cast("Value", outcome), value=attrs.evolve(child, output=self._decode_child_output(item, child), left=left)
        )

    async def _perform_remotely(self, item: Item, io: IO, ended: dict[str, object]) -> Single:
        with self._reserve_share(item) as share:
            return await self._inner.perform(item, _RemoteIO(io, self._run, item, share, ended))

    # --- what only waits, and children in the background --------------------------------------------------------------

    async def _wait(self, item: Item, io: IO, place: _ReservedSteps) -> Single:
        """
        Wait until the time that the run's record gives, for a message, or for children, and record what came.

        The time needs no timer of the database: it follows from what is recorded, so that whoever goes on waits for the same one.
        """
        run, effect = self._run, item.effect
        found: list[Single] = []

        async def act() -> dict[str, Any]:
            run.is_live = True
            if place.race is not None and await place.race.is_lost(item):
                return encode_outcome(
                    effect.seq, make_race_loss_outcome(item, run.elapsed_ms()), run.redactor
                ) | run.placed(item)
            outcome = await self._inner.perform(item._replace(has_begun=True), io)
            form = self._encode_outcome(item, outcome)
            found.append(outcome)
            return form

        # Counted as waiting and not as acting: a worker that leaves does not wait for what may take a year.
        run.asking += 1
        try:
            outcome, _ = await self._record_outcome(item, place, act)
        finally:
            run.asking -= 1
        if type(effect) not in CHILD_ENDS or not isinstance(outcome, Value):
            return outcome
        if found:
            return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=found[0].value.ended))  # type: ignore[union-attr]
        return await self._add_child_ends(item, outcome, io)

    async def _add_child_ends(self, item: Item, outcome: Value, io: IO) -> Single:
        """Return an outcome with the ends of the children that it names, once they are known here."""
        if isinstance(item.effect, EndRuns):
            cast("RunTree", self._run.tree).background.end(item.effect.children, item.effect.reason)
        ended = await io.ends(item, outcome.value.done)
        if ended is None:
            return Stop("cancelled", self._run.elapsed_ms())
        return attrs.evolve(outcome, value=attrs.evolve(outcome.value, ended=ended))

    async def _send_to_child(self, item: Item, place: _ReservedSteps) -> Single:
        """Send a message to a background child once, in whichever process it runs."""
        run, effect = self._run, cast("SendToRun", item.effect)

        # A step of its own, with a key made of the effect's address: an execution that dies between sending and
        # recording sends it once more, and the database drops what has a key that it knows. Without the record a
        # resumed run would not know either whether the child was still at work when it was told, which is what the
        # handler gets.
        async def act() -> dict[str, Any]:
            run.is_live = True
            is_at_work = cast("RunTree", run.tree).background.child(effect.child).result is None
            if is_at_work:
                said = {"value": effect.value}
                key = f"tell:{format_address(item.path, effect.seq)}"
                topic = make_database_topic(effect.child, effect.topic)
                await run.dbos.send_async(run.order.root, said, topic, idempotency_key=key)
            tree = cast("RunTree", run.tree)
            form = encode_outcome(effect.seq, Value(is_at_work, run.advance_time(tree.clock.elapsed())), run.redactor)
            return form | run.placed(item)

        with run.count_running_effect():
            return (await self._record_outcome(item, place, act))[0]

    async def _start_background_child(self, item: Item, io: IO, place: _ReservedSteps) -> Single:
        """Record the start of a background child, then put it on its queue."""
        run, effect = self._run, cast("Spawn", item.effect)
        path = child_path(item.path, effect.seq)
        started = self._started[path] = _BackgroundStart(item)
        performed: list[Single] = []

        async def act() -> dict[str, Any]:
            run.is_live = True
            outcome = await self._inner.perform(item, io)
            performed.append(outcome)
            return self._encode_outcome(item, outcome)

        with run.count_running_effect():
            # Recorded first and enqueued then, behind `is_recorded`: a child that is at work and of which its parent
            # knows nothing could be ended by nobody.
            outcome, _ = await self._record_outcome(item, place, act)
        if not performed and isinstance(outcome, Value):
            # It is at work, or was; here it is only waited for.
            again = await self._inner.perform(item._replace(has_begun=True), io)
            if not isinstance(again, Value):
                return again
        started.is_recorded.set_result(None)
        return outcome

    async def _await_background_child(self, item: Item, io: IO) -> Single:
        """Wait for the end of a background child, which its own workflow records."""
        run, tree = self._run, cast("RunTree", self._run.tree)
        started = self._started[item.path]
        # The row of the child must not be there before the step that starts it is recorded: executed again, the parent
        # would not know that it has a child.
        await started.is_recorded
        ended: dict[str, Any] = {}
        try:
            with self._reserve_budgets(started.item.path, 1 + self._count_running_children(started.item.path)) as share:
                outcome = await self._inner.perform(item, _RemoteIO(io, run, started.item, share, ended))
        except _Unrecorded as stopped:
            run.fatal = run.fatal or cast("ReplayDivergence", stopped.outcome.error)
            tree.root.stop(stopped.outcome)
            return stopped.outcome
        child = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            return outcome
        for rule in ended.get("rules", ()):
            tree.questions.remembered.add(freeze_object(rule))
        run.started += ended.get("started", 0) + bool(child.run_id)
        plan: RunPlan = cast("RunInBackground", item.effect).plan
        with contextlib.suppress(StepEngineError):
            if child.output is not None and plan.decode_output is not None:
                child = attrs.evolve(child, output=plan.decode_output(child.output))
        self._count_usage(started.item, child.usage, child.cost, ended.get("started", 0))
        return attrs.evolve(cast("Value", outcome), value=child, at=ended.get("at", run.advance_time(outcome.at)))

    def _count_running_children(self, path: str) -> int:
        """Return how many children of the run at *path* are at work in the background."""
        return sum(child.rpartition(".")[0] == path for child in cast("RunTree", self._run.tree).background.at_work())

    def _count_usage(self, item: Item, usage: Usage, cost: Decimal | None, started: int) -> None:
        """Count the usage of a child or remote body and the *started* runs below it against this run's budgets."""
        ledger = cast("RunTree", self._run.tree).performers.ledger(item.path)
        ledger.count_children(started, by_model=_was_requested_by_model(item))
        # The child's own process has counted it there; here it is counted a second time, in the budget that the
        # parent's next call is judged by.
        ledger.spend(usage.total_tokens, cost or Decimal(0))

    def _decode_child_output(self, item: Item, child: ChildResult) -> Any:
        """Return a child's output as its agent's own type."""
        if child.output is None or not child.run_id:
            return child.output
        tree, effect = cast("RunTree", self._run.tree), cast("Spawn", item.effect)
        # The planner knows the type of the agent's output; where it refuses by now (an agent that was taken out), the
        # JSON as it is serves better than no result.
        try:
            plan, _ = tree.services.planner(item.plan, effect, child_path(item.path, effect.seq))
            return child.output if plan.decode_output is None else plan.decode_output(child.output)
        except StepEngineError:
            return child.output


class _Siblings:
    """Counts the children of one group that are running or still to start."""

    def __init__(self, item: Item) -> None:
        together = (item.effect,) if item.gather is None else item.gather.effects
        width = item.plan.limits.max_concurrent_children if item.gather is None else item.gather.concurrency
        self._width = width or item.plan.limits.max_concurrent_children or len(together)
        self._to_come = sum(type(effect) in RUNS for effect in together)
        self._running = 0

    def begin(self) -> int:
        """Count one as running; return among how many the remaining budgets are shared: it, and those beside it."""
        # Not all of the group share what is left, only those that may run at once: of ten children of which two run at
        # a time each gets half, and what they leave goes to the next two.
        among = max(1, min(self._width - self._running, self._to_come))
        self._to_come -= 1
        self._running += 1
        return among

    def end(self) -> None:
        """Count one as ended."""
        self._running -= 1


class _RaceRecord:
    """The recorded result of a race; its members wait for it before they act."""

    def __init__(self) -> None:
        self._looking: set[int] = set()
        self._is_won = False
        self._news = asyncio.Event()

    def begin(self, item: Item) -> None:
        """Record that a member's record is looked up."""
        self._looking.add(item.effect.seq)

    def settle(self, item: Item, *, is_won: bool) -> None:
        """Record the end of a member, and whether it won the race."""
        self._looking.discard(item.effect.seq)
        self._is_won = self._is_won or is_won
        self._news.set()

    async def is_lost(self, item: Item) -> bool:
        """Wait for pending look-ups and return whether another member has won."""
        # Members look for their records at the same time; who finds none waits until it is known of the others, since
        # one of them may have won in an earlier execution. Without this the loser's effect would happen after all.
        self._looking.discard(item.effect.seq)
        self._news.set()
        while self._looking and not self._is_won:
            self._news.clear()
            await self._news.wait()
        return self._is_won


class _BackgroundStart:
    """A child in the background: what started it, and when that is recorded."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.is_recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _RemoteChildEnd:
    """The result of a child in another process, shaped like a machine's result."""

    def __init__(self, child: ChildResult) -> None:
        self.status = child.status
        self.pending = child.questions
        self._child = child

    def as_child(self, *, is_inline: bool = False) -> ChildResult:
        """Return the child's result for its parent."""
        return self._child


class _RemoteBodyEnd:
    """The result of a tool body in another process, shaped like a machine's result."""

    def __init__(self, form: Mapping[str, Any]) -> None:
        self.status = RunStatus(form["status"])
        self.pending = ()
        self.error = None
        self._form = form

    def as_tool_result(self, _: Yielding, *, is_typed: bool) -> ToolResult:
        """Return the result of the call."""
        result: ToolResult = restored(self._form["result"])
        return result

    def as_body(self) -> BodyEnd:
        """Return the changes of the body for its caller."""
        return parse_body_end(self._form["body"])


class _RemoteIO:
    """The ``IO`` of an effect that another worker performs from its queue."""

    def __init__(self, io: IO, run: DurableRun, item: Item, share: Limits | None, ended: dict[str, object]) -> None:
        self._run = run
        self._item = item
        self._share = share
        self._ended = ended
        # A child can be ended only when its row is there; who wants to end it before waits for this.
        self._queued = asyncio.Event()
        self._io = io
        self.emit = io.emit
        self.attempt = io.attempt
        self.find_stopped_call = io.find_stopped_call
        self.waits = io.waits
        self.ends, self.note_suspension = io.ends, io.note_suspension

    @property
    def watched(self) -> bool:
        """Whether events are observed."""
        return self._io.watched

    async def drive(self, plan: RunPlan, state: AgentState, path: str) -> Finished:
        """Put the child on its queue unless it is there, and wait for its end."""
        run, order = self._run, self._run.order
        tree = cast("RunTree", run.tree)
        # Only what the child needs goes over the wire, and all of it: another worker has the code, and nothing of this
        # process.
        child = attrs.evolve(
            order,
            spawns=(*order.spawns, *run.bodies, make_ancestor(self._item, plan.definition.id)),
            parent=inherited_state(self._item.effect, plan),
            previous=None,
            slice=self._share,
            rules=tree.questions.remembered.rules,
        )
        # The id is that of the path, so to enqueue it again after a crash finds the child that is there (durable:U5). A
        # queue for each depth: on one for all, parents that wait would hold the places which their children need, for
        # ever (durable:U5). The release is the parent's, as its record is of that code.
        options: dict[str, object] = {
            "workflow_name": WORKFLOW,
            "queue_name": queue_name(order.pool, len(child.spawns)),
            "workflow_id": child.id,
            "app_version": run.release,
            "attributes": {"parent": order.id, "agent": plan.definition.id},
        }
        if plan.body is not None:
            options["attributes"] = {"parent": order.id, "agent": plan.definition.id, "tool": plan.body.tool_name}
        options |= {"priority": order.priority} if order.priority else {}
        # In a context of its own: the child belongs to the run and not to this step, which may be done again.
        task = asyncio.create_task(self._wait_for_child(options, child, state.run_id), context=contextvars.Context())
        # Three things end this wait: the child, somebody who ends the child, and a sibling that makes it pointless.
        # Whichever it is, the wait goes on until the child is really over, so that its spending is known.
        pull = tree.performers.brake.find_stop_signal(path)
        ending = tree.runs.elsewhere[path] = asyncio.get_running_loop().create_future()
        known = tree.background.stopping(path)
        if known is not None:
            ending.set_result(known)
        ends: set[asyncio.Future[Any]] = {task, ending} if pull is None else {task, ending, pull}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._cancel_child(child.id, ending.result() if ending.done() else Stop("cancelled"), task)
            form = await asyncio.shield(task)
        # Cancelled from here only for a limit, which holds for the child, too. In all other cases this execution ends
        # and the child goes on.
        except asyncio.CancelledError:
            stop = tree.root.stopping
            if stop is not None and stop.kind == "limit":
                await _cancel_subtree(run, child.id)
            raise
        finally:
            tree.runs.elsewhere.pop(path, None)
            task.cancel()
        self._ended.update(form)
        return cast("Finished", _RemoteChildEnd(parse_child_end(form)) if plan.body is None else _RemoteBodyEnd(form))

    async def _cancel_child(self, child: str, stop: Stop, waiting: asyncio.Task[Any]) -> None:
        """Cancel the child once it is on its queue; if only this execution ends, leave the child alone."""
        if not self._run.ends_children(stop):
            raise asyncio.CancelledError
        queued = asyncio.ensure_future(self._queued.wait())
        await asyncio.wait((waiting, queued), return_when=asyncio.FIRST_COMPLETED)
        queued.cancel()
        await _cancel_subtree(self._run, child, "" if stop.error is None else str(stop.error))

    async def _wait_for_child(self, options: Mapping[str, Any], child: Order, run_id: str) -> dict[str, object]:
        run, errors = self._run, self._run.errors
        seed = run.seed.select_subtree(child.path)
        more = [seed.form()] if seed.outcomes else []
        handle = await run.dbos.enqueue_workflow_with_options_async(options, child.form(), *more)
        self._queued.set()
        try:
            form: dict[str, object] = await handle.get_result(polling_interval_sec=CHILD_POLL_SECONDS)
            return form
        except errors.DBOSAwaitedWorkflowCancelledError:
            if child.spawns[-1].tool_name:
                cut = Finished(status=RunStatus.CANCELLED, state=AgentState())
                return encode_body_end(cut, cut.as_tool_result(cast("Yielding", None), is_typed=False), started=0)
            status = await handle.get_status()
            name = child.spawns[-1].agent_id
            why = (status.attributes or {}).get(REASON)
            error = AgentError(why) if why else None
            gone = ChildResult(agent_id=name, run_id=run_id, status=RunStatus.CANCELLED, error=error)
            return {"child": bare(gone), "started": 0}
        # The child has no result and will have none by itself: it diverged, was set aside as poison, or its row cannot
        # be read. That is no outcome of the parent's effect, for once the cause is mended both go on; recorded as a
        # failure, the handler would have gone another way by then. So the parent stops here, too, unrecorded, and
        # `stepengine deploy retry` goes on with both (durable:U5).
        except Exception as error:
            msg = f"the run {child.id!r} cannot go on: {error}"
            raise _Unrecorded(Stop("diverged", run.elapsed_ms(), ReplayDivergence(msg))) from error


async def _cancel_subtree(run: DurableRun, child: str, reason: str = "") -> None:
    """Cancel a child and its descendants without waiting for them, outside of recorded steps."""
    # In a context of its own, so that the package does not take it for a step of the run: it may happen in one
    # execution and not in the next.
    await asyncio.create_task(_cancel_workflows(run.dbos, child, reason), context=contextvars.Context())


async def _cancel_workflows(dbos: Any, child: str, reason: str) -> None:
    # By itself the package cancels the one workflow. Those below it are found by their ids, which are their paths.
    below = await dbos.list_workflows_async(
        workflow_id_prefix=f"{child}.", load_input=False, load_output=False, status=["PENDING", "ENQUEUED"]
    )
    if reason:
        await dbos.update_workflow_attributes_async(child, {REASON: reason}, merge=True)
    for each in (child, *[status.workflow_id for status in below]):
        await dbos.cancel_workflow_async(each)


def make_ancestor(item: Item, agent_id: str = "") -> Ancestor:
    """Return the ancestor for an effect that starts a run of the agent *agent_id*."""
    effect = cast("Spawn | CallBody", item.effect)
    if isinstance(effect, CallBody):
        return Ancestor(
            seq=effect.seq, agent_id=agent_id or item.plan.definition.id, tool_call_id=effect.tool_call_id, at=effect.at,
            tool_name=effect.tool_name, input=effect.input, source=effect.source, values=encode_values(effect.values),
        )  # fmt: skip
    return Ancestor(
        seq=effect.seq, agent_id=agent_id, prompt=effect.prompt, params=effect.params,
        tool_call_id=effect.tool_call_id, is_inline=effect.is_inline, at=effect.at, of=effect.of,
    )  # fmt: skip


def _is_part_of_run(item: Item) -> bool:
    """
    Return whether the work of an effect is part of this run: the body of a tool that was called alone.

    Several at once are runs of their own, as children are: one run would number their steps in the order in which they end.
    """
    return isinstance(item.effect, CallBody) and item.gather is None


def _starts_background_child(item: Item) -> bool:
    """Return whether an effect starts a child in the background."""
    return isinstance(item.effect, Spawn) and item.effect.is_background


def _check_supported(item: Item) -> None:
    """Raise ``StepEngineError`` for what a durable run cannot do, before anything of it begins."""
    # Refused before anything begins, and not when the result fails to come: the sender would deliver to a process that
    # has forgotten the call.
    if is_deferred(item):
        msg = f"the result of {item.effect.tool_name!r} comes from outside, which a durable run cannot wait for"  # type: ignore[union-attr]
        raise StepEngineError(msg)
    if isinstance(item.effect, AskPerson) and _find_race(item) is not None:
        msg = "a durable run asks nobody in a race: let a child ask, and race with that"
        raise StepEngineError(msg)


def _find_race(item: Item) -> tuple[int, int] | None:
    """Return the start and end, in its group, of the race that an effect belongs to."""
    together = item.gather
    if together is not None:
        for race in together.races:
            if any(effect.seq == item.effect.seq for effect in together.effects[slice(*race)]):
                return race
    return None


def _has_unrecorded_changes(item: Item, form: Mapping[str, Any]) -> bool:
    """Return whether an effect changed more than a journal records of its end."""
    effect = item.effect
    if not isinstance(effect, CallBody):
        return isinstance(effect, Spawn) and effect.is_inline
    # One that was cut off with its group would go on now; one that was refused never began.
    return "error" not in form and form["value"].get("status") != "cancelled"


def _add_body_end(ended: Single, body: BodyEnd | None) -> Single:
    """Return the outcome of a call with the end of its body; one that failed before it started has none."""
    return ended if isinstance(ended, Failure) else attrs.evolve(cast("Value", ended), body=body)


def _find_unknown_body_error(item: Item) -> Failure | None:
    """Return a failure if the tool comes from a source, so that no other worker knows its body."""
    effect = item.effect
    if not isinstance(effect, CallBody) or effect.tool_name in item.plan.planned_from.tools:
        return None
    msg = (
        f"the tool {effect.tool_name!r} yields, and came from a source of tools: in a durable run it is called alone, not together "
        "with others"
    )
    return Failure(StepEngineError(msg))


def _was_requested_by_model(item: Item) -> bool:
    """Return whether a model asked for the run that an effect starts."""
    effect, body = item.effect, item.plan.body
    if isinstance(effect, CallBody):
        return effect.source == "model" if body is None else body.by_model
    return bool(cast("Spawn", effect).tool_call_id)


def _remaining_budgets(ledger: SpendingLedger, among: int) -> dict[str, Any]:
    """Return what is left of the budgets of a run and those around it, divided by *among*."""
    found: dict[str, list[Any]] = {}
    # The narrowest of the budgets around counts: a child's share may not be larger than what is left to its
    # grandparents.
    for around in (ledger, *ledger.above):
        limits = around.limits
        if limits.max_tokens is not None:
            left = limits.max_tokens - around.tokens - around.reserved_tokens
            found.setdefault("max_tokens", []).append(max(0, left) // among)
        if limits.max_cost_usd is not None:
            dollars = Decimal(str(limits.max_cost_usd)) - around.cost - around.reserved_cost
            found.setdefault("max_cost_usd", []).append(max(Decimal(0), dollars) / among)
        if around.given.max_total_children is not None:
            more = around.given.max_total_children - around.children
            found.setdefault("max_total_children", []).append(max(0, more) // among)
    return {name: min(values) for name, values in found.items()}


def _find_deadline(tree: RunTree, path: str) -> float | None:
    """Return the earliest deadline of a run and its ancestors; ``None`` for none."""
    paths = [path, *[path.rsplit(".", n)[0] for n in range(1, path.count(".") + 1)], ""]
    ends = [tree.clock.deadlines[each][0] for each in paths if each in tree.clock.deadlines]
    return min(ends, default=None)


def inherited_state(effect: Leaf, plan: RunPlan) -> AgentState:
    """Return the part of a caller's state that its child or tool body starts with."""
    # Only what is read there: a whole state holds the conversation twice, and each row of the database keeps it.
    if isinstance(effect, CallBody):
        caller = effect.state()
        names = (
            "run_id",
            "ancestor_run_ids",
            "message_history",
            "view",
            "system_prompt",
            "tool_definitions",
            "context",
            "left_out",
        )
        return AgentState(**{name: getattr(caller, name) for name in names})
    parent = cast("Spawn", effect).parent()
    known: dict[str, Any] = {"run_id": parent.run_id, "ancestor_run_ids": parent.ancestor_run_ids}
    if plan.sent is not None:
        known |= {"system_prompt": parent.system_prompt, "tool_definitions": parent.tool_definitions}
    if plan.is_inline or plan.definition.include_message_history:
        known |= {"message_history": parent.message_history, "view": parent.view, "next_call": parent.next_call}
        known["left_out"] = parent.left_out
    if plan.is_inline:
        known["context"] = parent.context
    return AgentState(**known)


def _decode_outcome(form: Mapping[str, object], where: str) -> Single:
    try:
        return parse_outcome(form)
    # A divergence and no failure of the run: the record is of a newer release or was damaged, and under the code that
    # can read it the run goes on.
    except (DataError, LookupError, TypeError, AttributeError) as error:
        msg = f"the recorded outcome of {where} cannot be read: {error}"
        raise ReplayDivergence(msg, kind="undecodable", address=where) from error
