"""
Workers of the sandbox that check programs, and the signal that ends a check.

A check may take long, even for a short program. So each check has its own worker, and several run at once. A check waits only if
all workers of the pool are busy. The signal ends a check from another thread and kills its worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from stepengine.errors import ToolError
from stepengine.workspace.after_fork import Lock

STOPPED = "the program was stopped"
POLL_SECONDS = 0.1
"""How often a check that waits for a free worker checks its stop signal."""


class Checkout(Protocol):
    """A function that opens a session of the sandbox in its own worker."""

    def __call__(self, **options: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager of a session; *options* are those of the pool's ``checkout``."""


class StopSignal:
    """
    Ends the work of another thread, permanently.

    Attributes:
        is_sent: Whether the signal was sent.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._end: Callable[[], None] | None = None
        self.is_sent = False

    def send(self) -> None:
        """End the current work. Work that starts later ends at once."""
        with self._lock:
            self.is_sent = True
            if self._end is not None:
                self._end()

    @contextlib.contextmanager
    def call_when_sent(self, end: Callable[[], None]) -> Iterator[None]:
        """Call *end* if the signal is sent inside the block or was sent before; never after the block."""
        with self._lock:
            self._end = end
            if self.is_sent:
                end()
        try:
            yield
        finally:
            with self._lock:
                self._end = None


class CheckWorkers:
    """
    Workers for checks.

    Args:
        start_pool: Starts a pool of workers, given its ``checkout_timeout``.
    """

    def __init__(self, start_pool: Callable[..., Any]) -> None:
        self._start_pool = start_pool
        self._lock = Lock()
        self._pool: Any = None
        self.count = 0
        """Sessions that are open or wait for a worker."""

    @contextlib.contextmanager
    def checkout(self, stop: StopSignal | None = None, **options: Any) -> Iterator[Any]:
        """
        Wait for a free worker, open a session in it, yield the session, and close it at the end.

        Args:
            stop: Ends the session, or the wait for a worker.
            options: The session's options, those of the pool's ``checkout``.

        Raises:
            ToolError: when *stop* was sent before the end of the block, even if the block succeeded.
        """
        stop = stop or StopSignal()
        with self._lock:
            self.count += 1
        try:
            session = self._open_session(stop, options)
            pid = session.worker_pid  # not known while it works
            try:
                with stop.call_when_sent(lambda: kill_process(pid)):
                    yield session
            finally:
                with contextlib.suppress(Exception):  # a worker that has crashed already
                    session.__exit__(None, None, None)
        finally:
            with self._lock:
                self.count -= 1
            if stop.is_sent:
                raise ToolError(STOPPED)

    def _open_session(self, stop: StopSignal, options: dict[str, Any]) -> Any:
        """Wait for a free worker, open a session in it and return the session; raise ``ToolError`` when *stop* is sent."""
        while not stop.is_sent:
            session = self._get_or_start_pool().checkout(**options)
            with contextlib.suppress(TimeoutError):  # every worker is taken
                session.__enter__()
                return session
        raise ToolError(STOPPED)

    def _get_or_start_pool(self) -> Any:
        with self._lock:
            if self._pool is None:
                self._pool = self._start_pool(checkout_timeout=POLL_SECONDS)
            return self._pool

    def close(self) -> None:
        """End the workers; the next check starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.__exit__(None, None, None)


def kill_process(pid: int) -> None:
    """Kill a worker's process, if it has not ended."""
    with contextlib.suppress(ProcessLookupError):  # it has ended just now
        os.kill(pid, signal.SIGKILL)
