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
from functools import partial
from typing import Any

import attrs
from attrs import frozen

from stepengine.data.effects import CHILD_ENDS, RUNS, WAITS, AskPerson, CallBody, CallModel, RunInBackground, Spawn
from stepengine.data.events import Event
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import AgentState, ChildResult, RunResult, RunStatus
from stepengine.durable.body import make_root_request
from stepengine.durable.deployment import Deployment, DurableRunView, Step
from stepengine.durable.sessions import ENTERED, resolve_answered_run, with_previous_turn
from stepengine.durable.step_names import (
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
    get_effect_step_kind,
    parse_step_fingerprint,
    parse_step_kind,
)
from stepengine.durable.wire import (
    StartOutcomes,
    SubmittedRun,
    encode_outcome,
    parse_answers,
    parse_error,
    parse_outcome,
)
from stepengine.engine.launcher import Launcher
from stepengine.engine.run import EngineRun, make_ended_machine, stream_run
from stepengine.engine.run_plans import with_resolved_system_prompt
from stepengine.errors import AgentError, JournalError, ReplayDivergence, StepEngineError
from stepengine.journal.encoding import decode_stored, encode_effect, may_change_world_if_repeated, to_comparable_json
from stepengine.journal.fingerprints import Fingerprints
from stepengine.journal.history import parse_recorded_start
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.provenance import replace_records_by_derived
from stepengine.journal.records import Address, Intent, Result, format_address, get_starter_address
from stepengine.journal.run_start import start_run
from stepengine.journal.show import find_root_end
from stepengine.journal.store import Journal, MemoryJournal
from stepengine.machine.plan import RunPlan
from stepengine.redaction import Redactor
from stepengine.runtime.performer import IO, Item, Performer, child_path
from stepengine.runtime.services import ChildPlanner, Services

FOLLOW_SECONDS = 0.2
"""Fast enough that a reader sees steps as they happen. Each reader looks five times in a second, with three queries or more."""


@frozen
class EffectRecord:
    """
    The record of one effect.

    Attributes:
        kind: The kind of the step, as in ``step_names``; for an effect that has only started, a value of ``BEGINNINGS``.
        fp: The fingerprint of the effect.
        form: The stored outcome; ``None`` before there is one.
    """

    kind: str
    fp: str
    form: Mapping[str, Any] | None = None


@attrs.define
class RunTreeRecord:
    """
    The record of a run tree.

    Attributes:
        order: The request of the root run.
        entries: The started effects, by address.
        lookups: The recorded prompts and context windows of runs, by path.
        runs: The runs, by path.
        sizes: The number of recorded steps at the last refresh, by run id.
        known: The numbers of the steps that need not be read again, by run id.
        ends: The end times of children in milliseconds of the tree, by path.
        is_begun: Whether the root has its first state. A turn has none before the end of the previous turn is recorded.
    """

    order: SubmittedRun
    entries: dict[Address, EffectRecord] = attrs.field(factory=dict)
    lookups: dict[str, Mapping[str, Any]] = attrs.field(factory=dict)
    runs: dict[str, DurableRunView] = attrs.field(factory=dict)
    sizes: dict[str, int] = attrs.field(factory=dict)
    known: dict[str, set[int]] = attrs.field(factory=dict)
    ends: dict[str, int] = attrs.field(factory=dict)
    is_begun: bool = True

    async def refresh(self, deployment: Deployment) -> None:
        """Read the steps recorded since the last refresh."""
        views = await deployment.get_tree(self.order.root)
        sizes = await deployment.count_steps([view.id for view in views])
        for view in views:
            path = view.id.partition("/")[2]
            self.runs[path] = view
            size = sizes.get(view.id, 0)
            if size != self.sizes.get(view.id, 0):
                # By their numbers: of effects that run at once, one with a smaller number may be recorded later.
                known = self.known.setdefault(view.id, set())
                known |= _add_steps_to_tree_record(self, path, await deployment.load_steps(view.id, known))
                self.sizes[view.id] = size


async def read_tree_record(deployment: Deployment, root: str) -> RunTreeRecord:
    """
    Read the record of a run tree from the database.

    Raises:
        JournalError: when there is no such root run.
    """
    found = await deployment.client.list_workflows_async(workflow_ids=[root], load_output=False)
    if not found or "/" in root:
        msg = f"there is no root run {root!r} in this database"
        raise JournalError(msg)
    given = found[0].input["args"]
    order = SubmittedRun.from_json(given[0])
    tree_record = RunTreeRecord(order, is_begun=not order.turn)
    if len(given) > 1:
        seed = StartOutcomes.from_json(given[1])
        tree_record.entries.update({address: EffectRecord(*found) for address, found in seed.outcomes.items()})
        tree_record.lookups.update(seed.lookups)
    await tree_record.refresh(deployment)
    return tree_record


async def read_tree_record_once_started(
    deployment: Deployment, root: str, *, pause: float, waiting: Callable[[], None] = lambda: None
) -> RunTreeRecord:
    """
    Wait until a run has started, and read its record; for a turn that became an answer, that of the answered run.

    Args:
        deployment: The deployment.
        root: The root run.
        pause: Seconds between two looks.
        waiting: Called before each pause.

    Raises:
        JournalError: when there is no such root run.
    """
    tree_record = await read_tree_record(deployment, root)
    while not tree_record.is_begun and not tree_record.runs[""].is_over:
        waiting()
        await asyncio.sleep(pause)
        await tree_record.refresh(deployment)
    answered = await resolve_answered_run(deployment, root)
    return tree_record if answered == root else await read_tree_record(deployment, answered)


def _add_steps_to_tree_record(tree_record: RunTreeRecord, path: str, steps: Sequence[Step]) -> set[int]:
    """
    Add the steps of one run to the record in memory; return the numbers that need not be read again.

    Open questions are read again.
    """
    taken = {step.number for step in steps}
    received = {step.number: step.form for step in steps if step.name == "DBOS.recv"}
    for step in steps:
        name, form = step.name, step.form
        kind, fp = parse_step_kind(name), parse_step_fingerprint(name)
        if not isinstance(form, Mapping):
            continue
        # What belongs to the body of a tool in this run says so.
        address: Address = (form.get("path", path), form.get("seq", -1))
        if kind == LOOKUP:
            tree_record.lookups[path] = form
        elif kind == ENTERED:
            tree_record.order, tree_record.is_begun = with_previous_turn(tree_record.order, form), True
        elif kind == END:
            tree_record.ends[path] = form["at"]
        elif kind == ASK and "questions" in form:
            said = received.get(step.number + 1)
            taken -= set() if said is not None else {step.number}
            tree_record.entries[address] = EffectRecord(kind, fp, None if said is None else {**form, "said": said})
        else:
            _add_effect_to_tree_record(tree_record, address, kind, fp, form)
    return taken


def _add_effect_to_tree_record(
    tree_record: RunTreeRecord, address: Address, kind: str, fp: str, form: Mapping[str, Any]
) -> None:
    """Add the start or the outcome of an effect to the record in memory."""
    if kind in BEGINNINGS:
        tree_record.entries.setdefault(address, EffectRecord(BEGINNINGS[kind], fp))
    elif "seq" in form:
        tree_record.entries[address] = EffectRecord(kind, fp, form)


BEGINNINGS = {INTENT: INTENT, SPAWN: CHILD, BODY: TOOL, WAIT: WAIT}
"""Kinds of steps by which it is known that something has begun, and what it is."""


def decode_outcome_or_answers(form: Mapping[str, Any]) -> Single:
    """
    Return the outcome in a stored form; for questions, the answers stored with them.

    Raises:
        DataError: when it does not fit the codec any more.
    """
    if "said" not in form:
        return parse_outcome(form)
    questions = tuple(map(decode_stored, form["questions"]))
    said = form["said"]
    return Value(parse_answers(said["answers"], questions), max(form["at"], int(said["at"])))


# --- out ----------------------------------------------------------------------------------------------------------------


async def replay_record_into_journal(
    launcher: Launcher, tree_record: RunTreeRecord, journal: Journal, recorded: RunResult | None = None
) -> Journal:
    """
    Write the record of a run tree into *journal*, and return it.

    Args:
        launcher: The engine's, with the agents of the run's release.
        tree_record: What is recorded.
        journal: A journal that holds no run.
        recorded: The stored result of an ended run. If the replayed end differs, the journal gets the stored one.

    Raises:
        JournalError: when the journal cannot be written, or holds a run; when the run's turn in its session has not come.
        ReplayDivergence: when the agents ask for something else than is recorded.
    """
    if not tree_record.is_begun:
        why = tree_record.runs[""].attributes.get("answered")
        said = (
            "its turn in the session has not started"
            if why is None
            else f"it was the answer to {why!r}, whose journal contains it"
        )
        msg = f"the run {tree_record.order.root!r} has no record: {said}"
        raise JournalError(msg)
    session = JournaledRun.record(journal, dict(tree_record.order.answers), seed=tree_record.order.seed)
    played = Playback(tree_record, session)
    result = await create_replayed_run(launcher, played).run()
    if played.fatal is not None:
        raise played.fatal
    if isinstance(result.error, ReplayDivergence):
        raise result.error
    played.refuse_unused_records()
    _remove_unstarted_effects(session.writer.journal, tree_record)
    if recorded is not None:
        _write_recorded_end(session.writer.journal, recorded)
    return session.writer.journal


def _write_recorded_end(journal: Journal, recorded: RunResult) -> None:
    """Replace the replayed end in *journal* by the stored one if they differ."""
    made, records = find_root_end(journal.history()), journal.records()
    end = records[-1]
    if made is None or not isinstance(end, Result):
        return
    was = attrs.evolve(
        made, status=recorded.status, output=recorded.output, text=recorded.text,
        error=recorded.error if isinstance(recorded.error, StepEngineError) else made.error,
    )  # fmt: skip
    if to_comparable_json(was) != to_comparable_json(made):
        end = Result(end.path, end.seq, end.at, Value(was, end.at))
        replace_records_by_derived(journal, [*records[:-1], end], journal)


async def follow_run(launcher: Launcher, deployment: Deployment, root: str) -> AsyncGenerator[Event, None]:
    """
    Yield the events of a run in another process from its start, as its outcomes are recorded.

    There are events only for recorded data, so none for parts of replies or for progress of tools.

    Raises:
        JournalError: when there is no such root run.
        ReplayDivergence: when these agents ask for something else than is recorded.
    """
    tree_record = await read_tree_record_once_started(deployment, root, pause=FOLLOW_SECONDS)
    reading, reads = asyncio.Lock(), 0

    async def wait_for_more() -> bool:
        nonlocal reads
        is_over, known = tree_record.runs[""].is_over, reads
        async with reading:
            # All effects that wait share one read: in turn, the last of fifty would appear after fifty pauses.
            if reads == known:
                await asyncio.sleep(FOLLOW_SECONDS)
                await tree_record.refresh(deployment)
                reads += 1
        return not is_over

    session = JournaledRun.record(MemoryJournal(), dict(tree_record.order.answers), seed=tree_record.order.seed)
    played = Playback(tree_record, session, wait_for_more)
    events = stream_run(create_replayed_run(launcher, played))
    try:
        async for event in events:
            yield event
    finally:
        await events.aclose()
    if played.fatal is not None:
        raise played.fatal


def create_replayed_run(launcher: Launcher, playback: Playback) -> EngineRun:
    """Return a run that replays the recorded effects; its start is recorded in the session of *playback*."""
    order, session = playback.order, playback.session
    time = attrs.evolve(launcher.services.time, clock=_FixedClock(order.created))
    at_that_time = attrs.evolve(launcher, services=attrs.evolve(launcher.services, time=time))
    try:
        made = at_that_time.plan_root_run(make_root_request(launcher, order))
        plan, state = playback.with_recorded_prompt_and_window(made.plan, made.state)
        plan, state = start_run(
            session, plan, state, limits=order.limits, models=launcher.models.by_agent, own_models=order.models
        )
        services = playback.wrap_services(made.services)
        live = at_that_time.make_or_fill_engine_run(attrs.evolve(made, plan=plan, state=state, services=services))
    except BaseException:
        session.writer.close()
        raise
    live.journaled_run = session
    live.tree.questions.patience = 0.0
    return live


def _remove_unstarted_effects(journal: Journal, tree_record: RunTreeRecord) -> None:
    """Remove effects at the end that never started; in a journal they would be in doubt."""
    records = journal.records()
    results = {record.address for record in records if isinstance(record, Result)}
    intents = [record for record in records if isinstance(record, Intent)]
    paths = {record.path for record in intents}
    last: dict[str, int] = {}
    for record in intents:
        address = record.address
        if record.seq < 0 or address in results or address in tree_record.entries or child_path(*address) in paths:
            last[record.path] = max(record.seq, last.get(record.path, record.seq))
    # Of effects that run at once, a later one may be recorded first; a journal has no gaps.
    kept = [record for record in records if not isinstance(record, Intent) or record.seq <= last.get(record.path, -1)]
    if len(kept) < len(records):
        replace_records_by_derived(journal, kept, journal)


class _FixedClock:
    """The clock of a replayed run, fixed at its creation."""

    def __init__(self, created: str) -> None:
        self._created = datetime.fromisoformat(created)

    def now(self) -> datetime:
        """Return when the run was created."""
        return self._created

    def now_ms(self) -> int:
        """Return 0, since recorded outcomes have their own times."""
        return 0

    async def sleep(self, seconds: float) -> None:
        """Return at once, since a replay does not wait."""


class Playback:
    """
    Replays a run tree from its record.

    Args:
        tree_record: The record.
        session: The journal session that the replay is written to.
        wait_for_more: Waits until more may be recorded, and returns whether there may be; ``None`` to stop at the end of the record.
    """

    def __init__(
        self,
        tree_record: RunTreeRecord,
        session: JournaledRun,
        wait_for_more: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._tree_record = tree_record
        self.wait_for_more = wait_for_more
        self.order = tree_record.order
        self.session = session
        self._prints = Fingerprints(session.writer.source.redactor)
        self._used: set[Address] = set()
        self.fatal: ReplayDivergence | None = None

    def wrap_services(self, services: Services) -> Services:
        """Return services that answer effects from the record and perform nothing."""
        failed = self._tree_record.lookups.get("", {}).get("error")
        if failed is not None:
            services = attrs.evolve(services, machine=make_ended_machine(parse_error(failed) or StepEngineError()))
        mine = attrs.evolve(
            services,
            planner=self._wrap_planner(services.planner),
            middlewares=(*services.middlewares, partial(_PlaybackPerformer, played=self)),
        )
        return self.session.wrap_services(mine)

    def _wrap_planner(self, inner: ChildPlanner) -> ChildPlanner:
        """Return a planner whose plans have the recorded prompts and context windows."""

        def plan_with_recorded_lookups(
            parent: RunPlan, effect: Spawn | CallBody, path: str
        ) -> tuple[RunPlan, AgentState]:
            return self.with_recorded_prompt_and_window(*inner(parent, effect, path))

        return plan_with_recorded_lookups

    def with_recorded_prompt_and_window(self, plan: RunPlan, state: AgentState) -> tuple[RunPlan, AgentState]:
        """Return plan and state with the recorded prompt and context window; without a record, a fixed prompt is resolved."""
        if plan.body is not None:
            return plan, state
        known = self._tree_record.lookups.get(plan.path)
        if known is None:
            prompt = plan.agent.definition.system_prompt
            return plan, with_resolved_system_prompt(plan, state) if isinstance(
                prompt, str
            ) and plan.sent is None else state
        if known.get("prompt") is not None:
            state = attrs.evolve(state, system_prompt=known["prompt"])
        return attrs.evolve(plan, context_window=known.get("window")), state

    def compare_with_record(self, item: Item) -> None:
        """Compare an effect with its record, if it has one, and mark that as used; raise ``ReplayDivergence`` if they differ."""
        address = item.address
        entry = self._tree_record.entries.get(address)
        if entry is None:
            return
        self._used.add(address)
        form = encode_effect(item)
        fp = self._prints.for_effect(form)
        if fp != entry.fp:
            where = format_address(*address)
            now = "model" if isinstance(form, CallModel) else str(form["type"])
            msg = (
                f"the run {self._tree_record.order.root!r} diverges from its record at {where}: "
                f"the record has {entry.kind}:{entry.fp}, and the run has {now}:{fp}"
            )
            self.fatal = ReplayDivergence(msg, kind="changed", address=where)
            raise self.fatal

    def is_effect_recorded(self, item: Item) -> bool:
        """Return whether an effect is recorded, with or without an outcome."""
        return item.address in self._tree_record.entries

    def find_outcome(self, item: Item) -> Single | None:
        """Return the recorded outcome of an effect, if it has one."""
        entry = self._tree_record.entries.get(item.address)
        return None if entry is None or entry.form is None else decode_outcome_or_answers(entry.form)

    def get_failed_attempts(self, item: Item) -> Sequence[Mapping[str, Any]]:
        """Return the recorded failed attempts before the outcome of an effect."""
        form = self._tree_record.entries[item.address].form
        found: Sequence[Mapping[str, object]] = (form or {}).get("attempts", ())
        return found

    def make_stop_at_record_end(self, path: str) -> Stop:
        """Return the stop of a run at the end of its record: ``cancelled`` if it was cancelled or has ended, else ``shutdown``."""
        if self.has_ended_elsewhere(path):
            return Stop("cancelled")
        runs = self._tree_record.runs
        while path and path not in runs:
            path = path.rpartition(".")[0]
        view = runs.get(path)
        return Stop("cancelled" if view is not None and view.state == "CANCELLED" else "shutdown")

    def has_ended_elsewhere(self, path: str) -> bool:
        """Return whether the end of a run or one of its ancestors is recorded, so that the run no longer waits."""
        while path:
            address = get_starter_address(path)
            entry = self._tree_record.entries.get(address)
            if entry is not None and entry.kind == START:
                view = self._tree_record.runs.get(path)
                if view is not None and view.is_over:
                    return True
            elif entry is not None and entry.form is not None:
                return True
            path = address[0]
        return False

    def get_end_time(self, path: str) -> int:
        """Return when a background child ended; without a recorded end, the last recorded time of its tree, or 0."""
        known = self._tree_record.ends.get(path)
        if known is not None:
            return known
        inside, start = f"{path}.", get_starter_address(path)
        times: list[int] = [
            entry.form["at"]
            for address, entry in self._tree_record.entries.items()
            if entry.form is not None and (address in ((path, address[1]), start) or address[0].startswith(inside))
        ]
        return max(times, default=0)

    def find_cancel_reason(self, path: str) -> str:
        """Return why a parent ended the child at *path*; ``""`` if no reason is recorded."""
        view = self._tree_record.runs.get(path)
        return "" if view is None else str(view.attributes.get(REASON) or "")

    def refuse_unused_records(self) -> None:
        """Raise ``ReplayDivergence`` if the replay of a completed run did not use all of its recorded outcomes."""
        left = [a for a, e in self._tree_record.entries.items() if a not in self._used and e.form is not None]
        if left and self._tree_record.runs[""].state == "SUCCESS":
            where = format_address(*left[0])
            msg = f"the run {self._tree_record.order.root!r} ends before {where}, which is in its record"
            raise ReplayDivergence(msg, kind="unused", address=where)


class _PlaybackPerformer:
    """Answers effects from the record, and stops where it ends."""

    def __init__(self, inner: Performer, played: Playback) -> None:
        self._inner = inner
        self._played = played

    def begin(self, batch: Sequence[Item]) -> Awaitable[None]:
        """Compare effects with the record and begin them; in a followed run, questions begin once they are recorded."""
        for item in batch:
            self._played.compare_with_record(item)
        asked = [
            item for item in batch if isinstance(item.effect, AskPerson) and not self._played.is_effect_recorded(item)
        ]
        return (
            self._inner.begin(batch)
            if self._played.wait_for_more is None or not asked
            else self._start_recorded_questions(batch, asked)
        )

    async def _start_recorded_questions(self, batch: Sequence[Item], questions: Sequence[Item]) -> None:
        """Start questions only after they are recorded, since they may be answered at once."""
        assert self._played.wait_for_more is not None  # noqa: S101 - it was looked
        for item in questions:
            while not self._played.is_effect_recorded(item) and await self._played.wait_for_more():
                self._played.compare_with_record(item)
        await self._inner.begin(batch)

    async def perform(self, item: Item, io: IO) -> Single:
        """Return the recorded outcome, or a stop where the record ends; children and tool bodies replay their own records."""
        if isinstance(item.effect, RunInBackground):
            return await self._replay_child_to_end(item, io)
        if isinstance(item.effect, RUNS) and not getattr(item.effect, "is_background", False):
            return await self._replay_child_or_body(item, io)
        known = await self._wait_for_outcome(item)
        if known is None:
            return await self._stop_before_effect(item, io)
        if isinstance(known, Value) and isinstance(item.effect, (Spawn, *CHILD_ENDS)):
            return await self._replay_background_effect(item, io, known)
        for attempt in self._played.get_failed_attempts(item):
            error = decode_stored({"type": "failure", "error": attempt["error"]}).error
            io.report_failed_attempt(Failure(error), decode_stored(attempt["usage"]) if "usage" in attempt else None)
        return known

    async def _replay_background_effect(self, item: Item, io: IO, known: Value) -> Single:
        """Start a recorded background child, or return the recorded ends of children."""
        if isinstance(item.effect, Spawn):
            outcome = await self._inner.perform(item, io)
            return attrs.evolve(outcome, at=known.at, inputs=known.inputs) if isinstance(outcome, Value) else outcome
        ended = await io.wait_for_children(item, known.value.done)
        if ended is None:
            return Stop("cancelled")
        return attrs.evolve(known, value=attrs.evolve(known.value, ended=ended))

    async def _stop_before_effect(self, item: Item, io: IO) -> Single:
        """Return the stop before an effect without an outcome; for a wait or open question, it is recorded as a suspension."""
        if not self._played.has_ended_elsewhere(item.path):
            if isinstance(item.effect, WAITS):
                io.record_suspension(item)
                return Stop("suspended")
            if isinstance(item.effect, AskPerson):
                stopped = await self._inner.perform(item, io)
                if isinstance(stopped, Stop):
                    return stopped
        return self._played.make_stop_at_record_end(item.path)

    async def _wait_for_outcome(self, item: Item) -> Single | None:
        """Return the recorded outcome of an effect, waiting for it while the run is active; ``None`` if the record ends before it."""
        known = self._played.find_outcome(item)
        while known is None and self._played.wait_for_more is not None and await self._played.wait_for_more():
            self._played.compare_with_record(item)
            known = self._played.find_outcome(item)
        return known

    async def _replay_child_to_end(self, item: Item, io: IO) -> Single:
        """Replay a background child to its end, at its recorded time."""
        outcome = await self._inner.perform(item, io)
        if not isinstance(outcome, Value):
            return outcome
        why, child = self._played.find_cancel_reason(item.path), outcome.value
        if why and child.status is RunStatus.CANCELLED:
            child = attrs.evolve(child, error=AgentError(why))
        return attrs.evolve(outcome, value=child, at=self._played.get_end_time(item.path))

    async def _replay_child_or_body(self, item: Item, io: IO) -> Single:
        """Replay a child or tool body at its recorded time; one that was refused has its recorded outcome alone."""
        known = self._played.find_outcome(item)
        if known is not None and not _was_child_or_body_started(item, known):
            return known
        outcome = await self._inner.perform(item, io)
        known = known if isinstance(outcome, Stop) else await self._wait_for_outcome(item)
        if isinstance(known, Stop):
            return attrs.evolve(known, body=getattr(outcome, "body", None))
        if known is None or isinstance(outcome, Stop):
            return outcome
        return attrs.evolve(outcome, at=known.at, inputs=known.inputs)


def _was_child_or_body_started(item: Item, outcome: Single) -> bool:
    """Return whether the child or body of an effect ran, and was not refused before its start."""
    if isinstance(item.effect, CallBody):
        return not isinstance(outcome, Failure)
    child: object = getattr(outcome, "value", None)
    return isinstance(child, ChildResult) and bool(child.run_id)


# --- in -----------------------------------------------------------------------------------------------------------------


def order_and_seed_from_journal(
    journal: Journal, redactor: Redactor, *, pool: str
) -> tuple[SubmittedRun, StartOutcomes]:
    """
    Return the order and the seed that continue the run of a journal.

    Raises:
        JournalError: when the journal is damaged, or its run has ended.
    """
    history = journal.history()
    opening, head = parse_recorded_start(history), history.head
    assert head is not None  # noqa: S101 - an opening was read from it
    if history.is_complete:
        msg = f"the run of {journal.name} has ended, so it cannot continue elsewhere; replay or fork it"
        raise JournalError(msg)
    if any(intent.is_background for intent in history.intents.values()):
        msg = (
            f"the run of {journal.name} has started children in the background, which cannot move between a journal and a database; "
            "continue it where it is"
        )
        raise JournalError(msg)
    prints = Fingerprints(redactor)
    outcomes: dict[Address, tuple[str, str, dict[str, object] | None]] = {}
    for address, intent in history.intents.items():
        result = history.results.get(address)
        if intent.starts_child_or_body and result is None:
            continue
        fp = intent.fp or prints.for_effect(intent.effect)
        attempts = [] if result is None else list(result.attempts)
        form = (
            None if result is None else encode_outcome(address[1], history.outcome(result), redactor, attempts=attempts)
        )
        if form is not None or may_change_world_if_repeated(intent.effect):
            outcomes[address] = get_effect_step_kind(intent.effect), fp, form
    prompts, windows = history.facts.system_prompts, history.facts.context_windows
    lookups = {path: {"prompt": prompts.get(path), "window": windows.get(path)} for path in {*prompts, *windows}}
    order = SubmittedRun(
        root=opening.run_id, agent_id=opening.agent_id, prompt=opening.prompt, params=opening.params,
        created=head.created, seed=head.seed, info=opening.info, limits=opening.limits, previous=opening.previous, pool=pool,
        models=history.root.get("run_models") or {},
    )  # fmt: skip
    return order, StartOutcomes(outcomes, lookups)
