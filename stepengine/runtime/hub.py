"""
The one ordered event stream of a run tree, and who is shown it.

Events reach observers and subscribers in the order in which they are emitted; each gets its place in the stream here. Those
of a run that has a handle are kept for whoever comes late or comes back, as far as a ring of fixed size reaches. Nobody who
watches can change, stop or slow a run: observers that raise are dropped, slow subscribers lose deltas first.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.events import (
    EVENTS,
    Event,
    EventsDropped,
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
from stepengine.data.frozen import frozen
from stepengine.data.messages import ToolResult
from stepengine.data.models import ModelReply
from stepengine.data.state import RunPhase
from stepengine.data.transcript import Transcript
from stepengine.errors import LimitExceeded, StepEngineError
from stepengine.machine.signals import is_callers
from stepengine.redaction import GIVEN, KNOWN, Trickle
from stepengine.runtime.logs import LOGGER, write

__all__ = ("WATCHED", "Hub", "Observer", "ObserverLike", "Subscription", "Watcher", "place_of")

MAX_QUEUE = 10_000
MAX_KEPT_CHARS = 1_048_576
"""How much text the events hold at most that are kept for late subscribers; the newest event stays whatever its size."""
MAX_SUBSCRIBERS = 100
MAX_OBSERVER_ERRORS = 10
MAX_JOINED = 4_096
"""Characters that deltas are joined to at most, so that joining many stays cheap."""
BEHIND = 100
"""A reader has fallen behind when a hundredth of what may wait does: a stuck one costs kilobytes, and loses no text."""
EPOCH_BYTES = 4
EPOCH_DIGITS = frozenset("0123456789abcdef")
MAX_INDEX_DIGITS = 18
DELTAS = (TextDelta, ThinkingDelta, ToolInputDelta)
Delta: TypeAlias = TextDelta | ThinkingDelta | ToolInputDelta


class Observer(Protocol):
    """Somebody who is shown every event of every run of an engine."""

    def on_event(self, event: Event, /) -> Any:
        """Look at *event*; must return at once. What it returns is ignored."""


ObserverLike: TypeAlias = "Observer | Callable[[Event], Any]"


class Watcher:
    """An observer and how often it has failed; an engine keeps one for all its runs."""

    __slots__ = ("call", "errors", "name")

    def __init__(self, observer: ObserverLike) -> None:
        self.call: Callable[[Event], Any] | None = getattr(observer, "on_event", None) or observer  # type: ignore[assignment]
        self.name = getattr(observer, "__qualname__", type(observer).__qualname__)
        self.errors = 0

    def show(self, event: Event) -> str | None:
        """
        Show *event*; return a warning when this failure was one too many and the observer is dropped.

        Raises:
            BaseException: what the observer raised for the caller of the run, such as ``pytest.fail`` does.
        """
        if self.call is None:
            return None
        try:
            self.call(event)
        except BaseException as error:
            if is_callers(error):
                raise
            LOGGER.error("the observer %r raised at %s", self.name, event.type, exc_info=error)
            self.errors += 1
            if self.errors == MAX_OBSERVER_ERRORS:
                self.call = None
                text = f"the observer {self.name!r} raised {self.errors} times and is not called any more"
                LOGGER.warning(text)
                return text
        return None


@frozen
class Seat:
    """A run under way: what its log lines carry."""

    run_id: str
    agent_id: str


WATCHED = attrgetter("watched")
"""Whether the events of a hub have to be made; a machine asks often, and this answers without a call of Python."""


class Curtain:
    """
    Keeps secrets that the process knows out of events; the run itself has them.

    ``RunFinished`` passes as it is: its result is what the caller of the run gets. Only its JSON is clean.
    """

    def __init__(self) -> None:
        self._flows: dict[str, tuple[Delta, Trickle]] = {}
        self._offer: tuple[Any, Any] = ((), ())

    def through(self, event: Event) -> Sequence[Event]:
        """Return what may be shown in place of *event*: what deltas held back of their run's path, then the event."""
        if isinstance(event, DELTAS):
            return self._flowing(event)
        clean = self._started(event) if type(event) is ModelStarted else KNOWN.frozen(event)
        return (*self._ended(event.path), clean) if event.path in self._flows else (clean,)

    def _flowing(self, delta: Delta) -> list[Event]:
        shown: list[Event] = []
        if type(delta) is ToolInputDelta:
            delta = _named(delta)
        last, trickle = self._flows.get(delta.path, (delta, None))
        if trickle is None or not _goes_on(last, delta):
            shown += self._ended(delta.path)
            trickle = Trickle(KNOWN)
        self._flows[delta.path] = delta, trickle
        text = trickle.feed(delta.text)
        if text:
            shown.append(delta if text == delta.text else attrs.evolve(delta, text=text))
        return shown

    def rest(self) -> list[Event]:
        """Return what is still held back."""
        return [event for path in list(self._flows) for event in self._ended(path)]

    def _ended(self, path: str) -> Sequence[Event]:
        flow = self._flows.pop(path, None)
        text = "" if flow is None else flow[1].rest()
        return (attrs.evolve(flow[0], text=text),) if flow is not None and text else ()

    def _started(self, event: ModelStarted) -> ModelStarted:
        """Return *event*; the tools of its request, the same at every step, are looked at once."""
        request = event.request
        if request is None:
            return event
        if request.tools is not self._offer[0]:
            self._offer = request.tools, KNOWN.frozen(request.tools)
        kept = {name: getattr(request, name) for name in ("system_prompt", "messages", "tail")}
        clean = {name: KNOWN.frozen(value) for name, value in kept.items()} | {"tools": self._offer[1]}
        changed = {name: value for name, value in clean.items() if value is not getattr(request, name)}
        return attrs.evolve(event, request=attrs.evolve(request, **changed)) if changed else event


def _named(event: ToolInputDelta) -> ToolInputDelta:
    """Return *event* with a clean name: a model may call a tool whatever it likes."""
    name, call = KNOWN.frozen(event.tool_name), KNOWN.frozen(event.tool_call_id)
    is_clean = name is event.tool_name and call is event.tool_call_id
    return event if is_clean else attrs.evolve(event, tool_name=name, tool_call_id=call)


def _goes_on(a: Delta, b: Delta) -> bool:
    """Return whether *b* of the same path goes on where *a* stops."""
    if type(a) is not type(b) or a.seq != b.seq:
        return False
    if isinstance(a, ToolInputDelta) and isinstance(b, ToolInputDelta):
        return (a.tool_call_id, a.tool_name) == (b.tool_call_id, b.tool_name)
    return True


class _Flow:
    """Deltas of a ring that go on where the one before stops; read as one, which has the last one's place in the stream."""

    __slots__ = ("_indices", "_pieces", "chars", "key", "last")

    def __init__(self, first: Delta) -> None:
        self.key = first.index
        self._indices = array("q")
        self._pieces: list[str] = []
        self.chars = 0
        self.add(first)

    def add(self, delta: Delta) -> None:
        self.last = delta
        self._indices.append(delta.index)
        self._pieces.append(delta.text)
        self.chars += len(delta.text) + 1  # for the piece itself: it may be empty

    def after(self, index: int) -> Delta:
        """Return what comes after *index*."""
        return attrs.evolve(self.last, text="".join(self._pieces[bisect_right(self._indices, index) :]))


class Ring:
    """
    The newest events of a run, for subscribers that come late or come back.

    At most 10,000 events with 1 MiB of text. Deltas are kept while their model call runs: what is shown after it holds them
    whole. Requests of model calls, which hold whole conversations, are not kept.

    Attributes:
        start: All events before this index may be missing; after it, only deltas of model calls that have ended.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[int, tuple[Event | _Flow, int]] = OrderedDict()
        self._flows: dict[tuple[str, int], list[int]] = {}
        self._chars = 0
        self.start = 0

    def put(self, event: Event) -> None:
        """Keep *event*, which is the newest one."""
        if isinstance(event, DELTAS):
            self._flow(event)
        else:
            if type(event) in (ModelFinished, ReplyDiscarded):
                self._forget_deltas(event.path, event.seq)
            elif type(event) is ModelStarted:
                event = attrs.evolve(event, request=None)
            self._add(event.index, event, _chars(event))
        while len(self._entries) > MAX_QUEUE or (self._chars > MAX_KEPT_CHARS and len(self._entries) > 1):
            oldest = next(iter(self._entries.values()))[0]
            self.start = (oldest.last if isinstance(oldest, _Flow) else oldest).index + 1
            self._remove(next(iter(self._entries)))

    def after(self, index: int) -> Iterator[Event]:
        """Give what there is after *index*, in order; deltas that go on where the one before stops as one."""
        for entry, _ in self._entries.values():
            if isinstance(entry, _Flow):
                if entry.last.index > index:
                    yield entry.after(index)
            elif entry.index > index:
                yield entry

    def _flow(self, delta: Delta) -> None:
        keys = self._flows.setdefault((delta.path, delta.seq), [])
        flow = self._entries[keys[-1]][0] if keys and keys[-1] in self._entries else None
        if not isinstance(flow, _Flow) or flow.chars > MAX_JOINED or not _goes_on(flow.last, delta):
            flow = _Flow(delta)
            keys.append(flow.key)
            self._add(flow.key, flow, flow.chars)
            return
        self._chars -= flow.chars
        flow.add(delta)
        self._chars += flow.chars
        # Its place is that of its last delta, so that whoever comes back with that id has missed nothing before it.
        self._entries[flow.key] = flow, flow.chars
        self._entries.move_to_end(flow.key)

    def _forget_deltas(self, path: str, seq: int) -> None:
        for key in self._flows.pop((path, seq), ()):
            if key in self._entries:
                self._remove(key)

    def _add(self, key: int, entry: Event | _Flow, chars: int) -> None:
        self._entries[key] = entry, chars
        self._chars += chars

    def _remove(self, key: int) -> None:
        self._chars -= self._entries.pop(key)[1]


NO_TEXT = frozenset({int, float, bool, type(None)})
OF_VALUES = ("text", "value", "data", "input", "raw_input", "details")
"""Where questions and the parts of results and replies hold what may be long."""
OF_EVENTS = frozenset({"JsonValue", "ToolResult", "ModelReply | None", "Question"})


@cache
def _fields(kind: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the fields of a kind of event that are texts, and of those that may hold texts."""
    own = [field for field in attrs.fields(EVENTS[kind]) if field.name not in ("path", "run_id", "epoch")]
    texts = tuple([field.name for field in own if field.type == "str"])
    return texts, tuple([field.name for field in own if field.type in OF_EVENTS])


def _chars(event: Event) -> int:
    """Return how much text an event holds; what its run's result holds is kept anyway by whoever has the handle."""
    texts, others = _fields(event.type)
    chars = sum([len(getattr(event, name)) for name in texts])
    return chars + sum([_size(getattr(event, name)) for name in others]) if others else chars


def _size(value: Any) -> int:
    """Return how much text there is in JSON, a result, a reply, a question or one of their parts."""
    kind = type(value)
    if kind is str or kind is bytes:
        return len(value)
    if kind in NO_TEXT:
        return 0
    if isinstance(value, Mapping):
        return sum([len(key) + _size(held) for key, held in value.items()])
    if isinstance(value, tuple | list):
        return sum([_size(held) for held in value])
    if isinstance(value, ToolResult | ModelReply):
        return _size(value.content)
    return sum([_size(getattr(value, name)) for name in OF_VALUES if hasattr(value, name)])


@frozen
class Place:
    """A place in the stream of an epoch."""

    epoch: str
    index: int


def place_of(after: object, *, like: str = "5d0c2a17") -> Place:
    """
    Return what an event's id says; *like* is an epoch, to show how one looks.

    Raises:
        StepEngineError: when it is not an id of an event.
    """
    epoch, _, index = after.partition("-") if isinstance(after, str) else ("", "", "")
    is_epoch = len(epoch) == 2 * EPOCH_BYTES and EPOCH_DIGITS.issuperset(epoch)
    if not (is_epoch and index.isascii() and index.isdigit() and len(index) <= MAX_INDEX_DIGITS):
        msg = f"after={after!r} is not an id of an event; one is such as {like}-0"
        raise StepEngineError(msg)
    return Place(epoch, int(index))


class Hub:
    """
    The event stream of one run tree.

    Args:
        watchers: Who is shown every event.
        logger: Where log lines go beside the stream; see ``stepengine.runtime.logs.write``.
        shows: Says which events are news; the others are neither shown nor logged. By default all are.

    Attributes:
        shows: As given.
        run_id: The root run's id.
        resumed: Whether the root run goes on from its journal.
        goes_on: Whether another run follows in this stream when one has ended: that of a kept-open handle.
        watched: Whether anybody is shown events, or will be; while nobody is, they need not be made.
        phase: What the root run is doing.
        history: Gives the history of the root run at this moment, while it runs.
        warnings: Observers that were dropped.
        crash: What an observer or the logger raised for the caller of the run, the first of it.
        on_crash: Told of it at once, while the run can still be ended because of it.
    """

    def __init__(
        self, watchers: Iterable[Watcher] = (), logger: object = LOGGER, *, shows: Callable[[Event], bool] | None = None
    ) -> None:
        self._watchers = tuple(watchers)
        self._subscriptions: list[Subscription] = []
        self._logger = logger
        self.shows = shows
        self.run_id = ""
        self.resumed = False
        self.goes_on = False
        self._epoch = ""
        self._index = 0
        self._begun: dict[str, Event] = {}
        self._ring: Ring | None = None
        self._seats: dict[str, Seat] = {}
        self._last: RunFinished | None = None
        self._is_over = False
        self._curtain = Curtain()
        self.watched = bool(self._watchers)
        self.phase = RunPhase.IDLE
        self.history: Callable[[], Transcript] | None = None
        self.warnings: list[str] = []
        self.crash: BaseException | None = None
        self.on_crash: Callable[[BaseException], Any] | None = None

    @property
    def epoch(self) -> str:
        """What tells this stream from that of another process which drives the same run; from the OS, never recorded."""
        if not self._epoch:
            self._epoch = os.urandom(EPOCH_BYTES).hex()
        return self._epoch

    def keep(self) -> None:
        """Keep the newest events from now on, for whoever subscribes later."""
        self._ring = self._ring or Ring()
        self.watched = True

    def opened(self, history: Callable[[], Transcript]) -> None:
        """Learn where the history of the root run can be looked up; called by its machine."""
        self.history = history

    @property
    def subscribers(self) -> int:
        """How many subscriptions are open."""
        return len(self._subscriptions)

    def seat(self, path: str, run_id: str, agent_id: str) -> None:
        """Say which run is at *path*, for its log lines."""
        self._seats[path] = Seat(run_id, agent_id)

    def seats(self) -> Mapping[str, Seat]:
        """Return which runs are under way, by path."""
        return dict(self._seats)

    def unseat(self, path: str) -> None:
        """Forget the run at *path*, which has ended."""
        self._seats.pop(path, None)

    def emit(self, event: Event) -> None:
        """Give *event* its index and show it, if it is news."""
        for news in (event,) if self.shows is None else self._news(event, self.shows):
            if not GIVEN.names:
                self._pass_on(news)
                continue
            for clean in self._curtain.through(news):
                self._pass_on(clean)

    def _news(self, event: Event, shows: Callable[[Event], bool]) -> Iterator[Event]:
        """
        Give what is shown of *event* in a resumed run: the news, and whole steps around them.

        A step of which only the rest is news begins with the first of it, so that whoever is shown its end saw it begin.
        """
        path, kind, held = event.path, type(event), self._begun
        if kind is StepStarted:
            if not shows(event):
                held[path] = event
                return
            held.pop(path, None)
        elif kind is StepFinished:
            if held.pop(path, None) is not None:
                return
        elif not shows(event):
            return
        for above in sorted([one for one in held if not one or path == one or path.startswith(f"{one}.")], key=len):
            begun = held.pop(above)
            object.__setattr__(begun, "resumed", True)  # nobody has seen it yet, as with its stamp
            yield begun
        yield event

    def finish(self, event: RunFinished) -> None:
        """Show the last event and end all subscriptions, unless another run follows; those that come later get it too."""
        if self._last is not None:
            return
        for clean in self._curtain.rest():
            self._pass_on(clean)
        event = attrs.evolve(event, clean=KNOWN.value)
        if not self.goes_on:
            self._last = event
        self._pass_on(event)
        self.end()

    def end(self) -> None:
        """End all subscriptions, unless another run follows."""
        self.history = None
        self._begun.clear()
        if self.goes_on:
            return
        self._is_over = True
        for subscription in list(self._subscriptions):
            subscription.end()

    def subscribe(self, after: str | None = None) -> Subscription:
        """
        Return a subscription to every event: from the first one that is kept, or from now on when none are.

        Args:
            after: The ``id`` of the last event that the subscriber has; what comes after it is what it gets.

        Raises:
            LimitExceeded: when the run has 100 subscribers already.
            StepEngineError: when *after* is not an id of an event.
        """
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            msg = f"this run has {MAX_SUBSCRIBERS} subscribers already; close one, or pass events on from one of them"
            raise LimitExceeded(msg, kind="readers", limit=MAX_SUBSCRIBERS)
        index = -1 if after is None else self._place(after)
        subscription = Subscription(self)
        if self._ring is not None:
            missing = self._ring.start - (-1 if index is None else index) - 1
            if missing > 0 or index is None:
                subscription.miss(max(0, missing), "epoch" if index is None else "buffer")
            for event in self._ring.after(-1 if index is None else index):
                subscription.put(event)
        elif self._last is not None:
            if not self._last.epoch:
                self._stamp(self._last)  # it was not made known yet
            subscription.put(self._last)
        if self._is_over:
            subscription.end()
        else:
            self._subscriptions.append(subscription)
            self.watched = True
        return subscription

    def _place(self, after: object) -> int | None:
        """Return the index of an event's id; ``None`` for one of another epoch."""
        place = place_of(after, like=self.epoch)
        if place.epoch != self.epoch:
            return None
        if place.index >= self._index:
            msg = f"after={after!r} names an event that was not yet; the newest one is {self.epoch}-{self._index - 1}"
            raise StepEngineError(msg)
        return place.index

    def leave(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self.watched = bool(self._watchers or self._subscriptions) or self._ring is not None

    def _stamp(self, event: Event) -> None:
        # The event was made for this moment and nobody has seen it yet, so it is stamped and not copied.
        stamp = object.__setattr__
        stamp(event, "run_id", self.run_id)
        stamp(event, "epoch", self._epoch or self.epoch)
        stamp(event, "index", self._index)
        self._index += 1

    def _pass_on(self, event: Event) -> None:
        match event:
            case LogLine():
                self.log(event, event.data, step=event.step)
            case PhaseChanged(path=""):
                self.phase = event.phase
            case RunStarted(path="") if self.resumed:
                object.__setattr__(event, "resumed", True)  # nobody has seen it yet, as with its stamp
            case _:
                pass
        if self.watched:
            self._stamp(event)
            if self._watchers:
                self._show(event)
            if self._ring is not None or self._subscriptions:
                self._hand_out(event)

    def _show(self, event: Event) -> None:
        for watcher in self._watchers:
            try:
                warning = watcher.show(event)
            except BaseException as error:  # noqa: BLE001 - only what is the caller's comes out of it
                self._crashed(error)
            else:
                if warning is not None:
                    self.warnings.append(warning)

    def _hand_out(self, event: Event) -> None:
        if self._ring is not None:
            self._ring.put(event)
        for subscription in self._subscriptions:
            subscription.put(event)

    def log(self, event: LogLine | ToolLog, data: object = None, *, step: int = 0) -> None:
        """Write a log line where the engine logs; the event itself is shown by ``emit``."""
        seat = self._seats.get(event.path) or Seat("", "")
        if KNOWN.suspicious(f"{event.message} {data!r}"):
            event, data = KNOWN.frozen(event), KNOWN.value(plain(data))
        context = {"run_id": seat.run_id, "agent_id": seat.agent_id, "path": event.path, "step": step}
        try:
            write(self._logger, event.level, event.message, context, data)
        except Exception as error:  # noqa: BLE001
            LOGGER.error("the logger of the engine raised", exc_info=error)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._crashed(error)

    def _crashed(self, error: BaseException) -> None:
        self.crash = self.crash or error
        if self.on_crash is not None:
            self.on_crash(error)


class Subscription:
    """
    One reader of a stream; ``events()`` iterates it once, in the run's own event loop.

    At most 10,000 events wait. A reader that falls behind gets deltas that belong together as one; when that is not enough,
    deltas go first, after that the newest, and the reader is told with ``EventsDropped``. The last event always fits.
    """

    def __init__(self, hub: Hub, limit: int = MAX_QUEUE) -> None:
        self._hub = hub
        self._limit = limit
        self._queue: deque[Event] = deque()
        self._deltas = 0
        self._dropped = 0
        self._reason = "buffer"
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Event) -> None:
        """Keep *event* for the reader, or count it as dropped."""
        if len(self._queue) > self._limit // BEHIND and self._joined(event):
            return
        if len(self._queue) < self._limit or self._make_room(event):
            self._queue.append(event)
            self._deltas += isinstance(event, DELTAS)
            self._wake()

    def miss(self, count: int, reason: str) -> None:
        """Tell the reader first that it misses *count* events, or those of another epoch."""
        self._dropped, self._reason = count, reason

    def end(self) -> None:
        """Let the reader stop after what waits."""
        self._ended = True
        self._hub.leave(self)
        self._wake()

    def close(self) -> None:
        """Stop reading and forget what waits."""
        self._queue.clear()
        self._deltas = 0
        self.end()

    async def events(self) -> AsyncGenerator[Event, None]:
        """Give every event, then stop."""
        try:
            while True:
                if self._dropped or self._reason == "epoch":
                    yield self._told_of_loss()
                if self._queue:
                    event = self._queue.popleft()
                    self._deltas -= isinstance(event, DELTAS)
                    yield event
                elif self._ended:
                    return
                else:
                    await self._wait()
        finally:
            self.close()

    def _told_of_loss(self) -> EventsDropped:
        event = EventsDropped(count=self._dropped, reason=self._reason, run_id=self._hub.run_id, epoch=self._hub.epoch)
        self._dropped, self._reason = 0, "buffer"
        return event

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _joined(self, event: Event) -> bool:
        """Append a delta to the last one that waits, if it goes on where that stops."""
        if not isinstance(event, DELTAS):
            return False
        last = self._queue[-1]
        if not isinstance(last, DELTAS) or len(last.text) + len(event.text) > MAX_JOINED:
            return False
        if last.path != event.path or not _goes_on(last, event):
            return False
        self._queue[-1] = attrs.evolve(event, text=last.text + event.text)
        return True

    def _make_room(self, event: Event) -> bool:
        """Drop deltas for anything else; return whether *event* may stay."""
        if isinstance(event, RunFinished):
            return True
        if self._deltas and not isinstance(event, DELTAS):
            self._queue = deque(e for e in self._queue if not isinstance(e, DELTAS))
            self._dropped += self._deltas
            self._deltas = 0
            return True
        self._dropped += 1
        return False
