"""
``DurableRun``: one execution of a run, and the parts that it is made of.

Each part can be used alone: ``ExecutionEnd`` decides whether the execution has to stop, ``WorkflowSteps`` numbers and records steps,
``Activity`` counts the effects and waits that are under way, and ``DurableClock`` is the run's clock. No rule of the machine is here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

from stepengine.data.events import Event
from stepengine.data.outcomes import Stop
from stepengine.durable.database import list_driver_errors
from stepengine.durable.messages import ReceivedMessages
from stepengine.durable.sessions import Sessions
from stepengine.durable.step_names import NAMES
from stepengine.durable.step_records import ReservedStep, StepRecords, run_outside_workflow
from stepengine.durable.wire import Ancestor, StartOutcomes, SubmittedRun
from stepengine.errors import ReplayDivergence
from stepengine.journal.divergence import find_waiting_location
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.recorded_clock import RunClock
from stepengine.redaction import Redactor
from stepengine.runtime.performer import Item
from stepengine.runtime.tree import RunTree

T = TypeVar("T")
TAKEOVER_ATTRIBUTES = ("takeover", "again")
"""Attributes of runs that an operator gave to another worker, so that the count of their executions restarts."""


class ExecutionEnd:
    """
    Why an execution of a run has to stop, if it has to.

    Args:
        run: The run's id.

    Attributes:
        parked: Why this execution ends without a result: the run was cancelled, belongs to another worker now, or the database is away.
        fatal: The divergence that ended the run.
        is_leaving: Whether the process is about to leave the run, so that no effect may start.
        tree: The run's tree, once there is one.
        machine: The machine that is driven now; its line is named in a divergence.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self.parked: BaseException | None = None
        self.fatal: ReplayDivergence | None = None
        self.is_leaving = False
        self.tree: RunTree | None = None
        self.machine: Any = None

    def raise_if_stopping(self) -> None:
        """
        Raise the stored divergence or ``CancelledError`` if this execution has to stop.

        Raises:
            ReplayDivergence: when the run did something else than is recorded.
            asyncio.CancelledError: when this execution must go no further.
        """
        if self.fatal is not None:
            raise self.fatal
        # A cancellation and no outcome: the machine would give an outcome to the handler, which would continue and do
        # things that belong to the next execution.
        if self.is_leaving or self.parked is not None:
            raise asyncio.CancelledError

    def does_stop_end_children(self, stop: Stop) -> bool:
        """Return whether children in other processes end with *stop*; if only this execution ends, they continue."""
        continues_elsewhere = self.is_leaving or self.parked is not None or self.fatal is not None
        return not continues_elsewhere and stop.kind in ("cancelled", "limit")

    def stop_without_result(self, error: BaseException) -> None:
        """Stop this execution and store *error* unless one is stored; the run itself does not end."""
        self.parked = self.parked or error
        if self.tree is not None:
            self.tree.root.stop(Stop("cancelled"))

    def record_divergence(self, error: ReplayDivergence) -> ReplayDivergence:
        """Store the divergence in memory if it is the first one of this execution, and return the first one."""
        self.fatal = self.fatal or error
        return self.fatal

    def make_and_record_divergence(self, where: str, names: Sequence[str]) -> ReplayDivergence:
        """Store a divergence at *where* in memory and return the first one; *names* are the names of the recorded and the new step."""
        site = find_waiting_location(self.machine)
        said = f"; the record and the run have {' and '.join(dict.fromkeys(names))}" if names else ""
        lines = [f"the run {self._run!r} diverges from its record at {where}{said}"]
        lines += [f"  {site}"] if site else []
        lines.append(
            "  the record is unchanged: continue with the release that started the run; "
            "`stepengine deploy release OLD NEW --check` lists the runs that another release can continue"
        )
        return self.record_divergence(ReplayDivergence("\n".join(lines), kind="changed", address=where, site=site))


class WorkflowSteps:
    """
    The numbered steps of one execution in the database.

    Args:
        dbos: The package's class ``DBOS``.
        errors: The module with its errors.
        run: The run's id.
        end: Receives divergences and the loss of the database.

    Attributes:
        is_live: Whether this execution has performed something that was not recorded.
        was_replayed: Whether this execution has found a recorded step, so that it is not the run's first one.
    """

    def __init__(self, dbos: Any, errors: Any, run: str, end: ExecutionEnd) -> None:
        self.dbos = dbos
        self.errors = errors
        self.is_live = False
        self.was_replayed = False
        self._run = run
        self._end = end
        self._records = StepRecords(dbos, errors, run)
        self._is_repeated: bool | None = None
        self._diverges = (errors.DBOSUnexpectedStepError, errors.DBOSStepNondeterminismError)
        # Looked up in the module that was given: the package is imported by name and only on first use, so that the
        # facade can be read without the extra.
        self._parks = (
            errors.DBOSWorkflowCancelledError,
            errors.DBOSWorkflowConflictIDError,
            *list_driver_errors(),
        )

    def is_new_event(self, event: Event) -> bool:
        """Return whether an event is new to observers, and does not repeat the recorded part of a resumed run."""
        # A run that was resumed repeats its recorded part, whose events were shown by an earlier execution.
        return self.is_live or not self.was_replayed

    async def is_repeated_execution(self) -> bool:
        """Return whether this is not the run's first execution; query the database if no recorded step was found."""
        if self.was_replayed:
            return True
        if self._is_repeated is None:
            look = self.dbos.list_workflows_async(workflow_ids=[self._run], load_input=False, load_output=False)
            (status,) = await run_outside_workflow(look)
            known = status.attributes or {}
            # A takeover by an operator makes the package count from the beginning again, so its count alone would take
            # the second execution for the first; the attributes show it.
            self._is_repeated = (status.recovery_attempts or 0) > 1 or any(
                name in known for name in TAKEOVER_ATTRIBUTES
            )
        return self._is_repeated

    async def await_or_stop_execution(self, operation: Awaitable[T], where: str) -> T:
        """
        Await a database operation; turn divergences and lost databases into stops of this execution.

        Raises:
            ReplayDivergence: when the run does something else there than is recorded.
            asyncio.CancelledError: when this execution must go no further; ``ExecutionEnd.parked`` is the reason.
        """
        try:
            return await operation
        # The package compares the name of a step with what is recorded at that number, and a name holds the fingerprint
        # of the effect: so a changed handler is found here, before anything of it is performed (durable:UT9).
        except self._diverges as error:
            names = [found["name"] for found in NAMES.finditer(str(error)) if found["name"]]
            raise self._end.make_and_record_divergence(where, names) from None
        # A database that is away is not the fault of the run: ended as failed it would be lost, parked it is tried again
        # (durable:UF18).
        except self._parks as error:
            self._end.stop_without_result(error)
            raise asyncio.CancelledError from None

    def reserve_next_step(self, name: str, mark: Mapping[str, object] | None = None) -> ReservedStep:
        """Reserve the next number for a step of this name; ``load_or_record_mark`` stores its *mark* later."""
        return ReservedStep(self.dbos.reserve_step(), name, mark)

    async def compare_recorded_steps(self, steps: Sequence[ReservedStep], where: str) -> None:
        """Read the records of reserved steps and compare their names; a different name ends this execution with a divergence."""
        self.was_replayed |= await self.await_or_stop_execution(self._records.read_and_compare_steps(steps), where)

    async def load_or_record_mark(self, step: ReservedStep, where: str) -> Any:
        """Return the mark that an earlier execution recorded for a reserved step, or record the step's own mark and return it."""

        async def get_mark() -> Mapping[str, object] | None:
            return step.mark

        return await self.load_or_perform_step(step, get_mark, where, preemptible=False)

    async def reserve_and_load_or_perform_step(
        self, name: str, act: Callable[[], Coroutine[Any, Any, Any]], where: str
    ) -> Any:
        """Reserve the next step under this name; return its recorded result, or perform and record it now."""
        return await self.load_or_perform_step(self.reserve_next_step(name), act, where)

    async def load_or_perform_step(
        self,
        step: ReservedStep,
        act: Callable[[], Coroutine[Any, Any, object]],
        where: str,
        *,
        preemptible: bool = True,
    ) -> Any:
        """
        Return the recorded result of a reserved step, or perform and record it now.

        Args:
            step: The step.
            act: Performs the step and returns its result.
            where: The address of the effect, for errors.
            preemptible: Whether cancelling the run interrupts the step.
        """
        await self.compare_recorded_steps([step], where)
        known = self._records.pop_result(step)
        if known is not None:
            return known
        is_performed = False

        async def perform_and_mark() -> object:
            nonlocal is_performed
            is_performed = True
            return await act()

        result = await self.await_or_stop_execution(
            step.reservation.run_async({"name": step.name, "preemptible": preemptible}, perform_and_mark), where
        )
        self.was_replayed |= not is_performed
        return result


class Activity:
    """
    The effects of an execution that are running, and its waits.

    Attributes:
        waits: How many effects wait for something: an answer, a message, a time.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._running = 0
        self._idle: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def count_running(self) -> Iterator[None]:
        """Count an effect as running while the block runs."""
        # A worker that leaves waits for effects under way to be recorded, and for nothing else: cut off between doing
        # and recording they would be in doubt (durable:U40).
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._idle is not None:
                self._idle.set_result(None)
                self._idle = None

    @contextlib.contextmanager
    def count_waiting(self) -> Iterator[None]:
        """Count an effect as waiting while the block runs. A worker that stops does not wait for it."""
        self.waits += 1
        try:
            yield
        finally:
            self.waits -= 1

    async def wait_until_idle(self) -> None:
        """Wait until no effect is running."""
        while self._running:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)


class DurableClock(RunClock):
    """
    The clock of a run in the database.

    Args:
        created: When the run was submitted; times count from here.
    """

    def __init__(self, created: datetime) -> None:
        super().__init__(stable=False)
        self._created = created

    def start_execution_time(self) -> None:
        """Start the time of this execution."""
        self.continue_from(0, self._created, datetime.now(UTC))

    def elapsed_ms(self) -> int:
        """Return the milliseconds since the run was created, never less than the last recorded time."""
        return max(self.last, (datetime.now(UTC) - self._created) // timedelta(milliseconds=1))

    def advance_time(self, at: int) -> int:
        """Advance the run's time to *at* milliseconds after this execution started, and return it."""
        self.record_time("", 0, at)
        return self.last


class DurableRun:
    """
    One execution of a run: its order, and its parts.

    Args:
        order: The order that started the run.
        workflow: Its steps in the database.
        end: Why it has to stop.
        release: The release that it belongs to.
        effects: How many effects this process performs at once.
        redactor: Removes secrets from everything that is stored.
        seed: The outcomes that it starts with.
        sessions: The sessions, in which a turn looks up the turn before it; set once this process has connected.

    Attributes:
        clock: Its clock.
        activity: The effects and waits that are under way.
        prints: The fingerprints of its effects.
        started: How many runs were started below this one.
        messages: The messages that this execution has received.
        bodies: The calls of tools that yield whose bodies are under way in this run, from the outermost on.
    """

    def __init__(
        self,
        order: SubmittedRun,
        workflow: WorkflowSteps,
        end: ExecutionEnd,
        *,
        release: str,
        effects: asyncio.Semaphore,
        redactor: Redactor,
        seed: StartOutcomes,
        sessions: asyncio.Future[Sessions],
    ) -> None:
        self.order = order
        self.workflow = workflow
        self.end = end
        self.release = release
        self.effects = effects
        self.redactor = redactor
        self.seed = seed
        self.sessions = sessions
        self.clock = DurableClock(datetime.fromisoformat(order.created))
        self.activity = Activity()
        self.messages = ReceivedMessages()
        self.prints = Fingerprints(redactor)
        self.started = 0
        self.bodies: list[Ancestor] = []

    @property
    def tree(self) -> RunTree:
        """The run's tree, or ``None`` before it is built. No effect is performed before that."""
        return cast("RunTree", self.end.tree)

    def make_path_member(self, item: Item) -> dict[str, str]:
        """Return the member with the path of an effect in a tool body; nothing for one of the run itself."""
        return {} if item.path == self.order.path else {"path": item.path}
