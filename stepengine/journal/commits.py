"""
``Commits``: makes durable what a writer was given, while the event loop goes on (replay J32, reliability JR42).

One commit of a journal is under way at a time, so records reach the disk in the order in which they were appended; whoever asks
meanwhile shares the next one. The threads belong to all journals of the process, and end with the last of them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ClassVar, TypeVar

from stepengine.errors import StepEngineError
from stepengine.journal.store import Writer
from stepengine.tools.threads import ThreadPool

__all__ = ("Commits",)

THREADS = 8
Made = TypeVar("Made")


class Commits:
    """
    The commits of one journal.

    Args:
        writer: Its writer.
    """

    _pool: ClassVar[ThreadPool] = ThreadPool(THREADS)
    _users: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._waiting: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._uses_pool = False

    def durable(self) -> asyncio.Future[None] | None:
        """
        Return what is done when everything is durable that was appended before; ``None`` where it is so already.

        It holds a ``StepEngineError`` when that is impossible. Cancelling it ends the waiting, and no commit.

        Raises:
            StepEngineError: when it is impossible, and the writer never waits.
        """
        if not self._writer.blocks:
            self._writer.commit()
            return None
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        if self._task is None:
            self._task = loop.create_task(self._work(), name="stepengine journal")
        return future

    async def apart(self, work: Callable[[], Made]) -> Made:
        """Return what *work* returns, which may wait for the disk."""
        if not self._uses_pool:
            self._uses_pool = True
            self._count(1)
        made: Made = await self._pool.run("journal", work)
        return made

    def close(self) -> None:
        """Commit what is left, and give the journal back; may be called twice."""
        try:
            self._writer.close()
        finally:
            if self._uses_pool:
                self._uses_pool = False
                self._count(-1)

    @classmethod
    def _count(cls, change: int) -> None:
        with cls._lock:
            cls._users += change
            if not cls._users:
                cls._pool.close()

    def _tried(self) -> StepEngineError | None:
        try:
            self._writer.commit()
        except StepEngineError as error:
            return error
        return None

    def _taken(self) -> list[asyncio.Future[None]]:
        taken, self._waiting = self._waiting, []
        return taken

    async def _work(self) -> None:
        batch: list[asyncio.Future[None]] = []
        try:
            while self._waiting:
                batch = self._taken()
                self._tell(batch, await self.apart(self._tried))
        finally:
            self._task = None
            # The loop is being closed: nobody will hear any more.
            for future in (*batch, *self._taken()):
                future.cancel()

    @staticmethod
    def _tell(batch: list[asyncio.Future[None]], error: StepEngineError | None) -> None:
        for future in batch:
            if not future.done():
                future.set_result(None) if error is None else future.set_exception(error)
