"""
Forks: what is brought to rest before one, and what a child makes anew: it has its parent's memory, and none of its threads.

Whatever holds threads, locks, event loops or connections is registered here, and renewed before any other code of the child
runs. What belongs to the parent is never given back in a child, not even by garbage collection: the selector of an event loop
and the connections to servers are the same ones in both.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

__all__ = ("PATIENCE_SECONDS", "Lock", "Renewable", "leave", "renewed", "renews", "rests")

Function = TypeVar("Function", bound=Callable[[], None])

PATIENCE_SECONDS = 10.0
"""
Seconds for which a fork waits for each thing that is not at rest; then it takes place nevertheless: a program that
hangs is worse.
"""


class Renewable(Protocol):
    """Something that a forked child makes anew."""

    def renew(self) -> None:
        """Forget what the parent's threads do, without waiting for any of them."""


_things: weakref.WeakSet[Any] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []
_resting: list[tuple[Callable[[], None], Callable[[], None]]] = []
_left: list[Any] = []


def renewed(thing: Renewable) -> None:
    """Have *thing* renewed in every child that is forked while it lives; it is referred to weakly."""
    _things.add(thing)


def renews(function: Function) -> Function:
    """Have a function of a module called in every child: a decorator."""
    _functions.append(function)
    return function


def rests(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Have *before* called ahead of every fork, and *after* behind it, in the parent alone; both for as long as the process lives."""
    _resting.append((before, after))


def leave(*things: object) -> None:
    """Keep in this child what is its parent's, so that nothing of it is ever closed here."""
    _left.extend(things)


def _rest() -> None:
    for before, _ in _resting:
        before()


def _go_on() -> None:
    for _, after in _resting:
        after()


def _renew() -> None:
    for thing in list(_things):
        thing.renew()
    for function in _functions:
        function()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest, after_in_parent=_go_on, after_in_child=_renew)


class Lock:
    """A lock that is free in a forked child, whichever thread of the parent had it."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        renewed(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def acquire(self, timeout: float = -1) -> bool:
        """Take the lock, and return whether that came about within *timeout* seconds; with -1 it is waited for as long as it takes."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Give the lock back."""
        self._lock.release()

    def renew(self) -> None:
        """Be free."""
        self._lock = threading.Lock()
