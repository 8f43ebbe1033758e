"""
The program of another agent: its start, its messages as lines of JSON, and the end of all its processes.

What must not be here: the meaning of the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepengine.adapters.acp.stdio import parse_message
from stepengine.data.secret_names import is_secret_name
from stepengine.errors import ExternalAgentError
from stepengine.workspace.environment import SUPERVISOR, find_program

LINE_BYTES = 16 * 1024 * 1024
"""The longest line: a whole file, or an image, is one."""
JUNK_LINES = 200
"""The most lines that are skipped because they are not messages, such as output of a program that does not speak the protocol."""
SAID_BYTES = 8_192
SAID_CHARS = 2_000
EOF_SECONDS = 2.0
"""How long a program has after the end of its input: it may be writing its session down."""
TERM_SECONDS = 2.0
"""How long it has after SIGTERM, before it is killed."""
END_SECONDS = 5.0
LINGER_SECONDS = 1.0
START_SECONDS = 60.0
ALWAYS = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ", "TMPDIR", "TERM")
"""The variables of this process that a program gets: those that it needs to find its files and settings, and no keys."""
REASONS = {2: "there is no such program", 13: "it is not executable", 8: "it is not a program for this system"}


def select_default_and_named_variables(more_names: Sequence[str]) -> dict[str, str]:
    """Return this process's variables for a program: the few that every program gets, and those in *more_names*."""
    own = [name for name in ALWAYS if not is_secret_name(name, "variable")]
    return {name: os.environ[name] for name in (*own, *more_names) if name in os.environ}


class AgentProgram:
    """
    An agent program and the supervisor that ends all its processes, even when this process is killed.

    It is a transport for ``acp.connection.Connection``.

    Attributes:
        problem: Why reading stopped; ``""`` if the program just ended.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process, line: socket.socket) -> None:
        self.problem = ""
        self._name = name
        self._process = process
        self._line = line
        self._junk = 0
        self._first_junk = ""
        self._said = b""
        self._ended = ""
        self._has_ended = asyncio.Event()
        self._pid = 0
        self._tasks = [asyncio.create_task(self._store_stderr_tail())]

    @classmethod
    async def start(cls, command: Sequence[str], env: Mapping[str, str], folder: Path) -> AgentProgram:
        """
        Start a program below a supervisor, and wait until it runs.

        Raises:
            ExternalAgentError: If the program cannot be started.
        """
        path = find_program(command[0], env.get("PATH", os.defpath), ())
        if path is None:
            msg = f"the program {command[0]!r} is not on the search path; install it, or give its path in command=[...]"
            raise ExternalAgentError(msg, kind="start")
        line, theirs = socket.socketpair()
        try:
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            line.close()
            theirs.close()
            msg = f"the folder {os.fspath(folder)!r} cannot be opened: {error.strerror}"
            raise ExternalAgentError(msg, kind="start") from None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR, str(os.getpid()), str(theirs.fileno()),
                str(opened), "", path, *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env=dict(env), pass_fds=(theirs.fileno(), opened), start_new_session=True, limit=LINE_BYTES,
            )  # fmt: skip
        except BaseException:
            line.close()
            raise
        finally:
            theirs.close()
            os.close(opened)
        line.setblocking(False)
        made = cls(command[0], process, line)
        try:
            await made._wait_for_pid()
        except BaseException:
            await made.close()
            raise
        return made

    async def _wait_for_pid(self) -> None:
        """Store the process id that the supervisor reports, and watch for the end; raise an error if the start failed."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(START_SECONDS):
            said = await loop.sock_recv(self._line, 64)
        word, _, number = said.decode("ascii", "replace").strip().partition(" ")
        if word != "pid":
            code = int(number) if number.isdecimal() else 0
            why = REASONS.get(code) or os.strerror(code)
            msg = f"the program {self._name!r} could not be started: {why}"
            raise ExternalAgentError(msg, kind="start")
        self._pid = int(number)
        self._tasks.append(asyncio.create_task(self._end_children_after_program()))

    async def _end_children_after_program(self) -> None:
        """End the remaining processes when the program ends. They may hold the pipes open and hide its end."""
        with contextlib.suppress(OSError):
            said = await asyncio.get_running_loop().sock_recv(self._line, 64)
            self._ended = said.decode("ascii", "replace").strip()
            self._has_ended.set()
            await asyncio.sleep(LINGER_SECONDS)
            self._line.send(b"end")

    async def _store_stderr_tail(self) -> None:
        """Read stderr until it ends, and store its last bytes for error messages."""
        stream = self._process.stderr
        assert stream is not None  # noqa: S101 - it was asked for
        while data := await stream.read(SAID_BYTES):
            self._said = (self._said + data)[-SAID_BYTES:]

    # --- the transport ------------------------------------------------------------------------------------------------

    async def send(self, message: dict[str, Any]) -> None:
        """Write a message as a line of JSON to the program's stdin."""
        stream = self._process.stdin
        assert stream is not None  # noqa: S101
        stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        await stream.drain()

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message; ``None`` at the end of the output, and after a line that is too long or too much junk."""
        stream = self._process.stdout
        assert stream is not None  # noqa: S101
        while True:
            try:
                line = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return None
            except asyncio.LimitOverrunError:
                self.problem = f"it sent a line of more than {LINE_BYTES:,} bytes"
                return None
            message = parse_message(line)
            if message is not None:
                return message
            if line.strip():
                self._junk += 1
                self._first_junk = self._first_junk or line[:200].decode("utf-8", "replace").strip()
            if self._junk > JUNK_LINES:
                self.problem = (
                    f"it printed {self._junk} lines that are not protocol messages, such as {self._first_junk!r}"
                )
                return None

    async def close(self) -> None:
        """Ask the program to end, kill it after a timeout, and end all its processes."""
        work = asyncio.ensure_future(self._end_all_processes())
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            # What was started has to be gone before anybody goes on.
            await asyncio.wait((work,))
            raise

    async def _close_input_and_terminate(self) -> None:
        """Close the input of the program, wait, then send SIGTERM and wait again; do nothing if it has ended."""
        stream = self._process.stdin
        if stream is None or self.problem or not self._pid or self._has_ended.is_set():
            return
        stream.close()
        for seconds, number in ((EOF_SECONDS, signal.SIGTERM), (TERM_SECONDS, None)):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_ended.wait(), seconds)
                return
            if number is not None and self._process.returncode is None:
                # The number is its own as long as its supervisor is there, which waits for nobody but us.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, number)

    async def _end_all_processes(self) -> None:
        """Ask the program to end, let the supervisor kill the rest, and kill the supervisor after a timeout."""
        await self._close_input_and_terminate()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks[1:], return_exceptions=True)
        with contextlib.suppress(OSError):
            self._line.send(b"end")
        self._line.close()
        stream = self._process.stdin
        if stream is not None:
            stream.close()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._tasks[0].cancel()
        await asyncio.gather(self._tasks[0], return_exceptions=True)

    async def describe_end(self) -> str:
        """Return why reading stopped; else how the program ended, with the end of its stderr."""
        if self.problem:
            return self.problem
        # What it said last, and how it ended, are still on their way.
        await asyncio.wait(self._tasks, timeout=LINGER_SECONDS)
        said = self._said.decode("utf-8", "replace").strip()[-SAID_CHARS:]
        ended = "its program ended" + (f" ({self._ended})" if self._ended else "")
        junk = f"; it printed {self._first_junk!r}" if self._first_junk else ""
        return f"{ended}{junk}; its stderr ends with: {said}" if said else f"{ended}{junk}"
