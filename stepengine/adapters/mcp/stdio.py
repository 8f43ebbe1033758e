"""
A server as a process: one JSON message per line in both directions, and an end that leaves nothing behind.

The transport of the package ``mcp`` passes more of the environment on, reads lines of any length, logs a traceback for each
line that is not a message, and writes what the server says on its standard error to the terminal.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

from attrs import frozen

from stepengine.adapters.mcp._caps import (
    CLOSE_SECONDS,
    FLUSH_SECONDS,
    JUNK_CHARS,
    JUNK_LINES,
    JUNK_LINES_KEPT,
    LINE_BYTES,
    STDERR_BYTES,
    STDERR_SHOWN_CHARS,
)
from stepengine.adapters.mcp.lenient_messages import MessageRepair
from stepengine.data.visible import visible

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
    from mcp.shared.message import SessionMessage

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "USER", "LOGNAME")
SET = {"TERM": "dumb", "NO_COLOR": "1"}
POLL_SECONDS = 0.01
"""A dying process is gone within some milliseconds, and is looked at only while it is closed."""
CHUNK_BYTES = 64 * 1024
"""The size of a pipe on Linux, which no read exceeds."""
UNREADABLE = "its reply is not a message of the protocol, such as text that is not UTF-8, or JSON that is cut or of another shape"
ANSWER = re.compile(rb'"(?:result|error)"')
ID = re.compile(rb'"id"\s*:\s*(?:(-?[0-9]{1,18})\b|"([!#-\[\]-~]{1,200})")')


def make_environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of a server: a few variables of this process, and *variables*."""
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**kept, **SET, **(variables or {})}


@frozen
class ServerProgram:
    """
    The command, environment and folder of a server.

    Attributes:
        argv: The program and its arguments; no shell is used.
        env: Variables in addition to those that every server gets.
        cwd: The working folder; by default the one of this process.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None
    cwd: str | None = None

    def __str__(self) -> str:
        return visible(" ".join(self.argv), strict=True)


class ServerProcess:
    """
    The process of one server, and the messages from and to it.

    Args:
        program: The command of the server.
        ended: Is called when the output of the process ends.
        repair: Converts each message into one that the package accepts; without it, messages are not changed.

    Attributes:
        problem: Why this side ended the connection; ``""`` if it did not.
        junk: The first lines that were not messages.
        junk_count: The number of lines that were not messages.
    """

    def __init__(self, program: ServerProgram, ended: Callable[[], None], repair: MessageRepair | None = None) -> None:
        self._program = program
        self._ended = ended
        self._repair = repair
        self._errors = bytearray()
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: set[int | str] = set()
        self.problem = ""
        self.junk: list[str] = []
        self.junk_count = 0

    def get_stderr_tail(self) -> str:
        """Return the end of the server's standard error, safe to show."""
        text = bytes(self._errors[-STDERR_SHOWN_CHARS:]).decode("utf-8", "replace").strip()
        return visible(text)

    @asynccontextmanager
    async def start_and_open_streams(
        self,
    ) -> AsyncIterator[
        tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]
    ]:
        """
        Start the process, yield its streams (read, write), and end it with all its descendants at the end of the block.

        Raises:
            OSError: If the program cannot be started.
        """
        import anyio
        from mcp.shared.message import SessionMessage

        process = self._process = await asyncio.create_subprocess_exec(
            *self._program.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=make_environment(self._program.env),
            cwd=self._program.cwd,
            start_new_session=True,
            limit=LINE_BYTES,
        )
        incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
        reading = asyncio.create_task(self._read_and_forward_messages(process, incoming))
        writing = asyncio.create_task(self._write_messages(process, outgoing, incoming))
        listening = asyncio.create_task(self._store_stderr_tail(process))
        try:
            yield read, write
        finally:
            ending = asyncio.ensure_future(self._end_process(process, (write, read), (reading, writing, listening)))
            while not ending.done():
                # Whoever is impatient does not leave a process behind.
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
            for stream in (incoming, read, write, outgoing):
                stream.close()

    async def _read_and_forward_messages(self, process: asyncio.subprocess.Process, incoming: Any) -> None:
        """Forward the messages of the process until its output ends, or too much of it is no message."""
        from anyio import BrokenResourceError, ClosedResourceError

        assert process.stdout is not None  # noqa: S101
        try:
            while not self.problem:
                message = self._parse_line(await process.stdout.readuntil(b"\n"))
                if message is not None:
                    await incoming.send(message if self._repair is None else self._repair(message))
        except asyncio.IncompleteReadError:
            pass  # it closed its output, most likely by ending
        except asyncio.LimitOverrunError:
            self.problem = f"it sent a message of more than {LINE_BYTES // 1024 // 1024} MiB"
        except (BrokenResourceError, ClosedResourceError, ConnectionError):
            pass  # nobody listens any more
        finally:
            incoming.close()
            self._ended()

    def _parse_line(self, line: bytes) -> object:
        """Return the message in a line, or an error for an unreadable reply; ``None`` for any other line, which is counted."""
        import mcp_types
        from mcp.shared.message import SessionMessage

        if not line.strip():
            return None
        try:
            message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            if not hasattr(message, "method"):
                self._waiting.discard(message.id)
            return SessionMessage(message)
        except (ValueError, RecursionError):
            number = self._pop_answered_id(line)
            reply = None if number is None or self._repair is None else self._repair.repair_list_reply(line, number)
            if reply is not None:
                return SessionMessage(reply)
            if number is not None:
                # A reply, if one that nobody can read: whoever waits for it must not wait until their time is up.
                said = mcp_types.ErrorData(code=mcp_types.PARSE_ERROR, message=UNREADABLE)
                return SessionMessage(mcp_types.JSONRPCError(jsonrpc="2.0", id=number, error=said))
            self.junk_count += 1
            if len(self.junk) < JUNK_LINES_KEPT:
                self.junk.append(visible(line[:JUNK_CHARS].decode("utf-8", "replace").strip(), strict=True))
            if self.junk_count > JUNK_LINES:
                first = "; ".join(self.junk)
                self.problem = f"it wrote more than {JUNK_LINES} lines that are not messages, the first: {first}"
            return None

    def _pop_answered_id(self, line: bytes) -> int | str | None:
        """Remove and return the id of the waiting request that an unreadable line answers; ``None`` if it answers none."""
        if not ANSWER.search(line):
            return None
        for found in ID.finditer(line):
            number: int | str = int(found[1]) if found[1] else found[2].decode()
            if number in self._waiting:
                self._waiting.discard(number)
                return number
        return None

    async def _write_messages(self, process: asyncio.subprocess.Process, outgoing: Any, incoming: Any) -> None:
        """Write messages to the process, and store the ids of requests; a lost process closes *incoming*."""
        assert process.stdin is not None  # noqa: S101
        try:
            async for sent in outgoing:
                text = sent.message.model_dump_json(by_alias=True, exclude_unset=True)
                if getattr(sent.message, "method", None) and (number := getattr(sent.message, "id", None)) is not None:
                    self._waiting.add(number)
                    if self._repair is not None:
                        self._repair.record_request(sent.message)
                process.stdin.write(text.encode() + b"\n")
                await process.stdin.drain()
        except (ConnectionError, RuntimeError):
            incoming.close()  # so that no request waits for an answer

    async def _store_stderr_tail(self, process: asyncio.subprocess.Process) -> None:
        """Read stderr until it ends, and store its last bytes."""
        assert process.stderr is not None  # noqa: S101
        while chunk := await process.stderr.read(CHUNK_BYTES):
            self._errors += chunk
            del self._errors[:-STDERR_BYTES]

    async def _end_process(
        self, process: asyncio.subprocess.Process, streams: Sequence[Any], tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        """End the process: its input, two seconds, SIGTERM, two seconds, SIGKILL, each to the whole group."""
        assert process.stdin is not None  # noqa: S101
        reading, writing, _ = tasks
        for stream in streams:
            stream.close()
        await asyncio.wait((writing,), timeout=FLUSH_SECONDS)
        # What the server still writes is read and dropped, so that a full pipe does not keep it from ending.
        reading.cancel()
        await asyncio.wait((reading,))
        draining = asyncio.create_task(_drain_stdout(process))
        process.stdin.close()
        await _wait_briefly_until_gone(process)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not _signal_group(process, number):
                break
            await _wait_briefly_until_gone(process)
        for task in (*tasks, draining):
            task.cancel()
        await asyncio.gather(*tasks, draining, return_exceptions=True)
        # A process that left the group may hold the pipes; nothing public closes this end of them.
        process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001


async def _drain_stdout(process: asyncio.subprocess.Process) -> None:
    """Read and discard the rest of the output of a process."""
    assert process.stdout is not None  # noqa: S101
    while await process.stdout.read(CHUNK_BYTES):
        pass


async def _wait_briefly_until_gone(process: asyncio.subprocess.Process) -> None:
    """Wait some seconds until the process and its group have ended. ``wait()`` would also wait for its children's pipes."""
    loop = asyncio.get_running_loop()
    end = loop.time() + CLOSE_SECONDS
    while loop.time() < end and (process.returncode is None or _signal_group(process, 0)):  # noqa: ASYNC110  (no event tells of a group)
        await asyncio.sleep(POLL_SECONDS)


def _signal_group(process: asyncio.subprocess.Process, number: int) -> bool:
    """Send a signal to the group of a process, and return False if the group has ended."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
