"""
``LoopThread``: one event loop in a thread of its own, for synchronous callers.

It works inside a running loop, from any thread, and from inside its own runs: whoever would wait for a thread that waits
for him is given a fresh one.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

from stepengine.errors import StepEngineError
from stepengine.workspace.after_fork import Lock, hold_references, register_for_fork_reset
from stepengine.workspace.threads import ThreadPool

T = TypeVar("T")
JOIN_SECONDS = 10.0
"""How long a thread is waited for whose loop is blocked; it is a daemon."""

_blocked: ContextVar[frozenset[int]] = ContextVar("stepengine_blocked_loops", default=frozenset())
"""The loop threads that wait, directly or not, for the code that runs in this context."""
_own = threading.local()


class LoopThread:
    """An event loop in a thread, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        register_for_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Forget the parent's thread and loop in a forked child; the next ``run`` starts a thread of its own."""
        hold_references(self._loop)
        self._thread = self._loop = None

    @property
    def is_running(self) -> bool:
        """Whether the thread was started and not closed."""
        return self._thread is not None

    def run(self, make_coroutine: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """
        Run ``make_coroutine()`` in the loop and return its result; Ctrl-C cancels it and waits for its end.

        Raises:
            StepEngineError: when called from a signal handler, which must not wait.
        """
        _refuse_in_signal_handler()
        blocked = _blocked.get()
        here = getattr(_own, "thread", None)
        if here is not None:
            blocked |= {id(here)}
        if id(self) not in blocked:
            return self._run_and_wait(make_coroutine, blocked)
        other = LoopThread()
        try:
            return other._run_and_wait(make_coroutine, blocked)
        finally:
            other.close()

    def close(self) -> None:
        """Stop the loop and wait for its thread to end, ten seconds at most; the next ``run`` starts another one."""
        with self._lock:
            thread, loop = self._thread, self._loop
            self._thread = self._loop = None
        if thread is None or loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(JOIN_SECONDS)

    def _run_and_wait(self, make_coroutine: Callable[[], Coroutine[Any, Any, T]], blocked: frozenset[int]) -> T:
        """Run ``make_coroutine()`` in the loop and wait for its result, with *blocked* as the waiting threads; Ctrl-C cancels it."""
        future: Future[T] = Future()
        tasks: list[asyncio.Task[None]] = []
        loop = self._get_or_start_loop()

        def start_task() -> None:
            if not future.done():
                tasks.append(loop.create_task(_run_into_future(make_coroutine, future)))

        def cancel_task() -> None:
            if tasks:
                tasks[0].cancel()
            elif not future.done():
                future.set_exception(KeyboardInterrupt())

        token = _blocked.set(blocked)
        try:
            loop.call_soon_threadsafe(start_task)
            return future.result()
        except KeyboardInterrupt:
            if not future.done():
                loop.call_soon_threadsafe(cancel_task)
                with contextlib.suppress(BaseException):
                    future.result()
            raise
        finally:
            _blocked.reset(token)

    def _get_or_start_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the running thread; start a thread if none runs."""
        with self._lock:
            if self._loop is None or self._thread is None or not self._thread.is_alive():
                ready: Future[asyncio.AbstractEventLoop] = Future()
                self._thread = threading.Thread(
                    target=self._run_loop, args=(ready,), name="stepengine-loop", daemon=True
                )
                self._thread.start()
                self._loop = ready.result()
            return self._loop

    def _run_loop(self, ready: Future[asyncio.AbstractEventLoop]) -> None:
        """Run an event loop in this thread until it is stopped; *ready* receives the loop."""
        _own.thread = self
        with asyncio.Runner() as runner:
            loop = runner.get_loop()
            ready.set_result(loop)
            loop.run_forever()


def close_threads(loop_thread: LoopThread, threads: ThreadPool) -> None:
    """End the threads of an engine that was not closed."""
    loop_thread.close()
    threads.close()


async def _run_into_future(make_coroutine: Callable[[], Coroutine[object, Any, T]], future: Future[T]) -> None:
    """Set the result or the error of ``make_coroutine()`` in *future*."""
    try:
        result = await make_coroutine()
    except BaseException as error:  # noqa: BLE001  (a KeyboardInterrupt out of a tool belongs to the caller, not to the loop)
        future.set_exception(error)
    else:
        future.set_result(result)


def _refuse_in_signal_handler() -> None:
    """Raise ``StepEngineError`` if a signal handler of the main thread is the caller."""
    if threading.current_thread() is not threading.main_thread():
        return
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in codes:
            msg = (
                f"the signal handler {frame.f_code.co_name!r} cannot wait for a run: it would block the code that it "
                "interrupted; set a flag in the handler and start the run outside"
            )
            raise StepEngineError(msg)
        frame = frame.f_back
