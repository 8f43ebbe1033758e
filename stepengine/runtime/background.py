"""
The children that run in the background of one tree.

Each is driven in a task of its own, and performed through everything that records as one effect at its own path and -1, so that
its end is an outcome like any other. None outlives the run that started it: that one ends those of which it was not told, and where
it is stopped itself, whoever drives it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs

from stepengine.data.effects import RunInBackground, Spawn
from stepengine.data.outcomes import Single, Stop, Value
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunStatus, no_longer_waiting
from stepengine.errors import AgentError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.runtime.effect_events import ended
from stepengine.runtime.performer import Item, Performer
from stepengine.runtime.run_protocol import Run
from stepengine.runtime.standstill import RestingTree

__all__ = ("BackgroundChild", "BackgroundChildren", "TreeWithBackground")


class BackgroundChild:
    """
    One child in the background.

    Attributes:
        path: Its path.
        effect: What started it.
        outcome: How it ended, once it has.
        stopping: Why it must end, once somebody said so.
        is_ended: Whether it was ended by its parent, which is an end like any other; else its tree was stopped.
        is_told: Whether its parent was told how it ended.
    """

    __slots__ = ("effect", "is_ended", "is_told", "outcome", "path", "stopping", "task")

    def __init__(self, path: str, effect: Spawn) -> None:
        self.path = path
        self.effect = effect
        self.outcome: Single | None = None
        self.stopping: Stop | None = None
        self.is_ended = self.is_told = False
        self.task: asyncio.Task[None] | None = None

    @property
    def result(self) -> ChildResult[Any] | None:
        """How it ended; ``None`` as long as it has not, or only stands still."""
        outcome = self.outcome
        return outcome.value if isinstance(outcome, Value) else None


class BackgroundChildren:
    """
    The children in the background of one tree, by path.

    Args:
        tree: The tree.

    Attributes:
        children: Those that were started, by their paths.
        of: The same by the paths of the runs that started them.
        suspended: The open questions of those that were suspended, by id.
    """

    def __init__(self, tree: RestingTree) -> None:
        self._tree = tree
        self.children: dict[str, BackgroundChild] = {}
        self.of: dict[str, list[BackgroundChild]] = {}
        self.suspended: dict[str, Question] = {}
        self._ends: list[asyncio.Future[None]] = []

    def is_used_by(self, path: str) -> bool:
        """Return whether a child that the run at *path* started here is at work."""
        return any(child.outcome is None for child in self.of.get(path, ()))

    def close(self) -> None:
        """Forget the tree, which has ended."""
        del self._tree

    def start(self, item: Item, plan: RunPlan, state: AgentState, performer: Performer) -> None:
        """Start the child of an effect: from now on it is at work."""
        assert isinstance(item.effect, Spawn)  # noqa: S101
        child = self.children[plan.path] = BackgroundChild(plan.path, item.effect)
        self.of.setdefault(item.path, []).append(child)
        asked = Item(plan.path, RunInBackground(plan.definition.id, plan=plan, state=state), plan)
        child.task = asyncio.create_task(self._run(child, item, asked, performer))

    async def _run(self, child: BackgroundChild, item: Item, asked: Item, performer: Performer) -> None:
        tree = self._tree
        try:
            outcome = await performer.perform(asked, tree)
        except asyncio.CancelledError:
            outcome = Stop("cancelled", tree.clock.elapsed())
        # This task is awaited by nobody in particular, so an error that left it would be lost; it ends the tree
        # instead.
        except BaseException as error:  # noqa: BLE001
            tree.root.broken(error)
            outcome = tree.root.halt()
        child.outcome = outcome
        if isinstance(outcome, Value):
            tree.standstill.drop(child.path)
        if tree.hub.watched:
            for event in ended(item, outcome):
                tree.emit(event)
        ends, self._ends = self._ends, []
        for future in ends:
            if not future.done():
                future.set_result(None)
        tree.standstill.look()

    def at_work(self) -> Iterator[str]:
        """Give the paths of those that have not ended, the youngest first."""
        return (child.path for child in reversed(self.children.values()) if child.outcome is None)

    def is_at_work(self, path: str) -> bool:
        """Return whether there is a child at *path* that has not ended."""
        child = self.children.get(path)
        return child is not None and child.outcome is None

    def stopping(self, path: str) -> Stop | None:
        """Return why the child at *path* must end without having begun; ``None`` when it may begin."""
        child = self.children.get(path)
        return None if child is None else child.stopping

    def child(self, path: str) -> BackgroundChild:
        """Return the child at a path."""
        return self.children[path]

    def done(self, paths: Sequence[str]) -> list[str]:
        """Return those of *paths* whose children have ended, in the order of their recorded ends."""
        # By recorded time, and then by path: which of two was first is what the record says, not what this process saw
        # (a replay sees both at once).
        found = [(self.children[path].outcome, path) for path in paths if self.children[path].result is not None]
        return [path for _, path in sorted([(outcome.at, path) for outcome, path in found if outcome is not None])]

    def results(self, paths: Sequence[str]) -> dict[str, ChildResult[Any]]:
        """Return how the children at *paths* ended, all of which have; the caller tells their parent."""
        found: dict[str, ChildResult[Any]] = {}
        for path in paths:
            child = self.children[path]
            assert child.result is not None  # noqa: S101
            child.is_told = True
            found[path] = child.result
        return found

    def one_end(self) -> asyncio.Future[None]:
        """Return what is done as soon as any child ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.append(future)
        return future

    def has_ended(self, paths: Sequence[str]) -> bool:
        """Return whether none of these is at work any more."""
        return all(self.children[path].outcome is not None for path in paths)

    async def all_ended(self, paths: Sequence[str]) -> bool:
        """Wait until these have ended; return whether each of them has an end of its own, and was not stopped with its tree."""
        tasks = [task for path in paths if (task := self.children[path].task) is not None]
        if tasks:
            await asyncio.wait(tasks)
        return all(self.children[path].result is not None for path in paths)

    async def ends(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> dict[str, Any] | None:
        """
        Return how children in the background ended, once they have; ``None`` where one was stopped with its tree.

        With *cut*, which says that they will not end as recorded, it is also ``None`` once that is done, or the tree stands still.
        """
        if cut is not None and not await self._ended_unless(cut, item, paths):
            return None
        if not await self.all_ended(paths):
            return None
        return self.results(paths)

    async def _ended_unless(self, cut: asyncio.Future[None], item: Item, paths: Sequence[str]) -> bool:
        """Wait until these have ended, and return that they have; not once *cut* is done, or the tree stands still."""
        while not self.has_ended(paths):
            # Shielded: this wait may be given up, and others wait for the same end.
            came = await self._tree.standstill.until(item, (), self.one_end, lambda: asyncio.shield(cut))
            if cut.done() or not came:
                return False
        return True

    def end(self, paths: Sequence[str], reason: str) -> None:
        """End children because their parent wants it: their end is recorded."""
        for path in paths:
            child = self.children[path]
            # The first word counts: a child that is ended twice, or ended while its tree stops, has one end.
            if child.outcome is None and child.stopping is None:
                child.is_ended = True
                child.stopping = Stop("cancelled", error=AgentError(reason) if reason else None)
                self._stop(path, child.stopping)

    async def end_with(self, path: str, stop: Stop | None) -> list[ChildResult[Any]]:
        """
        Wait until no child of the run at *path*, which has ended, is at work; *stop* is why they must end, if they must.

        Returns:
            How those ended of which their parent was not told.
        """
        if stop is not None:
            self.stop_all(path, stop)
        left = [child for child in self.of.get(path, ()) if not child.is_told]
        tasks = [child.task for child in left if child.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        found = [_result_of(child) for child in left]
        return [child for child in found if child is not None]

    async def settle(self, run: Run, finished: Finished) -> Finished:
        """
        Return how a run ended once nothing that it started in the background is at work; what that spent is its own, too.

        Its children are stopped where it was. Where it came to the end of what is recorded of it, each of them does so by itself,
        after all that is recorded of that one.
        """
        # Said to the standstill: this run is at its end and only waits for its children, so it does not count as one
        # that is at work, or a tree whose children all wait could never lie down.
        run.start_waiting()
        stop = None if self._tree.root.spares or run.stopping is None else _stop_below(run)
        work = asyncio.create_task(self.end_with(run.path, stop))
        self._tree.standstill.look()
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.interrupted()
                self.stop_all(run.path, _stop_below(run))
        run.end_waiting()
        left = work.result()
        self.forget(run.path)
        if not left:
            return finished
        if finished.status is not RunStatus.SUSPENDED:
            left = [no_longer_waiting(child) for child in left]
        spending = finished.spending
        for child in left:
            spending += child.spending
            self.suspended.update({question.id: question for question in child.questions})
        return attrs.evolve(finished, spending=spending, children=(*finished.children, *left))

    def stop_all(self, path: str, stop: Stop) -> None:
        """Stop what the run at *path* has in the background; nobody records that as an end."""
        for child in self.of.get(path, ()):
            if child.outcome is None and child.stopping is None:
                # No end: whoever goes on with the tree starts it again over its record.
                child.stopping = stop
                self._stop(child.path, stop)

    def _stop(self, path: str, stop: Stop) -> None:
        self._tree.runs.stop(path, stop)
        self._tree.standstill.release(path)

    def forget(self, path: str) -> None:
        """Forget the children of a run that has ended."""
        for child in self.of.pop(path, ()):
            del self.children[child.path]


class TreeWithBackground(RestingTree, Protocol):
    """A run tree with its children in the background."""

    @property
    def background(self) -> BackgroundChildren:
        """The children in the background."""


def _result_of(child: BackgroundChild) -> ChildResult[Any] | None:
    outcome = child.outcome
    return outcome.child if isinstance(outcome, Stop) else child.result


def _stop_below(run: Run) -> Stop:
    """Return why what a stopped run has in the background ends: of a body no reason is recorded that a replay could tell them."""
    stop = run.stopping or Stop("cancelled")
    return Stop("cancelled") if run.plan.body is not None and stop.kind in {"cancelled", "limit"} else stop
