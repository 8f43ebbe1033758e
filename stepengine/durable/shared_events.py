"""
``SharedEvents``: the events of a durable run, in one order and with the same ids for everybody who watches it in any process.

The agents are driven over what is recorded, as for ``followed``, and what that writes into a journal in memory gives the events. Of
effects that run at once each process finds the ends in an order of its own, so the order in which things are shown stands in the
database: who is the first to see something says where it comes, and all others show it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING

from stepengine.data.events import Event, EventsDropped
from stepengine.durable.database import DatabaseAway
from stepengine.durable.records import Archive, Playback, create_replayed_run, read_archive
from stepengine.durable.sessions import resolve_answered_run
from stepengine.errors import StepEngineError
from stepengine.journal.event_stream import EventProjection
from stepengine.journal.follower import Follower
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import Head, Input, Intent, Record, Result
from stepengine.journal.store import MemoryJournal
from stepengine.runtime.hub import parse_event_id

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.durable.operate import Operator
    from stepengine.engine.launcher import Launcher

FIRST_PAUSE_SECONDS = 0.05
"""Readers see news as fast as they read; a busy run is asked for twenty times in a second, whatever number of readers it has."""
LAST_PAUSE_SECONDS = 1.0
"""A run that is quiet for long costs one query in a second, and its next event comes a second late at most."""
PAUSE_FACTOR = 1.5
"""From the first pause to the longest one in eight looks, within about two seconds."""
MAX_LOOK_SECONDS = 5.0
"""A query takes milliseconds. A database that is away longer must not hold up a request for what is known already."""
SETTLE_SECONDS = 0.005
"""What the driver makes of news takes it a moment; what it makes later is found at the next look."""
BATCH_KEYS = 1_000
"""More events than a run makes between two looks; a run that is read late is placed in several statements of limited size."""
STUCK_LOOKS = 20
"""After so many looks what somebody else saw, and does not come here, is passed over: the run was moved to other code since."""
PLACED = "select keys from stepengine.served_events where run = %s and first >= %s order by first"
PLACE = "insert into stepengine.served_events (run, first, keys) values (%s, %s, %s) on conflict do nothing returning 1"


class SharedEvents:
    """
    The events of one run, for as many readers of this process as there are, from ``open`` to ``close``.

    Args:
        launcher: The engine's, with the agents of the run's release.
        operator: The client.
        run: A root run's id.
        tries: How many times the run went on after it had stopped: what was shown of its end does not hold any more then, so that
            the events are of another epoch.

    Attributes:
        events: What there is by now, by index.
        is_over: Whether nothing comes any more.
        is_resting: Whether nothing of the run goes on by itself, as it was last looked at.
    """

    def __init__(self, launcher: Launcher, operator: Operator, run: str, *, tries: int = 0) -> None:
        self.run = run
        self.tries = tries
        self.events: list[Event] = []
        self.is_over = self.is_resting = False
        self._is_caught_up = False
        self._error: StepEngineError | None = None
        self._launcher = launcher
        self._operator = operator
        self._changed = asyncio.Event()
        self._looks = self._begun = self._quiet = 0
        self._waiting = 0
        self._looked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._projection = EventProjection()
        self._here: dict[str, Record] = {}
        self._mine: list[str] = []
        self._order: deque[str] = deque()
        self._placed = 0
        self._last: list[Record] = []
        self._stuck = 0
        self._archive: Archive | None = None
        self._task = asyncio.get_running_loop().create_task(self._follow_until_end())

    async def close(self) -> None:
        """Stop following; readers get no more events."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def place(self, after: str | None) -> int:
        """
        Return the index after the event *after*; -1 if it is of another epoch.

        Raises:
            StepEngineError: when it is not an id of an event, or of none that was; why the run cannot be shown.
        """
        given = None if after is None else parse_event_id(after)
        while not (self._is_caught_up or self.is_over):
            await self._wait_for_change()
        if self._error is not None:
            raise self._error
        if given is None:
            return 0
        epoch = self.events[0].epoch if self.events else ""
        if given.epoch != epoch:
            return -1
        await self._wait_for_index(given.index)
        if given.index >= len(self.events):
            msg = f"after={after!r} names an event that was not yet; the newest one is {epoch}-{len(self.events) - 1}"
            raise StepEngineError(msg)
        return given.index + 1

    async def look(self) -> None:
        """Read the record once more now; an unreachable database is not waited for long."""
        begun = self._begun
        self._hurried.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_SECONDS):
                while self._looks <= begun and not self.is_over:
                    await self._looked.wait()

    async def _wait_for_index(self, index: int) -> None:
        """
        Wait until the event with *index* exists, or cannot come any more.

        Another process may have shown it already: this one looks at the run up to a second later.
        """
        begun = self._begun
        while index >= len(self.events) and not self.is_over:
            if self._quiet > begun:
                if not await self._operator.rows(PLACED, self.run, self._placed):
                    return
                begun = self._begun
            await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def read(self, place: int, *, patience: float) -> AsyncGenerator[Event, None]:
        """
        Yield the events from index *place* on, until the run ends or is suspended.

        Args:
            place: Where to begin.
            patience: Seconds to stay while nothing of the run goes on by itself.
        """
        index = max(0, place)
        if place < 0:
            first = self.events[0] if self.events else None
            yield EventsDropped(
                count=0, reason="epoch", run_id=first.run_id if first else "", epoch=first.epoch if first else ""
            )
        loop = asyncio.get_running_loop()
        rests_since: float | None = None
        while True:
            while index < len(self.events):
                event, index, rests_since = self.events[index], index + 1, None
                yield event
            if self.is_over:
                return
            if not self.is_resting:
                rests_since = None
            elif rests_since is None:
                rests_since = loop.time()
            if rests_since is not None and loop.time() - rests_since >= patience:
                return
            await self._wait_for_change(patience if rests_since is not None else None)

    async def _wait_for_change(self, seconds: float | None = None) -> None:
        """Wait until something has changed, or for some seconds."""
        changed = self._changed
        if seconds is None:
            await changed.wait()
        else:
            try:
                async with asyncio.timeout(seconds):
                    await changed.wait()
            except TimeoutError:
                return

    def _notify_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _follow_until_end(self) -> None:
        try:
            await self._replay_archive()
        except asyncio.CancelledError:
            raise
        except StepEngineError as error:
            self._error = error
        finally:
            self.is_over = True
            self._looked.set()
            self._notify_readers()

    async def _read_started_archive(self) -> Archive:
        """Wait until the run has started and return its record; for an answer, that of the answered run."""
        while True:
            try:
                archive = await read_archive(self._operator, self.run)
                while not archive.is_begun and not archive.runs[""].is_over:
                    self._is_caught_up = True
                    self._notify_readers()
                    await asyncio.sleep(LAST_PAUSE_SECONDS)
                    await archive.refresh(self._operator)
                answered = await resolve_answered_run(self._operator, self.run)
                if answered != self.run:
                    self.run, self.tries = answered, 0
                    archive = await read_archive(self._operator, answered)
            except DatabaseAway:
                await asyncio.sleep(LAST_PAUSE_SECONDS)
            else:
                return archive

    async def _replay_archive(self) -> None:
        archive = self._archive = await self._read_started_archive()
        journal = MemoryJournal()
        session = JournaledRun.record(journal, dict(archive.order.answers), seed=archive.order.seed)
        played = Playback(archive, session, self._wait_for_refresh)
        driving = asyncio.ensure_future(create_replayed_run(self._launcher, played).run())
        try:
            await self._collect_events(archive, Follower(journal), driving)
        finally:
            driving.cancel()
            await asyncio.wait((driving,))
        if played.fatal is not None:
            raise played.fatal

    async def _collect_events(self, archive: Archive, follower: Follower, driving: asyncio.Future[RunResult]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await asyncio.sleep(SETTLE_SECONDS)
            is_done = driving.done()
            try:
                has_news = await self._append_new_events(follower, is_last=is_done)
                if is_done and not self._mine and not self._order:
                    return
                if not is_done:
                    self._begun += 1
                    await archive.refresh(self._operator)
                    await self._update_suspended_state(has_news=has_news)
            except DatabaseAway:
                pause = LAST_PAUSE_SECONDS
                await asyncio.sleep(pause)
                continue
            self._looks = self._begun
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            pause = FIRST_PAUSE_SECONDS if has_news else min(LAST_PAUSE_SECONDS, pause * PAUSE_FACTOR)
            await self._sleep_until_requested(0 if is_done else pause)

    async def _sleep_until_requested(self, pause: float) -> None:
        """Sleep for *pause* seconds, or until a reader asks for a look at once."""
        try:
            async with asyncio.timeout(pause):
                await self._hurried.wait()
        except TimeoutError:
            return
        self._hurried.clear()

    async def _update_suspended_state(self, *, has_news: bool) -> None:
        was_resting = self.is_resting
        if has_news:
            self.is_resting = False
        else:
            asked, left = await self._operator.rests(self.run)
            self.is_resting = bool(asked or left)
        if was_resting != self.is_resting:
            self._notify_readers()

    async def _wait_for_refresh(self) -> bool:
        """Wait until the next look is over; return whether there may be another one."""
        assert self._archive is not None  # noqa: S101 - it is driven
        was_over, begun = self._archive.runs[""].is_over, self._begun
        self._waiting += 1
        try:
            while self._looks <= begun:
                await self._looked.wait()
        finally:
            self._waiting -= 1
        return not was_over

    # --- the one order ------------------------------------------------------------------------------------------------

    async def _append_new_events(self, follower: Follower, *, is_last: bool) -> bool:
        """Append new events in their agreed order; return whether there were any."""
        shown = len(self.events)
        unplaced = self._store_new_records(follower)
        self._mine += unplaced
        if self._mine:
            await self._share_order()
        self._append_ordered_events(follower, is_last=is_last)
        if is_last and not self._order:
            self._append_events_of(follower, self._last)
        is_quiet = is_last or (self._waiting and not unplaced)
        was_caught_up = self._is_caught_up
        if is_quiet and not self._mine and not self._order:
            self._is_caught_up, self._quiet = True, self._looks
        if len(self.events) > shown or was_caught_up != self._is_caught_up:
            self._notify_readers()
        return bool(unplaced) or len(self.events) > shown

    def _store_new_records(self, follower: Follower) -> list[str]:
        """
        Store the new records; return the keys of those that need a position in the order.

        How a run without a result ended is not part of the order, and is shown behind it: somebody may let the run go on.
        """
        unplaced: list[str] = []
        for record in follower.news().records:
            key = _order_key(record)
            if isinstance(record, Head):
                self._append_events_of(follower, [record])
            elif isinstance(record, Input) and record.input.get("type") == "stop":
                self._last.append(record)
            elif key is not None:
                self._here[key] = record
                unplaced.append(key)
        return unplaced

    async def _share_order(self) -> None:
        """Read the positions in the order, and append the keys of records without one."""
        while self._mine:
            for (keys,) in await self._operator.rows(PLACED, self.run, self._placed):
                self._placed += len(keys)
                self._order.extend(keys)
                known = set(keys)
                self._mine = [key for key in self._mine if key not in known]
            if any(key not in self._here for key in self._order):
                # Somebody is further than this one, which comes to the same: what it gives places to would stand in front of that.
                return
            some = self._mine[:BATCH_KEYS]
            if some and await self._operator.rows(PLACE, self.run, self._placed, some):
                self._placed += len(some)
                self._order.extend(some)
                del self._mine[: len(some)]

    def _append_ordered_events(self, follower: Follower, *, is_last: bool) -> None:
        """Append the events of records in the agreed order, up to the first record that has not arrived here."""
        ready: list[Record] = []
        while self._order:
            if self._order[0] in self._here:
                ready.append(self._here.pop(self._order.popleft()))
                self._stuck = 0
                continue
            self._stuck += 1
            if not is_last and self._stuck < STUCK_LOOKS:
                break
            self._order.popleft()
        self._append_events_of(follower, ready)

    def _append_events_of(self, follower: Follower, records: Sequence[Record]) -> None:
        for event in self._projection.take(follower.history, records):
            if self.tries:
                again = hashlib.blake2b(f"{event.epoch} {self.tries}".encode(), digest_size=4).hexdigest()
                object.__setattr__(event, "epoch", again)
            self.events.append(event)


def _order_key(record: Record) -> str | None:
    """Return the key of a record in the order; ``None`` for a record that shows nothing."""
    if isinstance(record, Intent):
        return f"i{record.path}#{record.seq}"
    if isinstance(record, Result):
        return f"r{record.path}#{record.seq}"
    if isinstance(record, Input) and record.input.get("type") == "wake_time":
        return f"w{record.path}#{record.seq}"
    return None
