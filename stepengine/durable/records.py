"""
What the database holds of a run tree, and its ways in and out of ordinary journals.

The database holds outcomes, and of what was asked for only fingerprints. So a journal is made by driving the agents over the
outcomes: nothing is performed, and what differs from the record is a divergence. The other way, outcomes of a journal become
the seed that a run is submitted with.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.effects import CHILD_ENDS, RUNS, WAITS, AskPerson, CallBody, CallModel, RunInBackground, Spawn
from stepengine.data.events import Event
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunStatus
from stepengine.durable.body import request_of_root
from stepengine.durable.operate import Operator, RunView, Step
from stepengine.durable.sessions import ENTERED, begin_order, run_of_result
from stepengine.durable.steps import (
    ASK,
    BODY,
    CHILD,
    END,
    INTENT,
    LOOKUP,
    REASON,
    SPAWN,
    START,
    TOOL,
    WAIT,
    fingerprint_of,
    kind_of,
    kind_of_effect,
)
from stepengine.durable.wire import Order, Seed, answers_of, error_of, outcome_form, outcome_of_form
from stepengine.engine.launching import Launcher
from stepengine.engine.planning import with_prompt
from stepengine.engine.run import EngineRun, failing, stream_run
from stepengine.errors import AgentError, JournalError, ReplayDivergence, StepEngineError
from stepengine.journal.encoding import describe, restored, touched_world
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import opening_of, parent_of
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import Address, Intent, Result, shown_address
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.machine.plan import RunPlan
from stepengine.redaction import Redactor
from stepengine.runtime.performer import IO, Item, Performer, child_path
from stepengine.runtime.services import ChildPlanner, Services

__all__ = (
    "Archive",
    "EffectRecord",
    "Played",
    "driven",
    "followed",
    "order_from_journal",
    "read_archive",
    "write_journal",
)

FOLLOW_SECONDS = 0.2
"""Fast enough that a reader sees steps as they happen; each reader costs five queries in a second."""


@frozen
class EffectRecord:
    """
    What is recorded of one effect.

    Attributes:
        kind: ``"model"``, ``"tool"``, ``"perform"``, ``"child"`` or ``"ask"``.
        fp: Its fingerprint.
        form: Its outcome as it is stored; ``None`` while there is none.
    """

    kind: str
    fp: str
    form: Mapping[str, Any] | None = None


@attrs.define
class Archive:
    """
    What is recorded of a run tree.

    Attributes:
        order: What the root was started with.
        entries: Its effects, by address; those that have begun, at least.
        lookups: What was looked up when runs started, by path.
        runs: The runs, by path.
        sizes: How many steps were recorded when they were read, by run.
        known: The numbers of those that need not be read again, by run.
        ends: When children ended, in the tree's own time, by path.
        is_begun: Whether it is known what the root goes on from: of a turn not before it is its turn.
    """

    order: Order
    entries: dict[Address, EffectRecord] = attrs.field(factory=dict)
    lookups: dict[str, Mapping[str, Any]] = attrs.field(factory=dict)
    runs: dict[str, RunView] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    known: dict[str, set[int]] = attrs.field(factory=dict)
    ends: dict[str, int] = attrs.field(factory=dict)
    is_begun: bool = True

    async def refresh(self, operator: Operator) -> None:
        """Take in what was recorded since."""
        views = await operator.tree(self.order.root)
        sizes = await operator.sizes([view.id for view in views])
        for view in views:
            path = view.id.partition("/")[2]
            self.runs[path] = view
            size = sizes.get(view.id, 0)
            if size != self.sizes.get(view.id, 0):
                self.sizes[view.id] = size
                # By their numbers: of effects that run at once, one with a smaller number may be recorded later.
                known = self.known.setdefault(view.id, set())
                known |= _take(self, path, await operator.steps(view.id, known))


async def read_archive(operator: Operator, root: str) -> Archive:
    """
    Return what the database holds of a run tree.

    Raises:
        JournalError: when there is no such root run.
    """
    found = await operator.client.list_workflows_async(workflow_ids=[root], load_output=False)
    if not found or "/" in root:
        msg = f"there is no root run {root!r} in this database"
        raise JournalError(msg)
    given = found[0].input["args"]
    order = Order.of(given[0])
    archive = Archive(order, is_begun=not order.turn)
    if len(given) > 1:
        seed = Seed.of(given[1])
        archive.entries.update({address: EffectRecord(*found) for address, found in seed.outcomes.items()})
        archive.lookups.update(seed.lookups)
    await archive.refresh(operator)
    return archive


def _take(archive: Archive, path: str, steps: Sequence[Step]) -> set[int]:
    """Read the steps of one run, in their order; return their numbers, except those of open questions, which are read again."""
    taken = {step.number for step in steps}
    received = {step.number: step.form for step in steps if step.name == "DBOS.recv"}
    for step in steps:
        name, form = step.name, step.form
        kind, fp = kind_of(name), fingerprint_of(name)
        if not isinstance(form, Mapping):
            continue
        # What belongs to the body of a tool in this run says so.
        address: Address = (form.get("path", path), form.get("seq", -1))
        if kind == LOOKUP:
            archive.lookups[path] = form
        elif kind == ENTERED:
            archive.order, archive.is_begun = begin_order(archive.order, form), True
        elif kind == END:
            archive.ends[path] = form["at"]
        elif kind == ASK and "questions" in form:
            said = received.get(step.number + 1)
            taken -= set() if said is not None else {step.number}
            archive.entries[address] = EffectRecord(kind, fp, None if said is None else {**form, "said": said})
        else:
            _take_effect(archive, address, kind, fp, form)
    return taken


def _take_effect(archive: Archive, address: Address, kind: str, fp: str, form: Mapping[str, Any]) -> None:
    """Take in that an effect has begun, or its outcome."""
    if kind in BEGINNINGS:
        archive.entries.setdefault(address, EffectRecord(BEGINNINGS[kind], fp))
    elif "seq" in form:
        archive.entries[address] = EffectRecord(kind, fp, form)


BEGINNINGS = {INTENT: INTENT, SPAWN: CHILD, BODY: TOOL, WAIT: WAIT}
"""Kinds of steps by which it is known that something has begun, and what it is."""


def recorded_outcome(form: Mapping[str, Any]) -> Single:
    """
    Return the outcome that is stored, also of a question that was answered.

    Raises:
        DataError: when it does not fit the codec any more.
    """
    if "said" not in form:
        return outcome_of_form(form)
    questions = tuple(map(restored, form["questions"]))
    said = form["said"]
    return Value(answers_of(said["answers"], questions), max(form["at"], int(said["at"])))


# --- out ----------------------------------------------------------------------------------------------------------------


async def write_journal(launcher: Launcher, archive: Archive, journal: Journal) -> Journal:
    """
    Write what is recorded of a run tree into *journal*, and return it.

    Args:
        launcher: The engine's, with the agents of the run's release.
        archive: What is recorded.
        journal: A journal that holds no run.

    Raises:
        JournalError: when the journal cannot be written, or holds a run; when the run's turn in its session has not come.
        ReplayDivergence: when the agents ask for something else than is recorded.
    """
    if not archive.is_begun:
        why = archive.runs[""].attributes.get("answered")
        said = "its turn has not come" if why is None else f"it was the answer to {why!r}, which has it in its journal"
        msg = f"nothing of the run {archive.order.root!r} is recorded: {said}"
        raise JournalError(msg)
    session = JournaledRun.record(journal, dict(archive.order.answers), seed=archive.order.seed)
    played = Played(archive, session)
    result = await driven(launcher, played).run()
    if played.fatal is not None:
        raise played.fatal
    if isinstance(result.error, ReplayDivergence):
        raise result.error
    played.check_end()
    _drop_unbegun(session.journal, archive)
    return session.journal


async def followed(launcher: Launcher, operator: Operator, root: str) -> AsyncGenerator[Event, None]:
    """
    Give the events of a run that goes on elsewhere, from its start on, as its outcomes are recorded.

    What is not recorded has no events: no parts of replies, no progress of tools.

    Raises:
        JournalError: when there is no such root run.
        ReplayDivergence: when these agents ask for something else than is recorded.
    """
    archive = await read_archive(operator, root)
    while not archive.is_begun and not archive.runs[""].is_over:
        await asyncio.sleep(FOLLOW_SECONDS)
        await archive.refresh(operator)
    answered = await run_of_result(operator, root)
    if answered != root:
        archive = await read_archive(operator, answered)
    reading = asyncio.Lock()

    async def coming() -> bool:
        is_over = archive.runs[""].is_over
        async with reading:
            await asyncio.sleep(FOLLOW_SECONDS)
            await archive.refresh(operator)
        return not is_over

    session = JournaledRun.record(MemoryJournal(), dict(archive.order.answers), seed=archive.order.seed)
    played = Played(archive, session, coming)
    events = stream_run(driven(launcher, played))
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()
    if played.fatal is not None:
        raise played.fatal


def driven(launcher: Launcher, played: Played) -> EngineRun:
    """Return a run that is driven over what is recorded."""
    order, session = played.order, played.session
    at_that_time = attrs.evolve(launcher, services=attrs.evolve(launcher.services, clock=_Fixed(order.created)))

    try:
        made = at_that_time.plan(request_of_root(launcher, order))
        plan, state = played.looked_up(made.plan, made.state)
        plan, state = session.start(
            plan, state, limits=order.limits, models=launcher.agent_models, own_models=order.models
        )
        services = played.wrap(made.services)
        live = at_that_time.run_of(attrs.evolve(made, plan=plan, state=state, services=services))
    except BaseException:
        session.close()
        raise
    live.session = session
    live.tree.desk.patience = 0.0
    return live


def _drop_unbegun(journal: Journal, archive: Archive) -> None:
    """Leave out effects at the end that had not begun: in a journal, what was begun and has no result may have happened."""
    records = journal.records()
    results = {(record.path, record.seq) for record in records if isinstance(record, Result)}
    intents = [record for record in records if isinstance(record, Intent)]
    paths = {record.path for record in intents}
    last: dict[str, int] = {}
    for record in intents:
        address = (record.path, record.seq)
        if record.seq < 0 or address in results or address in archive.entries or child_path(*address) in paths:
            last[record.path] = max(record.seq, last.get(record.path, record.seq))

    def has_begun(record: Intent) -> bool:
        # Of effects that run at once, a later one may be recorded first; a journal has no gaps.
        return record.seq <= last.get(record.path, -1)

    kept = [record for record in records if not isinstance(record, Intent) or has_begun(record)]
    if len(kept) < len(records):
        journal.replace(kept)


class _Fixed:
    """The clock of a run that was created at a time that is over."""

    def __init__(self, created: str) -> None:
        self._created = datetime.fromisoformat(created)

    def now(self) -> datetime:
        """Return when the run was created."""
        return self._created

    def now_ms(self) -> int:
        """Return no time: outcomes have theirs."""
        return 0

    async def sleep(self, seconds: float) -> None:
        """Wait for nothing."""


class Played:
    """
    Drives a run tree over what is recorded of it.

    Args:
        archive: What is recorded.
        session: Where it is written.
        coming: Waits until more is recorded, and returns whether there is; ``None`` to stop where the record ends.
    """

    def __init__(
        self, archive: Archive, session: JournaledRun, coming: Callable[[], Awaitable[bool]] | None = None
    ) -> None:
        self._archive = archive
        self.coming = coming
        self.order = archive.order
        self.session = session
        self._prints = Fingerprints(session.source.redactor)
        self._used: set[Address] = set()
        self.fatal: ReplayDivergence | None = None

    def wrap(self, services: Services) -> Services:
        """Return services with which nothing is performed."""
        failed = self._archive.lookups.get("", {}).get("error")
        if failed is not None:
            services = attrs.evolve(services, machine=failing(error_of(failed) or StepEngineError()))
        mine = attrs.evolve(
            services,
            planner=self._planner(services.planner),
            middlewares=(*services.middlewares, self._player),
        )
        return self.session.wrap(mine)

    def _player(self, inner: Performer) -> Performer:
        return _Player(inner, self)

    def _planner(self, inner: ChildPlanner) -> ChildPlanner:
        def planned(parent: RunPlan, effect: Spawn | CallBody, path: str) -> tuple[RunPlan, AgentState]:
            return self.looked_up(*inner(parent, effect, path))

        return planned

    def looked_up(self, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
        """Return plan and state with what was looked up when the run started; the caller of a tool has looked for its body."""
        if plan.body is not None:
            return plan, state
        known = self._archive.lookups.get(plan.path)
        if known is None:
            prompt = plan.definition.system_prompt
            return plan, with_prompt(plan, state) if isinstance(prompt, str) and plan.sent is None else state
        if known.get("prompt") is not None:
            state = attrs.evolve(state, system_prompt=known["prompt"])
        return attrs.evolve(plan, context_window=known.get("window")), state

    def meet(self, item: Item) -> None:
        """Compare an effect with the record; raises ``ReplayDivergence`` when they differ."""
        address = (item.path, item.effect.seq)
        entry = self._archive.entries.get(address)
        if entry is None:
            return
        self._used.add(address)
        fp = self._prints.of(describe(item))
        if fp != entry.fp:
            self.fatal = self._divergence_at(item, entry)
            raise self.fatal

    def _divergence_at(self, item: Item, entry: EffectRecord) -> ReplayDivergence:
        where = shown_address(item.path, item.effect.seq)
        form = describe(item)
        now = "model" if isinstance(form, CallModel) else str(form["type"])
        msg = (
            f"the run {self._archive.order.root!r} does something else at {where} than is recorded: "
            f"{entry.kind}:{entry.fp} is recorded, and {now}:{self._prints.of(form)} is asked for"
        )
        return ReplayDivergence(msg, kind="changed", address=where)

    def is_begun(self, item: Item) -> bool:
        """Return whether an effect is recorded, whether or not it has an outcome."""
        return (item.path, item.effect.seq) in self._archive.entries

    def outcome(self, item: Item) -> Single | None:
        """Return the recorded outcome of an effect, if it has one."""
        entry = self._archive.entries.get((item.path, item.effect.seq))
        return None if entry is None or entry.form is None else recorded_outcome(entry.form)

    def attempts(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Return the failed attempts before an outcome."""
        form = self._archive.entries[item.path, item.effect.seq].form
        found: Sequence[Mapping[str, object]] = (form or {}).get("attempts", ())
        return found

    def end_of(self, path: str) -> Stop:
        """Return why a run stops where its record does."""
        if self.was_cut(path):
            return Stop("cancelled")
        runs = self._archive.runs
        while path and path not in runs:
            path = path.rpartition(".")[0]
        view = runs.get(path)
        return Stop("cancelled" if view is not None and view.state == "CANCELLED" else "shutdown")

    def was_cut(self, path: str) -> bool:
        """Return whether the run at *path*, or one around it, is known to have ended: nobody waits there any more."""
        while path:
            address = parent_of(path)
            entry = self._archive.entries.get(address)
            if entry is not None and entry.kind == START:
                view = self._archive.runs.get(path)
                if view is not None and view.is_over:
                    return True
            elif entry is not None and entry.form is not None:
                return True
            path = address[0]
        return False

    def ended_at(self, path: str) -> int:
        """Return when the child in the background at *path* ended; if it was cancelled, when it last did something."""
        known = self._archive.ends.get(path)
        if known is not None:
            return known
        inside, start = f"{path}.", parent_of(path)
        times: list[int] = [
            entry.form["at"]
            for address, entry in self._archive.entries.items()
            if entry.form is not None and (address in ((path, address[1]), start) or address[0].startswith(inside))
        ]
        return max(times, default=0)

    def reason(self, path: str) -> str:
        """Return why the parent of the child at *path* ended it; ``""`` where it gave no reason, or did not."""
        view = self._archive.runs.get(path)
        return "" if view is None else str(view.attributes.get(REASON) or "")

    def check_end(self) -> None:
        """Raise ``ReplayDivergence`` when the run ended before its record does."""
        left = [a for a, e in self._archive.entries.items() if a not in self._used and e.form is not None]
        if left and self._archive.runs[""].state == "SUCCESS":
            where = shown_address(*left[0])
            msg = f"the run {self._archive.order.root!r} ends before {where}, which is recorded"
            raise ReplayDivergence(msg, kind="unused", address=where)


class _Player:
    """Answers effects from the record, and stops where it ends."""

    def __init__(self, inner: Performer, played: Played) -> None:
        self._inner = inner
        self._played = played

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Compare with the record."""
        for item in batch:
            self._played.meet(item)
        asked = [item for item in batch if isinstance(item.effect, AskPerson) and not self._played.is_begun(item)]
        return self._inner.begin(batch) if self._played.coming is None or not asked else self._begin_open(batch, asked)

    async def _begin_open(self, batch: Sequence[Item], asked: Sequence[Item]) -> None:
        """Begin questions once they are recorded: whoever is shown one may answer at once, and before that the run does not have it."""
        assert self._played.coming is not None  # noqa: S101 - it was looked
        for item in asked:
            while not self._played.is_begun(item) and await self._played.coming():
                self._played.meet(item)
        await self._inner.begin(batch)

    async def perform(self, item: Item, io: IO) -> Single:
        """Give the recorded outcome; a child, and the body of a tool, is driven over its own records."""
        if isinstance(item.effect, RunInBackground):
            return await self._in_background(item, io)
        if type(item.effect) in RUNS and not getattr(item.effect, "is_background", False):
            return await self._driven(item, io)
        known = await self._coming(item)
        if known is None:
            return await self._stop_before(item, io)
        if isinstance(known, Value) and type(item.effect) in (Spawn, *CHILD_ENDS):
            return await self._about_children(item, io, known)
        for attempt in self._played.attempts(item):
            error = restored({"type": "failure", "error": attempt["error"]}).error
            io.attempt(Failure(error), restored(attempt["usage"]) if "usage" in attempt else None)
        return known

    async def _about_children(self, item: Item, io: IO, known: Value) -> Single:
        """Start a child in the background where it is recorded to have been, or give what is recorded of some that have ended here."""
        if isinstance(item.effect, Spawn):
            outcome = await self._inner.perform(item, io)
            return attrs.evolve(outcome, at=known.at, inputs=known.inputs) if isinstance(outcome, Value) else outcome
        ended = await io.ends(item, known.value.done)
        if ended is None:
            return Stop("cancelled")
        return attrs.evolve(known, value=attrs.evolve(known.value, ended=ended))

    async def _stop_before(self, item: Item, io: IO) -> Single:
        """Return how the run stops before an effect without an outcome; where it waits there, it is suspended."""
        if type(item.effect) in WAITS and not self._played.was_cut(item.path):
            io.stands(item)
            return Stop("suspended")
        if isinstance(item.effect, AskPerson) and not self._played.was_cut(item.path):
            stopped = await self._inner.perform(item, io)
            return stopped if isinstance(stopped, Stop) else self._played.end_of(item.path)
        return self._played.end_of(item.path)

    async def _coming(self, item: Item) -> Single | None:
        """Return the recorded outcome of an effect, if it has one, or will have."""
        known = self._played.outcome(item)
        while known is None and self._played.coming is not None and await self._played.coming():
            self._played.meet(item)
            known = self._played.outcome(item)
        return known

    async def _in_background(self, item: Item, io: IO) -> Single:
        """Drive a child in the background to the end of its record, and give its end the time at which it came."""
        outcome = await self._inner.perform(item, io)
        if not isinstance(outcome, Value):
            return outcome
        why, child = self._played.reason(item.path), outcome.value
        if why and child.status is RunStatus.CANCELLED:
            child = attrs.evolve(child, error=AgentError(why))
        return attrs.evolve(outcome, value=child, at=self._played.ended_at(item.path))

    async def _driven(self, item: Item, io: IO) -> Single:
        known = self._played.outcome(item)
        if known is not None and not _has_run(item, known):
            return known
        outcome = await self._inner.perform(item, io)
        known = known if isinstance(outcome, Stop) else await self._coming(item)
        if isinstance(known, Stop):
            return attrs.evolve(known, body=getattr(outcome, "body", None))
        if known is None or isinstance(outcome, Stop):
            return outcome
        return attrs.evolve(outcome, at=known.at, inputs=known.inputs)


def _has_run(item: Item, known: Single) -> bool:
    """Return whether what an effect starts has run, as is recorded of its end: it was not refused before it began."""
    if isinstance(item.effect, CallBody):
        return not isinstance(known, Failure)
    child: object = getattr(known, "value", None)
    return isinstance(child, ChildResult) and bool(child.run_id)


# --- in -----------------------------------------------------------------------------------------------------------------


def order_from_journal(journal: Journal, redactor: Redactor, *, pool: str) -> tuple[Order, Seed]:
    """
    Return what the run of a journal is submitted with, and what it begins with, to go on where the journal ends.

    Raises:
        JournalError: when the journal is damaged, or its run has ended.
    """
    history = journal.history()
    opening, head = opening_of(history), history.head
    assert head is not None  # noqa: S101 - an opening was read from it
    if history.is_complete:
        msg = f"the run of {journal.name} has ended, so nothing of it can go on elsewhere; replay or fork it"
        raise JournalError(msg)
    if any(intent.is_background for intent in history.intents.values()):
        msg = (
            f"the run of {journal.name} has started children in the background, which do not move between a journal and a database; "
            "go on with it where it is"
        )
        raise JournalError(msg)
    prints = Fingerprints(redactor)
    outcomes: dict[Address, tuple[str, str, dict[str, object] | None]] = {}
    for address, intent in history.intents.items():
        result = history.results.get(address)
        if intent.begins_run and result is None:
            continue
        fp = intent.fp or prints.of(intent.effect)
        attempts = [] if result is None else list(result.attempts)
        form = (
            None if result is None else outcome_form(address[1], history.outcome(result), redactor, attempts=attempts)
        )
        if form is not None or touched_world(intent.effect):
            outcomes[address] = kind_of_effect(intent.effect), fp, form
    lookups: dict[str, dict[str, object]] = {}
    for path in {*history.prompts, *history.windows}:
        lookups[path] = {"prompt": history.prompts.get(path), "window": history.windows.get(path)}
    order = Order(
        root=opening.run_id, agent_id=opening.agent_id, prompt=opening.prompt, params=opening.params,
        created=head.created, seed=head.seed, info=opening.info, limits=opening.limits, previous=opening.previous, pool=pool,
        models=history.root.get("run_models") or {},
    )  # fmt: skip
    return order, Seed(outcomes, lookups)
