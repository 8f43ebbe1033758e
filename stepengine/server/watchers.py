"""
Watchers of runs, in this process or another one: the events that each has received, and those still to send.

A run is told in two ways: live by the process that has it, with pieces of texts and under an epoch of that process; and by its
journal, to everybody alike. What both tell has the same path, number and type. So an event's id as a client gets it says, beside
its place in its stream, how far the client has come on each path of the tree that is still open: ``5d0c2a17-17~:4:tool_finished``.
Whoever brings it to another server, or to the same one after a restart, gets what comes behind that, and nothing twice.
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
"""The number and the type of the last event of a path."""
Key: TypeAlias = tuple[str, int, str]
TOLD = frozenset([row.cls.type for row in EVENTS if row.is_recorded])
"""What is told live and by the journal alike; see ``is_in_both_streams``."""
STOPS = frozenset({"cancelled", "crashed", "diverged", "limit", "shutdown", "suspended"})
MOST_PATHS = 16
"""Open paths that an id names. Of a wider tree the id says its place alone, and another server begins anew and says so."""
MAX_ID = 2_000
MAX_DIGITS = 18
KEYS_KEPT = 10_000
MOST_KEPT = 10_000
MAX_BYTES = 4 * 1024 * 1024
"""Of a journal as long as that, the events are kept in memory for everybody who follows it; older ones are read again."""
IDLE_SECONDS = 30.0
MOST_IDLE = 32
"""Journals that nobody follows any more, and somebody may come back to."""


class ReaderPosition:
    """
    The position of a reader in the events of a run.

    Args:
        place: The place of the last event in its stream; ``None`` for who has nothing.
        marks: The last event of each path that is still open, of those that every stream tells; ``None`` where that is not known.
        is_mixed: Whether it has events of another stream, too, so that the place does not say what it has of this one.
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
        Parse the id of the last event that a client received.

        Raises:
            StepEngineError: when it is not an id of an event.
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
        """Record that the reader receives an event, and return the id to send with it; ``""`` for an event without an id."""
        if isinstance(event, EventsDropped):
            # What it missed is not known, unless it begins anew.
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
        if _advances_mark(event, marks.get(event.path)):
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


def _advances_mark(event: Event, mark: Mark | None) -> bool:
    """Return whether an event replaces the mark of its path: both streams have it, and it is not an earlier start."""
    if not is_in_both_streams(event):
        return False
    # What is begun a second time after a restart stands in the journal where it was begun first.
    return mark is None or event.seq >= mark[0] or not event.type.endswith("_started")


def _parse_mark(text: str) -> tuple[str, Mark] | tuple[None, None]:
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
        events: All of it.
        marks: How far the reader has come.
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

    def _has_received(self, number: int, event: Event) -> bool:
        mark = self._marks.get(event.path)
        if mark is not None and event.path not in self._at:
            return has_mark_passed(mark, event)
        return number <= self._last_received_number(event.path)

    def _last_received_number(self, path: str) -> float:
        """Return the number of the last event of a path that the reader has; -1 for none, infinity for all."""
        if path not in self._limits:
            at: float
            if path in self._marks:
                at = self._at.get(path, float("inf"))
            elif path in self._ends and self._ends[path] <= self._last_received_number(path.rpartition(".")[0]):
                at = float("inf")
            else:
                at = -1
            self._limits[path] = at
        return self._limits[path]

    @property
    def missing_marks(self) -> dict[str, Mark]:
        """The marks, by path, of events that the reader has and the journal does not."""
        return {path: mark for path, mark in self._marks.items() if path not in self._at}


def has_mark_passed(mark: Mark, event: Event) -> bool:
    """Return whether the reader already has an event: its mark for the event's path is there or later."""
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
        readers: How many read.
        since: When the last of them went.
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

    async def events(self, had: ReaderPosition, *, stay: bool) -> AsyncGenerator[Event, None]:
        """
        Yield the events that a reader lacks, and with *stay* new ones as they are written.

        Args:
            had: What it has.
            stay: See ``follow_events``.
        """
        self.readers += 1
        try:
            async for event in self._stream_until_end(had, stay=stay):
                yield event
        finally:
            self._remove_reader()

    async def read_unread_events(self, had: ReaderPosition) -> tuple[UnreadEvents, Sequence[Event], int]:
        """
        Return the recorded events that a reader of another stream lacks, all events compared, and the place of the last one.

        Returns:
            It, the events among which it was looked for, and the place of the last of them.
        """
        self.readers += 1
        try:
            await self._read_remaining_records()
            events, start, end = [*self._events], self._start, self._end_index
            if start and had.marks:
                # Whoever comes back was here a moment ago, and has all that is older.
                past = await asyncio.to_thread(UnreadEvents, events, had.marks)
                if not past.missing_marks:
                    return past, events, end - 1
            events = [*(await self._reread_events(0, start)), *events]
            return await asyncio.to_thread(UnreadEvents, events, had.marks or {}), events, end - 1
        finally:
            self._remove_reader()

    def _remove_reader(self) -> None:
        """Count one reader less and store the time; without readers, a closed stream stops reading."""
        self.readers -= 1
        if self._is_closed and not self.readers:
            self.close()
        self.since = asyncio.get_running_loop().time()

    async def _stream_until_end(self, had: ReaderPosition, *, stay: bool) -> AsyncGenerator[Event, None]:
        await self._read_remaining_records()
        if self._task is None:
            self._task = asyncio.create_task(self._poll_journal_forever())
        turn = self._turn
        waiting, place, marks = await self._find_first_events(had)
        while True:
            for event in waiting:
                yield event
            if turn != self._turn:
                turn, marks, place = self._turn, {}, min(place, self._kept - 1)
                yield EventsDropped(count=self._lost, reason="journal")
            news, found = self._news, await self._get_events_after(place)
            waiting = [event for event in found if _is_new_and_drop_mark(marks, event)]
            place += len(found)
            if waiting or turn != self._turn or place + 1 < self._end_index:
                continue
            if self._has_ended_or_raise(stay=stay):
                return
            await news.wait()

    def _has_ended_or_raise(self, *, stay: bool) -> bool:
        """Return whether no more events follow; raise the error if the journal could not be read."""
        if self._error is not None:
            raise self._error
        return self._watch.is_over(stay=stay)

    async def _find_first_events(self, had: ReaderPosition) -> tuple[Sequence[Event], int, dict[str, Mark]]:
        """Return the first events for a reader, its position, and its marks that the journal lacks."""
        if had.place is None:
            return (), -1, {}
        if had.place.epoch == self._epoch and not (had.is_mixed and had.marks):
            place = min(had.place.index, self._end_index - 1)
            # A machine that lost power keeps what was synced.
            missing = had.place.index - place
            return [EventsDropped(count=missing, reason="journal")] if missing else (), place, {}
        if had.marks is None:
            return [EventsDropped(count=0, reason="epoch")], -1, {}
        past, _, place = await self.read_unread_events(had)
        return past.new, place, past.missing_marks

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _poll_journal_forever(self) -> None:
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
        """Read the records of the journal that were not read yet."""
        if self._error is not None:
            raise self._error
        async with self._looking:
            await self._read_new_records()
            while self._watch.is_behind:
                await self._read_new_records()

    async def _read_new_records(self) -> bool:
        """Read new records and return whether there were any; the caller holds the lock."""
        if self._reading is not None:
            # Who asked for it has gone, but its thread reads on: with two at once records would come twice, or be lost.
            await self._await_shared_reading(self._reading)
        watch = self._watch
        if not (watch.is_behind or watch.follower.may_have_new_records()):
            return False
        self._reading = asyncio.create_task(self._read_and_append_events())
        self._reading.add_done_callback(_retrieve_error)
        return await self._await_shared_reading(self._reading)

    async def _await_shared_reading(self, reading: asyncio.Task[bool]) -> bool:
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
        return self._start + len(self._events)

    @property
    def _epoch(self) -> str:
        return self._events[-1].epoch if self._events else ""

    async def _get_events_after(self, place: int) -> Sequence[Event]:
        """Return the events after a place; events no longer in memory are read again from the journal."""
        if place + 1 >= self._start:
            return self._events[place + 1 - self._start :]
        return await self._reread_events(place + 1, self._start)

    async def _reread_events(self, first: int, end: int) -> Sequence[Event]:
        """Return events that are no longer in memory, from another pass over the journal."""
        return await asyncio.to_thread(_read_events_in_range, self._journal, first, end) if first < end else ()


def _retrieve_error(task: asyncio.Task[bool]) -> None:
    """Retrieve the error of a task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _read_events_in_range(journal: Journal, first: int, end: int) -> list[Event]:
    watch, found = JournalWatch(journal), list[Event]()
    while watch.is_behind and (not found or found[-1].index + 1 < end):
        found += [event for event in watch.read_new_events() if event.id and event.index >= first]
    return [event for event in found if event.index < end]


def _is_new_and_drop_mark(marks: dict[str, Mark], event: Event) -> bool:
    """Return whether a reader lacks an event that it may have received from the process that executes the run."""
    mark = marks.get(event.path)
    if mark is None:
        return True
    is_it = mark == (event.seq, event.type)
    is_had = is_it or has_mark_passed(mark, event)
    if is_it or not is_had:
        del marks[event.path]
    return not is_had


class SharedJournals:
    """
    The followed journals of this process.

    Args:
        journal: Gives the journal of a run.
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
    events: AsyncGenerator[Event, None], following: FollowedEvents, had: ReaderPosition
) -> AsyncGenerator[Event, None]:
    """
    Yield the events that a reader of an executing run lacks: recorded ones first, then live ones.

    Args:
        events: What is shown live, behind what the reader has of that.
        following: What is recorded.
        had: What the reader has.
    """
    try:
        if had.place is not None and had.marks is None:
            yield EventsDropped(count=0, reason="epoch")
        past, told, _ = await following.read_unread_events(had)
        for event in past.new:
            yield event
        if following.is_over:
            return
        # What is told of as its end is one behind which this process went on.
        keys = {make_event_key(event) for event in told[-KEYS_KEPT:] if not isinstance(event, RunFinished)}
        del told, past
        async for event in events:
            if not is_in_both_streams(event) or make_event_key(event) not in keys:
                yield event
    finally:
        await events.aclose()
