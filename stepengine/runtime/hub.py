"""
The ordered event stream of a run tree, and its receivers.

Events reach observers and subscribers in the order in which they are emitted; each gets its id here. Those of a run that has a
handle are kept in a ring of fixed size for subscribers that arrive late or reconnect. Observers and subscribers cannot change, stop
or slow a run: observers that raise are dropped, slow subscribers lose deltas first.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias

import attrs
from attrs import frozen

from stepengine.data.codec import plain
from stepengine.data.events import (
    DELTAS,
    Event,
    EventsDropped,
    HookFailed,
    LogLine,
    ModelFinished,
    ModelStarted,
    PhaseChanged,
    ReplyDiscarded,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolLog,
)
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.state import RunPhase, RunResult
from stepengine.data.transcript import Transcript
from stepengine.errors import LimitExceeded, StepEngineError
from stepengine.machine.signals import belongs_to_caller
from stepengine.redaction import GIVEN, KNOWN, KNOWN_RECORDS, StreamRedactor
from stepengine.runtime.logs import LOGGER, write_log_line

MAX_QUEUED_EVENTS = 10_000
"""Some minutes of a fast reply, at about a kilobyte for each event: 10 MB for a reader that never reads."""
MAX_KEPT_CHARS = 1_048_576
"""Text of events for late subscribers: a megabyte, in which a long reply fits. The newest event stays whatever its size."""
# Each of them costs a queue and a turn of the loop at each event; who has more readers fans one of them out.
MAX_SUBSCRIBERS = 100
MAX_OBSERVER_ERRORS = 10
"""An observer may fail at events that it does not know. One that fails at each event would log a traceback for each delta."""
MAX_JOINED_CHARS = 4_096
"""Characters that deltas are joined to at most, so that joining many stays cheap."""
BATCH_EVENTS = 100
"""Events that a reader receives at once: enough to catch up fast, and few enough that it does not block the loop."""
LAG_EVENTS = MAX_QUEUED_EVENTS // 100
"""A reader has fallen behind when more than a hundredth of what may wait does: a stuck one costs kilobytes, and loses no text."""
# Enough to tell the few processes apart that ever drive one run. It stands in the id of each event that goes over the
# wire, so it is no longer than that.
EPOCH_BYTES = 4
EPOCH_DIGITS = frozenset("0123456789abcdef")
# An id comes from a browser. Python refuses to read a number of more than 4,300 digits with an error of its own, and
# takes time that grows with the square below that.
MAX_INDEX_DIGITS = 18
MAX_HISTORIES = 64
"""Histories without their secrets that are kept, one for each run of a tree: runs above this number, which are rare, are redacted anew at each step."""
NO_HISTORY = ("", Transcript(), Transcript())
NOTED = (HookFailed, LogLine, PhaseChanged, RunStarted)
"""The kinds that the hub itself reads."""
Delta: TypeAlias = TextDelta | ThinkingDelta | ToolInputDelta


class Observer(Protocol):
    """A receiver of every event of every run of an engine."""

    def on_event(self, event: Event, /) -> Any:
        """Handle *event*; must return at once. The return value is ignored."""


ObserverLike: TypeAlias = "Observer | Callable[[Event], Any]"


class Receiver(Protocol):
    """A receiver of the events of one run tree: an observer, a ring, a subscription."""

    @property
    def put(self) -> Callable[[Event], Any]:
        """Receive an event."""


class Watcher:
    """An observer with the number of its errors; all runs of an engine share it."""

    __slots__ = ("errors", "name", "put")

    def __init__(self, observer: ObserverLike) -> None:
        # An object with `on_event` or a plain function: whoever only wants to print a line should not have to write a
        # class.
        self.put: Callable[[Event], Any] = getattr(observer, "on_event", None) or observer  # type: ignore[assignment]
        self.name = getattr(observer, "__qualname__", type(observer).__qualname__)
        self.errors = 0

    def log_and_count_error(self, event: Event, error: BaseException) -> str | None:
        """
        Log and count an *error* of the observer at *event*; return a warning if it is dropped now for too many errors, else ``None``.

        Raises:
            BaseException: *error*, if it is meant for the caller of the run, such as what ``pytest.fail`` raises.
        """
        # An observer may be a test's: what `pytest.fail` raises has to end the run and the test, and not be logged as
        # the tenth error of an observer.
        if belongs_to_caller(error):
            raise error
        LOGGER.error("the observer %r raised at %s", self.name, event.type, exc_info=error)
        self.errors += 1
        # Not at the first: one event of a kind that it does not know is no reason to lose the others. But one that
        # fails at each event would write a traceback for each delta of each reply.
        if self.errors == MAX_OBSERVER_ERRORS:
            self.put = _ignore_event
            text = f"the observer {self.name!r} raised {self.errors} times and is no longer called"
            LOGGER.warning(text)
            return text
        return None


def _ignore_event(_: Event) -> None:
    """Ignore an event, in place of a dropped observer."""


class RunLabel(NamedTuple):
    """The identity of a running run for its log lines."""

    run_id: str
    agent_id: str


WATCHED = attrgetter("watched")
"""Whether the events of a hub have to be made; a machine asks often, and this answers without a call of Python."""


class EventRedactor:
    """
    Redacts the secrets that the process knows in events; the run itself has them.

    ``RunFinished`` passes as it is: its result is what the caller of the run gets. Only its JSON is clean.
    """

    def __init__(self) -> None:
        # By model call, where something is held back: what a model says comes in pieces, and a secret may be cut in two by
        # the end of a piece, so that neither half looks like one. The last characters are held back until the next piece
        # shows that they begin no secret (reliability:R11). Calls of one run, and the inputs that one call streams, may take
        # turns, so each input has its own text, and text and thoughts share one: readers show them in their order.
        self._flows: dict[tuple[str, int], dict[tuple[str, str] | None, tuple[Delta, StreamRedactor]]] = {}
        self._offer: tuple[Any, Any] = ((), ())
        # By path: the last history in which there was a secret, and the same without it.
        self._histories: dict[str, tuple[str, Transcript, Transcript]] = {}

    def can_pass_unchanged(self, events: Sequence[Event]) -> bool:
        """Return whether *events* need no redaction and no held text comes before them; False if unsure."""
        if self._flows:
            return False
        tools, clean = self._offer
        looked_at: list[object] = []
        # The newest first: its history holds those of the others, which are then known.
        for event in reversed(events):
            if isinstance(event, DELTAS):
                if not KNOWN.is_harmless_piece(event.text):
                    return False
                if isinstance(event, ToolInputDelta):
                    looked_at += (event.tool_name, event.tool_call_id)
            elif isinstance(event, ModelStarted) and event.request is not None:
                request = event.request
                if request.tools is not tools or tools is not clean:
                    return False
                looked_at += (request.system_prompt, request.messages, request.tail)
            else:
                looked_at.append(event)
        # All at one look, which costs a fraction of one for each.
        return not looked_at or KNOWN_RECORDS.is_clean(tuple(looked_at))

    def redact_event(self, event: Event) -> Sequence[Event]:
        """
        Return the redacted events for *event*, which may be none; text held back for its model call comes first.

        Of a delta, a possible start of a secret is held back, so the result may be empty.
        """
        if isinstance(event, DELTAS):
            return (event,) if self.can_pass_unchanged((event,)) else self._redact_delta(event)
        # Before anything else of a call is shown, its own held-back text goes out, or a reply would seem to go on behind
        # its end.
        clean = self._redact_model_started(event) if isinstance(event, ModelStarted) else KNOWN_RECORDS.redact(event)
        return (*self._flush_ended_calls(event), clean) if self._flows else (clean,)

    def _redact_delta(self, delta: Delta) -> list[Event]:
        """Return the part of a delta that needs no more text to be redacted; a possible start of a secret is held back."""
        shown: list[Event] = []
        part = None
        if isinstance(delta, ToolInputDelta):
            delta = _redact_name_and_call_id(delta)
            part = delta.tool_name, delta.tool_call_id
        call = delta.path, delta.seq
        held = self._flows.pop(call, {})
        if None in held and type(held[None][0]) is not type(delta):
            shown += _flush_held_texts([held.pop(None)])
        trickle = held.pop(part)[1] if part in held else StreamRedactor(KNOWN)
        text = trickle.feed(delta.text)
        if trickle.has_pending_text:
            held[part] = delta, trickle
        if held:
            self._flows[call] = held
        # A delta of which nothing may be shown yet is no event: an empty one would wake each reader for nothing.
        if text:
            shown.append(delta if text == delta.text else attrs.evolve(delta, text=text))
        return shown

    def flush(self) -> list[Event]:
        """Remove and return the text that is still held back, as events."""
        flows, self._flows = self._flows, {}
        return [event for held in flows.values() for event in _flush_held_texts(held.values())]

    def _flush_ended_calls(self, event: Event) -> list[Event]:
        """Remove and return the held text of the call of *event*; at the start or end of a step that of all calls of the run."""
        ended = [(event.path, event.seq)]
        # The end of a call is not shown where nobody watched its start.
        if isinstance(event, StepStarted | StepFinished):
            ended = [call for call in self._flows if call[0] == event.path]
        return [one for call in ended for one in _flush_held_texts(self._flows.pop(call, {}).values())]

    def _redact_model_started(self, event: ModelStarted) -> ModelStarted:
        """Return *event* redacted; its tools are scanned only once."""
        request = event.request
        if request is None:
            return event
        # Schemas of tools are the largest part of a short request and the same object at every step, so to look through
        # them once is most of the work saved.
        if request.tools is not self._offer[0]:
            self._offer = request.tools, KNOWN_RECORDS.redact(request.tools)
        clean = {
            "system_prompt": KNOWN_RECORDS.redact(request.system_prompt),
            "messages": self._redact_history(event.path, request.messages),
            "tools": self._offer[1],
            "tail": KNOWN_RECORDS.redact(request.tail),
        }
        changed = {name: value for name, value in clean.items() if value is not getattr(request, name)}
        return attrs.evolve(event, request=attrs.evolve(request, **changed)) if changed else event

    def _redact_history(self, path: str, history: Transcript) -> Transcript:
        """Return the redacted *history* of the run at *path*."""
        if not KNOWN_RECORDS.has_secrets(history):
            return history
        # One that holds a secret holds it at every step. Made anew at each of them, 3,000 steps took half a minute.
        key, seen, clean = self._histories.pop(path, NO_HISTORY)
        known = history.shared_prefix_length(seen)
        if known < len(seen) or key != KNOWN.cache_key:
            known, clean = 0, Transcript()
        clean = clean.extend([KNOWN_RECORDS.redact(message) for message in history.list_messages_after(known)])
        self._histories[path] = KNOWN.cache_key, history, clean
        if len(self._histories) > MAX_HISTORIES:
            del self._histories[next(iter(self._histories))]
        return clean


def _flush_held_texts(held: Iterable[tuple[Delta, StreamRedactor]]) -> list[Event]:
    return [attrs.evolve(last, text=trickle.flush()) for last, trickle in held]


def _redact_name_and_call_id(event: ToolInputDelta) -> ToolInputDelta:
    # Cleaned as wholes, while the text of the input comes in pieces: a name arrives in one.
    name, call = KNOWN_RECORDS.redact(event.tool_name), KNOWN_RECORDS.redact(event.tool_call_id)
    is_clean = name is event.tool_name and call is event.tool_call_id
    return event if is_clean else attrs.evolve(event, tool_name=name, tool_call_id=call)


def _continues_delta(a: Delta, b: Delta) -> bool:
    """Return whether *b* continues *a*; the caller has checked that both have the same path."""
    if type(a) is not type(b) or a.seq != b.seq:
        return False
    if not isinstance(a, ToolInputDelta) or not isinstance(b, ToolInputDelta):
        return True
    return a.tool_call_id == b.tool_call_id and a.tool_name == b.tool_name


class _StoredDeltas:
    """Consecutive deltas of a ring, read as one at the last one's index in the stream."""

    __slots__ = ("_indices", "_pieces", "chars", "key", "last")

    def __init__(self, first: Delta) -> None:
        self.key = first.index
        # A reply has thousands of deltas. As events each would keep an object of some hundred bytes; so the ring keeps
        # a number and the text of each, and cuts the text where a reader comes back.
        self._indices = array("q")
        self._pieces: list[str] = []
        self.chars = 0
        self.add(first)

    def add(self, delta: Delta) -> None:
        """Add a piece; it must continue the last one."""
        self.last = delta
        self._indices.append(delta.index)
        self._pieces.append(delta.text)
        self.chars += len(delta.text) + 1  # for the piece itself: it may be empty

    def join_deltas_after(self, index: int) -> Delta:
        return attrs.evolve(self.last, text="".join(self._pieces[bisect_right(self._indices, index) :]))


class EventBuffer:
    """
    The newest events of a run, for subscribers that arrive late or reconnect.

    At most 10,000 events with 1 MiB of text. Deltas are kept while their model call runs: what is shown after it holds them
    whole. Requests of model calls, which hold whole conversations, are not kept.

    Attributes:
        start: All events before this index may be missing; after it, only deltas of model calls that have ended.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[Event | _StoredDeltas, int]] = OrderedDict()
        self._flows: dict[tuple[str, int], list[int]] = {}
        self._chars = 0
        self.start = 0

    def put(self, event: Event) -> None:
        """Store *event* as the newest; drop the deltas of a model call that it ends, and the oldest events over the limits."""
        if isinstance(event, DELTAS):
            self._append_delta(event)
        else:
            # The event that follows them says the same as a whole. Whoever comes late is not to read a reply letter by
            # letter, and whoever had some of its deltas gets all of it.
            if isinstance(event, (ModelFinished, ReplyDiscarded)):
                self._forget_deltas(event.path, event.seq)
            # A request holds the conversation so far: with it in the ring, a run of n steps would keep n conversations.
            elif isinstance(event, ModelStarted):
                event = attrs.evolve(event, request=None)
            self._add_entry(event.index, event, _count_event_chars(event))
        # By number and by text, since one tool result may be as long as all other events. The newest stays whatever its
        # size: without it a reader that comes back could not be told what happened last.
        while len(self._entries) > MAX_QUEUED_EVENTS or (self._chars > MAX_KEPT_CHARS and len(self._entries) > 1):
            oldest = next(iter(self._entries.values()))[0]
            self.start = (oldest.last if isinstance(oldest, _StoredDeltas) else oldest).index + 1
            self._remove_entry(next(iter(self._entries)))

    def iterate_events_after(self, index: int) -> Iterator[Event]:
        """Yield the events after *index* in order, with consecutive deltas joined."""
        for entry, _ in self._entries.values():
            if isinstance(entry, _StoredDeltas):
                if entry.last.index > index:
                    yield entry.join_deltas_after(index)
            elif entry.index > index:
                yield entry

    def _append_delta(self, delta: Delta) -> None:
        """Add a delta to the stored ones that it continues, or store it as a new entry."""
        # By call, since the deltas of one call are forgotten together, when the event comes that holds them whole.
        keys = self._flows.setdefault((delta.path, delta.seq), [])
        flow = self._entries[keys[-1]][0] if keys and keys[-1] in self._entries else None
        if (
            not isinstance(flow, _StoredDeltas)
            or flow.chars > MAX_JOINED_CHARS
            or not _continues_delta(flow.last, delta)
        ):
            flow = _StoredDeltas(delta)
            keys.append(flow.key)
            self._add_entry(flow.key, flow, flow.chars)
            return
        self._chars -= flow.chars
        flow.add(delta)
        self._chars += flow.chars
        # Its place is that of its last delta, so that whoever comes back with that id has missed nothing before it.
        self._entries[flow.key] = flow, flow.chars
        self._entries.move_to_end(flow.key)

    def _forget_deltas(self, path: str, seq: int) -> None:
        """Drop the stored deltas of a model call."""
        for key in self._flows.pop((path, seq), ()):
            if key in self._entries:
                self._remove_entry(key)

    def _add_entry(self, key: int, entry: Event | _StoredDeltas, chars: int) -> None:
        """Store an entry under its key, and count its *chars*."""
        self._entries[key] = entry, chars
        self._chars += chars

    def _remove_entry(self, key: int) -> None:
        self._chars -= self._entries.pop(key)[1]


# Read by name where a value has such a field: the size is an estimate for a bound on memory, so a kind of value that
# nobody listed counts a little too small, and no import of all kinds is needed.
OF_VALUES = ("text", "value", "data", "input", "raw_input", "details")
"""Where questions and the parts of results and replies hold what may be long."""
OF_EVENTS = frozenset({"JsonValue", "ToolResult", "ModelReply | None", "Question"})


@cache
def _list_text_fields(kind: type[Event]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of an event class's text fields, and of the fields that may contain texts."""
    # Found from the annotations once for each kind: a list by hand would forget the text of the next kind of event, and
    # the ring would grow without anybody's noticing.
    own = [field for field in attrs.fields(kind) if field.name not in ("path", "run_id", "epoch")]
    texts = tuple([field.name for field in own if field.type == "str"])
    return texts, tuple([field.name for field in own if field.type in OF_EVENTS])


def _count_event_chars(event: Event) -> int:
    """Return the number of characters of text in an event, without its run's result."""
    kind: Any = type(event)  # mypy: a frozen class would have no hash
    texts, others = _list_text_fields(kind)
    chars = sum([len(getattr(event, name)) for name in texts])
    return chars + sum([_count_value_chars(getattr(event, name)) for name in others]) if others else chars


def _count_value_chars(value: Any) -> int:
    """Return the number of characters of text in a value."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum([len(key) + _count_value_chars(held) for key, held in value.items()])
    if isinstance(value, tuple | list):
        return sum([_count_value_chars(held) for held in value])
    if isinstance(value, ToolResult | ModelReply):
        return _count_value_chars(value.content)
    return sum([_count_value_chars(getattr(value, name)) for name in OF_VALUES if hasattr(value, name)])


@frozen
class StreamPosition:
    """A place in the stream of an epoch."""

    epoch: str
    index: int


def parse_event_id(event_id: object, *, example_epoch: str = "5d0c2a17") -> StreamPosition:
    """
    Parse an event's id; *example_epoch* is an epoch for the example in an error.

    Raises:
        StepEngineError: when it is not an id of an event.
    """
    epoch, _, index = event_id.partition("-") if isinstance(event_id, str) else ("", "", "")
    is_epoch = len(epoch) == 2 * EPOCH_BYTES and EPOCH_DIGITS.issuperset(epoch)
    if not (is_epoch and index.isascii() and index.isdigit() and len(index) <= MAX_INDEX_DIGITS):
        msg = f"after={event_id!r} is not the id of an event; write one like {example_epoch}-0"
        raise StepEngineError(msg)
    return StreamPosition(epoch, int(index))


class WatcherFailures:
    """
    The errors of the observers and the logger of one run tree.

    Attributes:
        warnings: Warnings for the result, such as about dropped observers.
        crash: The first error for the caller of the run that an observer or the logger raised.
        on_crash: Called with such an error at once, so that it ends the run.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.crash: BaseException | None = None
        self.on_crash: Callable[[BaseException], Any] | None = None

    def record_observer_error_or_raise(self, receiver: Receiver, event: Event, error: BaseException) -> None:
        """Count the *error* of an observer at *event*, and add a warning if it is dropped; raise the error of any other receiver."""
        if not isinstance(receiver, Watcher):
            raise error
        try:
            warning = receiver.log_and_count_error(event, error)
        except BaseException as raised:  # noqa: BLE001
            self.report_crash(raised)
        else:
            if warning is not None:
                self.warnings.append(warning)

    def report_crash(self, error: BaseException) -> None:
        """Store the first error that must reach the caller of the run, and call ``on_crash`` with each."""
        self.crash = self.crash or error
        if self.on_crash is not None:
            self.on_crash(error)


class TreeLogger:
    """
    Writes the log lines of one run tree, with the run that each belongs to.

    Args:
        logger: Where they go; see ``stepengine.runtime.logs.write_log_line``.
        failures: What the logger raised goes there.
    """

    def __init__(self, logger: object, failures: WatcherFailures) -> None:
        self._logger = logger
        self._failures = failures
        self._labels: dict[str, RunLabel] = {}

    def add_run(self, path: str, run_id: str, agent_id: str) -> None:
        """Register the run at *path* for its log lines."""
        self._labels[path] = RunLabel(run_id, agent_id)

    def copy_labels(self) -> Mapping[str, RunLabel]:
        """Return the labels of the running runs by path."""
        return dict(self._labels)

    def remove_run(self, path: str) -> None:
        """Remove the ended run at *path*."""
        self._labels.pop(path, None)

    def write(self, event: LogLine | ToolLog, data: object = None, *, step: int = 0) -> None:
        """Write a redacted line to the engine's logger, without showing an event; an error of the logger does not end the run."""
        label = self._labels.get(event.path) or RunLabel("", "")
        # A cheap look for the beginnings of what is known; the thorough one copies, and hardly a line needs it.
        if KNOWN.may_contain_secret(f"{event.message} {data!r}"):
            event, data = KNOWN_RECORDS.redact(event), KNOWN.value(plain(data))
        context = {"run_id": label.run_id, "agent_id": label.agent_id, "path": event.path, "step": step}
        try:
            write_log_line(self._logger, event.level, event.message, context, data)
        # A logger that is misconfigured must not end runs.
        except Exception as error:  # noqa: BLE001
            LOGGER.error("the logger of the engine raised", exc_info=error)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._failures.report_crash(error)


class EventNumbers:
    """
    The ids of the events of one stream: run, epoch and index.

    Attributes:
        run_id: The root run's id.
        drawn_epoch: The epoch; ``""`` until ``ensure_epoch`` is called.
        next_index: The index of the next event.
    """

    __slots__ = ("drawn_epoch", "next_index", "run_id")

    def __init__(self) -> None:
        self.run_id = self.drawn_epoch = ""
        self.next_index = 0

    def ensure_epoch(self) -> str:
        """Return the epoch of this stream, drawn at random by the first call; each process that drives the run has its own."""
        # Drawn when first needed: a run that nobody watches asks the system for no random bytes. It is not the run's
        # own chance, which a replay repeats: two processes that drive one run after each other must have different
        # ones, or a reader that reconnects would be given the events behind another one's place.
        if not self.drawn_epoch:
            self.drawn_epoch = os.urandom(EPOCH_BYTES).hex()
        return self.drawn_epoch

    def assign_ids(self, *events: Event) -> None:
        """Assign the next ids to events that no one has seen."""
        for event in events:
            object.__setattr__(event, "run_id", self.run_id)
            object.__setattr__(event, "epoch", self.drawn_epoch)
            object.__setattr__(event, "index", self.next_index)
            self.next_index += 1

    def find_index(self, event_id: object) -> int | None:
        """
        Return the index in the id of an event, or ``None`` if the id is of another epoch.

        Raises:
            StepEngineError: when it is not the id of an event so far.
        """
        epoch = self.ensure_epoch()
        position = parse_event_id(event_id, example_epoch=epoch)
        # The process that gave this id has ended, and another one continues the run: its numbers count other events. So
        # the reader gets all that there is, and is notified.
        if position.epoch != epoch:
            return None
        if position.index >= self.next_index:
            msg = f"after={event_id!r} names an event that does not exist yet; the newest one is {epoch}-{self.next_index - 1}"
            raise StepEngineError(msg)
        return position.index


class NewsFilter:
    """
    Selects the news among the events of a resumed run: those that were not shown before it was resumed.

    Args:
        is_news: Returns whether an event is news.
    """

    def __init__(self, is_news: Callable[[Event], bool]) -> None:
        self._is_news = is_news
        self._held_starts: dict[str, Event] = {}

    def select_news(self, event: Event) -> Iterator[Event]:
        """
        Yield *event* if it is news, after the starts of the steps around it.

        If only the rest of a step is news, its start is shown, too, so that no end is shown without its start.
        """
        path, held = event.path, self._held_starts
        if isinstance(event, StepStarted):
            if not self._is_news(event):
                held[path] = event
                return
            held.pop(path, None)
        elif isinstance(event, StepFinished):
            if held.pop(path, None) is not None:
                return
        elif not self._is_news(event):
            return
        # A child's news makes its parent's step news as well: shown are the starts of all steps around it, outermost
        # first, or a viewer would have to hang the child below nothing.
        for above in sorted([one for one in held if not one or path == one or path.startswith(f"{one}.")], key=len):
            start = held.pop(above)
            object.__setattr__(start, "resumed", True)  # nobody has seen it yet, as with its id
            yield start
        yield event

    def drop_held_starts(self) -> None:
        """Drop the held starts of steps; the run has ended and no more news follows."""
        self._held_starts.clear()


class RootStatus:
    """
    The state of the root run that handles show while it runs.

    Attributes:
        phase: Its phase, as far as events are kept or shown to more than one reader.
        is_resumed: Whether it continues from its journal.
        history: Returns its messages at this moment; ``None`` unless it runs.
    """

    __slots__ = ("history", "is_resumed", "phase")

    def __init__(self) -> None:
        self.phase = RunPhase.IDLE
        self.is_resumed = False
        self.history: Callable[[], Transcript] | None = None

    def set_history(self, get_history: Callable[[], Transcript]) -> None:
        """Register the function that returns the current history; called by the machine of the run."""
        self.history = get_history


class Hub:
    """
    The event stream of one run tree.

    Args:
        watchers: The observers of every event.
        logger: Where log lines go in addition to the stream; see ``stepengine.runtime.logs.write_log_line``.

    Attributes:
        numbers: The ids of its events.
        root: The state of the root run.
        is_kept_open: Whether its handle is kept open, so that another run follows in this stream when one has ended.
        watched: Whether anyone receives events; otherwise they need not be created.
        only: A reader that is the only receiver; ``None`` while there is no such reader.
        failures: The errors of observers and the logger.
        log: Writes log lines without showing an event.
    """

    def __init__(self, watchers: Iterable[Watcher] = (), logger: object = LOGGER) -> None:
        self._receivers: list[Receiver] = [*watchers]
        self.failures = WatcherFailures()
        self.log = TreeLogger(logger, self.failures)
        self.numbers = EventNumbers()
        self.root = RootStatus()
        self.is_kept_open = False
        self.watched = bool(self._receivers)
        if self.watched:
            self.numbers.ensure_epoch()
        self.only: Subscription | None = None
        self._news: NewsFilter | None = None
        self._ring: EventBuffer | None = None
        self._last: RunFinished | None = None
        self._is_over = False
        self._event_redactor = EventRedactor()

    def set_run_id(self, run_id: str) -> None:
        """Use *run_id* in the ids of all later events."""
        self.redact_and_index_waiting()
        self.numbers.run_id = run_id

    def set_news_filter(self, is_news: Callable[[Event], bool] | None) -> None:
        """Emit and log only events that are news from now on; ``None`` emits all."""
        self._news = None if is_news is None else NewsFilter(is_news)
        self._reset_only_reader()

    def start_storing_events(self) -> None:
        """Store the newest events from now on, for later subscribers."""
        if self._ring is None:
            self._ring = EventBuffer()
            self._add_receiver(self._ring)

    def _add_receiver(self, receiver: Receiver) -> None:
        """Send events to another receiver from now on, and mark the run as watched."""
        # Set only by those who watch, and asked before events are made: a run that nobody watches makes none of its
        # steps (performance:Q2).
        self.numbers.ensure_epoch()
        self.watched = True
        self._receivers.append(receiver)
        self._reset_only_reader()

    def _reset_only_reader(self) -> None:
        """Update the only reader: the subscription that is the only receiver, if there is one."""
        self.redact_and_index_waiting()
        reader = self._receivers[0] if len(self._receivers) == 1 and self._news is None else None
        self.only = reader if isinstance(reader, Subscription) else None
        if self.only is not None:
            self.only.indexed = len(self.only.queue)

    def redact_and_index_waiting(self) -> None:
        """Redact, index and join the events that wait for the only reader; do nothing without such a reader."""
        reader = self.only
        if reader is None or reader.indexed == len(reader.queue):
            return
        queue, indexed = reader.queue, reader.indexed
        # Joined deltas have an index, so there are none among these.
        new: list[Any] = queue[indexed:] if indexed else queue
        if GIVEN.names and not self._event_redactor.can_pass_unchanged(new):
            new = new.copy()
            del queue[indexed:]
            for event in new:
                for clean in self._event_redactor.redact_event(event):
                    self.numbers.assign_ids(clean)
                    reader.put(clean)
        else:
            self.numbers.assign_ids(*new)
            if reader.joins:
                reader.join_deltas(indexed)
        reader.joins, reader.indexed = False, len(queue)

    @property
    def subscribers(self) -> list[Subscription]:
        """The open subscriptions."""
        return [receiver for receiver in self._receivers if isinstance(receiver, Subscription)]

    def emit(self, event: Event, is_clean: bool = False) -> None:  # noqa: C901, FBT001, FBT002 - each event of a run
        """Assign an index to *event* and send it to all receivers if it is news; *is_clean* skips redaction."""
        # Every event of a watched run and every token passes here, so what is done for each stands in this one
        # function, which takes nothing by name. What only waits for one reader gets its place, and is looked at for
        # secrets, when that reader takes it: nobody sees it before.
        reader, news = self.only, self._news
        is_queued = reader is not None and reader.waiter is None
        if is_queued and not is_clean:
            queue = reader.queue  # type: ignore[union-attr]
            if len(queue) < MAX_QUEUED_EVENTS:
                if isinstance(event, NOTED):
                    self._update_root_status_or_log(event)
                elif isinstance(event, DELTAS) and len(queue) > LAG_EVENTS and isinstance(queue[-1], JOINED_TO):
                    self._mark_joinable(reader)  # type: ignore[arg-type]
                queue.append(event)
                return
            self.redact_and_index_waiting()
        # The two usual cases cost one look each: a run that is not resumed has only news, and a process that knows no
        # secrets has nothing to look for. One that knows its keys, as most do, looks at an event once and shows it from
        # here: through `_select_and_redact_news` it would take a generator and a second call.
        if not is_clean and (
            news is not None or (GIVEN.names and not self._event_redactor.can_pass_unchanged((event,)))
        ):
            for clean in (
                self._event_redactor.redact_event(event) if news is None else self._select_and_redact_news(event, news)
            ):
                self.emit(clean, True)
            return
        if isinstance(event, NOTED):
            self._update_root_status_or_log(event)
        if self.watched:
            if is_queued:
                self.redact_and_index_waiting()
            # As `EventNumbers.assign_ids`, without a call for each event of a watched run.
            numbers = self.numbers
            object.__setattr__(event, "run_id", numbers.run_id)
            object.__setattr__(event, "epoch", numbers.drawn_epoch)
            object.__setattr__(event, "index", numbers.next_index)
            numbers.next_index += 1
            # Here and now, one after the other, in the order of the events. Observers return at once, by contract; a
            # reader that takes its time subscribes, and has a queue.
            for receiver in self._receivers:
                try:
                    receiver.put(event)
                except BaseException as error:  # noqa: BLE001 - only what is the caller's comes out of `record_observer_error_or_raise`
                    self.failures.record_observer_error_or_raise(receiver, event, error)
            if reader is not None:
                reader.indexed = len(reader.queue)

    def _mark_joinable(self, reader: Subscription) -> None:
        """Mark that deltas may join among the waiting events of a reader that is behind; join them by the hundred."""
        # Joined by the hundred, at half of what it takes one by one.
        if len(reader.queue) - reader.indexed > LAG_EVENTS:
            self.redact_and_index_waiting()
        reader.joins = True

    def _select_and_redact_news(self, event: Event, news: NewsFilter) -> Iterator[Event]:
        """Yield the redacted news in an event of a resumed run."""
        for one in news.select_news(event):
            # One event may become several: what deltas of that run had held back goes out in front of it.
            yield from self._event_redactor.redact_event(one) if GIVEN.names else (one,)

    def finish(self, result: RunResult) -> None:
        """
        Emit the last event with *result* and end all subscriptions, unless another turn follows.

        Later subscribers get that event, too.
        """
        if self._last is not None:
            return
        # What waits may hold something back, too.
        self.redact_and_index_waiting()
        for clean in self._event_redactor.flush():
            self.emit(clean, True)
        # The result is the caller's and passes as it is, secrets and all; who makes JSON of the event gets it clean.
        event = RunFinished(path="", seq=0, result=result, clean=KNOWN.value)
        if not self.is_kept_open:
            self._last = event
        self.emit(event, True)
        self.end_stream_unless_kept_open()

    def end_stream_unless_kept_open(self) -> None:
        """Drop the history and the held events of the ended run; end all subscriptions unless the hub is kept open."""
        self.root.history = None
        if self._news is not None:
            self._news.drop_held_starts()
        if self.is_kept_open:
            return
        self._is_over = True
        for subscription in self.subscribers:
            subscription.end()

    def subscribe(self, after: str | None = None) -> Subscription:
        """
        Return a subscription to the stored events and all later ones.

        Args:
            after: The ``id`` of the last event that the subscriber has; the subscription starts after it.

        Raises:
            LimitExceeded: when the run has 100 subscribers already.
            StepEngineError: when *after* is not an id of an event.
        """
        if len(self.subscribers) >= MAX_SUBSCRIBERS:
            msg = f"this run has {MAX_SUBSCRIBERS} subscribers already; close one, or forward events from one of them"
            raise LimitExceeded(msg, kind="readers", limit=MAX_SUBSCRIBERS)
        index = -1 if after is None else self.numbers.find_index(after)
        subscription = Subscription(self)
        if self._ring is not None:
            # What fell out of the ring cannot be shown any more, but it can be counted: a page that comes back after an
            # hour is told that it has not seen everything, and can load the run anew.
            missing = self._ring.start - (-1 if index is None else index) - 1
            if missing > 0 or index is None:
                subscription.report_missed(max(0, missing), "epoch" if index is None else "buffer")
            for event in self._ring.iterate_events_after(-1 if index is None else index):
                subscription.put(event)
        elif self._last is not None:
            if not self._last.epoch:
                # Nobody watched when it was shown, so it has no id yet.
                self.numbers.ensure_epoch()
                self.numbers.assign_ids(self._last)
            subscription.put(self._last)
        if self._is_over:
            subscription.end()
        else:
            self._add_receiver(subscription)
        return subscription

    def remove_subscription(self, subscription: Subscription) -> None:
        """Send no more events to a subscription; without receivers, the run is no longer watched."""
        if subscription in self._receivers:
            self._receivers.remove(subscription)
            self.watched = bool(self._receivers)
            self._reset_only_reader()

    def _update_root_status_or_log(self, event: Event) -> None:
        """Apply a phase or start event to the status of the root run, or write a log line or hook failure to the log; ignore others."""
        match event:
            case PhaseChanged(path=""):
                self.root.phase = event.phase
            case LogLine():
                self.log.write(event, event.data, step=event.step)
            case HookFailed():
                self.log.write(LogLine(path=event.path, level="error", message=event.error))
            case RunStarted(path="") if self.root.is_resumed:
                object.__setattr__(event, "resumed", True)  # nobody has seen it yet, as with its id


class _WaitingDeltas:
    """Deltas that wait for a reader as one, which has the last one's place in the stream."""

    __slots__ = ("_texts", "chars", "last")

    def __init__(self, first: Delta) -> None:
        self.last = first
        self._texts = [first.text]
        self.chars = len(first.text)

    @property
    def count(self) -> int:
        """The number of joined deltas."""
        return len(self._texts)

    def join_if_continuing(self, event: Event) -> bool:
        """Join *event* if it is a delta that continues the last one; return whether it was joined."""
        if not isinstance(event, DELTAS) or not _continues_delta(self.last, event):
            return False
        if self.last.path != event.path or self.chars + len(event.text) > MAX_JOINED_CHARS:
            return False
        self.last = event
        self._texts.append(event.text)
        self.chars += len(event.text)
        return True

    def to_delta(self) -> Delta:
        return attrs.evolve(self.last, text="".join(self._texts))


JOINED_TO = (*DELTAS, _WaitingDeltas)
"""What a delta may be joined to."""


class Subscription:
    """
    One reader of a stream; ``events()`` iterates it once, in the run's own event loop.

    At most 10,000 events wait, in addition to a hundred that the reader has taken. A reader that falls behind gets deltas that belong
    together as one. If that is not enough, deltas are dropped first, then the newest events, and the reader gets an
    ``EventsDropped``. The last event always fits.

    Attributes:
        queue: The waiting events.
        indexed: How many of them, from the first one on, are without secrets and have an index; for the only reader of a hub.
        joins: Whether deltas among the others may belong together.
        waiter: The future that the reader awaits; ``None`` while it does not wait for an event.
    """

    def __init__(self, hub: Hub, limit: int = MAX_QUEUED_EVENTS) -> None:
        self._hub = hub
        self._limit = limit
        self._behind = limit * LAG_EVENTS // MAX_QUEUED_EVENTS
        # A list and a future of our own in place of `asyncio.Queue`: what waits is changed from both ends (deltas are
        # joined to the last one, or thrown out from the middle), and whoever puts something must neither wait nor fail.
        self.queue: list[Event | _WaitingDeltas] = []
        self.indexed = 0
        self.joins = False
        self.waiter: asyncio.Future[None] | None = None
        self._held: list[Event] = []
        self._dropped = 0
        self._reason = "buffer"
        self._has_lost = False
        self._has_joined = False
        # Whether it was seen that no deltas wait, and none came since the reader fell behind.
        self._is_bare = False
        self._ended = False

    def put(self, event: Event) -> None:
        """Queue *event* for the reader, or count it as dropped."""
        queue = self.queue
        count = len(queue)
        # Not joined for a reader that keeps up: a page shows text as it comes, and would get it in jumps.
        if (
            count <= self._behind
            or (count < self._limit and not isinstance(event, DELTAS))
            or self._join_or_make_room(event)
        ):
            queue.append(event)
            if self.waiter is not None:
                self._wake()

    def _join_or_make_room(self, event: Event) -> bool:
        """Join an event to the last one, or make room for it; return whether to queue it, False if it was joined or dropped."""
        is_delta = isinstance(event, DELTAS)
        if is_delta and self._join_to_last(event):
            return False
        if len(self.queue) >= self._limit and not self._make_room(event):
            return False
        self._is_bare = self._is_bare and not is_delta
        return True

    def join_deltas(self, start: int) -> None:
        """Join the waiting deltas from index *start* on, as ``put`` would have."""
        queue = self.queue
        start = max(start, self._behind + 1)
        new = queue[start:]
        del queue[start:]
        for event in new:
            if isinstance(event, DELTAS):
                self._is_bare = False
                if self._join_to_last(event):
                    continue
            queue.append(event)

    def report_missed(self, count: int, reason: str) -> None:
        """Report to the reader first that it missed *count* events, and the *reason*: ``buffer`` or ``epoch``."""
        self._dropped, self._reason, self._has_lost = count, reason, True

    def end(self) -> None:
        """Remove the subscription from its hub, and end its iteration after the waiting events."""
        self._ended = True
        self._hub.remove_subscription(self)
        self._wake()

    def close(self) -> None:
        """End the iteration and drop the waiting events."""
        # What is forgotten had a place in the stream, and nobody else's event gets it.
        if self._hub.only is self:
            self._hub.redact_and_index_waiting()
        self.queue.clear()
        self._held.clear()  # whoever iterates it gets nothing more
        self.end()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the events until the stream ends, then unsubscribe; a reader that falls behind loses some."""
        # Reading ends by `aclose`, too, when the page is closed: the place among the subscribers has to become free.
        try:
            while True:
                for event in self.pop_events():
                    yield event
                if not self.queue and not await self.wait_for_event():
                    return
        finally:
            self.close()

    def pop_events(self) -> list[Event]:
        """Remove and return at most a hundred waiting events; none if there are none or the reader has stopped."""
        # In one list, whose events need nobody's turn one after the other; not all at once, since what a reader holds is
        # neither joined nor counted when it falls behind.
        queue, hub = self.queue, self._hub
        if hub.only is self:
            if self.indexed != len(queue):
                hub.redact_and_index_waiting()
            self.indexed = max(0, len(queue) - BATCH_EVENTS)
        if len(queue) <= BATCH_EVENTS:
            taken = queue.copy()
            queue.clear()
        else:
            taken = queue[:BATCH_EVENTS]
            del queue[:BATCH_EVENTS]
        if self._has_joined:
            taken = [event if not isinstance(event, _WaitingDeltas) else event.to_delta() for event in taken]
            self._has_joined = bool(queue)
        if self._has_lost:
            taken.insert(0, self._make_dropped_event())
        self._held = taken  # type: ignore[assignment]
        return self._held

    async def wait_for_event(self) -> bool:
        """Wait for an event if none is waiting; return False at the end of the stream."""
        if self._ended:
            return False
        # Made for one wait and thrown away: a wait that is cancelled cancels its future, and one that is used again would be
        # done already. An `asyncio.Event` would do the same with a set of waiters, for the one that there is.
        self.waiter = asyncio.get_running_loop().create_future()
        try:
            await self.waiter
        finally:
            self.waiter = None
        return True

    def _make_dropped_event(self) -> EventsDropped:
        """Return the event that reports the dropped events, and reset the count."""
        numbers = self._hub.numbers
        event = EventsDropped(
            count=self._dropped, reason=self._reason, run_id=numbers.run_id, epoch=numbers.ensure_epoch()
        )
        # Told once and then counted anew: the reader knows what it missed since the last time.
        self._dropped, self._reason, self._has_lost = 0, "buffer", False
        return event

    def _wake(self) -> None:
        """Wake the reader if it waits for an event."""
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _join_to_last(self, event: Event) -> bool:
        """Join a delta to the last waiting event if it continues that; return whether it does."""
        last = self.queue[-1]
        # Only to the one that waits last: joined to an earlier one, text would come before what was shown between the two.
        if isinstance(last, _WaitingDeltas):
            return last.join_if_continuing(event)
        if not isinstance(last, DELTAS):
            return False
        one = _WaitingDeltas(last)
        if not one.join_if_continuing(event):
            return False
        self.queue[-1] = one
        self._has_joined = True
        return True

    def _make_room(self, event: Event) -> bool:
        """
        Drop waiting events to make room for *event* in a full queue; return False if *event* itself is dropped.

        A delta is dropped. Any other event drops all waiting deltas once; without any it is dropped, too. ``RunFinished`` always fits.
        """
        # Whatever is lost, a reader must learn that the run has ended, or it waits for ever.
        if isinstance(event, RunFinished):
            return True
        # All of them at once and not the oldest: of a text with holes in it nobody can use the rest, and the event that
        # ends the reply holds it whole.
        self._has_lost = True
        if not isinstance(event, DELTAS) and not self._is_bare:
            kept = [e for e in self.queue if not isinstance(e, JOINED_TO)]
            dropped = [e for e in self.queue if isinstance(e, JOINED_TO)]
            self._dropped += sum([e.count if isinstance(e, _WaitingDeltas) else 1 for e in dropped])
            self.queue.clear()
            self.queue += kept
            # Looked for once and not again at each event of a reader that is stuck.
            self._is_bare = True
            if dropped:
                return True
        self._dropped += 1
        return False
