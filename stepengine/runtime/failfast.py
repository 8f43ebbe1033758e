"""
Giving up the siblings of a child that failed.

It happens inside everything that records, so that what each sibling was stopped with is a recorded outcome like any other:
one that has not begun is refused, one that runs has its next, or present, live effect answered with a ``Stop``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import attrs

from stepengine.data.effects import RUNS, CallBody
from stepengine.data.messages import ToolResult
from stepengine.data.outcomes import Failure, Single, Stop, Value
from stepengine.data.state import ChildResult
from stepengine.errors import AgentError
from stepengine.runtime.performer import IO, Item, Performer, child_path

if TYPE_CHECKING:
    from stepengine.runtime.limits import Refusals

__all__ = ("Brake", "Group", "has_failed")


def has_failed(outcome: Single) -> bool:
    """Return whether a member of a group failed by itself."""
    if type(outcome) is Value:
        return isinstance(outcome.value, ChildResult | ToolResult) and outcome.value.is_error
    return type(outcome) is Failure


class Group:
    """
    The children of one ``Gather`` of which one failure ends all.

    Args:
        brake: The brake of the tree.
        items: The members; only children are stopped.
        has_failed: Whether one failed before any of these began.
    """

    def __init__(self, brake: Brake, items: Sequence[Item], *, has_failed: bool = False) -> None:
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


class Brake:
    """
    Stands beside the gate, and stops the effects of children whose group has failed.

    A child is not cut off: the effects that it waits for are, down to the last leaf, and each run above them ends because
    of that. So a replay, which meets the failure at another moment, ends every run where its record does.

    Args:
        inner: What performs.
        refusals: Shared with the gate: what must not begin.
        now: Milliseconds since the root run was created.
    """

    def __init__(self, inner: Performer, refusals: Refusals, now: Callable[[], int]) -> None:
        self._inner = inner
        self._refusals = refusals
        self._now = now
        self._watched: dict[str, asyncio.Future[None]] = {}
        self._stopped_by: dict[str, asyncio.Future[None]] = {}
        self.begin = inner.begin

    def reaches(self, path: str) -> bool:
        """Return whether the run at *path* may be stopped, for as long as it lasts."""
        return bool(self._watched and self._pulls(path))

    def pulled(self, path: str) -> asyncio.Future[None] | None:
        """Return what is done when the child at *path* must stop, for who drives it elsewhere; ``None`` when nothing will say so."""
        return self._watched.get(path)

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
        """Pass an effect on; one of a watched child, or of a run below it, can be interrupted."""
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
        if type(outcome) is not Value or cause is None or cause not in pulls:
            return outcome
        self._stopped_by[item.path] = cause
        if type(item.effect) is CallBody:
            return Stop("cancelled", outcome.at, body=outcome.body)
        return Stop("cancelled", outcome.at, child=outcome.value)

    async def _interruptible(self, item: Item, io: IO, pulls: Sequence[asyncio.Future[None]]) -> Single:
        if any(pull.done() for pull in pulls):
            return self._stop(item, pulls)
        work = asyncio.ensure_future(self._inner.perform(item, io))
        waited: list[asyncio.Future[Any]] = [work, *pulls]
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                await _ended(work)
        return attrs.evolve(self._stop(item, pulls), begun=io.begun(item)) if work.cancelled() else work.result()

    def _stop(self, item: Item, pulls: Sequence[asyncio.Future[None]]) -> Stop:
        self._stopped_by[item.path] = next(pull for pull in pulls if pull.done())
        return Stop("cancelled", self._now())


async def _ended(work: asyncio.Future[Single]) -> None:
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
