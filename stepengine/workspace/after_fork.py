"""
Forks: pausing work before a fork, and rebuilding state in the child, which has its parent's memory but none of its threads.

Objects with threads, locks, event loops or connections are registered here. They are rebuilt before any other code of the child
runs. Resources of the parent are never released in a child, not even by garbage collection: the selector of an event loop and the
connections to servers are shared by both.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

Function = TypeVar("Function", bound=Callable[[], None])

PATIENCE_SECONDS = 10.0
"""
Seconds for which a fork waits for each busy object. Then the fork happens nevertheless, since a program that hangs is
worse.
"""


class ForkResettable(Protocol):
    """An object that resets itself in forked child processes."""

    def reset_after_fork(self) -> None:
        """Reset the state that the parent's threads use, without waiting for any of them."""


_things: weakref.WeakSet[Any] = weakref.WeakSet()
_functions: list[Callable[[], None]] = []
_resting: list[tuple[Callable[[], None], Callable[[], None]]] = []
_left: list[Any] = []


def register_for_fork_reset(resettable: ForkResettable) -> None:
    """Call ``reset_after_fork`` of *resettable* in every forked child; the reference to it is weak."""
    _things.add(resettable)


def call_in_forked_child(function: Function) -> Function:
    """A decorator: call the module function in every forked child."""
    _functions.append(function)
    return function


def register_fork_hooks(before: Callable[[], None], after: Callable[[], None]) -> None:
    """Register two functions that the parent calls at every fork: *before* ahead of it and *after* when it is done."""
    _resting.append((before, after))


def hold_references(*objects: object) -> None:
    """Store references to the parent's objects in this child, so that they are never closed here."""
    _left.extend(objects)


def _run_before_fork() -> None:
    """Call the registered functions before a fork."""
    for before, _ in _resting:
        before()


def _run_after_fork() -> None:
    """Call the registered functions in the parent after a fork."""
    for _, after in _resting:
        after()


def _reset_all_in_child() -> None:
    """Reset the registered objects and call the registered functions in a forked child."""
    for thing in list(_things):
        thing.reset_after_fork()
    for function in _functions:
        function()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_run_before_fork, after_in_parent=_run_after_fork, after_in_child=_reset_all_in_child)


class Lock:
    """A lock that is free in a forked child, whichever thread of the parent had it."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        register_for_fork_reset(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()

    def acquire(self, timeout: float = -1) -> bool:
        """Acquire the lock, and return True if this took at most *timeout* seconds; -1 waits without a limit."""
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()

    def reset_after_fork(self) -> None:
        """Replace the lock by a free one."""
        self._lock = threading.Lock()
