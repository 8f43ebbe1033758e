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
from stepengine.durable.records import Archive, Played, driven, read_archive
from stepengine.durable.sessions import run_of_result
from stepengine.errors import StepEngineError
from stepengine.journal.following import Follower
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import Head, Input, Intent, Record, Result
from stepengine.journal.store import MemoryJournal
from stepengine.journal.watching import Projection
from stepengine.runtime.hub import place_of

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.durable.operate import Operator
    from stepengine.engine.launching import Launcher

__all__ = ("SharedEvents",)

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
        self._projection = Projection()
        self._here: dict[str, Record] = {}
        self._mine: list[str] = []
        self._order: deque[str] = deque()
        self._placed = 0
        self._last: list[Record] = []
        self._stuck = 0
        self._archive: Archive | None = None
        self._task = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Stop looking; readers are told nothing more."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def place(self, after: str | None) -> int:
        """
        Return the index of the first event that a reader has not got whose last one is *after*; -1 where it is of another epoch.

        Raises:
            StepEngineError: when it is not an id of an event, or of none that was; why the run cannot be shown.
        """
        given = None if after is None else place_of(after)
        while not (self._is_caught_up or self.is_over):
            await self._news()
        if self._error is not None:
            raise self._error
        if given is None:
            return 0
        epoch = self.events[0].epoch if self.events else ""
        if given.epoch != epoch:
            return -1
        await self._reach(given.index)
        if given.index >= len(self.events):
            msg = f"after={after!r} names an event that was not yet; the newest one is {epoch}-{len(self.events) - 1}"
            raise StepEngineError(msg)
        return given.index + 1

    async def look(self) -> None:
        """Look at the run once more, now, as what is known of it may be a second old; a database that is away is not waited for long."""
        begun = self._begun
        self._hurried.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MAX_LOOK_SECONDS):
                while self._looks <= begun and not self.is_over:
                    await self._looked.wait()

    async def _reach(self, index: int) -> None:
        """
        Wait until there is an event with *index*, or it is sure that there is none.

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
        Give the events from *place* on, what ``place`` returned, until nothing comes any more.

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
            await self._news(patience if rests_since is not None else None)

    async def _news(self, seconds: float | None = None) -> None:
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

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            await self._follow_archive()
        except asyncio.CancelledError:
            raise
        except StepEngineError as error:
            self._error = error
        finally:
            self.is_over = True
            self._looked.set()
            self._tell()

    async def _begun_archive(self) -> Archive:
        """Return what is recorded, once it is known what the run continues; for a run that was an answer, the record of the answered run."""
        while True:
            try:
                archive = await read_archive(self._operator, self.run)
                while not archive.is_begun and not archive.runs[""].is_over:
                    self._is_caught_up = True
                    self._tell()
                    await asyncio.sleep(LAST_PAUSE_SECONDS)
                    await archive.refresh(self._operator)
                answered = await run_of_result(self._operator, self.run)
                if answered != self.run:
                    self.run, self.tries = answered, 0
                    archive = await read_archive(self._operator, answered)
            except DatabaseAway:
                await asyncio.sleep(LAST_PAUSE_SECONDS)
            else:
                return archive

    async def _follow_archive(self) -> None:
        archive = self._archive = await self._begun_archive()
        journal = MemoryJournal()
        session = JournaledRun.record(journal, dict(archive.order.answers), seed=archive.order.seed)
        played = Played(archive, session, self._coming)
        driving = asyncio.ensure_future(driven(self._launcher, played).run())
        try:
            await self._look(archive, Follower(journal), driving)
        finally:
            driving.cancel()
            await asyncio.wait((driving,))
        if played.fatal is not None:
            raise played.fatal

    async def _look(self, archive: Archive, follower: Follower, driving: asyncio.Future[RunResult]) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            await asyncio.sleep(SETTLE_SECONDS)
            is_done = driving.done()
            try:
                has_news = await self._take(follower, is_last=is_done)
                if is_done and not self._mine and not self._order:
                    return
                if not is_done:
                    self._begun += 1
                    await archive.refresh(self._operator)
                    await self._look_whether_it_rests(has_news=has_news)
            except DatabaseAway:
                pause = LAST_PAUSE_SECONDS
                await asyncio.sleep(pause)
                continue
            self._looks = self._begun
            looked, self._looked = self._looked, asyncio.Event()
            looked.set()
            pause = FIRST_PAUSE_SECONDS if has_news else min(LAST_PAUSE_SECONDS, pause * PAUSE_FACTOR)
            await self._rest(0 if is_done else pause)

    async def _rest(self, pause: float) -> None:
        try:
            async with asyncio.timeout(pause):
                await self._hurried.wait()
        except TimeoutError:
            return
        self._hurried.clear()

    async def _look_whether_it_rests(self, *, has_news: bool) -> None:
        was_resting = self.is_resting
        if has_news:
            self.is_resting = False
        else:
            asked, left = await self._operator.rests(self.run)
            self.is_resting = bool(asked or left)
        if was_resting != self.is_resting:
            self._tell()

    async def _coming(self) -> bool:
        """Wait until a look that begins now or later is over; return whether there may be another one."""
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

    async def _take(self, follower: Follower, *, is_last: bool) -> bool:
        """Show what the driver wrote down, in its place; return whether there was anything."""
        shown = len(self.events)
        unplaced = self._find_new(follower)
        self._mine += unplaced
        if self._mine:
            await self._agree()
        self._show(follower, is_last=is_last)
        if is_last and not self._order:
            self._project(follower, self._last)
        is_quiet = is_last or (self._waiting and not unplaced)
        was_caught_up = self._is_caught_up
        if is_quiet and not self._mine and not self._order:
            self._is_caught_up, self._quiet = True, self._looks
        if len(self.events) > shown or was_caught_up != self._is_caught_up:
            self._tell()
        return bool(unplaced) or len(self.events) > shown

    def _find_new(self, follower: Follower) -> list[str]:
        """
        Return the keys of what is new and has a place to get.

        How a run without a result ended is not part of the order, and is shown behind it: somebody may let the run go on.
        """
        unplaced: list[str] = []
        for record in follower.news().records:
            key = _key(record)
            if isinstance(record, Head):
                self._project(follower, [record])
            elif isinstance(record, Input) and record.input.get("type") == "stop":
                self._last.append(record)
            elif key is not None:
                self._here[key] = record
                unplaced.append(key)
        return unplaced

    async def _agree(self) -> None:
        """Read which places are taken, and give the next ones to events without one."""
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

    def _show(self, follower: Follower, *, is_last: bool) -> None:
        """Show what has its place, as far as it is here."""
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
        self._project(follower, ready)

    def _project(self, follower: Follower, records: Sequence[Record]) -> None:
        for event in self._projection.take(follower.history, records):
            if self.tries:
                again = hashlib.blake2b(f"{event.epoch} {self.tries}".encode(), digest_size=4).hexdigest()
                object.__setattr__(event, "epoch", again)
            self.events.append(event)


def _key(record: Record) -> str | None:
    """Return the key of a record in the order; ``None`` for a record that shows nothing."""
    if isinstance(record, Intent):
        return f"i{record.path}#{record.seq}"
    if isinstance(record, Result):
        return f"r{record.path}#{record.seq}"
    if isinstance(record, Input) and record.input.get("type") == "wake_time":
        return f"w{record.path}#{record.seq}"
    return None
