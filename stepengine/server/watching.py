"""
What somebody who watches a run has of it, and what is still to be shown: of a run of this process, and of one of another.

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
from stepengine.journal.watching import FIRST_PAUSE_SECONDS, Watch, next_pause
from stepengine.runtime.effect_events import STOPPED
from stepengine.runtime.hub import StreamPlace, place_of
from stepengine.runtime.performer import child_path

if TYPE_CHECKING:
    from stepengine.journal.store import Journal

__all__ = ("Had", "Shared", "live_events")

Mark: TypeAlias = tuple[int, str]
"""The number and the type of the last event of a path."""
Key: TypeAlias = tuple[str, int, str]
TOLD = frozenset([row.cls.type for row in EVENTS if row.is_recorded])
"""What is told live and by the journal alike; see ``is_told``."""
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


class Had:
    """
    How far a reader has come.

    Args:
        place: The place of the last event in its stream; ``None`` for who has nothing.
        marks: The last event of each path that is still open, of those that every stream tells; ``None`` where that is not known.
        is_mixed: Whether it has events of another stream, too, so that the place does not say what it has of this one.
    """

    def __init__(self, place: StreamPlace | None, marks: Mapping[str, Mark] | None, *, is_mixed: bool = False) -> None:
        self.place = place
        self.marks: dict[str, Mark] | None = None if marks is None else dict(marks)
        self.is_mixed = is_mixed
        self._epoch = "" if place is None else place.epoch

    @classmethod
    def of(cls, after: str | None) -> Had:
        """
        Return what a client says by the id that it brings back.

        Raises:
            StepEngineError: when it is not an id of an event.
        """
        if after is None:
            return cls(None, {})
        place, tilde, told = after[: MAX_ID + 1].partition("~")
        if not tilde:
            return cls(place_of(place), None)
        is_mixed, told = told.startswith("+"), told.removeprefix("+")
        found = dict(map(_parse_mark, told.split(",", MOST_PATHS))) if told else {}
        if len(after) > MAX_ID or None in found:
            msg = f"after={after[:100]!r} is not an id of an event; one is such as 5d0c2a17-0"
            raise StepEngineError(msg)
        return cls(place_of(place), found, is_mixed=is_mixed)  # type: ignore[arg-type]  # `None` was looked for

    @property
    def own_id(self) -> str | None:
        """The id of the last event without what was added to it."""
        return None if self.place is None else f"{self.place.epoch}-{self.place.index}"

    def take(self, event: Event) -> str:
        """Note that the reader gets an event, and return the id that is sent with it; ``""`` for an event without one."""
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
        if event.type == "agent_finished" and is_told(event):
            below = child_path(event.path, event.seq)
            for path in [one for one in marks if one == below or one.startswith(f"{below}.")]:
                del marks[path]
        if _moves(event, marks.get(event.path)):
            marks[event.path] = event.seq, event.type
        if len(marks) > MOST_PATHS:
            return event.id
        return f"{event.id}~{'+' if self.is_mixed else ''}{','.join([f'{path}:{seq}:{kind}' for path, (seq, kind) in marks.items()])}"


def is_told(event: Event) -> bool:
    """Return whether the other stream of the run tells an event, too: none tells what a stop, or a pause, cut off."""
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


def _moves(event: Event, mark: Mark | None) -> bool:
    if not is_told(event):
        return False
    # What is begun a second time after a restart stands in the journal where it was begun first.
    return mark is None or event.seq >= mark[0] or not event.type.endswith("_started")


def _parse_mark(told: str) -> tuple[str, Mark] | tuple[None, None]:
    path, _, mark = told.partition(":")
    number, _, kind = mark.partition(":")
    digits = number.removeprefix("-")
    is_path = not path or all(part.isascii() and part.isdigit() for part in path.split("."))
    if not (is_path and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS and kind in TOLD):
        return None, None
    return path, (int(number), kind)


class JournalSoFar:
    """
    What stands in a journal, for a reader who has some of it.

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
        self.new = [event for number, event in enumerate(events) if not self._is_had(number, event)]

    def _is_had(self, number: int, event: Event) -> bool:
        mark = self._marks.get(event.path)
        if mark is not None and event.path not in self._at:
            return is_before(mark, event)
        return number <= self._limit(event.path)

    def _limit(self, path: str) -> float:
        """Return up to which event the reader has those of a path; if its run has ended, the parent's events say so."""
        if path not in self._limits:
            at: float
            if path in self._marks:
                at = self._at.get(path, float("inf"))
            elif path in self._ends and self._ends[path] <= self._limit(path.rpartition(".")[0]):
                at = float("inf")
            else:
                at = -1
            self._limits[path] = at
        return self._limits[path]

    @property
    def missing(self) -> dict[str, Mark]:
        """What the reader has, and the journal not yet, or not any more."""
        return {path: mark for path, mark in self._marks.items() if path not in self._at}


def is_before(mark: Mark, event: Event) -> bool:
    """Return whether a reader has an event whose path it knows further than the journal."""
    if event.type in ("run_finished", "run_failed") or getattr(event, "resumed", False):
        return mark == (event.seq, event.type)
    return event.seq <= mark[0]


def key_of(event: Event) -> Key:
    """Return what an event has in common with the same one in the other stream."""
    return event.path, event.seq, event.type


class Following:
    """
    The events of a journal that another process writes, followed once for all who watch them here.

    Args:
        journal: The journal.

    Attributes:
        readers: How many read.
        since: When the last of them went.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._watch = Watch(journal)
        self._events: list[Event] = []
        self._pieces: list[tuple[int, int]] = []
        self._start = self._lost = self._turn = self._kept = 0
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._looking = asyncio.Lock()
        self._reading: asyncio.Task[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self.readers = 0
        self.since = asyncio.get_running_loop().time()

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, by what was read."""
        return self._watch.is_over(stay=True)

    @property
    def has_failed(self) -> bool:
        """Whether the journal could not be read."""
        return self._error is not None

    def close(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    async def events(self, had: Had, *, stay: bool) -> AsyncGenerator[Event, None]:
        """
        Give what a reader has not got, and what comes.

        Args:
            had: What it has.
            stay: See ``follow_events``.
        """
        self.readers += 1
        try:
            async for event in self._give_events(had, stay=stay):
                yield event
        finally:
            self._remove_reader()

    async def past(self, had: Had) -> tuple[JournalSoFar, Sequence[Event], int]:
        """
        Return what stands in the journal now for a reader of another stream.

        Returns:
            It, the events among which it was looked for, and the place of the last of them.
        """
        self.readers += 1
        try:
            await self._caught_up()
            events, start, end = [*self._events], self._start, self._end
            if start and had.marks:
                # Whoever comes back was here a moment ago, and has all that is older.
                past = await asyncio.to_thread(JournalSoFar, events, had.marks)
                if not past.missing:
                    return past, events, end - 1
            events = [*(await self._older(0, start)), *events]
            return await asyncio.to_thread(JournalSoFar, events, had.marks or {}), events, end - 1
        finally:
            self._remove_reader()

    def _remove_reader(self) -> None:
        self.readers -= 1
        self.since = asyncio.get_running_loop().time()

    async def _give_events(self, had: Had, *, stay: bool) -> AsyncGenerator[Event, None]:
        await self._caught_up()
        if self._task is None:
            self._task = asyncio.create_task(self._follow())
        turn = self._turn
        waiting, place, marks = await self._begin_reading(had)
        while True:
            for event in waiting:
                yield event
            if turn != self._turn:
                turn, marks, place = self._turn, {}, min(place, self._kept - 1)
                yield EventsDropped(count=self._lost, reason="journal")
            news, found = self._news, await self._behind(place)
            waiting = [event for event in found if _is_new(marks, event)]
            place += len(found)
            if waiting or turn != self._turn or place + 1 < self._end:
                continue
            if self._has_ended(stay=stay):
                return
            await news.wait()

    def _has_ended(self, *, stay: bool) -> bool:
        if self._error is not None:
            raise self._error
        return self._watch.is_over(stay=stay)

    async def _begin_reading(self, had: Had) -> tuple[Sequence[Event], int, dict[str, Mark]]:
        """Return what a reader gets first, behind which place it goes on, and what it has that is not there yet."""
        if had.place is None:
            return (), -1, {}
        if had.place.epoch == self._epoch and not (had.is_mixed and had.marks):
            place = min(had.place.index, self._end - 1)
            # A machine that lost power keeps what was synced.
            missing = had.place.index - place
            return [EventsDropped(count=missing, reason="journal")] if missing else (), place, {}
        if had.marks is None:
            return [EventsDropped(count=0, reason="epoch")], -1, {}
        past, _, place = await self.past(had)
        return past.new, place, past.missing

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        try:
            while True:
                async with self._looking:
                    has_news = await self._look()
                if not self._watch.is_behind:
                    pause = next_pause(pause, has_news=has_news)
                    await asyncio.sleep(pause)
        except Exception as error:  # noqa: BLE001 - whoever reads is told
            self._error = error
            self._news.set()

    async def _caught_up(self) -> None:
        """Take in all that is there."""
        if self._error is not None:
            raise self._error
        async with self._looking:
            await self._look()
            while self._watch.is_behind:
                await self._look()

    async def _look(self) -> bool:
        """Take in what is new, and return whether there is any; asked for by who holds the lock."""
        if self._reading is not None:
            # Who asked for it has gone, but its thread reads on: with two at once records would come twice, or be lost.
            await self._taken(self._reading)
        watch = self._watch
        if not (watch.is_behind or watch.follower.has_changed()):
            return False
        self._reading = asyncio.create_task(self._read_on())
        self._reading.add_done_callback(_take_error)
        return await self._taken(self._reading)

    async def _taken(self, reading: asyncio.Task[bool]) -> bool:
        try:
            return await asyncio.shield(reading)
        finally:
            if reading.done():
                self._reading = None

    async def _read_on(self) -> bool:
        watch = self._watch
        before = watch.follower.end
        found = await asyncio.to_thread(watch.look)
        for event in found:
            if isinstance(event, EventsDropped):
                self._take_back(event.count)
        kept = [event for event in found if not isinstance(event, EventsDropped)]
        self._events += kept
        self._pieces.append((len(kept), max(0, watch.follower.end - before)))
        self._forget()
        news, self._news = self._news, asyncio.Event()
        news.set()
        return bool(found)

    def _forget(self) -> None:
        size = sum([size for _, size in self._pieces])
        while len(self._pieces) > 1 and (len(self._events) > MOST_KEPT or size > MAX_BYTES):
            count, bytes_ = self._pieces.pop(0)
            del self._events[:count]
            self._start, size = self._start + count, size - bytes_

    def _take_back(self, count: int) -> None:
        """Forget events that no longer hold; readers that have them are told."""
        self._kept = self._end - count
        self._events, self._pieces, self._start = [], [], self._kept
        self._lost, self._turn = count, self._turn + 1

    @property
    def _end(self) -> int:
        return self._start + len(self._events)

    @property
    def _epoch(self) -> str:
        return self._events[-1].epoch if self._events else ""

    async def _behind(self, place: int) -> Sequence[Event]:
        if place + 1 >= self._start:
            return self._events[place + 1 - self._start :]
        return await self._older(place + 1, self._start)

    async def _older(self, first: int, end: int) -> Sequence[Event]:
        """Return events that are not kept, by reading the journal once more."""
        return await asyncio.to_thread(_read, self._journal, first, end) if first < end else ()


def _take_error(task: asyncio.Task[bool]) -> None:
    """Take note of an error that perhaps nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _read(journal: Journal, first: int, end: int) -> list[Event]:
    watch, found = Watch(journal), list[Event]()
    while watch.is_behind and (not found or found[-1].index + 1 < end):
        found += [event for event in watch.look() if event.id and event.index >= first]
    return [event for event in found if event.index < end]


def _is_new(marks: dict[str, Mark], event: Event) -> bool:
    """Return whether a reader has not got an event from the process that has the run, which was ahead of its journal."""
    mark = marks.get(event.path)
    if mark is None:
        return True
    is_it = mark == (event.seq, event.type)
    is_had = is_it or is_before(mark, event)
    if is_it or not is_had:
        del marks[event.path]
    return not is_had


class Shared:
    """
    What is followed in this process, each journal once.

    Args:
        journal: Gives the journal of a run.
    """

    def __init__(self, journal: Callable[[str], Journal]) -> None:
        self._journal = journal
        self._known: OrderedDict[str, Following] = OrderedDict()

    def following(self, run: str) -> Following:
        """Return what follows the journal of a run."""
        found = self._known.get(run)
        if found is None or found.has_failed:
            found = self._known[run] = Following(self._journal(run))
        self._known.move_to_end(run)
        return found

    def drop_idle(self) -> None:
        """Let go of what nobody has watched for a while."""
        now = asyncio.get_running_loop().time()
        idle = [run for run, one in self._known.items() if not one.readers]
        for number, run in enumerate(reversed(idle)):
            if number >= MOST_IDLE or now - self._known[run].since > IDLE_SECONDS:
                self._known.pop(run).close()

    def close(self) -> None:
        """Follow nothing any more."""
        for one in self._known.values():
            one.close()
        self._known.clear()


async def live_events(
    events: AsyncGenerator[Event, None], following: Following, had: Had
) -> AsyncGenerator[Event, None]:
    """
    Give what a reader has not got of a run that goes on in this process: what is recorded, then what is shown live.

    Args:
        events: What is shown live, behind what the reader has of that.
        following: What is recorded.
        had: What the reader has.
    """
    try:
        if had.place is not None and had.marks is None:
            yield EventsDropped(count=0, reason="epoch")
        past, told, _ = await following.past(had)
        for event in past.new:
            yield event
        if following.is_over:
            return
        # What is told of as its end is one behind which this process went on.
        keys = {key_of(event) for event in told[-KEYS_KEPT:] if not isinstance(event, RunFinished)}
        del told, past
        async for event in events:
            if not is_told(event) or key_of(event) not in keys:
                yield event
    finally:
        await events.aclose()
