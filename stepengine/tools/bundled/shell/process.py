"""
One command: its supervisor starts it, its output is read without blocking, and all processes that it has started end with it.

The supervisor calls ``wait`` for the command only at the end, so no other process can get the number of its process group. If the
command kills its supervisor, the remaining processes are found by the marker in their environment. This works only on Linux, and
only for processes that did not remove the marker.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from typing import Any

from attrs import frozen

from stepengine.errors import ToolError, UnknownOutcome, WorkspaceLost
from stepengine.tools.bundled.shell.output import Capture
from stepengine.workspace.calls import Fd
from stepengine.workspace.environment import MARKER, SUPERVISOR
from stepengine.workspace.remote_files import RemoteFile, RemoteSystem, Spawned

COMMAND_CHARS = 50_000
"""About 12,000 tokens of each stream: its head and its tail, where errors are."""
COMMAND_OUTPUT_BYTES = 64 * 1024 * 1024
"""No command that ends prints as much; one that prints for ever is ended."""
COMMAND_DRAIN_SECONDS = 0.2
"""What a command printed last is in the pipe; a child that holds it open may print for ever."""
COMMAND_TERM_SECONDS = 1.5
"""Programs that clean up after SIGTERM do it in a moment; then they are killed."""

CHUNK_BYTES = 65_536
"""The size of a pipe on Linux, which no read exceeds."""
DRAIN_READS = 32
"""A pipe holds less; more comes from a child that holds it open."""
POLL_SECONDS = 0.02
"""How late the end of a command is noticed where nothing reports it: nobody sees it."""
DEATH_SECONDS = 5.0
"""More than the supervisor takes to kill everything."""
SAID_BYTES = 4_096
"""A line of the supervisor has some dozen bytes; this is what a read of it may hold."""
NUMBER_DIGITS = 10
"""Numbers of processes and exit codes have at most ten."""
START_SECONDS = 30.0
"""Starting takes milliseconds; a machine without memory may take long, and must not hold a run."""
FULL = {errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
FULL_SECONDS = 10.0
"""A machine that cannot start another process may be able to again soon, when one of its commands has ended."""
REASONS = {
    errno.ENOENT: "it, or the interpreter that its first line names, does not exist",
    errno.EACCES: "it is not executable",
    errno.ENOEXEC: "it is no program of this system, and has no first line such as #!/bin/sh that names an interpreter",
    errno.E2BIG: "its arguments and environment are too large",
}


@frozen(kw_only=True)
class CommandStart:
    """
    The program, arguments, environment and folder of a command to start.

    Attributes:
        program: The path of the program.
        argv: Its arguments, with its own name first.
        env: Its environment.
        folder: The descriptor of its working folder.
        limits: The resource limits as text for the supervisor.
        script: The content of the descriptor whose path replaces ``{script}`` in *argv*.
        on_output: Called with the new bytes of both streams.
        on_text: Called with the new text of both streams.
        on_stdout: Called with the new bytes of the standard output.
        remote_log: The file on a remote system to which both streams are written; ``""`` for none.
    """

    program: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: Fd
    limits: str = ""
    script: bytes | None = None
    on_output: Callable[[bytes], None] | None = None
    on_text: Callable[[str], None] | None = None
    on_stdout: Callable[[bytes], None] | None = None
    remote_log: str = ""


class ProgramUnavailable(ToolError):
    """A program named by its path does not exist or cannot be executed; the model receives the message."""


@frozen
class Ending:
    """The exit code of a command, or the signal that ended it."""

    code: int | None
    signal: str | None


async def wait_despite_cancellation(work: asyncio.Task[Any]) -> None:
    """Wait until a task is done, even if the caller is cancelled; then raise that cancellation, or the task's error."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait((work,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    work.result()


async def start_command(start: CommandStart) -> CommandProcess:
    """
    Start a command, and wait until its program runs; retry for 10 seconds while no descriptors or processes are free.

    Raises:
        ToolError: If the program cannot be executed.
        UnknownOutcome: If the connection to a remote system was lost.
    """
    process = await _start_with_retry(start)
    try:
        await process.wait_until_started(start)
    except BaseException:
        await wait_despite_cancellation(asyncio.create_task(process.end()))
        raise
    return process


async def _start_with_retry(start: CommandStart) -> CommandProcess:
    """Start the supervisor of a command; while the system has no free descriptors or processes, retry for 10 s, then raise ``ToolError``."""
    give_up = time.monotonic() + FULL_SECONDS
    while True:
        try:
            folder = start.folder
            return (
                await _start_remote_supervisor(start, folder)
                if isinstance(folder, RemoteFile)
                else _start_local_supervisor(start, folder)
            )
        except OSError as error:
            if error.errno not in FULL or time.monotonic() > give_up:
                msg = f"{start.argv[0]!r} could not be started: {error.strerror}"
                raise ToolError(msg) from None
        await asyncio.sleep(POLL_SECONDS)


async def _start_remote_supervisor(start: CommandStart, folder: RemoteFile) -> CommandProcess:
    """Start the supervisor of a command on the remote system of the folder; if the call is cancelled, end the supervisor."""
    child = _RemoteSupervisor(folder.system, start.env)
    given = {
        "limits": start.limits,
        "program": start.program,
        "argv": list(start.argv),
        "env": dict(start.env),
        "log": start.remote_log or None,
    }
    process = CommandProcess(child, start, time.monotonic())
    try:
        source = await asyncio.to_thread(Path(SUPERVISOR).read_text, "utf-8")
        starting = asyncio.create_task(
            asyncio.to_thread(folder.system.spawn, folder, child, script=start.script, supervisor=source, **given)
        )
        try:
            child.spawned = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await wait_despite_cancellation(starting)
            child.spawned = starting.result()
            await wait_despite_cancellation(asyncio.create_task(process.end()))
            raise
    except OSError:
        child.close()
        raise
    return process


def _start_local_supervisor(start: CommandStart, folder: int) -> CommandProcess:
    """Start the supervisor of a command as a process of this system, connected by pipes and a socket."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        made: list[int] = []
        for _ in range(2):
            read, write = os.pipe()
            ours.callback(os.close, read)
            theirs.callback(os.close, write)
            made += [read, write]
        out, out_end, err, err_end = made
        line, line_end = socket.socketpair()
        ours.callback(line.close)
        theirs.callback(line_end.close)
        passed = [line_end.fileno(), folder]
        argv = start.argv
        if start.script is not None:
            script = theirs.enter_context(tempfile.TemporaryFile())
            script.write(start.script)
            script.seek(0)
            passed.append(script.fileno())
            argv = tuple([a.replace("{script}", f"/dev/fd/{script.fileno()}") for a in argv])
        # Before the start: on a busy machine, the command may have ended before this code continues.
        began = time.monotonic()
        popen = subprocess.Popen(  # noqa: S603  (the supervisor; it executes an argument list)
            [sys.executable, "-I", "-S", "-X", "utf8", SUPERVISOR, str(os.getpid()), str(line_end.fileno()),
             str(folder), start.limits, start.program, *argv],
            stdin=subprocess.DEVNULL, stdout=out_end, stderr=err_end, env=dict(start.env), pass_fds=passed,
            start_new_session=True, umask=0o022,
        )  # fmt: skip
        ours.pop_all()
    return CommandProcess(_LocalSupervisor(popen, out, err, line.detach(), start.env), start, began)


class _Pipe:
    """One output stream of a command; the event loop reads it, outside of the context of any call."""

    def __init__(self, fd: int, feed: Callable[[bytes], None], ends: Callable[[], None] | None = None) -> None:
        self._fd = fd
        self._feed = feed
        self._ends = ends
        self._loop = asyncio.get_running_loop()
        self.closed = asyncio.Event()
        os.set_blocking(fd, False)
        Context().run(self._loop.add_reader, fd, self.read)

    def read(self) -> bool:
        """Pass the available data to the callback and return True; without data return False, at the end of the stream close the pipe."""
        if self.closed.is_set():
            return False
        try:
            data = os.read(self._fd, CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if data:
            self._feed(data)
        else:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Stop reading, close the descriptor, and call the callback for the end; do nothing if the pipe is closed."""
        if not self.closed.is_set():
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self.closed.set()
            if self._ends is not None:
                self._ends()


class _LocalSupervisor:
    """The supervisor of a command on this system."""

    def __init__(
        self, supervisor: subprocess.Popen[bytes], out: int, err: int, line: int, env: Mapping[str, str]
    ) -> None:
        self._supervisor = supervisor
        self._fds = out, err, line
        self._env = env

    def forward_to(self, process: CommandProcess) -> None:
        """Start to read the pipes on the event loop, and pass the output and the supervisor's messages to *process*."""
        out, err, line = self._fds
        self._out = _Pipe(out, lambda data: process.feed(process.out, data))
        self._err = _Pipe(err, lambda data: process.feed(process.err, data))
        self._line = _Pipe(line, process.handle_supervisor_output, process.handle_messages_end)
        self._captures = process.out, process.err

    @property
    def has_ended_messages(self) -> bool:
        """Whether the supervisor has closed its channel for messages."""
        return self._line.closed.is_set()

    async def wait_for_streams(self) -> None:
        """Wait until no process has the streams of the command open."""
        await self._out.closed.wait()
        await self._err.closed.wait()

    async def wait_for_messages_end(self) -> None:
        """Wait until the supervisor has closed its channel for messages."""
        await self._line.closed.wait()

    def drain(self) -> None:
        """Pass the output that is available now to the process, and end the captures of closed streams."""
        for pipe, capture in zip((self._out, self._err), self._captures, strict=True):
            for _ in range(DRAIN_READS):
                if not pipe.read():
                    break
            if pipe.closed.is_set():
                capture.end()

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the process group of the command, if the supervisor still runs."""
        # While the supervisor lives, it has not waited for the command, and the number is the command's.
        if self._supervisor.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def request_end(self) -> None:
        """Ask the supervisor to end the command and all its processes."""
        with contextlib.suppress(OSError):  # it has ended just now
            os.write(self._fds[2], b"end\n")

    def kill_all(self, command_pid: int) -> None:
        """Kill the process group of the command and the supervisor, and stop reading its messages."""
        if command_pid:
            self.signal(command_pid, signal.SIGKILL)
        self._supervisor.kill()
        self._line.close()

    async def wait_for_supervisor(self) -> None:
        """Wait for the supervisor; if it failed, kill the remaining processes by their marker."""
        if self._supervisor.wait():
            await kill_marked_processes(self._env)

    def close(self) -> None:
        """Stop reading."""
        self._out.close()
        self._err.close()


class _RemoteSupervisor:
    """The supervisor of a command on a remote system; its messages arrive in a thread and are passed to the event loop."""

    def __init__(self, system: RemoteSystem, env: Mapping[str, str]) -> None:
        self.spawned: Spawned | None = None
        self._system, self._env = system, env
        self._loop = asyncio.get_running_loop()
        self._out_closed, self._err_closed, self._line_closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._is_left = asyncio.Event()
        self._code: int | None = None
        self._is_closed = False
        self._process: CommandProcess | None = None

    # --- in the thread that reads ----

    def handle_output(self, stream: str, data: bytes) -> None:
        """Pass output of the command to the event loop."""
        self._call_on_loop(self._feed_output, stream, data)

    def handle_end(self, stream: str) -> None:
        """Pass the end of a stream to the event loop."""
        self._call_on_loop(self._end_stream, stream)

    def handle_exit(self, code: int | None) -> None:
        """Pass the exit code of the supervisor to the event loop."""
        self._call_on_loop(self._handle_exit, code)

    def _call_on_loop(self, function: Callable[..., None], *args: object) -> None:
        """Call a function on the event loop from any thread; do nothing if the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *args, context=Context())

    # --- on the event loop ----

    def forward_to(self, process: CommandProcess) -> None:
        """Pass output and messages to *process* from now on; earlier ones were dropped."""
        self._process = process

    def _feed_output(self, stream: str, data: bytes) -> None:
        """Pass output or supervisor messages to the process, and let the connection send as many further bytes."""
        process = self._process
        if process is None or self._is_closed:
            return
        if stream == "line":
            process.handle_supervisor_output(data)
        else:
            process.feed(process.out if stream == "out" else process.err, data)
        if self.spawned is not None:
            self.spawned.allow_output(len(data))

    def _end_stream(self, stream: str) -> None:
        """Record the end of one stream, and pass it to the process."""
        process = self._process
        if process is None:
            return
        if stream == "line":
            self._line_closed.set()
            process.handle_messages_end()
        elif stream == "out":
            self._out_closed.set()
            process.out.end()
        else:
            self._err_closed.set()
            process.err.end()

    def _handle_exit(self, code: int | None) -> None:
        """Record the exit code and the end of all streams; ``None`` means that the connection was lost."""
        self._code = code
        if code is None and self._process is not None and not self._line_closed.is_set():
            self._process.is_lost = True
        for stream in ("out", "err", "line"):
            self._end_stream(stream)
        self._is_left.set()

    @property
    def has_ended_messages(self) -> bool:
        """Whether the supervisor has closed its channel for messages."""
        return self._line_closed.is_set()

    async def wait_for_streams(self) -> None:
        """Wait until no process has the streams of the command open."""
        await self._out_closed.wait()
        await self._err_closed.wait()

    async def wait_for_messages_end(self) -> None:
        """Wait until the supervisor has ended; all output has arrived then."""
        await self._is_left.wait()

    def drain(self) -> None:
        """Do nothing: output arrives before the end of the command."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the group of the command."""
        if self.spawned is not None:
            self.spawned.signal(pid, number)

    def request_end(self) -> None:
        """Ask the supervisor to end the command and all its processes."""
        if self.spawned is not None:
            self.spawned.request_end()

    def kill_all(self, command_pid: int) -> None:
        """Kill the supervisor. Its death makes the remote system kill the command."""
        if self.spawned is not None:
            self.spawned.kill_supervisor()
        self._line_closed.set()

    async def wait_for_supervisor(self) -> None:
        """Wait a short time for the supervisor; if it failed, kill the remaining processes by their marker."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_SECONDS):
                await self._is_left.wait()
        if self._code and not self._is_lost:
            with contextlib.suppress(WorkspaceLost, OSError):
                await asyncio.to_thread(self._system.kill_marked_processes, f"{MARKER}={self._env[MARKER]}")

    @property
    def _is_lost(self) -> bool:
        """Whether the supervisor was never started, or the connection to it was lost."""
        return self.spawned is None or self.spawned.is_lost

    def close(self) -> None:
        """Ignore further events."""
        self._is_closed = True
        self._process = None


class CommandProcess:
    """
    A command that was started.

    Attributes:
        pid: The process id, also the number of its process group; 0 before it runs.
        out: Its standard output.
        err: Its standard error.
        over: Set when it has ended, or has printed more than 64 MiB.
        news: Set when it has printed something or has ended; waiters clear it.
        flooded: Whether it printed more than 64 MiB.
        is_lost: Whether the connection to its system ended before it did.
        seconds: Its run time in seconds, until its end or now.
    """

    def __init__(self, child: _LocalSupervisor | _RemoteSupervisor, start: CommandStart, began: float) -> None:
        self._child = child
        self.pid = 0
        self.out, self.err = Capture(COMMAND_CHARS), Capture(COMMAND_CHARS)
        self.over, self._gone = asyncio.Event(), asyncio.Event()
        self.news = asyncio.Event()
        self.flooded = self.is_lost = False
        self._on_output, self._on_text, self._on_stdout = start.on_output, start.on_text, start.on_stdout
        self._began, self._ended = began, 0.0
        self._said = b""
        self._errno = 0
        self._ending: Ending | None = None
        self._known = asyncio.Event()
        child.forward_to(self)

    def feed(self, capture: Capture, data: bytes) -> None:
        """Store output and pass it to the callbacks; after more than 64 MiB, kill the command and drop further output."""
        if self.flooded:
            return
        text = capture.feed(data)
        if self._on_stdout is not None and capture is self.out:
            self._on_stdout(data)
        if self._on_output is not None:
            self._on_output(data)
        if self._on_text is not None:
            self._on_text(text)
        if self.out.total + self.err.total > COMMAND_OUTPUT_BYTES:
            self.flooded = True
            self.over.set()
            self.send_signal(signal.SIGKILL)
        self.news.set()

    # --- messages of the supervisor ------------------------------------------------------------

    def handle_supervisor_output(self, data: bytes) -> None:
        """Parse messages of the supervisor, and record the process id, the start error or the end of the command in them."""
        *lines, self._said = (self._said + data[:SAID_BYTES]).split(b"\n")
        for line in lines:
            what, _, number = line.decode("ascii", "replace").partition(" ")
            if not number.isdigit() or len(number) > NUMBER_DIGITS:
                continue  # no supervisor says that
            match what:
                case "pid":
                    self.pid = int(number)
                case "errno":
                    self._errno = int(number)
                case "exit":
                    self._record_end(Ending(int(number), None))
                case _:
                    self._record_end(Ending(None, _get_signal_name(int(number))))
        self._known.set()

    def handle_messages_end(self) -> None:
        """Record that the supervisor has ended; a command whose end it did not report was killed with it."""
        self._known.set()
        self._record_end(self._ending or Ending(None, _get_signal_name(signal.SIGKILL)))

    def _record_end(self, ending: Ending) -> None:
        """Record how and when the command ended, and wake all waiters."""
        self._ending = ending
        self._ended = self._ended or time.monotonic()
        self._gone.set()
        self.over.set()
        self.news.set()

    @property
    def seconds(self) -> float:
        """The run time of the command, until its end or now."""
        return (self._ended or time.monotonic()) - self._began

    def get_ending(self) -> Ending | None:
        """Return the exit code or the signal with which the command ended; ``None`` while it runs."""
        return self._ending

    # --- operations ----------------------------------------------------------

    async def wait_until_started(self, start: CommandStart) -> None:
        """
        Wait until the program has started; raise an error if it cannot be executed or does not start within 30 seconds.

        Raises:
            ProgramUnavailable: If it is named by its path and cannot be executed.
            ToolError: If another program cannot be executed, or has not started within 30 seconds.
            UnknownOutcome: If the connection to a remote system was lost.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                await self._known.wait()
        if self._errno:
            reason = REASONS.get(self._errno, os.strerror(self._errno))
            msg = f"{start.argv[0]!r} could not be executed: {reason}"
            raise ProgramUnavailable(msg) if "/" in start.argv[0] else ToolError(msg)
        self.raise_if_lost(start.argv[0])
        if not self.pid:
            msg = f"{start.argv[0]!r} was ended: the process that supervises it was stopped or killed, maybe by itself"
            raise ToolError(msg)

    def raise_if_lost(self, command: str) -> None:
        """Raise ``UnknownOutcome`` if the connection to its system ended before the command did."""
        if self.is_lost:
            msg = f"nobody knows how {command!r} ended: the connection to where it ran was lost in the middle of it"
            raise UnknownOutcome(msg)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process group of the command; do nothing before it runs."""
        if self.pid:
            self._child.signal(self.pid, number)

    async def wait(self, seconds: float | None) -> bool:
        """Wait until the command has ended or printed too much, and return True; return False if it still runs after *seconds*."""
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            if self.get_ending() is None:  # else only the event loop was late
                return False
        await self._wait_for_streams(COMMAND_DRAIN_SECONDS)
        return True

    async def _wait_for_streams(self, seconds: float) -> None:
        """Wait for at most *seconds* until the command has ended and no process has its streams open."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._gone.wait()
                await self._child.wait_for_streams()

    def drain(self) -> None:
        """Read the output that is available now, without waiting for more."""
        self._child.drain()

    async def end(self, number: int = signal.SIGTERM) -> Ending:
        """Send the signal *number* to the command, kill its remaining processes after 1.5 s, and return its exit code or signal."""
        if not self._gone.is_set():
            self.send_signal(number)
            await self._wait_for_streams(COMMAND_TERM_SECONDS)
        ending = self._ending or Ending(None, _get_signal_name(signal.SIGKILL))
        await self._end_supervisor()
        self.drain()
        self._child.close()
        self.drain()
        return ending

    async def _end_supervisor(self) -> None:
        """Let the supervisor end the remaining processes; kill all of them if it does not respond within 5 s."""
        child = self._child
        if not child.has_ended_messages:
            child.request_end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_SECONDS):
                await child.wait_for_messages_end()
        if not child.has_ended_messages:
            child.kill_all(self.pid)
        await child.wait_for_supervisor()


def _get_signal_name(number: int) -> str:
    """Return the name of a signal, such as ``SIGTERM``; ``signal 99`` for an unknown number."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


PROC = Path("/proc")
KILL_ROUNDS = 40
"""Each round kills what a process started meanwhile; a fork bomb may win in the end."""
PAUSE_SECONDS = 0.01
"""About as long as the kernel takes to end some processes."""


def find_marked_processes(marker: str) -> list[int]:
    """Return the ids of this user's running processes whose environment contains the marker."""
    wanted, user = f"{MARKER}={marker}".encode(), os.getuid()
    found: list[int] = []
    if not PROC.is_dir():
        return found
    with os.scandir(PROC) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it ended meanwhile, or is not ours to read
                if (
                    entry.name.isdigit()
                    and entry.stat().st_uid == user
                    and wanted in Path(entry, "environ").read_bytes()
                ):
                    found.append(int(entry.name))
    return found


async def kill_marked_processes(env: Mapping[str, str]) -> None:
    """Kill every process with the marker of *env*, in several rounds until none is left."""
    for _ in range(KILL_ROUNDS):
        left = find_marked_processes(env[MARKER])
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(PAUSE_SECONDS)
