"""
``SharedEvents``: the events of a durable run, in the same order and with the same ids in every process.

The agents are driven over the record, as for ``follow_run``, and write a journal in memory. Its records give the events, in the order
that ``EventOrder`` has from the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from stepengine.data.events import Event, EventsDropped
from stepengine.durable.event_order import EventOrder
from stepengine.durable.records import Playback, RunTreeRecord, create_replayed_run, read_tree_record_once_started
from stepengine.errors import DatabaseUnavailable, StepEngineError
from stepengine.journal.event_stream import EventProjection
from stepengine.journal.follower import Follower
from stepengine.journal.journaled_run import JournaledRun
from stepengine.journal.records import Head, Record
from stepengine.journal.store import MemoryJournal
from stepengine.runtime.hub import parse_event_id

if TYPE_CHECKING:
    from stepengine.data.state import RunResult
    from stepengine.durable.operator import Operator
    from stepengine.engine.launcher import Launcher

FIRST_PAUSE_SECONDS = 0.05
"""Readers see news as fast as they read; a busy run is asked for twenty times in a second, whatever number of readers it has."""
LAST_PAUSE_SECONDS = 1.0
"""A run that is quiet for long costs one look in a second, and its next event comes a second late at most."""
PAUSE_FACTOR = 1.5
"""From the first pause to the longest one in eight looks, within about two seconds."""
LOOK_TIMEOUT_SECONDS = 5.0
"""A query takes milliseconds. A database that is away longer must not hold up a request for what is known already."""
SETTLE_SECONDS = 0.005
"""The driver turns new records into events within milliseconds; later events are found by the next look."""


class RecordLooks:
    """
    The looks at a record: one after the other, and sooner if a reader asks for it.

    Attributes:
        started: How many have started.
        ended: The number of the last one that has ended.
        settled: The number of the last one that found nothing left to show.
    """

    def __init__(self) -> None:
        self.started = self.ended = self.settled = 0
        self._is_closed = False
        self._ended = asyncio.Event()
        self._requested = asyncio.Event()

    def finish_look(self) -> None:
        """Mark the read of the record that was started last as ended."""
        self.ended = self.started
        ended, self._ended = self._ended, asyncio.Event()
        ended.set()

    def close(self) -> None:
        """End all waits, since no more reads of the record follow."""
        self._is_closed = True
        self._ended.set()

    def request_look(self) -> None:
        """Let the next read of the record start immediately."""
        self._requested.set()

    async def wait_for_next_look(self) -> None:
        """Wait for the end of a read of the record that starts after this call, or until no more reads follow."""
        started = self.started
        while self.ended <= started and not self._is_closed:
            await self._ended.wait()

    async def sleep(self, pause: float) -> None:
        """Sleep for *pause* seconds, or until a read of the record is requested."""
        try:
            async with asyncio.timeout(pause):
                await self._requested.wait()
        except TimeoutError:
            return
        self._requested.clear()


class SharedEvents:
    """
    The events of one run, for as many readers of this process as there are, from ``open`` to ``close``.

    Args:
        launcher: The engine's, with the agents of the run's release.
        operator: The client.
        run: A root run's id.
        tries: How many times the run was retried after it had stopped. Each retry gives the events a new epoch, since the end that
            was shown is no longer valid.

    Attributes:
        events: The events so far, by index.
        is_over: Whether no more events follow.
        is_suspended: Whether all of the run was suspended at the last look.
    """

    def __init__(self, launcher: Launcher, operator: Operator, run: str, *, tries: int) -> None:
        self.run = run
        self.tries = tries
        self.events: list[Event] = []
        self.is_over = self.is_suspended = False
        self._is_caught_up = False
        self._error: StepEngineError | None = None
        self._operator = operator
        self._changed = asyncio.Event()
        self._looks = RecordLooks()
        self._waiting = 0
        self._projection = EventProjection()
        self._order = EventOrder(operator.deployment, run)
        self._task = asyncio.get_running_loop().create_task(self._follow_until_end(launcher))

    async def close(self) -> None:
        """Stop following the run; readers receive no more events."""
        self._task.cancel()
        await asyncio.wait((self._task,))

    # --- reading ------------------------------------------------------------------------------------------------------

    async def wait_for_index_after(self, after: str | None) -> int:
        """
        Wait until the event *after* is available, and return the index after it; 0 for ``None``, -1 for an event of another epoch.

        Raises:
            StepEngineError: When *after* is not the id of an event so far; when the run cannot be replayed, with the reason.
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
            msg = f"after={after!r} names an event that does not exist yet; the newest one is {epoch}-{len(self.events) - 1}"
            raise StepEngineError(msg)
        return given.index + 1

    async def refresh(self) -> None:
        """Read the record once more now; an unreachable database is not waited for long."""
        self._looks.request_look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_TIMEOUT_SECONDS):
                await self._looks.wait_for_next_look()

    async def _wait_for_index(self, index: int) -> None:
        """
        Wait until the event with *index* exists, or cannot come any more.

        Another process may have sent the event already, since this process reads the record up to a second later.
        """
        started = self._looks.started
        while index >= len(self.events) and not self.is_over:
            if self._looks.settled > started:
                if not await self._order.has_unread_positions():
                    return
                started = self._looks.started
            await asyncio.sleep(FIRST_PAUSE_SECONDS)

    async def read(self, index: int, *, patience: float) -> AsyncGenerator[Event, None]:
        """
        Yield the events from *index* on, until the run ends or is suspended.

        Args:
            index: The index of the first event; after -1 an ``EventsDropped`` and all events.
            patience: Seconds to stay while the run is suspended.
        """
        if index < 0:
            index = 0
            first = self.events[0] if self.events else None
            yield EventsDropped(
                count=0, reason="epoch", run_id=first.run_id if first else "", epoch=first.epoch if first else ""
            )
        loop = asyncio.get_running_loop()
        suspended_since: float | None = None
        while True:
            while index < len(self.events):
                event, index, suspended_since = self.events[index], index + 1, None
                yield event
            if self.is_over:
                return
            if not self.is_suspended:
                suspended_since = None
            elif suspended_since is None:
                suspended_since = loop.time()
            if suspended_since is not None and loop.time() - suspended_since >= patience:
                return
            await self._wait_for_change(patience if suspended_since is not None else None)

    async def _wait_for_change(self, seconds: float | None = None) -> None:
        """Wait until something has changed, or for some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _notify_readers(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # --- looking ------------------------------------------------------------------------------------------------------

    async def _follow_until_end(self, launcher: Launcher) -> None:
        """Follow the run to its end, store the error that prevents it, and notify all readers."""
        try:
            await self._replay_and_collect_events(launcher)
        except asyncio.CancelledError:
            raise
        except StepEngineError as error:
            self._error = error
        finally:
            self.is_over = True
            self._looks.close()
            self._notify_readers()

    async def _read_started_tree_record(self) -> RunTreeRecord:
        """Wait until the run has started and return its record; for an answer, follow the answered run from now on."""
        deployment = self._operator.deployment
        while True:
            try:
                tree_record = await read_tree_record_once_started(
                    deployment, self.run, pause=LAST_PAUSE_SECONDS, waiting=self._mark_caught_up
                )
            except DatabaseUnavailable:
                await asyncio.sleep(LAST_PAUSE_SECONDS)
                continue
            if tree_record.order.root != self.run:
                self.run, self.tries = tree_record.order.root, 0
                self._order = EventOrder(deployment, self.run)
            return tree_record

    def _mark_caught_up(self) -> None:
        """Mark the events as complete up to now, and notify readers."""
        self._is_caught_up = True
        self._notify_readers()

    async def _replay_and_collect_events(self, launcher: Launcher) -> None:
        """Wait until the run has started, replay its record, and append its events; raise a divergence."""
        tree_record = await self._read_started_tree_record()
        journal = MemoryJournal()
        session = JournaledRun.record(journal, dict(tree_record.order.answers), seed=tree_record.order.seed)
        played = Playback(tree_record, session, partial(self._wait_for_refresh, tree_record))
        driving = asyncio.ensure_future(create_replayed_run(launcher, played).run())
        try:
            await self._collect_events(tree_record, Follower(journal), driving)
        except BaseException:
            driving.cancel()
            await asyncio.wait((driving,))
            raise
        # No pause since the last events were appended: a reader that they wake finds the run over, and its error.
        if played.fatal is not None:
            raise played.fatal

    async def _collect_events(
        self, tree_record: RunTreeRecord, follower: Follower, driving: asyncio.Future[RunResult]
    ) -> None:
        """Append new events and read the record again, with pauses, until the replay has ended and all events are appended."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            await asyncio.sleep(SETTLE_SECONDS)
            is_done = driving.done()
            try:
                has_news = await self._append_ready_events(follower, is_last=is_done)
                if is_done and self._order.is_empty:
                    return
                if not is_done:
                    self._looks.started += 1
                    await tree_record.refresh(self._operator.deployment)
                    await self._update_suspended_state(has_news=has_news)
            except DatabaseUnavailable:
                pause = LAST_PAUSE_SECONDS
                await asyncio.sleep(pause)
                continue
            self._looks.finish_look()
            pause = FIRST_PAUSE_SECONDS if has_news else min(LAST_PAUSE_SECONDS, pause * PAUSE_FACTOR)
            await self._looks.sleep(0 if is_done else pause)

    async def _update_suspended_state(self, *, has_news: bool) -> None:
        """Query whether all of the run is suspended, unless there is news, and notify readers of a change."""
        was_suspended = self.is_suspended
        if has_news:
            self.is_suspended = False
        else:
            asked, left = await self._operator.run_waits.find_waits_if_suspended(self.run)
            self.is_suspended = bool(asked or left)
        if was_suspended != self.is_suspended:
            self._notify_readers()

    async def _wait_for_refresh(self, tree_record: RunTreeRecord) -> bool:
        """Wait until the next read of the record has ended; return whether another one may follow."""
        was_over = tree_record.runs[""].is_over
        self._waiting += 1
        try:
            await self._looks.wait_for_next_look()
        finally:
            self._waiting -= 1
        return not was_over

    # --- the one order ------------------------------------------------------------------------------------------------

    async def _append_ready_events(self, follower: Follower, *, is_last: bool) -> bool:
        """Append the events whose position is known and notify readers; return whether any event was appended or any record arrived."""
        shown = len(self.events)
        has_arrived = False
        for record in follower.read_new().records:
            if isinstance(record, Head):
                self._append_record_events(follower, [record])
            else:
                has_arrived |= self._order.add_record(record)
        await self._order.read_and_append_positions()
        self._append_record_events(follower, self._order.pop_ready_records(is_last=is_last))
        # With the end itself, and not when its driver has ended, too: a client that has the last event may ask in between.
        self.is_over = self._projection.is_over
        was_caught_up = self._is_caught_up
        if (is_last or (self._waiting and not has_arrived)) and self._order.is_empty:
            self._is_caught_up, self._looks.settled = True, self._looks.ended
        if len(self.events) > shown or was_caught_up != self._is_caught_up:
            self._notify_readers()
        return has_arrived or len(self.events) > shown

    def _append_record_events(self, follower: Follower, records: Sequence[Record]) -> None:
        """Append the events of records; after a retry, with an epoch of their own."""
        for event in self._projection.project_records(follower.history, records):
            if self.tries:
                again = hashlib.blake2b(f"{event.epoch} {self.tries}".encode(), digest_size=4).hexdigest()
                object.__setattr__(event, "epoch", again)
            self.events.append(event)
