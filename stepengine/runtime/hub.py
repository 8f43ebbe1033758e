"""
The one ordered event stream of a run tree, and who is shown it (requirements N7-N10, O4, O5).

Events reach observers and subscribers in the order in which they are emitted; each gets its ``index`` here. Nobody who
watches can change, stop or slow a run: observers that raise are dropped, slow subscribers lose deltas first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import attrs

from stepengine.data.codec import plain
from stepengine.data.events import (
    Event,
    EventsDropped,
    LogLine,
    ModelStarted,
    PhaseChanged,
    RunFinished,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolLog,
)
from stepengine.data.run import RunPhase
from stepengine.errors import StepEngineError
from stepengine.machine.signals import is_callers
from stepengine.redaction import GIVEN, KNOWN, Trickle
from stepengine.runtime.logs import LOGGER, write

__all__ = ("Hub", "Observer", "ObserverLike", "Subscription", "Watcher")

MAX_QUEUE = 10_000
MAX_SUBSCRIBERS = 100
MAX_OBSERVER_ERRORS = 10
MAX_JOINED = 4_096
"""Characters that deltas are joined to at most, so that joining many stays cheap."""
BEHIND = 10
"""A reader has fallen behind when a tenth of what may wait does."""
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


@attrs.define
class _Seat:
    """What log lines of one run carry."""

    run_id: str
    agent_id: str


class Curtain:
    """
    Keeps secrets that the process knows out of events; the run itself has them (reliability R11, SC07).

    ``RunFinished`` passes as it is: its result is what the caller of the run gets.
    """

    def __init__(self) -> None:
        self._flows: dict[str, tuple[Delta, Trickle]] = {}
        self._offer: tuple[Any, Any] = ((), ())

    def through(self, event: Event) -> Iterator[Event]:
        """Give what may be shown in place of *event*: what deltas held back of their run's path, then the event."""
        if not isinstance(event, DELTAS):
            yield from self._ended(event.path)
            yield self._started(event) if type(event) is ModelStarted else KNOWN.frozen(event)
            return
        last, trickle = self._flows.get(event.path, (event, None))
        if trickle is None or not _goes_on(last, event):
            yield from self._ended(event.path)
            trickle = Trickle(KNOWN)
        self._flows[event.path] = event, trickle
        text = trickle.feed(event.text)
        if text:
            yield event if text == event.text else attrs.evolve(event, text=text)

    def rest(self) -> Iterator[Event]:
        """Give what is still held back."""
        for path in list(self._flows):
            yield from self._ended(path)

    def _ended(self, path: str) -> Iterator[Event]:
        flow = self._flows.pop(path, None)
        if flow is not None and (text := flow[1].rest()):
            yield attrs.evolve(flow[0], text=text)

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


def _goes_on(a: Delta, b: Delta) -> bool:
    tools = getattr(a, "tool_name", None), getattr(b, "tool_name", None)
    return type(a) is type(b) and a.seq == b.seq and tools[0] == tools[1]


class Hub:
    """
    The event stream of one run tree.

    Args:
        watchers: Who is shown every event.
        logger: Where log lines go beside the stream; see ``stepengine.runtime.logs.write``.
        shows: Says which events are news; the others are neither shown nor logged. By default all are.

    Attributes:
        shows: As given.
        watched: Whether anybody is shown events; while nobody is, they need not be made.
        followed: Whether somebody may ask for ``phase``, which then is kept up to date.
        phase: What the root run is doing (requirements N11).
        warnings: Observers that were dropped.
        crash: What an observer or the logger raised for the caller of the run, the first of it.
        on_crash: Told of it at once, while the run can still be ended because of it.
    """

    def __init__(
        self, watchers: Iterable[Watcher] = (), logger: Any = LOGGER, *, shows: Callable[[Event], bool] | None = None
    ) -> None:
        self._watchers = tuple(watchers)
        self._subscriptions: list[Subscription] = []
        self._logger = logger
        self.shows = shows
        self._index = 0
        self._seats: dict[str, _Seat] = {}
        self._last: RunFinished | None = None
        self._curtain = Curtain()
        self.watched = bool(self._watchers)
        self.followed = False
        self.phase = RunPhase.IDLE
        self.warnings: list[str] = []
        self.crash: BaseException | None = None
        self.on_crash: Callable[[BaseException], Any] | None = None

    def is_watched(self) -> bool:
        """Return whether the events of steps and phases have to be made at all."""
        return self.watched or self.followed

    @property
    def subscribers(self) -> int:
        """How many subscriptions are open."""
        return len(self._subscriptions)

    def seat(self, path: str, run_id: str, agent_id: str) -> None:
        """Say which run is at *path*, for its log lines."""
        self._seats[path] = _Seat(run_id, agent_id)

    def unseat(self, path: str) -> None:
        """Forget the run at *path*, which has ended."""
        self._seats.pop(path, None)

    def emit(self, event: Event) -> None:
        """Give *event* its index and show it, if it is news."""
        if self.shows is not None and not self.shows(event):
            return
        if not GIVEN.names:
            self._pass_on(event)
            return
        for clean in self._curtain.through(event):
            self._pass_on(clean)

    def _pass_on(self, event: Event) -> None:
        tap = TAPS.get(type(event))
        if tap is not None:
            tap(self, event)
        if self.watched:
            self._show(event)

    def finish(self, event: RunFinished) -> None:
        """Show the last event and end all subscriptions; those that come later get it too."""
        if self._last is not None:
            return
        for clean in self._curtain.rest():
            self._pass_on(clean)
        self._last = event
        self._show(event)
        self.end()

    def end(self) -> None:
        """End all subscriptions."""
        for subscription in list(self._subscriptions):
            subscription.end()

    def subscribe(self) -> Subscription:
        """
        Return a subscription to every event from now on.

        Raises:
            StepEngineError: when the run has 100 subscribers already (reliability RS10).
        """
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            msg = f"this run has {MAX_SUBSCRIBERS} subscribers already; close one, or pass events on from one of them"
            raise StepEngineError(msg)
        subscription = Subscription(self)
        if self._last is not None:
            subscription.put(self._last)
            subscription.end()
        else:
            self._subscriptions.append(subscription)
            self.watched = True
        return subscription

    def leave(self, subscription: Subscription) -> None:
        """Forget a subscription."""
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self.watched = bool(self._watchers or self._subscriptions)

    def _show(self, event: Event) -> None:
        # The event was made for this moment and nobody has seen it yet, so it is stamped and not copied.
        object.__setattr__(event, "index", self._index)
        self._index += 1
        for watcher in self._watchers:
            try:
                warning = watcher.show(event)
            except BaseException as error:  # noqa: BLE001 - only what is the caller's comes out of it
                self._crashed(error)
            else:
                if warning is not None:
                    self.warnings.append(warning)
        for subscription in self._subscriptions:
            subscription.put(event)

    def log(self, event: LogLine | ToolLog, data: Any = None, *, step: int = 0) -> None:
        """Write a log line where the engine logs; the event itself is shown by ``emit``."""
        seat = self._seats.get(event.path) or _Seat("", "")
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

    def _log_line(self, event: LogLine) -> None:
        self.log(event, event.data, step=event.step)

    def _phase_changed(self, event: PhaseChanged) -> None:
        if not event.path:
            self.phase = event.phase


TAPS: Mapping[type[Event], Callable[[Hub, Any], None]] = {
    LogLine: Hub._log_line,  # noqa: SLF001
    PhaseChanged: Hub._phase_changed,  # noqa: SLF001
}
"""What a hub does with some events beside showing them; unbound, so that a hub does not refer to itself."""


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
                if self._dropped:
                    dropped, self._dropped = self._dropped, 0
                    yield EventsDropped(count=dropped)
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
        whole = attrs.evolve(last, text=last.text + event.text)
        if attrs.evolve(event, text=whole.text) != whole:
            return False
        self._queue[-1] = whole
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
