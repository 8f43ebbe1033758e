"""
The loop that feeds outcomes to a machine, the only place where a run waits (design 3, 9).

It knows no records, no replay and no limits: those wrap the performer. One effect is awaited in the run's own task;
only the members of a ``Gather`` and the runs of children get tasks of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from stepengine.data.effects import CallTool, Gather, Notify, Spawn
from stepengine.data.outcomes import Gathered, Outcome, Single
from stepengine.machine.plan import Finished
from stepengine.runtime.failfast import Group
from stepengine.runtime.performer import Item, child_path
from stepengine.runtime.reports import finished, started
from stepengine.runtime.scope import Scope

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
            if scope.stopping is not None:
                outcome = scope.refuse(effect)
                continue
            if type(effect) is Gather:
                outcome = await _gather(scope, effect)
            else:
                outcome = await _perform(scope, Item(scope.path, effect, scope.plan), alone=True)
            count += 1
            if count % BREATH == 0:
                await _breathe(scope)
    except StopIteration as stop:
        result: Finished = stop.value
        return result
    finally:
        machine.close()


async def _perform(scope: Scope, item: Item, *, alone: bool) -> Single:
    """Perform one effect and show it; whatever happens is an outcome. *alone* says that this is the run's own task."""
    tree = scope.tree
    began = _show_start(tree, item) if tree.hub.watched else None
    outcome: Single
    try:
        if alone:
            scope.busy = True
            await tree.performer.begin((item,))
        outcome = await tree.performer.perform(item, tree)
        if alone and scope.task.cancelling():  # type: ignore[union-attr]
            scope.notice_cancel()
    except BaseException as error:  # noqa: BLE001
        outcome = _instead(scope, item, error, alone=alone)
    finally:
        if alone:
            scope.busy = False
    if began is not None:
        for event in finished(item, outcome, tree.elapsed() - began):
            tree.emit(event)
    return outcome


def _show_start(tree: Tree, item: Item) -> int:
    for event in started(item):
        tree.emit(event)
    return tree.elapsed()


def _instead(scope: Scope, item: Item, error: BaseException, *, alone: bool) -> Single:
    """Return the outcome of an effect that ended with an exception instead of one."""
    if isinstance(error, asyncio.CancelledError):
        if alone:
            scope.interrupted()
        return scope.halt(child_path(item.path, item.effect.seq) if type(item.effect) is Spawn else None)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return scope.crashed(error)
    if isinstance(error, Exception):
        return scope.broken(error)
    raise error


async def _gather(scope: Scope, effect: Gather) -> Gathered:
    """Perform the members at once, in lanes; on a stop the members under way are cancelled and waited for."""
    items = [Item(scope.path, member, scope.plan) for member in effect.effects]
    outcomes: list[Single | None] = [None] * len(items)
    scope.busy = True
    try:
        await scope.tree.performer.begin(items)
        if effect.fail_fast:
            with Group(scope.tree.brake, items) as group:
                await _lanes(scope, items, outcomes, effect.concurrency, group)
        else:
            await _lanes(scope, items, outcomes, effect.concurrency)
    except asyncio.CancelledError:
        scope.interrupted()
    except Exception as error:  # noqa: BLE001
        scope.broken(error)
    finally:
        scope.busy = False
    return Gathered(tuple([outcome or scope.halt() for outcome in outcomes]))


async def _lanes(
    scope: Scope,
    items: Sequence[Item],
    outcomes: list[Single | None],
    concurrency: int | None,
    group: Group | None = None,
) -> None:
    numbered = list(enumerate(items))
    limits = scope.plan.limits
    bounds = {Spawn: limits.max_concurrent_children, CallTool: limits.max_concurrent_tools}
    kinds = dict.fromkeys([type(item.effect) for item in items])
    lanes: list[Iterator[tuple[int, Item]]] = []
    for kind in kinds:
        members = [pair for pair in numbered if type(pair[1].effect) is kind]
        lanes += _shared(members, concurrency, bounds.get(kind))
    tasks = [asyncio.create_task(_work(scope, lane, outcomes, group)) for lane in lanes]
    pending: set[asyncio.Task[None]] = set(tasks)
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError:
            scope.interrupted()
            for task in tasks:
                task.cancel()


def _shared(members: list[tuple[int, Item]], *bounds: int | None) -> list[Iterator[tuple[int, Item]]]:
    """Return one shared iterator for each worker that may take members from it."""
    width = min([len(members), *[bound for bound in bounds if bound is not None]])
    return [iter(members)] * width


async def _work(
    scope: Scope, members: Iterator[tuple[int, Item]], outcomes: list[Single | None], group: Group | None
) -> None:
    for index, item in members:
        if scope.stopping is None:
            if group is not None:
                group.begins(item)
            outcomes[index] = outcome = await _perform(scope, item, alone=False)
            if group is not None:
                group.ended(outcome)
        else:
            outcomes[index] = scope.halt()


async def _breathe(scope: Scope) -> None:
    scope.busy = True
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        scope.interrupted()
    finally:
        scope.busy = False
