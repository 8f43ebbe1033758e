"""
The children that run in the background of one tree.

Each is driven in a task of its own, and performed through everything that records as one effect at its own path and -1, so that
its end is an outcome like any other. None outlives the run that started it: at a normal end the machine of that run cancels or
awaits those whose results it has not received. If the run was stopped, ``await_children_at_end`` stops them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from stepengine.data.effects import RunInBackground, Spawn
from stepengine.data.outcomes import Single, Stop, Value, make_descendant_stop
from stepengine.data.questions import Question
from stepengine.data.state import AgentState, ChildResult, RunStatus, mark_suspended_as_cancelled
from stepengine.errors import AgentError
from stepengine.machine.plan import Finished, RunPlan
from stepengine.machine.usage_totals import mark_stopped_as_cancelled
from stepengine.runtime.effect_events import make_child_end_events
from stepengine.runtime.performer import Item, Performer
from stepengine.runtime.run_protocol import Run
from stepengine.runtime.suspension import TreeWithSuspension


class BackgroundChild:
    """
    One child in the background.

    Attributes:
        path: Its path.
        effect: The effect that started it.
        outcome: Its outcome; ``None`` while it runs.
        stopping: The reason why it must end; ``None`` until it is stopped.
        is_ended: Whether its parent ended it, which is recorded as its end; otherwise its tree was stopped.
        is_told: Whether its parent has received its result.
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
        """Its result; ``None`` while it runs or is suspended."""
        outcome = self.outcome
        return outcome.value if isinstance(outcome, Value) else None


class BackgroundChildren:
    """
    The children in the background of one tree, by path.

    Args:
        tree: The tree.

    Attributes:
        children: Those that were started, by their paths.
        by_parent_path: The same children by the paths of the runs that started them.
        suspended: The open questions of those that were suspended, by id.
    """

    def __init__(self, tree: TreeWithSuspension) -> None:
        self._tree = tree
        self.children: dict[str, BackgroundChild] = {}
        self.by_parent_path: dict[str, list[BackgroundChild]] = {}
        self.suspended: dict[str, Question] = {}
        self._ends: list[asyncio.Future[None]] = []

    def has_running_child(self, path: str) -> bool:
        """Return whether a background child of the run at *path* is still running here."""
        return any(child.outcome is None for child in self.by_parent_path.get(path, ()))

    def close(self) -> None:
        """Forget the tree, which has ended."""
        del self._tree

    def start_child(self, item: Item, plan: RunPlan, state: AgentState, performer: Performer) -> None:
        """Register the child of a ``Spawn``, and start it through *performer* in a task of its own."""
        assert isinstance(item.effect, Spawn)  # noqa: S101
        child = self.children[plan.path] = BackgroundChild(plan.path, item.effect)
        self.by_parent_path.setdefault(item.path, []).append(child)
        asked = Item(plan.path, RunInBackground(plan.agent.definition.id, plan=plan, state=state), plan)
        child.task = asyncio.create_task(self._run_child_and_report_end(child, item, asked, performer))

    async def _run_child_and_report_end(
        self, child: BackgroundChild, item: Item, run_item: Item, performer: Performer
    ) -> None:
        """Run a child, store its outcome, emit its end and wake those that wait for it; an error stops the tree."""
        tree = self._tree
        try:
            outcome = await performer.perform(run_item, tree)
        except asyncio.CancelledError:
            outcome = Stop("cancelled", tree.clock.elapsed_ms())
        # This task is awaited by nobody in particular, so an error that left it would be lost; it ends the tree
        # instead.
        except BaseException as error:  # noqa: BLE001
            tree.root.stop_with_error(error)
            outcome = tree.root.make_stop()
        child.outcome = outcome
        if isinstance(outcome, Value):
            tree.suspension.drop_waits(child.path)
        if tree.hub.watched:
            for event in make_child_end_events(item, outcome):
                tree.emit(event)
        ends, self._ends = self._ends, []
        for future in ends:
            if not future.done():
                future.set_result(None)
        tree.suspension.release_or_suspend_idle_tree()

    def iterate_running_paths(self) -> Iterator[str]:
        """Yield the paths of running children, the youngest first."""
        return (child.path for child in reversed(self.children.values()) if child.outcome is None)

    def is_running(self, path: str) -> bool:
        """Return whether the child at *path* is still running."""
        child = self.children.get(path)
        return child is not None and child.outcome is None

    def find_child_stop(self, path: str) -> Stop | None:
        """Return the reason why the child at *path* must end before it starts, or ``None``."""
        child = self.children.get(path)
        return None if child is None else child.stopping

    def get_child(self, path: str) -> BackgroundChild:
        """Return the child at a path."""
        return self.children[path]

    def list_ended(self, paths: Sequence[str]) -> list[str]:
        """Return the *paths* of ended children, in the order of their recorded ends."""
        # By recorded time, and then by path: which of two was first is what the record says, not what this process saw
        # (a replay sees both at once).
        found = [(self.children[path].outcome, path) for path in paths if self.children[path].result is not None]
        return [path for _, path in sorted([(outcome.at, path) for outcome, path in found if outcome is not None])]

    def get_results(self, paths: Sequence[str]) -> dict[str, ChildResult[Any]]:
        """Return the results of the ended children at *paths*."""
        return {path: child.result for path in paths if (child := self.children[path]).result is not None}

    def mark_results_received(self, paths: Sequence[str]) -> None:
        """Record that the parent of the children at *paths* has their results."""
        for path in paths:
            self.children[path].is_told = True

    def make_end_future(self) -> asyncio.Future[None]:
        """Return a future that is done when any child ends."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ends.append(future)
        return future

    async def wait_for_ends(self, paths: Sequence[str]) -> bool:
        """Wait until the children at *paths* have ended; return False if one of them was only stopped with its tree."""
        tasks = [task for path in paths if (task := self.children[path].task) is not None]
        if tasks:
            await asyncio.wait(tasks)
        return all(self.children[path].result is not None for path in paths)

    async def wait_for_children(
        self, item: Item, paths: Sequence[str], cut: asyncio.Future[None] | None = None
    ) -> dict[str, Any] | None:
        """
        Wait for children and return their results; ``None`` if one was stopped with its tree or *cut* is done.

        *cut* is done when they will not end as recorded. With *cut* it is also ``None`` if the tree is suspended.
        """
        if cut is not None and not await self._wait_unless_cut(cut, item, paths):
            return None
        if not await self.wait_for_ends(paths):
            return None
        self.mark_results_received(paths)
        return self.get_results(paths)

    async def _wait_unless_cut(self, cut: asyncio.Future[None], item: Item, paths: Sequence[str]) -> bool:
        """Wait until the children at *paths* have ended; return False if *cut* is done first or the tree is suspended."""
        while any(self.children[path].outcome is None for path in paths):
            # Shielded: this wait may be given up, and others wait for the same end.
            came = await self._tree.suspension.wait_for_first_or_suspension(
                item, (), self.make_end_future, lambda: asyncio.shield(cut)
            )
            if cut.done() or not came:
                return False
        return True

    def cancel_children(self, paths: Sequence[str], reason: str) -> None:
        """Cancel children at their parent's request; their end is recorded."""
        for path in paths:
            child = self.children[path]
            # The first word counts: a child that is ended twice, or ended while its tree stops, has one end.
            if child.outcome is None and child.stopping is None:
                child.is_ended = True
                child.stopping = Stop("cancelled", error=AgentError(reason) if reason else None)
                self._stop_and_wake_child(path, child.stopping)

    async def stop_and_await_children(self, path: str, stop: Stop | None) -> list[ChildResult[Any]]:
        """
        Stop a run's background children with *stop*, unless it is ``None``, and await them; return the results not reported to it.

        Returns:
            The results of the children that were not reported to their parent.
        """
        if stop is not None:
            self.stop_children_of(path, stop)
        left = [child for child in self.by_parent_path.get(path, ()) if not child.is_told]
        tasks = [child.task for child in left if child.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        found = [_find_result_even_if_stopped(child) for child in left]
        return [child for child in found if child is not None]

    async def await_children_at_end(self, run: Run, finished: Finished) -> Finished:
        """
        Await a run's background children, stopped if the run is, and forget them; return its end with their spending added.

        Its children are stopped where it was. Where it came to the end of what is recorded of it, each of them does so by itself,
        after all that is recorded of that one.
        """
        # The detector is told: this run is at its end and only waits for its children, so it does not count as one
        # that is at work, or a tree whose children all wait could never lie down.
        run.start_waiting_for_children()
        is_spared = self._tree.root.is_in_grace and not run.is_cut
        stop = None if is_spared or run.stopping is None else _make_stop_for_children(run)
        work = asyncio.create_task(self.stop_and_await_children(run.path, stop))
        self._tree.suspension.release_or_suspend_idle_tree()
        while not work.done():
            try:
                await asyncio.wait((work,))
            except asyncio.CancelledError:
                run.absorb_cancellation()
                self.stop_children_of(run.path, _make_stop_for_children(run))
        run.end_waiting_for_children()
        left = work.result()
        self.forget_children_of(run.path)
        if not left:
            return finished
        if finished.status is not RunStatus.SUSPENDED:
            left = [mark_suspended_as_cancelled(child) for child in left]
        for child in left:
            self.suspended.update({question.id: question for question in child.questions})
        return finished.with_children(left)

    def stop_children_of(self, path: str, stop: Stop) -> None:
        """Stop the background children of the run at *path* without recording an end."""
        for child in self.by_parent_path.get(path, ()):
            if child.outcome is None and child.stopping is None:
                # No end: whoever goes on with the tree starts it again over its record.
                child.stopping = stop
                self._stop_and_wake_child(child.path, stop)

    def _stop_and_wake_child(self, path: str, stop: Stop) -> None:
        """Stop the child at *path* and all runs below it, and end its wait if it is suspended."""
        self._tree.runs.stop(path, stop)
        self._tree.suspension.end_background_wait(path)

    def forget_children_of(self, path: str) -> None:
        """Forget the children of a run that has ended."""
        for child in self.by_parent_path.pop(path, ()):
            del self.children[child.path]


class TreeWithBackground(TreeWithSuspension, Protocol):
    """A run tree with its children in the background."""

    @property
    def background(self) -> BackgroundChildren:
        """The children in the background."""


def _find_result_even_if_stopped(child: BackgroundChild) -> ChildResult[Any] | None:
    """Return the result of a child, also of one that was stopped with its tree; ``None`` if it left none."""
    outcome = child.outcome
    if not isinstance(outcome, Stop):
        return child.result
    return None if outcome.child is None else mark_stopped_as_cancelled(outcome.child)


def _make_stop_for_children(run: Run) -> Stop:
    return make_descendant_stop(run.stopping or Stop("cancelled"))
