"""
The detection of a run tree that stands still: every run only waits, and nothing running could end by itself.

A run that waits for long is not suspended alone. As long as anything else of its tree is at work the wait stands in this process,
and may end here; when nothing is, all waits end together, each run around them is suspended, and a process that is woken later
finds them in the record. So a parent that sleeps for a day does not cut off the child that it started before, and no half of a tree
is suspended while the other half still changes what it waits for.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from stepengine.data.effects import RUNS, WAITS, AskPerson, Spawn
from stepengine.data.waits import Waits
from stepengine.errors import AgentError
from stepengine.runtime.performer import Item, child_path, make_wait
from stepengine.runtime.run_protocol import Run
from stepengine.runtime.tree_protocols import Tree


def list_waits(item: Item) -> tuple[Waits, ...]:
    """Return the waits of an effect; empty for one that ends by itself."""
    effect = item.effect
    if isinstance(effect, AskPerson):
        return tuple(
            [Waits(path=item.path, seq=effect.seq, kind="question", question=question) for question in effect.questions]
        )
    return (make_wait(item),) if isinstance(effect, WAITS) else ()


class _ParkedWait(NamedTuple):
    """A wait: the future that ends it, the one for the suspension, and its description."""

    events: tuple[asyncio.Future[Any], ...]
    over: asyncio.Future[None]
    waits: tuple[Waits, ...]


class SuspensionDetector:
    """
    The waits of one run tree.

    Args:
        tree: The tree.

    Attributes:
        parked: The waits of running runs, by address.
        held: The effects that wait until no run is replaying any more, by address.
        waits: The waits for which the tree was suspended, by address.
        is_reachable: Whether messages can reach the tree in this process, such as by a handle.
        is_replaying: Whether no new effect may start before every run of the tree has reached the end of its record.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.parked: dict[tuple[str, int], _ParkedWait] = {}
        self.held: dict[tuple[str, int], asyncio.Future[None]] = {}
        self.waits: dict[tuple[str, int], tuple[Waits, ...]] = {}
        self._busy = ""
        self.is_reachable = self.is_replaying = False

    async def wait_for_first_or_suspension(
        self, item: Item, waits: tuple[Waits, ...], *begin: Callable[[], Awaitable[Any]]
    ) -> bool:
        """
        Start the awaitables and wait for the first. Return False if the tree was suspended before one was done.

        They are started only if it is necessary to wait, because the clock of a test would advance in them. Pass futures that may be
        done already: a task needs a moment to be done, in which all runs would seem to wait.
        """
        address = item.address
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parked[address] = _ParkedWait((), over, waits)
        events: tuple[asyncio.Future[Any], ...] = ()
        try:
            self.release_or_suspend_idle_tree()
            if not over.done():
                events = tuple([asyncio.ensure_future(one()) for one in begin])
                self.parked[address] = _ParkedWait(events, over, waits)
                await asyncio.wait((*events, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self.parked[address]
            come = [event for event in events if event.done()]
            for event in events:
                event.cancel()
        if come:
            come[0].result()
            return True
        over.result()
        if waits:
            self.waits[address] = waits
        return False

    async def hold_effect(self, item: Item) -> None:
        """Hold an effect until every run of the tree has reached the end of its record."""
        address = item.address
        held = self.held[address] = asyncio.get_running_loop().create_future()
        try:
            self.release_or_suspend_idle_tree()
            await held
        finally:
            self.held.pop(address, None)

    async def hold_effect_if_new(self, item: Item, *, begins: bool) -> None:
        """
        Hold a new effect until every run of the tree has reached the end of its record.

        An effect that *begins* is held if it was not started before; one that is performed, if it has no outcome.
        """
        record = self._tree.services.record
        if record is not None and not (record.has_begun(item) if begins else record.has_outcome(item)):
            await self.hold_effect(item)

    def close(self) -> None:
        """Drop the ended tree; its waits are kept."""
        del self._tree

    def end_background_wait(self, path: str) -> None:
        """Wake the suspended background child at *path*, because it must end."""
        parked = self.parked.get((path, -1))
        if parked is not None:
            _resolve_waits(parked.events)

    def drop_waits(self, path: str) -> None:
        """Remove the waits of the run at *path*, which was ended while it waited."""
        for address in [one for one in self.waits if one[0] == path or one[0].startswith(f"{path}.")]:
            del self.waits[address]

    def release_or_suspend_idle_tree(self) -> None:
        """
        If all runs of the tree wait, start the effects held back during replay, else suspend the tree if possible.

        Waits that nothing can end fail. A tree that someone attends to is not suspended. This is called after every end.
        """
        if not (self.parked or self.held) or not self._are_all_runs_waiting():
            return
        # Held effects come first: a tree at the end of its record continues live and is not suspended.
        if self.held:
            self.is_replaying = False
            _resolve_waits(self.held.values())
        elif self._can_suspend([one for parked in self.parked.values() for one in parked.waits]):
            unreachable = self._find_unreachable_waits()
            for one in unreachable:
                one.over.set_exception(_make_no_sender_error(one.waits[0]))
            if not unreachable:
                _resolve_waits([parked.over for parked in self.parked.values()])

    def _can_suspend(self, waits: Sequence[Waits]) -> bool:
        """
        Return whether a tree with only these waits may be suspended.

        Not while anyone attends to it, who may answer questions or send messages. A tree that is not recorded waits here, as it could
        not be resumed, except for messages that no one here can send.
        """
        tree = self._tree
        # Somebody who is there may still say something, and a tree that lies down would have to be woken for it by
        # hand.
        if tree.questions.has_attendant:
            return False
        return tree.services.resumable or not (self.is_reachable or any(one.wakes_at is not None for one in waits))

    def _find_unreachable_waits(self) -> list[_ParkedWait]:
        """Return the waits for messages that no one can ever send; none in a tree that is kept or asks a person."""
        parked = [one for one in self.parked.values() if not one.over.done()]
        tree = self._tree
        is_kept = tree.services.resumable or tree.root.plan.info.session_id is not None
        is_asking = any(wait.kind == "question" for one in parked for wait in one.waits)
        if is_asking or is_kept:
            return []
        return [one for one in parked if one.waits and one.waits[0].kind == "message"]

    def _are_all_runs_waiting(self) -> bool:
        """Return whether every run of the tree, background children included, only waits."""
        tree = self._tree
        # Whoever was at work when this was last asked mostly still is, and the youngest comes to rest last.
        # Asked at each end of anything, of all runs of a tree that may have thousands: the one that was at work the
        # last time answers for nearly all of these questions.
        if not self._is_run_waiting_at(self._busy):
            return False
        for path in itertools.chain(reversed(tree.runs.by_path), tree.background.iterate_running_paths()):
            if not self._is_run_waiting_at(path):
                self._busy = path
                return False
        return True

    def _is_run_waiting_at(self, path: str) -> bool:
        """Return whether the run at *path* only waits; a background run that has not started does not."""
        run = self._tree.runs.by_path.get(path)
        if run is not None:
            return self._is_run_waiting(run)
        return self._is_parked((path, -1)) or not self._tree.background.is_running(path)

    def _is_run_waiting(self, run: Run) -> bool:
        """Return whether a run only waits, be it for its background children at its end."""
        if run.is_ending:
            return self._tree.background.has_running_child(run.path)
        busy = run.busy
        if busy is None or busy is True:
            return False
        return (
            self._is_effect_waiting(busy) if isinstance(busy, Item) else busy.are_all_waiting(self._is_effect_waiting)
        )

    def _is_effect_waiting(self, item: Item) -> bool:
        """Return whether an effect is held, parked, or a child whose run is looked at by itself."""
        held = self.held.get(item.address)
        if held is not None:
            return not held.done()  # one that was let go is at work, though it had no turn yet
        if self._tree.performers.group_stopper.has_lost_race(item):
            return False
        # A member of a race whose run stands still is parked itself, and waits for the others of it. Whoever starts a child in the
        # background does not wait for it: it goes on as soon as that is recorded, which takes a journal in a file a moment.
        effect = item.effect
        is_start = isinstance(effect, Spawn) and effect.is_background
        if isinstance(effect, RUNS) and not is_start and child_path(item.path, effect.seq) in self._tree.runs.by_path:
            return True
        return self._is_parked((item.path, effect.seq))

    def _is_parked(self, address: tuple[str, int]) -> bool:
        """Return whether the wait at an address is parked and nothing has ended it yet."""
        parked = self.parked.get(address)
        return parked is not None and not any(event.done() for event in (parked.over, *parked.events))


class TreeWithSuspension(Tree, Protocol):
    """A run tree with the waits of its runs."""

    @property
    def suspension(self) -> SuspensionDetector:
        """The waits of its runs."""


def _make_no_sender_error(wait: Waits) -> AgentError:
    """Return the error for a wait for a message that nobody can send."""
    whose = f" of the run {wait.path!r}" if wait.path else ""
    msg = (
        f"Receive({wait.topic!r}){whose} waits for a message that cannot be sent: the run has no journal and no handle. "
        f"Record it with journal=FileJournal(...), or start it with engine.start(...) and call handle.send_message({wait.topic!r}, value)"
    )
    return AgentError(msg)


def _resolve_waits(waits: Iterable[asyncio.Future[None]]) -> None:
    """Wake everyone who awaits one of *waits*."""
    for wait in waits:
        if not wait.done():
            wait.set_result(None)
