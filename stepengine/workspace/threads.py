"""
``ThreadPool``: runs synchronous bodies of tools.

A thread cannot be killed. A body that does not stop when its call ends is *abandoned*: its thread continues under a name that the run
reports. The pool then may start another thread in its place, so that abandoned bodies do not block others.
Threads are daemons and end after they have been idle for a while.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from stepengine.workspace.after_fork import register_for_fork_reset

if TYPE_CHECKING:
    import asyncio

THREADS = 32
"""Tools mostly wait for disks and networks; concurrent children rarely need more threads, and each thread has a stack."""
CANCEL_GRACE_SECONDS = 5.0
"""A body that checks its signal ends in time; after a stop, people do not wait longer for other bodies."""

IDLE_SECONDS = 10.0
"""Longer than the time between two steps, so that a run keeps its thread."""

ResultCallback: TypeAlias = "Callable[[Any, BaseException | None], object]"
"""Receives the return value of a body, or its exception."""


class CancelSignal(Protocol):
    """A cancellation signal, such as a ``threading.Event``."""

    def is_set(self) -> bool:
        """Return whether the call should stop."""


CANCELLED: contextvars.ContextVar[CancelSignal | None] = contextvars.ContextVar("stepengine_cancelled", default=None)
"""The signal to stop for the call whose body runs in this thread."""


class Settable(CancelSignal, Protocol):
    """A cancellation signal that can be set."""

    def set(self) -> None:
        """Set the signal."""


class _ThreadTask:
    """A function that runs in a thread."""

    __slots__ = (
        "abandoned",
        "body",
        "context",
        "done",
        "future",
        "lock",
        "loop",
        "name",
        "outcome",
        "started",
        "tells",
        "thread",
    )

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        loop: asyncio.AbstractEventLoop,
        tells: ResultCallback | None = None,
    ) -> None:
        self.name = name
        self.body = body
        self.loop = loop
        self.tells = tells
        self.context = contextvars.copy_context()
        self.future: asyncio.Future[Any] | None = None if tells is not None else loop.create_future()
        self.lock = threading.Lock()
        self.started = self.done = self.abandoned = False
        self.thread = ""
        self.outcome: tuple[bool, Any] = (True, None)

    def run(self) -> None:
        """Run the body in this thread, and schedule the delivery of its result in the event loop."""
        try:
            self.outcome = (True, self.context.run(self.body))
        except BaseException as error:  # noqa: BLE001  (it is raised again in the thread that waits)
            self.outcome = (False, error)
        with self.lock:
            self.done = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
            self.loop.call_soon_threadsafe(self._deliver_result)

    def _deliver_result(self) -> None:
        """Pass the result to the callback, or wake the caller that waits for it; runs in the event loop."""
        if self.tells is not None:
            succeeded, value = self.outcome
            self.tells(*((value, None) if succeeded else (None, value)))
        elif self.future is not None and not self.future.done():
            self.future.set_result(None)


class ThreadPool:
    """
    At most *size* threads for synchronous bodies; abandoned threads do not count.

    Args:
        size: The number of bodies that may run at once.
        grace: The seconds until a cancelled body is abandoned.
    """

    def __init__(self, size: int = THREADS, *, grace: float = CANCEL_GRACE_SECONDS) -> None:
        self._size = size
        self._grace = grace
        self._ready = threading.Condition()
        self._jobs: deque[_ThreadTask] = deque()
        self._idle = self._threads = self._made = 0
        self._closed = False
        self._leaked: dict[str, None] = {}
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Reset threads, jobs and lock in a forked child, which has no threads of its parent."""
        self._ready = threading.Condition()
        self._jobs.clear()
        self._idle = self._threads = 0
        self._closed = False
        self._leaked.clear()

    @property
    def leaked(self) -> tuple[str, ...]:
        """The names of abandoned threads that still run."""
        with self._ready:
            return tuple(self._leaked)

    def close(self) -> None:
        """End idle threads now, and busy ones after their body. The pool stays usable."""
        with self._ready:
            self._closed = True
            self._ready.notify_all()

    async def run(
        self, name: str, body: Callable[[], Any], *, signal: Settable | None = None, leaked: list[str] | None = None
    ) -> Any:
        """
        Run *body* in a thread, and return its result or raise its error.

        On cancellation *signal* is set and the body is waited for. A body that continues is abandoned, and its thread's
        name is added to *leaked*. The caller's context variables are visible to the body.

        Raises:
            RuntimeError: when the system can start no thread, and the pool has none. The body does not run then.
        """
        import asyncio

        job = _ThreadTask(name, body, asyncio.get_running_loop())
        if signal is not None:
            job.context.run(CANCELLED.set, signal)
        assert job.future is not None  # noqa: S101 - without a callback it has one
        self._submit_job(job)
        try:
            await job.future
        except asyncio.CancelledError:
            if not self._withdraw_job(job):
                if signal is not None:
                    signal.set()
                await self._wait_then_abandon(job, leaked)
            raise
        succeeded, value = job.outcome
        if succeeded:
            return value
        raise value

    def start_with_callback(self, name: str, body: Callable[[], Any], callback: ResultCallback) -> None:
        """
        Start *body* in a thread, and call *callback* in the running event loop when it has ended.

        For work without cancellation: it needs a third of the iterations of the loop that ``run`` needs.
        """
        import asyncio

        self._submit_job(_ThreadTask(name, body, asyncio.get_running_loop(), callback))

    def _submit_job(self, job: _ThreadTask) -> None:
        """Queue a job, and start a thread if needed; raise ``RuntimeError`` if no thread can run it."""
        with self._ready:
            self._closed = False
            self._jobs.append(job)
            try:
                self._start_thread_if_needed()
            except RuntimeError:
                if not self._threads:  # else the job waits for one of them
                    self._jobs.pop()
                    raise
            self._ready.notify()

    def _start_thread_if_needed(self) -> None:
        """Start a thread if more jobs than idle threads wait and the pool is not full."""
        if len(self._jobs) > self._idle and self._threads < self._size:
            self._threads += 1
            self._made += 1
            try:
                threading.Thread(target=self._run_jobs, name=f"stepengine-tool-{self._made}", daemon=True).start()
            except RuntimeError:
                self._threads -= 1
                raise

    def _withdraw_job(self, job: _ThreadTask) -> bool:
        """Remove a job from the queue and return True; return False if it has started."""
        with self._ready:
            if job.started:
                return False
            self._jobs.remove(job)
            return True

    async def _wait_then_abandon(self, job: _ThreadTask, leaked: list[str] | None) -> None:
        """Wait for a started job for the time of grace, then abandon its thread."""
        import asyncio

        with job.lock:
            if job.done:
                return
            job.future = job.loop.create_future()
        try:
            async with asyncio.timeout(self._grace):
                await job.future
        except TimeoutError:
            self._abandon_job(job, leaked)
        except asyncio.CancelledError:
            self._abandon_job(job, leaked)
            raise

    def _abandon_job(self, job: _ThreadTask, leaked: list[str] | None) -> None:
        """Count the thread of a running job as leaked, and start another one in its place if jobs wait."""
        with self._ready, job.lock:
            if job.done:
                return
            job.abandoned = True
            self._leaked[job.thread] = None
            self._threads -= 1
            with contextlib.suppress(RuntimeError):  # waiting jobs start with the next one, or when this body ends
                self._start_thread_if_needed()
        if leaked is not None:
            leaked.append(job.thread)

    def _run_jobs(self) -> None:
        """Run queued jobs in this thread until the thread was idle for too long or was abandoned."""
        thread = threading.current_thread()
        plain_name = thread.name
        while (job := self._wait_for_next_job(plain_name)) is not None:
            thread.name = job.thread
            job.run()
            thread.name = plain_name
            if job.abandoned:
                with self._ready:
                    del self._leaked[job.thread]
                    with contextlib.suppress(RuntimeError):
                        self._start_thread_if_needed()
                return
            del job

    def _wait_for_next_job(self, thread: str) -> _ThreadTask | None:
        """Wait for a job, mark it as started and return it; ``None`` if this thread must end."""
        with self._ready:
            while not self._jobs:
                self._idle += 1
                woken = not self._closed and self._ready.wait(IDLE_SECONDS)
                self._idle -= 1
                if not woken and not self._jobs:
                    self._threads -= 1
                    return None
            job = self._jobs.popleft()
            job.started = True
            job.thread = f"{thread}-{job.name}"
            return job
