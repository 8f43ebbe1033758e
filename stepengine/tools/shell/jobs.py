"""The commands of one run that go on in the background; they end with the run (requirements F9, reliability SH14)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepengine.errors import ToolError
from stepengine.tools.shell.environment import Private
from stepengine.tools.shell.process import Ending, Process

__all__ = ("Job", "Jobs", "Log")

JOBS_PER_RUN = 4
JOB_OUTPUT_BYTES = 16 * 1024 * 1024


class Log:
    """The output file of one job: both streams as they came, up to 16 MiB."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self.is_full = False
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def write(self, data: bytes) -> None:
        """Add what the job printed, as far as there is room."""
        kept = data[: JOB_OUTPUT_BYTES - self.size]
        self.is_full = self.is_full or len(kept) < len(data)
        self.size += os.pwrite(self._fd, kept, self.size)

    def holds(self, text: bytes, start: int) -> bool:
        """Return whether *text* stands in the file at or after the byte *start*."""
        return text in os.pread(self._fd, self.size - start, start)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Job:
    """
    One command in the background.

    Attributes:
        id: Its id.
        command: How it is shown.
        process: What runs.
        log: Its output file.
        ended_by_us: How it ended, when we ended it.
    """

    def __init__(self, id: str, command: str, process: Process, log: Log, private: Private) -> None:
        self.id = id
        self.command = command
        self.process = process
        self.log = log
        self.ended_by_us: Ending | None = None
        self._private = private

    @property
    def ending(self) -> Ending | None:
        """How it ended; ``None`` while it runs."""
        return self.ended_by_us or self.process.ending()

    async def wait(self, text: str | None, seconds: float) -> bool | None:
        """Wait until it printed *text*, or without one until it ended; return whether *text* was found."""
        wanted, seen = (text or "").encode(), 0
        end = asyncio.get_running_loop().time() + seconds
        while True:
            self.process.news.clear()
            ending = self.ending
            if ending is not None:
                self.process.drain()
            if wanted and self.log.holds(wanted, max(0, seen - len(wanted))):
                return True
            seen = self.log.size
            left = end - asyncio.get_running_loop().time()
            if ending is not None or left <= 0:
                return False if wanted else None
            try:
                async with asyncio.timeout(left):
                    await self.process.news.wait()
            except TimeoutError:
                continue

    async def stop(self, number: int = signal.SIGTERM) -> None:
        """End it and all that it started."""
        was_running = self.ending is None
        ending = await self.process.end(number)
        if was_running:
            self.ended_by_us = ending

    async def discard(self) -> None:
        """End it, and remove its files."""
        await self.stop()
        self.log.close()
        self._private.remove()


class Jobs:
    """The jobs of one run."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._starting = 0

    async def start(self, make: Callable[[], Any]) -> Job:
        """
        Keep the job that *make* starts.

        Raises:
            ToolError: when four jobs of the run are going on.
        """
        running = [job.id for job in self._jobs.values() if job.ending is None]
        if len(running) + self._starting >= JOBS_PER_RUN:
            msg = f"{JOBS_PER_RUN} background jobs are running already ({', '.join(running)}); stop one with kill_job"
            raise ToolError(msg)
        self._starting += 1
        try:
            job: Job = await make()
        finally:
            self._starting -= 1
        self._jobs[job.id] = job
        return job

    def get(self, id: str) -> Job:
        """
        Return a job.

        Raises:
            ToolError: when this run has no such job.
        """
        if id not in self._jobs:
            known = ", ".join(self._jobs) or "none"
            msg = f"this run has no job {id!r}; its jobs are: {known}. A job ends with its run, also when that is suspended"
            raise ToolError(msg)
        return self._jobs[id]

    async def aclose(self) -> list[str]:
        """End all jobs; return a sentence about each one that was going on."""
        jobs = list(self._jobs.values())
        running = [
            f"background job {job.id} ({job.command}) was ended with its run" for job in jobs if job.ending is None
        ]
        await asyncio.gather(*[job.discard() for job in jobs])
        self._jobs.clear()
        return running
