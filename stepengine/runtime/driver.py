"""
The loop that feeds outcomes to a machine, the only place where a run waits (design 3, 9).

It knows no records, no replay and no limits: those wrap the performer. One effect is awaited in the run's own task;
only the members of a ``Gather`` and the runs of children get tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from stepengine.data.effects import Ask, CallTool, Gather, Notify, Spawn
from stepengine.data.outcomes import Gathered, Outcome, Single, Stop, Value
from stepengine.machine.plan import Finished
from stepengine.machine.signals import is_callers
from stepengine.runtime.failfast import Group
from stepengine.runtime.performer import Item, child_path
from stepengine.runtime.reports import finished, started
from stepengine.runtime.scope import Scope
from stepengine.runtime.toolcalls import is_deferred

if TYPE_CHECKING:
    from stepengine.runtime.tree import Tree

__all__ = ("drive",)

BREATH = 64
"""After so many effects other tasks get their turn: a scripted run would starve the loop."""


async def drive(machine: Generator[Any, Outcome | None, Finished], scope: Scope) -> Finished:
    """
    Run *machine* to its end; it is closed on every way out.

    A cancellation becomes a ``Stop`` that the machine ends the run with, and is left noted in *scope*.
    """
    send, emit = machine.send, scope.tree.emit
    outcome: Outcome | None = None
    count = 0
    try:
        while True:
            effect = send(outcome)
            if type(effect) is Notify:
                emit(effect.event)
                outcome = None
                continue
            if (scope.stopping is not None or scope.tree.deadlines) and scope.must_stop():
                outcome = scope.refuse(effect)
                continue
            if type(effect) is Gather:
                outcome = await _gather(scope, effect)
            else:
                outcome = await _alone(scope, Item(scope.path, effect, scope.plan))
            count += 1
            if count % BREATH == 0:
                await _breathe(scope)
    except StopIteration as stop:
        result: Finished = stop.value
        return result
    finally:
        machine.close()


async def _alone(scope: Scope, item: Item) -> Single:
    """Perform one effect in the run's own task, and show it; whatever happens is an outcome."""
    tree = scope.tree
    began = _show_start(tree, item) if tree.hub.watched and not _is_known(tree, item) else None
    outcome: Single
    scope.busy = True
    try:
        if began is None and tree.passes(item):
            outcome = await tree.leaves.perform(item, tree)
        else:
            await tree.performer.begin((item,))
            outcome = await tree.performer.perform(item, tree)
        if scope.task.cancelling():  # type: ignore[union-attr]
            scope.notice_cancel()
    except BaseException as error:  # noqa: BLE001
        outcome = _instead(scope, item, error, alone=True)
    finally:
        scope.busy = False
    if type(item.effect) is Ask:
        _remember(tree, item.effect, outcome)
    if began is not None:
        _show_end(tree, item, outcome, began)
    return outcome


async def _perform(scope: Scope, item: Item) -> Single:
    """Perform a member of a ``Gather`` that has begun, and show it; whatever happens is an outcome."""
    tree = scope.tree
    began = _show_start(tree, item) if tree.hub.watched and not _is_known(tree, item) else None
    outcome: Single
    try:
        outcome = await tree.performer.perform(item, tree)
    except BaseException as error:  # noqa: BLE001
        outcome = _instead(scope, item, error, alone=False)
    if type(item.effect) is Ask:
        _remember(tree, item.effect, outcome)
    if began is not None:
        _show_end(tree, item, outcome, began)
    return outcome


def _remember(tree: Tree, effect: Ask, outcome: Single) -> None:
    """Take note of what was allowed for good: here, where answers out of a record pass by like others."""
    if type(outcome) is Value:
        for question, answer in zip(effect.questions, outcome.value, strict=True):
            tree.desk.remembered.take(question, answer)


def _is_known(tree: Tree, item: Item) -> bool:
    """Return whether an effect asks what somebody allowed for good: that is shown to nobody."""
    return type(item.effect) is Ask and all(map(tree.desk.knows, item.effect.questions))


def _show_start(tree: Tree, item: Item) -> int:
    if is_deferred(item):
        # Whoever sees that it began may have its result at once, before the call has come to its body.
        tree.deferred.expect(item)
    for event in started(item):
        tree.emit(event)
    return tree.elapsed()


def _show_end(tree: Tree, item: Item, outcome: Single, began: int) -> None:
    if is_deferred(item):
        tree.deferred.forget(item)
    for event in finished(item, outcome, tree.elapsed() - began):
        tree.emit(event)


def _instead(scope: Scope, item: Item, error: BaseException, *, alone: bool) -> Single:
    """Return the outcome of an effect that ended with an exception instead of one."""
    if isinstance(error, asyncio.CancelledError):
        if alone:
            scope.interrupted()
        return scope.halt(child_path(item.path, item.effect.seq) if type(item.effect) is Spawn else None)
    return _account(scope, error)


def _account(scope: Scope, error: BaseException) -> Stop:
    return scope.crashed(error) if is_callers(error) else scope.broken(error)


async def _gather(scope: Scope, effect: Gather) -> Gathered:
    """Perform the members at once; on a stop those under way are cancelled and waited for."""
    together = _Together(scope, effect)
    scope.busy = True
    try:
        if effect.fail_fast:
            with Group(scope.tree.brake, together.items, has_failed=effect.has_failed) as group:
                await together.run(group)
        else:
            await together.run()
    finally:
        scope.busy = False
    return Gathered(tuple([outcome or scope.halt() for outcome in together.outcomes]))


class _Together:
    """
    The members of one ``Gather`` on their way (requirements X50).

    They are admitted in request order, as far as the window is wide: that is when they begin for those who record and
    reserve. Each starts as soon as there is room for its kind, so that children who wait keep nobody else waiting.
    """

    def __init__(self, scope: Scope, effect: Gather) -> None:
        plan, width = scope.plan, effect.concurrency
        limits = plan.limits if width is None else plan.given
        bounds = {Spawn: limits.max_concurrent_children, CallTool: limits.max_concurrent_tools}
        gather = effect if len(effect.effects) > 1 else None
        self.items = [Item(scope.path, member, plan, gather) for member in effect.effects]
        self.outcomes: list[Single | None] = [None] * len(self.items)
        self._scope = scope
        self._group: Group | None = None
        self._free = len(self.items) if width is None else width
        self._next = 0
        self._room = {kind: len(self.items) if most is None else max(1, most) for kind, most in bounds.items()}
        self._waiting: dict[type[Any], deque[int]] = {}
        self._running: dict[asyncio.Task[None], type[Any]] = {}
        self._ended: asyncio.Future[None] | None = None

    async def run(self, group: Group | None = None) -> None:
        """Return when all members have ended; after a stop no other one starts."""
        self._group = group
        while self._running or (self._scope.stopping is None and self._next < len(self.items)):
            try:
                if self._scope.stopping is None and self._free and self._next < len(self.items):
                    await self._admit()
                else:
                    await self._until_one_ended()
            except asyncio.CancelledError:
                self._scope.interrupted()
                for task in self._running:
                    task.cancel()
            except BaseException as error:  # noqa: BLE001
                _account(self._scope, error)

    async def _admit(self) -> None:
        """Let the next members begin, as many as the window has room for."""
        batch = range(self._next, min(self._next + self._free, len(self.items)))
        self._next += len(batch)
        self._free -= len(batch)
        await self._scope.tree.performer.begin([self.items[index] for index in batch])
        for index in batch:
            self._waiting.setdefault(type(self.items[index].effect), deque()).append(index)
        self._start()

    def _start(self) -> None:
        """Start the members for whose kind there is room."""
        for kind, indices in self._waiting.items():
            while indices and self._room.setdefault(kind, len(self.items)) and self._scope.stopping is None:
                self._room[kind] -= 1
                task = asyncio.create_task(self._work(indices.popleft()))
                self._running[task] = kind
                task.add_done_callback(self._done)

    async def _work(self, index: int) -> None:
        item = self.items[index]
        if self._scope.stopping is not None:
            return
        if self._group is not None:
            self._group.begins(item)
        self.outcomes[index] = outcome = await _perform(self._scope, item)
        if self._group is not None:
            self._group.ended(outcome)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._room[self._running.pop(task)] += 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _account(self._scope, error)
        self._free += 1
        self._start()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    async def _until_one_ended(self) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        try:
            await self._ended
        finally:
            self._ended = None


async def _breathe(scope: Scope) -> None:
    scope.busy = True
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        scope.interrupted()
    finally:
        scope.busy = False
