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
from stepengine.data.state import ChildResult, RunStatus, no_longer_waiting
from stepengine.errors import AgentError, RaceLost
from stepengine.machine.plan import cut_body
from stepengine.runtime.performer import IO, Item, Performer, child_path
from stepengine.runtime.standstill import RestingTree, waits_of

if TYPE_CHECKING:
    from stepengine.runtime.limits import Refusals

__all__ = ("LOST", "Group", "StopOnFailure", "given_up", "has_failed")

LOST = "another member of the race was first"


def has_failed(outcome: Single) -> bool:
    """Return whether a member of a group failed by itself; one whose limit asks a person for more has not."""
    if isinstance(outcome, Value):
        return isinstance(outcome.value, ChildResult | ToolResult) and outcome.value.is_error
    return isinstance(outcome, Failure) and getattr(outcome.error, "more", None) is None


class Group:
    """
    The children of one ``Gather`` of which one failure ends all.

    Args:
        brake: The brake of the tree.
        items: The members; only children are stopped.
        has_failed: Whether one failed before any of these began.
    """

    def __init__(self, brake: StopOnFailure, items: Sequence[Item], *, has_failed: bool = False) -> None:
        self._brake = brake
        self._children = {(i.path, i.effect.seq): child_path(i.path, i.effect.seq) for i in items if _spawns(i)}
        self._begun: set[tuple[str, int]] = set()
        self._gone = has_failed

    def __enter__(self) -> Self:
        self._brake.watch(self._children.values())
        return self

    def __exit__(self, *_: object) -> None:
        self._brake.leave(self._children.values())

    def begins(self, item: Item) -> None:
        """Take note that a member begins; after a failure it is refused, or stopped if it began in another process."""
        address = (item.path, item.effect.seq)
        self._begun.add(address)
        # Members begin one after the other, so the failure may be there before this one began. It is refused, which is
        # recorded; cut off it would be in doubt.
        if self._gone and address in self._children:
            self._brake.refuse(item)
            self._brake.pull([self._children[address]])

    def ended(self, outcome: Single) -> None:
        """Look at how a member ended; the first failure stops the others."""
        if self._gone or not has_failed(outcome):
            return
        self._gone = True
        self._brake.pull([path for address, path in self._children.items() if address in self._begun])


def _spawns(item: Item) -> bool:
    return type(item.effect) in RUNS


class StopOnFailure:
    """
    Stands beside the gate, and stops the effects of children whose group has failed.

    A child is not cut off: the effects that it waits for are, down to the last leaf, and each run above them ends because
    of that. So a replay, which meets the failure at another moment, ends every run where its record does.

    Args:
        inner: What performs.
        refusals: Shared with the gate: what must not begin.
        now: Milliseconds since the root run was created.
        tree: The tree, which ends runs.
    """

    def __init__(self, inner: Performer, refusals: Refusals, now: Callable[[], int], tree: RestingTree) -> None:
        self._inner = inner
        self._tree = tree
        self._refusals = refusals
        self._now = now
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._racing: dict[tuple[str, int], asyncio.Future[None]] = {}
        self._stopped_by: dict[str, asyncio.Future[None]] = {}
        self.begin = inner.begin

    def reaches(self, path: str) -> bool:
        """Return whether the run at *path* may be stopped, for as long as it lasts."""
        return bool(self._watched and self._pulls(path))

    def pulled(self, path: str) -> asyncio.Future[None] | None:
        """Return a future that is done when the child at *path* must stop, for whoever drives it elsewhere; ``None`` when nothing will say so."""
        return self._watched.get(path)

    def is_given_up(self, item: Item) -> bool:
        """Return whether another member of its race has won, which an effect that is under way may not have noticed yet."""
        lost = self._racing.get((item.path, item.effect.seq))
        return lost is not None and lost.done()

    def watch(self, paths: Iterable[str]) -> None:
        """Look at the children at these paths from now on."""
        loop = asyncio.get_running_loop()
        self._watched.update({path: loop.create_future() for path in paths})

    def leave(self, paths: Iterable[str]) -> None:
        """Forget the children at these paths."""
        for path in paths:
            self._watched.pop(path, None)
            self._stopped_by.pop(path, None)

    def pull(self, paths: Iterable[str]) -> None:
        """Stop the children at these paths."""
        for path in paths:
            self._watched[path].set_result(None)

    def refuse(self, item: Item) -> None:
        """Keep a child from being started."""
        error = AgentError("cancelled before it started, because another member failed")
        self._refusals.refuse(item.path, (item.effect,), error)

    def perform(self, item: Item, io: IO) -> Awaitable[Single]:
        """Pass an effect on; one of a watched child, or of a run below it, can be interrupted, and so can one of a race."""
        if self._racing and item.gather is not None and (item.path, item.effect.seq) in self._racing:
            return self._race(item, io)
        if isinstance(item.effect, RunInBackground):
            # Its effects are stopped one by one, and whoever started it ends it.
            return self._inner.perform(item, io)
        if self._watched and item.path:
            pulls = self._pulls(item.path)
            if pulls:
                act = self._child_of_watched if type(item.effect) in RUNS else self._interruptible
                return act(item, io, pulls)
        return self._inner.perform(item, io)

    def _pulls(self, path: str) -> list[asyncio.Future[None]]:
        """Return what says that the run at *path*, or one above it, must stop."""
        found: list[asyncio.Future[None]] = []
        while path:
            if path in self._watched:
                found.append(self._watched[path])
            path = path.rpartition(".")[0]
        return found

    async def _child_of_watched(self, item: Item, io: IO, pulls: Sequence[asyncio.Future[None]]) -> Single:
        """Run a child of a watched run; when its effects were stopped for both of them, so is the run that waits for it."""
        outcome = await self._inner.perform(item, io)
        cause = self._stopped_by.pop(child_path(item.path, item.effect.seq), None)
        if not isinstance(outcome, Value) or cause is None or cause not in pulls:
            return outcome
        self._stopped_by[item.path] = cause
        if isinstance(item.effect, CallBody):
            return Stop("cancelled", outcome.at, body=outcome.body)
        return Stop("cancelled", outcome.at, child=outcome.value)

    async def _interruptible(self, item: Item, io: IO, pulls: Sequence[asyncio.Future[None]]) -> Single:
        if any(pull.done() for pull in pulls):
            return self._stop(item, pulls)
        # A task, since only a task can be cut off by somebody else than who awaits it. Only effects below a watched
        # group pay for one.
        work = asyncio.ensure_future(self._inner.perform(item, io))
        waited: list[asyncio.Future[Any]] = [work, *pulls]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                await _cancel_and_wait(work)
        return attrs.evolve(self._stop(item, pulls), begun=io.begun(item)) if work.cancelled() else work.result()

    @contextmanager
    def racing(self, items: Sequence[Item]) -> Iterator[None]:
        """Let the members of races be given up; a fail-fast group around them may still stop their children."""
        loop = asyncio.get_running_loop()
        addresses = [(item.path, item.effect.seq) for item in items]
        self._racing.update({address: loop.create_future() for address in addresses})
        try:
            yield
        finally:
            for address in addresses:
                self._racing.pop(address, None)

    def give_up(self, items: Iterable[Item]) -> None:
        """Give up members of a race that another one of it has won."""
        for item in items:
            lost = self._racing[item.path, item.effect.seq]
            if not lost.done():
                lost.set_result(None)

    async def _race(self, item: Item, io: IO) -> Single:
        """
        Perform a member of a race until it has ended, or the race.

        What cannot go on by itself, such as a question that nobody answers, does not end the race: another member may.
        """
        lost = self._racing[item.path, item.effect.seq]
        if lost.done():
            return given_up(item, self._now())
        work = asyncio.ensure_future(self._inner.perform(item, io))
        try:
            await asyncio.wait((work, lost), return_when=asyncio.FIRST_COMPLETED)
            # Cut off, a child would leave its handler parked and its calls without results; told to end it closes both,
            # and says what it has spent.
            if not work.done() and type(item.effect) in RUNS:
                # A run is not cut off: it ends, and so do those below it.
                self._tree.runs.cancel(child_path(item.path, item.effect.seq), LOST)
                await asyncio.wait((work,))
        finally:
            if not work.done():
                await _cancel_and_wait(work)
        if work.cancelled():
            return given_up(item, self._now())
        outcome = work.result()
        # A member that only waits has not lost and not won: another may still end, in this process or a later one.
        if not isinstance(outcome, Stop) or outcome.kind != "suspended":
            return outcome
        # Another one may have won at the moment at which this one was suspended: then there is nothing to wait for.
        if not lost.done() and not await self._tree.standstill.until(
            item, waits_of(item), lambda: asyncio.shield(lost)
        ):
            return outcome
        if type(item.effect) in RUNS:
            self._tree.standstill.drop(child_path(item.path, item.effect.seq))
        return given_up(item, self._now(), outcome)

    def _stop(self, item: Item, pulls: Sequence[asyncio.Future[None]]) -> Stop:
        self._stopped_by[item.path] = next(pull for pull in pulls if pull.done())
        return Stop("cancelled", self._now())


def given_up(item: Item, now: int, outcome: Stop | None = None) -> Single:
    """Return the outcome of a member of a race that another one has won; *outcome* is why it did not go on."""
    effect = item.effect
    if isinstance(effect, CallBody):
        body = None if outcome is None else outcome.body
        if body is not None:
            body = attrs.evolve(body, children=tuple(map(no_longer_waiting, body.children)), questions=())
        return Value(cut_body(), now, body=body)
    if isinstance(effect, CallTool):
        text = "Cancelled: something else came first; it may have had effects."
        return Value(ToolResult.error(text, status="cancelled"), now)
    if isinstance(effect, Spawn):
        child = None if outcome is None else outcome.child
        if child is None:
            return Value(ChildResult(agent_id=effect.agent_id, status=RunStatus.CANCELLED), now)
        return Value(no_longer_waiting(child), now)
    return Failure(RaceLost(LOST), now)


async def _cancel_and_wait(work: asyncio.Future[Single]) -> None:
    """Cancel *work* and wait until it has ended, however often this is cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while not work.done():
        work.cancel()
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            again = error
    if again is not None:
        raise again
