"""
``JsonChildProcess``: a child process of the server that imports the authors' code from its current files.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self

LINE = 8 * 1024 * 1024
END_SECONDS = 1.0


class JsonChildProcess:
    """
    A child process that exchanges lines of JSON with the server.

    Args:
        child: The process.
    """

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, module: str, first_message: Mapping[str, Any]) -> Self:
        """Start a module of this package in a process, and send it the first message."""
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a file of the author's that is called like a module of Python's takes the place of none
            "-m",
            module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            limit=LINE,
        )
        made = cls(child)
        try:
            await made.send_message(first_message)
        except BaseException:
            await made.terminate()
            raise
        return made

    async def send_message(self, message: Mapping[str, Any]) -> None:
        """Send the process a message; do nothing if it has ended."""
        assert self._child.stdin is not None  # noqa: S101 - it was asked for
        self._child.stdin.write(json.dumps(message).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await self._child.stdin.drain()

    async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the messages of the process until it ends or sends an oversized line."""
        assert self._child.stdout is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(ValueError):  # a line over the limit, of which the rest would be read as lines
            while line := await self._child.stdout.readline():
                yield json.loads(line)

    async def terminate(self) -> None:
        """Send SIGTERM to the process and its children, and SIGKILL after a second or if this is cancelled; may be called twice."""
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                self._send_signal(number)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_SECONDS):
                        await self._child.wait()
                        break
            await self._child.wait()
        except asyncio.CancelledError:
            # The loop of a server that stops cancels its tasks once, and waits for them.
            self._send_signal(signal.SIGKILL)
            await self._child.wait()
            raise
        finally:
            # Closed here: the loop of a server that stops may end before it is told that the pipes are closed.
            transport = getattr(self._child, "_transport", None)
            if transport is not None:
                transport.close()

    def _send_signal(self, number: int) -> None:
        """Send a signal to the process and its children, which may outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)
