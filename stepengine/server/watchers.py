"""
Watchers of runs, in this process or another one: the events that each has received, and those still to send.

A run has two event streams: the live one of the process that executes it, with pieces of texts and an epoch of that process, and the
one of its journal, which is the same for every reader. An event in both has the same path, number and type. So the id that a client
gets has the position in its stream and the last event of each open path of the run tree: ``5d0c2a17-17~:4:tool_finished``. A client
that reconnects with it, to any server, gets the events after these, and no event twice.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from stepengine.data.events import (
    EVENTS,
    AgentFinished,
    Event,
    EventsDropped,
    ModelFinished,
    PerformFinished,
    RunFinished,
    StepFinished,
    ToolFinished,
    WaitFinished,
)
from stepengine.data.state import RunStatus
from stepengine.errors import StepEngineError
from stepengine.journal.event_stream import FIRST_PAUSE_SECONDS, JournalWatch, compute_next_pause
from stepengine.runtime.effect_events import STOPPED
from stepengine.runtime.hub import StreamPosition, parse_event_id
from stepengine.runtime.performer import child_path

if TYPE_CHECKING:
    from stepengine.journal.store import Journal

Mark: TypeAlias = tuple[int, str]
"""The number and the type of the last event of a path that a reader received."""
Key: TypeAlias = tuple[str, int, str]
TOLD = frozenset([row.cls.type for row in EVENTS if row.is_recorded])
"""The types of events in both streams; see ``is_in_both_streams``."""
STOPS = frozenset({"cancelled", "crashed", "diverged", "limit", "shutdown", "suspended"})
MOST_PATHS = 16
"""The most open paths in an id. For a wider tree the id has only the position, and another server starts again from the first event."""
MAX_ID = 2_000
MAX_DIGITS = 18
KEYS_KEPT = 10_000
MOST_KEPT = 10_000
MAX_BYTES = 4 * 1024 * 1024
"""The most bytes of a journal whose events stay in memory for all readers; older events are read again."""
IDLE_SECONDS = 30.0
MOST_IDLE = 32
"""The most journals without readers that stay in memory for readers that reconnect."""


class ReaderPosition:
    """
    The position of a reader in the events of a run.

    Args:
        place: The position of the last event in its stream; ``None`` if the reader has no events.
        marks: The last event, of those in both streams, of each open path; ``None`` if they are unknown.
        is_mixed: Whether the reader has events of both streams, so that *place* alone is not its position.
    """

    def __init__(
        self, place: StreamPosition | None, marks: Mapping[str, Mark] | None, *, is_mixed: bool = False
    ) -> None:
        self.place = place
        self.marks: dict[str, Mark] | None = None if marks is None else dict(marks)
        self.is_mixed = is_mixed
        self._epoch = "" if place is None else place.epoch

    @classmethod
    def parse(cls, after: str | None) -> ReaderPosition:
        """
        Return the position of a client from the id of the last event that it received; raise ``StepEngineError`` if it is invalid.

        Raises:
            StepEngineError: If *after* is not the id of an event.
        """
        if after is None:
            return cls(None, {})
        place, tilde, told = after[: MAX_ID + 1].partition("~")
        if not tilde:
            return cls(parse_event_id(place), None)
        is_mixed, told = told.startswith("+"), told.removeprefix("+")
        found = dict(map(_parse_mark, told.split(",", MOST_PATHS))) if told else {}
        if len(after) > MAX_ID or None in found:
            msg = f"after={after[:100]!r} is not the id of an event, such as 5d0c2a17-0"
            raise StepEngineError(msg)
        return cls(parse_event_id(place), found, is_mixed=is_mixed)  # type: ignore[arg-type]  # `None` was looked for

    @property
    def last_event_id(self) -> str | None:
        """The id of the last event that the reader received, without the positions of the other stream."""
        return None if self.place is None else f"{self.place.epoch}-{self.place.index}"

    def record_received_event(self, event: Event) -> str:
        """Update the position by an event that the reader receives, and return the id to send with the event; ``""`` for no id."""
        if isinstance(event, EventsDropped):
            # The missed events are unknown, unless the reader starts again.
            self.marks = {} if event.reason == "epoch" else None
            self.is_mixed, self._epoch = False, ""
            return ""
        self.is_mixed |= self._epoch not in ("", event.epoch)
        self._epoch = event.epoch
        marks = self.marks
        if marks is None or not event.id:
            return event.id
        if event.type == "agent_finished" and is_in_both_streams(event):
            below = child_path(event.path, event.seq)
            for path in [one for one in marks if one == below or one.startswith(f"{below}.")]:
                del marks[path]
        if _replaces_mark(event, marks.get(event.path)):
            marks[event.path] = event.seq, event.type
        if len(marks) > MOST_PATHS:
            return event.id
        return f"{event.id}~{'+' if self.is_mixed else ''}{','.join([f'{path}:{seq}:{kind}' for path, (seq, kind) in marks.items()])}"


def is_in_both_streams(event: Event) -> bool:
    """Return whether both the live stream and the journal have an event; events that a stop or pause interrupted are in one only."""
    match event:
        case ToolFinished():
            return event.result.status not in ("cancelled", "pending")
        case ModelFinished():
            return event.reply is not None or event.kind not in STOPS
        case PerformFinished():
            return event.error != STOPPED
        case WaitFinished():
            return event.is_over
        case AgentFinished() | StepFinished():
            return event.status is not RunStatus.SUSPENDED
        case RunFinished():
            return event.result.status is not RunStatus.SUSPENDED
        case _:
            return event.type in TOLD and not getattr(event, "resumed", False)


def _replaces_mark(event: Event, mark: Mark | None) -> bool:
    """Return whether an event replaces the mark of its path: both streams have it, and it is not an earlier start."""
    if not is_in_both_streams(event):
        return False
    # After a restart, an effect starts a second time; the journal has only its first start.
    return mark is None or event.seq >= mark[0] or not event.type.endswith("_started")


def _parse_mark(text: str) -> tuple[str, Mark] | tuple[None, None]:
    """Parse a mark ``path:seq:kind`` in the id of an event; return (``None``, ``None``) if it is invalid."""
    path, _, mark = text.partition(":")
    number, _, kind = mark.partition(":")
    digits = number.removeprefix("-")
    is_path = not path or all(part.isascii() and part.isdigit() for part in path.split("."))
    if not (is_path and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS and kind in TOLD):
        return None, None
    return path, (int(number), kind)


class UnreadEvents:
    """
    The recorded events of a run, for a reader that already has some of them.

    Args:
        events: All recorded events of the run.
        marks: The last event of each path that the reader received.
    """

    def __init__(self, events: Sequence[Event], marks: Mapping[str, Mark]) -> None:
        self._marks = marks
        self._at: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        for number, event in enumerate(events):
            if marks.get(event.path) == (event.seq, event.type):
                self._at.setdefault(event.path, number)
            if event.type == "agent_finished":
                self._ends.setdefault(child_path(event.path, event.seq), number)
        self._limits: dict[str, float] = {}
        self.new = [event for number, event in enumerate(events) if not self._has_received(number, event)]

    def _has_received(self, index: int, event: Event) -> bool:
        """Return whether the reader has received an event of the journal, by the marks of its path."""
        mark = self._marks.get(event.path)
        if mark is not None and event.path not in self._at:
            return is_already_received(mark, event)
        return index <= self._get_last_received_index(event.path)

    def _get_last_received_index(self, path: str) -> float:
        """Return the index of the last event of a path that the reader has; -1 for none, infinity for all."""
        if path not in self._limits:
            at: float
            if path in self._marks:
                at = self._at.get(path, float("inf"))
            elif path in self._ends and self._ends[path] <= self._get_last_received_index(path.rpartition(".")[0]):
                at = float("inf")
            else:
                at = -1
            self._limits[path] = at
        return self._limits[path]

    @property
    def missing_marks(self) -> dict[str, Mark]:
        """The marks, by path, of events that the reader has and the journal does not."""
        return {path: mark for path, mark in self._marks.items() if path not in self._at}


def is_already_received(mark: Mark, event: Event) -> bool:
    """Return whether the reader has received *event*: its *mark* for the path is at the event or after it."""
    if event.type in ("run_finished", "run_failed") or getattr(event, "resumed", False):
        return mark == (event.seq, event.type)
    return event.seq <= mark[0]


def make_event_key(event: Event) -> Key:
    """Return a key of an event that is the same in the live stream and the journal."""
    return event.path, event.seq, event.type


class FollowedEvents:
    """
    The events of a journal that another process writes, read once for all readers in this process.

    Args:
        journal: The journal.

    Attributes:
        readers: The number of current readers.
        since: When the last reader left, by the clock of the event loop.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._watch = JournalWatch(journal)
        self._events: list[Event] = []
        self._pieces: list[tuple[int, int]] = []
        self._start = self._lost = self._turn = self._kept = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._looking = asyncio.Lock()
        self._reading: asyncio.Task[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self.readers = 0
        self.since = asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, according to the records read so far."""
        return self._watch.is_over(stay=True)

    @property
    def has_failed(self) -> bool:
        """Whether the journal could not be read."""
        return self._error is not None

    def close(self) -> None:
        """Stop reading new records, until another reader starts. Readers that wait for events are not notified."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def events(self, position: ReaderPosition, *, wait_for_new: bool) -> AsyncGenerator[Event, None]:
        """
        Yield the events that a reader lacks, and with *wait_for_new* also new ones as they are written.

        Args:
            position: The position of the reader.
            wait_for_new: Whether the stream continues after the recorded events until the run ends, because a process executes it.
        """
        self.readers += 1
        try:
            async for event in self._stream_until_end(position, wait_for_new=wait_for_new):
                yield event
        finally:
            self._remove_reader()

    async def read_unread_events(self, position: ReaderPosition) -> tuple[UnreadEvents, Sequence[Event], int]:
        """
        Read all new records, and return (events that a reader of another stream lacks, all compared events, index of the last one).
        """
        self.readers += 1
        try:
            await self._read_remaining_records()
            events, start, end = [*self._events], self._start, self._end_index
            if start and position.marks:
                # A reader that reconnects has all older events.
                past = await asyncio.to_thread(UnreadEvents, events, position.marks)
                if not past.missing_marks:
                    return past, events, end - 1
            events = [*(await self._reread_events(0, start)), *events]
            return await asyncio.to_thread(UnreadEvents, events, position.marks or {}), events, end - 1
        finally:
            self._remove_reader()

    def _remove_reader(self) -> None:
        """Decrease the number of readers and store the time; a closed object without readers stops reading."""
        self.readers -= 1
        if self._is_closed and not self.readers:
            self.close()
        self.since = asyncio.get_running_loop().time()

    async def _stream_until_end(self, position: ReaderPosition, *, wait_for_new: bool) -> AsyncGenerator[Event, None]:
        """Yield the events that a reader lacks, then new ones, until the run is over or no longer executed."""
        await self._read_remaining_records()
        if self._task is None:
            self._task = asyncio.create_task(self._poll_journal_forever())
        turn = self._turn
        waiting, place, marks = await self._find_first_events(position)
        while True:
            for event in waiting:
                yield event
            if turn != self._turn:
                turn, marks, place = self._turn, {}, min(place, self._kept - 1)
                yield EventsDropped(count=self._lost, reason="journal")
            news, found = self._news, await self._get_events_after(place)
            waiting = [event for event in found if _test_if_new_and_update_marks(marks, event)]
            place += len(found)
            if waiting or turn != self._turn or place + 1 < self._end_index:
                continue
            if self._has_ended_or_raise(wait_for_new=wait_for_new):
                return
            await news.wait()

    def _has_ended_or_raise(self, *, wait_for_new: bool) -> bool:
        """Return whether no more events follow; raise the error if the journal could not be read."""
        if self._error is not None:
            raise self._error
        return not self._watch.is_behind and (not wait_for_new or self.is_over)

    async def _find_first_events(self, position: ReaderPosition) -> tuple[Sequence[Event], int, dict[str, Mark]]:
        """Return (first events for a reader, index of the last event it then has, its marks that the journal lacks)."""
        if position.place is None:
            return (), -1, {}
        if position.place.epoch == self._epoch and not (position.is_mixed and position.marks):
            place = min(position.place.index, self._end_index - 1)
            # A machine that lost power keeps what was synced.
            missing = position.place.index - place
            return [EventsDropped(count=missing, reason="journal")] if missing else (), place, {}
        if position.marks is None:
            return [EventsDropped(count=0, reason="epoch")], -1, {}
        past, _, place = await self.read_unread_events(position)
        return past.new, place, past.missing_marks

    # --- reading ------------------------------------------------------------------------------------------------------

    async def _poll_journal_forever(self) -> None:
        """Read new records of the journal in growing intervals; store an error for the readers, and notify them."""
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                async with self._looking:
                    has_news = await self._read_new_records()
                if not self._watch.is_behind:
                    pause = compute_next_pause(pause, has_news=has_news)
                    await asyncio.sleep(pause)
        except Exception as error:  # noqa: BLE001 - whoever reads is told
            self._error = error
            self._news.set()

    async def _read_remaining_records(self) -> None:
        """Read the journal up to its end; raise the stored error if an earlier read failed."""
        if self._error is not None:
            raise self._error
        async with self._looking:
            await self._read_new_records()
            while self._watch.is_behind:
                await self._read_new_records()

    async def _read_new_records(self) -> bool:
        """Read the next new records, and return whether they had events; the caller must hold the lock."""
        if self._reading is not None:
            # Its caller was cancelled, but its thread still reads: two reads at once would repeat or lose records.
            await self._wait_for_shared_read(self._reading)
        watch = self._watch
        if not (watch.is_behind or watch.follower.may_have_new_records()):
            return False
        self._reading = asyncio.create_task(self._read_and_append_events())
        self._reading.add_done_callback(_retrieve_error)
        return await self._wait_for_shared_read(self._reading)

    async def _wait_for_shared_read(self, reading: asyncio.Task[bool]) -> bool:
        """Wait for a read that continues if this caller is cancelled, and return whether it found events."""
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None

    async def _read_and_append_events(self) -> bool:
        """Read new events from the journal into memory, notify the readers, and return whether there were any."""
        watch = self._watch
        before = watch.follower.offset
        found = await asyncio.to_thread(watch.read_new_events)
        for event in found:
            if isinstance(event, EventsDropped):
                self._discard_lost_events(event.count)
        kept = [event for event in found if not isinstance(event, EventsDropped)]
        self._events += kept
        self._pieces.append((len(kept), max(0, watch.follower.offset - before)))
        self._drop_oldest_events()
        news, self._news = self._news, asyncio.Event()
        news.set()
        return bool(found)

    def _drop_oldest_events(self) -> None:
        """Remove the oldest events from memory while the limits of number or bytes are exceeded."""
        size = sum([size for _, size in self._pieces])
        while len(self._pieces) > 1 and (len(self._events) > MOST_KEPT or size > MAX_BYTES):
            count, bytes_ = self._pieces.pop(0)
            del self._events[:count]
            self._start, size = self._start + count, size - bytes_

    def _discard_lost_events(self, count: int) -> None:
        """Discard events that the journal no longer has; their readers are notified."""
        self._kept = self._end_index - count
        self._events, self._pieces, self._start = [], [], self._kept
        self._lost, self._turn = count, self._turn + 1

    @property
    def _end_index(self) -> int:
        """The index after the last event read from the journal."""
        return self._start + len(self._events)

    @property
    def _epoch(self) -> str:
        """The epoch of the last event; ``""`` without events."""
        return self._events[-1].epoch if self._events else ""

    async def _get_events_after(self, index: int) -> Sequence[Event]:
        """Return the events after a place; events no longer in memory are read again from the journal."""
        if index + 1 >= self._start:
            return self._events[index + 1 - self._start :]
        return await self._reread_events(index + 1, self._start)

    async def _reread_events(self, first: int, end: int) -> Sequence[Event]:
        """Return events that are no longer in memory, from another pass over the journal."""
        return await asyncio.to_thread(_read_events_in_range, self._journal, first, end) if first < end else ()


def _retrieve_error(task: asyncio.Task[bool]) -> None:
    """Retrieve the error of a task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _read_events_in_range(journal: Journal, first: int, end: int) -> list[Event]:
    """Read the events from index *first* to before *end* from a journal."""
    watch, found = JournalWatch(journal), list[Event]()
    while watch.is_behind and (not found or found[-1].index + 1 < end):
        found += [event for event in watch.read_new_events() if event.id and event.index >= first]
    return [event for event in found if event.index < end]


def _test_if_new_and_update_marks(marks: dict[str, Mark], event: Event) -> bool:
    """Return whether a reader lacks *event*, which it may have received live; remove its mark from *marks* when it is reached."""
    mark = marks.get(event.path)
    if mark is None:
        return True
    is_it = mark == (event.seq, event.type)
    is_had = is_it or is_already_received(mark, event)
    if is_it or not is_had:
        del marks[event.path]
    return not is_had


class SharedJournals:
    """
    The followed journals of this process.

    Args:
        journal: Returns the journal of a run by its id.
    """

    def __init__(self, journal: Callable[[str], Journal]) -> None:
        self._journal = journal
        self._known: OrderedDict[str, FollowedEvents] = OrderedDict()

    def get_or_create_followed_events(self, run: str) -> FollowedEvents:
        """Return the shared ``FollowedEvents`` of a run's journal; create one if there is none, or if it failed."""
        found = self._known.get(run)
        if found is None or found.has_failed:
            found = self._known[run] = FollowedEvents(self._journal(run))
        self._known.move_to_end(run)
        return found

    def stop_following_idle_runs(self) -> None:
        """Stop following the journals that no client has read for a while."""
        now = asyncio.get_running_loop().time()
        idle = [run for run, one in self._known.items() if not one.readers]
        for number, run in enumerate(reversed(idle)):
            if number >= MOST_IDLE or now - self._known[run].since > IDLE_SECONDS:
                self._known.pop(run).close()

    def close(self) -> None:
        """Stop following all journals. Their readers are not notified: the server ends its streams itself."""
        for one in self._known.values():
            one.close()
        self._known.clear()


async def stream_recorded_then_live_events(
    events: AsyncGenerator[Event, None], following: FollowedEvents, position: ReaderPosition
) -> AsyncGenerator[Event, None]:
    """
    Yield the events that a reader of an executing run lacks: recorded ones first, then live ones.

    Args:
        events: The live events after those that the reader has; closed at the end.
        following: The recorded events.
        position: The position of the reader.
    """
    try:
        if position.place is not None and position.marks is None:
            yield EventsDropped(count=0, reason="epoch")
        past, told, _ = await following.read_unread_events(position)
        for event in past.new:
            yield event
        if following.is_over:
            return
        # A recorded end is an earlier one, after which this process resumed the run.
        keys = {make_event_key(event) for event in told[-KEYS_KEPT:] if not isinstance(event, RunFinished)}
        del told, past
        async for event in events:
            if not is_in_both_streams(event) or make_event_key(event) not in keys:
                yield event
    finally:
        await events.aclose()
