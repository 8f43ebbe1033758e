"""
``follow_events``: the events of a run in another process, derived from its journal.

What is shown of an effect comes from where the driver has it (``runtime.effect_events``); what a machine shows beside, its steps and
its end, is told by the order of the records. The same records give the same events, so an event's place in the stream is the same for
everybody who reads the journal, whenever and in however many pieces.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import attrs

from stepengine.data.codec import decode_stored
from stepengine.data.definition import AgentDefinition
from stepengine.data.effects import (
    KINDS,
    AskPerson,
    AwaitTime,
    CallBody,
    CallFunction,
    CallModel,
    CallTool,
    Leaf,
    Spawn,
)
from stepengine.data.events import (
    Event,
    EventsDropped,
    ModelStarted,
    PermissionDecided,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextCompleted,
    ThinkingCompleted,
)
from stepengine.data.messages import AssistantMessage
from stepengine.data.models import ModelReply, ModelRequest
from stepengine.data.outcomes import Failure, Stop, Value
from stepengine.data.questions import Answer
from stepengine.data.state import AgentState, ChildResult, RunResult, RunStatus
from stepengine.data.usage import Spending, Usage, add_cost
from stepengine.data.yields import Perform
from stepengine.errors import JournalCorrupt
from stepengine.journal.encoding import get_recorded_questions
from stepengine.journal.follower import Follower
from stepengine.journal.history import History, parse_created
from stepengine.journal.pending_items import WAITING
from stepengine.journal.records import ROOT, UNREADABLE, Address, Head, Input, Intent, Record, Result
from stepengine.journal.store import Journal
from stepengine.machine.plan import PlannedAgent, RunPlan
from stepengine.machine.signals import status_from_stop
from stepengine.machine.step import UNFINISHED
from stepengine.runtime.effect_events import make_child_end_events, make_end_events, make_start_events
from stepengine.runtime.hub import EPOCH_BYTES, parse_event_id
from stepengine.runtime.performer import Item, child_path

FIRST_PAUSE_SECONDS = 0.02
"""Seconds until the next look where there was news: a reader is hardly ever further behind than an eye notices."""
LAST_PAUSE_SECONDS = 0.5
"""Seconds between looks where nothing comes: a look asks for the file's time and size, and 5,000 who wait cost a tenth of a core."""
PAUSE_FACTOR = 1.5
"""From the first pause to the longest one in eight looks, within about a second."""
SPOKEN = frozenset({"step", "final_answer"})
UNKNOWN_STEPS = -1
"""The number of remaining steps is not recorded, and the event needs one."""
STILL = frozenset({"ask", *WAITING})
SOMEBODY = AgentDefinition("followed")
"""Stands in plans for the agents of a run: nobody here has their definitions."""


@attrs.define
class _KnownRun:
    """
    The state of one run of the tree in the stream.

    Attributes:
        agent_id: The id of its agent; ``""`` for the body of a tool.
        started: The start event, until it was returned.
        plan: A substitute for the plan of the run.
        last: The time of the last result in the run; journals store no other times.
        step: The number of the current step; -1 before the first.
        is_open: Whether the step has started and not ended.
        was_left: Whether the step was open when the run was stopped; it starts again when the run is resumed.
        has_no_end: Whether a shutdown left the step without an end event.
        ended_turn: Whether the last reply of the model in the step requested no call.
        spent: The spending of the run and its children so far.
    """

    agent_id: str
    plan: RunPlan
    started: RunStarted | None = None
    last: int = 0
    step: int = -1
    is_open: bool = False
    was_left: bool = False
    has_no_end: bool = False
    ended_turn: bool = False
    spent: Spending = Spending(usage=Usage(), cost=Decimal(0))


@attrs.define
class _OpenEffect:
    """An effect without a result, its start time, and whether its start was shown."""

    item: Item
    form: Mapping[str, Any]
    began: int
    is_shown: bool = True


class EventProjection:
    """
    Makes the events of a journal's records, which are passed in order, in groups of any size.

    Attributes:
        epoch: The epoch of the events: 8 hex digits computed from the run's id; ``""`` until the id is known.
        index: The number of the next event.
        is_over: Whether the last record is the end of the run or a permanent stop.
    """

    def __init__(self) -> None:
        self.epoch = ""
        self.index = 0
        self.is_over = self._is_stopped = False
        self._run_id = ""
        self._head: Head | None = None
        self._runs: dict[str, _KnownRun] = {}
        self._open: dict[Address, _OpenEffect] = {}
        self._background: dict[str, Item] = {}

    def project_records(self, history: History, records: Sequence[Record]) -> Iterator[Event]:
        """
        Yield the events of all *records*, the last ones of *history*, and number them.

        Raises:
            JournalCorrupt: when a record has content that no run writes.
        """
        for record in records:
            try:
                events = list(self._apply_record_and_make_events(history, record))
            except UNREADABLE as error:
                msg = f"{history.name} contains an invalid record: {type(error).__name__}: {error}"
                raise JournalCorrupt(msg) from error
            for event in events:
                # It was made for this moment and nobody has seen it yet, so it is stamped and not copied.
                stamp = object.__setattr__
                stamp(event, "run_id", self._run_id)
                stamp(event, "epoch", self.epoch)
                stamp(event, "index", self.index)
                self.index += 1
                yield event

    def _apply_record_and_make_events(self, history: History, record: Record) -> Iterator[Event]:
        """Apply any record to the state of the projection, and yield its events."""
        if isinstance(record, Intent):
            yield from self._apply_intent_and_make_events(history, record)
        elif isinstance(record, Result):
            yield from self._apply_result_and_make_events(history, record)
        elif isinstance(record, Input):
            yield from self._apply_input_and_make_events(record)
        elif isinstance(record, Head):
            self._head = record

    # --- runs and their steps -----------------------------------------------------------------------------------------

    def _apply_root_start_and_make_events(self, form: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the start event of the root run, and set the run id and the epoch."""
        self._run_id = str(form["run_id"])
        self.epoch = hashlib.blake2b(self._run_id.encode(), digest_size=EPOCH_BYTES).hexdigest()
        self._register_run("", form)
        yield from self._pop_start_event("")

    def _register_run(self, path: str, form: Mapping[str, Any]) -> None:
        """Register a run that may start; the body of a tool is no run of its own."""
        above = self._runs[path.rpartition(".")[0]] if path else None
        own_id = f"{self._run_id}-{path.replace('.', '-')}" if path else self._run_id
        created = above.plan.created if above is not None else parse_created(self._head)  # type: ignore[arg-type]
        plan = RunPlan(agent=PlannedAgent(definition=SOMEBODY), run_id=own_id, path=path, created=created)
        run = self._runs[path] = _KnownRun("", plan, last=0 if above is None else above.last)
        if form["type"] == "agent_call":
            run.agent_id = str(form["agent_id"])
            run.started = RunStarted(
                path=path, own_id=own_id, agent_id=run.agent_id, prompt=form["prompt"], params=form["params"]
            )

    def _pop_start_event(self, path: str) -> Iterator[Event]:
        """Yield the start event of a run the first time, and nothing later."""
        run = self._runs[path]
        started, run.started = run.started, None
        if started is not None:
            yield started

    def _resume_runs_and_make_events(self, path: str, seq: int) -> Iterator[Event]:
        """Mark a stopped run and its interrupted steps at *path* and around it as resumed; yield their start events."""
        if self._is_stopped:
            self.is_over = self._is_stopped = False
            root = self._runs[""]
            yield RunStarted(own_id=self._run_id, agent_id=root.agent_id, resumed=True)
        parts = path.split(".") if path else []
        for above in ["", *[".".join(parts[:n]) for n in range(1, len(parts) + 1)]]:
            run = self._runs[above]
            if run.was_left:
                run.was_left, run.has_no_end, run.is_open = False, False, True
                at = seq if above == path else int(parts[above.count(".") + 1 if above else 0])
                yield StepStarted(path=above, seq=at, step=run.step, steps_remaining=UNKNOWN_STEPS, resumed=True)

    def _end_step_and_make_events(
        self, path: str, seq: int, status: RunStatus = RunStatus.COMPLETED
    ) -> Iterator[Event]:
        """Close the open step of a run, if there is one, and yield its end event."""
        run = self._runs.get(path)
        if run is None or not run.is_open:
            return
        run.is_open = run.has_no_end = False
        yield StepFinished(
            path=path,
            seq=seq,
            step=run.step,
            ended_turn=run.ended_turn and status is RunStatus.COMPLETED,
            usage=run.spent.usage,
            cost=run.spent.cost,
            status=status,
        )

    def _add_spending_upwards(self, path: str, usage: Usage, cost: Decimal | None) -> None:
        """Add usage and cost to the run at *path* and all its ancestors."""
        while True:
            run = self._runs[path]
            run.spent = Spending(usage=run.spent.usage + usage, cost=add_cost(run.spent.cost, cost))
            if not path:
                return
            path = path.rpartition(".")[0]

    # --- effects ------------------------------------------------------------------------------------------------------

    def _apply_intent_and_make_events(self, history: History, intent: Intent) -> Iterator[Event]:
        """Apply the start of an effect to the state of its run, and yield its events."""
        form, path, seq = history.form(intent), intent.path, intent.seq
        if (path, seq) == ROOT:
            yield from self._apply_root_start_and_make_events(form)
            return
        yield from self._resume_runs_and_make_events(path, seq)
        yield from self._pop_start_event(path)
        run = self._runs[path]
        begins = form["type"] == "model_call" and form["purpose"] == "step" and not _continues_cut_text(form["request"])
        if begins or not _is_effect_in_step(form):
            yield from self._end_step_and_make_events(path, seq)
        if begins:
            run.step += 1
            run.is_open, run.ended_turn = True, False
            yield StepStarted(path=path, seq=seq, step=run.step, steps_remaining=UNKNOWN_STEPS)
        item = Item(path, effect_from_json(intent, form), run.plan)
        opened = self._open[path, seq] = _OpenEffect(item, form, run.last)
        if form["type"] == "sleep" or form.get("timeout") is not None:
            opened.is_shown = False  # until when it waits stands in a record of its own, which comes next
        else:
            yield from self._make_effect_start_events(opened)
        if intent.starts_child_or_body:
            self._register_run(child_path(path, seq), form)
            if intent.is_background:
                self._background[child_path(path, seq)] = item

    def _make_effect_start_events(self, opened: _OpenEffect) -> Iterator[Event]:
        """Yield the start events of an effect, without the request of a model call, and mark the start as shown."""
        opened.is_shown = True
        effect = opened.item.effect
        shown = effect.questions if isinstance(effect, AskPerson) and effect.purpose == "permission" else ()
        for event in make_start_events(opened.item, shown):
            match event:
                case ModelStarted():
                    yield attrs.evolve(event, request=None)
                case _ if isinstance(effect, Spawn):
                    yield attrs.evolve(event, parent_agent_id=self._runs[opened.item.path].agent_id)  # type: ignore[call-arg]
                case _:
                    yield event

    def _apply_result_and_make_events(self, history: History, result: Result) -> Iterator[Event]:
        """Apply an effect's result to the state of its run, and yield its events."""
        path, seq, outcome = result.path, result.seq, history.outcome(result)
        if (path, seq) == ROOT:
            yield from self._apply_root_end_and_make_events(outcome)
            return
        if seq == ROOT[1]:
            yield from self._resume_runs_and_make_events(path.rpartition(".")[0], int(path.rpartition(".")[2]))
            yield from self._make_child_end_events(path, self._background.pop(path), outcome)
            return
        yield from self._resume_runs_and_make_events(path, seq)
        opened, run = self._open.pop((path, seq)), self._runs[path]
        run.last = max(run.last, result.at)
        if not opened.is_shown:
            yield from self._make_effect_start_events(opened)
        if isinstance(opened.item.effect, Spawn) and not opened.item.effect.is_background:
            yield from self._make_child_end_events(child_path(path, seq), opened.item, outcome)
            return
        yield from make_end_events(opened.item, outcome, max(0, result.at - opened.began))
        if isinstance(opened.item.effect, AskPerson) and opened.item.effect.purpose == "permission":
            yield from _make_decision_events(opened.item.effect, path, getattr(outcome, "value", ()))
        if isinstance(opened.item.effect, CallModel):
            yield from self._apply_reply_and_make_events(
                run, result, opened.form["purpose"], getattr(outcome, "value", None)
            )

    def _apply_reply_and_make_events(
        self, run: _KnownRun, result: Result, purpose: str, reply: ModelReply | None
    ) -> Iterator[Event]:
        """Add the usage of a reply and its failed attempts to the run, and yield the reply's events."""
        for attempt in result.attempts:
            if attempt.get("usage") is not None:
                self._add_spending_upwards(result.path, decode_stored(attempt["usage"]), None)
        if reply is None:
            return
        self._add_spending_upwards(result.path, reply.usage or Usage(), reply.cost)
        run.ended_turn = not reply.tool_calls
        if purpose in SPOKEN:
            yield from _make_text_events(result.path, result.seq, reply)
        if purpose == "step" and run.ended_turn and reply.stop_reason not in UNFINISHED:
            yield from self._end_step_and_make_events(result.path, result.seq + 1)

    def _make_child_end_events(self, path: str, item: Item, outcome: Value | Failure) -> Iterator[Event]:
        """Yield the end events of a child: of its open step, its failure, and the effect that started it."""
        child = outcome.value if isinstance(outcome, Value) else None
        if isinstance(child, ChildResult):
            if child.run_id:
                yield from self._pop_start_event(path)
            yield from self._end_step_and_make_events(path, 0, child.status)
            if child.status is RunStatus.FAILED and child.error is not None:
                yield _make_failed_event(path, child.error)
        yield from make_child_end_events(item, outcome)

    def _apply_root_end_and_make_events(self, outcome: Value | Failure) -> Iterator[Event]:
        """Yield the end events of the root run, and set ``is_over``."""
        child = outcome.value if isinstance(outcome, Value) else None
        if not isinstance(child, ChildResult):
            error = outcome.error if isinstance(outcome, Failure) else None
            child = ChildResult(agent_id=self._runs[""].agent_id, status=RunStatus.FAILED, error=error)
        yield from self._end_step_and_make_events("", 0, child.status)
        if child.status is RunStatus.FAILED and child.error is not None:
            yield _make_failed_event("", child.error)
        self.is_over = True
        yield self._make_finished_event(
            status=child.status,
            output=child.output,
            text=child.text,
            error=child.error,
            spending=child.spending,
            warnings=child.warnings,
        )

    def _make_finished_event(self, **result_fields: Any) -> RunFinished:
        state = AgentState(run_id=self._run_id, agent_id=self._runs[""].agent_id)
        return RunFinished(result=RunResult(state=state, **result_fields))

    # --- what came from outside ---------------------------------------------------------------------------------------

    def _apply_input_and_make_events(self, record: Input) -> Iterator[Event]:
        """Apply an input record, and yield its events: of a wait with its wake time, or of a stop."""
        said, address = record.input, (record.path, record.seq)
        run = self._runs[record.path]
        run.last = max(run.last, record.at)
        match said.get("type"):
            case "wake_time" if address in self._open and not self._open[address].is_shown:
                opened = self._open[address]
                effect: Any = opened.item.effect
                opened.item = opened.item._replace(effect=attrs.evolve(effect, wakes=int(said["until"])))
                yield from self._make_effect_start_events(opened)
            case "stop":
                yield from self._apply_stop_and_make_events(said)
            case _:
                pass

    def _apply_stop_and_make_events(self, stop: Mapping[str, Any]) -> Iterator[Event]:
        """Mark runs as stopped; yield the end events of open steps and of the run, none for a suspension or shutdown."""
        if stop["kind"] == "suspended":
            return  # what it waits for is shown, and a run that waits has not ended
        if stop["kind"] == "shutdown":
            # Its process was to end, and leaves it to the next one: as where that was killed, nobody is told of an end.
            for run in self._runs.values():
                run.was_left, run.has_no_end = run.is_open or run.was_left, run.is_open or run.has_no_end
                run.is_open = False
            self._is_stopped = True
            return
        error = decode_stored(stop["error"]) if "error" in stop else None
        status = status_from_stop(Stop(stop["kind"], error=error))
        for path in sorted(self._runs, key=lambda path: (-path.count("."), path)):
            run = self._runs[path]
            run.is_open = run.is_open or run.has_no_end
            run.was_left = run.is_open or run.was_left
            yield from self._end_step_and_make_events(path, 0, status)
        if status is RunStatus.FAILED and error is not None:
            yield _make_failed_event("", error)
        self._is_stopped = self.is_over = True
        yield self._make_finished_event(status=status, error=error, spending=self._runs[""].spent)

    @property
    def is_waiting(self) -> bool:
        """Whether every active run is waiting: for a person, a message, a time or a waiting child."""
        runs = {path for path, _ in self._open}
        return (
            bool(self._open)
            and all(one.form["type"] in STILL or child_path(*address) in runs for address, one in self._open.items())
            and all(path in runs for path in self._background)
        )


def _continues_cut_text(request: Mapping[str, Any]) -> bool:
    """Return whether a request continues a text that was cut off, so that it is not a new step."""
    return any(message["type"] == "assistant_message" for message in request.get("tail") or ())


def _is_effect_in_step(effect: Mapping[str, Any]) -> bool:
    """Return whether an effect belongs to the running step rather than to its handler between two steps."""
    if effect["type"] == "tool_call":
        return bool(effect["source"] in ("model", "hook"))
    return effect["type"] == "model_call" or bool(effect.get("tool_call_id"))


# The machine makes this event of what a policy decided, which no effect has; a record has the answer of a person alone.
def _make_decision_events(effect: AskPerson, path: str, answers: Sequence[Answer]) -> Iterator[Event]:
    """Yield an event for the decision about each permission question of an effect."""
    for question, answer in zip(effect.questions, answers, strict=False):
        yield PermissionDecided(
            path=path,
            seq=effect.seq + 1,
            tool_name=question.tool_name or "",
            tool_call_id=effect.tool_call_id,
            decision="allow" if answer.agrees else "deny",
            by=answer.by,
            reason=answer.reason,
            edited_input=answer.edited_input,
        )


def _make_failed_event(path: str, error: BaseException) -> RunFailed:
    return RunFailed(path=path, error=str(error), kind=type(error).__name__)


def _make_text_events(path: str, seq: int, reply: ModelReply) -> Iterator[Event]:
    """Yield events with the thoughts and the text of a reply, if it has any."""
    message = AssistantMessage(reply.content)
    if message.thinking:
        yield ThinkingCompleted(path=path, seq=seq, text="".join(message.thinking))
    if message.text:
        yield TextCompleted(path=path, seq=seq, text=message.text)


@attrs.frozen
class _RecordedPerform:
    """A ``Perform`` of which only the name is known."""

    name: str
    is_trusted: bool = False


def _tool_call_from_json(intent: Intent, form: Mapping[str, Any]) -> Leaf:
    kind = CallBody if "yields" in form else CallTool
    return kind(intent.seq, form["tool_name"], form["input"], form["tool_call_id"], form["source"])


def _spawn_from_json(intent: Intent, form: Mapping[str, Any]) -> Leaf:
    return Spawn(
        intent.seq,
        form["agent_id"],
        form["prompt"],
        form["params"],
        form.get("tool_call_id", ""),
        is_background=intent.is_background,
        of=1 if intent.gather is None else 0,
    )


def effect_from_json(intent: Intent, form: Mapping[str, Any]) -> Leaf:
    """Return a recorded effect for events and origins of values; a model call has the model's name alone as its request."""
    if intent.type in EFFECTS:
        return EFFECTS[intent.type](intent, form)
    row = KINDS[intent.type]
    given = {name: form[name] for member in row.members if (name := member.rstrip("?")) in form}
    effect: Any = row.cls
    made: Leaf = effect(intent.seq, **{n: tuple(v) if isinstance(v, list) else v for n, v in given.items()})
    return made


EFFECTS: Mapping[str, Callable[[Intent, Mapping[str, Any]], Leaf]] = {
    "model_call": lambda intent, form: CallModel(
        intent.seq, ModelRequest(str(form["request"]["model"])), form["purpose"]
    ),
    "tool_call": _tool_call_from_json,
    "agent_call": _spawn_from_json,
    "perform": lambda intent, form: CallFunction(intent.seq, cast("Perform[Any]", _RecordedPerform(form["name"]))),
    "ask": lambda intent, form: AskPerson(
        intent.seq, get_recorded_questions(form), form["purpose"], form.get("tool_call_id", "")
    ),
    "sleep": lambda intent, _: AwaitTime(intent.seq),
}
"""Makes the effects whose attributes are not the members of the record."""


async def follow_events(
    journal: Journal,
    after: str | None = None,
    *,
    stay: bool = True,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> AsyncGenerator[Event, None]:
    """
    Yield the events of a run of another process, from its journal, as they arrive.

    There are no deltas: complete texts arrive as ``TextCompleted`` and ``ThinkingCompleted``. Events without a record are missing:
    phases, progress, log lines, notifications, retries, warnings, decisions of rules without a person, and the requests of model calls.
    Some members are unknown: ``ModelFinished.call_ids`` (``()``), categories of tools (``""``), ``steps_remaining`` (-1), and the
    number of children started together (``of`` is 0 for more than one). ``RunFinished.result`` has status, output, text, error and
    spending.

    A waiting run has not ended, with or without a process. For a stopped run ``RunFinished`` reports the end. If the run is resumed,
    ``RunStarted`` with ``resumed`` follows. A run whose process was shut down has not ended, and has no event for that until it is
    resumed. A killed process leaves no trace.

    Args:
        journal: Any journal; a missing one is waited for.
        after: The ``id`` of the last event that the reader has; only later events are returned. All readers of a journal get the same
            ids.
        stay: Whether to continue while the run only waits, for people, messages or times. The stream always ends when the run ends or
            is stopped permanently. After a shutdown or a killed process, it waits until the run is resumed.
        sleep: Waits between two polls, for 0.02 seconds at first and up to 0.5 while there are no records.

    Yields:
        The events in order. ``EventsDropped``, which has no ``id``, has two reasons. ``"epoch"``: *after* is not an event of this
        journal, and all events follow. ``"journal"``: a number of returned events are no longer valid, because the writer could not
        store them or the journal was replaced; the present ones follow.

    Raises:
        StepEngineError: when *after* is not the id of an event.
        JournalCorrupt: when a record is damaged.
        JournalMissing: when the journal was removed.
        JournalError: when the journal cannot be read.
    """
    watch, pause = JournalWatch(journal, after), FIRST_PAUSE_SECONDS
    while True:
        # What is read waits for the disk, and making events of a long journal takes its time.
        has_news = watch.is_behind or watch.follower.may_have_new_records()
        events = await asyncio.to_thread(watch.read_new_events) if has_news else ()
        for event in events:
            yield event
        if watch.is_over(stay=stay):
            return
        pause = compute_next_pause(pause, has_news=bool(events))
        if not watch.is_behind:
            await sleep(pause)


def compute_next_pause(pause: float, *, has_news: bool) -> float:
    """Return the seconds until the next poll, given the last pause."""
    return FIRST_PAUSE_SECONDS if has_news else min(LAST_PAUSE_SECONDS, pause * PAUSE_FACTOR)


class JournalWatch:
    """
    The position of one reader in a journal, and its projection.

    Args:
        journal: The journal.
        after: The id of the last event that the reader has.
    """

    def __init__(self, journal: Journal, after: str | None = None) -> None:
        place = None if after is None else parse_event_id(after)
        self.follower = Follower(journal)
        self.is_behind = True
        self._projection = EventProjection()
        self._epoch = "" if place is None else place.epoch
        self._had = 0 if place is None else place.index + 1

    def is_over(self, *, stay: bool) -> bool:
        """Return whether all events were read and the run has ended or was stopped; unless *stay*, also if it only waits."""
        shown = self._projection
        return not self.is_behind and (shown.is_over or (shown.is_waiting and not stay))

    def read_new_events(self) -> list[Event]:
        """Read the new records of the journal, and return the events that they add."""
        was_behind, news = self.is_behind, self.follower.read_new()
        self.is_behind = news.is_behind
        told: list[Event] = []
        records = news.records
        if news.again:
            had, self._projection = max(self._had, self._projection.index), EventProjection()
            self._had = sum(1 for _ in self._projection.project_records(self.follower.history, records[: news.kept]))
            records = records[news.kept :]
            told += _make_dropped_events(had - self._had)
        events = list(self._projection.project_records(self.follower.history, records))
        epoch = self._projection.epoch
        if self._epoch and epoch:
            if epoch != self._epoch:
                self._had = 0
                told.append(EventsDropped(count=0, reason="epoch"))
            self._epoch = ""
        told += [event for event in events if event.index >= self._had]
        if was_behind and not self.is_behind:
            # Of what the reader has, some stands in the journal no more: a machine that lost power keeps what was synced.
            told += _make_dropped_events(self._had - self._projection.index)
        self._had = 0 if not self.is_behind else self._had
        return told


def _make_dropped_events(count: int) -> list[Event]:
    return [EventsDropped(count=count, reason="journal")] if count > 0 else []
