"""
Giving up the siblings of a child that failed, and the members of a race that another one has won.

It happens inside everything that records, so that what each sibling was stopped with is a recorded outcome like any other:
one that has not begun is refused, one that runs has its next, or present, live effect answered with a ``Stop``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import attrs

from stepengine.data.effects import RUNS, CallBody, CallTool, RunInBackground, Spawn
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import ChildResult, RunStatus, mark_suspended_as_cancelled
from stepengine.errors import AgentError, RaceLost
from stepengine.machine.plan import make_stopped_body_result
from stepengine.runtime.performer import IO, Item, Performer, child_path
from stepengine.runtime.suspension import TreeWithSuspension, list_waits

if TYPE_CHECKING:
    from stepengine.runtime.limits import Refusals

LOST = "another member of the race was first"


def has_failed(outcome: Single) -> bool:
    """Return whether a member of a group failed by itself; one whose limit asks a person for more has not."""
    if isinstance(outcome, Value):
        return isinstance(outcome.value, ChildResult | ToolResult) and outcome.value.is_error
    return isinstance(outcome, Failure) and getattr(outcome.error, "more", None) is None


class FailFastGroup:
    """
    The children of one ``Gather`` of which one failure ends all.

    Args:
        group_stopper: What stops the members of groups in the tree.
        items: The members; only children are stopped.
        has_failed: Whether one failed before any of these began.
    """

    def __init__(self, group_stopper: StopOnFailure, items: Sequence[Item], *, has_failed: bool) -> None:
        self._group_stopper = group_stopper
        runs = [(item.path, item.effect.seq) for item in items if isinstance(item.effect, RUNS)]
        self._children = {address: child_path(*address) for address in runs}
        self._begun: set[tuple[str, int]] = set()
        self._gone = has_failed

    def __enter__(self) -> Self:
        self._group_stopper.watch_children(self._children.values())
        return self

    def __exit__(self, *_: object) -> None:
        self._group_stopper.unwatch_children(self._children.values())

    def register_or_refuse_start(self, item: Item) -> None:
        """Register a member that starts; after a failure it is refused, or stopped if another process started it."""
        address = item.address
        self._begun.add(address)
        # Members begin one after the other, so the failure may be there before this one began. It is refused, which is
        # recorded; cut off it would be in doubt.
        if self._gone and address in self._children:
            self._group_stopper.refuse_child(item)
            self._group_stopper.stop_children([self._children[address]])

    def stop_others_on_failure(self, outcome: Single) -> None:
        """Stop the other started children if *outcome* is the first failure of a member."""
        if self._gone or not has_failed(outcome):
            return
        self._gone = True
        self._group_stopper.stop_children([path for address, path in self._children.items() if address in self._begun])


class StopOnFailure:
    """
    The performer that stops the effects of children whose group has failed.

    A child itself is not cancelled. The effects that it waits for are, down to the last leaf, and so each run above them ends.
    Thus a replay, in which the failure occurs at another moment, ends every run at the end of its record.

    Args:
        inner: The performer that this one wraps.
        refusals: The effects that must not start, shared with the gate.
        now: Returns the milliseconds since the root run was created.
        tree: The tree, which ends runs.
    """

    def __init__(self, inner: Performer, refusals: Refusals, now: Callable[[], int], tree: TreeWithSuspension) -> None:
        self._inner = inner
        self._tree = tree
        self._refusals = refusals
        self._now = now
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._racing: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._stopped_by: dict[str, asyncio.Future[None]] = {}
        self.begin = inner.begin

    def can_stop_run(self, path: str) -> bool:
        """Return whether the run at *path* can be stopped here."""
        return bool(self._watched and self._list_stop_signals(path))

    def find_stop_signal(self, path: str) -> asyncio.Future[None] | None:
        """Return the future that is done when the child at *path*, driven elsewhere, must stop; ``None`` without one."""
        return self._watched.get(path)

    def has_lost_race(self, item: Item) -> bool:
        """Return whether another member has won the race of an effect."""
        lost = self._racing.get(item.address)
        return lost is not None and lost.done()

    def watch_children(self, paths: Iterable[str]) -> None:
        """Let ``stop_children`` stop the children at *paths* from now on."""
        loop = asyncio.get_running_loop()
        self._watched.update({path: loop.create_future() for path in paths})

    def unwatch_children(self, paths: Iterable[str]) -> None:
        """Forget the children at *paths*, whose group has ended."""
        for path in paths:
            self._watched.pop(path, None)
            self._stopped_by.pop(path, None)

    def stop_children(self, paths: Iterable[str]) -> None:
        """Stop the watched children at *paths* by the effects that they perform now or next."""
        for path in paths:
            self._watched[path].set_result(None)

    def refuse_child(self, item: Item) -> None:
        """Make the start of a child fail, because another member of its group failed."""
        error = AgentError("cancelled before it started, because another member failed")
        self._refusals.refuse(item.path, (item.effect,), error)

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Perform an effect; it can be interrupted if it belongs to a watched child or a race."""
        if self._racing and item.gather is not None and item.address in self._racing:
            return self._perform_race_member(item, io)
        if isinstance(item.effect, RunInBackground):
            # Its effects are stopped one by one, and whoever started it ends it.
            return self._inner.perform(item, io)
        if self._watched and item.path:
            signals = self._list_stop_signals(item.path)
            if signals:
                act = self._run_watched_child if isinstance(item.effect, RUNS) else self._perform_interruptibly
                return act(item, io, signals)
        return self._inner.perform(item, io)

    def _list_stop_signals(self, path: str) -> list[asyncio.Future[None]]:
        """Return the futures that stop the run at *path* or one above it."""
        found: list[asyncio.Future[None]] = []
        while path:
            if path in self._watched:
                found.append(self._watched[path])
            path = path.rpartition(".")[0]
        return found

    async def _run_watched_child(self, item: Item, io: IO, signals: Sequence[asyncio.Future[None]]) -> Single:
        """Run a child of a watched run; if both were stopped, stop the parent as well."""
        outcome = await self._inner.perform(item, io)
        cause = self._stopped_by.pop(child_path(item.path, item.effect.seq), None)
        if not isinstance(outcome, Value) or cause is None or cause not in signals:
            return outcome
        self._stopped_by[item.path] = cause
        if isinstance(item.effect, CallBody):
            return Stop("cancelled", outcome.at, body=outcome.body)
        return Stop("cancelled", outcome.at, child=outcome.value)

    async def _perform_interruptibly(self, item: Item, io: IO, signals: Sequence[asyncio.Future[None]]) -> Single:
        """Perform an effect, or cancel it and return a stop once one of *signals* is done."""
        if any(signal.done() for signal in signals):
            return self._make_stop_with_cause(item, signals)
        # A task, since only a task can be cut off by somebody else than who awaits it. Only effects below a watched
        # group pay for one.
        work = asyncio.ensure_future(self._inner.perform(item, io))
        waited: list[asyncio.Future[Any]] = [work, *signals]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                await _cancel_and_wait(work)
        return (
            attrs.evolve(self._make_stop_with_cause(item, signals), begun=io.find_stopped_call_usage(item))
            if work.cancelled()
            else work.result()
        )

    @contextmanager
    def register_race_members(self, items: Sequence[Item]) -> Iterator[None]:
        """
        Register the members of races for the duration of the block, so that ``cancel_race_losers`` can cancel them.

        A fail-fast group around them can still stop their children.
        """
        loop = asyncio.get_running_loop()
        addresses = [item.address for item in items]
        self._racing.update({address: loop.create_future() for address in addresses})
        try:
            yield
        finally:
            for address in addresses:
                self._racing.pop(address, None)

    def cancel_race_losers(self, items: Iterable[Item]) -> None:
        """Notify the members *items* that they have lost their race, so that each is cancelled."""
        for item in items:
            lost = self._racing[item.address]
            if not lost.done():
                lost.set_result(None)

    async def _perform_race_member(self, item: Item, io: IO) -> Single:
        """
        Perform a member of a race until it ends or another one wins.

        A suspended member, such as an unanswered question, does not end the race: another member may still win.
        """
        lost = self._racing[item.address]
        if lost.done():
            return make_race_loss_outcome(item, self._now())
        work = asyncio.ensure_future(self._inner.perform(item, io))
        await self._wait_for_race_member(item, work, lost)
        if work.cancelled():
            return make_race_loss_outcome(item, self._now())
        outcome = work.result()
        # A member that only waits has not lost and not won: another may still end, in this process or a later one.
        if not isinstance(outcome, Stop) or outcome.kind != "suspended":
            return outcome
        # Another one may have won at the moment at which this one was suspended: then there is nothing to wait for.
        if not lost.done() and not await self._tree.suspension.wait_for_first_or_suspension(
            item, list_waits(item), lambda: asyncio.shield(lost)
        ):
            return outcome
        if isinstance(item.effect, RUNS):
            self._tree.suspension.drop_waits(child_path(item.path, item.effect.seq))
        self._tree.questions.forget_unanswered(outcome.questions)
        return make_race_loss_outcome(item, self._now(), outcome)

    async def _wait_for_race_member(self, item: Item, work: asyncio.Future[Single], lost: asyncio.Future[None]) -> None:
        """Wait until the *work* of a member of a race ends, and end it once another member has won."""
        try:
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            # Cut off, a child would leave its handler parked and its calls without results; told to end it closes both,
            # and says what it has spent.
            if not work.done() and isinstance(item.effect, RUNS):
                # A run is not cut off: it ends, and so do those below it.
                self._tree.runs.cancel(child_path(item.path, item.effect.seq), LOST)
                await asyncio.wait((work,))
        except asyncio.CancelledError:
            await _cancel_and_wait(work)
            # One that has ended at this moment has an outcome, and what it spent is in no other place.
            if work.cancelled():
                raise
        finally:
            if not work.done():
                await _cancel_and_wait(work)

    def _make_stop_with_cause(self, item: Item, signals: Sequence[asyncio.Future[None]]) -> Stop:
        """Return the stop for an effect, and record which of *signals* stopped its run."""
        self._stopped_by[item.path] = next(signal for signal in signals if signal.done())
        return Stop("cancelled", self._now())


def make_race_loss_outcome(item: Item, now: int, outcome: Stop | None = None) -> Single:
    """
    Return the outcome of a loser of a race: a cancelled result for a call or child, else a ``RaceLost`` failure.

    *outcome* is the stop of a loser that was suspended; its spending is kept.
    """
    effect = item.effect
    if isinstance(effect, CallBody):
        body = None if outcome is None else outcome.body
        if body is not None:
            body = attrs.evolve(body, children=tuple(map(mark_suspended_as_cancelled, body.children)), questions=())
        return Value(make_stopped_body_result(), now, body=body)
    if isinstance(effect, CallTool):
        text = "Cancelled: something else came first; it may have had effects."
        return Value(ToolResult.error(text, status="cancelled"), now)
    if isinstance(effect, Spawn):
        child = None if outcome is None else outcome.child
        if child is None:
            return Value(ChildResult(agent_id=effect.agent_id, status=RunStatus.CANCELLED), now)
        return Value(mark_suspended_as_cancelled(child), now)
    return Failure(RaceLost(LOST), now)


async def _cancel_and_wait(work: asyncio.Future[Single]) -> None:
    """Cancel *work* and wait until it has ended, even if the caller is cancelled repeatedly."""
    again: asyncio.CancelledError | None = None
    while not work.done():
        work.cancel()
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again
